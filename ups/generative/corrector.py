"""The corrector: the distribution of the residual r = z_ref - z_pred of a frozen predictor, given its inputs.

    r = mean_k + std_k exp(h) (m + r~),   (m, h) = Gaussian(c),   r~ ~ diffusion with velocity F(x, angle, c)

mean_k and std_k are statistics per task and coefficient. m and h are the conditional mean and log-scale from
a small network, fitted by maximum likelihood before the diffusion and then frozen; on their own they are the
baseline N(mean, scale^2) that the diffusion must beat. Every component of r~ has unit variance whatever the
size of r, as the angles of ups/generative/diffusion.py assume. The part of F that is linear in x is computed
in closed form from the covariance of r~ (ups/generative/law.py). Conditions c are tokens (batch, *tokens,
C) (states and prediction) and facts (batch, K) (parameters, time step, observation).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from ups.common.device import autocast
from ups.common.files import DamagedError
from ups.common.place import make_target
from ups.config.model import ModelConfig
from ups.config.schema import OptimConfig
from ups.generative.cell_posterior import posterior_of
from ups.generative.diffusion import Velocity, largest_mode
from ups.generative.law import ScaleMixture, Waves, one_scale
from ups.generative.limits import WaveLimits
from ups.models.backbones import backbone_of
from ups.models.backbones.flat import LocalBackbone
from ups.models.backbones.layers import zero_linear
from ups.models.facts import CORRECTOR, Count, Facts, Size, require_kinds
from ups.models.network import TaskNetwork
from ups.tasks import described_task
from ups.training.optim import fit_averaged
from ups.training.weights import load_stage
from ups_discovery.boundary import along

METHODS = ("pushed", "diffusion")  # of sampling: ups/generative/prior_selection.py
MAX_FACTS = 8
FREQUENCIES = (1, 2, 4, 8, 16)  # of the angle's sinusoids; low ones keep derivatives in the angle smooth
LARGEST_LOG_SCALE = math.log(1e4)  # bound of |h|: a coefficient known to 1e-4 of its spread counts as known
# prefixes of the tensors of a head that `fit_head` fills
FITTED = ("r_mean", "r_std", "c_mean", "c_std", "largest_std", "marginal", "gaussian", "waves", "mixture")
GAUSSIAN_DEPTH = 2  # layers for the mean and scale on the operator's features
MOST_SAMPLER_STEPS = 4096  # with more, sampling one state takes minutes
STD_FLOOR = 1e-3  # of the largest std_k: smaller coefficients are rounding errors of the tokenizer
STATISTICS_BATCHES = 16


class Start(NamedTuple):
    """Start of the sampling path other than white noise: offset (batch, *tokens, dim) from the prediction,
    plus the Gaussian error of a prediction made under the conditions `tokens` and `facts`."""

    offset: Tensor
    tokens: Tensor
    facts: Tensor


class ResidualBatch(NamedTuple):
    """Residuals r (batch, *tokens, dim), their raw conditions, and the start of their samples (None: white
    noise)."""

    r: Tensor
    tokens: Tensor
    facts: Tensor
    start: Start | None = None


@dataclass(frozen=True)
class Condition:
    """Conditions of a batch of one task, made by `CorrectorHead.condition`.

    mean, log_scale: m and h. start_mean, start_scale: mean and standard deviation of the start of the
    sampling path, in units of r~; None: white noise.
    """

    name: str
    tokens: Tensor
    facts: Tensor
    mean: Tensor
    log_scale: Tensor
    start_mean: Tensor | None = None
    start_scale: Tensor | None = None

    def rows(self, index: Tensor | slice) -> "Condition":
        """The conditions of the rows `index`, which may repeat."""
        return replace(
            self, **{key: value[index] for key, value in vars(self).items() if isinstance(value, Tensor)}
        )

    def initial_state(self, noise: Tensor) -> Tensor:
        """Start of the sampling path (batch, *tokens, dim), from white noise of that shape."""
        return noise if self.start_mean is None else self.start_mean + self.start_scale * noise


register_dataclass(Condition)


@dataclass(frozen=True, kw_only=True)
class CorrectorFacts(Facts):
    """The facts of one task of a corrector. None: does not apply.

    name, own: of the task. dim: of r; num_conditions: C. In time also tokens (per axis), fields (channels,
    *space), num_features (the last of the C conditions, features of the operator, of which the Gaussian is a
    small head), is_localized (the closed-form part is a mixture of two scales), sample_error (of a sampled
    state over the size of a residual, which a rollout passes to the network) and horizon (frames of the
    ensembles that were validated).
    Steady also guess (of `posterior_of`), start of the path and method of sampling, one of METHODS.
    """

    again = f"Train the stage again: {make_target('diffusion')}, {make_target('steady')}."

    name: str
    own: dict[str, Any] | None = None
    guess: dict[str, Any] | None = None
    start: str | None = None
    method: Literal[METHODS] | None = None
    dim: Count
    num_conditions: Count
    tokens: list[Count] | None = None
    fields: list[Count] | None = None
    num_features: int | None = None
    is_localized: bool | None = None
    sample_error: Size | None = None
    horizon: Count | None = None


class CorrectorHead(nn.Module):
    """The weights of one task beside the shared network: statistics, Gaussian, input and output layers.

    `fit_head` fills the statistics. marginal_mean and marginal_std, for unconditional dressing, are those
    under uniform window starts (training prefers starts with large residuals). limits: bounds on samples,
    measured when the network is trained.
    """

    def __init__(self, facts: CorrectorFacts, model: ModelConfig):
        super().__init__()
        task = described_task({"name": facts.name, **({"own": facts.own} if facts.own else {})})
        self.name = task.name
        self.facts, dim, num_conditions = facts, facts.dim, facts.num_conditions
        for name, size, value in (
            ("r_mean", dim, 0.0),
            ("r_std", dim, 1.0),
            ("c_mean", num_conditions, 0.0),
            ("c_std", num_conditions, 1.0),
            ("marginal_mean", dim, 0.0),
            ("marginal_std", dim, 1.0),
        ):
            self.register_buffer(name, torch.full((size,), value))
        self.register_buffer("largest_std", torch.ones(()))  # standard deviation of the largest mode of r~
        self.guess = posterior_of(facts.guess, model, task) if facts.guess else None
        if self.guess is not None:
            self.guess.requires_grad_(False)  # `fit_posteriors` trains it
        self.waves = Waves(facts.tokens, dim, task.boundary) if facts.tokens else None
        self.limits = WaveLimits(*facts.fields, boundary=task.boundary) if facts.tokens else None
        self.mixture = ScaleMixture(dim) if facts.is_localized else None
        self.gaussian_into = nn.Linear(num_conditions, model.width)
        self.gaussian_facts = nn.Linear(MAX_FACTS, model.width)
        self.gaussian = (
            LocalBackbone(model, GAUSSIAN_DEPTH, along(task.boundary, task.ndim))
            if facts.num_features
            else backbone_of(model, task)
        )
        self.gaussian_out = zero_linear(model.width, 2 * dim)
        self.into = nn.Linear(num_conditions + 3 * dim, model.width)
        self.out = zero_linear(model.width, 2 * dim + 1 if self.mixture else dim)
        self.gaussian_parts = [self.gaussian_into, self.gaussian_facts, self.gaussian, self.gaussian_out]
        nn.ModuleList(self.gaussian_parts).requires_grad_(False)  # `fit_head` trains them

    @property
    def method(self) -> str:
        """How samples are made, one of METHODS; tasks in time always use the diffusion."""
        return self.facts.method or METHODS[-1]

    @property
    def sample_error(self) -> float:
        """Error of a sampled state over the size of a residual; selected on validation."""
        return self.facts.sample_error or 0.0

    def decide(self, **facts: Any) -> None:
        """Set `facts` that are found when the head is made or validated."""
        self.facts = replace(self.facts, **facts)

    @property
    def is_pushed(self) -> bool:
        """Whether the diffusion starts at a pushed sample of the coefficient; else at white noise."""
        return self.facts.start == METHODS[0]

    @cached_property
    def largest(self) -> float:
        """largest_std as a number, cached because every read waits for the device."""
        return float(self.largest_std)

    @property
    def fitted(self) -> dict[str, Tensor]:
        """The tensors that `fit_head` fills: statistics, conditional mean and scale."""
        return {key: value for key, value in self.state_dict().items() if key.startswith(FITTED)}

    def gaussian_condition(self, tokens: Tensor, facts: Tensor) -> Condition:
        """The `Condition` of raw tokens (batch, *tokens, C) and facts (batch, K <= MAX_FACTS). Raises
        ValueError if the number of conditions is not that of training."""
        if tokens.shape[-1] != len(self.c_mean):
            raise ValueError(
                f"sampling {self.name} got {tokens.shape[-1]} conditions per token; "
                f"expected {len(self.c_mean)}: this stage was trained with another operator or "
                "by another version of the package. Train it again."
            )
        tokens = (tokens - self.c_mean) / self.c_std
        facts = nn.functional.pad(facts, (0, MAX_FACTS - facts.shape[1]))
        hidden = self.gaussian(self.gaussian_into(tokens), self.gaussian_facts(facts))
        mean, raw = self.gaussian_out(hidden).chunk(2, -1)
        log_scale = LARGEST_LOG_SCALE * torch.tanh(raw / LARGEST_LOG_SCALE)
        return Condition(self.name, torch.cat([tokens, mean, log_scale], -1), facts, mean, log_scale)

    def condition(self, tokens: Tensor, facts: Tensor) -> Condition:
        """The same for the network, for which localized residuals are divided by one number."""
        condition = self.gaussian_condition(tokens, facts)
        if self.mixture is None:
            return condition
        log_scale = (one_scale(self.r_std) / self.r_std).log().expand_as(condition.mean)
        return replace(condition, mean=torch.zeros_like(log_scale), log_scale=log_scale)

    def whiten(self, r: Tensor, condition: Condition) -> Tensor:
        """r~ of r (batch, *tokens, dim) in latent units."""
        return (r - self.r_mean) / self.r_std * torch.exp(-condition.log_scale) - condition.mean

    def unwhiten(self, r: Tensor, condition: Condition) -> Tensor:
        """r in latent units of r~ (batch, *tokens, dim)."""
        return self.r_mean + self.r_std * condition.log_scale.exp() * (condition.mean + r)

    def with_start(self, condition: Condition, start: Start) -> Condition:
        """Return the condition with the start of the sampling path. If the coefficient is fully observed,
        only the operator's own error remains; the facts of start and condition are then equal."""
        if self.method == "diffusion" and not self.is_pushed:
            return condition
        prediction = self.condition(start.tokens, start.facts)
        has_error = (condition.facts == prediction.facts).all(1) | (self.method != METHODS[0])
        has_error = has_error.view(-1, *[1] * (start.offset.ndim - 1))
        error = self.unwhiten(torch.zeros_like(prediction.mean), prediction)
        offset = start.offset + torch.where(has_error, error, 0.0)
        scale = (prediction.log_scale - condition.log_scale).exp()
        return replace(
            condition,
            start_mean=self.whiten(offset, condition),
            start_scale=torch.where(has_error, scale, 0.0),
        )

    def whitened(
        self, r: Tensor, tokens: Tensor, facts: Tensor, start: Start | None = None
    ) -> tuple[Tensor, Condition]:
        """(r~, its condition) of the fields of a `ResidualBatch`."""
        condition = self.condition(tokens, facts)
        return self.whiten(r, condition), condition if start is None else self.with_start(condition, start)


class Corrector(TaskNetwork):
    """One network for all corrected tasks. description: as `TaskNetwork` and `CorrectorFacts`; is_map: the
    output maps noise to a sample, as in students, and is not the velocity of an ODE. sampler_steps: of the
    diffusion; mid_angle: of a student's second evaluation."""

    def __init__(self, description: dict[str, Any]):
        super().__init__(description, lambda task, model: CorrectorHead(CorrectorFacts.read(task), model))
        require_kinds(description, CORRECTOR, "a corrector")
        if (steps := description.get("sampler_steps", 1)) not in range(1, MOST_SAMPLER_STEPS + 1):
            raise ValueError(
                f"a corrector has sampler_steps {steps!r:.80}; expected 1 to "
                f"{MOST_SAMPLER_STEPS}. Train it with fewer sampler_steps."
            )
        self.sampler_steps: int | None = description.get("sampler_steps")
        self.mid_angle: float = description.get("mid_angle", 0.0)
        width = self.width
        self.facts, self.angle = (
            nn.Sequential(nn.Linear(size, width), nn.SiLU(), nn.Linear(width, width))
            for size in (MAX_FACTS, 2 * len(FREQUENCIES) + 1)
        )
        self.register_buffer("frequencies", torch.tensor(FREQUENCIES, dtype=torch.float32), persistent=False)

    @property
    def description(self) -> dict[str, Any]:
        return self._description | {"tasks": [head.facts.described() for head in self.heads.values()]}

    def velocity(self, condition: Condition) -> Velocity:
        """F(x, angle) under these conditions: the network's output, plus the linear part of `Waves` for tasks
        in time. Float32 in and out; the backbone runs in bf16 if `precision` is bf16."""
        head = self.heads[condition.name]
        linear = head.mixture or head.waves
        add_linear = linear and (linear.map if self._description.get("is_map") else linear.flow)

        def evaluate(x: Tensor, angle: Tensor) -> Tensor:
            phase = angle[:, None] * self.frequencies
            embedding = self.angle(torch.cat([angle[:, None], phase.sin(), phase.cos()], -1))
            task = self.task_embedding[self.names.index(condition.name)]
            vector = task + self.facts(condition.facts) + embedding
            tokens = torch.cat([x.float(), condition.tokens], -1)
            with autocast(self.precision, x.device):
                hidden = self.backbone(head.into(tokens), vector, condition.name)
            rest = head.out(hidden.float())
            return add_linear(x.float(), angle, rest) if add_linear else rest

        return evaluate


def gaussian_nll(white: Tensor, log_scale: Tensor) -> Tensor:
    """Negative log-likelihood of r under N(e^h m, e^{2h}) without constants, mean over elements: (batch,).

    Equal to 0.5 r~^2 + h, with r~ = r e^{-h} - m and r in units of its marginal standard deviation.
    """
    return (0.5 * white.square() + log_scale).flatten(1).mean(1)


def fit_head(
    head: CorrectorHead,
    batch_of: Callable[[int], ResidualBatch],
    validation: Sequence[ResidualBatch],
    steps: int,
    optim: OptimConfig,
    num_rows: tuple[int, int],
) -> dict[str, float]:
    """Fill the statistics of a head and fit its Gaussian by maximum likelihood; deterministic in batches and
    initial weights.

    batch_of(step): a training batch; negative steps give the batches for the statistics. num_rows: numbers of
    trajectories in training and validation. Returns ratio (mean size of the residual in training over that in
    validation) and its relative standard error; rms_val; std_train and std_val of the whitened residual and
    the latter's standard error; its largest_std and kurtosis; nll on validation. ValueError if not finite.
    """
    probe = [batch_of(-1 - i) for i in range(STATISTICS_BATCHES)]
    r, tokens = (torch.cat(parts).flatten(0, -2) for parts in list(zip(*probe, strict=True))[:2])
    std, size_train = r.std(0), torch.cat([_rms(r) for r, *_ in probe])
    head.r_mean.copy_(r.mean(0))
    head.r_std.copy_(std.clamp_min(STD_FLOOR * float(std.max())).clamp_min(1e-12))
    head.c_mean.copy_(tokens.mean(0))
    head.c_std.copy_(tokens.std(0).clamp_min(1e-6))
    if num_features := head.facts.num_features:  # features have unit size already
        head.c_mean[-num_features:] = 0.0
        head.c_std[-num_features:] = 1.0

    fitted = nn.ModuleList(head.gaussian_parts)
    fitted.requires_grad_(True)

    def loss_of(step: int) -> Tensor:
        white, condition = head.whitened(*batch_of(step))
        return gaussian_nll(white, condition.log_scale).mean()

    stopped, ema = fit_averaged(fitted, loss_of, steps, optim)
    if stopped is not None:
        raise ValueError(
            f"the likelihood of {head.name}'s residuals is not finite at step {stopped} of "
            "their scale; expected finite residuals. Look at the data with the doctor, or "
            "lower the learning rates of this stage."
        )
    ema.write(ema.averages)
    fitted.requires_grad_(False)
    with torch.no_grad():
        white = torch.cat([head.whitened(*part)[0] for part in probe])
        # last correction of the scale: unit variance per coefficient on training residuals
        factor = white.flatten(0, -2).std(0).clamp_min(1e-6)
        head.r_std.mul_(factor)
        head.gaussian_out.weight[: len(factor)].div_(factor[:, None])
        head.gaussian_out.bias[: len(factor)].div_(factor)
        white = white / factor
        if head.waves is not None:  # on perturbed states, so that the covariance includes their errors
            head.waves.fit(torch.cat([head.whitened(*batch_of(step))[0] for step in range(len(probe))]))
        head.largest_std.copy_(largest_mode(white))
        held_out = [head.whitened(*part) for part in validation]
        val, r_val = torch.cat([white for white, _ in held_out]), [r for r, *_ in validation]
        size_val, squares = torch.cat([_rms(r) for r in r_val]), val.square().flatten(1).mean(1)
        nll = torch.cat([gaussian_nll(white, condition.log_scale) for white, condition in held_out]).mean()

    def standard_error(rows: Tensor, num: int) -> Tensor:
        return (rows.var() / min(len(rows), num)).sqrt()  # rows of one trajectory are not independent

    sizes = zip((size_train, size_val), num_rows, strict=True)
    errors = [standard_error(size / size.mean(), num) for size, num in sizes]
    facts = {
        "ratio": size_train.mean() / size_val.mean(),
        "ratio_error": errors[0].hypot(errors[1]),
        "nll": nll + factor.log().mean(),
        "std_train": white.std(),
        "std_val": val.std(),
        "std_val_error": standard_error(squares, num_rows[1]) / (2 * val.std()),
        "largest_std": head.largest_std,
        "kurtosis": white.pow(4).mean() / white.var() ** 2 - 3,
        "rms_val": torch.cat(r_val).square().mean().sqrt(),
    }
    return {name: float(value) for name, value in facts.items()}


def _rms(r: Tensor) -> Tensor:
    """RMS of each row (batch,). Rows without an event, which are nearly zero, would decide a mean of logs."""
    return r.square().flatten(1).mean(1).clamp_min(1e-30).sqrt()


def load_corrector(
    directory: str | Path, device: torch.device | str = "cpu", operator: nn.Module | None = None
) -> Corrector:
    """The finished network in a stage's folder (config.json, model.safetensors), in evaluation mode on
    `device`.

    operator: a loaded operator, whose errors the network must have been trained on. Raises as `load_stage`,
    and DamagedError for the network of another operator.
    """
    found = load_stage(directory, Corrector, "stage", f"Run {make_target(Path(directory).name)}.")
    if operator is not None and found.record["parents"].get("operator") != operator.record["fingerprint"]:
        raise DamagedError(
            f"{directory} was trained on the residuals of another operator than the one that was loaded; "
            f"expected stages of one run. Load the run again, or run {make_target(Path(directory).name)}."
        )
    return found.served_on(device)
