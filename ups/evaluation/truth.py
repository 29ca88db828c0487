"""The reference of all scores: the evaluated trajectories of the data files, in physical units.

The operator, its baselines, ensembles and priors have the same truth. Decoded latents are no truth: a
truncated codec loses part of the field, and a model scored against them would be forgiven that part.
"""

import numpy as np
import torch
from torch import Tensor

from ups.config.schema import Config
from ups.data.build_cache import same_source
from ups.data.cache import Cache, open_cache
from ups.data.generate import solver_of
from ups.data.tokenizer import Tokenizer
from ups.models.head import TaskHead
from ups.userdata.trajectories import Trajectories

LAW_BYTES = 2**30  # memory of the exact samples that replace the data as the truth


def affordable(num_draws: int, num_bytes: int) -> int:
    """How many exact samples, of num_bytes each, fit into LAW_BYTES; at least 2."""
    return max(2, min(num_draws, LAW_BYTES // num_bytes))


class Truth:
    """The trajectories of one split of a task, read on demand.

    cache: of the same data (rows, parameters, input latents). source: the data files. context: number of
    input frames, which are not scored. most: trajectories at most, 0 for all. rows (n,): rows of the cache,
    the same initial conditions for every parameter value.
    """

    def __init__(self, cache: Cache, source: Trajectories, split: str, context: int, most: int = 0):
        self.cache, self.task, self.source = cache, cache.task, source
        self.split, self.context, self.rows = split, context, cache.split[split]
        if most:
            self.rows = self.rows[torch.argsort(cache.trajectory[self.rows], stable=True)[:most]]
        # trajectories of user data may be longer in this split than in training
        total = cache.num_frames if self.task.is_steady else source.frames_of(self.rows.tolist())
        self.num_frames = total - context
        if context and self.num_frames < 1:
            raise ValueError(
                f"{self.task.name} has {cache.num_frames} frames; expected more than "
                f"evaluate.context_frames = {context}. Lower evaluate.context_frames or keep more frames."
            )

    def _read(self, rows: Tensor, count: int = 0) -> Tensor:
        """Trajectories (n, T, channels, *space), float32, of `count` frames or as long as in training."""
        unique, where = rows.unique(return_inverse=True)
        frames = range(count) if count > self.cache.num_frames else None
        # rows that follow each other in a file are read together: to open the file takes longer than a row
        is_first = torch.cat([torch.ones(1, dtype=torch.bool), unique.diff() > 1])
        runs = unique.tensor_split(is_first.nonzero()[1:, 0])
        found = [self.source.read(int(run[0]), int(run[-1]) + 1, frames) for run in runs]
        return torch.from_numpy(np.concatenate(found))[where]

    def years(self, rows: Tensor, num_frames: int) -> Tensor | None:
        """The dates (n, num_frames) of the first frames, in years; None if the files hold no dates."""
        if self.source.years is None:
            return None
        years = self.source.years_of(rows.tolist(), num_frames)
        return None if years is None else torch.from_numpy(years)

    def inputs(self, rows: Tensor) -> Tensor:
        """The coefficient of a steady task (n, 1, C_in, *space)."""
        return self._read(rows)[:, :, : len(self.task.inputs)]

    def frames(self, rows: Tensor, first: Tensor | int, count: int) -> Tensor:
        """Frames first .. first + count - 1 (n, count, C, *space); first: per row, or one for all."""
        u = self._read(rows, int(torch.as_tensor(first).max()) + count)
        index = torch.arange(len(rows))[:, None]
        first_field, end = len(self.task.inputs), len(self.task.inputs + self.task.fields)
        return u[
            index, torch.as_tensor(first).expand(len(rows))[:, None] + torch.arange(count), first_field:end
        ]

    def draws(
        self, rows: Tensor, u: Tensor, numbers: Tensor, seed: int, num_frames: int, num_draws: int
    ) -> Tensor:
        """Exact futures (n, num_draws, num_frames, C, *space) of states u (n, C, *space) at the parameters of
        rows, in physical units; sample j is a function of seed, the state's number and j. Needs
        Task.has_known_law."""
        out = u.new_empty(len(u), num_draws, num_frames, *u.shape[1:])
        index = self.cache.parameter_index[rows]
        for place in index.unique().tolist():
            same, known = (index == place).nonzero()[:, 0], self.cache.settings.parameters
            out[same] = solver_of(self.task).exact_futures(
                u[same],
                num_draws,
                seed=seed,
                rows=numbers[same].tolist(),
                num_frames=num_frames,
                parameter=known[place] if known else None,
                dt=self.cache.dt,
            )
        return out

    def future(self, rows: Tensor, count: int = 0) -> Tensor:
        """The first `count` (0: all) scored frames of the scored fields (n, count, C, *space)."""
        return self.task.predicted(self.frames(rows, self.context, count or self.num_frames))

    def given(self, rows: Tensor, codec: Tokenizer) -> Tensor:
        """The input latents of a model with this codec: the context frames, or the coefficient of a steady
        task; from the cache if its codec is the same."""
        is_steady, device = self.task.is_steady, codec.mean.device
        if codec.is_same(self.cache.input_tokenizer if is_steady else self.cache.tokenizer):
            return self.cache.given(rows, self.context, device)
        u = self.inputs(rows) if is_steady else self.frames(rows, 0, self.context)
        return codec.encode(codec.normalise(u.to(device)))

    def forced(self, rows: Tensor, head: TaskHead, num_frames: int = 0) -> Tensor | None:
        """The forcing of the first `num_frames` (0: all) scored frames, as `TaskHead.forcing_of`, from the
        last input frame on. After the last frame of the data the first follows. None without forcing."""
        codec, count = head.forcing_codec, 1 + (num_frames or self.num_frames)
        total = self.context + self.num_frames
        is_longer = self.context - 1 + count > self.cache.num_frames < total
        if codec is None or (codec.is_same(self.cache.forcing_tokenizer) and not is_longer):
            return head.forcing_of(self.cache, rows, self.context - 1, count)
        frames = (self.context - 1 + torch.arange(count)) % total
        f = self._read(rows, total)[:, frames, -len(self.task.forcing) :]
        return codec.normalise(f.to(head.scale.device))

    def scored(self, rows: Tensor, codec: Tokenizer, count: int = 0) -> Tensor:
        """The latents of the first `count` (0: all) scored frames; from the cache if possible."""
        count, device = count or self.num_frames, codec.mean.device
        if codec.is_same(self.cache.tokenizer) and self.context + count <= self.cache.num_frames:
            return self.cache.batch(rows, self.context, count, device)
        return codec.encode(codec.normalise(self.frames(rows, self.context, count).to(device)))

    def one_of_each(self, count: int) -> Tensor:
        """At most `count` positions in the split, each of another initial condition, with parameter values in
        turn."""
        trajectory = self.cache.trajectory[self.cache.split[self.split]]
        alike = [(trajectory == start).nonzero()[:, 0] for start in trajectory.unique()[:count]]
        return torch.stack([places[turn % len(places)] for turn, places in enumerate(alike)])


def open_truth(config: Config, name: str) -> Truth:
    """The evaluated trajectories of a task. Raises ValueError if its data files differ from those of the
    cache."""
    cache, settings = open_cache(config, name), config.evaluate
    source = same_source(config, cache)
    return Truth(cache, source, settings.split, cache.context(config), settings.max_trajectories)
