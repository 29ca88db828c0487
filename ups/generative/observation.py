"""Partial observations of the input field of a steady task, and the linear posterior of the field given them.

    values = mask * (S v + noise * eta)

v is the normalised input field (for darcy2d_grf the standardised log a). S is the mean over blocks of cells,
repeated over the block (block 1: v itself). The mask is 1 at observed cells; others hold 0, the prior mean in
normalised units. There are five kinds: all cells; none; a random fraction of the cells; block averages; every
cell with noise.

Every row of a batch has a random generator of its own, so that a batch can be split over processes and
micro-batches. KIND_FRACTIONS and the ranges are for training; `CASES` are the fixed observations of an
evaluation.
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

# fractions of the rows of a training batch
KIND_FRACTIONS = {"full": 0.25, "none": 0.05, "points": 0.40, "coarse": 0.15, "noisy": 0.15}
COVERAGE = (0.01, 0.5)  # fraction of the cells observed by "points", log-uniform
NOISE = (0.05, 1.0)  # standard deviation of "noisy" in normalised units (v has 1), log-uniform
BLOCKS = (2, 4, 8)  # cells per axis averaged by "coarse"; those that divide the grid are equally likely
FACTS = ("coverage", "noise", "log2_block")
WAVES = (cosine, sine, fourier)  # candidates along every axis for the eigenvectors of a field's covariance
MODES = 1024  # largest number of modes of a linear posterior: all of a 32 x 32 grid
FOLDS = 4  # of the training fields: variances are measured on fields that did not make the modes
IMAGES = 16  # random symmetric images of every training field that a covariance is averaged over
LARGEST_IMAGES = 2**27  # numbers in all images together
MIN_VARIANCE = 1e-6  # of a cell on its own, in normalised units: keeps a covariance regular

# case: its levels, i.e. fraction of the cells observed, noise, cells per axis averaged
CASES: dict[str, tuple[float, float, int]] = {
    "none": (0.0, 0.0, 1),
    "points_1": (0.01, 0.0, 1),
    "points_10": (0.1, 0.0, 1),
    "points_50": (0.5, 0.0, 1),
    "coarse_4": (1.0, 0.0, 4),
    "noisy_0.3": (1.0, 0.3, 1),
    "full": (1.0, 0.0, 1),
}
PARTIAL = [case for case in CASES if case != "full"]  # a full observation has one solution


@dataclass(frozen=True)
class Observation:
    """An observation of a batch of fields.

    values (B, C, *space); mask (B, 1, *space) of 0 and 1; facts (B, len(FACTS)) float32; groups, on the CPU,
    one per row: (k, m) int64, flat indices of the m cells behind each of the k observed means, stored at the
    first of them.
    """

    values: Tensor
    mask: Tensor
    facts: Tensor
    groups: list[Tensor]

    @property
    def is_complete(self) -> list[bool]:
        """For every row, whether each cell is observed on its own."""
        return [len(groups) == self.mask[0].numel() for groups in self.groups]


def row_generators(seed: int, *keys: int | str, rows: Iterable[int]) -> list[torch.Generator]:
    """One random generator per row; rows are counted over the global batch."""
    return [generator(seed, "observe", *keys, row) for row in rows]


def sample_levels(space: Sequence[int], rngs: Sequence[torch.Generator]) -> Tensor:
    """Random levels (B, 3) of a training batch on the grid `space`, as in `CASES`, one row per generator.

    Raises ValueError for a grid that no block divides.
    """
    blocks = [block for block in BLOCKS if not any(size % block for size in space)]
    if not blocks:
        raise ValueError(
            f"no block of {', '.join(map(str, BLOCKS))} cells divides the grid {tuple(space)}; "
            "expected even numbers of cells (ups.generative.observation.sample_levels). Change "
            "task.TASK.resolution or task.TASK.space_stride."
        )
    u_kind, u_level = torch.stack([torch.rand(2, generator=rng, dtype=torch.float64) for rng in rngs], 1)
    edges = torch.tensor(list(KIND_FRACTIONS.values()), dtype=torch.float64).cumsum(0)[:-1]
    index = torch.bucketize(u_kind, edges, right=True)
    kind = {name: index == i for i, name in enumerate(KIND_FRACTIONS)}
    coverage = torch.where(kind["points"], COVERAGE[0] * (COVERAGE[1] / COVERAGE[0]) ** u_level, 1.0)
    block = torch.where(kind["coarse"], torch.tensor(blocks)[(u_level * len(blocks)).long()], 1)
    noise = torch.where(kind["noisy"], NOISE[0] * (NOISE[1] / NOISE[0]) ** u_level, 0.0)
    return torch.stack([coverage.masked_fill(kind["none"], 0.0), noise, block], 1)


def observe(v: Tensor, levels: Tensor, rngs: Sequence[torch.Generator]) -> Observation:
    """The observation of the normalised field v (B, C, *space), 1 to 3 space axes, at `levels` (B, 3) as in
    `CASES`.

    A coverage above zero observes at least one cell. Random numbers are generated on the CPU. Raises
    ValueError for blocks that do not divide the grid.
    """
    space, cells = v.shape[2:], v.shape[2:].numel()
    averaged, mask, eta = v, torch.zeros(len(v), cells), torch.zeros(v.shape)
    blocks = levels[:, 2].long()
    for block in sorted(set(blocks.tolist()) - {1}):
        if any(size % block for size in space):
            raise ValueError(
                f"blocks of {block} cells do not divide the grid {tuple(space)}; expected a "
                f"multiple of {block} per axis (ups.generative.observation.observe). Change "
                "task.TASK.resolution or leave the case out."
            )
        rows = send(blocks == block, v.device).view(-1, *[1] * (v.ndim - 1))
        averaged = torch.where(rows, block_average(v, block), averaged)
    for row, ((coverage, noise, _), rng) in enumerate(zip(levels.tolist(), rngs, strict=True)):
        count = max(round(coverage * cells), int(coverage > 0))
        is_partial = 0 < count < cells
        mask[row, torch.randperm(cells, generator=rng)[:count] if is_partial else slice(count)] = 1.0
        if noise > 0:
            eta[row] = torch.randn(v.shape[1:], generator=rng) * noise
    facts = torch.stack([mask.double().mean(1), levels[:, 1], levels[:, 2].log2()], 1)
    groups = [_groups(row, space, block) for row, block in zip(mask, blocks.tolist(), strict=True)]
    mask, eta = (send(part.to(v.dtype), v.device) for part in (mask.view(-1, 1, *space), eta))
    return Observation(mask * (averaged + eta), mask, send(facts.float(), v.device), groups)


def _groups(mask: Tensor, space: Sequence[int], block: int) -> Tensor:
    """Flat indices (k, block^ndim) of the observed blocks; mask (cells,) of one row."""
    cells = torch.arange(len(mask)).view(*space)
    for axis in range(len(space)):
        cells = cells.unfold(axis, block, block)
    cells = cells.reshape(-1, block ** len(space))
    return cells[mask[cells[:, 0]] > 0]


def observe_case(v: Tensor, case: str, rngs: Sequence[torch.Generator]) -> Observation:
    """The observation of v (B, C, *space) in the named case, one of `CASES`."""
    return observe(v, torch.tensor([CASES[case]] * len(v), dtype=torch.float64), rngs)


def observe_cells(v: Tensor, mask: Tensor) -> Observation:
    """The exact observation of v (B, C, *space) at the cells where mask (B, 1, *space) is 1."""
    mask = mask.to(v)
    facts = nn.functional.pad(mask.flatten(1).mean(1)[:, None], (0, len(FACTS) - 1))
    groups = [_groups(row, v.shape[2:], 1) for row in mask.flatten(1).cpu()]
    return Observation(torch.where(mask > 0, v, 0.0), mask, facts, groups)


def observe_all(v: Tensor) -> Observation:
    """The exact observation of all cells of v (B, C, *space)."""
    mask, facts = torch.ones_like(v[:, :1]), v.new_zeros(len(v), len(FACTS))
    facts[:, 0] = 1.0
    return Observation(v, mask, facts, [_groups(torch.ones(mask[0].numel()), v.shape[2:], 1)] * len(v))


def as_linear(observation: Observation, row: int, mean: float, std: float) -> LinearObservation:
    """One row of an observation of v = (g - mean) / std as y = A g + noise * eta of the field g (log a)
    itself.

    mean, std: of the codec's only channel (`codec.mean.item()`, `codec.std.item()`). Raises ValueError unless
    the row is one channel on a square 2D grid, as the generated data are.
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
    """Mean over blocks of `block` cells per axis, repeated over the block: (B, C, *space)."""
    for axis in range(2, v.ndim):
        v = v.unflatten(axis, (-1, block)).mean(axis + 1).repeat_interleave(block, axis)
    return v


class Posterior(NamedTuple):
    """A field given an observation: mean and standard deviation of each cell, (B, C, *space), and samples (B,
    M, C, *space)."""

    mean: Tensor
    std: Tensor
    samples: Tensor


class LinearPosterior(nn.Module):
    """A Gaussian fitted to training fields, conditioned on part of a field; its mean is the best linear
    guess.

        v = mean + U s + e,  s ~ N(0, diag(variance)),  e ~ N(0, residual_variance I),  y = A v + noise * eta
        v | y:  z + mean + C A^T K^-1 (y - A (mean + z) - noise * eta),  z ~ N(0, C),  K = A C A^T + noise^2 I

    (Probabilistic principal components, Tipping and Bishop 1999, conditioned as in ups/tasks/darcy_grf.py.)
    shape: (C, *space) of a field. floor: the smallest solution whose logarithm is taken, stored for the
    prior.

    If few cells are unobserved, the smallest variances rule the posterior there, and a sample covariance has
    them far too small. So the variances along U come from fields that did not make U (cross-validation;
    Lamrani et al. 2025, arXiv 2503.15186). U is the basis, of principal components or of waves (cosines,
    sines or both along every axis, which diagonalise the covariance of a stationary field: Kasanicky, Mandel
    and Vejmelka 2015, "Spectral diagonal ensemble Kalman filters"), that gives held-out fields the highest
    likelihood, i.e. the smallest product of these variances. Only the eigenvectors of the true covariance
    reach the minimum (Hadamard's inequality). A row costs k^3 for k observed numbers, but no inversion if all
    cells are observed.
    """

    def __init__(self, shape: Sequence[int], num_modes: int):
        super().__init__()
        self.shape, cells = tuple(shape), torch.Size(shape).numel()
        for name, size in (
            ("mean", (cells,)),
            ("variance", (num_modes,)),
            ("basis", (cells, num_modes)),
            ("residual_variance", ()),
            ("floor", ()),
        ):
            self.register_buffer(name, torch.zeros(size))
        self._covariance: Tensor | None = None

    @classmethod
    def fit(
        cls, fields: Tensor, floor: float = 0.0, image: Callable[[Tensor], Tensor] | None = None
    ) -> "LinearPosterior":
        """The posterior of training fields (n, C, *space), on their device. image: applies one random
        symmetry to all fields of a batch; None: no symmetry."""
        num_images = max(1, min(IMAGES, LARGEST_IMAGES // fields.numel()))
        images = [fields] if image is None else [image(fields) for _ in range(num_images)]
        mean = torch.stack([part.flatten(1).double().mean(0) for part in images]).mean(0)
        total = torch.stack([(part.flatten(1) - mean).square().sum(1).mean() for part in images]).mean()
        bases = [component_basis(images, mean)] + [wave_basis(images, mean, rows) for rows in WAVES]

        def residual_variance(variance: Tensor) -> float:
            return max(float(total - variance.sum()) / max(len(mean) - len(variance), 1), MIN_VARIANCE)

        def code_length(variance: Tensor) -> float:  # twice the negative log-likelihood, without constants
            rest = (len(mean) - len(variance)) * math.log(residual_variance(variance))
            return float(variance.log().sum()) + rest

        basis, variance = min(bases, key=lambda pair: code_length(pair[1]))
        linear, residual = cls(fields.shape[1:], len(variance)).to(fields), residual_variance(variance)
        linear.mean.copy_(mean)
        linear.basis.copy_(basis)
        linear.variance.copy_((variance - residual).clamp_min(0))
        linear.residual_variance.fill_(residual)
        linear.floor.fill_(floor)
        return linear

    def forward(self, observation: Observation, noise: Tensor | None = None) -> Posterior:
        """The posterior given an observation. noise (B, M, 2, C, *space): standard normal, for M samples of
        each row; None: no samples."""
        values = observation.values
        if noise is None:
            noise = values.new_zeros(len(values), 0, 2, *self.shape)
        rows = zip(
            values.flatten(1),
            observation.groups,
            observation.is_complete,
            observation.facts[:, 1],
            noise.flatten(3),
            strict=True,
        )
        squares = self.basis.square()
        prior = (
            self.residual_variance + squares @ self.variance
        )  # variance of each cell without an observation
        parts = [
            self._given_all(y, size, *white.unbind(1), squares)
            if is_complete
            else self._given_groups(y, groups, size, *white.unbind(1), prior)
            for y, groups, is_complete, size, white in rows
        ]
        mean, std, samples = (
            torch.stack(part).to(values).unflatten(-1, self.shape) for part in zip(*parts, strict=True)
        )
        # cells that are observed exactly keep their values, without rounding
        is_exact = observation.mask.expand_as(values) > 0
        is_exact &= (observation.facts[:, 1:] == 0).all(1).view(-1, *[1] * len(self.shape))
        return Posterior(
            torch.where(is_exact, values, mean),
            std.masked_fill(is_exact, 0.0),
            torch.where(is_exact[:, None], values[:, None], samples),
        )

    def _given_all(
        self, y: Tensor, noise: Tensor, white: Tensor, eta: Tensor, squares: Tensor
    ) -> tuple[Tensor, ...]:
        """Mean, standard deviation (cells,) and samples (M, cells) given all cells y with noise, where the
        modes decouple. squares: of the basis."""
        rest = self.residual_variance
        along, square = self.variance + rest, noise.square()
        gain, gain_rest = along / (along + square), rest / (rest + square)

        def filtered(x: Tensor) -> Tensor:
            return gain_rest * x + (x @ self.basis * (gain - gain_rest)) @ self.basis.mT

        z = self._sample_prior(white)
        variance_rest = rest * (1 - gain_rest)
        variance = variance_rest + squares @ (along * (1 - gain) - variance_rest)
        return (
            self.mean + filtered(y - self.mean),
            variance.clamp_min(0).sqrt(),
            self.mean + z + filtered(y - self.mean - z - noise * eta),
        )

    def _given_groups(
        self, y: Tensor, groups: Tensor, noise: Tensor, white: Tensor, eta: Tensor, prior: Tensor
    ) -> tuple[Tensor, ...]:
        """The same given the means of the groups (k, m), k >= 0, in float64. prior: variance of each cell for
        k = 0."""
        per_channel = self.basis.shape[0] // self.shape[0]
        cells = torch.cat([groups + channel * per_channel for channel in range(self.shape[0])])
        cells = send(cells, y.device)
        z, mean = self._sample_prior(white).double(), self.mean.double()

        def apply_a(x: Tensor) -> Tensor:
            return x[..., cells].mean(-1)

        cross = self._cross_covariance(cells)
        k = apply_a(cross) + noise.double().square() * torch.eye(len(cells), device=y.device).double()
        # NaN if the factorisation fails, rather than a check that waits for the device
        factor, info = torch.linalg.cholesky_ex(0.5 * (k + k.mT))
        factor = torch.where(info == 0, factor, torch.nan)
        first = y[cells[:, 0]].double()
        misfit = first - apply_a(mean + z) - noise * eta[:, cells[:, 0]]
        misfits = torch.cat([(first - apply_a(mean))[None], misfit])
        updates = torch.cholesky_solve(misfits.mT, factor).mT @ cross
        reduction = torch.linalg.solve_triangular(factor, cross, upper=False).square().sum(0)
        return mean + updates[0], (prior - reduction).clamp_min(0).sqrt(), mean + z + updates[1:]

    def _sample_prior(self, white: Tensor) -> Tensor:
        """z (M, cells) with covariance C: its symmetric root times white noise of that shape."""
        std = self.residual_variance.sqrt()
        along = (self.variance + self.residual_variance).sqrt() - std
        return std * white + (white @ self.basis * along) @ self.basis.mT

    def _cross_covariance(self, cells: Tensor) -> Tensor:
        """A C (k, cells), float64, of groups (k, m)."""
        if len(self.variance) == len(self.mean):  # with all modes C is no larger than the basis
            if self._covariance is None or self._covariance.device != self.basis.device:
                basis = self.basis.double()
                self._covariance = basis * self.variance @ basis.mT
                self._covariance.diagonal().add_(self.residual_variance)
            return self._covariance[cells].mean(1)
        basis = self.basis.double()
        cross = basis[cells].mean(1) * self.variance @ basis.mT
        return cross.scatter_add_(
            1, cells, (self.residual_variance.double() / cells.shape[1]).expand(cells.shape)
        )


def component_basis(images: Sequence[Tensor], mean: Tensor) -> tuple[Tensor, Tensor]:
    """(basis (cells, K), variance (K,)) of the principal components of images (n, C, *space) about mean
    (cells,). Variances are those of fields that did not make the component."""
    subspace, (count, cells) = None, images[0].flatten(1).shape
    if cells > MODES:  # components are sought in the span of the leading ones of a few images
        few = torch.cat([part.flatten(1) - mean.float() for part in images[: 1 + 8 * MODES // count]])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            subspace = torch.svd_lowrank(few[: 8 * MODES], min(MODES, len(few)))[2].double()
    fold = torch.arange(count, device=mean.device) % FOLDS
    second = 0  # moments of every fold, (FOLDS, K, K)
    for part in images:
        x = part.flatten(1).double() - mean
        x = x if subspace is None else x @ subspace
        second = second + torch.stack([x[fold == k].mT @ x[fold == k] for k in range(FOLDS)])
    second = second / (count * len(images))

    def components(moment: Tensor) -> Tensor:
        return torch.linalg.eigh(moment)[1].flip(1)

    variance = 0
    for k in range(FOLDS):
        u = components(second.sum(0) - second[k])
        variance = variance + torch.einsum("ik,ij,jk->k", u, second[k], u)
    basis = components(second.sum(0))
    return basis if subspace is None else subspace @ basis, variance.clamp_min(MIN_VARIANCE)


def wave_basis(
    images: Sequence[Tensor], mean: Tensor, rows: Callable[[int], Tensor]
) -> tuple[Tensor, Tensor]:
    """The same of products of the waves `rows(n)` (n, n) along every axis: those of most variance, each in
    one channel."""
    shape = images[0].shape[1:]
    along = [rows(n).to(mean) for n in shape[1:]]
    square = sum(apply_axes(part.double() - mean.view(shape), along).square().mean(0) for part in images)
    variance, kept = (square.flatten() / len(images)).topk(min(MODES, len(mean)))
    wave = torch.zeros(len(kept), len(mean)).to(mean).scatter_(1, kept[:, None], 1.0).view(-1, *shape)
    basis = apply_axes(wave, [matrix.mT for matrix in along]).flatten(1).mT
    return basis, variance.clamp_min(MIN_VARIANCE)
