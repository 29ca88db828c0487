"""Checks of ensembles beyond scores: are members independent, do students respond to their condition as the
teacher does, and are the data a sample of the law that replaces them?"""

import torch
from torch import Tensor

from ups.metrics.intervals import as_interval, bootstrap, halves
from ups.metrics.spectra import ROUNDING, octaves

LEADS = 4  # of the second ensemble, sampled if no law is known


def independence(
    members: Tensor,
    num_bootstrap: int,
    seed: int,
    groups: Tensor,
    law: Tensor | None = None,
    again: Tensor | None = None,
) -> dict[str, float | None]:
    """Variance of the ensemble mean over that of a mean of independent members, mean over leads, with its
    interval. 1: independent. 0: antithetic pairs. 1 / a^2: members inflated by a around their mean. Above 1:
    a biased mean, or dependent members. Fair scores reward dependent members, so they cannot detect them.

    members (n, M, T, C, *space). Deviations are from the mean of exact samples, law (n, K, T, C, *space). If
    no law is known, the variance of the mean is that between members and `again`, a second ensemble with
    other noise and fewer leads.
    """
    x, num = members.double(), members.shape[1]
    if law is not None:
        mean, noise = law.double().mean(1), law.double().var(1).flatten(2).sum(2) / law.shape[1]
        away = x - mean[:, None]
        together = num * (away.mean(1).square().flatten(2).sum(2) - noise)
        alone = away.square().flatten(3).sum(3).mean(1) - noise
    else:
        y, x = again.double(), x[:, :, : again.shape[2]]
        together = num * (x.mean(1) - y.mean(1)).square().flatten(2).sum(2) / 2
        alone = (x.var(1) + y.var(1)).flatten(2).sum(2) / 2
    return as_interval(
        bootstrap(
            torch.cat([together, alone], 1), lambda mean: halves(mean).mean(1), num_bootstrap, seed, groups
        )
    )


def response(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    num_bootstrap: int,
    seed: int,
    groups: Tensor,
) -> dict[str, float | None]:
    """A student's response to its condition over the teacher's, with its interval: 1 for equal maps, 0 if the
    student ignores its condition. Each pair: samples (n, M, ...) under the condition of the case and of
    another case, from the same noise. The response is the regression slope of the student's difference on
    the teacher's."""
    ours, theirs = ((own.double() - other.double()).flatten(1) for own, other in (student, teacher))
    return as_interval(
        bootstrap(
            torch.stack([(ours * theirs).mean(1), theirs.square().mean(1)], 1),
            lambda mean: mean[:, 0] / mean[:, 1],
            num_bootstrap,
            seed,
            groups,
        )
    )


def ranks_of_data(
    u_ref: Tensor, law: Tensor, boundary: str, num_bootstrap: int, seed: int, groups: Tensor
) -> dict[str, list] | None:
    """Relative rank of the data's energy among that of exact samples, by octave of the wave number, with
    intervals: 1/2 if the data u_ref (n, T, C, *space) have the law of the samples (n, K, T, C, *space).

    Energies are of deviations from the mean of all: above 1/2 the data vary more than the law, or its mean is
    wrong. Octaves with rounding errors only are skipped; None if no octave remains.
    """
    every = torch.cat([u_ref[:, None], law], 1).double()
    away = (every - every.mean(1, keepdim=True)).flatten(0, 1)
    energy = octaves(away, boundary).mean((1, 2)).unflatten(0, every.shape[:2])  # (n, 1 + K, bands)
    size = u_ref.double().square().flatten(1).mean(1)[:, None, None]
    kept = (energy > ROUNDING * size).double().mean((0, 1)) > 0.5
    if not kept.any():
        return None
    data, others = energy[:, :1], energy[:, 1:]
    rank = ((others < data).double() + 0.5 * (others == data)).mean(1)[:, kept]
    return as_interval(bootstrap(rank, lambda mean: mean, num_bootstrap, seed, groups))
