"""Joint structure of an ensemble in space and time: is the truth as far from a member as two members are?

If truth and independent members have one distribution, any distance has the same mean between the truth and a
member as between two members. So the ratio of the two mean distances is 1 for exact samples, even if the
distribution is unknown. With r = u - reference, the residual to the operator's forecast:

    trajectory_score   fair energy score of whole trajectories (Gneiting and Raftery 2007), units of an RMSE
    nearest            distance of the truth to the nearest member over that of a member to the nearest other
    spectrum           decades between the mean energy of r of members and of the truth, mean over leads and
                       fields, in the octave of the wave number with the largest difference; 0 is exact
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ups.common.mask import filled, fraction, valid_cells
from ups.metrics.intervals import CHUNK, Metric, Moments, Scores, halves, merge
from ups.metrics.proper import EXACT, check_members, energy_score
from ups.metrics.spectra import ROUNDING, octaves, rms


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
    energy_ref = residual_energy(y[:, None], y, boundary, reference) if energy_ref is None else energy_ref
    out = {
        "trajectory_score": score,
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
) -> Scores:
    """Scores of each trajectory of members (n, M, T, C, *space) against u_ref (n, T, C, *space), float64 on
    the CPU.

    Returns trajectory_score (n,), nearest (n, 2, T), and energy of members and truth (n, 2, T C, octaves);
    inf for trajectories with a member that is not finite. reference: the operator's forecast, as u_ref. exact
    (n, K, T, C, *space): samples of the distribution of the truth, over which the trajectory score is
    averaged; energy_ref: their `residual_energy`, instead of the truth's.
    """
    check_members(members, u_ref, "score_joint")
    size = max(1, CHUNK // members[0].numel())
    parts = [
        [None if u is None else u[i : i + size] for u in (members, u_ref, reference, exact, energy_ref)]
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


def _ratio_of_distances(scores: Scores, _: object) -> Moments | None:
    found = scores.get("nearest")
    if found is None or found.isnan().all():
        return None
    return found.flatten(1), lambda mean: halves(mean).mean(1)


JOINT = (
    Metric(
        "trajectory_score",
        "trajectory score",
        "energy score of whole trajectories: sees whether leads and points vary together; units of an RMSE",
        _mean_score("trajectory_score"),
        is_compared=True,
    ),
    Metric(
        "nearest",
        "nearest member",
        "distance to the nearest member from the truth over that from a member; 1 for exact samples",
        _ratio_of_distances,
        best=1.0,
    ),
    Metric(
        "spectrum",
        "spectrum of members",
        "decades between the energy that members and the truth add to the operator's, in the worst octave",
        lambda scores, _: decades(scores["energy"]) if "energy" in scores else None,
    ),
)
