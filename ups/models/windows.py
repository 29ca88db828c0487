"""The training batches of the operator: windows of trajectories under a random symmetry of the equation."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ups.config.schema import OperatorConfig, TaskConfig
from ups.data.cache import Cache
from ups.data.counts import most_calls
from ups.data.schedule import Batch, Schedule
from ups.data.tokenizer import Tokenizer
from ups.models.bases.base import ParameterBatch
from ups.models.head import TaskHead
from ups.tasks import Task
from ups_discovery.boundary import PERIODIC, along
from ups_discovery.seeds import generator

Move = Callable[[Tensor, Tokenizer], Tensor]  # maps normalised fields (..., C, *space) of a codec


def stay(w: Tensor, codec: Tokenizer) -> Tensor:
    """No symmetry."""
    return w


def symmetry(task: Task, space: Sequence[int], generator: torch.Generator) -> Move:
    """A random symmetry of the equation on a grid, or `stay` if it has none.

    A shift along periodic axes, if shifted solutions are solutions; a mirror image, if mirrored solutions
    are; on a cube also a permutation of the axes. The components of `task.vector` follow: they are permuted
    with the axes, and negated by a mirror.
    """
    axes, shifts, flips, order = list(range(-task.ndim, 0)), [], [], list(range(task.ndim))
    ends = along(task.boundary, task.ndim)
    if task.is_shifted and PERIODIC in ends:
        shifts = [
            int(torch.randint(0, n, (), generator=generator))
            if end == PERIODIC and axis not in task.fixed_axes
            else 0
            for n, end, axis in zip(space, ends, task.axes, strict=True)
        ]
    if task.is_symmetric:
        flips = [axis for axis in axes if bool(torch.randint(0, 2, (), generator=generator))]
        is_cube = len({*zip(space, ends, task.spans, strict=True)}) == 1
        order = torch.randperm(task.ndim, generator=generator).tolist() if is_cube else order
    if not shifts and not task.is_symmetric:
        return stay

    def move(w: Tensor, codec: Tokenizer) -> Tensor:
        w = torch.roll(w, shifts, axes) if shifts else w
        w = (w.flip(flips) if flips else w).movedim([axes[axis] for axis in order], axes)
        if not (task.vector and task.is_symmetric):
            return w
        channels, mean, std = [*w.unbind(-1 - task.ndim)], codec.mean.unbind(), codec.std.unbind()
        for vector in task.vectors_of(codec.fields):
            own_channels = [codec.fields.index(name) for name in vector]
            images = [
                (1 - 2 * (axis in flips)) * (channels[i] * std[i] + mean[i])
                for axis, i in zip(axes, own_channels, strict=True)
            ]
            for i, axis in zip(own_channels, order, strict=True):
                channels[i] = (images[axis] - mean[i]) / std[i]
        return torch.stack(channels, -1 - task.ndim)

    return move


def augment(
    task: Task, fields: Sequence[tuple[Tensor, Tokenizer]], generator: torch.Generator
) -> list[Tensor]:
    """The same random `symmetry` of several normalised fields (batch, time, C, *space) with their codecs,
    inside the subspaces of these.
    """
    move = symmetry(task, fields[0][1].space, generator)
    if move is stay:
        return [w for w, _ in fields]
    return [codec.projected(move(w, codec)) for w, codec in fields]


class Windows:
    """The training windows of all tasks, a function of (seed, step).

    schedule: the task, rows and window starts of each step. Raises ValueError for a task with too few frames
    to train on.
    """

    def __init__(
        self,
        caches: Mapping[str, Cache],
        tasks: Mapping[str, TaskConfig],
        settings: OperatorConfig,
        seed: int,
    ):
        self.caches, self.tasks, self.settings, self.seed = caches, tasks, settings, seed
        self.calls: dict[str, int] = {}
        self.odds: dict[tuple[str, int], Tensor] = {}  # of tasks with a user's solver, by length of windows
        windows = {}
        for name, cache in caches.items():
            task = tasks[name]
            # fewer calls in a row if the frames do not hold them: two frames train single calls
            calls = self.calls[name] = max(1, min(settings.unroll_steps, most_calls(task, cache.num_frames)))
            length = task.history + calls
            starts = 1 if cache.task.is_steady else cache.num_frames - task.train_from - length + 1
            windows[name] = (len(cache.split["train"]), starts)
        self.schedule = Schedule(windows, settings.train.batch_size, seed)

    def read(self, head: TaskHead, batch: Batch, shard_rows: slice) -> tuple[Tensor, Tensor, ParameterBatch]:
        """(u of the input frames, u_ref of the frames to predict, parameters) of some rows of this rank's
        shard of a batch; normalised fields.
        """
        cache, device = self.caches[batch.task], head.scale.device
        rows, starts, length = self._window(head, batch, shard_rows)
        rng = generator(self.seed, batch.step, "augment")
        if head.task.is_steady:
            fields = [
                (head.input_codec.decode(cache.inputs(rows, device)), head.input_codec),
                (head.codec.decode(cache.batch(rows, 0, 1, device)), head.codec),
            ]
            (u, u_ref), forcing = augment(head.task, fields, rng), None
        else:
            fields = [(head.codec.decode(cache.batch(rows, starts, length, device)), head.codec)]
            if head.task.forcing:
                fields.append((head.forcing_of(cache, rows, starts, length), head.forcing_codec))
            window, *forcings = augment(head.task, fields, rng)
            u, u_ref = window[:, : head.history], window[:, head.history :]
            forcing = forcings[0][:, head.history - 1 :] if forcings else None
        return u, u_ref, head.parameter_batch(cache.parameters[rows], forcing)

    def _window(self, head: TaskHead, batch: Batch, shard_rows: slice) -> tuple[Tensor, Tensor | int, int]:
        """(rows of the cache, first frames, number of frames) of some rows of a shard."""
        cache, task, settings = self.caches[batch.task], self.tasks[batch.task], self.settings
        rows, starts = batch.rows[shard_rows], batch.starts[shard_rows]
        if cache.task.is_steady:
            return cache.split["train"][rows], 0, 1
        # one call of the operator, or `self.calls` in a row in the last fraction of the training
        is_unrolled = batch.step >= (1 - settings.unroll_fraction) * settings.train.steps
        length = task.history + (self.calls[batch.task] if is_unrolled else 1)
        if head.base.is_user_solver:
            rows, starts = (some[batch.within(shard_rows)] for some in self._moving(head, batch.step, length))
        return cache.split["train"][rows], starts + task.train_from, length

    def _moving(self, head: TaskHead, step: int, length: int) -> tuple[Tensor, Tensor]:
        """Training rows and starts of a global batch of windows, drawn half evenly and half in proportion to
        the change of the first predicted frame, relative to the size of the state. There a solver errs, and
        later frames inherit the error."""
        if (head.name, length) not in self.odds:
            self.odds[head.name, length] = self._odds(head, length)
        odds, rng = self.odds[head.name, length], generator(self.seed, step, "windows")
        places = torch.rand(self.settings.train.batch_size, generator=rng, dtype=torch.float64)
        found = torch.searchsorted(odds.flatten(), places).clamp_max(odds.numel() - 1)
        return found // odds.shape[1], found % odds.shape[1]

    def _odds(self, head: TaskHead, length: int) -> Tensor:
        """Cumulated probabilities of the windows, (training rows, starts)."""
        first, changes = self.tasks[head.name].history - 1, self._changes(head)
        changes = changes[:, first : first + changes.shape[1] + 2 - length]  # one per window
        weights = 0.5 / changes.numel() + 0.5 * changes / changes.sum().clamp_min(1e-30)
        return (weights / weights.sum()).flatten().cumsum(0).view_as(weights)

    def _changes(self, head: TaskHead) -> Tensor:
        """RMS changes from each frame to the next over the size of the state, (training rows, frames - 1),
        from frame train_from on."""
        cache, found = self.caches[head.name], []
        for row in cache.split["train"]:
            u = head.codec.decode(cache.batch(row[None], 0, cache.num_frames, head.scale.device))[0]
            u = u[self.tasks[head.name].train_from :]
            found.append(u.diff(dim=0).flatten(1).square().mean(1).sqrt() / head.base.size(u[:-1, None]))
        return torch.stack(found).double().cpu()
