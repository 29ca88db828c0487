"""The band of a forecast (ups/models/band.py, ups/forecast_band.py), and fakes that do not hold."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

import ups
from ups.common.place import ROOT
from ups.evaluation import trust
from ups.forecaster import Forecaster
from ups.models.band import Band, calibrated, differences, numbers_of
from ups.models.facts import HeadFacts
from ups.report.sections import trust_section
from ups.results import Entry
from ups.tasks import get_task
from ups_solvers import SOLVERS

NUM_FRAMES = 6


def rollouts(num: int, seed: int) -> Tensor:
    """`numbers_of` rollouts of 3 frames of a field, whose errors are the difference from a twin by chance."""
    source = torch.Generator().manual_seed(seed)
    difference = (2 * torch.randn(num, 1, generator=source, dtype=torch.float64)).exp()
    size = difference * (0.2 * torch.randn(num, 1, generator=source, dtype=torch.float64)).exp()
    most = size * torch.rand(num, 3, generator=source, dtype=torch.float64)
    return torch.cat([size, most, most / 2, difference.expand(-1, 3), torch.zeros(num, 3)], 1)


def apart(found: Tensor) -> Tensor:
    """The `differences` in `numbers_of` rollouts of `rollouts`."""
    return torch.stack(found[:, 7:, None].split(3, 1))


def outside(band: Band, found: Tensor, factor: float = 1.0) -> float:
    """The fraction of rollouts that leave a band `factor` times as wide."""
    s = band.expected(apart(found))
    profile = torch.tensor(band.profile, dtype=torch.float64).flatten()
    return float((found[:, 1:4] > factor * band.width * s[:, None] * profile).any(1).double().mean())


def test_a_band_holds_for_whole_rollouts_with_its_probability_and_fakes_do_not():
    fresh = rollouts(2000, 0)
    for num, expected in ((20, 1 / 16), (40, 3 / 31), (200, 15 / 151)):  # three quarters calibrate
        groups = torch.arange(num)
        bands = [calibrated(rollouts(num, seed), groups, 1, 3) for seed in range(1, 101)]
        assert np.mean([outside(band, fresh) for band in bands]) == pytest.approx(expected, abs=0.015)
    assert np.mean([outside(band, fresh, 0.5) for band in bands]) > 0.3  # half as wide
    cells = [replace(band, width=band.cell_width) for band in bands]
    halves = torch.cat([fresh[:, :1], fresh[:, 4:7], fresh[:, 4:]], 1)
    assert np.mean([outside(band, halves) for band in cells]) == pytest.approx(0.1, abs=0.02)
    for seed in range(1, 4):  # of a score that does not depend on the state, or by chance
        found, widths = rollouts(200, seed), []
        chance = rollouts(200, -seed)[:, 7:10]
        for difference in (found[:, 7:10], torch.ones_like(chance), chance):
            scored = torch.cat([found[:, :7], difference, found[:, 10:]], 1)
            band = calibrated(scored, groups, 1, 3)
            s = band.expected(apart(scored))
            widths.append(float(band.width * s.median() * np.mean(band.profile)))
            scored[:, 7:] *= 1e3 if len(widths) == 1 else 1  # of starts that are a thousand times as wrong
            ratio = (band.expected(apart(scored)) / (1e3 * found[:, 0])).log().abs()
            assert (float((ratio < np.log(2)).double().mean()) > 0.9) == (len(widths) == 1)
        assert widths[0] < 0.3 * min(widths[1:])


def test_what_finer_steps_change_counts_where_it_exceeds_validation_and_a_constant_says_nothing():
    found, groups = rollouts(200, 1), torch.arange(200)
    size = 0.01 * torch.rand(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, bands = calibrated(found, groups, 1, 3), []
    for refined in (size, torch.full_like(size, 0.01)):
        scored = torch.cat([found[:, :10], refined.expand(-1, 3)], 1)
        bands.append(calibrated(scored, groups, 1, 3))
        s, before = bands[-1].expected(apart(scored)), plain.expected(apart(found))
        larger = before.clamp_min(bands[-1].numerics)
        assert (s == before)[before == larger].double().mean() >= 0.85
        assert (before <= s).all() and (s <= 1.1 * larger).all()
    # short waves: base and twin agree, and both err by what finer steps show; the fake does not move
    wrong = torch.cat([found[:, :10], (1e3 * found[:, :1] + 100).expand(-1, 3)], 1)
    ratio = (bands[0].expected(apart(wrong)) / wrong[:, 10]).log().abs()
    assert (ratio < np.log(2)).all() and all(bands[0].verdict(one) == "refused" for one in wrong[:, 10])
    both = torch.cat([found[:, :7], wrong[:, 10:], wrong[:, 10:]], 1)  # one error, not counted twice
    assert (bands[0].expected(apart(both)) < 1.2 * wrong[:, 10]).all()
    wrong[:, 10:] = 0.01
    assert torch.equal(bands[1].expected(apart(wrong)), plain.expected(apart(found)).clamp_min(0.01))


def test_rounding_that_the_twin_shares_is_stated_and_a_twin_alone_does_not():
    source, groups = torch.Generator().manual_seed(0), torch.arange(200)
    rounding = 1e-6 * torch.rand(200, 1, generator=source, dtype=torch.float64).exp().square()
    found = torch.cat([rounding, rounding.expand(-1, 3), rounding.expand(-1, 3) / 2], 1)
    near = 1e-6 * torch.ones(200, 3, dtype=torch.float64)
    for refined, is_stated in ((1.5 * rounding.expand(-1, 3), True), (near, False)):
        scored = torch.cat([found, near, refined], 1)
        s = calibrated(scored, groups, 1, 3).expected(apart(scored))
        assert (torch.corrcoef(torch.stack([s, rounding[:, 0]]).log())[0, 1] > 0.5) == is_stated


def test_a_parameter_outside_is_refused_unless_the_stated_error_says_what_it_costs():
    band = calibrated(rollouts(200, 1), torch.arange(200), 1, 3)
    good, bad = band.error / 10, 4 * band.error
    assert [band.verdict(good, over) for over in (0.0, 0.05, 0.2)] == ["fine", "doubtful", "refused"]
    assert [band.verdict(s, 3.0, True) for s in (good, bad, float("nan"))] == [
        "doubtful",
        "refused",
        "refused",
    ]


def test_too_few_rollouts_or_starts_and_errors_that_are_not_finite_give_no_band():
    found = rollouts(40, 0)
    assert calibrated(found, torch.arange(40), 1, 3) is not None
    assert calibrated(found[:19], torch.arange(19), 1, 3) is None
    assert calibrated(found, torch.zeros(40), 1, 3) is None  # the halves would be the same start
    assert calibrated(found.log().log(), torch.arange(40), 1, 3) is None  # NaN


def test_rounding_of_fields_that_are_copied_from_the_start_is_no_error():
    w = torch.rand(4, 2, 5, 8, 8)
    found = numbers_of(SimpleNamespace(task=get_task("ns_incom2d")), w, torch.ones(2, 4, 2, 5), w + 1e-3)
    most = found[:, 1:11].view(4, 2, 5)
    assert (most[..., :3] > 0).all() and not most[..., 3:].any()


def test_the_report_says_how_far_bands_hold_and_errors_rank(monkeypatch):
    def entry_of(factor: float, is_ranked: bool) -> Entry:
        """The entry of a task whose band is `factor` times as wide, and whose twin may be any."""
        calibration, found = rollouts(200, 1), rollouts(100, 2)
        if not is_ranked:
            found[:, 7:10] = found.flip(0)[:, 7:10]
        band = calibrated(calibration, torch.arange(200), 1, 3)
        facts = SimpleNamespace(band=asdict(replace(band, width=factor * band.width)), network_weight=0.0)
        head = SimpleNamespace(facts=facts, codec=SimpleNamespace(num_channels=1))
        operator = SimpleNamespace(head=lambda name: head)
        cache = SimpleNamespace(trajectory=torch.arange(100))
        truth = SimpleNamespace(rows=torch.arange(100), cache=cache, context=1)
        config = SimpleNamespace(evaluate=SimpleNamespace(num_bootstrap=100), run=SimpleNamespace(seed=0))
        monkeypatch.setattr(trust, "measured", lambda operator, cache, rows, *rest: found[rows])
        entry = Entry("any", "tasks", {"times": [1.0, 2.0, 3.0]})
        trust.add_band(entry, operator, truth, config)
        return entry

    good, narrow, random = entry_of(1, True), entry_of(0.5, True), entry_of(1, False)
    inside, within = (
        [one.number("operator", name, "band") for one in (good, narrow, random)]
        for name in ("inside", "within_2")
    )
    assert inside[0] >= 0.8 > 0.75 > inside[1] and within[0] >= 0.9 and within[2] < 0.5
    first = [one.listed("operator", "risk", "band")["value"][0] for one in (good, random)]
    assert first[0] < 0.1 < first[1] and good.listed("operator", "risk_best", "band")["value"][-1] == 1
    page = trust_section({"any": good, "other": Entry("other", "tasks")})
    assert "<svg" in page and "which takes 20 validation rollouts: other." in page
    assert "<table" not in trust_section({"other": Entry("other", "tasks")})


@pytest.fixture(scope="module")
def model() -> Forecaster:
    """The published weights, of which burgers1d has a band, from 60 trajectories of its solver."""
    model = ups.load(ROOT / "pretrained")
    head, (w, raw, w_ref) = model.operator.head("burgers1d"), films(model, 3, 60)
    given = model.operator, head.name, w, raw, model.operator.forecast(w, head.name, raw, NUM_FRAMES)
    found = numbers_of(head, given[-1], differences(*given, head.facts.network_weight, None), w_ref)
    head.facts = replace(head.facts, band=asdict(calibrated(found, torch.arange(60), 1, NUM_FRAMES)))
    assert HeadFacts.read(head.facts.described()) == head.facts
    return model


def films(model: Forecaster, seed: int, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """(start, parameters, later frames), normalised."""
    times = {"num_frames": 7, "t_end": 0.3, "parameter": 0.01}
    u = SOLVERS["burgers1d"].simulate(range(num), seed=seed, resolution=256, **times)
    w = model.operator.head("burgers1d").codec.normalise(u)
    return w[:, :1], torch.full((num, 1), 0.01, dtype=torch.float64), w[:, 1:]


def test_a_forecast_comes_with_a_band_that_holds_and_an_error_that_ranks(model):
    codec = model.operator.head("burgers1d").codec
    w, _, w_ref = films(model, 4, 60)
    u0, u_ref = codec.denormalise(w).numpy(), codec.denormalise(w_ref).numpy()
    found = model.forecast("burgers1d", u0, {"Nu": 0.01}, NUM_FRAMES, error=True)
    np.testing.assert_array_equal(found.u, model.forecast("burgers1d", u0, {"Nu": 0.01}, NUM_FRAMES))
    inside = ((found.low <= u_ref) & (u_ref <= found.high)).all((1, 2, 3))
    assert 0.75 <= inside.mean() <= 1 and (found.horizon, found.horizon_time) == (6, pytest.approx(0.3))
    assert (found.low <= found.cell_low).all() and (found.cell_high <= found.high).all()
    errors = np.abs(found.u - u_ref)
    constant = np.sort(errors.max((1, 2, 3)))[54]
    assert np.median((found.high - found.low).mean((1, 2, 3)) / 2) < 0.5 * constant
    assert np.corrcoef(np.log([found.error, np.square(errors).mean((1, 2, 3))]))[0, 1] > 0.7
    assert np.mean([verdict == "fine" for verdict in found.verdict]) > 0.8


def test_the_derivative_of_a_forecast_is_that_of_the_solver_and_of_persistence_is_not(model):
    head = model.operator.head("burgers1d")
    u = head.codec.denormalise(films(model, 5, 7)[0])
    cache = SimpleNamespace(
        parameter_index=torch.zeros(7, dtype=torch.int64),
        parameters=torch.full((7, 1), 0.01, dtype=torch.float64),
        settings=SimpleNamespace(parameters=[0.01]),
        dt=0.05,
    )
    truth = SimpleNamespace(task=head.task, cache=cache, rows=torch.arange(7), context=1)
    truth.num_frames, truth.frames = NUM_FRAMES, lambda rows, first, count: u[rows]
    fake = SimpleNamespace(
        head=model.operator.head, forecast=lambda w, *rest: w.expand(-1, NUM_FRAMES, -1, -1)
    )
    assert trust.derivative_cosine(model.operator, truth) > 0.999 > 0.9 > trust.derivative_cosine(fake, truth)


def test_a_verdict_has_a_reason_and_a_band_ends_with_its_horizon(model):
    wave = np.sin(2 * np.pi * np.arange(256) / 256)[None]

    def verdict(u0: np.ndarray, nu: float = 0.01, num_frames: int = NUM_FRAMES, **options) -> tuple[str, str]:
        found = model.forecast("burgers1d", u0, {"Nu": nu}, num_frames, error=True, **options)
        return found.verdict, found.reason

    assert verdict(wave) == ("fine", "it is like those of validation, 90% of which are inside the band")
    for far in (verdict(20 * wave, extrapolate=True), verdict(wave, 0.002, extrapolate=True)):
        assert far[0] == "refused" and "times what 90% of those in validation do not exceed" in far[1]
    assert "a parameter is 0.7 of its range outside of it" in far[1]
    assert verdict(wave, num_frames=40)[0] == "doubtful" and "longer than" in verdict(wave, num_frames=40)[1]
    found = model.forecast("burgers1d", wave, {"Nu": 0.01}, 7, error=True)
    assert found.horizon == 6 and np.isinf(found.high[6]).all()
    coarse = model.forecast("burgers1d", wave[:, ::2], {"Nu": 0.01}, 7, error=True, resample=True)
    assert np.isfinite(coarse.high[:6]).all() and np.isneginf(coarse.low[6]).all()
    with pytest.raises(
        ValueError, match="advection1d has no band in its weights; .* Train the operator again"
    ):
        model.forecast("advection1d", np.zeros((10, 1, 256)), {"beta": 1.0}, 2, error=True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"numerics": "none"}, "the weights of burgers1d have band .* expected the numbers of a band"),
        ({"profile": [[1.0, 1.0]]}, r"a profile of shape \(1, 2\); expected \(frames, 1\), twice"),
        ({"twin": [[1.0]]}, r"a profile of shape \(6, 1\); expected \(frames, 1\), twice"),
    ],
)
def test_a_band_that_is_not_one_of_its_task_is_refused(model, change, text):
    head = model.operator.head("burgers1d")
    stored = head.facts.described()
    with pytest.raises(ValueError, match=text), pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "facts", HeadFacts.read(stored | {"band": stored["band"] | change}))
        wave = np.sin(2 * np.pi * np.arange(256) / 256)[None]
        model.forecast("burgers1d", wave, {"Nu": 0.01}, NUM_FRAMES, error=True)
