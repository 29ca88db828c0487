"""Gates, verdicts and which split is scored."""

import json
from types import SimpleNamespace

import pytest
import torch
from test_report import example, task_entry, waves

from ups import report
from ups.config import load_config
from ups.gates import check_gates, check_verdicts


def test_gates_pass_and_fail_for_the_stated_reason():
    results, _, _ = example()
    gates = {gate["name"]: gate for gate in results["gates"]}
    task = results["tasks"]["advection1d"]["models"]
    assert gates["persistence/advection1d"]["value"] == pytest.approx(
        task["operator"]["nrmse"]["value"] / task["persistence"]["nrmse"]["value"])
    assert "persistence/darcy2d" not in gates and not gates["nrmse/diff_react2d"]["passed"]
    assert gates["finite/cfd3d/operator"]["passed"] and "finite/advection1d/fno" not in gates
    limits = SimpleNamespace(max_ratio_to_persistence=1e-6, max_nrmse={"burgers1d": 0.1})
    failed = {gate["name"]: gate["reason"] for gate in check_gates(results, limits) if not gate["passed"]}
    assert "allowed is at most 1e-06" in failed["persistence/advection1d"]
    assert "was not evaluated" in failed["nrmse/burgers1d"]


@pytest.mark.parametrize(("value", "low", "high", "passes"), [
    (0.95, 0.85, 1.05, True), (0.78, 0.70, 0.86, False), (0.7, 0.6, 0.79, False), (1.4, 1.26, 1.5, False),
    (0.9, None, None, True), (0.7, None, None, False), (None, None, None, False)])
def test_the_spread_skill_gate_passes_where_the_whole_interval_is_inside(value, low, high, passes):
    entry = {"best_cheap": "dressed", "comparisons": {"corrector / dressed": {"crps": {"value": 0.9}}},
             "models": {"corrector": {"one_step": {"ssr": {"value": value, "low": low, "high": high}}}}}
    limits = SimpleNamespace(max_nrmse={}, max_crps_ratio=1.0, spread_skill=[0.8, 1.25])
    entry["comparisons"]["corrector / dressed"]["crps"] |= {"low": 0.9, "high": 0.9}
    [crps, gate] = check_gates({"tasks": {}, "ensembles": {"burgers1d_hidden": entry}}, limits)
    assert crps["passed"] and gate["passed"] is passes and "allowed is 0.8 to 1.25" in gate["reason"]


def test_a_prediction_that_is_not_finite_fails_every_gate_it_touches():
    results, _, _ = example()
    u_pred, u_ref, times, context = waves(4, 6, 1, 16, 1, 0)
    u_pred[1, 3] = torch.nan
    results["tasks"] = {"advection1d": task_entry(u_pred, u_ref, times, context, ["u"], "periodic", False)[0]}
    gates = check_gates(results, SimpleNamespace(max_ratio_to_persistence=1e9, max_nrmse={"advection1d": 1e9}))
    assert [gate["passed"] for gate in gates] == [False, False, False]
    results |= {"gates": gates, "verdicts": check_verdicts(results)}
    assert not results["verdicts"]["advection1d"]["usable"]
    assert "not finite" in report.verdict(results) and "3 of 3 gates fail" in report.verdict(results)
    report.validate_results(results)
    assert json.loads(json.dumps(results, allow_nan=False)) == results


@pytest.mark.parametrize(("error", "usable", "words"), [
    ((0.75, 0.72, 0.78), False, "more than a quarter of the field's energy is wrong"),     # passed "3 of 3" gates once
    ((0.45, 0.38, 0.52), False, "more than a quarter"), ((0.26, 0.23, 0.30), True, "Usable: its relative error is 0.26"),
    ((0.95, 0.85, 1.05), False, "not clearly below that of the trivial forecast (1)"), ((None, None, None), False, "not finite")])
def test_the_verdict_says_in_words_when_a_model_is_not_usable(error, usable, words):
    row = {"nrmse": dict(zip(("value", "low", "high"), error, strict=True))}
    entry = {"models": {"operator": row, "persistence": {"nrmse": {"value": 1.0, "low": 0.9, "high": 1.1}}}}
    verdict = check_verdicts({"tasks": {"own": entry}})["own"]
    assert verdict["usable"] is usable and words in verdict["words"]


def test_choices_have_a_report_of_their_own():
    config = load_config(None, ["run.name=r", "evaluate.split=val", "data.tasks=[advection1d, burgers1d]",
                                "evaluate.tasks=[burgers1d]"])
    assert str(config.report_dir) == "runs/r/report-val" and config.evaluated == ["burgers1d"]
    assert str(load_config(None, ["run.name=r"]).report_dir) == "runs/r/report"
    with pytest.raises(ValueError, match=r"evaluate.tasks is .*advection1d.* with evaluate.split test; expected every task"):
        load_config(None, ["evaluate.tasks=[advection1d]", "data.tasks=[advection1d]"])
    with pytest.raises(ValueError, match="evaluate.tasks names darcy2d; expected tasks of the run"):
        load_config(None, ["evaluate.tasks=[darcy2d]", "data.tasks=[advection1d]", "evaluate.split=val"])
