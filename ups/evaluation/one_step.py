"""Scores of single steps of a corrected task, from windows all along the trajectories, and checks of the
networks that sample them."""

import torch
from torch import Tensor

from ups.common.progress import note
from ups.evaluation.ensemble import CHEAP, Ensembles, needs_many, one_step
from ups.metrics.ensembles import score_ensemble, summarise_ensemble
from ups.metrics.intervals import Resamples
from ups.metrics.spectra import ROUNDING, octaves
from ups.results import Entry

FEW_WINDOWS = 256  # windows of a sampler with many evaluations
FRACTION = 16  # of the windows: those of the checks that sample again
LEADS = 4  # of the second ensemble, sampled if no law is known
ONE_STEP = "one step"
KEPT = ("crps", "ssr", "nonfinite_trajectories")  # of the scores of one step


def num_step_samples(count: int, num_members: int) -> float:
    """Samples of the corrector in `assess_one_step`."""
    return num_members * (min(FEW_WINDOWS, count) + max(2, count // FRACTION))


def assess_one_step(
    entry: Entry, ensembles: Ensembles, count: int, num_members: int, num_bootstrap: int, num_exact: int
) -> None:
    """Add the case "one step": scores of single calls from windows all along the trajectories, and checks of
    which some need the same noise twice.

    Fields are scored against the data; CRPS and errors of means against `num_exact` exact samples if the law
    is known.
    """
    source, truth = ensembles.residuals, ensembles.truth
    costly = [name for name in ensembles.names if needs_many(entry, name)]
    others = [name for name in ensembles.names if name not in costly]
    windows = one_step(ensembles, count, num_members, others, num_exact=num_exact)
    if costly:
        note(f"{entry.name}: single steps of {', '.join(costly)}")
        windows.samples.update(one_step(ensembles, min(FEW_WINDOWS, count), num_members, costly).samples)
    groups = truth.cache.trajectory[truth.cache.split[truth.split][windows.rows]]
    resamples = Resamples(num_bootstrap, ensembles.seed, groups)
    field_ref = windows.u_ref.cpu()

    # ---- scores
    for model, members in windows.samples.items():
        law = None if windows.law is None else windows.law[: len(members)].cpu()
        u = source.decode(members).cpu()
        summary = summarise_ensemble(score_ensemble(u, field_ref[: len(u)], exact=law), resamples[: len(u)])
        entry.add(model, {key: summary[key] for key in KEPT}, ONE_STEP)

    # ---- response to the conditions of other windows
    note(f"{entry.name}: single steps again")
    some = max(2, count // FRACTION)
    trained = [name for name in ensembles.names if name not in CHEAP]
    others = one_step(ensembles, some, num_members, trained, is_shuffled=True).samples
    pairs = {name: (windows.samples[name][:some].cpu(), members.cpu()) for name, members in others.items()}
    for name in trained:
        if name != "corrector":
            found = response(pairs[name], pairs["corrector"], resamples[:some])
            entry.add(name, {"response": found}, ONE_STEP)

    # ---- the exact law
    if windows.law is not None:
        ranks = ranks_of_data(field_ref, windows.law.cpu(), truth.task.boundary, resamples)
        entry.add("", {"ranks_of_data": ranks}, ONE_STEP)


# ---- checks beyond scores: do students respond to their condition as the teacher does, and are the data a
# sample of the law that replaces them?


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
