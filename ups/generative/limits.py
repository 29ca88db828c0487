"""Limits on samples by wave number, so that samples have no noise where the data have none.

    r_hat(k) <- pull(|k|, group) w_pred_hat(k) + gain(|k|, group) r_hat(k)
    w_pred + r has no energy in silent waves, which no training state has

A network's sample has an error of a few percent of the residual. Spread over all waves, that is many times
the energy of a smooth residual in short waves, or in a mean that the equation conserves. And where a
prediction has too much energy, the residual takes it away, but a sample that is independent of the prediction
adds to it. With pull and gain, power and product with the prediction are those of residuals at the same
states. If short waves are those of a few sharp states, so are the residual's, while the error of a network
is in all samples: hence groups of predictions by their own power in these waves. All is measured by shell of
|k|, and silent waves by wave, on a stage's training residuals (ups/generative/fit_limits.py). Waves are those
of the field, because waves of the tokens would have jumps at the edges of patches; along walls those of
`ups_discovery.spectral.FieldTransform`.
"""

import torch
from torch import Tensor, nn

from ups.metrics.spectra import ROUNDING
from ups_discovery.boundary import DIRICHLET, along
from ups_discovery.spectral import FieldTransform

CHANCE = 3.0  # standard errors; a gain is 1 and a pull 0 unless the moments differ by more
TINY = 1e-30
LARGEST = 2.0  # gain: waves that samples hardly have are not amplified without bound
SECOND = (0, 2)  # evaluations of the samplers with the second row of gains
SETS = 2  # of gains: for observed states and for sampled ones
# Between groups of predictions: power in a shell and shorter waves, over its mean. Half of the power of the
# shortest octave of forced Burgers is in 1 % of the states, which have 60 times the mean (docs/lab/log.md).
EDGES = (1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0)
LEAST = 0.005  # fraction of the states in a group; a smaller group has the gains of all states


class WaveLimits(nn.Module):
    """The limits of one task, for fields (batch, channels, *space) with the frames of a call as channels.

    gains (2, SETS, 2, groups, channels, shells), (pull, gain) on the third axis: the first row for one
    evaluation or the probability flow, the second for two evaluations or Gaussian waves, of which no network
    has both. typical (channels, shells): mean power of predictions in a shell and shorter waves. is_silent:
    (channels, waves). A new object limits nothing.
    """

    def __init__(self, channels: int, *space: int, boundary: str):
        super().__init__()
        self.transform = FieldTransform(space, boundary)
        shells = wave_numbers(self.transform, boundary).floor().long()
        self.register_buffer("shells", shells, persistent=False)
        self.num_shells = int(shells.max()) + 1
        nothing = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
        shape = 1 + len(EDGES), channels, self.num_shells
        self.register_buffer("gains", nothing.repeat(2, SETS, 1, *shape))
        self.register_buffer("typical", torch.full(shape[1:], torch.inf))
        self.register_buffer("is_silent", torch.zeros(channels, self.transform.modes, dtype=torch.bool))

    def forward(self, w_pred: Tensor, r: Tensor, evaluations: int | None, is_sampled: Tensor) -> Tensor:
        """r (batch, channels, *space) within the limits. w_pred: the prediction; evaluations: as in
        `SAMPLERS`; is_sampled (batch,): whether the input state is a sample."""
        w_hat, gains = self.transform(w_pred), self.gains[int(evaluations in SECOND)][is_sampled.long()]
        group = self.group(w_hat.abs().square())[:, None, None].expand(-1, 2, 1, -1, -1)
        pull, gain = gains.gather(2, group)[:, :, 0, :, self.shells].unbind(1)
        found = pull * w_hat + gain * self.transform(r)
        return self.transform.inverse(torch.where(self.is_silent, -w_hat, found))

    def power(self, w: Tensor) -> Tensor:
        """Power of fields w (n, channels, *space) by wave, in float64: (n, channels, waves)."""
        return self.transform(w.double()).abs().square()

    def by_shell(self, values: Tensor) -> Tensor:
        """Sums over shells (..., channels, shells) of values (..., channels, waves), silent waves aside."""
        total = values.new_zeros(*values.shape[:-1], self.num_shells)
        return total.index_add_(-1, self.shells, torch.where(self.is_silent, 0.0, values))

    def from_shell(self, power: Tensor) -> Tensor:
        """As `by_shell`, of each shell and all shorter waves."""
        return self.by_shell(power).flip(-1).cumsum(-1).flip(-1)

    def group(self, power: Tensor) -> Tensor:
        """Groups (n, channels, shells) of predictions with this power by wave."""
        return sum((self.from_shell(power) > edge * self.typical).long() for edge in EDGES)

    def moments(self, w_pred: Tensor, r: Tensor) -> Tensor:
        """(n, 4, groups, channels, shells), without the silent waves and zero outside of the prediction's
        group: power of the prediction, its product with r, power of r, and one."""
        w_hat, r_hat = self.transform(w_pred.double()), self.transform(r.double())
        power = w_hat.abs().square()
        product = self.by_shell(torch.stack([power, (w_hat.conj() * r_hat).real, r_hat.abs().square()], 1))
        product = torch.cat([product, torch.ones_like(product[:, :1])], 1)
        group = nn.functional.one_hot(self.group(power), 1 + len(EDGES)).movedim(-1, 1)
        return product[:, :, None] * group[:, None]

    @torch.no_grad()
    def set_silent(self, power: Tensor, power_pred: Tensor) -> None:
        """Set the silent waves, those with only rounding errors in `power` (channels, waves) of the states,
        and the typical power, from that of the predictions; means over states."""
        self.is_silent.copy_(power <= ROUNDING * power.sum(1, keepdim=True))
        self.typical.copy_(self.from_shell(power_pred))

    @torch.no_grad()
    def set_gains(self, exact: Tensor, sampled: Tensor, evaluations: int | None, is_sampled: bool) -> None:
        """Set pulls and gains from the `moments` of residuals and of samples at the same states, each (mean,
        standard error) (2, 4, groups, channels, shells). Those of observed states also apply to sampled ones
        until those are measured."""
        both = torch.stack([exact, sampled])
        of_all = torch.stack([both[:, 0].sum(2), both[:, 1].square().sum(2).sqrt()], 1)
        common = _pull_and_gain(*of_all, torch.zeros(()), torch.ones(()))[:, None]
        is_rare = torch.minimum(exact[0, 3], sampled[0, 3]) < LEAST
        found = torch.where(is_rare, common, _pull_and_gain(exact, sampled, *common))
        self.gains[int(evaluations in SECOND), int(is_sampled) :] = found.to(self.gains)


def _pull_and_gain(exact: Tensor, sampled: Tensor, pull: Tensor, gain: Tensor) -> Tensor:
    """(2, ...) of moments (2, 4, ...) as in `WaveLimits.set_gains`; this pull and gain if the moments do not
    differ significantly from those that these give."""
    (power, product, energy, _), (_, product_error, energy_error, _) = exact
    (own_power, own_product, own_energy, _), (_, own_product_error, own_error, _) = sampled
    slope, own_slope = product / power.clamp_min(TINY), own_product / own_power.clamp_min(TINY)
    rest, own_rest = energy - slope * product, own_energy - own_slope * own_product
    energy, own_energy = energy.clamp_min(TINY), own_energy.clamp_min(TINY)
    error = ((energy_error / energy).square() + (own_error / own_energy).square()).sqrt()
    ratio = rest.clamp_min(TINY) / own_rest.clamp_min(TINY)
    is_chance = (ratio / gain.square()).log().abs() <= CHANCE * error
    gain = torch.where(is_chance, gain, ratio.sqrt().clamp_max(LARGEST))
    found = slope - gain * own_slope
    error = (product_error.square() + (gain * own_product_error).square()).sqrt() / power.clamp_min(TINY)
    return torch.stack([torch.where((found - pull).abs() <= CHANCE * error, pull, found), gain])


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
