"""The task, trajectories and window starts of every training step, as a pure function of (seed, step).

Every rank computes the same global batch and takes its shard, so ranks exchange nothing, a resumed run
continues exactly, and one process with batch B trains on what W processes with batch B/W train on.

Every task comes once per round, in an order that is shuffled anew for each round. An epoch of a task is a
permutation of its trajectories with one random window start for each; a batch that reaches the end of an
epoch continues with the next one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import LongTensor, Tensor

from ups_discovery.seeds import generator


@dataclass(frozen=True)
class Batch:
    """Rows of one task and the first frame of each window.

    rows, starts: (batch,); rows count the training trajectories of the task. step: of the training. offset:
    number of the first row within the global batch, so that random numbers can be drawn for the global batch
    on any number of ranks.
    """

    task: str
    rows: LongTensor
    starts: LongTensor
    step: int = 0
    offset: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def shard(self, rank: int, world: int) -> "Batch":
        """The rows of this batch that rank `rank` of `world` computes; the shards are disjoint and cover the
        batch."""
        assert 0 <= rank < world, (rank, world)
        rows = slice(rank * len(self) // world, (rank + 1) * len(self) // world)
        return Batch(self.task, self.rows[rows], self.starts[rows], self.step, rows.start)

    def within(self, rows: slice) -> slice:
        """The place in the global batch of the rows `rows` of this shard."""
        return slice(self.offset + rows.start, self.offset + min(rows.stop, len(self)))


class Schedule:
    """The global batch of every step.

    windows: task -> (number of training trajectories, number of window starts in each). batch_size: global;
    if it exceeds the trajectories of a task, epochs follow one another inside a batch. start_weights: task ->
    weight of each start, (starts,); None for equal weights. Raises ValueError for a task without trajectories
    or windows.
    """

    def __init__(
        self,
        windows: Mapping[str, Sequence[int]],
        batch_size: int,
        seed: int,
        start_weights: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        for task, (num_rows, num_starts) in windows.items():
            if num_rows < 1 or num_starts < 1:
                raise ValueError(
                    f"task {task} has {num_rows} training trajectories with {num_starts} windows each; "
                    f"expected at least one of each. Add trajectories or frames, or lower "
                    f"task.{task}.reserve or its history."
                )
        self.tasks = list(windows)
        self.windows, self.batch_size, self.seed = dict(windows), batch_size, seed
        self.start_weights = dict(start_weights or {})
        self._order = lru_cache(maxsize=4)(self._shuffle_tasks)
        self._epoch = lru_cache(maxsize=4 * len(self.tasks))(self._shuffle_rows)

    def batch(self, step: int) -> Batch:
        """The global batch of `step`."""
        assert step >= 0, step
        turn, place = divmod(step, len(self.tasks))
        task = self._order(turn)[place]
        num_rows = self.windows[task][0]
        first = turn * self.batch_size  # rows of the task in the rounds before
        last = first + self.batch_size
        epochs = range(first // num_rows, -(-last // num_rows))
        rows, starts = map(torch.cat, zip(*(self._epoch(task, epoch) for epoch in epochs), strict=True))
        chosen = slice(first - epochs[0] * num_rows, last - epochs[0] * num_rows)
        return Batch(task, rows[chosen], starts[chosen], step)

    def _shuffle_tasks(self, turn: int) -> list[str]:
        num = len(self.tasks)
        order = torch.randperm(num, generator=generator(self.seed, "round", num, turn))
        return [self.tasks[index] for index in order.tolist()]

    def _shuffle_rows(self, task: str, epoch: int) -> tuple[LongTensor, LongTensor]:
        num_rows, num_starts = self.windows[task]
        source = generator(self.seed, "epoch", task, epoch)
        order, weights = torch.randperm(num_rows, generator=source), self.start_weights.get(task)
        if weights is None:
            return order, torch.randint(num_starts, (num_rows,), generator=source)
        return order, torch.multinomial(weights, num_rows, replacement=True, generator=source)
