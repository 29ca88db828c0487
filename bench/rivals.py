"""The rivals: backbones of ups/models/backbones that predict the change of a frame, and their training.

    u_{k+1} = u_k + s * network(u_{k-h+1..k}, log parameters, grid)   time-dependent; s: RMS of a step
    u = network(a, log parameters, grid)                              steady

All are trained by one recipe for a given time: AdamW, the learning rate is a function of the fraction of the
budget that is spent. Fields are normalised and channels-last, (batch, *space, channel), one to three axes,
unless stated otherwise.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn

from ups.common.device import autocast
from ups.config.model import ModelConfig
from ups.data.tokenizer import patchify, unpatchify
from ups.models.backbones import ANY, build
from ups.models.backbones.layers import zero_linear
from ups.models.rollout import rollout
from ups_discovery.boundary import PERIODIC, along

KERNEL_SIZE, MLP_RATIO = 7, 2.0  # of backbones that have such settings
CHANGE_FLOOR = 0.05  # share of the typical change below which loss "change" stops dividing by the change
WARM_UP, DECAY_START = 0.02, 0.3  # fractions of the budget: the rate rises until, and falls to zero from
WEIGHT_DECAY = 1e-4
CHECKPOINTS = (0.7, 0.85)  # shares of the budget, beside its end, at which validation may select the weights


# ---- networks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What may be tuned. `network` to `patch` are of the network, the rest of the recipe.

    network: kind of the backbone. width, depth, modes: as in `ModelConfig`. patch: cells per axis that become
    one token. history: input frames. loss: mse of the scaled change; change: per-sample error over that
    sample's change; field: over that sample's field. unroll_fraction: last fraction of the budget, trained
    through two steps. is_scored_only: train only on windows where the rollout is scored.
    """

    network: Literal["fno", "unet"] = "fno"
    width: int = 48
    depth: int = 4
    modes: int = 24
    patch: int = 1
    history: int = 1
    loss: Literal["mse", "change", "field"] = "mse"
    lr: float = 2e-3
    batch_size: int = 32
    unroll_fraction: float = 0.3
    is_scored_only: bool = False


# best: of a network on a task; usual: on other tasks, by dimension; starts: of a search, by dimension
KNOWN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def settings_for(network: str, task: str, ndim: int, changes: dict[str, Any]) -> Settings:
    """The tuned settings of a network on `task`, with `changes`."""
    usual = KNOWN["usual"][ndim] | ({"patch": 2} if ndim == 3 and network != "fno" else {})
    return Settings(**{"network": network, **KNOWN["best"][network].get(task, usual), **changes})


class Rival(nn.Module):
    """A backbone between linear maps from and to the cells of a patch; zero at the start of training."""

    def __init__(
        self,
        channels_in: int,
        num_parameters: int,
        channels_out: int,
        sizes: tuple[int, ...],
        boundary: str,
        settings: Settings,
    ):
        super().__init__()
        self.patch, width, cells = settings.patch, settings.width, settings.patch ** len(sizes)
        if any(size % self.patch for size in sizes):
            raise ValueError(
                f"the grid {sizes} has no patches of {self.patch} cells; expected axes divisible by it. "
                f"Change {settings.network}.patch or the resolution."
            )
        model = ModelConfig(settings.network, width, settings.depth, settings.modes, KERNEL_SIZE, MLP_RATIO)
        self.width = width
        self.into = nn.Linear((channels_in + num_parameters) * cells, width)
        self.condition = nn.Linear(num_parameters, width) if num_parameters else None
        self.backbone = build(model, {ANY: along(boundary, len(sizes))})
        self.out = zero_linear(width, channels_out * cells)

    def forward(self, u: Tensor, parameters: Tensor) -> Tensor:
        """u (batch, *space, channel), parameters (batch, P), standardised: (batch, *space, channel)."""
        sizes = u.shape[1:-1]
        constant = parameters.view(len(u), *[1] * len(sizes), -1).expand(*u.shape[:-1], -1)
        cells = torch.cat((u, constant), -1).movedim(-1, 1)
        x = self.into(patchify(cells, len(sizes), self.patch))
        condition = x.new_zeros(len(u), self.width) if self.condition is None else self.condition(parameters)
        y = self.out(self.backbone(x, condition))
        return unpatchify(y, len(sizes), self.patch).movedim(1, -1).contiguous()


# ---- problem and predictor ---------------------------------------------------------------------------------


@dataclass
class Problem:
    """Everything about a task that a model may use. Fields are physical, float32, (row, time, channel,
    *space).

    train: the solution; num_moving: its first channels, which are predicted (0: all), the others are constant
    in time and are inputs; steady tasks have one frame and `train_inputs` (row, 1, channel, *space).
    normalise, denormalise: physical to normalised fields and back; offset: what to add to a normalised
    channel to make it proportional to the physical one (mean / std), for relative losses. symmetry: makes a
    random move of normalised fields (batch, time, channel, *space) that maps solutions to solutions."""

    name: str
    ndim: int
    boundary: str
    is_steady: bool
    context: int
    train: Tensor
    train_parameters: Tensor
    normalise: Callable[[Tensor], Tensor]
    denormalise: Callable[[Tensor], Tensor]
    offset: Tensor
    train_inputs: Tensor | None = None
    normalise_inputs: Callable[[Tensor], Tensor] | None = None
    symmetry: Callable[[torch.Generator], Callable[[Tensor], Tensor]] | None = None
    num_moving: int = 0


@dataclass
class Trained:
    """A trained model and what it cost.

    predict(given, parameters, num_steps): physical fields (batch, num_steps, channel, *space) after the
    context frames `given` (batch, context, channel, *space), or (steady) from the coefficient, with num_steps
    1. seconds: of the budget spent. history: validation error at every point where weights could be selected.
    predict_base: of ours, by its base alone."""

    predict: Callable[[Tensor, Tensor, int], Tensor]
    num_parameters: int = 0
    steps: int = 0
    step_ms: float = float("nan")
    seconds: float = 0.0
    history: list[dict] = dataclasses.field(default_factory=list)
    predict_base: Callable[[Tensor, Tensor, int], Tensor] | None = None

    def costs(self) -> dict[str, Any]:
        """Return what is kept of a training beside its scores. validation: at its end, inf if it diverged."""
        found = {name: getattr(self, name) for name in COSTS}
        return found | {"validation": best_error(self)}


COSTS = ("num_parameters", "steps", "step_ms", "seconds")


def best_error(run: Trained) -> float:
    """Return the validation error at the end of a training; inf if it diverged."""
    return min(point["val"] if math.isfinite(point["val"]) else math.inf for point in run.history)


def channels_last(u: Tensor, ndim: int) -> Tensor:
    """(..., channel, *space) to (..., *space, channel), contiguous."""
    return u.movedim(-ndim - 1, -1).contiguous()


class ParameterScale:
    """log parameters, centred and scaled on the training rows; constant and repeated columns are dropped."""

    def __init__(self, parameters: Tensor):
        values = parameters.double()
        self.is_log = bool(values.numel()) and bool((values > 0).all())
        values = self._map(values)
        self.columns = [
            i
            for i in range(values.shape[1])
            if float(values[:, i].max() - values[:, i].min()) > 1e-9
            and not any(torch.allclose(values[:, i], values[:, j]) for j in range(i))
        ]
        self.mean = values[:, self.columns].mean(0)
        self.std = (values[:, self.columns] - self.mean).square().mean(0).sqrt()

    def _map(self, values: Tensor) -> Tensor:
        return values.log() if self.is_log else values

    def __call__(self, parameters: Tensor) -> Tensor:
        values = self._map(parameters.double())[:, self.columns]
        return ((values - self.mean.to(values.device)) / self.std.to(values.device)).float()


# ---- training ----------------------------------------------------------------------------------------------


# cpu: processor seconds of one thread, the same on a busy machine as on an idle one; wall: where a GPU
# computes
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


class Stopwatch:
    """Seconds of `clock`, without the time inside a `with` of it."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.start = clock, clock()

    def __call__(self) -> float:
        return self.clock() - self.start

    def __enter__(self) -> Stopwatch:
        self.entered = self.clock()
        return self

    def __exit__(self, *_) -> None:
        self.start += self.clock() - self.entered


class Training:
    """A training that ends before the first step that would not fit into its budget of seconds, and the
    weights that validation prefers of those at the CHECKPOINTS and at the end. Validation is not timed.

    validate: returns the error, lower is better, and what else of it is kept. snapshot: a copy of the
    weights. enough: an error that ends the training.
    """

    def __init__(
        self,
        budget_seconds: float,
        watch: Stopwatch,
        validate: Callable[[], dict[str, float]],
        snapshot: Callable[[], Any],
        enough: float = -math.inf,
    ):
        self.budget, self.watch = budget_seconds, watch
        self.validate, self.snapshot, self.enough = validate, snapshot, enough
        self.times: list[float] = []
        self.history: list[dict[str, float]] = []
        self.error, self.weights = math.inf, None

    def shares(self, is_done: bool = False) -> Iterator[float]:
        """Yield the spent fraction of the budget before every step. is_done: there is nothing to train."""
        due = list(CHECKPOINTS)
        while not is_done:
            begun = self.watch()
            if begun + max(self.times[-5:], default=0.0) > self.budget:
                break
            if due and begun >= due[0] * self.budget:
                self.look(due.pop(0))
                if self.error <= self.enough:
                    return
            yield begun / self.budget
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(self.watch() - begun)
        self.look(1.0)

    def look(self, share: float) -> None:
        with self.watch:
            found = self.validate()
            self.history.append({"share": share, "steps": len(self.times), **found})
            error = found["val"] if math.isfinite(found["val"]) else math.inf
            if self.weights is None or error < self.error:
                self.error, self.weights = error, self.snapshot()

    def trained(self, predict: Callable[..., Tensor], num_parameters: int, **more: Any) -> Trained:
        step_ms = 1e3 * sorted(self.times)[len(self.times) // 2] if self.times else float("nan")
        found = {"history": self.history, **more}
        return Trained(predict, num_parameters, len(self.times), step_ms, self.watch(), **found)


def learning_rate(share: float, settings: Settings) -> float:
    """Return the learning rate at a fraction of the budget: linear warm-up, constant, linear to zero."""
    fall = min(1.0, (1.0 - share) / (1.0 - DECAY_START))
    return settings.lr * min(1.0, share / WARM_UP, max(fall, 0.0))


class Trainer:
    """One training run of one rival; see `train`."""

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        seed: int,
        device: str = "cpu",
        network: Callable[..., nn.Module] = Rival,
    ):
        self.problem, self.settings, self.device = problem, settings, torch.device(device)
        p, s, ndim = problem, settings, problem.ndim
        if s.history > p.context and not p.is_steady:
            raise ValueError(
                f"history is {s.history}; expected at most the {p.context} context frames. "
                f"Lower {s.network}.history."
            )
        torch.manual_seed(seed)
        self.random = torch.Generator().manual_seed(seed)
        self.u = channels_last(p.normalise(p.train), ndim).to(self.device)
        self.inputs = (
            channels_last(p.normalise_inputs(p.train_inputs), ndim).to(self.device) if p.is_steady else None
        )
        self.scale_parameters = ParameterScale(p.train_parameters)
        self.parameters = self.scale_parameters(p.train_parameters).to(self.device)
        self.offset = p.offset.to(self.device)
        num_channels = self.u.shape[-1]
        self.num_moving = p.num_moving or num_channels
        self.first = max(0, p.context - s.history) if s.is_scored_only and not p.is_steady else 0
        if p.is_steady:
            self.change = torch.ones(num_channels, device=self.device)
            in_channels = self.inputs.shape[-1]
        else:
            difference = self.u[:, self.first :].diff(dim=1)
            self.change = self.moving(difference).pow(2).flatten(0, -2).mean(0).sqrt().clamp(min=1e-12)
            in_channels = num_channels * s.history
        # starts from persistence (steady: from the mean field), as its output is zero
        self.net = network(
            in_channels,
            self.parameters.shape[1],
            self.num_moving,
            tuple(self.u.shape[2:-1]),
            p.boundary,
            s,
        ).to(self.device)
        is_real = all(x.is_floating_point() for x in self.net.parameters())  # fused updates are for such
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=s.lr, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.95), fused=is_real
        )

    def advance(self, window: Tensor, parameters: Tensor) -> Tensor:
        """The frame after `window` (batch, history, *space, channel); steady: the solution, `window` holds
        the coefficient."""
        with autocast("bf16", self.device):
            y = self.net(window.movedim(1, -2).flatten(-2), parameters)
        if self.problem.is_steady:
            return y.float()
        last = window[:, -1]
        return torch.cat((self.moving(last) + self.change * y.float(), last[..., self.num_moving :]), -1)

    def moving(self, u: Tensor) -> Tensor:
        """Return the predicted channels of fields (..., channel)."""
        return u[..., : self.num_moving]

    def batch(self, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return augmented window (batch, history, ...), targets (batch, num_steps, ...) and parameters."""
        p, s = self.problem, self.settings
        rows = torch.randint(len(self.u), (s.batch_size,), generator=self.random)
        if p.is_steady:
            window, targets = self.inputs[rows], self.u[rows]
        else:
            length = s.history + num_steps
            starts = torch.randint(
                self.first, self.u.shape[1] - length + 1, (s.batch_size,), generator=self.random
            )
            frames = starts[:, None] + torch.arange(length)
            ends = along(p.boundary, p.ndim)
            if PERIODIC in ends:
                index = [rows.view(-1, 1, *[1] * p.ndim), frames.view(*frames.shape, *[1] * p.ndim)]
                for axis, size in enumerate(self.u.shape[2:-1]):
                    shift = torch.randint(
                        size if ends[axis] == PERIODIC else 1, (s.batch_size, 1), generator=self.random
                    )
                    cells = (torch.arange(size) + shift) % size
                    index.append(cells.view(-1, 1, *[1] * axis, size, *[1] * (p.ndim - axis - 1)))
            else:
                index = [rows[:, None], frames]
            index = tuple(i.to(self.device) for i in index)
            chosen = self.u[index]
            window, targets = chosen[:, : s.history], chosen[:, s.history :]
        if p.symmetry is not None:
            move = p.symmetry(self.random)
            window, targets = (move(u.movedim(-1, 2)).movedim(2, -1) for u in (window, targets))
        return window, targets, self.parameters[rows.to(self.device)]

    def loss(self, pred: Tensor, target: Tensor, before: Tensor | None) -> Tensor:
        """Settings.loss of one frame, (batch, *space, channel); `before` is the true frame a step earlier."""
        space = tuple(range(1, pred.ndim - 1))
        pred, target, before = (None if u is None else self.moving(u) for u in (pred, target, before))
        error = ((pred - target) / self.change).pow(2)
        if self.settings.loss == "mse":
            return error.mean()
        if self.settings.loss == "change" and before is not None:
            size = ((target - before) / self.change).pow(2).mean(space) + CHANGE_FLOOR**2
        else:
            size = ((target + self.moving(self.offset)) / self.change).pow(2).mean(space)
        return (error.mean(space).mean(-1) / size.mean(-1).clamp(min=1e-12)).sqrt().mean()

    def step(self, share: float) -> None:
        """Make one update; share: spent fraction of the budget."""
        s = self.settings
        num_steps = 2 if share >= 1 - s.unroll_fraction and not self.problem.is_steady else 1
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(share, s)
        window, targets, parameters = self.batch(num_steps)
        total, before = 0.0, None if self.problem.is_steady else window[:, -1]
        for k in range(num_steps):
            pred = self.advance(window, parameters)
            total = total + self.loss(pred, targets[:, k], before)
            window = torch.cat((window[:, 1:], pred[:, None]), 1) if k + 1 < num_steps else window
            before = targets[:, k]
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        if bool(torch.isfinite(norm)):
            self.optimizer.step()

    @torch.no_grad()
    def predict(self, given: Tensor, parameters: Tensor, num_steps: int) -> Tensor:
        """See Trained.predict."""
        p = self.problem
        normalise = p.normalise_inputs if p.is_steady else p.normalise
        window = channels_last(normalise(given), p.ndim).to(self.device)
        constant = self.scale_parameters(parameters).to(self.device)
        history = 1 if p.is_steady else self.settings.history

        u = rollout(lambda shown, _: self.advance(shown, constant)[:, None], window, num_steps, history)
        return p.denormalise(u.movedim(-1, 2).to(given.device))


def train(
    problem: Problem,
    settings: Settings,
    budget_seconds: float,
    seed: int,
    score: Callable[[Trained], float],
    clock: Callable[[], float] = time.process_time,
    device: str = "cpu",
    enough: float = -math.inf,
    network: Callable[..., nn.Module] = Rival,
) -> Trained:
    """Train one rival for `budget_seconds` of `clock` and return it with the weights that `score` (of the
    validation rows, lower is better; not counted in the budget) prefers among those at the CHECKPOINTS and
    the end.

    Normalising the data and building the network come before the budget; it ends before a step that would not
    fit, and where validation finds an error of at most `enough`."""
    trainer = Trainer(problem, settings, seed, device, network)
    net = trainer.net

    def validate() -> dict[str, float]:
        net.eval()
        error = score(Trained(trainer.predict))
        net.train()
        return {"val": error}

    def weights() -> dict[str, Tensor]:  # not `state_dict`, to which networks of neuraloperator add settings
        return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}

    training = Training(budget_seconds, Stopwatch(clock), validate, weights, enough)
    for share in training.shares():
        trainer.step(share)
    net.load_state_dict(training.weights, strict=False)
    net.eval()
    return training.trained(trainer.predict, sum(x.numel() for x in net.parameters()))
