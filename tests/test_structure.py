"""Joint scores of exact members are 1, and their differences from exact samples 0, on any grid."""

import math

import pytest
import torch

from ups.evaluation.one_step import ranks_of_data, response
from ups.metrics.intervals import Resamples, halves
from ups.metrics.joint import decades, score_structure, score_trajectories
from ups.metrics.likeness import likeness

GRIDS = [
    ((32,), "periodic", 6, 1),
    ((33,), "no_flux", 5, 2),
    ((8, 12), "periodic", 3, 1),
    ((16,), "dirichlet", 1, 1),
    ((4, 6, 5), "outflow", 2, 1),
]


def walks(count: int, num: int, frames: int, fields: int, space: tuple[int, ...], seed: int) -> torch.Tensor:
    """Members (count, num, frames, fields, *space): random walks of a smooth field plus small noise."""
    source = torch.Generator().manual_seed(seed)
    rough = torch.randn(count, num, frames, fields, *space, generator=source)
    smooth = torch.randn(count, num, frames, fields, *[1] * len(space), generator=source)
    return 5 + (smooth + 0.1 * rough).cumsum(2)


def figures(members: torch.Tensor, u_ref: torch.Tensor, boundary: str) -> dict[str, dict]:
    scores = score_structure(members, u_ref, boundary, torch.full_like(u_ref, 5.0))
    nearest = scores["nearest"].flatten(1), lambda mean: halves(mean).mean(1)
    of_all = {"nearest": nearest, "spectrum": decades(scores["energy"])}
    return {name: Resamples(100, 0).interval(*part) for name, part in of_all.items()}


@pytest.mark.parametrize(("space", "boundary", "frames", "fields"), GRIDS)
@pytest.mark.parametrize("count", [200, 12])
def test_exact_members_are_as_far_from_each_other_as_from_the_truth(space, boundary, frames, fields, count):
    """Also for few trajectories."""
    drawn = walks(count, 9, frames, fields, space, 1)
    found = figures(drawn[:, 1:], drawn[:, 0], boundary)
    assert found["nearest"]["low"] <= 1.15 and found["nearest"]["high"] >= 0.85, found["nearest"]
    assert abs(found["nearest"]["value"] - 1) < (0.1 if count == 200 else 0.5), found["nearest"]
    assert found["spectrum"]["value"] < (0.15 if count == 200 else 0.6)


@pytest.mark.parametrize(
    ("fake", "name", "low", "high"), [("white", "spectrum", 0.5, math.inf), ("leaked", "nearest", 0.0, 1e-6)]
)
def test_members_without_structure_are_far_from_the_truth_and_a_copy_of_it_is_near(fake, name, low, high):
    drawn = walks(100, 9, 6, 1, (32,), 2)
    u, u_ref, source = drawn[:, 1:], drawn[:, 0], torch.Generator().manual_seed(0)
    members = {
        "white": lambda: 5 + u.sub(5).std() * torch.randn(u.shape, generator=source),
        "leaked": lambda: torch.cat([u_ref[:, None], u[:, 1:]], 1),
    }[fake]()
    found = figures(members, u_ref, "periodic")[name]
    assert low <= found["low"] and found["high"] <= high, found


def test_scores_of_one_member_or_of_members_that_are_not_finite_are_undefined():
    drawn = walks(20, 4, 3, 1, (16,), 3)
    assert (score_trajectories(drawn[:, 1:2], drawn[:, 0])["trajectory_score"] > 0).all()
    same = figures(drawn[:, 1:2].expand(-1, 3, -1, -1, -1), drawn[:, 0], "periodic")
    assert same["nearest"]["value"] is None
    drawn[3, 2, 1] = torch.nan
    assert {row["value"] for row in figures(drawn[:, 1:], drawn[:, 0], "periodic").values()} == {None}
    assert score_trajectories(drawn[:, 1:], drawn[:, 0])["trajectory_score"].isinf().sum() == 1


def test_the_trajectory_score_over_exact_samples_has_the_same_mean_and_less_noise():
    drawn, law = walks(400, 5, 3, 1, (8,), 4), walks(400, 16, 3, 1, (8,), 5)
    by_truth = score_trajectories(drawn[:, 1:], drawn[:, 0])["trajectory_score"]
    by_law = score_trajectories(drawn[:, 1:], drawn[:, 0], law)["trajectory_score"]
    assert float(by_law.mean()) == pytest.approx(float(by_truth.mean()), rel=0.05)
    assert by_law.std() < 0.5 * by_truth.std()


@pytest.mark.parametrize("has_law", [True, False])
@pytest.mark.parametrize(("space", "boundary", "frames", "fields"), GRIDS)
def test_figures_of_exact_members_are_zero_but_for_chance_on_any_grid(
    space, boundary, frames, fields, has_law
):
    drawn = walks(100, 49, frames, fields, space, 5)
    u_ref, x, again, law = drawn[:, 0], drawn[:, 1:9], drawn[:, 9:17], drawn[:, 17:]
    known = {"law": law} if has_law else {"again": again}
    found = likeness(x, u_ref, boundary, torch.zeros_like(u_ref), Resamples(200, 0), **known)
    assert ("starts" in found) == ("activity" in found) == has_law
    assert bool(found["memory"]["value"]) == (frames > 1)
    assert bool(found["fields"]["value"]) == (fields > 1)
    for family, (value, low, high) in ((name, row.values()) for name, row in found.items()):
        for one, least, most in zip(value, low, high, strict=True):
            wide = most - least
            assert least <= one <= most and least - wide / 4 <= 0 <= most + wide / 4, (
                family,
                one,
                least,
                most,
            )


def test_figures_of_equal_members_and_of_members_that_are_not_finite_are_undefined():
    drawn, resamples = walks(20, 20, 3, 1, (16,), 3), Resamples(20, 0)
    u_ref, x, law = drawn[:, 0], drawn[:, 1:4].clone(), drawn[:, 4:]
    same = u_ref[:, None].expand_as(x)
    assert likeness(same, u_ref, "periodic", u_ref, resamples, again=same)["together"]["value"] == [None]
    x[3, 2, 1] = torch.nan
    assert {*likeness(x, u_ref, "periodic", u_ref, resamples, law)["spread"]["value"]} == {None}


def test_the_response_is_the_slope_on_the_teachers_and_zero_without_conditions():
    own, other = torch.randn(2, 30, 4, 8, 3, generator=torch.Generator().manual_seed(0)).unbind(0)
    groups = torch.arange(30)
    assert response((0.5 * own, 0.5 * other), (own, other), Resamples(50, 0, groups))[
        "value"
    ] == pytest.approx(0.5)
    assert response((own, own), (own, other), Resamples(50, 0, groups))["value"] == 0.0


@pytest.mark.parametrize(("size", "low", "high"), [(1.0, 0.47, 0.53), (0.8, 0.2, 0.45), (1.25, 0.55, 0.8)])
def test_exact_data_have_uniform_ranks_among_the_samples(size, low, high):
    every = torch.randn(400, 17, 1, 1, 16, generator=torch.Generator().manual_seed(0)) + 3
    ranks = ranks_of_data(
        size * every[:, 0], size * 3 - 3 + every[:, 1:], "periodic", Resamples(50, 0, torch.arange(400))
    )
    assert all(low < value < high for value in ranks["value"]) and len(ranks["value"]) == 3
