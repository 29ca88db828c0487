"""The data that an equation is identified from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from ups_discovery.units import FieldUnits


class Data(Protocol):
    """Films of states s of `FieldUnits`: trajectories, or windows of longer runs, in rows.

    seed, name: keys of the random streams. num_frames: of every row. is_cut: whether rows are
    windows of longer runs."""

    seed: int
    name: str

    @property
    def num_frames(self) -> int: ...

    @property
    def is_cut(self) -> bool: ...

    @property
    def units(self) -> FieldUnits: ...

    def rows(self, value: int) -> Tensor:
        """The rows of one parameter value."""

    def states(self, rows: Tensor, length: int, rng: torch.Generator) -> Tensor:
        """States (rows, up to `length` frames, C, *space), float64, of rows from random starts."""

    def films(self, rows: Tensor, max_values: int) -> Tensor:
        """States of all frames of some rows (films, time, C, *space), about `max_values` per channel; windows
        of a run are joined."""


@dataclass(frozen=True)
class Films:
    """`Data` of one parameter value in memory. s (films, time, C, *space), float64: states."""

    s: Tensor
    units: FieldUnits
    seed: int = 0
    name: str = "films"
    is_cut: bool = False

    @classmethod
    def of(cls, u: Tensor, positive: Sequence[int], seed: int) -> Self:
        """From u (films, time, C, *space) in any units. positive: channels without a value of 0 or less."""
        u = u.double().clone()
        u[:, :, positive] = u[:, :, positive].log()
        axes = [0, 1, *range(3, u.ndim)]
        units = FieldUnits.of(u.mean(axes), u.std(axes), positive)
        origin, size = (
            torch.tensor(values, dtype=torch.float64).view(-1, *[1] * (u.ndim - 3))
            for values in (units.origin, units.size)
        )
        s = (u - origin) / size
        s[:, :, positive] = u[:, :, positive] - size[positive].log()
        return cls(s, units, seed)

    @property
    def num_frames(self) -> int:
        return self.s.shape[1]

    def rows(self, value: int) -> Tensor:
        """All films."""
        return torch.arange(len(self.s))

    def states(self, rows: Tensor, length: int, rng: torch.Generator) -> Tensor:
        """See `Data`."""
        length = min(length, self.num_frames)
        starts = torch.randint(0, self.num_frames - length + 1, (len(rows),), generator=rng)
        windows = zip(rows.tolist(), starts.tolist(), strict=True)
        return torch.stack([self.s[row, start : start + length] for row, start in windows])

    def films(self, rows: Tensor, max_values: int) -> Tensor:
        """See `Data`; of long films the first frames."""
        frames = max(1, max_values // math.prod(self.s.shape[3:]))
        num_films = -(-frames // self.num_frames)
        return self.s[rows[:num_films], :frames]
