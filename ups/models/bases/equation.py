"""The equation base: an equation that `ups_discovery` identifies, integrated from frame to frame."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import ups_discovery.equation
from ups.common.progress import beat, note
from ups.models.bases.base import Base, Fit, ParameterBatch, Samples
from ups_discovery.terms import WAVE


class Equation(ups_discovery.equation.Equation, Base):
    """An equation of ups_discovery between normalised fields: s = std * w + mean (C,) is its state."""

    kind, needs_fitted_parameters, has_tangent, is_costly = "equation", True, True, True
    num_images = 1  # a second one shows nothing in float64 (log.md)

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.register_buffer("mean", torch.zeros_like(self.low))
        self.register_buffer("std", torch.ones_like(self.low))

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        u = u[:, -1].double() if self.is_exact else u[:, -1].float()
        if not self.terms.terms:
            return u.float()
        mean, std = self._column(self.mean, u), self._column(self.std, u)
        weight = self.weight if len(self.weight) == 1 else self.weight[parameters.index]
        return ((self.advance(u * std + mean, weight.to(u)) - mean) / std).float()

    def findings(self, fields: Sequence[str], axes: Sequence[str]) -> list[str]:
        from ups_discovery.statement import stated

        return stated(self.found, self.terms.terms, fields, self.terms.positive, axes)

    @property
    def degree(self) -> int:
        """The degree of the right-hand side; negative powers count by their size."""
        return max(
            (
                sum(map(abs, powers)) + sum(channel != WAVE for channel, _ in factors)
                for powers, factors in self.terms.terms
            ),
            default=1,
        )

    @property
    def num_fitted(self) -> int:
        return int((self.weight != 0).sum())

    def twin(self, samples: Samples, settings: dict[str, Any]) -> "tuple[dict[str, Any], Equation]":
        """The equation with derivatives by waves and half the time step, in float64, and coefficients for
        these (`Certainty.others`): those of the fit make up for its errors, but in the samples alone."""
        settings = {**settings, "num_steps": 2 * self.num_steps, "is_exact": True, "found": {}}
        other = Equation(**settings)
        other.load_state_dict(self.state_dict())
        for weight, found in zip(other.weight, self.found["equations"], strict=True):
            for (channel, place, *_), ratio in zip(found["rows"], found["others"], strict=True):
                weight[channel, place] *= ratio
        return settings, other.to(self.weight.device)

    def unbounded(self) -> "Equation":
        free = copy.deepcopy(self)
        free.low.fill_(-torch.inf)
        free.high.fill_(torch.inf)
        return free

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> Fit["Equation"]:
        """Yield the candidates of `ups_discovery.search.candidates`."""
        from ups_discovery import progress, search

        def report(doing: str, work: float, is_promising: bool) -> None:
            beat()
            if is_promising:
                samples.most_work = math.inf
            samples.spend(work)
            if doing:
                note(f"{samples.name}: {doing}")

        def made(**settings: Any) -> Equation:
            base = cls(**settings)
            base.mean.copy_(samples.units.shift)
            base.std.copy_(samples.units.scale)
            return base

        progress.listener = report
        try:
            return (yield from search.candidates(samples, settings, made))
        finally:
            progress.listener = None
