"""Partial observations of the input field of a steady task, for training and evaluating the conditional
prior, and the linear posterior of the field given them, which travels with the weights of the prior.

    values = mask * (S v + noise * eta)

v is the normalised input field (for darcy2d_grf the standardised log a), S the mean over blocks of cells
spread over the block (block 1: v itself), mask 1 where something is seen. Unseen cells hold 0, the prior mean
in normalised units. Five
kinds: everything; nothing; a random share of the cells; block averages; every cell with noise.

Every row of a batch draws from a generator of its own, so that a batch may be cut among processes and
micro-batches. Shares and ranges are those of training; `CASES` are the fixed observations of an evaluation.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ups.common.seeds import generator
from ups.common.spectral import apply_axes, cosine, fourier, sine
from ups.common.transfer import send
from ups.tasks.darcy_grf import LinearObservation

# of the rows of training batches
SHARES = {"full": 0.25, "none": 0.05, "points": 0.40, "coarse": 0.15, "noisy": 0.15}
COVERAGE = (0.01, 0.5)  # share of the cells that "points" sees, log-uniform
NOISE = (0.05, 1.0)  # standard deviation of "noisy" in normalised units (v has 1), log-uniform
BLOCKS = (2, 4, 8)  # cells per axis that "coarse" averages, those that divide the grid equally likely
FACTS = ("coverage", "noise", "log2_block")
WAVES = (cosine, sine, fourier)  # along every axis, of which a field's covariance may be made
MODES = 1024  # patterns of a field at most, in its linear posterior: all of a 32 x 32 grid
FOLDS = 4  # of the training fields: what variances are measured on did not make the patterns
IMAGES = 16  # random symmetric images of every training field that a covariance is averaged over
LARGEST = 2**27  # numbers in all of them together
LEAST = 1e-6  # variance of a cell by itself, in normalised units: keeps a covariance regular

# case: its levels, how well a row is observed: share of the cells seen, noise, cells per axis averaged
CASES: dict[str, tuple[float, float, int]] = {
    "none": (0.0, 0.0, 1),
    "points_1": (0.01, 0.0, 1),
    "points_10": (0.1, 0.0, 1),
    "points_50": (0.5, 0.0, 1),
    "coarse_4": (1.0, 0.0, 4),
    "noisy_0.3": (1.0, 0.3, 1),
    "full": (1.0, 0.0, 1),
}
PARTIAL = [case for case in CASES if case != "full"]  # what is all observed has one answer


@dataclass(frozen=True)
class Observation:
    """values (B, C, *space), mask (B, 1, *space) of 0 and 1, facts (B, len(FACTS)) float32: share seen,
    noise, log2 block; groups, in main memory: of every row (k, m) int64, the flat indices of the m cells of
    which each of its k numbers is the mean, the first of them holding it."""

    values: Tensor
    mask: Tensor
    facts: Tensor
    groups: list[Tensor]

    @property
    def is_whole(self) -> list[bool]:
        """Of every row, whether each cell is seen by itself."""
        return [len(groups) == self.mask[0].numel() for groups in self.groups]


def row_generators(seed: int, *keys: int | str, rows: Iterable[int]) -> list[torch.Generator]:
    """One generator per row, e.g. row_generators(seed, step, rows=range(first, last)) with rows counted over
    the global batch."""
    return [generator(seed, "observe", *keys, row) for row in rows]


def draw_levels(space: Sequence[int], generators: Sequence[torch.Generator]) -> Tensor:
    """The levels (B, 3) of a training batch on the grid `space`, one row per generator, as in `CASES` and
    distributed as `SHARES` and the ranges say.

    Raises ValueError for a grid that no block divides.
    """
    blocks = [block for block in BLOCKS if not any(size % block for size in space)]
    if not blocks:
        raise ValueError(
            f"no block of {', '.join(map(str, BLOCKS))} cells divides the grid {tuple(space)}; "
            "expected even numbers of cells (ups.generative.observation.draw_levels). Change "
            "task.TASK.resolution or task.TASK.space_stride."
        )
    pick, level = torch.stack(
        [torch.rand(2, generator=source, dtype=torch.float64) for source in generators], 1
    )
    edges = torch.tensor(list(SHARES.values()), dtype=torch.float64).cumsum(0)[:-1]
    number = torch.bucketize(pick, edges, right=True)
    kind = {name: number == i for i, name in enumerate(SHARES)}
    coverage = torch.where(kind["points"], COVERAGE[0] * (COVERAGE[1] / COVERAGE[0]) ** level, 1.0)
    block = torch.where(kind["coarse"], torch.tensor(blocks)[(level * len(blocks)).long()], 1)
    noise = torch.where(kind["noisy"], NOISE[0] * (NOISE[1] / NOISE[0]) ** level, 0.0)
    return torch.stack([coverage.masked_fill(kind["none"], 0.0), noise, block], 1)


def observe(v: Tensor, levels: Tensor, generators: Sequence[torch.Generator]) -> Observation:
    """The observation of the normalised field v (B, C, *space), 1 to 3 space axes, at `levels` (B, 3), see
    `CASES`; random numbers from the CPU.

    A row that is seen at all is seen in at least one cell. Raises ValueError for blocks that do not divide
    the grid.
    """
    space, cells = v.shape[2:], v.shape[2:].numel()
    seen, mask, eta = v, torch.zeros(len(v), cells), torch.zeros(v.shape)
    blocks = levels[:, 2].long()
    for block in sorted(set(blocks.tolist()) - {1}):
        if any(size % block for size in space):
            raise ValueError(
                f"blocks of {block} cells do not divide the grid {tuple(space)}; expected a "
                f"multiple of {block} per axis (ups.generative.observation.observe). Change "
                "task.TASK.resolution or leave the case out."
            )
        rows = send(blocks == block, v.device).view(-1, *[1] * (v.ndim - 1))
        seen = torch.where(rows, block_average(v, block), seen)
    for row, ((coverage, noise, _), source) in enumerate(zip(levels.tolist(), generators, strict=True)):
        count = max(round(coverage * cells), int(coverage > 0))
        is_some = 0 < count < cells  # which ones is drawn only then
        mask[row, torch.randperm(cells, generator=source)[:count] if is_some else slice(count)] = 1.0
        if noise > 0:
            eta[row] = torch.randn(v.shape[1:], generator=source) * noise
    facts = torch.stack([mask.double().mean(1), levels[:, 1], levels[:, 2].log2()], 1)
    groups = [_groups(row, space, block) for row, block in zip(mask, blocks.tolist(), strict=True)]
    mask, eta = (send(part.to(v.dtype), v.device) for part in (mask.view(-1, 1, *space), eta))
    return Observation(mask * (seen + eta), mask, send(facts.float(), v.device), groups)


def _groups(mask: Tensor, space: Sequence[int], block: int) -> Tensor:
    """The groups (k, block^ndim) of which something is seen: mask (cells,) of one row."""
    cells = torch.arange(len(mask)).view(*space)
    for axis in range(len(space)):
        cells = cells.unfold(axis, block, block)
    cells = cells.reshape(-1, block ** len(space))
    return cells[mask[cells[:, 0]] > 0]


def observe_case(v: Tensor, case: str, generators: Sequence[torch.Generator]) -> Observation:
    """The observation of v (B, C, *space) in the named case, one of `CASES`."""
    return observe(v, torch.tensor([CASES[case]] * len(v), dtype=torch.float64), generators)


def seen(v: Tensor, mask: Tensor) -> Observation:
    """The observation of v (B, C, *space) at the cells where mask (B, 1, *space) is 1, exactly."""
    mask = mask.to(v)
    facts = nn.functional.pad(mask.flatten(1).mean(1)[:, None], (0, len(FACTS) - 1))
    groups = [_groups(row, v.shape[2:], 1) for row in mask.flatten(1).cpu()]
    return Observation(torch.where(mask > 0, v, 0.0), mask, facts, groups)


def whole(v: Tensor) -> Observation:
    """The observation of all of v (B, C, *space), exactly."""
    mask, facts = torch.ones_like(v[:, :1]), v.new_zeros(len(v), len(FACTS))
    facts[:, 0] = 1.0
    return Observation(v, mask, facts, [_groups(torch.ones(mask[0].numel()), v.shape[2:], 1)] * len(v))


def as_linear(observation: Observation, row: int, mean: float, std: float) -> LinearObservation:
    """One row of an observation of v = (g - mean) / std as y = A g + noise * eta on the field g (log a)
    itself.

    mean, std: of the codec's only channel (`codec.mean.item()`, `codec.std.item()`). The row must be one
    channel on a square 2D grid, that of the generated data; raises ValueError otherwise.
    """
    values, groups = observation.values[row].detach().cpu(), observation.groups[row]
    if values.ndim != 3 or values.shape[0] != 1 or values.shape[1] != values.shape[2]:
        raise ValueError(
            f"observation of shape {tuple(values.shape)}; expected one channel on a square, (1, "
            "n, n) (ups.generative.observation.as_linear), for which the exact posterior is "
            "known. Use it for darcy2d_grf."
        )
    return LinearObservation(
        resolution=values.shape[1],
        cells=groups,
        values=values.flatten()[groups[:, 0]].double() * std + mean,
        noise=float(observation.facts[row, FACTS.index("noise")]) * std,
    )


def block_average(v: Tensor, block: int) -> Tensor:
    """Mean over blocks of `block` cells per axis, spread over the block again: (B, C, *space)."""
    for axis in range(2, v.ndim):
        v = v.unflatten(axis, (-1, block)).mean(axis + 1).repeat_interleave(block, axis)
    return v


class Posterior(NamedTuple):
    """Of a field given an observation: mean and standard deviation of each cell, (B, C, *space), and draws
    (B, M, C, *space)."""

    mean: Tensor
    spread: Tensor
    draws: Tensor


class LinearPosterior(nn.Module):
    """A Gaussian fitted to training fields, given part of a field: its mean is the best linear guess.

        v = mean + U s + e,  s ~ N(0, diag(variance)),  e ~ N(0, left I),  y = A v + noise * eta
        v | y:  z + mean + C A^T K^-1 (y - A (mean + z) - noise * eta),  z ~ N(0, C),  K = A C A^T + noise^2 I

    (probabilistic principal components, Tipping and Bishop 1999, conditioned as ups/tasks/darcy_grf.py does.)
    shape: (C, *space) of a field. least: of a solution; below it, its logarithm is not taken.

    Where few cells are unknown, what is left of them is ruled by the smallest variances, which a sample
    covariance has far too small. So the variances are those along U of fields that did not make U (cross-
    validation; Lamrani et al. 2025, arXiv 2503.15186). U: principal components, or waves (cosines, sines,
    both) along every axis, in which the covariance of a field that is alike everywhere is diagonal
    (Kasanicky, Mandel and Vejmelka 2015, "Spectral diagonal ensemble Kalman filters"): whichever gives fields
    that did not make it the shortest code, which is the least product of those variances. No basis but that
    of the covariance itself has a smaller one (Hadamard's inequality). Rows cost k^3 for k numbers seen, and
    nothing where all cells are.
    """

    def __init__(self, shape: Sequence[int], num_modes: int):
        super().__init__()
        self.shape, cells = tuple(shape), torch.Size(shape).numel()
        for name, size in (
            ("mean", (cells,)),
            ("variance", (num_modes,)),
            ("basis", (cells, num_modes)),
            ("left", ()),
            ("least", ()),
        ):
            self.register_buffer(name, torch.zeros(size))
        self._covariance: Tensor | None = None

    @classmethod
    def fit(
        cls, fields: Tensor, least: float = 0.0, image: Callable[[Tensor], Tensor] | None = None
    ) -> "LinearPosterior":
        """Of training fields (n, C, *space), on their device. image: a random symmetric image of such fields,
        one for all; None: there is no symmetry."""
        num_images = max(1, min(IMAGES, LARGEST // fields.numel()))
        images = [fields] if image is None else [image(fields) for _ in range(num_images)]
        mean = torch.stack([part.flatten(1).double().mean(0) for part in images]).mean(0)
        total = torch.stack([(part.flatten(1) - mean).square().sum(1).mean() for part in images]).mean()
        found = [component_basis(images, mean)] + [wave_basis(images, mean, rows) for rows in WAVES]

        def left_of(variance: Tensor) -> float:
            return max(float(total - variance.sum()) / max(len(mean) - len(variance), 1), LEAST)

        def code(variance: Tensor) -> float:  # twice as many nats, but for constants
            return float(variance.log().sum()) + (len(mean) - len(variance)) * math.log(left_of(variance))

        basis, variance = min(found, key=lambda pair: code(pair[1]))
        linear, left = cls(fields.shape[1:], len(variance)).to(fields), left_of(variance)
        linear.mean.copy_(mean)
        linear.basis.copy_(basis)
        linear.variance.copy_((variance - left).clamp_min(0))
        linear.left.fill_(left)
        linear.least.fill_(least)
        return linear

    def forward(self, observation: Observation, noise: Tensor | None = None) -> Posterior:
        """Given an observation; a draw of each row (B, M, 2, C, *space) of `noise`, standard normal. None: no
        draws."""
        values = observation.values
        if noise is None:
            noise = values.new_zeros(len(values), 0, 2, *self.shape)
        rows = zip(
            values.flatten(1),
            observation.groups,
            observation.is_whole,
            observation.facts[:, 1],
            noise.flatten(3),
            strict=True,
        )
        squares = self.basis.square()
        full = self.left + squares @ self.variance  # variance of each cell where nothing is seen
        parts = [
            self._whole(y, size, *white.unbind(1), squares)
            if is_whole
            else self._part(y, groups, size, *white.unbind(1), full)
            for y, groups, is_whole, size, white in rows
        ]
        mean, spread, draws = (
            torch.stack(part).to(values).unflatten(-1, self.shape) for part in zip(*parts, strict=True)
        )
        # what was seen exactly, cell by cell, is not computed again
        is_exact = observation.mask.expand_as(values) > 0
        is_exact &= (observation.facts[:, 1:] == 0).all(1).view(-1, *[1] * len(self.shape))
        return Posterior(
            torch.where(is_exact, values, mean),
            spread.masked_fill(is_exact, 0.0),
            torch.where(is_exact[:, None], values[:, None], draws),
        )

    def _whole(
        self, y: Tensor, noise: Tensor, white: Tensor, eta: Tensor, squares: Tensor
    ) -> tuple[Tensor, ...]:
        """mean, spread (cells,) and draws (M, cells) where all cells are seen, y, with noise: in the modes
        all is diagonal. squares: of the basis."""
        along, left, square = self.variance + self.left, self.left, noise.square()
        gain, gain_left = along / (along + square), left / (left + square)

        def filtered(x: Tensor) -> Tensor:
            return gain_left * x + (x @ self.basis * (gain - gain_left)) @ self.basis.mT

        z = self._drawn(white)
        rest = left * (1 - gain_left)
        spread = (rest + squares @ (along * (1 - gain) - rest)).clamp_min(0).sqrt()
        return (
            self.mean + filtered(y - self.mean),
            spread,
            self.mean + z + filtered(y - self.mean - z - noise * eta),
        )

    def _part(
        self, y: Tensor, groups: Tensor, noise: Tensor, white: Tensor, eta: Tensor, full: Tensor
    ) -> tuple[Tensor, ...]:
        """The same where the groups (k, m) are seen, in float64; nothing is where k is 0. full: variance of
        each cell where it is 0."""
        per_channel = self.basis.shape[0] // self.shape[0]
        cells = torch.cat([groups + channel * per_channel for channel in range(self.shape[0])])
        cells = send(cells, y.device)
        z, mean = self._drawn(white).double(), self.mean.double()

        def seen(x: Tensor) -> Tensor:  # A x
            return x[..., cells].mean(-1)

        cross = self._cross(cells)
        inner = seen(cross) + noise.double().square() * torch.eye(len(cells), device=y.device).double()
        # NaN where there is no factor, rather than a check that waits for the device
        factor, info = torch.linalg.cholesky_ex(0.5 * (inner + inner.mT))
        factor = torch.where(info == 0, factor, torch.nan)
        first = y[cells[:, 0]].double()
        given = torch.cat([(first - seen(mean))[None], first - seen(mean + z) - noise * eta[:, cells[:, 0]]])
        gained = torch.cholesky_solve(given.mT, factor).mT @ cross
        known = torch.linalg.solve_triangular(factor, cross, upper=False).square().sum(0)
        return mean + gained[0], (full - known).clamp_min(0).sqrt(), mean + z + gained[1:]

    def _drawn(self, white: Tensor) -> Tensor:
        """z (M, cells), of covariance C, from white noise of that shape: its symmetric root."""
        least = self.left.sqrt()
        along = (self.variance + self.left).sqrt() - least
        return least * white + (white @ self.basis * along) @ self.basis.mT

    def _cross(self, cells: Tensor) -> Tensor:
        """A C, (k, cells), float64, of groups (k, m)."""
        if len(self.variance) == len(self.mean):  # all modes: C is no larger than they are
            if self._covariance is None or self._covariance.device != self.basis.device:
                basis = self.basis.double()
                self._covariance = basis * self.variance @ basis.mT
                self._covariance.diagonal().add_(self.left)
            return self._covariance[cells].mean(1)
        basis = self.basis.double()
        cross = basis[cells].mean(1) * self.variance @ basis.mT
        return cross.scatter_add_(1, cells, (self.left.double() / cells.shape[1]).expand(cells.shape))


def component_basis(images: Sequence[Tensor], mean: Tensor) -> tuple[Tensor, Tensor]:
    """(basis (cells, K), variance (K,)) of the principal components of images (n, C, *space) of the same
    fields about mean (cells,): variances are those of fields that did not make the component."""
    space, (count, cells) = None, images[0].flatten(1).shape
    if cells > MODES:  # they are sought among the leading ones, of as many images as those need
        few = torch.cat([part.flatten(1) - mean.float() for part in images[: 1 + 8 * MODES // count]])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            space = torch.svd_lowrank(few[: 8 * MODES], min(MODES, len(few)))[2].double()
    fold = torch.arange(count, device=mean.device) % FOLDS
    second = 0  # moments of every fold, (FOLDS, K, K)
    for part in images:
        off = part.flatten(1).double() - mean
        off = off if space is None else off @ space
        second = second + torch.stack([off[fold == k].mT @ off[fold == k] for k in range(FOLDS)])
    second = second / (count * len(images))

    def components(moment: Tensor) -> Tensor:
        return torch.linalg.eigh(moment)[1].flip(1)

    variance = sum(
        torch.einsum("ik,ij,jk->k", u, second[k], u)
        for k in range(FOLDS)
        for u in [components(second.sum(0) - second[k])]
    )
    basis = components(second.sum(0))
    return basis if space is None else space @ basis, variance.clamp_min(LEAST)


def wave_basis(
    images: Sequence[Tensor], mean: Tensor, rows: Callable[[int], Tensor]
) -> tuple[Tensor, Tensor]:
    """The same of the products of waves `rows(n)` (n, n) along every axis: those of most variance, alone in
    every channel."""
    shape = images[0].shape[1:]
    along = [rows(n).to(mean) for n in shape[1:]]
    square = sum(apply_axes(part.double() - mean.view(shape), along).square().mean(0) for part in images)
    variance, kept = (square.flatten() / len(images)).topk(min(MODES, len(mean)))
    wave = torch.zeros(len(kept), len(mean)).to(mean).scatter_(1, kept[:, None], 1.0).view(-1, *shape)
    basis = apply_axes(wave, [matrix.mT for matrix in along]).flatten(1).mT
    return basis, variance.clamp_min(LEAST)
