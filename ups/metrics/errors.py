"""Errors of predicted trajectories, per trajectory first, so that means and intervals do not depend on the batch size.

Axes: u_pred, u_ref are (n, T, C, *space) in physical units, 1 to 3 space axes; T counts predicted frames only (the context
frames are cut off before). e = u_pred - u_ref, <.>_x is a mean over cells, N the number of cells, box length 1.

    scores = merge([score(pred, ref, boundary) for pred, ref in batches])     # everything per trajectory
    row = summarise(scores, num_bootstrap, seed)                              # numbers with 95 % intervals

Definitions are PDEBench's (Takamoto et al. 2022, `metric_func`) unless a docstring says otherwise, with roots of means taken
over all trajectories instead of within a batch. Two markers, never mixed: NaN = undefined because the truth is zero or flat
(left out and counted), inf = the prediction is not finite (the number becomes null in results.json and its gate fails).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LOW, HIGH = 4, 12  # PDEBench iLow, iHigh: low k < 4, mid 4 <= k < 12, high k >= 12
CORRELATION = 0.8  # threshold of the high-correlation time (Lippe et al. 2023, PDE-Refiner, section 4)
FLAT = 1e-6  # a field whose standard deviation is below FLAT * RMS is constant to float32 rounding
CHUNK = 2**22  # cells scored at a time in float64 (32 MiB per temporary)
INTERVAL = 0.95


def _check(u_pred: Tensor, u_ref: Tensor) -> None:
    if u_pred.shape != u_ref.shape or not 4 <= u_ref.ndim <= 6 or 0 in u_ref.shape:
        raise ValueError(f"prediction {tuple(u_pred.shape)} and truth {tuple(u_ref.shape)}; expected two equal, non-empty shapes "
                         "(n, T, C, *space) with 1 to 3 space axes. Cut the context frames from both.")


def _space(u: Tensor) -> tuple[int, ...]:
    return tuple(range(3, u.ndim))


def rms(u: Tensor) -> Tensor:
    """Root mean square over space, sqrt(<u^2>_x): (n, T, C, *space) -> (n, T, C)."""
    return u.double().square().mean(_space(u)).sqrt()


def rmse(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """sqrt(<e^2>_x) -> (n, T, C). PDEBench's RMSE is its mean over n, T and C."""
    _check(u_pred, u_ref)
    return rms(u_pred.double() - u_ref.double())


def _ratio(error: Tensor, reference: Tensor) -> Tensor:
    """error / reference; NaN (undefined, left out) where the reference is exactly zero. No epsilon."""
    return torch.where(reference == 0, torch.nan, error / reference)


def nrmse(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """sqrt(<e^2>_x) / sqrt(<u_ref^2>_x) -> (n, T, C); PDEBench's nRMSE is its mean.

    No epsilon, as in PDEBench, so the numbers agree wherever theirs is defined. Frames whose truth is exactly zero have no
    relative error: NaN here, left out of means and counted as `zero_frames`.
    """
    return _ratio(rmse(u_pred, u_ref), rms(u_ref))


def nrmse_global(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """sqrt(sum e^2) / sqrt(sum u_ref^2), sums over time, channel and space: one ratio per trajectory -> (n,).

    The relative L2 (Frobenius) error of the paper's text and of later work; channels weigh by their physical magnitude.
    """
    return _ratio(rmse(u_pred, u_ref).square().sum((1, 2)).sqrt(), rms(u_ref).square().sum((1, 2)).sqrt())


def nrmse_pooled(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """sqrt(mean_n <e^2>_x) / sqrt(mean_n <u_ref^2>_x) -> (T, C): pooled over trajectories before the roots (ours).

    Insensitive to near-zero frames of single trajectories; dominated by the hardest ones.
    """
    return _ratio(rmse(u_pred, u_ref).square().mean(0).sqrt(), rms(u_ref).square().mean(0).sqrt())


def bias(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """<e>_x -> (n, T, C): error of the conserved mean. PDEBench's cRMSE is mean_TC sqrt(mean_n bias^2)."""
    _check(u_pred, u_ref)
    return (u_pred.double() - u_ref.double()).mean(_space(u_ref))


def max_error(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """max_x |e| -> (n, T, C). PDEBench's Max is mean_TC max_n of it."""
    _check(u_pred, u_ref)
    return (u_pred.double() - u_ref.double()).abs().amax(_space(u_ref))


def boundary_rmse(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """sqrt(sum of e^2 on all faces / number of face cells) -> (n, T, C); cells on two faces count twice, as in PDEBench.

    Face cells: 2 in 1D, 2 (nx + ny) in 2D, 2 (nx ny + ny nz + nz nx) in 3D. In 3D PDEBench also sums e^2 over channels before
    the root: theirs is sqrt(sum_c ours^2), which we do not follow because it grows with the number of channels.
    """
    _check(u_pred, u_ref)
    squared = (u_pred.double() - u_ref.double()).square()
    total, cells = torch.zeros(squared.shape[:3], dtype=torch.float64, device=squared.device), 0
    for axis in _space(squared):
        faces = squared.index_select(axis, torch.tensor([0, squared.shape[axis] - 1], device=squared.device))
        total = total + faces.sum(_space(faces))
        cells += math.prod(faces.shape[3:])
    return (total / cells).sqrt()


def _shells(power: Tensor, index: Tensor, num_shells: int) -> Tensor:
    """Sums of `power` (n, T, C, *grid) over cells of equal integer `index` (*grid) below num_shells -> (n, T, C, shells)."""
    kept = index.flatten() < num_shells
    out = torch.zeros(*power.shape[:3], num_shells, dtype=power.dtype, device=power.device)
    return out.index_add_(3, index.flatten()[kept], power.flatten(3)[..., kept])


def _radius(axes: Sequence[Tensor]) -> Tensor:
    """floor(|k|) on the grid spanned by the wave numbers of each axis."""
    return sum(k.square() for k in torch.meshgrid(*axes, indexing="ij")).sqrt().floor().long()


def error_shells(u_pred: Tensor, u_ref: Tensor, quadrants: str = "positive") -> Tensor:
    """sum over floor(|k|) = shell of |e_hat|^2 / N^2 -> (n, T, C, shells).

    PDEBench's fRMSE of shell k is F_k = sqrt(mean_n shells_k); bands are means of F_k over k < 4, 4..11 and >= 12.
    1D: rfft, shells 0..nx/2. 2D, 3D: shells below min(n_i) / 2; quadrants "positive" takes only k_i >= 0 like PDEBench (half or
    a quarter of the energy), "all" takes every wave number.
    """
    _check(u_pred, u_ref)
    error = u_pred.double() - u_ref.double()
    space, axes = error.shape[3:], _space(error)
    if quadrants not in ("positive", "all"):
        raise ValueError(f"quadrants is {quadrants!r}; expected 'positive' (PDEBench) or 'all' in error_shells. Use one of them.")
    num_cells = math.prod(space)
    if len(space) == 1 and quadrants == "positive":
        return torch.fft.rfft(error).abs().square() / num_cells**2
    power = torch.fft.fftn(error, dim=axes).abs().square() / num_cells**2
    if quadrants == "positive":
        for axis in axes:
            power = power.narrow(axis, 0, power.shape[axis] // 2)
        waves = [torch.arange(n // 2, dtype=torch.float64, device=error.device) for n in space]
    else:
        waves = [torch.fft.fftfreq(n, 1 / n, dtype=torch.float64, device=error.device) for n in space]
    return _shells(power, _radius(waves), max(1, min(space) // 2))


def energy_spectrum(u: Tensor, boundary: str) -> Tensor:
    """Radial energy spectrum E_k -> (n, T, C, shells), with sum_k E_k = <u^2>_x (Parseval).

    Periodic: |u_hat|^2 / N^2 summed over floor(|k|) = shell, k in cycles per box, every quadrant. Any other boundary: the
    orthonormal cosine transform (DCT-II, an even extension), whose mode m has m/2 cycles per box, because a Fourier transform
    would see a jump at the edge as a false 1/k^2 tail. Ours; shells reach the corner of the grid, plot them up to min(n_i)/2.
    """
    u = u.double()
    space, device = u.shape[3:], u.device
    if boundary == "periodic":
        power = torch.fft.fftn(u, dim=_space(u)).abs().square() / math.prod(space) ** 2
        waves = [torch.fft.fftfreq(n, 1 / n, dtype=torch.float64, device=device) for n in space]
    else:
        coefficients = u
        for axis, n in enumerate(space, start=3):
            mode, cell = torch.arange(n, dtype=torch.float64, device=device), torch.arange(n, dtype=torch.float64, device=device)
            basis = (math.pi / n * mode[:, None] * (cell + 0.5)).cos() * math.sqrt(2.0 / n)
            basis[0] /= math.sqrt(2.0)
            coefficients = (coefficients.movedim(axis, -1) @ basis.T).movedim(-1, axis)
        power = coefficients.square() / math.prod(space)
        waves = [torch.arange(n, dtype=torch.float64, device=device) / 2 for n in space]
    index = _radius(waves)
    return _shells(power, index, int(index.max()) + 1)


def correlation(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """Pearson correlation over space, mean over channels -> (n, T).

    A flat truth (standard deviation below FLAT * RMS) has no correlation: that channel is left out, NaN when all are. A flat
    prediction of a truth that varies has correlation 0: it carries no information.
    """
    _check(u_pred, u_ref)
    axes, parts = _space(u_ref), []
    for u in (u_pred.double(), u_ref.double()):
        centred = u - u.mean(axes, keepdim=True)
        std = centred.square().mean(axes).sqrt()
        parts.append((centred, std, std <= FLAT * rms(u)))
    (pred, std_pred, flat_pred), (ref, std_ref, flat_ref) = parts
    value = (pred * ref).mean(axes) / torch.where(flat_pred | flat_ref, 1.0, std_pred * std_ref)
    value = torch.where(flat_pred, 0.0, value)
    return torch.where(flat_ref, torch.nan, value).nanmean(2)


def correlation_time(values: Tensor, lead_times: Tensor | None = None, threshold: float = CORRELATION) -> Tensor:
    """First lead time whose correlation (n, T) is below `threshold`, the last lead time when none is -> (n,).

    So a censored trajectory gives a lower bound. lead_times (T,): time since the last context frame; default 1..T in frames.
    Undefined (NaN) frames do not end the time.
    """
    num_frames = values.shape[1]
    lead_times = torch.arange(1, num_frames + 1) if lead_times is None else torch.as_tensor(lead_times)
    if lead_times.shape != (num_frames,):
        raise ValueError(f"lead_times has shape {tuple(lead_times.shape)}; expected ({num_frames},), one per predicted frame. "
                         "Cut the context frames from it.")
    below = values < threshold
    first = torch.where(below.any(1), below.double().argmax(1), num_frames - 1)
    return lead_times.to(torch.float64)[first.cpu()]


def shown_leads(num_frames: int) -> list[int]:
    """First, middle and last predicted frame (fewer when there are fewer): where spectra are kept and shown."""
    return sorted({0, num_frames // 2, num_frames - 1})


def _score_chunk(u_pred: Tensor, u_ref: Tensor, boundary: str) -> dict[str, Tensor]:
    u_pred, u_ref = u_pred.double(), u_ref.double()
    bad = ~torch.isfinite(u_pred).flatten(3).all(3)
    u_pred = torch.where(bad.reshape(*bad.shape, *[1] * (u_ref.ndim - 3)), u_ref, u_pred)  # marked inf below
    leads = shown_leads(u_ref.shape[1])
    errors = {"rmse": rmse(u_pred, u_ref), "bias": bias(u_pred, u_ref), "max_error": max_error(u_pred, u_ref),
              "brmse": boundary_rmse(u_pred, u_ref), "shells": error_shells(u_pred, u_ref)}
    errors = {name: value.masked_fill(bad.reshape(*bad.shape, *[1] * (value.ndim - 3)), torch.inf)
              for name, value in errors.items()}
    values = correlation(u_pred, u_ref).masked_fill(bad.any(2), -1.0)
    spectrum = energy_spectrum(u_pred[:, leads], boundary).masked_fill(bad[:, leads, :, None], torch.inf)
    return {**errors, "ref_rms": rms(u_ref), "correlation": values, "spectrum_pred": spectrum,
            "spectrum_ref": energy_spectrum(u_ref[:, leads], boundary), "nonfinite": bad.flatten(1).any(1).double()}


def score(u_pred: Tensor, u_ref: Tensor, boundary: str) -> dict[str, Tensor]:
    """Per-trajectory quantities of a batch, float64 on the CPU, every tensor with n first; join batches with `merge`.

    rmse, ref_rms, bias, max_error, brmse: (n, T, C); shells: (n, T, C, shells) of the error; correlation: (n, T);
    spectrum_pred, spectrum_ref: (n, leads, C, shells) at `shown_leads`; nonfinite: (n,) 1 where the prediction has a NaN or inf.
    `boundary` (as in ups.tasks) selects the basis of the spectra. Errors of non-finite frames are inf.
    Raises ValueError for unequal shapes or a truth that is not finite.
    """
    _check(u_pred, u_ref)
    if not torch.isfinite(u_ref).all():
        raise ValueError(f"the truth of shape {tuple(u_ref.shape)} holds NaN or inf; expected finite fields in score(). "
                         "Check the data file: its reference solver failed.")
    size = max(1, CHUNK // math.prod(u_ref.shape[1:]))
    parts = [_score_chunk(u_pred[i:i + size], u_ref[i:i + size], boundary) for i in range(0, len(u_ref), size)]
    return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}


def merge(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Scores of several batches as one: concatenated over trajectories, so nothing depends on the batch size."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def nrmse_per_trajectory(scores: dict[str, Tensor]) -> Tensor:
    """PDEBench's nRMSE of each trajectory, mean over time and channel -> (n,); to find the median and the worst one."""
    return _ratio(scores["rmse"], scores["ref_rms"]).nanmean((1, 2))


Statistic = Callable[[Tensor], Tensor]


def _mean_of_defined(ratio: Tensor) -> tuple[Tensor, Statistic]:
    """Moments and statistic of the mean of `ratio` (n, M), leaving out NaN: sum / count."""
    defined = ~ratio.isnan()
    moments = torch.stack([ratio.nan_to_num(0.0, torch.inf).sum(1), defined.double().sum(1)], 1)
    return moments, lambda mean: mean[:, 0] / mean[:, 1]


def _statistics(scores: dict[str, Tensor], lead_times: Tensor | None) -> dict[str, tuple[Tensor, Statistic]]:
    """name -> (moments (n, M), statistic of their mean (B, M) -> (B, ...)); a metric is statistic(mean of moments)."""
    squared, ref_squared = scores["rmse"].square().flatten(1), scores["ref_rms"].square().flatten(1)
    ratio, size = _ratio(scores["rmse"], scores["ref_rms"]), squared.shape[1]
    out = {
        "nrmse": _mean_of_defined(ratio.flatten(1)),
        "nrmse_global": _mean_of_defined(_ratio(squared.sum(1), ref_squared.sum(1)).sqrt()[:, None]),
        "nrmse_pooled": (torch.cat([squared, ref_squared], 1),
                         lambda mean: _ratio(mean[:, :size], mean[:, size:]).sqrt().nanmean(1)),
        "rmse": (scores["rmse"].flatten(1).mean(1, keepdim=True), lambda mean: mean[:, 0]),
        "crmse": (scores["bias"].square().flatten(1), lambda mean: mean.sqrt().mean(1)),
        "brmse": (scores["brmse"].flatten(1).mean(1, keepdim=True), lambda mean: mean[:, 0]),
    }
    shells = scores["shells"]
    for name, first, last in (("low", 0, LOW), ("mid", LOW, HIGH), ("high", HIGH, shells.shape[3])):
        if shells.shape[3] > first:  # a coarse grid has no such band
            out[f"frmse_{name}"] = (shells[..., first:last].flatten(1), lambda mean: mean.sqrt().mean(1))
    if scores["correlation"].shape[1] > 1:
        out["correlation_time"] = (correlation_time(scores["correlation"], lead_times)[:, None], lambda mean: mean[:, 0])
    for name, axis in (("error_growth", 2), ("nrmse_by_field", 1)):
        moments = torch.cat([ratio.nan_to_num(0.0, torch.inf).sum(axis), (~ratio.isnan()).double().sum(axis)], 1)
        out[name] = (moments, lambda mean: mean[:, :mean.shape[1] // 2] / mean[:, mean.shape[1] // 2:])
    return out


def bootstrap(moments: Tensor, statistic: Statistic, num_bootstrap: int, seed: int,
              groups: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(value, low, high) of statistic(mean of moments over trajectories); the 95 % percentile interval (Efron 1979).

    moments: (n, M). statistic: (B, M) -> (B, ...). Trajectories are drawn with replacement; those of one group (n,) stay
    together (same initial condition at several parameter values), because they are not independent. Where the value
    is not finite neither are the ends.
    """
    _, member = torch.unique(torch.arange(len(moments)) if groups is None else torch.as_tensor(groups), return_inverse=True)
    num_groups = int(member.max()) + 1
    sums = torch.zeros(num_groups, moments.shape[1], dtype=torch.float64).index_add_(0, member, moments.double())
    sizes = torch.bincount(member, minlength=num_groups).double()
    value = statistic((sums.sum(0) / sizes.sum())[None])[0]
    generator = torch.Generator().manual_seed(seed)
    draws, rows = [], max(1, CHUNK // moments.shape[1])
    for start in range(0, num_bootstrap, rows):
        drawn = torch.randint(num_groups, (min(rows, num_bootstrap - start), num_groups), generator=generator)
        ones = torch.ones(drawn.shape, dtype=torch.float64)
        counts = torch.zeros_like(ones).scatter_add_(1, drawn, ones)
        draws.append(statistic(counts @ sums / (counts @ sizes)[:, None]))
    tail = (1.0 - INTERVAL) / 2.0
    low, high = torch.nanquantile(torch.cat(draws), torch.tensor([tail, 1.0 - tail], dtype=torch.float64), dim=0)
    return value, torch.where(value.isfinite(), low, value), torch.where(value.isfinite(), high, value)


def bootstrap_interval(values: Tensor, num_bootstrap: int, seed: int, groups: Tensor | None = None) -> tuple[float, float, float]:
    """(mean, low, high) of one value per trajectory (n,), 95 % percentile bootstrap over trajectories."""
    value, low, high = bootstrap(values[:, None], lambda mean: mean[:, 0], num_bootstrap, seed, groups)
    return float(value), float(low), float(high)


def bootstrap_ratio(values: Tensor, baseline: Tensor, num_bootstrap: int, seed: int,
                    groups: Tensor | None = None) -> tuple[float, float, float]:
    """(mean(values) / mean(baseline), low, high), both (n,) on the same trajectories and drawn together (paired)."""
    if values.shape != baseline.shape:
        raise ValueError(f"{len(values)} values and {len(baseline)} of the baseline; expected the same trajectories in the same "
                         "order in bootstrap_ratio. Score both models on one split.")
    both = torch.stack([values, baseline], 1)
    value, low, high = bootstrap(both, lambda mean: mean[:, 0] / mean[:, 1], num_bootstrap, seed, groups)
    return float(value), float(low), float(high)


def compare(scores: dict[str, Tensor], baseline: dict[str, Tensor], num_bootstrap: int, seed: int, metric: str = "nrmse",
            groups: Tensor | None = None) -> dict[str, float | None]:
    """metric(scores) / metric(baseline) with its paired interval; below 1 is better than the baseline."""
    (ours, statistic), (theirs, _) = _statistics(scores, None)[metric], _statistics(baseline, None)[metric]
    width = ours.shape[1]
    return _entry(bootstrap(torch.cat([ours, theirs], 1), lambda mean: statistic(mean[:, :width]) / statistic(mean[:, width:]),
                            num_bootstrap, seed, groups))


def _number(value: Tensor | float) -> float | None:
    """Six significant digits for JSON, which has no NaN or inf: null there means undefined or not finite."""
    return float(f"{float(value):.6g}") if math.isfinite(value) else None


def _entry(interval: tuple[Tensor, Tensor, Tensor]) -> dict[str, float | None]:
    return dict(zip(("value", "low", "high"), map(_number, interval), strict=True))


def legacy_factor(num_predicted: int, num_context: int) -> float:
    """T / (T + context): PDEBench's published tables average over the context frames too, whose error is zero (its issue 41).

    Every metric that is averaged over time last shrinks by this factor.
    """
    return num_predicted / (num_predicted + num_context)


def summarise(scores: dict[str, Tensor], num_bootstrap: int, seed: int, lead_times: Tensor | None = None,
              legacy_context: int = 0, groups: Tensor | None = None) -> dict:
    """One model's row of results.json: name -> {value, low, high}, null where not finite, plus lists and counts.

    nrmse, nrmse_global, nrmse_pooled, rmse, crmse, brmse, frmse_low/mid/high, correlation_time (see the functions above);
    max_error has no interval (the bootstrap of a maximum is not consistent); error_growth(_low, _high): nRMSE per lead;
    nrmse_by_field: per channel; zero_frames: frames without a relative error, left out; nonfinite_trajectories: count.
    legacy_context > 0 adds nrmse_legacy, which counts so many perfect context frames.
    """
    out: dict = {}
    for name, (moments, statistic) in _statistics(scores, lead_times).items():
        interval = bootstrap(moments, statistic, num_bootstrap, seed, groups)
        if interval[0].ndim:
            for suffix, values in zip(("", "_low", "_high"), interval, strict=True):
                if name == "error_growth" or not suffix:
                    out[name + suffix] = [_number(value) for value in values]
        else:
            out[name] = _entry(interval)
    out["max_error"] = {"value": _number(scores["max_error"].amax(0).mean()), "low": None, "high": None}
    if legacy_context:
        factor = legacy_factor(scores["rmse"].shape[1], legacy_context)
        out["nrmse_legacy"] = {key: None if value is None else _number(value * factor) for key, value in out["nrmse"].items()}
    out["zero_frames"] = int((scores["ref_rms"] == 0).sum())
    out["nonfinite_trajectories"] = int(scores["nonfinite"].sum())
    return out


def summarise_spectra(scores: dict[str, dict[str, Tensor]]) -> dict:
    """Mean energy spectra of the truth and of each model for results.json: leads, wavenumber and name -> [lead][field][shell]."""
    first = next(iter(scores.values()))
    out: dict = {"leads": shown_leads(first["rmse"].shape[1]), "wavenumber": list(range(first["spectrum_ref"].shape[3]))}
    series = {"truth": first["spectrum_ref"], **{name: value["spectrum_pred"] for name, value in scores.items()}}
    for name, values in series.items():
        out[name] = [[[_number(energy) for energy in field] for field in lead] for lead in values.mean(0)]
    return out
