"""Scores of single steps of a corrected task, from windows all along the trajectories, and checks of the
networks that sample them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ups.common.progress import note
from ups.evaluation.ensemble import CHEAP, Ensembles, compare_common, needs_many, one_step
from ups.metrics.ensembles import score_ensemble, summarise_ensemble
from ups.metrics.intervals import Resamples, Scores
from ups.metrics.spectra import ROUNDING, octaves
from ups.results import START, Entry, Figures

STARTS = (0, 1, 4, 16)  # first frames of the bins of `by_start`
FEW_WINDOWS = 256  # windows of a sampler with many evaluations
FRACTION = 16  # of the windows: those of the checks that sample again
LEADS = 4  # of the second ensemble, sampled if no law is known
STUDENTS = {"student_1": "one evaluation", "student_2": "two evaluations"}
ONE_STEP = "one step"
KEPT = (  # of the scores of one step
    "crps",
    "ssr",
    "coverage_50",
    "coverage_90",
    "rank_ratio",
    "outlier_fraction",
    "nonfinite_trajectories",
)
KEPT_BY_START = ("ssr", "coverage_90")


def num_step_samples(count: int, num_members: int) -> float:
    """Samples of the corrector in `assess_one_step`."""
    return num_members * (min(FEW_WINDOWS, count) + max(2, count // FRACTION))


def assess_one_step(
    entry: Entry, ensembles: Ensembles, count: int, num_members: int, num_bootstrap: int, num_exact: int
) -> None:
    """Add the case "one step": scores of single calls from windows all along the trajectories, and checks of
    which some need the same noise twice; and the scores by first frame as the cases "start A-B".

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

    def add(model: str, figures: Figures) -> None:
        entry.add(model, figures, ONE_STEP)

    def score_fields(u: Tensor) -> Scores:
        law = None if windows.law is None else windows.law[: len(u)].cpu()
        return score_ensemble(u.cpu(), field_ref[: len(u)], truth.task.boundary, exact=law)

    def score(members: Tensor) -> Scores:
        return score_fields(source.decode(members))

    def summarise(rows: Scores, which: Tensor, kept: Sequence[str]) -> dict[str, Any]:
        part = {key: value[which] for key, value in rows.items()}
        summary = summarise_ensemble(part, resamples[which])
        return {key: summary[key] for key in kept}

    # ---- scores, over all windows and by first frame
    scores = {model: score(windows.samples[model]) for model in ensembles.names}
    if windows.exact is not None:
        scores["exact"] = score_fields(windows.exact)
    for model, rows in scores.items():
        num = len(rows["crps"])
        add(model, summarise(rows, torch.arange(num), KEPT))
        for first, last, which in bins_of(windows.starts[:num]):
            kept = summarise(rows, which, KEPT_BY_START)
            entry.add(model, {"windows": len(which), **kept}, f"{START}{first}-{last}")

    # ---- response to the conditions of other windows
    note(f"{entry.name}: single steps again")
    some = max(2, count // FRACTION)
    trained = [name for name in ensembles.names if name not in CHEAP]
    others = one_step(ensembles, some, num_members, trained, is_shuffled=True).samples
    pairs = {name: (windows.samples[name][:some].cpu(), members.cpu()) for name, members in others.items()}
    for name in trained:
        if name != "corrector":
            found = response(pairs[name], pairs["corrector"], resamples[:some])
            add(name, {"response": found})

    # ---- the exact law
    if windows.law is not None:
        ranks = ranks_of_data(field_ref, windows.law.cpu(), truth.task.boundary, resamples)
        add("", {"ranks_of_data": ranks})
        for name in trained:
            over = compare_common(scores[name], scores["exact"], resamples)["crps"]
            add(name, {"crps_over_exact": over})


def bins_of(starts: Tensor) -> list[tuple[int, int, Tensor]]:
    """(first frame, last frame, positions) of each bin of STARTS that has windows."""
    out, last = [], int(starts.max())
    for first, end in zip(STARTS, (*STARTS[1:], last + 1), strict=True):
        which = ((first <= starts) & (starts < end)).nonzero()[:, 0]
        if len(which):
            out.append((first, min(end - 1, last), which))
    return out


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
