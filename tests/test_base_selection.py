"""The choice of a base (ups/models/base_selection.py): the right one on real solutions, recorded, found
again, refused where it is foreign."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from golden_table import base_scores
from safetensors.torch import load_file
from user_files import base_error

import prepare_cache
import prepare_data
from ups.commands.stages import stage_folder
from ups.common.files import DamagedError
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.cache import Cache, open_cache
from ups.evaluation.truth import Truth, open_truth
from ups.models import base_selection
from ups.models.base_selection import fitted_candidates, fitted_state, select_base
from ups.models.bases.base import Fit, ParameterBatch, Persistence, Samples
from ups.models.facts import HeadFacts
from ups.models.head import MARGIN, TaskHead
from ups.models.head_setup import (
    base_settings,
    build_operator,
    head_facts,
    load_base,
    residual_scale,
)
from ups.models.loss import squared_errors
from ups.models.operator import Operator
from ups.tasks import TASKS, get_task
from ups.training.fit import find_fit, fit_once
from ups_discovery.units import widened

CPU = torch.device("cpu")
TINY = (
    "task.advection1d.num_trajectories=16 task.advection1d.resolution=32 "
    "task.burgers1d.parameters=[0.05,0.1] task.burgers1d.num_trajectories=20 "
    "task.darcy2d.num_trajectories=20 task.darcy2d.resolution=16 "
    "task.diff_react2d.num_trajectories=12 task.diff_react2d.resolution=16 "
    "task.diff_react2d.t_end=1.3 operator.base_steps=60 "
    "data.tasks=[advection1d,burgers1d,darcy2d,diff_react2d]"
).split()


def make_caches(root: Path, *overrides: str) -> Config:
    """Data and caches of configs/smoke.yaml, smaller still, under `root`."""
    overrides = [
        f"data.root={root}/data",
        f"cache.root={root}/cache",
        f"run.root={root}/runs",
        *TINY,
        *overrides,
    ]
    arguments = ["--config", str(ROOT / "configs" / "smoke.yaml"), *overrides]
    assert prepare_data.main([*arguments, "--workers", "1"]) == 0 and prepare_cache.main(arguments) == 0
    return load_config(ROOT / "configs" / "smoke.yaml", overrides)


def base_alone(root: Path, name: str, *overrides: str) -> tuple[Config, Truth, Operator]:
    """The configuration of one task, its truth, and an operator that is the selected base alone."""
    small = "operator.base_steps=20 operator.model.width=16 operator.model.depth=1"
    few = [f"data.tasks=[{name}]", *small.split(), "operator.train.precision='no'"]
    config = make_caches(root, *few, *overrides)
    truth = open_truth(config, name)
    head, _ = select_base(truth.cache, config.operator.base_steps, truth.context, 0, CPU)
    made = {"description": head.facts.described()}, fitted_state(head)
    operator = build_operator({name: made}, config.operator.model, "no").eval().requires_grad_(False)
    operator.head_for(truth.cache)
    return config, truth, operator


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    return make_caches(tmp_path_factory.mktemp("choose"))


@pytest.fixture(scope="module")
def facts(config) -> dict[str, dict]:
    """What `fit_base` says about every task; its files are in run_dir/operator/bases."""
    return {name: fact for name, (fact, _) in fitted(config).items()}


def loaded(config: Config, facts: dict, name: str) -> TaskHead:
    head = TaskHead(HeadFacts.read(facts[name]["description"]), width=1)
    load_base(head, find_fit(stage_folder(config, "operator"), f"bases/{name}")[1])
    return head


class OneRank:
    """What `fit_once` needs of a run."""

    stage, ranks = "operator", SimpleNamespace(rank=0, world=1, is_main=True)

    def __init__(self, config: Config) -> None:
        self.folder = stage_folder(config, "operator")
        self.directory = self.folder.path
        assert self.folder.take(0.0) == ""

    def agreed(self, function, doing):
        return function()


def numbers(config: Config, name: str) -> tuple[int, int]:
    """What the fit of a base reads of the configuration: base_steps, frames of context."""
    return config.operator.base_steps, config.context(name)


def fitted(config: Config, *names: str) -> dict[str, tuple[dict, dict]]:
    """The bases as the operator's stage fits them."""
    fits = {
        name: partial(base_selection.fit_base, open_cache(config, name), *numbers(config, name), 0, CPU)
        for name in names or config.data.tasks
    }
    return fit_once(OneRank(config), "bases", fits, "fitting")


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("task", "kind", "ratio"),
    [
        ("advection1d", "propagator", 100),
        ("burgers1d", "transport", 10),
        ("diff_react2d", "propagator", 100),
        ("darcy2d", "elliptic", 0),
    ],
)
def test_each_equation_gets_the_base_that_its_solution_suggests(facts, task, kind, ratio):
    description, scores = facts[task]["description"], base_scores(facts[task])
    assert description["base"]["kind"] == kind
    best = min((value, name) for name, value in scores.items() if value is not None)
    assert best[1].startswith(kind) and (not ratio or ratio * best[0] < scores["persistence"])
    if task == "diff_react2d":
        assert description["base"]["settings"]["degree"] == 3 and "degree 3" in best[1]
    if task == "darcy2d":
        assert best[0] < 0.3  # the mean field of the training split has about 1


def test_the_score_is_the_pooled_error_of_rollouts_from_the_context(config, facts):
    cache, context = open_cache(config, "advection1d"), config.evaluate.context_frames
    head = loaded(config, facts, "advection1d")
    rows = cache.split["val"]
    assert len(rows) <= base_selection.MAX_TRAJECTORIES
    # as the report's nRMSE, physical units
    u = head.physical(cache.batch(rows, 0, cache.num_frames)).double()
    error = (u[:, context:] - u[:, context - 1 : context]).square().sum((0, 3)) / u[:, context:].square().sum(
        (0, 3)
    )
    head.base = Persistence()
    expected = float(error.sqrt().mean())
    assert base_error(head, cache, context) == pytest.approx(expected, rel=1e-5)
    assert base_scores(facts["advection1d"])["persistence"] == pytest.approx(expected, rel=1e-5)
    every = {f"propagator degree {d} history {h}" for d in (1, 3) for h in (1, 2, 4)} | {"persistence"}
    assert {name.split(" ridge ")[0] for name in base_scores(facts["diff_react2d"])} == every


@pytest.mark.parametrize("name", ["advection1d", "darcy2d"])
def test_rollouts_are_decoded_in_blocks_and_the_errors_stay_the_same(config, facts, name, monkeypatch):
    cache, context = open_cache(config, name), config.context(name)
    operator = build_operator(
        {name: (facts[name], find_fit(stage_folder(config, "operator"), f"bases/{name}")[1])},
        config.operator.model,
        "no",
    )
    rows, batch, taken = torch.arange(7), Cache.batch, []
    frame = 8 * math.prod(cache.tokenizer.space)

    def watched(
        self: Cache, some: torch.Tensor, start: int, length: int, device: torch.device
    ) -> torch.Tensor:
        taken.append(len(some) * length * frame)
        return batch(self, some, start, length, device)

    monkeypatch.setattr(Cache, "batch", watched)

    def found() -> tuple[float, torch.Tensor]:
        taken.clear()
        return (
            base_error(operator.heads[name], cache, context),
            squared_errors(operator, cache, rows, context),
        )

    error, squares = found()
    together, bound = len(taken), 2 * frame * cache.num_frames + frame - 1  # small fields go together
    monkeypatch.setattr("ups.data.cache.DECODE_BYTES", bound)
    error_of_parts, squares_of_parts = found()
    assert max(taken) <= bound and together <= 3 < len(taken) and squares_of_parts.shape == squares.shape
    assert error_of_parts == pytest.approx(error, rel=1e-5)
    torch.testing.assert_close(squares_of_parts, squares, rtol=1e-4, atol=1e-9)
    monkeypatch.setattr("ups.data.cache.DECODE_BYTES", 1)  # one trajectory is more: alone
    assert [len(some) for some in cache.row_blocks(rows, cache.num_frames, 3)] == [1] * 7


class Broken(Persistence):
    """A base that goes to NaN or infinity in its second step."""

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def forward(self, u: torch.Tensor, parameters: ParameterBatch) -> torch.Tensor:
        return torch.where(u[:, -1] == 123.0, self.value, 123.0)


def offer(monkeypatch: pytest.MonkeyPatch, *bases: tuple[str, torch.nn.Module]) -> None:
    """Let `fitted_candidates` yield these bases in this order."""

    def fake(cache, base_steps, seed, device, most_work):
        for name, base in bases:
            head = base_selection.unfitted_head(cache, "persistence", base_settings(cache), device)
            head.base = base
            yield name, head

    monkeypatch.setattr(base_selection, "fitted_candidates", fake)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_base_that_blows_up_has_an_infinite_error_and_is_never_selected(config, monkeypatch, value):
    cache = open_cache(config, "advection1d")
    offer(monkeypatch, ("broken", Broken(value)), ("calm", Persistence()), ("broken too", Broken(value)))
    head, decisions = select_base(cache, *numbers(config, "advection1d"), 0, CPU)
    scores = decisions[0].scores
    assert isinstance(head.base, Persistence)
    assert scores["broken"] == scores["broken too"] == math.inf > scores["calm"]
    recorded = base_scores(base_selection.fit_base(cache, *numbers(config, "advection1d"), 0, CPU)[0])
    assert recorded["broken"] is None and recorded["calm"] == scores["calm"]
    json.dumps(recorded, allow_nan=False)


def test_a_task_without_a_finite_base_is_refused(config, monkeypatch):
    offer(monkeypatch, ("first", Broken(math.nan)), ("second", Broken(math.inf)))
    with pytest.raises(
        ValueError, match=r"no base of burgers1d survives .*\(tried: first, second\); expected one that stays"
    ):
        select_base(open_cache(config, "burgers1d"), *numbers(config, "burgers1d"), 0, CPU)


# ---------------------------------------------------------------- what selection may cost


class Costly(Persistence):
    """A base whose fit takes 100 units of work, and yields a candidate before and after."""

    is_costly, units = True, 100

    @classmethod
    def fit(cls, samples: Samples, settings: dict) -> Fit:
        yield f"begun {cls.units}", settings, cls()
        for _ in range(cls.units):
            samples.spend(1.0)
        yield f"ended {cls.units}", settings, cls()


class LessCostly(Costly):
    units = 10


@pytest.mark.parametrize(
    ("most", "names"),
    [
        (10.0, ["begun 10", "begun 100"]),
        (60.0, ["begun 10", "ended 10", "begun 100"]),
        (110.0, ["begun 10", "ended 10", "begun 100", "ended 100"]),
    ],
)
def test_costly_bases_are_fitted_last_and_what_one_leaves_is_for_the_next(
    config, monkeypatch, capsys, most, names
):
    cache, unfitted = open_cache(config, "advection1d"), base_selection.unfitted_head
    kinds = {"less": LessCostly, "persistence": Persistence, "costly": Costly}
    monkeypatch.setattr(cache, "settings", replace(cache.settings, base=[*kinds]))
    monkeypatch.setattr(base_selection, "base_class", kinds.__getitem__)
    monkeypatch.setattr(
        base_selection, "unfitted_head", lambda cache, _, *more: unfitted(cache, "persistence", *more)
    )
    assert [name for name, _ in fitted_candidates(cache, 1, 0, CPU, most)] == ["persistence", *names]
    reasons = capsys.readouterr().out.count("a candidate is left out, as its fit would take too much")
    assert reasons == 4 - len(names)


def test_bases_may_take_a_quarter_of_the_training_whatever_the_machine(config):
    """At twice the steps twice the work; with few of them enough for a base."""
    cache, settings = open_cache(config, "diff_react2d"), config.operator
    assert base_selection.most_work_of(cache, settings, 1) == math.inf  # a family, whose bases are known
    own = SimpleNamespace(task=SimpleNamespace(user_facts={}), tokenizer=cache.tokenizer)
    most = {
        steps: base_selection.most_work_of(
            own, replace(settings, train=replace(settings.train, steps=steps)), 1
        )
        for steps in (2, 20_000, 40_000)
    }
    assert most[2] == base_selection.LEAST_WORK < most[20_000] == pytest.approx(most[40_000] / 2)


# ---------------------------------------------------------------- what the fit may see


class Watched(Cache):
    """A cache that notes which rows and frames were read."""

    def batch(self, rows, starts, length, device="cpu"):
        self.seen.append((torch.as_tensor(rows), torch.as_tensor(starts), length))
        return super().batch(rows, starts, length, device)


@pytest.mark.parametrize("task", ["burgers1d", "diff_react2d", "darcy2d"])
def test_bases_are_fitted_on_training_trajectories_from_train_from_on(config, task):
    cache = open_cache(config, task)
    cache.__class__, cache.seen = Watched, []
    heads = [head for _, head in fitted_candidates(cache, 3, 0, CPU)]
    residual_scale(heads[-1], cache, 0)
    rows = torch.cat([rows for rows, _, _ in cache.seen])
    assert set(rows.tolist()) <= set(cache.split["train"].tolist()) and len(set(rows.tolist())) >= 10
    assert all((starts >= config.task[task].train_from).all() for _, starts, _ in cache.seen)
    last = max(int(starts.max()) + length for _, starts, length in cache.seen)
    assert last == cache.num_frames  # and the last frame is among them


def test_a_fit_depends_on_the_seed_alone(config):
    found = []
    for seed, draws in ((0, 0), (0, 7), (1, 0)):
        torch.manual_seed(99)
        torch.randn(draws)
        head, _ = select_base(open_cache(config, "darcy2d"), 5, config.context("darcy2d"), seed, CPU)
        found.append(torch.cat([value.flatten() for value in head.base.state_dict().values()]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_the_scale_is_the_residual_of_the_base_per_parameter_value(config, facts):
    cache, name = open_cache(config, "advection1d"), "advection1d"
    head = loaded(config, facts, name)
    assert head.scale.shape == (2,) and (head.scale < 1e-2).all()
    head.base = Persistence()
    measured = residual_scale(head, cache, 0)
    for value in range(2):  # against all training windows: the scale is measured on a sample of them
        rows = cache.split["train"]
        z = cache.batch(rows[cache.parameter_index[rows] == value], 0, cache.num_frames)
        assert float(measured[value]) == pytest.approx(float(z.diff(dim=1).square().mean().sqrt()), rel=0.2)
    assert 1.5 < measured[1] / measured[0] < 4  # the wave moves 2.5 times as far in a frame
    cache.is_sampled = True  # as if every trajectory had its own speed: then it must not jump between two
    mean = measured.square().mean().sqrt()
    assert torch.equal(residual_scale(head, cache, 0), mean.expand(2))


def test_validation_rows_are_stratified_by_parameter_value(config):
    cache = open_cache(config, "advection1d")
    rows = cache.rows_by_parameter("train", 6)
    assert cache.parameter_index[rows].bincount().tolist() == [3, 3] and len(set(rows.tolist())) == 6
    assert set(rows.tolist()) <= set(cache.split["train"].tolist())
    every = cache.rows_by_parameter("val", 1000)
    assert sorted(every.tolist()) == sorted(cache.split["val"].tolist())


# ---------------------------------------------------------------- files


def copied(config: Config, root: Path) -> Config:
    """The configuration for a run under `root`, in which the bases of `config` lie."""
    shutil.copytree(config.run_dir / "operator" / "bases", root / config.run.name / "operator" / "bases")
    return replace(config, run=replace(config.run, root=str(root)))


def test_bases_are_fitted_once_and_found_again(config, facts, monkeypatch):
    directory = config.run_dir / "operator" / "bases"
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()}
    monkeypatch.setattr(base_selection, "select_base", lambda *_: pytest.fail("fitted again"))
    assert {name: fact for name, (fact, _) in fitted(config).items()} == facts
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()} == before
    # nothing half-written
    assert sorted(path.suffix for path in before) == sorted([".json", ".safetensors"] * 4)


def test_a_fit_that_was_cut_short_is_made_again_and_is_the_same(config, facts, tmp_path):
    again = copied(config, tmp_path)
    folder = again.run_dir / "operator" / "bases"
    (folder / "advection1d.json").unlink()
    (folder / "advection1d.safetensors").write_bytes(b"torn")
    (folder / ".advection1d.safetensors.tmp").write_bytes(b"torn")
    fact, weights = fitted(again, "advection1d")["advection1d"]
    assert base_scores(fact) == base_scores(facts["advection1d"])
    first = load_file(config.run_dir / "operator" / "bases" / "advection1d.safetensors")
    assert first.keys() == weights.keys() and all(torch.equal(first[key], weights[key]) for key in first)


def test_bases_of_another_configuration_are_refused(config, facts, tmp_path):
    again = copied(config, tmp_path)
    changes = {
        "seed": replace(again, run=replace(again.run, seed=1)),
        "steps": replace(again, operator=replace(again.operator, base_steps=21)),
    }
    for changed in changes.values():
        with pytest.raises(
            FileExistsError,
            match="advection1d.json was made with another configuration .*; expected the same",
        ):
            find_fit(stage_folder(changed, "operator"), "bases/advection1d")
    assert find_fit(stage_folder(again, "operator"), "bases/advection1d")[0] == facts["advection1d"]


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_one_flipped_bit_of_what_was_fitted_once_is_refused(config, facts, tmp_path, suffix):
    again = copied(config, tmp_path)
    path = again.run_dir / "operator" / "bases" / f"burgers1d.{suffix}"
    content = bytearray(path.read_bytes())
    place = len(content) - 3 if suffix == "safetensors" else re.search(rb"\d\.(?=\d)", content).end()
    content[place] ^= 1
    path.write_bytes(content)
    text = rf"burgers1d.{suffix} (is .*; expected .* as .*json says|was altered).* Delete .*bases"
    with pytest.raises(DamagedError, match=text):
        fitted(again)


@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape"])
def test_weights_that_do_not_fit_the_head_are_refused(config, facts, damage):
    state = load_file(config.run_dir / "operator" / "bases" / "burgers1d.safetensors")
    if damage == "missing":
        del state["base.stencil"]
    elif damage == "unexpected":
        state["base.other"] = torch.zeros(1)
    else:
        state["base.stencil"] = torch.zeros(1, 1, 7)
    head = TaskHead(HeadFacts.read(facts["burgers1d"]["description"]), width=1)
    name = "base.other" if damage == "unexpected" else "base.stencil"
    with pytest.raises(
        ValueError, match=rf"base of burgers1d does not fit the model \({name}\); expected the base of this"
    ):
        load_base(head, state)


def test_a_steady_task_has_one_frame_whatever_the_configuration_says(config):
    task = dict(config.task)
    task["darcy2d"] = replace(task["darcy2d"], history=5)
    description = head_facts(open_cache(replace(config, task=task), "darcy2d"), "elliptic", {})
    assert description.history == 1
    json.dumps(description.described())


def test_the_bounds_are_those_of_the_training_trajectories_widened_the_more_the_fewer_these_are(config):
    cache = open_cache(config, "diff_react2d")
    head, _ = select_base(cache, 20, config.context("diff_react2d"), 0, CPU)
    w = head.codec.decode(cache.batch(cache.split["train"], 0, cache.num_frames))
    margin = 8 / len(cache.split["train"])
    assert 0.5 < margin < 1
    for channel in range(2):
        low, high = float(w[:, :, channel].min()), float(w[:, :, channel].max())
        assert float(head.low[channel]) == pytest.approx(low - margin * (high - low), abs=1e-5)
        assert float(head.high[channel]) == pytest.approx(high + margin * (high - low), abs=1e-5)
    for num, expected in ((1, 8.0), (4, 2.0), (16, 0.5), (1000, 0.5)):
        assert [float(end) for end in widened(torch.tensor(0.0), torch.tensor(1.0), num)] == [
            -expected,
            1 + expected,
        ]
    low, high = widened(torch.tensor(0.0), torch.tensor(1.0), 16)
    assert (float(low.lerp(high, MARGIN)), float(high.lerp(low, MARGIN))) == (0.0, 1.0)


@pytest.mark.parametrize("name", ["darcy2d", "diff_react2d"])
def test_a_steady_answer_is_not_bounded_by_those_of_training(config, monkeypatch, name):
    """Small coefficients have solutions that no other has; a rollout's bounds, which diff_react2d has, would
    cut them."""
    cache = open_cache(config, name)
    head, _ = select_base(cache, 20, config.context(name), 0, CPU)
    beyond = torch.full((2, head.codec.num_channels, *head.codec.space), 50.0)
    monkeypatch.setattr(head.base, "forward", lambda u, parameters: beyond)
    u = beyond.new_zeros(2, head.history, head.input_codec.num_channels, *head.input_codec.space)
    base = head.base_frames(u, head.parameter_batch(cache.parameters[:2]), 1)
    for found in (base, head.constrained(beyond[:, None], u[:, -1])):
        assert bool(found.amin() > 49) == head.task.is_steady


def test_a_propagator_with_the_values_at_the_walls_solves_diffusion_between_them(tmp_path, monkeypatch):
    """Diffusion-sorption holds u = 1 at one wall and 0 at the other. Sines of the field as it is cannot say
    so."""
    found = {}
    for walls in (get_task("diff_sorp1d").walls, ()):
        monkeypatch.setitem(TASKS, "diff_sorp1d", replace(TASKS["diff_sorp1d"], walls=walls))
        config = make_caches(
            tmp_path,
            "data.tasks=[diff_sorp1d]",
            "task.diff_sorp1d.num_trajectories=24",
            "task.diff_sorp1d.resolution=32",
            "task.diff_sorp1d.num_frames=21",
            "task.diff_sorp1d.patch=4",
            "task.diff_sorp1d.history=1",
        )
        head, decisions = select_base(open_cache(config, "diff_sorp1d"), 20, 10, 0, CPU)
        scores = decisions[0].scores
        found[bool(walls)] = min(error for name, error in scores.items() if name.startswith("propagator"))
        if walls:
            ends = head.codec.denormalise(head.base.line)[0]
            assert ends[[0, -1]].tolist() == pytest.approx([1 - 0.5 / 32, 0.5 / 32], abs=1e-5)
    assert found[True] < 0.2 * found[False]
