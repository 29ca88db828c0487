"""CRPS and energy score equal those of the library `scoringrules` (Zanetta and Allen)."""

import numpy as np
import pytest
import torch

from ups.metrics.proper import energy_score, fair_crps

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
