"""No step of a training waits for the device, and what it computes is one graph per task: shown without a
GPU.

Every stage's own loss, forward and backward, with the optimizer's step and the average, runs on torch's meta
device, whose tensors hold no numbers: what a GPU would have to be waited for (item(), bool(), tolist(),
nonzero(), a boolean mask) raises there. What meta tensors let pass and a GPU does not, `Watch` refuses."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_base_selection import make_caches
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_consistency
import train_operator
import train_scoring
from bench import gpu
from ups.common.device import send
from ups.common.place import ROOT
from ups.config.load import load_config, to_dict
from ups.config.model import ModelConfig
from ups.config.schema import Config
from ups.data.cache import Cache, open_cache, place
from ups.data.latents import Latents
from ups.generative import fitting
from ups.generative.corrector import Corrector
from ups.generative.residuals import Batches, SteadyResiduals, TransientResiduals
from ups.generative.student import SolvedPool, as_map
from ups.models.backbones.flat import FlatBackbone
from ups.models.bases.base import ParameterBatch
from ups.models.bases.elliptic import Elliptic
from ups.models.head_setup import base_settings, head_facts
from ups.models.loss import operator_loss
from ups.models.operator import Operator
from ups.models.windows import Windows
from ups.training.strategies import Agreed
from ups.training.update import Counters, Updates, read_nothing

META, SIZE = torch.device("meta"), 4
MODEL = to_dict(ModelConfig(kind="flat", width=8, depth=1, modes=3, kernel_size=3, mlp_ratio=1.0))
SMOKE = load_config(ROOT / "configs" / "smoke.yaml", [])
TASKS = SMOKE.data.tasks
LEARNT = [
    *(("burgers1d", "equation"), ("burgers1d", "transport"), ("advection1d", "propagator")),
    *(("diff_react2d", "propagator"), ("darcy2d", "elliptic")),
]
# of Burgers
EQUATION = {"terms": [((1,), ((0, (0,)),)), ((0,), ((0, (0, 0)),))], "num_steps": 2, "is_stiff": True}
STAGES = ("diffusion", "consistency", "scoring", "steady")
CORRECTED = ("burgers1d", "diff_react2d", "darcy2d_grf")
# all tasks have reserved trajectories, so that all are corrected
SMALL = [
    f"data.tasks=[{','.join(TASKS)}]",
    *[f"task.{name}.reserve=0.5" for name in TASKS],
    "task.burgers1d_hidden.num_trajectories=20",
    "task.darcy2d_grf.resolution=16",
    "task.darcy2d_grf.num_trajectories=20",
]

aten = torch.ops.aten
# of a GPU's, what waits and has an answer on the meta device all the same: they look whether a factorisation
# succeeded
WAITING = {aten._linalg_check_errors, aten.cholesky_inverse}


class WaitsError(Exception):
    pass


class Watch(TorchDispatchMode):
    """Refuses what a GPU would be waited for: copies from main memory that are not told not to wait,
    operations that are given a part of their operands in main memory, and WAITING."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_away, here = any(t.is_meta for t in given), [t for t in given if not t.is_meta]
        kind = function.overloadpacket
        if (
            kind is aten._to_copy
            and kwargs.get("device") == META
            and here
            or kind is aten.copy_
            and is_away
            and here
        ):
            if not kwargs.get("non_blocking", len(args) > 2 and args[2]):
                raise WaitsError(f"a copy of {tuple(here[0].shape)} to the device that waits for it")
        elif is_away and any(t.ndim for t in here) or is_away and kind in WAITING:
            raise WaitsError(f"{function} of {[(t.device.type, tuple(t.shape)) for t in given]}")
        return function(*args, **kwargs)


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    """torch refuses to cast for the meta device; nothing waits for a cast, and the graphs below hold them."""
    cast = torch.autocast
    monkeypatch.setattr(
        torch,
        "autocast",
        lambda kind, **settings: nullcontext() if kind == "meta" else cast(kind, **settings),
    )


@pytest.fixture(autouse=True)
def short_solves(monkeypatch):
    """All iterations are alike."""
    monkeypatch.setattr(Elliptic, "ITERATIONS", 2)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    return make_caches(tmp_path_factory.mktemp("device"), *SMALL)


@pytest.fixture(scope="module")
def caches(config) -> dict[str, Cache]:
    return {name: open_cache(config, name) for name in TASKS}


def operator_over(caches: dict[str, Cache], kinds: dict[str, str]) -> Operator:
    """An operator over bases of these kinds, nothing fitted or trained, on the codecs of the caches."""
    torch.manual_seed(0)
    operator = Operator(
        {
            "model": MODEL,
            "precision": "bf16",
            "tasks": [
                head_facts(caches[name], kind, base_settings(caches[name]) | EQUATION).described()
                for name, kind in kinds.items()
            ],
        }
    )
    for name, head in operator.heads.items():
        head.codec.load_state_dict(caches[name].tokenizer.state_dict())
        if head.coefficient_codec is not None:
            head.coefficient_codec.load_state_dict(caches[name].input_tokenizer.state_dict())
    return operator


def operator_stage(
    config: Config, caches: dict[str, Cache], name: str, kind: str
) -> tuple[nn.Module, Callable]:
    """(the operator on the device, its loss of a step)."""
    operator = operator_over(caches, {name: kind}).to(META)
    windows = Windows({name: caches[name]}, config.task, {name: config.context(name)}, config.operator, 0)
    return operator, lambda step: partial(
        train_operator.loss_of, operator, windows, windows.schedule.batch(step)
    )


def corrected_stage(config: Config, caches: dict[str, Cache], stage: str) -> tuple[nn.Module, Callable]:
    """(what the stage trains, on the device, its loss of a step); the tasks of CORRECTED in turn."""
    names = [name for name in CORRECTED if name in config.served(stage)]
    operator = operator_over(caches, {name: config.task[name].base[-1] for name in names})
    make = SteadyResiduals if stage == "steady" else TransientResiduals
    residuals = {name: make(operator, caches[name]) for name in names}
    teacher = Corrector(
        {
            "model": MODEL,
            "precision": "bf16",
            "sampler_steps": 2,
            "tasks": [source.description for source in residuals.values()],
        }
    )
    batches = Batches(residuals, SIZE, 0, fitting.STREAM, SimpleNamespace(rank=0, world=1))
    student, pool = as_map(teacher, mid_angle=1.0), SolvedPool(teacher, batches, 1.0, 4)
    # what a start looks up is known, as is what decides on the schedule: from here on nothing is asked
    for head in teacher.heads.values():
        assert head.largest >= 0
    for source in residuals.values():
        source.device = META
        if stage == "steady":
            source.posterior.to(META)
        else:
            source.examples = source.examples.to(META)
    for model in (operator, teacher, student):
        model.to(META)
    losses = {
        "consistency": lambda step: partial(train_consistency.loss_of, student, pool, 2, 1, step, step),
        "scoring": lambda step: partial(train_scoring.loss_of, student, batches, 2, step),
    }
    trained = student if stage in losses else teacher
    return trained, losses.get(
        stage, lambda step: partial(fitting.loss_of, teacher, batches, config.diffusion.noises, step)
    )


@contextmanager
def planted(monkeypatch, disturb: Callable[[Tensor], object]) -> Iterator[None]:
    """Inside, every backbone has `disturb` look at its tokens."""
    forward = FlatBackbone.forward
    with monkeypatch.context() as patch:
        patch.setattr(
            FlatBackbone, "forward", lambda self, x, *rest: (disturb(x), forward(self, x, *rest))[1]
        )
        yield


def update(
    config: Config,
    model: nn.Module,
    loss_at: Callable,
    steps: range,
    read_ahead_at: Callable = lambda step: read_nothing,
) -> None:
    """Updates as `Updates.update` makes them, up to the one sum that ranks agree on: of it they are told
    together."""

    def failed(error: Exception) -> None:
        raise error

    ranks = SimpleNamespace(
        device=META,
        record=failed,
        activity=SimpleNamespace(stop_signal=0),
        raise_unreported=lambda: None,
    )
    counters = Counters(micro_batch=SIZE, micro_batch_asked=SIZE)
    updates = Updates(model, Agreed(), ranks, counters, config.operator.train, config.operator.optim)
    for step in steps[: len(steps) // 2]:  # tables that are made once are made
        updates._backward(loss_at(step), SIZE, read_ahead_at(step))
    with Watch():
        for step in steps[len(steps) // 2 :]:
            metrics, cause = updates._backward(loss_at(step), SIZE, read_ahead_at(step))
            assert cause is None and metrics and all(value.is_meta for _, value, _ in metrics)
            updates._apply(1.0)


@pytest.mark.parametrize(("name", "kind"), [("advection1d", "persistence"), *LEARNT])
def test_a_step_of_the_operator_waits_for_no_device(config, caches, name, kind):
    last = config.operator.train.steps - 1  # unrolled
    update(config, *operator_stage(config, caches, name, kind), range(last - 1, last + 1))


@pytest.mark.parametrize("name", ["advection1d", "darcy2d"])
def test_latents_that_lie_on_the_device_are_gathered_without_a_wait(config, name):
    caches = {name: open_cache(config, name)}
    assert place(caches.values(), META, "device") == "device"
    update(config, *operator_stage(config, caches, name, config.task[name].base[-1]), range(2))


@pytest.mark.parametrize("name", ["burgers1d", "darcy2d"])
def test_reading_ahead_changes_neither_what_is_drawn_nor_its_order(config, name, monkeypatch):
    """On a device that computes beside the host, here in name: the next step's rows are read once, before
    they are asked for; a step that is repeated, or cut otherwise, reads them again."""
    cache, part = open_cache(config, name), slice(0, SIZE)
    head = operator_over({name: cache}, {name: config.task[name].base[-1]}).heads[name]
    windows = Windows({name: cache}, config.task, {name: config.context(name)}, config.operator, 0)
    steps, reads, read = (
        range(config.operator.train.steps - 3, config.operator.train.steps),
        [],
        Latents._read,
    )
    monkeypatch.setattr(
        Latents, "_read", lambda self, *asked: (reads.append(self.name), read(self, *asked))[1]
    )

    def drawn(step: int, part: slice) -> list[Tensor]:
        z, z_ref, known = windows.read(head, windows.schedule.batch(step).shard(1, 2), part)
        return [z, z_ref, known.standard]

    plain = [drawn(step, part) for step in steps]
    of_one = len(reads) // len(steps)
    for devices, ahead in ((("cuda",), 0), (("cpu",), of_one)):
        monkeypatch.setattr("ups.data.latents.ASYNCHRONOUS", devices)
        for step, expected in zip(steps, plain, strict=True):
            windows.read_ahead(windows.schedule.batch(step).shard(1, 2), torch.device("cpu"), part)
            reads.clear()
            assert all(map(torch.equal, drawn(step, part), expected)) and len(reads) == of_one - ahead
            assert all(map(torch.equal, drawn(step, part), expected)) and len(reads) == 2 * of_one - ahead
    windows.read_ahead(windows.schedule.batch(steps[0]).shard(1, 2), torch.device("cpu"), part)
    # a smaller micro-batch, after a want of memory
    assert torch.equal(drawn(steps[0], slice(0, 2))[1], plain[0][1][:2])
    end = windows.schedule.batch(steps[-1] + 1).shard(1, 2)
    windows.read_ahead(end, torch.device("cpu"), part)  # there is nothing ahead


@pytest.mark.parametrize("world", [2, 4])
def test_the_rows_of_all_ranks_are_the_global_batch_when_they_read_ahead(config, world, monkeypatch):
    monkeypatch.setattr("ups.data.latents.ASYNCHRONOUS", ("cpu",))
    steps = range(config.operator.train.steps - 3, config.operator.train.steps)

    def drawn(rank: int, world: int) -> list[Tensor]:
        cache = open_cache(config, "burgers1d")
        head = operator_over({"burgers1d": cache}, {"burgers1d": "propagator"}).heads["burgers1d"]
        windows, found = (
            Windows(
                {"burgers1d": cache},
                config.task,
                {"burgers1d": config.context("burgers1d")},
                config.operator,
                0,
            ),
            [],
        )
        for step in steps:
            batch = windows.schedule.batch(step).shard(rank, world)
            part = slice(0, len(batch))
            assert step == steps[0] or any(latents.ahead for latents, _ in cache._groups.values())
            found.append(windows.read(head, batch, part)[1])
            following = windows.schedule.batch(step + 1).shard(rank, world)
            windows.read_ahead(following, torch.device("cpu"), part)
        return found

    for whole, *parts in zip(drawn(0, 1), *(drawn(rank, world) for rank in range(world)), strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_reading_ahead_is_done_once_a_device_has_its_work_and_waits_for_none(config, caches, monkeypatch):
    monkeypatch.setattr("ups.data.latents.ASYNCHRONOUS", ("meta",))
    operator, loss_at = operator_stage(config, caches, "advection1d", "propagator")
    windows, order = loss_at(0).args[1], []
    backward, ahead = Tensor.backward, Windows.read_ahead
    monkeypatch.setattr(
        Tensor, "backward", lambda self, *rest: (order.append("backward"), backward(self, *rest))[1]
    )
    monkeypatch.setattr(
        Windows,
        "read_ahead",
        lambda self, batch, *rest: (order.append(batch.step), ahead(self, batch, *rest))[1],
    )
    later = windows.schedule.batch
    update(
        config, operator, loss_at, range(2), lambda step: partial(windows.read_ahead, later(step + 1), META)
    )
    assert order == ["backward", 1, "backward", 2]


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_of_a_stage_on_residuals_waits_for_no_device(config, caches, stage, monkeypatch):
    """And with a look at the device in it, does."""
    model, loss_at = corrected_stage(config, caches, stage)
    update(config, model, loss_at, range(4))
    with planted(monkeypatch, lambda x: x.sum().item()), pytest.raises(RuntimeError, match="meta"):
        update(config, model, loss_at, range(2))


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.isfinite().all()),
        lambda x: x[0, 0].tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x.cpu(),
        lambda x: x + torch.zeros(x.shape),
        lambda x: x[torch.tensor([0])],
        lambda x: torch.zeros(3).to(x.device),
        lambda x: torch.zeros_like(x).copy_(torch.zeros(x.shape)),
        lambda x: torch.linalg.cholesky(x.new_zeros(2, 2)),
        lambda x: torch.cholesky_inverse(x.new_zeros(2, 2)),
    ],
)
def test_a_look_at_the_device_is_found(config, caches, monkeypatch, look):
    """The negative control of the tests above: each of these, planted in the backbone, waits for a GPU."""
    with planted(monkeypatch, look), pytest.raises((WaitsError, RuntimeError, NotImplementedError)):
        update(config, *operator_stage(config, caches, "advection1d", "persistence"), range(2))


def test_what_is_sent_arrives_and_only_from_main_memory():
    u = torch.arange(6.0).view(2, 3)
    assert send(u, "cpu") is u and send(u, META).shape == (2, 3)
    with pytest.raises(AssertionError, match="meta"):
        send(u.to(META), "cpu")


# ---------------------------------------------------------------- what a step costs


def test_the_benchmark_on_gpus_times_the_model_of_the_stage_without_its_data(config, caches):
    """Shapes and facts of all weights are those over real caches; FLOP and bytes are those of the rows."""
    bases = {name: config.task[name].base[-1] for name in TASKS}
    config = replace(config, operator=replace(config.operator, model=ModelConfig(**MODEL)))
    found, real = gpu.operator_of(config, "no"), operator_over(caches, bases)
    shapes = [
        {key: tuple(value.shape) for key, value in operator.state_dict().items()}
        for operator in (found, real)
    ]
    assert shapes[0] == shapes[1]
    for name in ("burgers1d", "darcy2d"):
        few, many = (gpu.cost_of(found, name, gpu.batch_of(found, name, rows)) for rows in (4, 8))
        assert (
            few["flop"] == pytest.approx(many["flop"], rel=1e-6)
            and few["bytes"] > many["bytes"] > 0.5 * few["bytes"]
        )
        size = sum(p.numel() for p in found.backbone.parameters())
        assert few["flop"] > 6 * size  # every weight multiplies each of several tokens, there and back


def test_the_benchmark_on_gpus_judges_precisions_by_the_same_weights_and_times_where_latents_lie(
    config, caches, monkeypatch
):
    monkeypatch.setattr("ups.common.device.has_bfloat16", lambda kind: True)
    names = ["burgers1d", "darcy2d"]
    operator = operator_over(caches, {name: config.task[name].base[-1] for name in names})
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    monkeypatch.setattr(gpu, "load_operator", lambda folder, device: operator)
    config = replace(config, data=replace(config.data, tasks=names))
    for one in gpu.accuracy(config, ROOT, torch.device("cpu")).values():
        assert 1e-4 < one["apart"] < 0.1  # eight bits, through a few layers
        assert one["bf16"]["loss"] != one["no"]["loss"] == pytest.approx(one["bf16"]["loss"], rel=0.05)
        assert one["bf16"].keys() == one["no"].keys() == {"loss", "rollout"}
    times = gpu.placed(config, ROOT, torch.device("cpu"), 1)
    assert all(
        set(one) == {"mapped", "read ahead", "device"} and min(one.values()) > 0 for one in times.values()
    )


@pytest.mark.faults  # processes of their own
def test_the_benchmark_on_gpus_runs_on_a_cpu_and_says_what_it_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "OUT", tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "gpu",
            "--config",
            str(ROOT / "configs" / "smoke.yaml"),
            "data.tasks=[burgers1d,darcy2d]",
            "--device",
            "cpu",
            "--steps",
            "1",
            "--eager",
            "--processes",
            "1",
            "8",
        ],
    )
    gpu.main()
    printed = capsys.readouterr().out
    has_both = gpu.precisions(torch.device("cpu")) == gpu.PRECISIONS  # else float32 is not sold as bf16
    assert bool(re.search(r"1 process\(es\), bf16, eager: [\d.e+]+ samples/s", printed)) == has_both
    assert ("not run: bf16: it would be float32 (this cpu does not multiply bf16)" in printed) == (
        not has_both
    )
    assert (
        "not run: 8 process(es), no, eager: there are" in printed
        and "not run: compiled: not asked for" in printed
    )
    assert "not run: accuracy in bf16, and where latents lie: they need a trained run (--run)" in printed
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [(row["task"], row["precision"]) for row in rows] == [
        (name, precision)
        for precision in gpu.precisions(torch.device("cpu"))
        for name in ("burgers1d", "darcy2d")
    ]
    assert all(0 < row["of peak"] < 2 and 0 < row["of bandwidth"] and row["GiB"] is None for row in rows)


# ---------------------------------------------------------------- one graph per task


class Loss(nn.Module):
    """The operator's loss as a function of tensors alone."""

    def __init__(self, operator: Operator, name: str):
        super().__init__()
        self.operator, self.name = operator, name

    def forward(self, u: Tensor, u_ref: Tensor, *known: Tensor) -> Tensor:
        return operator_loss(self.operator, self.name, u, u_ref, ParameterBatch(*known), 0.1)[0]


def with_gradients(model: nn.Module, weights: dict[str, Tensor], *given: Tensor) -> list[Tensor]:
    """The loss and its gradients."""
    free = {name: weights[name].detach().requires_grad_() for name, p in model.named_parameters()}
    loss = functional_call(model, weights | free, given)
    gradients = torch.autograd.grad(loss, [*free.values()], allow_unused=True)
    return [loss, *[gradient for gradient in gradients if gradient is not None]]


@pytest.mark.parametrize(("name", "kind"), LEARNT)
def test_a_step_is_one_graph_whatever_the_data_are(config, caches, name, kind):
    """The graph that is traced of one batch, on tensors without numbers, computes the loss and the gradients
    of another, in which the rows have other parameter values."""
    operator, cache = operator_over(caches, {name: kind}), caches[name]
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
        if kind == "propagator":
            operator.heads[name].base.weight_real.normal_(std=0.01)
        elif kind == "equation":
            operator.heads[name].base.weight.normal_(std=0.01)
    windows = Windows({name: cache}, config.task, {name: config.context(name)}, config.operator, 0)
    model, head = Loss(operator, name), operator.heads[name]
    weights = {key: value.detach() for key, value in (*model.named_parameters(), *model.named_buffers())}

    def batch(step: int, rows: list[int]) -> tuple[Tensor, ...]:
        z, z_ref, known = windows.read(head, windows.schedule.batch(step), slice(0, SIZE))
        # of the first or the last value
        known = head.parameter_batch(cache.parameters[torch.tensor(rows) * (cache.num_rows - 1)])
        return z, z_ref, known.standard, known.index

    first, other = batch(0, [0, 0, 0, 1]), batch(1, [1, 0, 1, 1])
    with_gradients(model, weights, *first)  # tables that are made once are made
    graph = make_fx(partial(with_gradients, model), tracing_mode="fake", _allow_non_fake_inputs=True)(
        weights, *first
    )
    assert aten._local_scalar_dense.default not in [node.target for node in graph.graph.nodes]  # no item()
    found, expected = graph(weights, *other), with_gradients(model, weights, *other)
    assert len(found) == len(expected) > 5
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert not torch.equal(found[0], with_gradients(model, weights, *first)[0])


@pytest.mark.parametrize(
    ("look", "error"),
    [
        (lambda x: bool(x.mean() > 0), "data-dependent expression"),
        (lambda x: x.mean().item(), "_local_scalar_dense"),
        (lambda x: x.new_zeros(2, dtype=torch.long).unique().tolist(), "data-dependent|dynamic_output"),
    ],
)
def test_a_graph_that_follows_the_data_is_refused(config, caches, monkeypatch, look, error):
    """The negative control; the third is how the propagator found the rows of every value."""
    with planted(monkeypatch, look), pytest.raises((RuntimeError, AssertionError), match=error):
        test_a_step_is_one_graph_whatever_the_data_are(config, caches, "advection1d", "propagator")
