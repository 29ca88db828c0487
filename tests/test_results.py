"""The table of results (ups/results.py): every number of results.json is in it, and its file holds it."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from test_report import make_example
from test_report_ensemble import make_forecast, make_steady

from ups.results import Results, load

# of the entry of a task: what a task is and was given, and places in the lists of spectra
SETTINGS = ("times", "parameters", "grid", "selection", "leads", "wavenumber")


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in SETTINGS:
                yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def steps() -> dict[str, Any]:
    """An entry of ensembles with single steps, checks and long rollouts; all its numbers differ."""
    count = itertools.count(1)

    def interval() -> dict[str, float]:
        return {end: next(count) + 0.5 for end in ("value", "low", "high")}

    step = {
        "ssr": interval(),
        "spread_skill_bins": {"spread": [next(count) + 0.5, None], "slope": None},
        "by_start": [{"first": 0, "last": 0, "ssr": interval()}, {"first": 1, "last": 3, "ssr": interval()}],
    }
    checks = {
        "response": {"student_1": interval()},
        "pairing": {"student_1": {"error": interval(), "correlation": interval()}},
        "energy_distance_floor": next(count) + 0.5,
        "ranks_of_data": {end: [next(count) + 0.5, next(count) + 0.5] for end in ("value", "low", "high")},
        "long": {
            "frames": 30,
            "blown_up": {"corrector": 2},
            "climate": {"truth": {"memory": next(count) + 0.5}},
        },
    }
    return {"models": {"corrector": {"one_step": step}}, "checks": checks, "members": 7, "times": [0.5]}


def full() -> dict[str, Any]:
    """Everything that a report may have."""
    noise = {"sigma": {"u": 0.05}, "fraction": {"u": 0.01}, "nrmse": {"operator": [0.3, 0.2]}}
    costs = {"budget_s": {"data": 1.5}, "solver": {"error": 0.1, "seconds": 2.5, "grid": []}}
    example = json.loads(json.dumps(make_example()[0]))
    example["tasks"]["cfd3d"] |= {"noise": noise, "break_even": {"forecasts": None, "words": "N*", **costs}}
    steady = make_steady()[0] | {"chance": {"full": {"distance": {"value": 0.5, "low": 0.25, "high": 0.75}}}}
    entries = {"burgers1d": make_forecast()[0], "burgers1d_hidden": steps()}
    return example | {"ensembles": entries, "steady": {"darcy2d_grf": steady | {"ssr": 1.5}}}


def test_every_number_of_results_json_is_in_the_table():
    facts = full()
    rows = Results.of(facts).rows
    found = Counter(number for row in rows for number in row[5:] if number is not None)
    expected = Counter(number for part in ("tasks", "ensembles", "steady") for number in numbers(facts[part]))
    assert found == expected and sum(found.values()) > 3_000
    assert len({row[:5] for row in rows}) == len(rows)  # no two have one name


def test_a_number_is_found_by_its_name():
    facts = full()
    results = Results.of(facts)
    task, nested = results.tasks["advection1d"], facts["tasks"]["advection1d"]
    assert task.value("operator", "nrmse") == nested["models"]["operator"]["nrmse"]
    ratio = nested["comparisons"]["operator / base"]["nrmse"]
    assert task.value("operator / base", "nrmse") == ratio and task.ratios() == [*nested["comparisons"]]
    assert task.value("operator", "speed") is None and task.number("fake", "nrmse") is None
    assert task.models() == [*nested["models"]] and task.number("", "num_trajectories") == 4
    growth = task.by_lead("operator", "error_growth")
    assert (
        growth["lead"] == nested["times"]
        and growth["low"] == nested["models"]["operator"]["error_growth_low"]
    )
    spectrum = nested["spectra"]["truth"]
    assert task.by_lead("truth", "spectrum/0/3", "spectra")["value"] == [lead[0][3] for lead in spectrum]
    ensemble, nested = results.ensembles["burgers1d"], facts["ensembles"]["burgers1d"]
    counts = nested["models"]["corrector"]["rank_histogram"]
    assert ensemble.listed("corrector", "rank_histogram")["value"] == counts
    levels = nested["models"]["corrector"]["coverage_by_lead"]
    assert ensemble.by_lead("corrector", "coverage/4")["value"] == levels[4]
    [row] = results.select(task="burgers1d", case="rollout", model="corrector", metric="crps", lead=None)
    assert row.value == nested["models"]["corrector"]["crps"]["value"]
    hidden, nested = results.ensembles["burgers1d_hidden"], facts["ensembles"]["burgers1d_hidden"]
    part = nested["models"]["corrector"]["one_step"]["by_start"][-1]
    assert hidden.cases("start ") == ["start 0-0", "start 1-3"]
    assert hidden.value("corrector", "ssr", "start 1-3") == part["ssr"]
    paired = nested["checks"]["pairing"]["student_1"]["error"]
    assert hidden.value("student_1", "pairing/error", "one step") == paired
    ranks = hidden.listed("", "ranks_of_data", "one step")
    assert {end: ranks[end] for end in ("value", "low", "high")} == nested["checks"]["ranks_of_data"]
    prior = results.steady["darcy2d_grf"]
    assert prior.number("corrector", "distance", "observed full") == pytest.approx(6.31)
    assert prior.number("", "ssr") == 1.5 and prior.number("", "distance", "chance full") == 0.5


def test_the_table_comes_back_from_its_file_bit_by_bit(tmp_path):
    results = Results.of(full())
    results.save(tmp_path)
    again = load(tmp_path)
    assert again.rows == results.rows and again.facts == results.facts
    kinds = [[type(number) for number in row[4:]] for row in again.rows]
    assert kinds == [[type(number) for number in row[4:]] for row in results.rows]  # counts stay whole
    head, first, *_ = (tmp_path / "results.csv").read_text(encoding="utf-8").splitlines()
    assert head == "task,case,model,metric,lead,value,low,high" and first.startswith("advection1d,forecast,")
