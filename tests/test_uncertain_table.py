"""The table of ensembles over seeds (bench/uncertain.py): its figures are those of the reports, and runs that
are no repetitions of each other are refused."""

from __future__ import annotations

import sys

import pytest
from entries import entry_of

from bench import uncertain
from ups.results import Results


def model(crps: float, leads: list[float]) -> tuple[dict, dict]:
    """(row of a model, its comparison)."""
    return (
        {"ssr_by_lead": leads, "evaluations_per_state": 2.0},
        {
            "crps": {"value": crps, "low": crps - 0.1, "high": crps + 0.1},
            "crps_by_lead": {
                "value": [crps, crps + 0.2],
                "low": [crps - 0.3, crps],
                "high": [crps + 0.3, crps + 0.4],
            },
        },
    )


TIMES = {"times": [0.1, 0.2]}


def results(seed: int, crps: float = 1.0) -> Results:
    rows = {"operator": model(1.4, [0.0, 0.0]), "student_1": model(crps, [0.9, 1.0 + 0.1 * seed])}
    models = {"": {"num_trajectories": 10, "members": 4}} | {name: row for name, (row, _) in rows.items()}
    versus = {f"{name} / exact": versus for name, (_, versus) in rows.items()}
    exact = {"exact": model(1.0, [1.0, 1.0])[0]}
    forced = entry_of("ensembles", TIMES, "forced", main=models | exact | versus)
    models |= {"student_1 / operator": rows["student_1"][1]}
    coarse = entry_of("ensembles", TIMES, "coarse", main=models)
    facts = {
        "run": f"run_{seed}",
        "protocol": {"split": "test", "context_frames": 3, "seed": seed},
        "training": {"data_seed": 1},
    }
    return Results(facts, ensembles={"forced": forced, "coarse": coarse})


def written(folder, found: Results):
    """A run's folder."""
    found.save(folder / "report")
    return folder


def printed(monkeypatch, capsys, *folders) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["uncertain", "--runs", *map(str, folders)])
    status = uncertain.main()
    return status, *capsys.readouterr()


def test_a_row_is_the_mean_over_seeds_with_the_widest_interval_and_the_extreme_leads(
    tmp_path, monkeypatch, capsys
):
    folders = [written(tmp_path / str(seed), results(seed, 1.0 + 0.1 * seed)) for seed in (0, 1)]
    status, page, _ = printed(monkeypatch, capsys, *folders)
    assert status == 0
    assert "forced: 10 initial conditions, 2 leads, 4 members, 2 runs, seeds 0, 1" in page
    assert "| student, 1 step | 1.050 [0.900, 1.200] | 1.250 [1.000, 1.500] | 0.90 to 1.10 | 2 |" in page
    assert "| UPS operator | 1.400 [1.300, 1.500] | 1.600 [1.400, 1.800] | 0.00 to 0.00 | 2 |" in page
    assert "CRPS over the operator's" in page


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.facts["protocol"].update(context_frames=4), "differ in context;"),
        (lambda found: found.facts["protocol"].update(seed=0), r"the runs have the seeds \[0, 0\]"),
        (lambda found: found.facts["training"].update(data_seed=2), "differ in data;"),
        (lambda found: found.ensembles["forced"].add("", {"members": 5}), "differ in forced;"),
        (lambda found: found.ensembles.pop("coarse"), "differ in coarse;"),
    ],
)
def test_runs_that_are_no_repetitions_are_refused(change, words, tmp_path, monkeypatch, capsys):
    other = results(1)
    change(other)
    with pytest.raises(ValueError, match=words):
        uncertain.table([results(0), other])
    status, page, error = printed(
        monkeypatch, capsys, written(tmp_path / "a", results(0)), written(tmp_path / "b", other)
    )
    assert status == 1 and not page and error.startswith("uncertain: ")
