"""Which trained way to draw serves a task: ensembles of each, rolled out on validation trajectories, by the
fair CRPS of their members.

A stage judges what it has trained when it ends, and the figures travel in its config.json. Trajectories,
leads and noise are the same in every stage, so figures of different stages compare. What error a network is
told that its own draws have is chosen before, in the same way.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups.common.files import DamagedError
from ups.generative.calibration import fit_gains, measure_residuals
from ups.generative.draws import WAYS, Sampler, sample_states
from ups.generative.residuals import TransientResiduals, summed
from ups.metrics.proper import fair_crps
from ups.models.base_selection import stratified_rows
from ups.training.finished import stage_of_run

FOUND = "validation_crps"  # in config.json: task -> way -> CRPS, None where a member is not finite
ROWS, LEADS, MEMBERS = 32, 10, 4
FEW, SIZES = 8, (0.0, 0.03, 0.1, 0.3)  # trajectories on which an error is chosen, over a residual's size
USUAL, EVALUATIONS = "student_1", 2  # where nothing was judged; per call of what serves
TIED = 1.05  # so much chance is in these figures: with two evaluations for one they differed by -5 % to 5 %


@torch.no_grad()
def judge(
    samplers: Mapping[str, Sampler],
    residuals: Mapping[str, TransientResiduals],
    contexts: Mapping[str, int],
    seed: int,
    ranks: Any,
) -> dict[str, dict]:
    """{FOUND: task -> way -> fair CRPS} of the ways of one network: mean over trajectories, the first leads,
    channels and cells of normalised fields; None where a member is not finite. Sets the heads' limits and
    their `drawn_error`, by the best way. contexts: frames that are given, by task. A collective."""
    [network] = {sampler.network for sampler in samplers.values()}
    tried, powers = {}, {}
    for name, source in residuals.items():
        powers[name] = measure_residuals(network.heads[name].limits, source, seed, ranks)
        fit_gains(samplers, source, powers[name], seed, ranks)
    for size in SIZES:
        for name in residuals:
            network.heads[name].drawn_error = size
        tried[size] = _scores(samplers, residuals, contexts, seed, ranks, FEW)
    for name, source in residuals.items():
        network.heads[name].drawn_error = min(
            SIZES,
            key=lambda size: min(
                score if score is not None else math.inf for score in tried[size][name].values()
            ),
        )
        fit_gains(samplers, source, powers[name], seed, ranks, is_drawn=True)
    return {FOUND: _scores(samplers, residuals, contexts, seed, ranks, ROWS)}


def _scores(
    samplers: Mapping[str, Sampler],
    residuals: Mapping[str, TransientResiduals],
    contexts: Mapping[str, int],
    seed: int,
    ranks: Any,
    num_rows: int,
) -> dict[str, dict]:
    """Task -> way -> fair CRPS on some validation trajectories."""

    def own_parts(name: str, source: TransientResiduals) -> list[Tensor]:
        rows, num = (
            stratified_rows(source.cache, "val", num_rows)[ranks.rank :: ranks.world],
            frames_of(name),
        )
        return [*source.cache.row_blocks(rows, num * MEMBERS, ROWS)] if len(rows) else []

    def frames_of(name: str) -> int:
        return min(LEADS, residuals[name].cache.num_frames - contexts[name])

    def sums_of(name: str, rows: Tensor) -> Tensor:
        source, cache, num = residuals[name], residuals[name].cache, frames_of(name)
        decode, given = source.head.codec.decode, cache.batch(rows, 0, contexts[name], source.device)
        w_ref = decode(cache.batch(rows, contexts[name], num, source.device))
        forcing = source.head.forcing_of(cache, rows, contexts[name] - 1, num + 1)
        scores = [
            fair_crps(
                decode(
                    sample_states(
                        source.operator,
                        sampler,
                        name,
                        given,
                        cache.parameters[rows],
                        num,
                        MEMBERS,
                        seed,
                        rows.tolist(),
                        forcing,
                    )
                ),
                w_ref,
            ).sum()
            for sampler in samplers.values()
        ]
        return torch.stack([*scores, scores[0].new_tensor(len(rows))])

    parts = {name: own_parts(name, source) for name, source in residuals.items()}
    sums = summed(parts, sums_of, len(samplers) + 1, ranks)
    return {
        name: {
            way: total / count if math.isfinite(total) else None
            for way, total in zip(samplers, totals, strict=True)
        }
        for name, (*totals, count) in zip(residuals, sums, strict=True)
    }


def finished_ways(run_dir: str | Path, task: str) -> dict[str, tuple[int, float]]:
    """Way -> (evaluations per call, CRPS on validation, infinite where it was not judged) of the ways to draw
    a task's errors, of the finished stages in the folder of a run; without what blew up."""
    found = {}
    for way, (stage, evaluations) in WAYS.items():
        if way != "prior" and (finished := stage_of_run(Path(run_dir), stage)) is not None:
            description = finished.description
            try:
                crps = description.get(FOUND, {}).get(task, {}).get(way, math.inf)
                if crps is not None:
                    found[way] = evaluations or 2 * int(description["sampler_steps"]), float(crps)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise DamagedError(
                    f"{Path(run_dir) / stage}/config.json has no figures of {way} "
                    f"({error!r:.100}); expected those of this version. Run make {stage} "
                    "again."
                ) from error
    return found


def judged(run_dir: str | Path, task: str) -> dict[str, tuple[int, float]]:
    """`finished_ways` that were judged, the best first."""
    found = {way: entry for way, entry in finished_ways(run_dir, task).items() if entry[1] < math.inf}
    return dict(sorted(found.items(), key=lambda entry: entry[1][1]))


def spending(run_dir: str | Path, task: str, evaluations: int) -> tuple[str, int]:
    """(way, midpoint steps of the corrector or 0) that takes the most evaluations of a network per call
    within this budget: a student's or the rival's one or two, whichever is better on validation, or the
    corrector's sampler, in as many steps as it was trained for at most. USUAL where nothing fits."""
    found, steps = {}, 0
    for way, (taken, crps) in finished_ways(run_dir, task).items():
        if way == "corrector":  # each step takes two; in fewer steps it was not judged
            steps = min(taken, evaluations) // 2
            taken, crps = 2 * steps, crps if 2 * steps == taken else math.inf
        if 0 < taken <= evaluations:
            found[way] = -taken, crps
    way = min(found, key=found.__getitem__, default=USUAL)
    return way, steps if way == "corrector" else 0


def serving(run_dir: str | Path, task: str) -> str:
    """The way that draws a task's errors where none is asked for: of those that take at most EVALUATIONS
    evaluations of a network per call the cheapest within TIED of the best on validation, or the cheapest of
    all where those blew up there; USUAL where none was judged."""
    found = judged(run_dir, task)
    fitting = {way: entry for way, entry in found.items() if entry[0] <= EVALUATIONS}
    most = TIED * min((crps for _, crps in fitting.values()), default=math.inf)
    return min(
        (way for way, (_, crps) in fitting.items() if crps <= most),
        key=fitting.__getitem__,
        default=min(found, key=lambda way: found[way][0], default=USUAL),
    )


def in_words(run_dir: str | Path, task: str) -> str:
    """Which way `Forecaster.sample` draws by, and how it compares."""
    found, name = judged(run_dir, task), serving(run_dir, task)
    listed = ", ".join(f"{way} {crps:.3g} with {taken}" for way, (taken, crps) in found.items())
    is_cheap = name not in found or found[name][0] <= EVALUATIONS
    most = f"of what takes at most {EVALUATIONS} evaluations per call"
    why = (
        f"{most} the cheapest within {TIED - 1:.0%} of the best on validation"
        if is_cheap
        else f"the cheapest that stays finite on validation, as nothing {most} does"
    )
    return (
        f"sample() draws by {name}, {why}; fair CRPS there, over the field's standard deviation: "
        f"{listed or 'not judged'}."
    )
