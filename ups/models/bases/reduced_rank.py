"""Reduced-rank ridge regression Y ~ X U V^T of many numbers on many, with ridge and rank by cross-validation
(Izenman 1975, doi 10.1016/0047-259X(75)90042-1; Mukherjee and Zhu 2011, doi 10.1002/sam.10138).

It works in the principal directions of x and y. There are no more of them than windows, so memory and time do
not grow with the square of the number of cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ups.common.progress import beat

FOLDS = 4  # of cross-validation; windows are in the order of initial conditions and time
# nominal seconds of a number that is read, of float64 products, eigenvectors and errors of all ranks
# (docs/lab/log.md)
READ, PRODUCT, EIGENVECTORS, RANKS = 1e-7, 5e-11, 2.5e-10, 1.5e-8
RIDGES = tuple(10.0**power for power in range(-13, 2))  # relative to the largest variance of a direction of x
AS_GOOD = 1.005  # times the least error; among these, the largest ridge and then the smallest rank are taken
NEARLY = 0.75  # of the largest rank, from which the rank is not limited
TINY = 1e-15  # of the largest variance: float64 rounding
ROUNDING = 1e-14  # of the squares of y: smaller errors are rounding
MOST = 1024  # directions, if x has no more numbers than this
MANY = 512  # directions otherwise
BLOCK_COLUMNS = 2**16  # columns that are summed in float64 at once


class Map(NamedTuple):
    """y = x reads gives^T; reads (numbers of x, rank), gives (numbers of y, rank), float32."""

    reads: Tensor
    gives: Tensor

    @property
    def rank(self) -> int:
        return self.reads.shape[1]

    @classmethod
    def none(cls, x: Tensor, y: Tensor) -> "Map":
        """The map of rank 0 between windows x and y."""
        return cls(x.new_zeros(x.shape[1], 0), y.new_zeros(y.shape[1], 0))


@dataclass(frozen=True)
class Directions:
    """Principal directions of centred windows x (n, numbers), float32: scores (n, k) and variances (k,),
    float64, largest first. axes: the directions (numbers, k) or, if n is smaller, the vectors (n, k) from
    which x gives them.
    """

    x: Tensor
    scores: Tensor
    variances: Tensor
    axes: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Directions":
        is_tall = x.shape[0] >= x.shape[1]
        blocks = x.split(max(1, BLOCK_COLUMNS * 64 // x.shape[1])) if is_tall else x.T.split(BLOCK_COLUMNS)
        values, vectors = torch.linalg.eigh(sum((block := part.double()).T @ block for part in blocks))
        kept = (values.flip(0) > TINY * values[-1].clamp_min(1e-300)).nonzero()[:, 0]
        kept = kept[: MOST if x.shape[1] <= MOST else MANY]
        values, vectors = values.flip(0)[kept], vectors.flip(1)[:, kept]
        if is_tall:
            scores = torch.cat([block.double() @ vectors for block in blocks])
            return cls(x, scores, values, vectors)
        return cls(x, vectors * values.sqrt(), values, vectors / values.sqrt())

    def combined(self, weights: Tensor) -> Tensor:
        """Vectors (numbers, m), float32, from their components (k, m) along the directions."""
        columns = self.axes @ weights
        if self.axes.shape[0] == self.x.shape[1] and self.x.shape[0] >= self.x.shape[1]:
            return columns.float()
        return torch.cat([(block.double() @ columns).float() for block in self.x.T.split(BLOCK_COLUMNS)])


@dataclass(frozen=True)
class FoldSums:
    """Sums of x over one fold, from scores: the mean of the windows outside the fold; centred by it, the
    products of these as eigenvalues and eigenvectors, and of the held-out windows.
    """

    mean: Tensor
    values: Tensor
    vectors: Tensor
    held: Tensor

    @classmethod
    def of(cls, scores: Tensor, held: Tensor) -> "FoldSums":
        others = len(scores) - len(held)
        mean = (scores.sum(0) - scores[held].sum(0)) / others
        away = scores[held] - mean
        every = scores.T @ scores - scores[held].T @ scores[held] - others * torch.outer(mean, mean)
        values, vectors = torch.linalg.eigh(every)
        return cls(mean, values.clamp_min(0), vectors, vectors.T @ (away.T @ away) @ vectors)


class Errors:
    """Squared errors on the held-out windows of fits without their fold. products: x^T y of all windows."""

    def __init__(self, x: Tensor, y: Tensor, fold: FoldSums, held: Tensor, products: Tensor):
        others, self.values, self.held = len(y) - len(held), fold.values, fold.held
        mean = (y.sum(0) - y[held].sum(0)) / others
        away, of_held = y[held] - mean, x[held].T @ y[held]
        cross = fold.vectors.T @ (products - of_held - others * torch.outer(fold.mean, mean))
        cross_held = fold.vectors.T @ ((x[held] - fold.mean).T @ away)
        self.square = cross @ cross.T  # k, k
        self.square_held = cross_held @ cross.T
        self.size = away.square().sum()
        self.least = ROUNDING * self.size

    def of_ridge(self, ridge: float) -> Tensor:
        """The error of full rank."""
        inverse = 1 / (self.values + ridge * self.values.max())
        gain = 2 * inverse @ self.square_held.diagonal() - inverse @ (self.held * self.square) @ inverse
        return torch.maximum(self.size - gain, self.least)

    def of_rank(self, ridge: float) -> Tensor:
        """Errors (1 + k,) of rank 0, 1, ..., k."""
        root = (1 / (self.values + ridge * self.values.max())).sqrt()
        power, vectors = torch.linalg.eigh(root[:, None] * self.square * root)
        power, vectors = power.flip(0).clamp_min(0), root[:, None] * vectors.flip(1)
        gain = 2 * (vectors * (self.square_held @ vectors)).sum(0)
        gain = gain - power * (vectors * (self.held @ vectors)).sum(0)
        return torch.maximum(self.size - torch.cat([gain.new_zeros(1), gain.cumsum(0)]), self.least)


def fit_map(
    read: Directions, folds: Sequence[FoldSums], give: Directions, held: Sequence[Tensor], most: int
) -> tuple[Map, float]:
    """The map of rank `most` or less with the least held-out error, and the mean square error of a held-out
    window.
    """
    if not len(read.variances) or not len(give.variances):  # nothing varies
        return Map.none(read.x, give.x), 0.0
    products = read.scores.T @ give.scores
    errors = [
        Errors(read.scores, give.scores, fold, rows, products) for fold, rows in zip(folds, held, strict=True)
    ]
    by_ridge = {ridge: sum(error.of_ridge(ridge) for error in errors) for ridge in RIDGES}
    best = largest_as_good({ridge: float(found) for ridge, found in by_ridge.items()})
    by_rank = sum(error.of_rank(best) for error in errors)[: most + 1]
    rank = smallest_as_good(by_rank)
    every = min(len(read.variances), len(give.variances), len(read.scores) - max(map(len, held)) - 1)
    # the fit of all windows has more directions than that of a fold: nearly full rank means full rank
    found = fitted(read, give, best, rank if rank < NEARLY * every else most)
    return found, float(by_rank[rank]) / len(read.scores)


def largest_as_good(errors: dict[float, float]) -> float:
    """The largest ridge whose error is as good as the least."""
    return max(ridge for ridge, error in errors.items() if error <= AS_GOOD**2 * min(errors.values()))


def smallest_as_good(errors: Tensor) -> int:
    """The smallest rank whose error is as good as the least."""
    return int((errors <= AS_GOOD**2 * errors.min()).nonzero()[0])


def fitted(read: Directions, give: Directions, ridge: float, rank: int) -> Map:
    """The map fitted to all windows."""
    cross = read.scores.T @ give.scores
    root = (1 / (read.variances + ridge * read.variances.max())).sqrt()
    left, size, right = torch.linalg.svd(root[:, None] * cross, full_matrices=False)
    return Map(read.combined(root[:, None] * left[:, :rank] * size[:rank]), give.combined(right[:rank].T))


def work(num_windows: int, num_in: int, num_out: int, num_starts: int) -> float:
    """Work of `fit_maps`, as of `Samples.spend`: principal directions of x and of every target, and errors of
    all ranks."""
    total = num_starts * RANKS * min(num_windows, num_in, MANY) ** 3
    for size in (num_in, *[num_out] * num_starts):
        small, large = sorted((num_windows, size))
        total += READ * num_windows * size + PRODUCT * small**2 * large + EIGENVECTORS * small**3
    return total


def fit_maps(
    x: Tensor, y: Tensor, starts: dict[str, Tensor], most: int
) -> dict[str, tuple[dict[str, Tensor], Map, float]]:
    """Start -> (means of x and y and the fraction that persists, the map, the mean square error of a held-out
    window). starts: name -> fraction of a number's deviation that persists; most: of `fit_map`.
    """
    means = {"mean_in": x.mean(0, dtype=torch.float64), "mean": y.mean(0, dtype=torch.float64)}
    x, y = (part - mean.float() for part, mean in zip((x, y), means.values(), strict=True))
    read, held = Directions.of(x), torch.arange(len(x), device=x.device).chunk(FOLDS)
    folds, found = [FoldSums.of(read.scores, some) for some in held], {}
    for start, kept in starts.items():
        beat()
        target = y - kept * x[:, : len(kept)] if kept.any() else y
        fitted = fit_map(read, folds, Directions.of(target), held, most)
        found[start] = (means | {"kept": kept}, *fitted)
    return found
