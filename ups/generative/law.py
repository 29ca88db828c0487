"""The closed-form part of a sampler: a law of the residuals whose flow and map from noise are known.

    x = cos(angle) r + sin(angle) noise,    v = s^2 cos^2 + sin^2    for each component of r ~ N(0, s^2)
    velocity of the flow   F = x sin cos (1 - s^2) / v          spread of the rest of F given x:  s / sqrt(v)
    end of the flow        y = x s / sqrt(v)

(ups/generative/diffusion.py). The network learns the rest in units of that spread, so samples have the law
before the first training step.

Gaussian waves (`Waves`): if the law of residuals is invariant under shifts, different waves along the token
axes are uncorrelated. The covariance of the D numbers of a token is then one Hermitian matrix per wave, and
its eigenvectors give uncorrelated coefficients with standard deviations s (a proper orthogonal decomposition
of every wave). So samples have the spectrum of the residuals and do not leave their span. Along walls, waves
are those of `ups_discovery.spectral.FieldTransform`; there the network corrects the approximation.

A mixture of two scales (`ScaleMixture`), for localized residuals: most tokens are near zero, a few are large.

    r of a token ~ (1 - p) N(0, s_0^2) + p N(0, s_1^2),    independent components of the scales s_0 < s_1
    F = (1 - w) F_0 + w F_1,    F_k as above of s_k,    w(x): probability of the wide component given x

The network adds to the log-odds of w, which couples the tokens, and learns the rest of both components. So
tokens without an event get noise of the size s_0; with a single Gaussian they get a few percent of the size
of the events. If tokens are independent, the flow is exact before training. The denoiser is that of Vila and
Schniter 2013 (arXiv 1207.3107); its use in a flow is ours.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ups.generative.diffusion import gaussian_flow, gaussian_map
from ups_discovery.spectral import FieldTransform

ITERATIONS = 50  # of expectation maximization
SMALLEST = 1e-3  # of the scale of the wide component
LARGEST = 2**22  # numbers in the eigenvectors of all waves; with more, no eigenvectors are used
LEAST = 1e-3  # of the largest standard deviation: smaller ones are rounding errors of the tokenizer


Linear = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # `gaussian_flow` or `gaussian_map`


class Law(nn.Module):
    """A law of residuals (batch, *tokens, dim) with standard deviations `std`. The network's part `rest` is
    (batch, *tokens, size of its output)."""

    std: Tensor

    def flow(self, x: Tensor, angle: Tensor, rest: Tensor) -> Tensor:
        """The velocity F of a diffusion from the network's `rest`; x (batch, *tokens, dim)."""
        return self._joined(x, angle, rest, gaussian_flow)

    def map(self, x: Tensor, angle: Tensor, rest: Tensor) -> Tensor:
        """The F of a student, whose sample is cos(angle) x - sin(angle) F."""
        return self._joined(x, angle, rest, gaussian_map)

    def _joined(self, x: Tensor, angle: Tensor, rest: Tensor, linear_of: Linear) -> Tensor:
        """The factor of `linear_of` times x, and the rest in units of std / sqrt(variance of x)."""
        raise NotImplementedError


class Waves(Law):
    """Waves of residuals (batch, *tokens, dim) whose components have unit variance; std (waves, dim), one
    before `fit`."""

    def __init__(self, tokens: Sequence[int], dim: int, boundary: str):
        super().__init__()
        self.transform = FieldTransform(tuple(tokens), boundary)
        num = self.transform.modes
        self.register_buffer("std", torch.ones(num, dim))
        self.is_mixed = num * dim**2 <= LARGEST
        if self.is_mixed:
            eye = torch.eye(dim).expand(num, dim, dim)
            self.register_buffer(
                "mix",
                torch.view_as_real(eye.to(torch.complex64)).clone()
                if self.transform.is_complex
                else eye.clone(),
            )

    @torch.no_grad()
    def fit(self, r: Tensor) -> None:
        """Fill std and eigenvectors from residuals (n, *tokens, dim)."""
        r_hat = self.transform(r.double().movedim(-1, 1)).movedim(-1, 0)  # (waves, n, dim)
        second = r_hat.mH @ r_hat / len(r)
        if self.is_mixed:
            variance, mix = torch.linalg.eigh(second)
            self.mix.copy_(torch.view_as_real(mix) if mix.is_complex() else mix)
        else:
            variance = second.diagonal(dim1=1, dim2=2).real
        std = variance.clamp_min(0).sqrt()
        self.std.copy_(std.clamp_min(LEAST * float(std.max())).clamp_min(1e-12))

    def negative_log_likelihood(self, r: Tensor) -> Tensor:
        """Of residuals (n, *tokens, dim), per number and without constants: a scalar."""
        r_hat, std = self._waves(r), self.std
        numbers = self.transform.multiplicity.to(std)[:, None]  # of real numbers behind a complex one, of 2
        value = 0.5 * r_hat.abs().square().mean(0) / std.square() + std.log()
        return (numbers * value).sum() / (numbers.sum() * std.shape[1])

    def sample_gaussian(self, noise: Tensor) -> Tensor:
        """Samples of the Gaussian from white noise (batch, *tokens, dim)."""
        return self._back(self.std * self._waves(noise))

    def _joined(self, x: Tensor, angle: Tensor, rest: Tensor, linear_of: Linear) -> Tensor:
        linear, variance = linear_of(self.std, angle.cos()[:, None, None], angle.sin()[:, None, None])
        return self._back(linear * self._waves(x) + self.std / variance.sqrt() * self._waves(rest))

    def _back(self, found: Tensor) -> Tensor:
        """Inverse of `_waves`: (batch, *tokens, dim)."""
        if self.is_mixed:
            found = (found.movedim(1, 0) @ self._eigenvectors(found).mH).movedim(0, 1)
        return self.transform.inverse(found.movedim(1, -1)).movedim(1, -1)

    def _waves(self, x: Tensor) -> Tensor:
        """The coefficients (batch, waves, dim) along the eigenvectors of each wave."""
        x_hat = self.transform(x.movedim(-1, 1)).movedim(-1, 1)
        return (x_hat.movedim(1, 0) @ self._eigenvectors(x_hat)).movedim(0, 1) if self.is_mixed else x_hat

    def _eigenvectors(self, like: Tensor) -> Tensor:
        return (torch.view_as_complex(self.mix) if self.transform.is_complex else self.mix).to(like)


class ScaleMixture(Law):
    """Two components of residuals (batch, *tokens, dim); std (2, dim) and the log-odds of the second, both
    filled by `fit`. The network's part `rest` is (batch, *tokens, 2 dim + 1)."""

    def __init__(self, dim: int):
        super().__init__()
        self.register_buffer("std", torch.ones(2, dim))
        self.register_buffer("log_odds", torch.zeros(()))

    @torch.no_grad()
    def fit(self, r: Tensor) -> None:
        """Maximum likelihood for residuals (n, *tokens, dim), by expectation maximization from the median."""
        square = r.flatten(0, -2).double().square()
        size = square.mean(1)
        wide = (size > size.quantile(0.9)).double()
        for _ in range(ITERATIONS):
            weight = torch.stack([1 - wide, wide])
            variance = (weight @ square) / weight.sum(1, keepdim=True).clamp_min(1e-12)
            variance = variance.clamp_min(SMALLEST**2 * float(variance.max())).clamp_min(1e-24)
            self.std.copy_(variance.sqrt())
            self.log_odds.copy_(torch.logit(wide.mean(), 1e-6))
            wide = torch.sigmoid(self.log_odds + evidence(square, variance))

    def negative_log_likelihood(self, r: Tensor) -> Tensor:
        """Of residuals (n, *tokens, dim), per number and without constants: a scalar."""
        square, variance = r.flatten(0, -2).double().square(), self.std.double().square()
        narrow = -0.5 * (square / variance[0] + variance[0].log()).sum(1)
        odds = self.log_odds + evidence(square, variance)
        total = narrow + nn.functional.softplus(odds) - nn.functional.softplus(self.log_odds.double())
        return -total.mean() / r.shape[-1]

    def _joined(self, x: Tensor, angle: Tensor, rest: Tensor, linear_of: Linear) -> Tensor:
        angle = angle.view(-1, *[1] * x.ndim)
        linear, variance = linear_of(self.std, angle.cos(), angle.sin())
        found, odds = rest[..., :-1].unflatten(-1, (2, -1)), rest[..., -1]
        odds = odds + self.log_odds + evidence(x.square(), variance.movedim(-2, 0))
        weight = torch.sigmoid(odds)[..., None]
        narrow, wide = (linear * x[..., None, :] + self.std / variance.sqrt() * found).unbind(-2)
        return (1 - weight) * narrow + weight * wide


def one_scale(std: Tensor) -> Tensor:
    """The scale by which all components are divided, so that an error counts as in the field: the RMS of
    their standard deviations (dim,)."""
    return std.square().mean().sqrt()


def evidence(square: Tensor, variance: Tensor) -> Tensor:
    """Log-likelihood ratio (...,) of the second component to the first, of squares (..., dim); variance: of
    both, (2, ..., dim)."""
    narrow, wide = variance
    return 0.5 * (square * (1 / narrow - 1 / wide) - (wide / narrow).log()).sum(-1)
