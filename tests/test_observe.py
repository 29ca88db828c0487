"""Observations of an input field (ups/generative/observation.py), at random levels and in the named cases."""

import math

import pytest
import torch
from known_answers import posterior
from torch import Tensor

from ups.data.counts import PRIOR_BLOCK
from ups.generative.observation import (
    BLOCKS,
    CASES,
    COVERAGE,
    FACTS,
    KIND_FRACTIONS,
    NOISY_STD,
    Observation,
    as_linear,
    observe,
    observe_case,
    row_generators,
    sample_levels,
)
from ups_solvers import darcy_grf
from ups_solvers.darcy_grf import LinearObservation


def field(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def levels(*rows: tuple[float, float, int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def within(count: int, fraction: float, num: int) -> bool:
    """Whether a binomial count is within four standard deviations."""
    return abs(count - num * fraction) < 4 * math.sqrt(num * fraction * (1 - fraction))


# ---- training levels


def test_kinds_occur_with_their_fractions_and_levels_are_log_uniform_in_their_ranges() -> None:
    num = 4000
    coverage, noise, block = sample_levels((16, 24), row_generators(0, rows=range(num))).unbind(1)
    kinds = {
        "full": (coverage == 1) & (noise == 0) & (block == 1),
        "none": coverage == 0,
        "points": (coverage > 0) & (coverage < 1),
        "coarse": block > 1,
        "noisy": noise > 0,
    }
    assert sum(int(rows.sum()) for rows in kinds.values()) == num  # every row is of one kind
    for name, rows in kinds.items():
        assert within(int(rows.sum()), KIND_FRACTIONS[name], num), name
    for values, (low, high) in ((coverage[kinds["points"]], COVERAGE), (noise[kinds["noisy"]], NOISY_STD)):
        assert low <= values.min() < 1.05 * low and 0.95 * high < values.max() <= high
        assert within(int((values < math.sqrt(low * high)).sum()), 0.5, len(values))  # log-uniform
    coarse = block[kinds["coarse"]]
    assert all(within(int((coarse == size).sum()), 1 / 3, len(coarse)) for size in BLOCKS)


def test_only_blocks_that_divide_the_grid_are_sampled() -> None:
    assert max(block for _, _, block in CASES.values()) == PRIOR_BLOCK  # which such grids are multiples of
    assert set(sample_levels((12, 20), row_generators(0, rows=range(400)))[:, 2].tolist()) == {1, 2, 4}


def test_a_row_does_not_depend_on_its_batch() -> None:
    v = field(12, 1, 8, 8)

    def observation(rows: range, *keys: int) -> Observation:
        rngs = row_generators(5, *keys, rows=rows)
        return observe(v[rows.start : rows.stop], sample_levels((8, 8), rngs), rngs)

    whole, parts = observation(range(12), 3), [observation(range(5), 3), observation(range(5, 12), 3)]
    for name in ("values", "mask", "facts"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))
    assert not torch.equal(whole.mask, observation(range(12), 4).mask)


# ---- observations


@pytest.mark.parametrize("space", [(64,), (16, 8), (8, 8, 16)])
def test_points_are_observed_exactly_and_other_cells_hold_zero(space: tuple[int, ...]) -> None:
    v = field(3, 2, *space)
    found = observe(v, levels((0.25, 0, 1), (0.5, 0, 1), (1e-9, 0, 1)), row_generators(1, rows=range(3)))
    cells = math.prod(space)
    assert found.mask.shape == (3, 1, *space)
    assert found.values.shape == v.shape
    assert found.facts.shape == (3, len(FACTS))
    assert found.mask.flatten(1).sum(1).tolist() == [cells // 4, cells // 2, 1]
    assert set(found.mask.unique().tolist()) == {0, 1}
    assert torch.equal(found.values, v * found.mask)
    assert found.facts[:2].tolist() == [[0.25, 0, 0], [0.5, 0, 0]] and found.facts.dtype == torch.float32


@pytest.mark.parametrize("space", [(16,), (16, 8), (8, 8, 16)])
def test_coarse_values_are_the_means_of_their_blocks(space: tuple[int, ...]) -> None:
    v = field(2, 1, *space)
    found = observe(v, levels((1, 0, 1), (1, 0, 4)), row_generators(1, rows=range(2)))
    assert torch.equal(found.values[0], v[0]) and found.mask.min() == 1
    for first in ((0,) * len(space), (4,) * len(space)):
        block = (1, 0, *[slice(start, start + 4) for start in first])
        torch.testing.assert_close(found.values[block], v[block].mean().expand([4] * len(space)))
    assert found.facts[1].tolist() == [1, 0, 2]


def test_noise_has_the_standard_deviation_of_the_level() -> None:
    v = field(2, 1, 64, 64)
    found = observe(v, levels((1, 0.5, 1), (1, 0, 1)), row_generators(1, rows=range(2)))
    noise = (found.values - v)[0].flatten().double()
    assert abs(noise.mean()) < 4 * 0.5 / 64 and abs(noise.std() / 0.5 - 1) < 4 / math.sqrt(2 * 4096)
    assert torch.equal(found.values[1], v[1])
    assert found.mask.min() == 1
    assert found.facts[:, 1].tolist() == [0.5, 0]


def test_a_block_that_does_not_divide_the_grid_is_refused() -> None:
    v = field(2, 1, 12, 16)
    with pytest.raises(
        ValueError, match=r"blocks of 8 cells do not divide the grid \(12, 16\); expected a multiple of 8"
    ):
        observe(v, levels((1, 0, 1), (1, 0, 8)), row_generators(0, rows=range(2)))


# ---- observations for the exact posterior


@pytest.mark.parametrize("case", CASES)
def test_the_linear_observation_is_of_the_log_coefficient_itself(case: str) -> None:
    g = darcy_grf.sample_log_coefficient(0, 3, 16)
    mean, std = 0.3, 0.8
    v = ((g - mean) / std).float()[None, None]
    found = observe_case(v, case, row_generators(0, rows=range(1)))
    linear = LinearObservation(**as_linear(found, 0, mean, std))
    count = {"none": 0, "points_1": 3, "points_10": 26, "points_50": 128, "coarse_4": 16}.get(case, 256)
    assert linear.cells.shape == (count, 16 if case == "coarse_4" else 1)
    assert linear.values.dtype == torch.float64
    assert linear.noise == pytest.approx(0.3 * std if case == "noisy_0.3" else 0.0)
    error = linear.values - linear.matrix @ g.flatten()
    if linear.noise:
        assert abs(error.std() / linear.noise - 1) < 4 / math.sqrt(2 * 256)
    else:
        assert not bool((error.abs() > 1e-6).any())
    observed = (found.mask[0, 0] > 0).flatten()
    assert torch.equal(
        torch.zeros(256, dtype=torch.bool).index_fill_(0, linear.cells.flatten(), True), observed
    )
    if case == "full":
        torch.testing.assert_close(posterior(linear)[0], g, rtol=0, atol=1e-6)
