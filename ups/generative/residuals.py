"""Residuals: what a frozen operator leaves, under what a corrector is shown beside the operator's prediction
(ups/generative/conditions.py).

Residuals, which correctors, students and priors learn, are those of trajectories that the operator was not
trained on.

    in time   r = z_ref - O(z)
    steady    r = log u - log O(v_guess),  the solution u given a partly observed coefficient

v is the normalised coefficient, v_guess the linear guess of it from what was seen, O the frozen operator. The
solution of a diffusion equation with a positive source is positive, and where little is known its size varies
by factors: hence the logarithm. The diffusion's path begins at O(v_s), v_s drawn from the linear posterior of
which v_guess is the mean, with the operator's own error there (the conditional Gaussian of
ups/generative/corrector.py for v_s seen whole), or at white noise: ups/generative/selection.py. Where the
coefficient is Gaussian nothing is left to learn from there. A fully observed steady equation has one answer,
so calibration is judged on partial observations of a task whose exact posterior is known
(ups/evaluation/steady.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ups.common.seeds import generator
from ups.common.transfer import send
from ups.data.cache import Cache
from ups.data.schedule import Batch, Schedule
from ups.generative.conditions import SMALLEST, FieldConditions, StateConditions
from ups.generative.corrector import Condition, Corrector, Drawn
from ups.generative.diffusion import draw_angles
from ups.generative.observation import LinearPosterior, draw_levels, observe, row_generators
from ups.models.operator import Operator
from ups.models.windows import augment, stay, symmetry

FLOOR = 1e-3  # of a solution's mean: a guess is lifted to it before its logarithm is taken
SIZED = 64  # training solutions behind that mean
VALIDATION_BATCHES = 8
START_ROWS = 32  # trajectories from which the residual's size at each start is taken
DISTURBED, ALONE = 0.75, 0.1  # shares in training: with an error as a rollout's own; without what was before
LARGEST = 1.0  # of its size over that of a residual, which is log-uniform from SMALLEST on


class TransientResiduals(StateConditions):
    """Residuals along the trajectories of a cache: what a stage on the operator's errors is trained and
    validated on, as are `SteadyResiduals`.

    windows(split): (rows, starts), for `Schedule`. start_weights: what it draws window starts by in training;
    None: all alike. decode: residual latents to the field, linear. draw(split, places, starts, draw,
    is_disturbed): `Drawn` of rows `places` (positions in the split) and window starts; draw:
    augmentation, None: none; is_disturbed: as a network is trained, a state then may carry an error such as
    it has in a rollout of its own; is_begun: with where a draw begins, if that is not white noise.
    """

    def __init__(self, operator: Operator, cache: Cache):
        operator.head_for(cache)
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
        return torch.stack(
            [
                self.draw("reserved", places, torch.full((len(places),), start), None)[0]
                for start in range(num_starts)
            ]
        )

    def start_weights(self) -> Tensor:
        """Half of the windows start anywhere alike, half in proportion to the residual's size at that start.

        Which conditions are trained on does not change what is right for any of them, and where little is
        uncertain little can be learnt: with hidden parameters that is everywhere but in the first frames.
        """
        rms = self.left.square().flatten(1).mean(1).sqrt().double().cpu()
        if not bool(rms.isfinite().all()):
            frame = int((~rms.isfinite()).nonzero()[0]) + self.train_from
            raise ValueError(
                f"the residuals of {self.name} that start at frame {frame} are not finite; "
                "expected finite ones. Look at the data with the doctor, or train the operator "
                "again."
            )
        return 0.5 / len(rms) + 0.5 * rms / rms.sum().clamp_min(1e-30)

    def disturb(self, z: Tensor, starts: Tensor, sources: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """z (batch, frames, *tokens, dim) from window starts - 1 on, some rows with an error as a rollout's,
        and its size over a residual's, (batch,): one source a row.

        Half of them get what the operator leaves on that frame of another trajectory, moved along the tokens
        (an error with structure), half white noise as large (what a sampler leaves); frames of the context
        are exact. Trained without, a corrector answers the noise of its own draws with more of it. Of some
        that are exact the history alone is shown, which is all that a forecast may be given.
        """
        history, bundle = self.head.history, self.head.bundle
        z, ndim, errors = z.clone(), z.ndim - 3, torch.zeros(len(z))
        for row, source in enumerate(sources):
            is_clean, size, is_white, which = torch.rand(4, generator=source).tolist()
            shifts = [int(torch.randint(n, (), generator=source)) for n in self.left.shape[2 : 2 + ndim]]
            if is_clean >= 1 - ALONE:
                z[row, 0] = z[row, 1]
            if is_clean >= DISTURBED:
                continue
            for frame in range(z.shape[1]):
                call, part = divmod(int(starts[row]) - 1 + frame - history, bundle)  # that predicts it
                if call < 0:
                    continue
                error = self.left[min(call * bundle, len(self.left) - 1), int(which * self.left.shape[1])]
                error = error.unflatten(-1, (bundle, -1))[..., part, :].roll(shifts, tuple(range(ndim)))
                if is_white >= 0.5:
                    noise = send(torch.randn(error.shape, generator=source), error.device)
                    error = noise * error.square().flatten(0, -2).mean(0).sqrt()
                errors[row] = times = SMALLEST * (LARGEST / SMALLEST) ** size
                z[row, frame] += times * error
        return z, send(errors, z.device)

    @torch.no_grad()
    def draw(
        self,
        split: str,
        places: Tensor,
        starts: Tensor,
        draw: torch.Generator | None,
        is_disturbed: bool = False,
        is_begun: bool = False,
    ) -> Drawn:
        rows, history = self.cache.split[split][places], self.head.history
        frames = starts + self.train_from
        before = self.cache.batch(rows, (frames - 1).clamp_min(0), 1, self.device)  # or itself: no change
        z = torch.cat([before, self.cache.batch(rows, frames, history + self.head.bundle, self.device)], 1)
        parts = [(z, self.head.codec)]
        if self.head.task.forcing:  # from the frame before the last of the history on, as `predict` takes it
            parts.append(
                (
                    self.cache.forcing(rows, frames + history - 2, 2 + self.head.bundle, self.device),
                    self.head.forcing_codec,
                )
            )
        z, *forcing = [z for z, _ in parts] if draw is None else augment(self.head.task, parts, draw)
        seen, z_ref, error = z[:, : 1 + history], z[:, 1 + history :], 0.0
        if is_disturbed:
            keys = zip(places.tolist(), starts.tolist(), strict=True)
            seen, error = self.disturb(
                seen, starts, [generator(draw.initial_seed(), "disturb", *key) for key in keys]
            )
        parameters = self.head.parameter_batch(
            self.cache.parameters[rows], *[self.head.forcing_codec.decode(z_forcing) for z_forcing in forcing]
        )
        z_pred, tokens, facts = self.predict(seen, parameters, error)
        return Drawn(z_ref.movedim(1, -2).flatten(-2) - z_pred, tokens, facts)


class SteadyResiduals(FieldConditions):
    """Residuals of a steady task of a cache under random observations of its coefficient.

    linear: of a trained prior; None: fitted here to the cache's training fields. is_pushed: a draw may begin
    at a pushed one of the coefficient.
    """

    is_pushed = True

    def __init__(self, operator: Operator, cache: Cache, linear: LinearPosterior | None = None):
        head, self.cache = operator.head_for(cache), cache
        if linear is None:
            rows, device = cache.split["train"], head.scale.device
            codec = head.input_codec
            known = codec.decode(cache.inputs(rows, device)[:, 0])
            mean = head.physical(cache.batch(rows[:SIZED], 0, 1, device)).nanmean()
            draw = generator(0, "images")
            is_symmetric = symmetry(head.task, codec.space, draw) is not stay
            linear = LinearPosterior.fit(
                known,
                FLOOR * float(mean),
                (lambda v: symmetry(head.task, codec.space, draw)(v, codec)) if is_symmetric else None,
            )
        super().__init__(operator, cache.task.name, linear)

    def windows(self, split: str) -> tuple[int, int]:
        return len(self.cache.split[split]), 1

    def start_weights(self) -> None:
        return None

    def fields(self, split: str, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(coefficient latents (batch, 1, *tokens, dim_a), solution latents (batch, 1, *tokens, dim),
        parameters)."""
        rows = self.cache.split[split][places]
        return (
            self.cache.inputs(rows, self.device),
            self.cache.batch(rows, 0, 1, self.device),
            self.cache.parameters[rows],
        )

    @torch.no_grad()
    def draw(
        self,
        split: str,
        places: Tensor,
        starts: Tensor,
        draw: torch.Generator | None,
        is_disturbed: bool = False,
        is_begun: bool = False,
    ) -> Drawn:
        """Of rows `places` (positions in the split); draw: symmetry and observations, never None. is_begun:
        with one v_s a row, where a draw begins.

        is_disturbed changes nothing: no state is fed back.
        """
        z_in, z_ref, parameters = self.fields(split, places)
        z_in, z_ref = augment(self.head.task, [(z_in, self.head.input_codec), (z_ref, self.head.codec)], draw)
        v = self.head.input_codec.decode(z_in[:, 0])
        sources = row_generators(draw.initial_seed(), rows=places.tolist())
        observation = observe(v, draw_levels(v.shape[2:], sources), sources)
        is_begun &= self.is_pushed
        noise = torch.stack([torch.randn(1, *self.noise_shape, generator=source) for source in sources])
        guess, tokens, facts, start = self.predict(
            observation, parameters, send(noise, v.device) if is_begun else None
        )
        return Drawn(
            self.logarithm(self.head.physical(z_ref[:, 0])) - guess,
            tokens,
            facts,
            start if is_begun else None,
        )


Residuals = TransientResiduals | SteadyResiduals


def schedule_of(all_residuals: dict[str, Residuals], split: str, batch_size: int, seed: int) -> Schedule:
    """Batches of residuals: tasks in turn, starts by `start_weights`."""
    return Schedule(
        {name: r.windows(split) for name, r in all_residuals.items()},
        batch_size,
        seed,
        start_weights={name: r.start_weights() for name, r in all_residuals.items()},
    )


def validation(residuals: Residuals, seed: int, batch_size: int, is_begun: bool = False) -> list[Drawn]:
    """A fixed set of validation residuals, in batches."""
    schedule = schedule_of({residuals.name: residuals}, "val", batch_size, seed + 1)
    batches = [schedule.batch(step) for step in range(VALIDATION_BATCHES)]
    return [
        residuals.draw("val", batch.rows, batch.starts, generator(seed, "validation", i), is_begun=is_begun)
        for i, batch in enumerate(batches)
    ]


def held_out_of(
    all_residuals: dict[str, Residuals],
    seed: int,
    batch_size: int,
    ranks: Any,
    make: Callable[[str, int, Drawn], Any],
) -> dict[str, list]:
    """Task -> what make(task, number, drawn) makes of this rank's share of the numbered batches of
    `validation`."""
    return {
        name: [
            make(name, number, drawn)
            for number, drawn in enumerate(validation(source, seed, batch_size, True))
            if number % ranks.world == ranks.rank
        ]
        for name, source in all_residuals.items()
    }


@torch.no_grad()
def summed(held_out: dict[str, list], sums_of: Callable[[str, Any], Tensor], size: int, ranks: Any) -> list:
    """For every task the sums (size,) over all ranks of sums_of(task, part) of what `held_out_of` gave, as
    numbers. A collective."""

    def local() -> Tensor:
        nothing = torch.zeros(size, dtype=torch.float64, device=ranks.device)
        return torch.stack(
            [
                sum((sums_of(name, part).double() for part in parts), nothing)
                for name, parts in held_out.items()
            ]
        )

    return ranks.reduce_sum(ranks.agreed(local, "validating")).tolist()


@dataclass(frozen=True)
class Noised:
    """Residuals r~ under their conditions, with a noise and an angle (in main memory) each. within: where
    their rows lie in the global batch."""

    condition: Condition
    r: Tensor
    noise: Tensor
    angle: Tensor
    within: slice


class Batches:
    """The reserved residuals of all tasks, in the global batches of a stage; of each this rank has a share.

    stream: of the random numbers, which are functions of (seed, step). ranks: rank and world. share: how many
    rows a rank has; largest: the first step of the task that takes most memory.
    """

    def __init__(
        self, residuals: dict[str, Residuals], size: int, seed: int, stream: str, ranks: Any, offset: int = 0
    ):
        self.residuals, self.size, self.seed, self.stream, self.ranks = residuals, size, seed, stream, ranks
        self.schedule = schedule_of(residuals, "reserved", size, seed + offset)
        self.largest = self.schedule.step_of_largest(
            {name: source.cache.frame_bytes for name, source in residuals.items()}
        )
        self.share = len(self.batch(0))

    def batch(self, step: int) -> Batch:
        """This rank's share of a step's batch."""
        return self.schedule.batch(step).shard(self.ranks.rank, self.ranks.world)

    def shown(self, network: Corrector, step: int, part: slice) -> tuple[Tensor, Condition, slice]:
        """(r~, its condition, where it lies in the global batch) of the rows `part` of the share."""
        batch = self.batch(step)
        drawn = self.residuals[batch.task].draw(
            "reserved",
            batch.rows[part],
            batch.starts[part],
            generator(self.seed, self.stream, "augment", step),
            is_disturbed=True,
            is_begun=True,
        )
        return *network.heads[batch.task].shown(*drawn), batch.within(part)

    def noise(self, like: Tensor, within: slice, step: int, noises: int = 1) -> Tensor:
        """`noises` of each row of `like` (rows, ...), which lie `within` the global batch of a step."""
        noise = torch.randn(
            self.size, noises, *like.shape[1:], generator=generator(self.seed, self.stream, "noise", step)
        )
        return send(noise[within].flatten(0, 1), like.device)

    def noised(self, network: Corrector, step: int, part: slice, noises: int = 1) -> Noised:
        """The rows `part` of the share, each under `noises` noises and as many angles."""
        r, condition, within = self.shown(network, step, part)
        again = torch.arange(len(r), device=r.device).repeat_interleave(noises)
        angle = draw_angles(
            self.size * noises,
            generator(self.seed, self.stream, "angle", step),
            network.heads[condition.name].largest,
        ).view(self.size, noises)
        condition, noise = condition.rows(again), self.noise(r, within, step, noises)
        return Noised(condition, r[again], condition.begin(noise), angle[within].flatten(), within)
