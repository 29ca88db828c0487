"""No noise where the data have none: what is drawn is corrected wave by wave.

    r_hat(k) <- gain(|k|) r_hat(k),   gain = sqrt(power of residuals / power of draws) at the same states
    w_pred + r has none of the waves that no training state has

A network's draw is right to some percent of a residual's size. Spread over all waves, such errors are many
times what a smooth residual has in its short waves, or in a mean that the equation keeps. Gains, in shells of
|k|, and silent waves are measured at the end of a stage on the residuals that it learns from
(ups/generative/calibration.py), and travel with its weights. Waves are those of the field: of tokens alone,
patches would have steps at their edges. Along walls they are those of `ups.common.spectral.FieldTransform`.
"""

import torch
from torch import Tensor, nn

from ups.common.boundary import DIRICHLET, along
from ups.common.spectral import FieldTransform
from ups.metrics.spectra import ROUNDING

CHANCE = 3.0  # standard errors by which powers of draws and residuals differ where a gain is not 1
TINY = 1e-30
LARGEST = 2.0  # gain: noise is not made from next to nothing
SETS = 2  # of gains: for a state that is given, and for one that was drawn


class WaveLimits(nn.Module):
    """The limits of one task for fields (batch, channels, *space), channels of all frames of a call side by
    side.

    gain (evaluations, SETS, channels, shells): for one evaluation of a network or the probability flow, and
    for two. is_silent (channels, waves). As built, nothing is limited.
    """

    def __init__(self, channels: int, *space: int, boundary: str):
        super().__init__()
        self.transform = FieldTransform(space, boundary)
        shells = wave_numbers(self.transform, boundary).floor().long()
        self.register_buffer("shells", shells, persistent=False)
        self.register_buffer("gain", torch.ones(2, SETS, channels, int(shells.max()) + 1))
        self.register_buffer("is_silent", torch.zeros(channels, self.transform.modes, dtype=torch.bool))

    def forward(self, w_pred: Tensor, r: Tensor, evaluations: int, is_drawn: Tensor) -> Tensor:
        """r (batch, channels, *space) within the limits, w_pred being the prediction. evaluations: 1 or 2;
        is_drawn (batch,): whether the state before was drawn."""
        gain = self.gain[evaluations - 1][is_drawn.long()][..., self.shells]
        r_hat = torch.where(self.is_silent, -self.transform(w_pred), gain * self.transform(r))
        return self.transform.inverse(r_hat)

    def power(self, w: Tensor) -> Tensor:
        """Power of fields w (n, channels, *space) by wave, in float64: (n, channels, waves)."""
        return self.transform(w.double()).abs().square()

    def power_by_shell(self, w: Tensor) -> Tensor:
        """The same in shells, (n, channels, shells), without the silent waves, which are not drawn."""
        power = torch.where(self.is_silent, 0.0, self.power(w))
        total = power.new_zeros(*power.shape[:2], self.gain.shape[-1])
        return total.index_add_(2, self.shells, power)

    @torch.no_grad()
    def set_silent(self, power: Tensor) -> None:
        """Find the waves that states of this `power` (channels, waves) do not have, but for rounding."""
        self.is_silent.copy_(power <= ROUNDING * power.sum(1, keepdim=True))

    @torch.no_grad()
    def set_gain(self, power: Tensor, power_drawn: Tensor, evaluations: int, is_drawn: bool) -> None:
        """Set gains from the powers by shell of residuals and of draws at the same states, each as (mean,
        standard error of the mean) (2, channels, shells). Where they differ by chance the gain is 1. Gains
        for states that are given serve drawn ones, too, until these are measured."""
        mean, mean_drawn = power[0].clamp_min(TINY), power_drawn[0].clamp_min(TINY)
        error = ((power[1] / mean).square() + (power_drawn[1] / mean_drawn).square()).sqrt()
        is_equal = (mean_drawn / mean).log().abs() <= CHANCE * error
        gain = (mean / mean_drawn).sqrt().clamp_max(LARGEST)
        self.gain[evaluations - 1, int(is_drawn) :] = torch.where(is_equal, 1.0, gain)


def wave_numbers(transform: FieldTransform, boundary: str) -> Tensor:
    """|k| of every wave of a transform (modes,), in waves per box; along walls they come in halves."""
    waves = []
    for axis, (n, size, end) in enumerate(
        zip(transform.space, transform.shape, along(boundary, len(transform.space)), strict=True)
    ):
        k = torch.arange(size, dtype=torch.float64)
        is_periodic = axis in transform.periodic
        waves.append(torch.minimum(k, n - k) if is_periodic else (k + (end == DIRICHLET)) / 2)
    grid = torch.meshgrid(*waves, indexing="ij")
    return torch.stack([k.square() for k in grid]).sum(0).sqrt().flatten()
