"""The corrector: a distribution over what a frozen predictor leaves, r = z_ref - z_pred, given what the
predictor saw.

    r = mean_k + std_k exp(h) (m + r~),   (m, h) = Gaussian(c),   r~ ~ diffusion with velocity F(x, angle, c)

mean_k, std_k: per task and coefficient. m, h: a small network's conditional mean and log-scale, fitted by
maximum likelihood before the diffusion and then frozen; they alone are the baseline N(mean, scale^2) that the
diffusion must beat. r~ then has unit variance in every number, whatever the size of r, which is what the
angles of ups/generative/diffusion.py are made for; what is linear in F given the waves of r~ is in closed
form (ups/generative/waves.py). Conditions c are tokens (batch, *tokens, C) (states and prediction)
and facts (batch, K) (parameters, time step, observation).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ups.common.files import DamagedError
from ups.common.precision import autocast
from ups.config import ModelConfig, OptimConfig
from ups.generative.diffusion import Velocity
from ups.generative.limits import WaveLimits
from ups.generative.observation import LinearPosterior
from ups.generative.waves import Waves
from ups.models.backbone import LocalBackbone, TaskNetwork, backbone_of, zero_linear
from ups.models.description_checks import CORRECTOR, CORRECTOR_HEAD, require_kinds
from ups.models.warm import copy_maps
from ups.tasks import described_task
from ups.training.optim import EMA, build_optimizer, fit, learning_rate
from ups.training.stage import load_stage

# what a steady solution is drawn by: see ups/generative/selection.py
BY = ("pushed", "error", "gaussian", "diffusion")
MAX_FACTS = 8
# of the angle's sinusoids: smooth enough for a derivative in the angle to be taken
FREQUENCIES = (1, 2, 4, 8, 16)
# |h| stays below: a coefficient known to 1e-4 of its marginal spread is known
LARGEST_LOG_SCALE = math.log(1e4)
# of a head's tensors
FITTED = ("r_mean", "r_std", "c_mean", "c_std", "largest_std", "marginal", "gaussian", "waves")
GAUSSIAN_DEPTH = 2  # of the mean and scale on the operator's trunk
MOST_SAMPLER_STEPS = 4096  # with more a draw of one state takes minutes
STD_FLOOR = 1e-3  # of the largest std_k: coefficients smaller than that are noise of the codec


class Start(NamedTuple):
    """Where draws of rows begin in place of white noise: off (batch, *tokens, dim) from the prediction, with
    the Gaussian error of a prediction under tokens and facts of its own."""

    off: Tensor
    tokens: Tensor
    facts: Tensor


class Drawn(NamedTuple):
    """Residuals r of a batch, their conditions, and where their draws begin (None: at white noise)."""

    r: Tensor
    tokens: Tensor
    facts: Tensor
    start: Start | None = None


@dataclass(frozen=True)
class Condition:
    """What draws are conditioned on, for a batch of one task; made by `CorrectorHead.condition`. mean,
    log_scale: m and h. start_mean, start_scale: of the Gaussian at which the path begins, as r~; None: white
    noise."""

    name: str
    tokens: Tensor
    facts: Tensor
    mean: Tensor
    log_scale: Tensor
    start_mean: Tensor | None = None
    start_scale: Tensor | None = None

    def rows(self, index: Tensor) -> "Condition":
        """The conditions of some rows; an index may repeat."""
        return replace(
            self, **{key: value[index] for key, value in vars(self).items() if isinstance(value, Tensor)}
        )

    def begin(self, noise: Tensor) -> Tensor:
        """Where the path begins (batch, *tokens, dim), from white noise of that shape."""
        return noise if self.start_mean is None else self.start_mean + self.start_scale * noise


class CorrectorHead(nn.Module):
    """What one task adds to the shared network: statistics, Gaussian, input and output map.

    description: name, dim (of r), num_conditions (C), for a task in time tokens (per axis), fields (channels
    of all frames of a call, *space) and num_features (the last of C, of the operator's trunk, on which the
    Gaussian is then a small head), for a steady one guess (what `LinearPosterior` is built from), start and
    by (which the stage chooses). Statistics are buffers that `fit_head` fills, but marginal_mean and _std:
    those of residuals as they occur (training prefers where they are large), for dressing without conditions.
    limits: of draws, measured when the network is trained.
    """

    def __init__(self, description: dict[str, Any], model: ModelConfig):
        super().__init__()
        task = described_task(description)
        require_kinds(description, CORRECTOR_HEAD, task.name)
        self.name, self.boundary = task.name, task.boundary
        dim, num_conditions = description["dim"], description["num_conditions"]
        for name, size, value in (
            ("r_mean", dim, 0.0),
            ("r_std", dim, 1.0),
            ("c_mean", num_conditions, 0.0),
            ("c_std", num_conditions, 1.0),
            ("marginal_mean", dim, 0.0),
            ("marginal_std", dim, 1.0),
        ):
            self.register_buffer(name, torch.full((size,), value))
        self.register_buffer("largest_std", torch.ones(()))  # of the whitened residual's largest mode
        self.guess = LinearPosterior(**description["guess"]) if "guess" in description else None
        self.waves = Waves(description["tokens"], dim, self.boundary) if "tokens" in description else None
        self.limits = (
            WaveLimits(*description["fields"], boundary=self.boundary) if "tokens" in description else None
        )
        self.description = description
        self.gaussian_into = nn.Linear(num_conditions, model.width)
        self.gaussian_facts = nn.Linear(MAX_FACTS, model.width)
        self.gaussian = (
            LocalBackbone(model, GAUSSIAN_DEPTH)
            if description.get("num_features")
            else backbone_of(model, task)
        )
        self.gaussian_out = zero_linear(model.width, 2 * dim)
        self.into = nn.Linear(num_conditions + 3 * dim, model.width)
        self.out = zero_linear(model.width, dim)
        self.gaussian_parts = [self.gaussian_into, self.gaussian_facts, self.gaussian, self.gaussian_out]
        nn.ModuleList(self.gaussian_parts).requires_grad_(False)  # but while `fit_head` fits them

    @property
    def by(self) -> str:
        """Of BY, what draws are made by; of a task in time the diffusion."""
        return self.description.get("by", BY[-1])

    @by.setter
    def by(self, by: str) -> None:
        self.description["by"] = by

    @property
    def drawn_error(self) -> float:
        """Of a state that was drawn, over a residual's size, as a rollout tells the network: by validation
        (ups/generative/judge.py)."""
        return self.description.get("drawn_error", 0.0)

    @drawn_error.setter
    def drawn_error(self, size: float) -> None:
        self.description["drawn_error"] = size

    @property
    def is_pushed(self) -> bool:
        """Whether the diffusion's path begins at a pushed draw of the coefficient; else at white noise."""
        return self.description.get("start") == BY[0]

    @cached_property
    def largest(self) -> float:
        """largest_std, read once, when it is fitted: no step waits for the device to say it."""
        return float(self.largest_std)

    @property
    def fitted(self) -> dict[str, Tensor]:
        """What `fit_head` fills: statistics, conditional mean and scale."""
        return {key: value for key, value in self.state_dict().items() if key.startswith(FITTED)}

    def take(self, parent: "CorrectorHead") -> str:
        """Take over the maps of another head of this task; statistics and Gaussian are those of its own
        residuals. In words, "" if it cannot serve."""
        return copy_maps(self, parent)

    def condition(self, tokens: Tensor, facts: Tensor) -> Condition:
        """Raw tokens (batch, *tokens, C) and facts (batch, K <= MAX_FACTS) as what `whiten`, `unwhiten` and
        `Corrector.velocity` take. Raises ValueError for conditions that it was not trained under."""
        if tokens.shape[-1] != len(self.c_mean):
            raise ValueError(
                f"a draw of {self.name} was given {tokens.shape[-1]} conditions at a token; "
                f"expected {len(self.c_mean)}: this stage was trained with another operator or "
                "by another version of the package. Train it again."
            )
        tokens = (tokens - self.c_mean) / self.c_std
        facts = nn.functional.pad(facts, (0, MAX_FACTS - facts.shape[1]))
        hidden = self.gaussian(self.gaussian_into(tokens), self.gaussian_facts(facts), self.boundary)
        mean, raw = self.gaussian_out(hidden).chunk(2, -1)
        log_scale = LARGEST_LOG_SCALE * torch.tanh(raw / LARGEST_LOG_SCALE)
        return Condition(self.name, torch.cat([tokens, mean, log_scale], -1), facts, mean, log_scale)

    def whiten(self, r: Tensor, condition: Condition) -> Tensor:
        """r (batch, *tokens, dim), latent units, to r~."""
        return (r - self.r_mean) / self.r_std * torch.exp(-condition.log_scale) - condition.mean

    def unwhiten(self, r: Tensor, condition: Condition) -> Tensor:
        """r~ to latent units."""
        return self.r_mean + self.r_std * condition.log_scale.exp() * (condition.mean + r)

    def begun(self, condition: Condition, start: Start) -> Condition:
        """The condition, with the place where its draws begin, if that is not white noise. Where all was
        seen, which is when a start has the same facts, the prediction's own error is all that is uncertain,
        and always there."""
        if self.by == "gaussian" or (self.by == "diffusion" and not self.is_pushed):
            return condition
        own = self.condition(start.tokens, start.facts)
        is_own = (condition.facts == own.facts).all(1) | (self.by != BY[0])
        is_own = is_own.view(-1, *[1] * (start.off.ndim - 1))
        off = start.off + torch.where(is_own, self.unwhiten(torch.zeros_like(own.mean), own), 0.0)
        return replace(
            condition,
            start_mean=self.whiten(off, condition),
            start_scale=torch.where(is_own, (own.log_scale - condition.log_scale).exp(), 0.0),
        )

    def shown(
        self, r: Tensor, tokens: Tensor, facts: Tensor, start: Start | None = None
    ) -> tuple[Tensor, Condition]:
        """(r~, its condition) of what a residuals' `draw` gives."""
        condition = self.condition(tokens, facts)
        return self.whiten(r, condition), condition if start is None else self.begun(condition, start)


class Corrector(TaskNetwork):
    """All corrected tasks in one network; description: see `TaskNetwork` and `CorrectorHead`; is_map: it
    draws at once, as students do, and is no velocity to follow."""

    def __init__(self, description: dict[str, Any]):
        super().__init__(description, CorrectorHead)
        require_kinds(description, CORRECTOR, "a corrector")
        if (steps := description.get("sampler_steps", 1)) not in range(1, MOST_SAMPLER_STEPS + 1):
            raise ValueError(
                f"a corrector takes {steps!r:.80} steps a draw; expected 1 to "
                f"{MOST_SAMPLER_STEPS}. Train it with fewer sampler_steps."
            )
        width = self.width
        self.facts, self.angle = (
            nn.Sequential(nn.Linear(size, width), nn.SiLU(), nn.Linear(width, width))
            for size in (MAX_FACTS, 2 * len(FREQUENCIES) + 1)
        )
        self.register_buffer("frequencies", torch.tensor(FREQUENCIES, dtype=torch.float32), persistent=False)

    def velocity(self, condition: Condition) -> Velocity:
        """F(x, angle) of these conditions, over what is linear in it where residuals have waves; float32 in
        and out, the trunk in bf16 where `precision` says so."""
        head = self.heads[condition.name]
        over = head.waves and (head.waves.map if self.description.get("is_map") else head.waves.flow)

        def evaluate(x: Tensor, angle: Tensor) -> Tensor:
            phase = angle[:, None] * self.frequencies
            at = self.angle(torch.cat([angle[:, None], phase.sin(), phase.cos()], -1))
            vector = self.task_embedding[self.names.index(condition.name)] + self.facts(condition.facts) + at
            tokens = torch.cat([x.float(), condition.tokens], -1)
            with autocast(self.precision, x.device):
                hidden = self.backbone(head.into(tokens), vector, head.boundary, condition.name)
            rest = head.out(hidden.float())
            return over(x.float(), angle, rest) if over else rest

        return evaluate


def gaussian_nll(white: Tensor, log_scale: Tensor) -> Tensor:
    """Negative log-likelihood of r under N(e^h m, e^{2h}), constants dropped, mean over elements per row
    (batch,): 0.5 r~^2 + h, r~ = r e^{-h} - m being the whitened residual and r in units of its marginal
    standard deviation.
    """
    return (0.5 * white.square() + log_scale).flatten(1).mean(1)


def fit_head(
    head: CorrectorHead,
    draw: Callable[[int], Drawn],
    validation: Sequence[Drawn],
    steps: int,
    optim: OptimConfig,
    num_rows: tuple[int, int],
) -> dict[str, float]:
    """Fill the statistics and the Gaussian of a head by maximum likelihood; deterministic in the draws and
    the initial weights.

    draw(step): a training batch, also for the steps below `steps` that are negative (statistics). num_rows:
    trajectories behind training and validation. Returns ratio (geometric mean of the residual's size in
    training over that in validation) and its standard error, rms_val, std_train and std_val of the whitened
    residual, the latter's standard error, its largest_std and kurtosis, and nll of validation.
    """
    probe = [draw(-1 - i) for i in range(16)]
    r, tokens = (torch.cat(parts).flatten(0, -2) for parts in list(zip(*probe, strict=True))[:2])
    std, size_train = r.std(0), torch.cat([_log_size(r) for r, *_ in probe])
    head.r_mean.copy_(r.mean(0))
    head.r_std.copy_(std.clamp_min(STD_FLOOR * float(std.max())).clamp_min(1e-12))
    head.c_mean.copy_(tokens.mean(0))
    head.c_std.copy_(tokens.std(0).clamp_min(1e-6))
    if num_features := head.description.get("num_features", 0):  # of unit size, however little they vary
        head.c_mean[-num_features:] = 0.0
        head.c_std[-num_features:] = 1.0

    fitted = nn.ModuleList(head.gaussian_parts)
    fitted.requires_grad_(True)
    ema = EMA(fitted, optim.ema_decay)

    def loss_of(step: int) -> Tensor:
        white, condition = head.shown(*draw(step))
        return gaussian_nll(white, condition.log_scale).mean()

    stopped = fit(
        fitted,
        loss_of,
        range(steps),
        build_optimizer(fitted, optim),
        lambda step: learning_rate(step, steps, optim),
        optim.clip_norm,
        ema,
    )
    if stopped is not None:
        raise ValueError(
            f"the likelihood of {head.name}'s residuals is not finite at step {stopped} of "
            "their scale; expected finite residuals. Look at the data with the doctor, or "
            "lower the learning rates of this stage."
        )
    ema.write(ema.averages)
    fitted.requires_grad_(False)
    with torch.no_grad():
        white = torch.cat([head.shown(*part)[0] for part in probe])
        # the last word on the scale: unit variance per coefficient on training residuals
        factor = white.flatten(0, -2).std(0).clamp_min(1e-6)
        head.r_std.mul_(factor)
        head.gaussian_out.weight[: len(factor)].div_(factor[:, None])
        head.gaussian_out.bias[: len(factor)].div_(factor)
        white = white / factor
        if head.waves is not None:  # of states as they are trained on: what an error adds can be drawn, too
            head.waves.fit(torch.cat([head.shown(*draw(step))[0] for step in range(len(probe))]))
        head.largest_std.copy_(largest_mode(white))
        held_out = [head.shown(*part) for part in validation]
        val, r_val = torch.cat([white for white, _ in held_out]), [r for r, *_ in validation]
        size_val, squares = torch.cat([_log_size(r) for r in r_val]), val.square().flatten(1).mean(1)
        nll = torch.cat([gaussian_nll(white, condition.log_scale) for white, condition in held_out]).mean()

    def variance_of_mean(rows: Tensor, num: int) -> Tensor:
        """Rows of one trajectory are not independent of each other."""
        return rows.var() / min(len(rows), num)

    error = (variance_of_mean(size_train, num_rows[0]) + variance_of_mean(size_val, num_rows[1])).sqrt()
    facts = {
        "ratio": (size_train.mean() - size_val.mean()).exp(),
        "ratio_error": error,
        "nll": nll + factor.log().mean(),
        "std_train": white.std(),
        "std_val": val.std(),
        "std_val_error": variance_of_mean(squares, num_rows[1]).sqrt() / (2 * val.std()),
        "largest_std": head.largest_std,
        "kurtosis": white.pow(4).mean() / white.var() ** 2 - 3,
        "rms_val": torch.cat(r_val).square().mean().sqrt(),
    }
    return {name: float(value) for name, value in facts.items()}


def _log_size(r: Tensor) -> Tensor:
    """log of the RMS of each row, (batch,): its mean is not ruled by the few largest."""
    return r.square().flatten(1).mean(1).clamp_min(1e-30).sqrt().log()


def largest_mode(r: Tensor, iterations: int = 20) -> Tensor:
    """Square root of the largest eigenvalue of the second moment of r (n, ...), by power iteration on the
    samples; a scalar."""
    flat = r.flatten(1)
    v = flat[flat.square().sum(1).argmax()]  # a sample, which no mode that matters is orthogonal to
    for _ in range(iterations):
        v = v / v.norm().clamp_min(1e-12)
        v = flat.T @ (flat @ v) / len(flat)
    return v.norm().sqrt()


def load_corrector(
    directory: str | Path, device: torch.device | str = "cpu", operator: nn.Module | None = None
) -> Corrector:
    """The finished network of a stage directory (config.json, model.safetensors), in evaluation mode on
    `device`. operator: a loaded one, whose errors it draws. Raises as `load_stage`, and DamagedError for the
    network of another operator."""
    found = load_stage(directory, Corrector, "stage", f"Run make {Path(directory).name}.")
    if operator is not None and found.record["parents"].get("operator") != operator.record["fingerprint"]:
        raise DamagedError(
            f"{directory} draws the errors of another operator than the one that was loaded; "
            f"expected stages of one run. Load the run again, or run make "
            f"{Path(directory).name}."
        )
    return found.to(device).eval()
