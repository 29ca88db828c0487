"""Numbers that stand for none without saying so: one value in many cells, far from all others, such as -9999,
1e20, or a 0 where the field is never near 0.

A plateau of a field is no such value: the numbers beside it lead up to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ups.tasks import Finding, Task

FAR = 2.5  # standard deviations of the other values, from the nearest of them
SAMPLED = 256  # values of each channel that are kept of a trajectory, for that deviation
LOOKED_AT = 8  # values of each channel, the farthest from others
DISTINCT = 16  # of them that differ, at least: phases and indicators have few values


class Extremes:
    """The smallest value, the largest and zero of each channel: how often it is there, how far the next."""

    def __init__(self, channels: Sequence[str], offsets: Mapping[str, float] | None = None):
        self.channels, self.offsets, self.count = tuple(channels), offsets or {}, 0
        self.kept: list[np.ndarray] = []
        self.found: list[dict[float, list[float]]] = [{} for _ in channels]  # value: [cells, distance]

    def add(self, u: np.ndarray) -> None:
        """Take in a trajectory u (T, channels, *space); NaN does not count."""
        channels = np.moveaxis(u, 1, 0).reshape(len(self.found), -1)
        self.count += channels.shape[1]
        self.kept.append(channels[:, :: max(1, channels.shape[1] // SAMPLED)])
        for values, found, name in zip(channels, self.found, self.channels, strict=True):
            values = values[~np.isnan(values)]
            zero = np.float32(-self.offsets.get(name, 0.0))
            for value in {values.min(), values.max(), zero} if len(values) else ():
                apart = np.abs(values[values != value] - value)
                cells = len(values) - len(apart)
                if cells > 1 or (cells and (value == zero or value in found or value == np.round(value))):
                    before = found.setdefault(float(value), [0, np.inf])
                    before[:] = before[0] + cells, min(before[1], float(apart.min(initial=np.inf)))

    def suspects(self) -> Iterator[tuple[str, float, int, float, float]]:
        """(channel, value, how often it is there, smallest and largest of the others) of such values."""
        for channel, name in enumerate(self.channels if self.kept else ()):
            sample = np.concatenate([part[channel] for part in self.kept])
            offset = self.offsets.get(name, 0.0)
            far = sorted(self.found[channel].items(), key=lambda item: -item[1][1])[:LOOKED_AT]
            for value, (cells, apart) in far:
                rest = sample[(sample != value) & np.isfinite(sample)].astype(np.float64)
                apart = min(apart, float(np.abs(rest - value).min(initial=np.inf)))
                if cells > 1 and len(np.unique(rest)) >= DISTINCT and FAR * rest.std() < apart < np.inf:
                    low, high = rest.min() + offset, rest.max() + offset
                    yield name, float(f"{value + offset:.6g}"), cells, low, high


def asked(task: Task) -> bool:
    """Whether values may stand for none without saying so: in files of the user, but where `nan` is named."""
    return task.user_facts is not None and "nan" not in task.user_facts.get("missing", ())


def suspects(data: Any, extremes: Extremes) -> list[Finding]:
    """What to ask about the numbers of a task's files."""
    key = f"task.{data.task.name}"
    return [
        Finding(
            "error",
            f"{name} is {value:g} in {cells} of {extremes.count} numbers and from {low:g} "
            f"to {high:g} in the others, so it seems to stand for none",
            str(data.path),
            f"write {key}.missing: {value:g}, and {key}.skip_missing: true if only some frames have "
            f"it; or {key}.missing: nan if it is a value of the field",
        )
        for name, value, cells, low, high in (extremes.suspects() if asked(data.task) else ())
    ]
