"""The chain on the problems whose next state is truly uncertain, in miniature: what the report says of
them."""

from pathlib import Path

import pytest
from loop_stage import run_scripts

import prepare_cache
import prepare_data
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.evaluation.gates import check_gates
from ups.results import load
from ups.tasks import get_task

TASKS = {  # with a base that is fitted in seconds
    "burgers1d_forced": "{num_trajectories: 24, resolution: 32, num_frames: 14, t_end: 0.65, "
    "base: [propagator]}",
    "ks1d_coarse": "{num_trajectories: 24, resolution: 32, num_frames: 14, t_end: 13, patch: 2, history: 2, "
    "base: [propagator]}",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """The report's folder of a run of every script."""
    root = tmp_path_factory.mktemp("uncertain")
    arguments = [
        "--config",
        str(ROOT / "configs" / "smoke.yaml"),
        f"run.root={root}/runs",
        f"data.root={root}/data",
        f"cache.root={root}/cache",
        f"data.tasks=[{', '.join(TASKS)}]",
        *[f"task.{name}={settings}" for name, settings in TASKS.items()],
    ]
    assert prepare_data.main([*arguments, "--workers=1"]) == 0 and prepare_cache.main(arguments) == 0
    run_scripts(root, arguments, "train_operator", "train_diffusion", "train_consistency", "evaluate")
    return root / "runs/smoke/report"


@pytest.mark.faults
def test_the_report_has_exact_samples_if_the_law_is_known_and_statistics_otherwise(report):
    results = load(report)
    page = (report / "report.html").read_text()
    for name, entry in results.ensembles.items():
        models, has_law = entry.models(), get_task(name).has_known_law
        assert "analogs" in models
        assert ({"exact", "bayes_mean"} <= set(models)) == has_law == ("corrector / exact" in entry.ratios())
        over = entry.by_lead("corrector", "crps_over_exact")
        assert has_law == (over.get("lead") == entry.facts["times"])
        assert get_task(name).why_uncertain in entry.facts["words"][0]
        # those of smoke.yaml claim less
        gates = {gate["name"] for gate in check_gates(results, load_config(None).evaluate)}
        assert (f"exact/{name}/corrector" in gates) == (f"law_ranks/{name}" in gates) == has_law
        assert {f"{claim}/{name}/student_1" for claim in ("samples", "condition", "operations")} <= gates
        late = [
            model for model in entry.models("long") if entry.listed(model, "likeness/late variance", "long")
        ]
        trained = ("operator", "waves", "corrector", "student_1", "student_2")
        assert set(late) == {*trained, *(["exact"] if has_law else [])}
    assert page.count("energy in the worst octave, ratio") >= 2
    assert page.count("CRPS over that of exact draws") >= 1
    assert "mean of exact draws" in page
    assert "errors of analogs" in page
    assert "best possible mean" in results.facts["usability"]["burgers1d_forced"]["words"]


def test_exact_samples_need_the_grid_of_the_data():
    config = load_config(ROOT / "configs" / "uncertain.yaml")
    assert {*config.data.tasks} == {*TASKS, "vorticity2d_forced"}
    assert config.evaluate.ensemble_trajectories >= 100
    for name in config.data.tasks:
        settings = config.task[name]
        assert (
            settings.space_stride == 1 and settings.reserve > 0.5 and settings.history <= config.context(name)
        )
        tested = config.data.test_fraction * settings.num_trajectories * max(1, len(settings.parameters))
        assert tested >= 100, name  # initial conditions behind the intervals
