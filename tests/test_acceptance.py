"""Each acceptance criterion refuses the fake it names; one row per criterion, and every figure that was
designed is printed."""

import copy
import dataclasses
import functools
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from entries import drop
from test_gates import entry

from bench import acceptance
from ups.common.files import file_hash, write_sealed
from ups.evaluation import one_step as steps
from ups.evaluation.ensemble import SampledWindows
from ups.evaluation.gates import point
from ups.evaluation.steady import moments_against, split_distances, summarise_exact
from ups.metrics.intervals import Resamples
from ups.results import Entry, Results

pytestmark = pytest.mark.faults  # tests/test_gates.py refuses the same fakes of a stage
COUNT, MEMBERS, TOKENS, DIM = 320, 10, 4, 4


def drawn(kind: str, key: int, shuffle: bool = False, members: int = MEMBERS) -> torch.Tensor:
    """(COUNT, members, TOKENS, DIM): r = c + s (k + 0.1 e), k = -1 or 1 for all of a case, c and the scale s
    known per case.

    gaussian: the right mean and spread by a head that gets them from its own conditions, whatever the network
    is shown."""
    known = torch.randn(COUNT, 1, TOKENS, DIM, generator=torch.Generator().manual_seed(1))
    scale = 0.2 + torch.rand(COUNT, 1, 1, 1, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(key)
    shape = (COUNT, members, TOKENS, DIM)
    noise = torch.randn(shape, generator=generator)
    whole = torch.randn(*shape[:2], 1, 1, generator=generator).sign().expand(shape)
    mean = known.roll(1, 0) if shuffle and kind != "gaussian" else known
    return {
        "right": mean + scale * (whole + 0.1 * noise),
        "gaussian": mean + scale * noise,
        "mean": mean.expand(shape),
        "nan": torch.where(noise > 3, torch.nan, noise),
        "dead": mean + 0.3 * scale * (whole + 0.1 * noise),
        "one spread": mean + 0.7 * (whole + 0.1 * noise),
        "marginal": 1.3 * noise,
        "nothing": torch.zeros(shape),
    }[kind]


def assess(entry: Entry, kinds: dict[str, str], truth: torch.Tensor, num_exact: int = 0) -> Entry:
    """The entry with what ups.evaluation.one_step makes of single steps that draw as `kinds` says; exact
    draws are right ones."""
    keys = dict.fromkeys(kinds, 5) | {"scoring": 6}  # students from the same noise as their teacher

    def one_step(ensembles, count, num_members, names, num_steps=0, is_shuffled=False, num_exact=0):
        draws = {
            name: drawn(kinds[name], keys[name], is_shuffled)[:count, : 1 if name == "operator" else None]
            for name in names
        }
        places = torch.arange(count)
        law, exact = (
            source.decode(drawn("right", key, members=num)[:count]) if num_exact else None
            for key, num in ((98, num_exact), (97, num_members))
        )
        return SampledWindows(
            draws, truth[:count], source.decode(truth[:count]), places, (places % 8) ** 2 // 3, law, exact
        )

    cache = SimpleNamespace(trajectory=torch.arange(COUNT) // 2, split={"test": torch.arange(COUNT)})
    data = SimpleNamespace(cache=cache, split="test", task=SimpleNamespace(boundary="periodic"))
    source = SimpleNamespace(decode=lambda r: r.flatten(-2)[..., None, None, :])
    ensembles = SimpleNamespace(
        residuals=source,
        truth=data,
        seed=0,
        names=list(kinds),
        head=SimpleNamespace(marginal_std=torch.ones(DIM)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "one_step", one_step)
        steps.assess_one_step(entry, ensembles, COUNT, MEMBERS, 100, num_exact)
    return entry


FEWER = {"ms_per_state": 1.0, "networks_per_state": 3.0}  # of students
KINDS = {
    "operator": "nothing",
    "dressed": "marginal",
    "dressed_conditional": "gaussian",
    **dict.fromkeys(("corrector", "student_1", "student_2", "scoring"), "right"),
}


@functools.cache
def forecast(**fakes: str) -> Entry:
    """An entry of ensembles whose single steps draw as `fakes` says, rollouts of test_gates."""
    kinds, made = {**KINDS, **fakes}, entry()
    drop(made, case="one step")
    assess(made, kinds, drawn("right", 99, members=1)[:, 0])
    for model in made.models():
        is_teacher = model == "corrector"
        costs = {"ms_per_state": 20.0, "networks_per_state": 64.0} if is_teacher else FEWER
        made.add(model, costs)
    for metric in ("crps", "energy_score"):
        made.add("student_1 / scoring", {metric: made.value("student_1 / corrector", metric)})
    made.add("", {"frames": 20, "members": 8}, "long")
    for model in kinds:
        made.add(model, {"blown_up": 0}, "long")
    return made


def missed(**fakes: str) -> set[str]:
    return {row.criterion for row in acceptance.transient(forecast(**fakes)) if not row.passed}


def test_a_known_law_replaces_the_data_in_the_spread_of_every_start():
    """Refuses a spread that is right by what the data happen to hold: here they are of twice the law."""
    truth = 2 * drawn("right", 99, members=1)[:, 0]
    by_law, by_data = (assess(Entry("t", "ensembles"), KINDS, truth, num) for num in (64, 0))
    law, data = (found.number("corrector", "ssr", "one step") for found in (by_law, by_data))
    assert 0.9 < law < 1.1 and data < 0.7
    assert by_law.cases("start ") == by_data.cases("start ") != []
    for case in by_law.cases("start "):
        assert 0.9 < by_law.number("corrector", "ssr", case) < 1.1
        assert by_data.number("corrector", "ssr", case) < 0.75
        covered = [found.value("corrector", "coverage_90", case) for found in (by_law, by_data)]
        assert covered[0] == covered[1]


def test_correct_samples_pass_the_criteria_that_refuse_the_fakes():
    names = missed()
    for criterion in (
        "2b spread/skill one step ahead, all starts",
        "2b spread/skill one step ahead, from frame 0",
        "2b corrector: outliers over their expectation, one step",
        "2b corrector: slope of error over binned spread, one step",
        "2e CRPS lost by showing the network other conditions, of the gain over B1",
        "3d student_1: variance over that of the teacher",
        "3c student_1: correlation with the teacher's draw",
        "3b student_1: spread/skill less the teacher's, one step",
    ):
        assert criterion not in names, criterion


@pytest.mark.parametrize(
    ("fakes", "criteria"),
    [
        (
            {"corrector": "gaussian"},
            ["2e CRPS lost by showing the network other conditions, of the gain over B1"],
        ),
        (
            {"corrector": "mean"},
            [
                "2b spread/skill one step ahead, all starts",
                "2b spread/skill one step ahead, from frame 0",
                "2b corrector: outliers over their expectation, one step",
            ],
        ),
        ({"corrector": "one spread"}, ["2b corrector: slope of error over binned spread, one step"]),
        (
            {"corrector": "nan"},
            [
                "2b spread/skill one step ahead, all starts",
                "2b corrector: rank histogram ratio, one step",
                "2e CRPS lost by showing the network other conditions, of the gain over B1",
            ],
        ),
        (
            {"student_1": "mean"},
            [
                "3d student_1: variance over that of the teacher",
                "3c student_1: squared distance to the teacher's draw over its variance",
            ],
        ),
        (
            {"student_1": "dead"},
            [
                "3d student_1: variance over that of the teacher",
                "3b student_1: spread/skill less the teacher's, one step",
            ],
        ),
        ({"student_1": "gaussian"}, ["3c student_1: correlation with the teacher's draw"]),
        (
            {"student_1": "nan"},
            [
                "3d student_1: variance over that of the teacher",
                "3b student_1: spread/skill less the teacher's, one step",
            ],
        ),
    ],
)
def test_a_fake_misses_the_criterion_that_names_it(fakes, criteria):
    assert set(criteria) <= missed(**fakes), missed(**fakes)


def test_a_gaussian_head_alone_loses_nothing_to_the_conditions_shown_to_its_network():
    of_gaussian, of_network = (
        made.value("", "shuffled_crps_rise_over_gain", "one step")
        for made in (forecast(corrector="gaussian"), forecast())
    )
    assert of_gaussian["value"] == pytest.approx(0.0, abs=1e-9) and of_network["low"] > 0.5


# ---- the steady prior


@functools.cache
def exact_entry(kind: str, spread: float = 0.003) -> dict:
    """summarise_exact of 40 fields: u = exp(m + spread x), x two patterns of N(0, 1); kind: draws of that
    law, or a fake."""
    fields, draws, cells = 40, 48, 64
    generator = torch.Generator().manual_seed(3)
    patterns = torch.linalg.qr(torch.randn(cells, 2, generator=generator, dtype=torch.float64))[0].T
    patterns = cells**0.5 * torch.tensor([[1.0], [0.5]]) * patterns
    rows, splits = [], []
    for field in range(fields):
        mean = torch.randn(cells, generator=generator, dtype=torch.float64)

        def right(count: int) -> torch.Tensor:
            return torch.randn(count, 2, generator=generator, dtype=torch.float64) @ patterns

        exact, size = (mean + spread * right(2 * draws)).exp(), patterns.square().sum(0).sqrt()
        white = torch.randn(draws, cells, generator=generator, dtype=torch.float64)
        x = {
            "right": right(draws),
            "guess": torch.zeros(draws, cells),
            "dressed": size * white,
            "pooled": 30 * size * white,
            "small": 0.6 * right(draws),
            "leading": right(draws) @ patterns[1:].T @ patterns[1:] / cells / 0.25,
        }[kind]
        rows.append(moments_against((mean + spread * x).exp(), exact))
        splits.append(split_distances(exact, draws, field))
    return summarise_exact(rows, torch.stack(splits).mean(0), Resamples(100, 0))


def steady_misses(kind: str, baseline: str = "dressed") -> set[str]:
    full = {"nrmse_mean": point(0.1), "spread_slope": point(1.0), "spread_by_lead": [0.01]}
    none = {**full, "spread_by_lead": [1.0]}
    prior = Entry("t", "steady")
    for case, figures in (("full", full), ("none", none)):
        prior.add("corrector", figures, f"observed {case}")
        prior.add("operator", figures, f"observed {case}")
    prior.add("corrector", exact_entry(kind), "observed points_50")
    prior.add("dressed", exact_entry(baseline), "observed points_50")
    return {row.criterion.split(": ")[1] for row in acceptance.steady(prior) if not row.passed}


def test_a_correct_prior_passes_and_is_within_the_floor_of_chance():
    assert not steady_misses("right")
    found = exact_entry("right")
    assert (
        found["distance"]["value"] < found["floor"] < 0.1
        and found["distance"]["low"] <= found["distance"]["value"]
    )


@pytest.mark.parametrize(
    ("fake", "criteria"),
    [
        ("guess", {"energy distance to exact draws, 40 fields", "variance of log u over the exact one"}),
        ("pooled", {"energy distance to exact draws, 40 fields", "variance of log u over the exact one"}),
        (
            "dressed",
            {
                "energy distance to exact draws, 40 fields",
                "variance of log u along the leading exact pattern",
            },
        ),
        ("small", {"variance of log u over the exact one"}),
        ("leading", {"variance of log u along the leading exact pattern"}),
    ],
)
def test_a_fake_prior_is_refused_where_little_is_uncertain(fake, criteria):
    assert criteria <= steady_misses(fake), steady_misses(fake)


def test_a_prior_that_is_far_where_a_cheap_ensemble_is_near_is_refused_and_equal_is_enough():
    criterion = "energy distance to exact draws less the least of the other cheap ensembles'"
    assert criterion in steady_misses("dressed", "right") and criterion in steady_misses("guess", "right")
    assert criterion not in steady_misses("right", "right")


# ---- the command


ROW = acceptance.Row("t", "x", point(1.0), 0.9, 1.1)


@pytest.mark.parametrize(
    ("figures", "code", "said"),
    [
        ([1.0, 0.9, 1.1], 0, "3 of 3 criteria met"),
        ([1.0, 0.899], 1, "1 of 2"),
        ([1.101], 1, "0 of 1"),
        ([1.0, math.nan], 1, "1 of 2"),
        ([None], 1, "0 of 1"),
        ([], 1, "0 of 0"),
    ],
)
def test_the_exit_status_is_zero_only_if_every_criterion_is_met(
    tmp_path, monkeypatch, capsys, figures, code, said
):
    facts = {
        "run": "r",
        "gates": [],
        **dict.fromkeys(("protocol", "environment", "training"), {}),
    }
    Results(facts, ensembles={"t": Entry("t", "ensembles")}).save(tmp_path / "report")
    files = {path.name: file_hash(path) for path in (tmp_path / "report").iterdir()}
    write_sealed(tmp_path / "report" / "done.json", {"files": files})
    monkeypatch.setattr(acceptance, "missing", lambda results: [])
    rows = [dataclasses.replace(ROW, found=point(value)) for value in figures]
    monkeypatch.setattr(acceptance, "transient", lambda entry: rows)
    monkeypatch.setattr(sys, "argv", ["acceptance", "--run", str(tmp_path)])
    assert acceptance.main() == code
    out = capsys.readouterr().out
    assert said in out and out.count("MISS") == len(figures) - int(said.split()[0])


@pytest.mark.parametrize("name", ["results.json", "results.csv"])
def test_a_report_that_is_damaged_or_missing_is_named_in_one_line(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["acceptance", "--run", str(tmp_path)])
    Results({"run": "r"}).save(tmp_path / "report")
    (tmp_path / "report" / name).write_text("[]")
    for _ in range(2):
        assert acceptance.main() == 1
        out, error = capsys.readouterr()
        assert not out and error.startswith("acceptance: ") and error.count("\n") == 1 and name in error
        (tmp_path / "report" / name).unlink(missing_ok=True)


def test_a_figure_that_a_report_does_not_have_is_missed():
    made = copy.deepcopy(forecast())
    drop(made, case="one step", model="corrector", metric="ssr")
    rows = {row.criterion: row for row in acceptance.transient(made)}
    row = rows["2b spread/skill one step ahead, all starts"]
    assert not row.passed and row.found == point(None)
