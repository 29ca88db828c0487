"""No draw has energy where the data have none (ups/generative/limits.py, calibration.py)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ups.generative.conditions import encode_error
from ups.generative.corrector import ResidualBatch
from ups.generative.fit_limits import RESIDUAL_BATCHES, SAMPLE_BATCHES, LimitFit
from ups.generative.limits import LARGEST, WaveLimits
from ups.models.constraints import Shells, WaveBounds
from ups.models.head_setup import strongest_waves
from ups_discovery.seeds import generator
from ups_discovery.spectral import FieldTransform

ALONE = SimpleNamespace(
    rank=0,
    world=1,
    device=torch.device("cpu"),
    agreed=lambda function, _: function(),
    reduce_sum=lambda total: total,
)
CASES = [
    ("periodic", (48,), 1),
    ("no_flux", (48,), 1),
    ("dirichlet", (40,), 2),
    ("periodic", (16, 12), 2),
    ("periodic no_flux", (12, 10), 1),
    ("periodic", (10, 8, 10), 1),
]


DAMPING = 0.005


def noise(*shape: int, key: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(0, key))


def band(
    space: tuple[int, ...],
    boundary: str,
    channels: int,
    first: float,
    last: float,
    key: int,
    count: int = 64,
    slope: float = 2.0,
) -> Tensor:
    """Fields (count, channels, *space) of waves first <= |k| < last alone, their power falling as |k|^-2
    slope."""
    transform = FieldTransform(space, boundary)
    k = transform.wave_numbers
    size = torch.where((k >= first) & (k < last), k.clamp_min(0.5) ** -slope, 0.0).float()
    return transform.inverse(transform(noise(count, channels, *space, key=key)) * size)


class Source:
    """Residuals of short-tailed states, drawn by the fakes below: as much of a `TransientResiduals` as is
    used."""

    name, device, top = "flow", torch.device("cpu"), 6.0

    def __init__(self, boundary: str, space: tuple[int, ...], channels: int):
        self.boundary, self.space, self.channels = boundary, space, channels

    def windows(self, split: str) -> tuple[int, int]:
        assert split == "reserved"  # neither test nor what the operator was trained on
        return 600, 4

    def batch(self, split: str, rows: Tensor, starts: Tensor, draw: torch.Generator) -> ResidualBatch:
        key = draw.initial_seed()
        states = band(self.space, self.boundary, self.channels, 0.9, self.top, key, len(rows), 1.0)
        r = band(self.space, self.boundary, self.channels, 0.9, self.top, key + 1, len(rows))
        # tokens: the prediction, which here has waves of its own beyond those of states
        junk = band(self.space, self.boundary, self.channels, self.top, 99.0, key + 2, len(rows), 0.0)
        return ResidualBatch(r - 1e-3 * junk, states + 1e-3 * junk, torch.zeros(len(rows), 1))

    def prediction(self, tokens: Tensor) -> Tensor:
        return tokens

    def decode(self, r: Tensor) -> Tensor:
        return r[:, None]


class Way:
    """Draws of the right law and white noise, as a network's error is; of told states `told` times as
    large, and damped."""

    evaluations = 1

    def __init__(self, source: Source, white: float, told: float = 1.0):
        self.source, self.white, self.told = source, white, told
        head = SimpleNamespace(
            limits=WaveLimits(source.channels, *source.space, boundary=source.boundary), sample_error=0.1
        )
        self.network = SimpleNamespace(heads={source.name: head})

    def residual(self, source, tokens, facts, noise, second, is_limited: bool = True) -> Tensor:
        transform = FieldTransform(source.space, source.boundary)
        k = transform.wave_numbers
        size = torch.where((k >= 0.9) & (k < source.top), k.clamp_min(0.5) ** -2.0, 0.0).float()
        r = transform.inverse(transform(noise) * size) + self.white * second
        is_told = (facts[:, -1] > 0).view(-1, *[1] * (r.ndim - 1))
        r = torch.where(is_told, self.told * r - DAMPING * tokens, r)
        limits = self.network.heads[source.name].limits
        return limits(tokens, r, self.evaluations, facts[:, -1] > 0) if is_limited else r


def fit(way: Way, source: Source, ranks: SimpleNamespace = ALONE, is_sampled: bool = False) -> None:
    found = LimitFit({"way": way}, source, 0, ranks)
    found.fit_observed()
    if is_sampled:
        found.fit_sampled()


def powers(limits: WaveLimits, w: Tensor) -> Tensor:
    """Mean power in shells (channels, shells), of every wave."""
    power = limits.power(w).mean(0)
    return power.new_zeros(len(power), limits.num_shells).index_add_(1, limits.shells, power)


def product(limits: WaveLimits, w_pred: Tensor, r: Tensor) -> Tensor:
    """The product of r with the prediction over the power of the prediction, in shells 1 to 5."""
    power, product, _ = limits.moments(w_pred, r).mean(0)[:, 0, 1:6]
    return product / power


def limited(way: Way, source: Source, facts: float, key: int) -> tuple[Tensor, ...]:
    """(residuals, draws as made, draws within the limits, predictions) of many other states."""
    r, tokens, *_ = source.batch("reserved", torch.arange(2000), torch.zeros(2000), generator(key, "other"))
    noises = noise(*r.shape, key=key), noise(*r.shape, key=key + 1)
    drawn = way.residual(source, tokens, torch.full((2000, 1), facts), *noises, is_limited=False)
    limits = way.network.heads[source.name].limits
    return r, drawn, limits(tokens, drawn, 1, torch.full((2000,), facts) > 0), tokens


@pytest.mark.parametrize(("boundary", "space", "channels"), CASES)
def test_samples_have_the_power_of_residuals_in_every_wave_and_none_if_states_have_none(
    boundary, space, channels
):
    source = Source(boundary, space, channels)
    way = Way(source, white=0.1)
    fit(way, source)
    r, drawn, found, prediction = limited(way, source, 0.0, 3)
    limits = way.network.heads[source.name].limits
    k = limits.transform.wave_numbers
    is_kept = (k >= 0.9) & (k < source.top)
    assert torch.equal(limits.is_silent, ~is_kept.expand(channels, -1))
    beyond, before = (
        limits.power(prediction + part).mean(0)[limits.is_silent].sum() for part in (found, drawn)
    )
    # the prediction's, too
    assert float(beyond) < 1e-11 * float(limits.power(prediction).mean(0).sum()) < 1e-7 * float(before)
    shells = [shell for shell in range(1, 6) if (is_kept & (limits.shells == shell)).any()]
    ratio = (powers(limits, found) / powers(limits, r))[:, shells]
    assert (ratio > 0.7).all() and (ratio < 1.4).all()
    if len(shells) == 5 and len(space) == 1:
        assert (powers(limits, drawn) / powers(limits, r))[:, 5].min() > 2


def test_correct_samples_stay_as_they_are():
    source = Source("periodic", (48,), 1)
    way = Way(source, white=0.0)
    fit(way, source)
    limits = way.network.heads["flow"].limits
    waves = [limits.shells.tolist().index(shell) for shell in range(1, 6)]
    pull, gain = limits.gains[0, 0, :, 0, waves]
    assert (gain == 1).float().mean() >= 0.8 and (gain - 1).abs().max() < 0.2  # 3 standard errors each
    assert (pull == 0).float().mean() >= 0.8 and pull.abs().max() < 0.1


def test_what_a_prediction_has_too_much_is_taken_away_though_samples_do_not_know_it():
    """Residuals of the right power in every wave, and three times the energy of states in short ones."""

    class Rough(Source):
        def batch(self, *args) -> ResidualBatch:
            r, tokens, facts, _ = super().batch(*args)
            rough = short_waves(args[-1].initial_seed() + 3, len(r))
            return ResidualBatch(r - rough, tokens + rough, facts)

    class Deaf(Way):
        def residual(self, *args, **options) -> Tensor:
            return super().residual(*args, **options) + short_waves(9, len(args[1]))

    def short_waves(key: int, count: int) -> Tensor:
        return 6 * band((48,), "periodic", 1, 4.0, Source.top, key, count)

    source = Rough("periodic", (48,), 1)
    way = Deaf(source, white=0.0)
    fit(way, source)
    r, drawn, found, prediction = limited(way, source, 0.0, 3)
    limits = way.network.heads["flow"].limits
    state = powers(limits, prediction + r)[:, 1:6]
    assert (powers(limits, prediction + drawn)[:, 4:6] / state[:, 3:]).min() > 3
    assert ((powers(limits, prediction + found)[:, 1:6] / state).log().abs() < 0.2).all()


def test_samples_of_sampled_states_have_the_moments_of_those_of_observed_ones():
    """The damping of a frame is within three standard errors of residuals, and 10 % of the power in ten."""
    source = Source("periodic", (48,), 1)
    way = Way(source, white=0.0, told=1.5)
    fit(way, source)
    limits = way.network.heads["flow"].limits
    assert torch.equal(limits.gains[0, 0], limits.gains[0, 1])
    fit(way, source, is_sampled=True)
    slopes = []
    for facts in (0.0, float(encode_error(torch.tensor(0.1)))):
        r, drawn, found, prediction = limited(way, source, facts, 5)
        ratio = (powers(limits, found) / powers(limits, r))[0, 1:6]
        assert (ratio > 0.8).all() and (ratio < 1.25).all()
        slopes.append([product(limits, prediction, w) for w in (drawn, found)])
    (_, observed), (damped, sampled) = slopes
    assert (damped - 1.5 * observed).max() < -0.8 * DAMPING
    assert (sampled - observed).abs().max() < 0.2 * DAMPING, sampled - observed
    pull, gain = limits.gains[1][..., ~limits.is_silent].unbind(1)  # two evaluations were not fitted
    assert not pull.any() and (gain == 1).all()


def moments(energy: float, error: float, product: float = 0.0) -> Tensor:
    """Moments of residuals, over the power of the prediction."""
    mean = torch.tensor([1.0, product, energy])
    return torch.stack([mean, error * mean.abs()]).view(2, 3, 1, 1).expand(-1, -1, 1, 9)


def test_a_gain_is_significant_or_one_and_a_pull_no_larger_than_the_energy_of_states_needs():
    """Samples that do not know the prediction; rows of their energy, the product of residuals, error, whether
    states are sampled, pull and gain. Residuals have a power of 0.25 beside the product."""
    limits = WaveLimits(1, 16, boundary="periodic")
    for own, product, error, is_sampled, *expected in (
        (0.30, 0.0, 0.05, False, 0, 1),
        (0.30, 0.0, 0.01, False, 0, 1.2**-0.5),
        (0.125, 0.0, 0.01, False, 0, 1),  # no noise is made, which costs CRPS
        (0.125, 0.0, 0.01, True, 0, math.sqrt(2)),
        (0.125, 0.0, 0.5, True, 0, 1),
        (1e-6, 0.0, 0.01, True, 0, LARGEST),
        (0.25, -0.5, 0.01, False, math.sqrt(1.1 * 0.5 - 0.25) - 1, 1),  # the energy of states is 0.5
        (0.25, -0.5, 0.01, True, -0.5, 1),
        (0.25, -0.04, 0.01, False, 0, 1),  # without a pull 1.07 of the energy of states
        (0.25, -0.04, 0.01, True, -0.04, 1),
        (0.25, -0.5, 1.0, False, 0, 1),
        (0.25, 0.5, 0.01, False, math.sqrt(2.5 / 1.1 - 0.25) - 1, 1),
    ):
        exact, sampled = moments(0.25 + product**2, error, product), moments(own, error)
        limits.set_gains(exact, sampled, 2, is_sampled)
        found = limits.gains[1, int(is_sampled) :]
        torch.testing.assert_close(
            found, torch.tensor(expected, dtype=torch.float32).view(1, 2, 1, 1).expand_as(found)
        )


def test_limits_do_not_depend_on_the_number_of_ranks():
    """Two ranks measure half of the batches each."""
    source, found = Source("periodic", (48,), 1), {}
    way = Way(source, white=0.1)
    fit(way, source)
    alone = {key: value.clone() for key, value in way.network.heads["flow"].limits.state_dict().items()}
    assert SAMPLE_BATCHES % 2 == RESIDUAL_BATCHES % 2 == 0

    def rank(number: int) -> SimpleNamespace:
        calls = iter(range(9))

        def reduce_sum(total: Tensor) -> Tensor:
            call = next(calls)
            found.setdefault(call, {})[number] = total
            return sum(found[call].values())

        return SimpleNamespace(**vars(ALONE) | {"rank": number, "world": 2, "reduce_sum": reduce_sum})

    for number in (0, 1, 0):  # the first is told the second's sums when it asks again
        fit(way, source, rank(number))
    for key, value in way.network.heads["flow"].limits.state_dict().items():
        torch.testing.assert_close(value, alone[key], msg=key)


@pytest.mark.parametrize(("boundary", "space", "channels"), CASES)
def test_no_wave_of_a_forecast_is_stronger_than_those_of_the_data_and_of_the_base(boundary, space, channels):
    shells = Shells(space, boundary)
    waves = [[2.0] * len(shells)] * channels
    task = SimpleNamespace(boundary=boundary, moving=range(channels))
    facts = SimpleNamespace(waves=waves)
    head = SimpleNamespace(name="flow", task=task, codec=SimpleNamespace(space=space), facts=facts)
    bounds = WaveBounds(head)
    w, w_base = 3 * noise(2, 3, channels + 1, *space), 2 * noise(2, 3, channels + 1, *space, key=1)
    found = bounds(w, w_base)
    before, after, base = (shells(part[:, :, :channels]) for part in (w, found, w_base))
    torch.testing.assert_close(after, torch.minimum(before, base.clamp_min(2)), rtol=1e-4, atol=1e-4)
    assert torch.equal(found[:, :, channels:], w[:, :, channels:])  # fields that are constant in time
    assert torch.equal(bounds(w / 90, w_base), w / 90) and torch.equal(bounds(w, w), w)
    none = torch.zeros_like(w, requires_grad=True)
    bounds(none, w_base).sum().backward()
    assert none.grad.isfinite().all()
    facts.waves = [row[1:] for row in waves]
    with pytest.raises(ValueError, match="the weights of flow have bounds for .* shells of waves; expected"):
        WaveBounds(head)


def test_bounds_of_waves_are_the_strongest_of_the_training_data_widened():
    rows, place = torch.arange(16), 2 * math.pi * torch.arange(12) / 12
    w = torch.zeros(16, 5, 2, 12)
    w[3, 2, 0], w[7, 1, 1] = 4 * (2 * place + 1).cos(), 2.0
    cache = SimpleNamespace(
        task=SimpleNamespace(boundary="periodic", moving=("u", "v")),
        tokenizer=SimpleNamespace(space=(12,)),
        num_frames=5,
        rows_by_parameter=lambda split, count: rows,
        row_blocks=lambda some, frames, most: some.split(8),
        batch=lambda some, first, count, device: w[some],
    )
    head = SimpleNamespace(scale=torch.ones(1), codec=SimpleNamespace(decode=lambda z: z))
    expected = torch.zeros(2, 7)
    expected[0, 2], expected[1, 0] = 4 * math.sqrt(6), 2 * math.sqrt(12)  # norms of the fields
    found = torch.tensor(strongest_waves(head, cache))
    torch.testing.assert_close(found, 1.5 * expected, rtol=1e-4, atol=1e-5)
