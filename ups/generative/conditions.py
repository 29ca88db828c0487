"""What a corrector is shown beside the frozen operator's prediction, and the way from its draws to the next
state or the solution. Made from an operator (and, for a steady task, the linear guess that travels with the
prior) alone: no cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ups.data.tokenizer import patchify
from ups.generative.guess import LinearGuess
from ups.generative.observation import Observation
from ups.models.known import Known
from ups.models.operator import Operator

SPREAD_FLOOR = 1e-3   # of the coefficient, in normalised units: what is seen exactly


class StateConditions:
    """One call of the operator along a trajectory: r = z_ref - O(z), (batch, *tokens, bundle * dim).

    Conditions: the operator's history, the change that led to it (zero where no frame is before) and the
    predicted change as tokens; standardised log-parameters and log dt as facts. The change before is what a
    member knows of its own past: where a parameter is hidden it says which one the member follows, without it
    every call would draw it anew.
    """

    def __init__(self, operator: Operator, name: str):
        self.operator, self.name, self.head = operator, name, operator.head(name)
        self.device = self.head.scale.device
        dim, history, bundle = self.head.codec.dim, self.head.history, self.head.bundle
        self.description: dict[str, Any] = {"name": name, "dim": bundle * dim,
                                            "num_conditions": (history + 1 + bundle) * dim}

    def predict(self, z: Tensor, known: Known) -> tuple[Tensor, Tensor, Tensor]:
        """z (batch, history or one more, *tokens, dim) to (prediction (batch, *tokens, bundle * dim), tokens,
        facts)."""
        before, z = z[:, :1], z[:, -self.head.history :]
        full, _ = self.operator.predict(z, self.name, known)
        parts = (z, z[:, :1] - before, full - z[:, -1:])
        tokens = torch.cat([part.movedim(1, -2).flatten(-2) for part in parts], -1)
        dt = torch.full((len(z), 1), self.head.log_dt, device=z.device)
        return full.movedim(1, -2).flatten(-2), tokens, torch.cat([known.standard, dt], 1)

    def frames(self, r: Tensor) -> Tensor:
        """(..., *tokens, bundle * dim) to frames of latents (..., bundle, *tokens, dim)."""
        return r.unflatten(-1, (self.head.bundle, -1)).movedim(-2, -2 - self.head.task.ndim)

    def decode(self, r: Tensor) -> Tensor:
        """(..., *tokens, bundle * dim) to normalised fields (..., bundle, C, *space); linear."""
        return self.head.codec.decode(self.frames(r))


class FieldConditions:
    """A steady solution given part of its coefficient: r = log u - log O(v_guess), (batch, *tokens, dim).

        c = (mask * v, v_guess, its spread, mask, log O(v_guess)),  facts = (how much, how noisy, how coarse)

    v is the normalised coefficient, v_guess its linear guess from what was seen (v itself where all is seen).
    """

    def __init__(self, operator: Operator, name: str, linear: LinearGuess):
        self.operator, self.name, self.head, self.linear = operator, name, operator.head(name), linear
        self.device = self.head.scale.device
        codec, dim = self.head.input_codec, self.head.codec.dim
        num_conditions = 3 * codec.width + codec.patch**self.head.task.ndim + dim
        self.description: dict[str, Any] = {"name": name, "dim": dim, "num_conditions": num_conditions,
                                            "guess": linear.description}

    def predict(self, observation: Observation, parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(log O(v_guess) (batch, *tokens, dim), tokens, facts) of an observation in normalised units."""
        codec, ndim = self.head.input_codec, self.head.task.ndim
        v_guess, spread = self.linear(observation)
        z = self.operator(codec.encode(v_guess)[:, None], self.name, parameters)[:, 0]
        guess = self.logarithm(self.head.physical(z))
        fields = (observation.values, v_guess, (spread + SPREAD_FLOOR).log(), observation.mask)
        tokens = torch.cat([*[patchify(part, ndim, codec.patch) for part in fields], guess], -1)
        return guess, tokens, observation.facts

    def logarithm(self, u: Tensor) -> Tensor:
        """log u as tokens: (batch, C, *space), physical units, to (batch, *tokens, dim); linear in log u."""
        return self.head.codec.encode(u.clamp_min(self.linear.least).log())

    def solution(self, guess: Tensor, r: Tensor) -> Tensor:
        """Physical u = O exp(r): guess (batch, *tokens, dim) of `predict` and r (..., *tokens, dim) in
        tokens."""
        return self.decode(guess + r).exp()

    def decode(self, r: Tensor) -> Tensor:
        """(..., *tokens, dim) to fields of log u, (..., C, *space); linear."""
        return self.head.codec.decode(r)
