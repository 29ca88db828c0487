"""Limits on samples by wave number, so that samples have no noise where the data have none.

    r_hat(k) <- pull(|k|) w_pred_hat(k) + gain(|k|) r_hat(k)
    w_pred + r has no energy in silent waves, which no training state has

A network's sample has an error of a few percent of the residual. Spread over all waves, that is many times
the energy of a smooth residual in short waves, or in a mean that the equation conserves. And where a
prediction has too much energy, the residual takes it away, but a sample that is independent of the prediction
adds to it. A gain of at most 1 takes power that samples have too much, and a pull as much of the prediction
as gives w_pred + r the energy of states within TOLERANCE. More costs CRPS: gains above 1 and pulls that no
energy needs 3 to 4 % at the first lead of `barkley2d` (docs/lab/log.md). Both are measured by shell of |k|,
and silent waves by wave, on a stage's training residuals (ups/generative/fit_limits.py). Waves are those of
the field, because waves of the tokens would have jumps at the edges of patches; along walls those of
`ups_discovery.spectral.FieldTransform`.
"""

import torch
from torch import Tensor, nn

from ups.metrics.spectra import ROUNDING
from ups.models.constraints import TINY
from ups_discovery.spectral import FieldTransform

CHANCE = 3.0  # standard errors; a gain is 1 and a pull 0 unless the moments differ by more
LARGEST = 2.0  # gain for sampled states: waves that samples hardly have are not amplified without bound
TOLERANCE = 1.1  # energy of w_pred + r over that of states, or the reverse, without more pull
SECOND = (0, 2)  # evaluations of the samplers with the second row of gains
SETS = 2  # of gains: for observed states and for sampled ones


class WaveLimits(nn.Module):
    """The limits of one task, for fields (batch, channels, *space).

    gains (2, SETS, 2, channels, waves), (pull, gain) on the third axis, (-1, 0) of silent waves: the first
    row for one evaluation or the probability flow, the second for two evaluations or Gaussian waves, of which
    no network has both. is_silent: (channels, waves). A new object limits nothing.
    """

    def __init__(self, channels: int, *space: int, boundary: str):
        super().__init__()
        self.transform = FieldTransform(space, boundary)
        shells = self.transform.wave_numbers.floor().long()
        self.register_buffer("shells", shells, persistent=False)
        self.num_shells = int(shells.max()) + 1
        nothing = torch.tensor([0.0, 1.0]).view(2, 1, 1)
        self.register_buffer("gains", nothing.repeat(2, SETS, 1, channels, self.transform.modes))
        self.register_buffer("is_silent", torch.zeros(channels, self.transform.modes, dtype=torch.bool))

    def forward(self, w_pred: Tensor, r: Tensor, evaluations: int | None, is_sampled: Tensor) -> Tensor:
        """r (batch, channels, *space) within the limits. w_pred: the prediction; evaluations: as in
        `SAMPLERS`; is_sampled (batch,): whether the input state is a sample."""
        pull, gain = self.gains[int(evaluations in SECOND)][is_sampled.long()].unbind(1)
        return self.transform.inverse(pull * self.transform(w_pred) + gain * self.transform(r))

    def power(self, w: Tensor) -> Tensor:
        """Power of fields w (n, channels, *space) by wave, in float64: (n, channels, waves)."""
        return self.transform(w.double()).abs().square()

    def moments(self, w_pred: Tensor, r: Tensor) -> Tensor:
        """(n, 3, channels, shells), without the silent waves: power of the prediction, its product with r,
        and power of r."""
        w_hat, r_hat = self.transform(w_pred.double()), self.transform(r.double())
        product = torch.stack([w_hat.abs().square(), (w_hat.conj() * r_hat).real, r_hat.abs().square()], 1)
        total = product.new_zeros(*product.shape[:3], self.num_shells)
        return total.index_add_(3, self.shells, torch.where(self.is_silent, 0.0, product))

    @torch.no_grad()
    def set_silent(self, power: Tensor) -> None:
        """Set the silent waves: those with only rounding errors in `power` (channels, waves) of the
        states."""
        self.is_silent.copy_(power <= ROUNDING * power.sum(1, keepdim=True))
        self.gains.copy_(self.without_silent(self.gains))

    @torch.no_grad()
    def set_gains(self, exact: Tensor, sampled: Tensor, evaluations: int | None, is_sampled: bool) -> None:
        """Set pulls and gains from the `moments` of residuals and of samples at the same states, each (mean,
        standard error) (2, 3, channels, shells). Those of observed states also apply to sampled ones until
        those are measured. For sampled states all moments are met, as half a percent a frame adds up."""
        largest, tolerance = (LARGEST, 1.0) if is_sampled else (1.0, TOLERANCE)
        (power, product, energy), (_, product_error, energy_error) = exact
        (own_power, own_product, own_energy), (_, own_product_error, own_error) = sampled
        power = power.clamp_min(TINY)
        slope, own_slope = product / power, own_product / own_power.clamp_min(TINY)
        rest, own_rest = energy - slope * product, own_energy - own_slope * own_product
        error = torch.hypot(energy_error / energy.clamp_min(TINY), own_error / own_energy.clamp_min(TINY))
        ratio = rest.clamp_min(TINY) / own_rest.clamp_min(TINY)
        gain = torch.where(ratio.log().abs() <= CHANCE * error, 1.0, ratio.sqrt()).clamp_max(largest)
        pull = slope - gain * own_slope  # with which the product with the prediction is that of residuals
        error = torch.hypot(product_error, gain * own_product_error) / power
        pull = torch.where(pull.abs() <= CHANCE * error, 0.0, pull)
        # w_pred + r, over the power of w_pred: energy of states; what of samples is independent of w_pred
        state, noise = (1 + slope).square() + rest / power, gain.square() * own_rest / power
        energy = ((1 + gain * own_slope).square() + noise).clamp(state / tolerance, state * tolerance)
        needed = (energy - noise).clamp_min(0).sqrt() - (1 + gain * own_slope)
        pull = needed.clamp(pull.clamp_max(0), pull.clamp_min(0))
        found = torch.stack([pull, gain])[..., self.shells].to(self.gains)
        self.gains[int(evaluations in SECOND), int(is_sampled) :] = self.without_silent(found)

    def without_silent(self, gains: Tensor) -> Tensor:
        """Gains with which w_pred + r has nothing in silent waves."""
        return torch.where(self.is_silent, gains.new_tensor([-1.0, 0.0]).view(2, 1, 1), gains)
