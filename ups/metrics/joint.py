"""Joint structure of an ensemble in space and time: is the truth as far from a member as two members are?

If truth and independent members have one distribution, any distance has the same mean between the truth and a
member as between two members. So the ratio of the two mean distances is 1 for exact samples, even if the
distribution is unknown. With r = u - reference, the residual to the operator's forecast:

    trajectory_score   fair energy score of whole trajectories (Gneiting and Raftery 2007), units of an RMSE
    variogram_score    fair variogram score of order 1/2 (Scheuerer and Hamill 2015) of u itself, mean over
                       leads, fields and pairs of cells 1, 2, 4, ... apart along each axis; units of u
    variogram_space    ratio, of log10 of mean |r(x + h) - r(x)|, lags of 1, 2, 4, ... cells along each axis
    nearest            distance of the truth to the nearest member over that of a member to the nearest other
    spectrum           decades between the mean energy of r of members and of the truth, mean over leads and
                       fields, in the octave of the wave number with the largest difference; 0 is exact

Variograms of order 1 (Scheuerer and Hamill 2015) are means over cells, because their place is random. Members
that were cut into blocks or made white have the right marginals and the wrong variograms; members permuted
between leads have the wrong `memory` (ups/metrics/likeness.py); a member that is a copy of the truth has
`nearest` 0. Structure in time has no variogram: of rare events |r(t + 1) - r(t)| says how many there are, not
how they go on.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ups.common.mask import filled, fraction, valid_cells
from ups.metrics.intervals import CHUNK, Metric, Moments, Scores, halves, merge
from ups.metrics.proper import EXACT, check_members, energy_score, variogram_score
from ups.metrics.spectra import ROUNDING, octaves, rms, space_axes
from ups_discovery.boundary import PERIODIC, along

TOLERANCE = 0.01  # decades (2 %): added to distances, so that smaller ones do not count
ORDER = 0.5  # of the variogram score
PAIRS = 16  # per axis and lag, of the variogram score: neighbouring pairs say the same


def _lags(size: int) -> list[int]:
    """1, 2, 4, ... up to half of size."""
    return [2**power for power in range(size.bit_length()) if 2 * 2**power <= size]


def _differences(r: Tensor, axis: int, lag: int, is_periodic: bool) -> Tensor:
    """r shifted by a lag along `axis`, minus r."""
    if is_periodic:
        return r.roll(-lag, axis) - r
    count = r.shape[axis] - lag
    return r.narrow(axis, lag, count) - r.narrow(axis, 0, count)


def variograms(r: Tensor, boundary: str, floor: Tensor) -> Tensor:
    """log10 of the mean |difference| over cells of r (n, T, C, *space): (n, features).

    floor (n, T, C): the smallest mean.
    """
    axes = space_axes(r)
    mean = Tensor.mean if valid_cells(r) is None else Tensor.nanmean  # over pairs of valid cells
    features = [
        torch.fmax(mean(_differences(r, axis, lag, end == PERIODIC).abs(), axes), floor).log10()
        for axis, end in zip(axes, along(boundary, len(axes)), strict=True)
        for lag in _lags(r.shape[axis])
    ]
    return torch.stack(features, 1).flatten(1)


def increments(u: Tensor, boundary: str) -> Tensor:
    """|u(x + h) - u(x)|^ORDER of u (n, T, C, *space): (n, T, C, pairs), for h of `_lags` along each axis and
    about PAIRS points x per axis."""
    axes, out = space_axes(u), []
    stride = max(1, min(u.shape[3:]) // PAIRS)
    for axis, end in zip(axes, along(boundary, len(axes)), strict=True):
        thin, size = u, u.shape[axis]
        for other in axes:
            if other != axis:
                thin = thin[(slice(None),) * (other % u.ndim) + (slice(None, None, stride),)]
        for lag in _lags(size):
            first = torch.arange(0, size if end == PERIODIC else size - lag, stride, device=u.device)
            pair = (thin.index_select(axis, place) for place in (first, (first + lag) % size))
            out.append((next(pair) - next(pair)).abs().pow(ORDER).flatten(3))
    return torch.cat(out, 3) if out else u.new_zeros(*u.shape[:3], 0)


def law_increments(law: Tensor, boundary: str) -> Tensor:
    """Mean and variance of the increments of samples (n, K, T, C, *space): (n, 2, T, C, pairs), float64."""
    parts = [increments(draws.double(), boundary) for draws in law]
    return torch.stack([torch.stack([part.mean(0), part.var(0, correction=0)]) for part in parts])


def _distances(features: Tensor) -> Tensor:
    """(n, 2): mean distance of the first row of features (n, 1 + M, F) to the others, and between two of the
    others, each plus TOLERANCE; NaN for fewer than two others or no features."""
    count, size = features.shape[1] - 1, features.shape[2]
    if count < 2 or size == 0:
        return features.new_full((len(features), 2), torch.nan)
    apart = torch.cdist(features, features, p=1) / size
    among = apart[:, 1:, 1:].sum((1, 2)) / (count * (count - 1))
    return TOLERANCE + torch.stack([apart[:, 0, 1:].mean(1), among], 1)


def _nearest(x: Tensor, y: Tensor) -> Tensor:
    """(n, 2, T): distance of the truth y (n, T, C, *space) to the nearest member of x (n, M, T, C, *space),
    and the mean distance of a member to the nearest of the truth and the other members."""
    every = torch.cat([y[:, None], x], 1).transpose(1, 2).flatten(3)  # (n, T, 1 + M, cells)
    apart = torch.cdist(every, every, compute_mode=EXACT)
    apart.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    least = apart.amin(-1)
    return torch.stack([least[..., 0], least[..., 1:].mean(-1)], 1)


def residual_energy(u: Tensor, u_ref: Tensor, boundary: str, reference: Tensor | None = None) -> Tensor:
    """Energy by octave of u (n, K, T, C, *space) minus the reference, mean over K: (n, T C, octaves),
    float64. Its smallest value is the rounding error of u_ref (n, T, C, *space)."""
    floor = (rms(u_ref).square() * ROUNDING).clamp_min(torch.finfo(torch.float64).tiny)[..., None]
    total = 0.0
    for one in u.unbind(1):
        r = one.double() if reference is None else one.double() - reference.double()
        total = total + torch.maximum(octaves(r, boundary), floor)
    return (total / u.shape[1]).flatten(1, 2)


def _score_chunk(
    members: Tensor,
    u_ref: Tensor,
    boundary: str,
    reference: Tensor | None,
    exact: Tensor | None,
    energy_ref: Tensor | None,
    pairs_ref: Tensor | None,
) -> Scores:
    x, y = members.double(), u_ref.double()
    valid = valid_cells(y)
    broken = ~filled(x, valid).isfinite().flatten(1).all(1)
    if reference is not None:
        broken = broken | ~filled(reference, valid).isfinite().flatten(1).all(1)
        reference = torch.where(broken[(..., *[None] * (y.ndim - 1))], y, reference.double())
    x = torch.where(broken[(..., *[None] * y.ndim)], y[:, None], x)
    x_valid, y_valid = filled(x, valid), filled(y, valid)
    score = energy_score(x_valid, y_valid)
    if exact is not None:  # the same mean, without the chance of one truth
        law = filled(exact.double(), valid)
        far = torch.cdist(x_valid.flatten(2), law.flatten(2), compute_mode=EXACT).mean((1, 2))
        one = torch.cdist(x_valid.flatten(2), y_valid.flatten(1)[:, None], compute_mode=EXACT).mean((1, 2))
        score = score + (far - one) / y[0].numel() ** 0.5
    score = score / torch.as_tensor(fraction(valid)).double().mean().sqrt()
    x = filled(x, valid, torch.nan)
    every = torch.cat([y[:, None], x], 1)
    r = (every if reference is None else every - reference[:, None]).flatten(0, 1)
    floor, count = rms(y).square() * ROUNDING, every.shape[1]  # of an energy
    lowest = floor.sqrt().repeat_interleave(count, 0).clamp_min(torch.finfo(torch.float64).tiny)
    energy_ref = residual_energy(y[:, None], y, boundary, reference) if energy_ref is None else energy_ref
    mean, variance = (increments(y, boundary), 0.0) if pairs_ref is None else pairs_ref.unbind(1)
    pairs = increments(x.flatten(0, 1), boundary).unflatten(0, x.shape[:2])
    out = {
        "trajectory_score": score,
        "variogram_space": _distances(variograms(r, boundary, lowest).unflatten(0, (-1, count))),
        "variogram_score": variogram_score(pairs, mean, variance),
        "nearest": _nearest(x_valid, y_valid),
        "energy": torch.stack([residual_energy(x, y, boundary, reference), energy_ref], 1),
    }
    return {
        name: value.masked_fill(broken[(..., *[None] * (value.ndim - 1))], torch.inf)
        for name, value in out.items()
    }


def score_joint(
    members: Tensor,
    u_ref: Tensor,
    boundary: str,
    reference: Tensor | None = None,
    exact: Tensor | None = None,
    energy_ref: Tensor | None = None,
    pairs_ref: Tensor | None = None,
) -> Scores:
    """Scores of each trajectory of members (n, M, T, C, *space) against u_ref (n, T, C, *space), float64 on
    the CPU.

    Returns trajectory_score and variogram_score (n,), two distances variogram_space (n, 2),
    nearest (n, 2, T), and energy of members and truth (n, 2, T C, octaves); inf
    for trajectories with a member that is not finite.
    reference: the operator's forecast, as u_ref. exact (n, K, T, C, *space): samples of the distribution of
    the truth, over which the trajectory score is averaged; energy_ref, pairs_ref: their
    `residual_energy` and `law_increments`, instead of the truth's.
    """
    check_members(members, u_ref, "score_joint")
    size = max(1, CHUNK // members[0].numel())
    parts = [
        [
            None if u is None else u[i : i + size]
            for u in (members, u_ref, reference, exact, energy_ref, pairs_ref)
        ]
        for i in range(0, len(u_ref), size)
    ]
    return merge([_score_chunk(x, y, boundary, *others) for x, y, *others in parts])


def decades(energy: Tensor) -> Moments:
    """`spectrum` of energy (n, 2, F, octaves)."""
    num_octaves = energy.shape[-1]
    return energy.flatten(
        1
    ), lambda mean: halves(mean).log10().unflatten(1, (-1, num_octaves)).mean(1).abs().amax(1)


def _mean_score(name: str) -> Callable[[Scores, object], Moments | None]:
    """Moments of the mean of a score (n,); None if it was not computed or is undefined."""

    def moments(scores: Scores, _: object) -> Moments | None:
        found = scores.get(name)
        return None if found is None or found.isnan().all() else (found[:, None], lambda mean: mean[:, 0])

    return moments


def _ratio_of(name: str) -> Callable[[Scores, object], Moments | None]:
    """Moments of the ratio of two mean distances; None if it is undefined or was not scored."""

    def moments(scores: Scores, _: object) -> Moments | None:
        found = scores.get(name)
        if found is None or found.isnan().all():
            return None
        # (n, 2, T) or (n, 2, 1)
        return found.reshape(len(found), 2, -1).flatten(1), lambda mean: halves(mean).mean(1)

    return moments


JOINT = (
    Metric(
        "trajectory_score",
        "trajectory score",
        "energy score of whole trajectories: sees whether leads and points vary together; units of an RMSE",
        _mean_score("trajectory_score"),
        is_compared=True,
    ),
    Metric(
        "variogram_score",
        "variogram score",
        "of differences between cells: sees whether they vary together; units of the field",
        _mean_score("variogram_score"),
        is_compared=True,
    ),
    *[
        Metric(
            name,
            label,
            f"{what} from the truth to a member over that between two members; 1 for exact samples",
            _ratio_of(name),
            best=1.0,
        )
        for name, label, what in (
            ("variogram_space", "variogram in space", "distance of variograms"),
            ("nearest", "nearest member", "distance to the nearest member"),
        )
    ],
    Metric(
        "spectrum",
        "spectrum of members",
        "decades between the energy that members and the truth add to the operator's, in the worst octave",
        lambda scores, _: decades(scores["energy"]) if "energy" in scores else None,
    ),
)
