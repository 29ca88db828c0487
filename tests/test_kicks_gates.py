"""The gates on ensembles of barkley2d, where most cells are certain and a few are kicked: exact samples pass
them all, and fakes of tests/test_fakes.py are refused by a gate that names them."""

from __future__ import annotations

import pytest
import torch
from test_base_selection import make_caches
from test_fakes import ROLLOUTS, SETTINGS

from bench.excitable import LEADS, TASK, without_kicks
from ups.evaluation.claims import ENSEMBLE
from ups.evaluation.gates import gate
from ups.evaluation.one_step import independence
from ups.evaluation.reference_ensembles import sample_exactly, sample_law
from ups.evaluation.truth import open_truth
from ups.metrics.ensembles import compare_ensembles, score_ensemble, summarise_ensemble
from ups.metrics.intervals import Resamples
from ups.metrics.joint import law_increments, residual_energy, score_joint
from ups.results import Entry
from ups_solvers import barkley

pytestmark = pytest.mark.faults  # half a minute of exact samples
STARTS, MEMBERS, COUNT = 16, 10, 100
OF_NETWORKS = {"finite", "score", "condition", "teacher", "evaluations", "operations"}
REFUSED = {
    "exact": set(),
    "white": {"exact", "coverage_50", "variogram_space", "spectrum"},
    "without kicks": {"exact", "trajectories", "spread", "coverage_50"},
    "permuted": {"autocorrelation"},
    "reshuffled": {"spectrum"},
    "leaked": {"nearest"},
    "inflated": {"spread"},
    "wide": {"spread"},
}


@pytest.fixture(scope="module")
def entry(tmp_path_factory) -> Entry:
    """Figures of exact samples and of fakes. The operator is the equation alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(barkley, "SPIN", 16.0)
        config = make_caches(
            tmp_path_factory.mktemp("kicks"),
            f"data.tasks=[{TASK}]",
            "data.test_fraction=0.5",
            f"task.{TASK}={{num_trajectories: {2 * STARTS + 4}, num_frames: {LEADS + 2}, "
            f"t_end: {LEADS + 1}.0}}",
            "evaluate.context_frames=2",
        )
    truth = open_truth(config, TASK)
    rows = truth.cache.split[truth.split][truth.one_of_each(STARTS)]
    groups, u_ref = truth.cache.trajectory[rows], truth.future(rows, LEADS)
    law, operator = sample_law(truth, 2, rows, LEADS, u_ref, 24), without_kicks(truth, rows)
    known = law, residual_energy(law, u_ref, "periodic", operator[:, 0]), law_increments(law, "periodic")
    exact, rng = sample_exactly(truth, 0, rows, LEADS, MEMBERS), torch.Generator().manual_seed(1)
    ensembles = {
        "exact": exact,
        "white": operator + (exact - operator).std() * torch.randn(exact.shape, generator=rng),
        "without kicks": operator.repeat(1, MEMBERS, 1, 1, 1, 1),
        **{name: fake(exact, rng, u_ref) for name, fake in ROLLOUTS.items()},
    }
    scores = {
        name: score_ensemble(u, u_ref, "periodic", operator[:, 0], exact=law)
        | score_joint(u, u_ref, "periodic", operator[:, 0], *known)
        for name, u in ensembles.items()
    }
    made = Entry("t", "ensembles", {"best_cheap": "exact"})
    made.add("", {"members": MEMBERS})
    resamples = Resamples(COUNT, 0, groups)
    for name, u in ensembles.items():
        made.add(name, summarise_ensemble(scores[name], resamples))
        made.add(name, {"independence": independence(u, resamples, law, None)})
        made.add(f"{name} / exact", compare_ensembles(scores[name], scores["exact"], resamples))
    return made


@pytest.mark.parametrize("model", REFUSED)
def test_exact_samples_pass_and_fakes_are_refused(entry, model):
    failed, count = {}, 0
    for claim in ENSEMBLE:
        found = None if claim.of_task or claim.name in OF_NETWORKS else claim.figure(entry, model)
        if found is not None:
            row = gate("diffusion", f"{claim.name}/t/{model}", "", found, **claim.bounds(SETTINGS, model))
            count += 1
            if not row["passed"]:
                failed[claim.name] = row["reason"]
    assert count == 10 and REFUSED[model] <= set(failed), failed
    assert model != "exact" or not failed, failed
