"""What each step sees: a task, trajectories and window starts, as a pure function of (seed, step).

Every rank computes the same global batch and takes its slice, so nothing is communicated, a resumed run
continues exactly, and 1 process x batch B sees what W processes x B/W see. An epoch of a task is a
permutation of its trajectories with one window start drawn per trajectory; a batch that reaches the end of an
epoch continues with the next one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import torch
from torch import LongTensor, Tensor

from ups.common.seeds import generator


@dataclass(frozen=True)
class Batch:
    """One task's trajectories `rows` and the first frame of each window, `starts`; both (batch,). offset: of
    a share's first row in the global batch, for draws that are made for all of it, whatever the number of
    processes."""

    task: str
    rows: LongTensor
    starts: LongTensor
    offset: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def share(self, rank: int, world: int) -> "Batch":
        """The slice of this batch that belongs to `rank` of `world` processes; the slices are disjoint and
        cover it."""
        assert 0 <= rank < world, (rank, world)
        part = slice(rank * len(self) // world, (rank + 1) * len(self) // world)
        return Batch(self.task, self.rows[part], self.starts[part], part.start)

    def within(self, part: slice) -> slice:
        """Where the rows `part` of this share lie in the global batch."""
        return slice(self.offset + part.start, self.offset + min(part.stop, len(self)))


class Schedule:
    """The global batch of every step.

    windows: task -> (training trajectories, window starts per trajectory). batch_size: global, may exceed the
    trajectories of a task (epochs then follow one another inside a batch). strategy: `balanced`, every task
    once per round, rounds shuffled; `proportional`, by number of trajectories; `temperature`, by
    trajectories^(1/temperature); `curriculum`, tasks ordered by `complexity` enter one after another at equal
    intervals, all of them within the first half of total_steps, balanced among those that are in.
    start_weights: task -> weight of each start, (starts,); equal if None. Raises ValueError for what
    cannot be scheduled.
    """

    def __init__(
        self,
        windows: Mapping[str, Sequence[int]],
        batch_size: int,
        seed: int,
        strategy: str = "balanced",
        temperature: float = 1.0,
        complexity: Mapping[str, float] | None = None,
        total_steps: int = 1,
        start_weights: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        for task, (num_rows, num_starts) in windows.items():
            if num_rows < 1 or num_starts < 1:
                raise ValueError(
                    f"task {task} has {num_rows} training trajectories with {num_starts} windows each; "
                    f"expected at least one of each. Add trajectories or frames, or lower "
                    f"task.{task}.reserve, its history or its bundle."
                )
        self.tasks = list(windows)
        self.windows, self.batch_size, self.seed = dict(windows), batch_size, seed
        self.strategy, self.total_steps = strategy, total_steps
        sizes = torch.tensor([self.windows[task][0] for task in self.tasks], dtype=torch.float64)
        weights = sizes ** (1.0 / temperature if strategy == "temperature" else 1.0)
        self._weights = (weights / weights.sum()).tolist()
        self.start_weights = dict(start_weights or {})
        self._entry = (
            sorted(self.tasks, key=lambda task: complexity[task]) if strategy == "curriculum" else self.tasks
        )
        # (task index, how many batches of it came before), for steps 0, 1, ...
        self._draws: list[tuple[int, int]] = []
        self._counts = [0] * len(self.tasks)
        self._epoch = lru_cache(maxsize=4 * len(self.tasks))(self._draw_epoch)

    def step_of_largest(self, sizes: Mapping[str, float]) -> int:
        """The first step of the task with the largest of `sizes`: what decides whether memory is enough."""
        largest = max(self.tasks, key=lambda task: sizes[task])
        return next(step for step in count() if self.task(step) == largest)

    def task(self, step: int) -> str:
        """The task of `step`."""
        return self.tasks[self._draw(step)[0]]

    def batch(self, step: int) -> Batch:
        """The global batch of `step`."""
        index, draw = self._draw(step)
        task, first = self.tasks[index], draw * self.batch_size
        num_rows, last = self.windows[task][0], first + self.batch_size
        epochs = range(first // num_rows, -(-last // num_rows))
        rows, starts = map(torch.cat, zip(*(self._epoch(task, epoch) for epoch in epochs), strict=True))
        part = slice(first - epochs[0] * num_rows, last - epochs[0] * num_rows)
        return Batch(task, rows[part], starts[part])

    def _draw(self, step: int) -> tuple[int, int]:
        assert step >= 0, step
        while len(self._draws) <= step:  # from step 0 always: the counts are then the same in a resumed run
            index = self._choose(len(self._draws))
            self._draws.append((index, self._counts[index]))
            self._counts[index] += 1
        return self._draws[step]

    def _choose(self, step: int) -> int:
        """Index of the task of `step`, given the counts before it."""
        if self.strategy in ("proportional", "temperature"):
            # Largest deficit against weight * (step + 1): after any number of steps every count is within
            # one or so of its share, where random draws would stray by its square root.
            return max(range(len(self.tasks)), key=lambda i: self._weights[i] * (step + 1) - self._counts[i])
        first, num_active = 0, len(self.tasks)
        if self.strategy == "curriculum":
            length = max(1, self.total_steps // (2 * len(self.tasks)))
            num_active = min(len(self.tasks), step // length + 1)
            first = (num_active - 1) * length
        turn, place = divmod(step - first, num_active)
        order = torch.randperm(num_active, generator=generator(self.seed, "round", num_active, turn))
        return self.tasks.index(self._entry[int(order[place])])

    def _draw_epoch(self, task: str, epoch: int) -> tuple[LongTensor, LongTensor]:
        num_rows, num_starts = self.windows[task]
        source = generator(self.seed, "epoch", task, epoch)
        order, weights = torch.randperm(num_rows, generator=source), self.start_weights.get(task)
        if weights is None:
            return order, torch.randint(num_starts, (num_rows,), generator=source)
        return order, torch.multinomial(weights, num_rows, replacement=True, generator=source)
