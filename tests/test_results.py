"""The table of results (ups/results.py): figures become rows, a number is found by its name, and the files
hold all."""

import json
from typing import Any

import pytest
from test_report import make_example
from test_report_ensemble import make_forecast, make_steady

from ups.results import Entry, Results, Row, load

VALUE = {"value": 1.0, "low": 0.5, "high": 2.0}
# figures of a model -> metric, lead, value, low, high of their rows, at the leads 0.1 and 0.2
FIGURES: dict[str, tuple[dict[str, Any], list[tuple]]] = {
    "a number": ({"members": 7}, [("members", None, 7, None, None)]),
    "an undefined number": ({"ssr": None}, [("ssr", None, None, None, None)]),
    "an interval": ({"crps": VALUE}, [("crps", None, 1.0, 0.5, 2.0)]),
    "a list": ({"ranks": [3, 4]}, [("ranks/0", None, 3, None, None), ("ranks/1", None, 4, None, None)]),
    "by lead": (
        {"crps": 5.0, "crps_by_lead": {"value": [1.0, None], "low": [0.5, None], "high": [2.0, None]}},
        [("crps", None, 5.0, None, None), ("crps", 0.1, 1.0, 0.5, 2.0), ("crps", 0.2, None, None, None)],
    ),
    "levels by lead": (
        {"coverage_by_lead": [[0.1, 0.2], [0.3, 0.4]]},
        [
            (f"coverage/{level}", lead, value, None, None)
            for level, lead, value in ((0, 0.1, 0.1), (0, 0.2, 0.2), (1, 0.1, 0.3), (1, 0.2, 0.4))
        ],
    ),
    "a dictionary": (
        {"bins": {"spread": [1.0], "slope": None}, "pairing": {"error": VALUE}},
        [
            ("bins/spread/0", None, 1.0, None, None),
            ("bins/slope", None, None, None, None),
            ("pairing/error", None, 1.0, 0.5, 2.0),
        ],
    ),
}


@pytest.mark.parametrize("kind", FIGURES)
def test_figures_become_rows_with_their_leads_and_intervals(kind):
    figures, rows = FIGURES[kind]
    entry = Entry("t", "ensembles", {"times": [0.1, 0.2]})
    entry.add("corrector", figures)
    entry.add("corrector", figures)  # takes the place of the first
    assert entry.rows == [Row("t", "rollout", "corrector", *row) for row in rows]


def full() -> Results:
    """Everything that a report may have."""
    example, forecast, prior = (make() for make in (make_example, make_forecast, make_steady))
    steps = Entry("hidden", "ensembles", {"times": [0.5]})
    steps.add("", {"ranks_of_data": {end: [1.0, 2.0] for end in VALUE}}, "one step")
    pooled = Entry("grf", "steady")
    pooled.add("", {"ssr": 1.5})
    ensembles, steady = {"burgers1d": forecast[0], "hidden": steps}, {"darcy2d_grf": prior[0], "grf": pooled}
    return Results(dict(example[0].facts), example[0].tasks, ensembles, steady)


def test_a_number_is_found_by_its_name():
    results = full()
    task, ensemble, hidden = results.tasks["advection1d"], *results.ensembles.values()
    assert task.value("operator", "speed") is None and task.number("fake", "nrmse") is None
    assert task.models()[:2] == ["operator", "base"] and task.number("", "num_trajectories") == 4
    assert task.ratios() == ["operator / base", "operator / persistence"]
    assert task.by_lead("operator", "error_growth")["lead"] == task.facts["times"]
    [row] = results.select(task="burgers1d", case="rollout", model="corrector", metric="crps", lead=None)
    assert row.value == ensemble.number("corrector", "crps")
    assert hidden.listed("", "ranks_of_data", "one step")["value"] == [1.0, 2.0]
    assert results.steady["darcy2d_grf"].number("corrector", "distance", "observed full") == pytest.approx(
        6.31
    )
    assert results.steady["grf"].number("", "ssr") == 1.5
    observed = results.steady["darcy2d_grf"].cases("observed ")
    assert observed[0] == "observed none" and observed[-1] == "observed full"


def test_the_table_comes_back_from_its_file_bit_by_bit(tmp_path):
    results = full()
    results.save(tmp_path)
    again = load(tmp_path)
    assert again.rows == results.rows and len(again.rows) > 600
    assert again.record == json.loads(json.dumps(results.record))
    assert again.tasks.keys() == results.tasks.keys() and again.steady["grf"].case == "partial"
    assert len({row[:5] for row in again.rows}) == len(again.rows)  # no two have one name
    kinds = [[type(number) for number in row[4:]] for row in again.rows]
    assert kinds == [[type(number) for number in row[4:]] for row in results.rows]  # counts stay whole
    head, first, *_ = (tmp_path / "results.csv").read_text(encoding="utf-8").splitlines()
    assert head == "task,case,model,metric,lead,value,low,high" and first.startswith("advection1d,forecast,")
