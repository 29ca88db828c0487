"""Least squares with selection of columns, from normal equations alone.

Normal equations are (columns + 1, columns + 1): the last row and column belong to the target, the others to
the columns that may explain it."""

import torch
from torch import Tensor

RIDGE = 1e-9  # for columns of length 1; float64 keeps half of its digits if columns are nearly dependent
MIN_INDEPENDENT = 1e-4  # a column is a candidate only if the others leave this fraction of its square


def scaled(a: Tensor) -> tuple[Tensor, Tensor]:
    """Normal equations of columns of length 1, and the lengths."""
    length = a.diagonal().sqrt().clamp_min(1e-150)
    return a / length[:, None] / length, length


def _among(a: Tensor, columns: list[int]) -> Tensor:
    return a[columns][:, columns] + RIDGE * torch.eye(len(columns), dtype=a.dtype, device=a.device)


def solve(a: Tensor, columns: list[int]) -> Tensor:
    """The coefficients of `columns`."""
    a, length = scaled(a)
    return torch.linalg.solve(_among(a, columns), a[columns, -1]) * length[-1] / length[columns]


def damped_step(a: Tensor, length: Tensor, damping: float) -> Tensor:
    """The Levenberg-Marquardt step of all columns. a, length: of `scaled`."""
    damped = a[:-1, :-1] + damping * torch.eye(len(a) - 1, dtype=a.dtype, device=a.device)
    return torch.linalg.solve(damped, a[:-1, -1]) * length[-1] / length[:-1]


def residual(a: Tensor, columns: list[int]) -> float:
    """The fraction of the target's square that `columns` do not explain."""
    a, _ = scaled(a)
    return float(1 - a[columns, -1] @ torch.linalg.solve(_among(a, columns), a[columns, -1]))


def backward_selection(a: Tensor, columns: list[int], factor: float) -> list[int]:
    """The columns that remain if the least useful one is dropped again and again, while the residual is at
    most `factor` times that of all columns. Of many, a twentieth is dropped at once."""
    a, _ = scaled(a)
    allowed = factor * residual(a, columns) + RIDGE
    while len(columns) > 1:
        inverse = torch.linalg.inv(_among(a, columns))
        cost = (inverse @ a[columns, -1]).square() / inverse.diagonal()
        dropped = cost.argsort()[: max(1, len(columns) // 20)].tolist()
        fewer = [column for place, column in enumerate(columns) if place not in dropped]
        if residual(a, fewer) > allowed:
            break
        columns = fewer
    return columns


def forward_selection(a: Tensor, columns: list[int], most: int, min_gain: float = 0.0) -> list[int]:
    """`columns` and up to `most` more. Each one explains most of the residual, and at least the fraction
    `min_gain` of it."""
    a, _ = scaled(a)
    columns = list(columns)
    for _ in range(most):
        rest = a - a[:, columns] @ torch.linalg.solve(_among(a, columns), a[columns])
        independent = rest.diagonal()[:-1]
        gain = rest[:-1, -1].square() / independent.clamp_min(MIN_INDEPENDENT)
        gain = torch.where(independent > MIN_INDEPENDENT, gain, 0.0)
        gain[columns] = 0.0
        if float(gain.max()) <= min_gain * float(rest[-1, -1]):
            break
        columns.append(int(gain.argmax()))
    return columns


def significant(a: Tensor, columns: list[int], min_errors: float, max_dropped: int = 0) -> list[int]:
    """The columns that remain if the least significant one is dropped while its coefficient is less than
    `min_errors` standard errors; at most `max_dropped` (0: any number) go. The target's noise has variance
    1."""
    a, length = scaled(a)
    first = len(columns)
    while columns and not (max_dropped and len(columns) <= first - max_dropped):
        inverse = torch.linalg.inv(_among(a, columns))
        squares = (inverse @ a[columns, -1]).square() / inverse.diagonal() * length[-1] ** 2
        if float(squares.min()) >= min_errors**2:
            break
        columns = [column for place, column in enumerate(columns) if place != int(squares.argmin())]
    return columns
