"""Residuals of a frozen operator: the data that correctors, students and priors are trained on.

    in time   r = z_ref - O(z)
    steady    r = log u - log O(v_guess),  the solution u given a partly observed coefficient

Residuals come from trajectories on which the operator was not trained. Each comes with the conditions that a
corrector gets beside the prediction (ups/generative/conditions.py).

v is the normalised coefficient, v_guess its best linear guess from the observation, O the frozen operator.
The solution of a diffusion equation with a positive source is positive, and its size varies by factors if
little is observed: hence the logarithm. The diffusion starts either from white noise or from O(v_s) plus the
operator's own error, where v_s is a sample of the linear posterior with mean v_guess
(ups/generative/prior_selection.py selects). If the coefficient is Gaussian, the second start already has the
exact distribution. A fully observed steady equation has one solution, so calibration is evaluated on partial
observations of a task with a known posterior (ups/evaluation/steady.py).
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ups.common.device import send
from ups.data.cache import Cache
from ups.data.schedule import Batch, Schedule
from ups.data.tokenizer import Tokenizer
from ups.generative.cell_posterior import CellPosterior
from ups.generative.conditions import SMALLEST, FieldConditions, StateConditions
from ups.generative.corrector import ResidualBatch
from ups.generative.linear_posterior import LinearPosterior
from ups.generative.observation import observe, row_generators, sample_levels
from ups.models.operator import Operator
from ups.models.windows import stay, symmetry
from ups.tasks import Task
from ups_discovery.seeds import generator

if TYPE_CHECKING:
    from ups.training.ranks import Ranks

LOG_FLOOR = 1e-3  # times the mean solution: the smallest value whose logarithm is taken
FLOOR_ROWS = 64  # training solutions behind that mean
VALIDATION_BATCHES = 8
EXAMPLE_ROWS = 32  # trajectories behind `TransientResiduals.examples`
WITHOUT_PAST = 0.1  # fraction of the training states without a frame before the history
LARGEST = 1.0  # of an added error over a residual, log-uniform from SMALLEST


def augmented(task: Task, latents: Sequence[tuple[Tensor, Tokenizer]], rng: torch.Generator) -> list[Tensor]:
    """The same random symmetry of several latents (batch, time, *tokens, dim) with their codecs."""
    move = symmetry(task, latents[0][1].space, rng)
    if move is stay:
        return [z for z, _ in latents]
    return [codec.encode(move(codec.decode(z), codec)) for z, codec in latents]


class TransientResiduals(StateConditions):
    """Residuals along the trajectories of a cache; same interface as `SteadyResiduals`.

    windows(split): (rows, starts), for `Schedule`. start_weights: sampling weights of the window starts in
    training; None: uniform. decode: residual latents to the field, linear. batch(...): a `ResidualBatch`.
    perturbed: fraction of the training states with an added error.
    """

    def __init__(self, operator: Operator, cache: Cache, perturbed: float = 0.0):
        operator.head_for(cache)
        super().__init__(operator, cache.task.name)
        self.cache, self.train_from, self.perturbed = cache, cache.settings.train_from, perturbed

    def windows(self, split: str) -> tuple[int, int]:
        num_starts = self.cache.num_frames - self.train_from - self.head.history
        return len(self.cache.split[split]), num_starts

    @cached_property
    def examples(self) -> Tensor:
        """Residuals of at most EXAMPLE_ROWS reserved trajectories, on the host: (starts, rows,
        *tokens, dim)."""
        num_rows, num_starts = self.windows("reserved")
        rows = torch.arange(num_rows)[:: max(1, num_rows // EXAMPLE_ROWS)][:EXAMPLE_ROWS]
        return torch.stack(
            [
                self.batch("reserved", rows, torch.full((len(rows),), start), None).r
                for start in range(num_starts)
            ]
        ).cpu()

    def start_weights(self) -> Tensor:
        """Sampling weights of the window starts: half uniform, half proportional to the RMS residual there.

        The conditional distribution to be learnt does not depend on which conditions are sampled. Where the
        residual is small there is little to learn: with hidden parameters everywhere but in the first frames.
        """
        rms = self.examples.square().flatten(1).mean(1).sqrt().double()
        if not bool(rms.isfinite().all()):
            frame = int((~rms.isfinite()).nonzero()[0]) + self.train_from
            raise ValueError(
                f"the residuals of {self.name} that start at frame {frame} are not finite; expected finite "
                "ones. Look at the data with the doctor, or train the operator again."
            )
        return 0.5 / len(rms) + 0.5 * rms / rms.sum().clamp_min(1e-30)

    def perturb(self, z: Tensor, starts: Tensor, rngs: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """(z with errors as in a rollout added to some rows, size of the errors over a residual's (batch,)).

        z: (batch, frames, *tokens, dim), the first frame being starts - 1; rngs: one per row. Context frames
        get no error. Half of the errors are the operator's residual at the same frame of another trajectory,
        shifted along the tokens (structured errors); half are white noise of the same variance (the error of
        a sampler). Without them, a corrector amplifies the noise of its own samples. Some rows lose the frame
        before the history, because a forecast may start from the history alone.
        """
        ndim, sizes, has_past = z.ndim - 3, torch.zeros(len(z)), torch.ones(len(z), dtype=torch.bool)
        errors = torch.zeros(z.shape)  # on the host, and sent at once
        for row, rng in enumerate(rngs):
            u_kind, u_size, u_noise, u_row = torch.rand(4, generator=rng).tolist()
            shifts = [int(torch.randint(n, (), generator=rng)) for n in self.examples.shape[2 : 2 + ndim]]
            has_past[row] = u_kind < 1 - WITHOUT_PAST
            if u_kind >= self.perturbed:
                continue
            size = SMALLEST * (LARGEST / SMALLEST) ** u_size
            for frame in range(z.shape[1]):
                start = int(starts[row]) - 1 + frame - self.head.history  # of the call that predicts it
                if start < 0:  # a context frame
                    continue
                error = self.examples[start, int(u_row * self.examples.shape[1])]
                error = error.roll(shifts, tuple(range(ndim)))
                if u_noise >= 0.5:
                    noise = torch.randn(error.shape, generator=rng)
                    error = noise * error.square().flatten(0, -2).mean(0).sqrt()
                errors[row, frame] = size * error
                sizes[row] = size
        errors, sizes, has_past = (send(values, z.device) for values in (errors, sizes, has_past))
        past = torch.where(has_past.view(-1, *[1] * (z.ndim - 2)), z[:, 0], z[:, 1])
        return torch.cat([past[:, None], z[:, 1:]], 1) + errors, sizes

    @torch.no_grad()
    def batch(
        self,
        split: str,
        positions: Tensor,
        starts: Tensor,
        rng: torch.Generator | None,
        is_perturbed: bool = False,
        has_start: bool = False,
    ) -> ResidualBatch:
        """Residuals of the windows that start at `starts` in the rows `positions` of a split.

        rng: of the augmentation; None: no augmentation. is_perturbed: with the errors of `perturb`. has_start
        changes nothing: samples of a state start from white noise.
        """
        rows, history = self.cache.split[split][positions], self.head.history
        frames = starts + self.train_from
        # a first frame is its own past: the change is then zero
        past = self.cache.batch(rows, (frames - 1).clamp_min(0), 1, self.device)
        z = torch.cat([past, self.cache.batch(rows, frames, history + 1, self.device)], 1)
        series = [(z, self.head.codec)]
        if self.head.task.forcing:  # `predict` needs it from the frame before the last of the history
            z_forcing = self.cache.forcing(rows, frames + history - 2, 3, self.device)
            series.append((z_forcing, self.head.forcing_codec))
        z, *forcing = [z for z, _ in series] if rng is None else augmented(self.head.task, series, rng)
        z_in, z_ref, error = z[:, : 1 + history], z[:, 1 + history :], 0.0
        if is_perturbed:
            keys = zip(positions.tolist(), starts.tolist(), strict=True)
            rngs = [generator(rng.initial_seed(), "disturb", *key) for key in keys]
            z_in, error = self.perturb(z_in, starts, rngs)
        parameters = self.head.parameter_batch(
            self.cache.parameters[rows], *[self.head.forcing_codec.decode(z_forcing) for z_forcing in forcing]
        )
        z_pred, tokens, facts = self.predict(z_in, parameters, error)
        return ResidualBatch(z_ref[:, 0] - z_pred, tokens, facts)


class SteadyResiduals(FieldConditions):
    """Residuals of a steady task of a cache under random observations of its coefficient.

    posterior: of a trained prior; None: a linear one is fitted here to the training fields of the cache.
    """

    def __init__(
        self, operator: Operator, cache: Cache, posterior: LinearPosterior | CellPosterior | None = None
    ):
        head, self.cache = operator.head_for(cache), cache
        if posterior is None:
            rows, device, codec = cache.split["train"], head.scale.device, head.input_codec
            fields = codec.decode(cache.inputs(rows, device)[:, 0])
            mean = head.physical(cache.batch(rows[:FLOOR_ROWS], 0, 1, device)).nanmean()
            rng = generator(0, "images")
            is_symmetric = symmetry(head.task, codec.space, rng) is not stay
            posterior = LinearPosterior.fit(
                fields,
                LOG_FLOOR * float(mean),
                (lambda v: symmetry(head.task, codec.space, rng)(v, codec)) if is_symmetric else None,
            )
        super().__init__(operator, cache.task.name, posterior)

    def training_inputs(self, most: int | None = None) -> Tensor:
        """The coefficients of the training split and the reserved rows, normalised: (n, C, *space); the first
        `most`."""
        rows = torch.cat([self.cache.split[name] for name in ("train", "reserved")])[:most]
        return self.head.input_codec.decode(self.cache.inputs(rows, self.device)[:, 0])

    def windows(self, split: str) -> tuple[int, int]:
        return len(self.cache.split[split]), 1

    def start_weights(self) -> None:
        return None

    def fields(self, split: str, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(coefficient latents (batch, 1, *tokens, dim_a), solution latents (batch, 1, *tokens, dim),
        parameters (batch, P)) of the rows `positions` of a split."""
        rows = self.cache.split[split][positions]
        return (
            self.cache.inputs(rows, self.device),
            self.cache.batch(rows, 0, 1, self.device),
            self.cache.parameters[rows],
        )

    @torch.no_grad()
    def batch(
        self,
        split: str,
        positions: Tensor,
        starts: Tensor,
        rng: torch.Generator,
        is_perturbed: bool = False,
        has_start: bool = False,
    ) -> ResidualBatch:
        """Residuals of the rows `positions` of a split under random observations.

        rng: of the augmentation and the observations. has_start: with one v_s per row, from which its sample
        starts. starts and is_perturbed change nothing: a steady solution has one frame and is not fed back.
        """
        z_in, z_ref, parameters = self.fields(split, positions)
        z_in, z_ref = augmented(
            self.head.task, [(z_in, self.head.input_codec), (z_ref, self.head.codec)], rng
        )
        v = self.head.input_codec.decode(z_in[:, 0])
        rngs = row_generators(rng.initial_seed(), rows=positions.tolist())
        observation = observe(v, sample_levels(v.shape[2:], rngs), rngs)
        has_start &= self.is_linear
        noise = torch.stack([torch.randn(1, *self.noise_shape, generator=row_rng) for row_rng in rngs])
        guess, tokens, facts, start = self.predict(
            observation, parameters, send(noise, v.device) if has_start else None
        )
        r = self.logarithm(self.head.physical(z_ref[:, 0])) - guess
        return ResidualBatch(r, tokens, facts, start if has_start else None)


Residuals = TransientResiduals | SteadyResiduals


def residual_schedule(
    all_residuals: dict[str, Residuals], split: str, batch_size: int, seed: int
) -> Schedule:
    """Schedule of residual batches: tasks alternate, window starts are sampled by `start_weights`."""
    return Schedule(
        {name: r.windows(split) for name, r in all_residuals.items()},
        batch_size,
        seed,
        start_weights={name: r.start_weights() for name, r in all_residuals.items()},
    )


# ---- validation


def validation_batches(
    residuals: Residuals, seed: int, batch_size: int, has_start: bool = False
) -> list[ResidualBatch]:
    """A fixed set of validation residuals, in batches."""
    schedule = residual_schedule({residuals.name: residuals}, "val", batch_size, seed + 1)
    batches = [schedule.batch(step) for step in range(VALIDATION_BATCHES)]
    return [
        residuals.batch(
            "val", batch.rows, batch.starts, generator(seed, "validation", i), has_start=has_start
        )
        for i, batch in enumerate(batches)
    ]


def validation_shard(
    all_residuals: dict[str, Residuals],
    seed: int,
    batch_size: int,
    ranks: "Ranks",
    make: Callable[[str, int, ResidualBatch], Any] | None = None,
) -> dict[str, list]:
    """Task -> (task, number, batch) of the `validation_batches` in this rank's shard, or `make` of these."""
    return {
        name: [
            make(name, number, batch) if make else (name, number, batch)
            for number, batch in enumerate(validation_batches(residuals, seed, batch_size, True))
            if number % ranks.world == ranks.rank
        ]
        for name, residuals in all_residuals.items()
    }


@torch.no_grad()
def sum_by_task(
    shard: dict[str, list], sums_of: Callable[[str, Any], Tensor], shape: int | tuple, ranks: "Ranks"
) -> Tensor:
    """For every task, sums_of(task, item), of this shape, added up over the items of all ranks' shards:
    (tasks, *shape), float64. A collective."""

    def local_sums() -> Tensor:
        zeros = torch.zeros(shape, dtype=torch.float64, device=ranks.device)
        return torch.stack(
            [sum((sums_of(name, item).double() for item in items), zeros) for name, items in shard.items()]
        )

    return ranks.reduce_sum(ranks.agreed(local_sums, "validating"))


# ---- training


class Batches:
    """The global training batches of a stage, of reserved residuals; every rank has a shard of each.

    stream: names the random numbers, which are functions of (seed, step). local_size: rows of a rank.
    """

    def __init__(
        self,
        residuals: dict[str, Residuals],
        size: int,
        seed: int,
        stream: str,
        ranks: "Ranks",
        offset: int = 0,
    ):
        self.residuals, self.size, self.seed, self.stream, self.ranks = residuals, size, seed, stream, ranks
        self.schedule = residual_schedule(residuals, "reserved", size, seed + offset)
        self.local_size = len(self.shard(0))

    def shard(self, step: int) -> Batch:
        """This rank's rows of a step's batch."""
        return self.schedule.batch(step).shard(self.ranks.rank, self.ranks.world)

    def read(self, step: int, rows: slice) -> tuple[str, ResidualBatch, slice]:
        """(task, residuals, place in the global batch) of `rows` of this rank's shard."""
        shard = self.shard(step)
        batch = self.residuals[shard.task].batch(
            "reserved",
            shard.rows[rows],
            shard.starts[rows],
            generator(self.seed, self.stream, "augment", step),
            is_perturbed=True,
            has_start=True,
        )
        return shard.task, batch, shard.within(rows)

    def noise(self, like: Tensor, within: slice, step: int, noises: int = 1) -> Tensor:
        """`noises` standard normal tensors for each row of `like` (rows, ...), the rows `within` the global
        batch: (rows * noises, ...)."""
        noise = torch.randn(
            self.size, noises, *like.shape[1:], generator=generator(self.seed, self.stream, "noise", step)
        )
        return send(noise[within].flatten(0, 1), like.device)
