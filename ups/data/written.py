"""Detection of numbers that were never written: zeros, or whatever filled an array, where a simulation
stopped. The size of a file does not show them.

A field may be equal in all cells for good reasons: a fluid at rest, a wall, a zero field, a decayed state. It
gets there by steps like those before. Unwritten numbers begin with a jump: a frame, or a fraction of its
cells, turns into one number in a single step of JUMP times the size of those before.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ups.tasks import Task
from ups.userdata.masks import settled

JUMP = 3.0  # times the largest of the steps before; in resolved fields the next step is 1 to 1.5 times it
REST_JUMP = 5.0  # times the largest of the steps after; a flow that is set in motion slows down
STEPS = 4  # number of steps that a step is compared with
MIN_FRACTION = 1 / 16  # of the cells of a frame; fewer may be a small structure that leaves
NEGLIGIBLE = 1e-3  # a step below this fraction of a field's variation is no jump
USUAL = 0.9  # of the median variation; a frame before zeros that varies less belongs to a field that fades
DO = (
    "Write it again, or leave it out of the file (the last frames or trajectories: task.{}.num_frames or "
    "num_trajectories)"
)
Block = tuple[int, np.ndarray, range, np.ndarray]  # file, trajectories, frames, values


class Written:
    """Checks trajectories one by one, each in consecutive blocks of frames.

    source: `Trajectories`, from which frames are read again.
    """

    def __init__(self, task: Task, source: Any):
        self.task, self.source = task, source
        self.channels = slice(len(task.inputs), len(task.inputs) + len(task.moving))
        # stored zeros, minus the offset of the field
        self.zeros = np.float32([-task.offsets.get(name, 0.0) + 0.0 for name in task.moving])
        self.starts: list[tuple[int, int]] = []  # (trajectory, number of frames of zeros before a jump)
        self.num_rows = 0
        self._reset()

    def _reset(self) -> None:
        self.equal, self.lost, self.values, self.last = [], [], [], None

    def add(self, row: int, u: np.ndarray) -> str:
        """Add the next frames u (time, channel, *space) of trajectory `row`. After its last frame, returns
        what is wrong with it, "" if nothing."""
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
        self._reset()
        self.num_rows += 1
        if (equal & (values == values[0])).all():
            return "nothing but " + ", ".join(map(self._in_words, range(len(self.zeros)), values[0]))
        if equal.shape[0] > 1 and equal[0].all() and (values[0] == self.zeros).all():
            self._note_start(row, equal.all(1))
        for channel in range(len(self.zeros)):
            enters = ~equal[:-1, channel] & (equal[1:, channel] | (lost[1:, channel] >= MIN_FRACTION))
            for frame in (np.flatnonzero(enters) + 1).tolist():
                if self._is_jump(row, channel, frame, equal[:, channel]):
                    is_whole = equal[frame, channel]
                    where = "every cell" if is_whole else f"{lost[frame, channel]:.0%} of the cells"
                    value = values[frame, channel] if is_whole else self.zeros[channel]
                    return (
                        f"{self._in_words(channel, value)} in {where} of frame {self._stored(frame)} and not "
                        "before"
                    )
        return ""

    def unstarted(self) -> tuple[int, str] | None:
        """After all trajectories: the first one that begins with zeros while most do not, and the problem."""
        if not self.starts or 2 * len(self.starts) > self.num_rows:
            return None
        row, frames = self.starts[0]
        return row, f"zeros until frame {self._stored(frames - 1)}, as most others do not"

    def _in_words(self, channel: int, value: float) -> str:
        name = self.task.moving[channel]
        return f"{name} = {value + self.task.offsets.get(name, 0.0):g}"

    def _stored(self, frame: int) -> int:
        """The number of a frame in the file."""
        return self.source.first_frame + frame * self.source.time_stride

    def _frames(self, row: int, first: int, last: int) -> np.ndarray:
        """Frames first..last-1 of a trajectory, (channel, time, cell)."""
        u = self.source.read(row, row + 1, range(first, last))[0, :, self.channels]
        u = settled(u.reshape(last - first, len(self.zeros), -1))
        return u.swapaxes(0, 1).astype(np.float64)

    def _note_start(self, row: int, equal: np.ndarray) -> None:
        """Record a trajectory whose step away from zeros is larger than any step after it."""
        first = int(np.argmin(equal))
        steps = rms(np.diff(self._frames(row, first - 1, min(first + 1 + STEPS, len(equal))), axis=1)).max(0)
        if not len(steps[1:]) or steps[0] > REST_JUMP * steps[1:].max():
            self.starts.append((row, first))

    def _is_jump(self, row: int, channel: int, frame: int, equal: np.ndarray) -> bool:
        """Whether the step to `frame`, in which cells become equal, is unlike the steps before."""
        first = frame - 1
        while first > max(0, frame - 1 - STEPS) and not equal[first - 1]:
            first -= 1
        u = self._frames(row, first, frame + 1)[channel]
        step, before = u[-1] - u[-2], rms(np.diff(u[:-1], axis=0))
        largest_before = before.max(initial=0.0)
        if rms(step) <= NEGLIGIBLE * u[:-1].std(-1).max():
            return False
        if not equal[frame]:
            is_lost = (u[-1] == self.zeros[channel]) & (u[-2] != self.zeros[channel])
            # a front jumps too: compare with as many of the cells that changed most before
            largest = np.sort(np.abs(np.diff(u[:-1], axis=0)))[:, -is_lost.sum() :]
            return bool(
                len(before)
                and rms(step[is_lost]) > JUMP * rms(largest).max()
                and rms(step[~is_lost]) < 2 * largest_before
            )
        is_usual = u[-2].std() >= USUAL * np.median(u[:-1].std(-1))
        is_zeroed = u[-1, 0] == self.zeros[channel] and is_usual
        return bool(is_zeroed or (len(before) and rms(step) > JUMP * largest_before))


def rms(u: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(u).mean(-1))


def written(task: Task, sources: Sequence[Any], stream: Iterable[Block]) -> Iterator[Block]:
    """The blocks of `stream`, which are all trajectories of all `sources`, checked. Raises ValueError for
    numbers that were never written."""
    checks: dict[int, Written] = {}
    for number, index, frames, u in stream:
        check = checks.setdefault(number, Written(task, sources[number]))
        for row, values in zip(index.tolist(), u, strict=True):
            if problem := check.add(row, values):
                raise _unwritten(task, sources[number], row, problem)
        yield number, index, frames, u
    for number, check in checks.items():
        if start := check.unstarted():
            raise _unwritten(task, sources[number], *start)


def _unwritten(task: Task, source: Any, row: int, problem: str) -> ValueError:
    return ValueError(
        f"{source.path}: trajectory {row} holds {problem}; expected a simulated field: this "
        f"was never written. {DO.format(task.name)}."
    )
