"""Scores of ensemble forecasts: does the spread say how wrong the forecast is, and do members look like the truth?

Axes: members (n, M, T, C, *space), u_ref (n, T, C, *space) in physical units, 1 to 3 space axes, float64 inside. M = 1 is a
deterministic forecast. Everything is kept per trajectory, so means and intervals do not depend on the batch size:

    scores = merge_ensembles([score_ensemble(members, ref, boundary) for members, ref in batches])
    row = summarise_ensemble(scores, num_bootstrap, seed)                     # numbers with 95 % intervals

No single score suffices: CRPS hardly sees the spread (half of it costs 8 %), and neither CRPS, spread/skill nor ranks see
spatial structure; the energy score, spectra and coherence do. A calibrated member has sqrt(2) the error of a perfect mean, so
accuracy is that of the ensemble mean. Markers as in ups.metrics.errors: NaN = undefined, left out; inf = a member is not finite.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ups.metrics import errors as metrics
from ups.metrics import pairs
from ups.metrics.errors import Statistic, _entry, _mean_of_defined, _number, _ratio

LEVELS = (0.5, 0.9)   # nominal probabilities of the central intervals whose coverage is reported
NUM_BINS = 10         # of predicted spread
FINE, NUM_FINE = 16, 8 * 16  # stored bins per decade of spread / RMS of the truth, and in all, from 1e-6 to 1e2
ROUNDING = 1e-13      # share of a field's energy below which a band holds float32 rounding errors only ((2^-23)^2 = 1.4e-14)
EXACT = "donot_use_mm_for_euclid_dist"  # |x|^2 + |y|^2 - 2 x.y would lose small distances, and the zero of equal draws
RATIOS = ("crps", "energy_score", "nrmse_mean", "spectrum_error", "residual_spectrum_error", "nrmse_mean_by_lead")  # compared
POINTS = 16           # per axis, whose ranks are counted: neighbouring cells are no independent draws


def _check(members: Tensor, u_ref: Tensor, where: str) -> None:
    if members.ndim < 2 or 0 in members.shape or (members.shape[0], *members.shape[2:]) != tuple(u_ref.shape):
        raise ValueError(f"members {tuple(members.shape)} and truth {tuple(u_ref.shape)}; expected (n, M, ...) and (n, ...) with "
                         f"equal further axes and M >= 1 in {where}. Put the member axis second.")


def fair_crps(members: Tensor, u_ref: Tensor, alpha: float = 1.0) -> Tensor:
    """Continuous ranked probability score per point, members (n, M, ...), u_ref (n, ...) -> (n, ...), in the units of u.

    mean_i |x_i - y| - (1 - (1 - alpha) / M) / (2 M (M - 1)) sum_ij |x_i - x_j|, the double sum as 2 sum_k (2 k - M - 1) x_(k) of
    sorted members. alpha = 1: fair, its mean does not depend on M (Ferro 2014); 0: the CRPS of the empirical distribution;
    between: almost fair, afCRPS (Lang et al. 2024, AIFS-CRPS). M = 1: the absolute error. inf where a member is not finite.
    """
    _check(members, u_ref, "fair_crps")
    x, count = members.double(), members.shape[1]
    value = (x - u_ref.double()[:, None]).abs().mean(1)
    if count > 1:
        weight = 2.0 * torch.arange(1, count + 1, dtype=torch.float64, device=x.device) - count - 1
        spread = torch.einsum("nm...,m->n...", x.sort(1).values, weight) / (count * (count - 1))
        value = value - (1 - (1 - alpha) / count) * spread
    return torch.where(x.isfinite().all(1), value, torch.inf)


def crps_gaussian(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """CRPS of N(mean, std^2): std (w (2 Phi(w) - 1) + 2 phi(w) - 1/sqrt(pi)), w = (y - mean) / std (Gneiting & Raftery 2007)."""
    mean, std, y = torch.broadcast_tensors(*(torch.as_tensor(v, dtype=torch.float64) for v in (mean, std, y)))
    w = (y - mean) / torch.where(std > 0, std, 1.0)
    density = (-w.square() / 2).exp() / math.sqrt(2 * math.pi)
    value = std * (w * (2 * torch.special.ndtr(w) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    return torch.where(std > 0, value, (y - mean).abs())


def spread_skill(members: Tensor, u_ref: Tensor) -> tuple[Tensor, Tensor]:
    """(unbiased variance over members, squared error of their mean), each averaged over space -> (n, T, C).

    Spread/skill ratio SSR = sqrt((M + 1) / M * mean variance) / sqrt(mean squared error), means before the roots (Fortin et al.
    2014): 1 where truth and members are exchangeable, at every M. A single member has variance 0.
    """
    _check(members, u_ref, "spread_skill")
    x, axes = members.double(), tuple(range(3, u_ref.ndim))
    variance = x.var(1) if x.shape[1] > 1 else torch.zeros_like(x[:, 0])
    return variance.mean(axes), (x.mean(1) - u_ref.double()).square().mean(axes)


def _spread_bins(members: Tensor, u_ref: Tensor) -> Tensor:
    """Sums over points in bins of predicted spread: count, (M+1)/M variance, squared error of the mean -> (n, T, 3, NUM_FINE).

    Relative to the RMS of the truth in the frame and field (none where that is zero). A point's bin is given by the first half of
    the members, the variance summed is the other half's: else the sampling error that chose the bin would flatten the curve.
    """
    x, y, count = members.double(), u_ref.double(), members.shape[1]
    sums = y.new_zeros(*y.shape[:2], 3, NUM_FINE)
    if count < 4:  # a half has no variance
        return sums
    scale = metrics.rms(y).reshape(*y.shape[:3], *[1] * (y.ndim - 3)).square().expand_as(y)
    unit, kept = torch.where(scale > 0, scale, 1.0) * count / (count + 1), (scale > 0).double()
    first, second = x[:, :count // 2].var(1) / unit, x[:, count // 2:].var(1) / unit
    index = ((0.5 * first.log10() + 6) * FINE).clamp(0, NUM_FINE - 1).long().flatten(2)
    error = (x.mean(1) - y).square() / (unit * (count + 1) / count)
    for row, value in enumerate((kept, kept * second, kept * error)):
        sums[:, :, row].scatter_add_(2, index, value.flatten(2))
    return sums


def rank_histogram(members: Tensor, u_ref: Tensor, generator: torch.Generator, stride: int = 1) -> Tensor:
    """Counts of the rank 0..M of the truth among the members, over fields and every stride-th cell -> (n, T, M + 1).

    Ties are broken at random by `generator` (on the CPU). Flat where truth and members are exchangeable (Hamill 2001).
    """
    _check(members, u_ref, "rank_histogram")
    thin = (..., *[slice(None, None, stride)] * (u_ref.ndim - 3))
    x, y = members[thin].cpu(), u_ref[thin].cpu()[:, None]
    below, ties = (x < y).sum(1), (x == y).sum(1)
    rank = below + (torch.rand(ties.shape, generator=generator, dtype=torch.float64) * (ties + 1)).long()
    counts = torch.zeros(*rank.shape[:2], x.shape[1] + 1, dtype=torch.float64)
    return counts.scatter_add_(2, rank.flatten(2), torch.ones(rank.flatten(2).shape, dtype=torch.float64))


def outlier_share(counts: Tensor) -> Tensor:
    """Share of truths outside the ensemble over its expectation 2/(M+1), of rank counts (..., M + 1) -> (...); NaN for M = 1."""
    bins = counts.shape[-1]
    return (counts[..., 0] + counts[..., -1]) / counts.sum(-1) * (bins / 2 if bins > 2 else math.nan)


def coverage(counts: Tensor, level: float) -> Tensor:
    """Share of truths in the central interval of probability `level`, of rank counts (..., M + 1) -> (...).

    k = (M + 1)(1 - level)/2 of the M + 1 gaps between members are cut off at each end; of the gap in which a fractional k ends
    the kept part counts. So exchangeable members give `level` exactly at every M, whatever the distribution; interpolated
    quantiles do not (the whole range of M = 16 has 88 %). NaN for k <= 1/2 (M < 10 at 90 %): most outliers would be covered.
    """
    bins = counts.shape[-1]
    edges = (torch.arange(bins + 1, dtype=torch.float64) - bins / 2).clamp(-level * bins / 2, level * bins / 2)
    return (counts * edges.diff()).sum(-1) / counts.sum(-1) * (1.0 if bins * (1 - level) > 1 + 1e-9 else math.nan)


def _tiles(u: Tensor, block: Sequence[int], kept: int) -> Tensor:
    """(*kept axes, ..., *grid) -> (*kept axes, tiles, values per tile), tiles of size `block` along the last axes."""
    lead, grid = u.ndim - len(block), u.shape[u.ndim - len(block):]
    if lead < kept or any(n % size for n, size in zip(grid, block, strict=True)):
        raise ValueError(f"blocks of {tuple(block)} cells on a grid {tuple(grid)}; expected divisors of the last axes in "
                         "energy_score. Choose a block that divides the grid.")
    u = u.reshape(*u.shape[:lead], *itertools.chain(*((n // size, size) for n, size in zip(grid, block, strict=True))))
    u = u.permute(*range(kept), *range(lead, u.ndim, 2), *range(kept, lead), *range(lead + 1, u.ndim, 2))
    return u.reshape(*u.shape[:kept], math.prod(n // size for n, size in zip(grid, block, strict=True)), -1)


def energy_score(members: Tensor, truth: Tensor, block: Sequence[int] | None = None) -> Tensor:
    """Fair energy score of each case, mean_i |x_i - y| - 1/(2 M (M - 1)) sum_ij |x_i - x_j|: (n, M, ...), (n, ...) -> (n,).

    |.| is the Euclidean norm of the flattened case: CRPS for vectors, which sees whether points vary together (Gneiting & Raftery
    2007, section 4.3). block: sizes of tiles along the last axes; mean of the tiles' scores. inf where a member is not finite.
    """
    _check(members, truth, "energy_score")
    x, y, count = members.double(), truth.double(), members.shape[1]
    if block is None:
        x, y = x.reshape(len(x), count, 1, -1), y.reshape(len(y), 1, -1)
    else:
        x, y = _tiles(x, block, 2), _tiles(y, block, 1)
    value = (x - y[:, None]).norm(dim=3).mean(1)
    if count > 1:
        x = x.transpose(1, 2)
        value = value - torch.cdist(x, x, compute_mode=EXACT).sum((2, 3)) / (2 * count * (count - 1))
    return torch.where(members.flatten(1).isfinite().all(1), value.mean(1), torch.inf)


def energy_distance(x: Tensor, y: Tensor) -> float:
    """2 E|x - y| - E|x - x'| - E|y - y'| of samples (a, d), (b, d) over different draws: unbiased, its mean is 0 for equal
    distributions only, so it may be negative (Szekely & Rizzo 2013). inf where a sample is not finite.
    """
    if not x.ndim == y.ndim == 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ValueError(f"samples {tuple(x.shape)} and {tuple(y.shape)}; expected (a, d) and (b, d) with a, b >= 2 in "
                         "energy_distance. Flatten each draw to one row.")
    if not (x.isfinite().all() and y.isfinite().all()):
        return math.inf
    x, y, a, b = x.double(), y.double(), len(x), len(y)
    xy, xx, yy = (sum(float(torch.cdist(part, v, compute_mode=EXACT).sum()) for part in u.split(max(1, metrics.CHUNK // len(v))))
                  for u, v in ((x, y), (x, x), (y, y)))
    return 2 * xy / (a * b) - xx / (a * (a - 1)) - yy / (b * (b - 1))


def _bands(spectrum: Tensor, space: Sequence[int]) -> Tensor:
    """Energies (..., shells) summed over octaves 1, 2-3, 4-7, ... of the wave number; the last one reaches min(n_i) / 2."""
    last = min(space) // 2
    if last < 1:
        raise ValueError(f"a grid of {tuple(space)} cells; expected at least 2 per axis in a spectrum. Leave spectra out.")
    edges = [*(2**j for j in range(max(1, int(math.log2(last))))), last + 1]
    return torch.stack([spectrum[..., a:b].sum(-1) for a, b in itertools.pairwise(edges)], -1)


def spectrum_error(members: Tensor, u_ref: Tensor, boundary: str, reference: Tensor | None = None) -> Tensor:
    """mean |log10(E_member / E_true)| over octaves of the wave number and over members -> (n, T, C); 2 = a factor of 100.

    Of each member and not of the mean, whose small scales average out. reference (n, T, C, *space), the operator's prediction:
    the same for the residuals member - reference and u_ref - reference. Energies are not taken below ROUNDING of the truth's:
    float32 fields hold no smaller ones. NaN where the truth is zero.
    """
    _check(members, u_ref, "spectrum_error")
    x, y = members.double(), u_ref.double()
    floor = (ROUNDING * metrics.rms(y).square())[..., None]
    if reference is not None:
        x, y = x - reference.double()[:, None], y - reference.double()
    member = _bands(metrics.energy_spectrum(x.flatten(0, 1), boundary), y.shape[3:]).unflatten(0, x.shape[:2])
    truth = torch.maximum(_bands(metrics.energy_spectrum(y, boundary), y.shape[3:]), floor)
    error = (torch.maximum(member, floor[:, None]) / truth[:, None]).log10().abs().mean((1, 4))
    return torch.where(floor[..., 0] > 0, error, torch.nan)


def coherence(a: Tensor, b: Tensor, boundary: str) -> Tensor:
    """Correlation of two fields (n, T, C, *space) within each octave of the wave number -> (n, T, C, bands).

    Re sum a_hat conj(b_hat) / sqrt(E_a E_b), the cross spectrum from E(a + b) - E(a - b). Between member and truth as large as
    between two members where they are exchangeable. NaN where a band holds rounding errors only.
    """
    plus, minus, energy_a, energy_b = (_bands(metrics.energy_spectrum(u, boundary), a.shape[3:]) for u in
                                       (a.double() + b.double(), a.double() - b.double(), a, b))
    known = torch.minimum(energy_a / metrics.rms(a).square()[..., None], energy_b / metrics.rms(b).square()[..., None]) > ROUNDING
    return torch.where(known, (plus - minus) / (4 * torch.where(known, energy_a * energy_b, 1.0).sqrt()), torch.nan)


def _ranks(members: Tensor, u_ref: Tensor, stride: int) -> Tensor:
    """rank_histogram whose tie-breaking is seeded by each frame's truth, so that it does not depend on the batch."""
    counts = []
    for x, y in zip(members.transpose(1, 2).flatten(0, 1), u_ref.flatten(0, 1), strict=True):
        generator = torch.Generator().manual_seed(zlib.crc32(y.cpu().contiguous().numpy().tobytes()))
        counts.append(rank_histogram(x[None, :, None], y[None, None], generator, stride))
    return torch.cat(counts).reshape(*u_ref.shape[:2], -1)


def _score_chunk(members: Tensor, u_ref: Tensor, boundary: str, reference: Tensor | None, stride: int) -> dict[str, Tensor]:
    """Everything that is per frame, each tensor (n, T, ...)."""
    broken, cells = ~members.isfinite().all(1).flatten(2).all(2), (..., *[None] * (u_ref.ndim - 2))
    if reference is not None:
        broken = broken | ~reference.isfinite().flatten(2).all(2)
        reference = torch.where(broken[cells], u_ref, reference)
    x, y = torch.where(broken[cells][:, None], u_ref[:, None], members).double(), u_ref.double()
    (variance, squared), root = spread_skill(x, y), math.sqrt(y[0, 0].numel())
    out = {"crps": fair_crps(x, y).flatten(3).mean(3), "variance": variance, "squared_error": squared,
           "member_rmse": torch.stack([metrics.rmse(member, y) for member in x.unbind(1)]).mean(0),
           "energy_score": energy_score(x.transpose(1, 2).flatten(0, 1), y.flatten(0, 1)).reshape(broken.shape) / root,
           "ranks": _ranks(members, u_ref, stride).to(y.device), "spread_bins": _spread_bins(x, y),
           "spectrum_error": spectrum_error(x, y, boundary), "coherence": coherence(x[:, 0], y, boundary),
           "coherence_members": coherence(x[:, 0], x[:, -1], boundary)}
    if reference is not None:
        out["residual_spectrum_error"] = spectrum_error(x, y, boundary, reference)
    out = {name: value.masked_fill(broken[(..., *[None] * (value.ndim - 2))], torch.inf) for name, value in out.items()}
    return {**out, "ref_rms": metrics.rms(y), "nonfinite": broken.double()}


def score_ensemble(members: Tensor, u_ref: Tensor, boundary: str, reference: Tensor | None = None,
                   rank_stride: int | None = None) -> dict[str, Tensor]:
    """Per-trajectory quantities of a batch, float64 on the CPU, every tensor with n first; join batches with `merge_ensembles`.

    crps, variance, squared_error (of the mean), member_rmse, ref_rms, spectrum_error, residual_spectrum_error (only with
    `reference`, the operator's prediction): (n, T, C). energy_score: (n, T), over fields and cells, divided by sqrt(C * cells) so
    that it is in the units of an RMSE. ranks: (n, T, M + 1), of every rank_stride-th cell per axis (default: about POINTS per
    axis). spread_bins: (n, 3, NUM_FINE). coherence of the first member with the truth, coherence_members with the last member:
    (n, T, C, bands). nonfinite: (n, T), 1 where any member has a NaN or inf; scores of such frames are inf.
    """
    _check(members, u_ref, "score_ensemble")
    metrics._check(u_ref if reference is None else reference, u_ref)
    if not u_ref.isfinite().all():
        raise ValueError(f"the truth {tuple(u_ref.shape)} holds NaN or inf; expected finite fields in score_ensemble. Check the "
                         "data file: its reference solver failed.")
    stride = max(1, min(u_ref.shape[3:]) // POINTS) if rank_stride is None else rank_stride
    frame = members[0, :, 0].numel()
    frames, size = max(1, metrics.CHUNK // frame), max(1, metrics.CHUNK // (frame * u_ref.shape[1]))
    rows = []
    for i in range(0, len(u_ref), size):
        x, y, known = (None if u is None else u[i:i + size] for u in (members, u_ref, reference))
        parts = [_score_chunk(x[:, :, t:t + frames], y[:, t:t + frames], boundary,
                              None if known is None else known[:, t:t + frames], stride) for t in range(0, y.shape[1], frames)]
        rows.append({name: torch.cat([part[name].cpu() for part in parts], 1) for name in parts[0]})
    out = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    return {**out, "spread_bins": out["spread_bins"].sum(1)}


def merge_ensembles(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Scores of several batches of one model as one, concatenated over trajectories."""
    kinds = {tuple((name, *value.shape[1:]) for name, value in sorted(part.items())) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"{len(parts)} batches of {len(kinds)} kinds; expected at least one, of equal quantities, members and "
                         "leads in merge_ensembles. Score all batches of a model with the same arguments.")
    return metrics.merge(parts)


def _statistics(scores: dict[str, Tensor]) -> dict[str, tuple[Tensor, Statistic]]:
    """name -> (moments (n, K), statistic of their mean), as in ups.metrics.errors."""
    (_, num_frames, num_fields), num_members = scores["crps"].shape, scores["ranks"].shape[2] - 1
    squared, variance = scores["squared_error"], scores["variance"] * (num_members + 1) / num_members
    both, ranks = torch.stack([variance, squared], 1), scores["ranks"].sum(1)

    def root_ratio(mean: Tensor) -> Tensor:
        return _ratio(*mean.unflatten(1, (2, -1, num_fields)).unbind(1)).sqrt().nanmean(2)

    def by_lead(values: Tensor) -> tuple[Tensor, Statistic]:
        moments = torch.cat([values.nan_to_num(0.0, torch.inf).sum(2), (~values.isnan()).double().sum(2)], 1)
        return moments, lambda mean: mean[:, :num_frames] / mean[:, num_frames:]

    means = {**scores, "nrmse_mean": _ratio(squared.sqrt(), scores["ref_rms"]),
             "nrmse_member": _ratio(scores["member_rmse"], scores["ref_rms"])}
    names = ("crps", "nrmse_mean", "nrmse_member", "energy_score", "spectrum_error", "residual_spectrum_error")
    return {**{name: _mean_of_defined(means[name].flatten(1)) for name in names if name in means},
            "spread_slope": (scores["spread_bins"].flatten(1), lambda mean: spread_slope(mean.unflatten(1, (3, -1)))),
            "ssr": (both.mean(2).flatten(1), lambda mean: root_ratio(mean)[:, 0]), "outlier_share": (ranks, outlier_share),
            **{f"coverage_{round(100 * level)}": (ranks, lambda mean, level=level: coverage(mean, level)) for level in LEVELS},
            **{f"{name}_by_lead": by_lead(means[name]) for name in ("crps", "nrmse_mean")},
            **{f"{name}_by_lead": (value.flatten(1), lambda mean: mean.unflatten(1, (-1, num_fields)).sqrt().mean(2))
               for name, value in (("spread", variance), ("rmse", squared))}, "ssr_by_lead": (both.flatten(1), root_ratio)}


def _joined(sums: Tensor) -> Tensor:
    """Sums (B, 3, NUM_FINE) of score_ensemble in NUM_BINS bins of equally many points -> (B, 3, NUM_BINS)."""
    position = (sums[:, :1].cumsum(2) - sums[:, :1] / 2) / sums[:, :1].sum(2, keepdim=True).clamp_min(1e-30)
    index = (position.nan_to_num(0.0) * NUM_BINS).clamp(0, NUM_BINS - 1).long().expand_as(sums)
    return torch.zeros(len(sums), 3, NUM_BINS, dtype=torch.float64).scatter_add_(2, index, sums)


def spread_slope(sums: Tensor) -> Tensor:
    """Slope of rmse over spread, by least squares weighted with the counts of the bins, of sums (B, 3, NUM_FINE) -> (B,).

    1 where the spread tells quiet points from uncertain ones; NaN where it varies too little to tell.
    """
    count, variance, error = _joined(sums).unbind(1)
    spread, rmse = ((part / count.clamp_min(1e-30)).sqrt() for part in (variance, error))
    weight = count / count.sum(1, keepdim=True)
    away = spread - (weight * spread).sum(1, keepdim=True)
    slope = (weight * away * rmse).sum(1) / (weight * away.square()).sum(1)
    return torch.where((count > 0).sum(1) > 1, slope, torch.nan)


def spread_skill_bins(sums: Tensor) -> dict:
    """Curve of sums (3, NUM_FINE): spread, rmse (relative to the RMS of the truth), count of bins that have points; slope."""
    bins = _joined(sums[None])[0]
    count, variance, error = bins[:, bins[0] > 0]
    lists = {"spread": (variance / count).sqrt(), "rmse": (error / count).sqrt(), "count": count}
    return {**{name: [_number(v) for v in values] for name, values in lists.items()},
            "slope": _number(spread_slope(sums[None])[0])}


def summarise_ensemble(scores: dict[str, Tensor], num_bootstrap: int, seed: int, lead_times: Sequence[float] | None = None,
                       groups: Tensor | None = None) -> dict:
    """One model's row: name -> {value, low, high} (ups.metrics.errors.bootstrap), null where not finite or undefined, and lists.

    crps, ssr, nrmse_mean, nrmse_member, energy_score, coverage_50, coverage_90, outlier_share, spectrum_error,
    residual_spectrum_error, spread_slope; rank_ratio (ups.metrics.pairs.rank_evenness). crps_by_lead, ssr_by_lead (+ _low, _high),
    spread_by_lead, rmse_by_lead (physical units), nrmse_mean_by_lead: [T]. rank_histogram: [M + 1] counts. spread_skill_bins: see
    there. coherence: leads, wavenumber (lower ends), [lead][band] with truth and among members.
    num_members, num_trajectories, nonfinite_trajectories, lead_times.
    """
    num_frames, counts = scores["crps"].shape[1], scores["ranks"].sum(0)
    if lead_times is not None and len(lead_times) != num_frames:
        raise ValueError(f"{len(lead_times)} lead_times; expected {num_frames}, one per predicted frame, in summarise_ensemble. "
                         "Cut the context frames from them.")
    out: dict = {"num_members": scores["ranks"].shape[2] - 1, "num_trajectories": len(scores["crps"]),
                 "lead_times": None if lead_times is None else [_number(float(time)) for time in lead_times],
                 "nonfinite_trajectories": int(scores["nonfinite"].amax(1).sum())}
    for name, (moments, statistic) in _statistics(scores).items():
        interval = metrics.bootstrap(moments, statistic, num_bootstrap, seed, groups)
        if interval[0].ndim:
            out |= {name + suffix: [_number(v) for v in values] for suffix, values in
                    zip(("", "_low", "_high"), interval, strict=True) if not suffix or name in ("crps_by_lead", "ssr_by_lead")}
        else:
            out[name] = _entry(interval)
    out["rank_ratio"] = _entry(pairs.rank_evenness(scores["ranks"], num_bootstrap, seed, groups))
    out["rank_histogram"] = [_number(count) for count in counts.sum(0)]
    out["spread_skill_bins"] = spread_skill_bins(scores["spread_bins"].sum(0))
    leads = metrics.shown_leads(num_frames)
    out["coherence"] = {"leads": leads, "wavenumber": [2**j for j in range(scores["coherence"].shape[3])]}
    for label, name in (("truth", "coherence"), ("members", "coherence_members")):
        out["coherence"][label] = [[_number(v) for v in lead] for lead in scores[name][:, leads].nanmean((0, 2))]
    return out


def compare_ensembles(scores: dict[str, Tensor], baseline: dict[str, Tensor], num_bootstrap: int, seed: int,
                      groups: Tensor | None = None) -> dict[str, dict]:
    """metric(scores) / metric(baseline) with paired intervals, below 1 is better; the scores are fair, so M may differ.

    crps, energy_score, nrmse_mean, spectrum_error and, where both have it, residual_spectrum_error -> {value, low, high};
    nrmse_mean_by_lead: the same of lists [T]. ssr_less: spread/skill less the baseline's.
    """
    if scores["crps"].shape != baseline["crps"].shape:
        raise ValueError(f"scores of {tuple(scores['crps'].shape)} and baseline of {tuple(baseline['crps'].shape)} trajectories, "
                         "leads, fields; expected the same cases in compare_ensembles. Score both models on one split.")
    ours, theirs, out = _statistics(scores), _statistics(baseline), {}
    ratio, less = Tensor.div, Tensor.sub
    for name, key, join in (*((name, name, ratio) for name in RATIOS), ("ssr_less", "ssr", less)):
        if key in ours and key in theirs:
            (moments, statistic), (others, other_statistic), width = ours[key], theirs[key], ours[key][0].shape[1]
            interval = metrics.bootstrap(torch.cat([moments, others], 1), lambda mean: join(  # noqa: B023 (called at once)
                statistic(mean[:, :width]), other_statistic(mean[:, width:])), num_bootstrap, seed, groups)  # noqa: B023
            out[name] = _entry(interval) if not interval[0].ndim else {
                end: [_number(v) for v in values] for end, values in zip(("value", "low", "high"), interval, strict=True)}
    return out
