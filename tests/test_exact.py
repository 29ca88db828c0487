"""Ensembles beside exact draws of the future, and the operator's own errors: what is right passes, each fake
is refused."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from entries import drop, entry_of, place
from test_base_selection import base_alone
from torch import Tensor

from ups.config.load import load_config
from ups.data.build_cache import open_source
from ups.evaluation import transient
from ups.evaluation.claims import MARGINS
from ups.evaluation.ensemble import one_step
from ups.evaluation.gates import ensemble_gates, usability_of
from ups.evaluation.reference_ensembles import RolloutErrors, exact_mean, reference_ensembles, sample_exactly
from ups.generative.residuals import TransientResiduals
from ups.metrics.ensembles import compare_ensembles, score_ensemble, summarise_ensemble
from ups.metrics.intervals import Resamples
from ups.results import Entry
from ups.tasks import TASKS, get_task
from ups_solvers import SOLVERS

CPU, SETTINGS = torch.device("cpu"), load_config(None).evaluate
# starts, members, time between frames
NUMBERS = {"burgers1d_forced": (100, 24, 0.05), "vorticity2d_forced": (60, 20, 0.1)}


@pytest.fixture(
    scope="module", params=["burgers1d_forced", pytest.param("vorticity2d_forced", marks=pytest.mark.faults)]
)
def judged(request):
    """The entry whose models are exact draws again and the fakes."""
    solver = SOLVERS[request.param]
    starts, members, dt = NUMBERS[request.param]
    u = solver.simulate(range(starts), seed=21, resolution=16, num_frames=5, parameter=0.02, t_end=4 * dt)

    def draw(seed: int, num: int = members) -> Tensor:
        return solver.exact_futures(
            u[:, 0], num, seed=seed, rows=range(starts), num_frames=4, parameter=0.02, dt=dt
        )

    again = draw(2)
    mean = draw(3, 32).mean(1, keepdim=True)
    shown = {
        "exact": draw(1),
        "again": again,
        "wide": mean + 2 * (again - mean),
        "mean": mean,
        "blind": again.roll(1, 0),
        "operator": 1.5 * mean,
        "bayes_mean": mean,
    }
    law = draw(4, 32)
    scores = {name: score_ensemble(drawn, u[:, 1:], exact=law) for name, drawn in shown.items()}
    entry = Entry("t", "ensembles", {"best_cheap": "cheap"})
    for name, rows in scores.items():
        entry.add(name, summarise_ensemble(rows, Resamples(200, 0)))
        entry.add(name, {"nonfinite_trajectories": 0}, "one step")
        entry.add(f"{name} / exact", compare_ensembles(rows, scores["exact"], Resamples(200, 0)))
    best = compare_ensembles(scores["operator"], scores["bayes_mean"], Resamples(200, 0))
    entry.add("operator / bayes_mean", best)
    return entry


def as_corrector(entry: Entry, name: str) -> Entry:
    """The entry with that model in the corrector's place, and a cheap one that every model beats."""
    made = copy.deepcopy(entry)
    place(made, name, "corrector")
    made.add("corrector / cheap", {"crps": {"value": 0.1, "low": 0.1, "high": 0.1}})
    return made


def test_exact_samples_pass_and_their_mean_is_the_best_single_forecast(judged):
    found = judged.by_lead("again / exact", "crps")
    assert all(0.96 < value < 1.04 for value in found["value"])
    assert all(0.9 < ssr < 1.1 for ssr in judged.by_lead("again", "ssr")["value"])
    errors = {name: judged.number(name, "nrmse_mean") for name in judged.models()}
    assert errors["mean"] < 1.01 * min(errors.values()) and errors["operator"] > 1.05 * errors["mean"]


@pytest.mark.parametrize(
    ("model", "passed"), [("again", True), ("wide", False), ("mean", False), ("blind", False)]
)
def test_the_gate_compares_with_exact_samples(judged, model, passed):
    table = as_corrector(judged, model)
    rows = {row["name"]: row for row in ensemble_gates("diffusion", "t", table, SETTINGS)}
    assert rows["exact/t/corrector"]["passed"] == passed, rows["exact/t/corrector"]
    drop(table, model="corrector / exact")
    drop(table, model="exact")
    rows = ensemble_gates("diffusion", "t", table, SETTINGS)
    assert not any(row["name"].startswith("exact") for row in rows)


def test_a_forecast_as_good_as_the_best_mean_is_usable_however_large_its_error(judged):
    large = {"value": 0.7, "low": 0.6, "high": 0.8}
    below = {"value": 0.5, "low": 0.4, "high": 0.6}
    models = {
        "": {"num_initial_conditions": 9},
        "operator": {"nrmse": large, "correlation_time": below},
        "persistence": {"nrmse": large},
        "operator / persistence": {"nrmse": below},
    }
    task = entry_of("tasks", {"times": [1.0, 4.0], "network_is_used": False}, main=models)
    assert not usability_of(task, None)["usable"]
    poor = usability_of(task, judged)
    # the operator is half too large
    assert not poor["usable"] and "times that of the best possible mean" in poor["words"]
    ratio = {"nrmse_mean": {"value": 1.02, "low": 1.0, "high": 1.04}}
    best = entry_of("ensembles", main={"operator / bayes_mean": ratio})
    assert usability_of(task, best)["usable"]


# ---------------------------------------------------------------- from caches


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(truth, ensembles without networks) of a forced task at two viscosities, its operator a base alone."""
    name = "burgers1d_forced"
    config, truth, operator = base_alone(
        tmp_path_factory.mktemp("exact"),
        name,
        f"task.{name}={{num_trajectories: 20, resolution: 16, num_frames: 16, t_end: 0.75, "
        "parameters: [0.02, 0.1], base: [persistence, propagator]}",
    )
    return (
        config,
        truth,
        SimpleNamespace(residuals=TransientResiduals(operator, truth.cache), truth=truth, seed=3, device=CPU),
    )


def test_exact_samples_start_from_the_last_context_frame_at_the_viscosity_of_its_file(world):
    config, truth, _ = world
    drawn = sample_exactly(truth, 5, truth.rows, 3, 2)
    source = open_source(config, truth.task.name)
    assert drawn.shape == (len(truth.rows), 2, 3, 1, 16)
    for row, futures in zip(truth.rows.tolist(), drawn, strict=True):
        file = int(truth.cache.parameter_index[row])
        u = torch.from_numpy(source.read(row, row + 1)[0, truth.context - 1])[None]
        parameter = config.task[truth.task.name].parameters[file]
        by_hand = SOLVERS[truth.task.name].exact_futures(
            u, 2, seed=5, rows=[row], num_frames=3, parameter=parameter, dt=0.05
        )
        torch.testing.assert_close(futures, by_hand[0])
    mean = exact_mean(truth, 5, 2, truth.rows, 3, 7)
    torch.testing.assert_close(mean, drawn.mean(1, keepdim=True))


def test_residuals_of_exact_samples_are_those_of_the_data_if_the_law_is_the_data(world, monkeypatch):
    """From the frame before, at the viscosity of its file, shifted and mirrored as the window is."""
    _, truth, ensembles = world
    cache, asked = truth.cache, []

    def follow(
        u: torch.Tensor, num: int, *, seed: int, rows: list[int], num_frames: int, **known
    ) -> torch.Tensor:
        places, frames = torch.tensor(rows) // cache.num_frames, torch.tensor(rows) % cache.num_frames
        torch.testing.assert_close(u, truth.frames(places, frames - 1, 1)[:, 0])
        asked.append(known["parameter"])
        return truth.frames(places, frames, num_frames)[:, None].expand(-1, num, *[-1] * (u.ndim))

    for law in (SOLVERS[truth.task.name].exact_futures, follow):
        monkeypatch.setattr(
            "ups.evaluation.truth.solver_of", lambda _, law=law: SimpleNamespace(exact_futures=law)
        )
        single = SimpleNamespace(**vars(ensembles), noise=lambda *args: (torch.zeros(1), torch.zeros(1)))
        windows = one_step(single, 40, 2, [], num_exact=3)
        assert windows.law.shape == (40, 3, *windows.u_ref.shape[1:]) and windows.u_ref.abs().max() > 0.01
        is_data = torch.isclose(windows.law, windows.u_ref[:, None], rtol=1e-4, atol=1e-5).all()
        assert bool(is_data) == (law is follow)
    assert set(asked) == {0.02, 0.1}
    assert one_step(single, 40, 2, []).law is None
    monkeypatch.setattr(truth, "task", dataclasses.replace(truth.task, has_known_law=False))
    assert one_step(single, 40, 2, [], num_exact=3).law is None


def climates(world, monkeypatch, scored: int, rollouts, **facts) -> dict[str, dict[str, list[float]]]:
    """Model -> family -> figures of long rollouts, of a task of these facts."""
    _, truth, ensembles = world
    monkeypatch.setattr(truth, "task", dataclasses.replace(truth.task, **facts))
    monkeypatch.setattr(transient, "rollouts", lambda _, model, rows, num, __: rollouts(model, rows, num))
    single, entry = SimpleNamespace(**vars(ensembles), samplers=["corrector"]), Entry("t", "ensembles")
    transient.add_long_rollouts(entry, single, truth.rows.repeat(4), scored, 100)
    return {
        model: {
            family: found["value"]
            for family in MARGINS
            if (found := entry.listed(model, f"likeness/{family}", "long"))
        }
        for model in entry.models("long")
    }


def test_long_rollouts_are_compared_with_exact_samples_as_late_from_the_same_starts(world, monkeypatch):
    """Refuses the data in their place: here they begin at three times what the noise keeps up."""
    truth = world[1]
    frames = truth.frames
    monkeypatch.setattr(truth, "frames", lambda *args: 3 * frames(*args))

    def exact(model: str, rows: Tensor, num_frames: int) -> Tensor:
        return sample_exactly(truth, 11, rows, num_frames, 1) * (0.5 if model == "operator" else 1)

    found = climates(world, monkeypatch, 8, exact)
    assert set(found) == {"operator", "corrector", "exact"} and set(found["exact"]) >= {"late start"}
    for model in ("corrector", "exact"):
        assert abs(found[model]["late variance"][0]) < 0.5, found
        assert abs(found[model]["late memory"][0]) < 0.3, found
    assert found["operator"]["late variance"][0] < -0.9, found


@pytest.mark.parametrize(
    ("is_stationary", "scored"), [(True, 2), (False, 4)], ids=["their last frames", "the same frames"]
)
def test_without_a_law_long_rollouts_are_compared_with_the_data(world, monkeypatch, is_stationary, scored):
    """Members that are the data in the frames that are compared, and nothing in others."""
    truth = world[1]

    def data(model: str, rows: Tensor, num_frames: int) -> Tensor:
        u = torch.zeros(len(rows), 1, num_frames, 1, 16)
        u[:, 0, slice(-truth.num_frames, None) if is_stationary else slice(truth.num_frames)] = truth.future(
            rows
        )
        return u

    found = climates(world, monkeypatch, scored, data, has_known_law=False, is_stationary=is_stationary)[
        "corrector"
    ]
    assert found and ("late start" in found) == (not is_stationary)
    assert max(abs(value) for values in found.values() for value in values) < 1e-6, found


def test_an_analog_of_a_reserved_start_is_that_start_and_brings_the_truth(world):
    _, truth, ensembles = world
    errors = RolloutErrors(ensembles, 3)
    rows = truth.cache.split["reserved"]
    assert sorted(errors.rows.tolist()) == sorted(rows.tolist())
    chosen = errors.nearest(rows, 4)
    assert torch.equal(errors.rows[chosen[:, 0]], rows)
    told = truth.cache.parameter_index
    # of the viscosity that models are told
    assert torch.equal(told[errors.rows[chosen]], told[rows][:, None].expand(-1, 4))
    members = errors.sample(errors.nearest, rows, 3, 4)
    torch.testing.assert_close(members[:, 0], truth.future(rows, 3), rtol=1e-4, atol=1e-4)
    assert float((members[:, 1] - members[:, 0]).abs().max()) > 1e-3


def test_only_a_task_with_a_known_law_has_exact_rivals(world, monkeypatch):
    _, truth, ensembles = world
    settings = SimpleNamespace(truth_members=4)
    assert set(reference_ensembles(ensembles, settings, 2)) == {"analogs", "exact", "bayes_mean"}
    monkeypatch.setattr(truth, "task", TASKS["burgers1d"])
    assert set(reference_ensembles(ensembles, settings, 2)) == {"analogs"}
    assert not TASKS["burgers1d_hidden"].has_known_law
    assert not get_task("burgers1d_forced").hidden().has_known_law


def test_a_stride_in_space_is_refused_where_the_law_is_that_of_the_stored_grid():
    with pytest.raises(
        ValueError, match=r"task.burgers1d_forced.space_stride is 2; expected 1 \(exact draws are of the grid"
    ):
        load_config(None, ["data.tasks=[burgers1d_forced]", "task.burgers1d_forced.space_stride=2"])


def test_members_from_noisy_starts_have_the_noise_of_the_data(world):
    """The operator forecasts members whose start has noise, and the noise of the data is added once."""
    _, truth, ensembles = world
    head, rows, sigma = ensembles.residuals.head, truth.rows[:8], 0.1
    facts = head.facts
    head.facts = dataclasses.replace(facts, noise={truth.task.fields[0]: sigma}, is_deterministic=True)
    try:
        found = reference_ensembles(ensembles, SimpleNamespace(truth_members=4), 2)
        members = found["starts"](rows, 2, 16)
    finally:
        head.facts = facts
    assert members.shape[:3] == (len(rows), 16, 2) and torch.isfinite(members).all()
    given, operator = truth.given(rows, head.codec), ensembles.residuals.operator
    alone = head.physical(operator.rollout(given, head.name, truth.cache.parameters[rows], 2))
    assert float((members.mean(1) - alone).square().mean().sqrt()) < sigma
    assert sigma < float(members.var(1).mean().sqrt()) < 2 * sigma
