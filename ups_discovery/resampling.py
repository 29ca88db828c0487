"""Select the terms of an equation by resampled windows, from normal equations.

The size of the equation is the smallest one that windows left out cannot tell from the best. Its rivals are
the other sets of terms that some sample prefers (resampling as in Fasel, Kutz, Brunton and Brunton 2022,
arXiv 2111.10992). How often samples prefer a term says little of its certainty: windows of one film share
noise."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ups_discovery.least_squares import RIDGE, forward_selection, residual, scaled, solve
from ups_discovery.progress import beat
from ups_discovery.seeds import generator

MAX_CANDIDATES = 40  # terms that windows are resampled for
MAX_ADDED = 8  # columns by addition, and most terms of an equation
NUM_DRAWS = 40  # samples of windows
MIN_TIES = 1 / 3  # of the samples in which a smaller equation is no worse than the best one
# Of a coefficient from zero, of an equation and of its rivals; by the scatter of blocks, too small by a
# factor of 1.3 to 1.9 in single films.
MIN_STANDARD_ERRORS, MIN_OF_RIVALS = 3.0, 2.2
MOST_MORE = 2  # terms of a rival
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
    columns = [column for column in columns if a[column, column] > 0]  # without noise it may be negative
    some = torch.tensor([*columns, len(a) - 1])
    added = [columns[place] for place in forward_selection(a[some[:, None], some], [], MAX_ADDED)]
    found = {len(c): c for c in elimination(a, columns)}
    for size in range(1, len(added) + 1):
        found[size] = min(found.get(size, added[:size]), added[:size], key=lambda c: residual(a, c))
    return found


def values_of_sets(a: Tensor, sets: Tensor) -> Tensor:
    """The coefficients (samples, sets, size) of sets (sets, size) of columns, from normal equations
    (samples, columns + 1, columns + 1)."""
    x, y = a[:, sets[:, :, None], sets[:, None]], a[:, sets, -1]
    length = x.diagonal(dim1=-2, dim2=-1).sqrt().clamp_min(1e-150)
    x = x / length[..., None] / length[..., None, :] + RIDGE * torch.eye(sets.shape[1], dtype=a.dtype)
    return torch.linalg.solve(x, y / length) / length


def losses_of_sets(a: Tensor, sets: Tensor, values: Tensor) -> Tensor:
    """The squared residuals of the target (samples, sets) with these values of sets of columns."""
    x, y = a[:, sets[:, :, None], sets[:, None]], a[:, sets, -1]
    return a[:, -1, -1, None] - 2 * (values * y).sum(-1) + torch.einsum("spi,spij,spj->sp", values, x, values)


def preferred(blocks: Tensor, columns: list[int], seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For every number of some of the terms (sets, best, losses): the sets (sets, terms) that a sample of
    windows or all windows prefer, the place (samples,) of the best one for each sample, and its squared
    residual (samples,) in the windows left out. blocks: normal equations (blocks, terms + 1, terms + 1)."""
    rng, count = generator(seed, "windows"), len(blocks)
    total = blocks.sum(0)
    candidates = next((c for c in elimination(total, columns) if len(c) <= MAX_CANDIDATES), [])
    samples, pool = [], {size: {tuple(sorted(c))} for size, c in subsets(total, candidates).items()}
    for _ in range(NUM_DRAWS):
        beat()
        weight = torch.bincount(torch.randint(count, (count,), generator=rng), minlength=count)
        inside = torch.einsum("b,bij->ij", weight.double(), blocks)
        outside, unit = blocks[weight == 0].sum(0), float(total[-1, -1] * (weight == 0).sum() / count)
        if inside[-1, -1] > 0 and unit > 0:
            samples.append((inside, outside, unit))
            for size, c in subsets(inside, candidates).items():
                pool.setdefault(size, set()).add(tuple(sorted(c)))
    if not samples:
        return []
    insides, outsides = (torch.stack([one[place] for one in samples]) for place in (0, 1))
    units, found = insides.new_tensor([unit for *_, unit in samples]), []
    # one search may miss the best columns: each sample has the choice of what any search has found
    for size in sorted(pool)[:MAX_ADDED]:
        sets = torch.tensor(sorted(pool[size]))
        values = values_of_sets(insides, sets)
        best = losses_of_sets(insides, sets, values).nan_to_num(torch.inf).argmin(1)
        losses = losses_of_sets(outsides, sets, values)[torch.arange(len(best)), best] / units
        found.append((sets, best, losses))
    return found


def residual_of(blocks: Tensor, columns: list[int], values: Tensor) -> tuple[float, float]:
    """The squared residual with these values of columns, as a fraction of the target's square, and its
    standard error."""
    vector = blocks.new_zeros(blocks.shape[1])
    vector[[*columns, -1]] = torch.cat([-values, values.new_ones(1)])
    losses, unit = torch.einsum("i,bij,j->b", vector, blocks, vector), blocks[:, -1, -1].sum()
    return float(losses.sum() / unit), float(losses.std() * len(losses) ** 0.5 / unit)


def standard_errors(blocks: Tensor, columns: list[int], values: Tensor) -> Tensor:
    """Standard errors of the values of columns, from the scatter of the normal equations of the blocks
    (cluster-robust: Liang and Zeger 1986, doi 10.1093/biomet/73.1.13)."""
    some = blocks[:, columns]
    missed = some[:, :, -1] - some[:, :, columns] @ values
    missed, count = missed - missed.mean(0), len(blocks)
    total = some[:, :, columns].sum(0)
    length = total.diagonal().abs().sqrt().clamp_min(1e-150)
    inverse = torch.linalg.pinv(total / length[:, None] / length, hermitian=True)
    spread = (missed / length) @ inverse / length
    return (spread.square().sum(0) * count / (count - 1)).sqrt()


def selected(blocks: Tensor, tiers: list[list[int]], seed: int) -> tuple[list[int], list[list[int]]]:
    """The terms of one channel, from its normal equations (blocks, terms + 1, terms + 1), and their rivals:
    the other sets of terms, all certain, that samples prefer. No terms if none explain anything.

    The fewest terms that windows left out cannot tell from the best, of the first tier of columns that has
    them; without those that may be zero. Each tier is part of the next one."""
    found = [one for columns in tiers for one in preferred(blocks, columns, seed)]
    if not found:
        return [], []
    least = min((losses for *_, losses in found), key=lambda losses: float(losses.median()))
    as_good = [one for one in found if (one[2] - least <= MIN_RESIDUAL).double().mean() >= MIN_TIES]
    sets, best, _ = min(as_good, key=lambda one: one[0].shape[1])
    total = blocks.sum(0)
    fitting_best = min(sets[best].tolist(), key=lambda columns: residual(total, columns))
    terms = certain(blocks, fitting_best, MIN_STANDARD_ERRORS)
    pool = sorted({tuple(some) for sets, *_ in found for some in sets.tolist()})
    others = [[*some] for some in pool if len(some) <= len(terms) + MOST_MORE and {*some} != {*terms}]
    return terms, [some for some in others if certain(blocks, some, MIN_OF_RIVALS) == some]


def without_uncertain(
    blocks: Tensor,
    columns: list[int],
    least: float,
    errors_of: Callable[[list[int], Tensor], Tensor],
) -> list[tuple[list[int], Tensor, Tensor]]:
    """(columns, values, standard errors) of these columns, then each time without the one that is the fewest
    standard errors from zero, until all are `least` from it or one is left. errors_of(columns, values)."""
    total, path = blocks.sum(0), []
    while columns:
        values = solve(total, columns)
        errors = errors_of(columns, values)
        path.append((columns, values, errors))
        ratio = values.abs() / errors
        if len(columns) == 1 or float(ratio.min()) >= least:
            break
        columns = [column for place, column in enumerate(columns) if place != int(ratio.argmin())]
    return path


def certain(blocks: Tensor, columns: list[int], least: float) -> list[int]:
    """The columns that `without_uncertain` leaves, by the scatter of blocks."""
    return without_uncertain(blocks, columns, least, functools.partial(standard_errors, blocks))[-1][0]
