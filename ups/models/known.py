"""What is known of a batch's parameters, looked up once where they come from, so that no call asks the
device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Known:
    """standard (batch, P): standardised logarithms; index (batch,): the number of the nearest fitted value.

    groups: of every value that occurs, its number and its rows, for bases with weights of their own per
    value.
    """

    standard: Tensor
    index: Tensor
    groups: tuple[tuple[int, Tensor], ...]

    @classmethod
    def of(cls, standard: Tensor, index: Tensor, device: torch.device | str = "cpu") -> Known:
        """From standard and index in main memory: the groups are found there and all is put on `device`."""
        groups = tuple((value, torch.nonzero(index == value)[:, 0].to(device))
                       for value in index.unique().tolist())
        return cls(standard.to(device), index.to(device), groups)
