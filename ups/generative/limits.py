"""Limits on samples by wave number, so that samples have no noise where the data have none.

    r_hat(k) <- pull(|k|) w_pred_hat(k) + gain(|k|, g) r_hat(k)
    w_pred + r has no energy in silent waves, which no training state has

A network's sample has an error of a few percent of the residual. Spread over all waves, that is many times
the energy of a smooth residual in short waves, or in a mean that the equation conserves. And where a
prediction has too much energy, the residual takes it away, but a sample that is independent of the prediction
adds to it. With pull and gain, power and product with the prediction are those of residuals at the same
states. They are measured by shell of |k|, and silent waves by wave, on a stage's training residuals
(ups/generative/fit_limits.py), gains in groups g of equal ranks by the mean square of r: where residuals are
rare events, a sample with an event keeps its waves, and one without, which has errors alone, loses them.
Waves are those of the field, because waves of the tokens would have jumps at the edges of patches; along
walls those of `ups_discovery.spectral.FieldTransform`.
"""

import torch
from torch import Tensor, nn

from ups.metrics.spectra import ROUNDING
from ups.models.constraints import TINY
from ups_discovery.spectral import FieldTransform

CHANCE = 3.0  # standard errors; a gain is 1 and a pull 0 unless the moments differ by more
LARGEST = 2.0  # gain: waves that samples hardly have are not amplified without bound
SECOND = (0, 2)  # evaluations of the samplers with the second row of gains
SETS = 2  # of gains: for observed states and for sampled ones
RANKS = (0.5, 0.75, 0.875, 0.9375)  # between groups of samples by their mean square


class WaveLimits(nn.Module):
    """The limits of one task, for fields (batch, channels, *space) with the frames of a call as channels.

    gains (2, SETS, groups, 2, channels, shells), (pull, gain) on the fourth axis: the first row for one
    evaluation or the probability flow, the second for two evaluations or Gaussian waves, of which no network
    has both. ends (2, SETS, groups - 1): largest mean squares of the groups but the last. is_silent:
    (channels, waves). A new object limits nothing.
    """

    def __init__(self, channels: int, *space: int, boundary: str):
        super().__init__()
        self.transform = FieldTransform(space, boundary)
        shells = self.transform.wave_numbers.floor().long()
        self.register_buffer("shells", shells, persistent=False)
        self.num_shells = int(shells.max()) + 1
        nothing = torch.tensor([0.0, 1.0]).view(2, 1, 1)
        self.register_buffer("gains", nothing.repeat(2, SETS, len(RANKS) + 1, 1, channels, self.num_shells))
        self.register_buffer("ends", torch.zeros(2, SETS, len(RANKS)))
        self.register_buffer("is_silent", torch.zeros(channels, self.transform.modes, dtype=torch.bool))

    def forward(self, w_pred: Tensor, r: Tensor, evaluations: int | None, is_sampled: Tensor) -> Tensor:
        """r (batch, channels, *space) within the limits. w_pred: the prediction; evaluations: as in
        `SAMPLERS`; is_sampled (batch,): whether the input state is a sample."""
        row, which = int(evaluations in SECOND), is_sampled.long()
        group = (self.size(r)[:, None] > self.ends[row][which]).sum(1)
        pull, gain = self.gains[row][which, group][..., self.shells].unbind(1)
        w_hat = self.transform(w_pred)
        r_hat = torch.where(self.is_silent, -w_hat, pull * w_hat + gain * self.transform(r))
        return self.transform.inverse(r_hat)

    def size(self, r: Tensor) -> Tensor:
        """Mean square (n,) of fields r (n, channels, *space)."""
        return r.square().flatten(1).mean(1)

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

    @torch.no_grad()
    def set_gains(
        self, exact: Tensor, sampled: Tensor, ends: Tensor, evaluations: int | None, is_sampled: bool
    ) -> None:
        """Set pulls and gains from the `moments` of residuals and of samples by group, each (mean, standard
        error) (2, 3, groups + 1, channels, shells), the last of all, and the ends of the groups of samples.
        Those of observed states also apply to sampled ones until those are measured."""
        (power, product, energy), (_, product_error, energy_error) = exact
        (own_power, own_product, own_energy), (_, own_product_error, own_error) = sampled
        power, own_power = power.clamp_min(TINY), own_power.clamp_min(TINY)
        slope, own_slope = product[-1] / power[-1], own_product[-1] / own_power[-1]
        rest = energy + slope * (slope * power - 2 * product)
        own_rest = own_energy + own_slope * (own_slope * own_power - 2 * own_product)
        energy, own_energy = energy.clamp_min(TINY), own_energy.clamp_min(TINY)
        error = ((energy_error / energy).square() + (own_error / own_energy).square()).sqrt()
        ratio = rest.clamp_min(TINY) / own_rest.clamp_min(TINY)
        gain = torch.where(ratio.log().abs() <= CHANCE * error, 1.0, ratio.sqrt().clamp_max(LARGEST))[:-1]
        share = gain.new_tensor((0.0, *RANKS, 1.0)).diff().view(-1, 1, 1)
        own_slope = (share * gain * own_product[:-1]).sum(0) / own_power[-1]
        error = product_error[-1].square() + own_product_error[-1].square() * (share * gain.square()).sum(0)
        pull = slope - own_slope
        pull = torch.where(pull.abs() <= CHANCE * error.sqrt() / power[-1], 0.0, pull)
        place = int(evaluations in SECOND), slice(int(is_sampled), None)
        self.gains[place], self.ends[place] = torch.stack([pull.expand_as(gain), gain], 1), ends
