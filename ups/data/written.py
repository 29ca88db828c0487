"""Whether all of a trajectory was written. What a simulation did not reach reads as zeros, or as whatever an
array was filled with before; the room that a file takes does not show it.

A field may be the same in every cell for good reasons: a fluid at rest, a wall, a field that is zero, a state
that decayed. It gets there by steps such as those before. Numbers that were never written begin with a jump:
a frame, or some of its cells, becomes one number in a single step that is JUMP times those before.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ups.tasks import Task
from ups.userdata.masks import settled

JUMP = 3.0  # times the largest of the steps before; of resolved fields the next is 1 to 1.5 times it
REST_JUMP = 5.0  # times the largest of the steps after: a flow that is set in motion slows down
STEPS = 4  # that a step is compared with
SHARE = 1 / 16  # of the cells of a frame: fewer may be a small structure that leaves
NEGLIGIBLE = 1e-3  # of a field's variation: no jump
LIKE = 0.9  # of the usual variation, in a frame before zeros: fields that fade have less
DO = (
    "Write it again, or leave it out of the file (the last frames or trajectories: task.{}.num_frames or "
    "num_trajectories)"
)
Block = tuple[int, np.ndarray, range, np.ndarray]  # file, trajectories, frames, values


class Written:
    """Takes in one trajectory after the other, each in frames that follow one another, and says what of it
    was never written. source: gives frames again (`Trajectories.read`)."""

    def __init__(self, task: Task, source: Any):
        self.task, self.source = task, source
        self.channels = slice(len(task.inputs), len(task.inputs) + len(task.moving))
        # what a stored zero is, counted from the field's offset
        self.zeros = np.float32([-task.offsets.get(name, 0.0) + 0.0 for name in task.moving])
        self.starts: list[tuple[int, int]] = []  # (trajectory, its frames of zeros before a jump)
        self.num_rows = 0
        self._begin()

    def _begin(self) -> None:
        self.equal, self.lost, self.values, self.last = [], [], [], None

    def add(self, row: int, u: np.ndarray) -> str:
        """Take in the next frames u (time, channel, *space) of trajectory `row`; returns what is wrong with
        it, once all its frames were given, else ""."""
        u = settled(u[:, self.channels].reshape(len(u), len(self.zeros), -1))
        low, high, is_zero = u.min(-1), u.max(-1), u == self.zeros[:, None]
        before = np.concatenate([is_zero[:1] if self.last is None else self.last, is_zero[:-1]])
        self.equal.append(low == high)
        self.values.append(low)
        self.lost.append(np.count_nonzero(is_zero & ~before, axis=-1) / u.shape[-1])
        self.last = is_zero[-1:]
        if sum(map(len, self.equal)) < self.source.num_frames:
            return ""
        equal, lost, values = map(np.concatenate, (self.equal, self.lost, self.values))
        self._begin()
        self.num_rows += 1
        if (equal & (values == values[0])).all():
            return "nothing but " + ", ".join(map(self._says, range(len(self.zeros)), values[0]))
        if equal.shape[0] > 1 and equal[0].all() and (values[0] == self.zeros).all():
            self._note_start(row, equal.all(1))
        for channel in range(len(self.zeros)):
            enters = ~equal[:-1, channel] & (equal[1:, channel] | (lost[1:, channel] >= SHARE))
            for frame in (np.flatnonzero(enters) + 1).tolist():
                if self._is_jump(row, channel, frame, equal[:, channel]):
                    is_whole = equal[frame, channel]
                    where = "every cell" if is_whole else f"{lost[frame, channel]:.0%} of the cells"
                    value = values[frame, channel] if is_whole else self.zeros[channel]
                    return (
                        f"{self._says(channel, value)} in {where} of frame {self._stored(frame)} and not "
                        "before"
                    )
        return ""

    def unstarted(self) -> tuple[int, str] | None:
        """After all trajectories, the first that begins with zeros where most do not, and what is wrong."""
        if not self.starts or 2 * len(self.starts) > self.num_rows:
            return None
        row, frames = self.starts[0]
        return row, f"zeros until frame {self._stored(frames - 1)}, as most others do not"

    def _says(self, channel: int, value: float) -> str:
        """A field and its value, counted from its offset, in words."""
        name = self.task.moving[channel]
        return f"{name} = {value + self.task.offsets.get(name, 0.0):g}"

    def _stored(self, frame: int) -> int:
        return self.source.first_frame + frame * self.source.time_stride

    def _frames(self, row: int, first: int, last: int) -> np.ndarray:
        u = self.source.read(row, row + 1, range(first, last))[0, :, self.channels]
        u = settled(u.reshape(last - first, len(self.zeros), -1))
        return u.swapaxes(0, 1).astype(np.float64)

    def _note_start(self, row: int, equal: np.ndarray) -> None:
        """Keep a trajectory that leaves a first state of zeros by more than any step that follows."""
        first = int(np.argmin(equal))
        steps = rms(np.diff(self._frames(row, first - 1, min(first + 1 + STEPS, len(equal))), axis=1)).max(0)
        if not len(steps[1:]) or steps[0] > REST_JUMP * steps[1:].max():
            self.starts.append((row, first))

    def _is_jump(self, row: int, channel: int, frame: int, equal: np.ndarray) -> bool:
        """Whether the step to `frame`, in which cells become equal, is of another kind than those before."""
        first = frame - 1
        while first > max(0, frame - 1 - STEPS) and not equal[first - 1]:
            first -= 1
        u = self._frames(row, first, frame + 1)[channel]
        step, before = u[-1] - u[-2], rms(np.diff(u[:-1], axis=0))
        variation = u[:-1].std(-1).max()
        most = before.max(initial=0.0)
        if rms(step) <= NEGLIGIBLE * variation:
            return False
        if not equal[frame]:
            is_lost = (u[-1] == self.zeros[channel]) & (u[-2] != self.zeros[channel])
            largest = np.sort(np.abs(np.diff(u[:-1], axis=0)))[:, -is_lost.sum() :]  # fronts jump, too
            return bool(
                len(before)
                and rms(step[is_lost]) > JUMP * rms(largest).max()
                and rms(step[~is_lost]) < 2 * most
            )
        is_like = u[-1, 0] == self.zeros[channel] and u[-2].std() >= LIKE * np.median(u[:-1].std(-1))
        return bool(is_like or (len(before) and rms(step) > JUMP * most))


def rms(u: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(u).mean(-1))


def written(task: Task, sources: Sequence[Any], stream: Iterable[Block]) -> Iterator[Block]:
    """The blocks of `stream`, all of all files. Raises ValueError for what was never written."""
    found: dict[int, Written] = {}
    for number, index, frames, u in stream:
        found.setdefault(number, Written(task, sources[number]))
        for row, values in zip(index.tolist(), u, strict=True):
            if problem := found[number].add(row, values):
                raise _unwritten(task, sources[number], row, problem)
        yield number, index, frames, u
    for number, one in found.items():
        if start := one.unstarted():
            raise _unwritten(task, sources[number], *start)


def _unwritten(task: Task, source: Any, row: int, problem: str) -> ValueError:
    return ValueError(
        f"{source.path}: trajectory {row} holds {problem}; expected a simulated field: this "
        f"was never written. {DO.format(task.name)}."
    )
