"""Select the terms of an equation by resampled windows, from normal equations.

The size of the equation is the smallest one that windows left out cannot tell from the best, and its terms
are those that most samples find (inclusion probabilities, as in Fasel, Kutz, Brunton and Brunton 2022,
arXiv 2111.10992)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ups.common.progress import beat
from ups.common.seeds import generator
from ups.models.bases.least_squares import RIDGE, forward_selection, scaled, solve

MAX_CANDIDATES = 40  # terms that windows are resampled for
MAX_ADDED = 8  # columns by addition
NUM_DRAWS = 40  # samples of windows
NUM_ERRORS = 200  # samples of windows for standard errors
MIN_TIES = 0.2  # of the samples in which a smaller equation is no worse than the best one
MIN_GAIN = 3.0  # of the loss, by terms that are not plain
MIN_INCLUSION = 0.8  # of the samples that find a term
MIN_RESIDUAL = 1e-5  # of the square of the time derivative: less is not the equation's


def elimination(a: Tensor, columns: list[int] | None = None) -> list[list[int]]:
    """Sets of columns, from all (or these) to one: the least useful one is dropped again and again; of many,
    a twentieth at once."""
    a, _ = scaled(a)
    columns = list(range(len(a) - 1)) if columns is None else columns
    columns, path = [c for c in columns if a[c, c] > 0.5], []
    while columns:
        path.append(columns)
        matrix = a[columns][:, columns]
        sizes, vectors = torch.linalg.eigh(matrix)
        # without the noise's part a matrix may have negative eigenvalues: those as small are uncertain
        sizes = sizes.clamp_min(max(RIDGE, -float(sizes[0])))
        inverse = (vectors / sizes) @ vectors.mT
        cost = (inverse @ a[columns, -1]).square() / inverse.diagonal().clamp_min(1e-300)
        dropped = cost.argsort()[: max(1, len(columns) // 20)].tolist()
        columns = [column for place, column in enumerate(columns) if place not in dropped]
    return path


def subsets(a: Tensor, columns: list[int]) -> dict[int, list[int]]:
    """For every number of columns the better set of those by elimination and by addition."""
    some = torch.tensor([*columns, len(a) - 1])
    added = [columns[place] for place in forward_selection(a[some[:, None], some], [], MAX_ADDED)]
    found = {len(c): c for c in elimination(a, columns)}
    for size in range(1, len(added) + 1):
        both = [found.get(size, added[:size]), added[:size]]
        found[size] = min(both, key=lambda c: loss(a, c, solve(a, c), 1.0))
    return found


def loss(a: Tensor, columns: list[int], values: Tensor, unit: float) -> float:
    """The square of the target that values of columns leave, over `unit`."""
    x = a[columns][:, columns]
    return float(a[-1, -1] - 2 * values @ a[columns, -1] + values @ x @ values) / unit


@dataclass(frozen=True)
class Resampled:
    """Eliminations in samples of windows. paths: for every sample the sets of columns by their number; losses
    (samples, sizes): of the windows left out, for sizes, the numbers that all samples have."""

    paths: list[dict[int, list[int]]]
    sizes: list[int]
    losses: Tensor

    @classmethod
    def of(cls, blocks: Tensor, columns: list[int], seed: int) -> "Resampled":
        """By normal equations (blocks, terms + 1, terms + 1) and some of the terms."""
        rng, count = generator(seed, "windows"), len(blocks)
        total = blocks.sum(0)
        candidates = next((c for c in elimination(total, columns) if len(c) <= MAX_CANDIDATES), [])
        paths, losses = [], []
        for _ in range(NUM_DRAWS):
            beat()
            weight = torch.bincount(torch.randint(count, (count,), generator=rng), minlength=count)
            inside = torch.einsum("b,bij->ij", weight.double(), blocks)
            outside, unit = blocks[weight == 0].sum(0), float(total[-1, -1] * (weight == 0).sum() / count)
            paths.append(subsets(inside, candidates))
            losses.append({size: loss(outside, c, solve(inside, c), unit) for size, c in paths[-1].items()})
        sizes = sorted(set.intersection(*(set(one) for one in losses)))
        table = torch.tensor([[one[size] for size in sizes] for one in losses], dtype=torch.float64)
        return cls(paths, sizes, table)

    @property
    def best(self) -> Tensor:
        """The losses (samples,) of the size with the least median."""
        return self.losses[:, int(self.losses.median(0).values.argmin())]

    def terms(self) -> list[int]:
        """The terms that most samples find, of the smallest size that some cannot tell from the best."""
        is_as_good = (self.losses - self.best[:, None] <= MIN_RESIDUAL).double().mean(0) >= MIN_TIES
        size = self.sizes[int(is_as_good.nonzero()[0])]
        found = torch.tensor([column for path in self.paths for column in path[size]])
        return (torch.bincount(found) >= MIN_INCLUSION * len(self.paths)).nonzero().flatten().tolist()


def standard_errors(blocks: Tensor, columns: list[int], seed: int) -> Tensor:
    """The standard deviations of the values of columns in samples of windows with replacement."""
    rng, count = generator(seed, "errors"), len(blocks)
    weights = torch.randint(count, (NUM_ERRORS, count), generator=rng)
    found = torch.stack([solve(blocks[weight].sum(0), columns) for weight in weights])
    return found.std(0)


def selected(blocks: Tensor, plain: list[int], seed: int) -> list[int]:
    """The terms of one channel, from its normal equations (blocks, terms + 1, terms + 1); only plain ones,
    unless the others reduce their loss to less than 1 / MIN_GAIN."""
    few, every = (Resampled.of(blocks, c, seed) for c in (plain, list(range(blocks.shape[1] - 1))))
    if not (few.sizes and every.sizes):
        return []
    is_enough = few.best <= MIN_GAIN * every.best.clamp_min(MIN_RESIDUAL)
    return (few if is_enough.double().mean() >= MIN_TIES else every).terms()
