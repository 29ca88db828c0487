"""The gates on ensembles of barkley2d, where most cells are certain and a few are kicked: exact samples pass
them all, and fakes of tests/test_fakes.py are refused by a gate that names them."""

from __future__ import annotations

import pytest
import torch
from test_base_selection import make_caches
from test_fakes import ROLLOUTS, SETTINGS

from bench.excitable import LEADS, TASK, without_kicks
from ups.evaluation.claims import ENSEMBLE
from ups.evaluation.gates import gate, not_passed
from ups.evaluation.reference_ensembles import sample_exactly, sample_law
from ups.evaluation.truth import open_truth
from ups.metrics.ensembles import compare_ensembles, score_ensemble, summarise_ensemble
from ups.metrics.intervals import Resamples
from ups.metrics.likeness import likeness
from ups.results import Entry
from ups_solvers import barkley

pytestmark = pytest.mark.faults  # half a minute of exact samples
STARTS, MEMBERS, COUNT = 16, 10, 100
OF_NETWORKS = {"finite", "score", "condition", "teacher", "evaluations", "operations"}
REFUSED = {
    "exact": set(),
    "white": {"exact", "samples"},
    "without kicks": {"exact", "samples"},
    "permuted": {"samples"},
    "reshuffled": {"samples"},
    "leaked": {"samples"},
    "inflated": {"samples"},
    "wide": {"samples"},
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
    exact, rng = sample_exactly(truth, 0, rows, LEADS, MEMBERS), torch.Generator().manual_seed(1)
    ensembles = {
        "exact": exact,
        "white": operator + (exact - operator).std() * torch.randn(exact.shape, generator=rng),
        "without kicks": operator.repeat(1, MEMBERS, 1, 1, 1, 1),
        **{name: fake(exact, rng, u_ref) for name, fake in ROLLOUTS.items()},
    }
    scores = {
        name: score_ensemble(u, u_ref, "periodic", operator[:, 0], exact=law) for name, u in ensembles.items()
    }
    made = Entry(
        "t", "ensembles", {"best_cheap": "exact", "times": [1.0, 2.0, 3.0, 4.0], "fields": ["u", "v"]}
    )
    made.add("", {"members": MEMBERS})
    resamples = Resamples(COUNT, 0, groups)
    for name, u in ensembles.items():
        made.add(name, summarise_ensemble(scores[name], resamples))
        figures = likeness(u, u_ref, "periodic", operator[:, 0], resamples, law)
        made.add(name, {"likeness": figures})
        made.add(f"{name} / exact", compare_ensembles(scores[name], scores["exact"], resamples))
    return made


@pytest.mark.parametrize("model", REFUSED)
def test_exact_samples_pass_and_fakes_are_refused(entry, model):
    failed, count = {}, 0
    for claim in ENSEMBLE:
        found = None if claim.of_task or claim.name in OF_NETWORKS else claim.figure(entry, model)
        if found is not None:
            bounds = claim.bounds(SETTINGS, model)
            row = gate("diffusion", f"{claim.name}/t/{model}", "", found, *bounds, count=STARTS)
            count += 1
            if not_passed([row])[0]:
                failed[claim.name] = row["reason"]
    assert count == 2 and REFUSED[model] <= set(failed), failed
    assert model != "exact" or not failed, failed
