"""The stages after the operator, end to end on two tiny tasks: residuals, ensembles, processes, resumption
and refusals.

One chain of runs on one process serves all tests: an operator, its corrector, the student, a network trained
by scores and the steady prior of `burgers1d_hidden` (1D, 32 cells) and `darcy2d_grf` (2D, 16 x 16 cells)."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import loop_stage
import pytest
import torch
from cases import cases
from loop_stage import Left, same_end
from safetensors.torch import load_file
from torch import Tensor

import prepare_cache
import prepare_data
import ups.evaluation.ensemble
import ups.generative.sampling
import ups.training.run
from ups.common import place
from ups.common.files import file_hash, value_hash
from ups.common.place import ROOT
from ups.config.load import load_config, to_dict
from ups.config.schema import Config
from ups.data.cache import Cache, open_cache
from ups.evaluation.ensemble import Ensembles, costs_per_state, load_samplers, one_step, rollouts
from ups.evaluation.steady import case_bank, posterior_draws
from ups.evaluation.truth import open_truth
from ups.generative import prior_selection
from ups.generative.conditions import SMALLEST, STD_FLOOR
from ups.generative.corrector import METHODS, load_corrector
from ups.generative.diffusion import sample
from ups.generative.observation import observe_all, observe_case, observe_cells, row_generators
from ups.generative.prior_selection import select_method
from ups.generative.residuals import (
    LARGEST,
    WITHOUT_PAST,
    SteadyResiduals,
    TransientResiduals,
    augmented,
    residual_schedule,
    validation_batches,
)
from ups.generative.sampling import (
    SAMPLERS,
    Sampler,
    Starts,
    load_sampler,
    predict_with_noise,
    sample_rollout,
    sample_solutions,
)
from ups.models.head_setup import base_settings, head_facts
from ups.models.operator import Operator, load_operator
from ups.models.rollout import member_noise, rollout
from ups.models.warm import is_trunk
from ups.select import Decision
from ups.training.artifact import finished_stage
from ups_discovery.seeds import generator

SMOKE = ROOT / "configs" / "smoke.yaml"
CPU = torch.device("cpu")
HIDDEN, STEADY = "burgers1d_hidden", "darcy2d_grf"
TASKS = (
    f"data.tasks=[{HIDDEN},{STEADY}] task.{HIDDEN}.resolution=32 task.{HIDDEN}.num_frames=10 "
    f"task.{HIDDEN}.t_end=0.45 task.{HIDDEN}.degree=1 task.{STEADY}.resolution=16 "
    "evaluate.context_frames=4"
).split()
OPERATOR = (
    "operator.model.width=16 operator.model.depth=1 operator.model.modes=4 operator.base_steps=5 "
    "operator.train.steps=3 operator.train.precision='no' operator.train.validate_trajectories=1"
).split()
PARENTS = {name: [*stage.parents] for name, stage in place.STAGES.items() if name != "operator"}
STAGES = tuple(PARENTS)
TRAIN = [
    f"{section}.{key}"
    for section in STAGES
    for key in (
        "train.steps=20 train.log_every=1 train.validate_every=10 train.save_every=5 "
        "train.validate_trajectories=2 train.precision='no' train.timeout_s=20"
    ).split()
]
MODEL = [
    f"{section}.{key}"
    for section in ("diffusion", "steady")
    for key in ("model.width=16", "model.depth=1", "model.modes=4", "scale_steps=10", "sampler_steps=3")
]
SETTINGS = [
    *TASKS,
    *OPERATOR,
    *TRAIN,
    *MODEL,
    "diffusion.min_residual_ratio=0.01",
    "diffusion.max_whitened_std=50",
    "consistency.tune_fraction=0.3",
    "consistency.members=2",
    "scoring.members=2",
    "evaluate.stages=[operator,diffusion,consistency,scoring,steady]",
]
TUNED = 14  # first step of the tuning phase
EXACT = "donot_use_mm_for_euclid_dist"  # of torch.cdist, which would lose small distances


# ---- runs


def _script(record: str, module: str, arguments: list[str], kill_at: int, nan_from: int) -> None:
    """Call a script's main, which is killed before a step, or gets NaN residuals from a step on.

    The rows that it reads of every cache, and the splits of its residuals, go to the file `record`."""
    update, batch, inputs = loop_stage.dying_at(kill_at), Cache.batch, Cache.inputs
    step, read = [0], {}

    def noted(run: ups.training.run.Run, *rest, **options):
        step[0] = run.step
        update(run, *rest, **options)

    def with_nan(batch):
        def call(residuals, split: str, *rest, **options):
            read.setdefault("splits", set()).add(split)
            found = batch(residuals, split, *rest, **options)
            return found._replace(r=found.r * math.nan) if 0 <= nan_from <= step[0] else found

        return call

    def recorded(function):
        def call(cache: Cache, rows: Tensor, *rest, **options):
            read.setdefault(cache.task.name, set()).update(torch.as_tensor(rows).tolist())
            return function(cache, rows, *rest, **options)

        return call

    ups.training.run.Run.update = noted
    for kind in (TransientResiduals, SteadyResiduals):
        kind.batch = with_nan(kind.batch)
    Cache.batch, Cache.inputs = recorded(batch), recorded(inputs)
    loop_stage.run_script(module, arguments)
    Path(record).write_text(json.dumps({name: sorted(rows) for name, rows in read.items()}))


def launch(
    root: Path, module: str, *arguments: str, world: int = 1, kill_at: int = -1, nan_from: int = -1
) -> tuple[list, list]:
    """A script on `world` processes: (exit codes, outputs)."""
    arguments = (str(root / "rows.json"), module, list(arguments), kill_at, nan_from)
    return loop_stage.run_ranks(root, _script, lambda _rank: arguments, world)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Data files and caches."""
    root = tmp_path_factory.mktemp("stages")
    arguments = ["--config", str(SMOKE), *overrides_of(root, root)]
    assert prepare_data.main([*arguments, "--workers", "1"]) == 0 and prepare_cache.main(arguments) == 0
    return root


def overrides_of(data: Path, root: Path, *more: str) -> list[str]:
    return [f"data.root={data}/data", f"cache.root={data}/cache", f"run.root={root}", *SETTINGS, *more]


def start(stage: str, data: Path, root: Path, *more: str, **options) -> tuple[list[int], list[str]]:
    """A stage under `root`."""
    words = ("--config", str(SMOKE), *overrides_of(data, root, *more))
    return launch(root, f"train_{stage}", *words, **options)


@pytest.fixture(scope="module")
def chain(data) -> Path:
    """Folder of an undisturbed run of every stage on one process; read_STAGE.json: the rows that it read."""
    for stage in ("operator", *STAGES):
        codes, logs = start(stage, data, data)
        assert codes == [0], logs[0]
        (data / "rows.json").rename(data / f"read_{stage}.json")
    return data


def with_parents(chain: Path, root: Path, stage: str) -> Path:
    """`root`, given what `stage` is made from."""
    for parent in PARENTS[stage]:
        shutil.copytree(chain / "smoke" / parent, root / "smoke" / parent)
    return root


def left_by(stage: str, root: Path) -> Left:
    return Left(root / "smoke" / stage)


def edit(path: Path, change) -> dict:
    """Rewrite a done.json after change(record), as if the stage had ended so; the record."""
    done = json.loads(path.read_text())
    change(done)
    done["fingerprint"] = value_hash(
        {name: done[name] for name in ("model_sha256", "config_sha256", "config_hash", "parents")}
    )
    done["seal"] = value_hash({name: value for name, value in done.items() if name != "seal"})
    path.write_text(json.dumps(done))
    return done


@pytest.fixture
def run_here(main_here):
    """A stage in this process: (exit code, output)."""

    def run(stage: str, data: Path, root: Path, *more: str) -> tuple[int, str]:
        return main_here(f"train_{stage}", "--config", str(SMOKE), *overrides_of(data, root, *more))

    return run


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_finishes_and_a_second_start_says_nothing_to_do(chain, run_here, stage):
    left = left_by(stage, chain)
    directory, losses, done = left.directory, left.losses(), left.json("done.json")
    assert done["step"] == len(losses) == 20 and losses.isfinite().all() and done["num_skipped"] == 0
    caches = {HIDDEN} if stage != "steady" else {STEADY}
    assert set(done["parents"]) == {*PARENTS[stage], *caches}
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    code, output = run_here(stage, chain, chain)
    assert code == 0 and f"smoke/{stage} is finished and up to date: nothing to do" in output
    assert before == {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_give_the_losses_of_one(chain, tmp_path, stage):
    codes, logs = start(
        stage, chain, with_parents(chain, tmp_path, stage), f"{stage}.train.micro_batch=2", world=2
    )
    assert codes == [0, 0], logs
    assert "8 = 2 processes x 2 passes of at most 2" in logs[0]  # on one process: 2 of 4
    one, two = (left_by(stage, root) for root in (chain, tmp_path))
    torch.testing.assert_close(two.losses(), one.losses(), rtol=1e-5, atol=0.0)
    key = f"validation/{HIDDEN}/pair" if stage == "consistency" else "validation/score"
    torch.testing.assert_close(two.logged(key), one.logged(key), rtol=1e-4, atol=0.0)
    assert len(one.logged(key)) == 2 + (stage == "consistency")


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["consistency", "steady"])
def test_a_killed_stage_resumes_to_the_same_weights_bit_by_bit(chain, tmp_path, stage):
    codes, logs = start(stage, chain, with_parents(chain, tmp_path, stage), kill_at=17)
    assert codes == [-signal.SIGKILL] and not (tmp_path / "smoke" / stage / "done.json").exists(), logs
    codes, logs = start(stage, chain, tmp_path)
    assert codes == [0] and "resumed at step 15" in logs[0], logs
    same_end(left_by(stage, chain), left_by(stage, tmp_path))


@pytest.mark.parametrize(("stage", "task"), [("consistency", HIDDEN), ("steady", STEADY)])
def test_a_stage_starts_from_another_run_with_its_trunk_frozen(chain, tmp_path, stage, task):
    root = with_parents(chain, tmp_path, stage)
    frozen = [f"{stage}.init={chain / 'smoke'}", f"{stage}.optim.trunk_factor=0", f"{stage}.train.steps=2"]
    codes, logs = start(stage, chain, root, *frozen)
    assert codes == [0] and f"heads: {task} as it was" in logs[0], logs
    before, after = (left_by(stage, folder).weights() for folder in (chain, root))
    same = {name for name in after if torch.equal(after[name], before[name])}
    assert {name for name in after if is_trunk(name)} <= same
    assert not {name for name in after if ".out." in name or ".into." in name} & same


def test_no_stage_reads_test_rows_and_a_corrector_only_what_the_operator_never_saw(chain, config):
    for name in (HIDDEN, STEADY):
        split = {key: set(rows.tolist()) for key, rows in open_cache(config, name).split.items()}
        read = {
            stage: set(json.loads((chain / f"read_{stage}.json").read_text()).get(name, []))
            for stage in ("operator", *STAGES)
        }
        assert read["operator"] <= split["train"] | split["val"] and read["operator"] & split["train"]
        for stage in ("steady",) if name == STEADY else ("diffusion", "consistency", "scoring"):
            # whose coefficients the linear guess is fitted to
            fields = split["train"] if stage == "steady" else set()
            assert read[stage] <= split["reserved"] | split["val"] | fields, stage
            assert read[stage] & split["reserved"], stage
    for stage in STAGES:
        assert json.loads((chain / f"read_{stage}.json").read_text())["splits"] == ["reserved", "val"]


def test_the_scale_is_fitted_once_and_frozen_through_corrector_and_student(chain):
    scales = load_file(chain / "smoke" / "diffusion" / "scales" / f"{HIDDEN}.safetensors")
    weights = {stage: left_by(stage, chain).weights() for stage in ("diffusion", "consistency", "scoring")}
    assert any(name.startswith("gaussian_out") and value.any() for name, value in scales.items())
    for name, value in scales.items():
        assert all(torch.equal(found[f"heads.{HIDDEN}.{name}"], value) for found in weights.values()), name
    trained = [
        name
        for name in weights["diffusion"]
        if name.removeprefix(f"heads.{HIDDEN}.") not in scales and ".limits." not in name
    ]
    assert trained and not any("gaussian" in name for name in trained)
    for stage in ("consistency", "scoring"):
        assert all(not torch.equal(weights[stage][name], weights["diffusion"][name]) for name in trained), (
            stage
        )


def test_the_tuned_student_is_kept_only_if_validation_improves(chain):
    left = left_by("consistency", chain)
    done = left.json("done.json")
    lines = {line["step"]: line for line in left.lines() if f"validation/{HIDDEN}/pair" in line}
    assert sorted(lines) == [10, TUNED, 20]
    assert done["results"]["is_tuned"] == ("validation/tuning_ratio" in lines[20])
    assert done["best_score"] == lines[20].get("validation/tuning_ratio")
    kept = lines[20 if done["results"]["is_tuned"] else TUNED]
    for key, value in done["results"]["validation"][HIDDEN].items():
        assert value == pytest.approx(kept[f"validation/{HIDDEN}/{key}"], rel=1e-5), key
    tuned = [line for line in left.lines() if f"train/{HIDDEN}/score" in line]
    assert [line["step"] for line in tuned] == list(range(TUNED + 1, 21))


@pytest.mark.parametrize("stage", STAGES)
def test_a_dry_run_states_what_the_stage_trains_and_writes_nothing(chain, tmp_path, run_here, stage):
    code, output = run_here(stage, chain, tmp_path, "--dry-run")
    assert code == 0 and not list(tmp_path.iterdir())
    first, *_ = parents = PARENTS[stage]
    assert (
        f"0 of {len(parents)} parents are there; {tmp_path}/smoke/{first}/done.json is missing: make {first}"
        in output
    )
    assert f"on {STEADY if stage == 'steady' else HIDDEN}\n" in output and "20 steps of " in output


# ---- residuals


@pytest.fixture(scope="module")
def config(data) -> Config:
    return load_config(SMOKE, overrides_of(data, data))


@pytest.fixture(scope="module")
def hidden(chain, config) -> TransientResiduals:
    operator, cache = load_operator(chain / "smoke" / "operator"), open_cache(config, HIDDEN)
    return TransientResiduals(operator, cache, config.diffusion.perturbed)


@pytest.fixture(scope="module")
def steady(chain, config) -> SteadyResiduals:
    return SteadyResiduals(load_operator(chain / "smoke" / "operator"), open_cache(config, STEADY))


@torch.no_grad()
def test_residual_and_prediction_add_up_to_the_truth(hidden):
    places, starts = torch.tensor([0, 3, 5]), torch.tensor([1, 0, 7])
    r, tokens, facts, _ = hidden.batch("reserved", places, starts, None)
    z = hidden.cache.batch(hidden.cache.split["reserved"][places], starts, 2)
    z_pred = hidden.operator(z[:, :1], HIDDEN, torch.zeros(3, 0))
    torch.testing.assert_close(r + z_pred[:, 0], z[:, 1], rtol=0, atol=1e-6)
    dim = hidden.head.codec.dim
    assert torch.equal(tokens[..., :dim], z[:, 0]) and r.abs().max() > 1e-3
    torch.testing.assert_close(
        tokens[..., :dim] + tokens[..., 2 * dim : 3 * dim] + r, z[:, 1], rtol=0, atol=1e-6
    )
    before = hidden.cache.batch(hidden.cache.split["reserved"][places], torch.tensor([0, 0, 6]), 1)[:, 0]
    assert torch.equal(tokens[..., dim : 2 * dim], z[:, 0] - before) and not tokens[1, :, dim : 2 * dim].any()
    assert facts.tolist() == [[pytest.approx(math.log(hidden.cache.dt)), 0.0]] * 3  # the state is exact
    left = z[:, 0] - hidden.operator(before[:, None], HIDDEN, torch.zeros(3, 0))[:, 0]
    torch.testing.assert_close(tokens[[0, 2], :, 3 * dim : 4 * dim], left[[0, 2]], rtol=0, atol=1e-5)
    assert left[[0, 2]].abs().max() > 1e-3 and not tokens[1, :, 3 * dim : 4 * dim].any()
    # augmented alike: truth, history, prediction
    shifted, tokens, *_ = hidden.batch("reserved", places, starts, generator(1))
    [moved] = augmented(hidden.head.task, [(z, hidden.head.codec)], generator(1))
    torch.testing.assert_close(
        tokens[..., :dim] + tokens[..., 2 * dim : 3 * dim] + shifted, moved[:, 1], rtol=0, atol=1e-5
    )
    assert (moved - z).abs().max() > 0.1


@torch.no_grad()
def test_a_rollout_passes_the_last_residual_to_the_next_call(hidden, monkeypatch):
    """As it was drawn, without another call of the operator; the fake: what is left is always made anew, or
    forgotten."""
    z, known, calls, left = hidden.cache.batch(torch.arange(3), 0, 2), torch.zeros(3, 0), [], []
    dim, given = hidden.head.codec.dim, hidden.operator.predict
    monkeypatch.setattr(hidden.operator, "predict", lambda *args: calls.append(1) or given(*args))

    def drawn(
        tokens: torch.Tensor, facts: torch.Tensor, noise: torch.Tensor, second: torch.Tensor
    ) -> torch.Tensor:
        left.append(tokens[..., 3 * dim : 4 * dim])
        return 0.01 * noise

    codec = hidden.head.codec
    w = [codec.decode(torch.randn(6, *z.shape[2:], generator=generator(lead))) for lead in range(3)]
    noises = [codec.encode(one - one.mean(-1, keepdim=True)) for one in w]  # a mean would not be kept
    starts = Starts(z.repeat_interleave(2, 0), known.repeat_interleave(2, 0))
    members = sample_rollout(hidden, drawn, starts, 3, lambda lead: (noises[lead], noises[lead]))
    assert len(calls) == 1
    begun = (z[:, 1:] - given(z[:, :1], HIDDEN, hidden.head.parameter_batch(known))[0])[:, 0]
    torch.testing.assert_close(left[0], begun.repeat_interleave(2, 0), rtol=0, atol=1e-5)
    for lead in (1, 2):
        torch.testing.assert_close(left[lead], 0.01 * noises[lead - 1], rtol=0, atol=1e-5)
    anew = hidden.predict(members[:, :2], hidden.head.parameter_batch(known.repeat_interleave(2, 0)))[1]
    torch.testing.assert_close(left[2], anew[..., 3 * dim : 4 * dim], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_network_of_other_conditions_is_refused_with_what_to_do(chain, hidden):
    """A corrector from before the last residual was a condition."""
    head = load_corrector(chain / "smoke" / "diffusion").heads[HIDDEN]
    _, tokens, facts, _ = hidden.batch("val", torch.arange(2), torch.zeros(2, dtype=torch.long), None)
    with pytest.raises(ValueError, match=r"got \d+ conditions .* expected \d+: .*Train it again"):
        head.condition(tokens[..., 1:], facts)


@torch.no_grad()
def test_residuals_keep_frames_tokens_and_channels_in_order(config):
    """An untrained operator that is shown two frames."""
    settings = replace(config.task[HIDDEN], history=2, train_from=1)
    config = replace(config, task={**config.task, HIDDEN: settings})
    cache = open_cache(config, HIDDEN)
    operator = Operator(
        {
            "model": to_dict(config.operator.model),
            "precision": "no",
            "tasks": [head_facts(cache, "persistence", base_settings(cache)).described()],
        }
    )
    operator.heads[HIDDEN].codec.load_state_dict(cache.tokenizer.state_dict())
    operator.heads[HIDDEN].out.weight.normal_(std=0.1, generator=generator(0))
    residuals = TransientResiduals(operator, cache)
    assert residuals.windows("reserved") == (len(cache.split["reserved"]), 10 - 1 - 2)
    assert residuals.description == {
        "name": HIDDEN,
        "dim": 4,
        "tokens": [8],
        "fields": [1, 32],
        "num_conditions": 5 * 4 + operator.width,
        "num_features": operator.width,
    }
    places, starts = torch.tensor([4, 2]), torch.tensor([0, 6])
    r, tokens, *_ = residuals.batch("reserved", places, starts, None)
    z = cache.batch(cache.split["reserved"][places], starts + 1, 3)  # starts count from train_from
    z_pred = operator(z[:, :2], HIDDEN, torch.zeros(2, 0))
    torch.testing.assert_close(r, (z[:, 2:] - z_pred)[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(residuals.prediction(tokens), z_pred[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        tokens[..., 8:12], z[:, 0] - cache.batch(cache.split["reserved"][places], starts, 1)[:, 0]
    )


@torch.no_grad()
def test_residual_and_guess_add_up_to_the_logarithm_of_the_solution_of_a_steady_task(steady):
    places = torch.arange(8)
    r, tokens, facts, _ = steady.batch("reserved", places, torch.zeros(8), generator(2))
    z_in, z_ref, parameters = steady.fields("reserved", places)
    z_in, z_ref = augmented(
        steady.head.task, [(z_in, steady.head.input_codec), (z_ref, steady.head.codec)], generator(2)
    )
    u = steady.head.physical(z_ref[:, 0]).clamp_min(steady.posterior.floor)
    values, v_guess, spread, mask, guess = tokens.split(16, -1)
    torch.testing.assert_close(steady.solution(guess, r), u, rtol=1e-3, atol=0)
    torch.testing.assert_close(steady.head.codec.decode(guess + r), u.log(), rtol=0, atol=1e-3)
    assert ((mask == 0) | (mask == 1)).all() and not values[mask == 0].any() and facts.shape == (8, 3)
    torch.testing.assert_close(mask.flatten(1).mean(1), facts[:, 0])
    full = (facts[:, 0] == 1) & (facts[:, 1] == 0) & (facts[:, 2] == 0)
    assert full.any()
    assert torch.equal(v_guess[full], values[full])
    assert (spread[full] == math.log(STD_FLOOR)).all()
    assert (spread[~full] > math.log(STD_FLOOR)).any()
    # the operator, shown all that there is
    z_pred = steady.operator(z_in[full], STEADY, parameters[full])[:, 0]
    torch.testing.assert_close(guess[full], steady.logarithm(steady.head.physical(z_pred)), rtol=0, atol=1e-3)


@torch.no_grad()
def test_window_starts_are_weighted_by_half_with_the_size_of_their_residuals(hidden, steady):
    weights = hidden.start_weights()
    rows = hidden.cache.split["reserved"]
    z = hidden.cache.batch(rows, 0, 10)
    known = hidden.head.parameter_batch(hidden.cache.parameters[rows])
    rms = torch.stack(
        [(z[:, t + 1] - hidden.predict(z[:, t : t + 1], known)[0]).square().mean().sqrt() for t in range(9)]
    ).double()
    torch.testing.assert_close(weights, 0.5 / 9 + 0.5 * rms / rms.sum(), rtol=1e-5, atol=0)
    assert float(weights.sum()) == pytest.approx(1.0)
    assert weights[0] > 1.5 * weights[-1]
    assert steady.start_weights() is None
    starts = torch.cat(
        [residual_schedule({HIDDEN: hidden}, "reserved", 64, 0).batch(step).starts for step in range(40)]
    )
    expected = len(starts) * weights
    # chi-square, 8, p = 0.001
    assert ((starts.bincount(minlength=9) - expected).square() / expected).sum() < 26.1


@torch.no_grad()
@pytest.mark.parametrize("name", [HIDDEN, STEADY])
def test_batches_do_not_depend_on_their_split(hidden, steady, name):
    source = hidden if name == HIDDEN else steady
    places, starts = torch.tensor([5, 1, 7, 0, 2, 6]), torch.tensor([3, 0, 5, 1, 2, 4]) * (name == HIDDEN)

    def drawn(places, starts):
        found = source.batch("reserved", places, starts, generator(4), True, True)
        assert (found.start is not None) == (name == STEADY)
        return [*found[:3], *(found.start or ())]

    whole = drawn(places, starts)
    for cut in (1, 2, 4):
        parts = [drawn(*part) for part in zip(places.split(cut), starts.split(cut), strict=True)]
        for one, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            torch.testing.assert_close(torch.cat(pieces), one, rtol=1e-4, atol=1e-5)
    other = source.batch("reserved", places, starts, generator(5))
    assert (other[1] - whole[1]).abs().max() > 0.1


@torch.no_grad()
def test_training_states_have_errors_as_in_a_rollout(hidden):
    """The frames given are exact; the error is a residual of that frame, moved, or noise as large; the truth
    stays. Of some exact ones nothing before the history is shown, as nothing is where a forecast is given no
    more."""
    count, start = 400, 4
    z = hidden.cache.batch(hidden.cache.split["reserved"][:1], start - 1, 2).expand(count, -1, -1, -1)
    off, told = hidden.perturb(z, torch.full((count,), start), [generator(7, i) for i in range(count)])
    kept, none = TransientResiduals(hidden.operator, hidden.cache).perturb(
        z, torch.full((count,), start), [generator(7, i) for i in range(count)]
    )
    assert not none.any() and torch.equal(kept[:, 1], z[:, 1])  # diffusion.perturbed = 0
    error = off - z
    size = error.square().flatten(2).mean(2).sqrt()[:, 1]
    assert abs(float((size > 0).float().mean()) - hidden.perturbed) < 4 * 0.5 / count**0.5
    is_alone = (off[:, 0] == off[:, 1]).flatten(1).all(1)
    assert abs(float(is_alone.float().mean()) - WITHOUT_PAST) < 4 * 0.3 / count**0.5
    assert not size[is_alone].any()
    left = hidden.examples[start - 1]  # what a call leaves on frame 4, the last that is seen
    largest, smallest = (f(left.square().flatten(1).mean(1).sqrt().tolist()) for f in (max, min))
    seen = size[size > 0]
    assert torch.equal(told > 0, size > 0)
    assert 0.7 * smallest < (seen / told[size > 0]).min() <= (seen / told[size > 0]).max() < 1.3 * largest
    assert 0.7 * SMALLEST * smallest < seen.min() < 0.1 * seen.max() < 0.13 * LARGEST * largest
    rolled = torch.stack([left.roll(k, 1) for k in range(left.shape[1])]).flatten(0, 1).flatten(1)
    alike = (
        torch.nn.functional.normalize(error[size > 0, 1].flatten(1))
        @ torch.nn.functional.normalize(rolled).mT
    )
    share = float((alike.amax(1) > 0.999).float().mean())
    assert abs(share - 0.5) < 4 * 0.5 / len(seen) ** 0.5  # with structure; the rest is white
    given, told = hidden.perturb(
        z, torch.zeros(count, dtype=torch.long), [generator(7, i) for i in range(count)]
    )
    assert (
        torch.equal(given[~is_alone], z[~is_alone]) and torch.equal(given[:, 1], z[:, 1]) and not told.any()
    )
    first = (
        hidden.perturb(z, torch.ones(count, dtype=torch.long), [generator(7, i) for i in range(count)])[0] - z
    )
    assert not first[~is_alone, 0].any() and first[:, 1].any()
    places, starts, dim = torch.arange(8), torch.full((8,), start), hidden.head.codec.dim
    clean, off = (
        hidden.batch("reserved", places, starts, generator(3), is_perturbed) for is_perturbed in (False, True)
    )
    truth, same = (r + tokens[..., :dim] + tokens[..., 2 * dim : 3 * dim] for r, tokens, *_ in (clean, off))
    torch.testing.assert_close(same, truth, rtol=0, atol=1e-5)
    assert not torch.equal(off[1], clean[1])
    is_off = (off[1] != clean[1])[..., :dim].flatten(1).any(1)
    assert torch.equal(off[2][:, 1] > 0, is_off) and not clean[2][:, 1].any()  # its size is told
    assert off[2][is_off, 1].max() <= math.log1p(LARGEST / SMALLEST)


@torch.no_grad()
def test_a_hidden_parameter_is_in_no_input(hidden, config):
    cache = hidden.cache
    assert cache.parameters.shape == (cache.num_rows, 0) and cache.parameter_values.numel() == 0
    assert len(cache.parameter_index.unique()) == 2
    assert config.context(HIDDEN) == config.task[HIDDEN].history == 1
    assert config.data_dir(HIDDEN).name == "burgers1d"
    places = torch.tensor([0, 1])
    one = cache.split["reserved"][places]
    two = one + config.task[HIDDEN].num_trajectories  # the same initial states, the other parameter value
    assert (cache.parameter_index[one] != cache.parameter_index[two]).all()
    z_one, z_two = cache.batch(one, 0, 2), cache.batch(two, 0, 2)
    torch.testing.assert_close(z_one[:, 0], z_two[:, 0], rtol=0, atol=1e-6)
    assert (z_one[:, 1] - z_two[:, 1]).abs().max() > 0.01  # and yet the next state differs
    for a, b in zip(
        hidden.predict(z_one[:, :1], hidden.head.parameter_batch(cache.parameters[one])),
        hidden.predict(z_one[:, :1], hidden.head.parameter_batch(cache.parameters[two])),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_validation_residuals_are_fixed_and_of_the_validation_split(hidden):
    first, again = (validation_batches(hidden, 0, 3) for _ in range(2))
    assert all(
        torch.equal(a, b)
        for one, two in zip(first, again, strict=True)
        for a, b in zip(one[:3], two[:3], strict=True)
    )
    states = hidden.cache.batch(hidden.cache.split["val"], 0, hidden.cache.num_frames).flatten(0, 1)
    # of every state to be shown, whatever its shift
    spectra = torch.fft.rfft(hidden.head.codec.decode(states)[:, 0]).abs()
    for _, tokens, *_ in first:
        found = torch.fft.rfft(hidden.head.codec.decode(tokens[..., :4])[:, 0]).abs()
        assert (torch.cdist(found, spectra, compute_mode=EXACT).min(1).values < 1e-3).all()


# ---- ensembles


@pytest.fixture(scope="module")
def ensembles(hidden, config) -> Ensembles:
    samplers = load_samplers(config.run_dir, ("diffusion", "consistency", "scoring"), CPU)
    return Ensembles(hidden, open_truth(config, HIDDEN), samplers, config.run.seed)


@torch.no_grad()
def conditions_of(source: TransientResiduals, count: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, facts, noise, second) of test windows."""
    _, tokens, facts, _ = source.batch("test", torch.arange(count) % 4, torch.arange(count), None)
    return (
        tokens,
        facts,
        *(torch.randn(count, 8, 4, generator=generator(9, key)) for key in ("noise", "second")),
    )


@torch.no_grad()
def test_every_sampler_is_its_definition(ensembles, chain, config):
    names = "operator dressed dressed_conditional waves dressed_resampled corrector student_1 student_2"
    assert ensembles.names == [*names.split(), "scoring"]
    tokens, facts, noise, second = conditions_of(ensembles.residuals)
    draw = partial(ensembles.residual, tokens=tokens, facts=facts, noise=noise, second=second)
    networks = {
        stage: load_corrector(chain / "smoke" / stage) for stage in ("diffusion", "consistency", "scoring")
    }
    head = networks["diffusion"].heads[HIDDEN]
    assert not draw("operator").any()
    torch.testing.assert_close(draw("dressed"), head.marginal_mean + head.marginal_std * noise)
    rows = ensembles.residuals.cache.split["reserved"]
    z = ensembles.residuals.cache.batch(rows, 0, 10)
    known = ensembles.residuals.head.parameter_batch(torch.zeros(len(rows), 0))
    r = torch.cat([z[:, t + 1] - ensembles.residuals.predict(z[:, t : t + 1], known)[0] for t in range(9)])
    assert float(head.marginal_std.norm()) == pytest.approx(float(r.flatten(0, -2).std(0).norm()), rel=0.15)
    condition = networks["diffusion"].heads[HIDDEN].condition(tokens, facts)
    scale = head.r_std * condition.log_scale.exp()
    torch.testing.assert_close(draw("dressed_conditional"), head.r_mean + scale * (condition.mean + noise))
    assert head.waves.std.std() > 0.1
    gain = head.limits.gains[1, :, 1][:, ~head.limits.is_silent]
    assert (gain != 1).any()  # measured for the waves, too
    ends = {
        "waves": head.waves.sample_gaussian(noise),
        "corrector": sample(networks["diffusion"].velocity(condition), noise, config.diffusion.sampler_steps),
    }
    for stage, name in (("consistency", "student_1"), ("scoring", "scoring")):  # f = cos x - sin F at pi/2
        ends[name] = -networks[stage].velocity(condition)(noise, torch.full((5,), math.pi / 2))
    mid = networks["consistency"].description["mid_angle"]
    student = networks["consistency"].velocity(condition)
    assert mid == pytest.approx(math.pi / 3)  # on the teacher's path of three steps, the nearest to 1.1
    x = math.cos(mid) * ends["student_1"] + math.sin(mid) * second
    ends["student_2"] = math.cos(mid) * x - math.sin(mid) * student(x, torch.full((5,), mid))
    states = ensembles.residuals
    stages = {"student_1": "consistency", "student_2": "consistency", "scoring": "scoring"}

    def limited(name: str, end: torch.Tensor) -> torch.Tensor:
        limits = networks[stages.get(name, "diffusion")].heads[HIDDEN].limits
        r = head.r_mean + scale * (condition.mean + end)
        codec = states.head.codec
        w_pred, w = codec.decode(states.prediction(tokens)), codec.decode(r)
        return codec.encode(limits(w_pred, w, SAMPLERS[name][1], facts[:, -1] > 0))

    for name, end in ends.items():
        torch.testing.assert_close(draw(name), limited(name, end), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_resampled_residuals_are_whole_residuals_of_reserved_rows_each_equally_likely(
    ensembles, hidden, monkeypatch
):
    assert ensembles.bank.shape == (ups.evaluation.ensemble.BANK, 8, 4)
    rows = hidden.cache.split["reserved"]
    z = hidden.cache.batch(rows, 0, hidden.cache.num_frames)
    known = hidden.head.parameter_batch(hidden.cache.parameters[rows])
    r = torch.cat([z[:, t + 1] - hidden.predict(z[:, t : t + 1], known)[0] for t in range(9)])
    # of about the same size: the bank's states were shifted, with which the operator does not commute exactly
    assert float(ensembles.bank.square().mean().sqrt()) == pytest.approx(
        float(r.square().mean().sqrt()), rel=0.1
    )
    tokens, facts, *_ = conditions_of(hidden, 1)
    noise, count = torch.randn(8000, 8, 4, generator=generator(3)), len(ensembles.bank)
    drawn = ensembles.residual("dressed_resampled", tokens, facts, noise, noise)
    monkeypatch.setattr(ensembles, "bank", torch.arange(count))
    index = ensembles.residual("dressed_resampled", tokens, facts, noise, noise)
    monkeypatch.undo()
    assert torch.equal(drawn, ensembles.bank[index])
    tenths = (index * 10 // count).bincount(minlength=10).double()
    # chi-square, 9, p = 0.001
    assert ((tenths - 800).square() / 800).sum() < 27.9 and len(index.unique()) > 0.99 * count


@torch.no_grad()
def test_evaluations_are_counted_as_they_are_made(ensembles, config):
    tokens, facts, noise, second = conditions_of(ensembles.residuals)
    expected = dict.fromkeys(ups.evaluation.ensemble.CHEAP, 0) | {
        "scoring": 1,
        "student_1": 1,
        "student_2": 2,
        "corrector": 2 * config.diffusion.sampler_steps,
    }
    for name, count in expected.items():
        draw = partial(ensembles.residual, name, tokens, facts, noise, second)
        assert ensembles.count_calls(draw) == count, name
        costs = costs_per_state(ensembles, name, 2)
        assert costs["evaluations_per_state"] == count
        assert costs["operations_per_state"] > 0
    # which no hook of the first one sees
    copied, whitened = (copy.deepcopy(ensembles.samplers["corrector"]), Sampler.whitened)

    def teacher(sampler, *args, **options):
        return whitened(copied if sampler.evaluations == 1 else sampler, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        honest = costs_per_state(ensembles, "student_1", 2)
        patch.setattr(Sampler, "whitened", teacher)
        false = costs_per_state(ensembles, "student_1", 2)
    assert false["evaluations_per_state"] == 2 * config.diffusion.sampler_steps
    assert false["operations_per_state"] > 2 * honest["operations_per_state"]


@torch.no_grad()
def test_rollouts_of_the_operator_are_its_plain_rollouts(ensembles, hidden):
    rows = hidden.cache.split["test"][:3]
    parameters = hidden.cache.parameters[rows]
    z = rollout(lambda z, _: hidden.operator(z, HIDDEN, parameters), hidden.cache.batch(rows, 0, 1), 4, 1)
    expected = hidden.head.codec.denormalise(hidden.head.codec.decode(z))
    found = rollouts(ensembles, "operator", rows, 4, 5)
    assert found.shape == (3, 1, 4, 1, 32)
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "model", "dressed dressed_conditional waves dressed_resampled scoring corrector student_2".split()
)
def test_members_do_not_depend_on_the_batch_and_follow_the_seed(
    ensembles, hidden, config, monkeypatch, model
):
    rows = hidden.cache.split["test"][:3]
    together = rollouts(ensembles, model, rows, 3, 3)
    assert together.shape == (3, 3, 3, 1, 32) and len(together.flatten(2)[..., 0].unique()) == 9
    exact = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(rollouts(ensembles, model, rows[1:2], 3, 3), together[1:2], **exact)
    torch.testing.assert_close(rollouts(ensembles, model, rows.flip(0), 3, 3).flip(0), together, **exact)
    # more than one trajectory's, less than two's
    monkeypatch.setattr(ups.generative.conditions, "CPU_STATES", 4)
    torch.testing.assert_close(rollouts(ensembles, model, rows, 3, 3), together, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(ensembles, "seed", 1)
    assert (rollouts(ensembles, model, rows, 3, 3) - together).abs().amax((2, 3, 4)).min() > 1e-4


@torch.no_grad()
def test_single_steps_are_compared_on_the_same_test_windows_with_the_same_noise(ensembles, hidden):
    windows = one_step(ensembles, 6, 3, ensembles.names)
    samples, again = windows.samples, one_step(ensembles, 6, 3, ["corrector"]).samples
    assert set(samples) == set(ensembles.names) and not samples["operator"].any()
    assert windows.truth.shape == (6, 8, 4) and windows.rows.max() < len(hidden.cache.split["test"])
    torch.testing.assert_close(again["corrector"], samples["corrector"])
    # the codec is exact
    torch.testing.assert_close(
        windows.u_ref, hidden.head.codec.decode(windows.truth[:, None]), rtol=0, atol=1e-5
    )
    mixed = one_step(ensembles, 6, 3, ["corrector", "dressed"], is_shuffled=True).samples
    torch.testing.assert_close(mixed["dressed"], samples["dressed"])  # which reads no conditions
    gaussian = one_step(ensembles, 6, 3, ["dressed_conditional"], is_shuffled=True).samples[
        "dressed_conditional"
    ]
    # nor has it a network that could lose them
    torch.testing.assert_close(gaussian, samples["dressed_conditional"])
    assert (mixed["corrector"] - samples["corrector"]).abs().max() > 1e-3


@torch.no_grad()
def test_every_sampler_of_solutions_is_its_definition(chain, steady, config, monkeypatch):
    prior = load_corrector(chain / "smoke" / "steady")
    z_in, _, parameters = steady.fields("test", torch.arange(2))
    v = steady.head.input_codec.decode(z_in[:, 0])
    observation = observe_case(v, "points_10", row_generators(0, "points_10", rows=range(2)))
    predicted, noise = predict_with_noise(steady, observation, parameters, 0, [0, 1], 4)
    guess, tokens, facts, start = predicted
    assert torch.equal(noise, torch.cat([member_noise(guess.shape[1:], 0, [row], 0, 4) for row in (0, 1)]))
    head = prior.heads[STEADY]
    condition = head.condition(tokens, facts).rows(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    bank = case_bank(steady, "points_10", 0)
    place = (torch.special.ndtr(noise.flatten(2)[..., 0].double()) * len(bank)).long()
    field = torch.cat([member_noise(steady.noise_shape, 0, [row], 0, 4, "field") for row in (0, 1)])
    v_drawn = steady.posterior(observation, field).samples.flatten(0, 1)
    pushed = steady.logarithm(
        steady.head.physical(
            steady.operator(
                steady.head.input_codec.encode(v_drawn)[:, None], STEADY, parameters.repeat_interleave(4, 0)
            )[:, 0]
        )
    )
    # the operator's own error, at each draw as if it were all seen
    own = head.condition(start.tokens, start.facts)
    torch.testing.assert_close(
        start.offset.view_as(noise), pushed.view_as(noise) - guess[:, None], rtol=0, atol=1e-5
    )
    assert (v_drawn[:4] - v_drawn[0]).abs().max() > 0.01
    assert torch.equal(start.facts, torch.tensor([[1.0, 0.0, 0.0]]).expand(8, 3))
    with_error = start.offset + head.unwhiten(noise.flatten(0, 1), own)
    begun = head.whiten(with_error, condition)
    residuals = {
        "dressed": bank.mean(0) + bank.std(0) * noise,
        "resampled": bank[place],
        "pushed": start.offset,
        "gaussian": head.unwhiten(noise.flatten(0, 1), condition),
    }
    whole = predict_with_noise(steady, observe_all(v), parameters, 0, [0, 1], 4)
    head.decide(method="pushed")  # the operator's own error is all that is uncertain there, and always drawn
    torch.testing.assert_close(
        posterior_draws(prior, steady, *whole, "prior", bank),
        posterior_draws(prior, steady, *whole, "gaussian", bank),
        rtol=1e-4,
        atol=0,
    )
    by = {
        "pushed": start.offset,
        "diffusion": head.unwhiten(sample(prior.velocity(condition), begun, 4), condition),
    }
    head.facts = replace(head.facts, start="pushed")
    _, z, _ = steady.fields("reserved", torch.arange(len(bank)))
    blind = posterior_draws(prior, steady, predicted, noise, "blind", bank)
    torch.testing.assert_close(blind, steady.head.physical(z[:, 0])[place])
    for kind, r in [*residuals.items(), *(("prior", r) for r in by.values())]:
        head.decide(method=next((way for way, same in by.items() if same is r), "diffusion"))
        draws = posterior_draws(prior, steady, predicted, noise, kind, bank)
        assert draws.shape == (2, 4, 1, 16, 16) and (draws > 0).all()
        expected = steady.head.codec.decode(guess[:, None] + r.view_as(noise)).exp()
        torch.testing.assert_close(draws, expected, rtol=1e-3, atol=1e-6)
    monkeypatch.setattr(ups.generative.conditions, "CPU_STATES", 3)
    again = posterior_draws(prior, steady, predicted, noise, "prior", bank)
    torch.testing.assert_close(again, draws, rtol=1e-3, atol=1e-6)
    head.facts = replace(head.facts, start="gaussian")  # the path begins at white noise
    r = head.unwhiten(sample(prior.velocity(condition), noise.flatten(0, 1), 4), condition)
    draws = posterior_draws(prior, steady, predicted, noise, "prior", bank)
    torch.testing.assert_close(draws, steady.solution(guess[:, None], r.view_as(noise)), rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_a_prior_uses_the_best_method_on_validation(chain, steady, monkeypatch):
    """A path that leads astray does not serve, nor does an error that is none; where both are right they
    do."""
    records = left_by("steady", chain).json("config.json")["decisions"]
    [done] = [one for one in map(Decision.read, records) if one.question == f"samples of {STEADY}"]
    prior = load_corrector(chain / "smoke" / "steady")
    head, ranks = (
        prior.heads[STEADY],
        SimpleNamespace(
            rank=0, world=1, device="cpu", agreed=lambda work, _: work(), reduce_sum=lambda sums: sums
        ),
    )
    scores = done.scores
    assert [*scores] == [*METHODS] and scores["pushed"] == 1.0
    assert head.method == done.chosen == min(scores, key=scores.get) and head.is_pushed
    astray = lambda condition: lambda x, angle: 3 + 0 * x  # noqa: E731
    monkeypatch.setattr(prior, "velocity", astray)
    head.gaussian_out.bias[len(head.r_std) :] += 8.0  # an error of the operator, thousands of times too large
    exact = steady.head.physical(steady.fields("val", torch.arange(2))[1][:, 0])[:, None].expand(
        -1, 4, -1, -1, -1
    )

    def best_by(name):
        return lambda *_: exact + (head.method != name) * torch.randn(exact.shape)

    [found] = select_method(prior, {STEADY: steady}, 0, 2, ranks)
    scores = found.scores
    assert head.method == "pushed"
    assert scores["pushed"] == 1.0 < min(score for by, score in scores.items() if by != "pushed")
    monkeypatch.setattr(prior, "velocity", lambda condition: lambda x, angle: 0 * x)
    monkeypatch.setattr(prior_selection, "sample_fields", best_by("diffusion"))
    [found] = select_method(prior, {STEADY: steady}, 0, 2, ranks)
    assert found.scores["diffusion"] == 0.0 and head.method == found.chosen == "diffusion"


# ---- bad input


@pytest.mark.parametrize("stage", ["diffusion", "steady"])
def test_without_reserved_trajectories_there_is_nothing_to_correct(chain, tmp_path, run_here, stage):
    reserve = [f"task.{name}.reserve=0" for name in (HIDDEN, STEADY)]
    code, output = run_here(stage, chain, with_parents(chain, tmp_path, stage), *reserve)
    assert code == 2
    assert (
        f"no task for stage {stage} has reserved trajectories; expected task.TASK.reserve above 0" in output
    )
    assert not (tmp_path / "smoke" / stage).exists() and "Traceback" not in output


@pytest.mark.parametrize(
    ("stage", "parent"),
    [*((stage, "operator") for stage in STAGES), ("consistency", "diffusion"), ("scoring", "diffusion")],
)
def test_a_missing_or_unfinished_parent_is_refused_naming_the_make_target(
    chain, tmp_path, run_here, stage, parent
):
    made = with_parents(chain, tmp_path, stage) / "smoke" / parent
    (made / "done.json").unlink()
    for is_there in (True, False):
        code, output = run_here(stage, chain, tmp_path)
        words = f"stage {parent} of run smoke is {'unfinished' if is_there else 'missing'}; expected"
        assert code == 2 and words in output and f"make {parent} RUN=smoke" in output
        assert "Traceback" not in output and not (tmp_path / "smoke" / stage).exists()
        shutil.rmtree(made, ignore_errors=True)


@pytest.mark.parametrize("parent", ["operator", HIDDEN])
def test_a_teacher_made_from_another_operator_or_cache_is_refused(chain, tmp_path, run_here, parent):
    with_parents(chain, tmp_path, "consistency")
    done = tmp_path / "smoke" / "diffusion" / "done.json"
    edit(done, lambda record: record["parents"].update({parent: "another"}))
    code, output = run_here("consistency", chain, tmp_path)
    assert code == 2
    assert f"stage diffusion of run smoke was made from another {parent} (another then, " in output
    assert "smoke/diffusion (rm -r) and run make diffusion RUN=smoke again" in output
    assert not (tmp_path / "smoke" / "consistency").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_made_from_another_operator_is_not_continued(chain, tmp_path, run_here, stage):
    with_parents(chain, tmp_path, stage)
    shutil.copytree(chain / "smoke" / stage, tmp_path / "smoke" / stage)
    description = tmp_path / "smoke" / "operator" / "config.json"
    description.write_text(description.read_text() + "\n")  # as if it had been trained again
    operator = edit(
        description.with_name("done.json"), lambda record: record.update(config_sha256=file_hash(description))
    )
    name, now = "operator", operator["fingerprint"]
    if "diffusion" in PARENTS[stage]:
        diffusion = edit(
            tmp_path / "smoke" / "diffusion" / "done.json",
            lambda record: record["parents"].update(operator=now),
        )
        name, now = "diffusion", diffusion["fingerprint"]
    code, output = run_here(stage, chain, tmp_path)
    assert code == 2 and f"smoke/{stage} was made from another {name} (" in output and f"{now} now)" in output
    assert finished_stage(chain / "smoke" / stage)["fingerprint"]  # the original stands


def test_an_overfitted_operator_is_refused_with_the_measured_ratio_on_every_process(chain, tmp_path):
    codes, logs = start(
        "diffusion",
        chain,
        with_parents(chain, tmp_path, "diffusion"),
        "diffusion.min_residual_ratio=1000",
        world=2,
    )
    measured = json.loads((tmp_path / "smoke" / "diffusion" / "scales" / f"{HIDDEN}.json").read_text())[
        "facts"
    ]["ratio"]
    assert codes == [1, 1] and 0.01 < measured < 100
    words = (
        f"ValueError: the operator's residuals of {HIDDEN} where the corrector trains are {measured:.3f} "
        "times those of validation "
    )
    for rank, log in enumerate(logs):
        last = log.strip().splitlines()[-1]  # a slow rank may learn it from the other
        assert last.startswith(f"FAILED: rank {rank}, stage diffusion, step 0: ") and words in last, last
    assert not (tmp_path / "smoke" / "diffusion" / "done.json").exists()


@pytest.mark.parametrize(("stage", "text"), cases("stages.nan"))
def test_residuals_that_are_nan_from_the_start_are_refused_on_every_process(chain, tmp_path, stage, text):
    codes, logs = start(stage, chain, with_parents(chain, tmp_path, stage), world=2, nan_from=0)
    assert codes == [1, 1]
    for rank, log in enumerate(logs):  # both find it; a rank may hear of the other's error first
        last = log.strip().splitlines()[-1]
        assert re.match(
            rf"FAILED: rank {rank}, stage {stage}, step 0: (rank . failed: )?{re.escape(text)}", last
        ), log
    assert not list((tmp_path / "smoke" / stage).glob("scales/*.json"))


@pytest.mark.parametrize(("override", "text"), cases("stages.settings"))
def test_impossible_settings_are_refused(override, text):
    with pytest.raises(ValueError, match=text):
        load_config(SMOKE, [*SETTINGS, override])


# ---- draws of loaded stages, without a cache


@torch.no_grad()
def test_a_loaded_prior_draws_solutions_without_the_cache_that_its_guess_was_fitted_to(steady, chain):
    sampler = load_sampler(chain / "smoke", "prior", "cpu", load_operator(chain / "smoke" / "operator"))
    for one, two in zip(
        sampler.network.heads[STEADY].guess.buffers(), steady.posterior.buffers(), strict=True
    ):
        assert torch.equal(one, two) and one.any()
    z_in, _, parameters = steady.fields("test", torch.arange(2))
    v = steady.head.input_codec.decode(z_in[:, 0])
    mask = (torch.rand(v.shape, generator=generator(3)) < 0.5).float()
    u = sample_solutions(
        load_operator(chain / "smoke" / "operator"), sampler, STEADY, observe_cells(v, mask), parameters, 3
    )
    predicted, noise = predict_with_noise(steady, observe_cells(v, mask), parameters, 0, [0, 1], 3)
    expected = posterior_draws(
        sampler.network, steady, predicted, noise, "prior", case_bank(steady, "points_50", 0)
    )
    assert u.shape == (2, 3, 1, 16, 16) and (u > 0).all()
    torch.testing.assert_close(u, expected)
    other = observe_cells(v.where(mask > 0, torch.nan), mask)  # what is not seen is not looked at
    assert torch.equal(other.values, observe_cells(v, mask).values)
    assert other.facts[:, 0].tolist() == mask.mean((1, 2, 3)).tolist()
