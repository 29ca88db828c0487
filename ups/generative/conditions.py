"""Conditions of a corrector or prior, computed from an operator and, for a steady task, from the linear
posterior that is stored with the prior. No cache is needed; ups/generative/residuals.py adds the
residuals."""

from typing import Any

import torch
from torch import Tensor

from ups.data.tokenizer import patchify
from ups.generative.cell_posterior import CellPosterior
from ups.generative.corrector import Start
from ups.generative.linear_posterior import LinearPosterior
from ups.generative.observation import Observation, observe_all
from ups.models.bases.base import ParameterBatch
from ups.models.operator import Operator

STD_FLOOR = 1e-3  # of the coefficient's standard deviation, in normalised units: observed exactly
STATES = 512  # in one call of a network
CPU_STATES = 64  # the same on a CPU: with 512 darcy2d_grf takes 1.9 times as long, as layers leave the caches
SMALLEST = 0.01  # error of a state over a residual's size; a sampler of a small run has an error of some 5 %


def num_states(device: torch.device) -> int:
    """States in one call of a network."""
    return CPU_STATES if device.type == "cpu" else STATES


def encode_error(size: Tensor) -> Tensor:
    """Network input for the error of a state, given its size over that of a residual; 0: exact."""
    return (size / SMALLEST).log1p()


class StateConditions:
    """Conditions of one call of the operator along a trajectory: r = z_ref - O(z), (batch,
    *tokens, dim).

    Tokens: the operator's history, the last change, the predicted change, the residual of the last frame
    (zero, as the change, if there is no earlier frame) and the features of the operator's backbone. Facts:
    standardised log-parameters, log dt and the error of the history. Last change and last residual carry the
    past of an ensemble member: unobserved causes persist, and would otherwise be sampled anew at every call.
    The error distinguishes observed from sampled states; without it a network spreads both alike.
    """

    def __init__(self, operator: Operator, name: str):
        self.operator, self.name, self.head = operator, name, operator.head(name)
        self.device = self.head.scale.device

    # equal ones compute the same, from one CUDA graph
    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateConditions) and (self.operator, self.name) == (
            other.operator,
            other.name,
        )

    def __hash__(self) -> int:
        return hash((self.operator, self.name))

    @property
    def description(self) -> dict[str, Any]:
        """The facts of a `CorrectorFacts`."""
        codec, num_frames = self.head.codec, self.head.history + 3
        return {
            **self.head.task.description,
            "dim": codec.dim,
            "tokens": list(codec.tokens),
            "num_conditions": num_frames * codec.dim + self.operator.width,
            "num_features": self.operator.width,
            "fields": [codec.num_channels, *codec.space],
        }

    def predict(
        self,
        z: Tensor,
        parameters: ParameterBatch,
        error: Tensor | float = 0.0,
        last_pred: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(prediction (batch, *tokens, dim), tokens, facts) after z (batch, history or history + 1, *tokens,
        dim).

        Without an earlier frame, pass the history alone or its first frame twice. parameters: their forcing
        starts one frame before the last of z. error (batch,): of z, over the size of a residual; 0: exact.
        last_pred (batch, 1, *tokens, dim): the prediction of the last frame of z; None: computed here.
        On a GPU it is replayed.
        """
        error = error if isinstance(error, Tensor) else torch.full((), error, device=z.device)
        parameters = parameters.later(0, 3)
        return self.operator.call(StateConditions._predict, self, z, parameters, error, last_pred)

    def _predict(
        self, z: Tensor, parameters: ParameterBatch, error: Tensor, last_pred: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = torch.cat([z[:, :1], z], 1)[:, -1 - self.head.history :]
        earlier, z, change = z[:, :-1], z[:, 1:], z[:, 1:2] - z[:, :1]
        last_pred = (
            self.operator.predict(earlier, self.name, parameters)[0] if last_pred is None else last_pred
        )
        is_first = (change == 0).flatten(1).all(1).view(-1, *[1] * (z.ndim - 1))
        z_pred, features = self.operator.predict_with_features(z, self.name, parameters.later(1))
        last_residual = torch.where(is_first, 0.0, z[:, -1:] - last_pred)
        series = (z, change, z_pred - z[:, -1:], last_residual)
        tokens = torch.cat([*(frames.movedim(1, -2).flatten(-2) for frames in series), features], -1)
        dt = torch.full((len(z), 1), self.head.log_dt, device=z.device)
        size = error.float().expand(len(z))[:, None]
        facts = torch.cat([parameters.standard, dt, encode_error(size)], 1)
        return z_pred[:, 0], tokens, facts

    # As a frame of its own, a residual is not contiguous: torch rounds otherwise with [:, None], and gains of
    # limits and samples would differ in their last digits from those of the published results.

    def frame(self, r: Tensor) -> Tensor:
        """(..., *tokens, dim) to latents of one frame (..., 1, *tokens, dim)."""
        return r.unsqueeze(-2).movedim(-2, -2 - self.head.task.ndim)

    def decode(self, r: Tensor) -> Tensor:
        """(..., *tokens, dim) to normalised fields (..., 1, C, *space); linear."""
        return self.head.codec.decode(self.frame(r))

    def encode(self, w: Tensor) -> Tensor:
        """Inverse of `decode`, for fields inside the kept subspace."""
        return self.head.codec.encode(w).movedim(-2 - self.head.task.ndim, -2).flatten(-2)

    def prediction(self, tokens: Tensor) -> Tensor:
        """The prediction (batch, *tokens, dim), recovered from the tokens of `predict`."""
        dim, history = self.head.codec.dim, self.head.history
        last, change = (history - 1) * dim, (history + 1) * dim
        return tokens[..., last : last + dim] + tokens[..., change : change + dim]


class FieldConditions:
    """Conditions of a steady solution given a partly observed coefficient: r = log u - log O(v_guess),
    (batch, *tokens, dim).

        tokens = (mask * v, v_guess, log of its standard deviation, mask, log O(v_guess))
        facts  = (coverage, noise, log2 of the block size)

    v is the normalised coefficient, v_guess its mean given the observation: the best linear guess, or that
    of a `CellPosterior` (v itself if it is fully observed). noise_shape: of the standard normal numbers
    behind one sample of v.
    """

    def __init__(self, operator: Operator, name: str, posterior: LinearPosterior | CellPosterior):
        self.operator, self.name, self.head, self.posterior = operator, name, operator.head(name), posterior
        self.device, self.noise_shape = self.head.scale.device, (2, *posterior.shape)
        codec, dim = self.head.input_codec, self.head.codec.dim
        self.description: dict[str, Any] = {
            **self.head.task.description,
            "dim": dim,
            "num_conditions": 3 * codec.width + codec.patch**self.head.task.ndim + dim,
            "guess": posterior.description,
        }

    @property
    def is_linear(self) -> bool:
        """Whether the posterior of the coefficient is a `LinearPosterior`."""
        return isinstance(self.posterior, LinearPosterior)

    def predict(
        self, observation: Observation, parameters: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Start]:
        """(log O(v_guess) (batch, *tokens, dim), tokens, facts, start of the samples) given an observation in
        normalised units.

        noise (batch, M, *noise_shape): standard normal, for M samples v_s per row; None: no samples.
        """
        posterior = self.posterior(observation, noise)
        guess, tokens = self._push(observation, posterior.mean, posterior.std, parameters)
        num, v = posterior.samples.shape[1], posterior.samples.flatten(0, 1)
        if not len(v):
            return guess, tokens, observation.facts, Start(guess[:0], tokens[:0], observation.facts[:0])
        log_u, tokens_pushed = self._push(
            observe_all(v), v, torch.zeros_like(v), parameters.repeat_interleave(num, 0)
        )
        offset = log_u - guess.repeat_interleave(num, 0)
        return guess, tokens, observation.facts, Start(offset, tokens_pushed, observe_all(v).facts)

    def guess(self, observation: Observation, parameters: Tensor) -> Tensor:
        """log O(v_guess) of `predict` alone."""
        v = self.posterior.guess(observation)
        return self._push(observation, v, torch.zeros_like(v), parameters)[0]

    def _push(
        self, observation: Observation, v: Tensor, std: Tensor, parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(log O(v), tokens) of a coefficient v (batch, C, *space) with this standard deviation."""
        fields = (observation.values, observation.mask, v, std, parameters)
        blocks = zip(*(field.split(num_states(v.device)) for field in fields), strict=True)
        return tuple(map(torch.cat, zip(*(self._push_block(*block) for block in blocks), strict=True)))

    def _push_block(
        self, values: Tensor, mask: Tensor, v: Tensor, std: Tensor, parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        codec, ndim = self.head.input_codec, self.head.task.ndim
        batch = self.head.parameter_batch(parameters)
        v_start = codec.projected(v)[:, None]
        u = self.operator.call(Operator.step, self.operator, v_start, self.name, batch)[0][:, 0]
        log_u = self.logarithm(self.head.codec.denormalise(u))
        fields = (values, v, (std + STD_FLOOR).log(), mask)
        return log_u, torch.cat([*[patchify(field, ndim, codec.patch) for field in fields], log_u], -1)

    def logarithm(self, u: Tensor) -> Tensor:
        """log u as tokens: (batch, C, *space), physical units, to (batch, *tokens, dim); linear in log u."""
        return self.head.codec.encode(self.head.codec.masked(u.clamp_min(self.posterior.floor).log()))

    def solution(self, log_u: Tensor, r: Tensor) -> Tensor:
        """Physical u = exp(log_u + r), of log_u (batch, *tokens, dim) as `predict` gives it and r (...,
        *tokens, dim)."""
        return self.head.codec.masked(self.decode(log_u + r).exp(), torch.nan)

    def decode(self, r: Tensor) -> Tensor:
        """(..., *tokens, dim) to fields of log u, (..., C, *space); linear."""
        return self.head.codec.decode(r)
