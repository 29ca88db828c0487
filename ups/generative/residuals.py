"""Residuals of a frozen operator on trajectories it was not trained on: what the corrector and its student
learn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ups.config import DiffusionConfig, ModelConfig, SteadyConfig, to_dict
from ups.data.cache import Cache
from ups.data.schedule import Schedule
from ups.generative.conditions import StateConditions
from ups.generative.corrector import Corrector, CorrectorHead, fit_head
from ups.models.augment import augment
from ups.models.operator import Operator
from ups.seeds import generator
from ups.training.fitted import Fit

VALIDATION_BATCHES = 8
NATURAL_BATCHES = 16   # from which the marginal spread is taken
START_ROWS = 32        # trajectories from which the residual's size at each start is taken
DISTURBED = 0.75       # share of the states in training that carry an error as a rollout's own would
# its size over that of a residual, log-uniform; a sampler of a small run leaves some 5 %
SMALLEST, LARGEST = 0.01, 1.0


class Ranks(Protocol):
    """What a validation needs of the other processes; see ups/training/ranks.py."""

    rank: int
    world: int
    device: torch.device

    def agreed(self, function: Callable[[], Any], doing: str) -> Any:
        """function() on this rank; raises on every rank if it did on any."""

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks."""


class Residuals(Protocol):
    """The residuals of one task: description of its head, schedule of its rows, and the draw itself."""

    name: str
    cache: Cache
    description: dict[str, Any]

    def windows(self, split: str) -> tuple[int, int]:
        """(rows, starts) of a split, for `Schedule`."""

    def start_weights(self) -> dict[str, Tensor]:
        """What `Schedule` draws window starts by in training; empty: all alike."""

    def decode(self, r: Tensor) -> Tensor:
        """Residual latents (..., *tokens, dim) to the field; linear."""

    def draw(self, split: str, places: Tensor, starts: Tensor, draw: torch.Generator | None,
             is_disturbed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(r, tokens, facts) of rows `places` (positions in the split) and window starts; draw: augmentation,
        None: none.

        is_disturbed: as a network is trained. A state then may carry an error such as it has in a rollout of
        its own.
        """


class TransientResiduals(StateConditions):
    """Residuals along the trajectories of a cache."""

    def __init__(self, operator: Operator, cache: Cache):
        operator.serve(cache)
        super().__init__(operator, cache.task.name)
        self.cache, self.train_from = cache, cache.settings.train_from

    def windows(self, split: str) -> tuple[int, int]:
        num_starts = self.cache.num_frames - self.train_from - self.head.history - self.head.bundle + 1
        return len(self.cache.split[split]), num_starts

    @cached_property
    def left(self) -> Tensor:
        """What the operator leaves on some reserved trajectories: (starts, START_ROWS or fewer, *tokens,
        bundle * dim)."""
        num_rows, num_starts = self.windows("reserved")
        places = torch.arange(num_rows)[:: max(1, num_rows // START_ROWS)][:START_ROWS]
        return torch.stack([self.draw("reserved", places, torch.full((len(places),), start), None)[0]
                            for start in range(num_starts)])

    def start_weights(self) -> dict[str, Tensor]:
        """Half of the windows start anywhere alike, half in proportion to the residual's size at that start.

        Which conditions are trained on does not change what is right for any of them, and where little is
        uncertain little can be learnt: with hidden parameters that is everywhere but in the first frames.
        """
        rms = self.left.square().flatten(1).mean(1).sqrt().double().cpu()
        if not bool(rms.isfinite().all()):
            frame = int((~rms.isfinite()).nonzero()[0]) + self.train_from
            raise ValueError(f"the residuals of {self.name} that start at frame {frame} are not finite; "
                             "expected finite ones. Look at the data with the doctor, or train the operator "
                             "again.")
        weights = 0.5 / len(rms) + 0.5 * rms / rms.sum().clamp_min(1e-30)
        return {self.name: weights}

    def disturb(self, z: Tensor, starts: Tensor, sources: Sequence[torch.Generator]) -> Tensor:
        """z (batch, frames, *tokens, dim) from window starts - 1 on, some rows with an error as a rollout's:
        one source a row.

        Half of them get what the operator leaves on that frame of another trajectory, moved along the tokens
        (an error with structure), half white noise as large (what a sampler leaves); frames of the context
        are exact. Trained without, a corrector answers the noise of its own draws with more of it, and
        rollouts grow it.
        """
        history, bundle = self.head.history, self.head.bundle
        z, ndim = z.clone(), z.ndim - 3
        for row, source in enumerate(sources):
            is_clean, size, is_white, which = torch.rand(4, generator=source).tolist()
            shifts = [int(torch.randint(n, (), generator=source)) for n in self.left.shape[2 : 2 + ndim]]
            if is_clean >= DISTURBED:
                continue
            for frame in range(z.shape[1]):
                # that predicts the frame
                call, part = divmod(int(starts[row]) - 1 + frame - history, bundle)
                if call < 0:
                    continue
                error = self.left[min(call * bundle, len(self.left) - 1), int(which * self.left.shape[1])]
                error = error.unflatten(-1, (bundle, -1))[..., part, :].roll(shifts, tuple(range(ndim)))
                if is_white >= 0.5:
                    noise = torch.randn(error.shape, generator=source).to(error)
                    error = noise * error.square().flatten(0, -2).mean(0).sqrt()
                z[row, frame] += SMALLEST * (LARGEST / SMALLEST) ** size * error
        return z

    @torch.no_grad()
    def draw(self, split: str, places: Tensor, starts: Tensor, draw: torch.Generator | None,
             is_disturbed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        rows, history = self.cache.split[split][places], self.head.history
        frames = starts + self.train_from
        # the first frame itself: no change
        before = self.cache.batch(rows, (frames - 1).clamp_min(0), 1, self.device)
        z = torch.cat([before, self.cache.batch(rows, frames, history + self.head.bundle, self.device)], 1)
        if draw is not None:
            [z] = augment(self.head.task, [(z, self.head.codec)], draw)
        seen, z_ref = z[:, : 1 + history], z[:, 1 + history :]
        if is_disturbed:
            keys = zip(places.tolist(), starts.tolist(), strict=True)
            seen = self.disturb(seen, starts,
                                [generator(draw.initial_seed(), "disturb", *key) for key in keys])
        z_pred, tokens, facts = self.predict(seen, self.head.known(self.cache.parameters[rows]))
        return z_ref.movedim(1, -2).flatten(-2) - z_pred, tokens, facts


def schedule_of(all_residuals: dict[str, Residuals], split: str, batch_size: int, seed: int) -> Schedule:
    """Batches of residuals: tasks in turn, starts by `start_weights`."""
    weights = {name: value for residuals in all_residuals.values()
               for name, value in residuals.start_weights().items()}
    return Schedule({name: r.windows(split) for name, r in all_residuals.items()}, batch_size, seed,
                    start_weights=weights)


def validation(residuals: Residuals, seed: int, batch_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A fixed set of validation residuals, in batches."""
    schedule = schedule_of({residuals.name: residuals}, "val", batch_size, seed + 1)
    batches = [schedule.batch(step) for step in range(VALIDATION_BATCHES)]
    return [residuals.draw("val", batch.rows, batch.starts, generator(seed, "validation", i))
            for i, batch in enumerate(batches)]


def corrector_of(residuals: dict[str, Residuals], model: ModelConfig, precision: str,
                 sampler_steps: int) -> Corrector:
    """An untrained corrector; sampler_steps: it will be drawn with."""
    return Corrector({"model": to_dict(model), "precision": precision, "sampler_steps": sampler_steps,
                      "tasks": [source.description for source in residuals.values()]})


def scale_fits(residuals: dict[str, Residuals], section: DiffusionConfig | SteadyConfig,
               seed: int) -> dict[str, Callable[[], Fit]]:
    """Task -> the fit of its head: (statistics of `fit_head`, weights)."""
    return {name: partial(_fit_scale, source, section, seed) for name, source in residuals.items()}


def _fit_scale(residuals: Residuals, section: DiffusionConfig | SteadyConfig, seed: int) -> Fit:
    steps, batch_size = section.scale_steps, section.train.batch_size
    torch.manual_seed(generator(seed, "scale", residuals.name).initial_seed())
    head = CorrectorHead(residuals.description, section.model).to(residuals.device)
    schedule = schedule_of({residuals.name: residuals}, "reserved", batch_size, seed + 2)
    anywhere = Schedule({residuals.name: residuals.windows("reserved")}, batch_size, seed + 6)

    def draw(step: int) -> tuple[Tensor, Tensor, Tensor]:
        # statistics: batches after those that are fitted
        batch = schedule.batch(step if step >= 0 else steps - step)
        return residuals.draw("reserved", batch.rows, batch.starts,
                              generator(seed, "scale", residuals.name, step), step >= 0)

    natural = [residuals.draw("reserved", batch.rows, batch.starts,
                              generator(seed, "natural", residuals.name, i))[0]
               for i, batch in enumerate(anywhere.batch(i) for i in range(NATURAL_BATCHES))]
    r = torch.cat(natural).flatten(0, -2)
    head.marginal_mean.copy_(r.mean(0))
    head.marginal_std.copy_(r.std(0))
    facts = fit_head(head, draw, validation(residuals, seed, batch_size), steps, section.optim,
                     (residuals.windows("reserved")[0], residuals.windows("val")[0]))
    kept = ("r_mean", "r_std", "c_mean", "c_std", "largest_std", "marginal", "gaussian")
    return facts, {name: value for name, value in head.state_dict().items() if name.startswith(kept)}


def put_scales(corrector: Corrector, fits: dict[str, Fit], least_ratio: float,
               largest_std: float) -> dict[str, dict]:
    """Fill the heads of `corrector`; task -> the statistics. Raises as `refuse`."""
    for name, (facts, weights) in fits.items():
        corrector.heads[name].load_state_dict(weights, strict=False)
        refuse(name, facts, least_ratio, largest_std)
    return {name: facts for name, (facts, _) in fits.items()}


def refuse(name: str, facts: dict[str, float], least: float, largest: float) -> None:
    """Raise ValueError for residual statistics that would make a corrector dishonest: the operator is better
    where the corrector trains (it was trained there), or whitening does not carry over to validation."""
    # and so by more than chance: two standard errors below no difference
    is_small = facts["ratio"] < least and facts["ratio"] * (1 + 2 * facts["ratio_error"]) < max(1.0, least)
    if is_small or not math.isfinite(facts["ratio"]):
        raise ValueError(f"the operator's residuals of {name} where the corrector trains are "
                         f"{facts['ratio']:.3f} times those of validation (standard error "
                         f"{facts['ratio_error']:.3f}); expected at least {least} "
                         "(diffusion.min_residual_ratio): it would learn too small a spread. Reserve "
                         f"trajectories with task.{name}.reserve and train the operator again.")
    error = 2 * facts["std_val_error"]
    # false for NaN
    is_near = facts["std_val"] - error <= largest and facts["std_val"] + error >= 1 / largest
    if not (0.95 <= facts["std_train"] <= 1.05 and is_near):
        raise ValueError(f"the whitened residual of {name} has a standard deviation of "
                         f"{facts['std_train']:.3f} in training and {facts['std_val']:.3f} (standard error "
                         f"{facts['std_val_error']:.3f}) in validation; expected 0.95 to 1.05 and "
                         f"{1 / largest:.2f} to {largest} (diffusion.max_whitened_std). Reserve more "
                         f"trajectories (task.{name}.reserve) or lower scale_steps.")


def require_tasks(names: Sequence[str], stage: str) -> None:
    """Raise ValueError where no task has trajectories for a stage on the operator's errors."""
    if not names:
        raise ValueError(f"no task for stage {stage} has reserved trajectories; expected task.TASK.reserve "
                         "above 0 for at least one of data.tasks. Set it and train the operator again.")

