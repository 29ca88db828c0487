"""Checks of single steps of a corrected task, from windows all along the trajectories: do students respond to
their condition as the teacher does, and are the data a sample of the law that replaces them?"""

import torch
from torch import Tensor

from ups.common.progress import note
from ups.evaluation.ensemble import CHEAP, Ensembles, one_step
from ups.metrics.intervals import Resamples
from ups.metrics.spectra import ROUNDING, octaves
from ups.results import Entry

FRACTION = 16  # of the windows: those in which networks are sampled, with their condition and another one
LEADS = 4  # of the second ensemble, sampled if no law is known
ONE_STEP = "one step"


def num_step_samples(count: int, num_members: int) -> float:
    """Samples of the corrector in `assess_one_step`."""
    return num_members * 2 * max(2, count // FRACTION)


def assess_one_step(
    entry: Entry, ensembles: Ensembles, count: int, num_members: int, num_bootstrap: int, num_exact: int
) -> None:
    """Add the case "one step". num_exact: exact samples of each window, if the law is known."""
    trained, few = [name for name in ensembles.names if name not in CHEAP], max(2, count // FRACTION)
    windows = one_step(ensembles, count, num_members, [], num_exact=num_exact)
    cache, split = ensembles.truth.cache, ensembles.truth.split
    groups = cache.trajectory[cache.split[split][windows.rows]]
    resamples = Resamples(num_bootstrap, ensembles.seed, groups)

    # ---- response to the conditions of other windows, from the same noise
    note(f"{entry.name}: single steps of {', '.join(trained)}")
    own, other = (one_step(ensembles, few, num_members, trained, kind).samples for kind in (False, True))
    pairs = {name: (own[name].cpu(), other[name].cpu()) for name in trained}
    for name in trained:
        broken = (~own[name].isfinite()).flatten(1).any(1)
        found = {"nonfinite_trajectories": int(broken.sum())}
        if name != "corrector":
            found["response"] = response(pairs[name], pairs["corrector"], resamples[:few])
        entry.add(name, found, ONE_STEP)

    # ---- the exact law
    if windows.law is not None:
        boundary = ensembles.truth.task.boundary
        ranks = ranks_of_data(windows.u_ref.cpu(), windows.law.cpu(), boundary, resamples)
        entry.add("", {"ranks_of_data": ranks}, ONE_STEP)


def response(
    student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], resamples: Resamples
) -> dict[str, float | None]:
    """A student's response to its condition over the teacher's, with its interval: 1 for equal maps, 0 if the
    student ignores its condition. Each pair: samples (n, M, ...) under the condition of the case and of
    another case, from the same noise. The response is the regression slope of the student's difference on
    the teacher's."""
    ours, theirs = ((own.double() - other.double()).flatten(1) for own, other in (student, teacher))
    both = torch.stack([(ours * theirs).mean(1), theirs.square().mean(1)], 1)
    return resamples.interval(both, lambda mean: mean[:, 0] / mean[:, 1])


def ranks_of_data(u_ref: Tensor, law: Tensor, boundary: str, resamples: Resamples) -> dict[str, list] | None:
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
    return resamples.interval(rank, lambda mean: mean)
