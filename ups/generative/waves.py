"""The linear part of a sampler: flow, and map from noise, of a Gaussian with the covariance of the residuals.

If the law of residuals is invariant under shifts, different waves along the token axes are uncorrelated. The
covariance of the D numbers of a token is then one Hermitian matrix per wave, and its eigenvectors give
uncorrelated coefficients with standard deviations s (a proper orthogonal decomposition of every wave). For
N(0, s^2), with x = cos(angle) r + sin(angle) noise and v = s^2 cos^2 + sin^2,

    velocity of the flow   F = x sin cos (1 - s^2) / v          spread of the rest of F given x:  s / sqrt(v)
    end of the flow        y = x s / sqrt(v)

(ups/generative/diffusion.py). The network learns the rest in units of that spread. So samples have the
spectrum of the residuals before the first training step, and no sample leaves the span of the residuals.
Along walls, waves are those of `ups_discovery.spectral.FieldTransform`; there this is an approximation that
the network corrects.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.generative.diffusion import gaussian_flow, gaussian_map
from ups_discovery.spectral import FieldTransform

LARGEST = 2**22  # numbers in the eigenvectors of all waves; with more, no eigenvectors are used
LEAST = 1e-3  # of the largest standard deviation: smaller ones are rounding errors of the tokenizer


class Waves(nn.Module):
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
        r_hat = self._waves(r.double()).movedim(1, 0)  # (waves, n, dim)
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
        r_hat, std = self._mixed(self._waves(r)), self.std
        numbers = self.transform.multiplicity.to(std)[:, None]  # of real numbers behind a complex one, of 2
        value = 0.5 * r_hat.abs().square().mean(0) / std.square() + std.log()
        return (numbers * value).sum() / (numbers.sum() * std.shape[1])

    def flow(self, x: Tensor, angle: Tensor, rest: Tensor) -> Tensor:
        """The velocity F of a diffusion from the network's `rest`; x and rest (batch, *tokens, dim)."""
        linear, variance = gaussian_flow(self.std, *self._at(angle))
        return self._joined(x, linear, rest, self.std / variance.sqrt())

    def map(self, x: Tensor, angle: Tensor, rest: Tensor) -> Tensor:
        """The F of a student, whose sample is cos(angle) x - sin(angle) F."""
        linear, variance = gaussian_map(self.std, *self._at(angle))
        return self._joined(x, linear, rest, self.std / variance.sqrt())

    def sample_gaussian(self, noise: Tensor) -> Tensor:
        """Samples of the Gaussian from white noise (batch, *tokens, dim)."""
        return self._back(self.std * self._mixed(self._waves(noise)))

    def _at(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        return angle.cos()[:, None, None], angle.sin()[:, None, None]

    def _joined(self, x: Tensor, linear: Tensor, rest: Tensor, spread: Tensor) -> Tensor:
        x_hat, rest_hat = self._mixed(self._waves(x)), self._mixed(self._waves(rest))
        return self._back(linear * x_hat + spread * rest_hat)

    def _back(self, found: Tensor) -> Tensor:
        """Inverse of `_mixed` and `_waves`: (batch, *tokens, dim)."""
        if self.is_mixed:
            found = (found.movedim(1, 0) @ self._eigenvectors(found).mH).movedim(0, 1)
        return self.transform.inverse(found.movedim(1, -1)).movedim(1, -1)

    def _waves(self, x: Tensor) -> Tensor:
        """(batch, waves, dim)."""
        return self.transform(x.movedim(-1, 1)).movedim(-1, 1)

    def _mixed(self, x_hat: Tensor) -> Tensor:
        return (x_hat.movedim(1, 0) @ self._eigenvectors(x_hat)).movedim(0, 1) if self.is_mixed else x_hat

    def _eigenvectors(self, like: Tensor) -> Tensor:
        return (torch.view_as_complex(self.mix) if self.transform.is_complex else self.mix).to(like)
