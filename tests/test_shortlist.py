"""Which base serves (ups/models/base_selection.py): of those that validation cannot tell apart the simplest,
if it is stable beyond the data; and what a forecast says of itself where it goes further."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_table import base_scores
from user_files import ONE_BLOCK, config_of, fitted, overlay, section, write

from ups.config.load import load_config
from ups.data.build_cache import build_cache
from ups.data.cache import Cache, open_cache
from ups.forecaster import Forecaster
from ups.models import base_selection
from ups.models.bases.base import Mean, Persistence
from ups.models.bases.equation import Equation
from ups.models.bases.propagator import Propagator
from ups_discovery.boundary import PERIODIC

CPU = torch.device("cpu")
NUM, FRAMES, CELLS, DT = 24, 16, 32, 0.1
X = 2 * np.pi * np.arange(CELLS) / CELLS


def cache_of(folder: Path, *, base: list[str] | None = None, **fields: np.ndarray) -> Cache:
    """The cache of user data: fields (trajectory, time, x), periodic on [0, 2 pi]."""
    layout = {name: ["trajectory", "time", "x"] for name in fields}
    said = section(folder, layout=layout, domain=[0, 2 * math.pi], dt=DT, base=base)
    write(folder / "a.h5", **fields)
    config = load_config(overlay(folder, said))
    build_cache(config, "ks", progress=False)
    return open_cache(config, "ks")


def waves(
    num_frames: int = FRAMES, speed: float = 1.0, growth: float = 0.0, modes: int = 3, seed: int = 0
) -> np.ndarray:
    """Sums of a few waves of which each moves at `speed` and grows at a rate of `growth`, float32."""
    draw, t = np.random.default_rng(seed), DT * np.arange(num_frames)[:, None]
    u = sum(
        draw.standard_normal((NUM, 1, 1)) * np.sin(m * (X - speed * t) + draw.random((NUM, 1, 1)) * 2 * np.pi)
        for m in range(1, modes + 1)
    )
    return (u * np.exp(growth * t)).astype(np.float32)


def propagator(cache: Cache, gain: dict[int, complex], usual: complex = 0.0, degree: int = 1) -> Propagator:
    """A propagator that multiplies mode m by gain[m], and every other one by 1 + usual."""
    base = Propagator(**base_selection.base_settings(cache) | {"degree": degree, "history": 1})
    for mode in range(base.transform.modes):
        change = gain.get(mode, 1 + usual) - 1
        base.weight_real[0, mode, 0, 0], base.weight_imag[0, mode, 0, 0] = change.real, change.imag
    return base


def moving(growth: float = 0.0, modes: int = 3) -> dict[int, complex]:
    """What `waves` do in a frame."""
    return {m: np.exp(growth * DT - 1j * m * DT) for m in range(1, modes + 1)}


def selected(cache: Cache, **bases: torch.nn.Module) -> tuple[str, dict]:
    """Which of these candidates serves, and what is known of it."""
    shortlist = base_selection.Shortlist(cache, 0 if cache.task.is_steady else 1, 0)
    for name, base in bases.items():
        head = base_selection.unfitted_head(
            cache, base.kind, base_selection.base_settings(cache) | {"degree": 1, "terms": []}, CPU
        )
        head.base = base
        shortlist.add(name, head)
    head, _ = shortlist.select()
    description = head.facts.described()
    return description["base"]["name"], description


# ---------------------------------------------------------------- the simplest of equals


def test_of_bases_that_differ_by_rounding_the_simplest_serves(tmp_path):
    """Advected waves: cubic propagators are better by chance, in the last bits."""
    for seed in (0, 1, 3):
        (tmp_path / str(seed)).mkdir()
        cache = cache_of(tmp_path / str(seed), base=["persistence", "propagator"], u=waves(seed=seed))
        facts, _ = base_selection.fit_base(cache, 1, 1, 0, CPU)
        errors = [error for name, error in base_scores(facts).items() if name.startswith("propagator")]
        assert max(errors) < 1e-5 and facts["description"]["base"]["settings"]["degree"] == 1


def test_a_base_that_is_worse_on_validation_is_not_selected_however_simple(tmp_path):
    """Also with one validation trajectory, where nothing is known of chance."""
    for folder, num in ((tmp_path / "many", NUM), (tmp_path / "few", 10)):
        folder.mkdir()
        cache = cache_of(folder, u=waves()[:num])
        exact, close = propagator(cache, moving(), degree=3), propagator(cache, moving(growth=1e-3))
        assert len(cache.split["val"]) == num // 10
        assert selected(cache, still=Persistence(), exact=exact)[0] == "exact"
        # 1e-3 of the error of persistence is much
        assert selected(cache, close=close, exact=exact)[0] == "exact"


def test_one_diverging_trajectory_is_no_chance(tmp_path):
    """The interval of a ratio may hold 1 where one row in many is lost; the ratio itself says it."""
    cache = cache_of(tmp_path, u=waves())
    exact, astray = propagator(cache, moving(growth=0.1), degree=3), propagator(cache, moving(growth=0.1))
    lost = float(cache.batch(cache.split["val"][:1], 0, 1).abs().amax())
    forward = astray.forward
    astray.forward = lambda u, known: (
        forward(u, known) * torch.where((u.abs().amax((1, 2, 3)) >= 0.99 * lost)[:, None, None], 1.2, 1.0)
    )
    assert selected(cache, astray=astray, exact=exact)[0] == "exact"


def test_a_steady_task_takes_the_simplest_of_equals_and_makes_no_rollout(tmp_path):
    a = waves(1)[:, 0]
    said = section(
        tmp_path, layout={"a": ["trajectory", "x"], "u": ["trajectory", "x"]}, dt=None, inputs=["a"]
    )
    write(tmp_path / "a.h5", a=a, u=-a)
    config = load_config(overlay(tmp_path, said))
    build_cache(config, "ks", progress=False)
    cache = open_cache(config, "ks")
    many = Mean(num_channels=1)
    many.degree = 2
    name, description = selected(cache, many=many, mean=Mean(num_channels=1))
    assert name == "mean" and description["horizon"] == 1 and description["base"]["unstable"] == ""


def test_complexity_orders_the_bases():
    settings = {
        "num_values": 1,
        "num_parameters": 0,
        "num_channels": 1,
        "num_inputs": 0,
        "space": [16],
        "boundary": PERIODIC,
        "lengths": [1.0],
        "dt": 0.1,
        "positive": [],
        "reach": 3,
    }
    advection, burgers = [((0,), ((0, (0,)),))], [((1,), ((0, (0,)),))]
    bases = [
        Mean(1),
        Persistence(),
        Equation(**settings, terms=advection),
        *(Propagator(**settings, degree=degree, history=history) for degree, history in ((1, 1), (1, 4))),
        Equation(**settings, terms=burgers),
        Propagator(**settings, degree=2, history=1),
        Propagator(**settings, degree=3, history=1),
    ]
    for base in bases:
        if base.kind == "equation":
            base.weight.fill_(1.0)
    ranks = [base.complexity for base in bases]
    assert ranks == sorted(ranks) and len(set(ranks)) == len(ranks)


# ---------------------------------------------------------------- stability


def test_growth_in_modes_that_the_data_leave_empty_is_found(tmp_path):
    cache = cache_of(tmp_path, u=waves())
    calm, wild = propagator(cache, moving()), propagator(cache, moving() | {9: 1.15 + 0j})
    assert selected(cache, wild=wild, calm=calm)[0] == "calm"
    # a stable base serves with 1.5 times the error, and not with 4 times
    off = [{mode: (1 - by) * gain for mode, gain in moving().items()} for by in (2e-3, 3e-3, 8e-3)]
    off[0][9] = 1.15 + 0j
    wilder, near, far = (propagator(cache, gain) for gain in off)
    assert [selected(cache, wild=wilder, calm=one)[0] for one in (near, far)] == ["calm", "wild"]
    name, description = selected(cache, wild=wild)
    assert name == "wild" and "modes of u that are empty in the data grow" in description["base"]["unstable"]
    facts = {"description": description, "decisions": []}
    assert (
        "no base as good as this one is stable beyond the data: modes of u"
        in base_selection.describe_selection(facts)
    )
    facts = {"description": selected(cache, calm=calm)[1], "decisions": []}
    assert "stable" not in base_selection.describe_selection(facts)


def test_growth_of_what_the_data_hold_is_found_where_a_clamp_hides_it(tmp_path):
    """The equation keeps its states within bounds of its own, so its rollouts stay finite."""
    cache = cache_of(tmp_path, u=waves(growth=0.0))
    settings = base_selection.base_settings(cache) | {
        "terms": [((0,), ((0, (0,)),)), ((1,), ())],
        "num_steps": 4,
    }
    base = Equation(**settings)
    base.weight.copy_(torch.tensor([[[-1.0, 0.9]]]))
    base.low.fill_(-6.0)
    base.high.fill_(6.0)
    assert "u leaves all bounds of the data within" in selected(cache, base=base)[1]["base"]["unstable"]
    base.weight.copy_(torch.tensor([[[-1.0, 0.0]]]))
    assert selected(cache, base=base)[1]["base"]["unstable"] == ""


@pytest.mark.parametrize("growth", [0.5, -0.5])
def test_a_true_solution_that_grows_as_the_data_do_is_stable(tmp_path, growth):
    cache = cache_of(tmp_path, u=waves(growth=growth))
    exact = propagator(cache, moving(growth), usual=np.exp(max(0.0, growth) * DT) - 1)
    assert selected(cache, exact=exact)[1]["base"]["unstable"] == ""


def chaos(num: int = NUM, frames: int = 20) -> np.ndarray:
    """Kuramoto-Sivashinsky on [0, 22], 0.25 apart, by ETD1 steps of 0.01."""
    k = 2 * np.pi * np.fft.rfftfreq(CELLS, 22 / CELLS)
    linear, step = k**2 - k**4, 0.01
    decay = np.exp(step * linear)
    gain = np.where(linear == 0, step, np.expm1(step * linear) / np.where(linear == 0, 1, linear))
    u = np.fft.rfft(np.random.default_rng(0).standard_normal((num, CELLS))) * np.exp(-(k**2))
    kept = []
    for number in range(3000 + 25 * frames):
        if number >= 3000 and number % 25 == 0:
            kept.append(np.fft.irfft(u, CELLS))
        u = decay * u - gain * 0.5j * k * np.fft.rfft(np.fft.irfft(u, CELLS) ** 2)
    return np.stack(kept, 1).astype(np.float32)


def test_chaos_is_stable(tmp_path):
    """The equation itself: what perturbs it grows, and stays on the attractor."""
    cache = cache_of(tmp_path, u=chaos())
    settings = base_selection.base_settings(cache) | {
        "lengths": [22.0],
        "dt": 0.25,
        "num_steps": 16,
        "is_stiff": True,
        "terms": [((1,), ((0, (0,)),)), ((0,), ((0, (0, 0)),)), ((0,), ((0, (0, 0, 0, 0)),))],
    }
    base = Equation(**settings)
    base.weight.fill_(-1.0)
    base.mean.copy_(cache.tokenizer.mean)
    base.std.copy_(cache.tokenizer.std)
    name, description = selected(cache, still=Persistence(), base=base)
    assert name == "base" and description["base"]["unstable"] == ""


# ---------------------------------------------------------------- what a forecast says of itself


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Forecaster, Cache]:
    """A forecaster of waves that grow, whose base knows how."""
    folder = tmp_path_factory.mktemp("model")
    write(folder / "a.h5", u=waves(growth=0.6))
    cache, operator, _ = fitted(config_of(folder, ONE_BLOCK, domain=[0, 2 * math.pi], dt=DT))
    operator.heads["ks"].facts = replace(operator.heads["ks"].facts, network_weight=0.0)
    return Forecaster(operator), cache


def said_of(forecaster: Forecaster, u: np.ndarray, num_frames: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forecaster.forecast("ks", u, num_frames=num_frames)
    return [str(one.message) for one in caught]


def test_a_forecast_beyond_the_evaluated_horizon_warns_once_and_names_the_frame(model):
    forecaster, _ = model
    u = 0.1 * waves(1)[:2]
    assert not said_of(forecaster, u, FRAMES - 1)
    [text] = said_of(forecaster, u, FRAMES + 4)
    assert f"is longer than the {FRAMES - 1} frames on which the operator was evaluated" in text
    assert f"frame {FRAMES} on" in text
    assert "bounds" not in text


def test_a_forecast_that_reaches_the_bounds_warns_and_names_the_frame(model):
    forecaster, cache = model
    u = waves(growth=0.6)
    u = u[[np.abs(u).max((1, 2)).argmax(), 0]]
    texts = said_of(forecaster, u[:, -1:], FRAMES - 1)
    assert len(texts) == 1
    assert "reaches the bounds of the training data" in texts[0]
    assert "evaluated" not in texts[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        u_pred = forecaster.forecast("ks", u[:, -1:], num_frames=FRAMES - 1)
    head = forecaster.operator.heads["ks"]
    ends = head.codec.denormalise(torch.stack([head.low, head.high])[:, :, None]).flatten().tolist()
    is_cut = (u_pred <= ends[0] * 0.999).any((0, 2, 3)) | (u_pred >= ends[1] * 0.999).any((0, 2, 3))
    assert f"in frame {1 + int(is_cut.argmax())}, where it is cut" in texts[0]
    [text] = said_of(forecaster, u[:, -1:], FRAMES + 20)
    assert "evaluated" in text and "bounds" in text
