"""No step of a training waits for the device, and what it computes is one graph per task: shown without a
GPU.

Every stage's own loss, forward and backward, with the optimizer's step and the average, runs on torch's meta
device, whose tensors hold no numbers: what a GPU would have to be waited for (item(), bool(), tolist(),
nonzero(), a boolean mask) raises there. What meta tensors let pass and a GPU does not, `Watch` refuses."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from test_base_selection import make_caches
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import train_consistency
import train_operator
import train_scoring
from bench import gpu
from ups.common.device import send
from ups.common.graphs import MOST_RECORDED, NUM_FIRST_CALLS, Captured, CudaGraphs, refuse_recording
from ups.common.place import ROOT
from ups.config.load import load_config, to_dict
from ups.config.model import ModelConfig
from ups.config.schema import Config
from ups.data.cache import Cache, open_cache, place
from ups.generative import fitting
from ups.generative.corrector import Corrector
from ups.generative.residuals import Batches, SteadyResiduals, TransientResiduals
from ups.generative.sampling import SAMPLERS, Sampler, Starts, sample_states
from ups.generative.student import SolvedPool, as_map
from ups.models.backbones.flat import FlatBackbone
from ups.models.bases.elliptic import Elliptic
from ups.models.head_setup import base_settings, head_facts
from ups.models.operator import Operator
from ups.models.windows import Windows
from ups.training.checkpoint import sum_in_one_order
from ups.training.strategies import SplitLoss
from ups.training.update import Updates

META, SIZE = torch.device("meta"), 4
NUMBERLESS = torch.library.Library("aten", "IMPL")  # torch has no such kernel for the meta device
NUMBERLESS.impl("_fused_adamw_.tensor_lr", lambda *given, **settings: None, "Meta")
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


def operator_over(caches: dict[str, Cache], kinds: dict[str, str], model: dict = MODEL) -> Operator:
    """An operator over bases of these kinds, nothing fitted or trained, on the codecs of the caches."""
    torch.manual_seed(0)
    operator = Operator(
        {
            "model": model,
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
    config: Config,
    caches: dict[str, Cache],
    name: str,
    kind: str,
    model: dict = MODEL,
    device: torch.device | str = META,
) -> tuple[nn.Module, Callable]:
    """(the operator on the device, its loss of a step)."""
    operator = operator_over(caches, {name: kind}, model)
    marks = [
        vars(p) for p in operator.parameters()
    ]  # of the optimizer; torch makes others on the meta device
    for parameter, mark in zip(operator.to(device).parameters(), marks, strict=True):
        vars(parameter).update(mark)
    windows = Windows({name: caches[name]}, config.task, config.operator, 0)
    compute = partial(train_operator.loss_of, operator, name)
    return operator, lambda step: SplitLoss(
        partial(windows.read, operator.heads[name], windows.schedule.batch(step)), compute
    )


def networks_over(
    config: Config, caches: dict[str, Cache], names: list[str], stage: str = "diffusion"
) -> tuple[Operator, Corrector, dict]:
    """(operator, corrector, the residuals of both), nothing trained, but with weights that do something."""
    operator = operator_over(caches, {name: config.task[name].base[-1] for name in names})
    make = SteadyResiduals if stage == "steady" else TransientResiduals
    residuals = {name: make(operator, caches[name]) for name in names}
    tasks = [source.description for source in residuals.values()]
    corrector = Corrector({"model": MODEL, "precision": "bf16", "sampler_steps": 2, "tasks": tasks})
    with torch.no_grad():
        for parameter in (*operator.parameters(), *corrector.parameters()):
            parameter += 0.02 * torch.randn(parameter.shape)
    return operator, corrector, residuals


def corrected_stage(
    config: Config,
    caches: dict[str, Cache],
    stage: str,
    names: Sequence[str] = CORRECTED,
    device: torch.device | str = META,
    machine: "Rehearsal | None" = None,
) -> tuple[nn.Module, Callable, list[str]]:
    """(what the stage trains, on the device, its loss of a step, what is said of graphs); tasks in turn."""
    names, said = [name for name in names if name in config.served(stage)], []
    operator, teacher, residuals = networks_over(config, caches, names, stage)
    batches = Batches(residuals, SIZE, 0, fitting.STREAM, SimpleNamespace(rank=0, world=1))
    student, pool = as_map(teacher, mid_angle=1.0), SolvedPool(teacher, batches, 1.0, 4)
    # what a start looks up is known, as is what decides on the schedule: from here on nothing is asked
    for head in teacher.heads.values():
        assert head.largest >= 0
    for source in residuals.values():
        source.device = torch.device(device)
        if stage == "steady":
            source.posterior.to(device)
    for model in (operator, teacher, student):
        model.to(device)
        if machine is not None:
            model.call = Captured(machine, said.append).evaluate
    noises = config.diffusion.noises
    trained, compute, reading = {
        "consistency": (
            student,
            partial(train_consistency.loss_of, student, residuals),
            lambda step: partial(
                train_consistency.read, student, pool, 2 if step else None, step, pool.number(step)
            ),
        ),
        "scoring": (
            student,
            partial(train_scoring.loss_of, student, residuals),
            lambda step: partial(train_scoring.read, batches, 2, step),
        ),
    }.get(
        stage,
        (
            teacher,
            partial(fitting.loss_of, teacher),
            lambda step: partial(fitting.read, batches, teacher, noises, step),
        ),
    )
    return trained, lambda step: SplitLoss(reading(step), compute), said


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
) -> None:
    """Updates as `Updates.update` makes them, up to the one sum that ranks agree on: of it they are told
    together."""

    updates = gpu.updates_of(config, model, SIZE)
    for step in steps[: len(steps) // 2]:  # tables that are made once are made
        updates._backward(loss_at(step), SIZE)
    with Watch():
        for step in steps[len(steps) // 2 :]:
            metrics, cause = updates._backward(loss_at(step), SIZE)
            assert cause is None and metrics and all(value.is_meta for _, value, _ in metrics)
            updates._apply(1.0)


@pytest.mark.parametrize(("name", "kind"), [("advection1d", "persistence"), *LEARNT])
def test_a_step_of_the_operator_waits_for_no_device(config, caches, name, kind):
    last = config.operator.train.steps - 1  # unrolled
    update(config, *operator_stage(config, caches, name, kind), range(last - 1, last + 1))


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_of_a_stage_on_residuals_waits_for_no_device(config, caches, stage, monkeypatch):
    """And with a look at the device in it, does."""
    model, loss_at, _ = corrected_stage(config, caches, stage)
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


# ---------------------------------------------------------------- captured updates, without a GPU


class Rehearsal:
    """In place of `CudaGraphs`: replays a function by calling it on the tensors that stay where they are, as
    does the result.

    recording: context of a call that records; None: it is not called, as a GPU's recording computes nothing.
    replaying: context of the calls after it.
    """

    def __init__(self, recording: Callable | None = None, replaying: Callable = nullcontext):
        self.recording, self.replaying, self.num_replays = recording, replaying, 0

    turn, is_watched = nullcontext, staticmethod(lambda: False)

    def record(self, compute: Callable) -> Callable:
        if self.recording is not None:
            with self.recording():
                compute()

        kept = []

        @torch.no_grad()
        def replay() -> object:
            self.num_replays += 1
            with self.replaying(), torch.enable_grad():
                kept.append(compute())
            for old, new in zip(
                tree_leaves(kept[0]), tree_leaves(kept.pop() if kept[1:] else kept), strict=True
            ):
                if isinstance(old, Tensor) and old is not new:
                    old.copy_(new)
            return kept[0]

        return replay


class Launches(TorchDispatchMode):
    """Counts the kernels that a GPU launches: operators on the device that do not return a view or memory."""

    NONE = {aten._unsafe_view, aten.empty, aten.empty_like, aten.new_empty, aten.promote_types}

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_kernel = not function.is_view and function.overloadpacket not in self.NONE
        found = function(*args, **(kwargs or {}))
        is_away = any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, kwargs, found)))
        self.num += is_kernel and is_away and function.namespace == "aten"
        return found


class LaunchesOfRest(Launches):
    """Of what is in no graph. Refuses a number that is assigned to a place (x[0] = 1): it is copied from main
    memory, and waits for all that was launched."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is aten.scalar_tensor:
            raise WaitsError(f"the number {args[0]} is assigned to a place; expected fill_")
        return super().__torch_dispatch__(function, types, args, kwargs)


class OnDevice(TorchDispatchMode):
    """Refuses tensors in main memory: a graph repeats the numbers of its recording."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and not x.is_meta for x in tree_leaves((args, kwargs, found))):
            raise WaitsError(f"{function} with a tensor in main memory")
        return found


class NoNumbers(TorchFunctionMode):
    """Refuses tensors that are made of numbers in main memory, which dispatch modes do not see."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.tensor, torch.as_tensor, torch.from_numpy) and not isinstance(args[0], Tensor):
            raise WaitsError(f"{function.__name__} of {args[0]!r:.80}")
        return function(*args, **(kwargs or {}))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    with OnDevice(), NoNumbers():
        yield


def captured_updates(
    config: Config, operator: Operator, machine: Rehearsal, rows: int = SIZE
) -> tuple[Updates, list[str]]:
    """(updates of an operator that are replayed, what they print)."""
    updates, said = gpu.updates_of(config, operator, rows), []
    updates.optimizer.call = Captured(machine, said.append)
    return updates, said


def step_on_meta(updates: Updates, loss: Callable, name: str) -> None:
    """An update but for the look at the counts."""
    updates._backward(loss, SIZE)
    updates._buffer.mul_(0.5)
    updates._apply(1.0, name)


# task, backbone of two blocks -> kernels of an update, launched one by one, and launches with graphs
LAUNCHES = {
    ("advection1d", "plain"): (392, 28),
    ("burgers1d", "plain"): (400, 28),
    ("darcy2d", "plain"): (473, 34),
    ("diff_react2d", "plain"): (392, 27),
    ("burgers1d", "flat"): (476, 28),
    ("burgers1d", "fno"): (285, 28),
    ("burgers1d", "transformer"): (541, 28),
    ("burgers1d", "unet"): (523, 28),
}


@pytest.mark.parametrize(("name", "kind"), LAUNCHES)
def test_an_update_looks_at_nothing_has_one_shape_and_is_two_graphs_and_a_few_launches(config, name, kind):
    caches = {name: open_cache(config, name)}
    place(caches.values(), META, "device")
    model = MODEL | {"kind": kind, "depth": 2}
    operator, loss_at = operator_stage(config, caches, name, config.task[name].base[-1], model)
    eager = gpu.updates_of(config, operator, SIZE)
    step_on_meta(eager, loss_at(0), name)
    with Launches() as single:
        step_on_meta(eager, loss_at(1), name)
    machine = Rehearsal(as_on_a_gpu, _disable_current_modes)
    updates, said = captured_updates(config, operator, machine)
    is_line = operator.heads[name].task.ndim == 1  # else a symmetry may transpose fields: two layouts
    steps = range(NUM_FIRST_CALLS + 1 if is_line else 8 * NUM_FIRST_CALLS)
    for step in steps:
        step_on_meta(updates, loss_at(step), name)
    recorded = updates.optimizer.call.recorded.values()
    assert not said and all(one.is_replayed for one in recorded)
    assert len(recorded) == 1 + (1 if is_line else 2)
    machine.num_replays = 0
    with LaunchesOfRest() as rest:
        step_on_meta(updates, loss_at(len(steps)), name)
    found, most = (single.num, rest.num + machine.num_replays), LAUNCHES[name, kind]
    assert machine.num_replays <= 2 and found[0] <= most[0] and found[1] <= most[1] <= most[0] / 2, found


# of a later stage: the same
LAUNCHES_OF_STAGE = {
    "diffusion": (535, 50),
    "consistency": (712, 33),
    "scoring": (706, 46),
    "steady": (966, 340),  # the posterior of the coefficient solves one system a row, of its own size
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_of_a_later_stage_is_a_few_graphs_and_launches_with_the_weights_of_plain_calls(
    config, caches, stage
):
    """The frozen operator, its error in the condition, the teacher's paths, and the pass."""
    steps, names = range(12), ["darcy2d_grf"] if stage == "steady" else ["burgers1d"]
    found, counts = [], []
    for device in (META, torch.device("cpu")):
        for machine in (None, Rehearsal(as_on_a_gpu if device == META else None)):
            model, loss_at, said = corrected_stage(config, caches, stage, names, device, machine)
            updates = gpu.updates_of(config, model, SIZE)
            if machine is not None:
                updates.optimizer.call = Captured(machine, said.append)
            if device != META:
                found.append([updates.update(loss_at(step), SIZE).loss for step in steps])
                found[-1] += [*model.parameters()]
                continue
            for step in steps:
                if machine is not None:
                    machine.num_replays, machine.replaying = 0, _disable_current_modes
                with Launches() if step == steps[-1] else nullcontext() as launches:
                    step_on_meta(updates, loss_at(step), None)
            counts.append(launches.num + (machine.num_replays if machine else 0))
            assert not said
    assert all(a == b if isinstance(a, float) else torch.equal(a, b) for a, b in zip(*found, strict=True))
    most = LAUNCHES_OF_STAGE[stage]
    assert all(one <= limit for one, limit in zip(counts, most, strict=True)), counts
    assert 2 * most[1] <= most[0], counts


# sampler (none: a forecast), task -> kernels of a frame, launched one by one, and launches with graphs
LAUNCHES_OF_FRAME = {
    ("forecast", "advection1d"): (85, 10),
    ("forecast", "burgers1d"): (93, 10),
    ("forecast", "diff_react2d"): (109, 9),
    ("corrector", "burgers1d"): (533, 30),
    ("student_1", "burgers1d"): (270, 30),
    ("student_2", "burgers1d"): (364, 30),
    ("waves", "burgers1d"): (186, 30),
}


def frames_of(
    config: Config,
    caches: dict[str, Cache],
    kind: str,
    name: str,
    num_frames: int,
    device: torch.device | str,
    machine: Rehearsal | CudaGraphs | None,
) -> tuple[Tensor, list[str]]:
    """(a forecast, or members of a sampler, what is said of graphs)."""
    operator, corrector, _ = networks_over(config, caches, [name])
    said = []
    for network in (operator, corrector):
        network.to(device)
        if machine is not None:
            network.call = Captured(machine, said.append).evaluate
    z, parameters = caches[name].batch([0, 1], 0, 11).to(device), caches[name].parameters[:2]
    with torch.no_grad():
        if kind == "forecast":
            return operator.rollout(z, name, parameters, num_frames), said
        sampler, starts = Sampler(corrector, SAMPLERS[kind][1]), Starts(z, parameters, [0, 1])
        return sample_states(operator, sampler, name, starts, num_frames, 2), said


@pytest.mark.parametrize(("kind", "name"), LAUNCHES_OF_FRAME)
def test_a_frame_is_a_graph_or_two_with_the_numbers_of_plain_calls_bitwise(config, caches, kind, name):
    """Forecasts, of validation as well, and members of every sampler."""
    frames, machine, counts = partial(frames_of, config, caches, kind, name), Rehearsal(), []
    assert torch.equal(frames(8, "cpu", None)[0], frames(8, "cpu", machine)[0]) and machine.num_replays >= 4
    for is_replayed in (False, True):
        of_frames = []
        for num_frames in (NUM_FIRST_CALLS + 3, NUM_FIRST_CALLS + 4):
            machine = Rehearsal(as_on_a_gpu, _disable_current_modes) if is_replayed else None
            with Launches() as launches:
                _, said = frames(num_frames, META, machine)
            of_frames.append(launches.num + (machine.num_replays if machine else 0))
        counts.append(of_frames[1] - of_frames[0])
    most = LAUNCHES_OF_FRAME[kind, name]
    assert not said and all(one <= limit for one, limit in zip(counts, most, strict=True)), (counts, said)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or not run by `make test-gpu`")
@pytest.mark.parametrize(("kind", "name"), LAUNCHES_OF_FRAME)
def test_replayed_frames_of_a_gpu_have_the_numbers_of_eager_ones(config, caches, kind, name):
    sum_in_one_order()
    machine = CudaGraphs.of(torch.device("cuda", 0))
    plain, (replayed, said) = (frames_of(config, caches, kind, name, 8, "cuda", m) for m in (None, machine))
    torch.testing.assert_close(replayed, plain[0], rtol=1e-3, atol=1e-3)
    assert not said


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x + torch.tensor([1.0], device=x.device),
        lambda x: torch.zeros(3).to(x.device),
        torch.rand_like,
    ],
)
def test_a_pass_that_reads_main_memory_is_refused(config, caches, monkeypatch, look):
    """The negative control; random numbers of the device are allowed, as torch's graphs make new ones."""
    operator, loss_at = operator_stage(config, caches, "advection1d", "persistence")
    updates, said = captured_updates(config, operator, Rehearsal(as_on_a_gpu))
    with planted(monkeypatch, look):
        for step in range(NUM_FIRST_CALLS + 1):
            step_on_meta(updates, loss_at(step), "advection1d")
    assert len(said) == (look is not torch.rand_like)
    assert all("no CUDA graph of _pass" in line for line in said)


@pytest.mark.parametrize("name", ["burgers1d", "darcy2d", "diff_react2d"])
def test_replays_on_tensors_that_stay_give_the_weights_and_metrics_of_plain_calls(config, caches, name):
    """In two passes an update, and beyond the step from which windows are longer."""
    last = config.operator.train.steps
    first, found = int((1 - config.operator.unroll_fraction) * last) - 8, []
    for machine in (None, Rehearsal()):
        operator, loss_at = operator_stage(config, caches, name, config.task[name].base[-1], device="cpu")
        updates = gpu.updates_of(config, operator, SIZE // 2)
        if machine is not None:
            updates, said = captured_updates(config, operator, machine, SIZE // 2)
        done = [updates.update(loss_at(step), SIZE, only=name) for step in range(first, last)]
        metrics = [value for one in done for _, value, _ in one.metrics]
        found.append([*operator.parameters(), *updates.ema.averages.values(), *metrics])
    assert not said and machine.num_replays > 2 * len(done)
    for plain, replayed in zip(*found, strict=True):  # some processors round a product by its place in memory
        torch.testing.assert_close(replayed, plain, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_recorded_runs_as_before_and_one_line_says_why():
    class Full(Rehearsal):
        def record(self, compute: Callable) -> Callable:
            raise RuntimeError("CUDA error: operation not permitted\nCompile with TORCH_USE_CUDA_DSA")

    def double(x: Tensor, extra: Tensor | None, factor: int) -> Tensor:
        return factor * x

    def of_a_user(x: Tensor) -> Tensor:
        refuse_recording("it may compute something else in every call")
        return x

    said = []
    captured, fine = Captured(Full(), said.append), Captured(Rehearsal(), said.append)
    user = Captured(Rehearsal(nullcontext), said.append)
    for number in range(6):
        assert user.evaluate(of_a_user, torch.ones(2)).sum() == 2
        for shape in ((2,), (3,)):
            x = torch.full(shape, float(number))
            for call in (captured, fine):
                assert torch.equal(call(double, x, None, 2), 2 * x)
                assert torch.equal(call(double, x, None, 3), 3 * x)
    line = "no CUDA graph of double, which runs as without one: RuntimeError: CUDA error"
    other = "no CUDA graph of of_a_user, which runs as without one: RuntimeError: it may compute something"
    assert sorted(said) == [f"{line}: operation not permitted"] * 4 + [f"{other} else in every call"]
    assert fine.machine.num_replays == 4 * (6 - NUM_FIRST_CALLS) and len(fine.recorded) == 4
    for number in range(MOST_RECORDED):
        fine(double, torch.ones(4 + number), None, 2)
    assert len(fine.recorded) == MOST_RECORDED and not copy.deepcopy(fine.evaluate).__self__.recorded


def fraction_of(device: torch.device) -> float:
    """torch.cuda.get_per_process_memory_fraction, which wants a number of a device."""
    if device.index is None:
        raise ValueError("Expected a torch.device with a specified index or an integer, but got:cuda")
    return 1.0


@pytest.mark.parametrize("fails", [False, True])
def test_a_graph_is_recorded_as_torch_documents_it(monkeypatch, fails):
    """Against the signatures of torch: what is called on a GPU, and that a failure gives back all it took."""
    cuda = create_autospec(torch.cuda)
    cuda.mem_get_info.return_value, cuda.current_device.return_value = (8 << 30, 80 << 30), 0
    cuda.get_per_process_memory_fraction.side_effect = fraction_of
    cuda.memory_reserved.return_value = cuda.memory_allocated.return_value = 0
    cuda.max_memory_allocated.return_value = 1 << 30
    cuda.graph.return_value.__exit__.return_value = cuda.stream.return_value.__exit__.return_value = False
    ended = MagicMock(side_effect=RuntimeError("not recording"))
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended, raising=False)
    own = type("Graphs", (CudaGraphs,), {})  # it remembers those of its own
    graphs = own.of(torch.device("cuda"))  # as Accelerate gives it to a process alone
    assert graphs is own.of(torch.device("cuda", 0))
    with graphs.turn():
        assert graphs.stream.wait_stream.call_count == 1
    if fails:
        with pytest.raises(ValueError, match="mine"):
            graphs.record(MagicMock(side_effect=ValueError("mine")))
        ended.assert_called_once()
        cuda.max_memory_allocated.return_value = 5 << 30
        with pytest.raises(MemoryError, match=r"it may use 5.0 GiB and 8.0 GiB are free"):
            graphs.record(lambda: 3)
        return
    replay = graphs.record(lambda: 3)
    graph = cuda.CUDAGraph.return_value
    cuda.graph.assert_called_once_with(graph, graphs.memory, graphs.stream, capture_error_mode="thread_local")
    assert not graph.replay.called and replay() == 3 and graph.replay.call_count == 1 and not ended.called


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or not run by `make test-gpu`")
def test_replayed_updates_of_a_gpu_have_the_losses_of_eager_ones(config, caches, monkeypatch):
    sum_in_one_order()
    for name in ("burgers1d", "darcy2d", "diff_react2d"):
        found = []
        for is_replayed in (False, True):
            operator, loss_at = operator_stage(
                config, caches, name, config.task[name].base[-1], device="cuda"
            )
            updates = gpu.updates_of(config, operator, SIZE, is_replayed)
            steps = range(config.operator.train.steps)
            found.append([updates.update(loss_at(step), SIZE, only=name).loss for step in steps])
        assert gpu.was_replayed(updates) and found[1] == pytest.approx(found[0], rel=1e-3)


def test_the_benchmark_on_gpus_times_the_model_of_the_stage_without_its_data(config, caches):
    """Shapes of all weights are those over real caches."""
    bases = {name: config.task[name].base[-1] for name in TASKS}
    config = replace(config, operator=replace(config.operator, model=ModelConfig(**MODEL)))
    found, real = gpu.operator_of(config, "no"), operator_over(caches, bases)
    shapes = [
        {key: tuple(value.shape) for key, value in operator.state_dict().items()}
        for operator in (found, real)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.faults  # processes of their own
def test_the_check_of_a_gpu_runs_small_on_a_cpu_and_ends_with_one_table():
    done = subprocess.run(
        ["bash", "bench/gpu_check.sh", "--tiny"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    table = done.stdout[done.stdout.index("| what | measured |") :]
    parts = (
        "CPU, update of, losses of, pass of, forecast of, make consistency, stage consistency, 2 frames of"
    )
    assert all(f"| {part}" in table for part in parts.split(", ")), done.stdout + done.stderr
    assert "not finished" not in table and "not replayed" in table
    assert "bitwise equal" in table
    assert (
        sum(map(int, re.findall(r"^\w+ (\d+)$", (ROOT / "bench" / "gpu_check.sh").read_text(), re.M))) <= 540
    )
