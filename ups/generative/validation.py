"""Scores of samplers on validation trajectories, and the selection of a task's default sampler by them.

The score is the fair CRPS of ensemble rollouts. A stage scores its samplers when it ends and stores the
scores in its config.json. Trajectories, leads and noise are the same in every stage, so scores of different
stages compare. The error that a network is told a sampled state has (`CorrectorHead.sample_error`) is
selected before, in the same way.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ups.common.files import DamagedError
from ups.common.place import make_target
from ups.generative.fit_limits import LimitFit
from ups.generative.residuals import TransientResiduals, sum_by_task
from ups.generative.sampling import SAMPLERS, Sampler, Starts, sample_states
from ups.metrics.proper import fair_crps
from ups.select import Decision, select_lowest, select_sampler
from ups.training.artifact import stage_of_run

if TYPE_CHECKING:
    from ups.training.ranks import Ranks

CRPS_KEY = "validation_crps"  # in config.json: task -> sampler -> CRPS, None if a member is not finite
ROWS, LEADS, MEMBERS = 32, 10, 4
ERROR_ROWS = 8  # trajectories on which the sample error is selected
ERRORS = (0.0, 0.03, 0.1, 0.3)  # candidates, over a residual's size
DEFAULT = "student_1"  # if no sampler was scored


@dataclass(frozen=True)
class Validation:
    """Rollouts of ensembles from validation trajectories. contexts: task -> number of context frames."""

    residuals: Mapping[str, TransientResiduals]
    contexts: Mapping[str, int]
    seed: int
    ranks: "Ranks"

    def horizon(self, name: str) -> int:
        """Frames of the ensembles of a task."""
        return min(LEADS, self.residuals[name].cache.num_frames - self.contexts[name])

    def crps(self, samplers: Mapping[str, Sampler], num_rows: int) -> dict[str, dict]:
        """Task -> sampler -> fair CRPS on num_rows trajectories: mean over these, the first leads, channels
        and cells of normalised fields; None if a member is not finite. A collective."""

        def shard_of(name: str, source: TransientResiduals) -> list[Tensor]:
            rows = source.cache.rows_by_parameter("val", num_rows)[self.ranks.rank :: self.ranks.world]
            return [*source.cache.row_blocks(rows, self.horizon(name) * MEMBERS, ROWS)] if len(rows) else []

        def sums_of(name: str, rows: Tensor) -> Tensor:
            source, context, num = self.residuals[name], self.contexts[name], self.horizon(name)
            cache, decode = source.cache, source.head.codec.decode
            z = cache.batch(rows, 0, context, source.device)
            w_ref = decode(cache.batch(rows, context, num, source.device))
            forcing = source.head.forcing_of(cache, rows, context - 1, num + 1)
            starts = Starts(z, cache.parameters[rows], rows.tolist(), forcing)
            sums = []
            for sampler in samplers.values():
                members = sample_states(source.operator, sampler, name, starts, num, MEMBERS, self.seed)
                sums.append(fair_crps(decode(members), w_ref).sum())
            return torch.stack([*sums, sums[0].new_tensor(len(rows))])

        shard = {name: shard_of(name, source) for name, source in self.residuals.items()}
        sums = sum_by_task(shard, sums_of, len(samplers) + 1, self.ranks).tolist()
        return {
            name: {
                sampler: total / count if math.isfinite(total) else None
                for sampler, total in zip(samplers, totals, strict=True)
            }
            for name, (*totals, count) in zip(shard, sums, strict=True)
        }

    def select_errors(self, trained: Mapping[str, Sampler]) -> dict[str, Decision]:
        """Task -> the decision on the error of sampled states, by rollouts of the best of the samplers
        `trained` with each of ERRORS. A collective."""
        crps_by_error, decisions = {}, {}
        [network] = {sampler.network for sampler in trained.values()}
        for error in ERRORS:
            for name in self.residuals:
                network.heads[name].decide(sample_error=error)
            crps_by_error[error] = self.crps(trained, ERROR_ROWS)
        for name, source in self.residuals.items():
            best = {
                f"{error:g}": min(math.inf if value is None else value for value in crps[name].values())
                for error, crps in crps_by_error.items()
            }
            question = f"error of states of {name} sampled by {', '.join(trained)}"
            what = "CRPS of the best sampler; sizes over that of a residual"
            rows = len(source.cache.rows_by_parameter("val", ERROR_ROWS))
            decisions[name] = select_lowest(question, best, what, rows, self.seed)
        return decisions


@torch.no_grad()
def validate_samplers(
    samplers: Mapping[str, Sampler],
    residuals: Mapping[str, TransientResiduals],
    contexts: Mapping[str, int],
    seed: int,
    ranks: "Ranks",
) -> tuple[dict[str, dict], list[Decision]]:
    """{CRPS_KEY: `Validation.crps`} of the samplers of one network, with the decisions on the error of
    sampled states, which is 0 and none if no network saw states with errors in training.

    Sets the limits of the heads, their horizon, and their `sample_error` by the best sampler with a network.
    contexts: task -> number of context frames. A collective.
    """
    validation = Validation(residuals, contexts, seed, ranks)
    fits = {name: LimitFit(samplers, source, seed, ranks) for name, source in residuals.items()}
    for one in fits.values():
        one.fit_observed()
    is_trained = any(source.perturbed for source in residuals.values())  # on states with errors
    trained = {name: sampler for name, sampler in samplers.items() if sampler.evaluations != 0}
    decisions = validation.select_errors(trained) if is_trained else {}
    for name, one in fits.items():
        error = float(decisions[name].chosen) if decisions else 0.0
        one.head.decide(sample_error=error, horizon=validation.horizon(name))
        one.fit_sampled()
    return {CRPS_KEY: validation.crps(samplers, ROWS)}, [*decisions.values()]


# ---- selection


def finished_samplers(run_dir: str | Path, task: str) -> dict[str, tuple[int, float]]:
    """Sampler -> (evaluations per call, validation CRPS, infinite if not scored) of the finished stages of a
    run that sample a task's residuals, without samplers that became non-finite."""
    found = {}
    for sampler, (stage, evaluations) in SAMPLERS.items():
        if sampler != "prior" and (finished := stage_of_run(Path(run_dir), stage)) is not None:
            description = finished.description
            try:
                crps = description.get(CRPS_KEY, {}).get(task, {}).get(sampler, math.inf)
                if crps is not None:
                    if evaluations is None:
                        evaluations = 2 * int(description["sampler_steps"])
                    found[sampler] = evaluations, float(crps)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise DamagedError(
                    f"{Path(run_dir) / stage}/config.json has no readable scores of {sampler} "
                    f"({error!r:.100}); expected those that this version writes. Run "
                    f"{make_target(stage)} again."
                ) from error
    return found


def validated_samplers(run_dir: str | Path, task: str) -> dict[str, tuple[int, float]]:
    """`finished_samplers` that have a score, the best first."""
    found = {
        sampler: entry for sampler, entry in finished_samplers(run_dir, task).items() if entry[1] < math.inf
    }
    return dict(sorted(found.items(), key=lambda entry: entry[1][1]))


def best_within(run_dir: str | Path, task: str, evaluations: int) -> tuple[str, int]:
    """(sampler, midpoint steps of the corrector or 0) that uses most of a budget of network evaluations per
    call.

    Candidates are students and `scoring` with one or two evaluations, the better on validation first, and the
    corrector with at most its trained number of steps. DEFAULT if nothing fits.
    """
    found, steps = {}, 0
    for sampler, (needed, crps) in finished_samplers(run_dir, task).items():
        if sampler == "corrector":  # two evaluations per step; it has no score with fewer steps
            steps = min(needed, evaluations) // 2
            needed, crps = 2 * steps, crps if 2 * steps == needed else math.inf
        if 0 < needed <= evaluations:
            found[sampler] = needed, crps
    if not found:
        return DEFAULT, 0
    sampler = select_sampler(task, found, max(needed for needed, _ in found.values())).chosen
    return sampler, steps if sampler == "corrector" else 0


def default_sampler(run_dir: str | Path, task: str) -> str:
    """The sampler that is used if the user names none, by `select_sampler`; DEFAULT if none has a score."""
    found = validated_samplers(run_dir, task)
    return select_sampler(task, found).chosen if found else DEFAULT


def describe(run_dir: str | Path, task: str) -> str:
    """One sentence: the sampler that `Forecaster.sample` uses, and the scores of all."""
    found = validated_samplers(run_dir, task)
    scores = ", ".join(f"{sampler} {crps:.3g} with {needed}" for sampler, (needed, crps) in found.items())
    reason = f": {select_sampler(task, found).rule}" if found else ""
    return (
        f"sample() uses {default_sampler(run_dir, task)}{reason}. Validation CRPS (fair, over the field's "
        f"standard deviation) and evaluations: {scores or 'no scores'}."
    )
