"""Every stage is gated and every gate refuses the fake it is there for; usability; which split and stages a
report is asked for.

The ensembles are made of one world, where the truth is a conditional mean plus a residual with structure, and
scored as the report scores them: what an honest corrector, student or prior draws passes, and a plain
Gaussian, the mean, NaN, ... do not."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from cases import cases
from entries import drop, entry_of, place
from test_report import example, task_entry, waves

from ups.common.place import STAGES
from ups.config.load import load_config
from ups.evaluation.gates import check_gates, check_usability, gate, not_passed, outcome, point, usability_of
from ups.evaluation.steady import pool, pool_checks
from ups.metrics import ensembles as probabilistic
from ups.metrics.errors import vanishes
from ups.metrics.intervals import Resamples, halves
from ups.metrics.joint import score_structure
from ups.metrics.likeness import likeness
from ups.results import Entry, Results

SETTINGS = load_config(None).evaluate
CASES, MEMBERS, FRAMES, CELLS = 60, 8, 8, 16


def world(seed: int = 0):
    """(draw, truth): draw(kind, key) -> members (CASES, MEMBERS, FRAMES, 1, CELLS) of a conditional law;
    truth one right draw."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(CASES, 1, 1, 1, CELLS, generator=generator)

    def draw(kind: str, key: int, members: int = MEMBERS) -> torch.Tensor:
        source = torch.Generator().manual_seed(1000 * seed + key)
        shape = (CASES, members, FRAMES, 1)
        noise = torch.randn(*shape, CELLS, generator=source)
        # all cells up or all down
        whole = torch.randn(*shape, 1, generator=source).sign().expand(*shape, CELLS)
        return {
            "right": mean + whole + 0.1 * noise,
            "gaussian": mean + noise,
            "mean": mean.expand(*shape, CELLS),
            "nan": torch.where(noise > 3.5, torch.nan, noise),
            "wide": mean + 3 * noise,
            "inflated": mean + 1.3 * (whole + 0.1 * noise),
            "blind": mean.roll(1, 0) + whole + 0.1 * noise,
        }[kind]  # what was seen in another case

    return draw, draw("right", 99, 1)[:, 0]


@functools.cache
def scored(kind: str, key: int) -> tuple[dict, dict]:
    """(scores, figures) of members drawn as `kind` says."""
    draw, u_ref = world()
    members = u_ref[:, None].expand(-1, MEMBERS, -1, -1, -1) if kind == "truth" else draw(kind, key)
    scores = probabilistic.score_ensemble(members, u_ref)
    return scores, probabilistic.summarise_ensemble(scores, Resamples(200, 0))


@functools.cache
def likeness_of(kind: str, key: int) -> dict:
    """Figures beside the data, as no law is known."""
    draw, u_ref = world()
    members, again = (
        u_ref[:, None].expand(-1, MEMBERS, -1, -1, -1) if kind == "truth" else draw(kind, key + number)
        for number in (0, 50)
    )
    return likeness(members, u_ref, "periodic", draw("mean", 5, 1)[:, 0], Resamples(200, 0), again=again)


@functools.cache
def compared(one: tuple[str, int], other: tuple[str, int]) -> dict:
    return probabilistic.compare_ensembles(scored(*one)[0], scored(*other)[0], Resamples(200, 0))


@functools.cache
def make_entry(**fakes: str) -> Entry:
    """An entry of ensembles whose corrector, student_1, student_2 and scoring draw as `fakes` says,
    else rightly."""
    kinds = {
        "operator": "mean",
        "dressed": "wide",
        "dressed_conditional": "gaussian",
        **dict.fromkeys(("corrector", "student_1", "student_2", "scoring"), "right"),
        **fakes,
    }
    drawn = {model: (kind, key if kind == "right" else 5) for key, (model, kind) in enumerate(kinds.items())}
    cheap = "dressed_conditional"
    evaluations = {"corrector": 32.0, "student_1": 1.0, "student_2": 2.0, "scoring": 1.0}
    made = Entry("t", "ensembles", {"best_cheap": cheap, "times": list(range(FRAMES))})
    made.add("", {"num_initial_conditions": CASES, "members": MEMBERS})
    for model, which in drawn.items():
        made.add(model, scored(*which)[1])
    for model, count in evaluations.items():
        made.add(model, {"evaluations_per_state": count, "operations_per_state": count})
        made.add(model, scored(*drawn[model])[1], "one step")
        made.add(model, {"likeness": likeness_of(*drawn[model])})
    made.add(cheap, {"operations_per_state": 0.0})
    pairs = [
        *(
            (model, other)
            for model in ("corrector", "student_1", "student_2", "scoring")
            for other in (cheap, "operator")
        ),
        ("student_1", "corrector"),
        ("student_2", "corrector"),
    ]
    for one, other in pairs:
        made.add(f"{one} / {other}", compared(drawn[one], drawn[other]))
    return made


def entry(**fakes: str) -> Entry:
    return copy.deepcopy(make_entry(**fakes))


@functools.cache
def prior(kind: str = "right", pushed: str = "right") -> Entry:
    """A steady entry whose prior draws as `kind` says, and the linear posterior through the operator as
    `pushed`, in two partial cases."""
    draw, u_ref = world(1)
    groups, names = torch.arange(CASES), ("none", "points_10")
    members = {
        "operator": draw("mean", 0, 1),
        "dressed": draw("wide", 1),
        "dressed_conditional": draw("gaussian", 5),
        "linear_posterior": draw(pushed, 8),
        "unconditional": draw("blind", 9),
        "corrector": u_ref[:, None].expand(-1, MEMBERS, -1, -1, -1)
        if kind == "truth"
        else draw(kind, 8 if kind == pushed else 5),
    }
    scores = {model: probabilistic.score_ensemble(u, u_ref) for model, u in members.items()}
    cheap = "linear_posterior" if pushed == "right" else "dressed_conditional"
    made = Entry("t", "steady", {"best_cheap": cheap})
    for model, rows in scores.items():
        for name in names:
            made.add(model, probabilistic.summarise_ensemble(rows, Resamples(20, 0)), f"observed {name}")
    scores["corrector"] |= score_structure(members["corrector"], u_ref, "periodic", members["operator"][:, 0])
    every = dict.fromkeys(names, scores)
    both = [scores["corrector"]] * 2
    made.add("", {"num_initial_conditions": CASES} | pool_checks(both, [], Resamples(200, 0, groups)))
    for other in ("dressed", "dressed_conditional", "linear_posterior", "unconditional"):
        found = pool(every, list(names), other, Resamples(200, 0, groups))
        made.add(f"corrector / {other}", {"energy_score": found})
    return made


def results_with(transient: Entry | None = None, steady: Entry | None = None) -> Results:
    stages = {**dict.fromkeys(("diffusion", "consistency", "scoring"), ["t"]), "steady": ["t"]}
    entries = [{"t": entry} if entry else {} for entry in (transient, steady)]
    return Results(example()[0].facts | {"stages": stages}, {}, *entries)


def failed(results: Results, settings=SETTINGS) -> set[str]:
    return {row["name"] for row in not_passed(check_gates(results, settings))[0]}


def test_honest_stages_pass_every_gate_and_each_stage_has_some():
    gates = check_gates(results_with(entry(), prior()), SETTINGS)
    assert not not_passed(gates)[0]
    claims = {(row["stage"], row["name"].split("/")[0]) for row in gates}
    ours = ("finite", "score", "samples")
    of_prior = ("finite", "score", "spread", "coverage_50", "spectrum", "nearest")
    assert {(stage, claim) for stage in ("diffusion", "consistency", "scoring") for claim in ours} | {
        ("steady", claim) for claim in of_prior
    } | {
        (stage, claim) for stage in ("consistency", "scoring") for claim in ("evaluations", "operations")
    } | {("steady", "observed"), ("consistency", "teacher")} == claims
    assert all(row["task"] == "t" and row["low"] <= row["value"] <= row["high"] for row in gates)


@pytest.mark.parametrize("model", ["corrector", "student_1", "student_2", "scoring"])
@pytest.mark.parametrize(
    ("fake", "claims"),
    [
        ("gaussian", {"samples"}),
        ("mean", {"score", "samples"}),
        ("nan", {"finite", "score", "samples"}),
        ("truth", {"samples"}),
        ("wide", {"score", "samples"}),
    ],
)
def test_a_fake_in_the_place_of_a_stage_fails(model, fake, claims):
    names = failed(results_with(entry(**{model: fake}), prior()))
    assert {f"{claim}/t/{model}" for claim in claims} <= names, names


@pytest.mark.parametrize("serves", ["waves", "starts"])
@pytest.mark.parametrize(
    ("kind", "claims"),
    [
        ("right", set()),
        ("mean", {"score", "samples"}),
        ("wide", {"score", "samples"}),
        ("truth", {"samples"}),
    ],
)
def test_an_ensemble_that_no_stage_has_trained_has_gates_where_it_serves(serves, kind, claims):
    made = entry()
    place(entry(student_1=kind), "student_1", serves, made)

    def gates() -> dict[str, bool]:
        rows = check_gates(results_with(made), SETTINGS)
        found = [row for row in rows if row["name"].endswith(serves)]
        return {row["name"].split("/")[0]: row["passed"] or row["undecided"] for row in found}

    assert not gates()
    made.facts["serves"] = serves
    assert gates().keys() == {"finite", "score", "samples"}
    assert {claim for claim, passed in gates().items() if not passed} >= claims
    assert claims or all(gates().values())


@pytest.mark.parametrize(
    ("fake", "claims"),
    [
        ("gaussian", {"score"}),
        ("mean", {"score", "spread"}),
        ("truth", {"spread"}),
        ("wide", {"score", "spread"}),
        ("nan", {"finite", "score", "observed", "spread"}),
        ("blind", {"score", "observed"}),
        ("inflated", {"spread"}),
    ],
)
def test_a_fake_in_the_place_of_the_prior_fails(fake, claims):
    assert {f"{claim}/t/prior" for claim in claims} <= failed(results_with(entry(), prior(fake)))


def test_a_prior_that_is_the_exact_law_passes_beside_a_cheap_one_that_is_it_too():
    """Equal is enough there; what is worse by more than a twentieth is not, whatever else it beats."""
    for pushed in ("right", "gaussian"):
        assert not failed(results_with(entry(), prior("right", pushed)))
    assert "score/t/prior" in failed(results_with(entry(), prior("gaussian", "right")))


def test_samples_that_ignore_the_observation_fail_even_if_no_cheap_ensemble_is_better():
    made = copy.deepcopy(prior("blind", "blind"))
    made.facts["best_cheap"] = "linear_posterior"
    names = failed(results_with(entry(), made))
    assert "observed/t/prior" in names and "score/t/prior" not in names


def test_a_corrector_as_good_as_a_cheap_ensemble_passes_as_that_may_be_the_law_and_a_worse_one_fails():
    made, cheap, outcomes = entry(), "corrector / dressed_conditional", []
    for low, value, high in ((0.98, 1.0, 1.02), (0.98, 1.0, 1.06), (1.06, 1.08, 1.1)):
        made.add(cheap, {"crps": {"value": value, "low": low, "high": high}})
        gates = {row["name"]: row for row in check_gates(results_with(made), SETTINGS)}
        outcomes.append(outcome(gates["score/t/corrector"]))
    assert outcomes == ["pass", "UNDECIDED", "FAIL"]
    made = entry()
    leads = {end: [1.0, 1.2] for end in ("value", "low", "high")}
    made.add("exact", {"num_trajectories": MEMBERS})
    made.add("corrector / exact", {"crps_by_lead": leads})
    names = failed(results_with(made))
    assert "score/t/corrector" not in names and "exact/t/corrector" in names


def test_the_teacher_in_the_students_place_fails_by_its_evaluations_and_a_far_student_by_its_score():
    twice = entry()
    for model in ("student_1", "student_2"):
        twice.add(model, {"evaluations_per_state": 32.0})
    assert failed(results_with(twice, prior())) == {"evaluations/t/student_1", "evaluations/t/student_2"}
    assert "teacher/t/student_1" in failed(results_with(entry(student_1="wide"), prior()))


@pytest.mark.parametrize("stage", ["diffusion", "consistency", "scoring", "steady"])
def test_a_stage_that_was_asked_for_and_is_missing_fails_unless_the_report_stops_before_it(stage):
    results = results_with(entry(), prior())
    if stage == "steady":
        results.steady = {}
    else:
        for model in STAGES[stage].trained_samplers:
            drop(results.ensembles["t"], model=model)
    [row] = not_passed(check_gates(results, SETTINGS))[0]
    assert row["name"] == f"made/t/{stage}"
    assert f"Run make {stage}, or remove it from evaluate.stages" in row["reason"]
    del results.facts["stages"][stage]
    assert not failed(results)


def test_an_operator_that_is_gated_passes_and_fails_for_the_stated_reason():
    results, _, _ = example()
    gates, task = {row["name"]: row for row in results.facts["gates"]}, results.tasks["advection1d"]
    assert gates["trivial/advection1d"]["value"] == task.number("operator / persistence", "nrmse")
    assert gates["trivial/advection1d"]["passed"] and "trivial/darcy2d" in gates
    assert gates["finite/cfd3d/operator"]["passed"] and "finite/advection1d/fno" not in gates
    task.add("operator / persistence", {"nrmse": {"value": 0.9, "low": 0.7, "high": 1.1}})
    settings = replace(SETTINGS, min_initial_conditions=1)
    reasons = {row["name"]: row["reason"] for row in check_gates(results, settings) if not row["passed"]}
    assert "is 0.9 [0.7, 1.1]; allowed is below 1" in reasons["trivial/advection1d"]


def test_errors_are_pooled_where_a_driven_field_vanishes():
    """Between two kicks a frame is nearly zero, and the relative error of any forecast of the mean is huge.
    A task that nothing drives is judged by every frame."""
    ref_rms = torch.ones(4, 6, 2)
    assert not vanishes(ref_rms)
    ref_rms[1, 2, 0] = 1e-3
    assert vanishes(ref_rms)
    results, _, _ = example()
    task = results.tasks["advection1d"]
    for pair in task.ratios():
        task.add(pair, {"nrmse": point(40.0), "nrmse_pooled": {"value": 0.5, "low": 0.4, "high": 0.6}})
    results.tasks = {"advection1d": task}
    results.facts["stages"] = {"operator": ["advection1d"]}
    settings = replace(SETTINGS, min_initial_conditions=1)

    def trivial() -> dict:
        return {row["name"]: row for row in check_gates(results, settings)}["trivial/advection1d"]

    assert not trivial()["passed"] and trivial()["value"] == 40.0
    task.facts["error"] = "nrmse_pooled"
    assert trivial()["passed"] and trivial()["value"] == 0.5
    fake = {"value": 0.5, "low": 0.4, "high": 1.1}
    task.add("operator / persistence", {"nrmse_pooled": fake})
    assert not trivial()["passed"]


def test_a_prediction_that_is_not_finite_fails_every_gate_it_touches():
    results, _, _ = example()
    u_pred, u_ref, times, context = waves(4, 6, 1, 16, 1, 0)
    u_pred[1, 3] = torch.nan
    task = task_entry("advection1d", u_pred, u_ref, times, context, ["u"], False)[0]
    results.tasks = {"advection1d": task}
    results.facts["stages"] = {"operator": ["advection1d"]}
    gates = check_gates(results, replace(SETTINGS, min_initial_conditions=1))
    # finite twice, against persistence and base
    assert [row["passed"] for row in gates] == [False] * 4
    results.facts["gates"] = gates
    usable = check_usability(results)["advection1d"]
    assert not usable["usable"] and "not finite" in usable["words"]


@pytest.mark.parametrize(
    ("value", "low", "high", "found", "needed"),
    [
        (0.95, 0.85, 1.05, "pass", ""),
        (0.6, 0.5, 0.7, "FAIL", ""),
        (1.4, 1.3, 1.5, "FAIL", ""),
        (1.0, 0.75, 1.2, "UNDECIDED", "about 63 initial conditions would decide"),  # (0.25 / 0.2)^2 times 40
        (0.75, 0.65, 0.83, "UNDECIDED", "about 103 initial"),
        (1.25, 1.2, 1.3, "UNDECIDED", "no number of initial"),
        (None, None, None, "FAIL", ""),
        (0.9, None, None, "FAIL", ""),
    ],
)
def test_a_gate_passes_inside_fails_outside_and_else_names_the_starts_that_decide(
    value, low, high, found, needed
):
    interval = {"value": value, "low": low, "high": high}
    row, strict = (
        gate("diffusion", "spread/t/corrector", "spread", interval, 0.8, 1.25, count=count)
        for count in (40, 0)
    )
    assert outcome(row) == found and row["task"] == "t"
    assert needed in row["reason"] and "allowed is 0.8 to 1.25" in row["reason"]
    assert outcome(strict) == ("pass" if found == "pass" else "FAIL")
    assert not gate("scoring", "score/t/scoring", "score", point(1.0), below=1.0)[
        "passed"
    ]  # equal is not better


def test_less_data_makes_a_gate_harder():
    noise = torch.tensor([0.6, -0.6, 0.2, -0.2]).repeat(100)  # the same however many there are
    ours, theirs = 0.9 + noise, torch.ones(400)

    def passed(count: int) -> bool:
        both = torch.stack([ours[:count], theirs[:count]], 1)
        found = Resamples(500, 0).interval(both, lambda mean: halves(mean)[:, 0])
        return gate("scoring", "score/t/scoring", "score", found, below=1.0)["passed"]

    assert [passed(count) for count in (400, 8)] == [True, False]
    small = entry()
    small.add("", {"num_initial_conditions": 5})  # intervals as narrow as they like
    names = failed(results_with(small, prior()))
    assert "score/t/corrector" in names and not any(name.startswith("finite") for name in names)


@pytest.mark.parametrize(("error", "ratio", "usable", "words"), cases("gates.usability"))
def test_usability_is_stated_with_the_reasons(error, ratio, usable, words):
    row = {"nrmse": dict(zip(("value", "low", "high"), error, strict=True)), "correlation_time": point(1.0)}
    models = {
        "": {"num_initial_conditions": 9},
        "operator": row,
        "persistence": row,
        "operator / persistence": {"nrmse": point(ratio)},
        "operator / base": {"nrmse": point(1.07)},
    }
    task = entry_of("tasks", {"times": [0.5, 1.0], "network_is_used": True}, main=models)
    found = usability_of(task, None)
    assert found["usable"] is usable
    assert words in found["words"]
    assert "makes it worse than its base alone" in found["words"]
    assert "(scored up to 2 frames ahead, 1 time units)" in found["words"]
    task.add("operator", {"correlation_time": point(0.4)})
    found = usability_of(task, None)
    assert not found["usable"] and (None in error or "for 0.4 of 1 time units only" in found["words"])


def test_selections_have_a_separate_report():
    config = load_config(
        None,
        [
            "run.name=r",
            "evaluate.split=val",
            "data.tasks=[advection1d, burgers1d]",
            "evaluate.tasks=[burgers1d]",
        ],
    )
    assert str(config.report_dir) == "runs/r/report-val" and config.evaluated == ["burgers1d"]
    assert str(load_config(None, ["run.name=r"]).report_dir) == "runs/r/report"
    with pytest.raises(
        ValueError, match=r"evaluate.tasks is .*advection1d.* with evaluate.split test; expected every task"
    ):
        load_config(None, ["evaluate.tasks=[advection1d]", "data.tasks=[advection1d]"])
    with pytest.raises(ValueError, match="evaluate.tasks names darcy2d; expected tasks of the run"):
        load_config(None, ["evaluate.tasks=[darcy2d]", "data.tasks=[advection1d]", "evaluate.split=val"])


def test_reserved_trajectories_require_the_stages_that_train_on_them():
    tasks = "data.tasks=[advection1d, burgers1d_hidden, darcy2d_grf]"
    asked = load_config(None, [tasks, "task.advection1d.reserve=0"]).reported_stages
    assert asked["operator"] == ["advection1d", "burgers1d_hidden", "darcy2d_grf"]
    assert asked["steady"] == ["darcy2d_grf"]
    assert asked["diffusion"] == asked["consistency"] == ["burgers1d_hidden"] and "scoring" not in asked
    more = load_config(None, [tasks, "evaluate.stages=[operator, diffusion, scoring]"]).reported_stages
    assert more["scoring"] == ["burgers1d_hidden"] and "consistency" not in more
    assert set(load_config(None, [tasks, "evaluate.stages=[operator]"]).reported_stages) == {"operator"}
    assert set(
        load_config(None, ["data.tasks=[advection1d]", "task.advection1d.reserve=0"]).reported_stages
    ) == {"operator"}
    with pytest.raises(
        ValueError,
        match=r"evaluate.stages is \['operator', 'scoring'\]; expected operator, and diffusion where",
    ):
        load_config(None, [tasks, "evaluate.stages=[operator, scoring]"])
