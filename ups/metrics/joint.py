"""Joint structure of an ensemble in space and time: is the truth as far from a member as two members are?

If truth and independent members have one distribution, any distance has the same mean between the truth and a
member as between two members. So the ratio of the two mean distances is 1 for exact samples, even if the
distribution is unknown. With r = u - reference, the residual to the operator's forecast:

    trajectory_score   fair energy score of whole trajectories (Gneiting and Raftery 2007), units of an RMSE
    nearest            distance of the truth to the nearest member over that of a member to the nearest other
    decades            between the mean energy of r of members and of the truth, mean over leads and fields,
                       in the octave of the wave number with the largest difference; 0 is exact
"""

import torch
from torch import Tensor

from ups.common.mask import filled, fraction, valid_cells
from ups.metrics.intervals import CHUNK, Moments, Scores, halves, merge_chunks
from ups.metrics.proper import EXACT, check_members, energy_score
from ups.metrics.spectra import ROUNDING, octaves, rms


def score_trajectories(members: Tensor, u_ref: Tensor, exact: Tensor | None = None) -> Scores:
    """{"trajectory_score": (n,)} of members (n, M, T, C, *space) against u_ref (n, T, C, *space), float64 on
    the CPU; inf for trajectories with a member that is not finite.

    exact (n, K, T, C, *space): samples of the distribution of the truth, over which the score is averaged.
    """
    check_members(members, u_ref, "score_trajectories")
    size = max(1, CHUNK // members[0].numel())
    return merge_chunks(_trajectory_score, size, members, u_ref, exact)


def _trajectory_score(members: Tensor, u_ref: Tensor, exact: Tensor | None) -> Scores:
    valid = valid_cells(u_ref)
    x, y = filled(members.double(), valid), filled(u_ref.double(), valid)
    broken = ~x.isfinite().flatten(1).all(1)
    x = torch.where(broken[(..., *[None] * y.ndim)], y[:, None], x)
    score = energy_score(x, y)
    if exact is not None:  # the same mean, without the chance of one truth
        law = filled(exact.double(), valid)
        far = torch.cdist(x.flatten(2), law.flatten(2), compute_mode=EXACT).mean((1, 2))
        one = torch.cdist(x.flatten(2), y.flatten(1)[:, None], compute_mode=EXACT).mean((1, 2))
        score = score + (far - one) / y[0].numel() ** 0.5
    score = score / torch.as_tensor(fraction(valid)).double().mean().sqrt()
    return {"trajectory_score": score.masked_fill(broken, torch.inf)}


def score_structure(members: Tensor, u_ref: Tensor, boundary: str, reference: Tensor) -> Scores:
    """Distances and spectra of the trajectories of members (n, M, T, C, *space) beside u_ref (n, T, C,
    *space), float64 on the CPU: nearest (n, 2, T) of truth and members, for `nearest_ratio`; energy (n, 2, T
    C, octaves) of members and truth, for `decades`; inf for trajectories with a member that is not finite.
    reference: the operator's forecast, as u_ref.
    """
    x, y = members.double(), u_ref.double()
    valid = valid_cells(y)
    broken = ~filled(x, valid).isfinite().flatten(1).all(1)
    x = torch.where(broken[(..., *[None] * y.ndim)], y[:, None], x)
    energy = [_residual_energy(u, y, boundary, reference.double()) for u in (x, y[:, None])]
    out = {"nearest": _nearest(filled(x, valid), filled(y, valid)), "energy": torch.stack(energy, 1)}
    return {
        name: value.masked_fill(broken[(..., *[None] * (value.ndim - 1))], torch.inf).cpu()
        for name, value in out.items()
    }


def _nearest(x: Tensor, y: Tensor) -> Tensor:
    """(n, 2, T): distance of the truth y (n, T, C, *space) to the nearest member of x (n, M, T, C, *space),
    and the mean distance of a member to the nearest of the truth and the other members."""
    every = torch.cat([y[:, None], x], 1).transpose(1, 2).flatten(3)  # (n, T, 1 + M, cells)
    apart = torch.cdist(every, every, compute_mode=EXACT)
    apart.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    least = apart.amin(-1)
    return torch.stack([least[..., 0], least[..., 1:].mean(-1)], 1)


def _residual_energy(u: Tensor, u_ref: Tensor, boundary: str, reference: Tensor) -> Tensor:
    """Energy by octave of u (n, K, T, C, *space) minus the reference, mean over K: (n, T C, octaves). Its
    smallest value is the rounding error of u_ref (n, T, C, *space)."""
    floor = (rms(u_ref).square() * ROUNDING).clamp_min(torch.finfo(torch.float64).tiny)[..., None]
    total = 0.0
    for one in u.unbind(1):
        total = total + torch.maximum(octaves(one - reference, boundary), floor)
    return (total / u.shape[1]).flatten(1, 2)


def decades(energy: Tensor) -> Moments:
    """Decades between the two energies of (n, 2, F, octaves), in the worst octave."""
    num_octaves = energy.shape[-1]
    return energy.flatten(
        1
    ), lambda mean: halves(mean).log10().unflatten(1, (-1, num_octaves)).mean(1).abs().amax(1)
