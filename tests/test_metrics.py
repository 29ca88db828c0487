"""ups.metrics.errors against hand arithmetic, identities, plain numpy loops and fakes."""

import math

import numpy as np
import pytest
import torch

from ups.metrics import errors as metrics
from ups.metrics import intervals, spectra
from ups.metrics.intervals import Resamples, bootstrap, halves, plain_mean


def make(seed=0, n=6, num_frames=5, channels=2, space=(16,), noise=0.1):
    generator = torch.Generator().manual_seed(seed)
    u_ref = 1.0 + torch.randn(n, num_frames, channels, *space, generator=generator)
    return u_ref + noise * torch.randn(u_ref.shape, generator=generator), u_ref


def summary(u_pred, u_ref, **kwargs):
    return metrics.summarise_errors(metrics.score(u_pred, u_ref), Resamples(50, 0), **kwargs)


def interval(values, num_bootstrap, seed, groups=None):
    return tuple(map(float, bootstrap(*plain_mean(values[:, None]), Resamples(num_bootstrap, seed, groups))))


def ratio_interval(values, baseline, num_bootstrap, seed):
    both = torch.stack([values, baseline], 1)
    return tuple(map(float, bootstrap(both, lambda mean: halves(mean)[:, 0], Resamples(num_bootstrap, seed))))


def numpy_pdebench(u_pred, u_ref):
    """PDEBench's definitions written out with loops over one batch that holds every trajectory."""
    pred, ref = u_pred.double().numpy(), u_ref.double().numpy()
    n, num_frames, channels, *space = ref.shape
    out = {key: np.zeros((num_frames, channels)) for key in ("rmse", "nrmse", "crmse")}
    for t in range(num_frames):
        for c in range(channels):
            e, u = pred[:, t, c] - ref[:, t, c], ref[:, t, c]
            root = np.array([np.sqrt((e[i] ** 2).mean()) for i in range(n)])
            out["rmse"][t, c] = root.mean()
            out["nrmse"][t, c] = np.mean([root[i] / np.sqrt((u[i] ** 2).mean()) for i in range(n)])
            out["crmse"][t, c] = np.sqrt(np.mean([e[i].sum() ** 2 for i in range(n)])) / np.prod(space)
    return {key: value.mean() for key, value in out.items()}


@pytest.mark.parametrize("space", [(32,), (12, 16), (8, 6, 10)])
def test_numbers_equal_a_plain_numpy_computation_of_pdebench(space):
    u_pred, u_ref = make(space=space)
    row = summary(u_pred, u_ref)
    for name, value in numpy_pdebench(u_pred, u_ref).items():
        assert row[name]["value"] == pytest.approx(value, rel=1e-5), name


def test_hand_arithmetic():
    u_ref = torch.tensor([3.0, 4.0]).reshape(1, 1, 1, 2)
    u_pred = torch.tensor([3.0, 5.0]).reshape(1, 1, 1, 2)
    assert metrics.rmse(u_pred, u_ref).item() == pytest.approx(math.sqrt(0.5))
    assert metrics.nrmse(u_pred, u_ref).item() == pytest.approx(1 / 5)
    assert metrics.bias(u_pred, u_ref).item() == pytest.approx(0.5)


def test_the_two_normalisations_differ_as_defined():
    u_ref = torch.ones(2, 2, 1, 4) * torch.tensor([1.0, 3.0]).reshape(2, 1, 1, 1)
    u_pred = u_ref + torch.tensor([1.0, 0.0, 0.0, 3.0]).reshape(2, 2, 1, 1)
    row = summary(u_pred, u_ref)
    assert row["nrmse"]["value"] == pytest.approx((1 + 0 + 0 + 1) / 4)
    assert row["nrmse_pooled"]["value"] == pytest.approx(
        (math.sqrt(1 / 10) + math.sqrt(9 / 10)) / 2, rel=1e-5
    )
    assert row["error_growth_by_lead"]["value"] == pytest.approx([0.5, 0.5])
    by_lead = summary(u_pred, u_ref, is_pooled=True)
    assert by_lead["error_growth_by_lead"]["value"] == pytest.approx([math.sqrt(0.1), math.sqrt(0.9)])
    assert by_lead["nrmse"] == row["nrmse"]


@pytest.mark.parametrize("boundary", ["periodic", "no_flux"])
@pytest.mark.parametrize("space", [(15,), (12, 8), (4, 6, 5)])
def test_spectrum_sums_to_the_mean_square(boundary, space):
    _, u = make(space=space)
    assert torch.allclose(
        spectra.energy_spectrum(u, boundary).sum(3), u.double().square().mean(tuple(range(3, u.ndim)))
    )


def test_spectrum_of_one_wave_sits_in_its_shell():
    x = torch.arange(64) / 64
    wave = (2 * math.pi * 5 * x).sin().expand(1, 1, 1, 64)
    assert spectra.energy_spectrum(wave, "periodic")[0, 0, 0, 5].item() == pytest.approx(0.5)
    # 3.5 cycles per box, no flux at both ends
    half = (math.pi * 7 * (x + 0.5 / 64)).cos().expand(1, 1, 1, 64)
    assert spectra.energy_spectrum(half, "no_flux")[0, 0, 0, 3].item() == pytest.approx(0.5)


def test_cosine_spectrum_has_no_edge_tail_where_the_fourier_spectrum_has_one():
    cell = torch.arange(64, dtype=torch.float64) + 0.5
    ramp = (math.pi * cell / 64).cos().expand(1, 1, 1, 64)  # smooth, but jumps when made periodic
    tail = {
        name: spectra.energy_spectrum(ramp, name)[0, 0, 0, 8:].sum().item()
        for name in ("periodic", "dirichlet")
    }
    assert tail["dirichlet"] < 1e-20 < 1e-3 < tail["periodic"]


def test_scores_do_not_depend_on_the_batch_size(monkeypatch):
    u_pred, u_ref = make(n=7, space=(8, 8))
    whole = metrics.score(u_pred, u_ref)
    batches = [metrics.score(u_pred[i : i + k], u_ref[i : i + k]) for i, k in ((0, 3), (3, 1), (4, 3))]
    joined = intervals.merge(batches)
    monkeypatch.setattr(metrics, "CHUNK", 1)  # one trajectory at a time inside score
    single = metrics.score(u_pred, u_ref)
    for name in whole:
        assert torch.allclose(whole[name], joined[name], rtol=1e-12, atol=1e-14), name
        assert torch.allclose(whole[name], single[name], rtol=1e-12, atol=1e-14), name
    monkeypatch.undo()
    assert metrics.summarise_errors(whole, Resamples(20, 0)) == metrics.summarise_errors(
        joined, Resamples(20, 0)
    )


def test_zero_frames_are_excluded_and_counted():
    u_pred, u_ref = make(channels=2)
    u_ref[0, 2, 1] = 0.0
    ratio = metrics.nrmse(u_pred, u_ref)
    assert ratio.isnan().sum() == 1
    row = summary(u_pred, u_ref)
    assert row["zero_frames"] == 1
    assert row["nrmse"]["value"] == pytest.approx(ratio.nanmean().item(), rel=1e-5)
    nothing = summary(u_pred, torch.zeros_like(u_ref))
    assert nothing["nrmse"]["value"] is None and nothing["rmse"]["value"] > 0 and nothing["zero_frames"] == 60


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_prediction_that_is_not_finite_never_gets_a_number(value):
    u_pred, u_ref = make()
    u_pred[3, 2, 1, 7] = value
    row = summary(u_pred, u_ref)
    assert row["nonfinite_trajectories"] == 1
    for name in ("nrmse", "rmse", "crmse"):
        assert row[name]["value"] is None, name
    assert [v is None for v in row["error_growth_by_lead"]["value"]] == [False, False, True, False, False]


def test_a_truth_that_is_not_finite_is_refused():
    u_pred, u_ref = make()
    u_ref[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="truth .* holds NaN or inf"):
        metrics.score(u_pred, u_ref)


def test_unequal_shapes_are_refused():
    u_pred, u_ref = make()
    with pytest.raises(ValueError, match="two equal, non-empty shapes"):
        metrics.score(u_pred[:, 1:], u_ref)
    with pytest.raises(ValueError, match="two equal, non-empty shapes"):
        metrics.rmse(u_pred[0], u_ref[0])


def test_correlation_time_is_the_first_lead_below_the_threshold():
    x = 2 * math.pi * torch.arange(64, dtype=torch.float64) / 64
    # the correlation of shifted waves is cos(phase)
    phases = torch.tensor([0.0, 0.3, 0.6, 0.7, 0.1], dtype=torch.float64)
    u_ref = x.sin().expand(1, 5, 1, 64)
    u_pred = (x + phases[:, None]).sin()[None, :, None]
    values = metrics.correlation(u_pred, u_ref)
    assert torch.allclose(values[0], phases.cos())
    assert metrics.correlation_time(values).tolist() == [4.0]  # cos(0.6) = 0.825, cos(0.7) = 0.765
    assert metrics.correlation_time(
        values, torch.tensor([0.1, 0.2, 0.3, 0.5, 0.6])
    ).tolist() == pytest.approx([0.5])
    # never below: the last lead, a lower bound
    assert metrics.correlation_time(values[:, :3]).tolist() == [3.0]
    with pytest.raises(ValueError, match="one per predicted frame"):
        metrics.correlation_time(values, torch.ones(3))


def test_correlation_of_flat_fields():
    wave = torch.arange(8.0).sin().expand(1, 1, 1, 8)
    flat = torch.full((1, 1, 1, 8), 0.1)
    assert metrics.correlation(flat, wave).item() == 0.0  # a constant carries no information
    assert metrics.correlation(wave, flat).isnan().all()  # a flat truth has no correlation
    both = metrics.correlation(torch.cat([wave, wave], 2), torch.cat([wave, flat], 2))
    assert both.item() == pytest.approx(1.0)


def test_perfect_prediction_scores_zero_and_fakes_do_not():
    u_pred, u_ref = make(noise=0.05)
    perfect, good = summary(u_ref, u_ref), summary(u_pred, u_ref)
    shuffled = summary(u_pred.roll(1, 0), u_ref)
    constant = summary(u_ref.mean().expand_as(u_ref), u_ref)
    assert perfect["nrmse"]["value"] == 0.0 and perfect["correlation_time"]["value"] == 5.0
    for fake in (shuffled, constant):
        assert fake["nrmse"]["low"] > 5 * good["nrmse"]["high"]
        assert fake["correlation_time"]["value"] == 1.0 < good["correlation_time"]["value"]


def test_bootstrap_interval_matches_the_standard_error_of_the_mean():
    values = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    value, low, high = interval(values, 4000, 0)
    error = values.std().item() / math.sqrt(400)
    assert value == pytest.approx(values.mean().item())
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1.0, abs=0.06)
    assert (value, low, high) == interval(values, 4000, 0) != interval(values, 4000, 1)


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    samples = torch.randn(200, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    covered = sum(low <= 0.0 <= high for _, low, high in (interval(s, 200, 0) for s in samples))
    assert 0.88 <= covered / 200 <= 0.99


def test_grouped_trajectories_are_resampled_together():
    values = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    _, low, high = interval(values, 500, 0)
    repeated = interval(values.repeat(4), 500, 0)  # the same thirty, four times: no new information
    grouped = interval(values.repeat(4), 500, 0, groups=torch.arange(30).repeat(4))
    assert grouped[1:] == pytest.approx((low, high))
    assert repeated[2] - repeated[1] < 0.6 * (high - low)


def test_paired_ratio_is_tighter_than_unpaired_and_shuffling_the_pairs_shows():
    difficulty = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 0.05
    ratio, low, high = ratio_interval(0.8 * difficulty, difficulty, 500, 0)
    assert (ratio, low, high) == pytest.approx((0.8, 0.8, 0.8))  # every trajectory says the same
    _, low, high = ratio_interval(0.8 * difficulty.roll(1), difficulty, 500, 0)
    assert high - low > 0.1


def test_compare_is_the_ratio_of_the_two_summaries():
    u_pred, u_ref = make()
    ours, theirs = metrics.score(u_pred, u_ref), metrics.score(u_pred + 0.3, u_ref)
    for metric in ("nrmse", "nrmse_pooled", "crmse"):
        expected = (
            metrics.summarise_errors(ours, Resamples(10, 0))[metric]["value"]
            / metrics.summarise_errors(theirs, Resamples(10, 0))[metric]["value"]
        )
        entry = intervals.compare(metrics.ERROR[metric], ours, theirs, Resamples(50, 0))
        assert entry["value"] == pytest.approx(expected, rel=1e-5)
        assert entry["low"] <= entry["value"] <= entry["high"]


def test_a_steady_task_has_no_correlation_time():
    u_pred, u_ref = make(num_frames=1, space=(8, 8))
    row = summary(u_pred, u_ref)
    assert "correlation_time" not in row and len(row["error_growth_by_lead"]["value"]) == 1
    assert row["nrmse"]["value"] == pytest.approx(metrics.nrmse(u_pred, u_ref).mean().item(), rel=1e-5)
    assert torch.allclose(
        metrics.nrmse_per_trajectory(metrics.score(u_pred, u_ref)),
        metrics.nrmse(u_pred, u_ref).mean((1, 2)),
    )
