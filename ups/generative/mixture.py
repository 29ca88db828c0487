"""The closed-form part of a sampler of localized residuals: most tokens are near zero, a few are large.

    r of a token ~ (1 - p) N(0, s_0^2) + p N(0, s_1^2),    independent components of the scales s_0 < s_1

x = cos(angle) r + sin(angle) noise has the same law with variances v_k = s_k^2 cos^2 + sin^2. With w(x), the
probability of the wide component given x,

    velocity of the flow   F = (1 - w) F_0 + w F_1,    F_k = x sin cos (1 - s_k^2) / v_k
    map from the noise     the same with the end of the flow of each, x s_k / sqrt(v_k)

(ups/generative/diffusion.py). The network adds to the log-odds of w, which couples the tokens, and learns
the rest of both components in units of s_k / sqrt(v_k). So tokens without an event get noise of the size s_0;
with a single Gaussian they get a few percent of the size of the events. If tokens are independent, the flow
is exact before training. The denoiser is that of Vila and Schniter 2013 (arXiv 1207.3107); its use in a flow
is ours.
"""

import torch
from torch import Tensor, nn

from ups.generative.diffusion import gaussian_flow, gaussian_map

ITERATIONS = 50  # of expectation maximization
SMALLEST = 1e-3  # of the scale of the wide component


class ScaleMixture(nn.Module):
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

    def flow(self, x: Tensor, angle: Tensor, rest: Tensor) -> Tensor:
        """The velocity F of a diffusion from the network's `rest`; x (batch, *tokens, dim)."""
        return self._joined(x, rest, *gaussian_flow(self.std, *self._at(x, angle)))

    def map(self, x: Tensor, angle: Tensor, rest: Tensor) -> Tensor:
        """The F of a student, whose sample is cos(angle) x - sin(angle) F."""
        return self._joined(x, rest, *gaussian_map(self.std, *self._at(x, angle)))

    def _at(self, x: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), (batch, 1, ..., 1)."""
        return angle.cos().view(-1, *[1] * x.ndim), angle.sin().view(-1, *[1] * x.ndim)

    def _joined(self, x: Tensor, rest: Tensor, linear: Tensor, variance: Tensor) -> Tensor:
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
