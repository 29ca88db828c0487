"""Least squares that choose their columns, from normal equations alone: the last row and column stand for
what is to be explained, the others for what may explain it."""

import torch
from torch import Tensor

RIDGE = 1e-9  # of columns of length 1; float64 leaves half the digits of what is nearly dependent
OWN = 1e-4  # of a column's square that others do not explain, at least, or it is taken for one of theirs


def scaled(a: Tensor) -> tuple[Tensor, Tensor]:
    """Normal equations of columns of length 1, and the lengths."""
    length = a.diagonal().sqrt().clamp_min(1e-150)
    return a / length[:, None] / length, length


def _among(a: Tensor, columns: list[int]) -> Tensor:
    return a[columns][:, columns] + RIDGE * torch.eye(len(columns), dtype=a.dtype, device=a.device)


def solve(a: Tensor, columns: list[int]) -> Tensor:
    """The weights of `columns`."""
    a, length = scaled(a)
    return torch.linalg.solve(_among(a, columns), a[columns, -1]) * length[-1] / length[columns]


def left(a: Tensor, columns: list[int]) -> float:
    """The share of the last column's square that `columns` leave."""
    a, _ = scaled(a)
    return float(1 - a[columns, -1] @ torch.linalg.solve(_among(a, columns), a[columns, -1]))


def backwards(a: Tensor, columns: list[int], most: float) -> list[int]:
    """What is left of `columns` when the one that takes least goes, as long as the rest leaves at most `most`
    times what all of them leave; a twentieth of many at once."""
    a, _ = scaled(a)
    allowed = most * left(a, columns) + RIDGE
    while len(columns) > 1:
        inverse = torch.linalg.inv(_among(a, columns))
        cost = (inverse @ a[columns, -1]).square() / inverse.diagonal()
        gone = cost.argsort()[: max(1, len(columns) // 20)].tolist()
        fewer = [column for place, column in enumerate(columns) if place not in gone]
        if left(a, fewer) > allowed:
            break
        columns = fewer
    return columns


def forwards(a: Tensor, columns: list[int], most: int, least: float = 0.0) -> list[int]:
    """`columns` and up to `most` more, each the one that takes most off what is left, the share `least` of it
    or more."""
    a, _ = scaled(a)
    columns = list(columns)
    for _ in range(most):
        rest = a - a[:, columns] @ torch.linalg.solve(_among(a, columns), a[columns])
        own = rest.diagonal()[:-1]
        gain = torch.where(own > OWN, rest[:-1, -1].square() / own.clamp_min(OWN), 0.0)
        gain[columns] = 0.0
        if float(gain.max()) <= least * float(rest[-1, -1]):
            break
        columns.append(int(gain.argmax()))
    return columns


def significant(a: Tensor, columns: list[int], least: float, most: int = 0) -> list[int]:
    """What is left of `columns` when one after another goes whose weight is less than `least` times its
    standard error, `most` at most if given; what is to be explained has noise of variance 1."""
    a, length = scaled(a)
    first = len(columns)
    while columns and not (most and len(columns) <= first - most):
        inverse = torch.linalg.inv(_among(a, columns))
        sure = (inverse @ a[columns, -1]).square() / inverse.diagonal() * length[-1] ** 2
        if float(sure.min()) >= least**2:
            break
        columns = [column for place, column in enumerate(columns) if place != int(sure.argmin())]
    return columns
