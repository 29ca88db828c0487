"""What a corrector or a prior is conditioned on, made from an operator (and, for a steady task, the linear
posterior that travels with the prior) alone: no cache. The residuals are in ups/generative/residuals.py."""

from typing import Any

import torch
from torch import Tensor

from ups.data.tokenizer import patchify
from ups.generative.corrector import Start
from ups.generative.observation import LinearPosterior, Observation, whole
from ups.models.bases.base import ParameterBatch
from ups.models.operator import Operator

SPREAD_FLOOR = 1e-3  # of the coefficient, in normalised units: what is seen exactly
STATES = 512  # draws of a coefficient in one call of the operator
SMALLEST = 0.01  # error of a state over a residual's size; a sampler of a small run leaves some 5 %


def error_fact(size: Tensor) -> Tensor:
    """The size of a state's own error over that of a residual, as a network is told it; 0: exact."""
    return (size / SMALLEST).log1p()


class StateConditions:
    """One call of the operator along a trajectory: r = z_ref - O(z), (batch, *tokens, bundle * dim).

    Conditions: the operator's history, the change that led to it, the predicted change, what the operator
    left of the last frame (zero, as the change, where no frame is before) and its trunk's features as tokens;
    standardised log-parameters, log dt and the size of the history's own error as facts. Change and last
    residual are what a member knows of its past: causes that are not seen persist, and would be drawn anew at
    every call. The size tells a state that is given from a drawn one: untold, a network spreads both alike.
    """

    def __init__(self, operator: Operator, name: str):
        self.operator, self.name, self.head = operator, name, operator.head(name)
        self.device = self.head.scale.device
        dim, history, bundle = self.head.codec.dim, self.head.history, self.head.bundle
        self.description: dict[str, Any] = {
            **self.head.task.description,
            "dim": bundle * dim,
            "tokens": list(self.head.codec.tokens),
            "num_conditions": (history + 2 + bundle) * dim + operator.width,
            "num_features": operator.width,
            "fields": [bundle * self.head.codec.num_channels, *self.head.codec.space],
        }

    def predict(
        self, z: Tensor, parameters: ParameterBatch, error: Tensor | float = 0.0, led: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """z (batch, history or one more, *tokens, dim) to (prediction (batch, *tokens, bundle * dim), tokens,
        facts). Nothing is before a first frame that is there twice, or a history alone. parameters: their
        forcing begins a frame before the last of z. error: of z, (batch,), its size over that of a residual;
        0: exact. led (batch, frames, *tokens, dim): the prediction whose first frame became the
        last of z; None: made here."""
        z = torch.cat([z[:, :1], z], 1)[:, -1 - self.head.history :]
        earlier, z, change = z[:, :-1], z[:, 1:], z[:, 1:2] - z[:, :1]
        led = self.operator.predict(earlier, self.name, parameters)[0] if led is None else led
        is_first = (change == 0).flatten(1).all(1).view(-1, *[1] * (z.ndim - 1))
        full, features = self.operator.predict_with_features(z, self.name, parameters.later(1))
        parts = (z, change, full - z[:, -1:], torch.where(is_first, 0.0, z[:, -1:] - led[:, :1]))
        tokens = torch.cat([*(part.movedim(1, -2).flatten(-2) for part in parts), features], -1)
        dt = torch.full((len(z), 1), self.head.log_dt, device=z.device)
        size = torch.as_tensor(error, device=z.device).float().expand(len(z))[:, None]
        return (
            full.movedim(1, -2).flatten(-2),
            tokens,
            torch.cat([parameters.standard, dt, error_fact(size)], 1),
        )

    def frames(self, r: Tensor) -> Tensor:
        """(..., *tokens, bundle * dim) to frames of latents (..., bundle, *tokens, dim)."""
        return r.unflatten(-1, (self.head.bundle, -1)).movedim(-2, -2 - self.head.task.ndim)

    def decode(self, r: Tensor) -> Tensor:
        """(..., *tokens, bundle * dim) to normalised fields (..., bundle, C, *space); linear."""
        return self.head.codec.decode(self.frames(r))

    def encode(self, w: Tensor) -> Tensor:
        """The inverse of `decode`, of fields inside the kept subspace."""
        return self.head.codec.encode(w).movedim(-2 - self.head.task.ndim, -2).flatten(-2)

    def prediction(self, tokens: Tensor) -> Tensor:
        """The prediction (batch, *tokens, bundle * dim) from the tokens that `predict` gave with it."""
        dim, history, bundle = self.head.codec.dim, self.head.history, self.head.bundle
        last, change = tokens[..., (history - 1) * dim : history * dim], tokens[..., (history + 1) * dim :]
        return last.repeat(*[1] * (last.ndim - 1), bundle) + change[..., : bundle * dim]


class FieldConditions:
    """A steady solution given part of its coefficient: r = log u - log O(v_guess), (batch, *tokens, dim).

        c = (mask * v, v_guess, its spread, mask, log O(v_guess)),  facts = (how much, how noisy, how coarse)

    v is the normalised coefficient, v_guess its linear guess from what was seen (v itself where all is seen).
    noise_shape: of the normal numbers that a draw of it takes.
    """

    def __init__(self, operator: Operator, name: str, linear: LinearPosterior):
        self.operator, self.name, self.head, self.linear = operator, name, operator.head(name), linear
        self.device, self.noise_shape = self.head.scale.device, (2, *linear.shape)
        codec, dim = self.head.input_codec, self.head.codec.dim
        num_conditions = 3 * codec.width + codec.patch**self.head.task.ndim + dim
        self.description: dict[str, Any] = {
            **self.head.task.description,
            "dim": dim,
            "num_conditions": num_conditions,
            "guess": {"shape": list(linear.shape), "num_modes": len(linear.variance)},
        }

    def predict(
        self, observation: Observation, parameters: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Start]:
        """(log O(v_guess) (batch, *tokens, dim), tokens, facts, what draws begin at) of an observation in
        normalised units. noise: (batch, M, *noise_shape) standard normal, for the M draws v_s of each row;
        None: of none."""
        posterior = self.linear(observation, noise)
        guess, tokens = self._pushed(observation, posterior.mean, posterior.spread, parameters)
        num, v = posterior.draws.shape[1], posterior.draws.flatten(0, 1)
        if not len(v):
            return guess, tokens, observation.facts, Start(guess[:0], tokens[:0], observation.facts[:0])
        each = zip(v.split(STATES), parameters.repeat_interleave(num, 0).split(STATES), strict=True)
        pushed, shown = (
            torch.cat(part)
            for part in zip(
                *(self._pushed(whole(some), some, torch.zeros_like(some), row) for some, row in each),
                strict=True,
            )
        )
        return (
            guess,
            tokens,
            observation.facts,
            Start(pushed - guess.repeat_interleave(num, 0), shown, whole(v).facts),
        )

    def _pushed(
        self, observation: Observation, v: Tensor, spread: Tensor, parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(log O(v), tokens) of a coefficient v (batch, C, *space) with its spread."""
        codec, ndim = self.head.input_codec, self.head.task.ndim
        z = self.operator(codec.encode(v)[:, None], self.name, parameters)[:, 0]
        guess = self.logarithm(self.head.physical(z))
        fields = (observation.values, v, (spread + SPREAD_FLOOR).log(), observation.mask)
        return guess, torch.cat([*[patchify(part, ndim, codec.patch) for part in fields], guess], -1)

    def logarithm(self, u: Tensor) -> Tensor:
        """log u as tokens: (batch, C, *space), physical units, to (batch, *tokens, dim); linear in log u."""
        return self.head.codec.encode(self.head.codec.held(u.clamp_min(self.linear.least).log()))

    def solution(self, guess: Tensor, r: Tensor) -> Tensor:
        """Physical u = O exp(r): guess (batch, *tokens, dim) of `predict` and r (..., *tokens, dim) in
        tokens."""
        return self.head.codec.missing(self.decode(guess + r).exp())

    def decode(self, r: Tensor) -> Tensor:
        """(..., *tokens, dim) to fields of log u, (..., C, *space); linear."""
        return self.head.codec.decode(r)
