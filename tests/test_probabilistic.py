"""ups.metrics.ensembles against closed forms, hand arithmetic and fakes; random tests take a fresh seed,
which they print."""

import json
import math
import secrets

import pytest
import torch

from ups.metrics import ensembles as probabilistic
from ups.metrics import errors as metrics
from ups.metrics.calibration import coverage, rank_histogram
from ups.metrics.ensembles import compare_ensembles, score_ensemble, summarise_ensemble
from ups.metrics.intervals import Resamples, merge
from ups.metrics.proper import energy_distance, energy_score, expected_crps, fair_crps

SIGMAS = 5  # standard errors allowed to a random number
IDEAL = 1 / math.sqrt(math.pi)  # mean CRPS of N(0, 1) members and truth


@pytest.fixture
def generator():
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def ensemble(generator, n=3, members=6, num_frames=3, channels=2, space=(16,), spread=1.0):
    """Smooth truth and members drawn around one common mean: exchangeable for spread 1."""
    shape = (num_frames, channels, *space)
    mean = 3.0 + normal(generator, n, *shape)
    return (mean[:, None] + spread * normal(generator, n, members, *shape)).float(), (
        mean + normal(generator, n, *shape)
    ).float()


def close_to_mean(values, expected, scale=1.0):
    """The mean of independent `values` over scale is `expected` within SIGMAS standard errors."""
    values = values.flatten() / scale
    return abs(float(values.mean()) - expected) < SIGMAS * float(values.std()) / math.sqrt(len(values))


def crps_gaussian(mean, std, y):
    """CRPS of N(mean, std^2): std (w (2 Phi(w) - 1) + 2 phi(w) - 1/sqrt(pi)), w = (y - mean) / std (Gneiting
    & Raftery 2007)."""
    mean, std, y = torch.broadcast_tensors(*(torch.as_tensor(v, dtype=torch.float64) for v in (mean, std, y)))
    w = (y - mean) / torch.where(std > 0, std, 1.0)
    density = (-w.square() / 2).exp() / math.sqrt(2 * math.pi)
    value = std * (w * (2 * torch.special.ndtr(w) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    return torch.where(std > 0, value, (y - mean).abs())


def summary(members, u_ref):
    return summarise_ensemble(score_ensemble(members, u_ref), Resamples(50, 0))


# ---- CRPS


def test_crps_of_many_members_is_the_gaussian_formula(generator):
    y = torch.linspace(-6, 8, 15, dtype=torch.float64)[None]
    count, mean, std = 40_000, 0.7, 1.8
    members = (mean + std * normal(generator, count)).reshape(1, count, 1).expand(1, count, 15)
    # the influence of one member is below 2 std, except for y far away
    tolerance = SIGMAS * 2 * std / math.sqrt(count)
    found = fair_crps(members.transpose(1, 2)[0, :, :, None].float(), y[0, :, None].float())
    assert torch.allclose(found.double(), crps_gaussian(mean, std, y)[0], atol=tolerance, rtol=0)


def test_crps_is_the_double_sum_over_members():
    x, y = torch.tensor([1.0, 5.0, 2.0]), 3.0
    pairs = 2 * (4 + 1 + 3)
    for alpha, factor in ((1.0, 1 / 12), (0.0, 1 / 18), (0.95, 0.95 / 12 + 0.05 / 18)):
        value = fair_crps(x.reshape(1, 3), torch.tensor([y]), alpha)
        assert float(value) == pytest.approx((2 + 2 + 1) / 3 - factor * pairs)
    assert float(fair_crps(x[:1].reshape(1, 1), torch.tensor([y]))) == 2.0  # one member: the absolute error


@pytest.mark.parametrize("count", [2, 3, 8])
def test_fair_crps_is_unbiased_and_the_plain_one_inflated_by_one_over_members(count, generator):
    x, y = normal(generator, 100_000, count), normal(generator, 100_000)
    assert close_to_mean(fair_crps(x, y), 1.0, IDEAL)
    assert close_to_mean(fair_crps(x, y, alpha=0.0), 1 + 1 / count, IDEAL)
    assert close_to_mean(fair_crps(x, y, alpha=0.95), 1 + 0.05 / count, IDEAL)
    assert not close_to_mean(fair_crps(x, y, alpha=0.0), 1.0, IDEAL)


# ---- spread, ranks, coverage


@pytest.mark.parametrize("count", [2, 4, 16])
def test_exchangeable_members_have_spread_skill_ratio_one_and_the_error_of_a_finite_mean(count, generator):
    n, cells = 500, 64
    x, y = normal(generator, n, count, 2, 1, cells), normal(generator, n, 2, 1, cells)
    scores = score_ensemble(x, y)
    row, points = summarise_ensemble(scores, Resamples(200, 0)), n * cells * 2
    errors = scores["squared_error"].mean(0).sqrt().mean(1).tolist()
    error = 0.5 * math.sqrt(2 / points * (1 + 1 / (count - 1)))
    assert abs(row["ssr"]["value"] - 1) < SIGMAS * error
    assert row["ssr"]["low"] < row["ssr"]["value"] < row["ssr"]["high"] < 1 + 10 * error
    for ssr, rmse in zip(row["ssr_by_lead"]["value"], errors, strict=True):
        assert abs(ssr - 1) < SIGMAS * error * math.sqrt(2)
        # 1.225, 1.118, 1.031
        assert rmse / math.sqrt(1 + 1 / count) == pytest.approx(1, abs=SIGMAS / math.sqrt(points))
    assert summary(0.5 * x, y)["ssr"]["value"] < 0.75 or count == 2


def rank_ratio(counts):
    """sum_k (h_k - N/(M+1))^2 / (N M/(M+1)), about 1 for flat counts (Candille and Talagrand)."""
    bins, total = counts.shape[-1], counts.sum(-1)
    return (counts - total[..., None] / bins).square().sum(-1) / (total * (bins - 1) / bins)


@pytest.mark.parametrize("count", [2, 8])
def test_ranks_are_flat_for_exchangeable_members_and_not_for_confident_ones(count, generator):
    x, y = normal(generator, 400, count, 1, 1, 50).exp(), normal(generator, 400, 1, 1, 50).exp()
    counts = rank_histogram(x, y, [generator] * len(y)).sum((0, 1))
    assert counts.sum() == 20_000 and float(rank_ratio(counts)) < 1 + SIGMAS * math.sqrt(2 / count) + 2
    assert counts.argmax() not in (0, count) or counts.max() / counts.min() < 1.2
    confident = rank_histogram(x**0.4, y, [generator] * len(y)).sum((0, 1))
    assert float(rank_ratio(confident)) > 50


def test_ties_are_broken_evenly_and_the_stride_thins_every_axis(generator):
    counts = rank_histogram(
        torch.zeros(10, 4, 1, 1, 40, 50), torch.zeros(10, 1, 1, 40, 50), [generator] * 10
    ).sum((0, 1))
    assert float(rank_ratio(counts)) < 1 + SIGMAS * math.sqrt(2 / 4) + 2
    thin = rank_histogram(torch.zeros(1, 4, 2, 3, 9, 8), torch.zeros(1, 2, 3, 9, 8), [generator], 4)
    assert thin.sum((0, 2)).tolist() == [3 * 3 * 2] * 2


def test_where_nothing_happens_no_rank_counts(generator):
    """Rare kicks and rounding errors elsewhere, of another size and mean in members than in the truth."""

    def kicks(*shape):
        is_kicked = torch.rand(*shape, 1, 1, 400, generator=generator) < 0.03
        return torch.where(is_kicked, normal(generator, *shape, 1, 1, 400), 0.0)

    def covered(x, level=0.5):
        return float(coverage(rank_histogram(x, y, [generator] * len(y)).sum((0, 1)), level))

    y, x = kicks(200), kicks(200, 10)
    rounded = x + 1e-5 * (1 + normal(generator, *x.shape))
    assert abs(covered(x) - 0.5) < 0.02 and abs(covered(rounded) - 0.5) < 0.02
    assert covered(torch.zeros_like(x)) < 0.02  # one guess, that nothing is kicked
    assert covered(1e-5 * normal(generator, *x.shape)) < 0.02  # the same, with noise that hides nothing
    # no spread, so no cell is certain
    assert rank_histogram(0 * x, 0 * y, [generator] * len(y)).sum() == y.numel()


def test_rank_numbers_by_hand():
    counts = torch.tensor([4.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    assert float(rank_ratio(counts)) == pytest.approx((4 + 1 + 1 + 0) / (8 * 3 / 4))
    assert float(coverage(counts, 0.5)) == pytest.approx(2 / 8)
    assert float(coverage(counts, 0.6)) == pytest.approx((2 + 0.2 * 6) / 8)


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_coverage_is_the_nominal_one_for_exchangeable_members_of_any_law(count, level, generator):
    x, y = normal(generator, 500, count, 1, 1, 80).exp(), normal(generator, 500, 1, 1, 80).exp()
    share = float(coverage(rank_histogram(x, y, [generator] * len(y)).sum((0, 1)), level))
    if (count + 1) * (1 - level) / 2 <= 0.5:
        assert math.isnan(share)
    else:
        assert abs(share - level) < SIGMAS * math.sqrt(level * (1 - level) / 40_000)
        assert (
            float(coverage(rank_histogram(x**0.3, y, [generator] * len(y)).sum((0, 1)), level)) < level - 0.05
        )


# ---- structure, pairing


def test_energy_score_by_hand():
    members = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])
    expected = ((5 + 1) / 2 - math.sqrt(9 + 9) / 2) / math.sqrt(2)
    assert float(energy_score(members, torch.zeros(1, 2))) == pytest.approx(expected)
    assert float(energy_score(members[:, :1], torch.zeros(1, 2))) == pytest.approx(5 / math.sqrt(2))
    # of single numbers: the CRPS
    points = energy_score(members.flatten(0, 1).T[:, :, None], torch.zeros(2, 1))
    assert float(points.mean()) == pytest.approx(float(fair_crps(members, torch.zeros(1, 2))))


def test_scores_have_a_gradient_at_equal_members():
    members, truth = torch.zeros(2, 3, 4, requires_grad=True), torch.zeros(2, 4)
    (fair_crps(members, truth, 0.95) + energy_score(members, truth, 1e-12)).sum().backward()
    assert members.grad.isfinite().all()
    # judged, equal draws are at no distance
    assert float(energy_score(members.detach(), truth).abs().max()) == 0.0


def test_energy_score_sees_structure_that_crps_cannot(generator):
    def coherent(count):
        return normal(generator, 2000, count, 1).expand(2000, count, 8)

    x, y = coherent(8), coherent(1)[:, 0]
    shuffled = torch.stack([x[:, torch.randperm(8, generator=generator), i] for i in range(8)], 2)
    assert torch.allclose(fair_crps(shuffled, y), fair_crps(x, y))
    worse = energy_score(shuffled, y) - energy_score(x, y)
    assert float(worse.mean()) > SIGMAS * float(worse.std()) / math.sqrt(2000)


@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (0.8, 1.0), (0.0, 2.0), (-0.5, 0.4)])
def test_energy_distance_of_two_gaussians(mean, std, generator):
    def distance(centre, variance):  # E|N(centre, variance)|, the folded normal
        root = math.sqrt(variance)
        density = math.sqrt(2 / math.pi) * math.exp(-(centre**2) / (2 * variance))
        return root * density + centre * math.erf(centre / root / math.sqrt(2))

    expected = 2 * distance(mean, 1 + std**2) - distance(0, 2) - distance(0, 2 * std**2)
    values = [
        energy_distance(normal(generator, 8, 1), mean + std * normal(generator, 6, 1)) for _ in range(1500)
    ]
    assert close_to_mean(torch.tensor(values, dtype=torch.float64), expected)
    assert (expected == 0) == ((mean, std) == (0.0, 1.0))


def test_energy_distance_of_samples_that_are_not_finite_is_infinite():
    assert energy_distance(torch.zeros(4, 3), torch.full((3, 3), torch.nan)) == math.inf


# ---- whole ensembles


@pytest.mark.parametrize("members", [1, 6])
def test_scores_over_exact_samples_are_the_means_of_single_scores(generator, members):
    """Scores of whole fields and ranks still use the one truth."""
    x, u_ref = ensemble(generator, n=3, space=(6, 8), members=members)
    draws = torch.randn(3, 5, *u_ref.shape[1:], generator=generator)
    torch.testing.assert_close(
        expected_crps(x.double(), draws.double()),
        torch.stack([fair_crps(x.double(), y.double()) for y in draws.unbind(1)]).mean(0),
    )
    found, one = score_ensemble(x, u_ref, exact=draws), score_ensemble(x, u_ref)
    each = [score_ensemble(x, y) for y in draws.unbind(1)]
    for name, value in found.items():
        by_law = name in ("crps", "squared_error")
        torch.testing.assert_close(
            value,
            torch.stack([scores[name] for scores in each]).mean(0) if by_law else one[name],
            equal_nan=True,
        )
    assert not torch.allclose(found["crps"], one["crps"])
    broken = torch.where(torch.arange(members)[:, None, None, None, None] == 0, math.nan, x)
    assert score_ensemble(broken, u_ref, exact=draws)["crps"].isinf().all()


@pytest.mark.parametrize("space", [(20,), (12, 8), (6, 4, 8)])
def test_merged_batches_equal_one_scoring(space, generator, monkeypatch):
    members, u_ref = ensemble(generator, n=5, space=space)
    members[:, 1], members[1, 0, 0] = u_ref, u_ref[1, 0]  # ties
    whole = score_ensemble(members, u_ref)
    parts = [score_ensemble(members[i:j], u_ref[i:j]) for i, j in ((0, 1), (1, 4), (4, 5))]
    monkeypatch.setattr(probabilistic, "CHUNK", 6 * 2 * 2 * math.prod(space) + 1)  # two frames at a time
    for other in (merge(parts), score_ensemble(members, u_ref)):
        assert set(other) == set(whole) and all(value.dtype == torch.float64 for value in other.values())
        for name, value in whole.items():
            assert torch.allclose(other[name], value, rtol=1e-9, atol=1e-12, equal_nan=True), name
    monkeypatch.undo()
    rows = [summarise_ensemble(scores, Resamples(50, 0)) for scores in (whole, merge(parts))]
    assert json.dumps(rows[0], allow_nan=False) == json.dumps(rows[1], allow_nan=False)


def test_one_member_is_a_deterministic_forecast():
    generator = torch.Generator().manual_seed(0)  # of 20 others one makes frames that are right in two cells
    u_ref = ensemble(generator)[1]
    u_pred = u_ref + 0.1 * normal(generator, *u_ref.shape)
    row = summary(u_pred[:, None], u_ref)
    plain = metrics.summarise_errors(metrics.score(u_pred, u_ref), Resamples(50, 0))
    assert row["crps"]["value"] == pytest.approx(float((u_pred - u_ref).abs().mean()), rel=1e-5)
    assert row["nrmse_mean"] == plain["nrmse"]
    assert row["ssr"]["value"] == 0
    for name in ("coverage_50", "coverage_90"):
        assert row[name]["value"] is None
    assert row["energy_score"]["value"] == pytest.approx(
        float((u_pred - u_ref).square().mean((2, 3)).sqrt().mean()), rel=1e-5
    )


def test_errors_of_the_mean_are_pooled_where_a_field_vanishes(generator):
    members, u_ref = ensemble(generator, n=30, members=16)
    errors = []
    for size in (1.0, 1e-6):  # of one frame and its members, which are wrong by as much as before
        changed = u_ref.clone()
        changed[0, 1] *= size
        errors.append(summary(members + changed[:, None] - u_ref[:, None], changed)["nrmse_mean"]["value"])
    before, after = errors
    assert after == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_member_that_is_not_finite_becomes_null_and_is_never_dropped(bad, generator):
    members, u_ref = ensemble(generator, n=6, members=10)
    clean = summary(members, u_ref)
    members[2, 3, 1, 0, 5] = bad
    scores = score_ensemble(members, u_ref)
    assert scores["crps"][2, 1].tolist() == [math.inf] * 2 and scores["nonfinite"].sum() == 1
    assert scores["crps"].isfinite().sum() == scores["crps"].numel() - 2
    row = summarise_ensemble(scores, Resamples(50, 0))
    for name in "crps ssr nrmse_mean energy_score coverage_50 coverage_90".split():
        assert row[name] == {"value": None, "low": None, "high": None}, name
    for name in ("crps", "ssr"):
        found, expected = row[f"{name}_by_lead"]["value"], clean[f"{name}_by_lead"]["value"]
        assert found[1] is None and [found[0], found[2]] == [expected[0], expected[2]]
    assert row["nonfinite_trajectories"] == 1
    json.dumps(row, allow_nan=False)
    assert fair_crps(members, u_ref).isinf().tolist() == [False, False, True, False, False, False]
    assert energy_score(members, u_ref).isinf().tolist() == [False, False, True, False, False, False]
    assert compare_ensembles(scores, scores, Resamples(20, 0))["crps"]["value"] is None


def test_compare_is_a_paired_ratio(generator):
    members, u_ref = ensemble(generator, n=20, space=(8,))
    near = u_ref[:, None] + 0.5 * (members - u_ref[:, None])
    ours, theirs = (score_ensemble(x, u_ref) for x in (near, members))
    out = compare_ensembles(ours, theirs, Resamples(50, 0))
    for name in ("crps", "energy_score", "nrmse_mean"):
        assert out[name] == {key: pytest.approx(0.5, rel=1e-4) for key in ("value", "low", "high")}, name
    assert out["crps_by_lead"]["value"] == pytest.approx([0.5] * 3, rel=1e-4)
    single = compare_ensembles(ours, score_ensemble(members[:, :1], u_ref), Resamples(50, 0))
    assert 0 < single["crps"]["low"] < single["crps"]["value"] < single["crps"]["high"] < 1


def scored(n=2, members=3):
    return score_ensemble(torch.rand(n, members, 4, 1, 8), torch.rand(n, 4, 1, 8))


@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda: fair_crps(torch.zeros(3, 4, 5), torch.zeros(3, 6)),
            r"members \(3, 4, 5\) and truth \(3, 6\).*in fair_crps",
        ),
        (
            lambda: energy_distance(torch.zeros(3, 4), torch.zeros(1, 4)),
            r"expected \(a, d\) and \(b, d\) with a, b >= 2",
        ),
        (
            lambda: score_ensemble(torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 8)),
            "1 to 3 space axes",
        ),
        (
            lambda: score_ensemble(torch.zeros(1, 3, 1, 1, 8), torch.full((1, 1, 1, 8), math.nan)),
            "truth .* holds NaN",
        ),
        (
            lambda: compare_ensembles(scored(), scored(n=3), Resamples(5, 0)),
            "expected the same cases in compare_ensembles",
        ),
    ],
)
def test_errors_say_what_is_wrong(call, text):
    with pytest.raises(ValueError, match=text):
        call()
