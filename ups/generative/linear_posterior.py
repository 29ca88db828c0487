"""The linear posterior of an input field given a partial observation; it is stored with the weights of a
prior."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ups.common.device import send
from ups.generative.observation import Observation
from ups_discovery.spectral import apply_axes, cosine, fourier, sine

WAVES = (cosine, sine, fourier)  # candidates along every axis for the eigenvectors of a field's covariance
MODES = 1024  # largest number of modes of a linear posterior: all of a 32 x 32 grid
FOLDS = 4  # of the training fields: variances are measured on fields that did not make the modes
IMAGES = 16  # random symmetric images of every training field that a covariance is averaged over
LARGEST_IMAGES = 2**27  # numbers in all images together
MIN_VARIANCE = 1e-6  # of a cell on its own, in normalised units: keeps a covariance regular


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

    (Probabilistic principal components, Tipping and Bishop 1999, conditioned as in ups_solvers/darcy_grf.py.)
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

    @property
    def description(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "num_modes": len(self.variance)}

    def forward(self, observation: Observation, noise: Tensor | None = None) -> Posterior:
        """The posterior given an observation. noise (B, M, 2, C, *space): standard normal, for M samples of
        each row; None: no samples."""
        # variance of each cell without an observation
        return self._given(observation, noise, self.residual_variance + self.basis.square() @ self.variance)

    def guess(self, observation: Observation) -> Tensor:
        """The mean (B, C, *space) alone, in a third of the time."""
        return self._given(observation, None, None).mean

    def _given(self, observation: Observation, noise: Tensor | None, prior: Tensor | None) -> Posterior:
        """`forward`; without a prior variance, with a standard deviation of zero."""
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
        self, y: Tensor, groups: Tensor, noise: Tensor, white: Tensor, eta: Tensor, prior: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The same given the means of the groups (k, m), k >= 0, in float64. prior: variance of each cell for
        k = 0; None: the standard deviation is not computed, which takes most of the time, but zero."""
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
        std = torch.zeros_like(mean)
        if prior is not None:
            reduction = torch.linalg.solve_triangular(factor, cross, upper=False).square().sum(0)
            std = (prior - reduction).clamp_min(0).sqrt()
        return mean + updates[0], std, mean + z + updates[1:]

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
