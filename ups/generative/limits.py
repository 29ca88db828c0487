"""Limits on samples by wave number, so that samples have no noise where the data have none.

    r_hat(k) <- gain(|k|) r_hat(k),   gain = sqrt(power of residuals / power of samples) at the same states
    w_pred + r has no energy in silent waves, which no training state has

A network's sample has an error of a few percent of the residual. Spread over all waves, that is many times
the energy of a smooth residual in short waves, or in a mean that the equation conserves. Gains by shell of
|k| and silent waves are measured at the end of a stage on its training residuals
(ups/generative/fit_limits.py) and are stored with its weights. Waves are those of the field, because waves
of the tokens would have jumps at the edges of patches. Along walls they are those of
`ups_discovery.spectral.FieldTransform`.
"""

import torch
from torch import Tensor, nn

from ups.metrics.spectra import ROUNDING
from ups_discovery.boundary import DIRICHLET, along
from ups_discovery.spectral import FieldTransform

CHANCE = 3.0  # standard errors; a gain is 1 unless the powers differ by more
TINY = 1e-30
LARGEST = 2.0  # gain: waves that samples hardly have are not amplified without bound
SECOND = (0, 2)  # evaluations of the samplers with the second row of gains
SETS = 2  # of gains: for observed states and for sampled ones


class WaveLimits(nn.Module):
    """The limits of one task, for fields (batch, channels, *space) with the frames of a call as channels.

    gains (2, SETS, channels, shells): the first row for one evaluation or the probability flow, the second
    for two evaluations or Gaussian waves, of which no network has both. is_silent: (channels, waves). A new
    object limits nothing.
    """

    def __init__(self, channels: int, *space: int, boundary: str):
        super().__init__()
        self.transform = FieldTransform(space, boundary)
        shells = wave_numbers(self.transform, boundary).floor().long()
        self.register_buffer("shells", shells, persistent=False)
        self.register_buffer("gains", torch.ones(2, SETS, channels, int(shells.max()) + 1))
        self.register_buffer("is_silent", torch.zeros(channels, self.transform.modes, dtype=torch.bool))

    def forward(self, w_pred: Tensor, r: Tensor, evaluations: int | None, is_sampled: Tensor) -> Tensor:
        """r (batch, channels, *space) within the limits. w_pred: the prediction; evaluations: as in
        `SAMPLERS`; is_sampled (batch,): whether the input state is a sample."""
        gain = self.gains[int(evaluations in SECOND)][is_sampled.long()][..., self.shells]
        r_hat = torch.where(self.is_silent, -self.transform(w_pred), gain * self.transform(r))
        return self.transform.inverse(r_hat)

    def power(self, w: Tensor) -> Tensor:
        """Power of fields w (n, channels, *space) by wave, in float64: (n, channels, waves)."""
        return self.transform(w.double()).abs().square()

    def power_by_shell(self, w: Tensor) -> Tensor:
        """The same by shell, (n, channels, shells), without the silent waves."""
        power = torch.where(self.is_silent, 0.0, self.power(w))
        total = power.new_zeros(*power.shape[:2], self.gains.shape[-1])
        return total.index_add_(2, self.shells, power)

    @torch.no_grad()
    def set_silent(self, power: Tensor) -> None:
        """Set the silent waves: those with only rounding errors in `power` (channels, waves) of the
        states."""
        self.is_silent.copy_(power <= ROUNDING * power.sum(1, keepdim=True))

    @torch.no_grad()
    def set_gains(
        self, power: Tensor, sample_power: Tensor, evaluations: int | None, is_sampled: bool
    ) -> None:
        """Set the gains from the powers by shell of residuals and of samples at the same states, each (mean,
        standard error) (2, channels, shells). Gains of observed states also apply to sampled ones until those
        are measured."""
        mean, sample_mean = power[0].clamp_min(TINY), sample_power[0].clamp_min(TINY)
        error = ((power[1] / mean).square() + (sample_power[1] / sample_mean).square()).sqrt()
        is_equal = (sample_mean / mean).log().abs() <= CHANCE * error
        gain = (mean / sample_mean).sqrt().clamp_max(LARGEST)
        self.gains[int(evaluations in SECOND), int(is_sampled) :] = torch.where(is_equal, 1.0, gain)


def wave_numbers(transform: FieldTransform, boundary: str) -> Tensor:
    """|k| of every wave of a transform (modes,), in waves per box; along walls multiples of 1/2."""
    waves = []
    for axis, (n, size, end) in enumerate(
        zip(transform.space, transform.shape, along(boundary, len(transform.space)), strict=True)
    ):
        k = torch.arange(size, dtype=torch.float64)
        is_periodic = axis in transform.periodic
        waves.append(torch.minimum(k, n - k) if is_periodic else (k + (end == DIRICHLET)) / 2)
    grid = torch.meshgrid(*waves, indexing="ij")
    return torch.stack([k.square() for k in grid]).sum(0).sqrt().flatten()
