"""CRPS, energy score and variogram score equal those of the library `scoringrules` (Zanetta and Allen)."""

import numpy as np
import pytest
import torch

from ups.metrics.joint import ORDER, increments
from ups.metrics.proper import energy_score, fair_crps, variogram_score

scoringrules = pytest.importorskip(
    "scoringrules", reason="scoringrules is not installed (requirements-dev.txt)"
)


def sample(*space: int, members: int = 7, cases: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Skewed members (cases, members, *space) and a truth that is none of them, float64."""
    drawn = torch.randn(cases, members + 1, *space, generator=torch.Generator().manual_seed(3)).double()
    drawn = drawn.exp() + drawn.cumsum(-1)
    return drawn[:, 1:], drawn[:, 0]


@pytest.mark.parametrize(("alpha", "estimator"), [(1.0, "fair"), (0.0, "nrg")])
def test_crps_is_that_of_the_library(alpha, estimator):
    members, truth = sample(12)
    theirs = scoringrules.crps_ensemble(truth.numpy(), members.numpy(), m_axis=1, estimator=estimator)
    assert np.allclose(fair_crps(members, truth, alpha), theirs.mean(1), rtol=0, atol=1e-6)


def test_energy_score_is_that_of_the_library():
    members, truth = sample(12)
    theirs = scoringrules.es_ensemble(truth.numpy(), members.numpy(), estimator="fair") / 12**0.5
    assert np.allclose(energy_score(members, truth), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("boundary", ["periodic", "no_flux"])
def test_variogram_score_is_that_of_the_library_with_weights_of_our_pairs(boundary):
    """Eight cells: lags 1, 2 and 4; without a period no pair reaches around the end."""
    members, truth = sample(8)
    weights = np.zeros((8, 8))
    for lag in (1, 2, 4):
        for first in range(8 if boundary == "periodic" else 8 - lag):
            weights[first, (first + lag) % 8] += 1
    weights = np.broadcast_to(weights / weights.sum(), (len(truth), 8, 8))
    theirs = scoringrules.vs_ensemble(
        truth.numpy(), members.numpy(), weights, p=ORDER, estimator="fair", backend="numpy"
    )
    v, v_ref = (
        increments(u.flatten(0, -2)[:, None, None], boundary)[:, 0, 0] for u in (members, truth[:, None])
    )
    ours = variogram_score(v.unflatten(0, members.shape[:2]), v_ref)
    assert np.allclose(ours, theirs, rtol=0, atol=1e-6)
