"""The data that an equation is identified from."""

from typing import Protocol

import torch
from torch import Tensor

from ups_discovery.units import FieldUnits


class Films(Protocol):
    """Films of states s of `FieldUnits`: trajectories, or windows of longer runs, in rows.

    seed, name: keys of the random streams. num_frames: of every row."""

    seed: int
    name: str
    num_frames: int

    @property
    def units(self) -> FieldUnits: ...

    def rows(self, value: int) -> Tensor:
        """The rows of one parameter value."""

    def states(self, rows: Tensor, length: int, rng: torch.Generator) -> Tensor:
        """States (rows, up to `length` frames, C, *space), float64, of rows from random starts."""

    def films(self, rows: Tensor, max_values: int) -> Tensor:
        """States of all frames of some rows (films, time, C, *space), about `max_values` per channel; windows
        of a run are joined."""
