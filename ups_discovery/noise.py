"""The standard deviation of white noise of measurement in a film, from the film alone."""

import math
from collections.abc import Sequence

import numpy as np

MAX_ORDER = 4  # of the differences along every axis
MIN_CELLS = 8  # along an axis that is differenced; a shorter one is many films of the same noise
MIN_VALUES = 200  # differences that a result needs
CUT = 3.0  # robust standard deviations, beyond which a difference belongs to a front
CUT_VARIANCE, CUT_CORRELATION = 0.9733, 0.9805  # of a normal variable and of neighbours, cut there
MAX_MISFIT, STANDARD_ERRORS = 0.1, 3.0  # of the whiteness from 1: any, and by chance
SMALLEST, LARGEST = 1e-4, 0.98  # of the standard deviation of the field
ROUNDED = 2.0  # times the rounding error of the numbers: less noise than this is rounding
MOST_VALUES, MIN_FRAMES = 2**18, 16  # of a field that are looked at, and fewest frames of these


def noise_by_field(u: np.ndarray, names: Sequence[str], mask: np.ndarray | None = None) -> dict[str, float]:
    """The `measurement_noise` of every channel of u (rows, time, C, *space) that has any.

    mask (C, *space): cells without a value, or None."""
    found = {}
    for channel, name in enumerate(names):
        values = u[:, :, channel].astype(np.float64)
        if mask is not None:
            values[..., mask[channel]] = np.nan
        if sigma := measurement_noise(values):
            found[name] = sigma
    return found


def measurement_noise(u: np.ndarray) -> float | None:
    """The standard deviation of the noise in u (rows, time, *space), in its unit; None if there is none, or
    none that can be told from the field.

    Mixed differences along time and all axes of space remove a field that both resolve, and leave white
    noise. The first order b is taken at which neighbouring differences correlate along every axis as those of
    white noise do, by -b / (b + 1). So a field that the grid does not resolve is not noise, nor is one that
    noise drives (a random walk in time), nor rounding. Differences across fronts are cut out. NaN: cells
    without a value. Ours; with differences in place of the wavelets of Donoho and Johnstone 1994 (doi
    10.1093/biomet/81.3.425)."""
    u = u[: max(1, MOST_VALUES // u[0].size), : max(MIN_FRAMES, MOST_VALUES // u[0, 0].size)]
    u = np.asarray(u, np.float64)
    axes = [axis for axis in range(1, u.ndim) if u.shape[axis] >= MIN_CELLS or axis == 1]
    with np.errstate(invalid="ignore"):
        # a cell that never changes has no noise
        u = np.where(np.ptp(u, axis=1, keepdims=True) > 0, u, np.nan)
    if not np.isfinite(u).any():
        return None
    std, rounding = np.nanstd(u), rounding_error(u)
    for order in range(1, MAX_ORDER + 1):
        found = white(u, order, axes)
        if found and max(SMALLEST * std, ROUNDED * rounding) < found < LARGEST * std:
            return found
    return None


def white(u: np.ndarray, order: int, axes: list[int]) -> float | None:
    """The standard deviation of u by differences of this order along `axes`; None unless they are white."""
    if min(u.shape[axis] for axis in axes) < order + 2:
        return None
    d = u
    for axis in axes:
        d = np.diff(d, order, axis=axis) / math.sqrt(math.comb(2 * order, order))
    size = np.abs(d[np.isfinite(d)])
    if len(size) < MIN_VALUES:
        return None
    limit = CUT * np.median(size) / 0.6745
    d = np.where(np.abs(d) <= limit, d, np.nan)
    variance = np.nanmean(d**2) if limit > 0 else 0.0
    if not variance:
        return None
    # 1 for white noise, 0 for a random walk along the axis
    expected, walk = -order / (order + 1), -(order - 1) / order
    for axis in axes:
        ends = d.shape[axis]
        pairs = np.take(d, range(ends - 1), axis) * np.take(d, range(1, ends), axis)
        pairs = pairs[np.isfinite(pairs)] / variance / CUT_CORRELATION
        if len(pairs) < MIN_VALUES:
            return None
        whiteness = (pairs.mean() - walk) / (expected - walk)
        error = (1 - expected**2) * math.sqrt(order / len(pairs)) / (walk - expected)
        if abs(whiteness - 1) > MAX_MISFIT + STANDARD_ERRORS * error or STANDARD_ERRORS * error > 0.6:
            return None
    return math.sqrt(variance / CUT_VARIANCE)


def rounding_error(u: np.ndarray) -> float:
    """The standard deviation of rounding, from the gaps between the numbers that occur; 0 if few occur
    twice."""
    values = u[np.isfinite(u)][: 2**20]
    levels, place = np.unique(values, return_inverse=True)
    if 2 * len(levels) > len(values):
        return 0.0
    gaps = np.diff(levels, append=levels[-1])[place]
    return float(np.median(gaps)) / math.sqrt(12)
