"""Scores of rollouts over the number of network evaluations per state.

    corrector   one Euler step, then 1, 2, 4, ... midpoint steps of two evaluations, up to those of training
    student     one and two evaluations, the numbers that it is trained for
    scoring     one evaluation

The starts are the first of those of the whole comparison, with the same noise, so only the corrector with
fewer steps is sampled again.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ups.evaluation.ensemble import Ensembles
from ups.generative.corrector import Condition, Corrector
from ups.generative.diffusion import PURE_NOISE
from ups.generative.sampling import Sampler
from ups.metrics.ensembles import ENSEMBLE
from ups.metrics.intervals import Resamples, Scores, compare
from ups.results import Entry

STARTS = 8
METRICS = ("crps", "trajectory_score", "spectrum")
CURVES = {"student_1": "student", "student_2": "student"}  # sampler -> its curve, if of another name


@dataclass(frozen=True)
class EulerSampler(Sampler):
    """A diffusion in one Euler step, one evaluation."""

    def whitened(self, condition: Condition, noise: Tensor, second: Tensor | None = None) -> Tensor:
        x = condition.initial_state(noise)
        angle = torch.full((len(x),), PURE_NOISE, device=x.device)
        return x - PURE_NOISE * self.network.velocity(condition)(x, angle)


def coarser_samplers(network: Corrector) -> dict[int, Sampler]:
    """Number of evaluations -> the corrector with fewer of them than in training."""
    steps = network.sampler_steps
    fewer = [2**power for power in range(steps.bit_length()) if 2**power < steps]
    return {1: EulerSampler(network)} | {2 * number: Sampler(network, num_steps=number) for number in fewer}


def with_corrector(ensembles: Ensembles, sampler: Sampler) -> Ensembles:
    """The same ensembles with another sampler of the corrector."""
    again = copy.copy(ensembles)
    again.samplers = ensembles.samplers | {"corrector": sampler}
    return again


def add_curves(
    entry: Entry,
    coarse: dict[int, Scores],
    scores: dict[str, Scores],
    resamples: Resamples,
) -> None:
    """Add the case "evaluations": for every curve the list of "evaluations" and lists of METRICS.

    CRPS and energy score are paired ratios to exact samples, or to the corrector as in training if the law is
    not known. coarse: number of evaluations -> scores of the corrector, from the first starts. scores: model
    -> scores from all starts, of which the same ones are taken; evaluations of these models are those of the
    entry, 0 without a network.
    """
    count = len(coarse[1]["crps"])
    first = {model: {key: value[:count] for key, value in found.items()} for model, found in scores.items()}
    baseline = first["exact" if "exact" in first else "corrector"]
    points = [("corrector", number, found) for number, found in coarse.items()]
    for model, found in first.items():
        evaluations = entry.number(model, "evaluations_per_state") or 0.0
        points.append((CURVES.get(model, model), round(evaluations), found))
    curves: dict[str, dict[str, Any]] = {}
    for name, number, found in points:
        curve = curves.setdefault(name, {"evaluations": []} | {metric: {} for metric in METRICS})
        curve["evaluations"].append(number)
        for metric in (ENSEMBLE[key] for key in METRICS):
            if metric.is_compared:
                interval = compare(metric, found, baseline, resamples[:count])
            else:
                interval = resamples[:count].interval(*metric.moments(found, None))
            for end, value in interval.items():
                curve[metric.name].setdefault(end, []).append(value)
    entry.add("", {"starts": count}, "evaluations")
    for name, curve in curves.items():
        entry.add(name, curve, "evaluations")
