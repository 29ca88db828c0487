"""Figures of priors beside exact posteriors: right samples have those of an exact law, and no fake has."""

import functools

import pytest
import torch

from ups.evaluation.steady import moments_against, summarise_exact
from ups.metrics.intervals import Resamples

pytestmark = pytest.mark.faults  # tests/test_gates.py refuses the same fakes of a stage


@functools.cache
def exact_entry(kind: str, spread: float = 0.003) -> dict:
    """summarise_exact of 40 fields: u = exp(m + spread x), x two patterns of N(0, 1); kind: draws of that
    law, or a fake."""
    fields, draws, cells = 40, 48, 64
    generator = torch.Generator().manual_seed(3)
    patterns = torch.linalg.qr(torch.randn(cells, 2, generator=generator, dtype=torch.float64))[0].T
    patterns = cells**0.5 * torch.tensor([[1.0], [0.5]]) * patterns
    rows = []
    for _ in range(fields):
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
        }[kind]
        rows.append(moments_against((mean + spread * x).exp(), exact))
    return summarise_exact(rows, Resamples(100, 0))


def misses(kind: str) -> set[str]:
    """The figures of `kind` outside what is right."""
    found, guess = exact_entry(kind), exact_entry("dressed")["distance"]["value"]
    bounds = {
        "distance": (-1.0, 0.05 * guess),
        "log_trace": (0.9, 1.1),
    }
    return {name for name, (low, high) in bounds.items() if not low <= found[name]["value"] <= high}


def test_a_correct_prior_has_the_exact_law():
    assert not misses("right")


@pytest.mark.parametrize(
    ("fake", "figures"),
    [
        ("guess", {"distance", "log_trace"}),
        ("pooled", {"distance", "log_trace"}),
        ("dressed", {"distance"}),
        ("small", {"log_trace"}),
    ],
)
def test_a_fake_prior_is_refused_where_little_is_uncertain(fake, figures):
    assert figures <= misses(fake), misses(fake)
