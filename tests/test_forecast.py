"""`Forecaster.forecast` (ups/forecaster.py): operators answer for what they learnt on and refuse the rest by
name."""

from __future__ import annotations

import copy
import functools
import math
import warnings

import numpy as np
import pytest
import torch
from cases import cases
from finished import write_stage
from test_base_selection import make_caches
from torch import Tensor

from ups.config.schema import Config
from ups.data.cache import Cache, open_cache
from ups.forecaster import Forecaster
from ups.generative.residuals import SteadyResiduals, TransientResiduals
from ups.models.base_selection import fitted_state, select_base
from ups.models.head_setup import build_operator
from ups.models.loss import operator_loss
from ups.models.operator import Operator, load_operator
from ups.models.windows import Windows
from ups.training.optim import build_optimizer, scale_lr
from ups_discovery.boundary import NO_FLUX, PERIODIC
from ups_discovery.spectral import interpolation, resample

TASKS = ("burgers1d", "darcy2d", "diff_react2d", "advection1d_hidden")
SETTINGS = [
    *(
        "operator.base_steps=60 operator.model.width=16 operator.model.depth=1 "
        "operator.train.batch_size=8 operator.train.precision='no' task.diff_react2d.history=2 "
        f"task.darcy2d.reserve=0.5 data.tasks=[{','.join(TASKS)}]"
    ).split(),
    *[
        f"task.advection1d_hidden.{text}"
        for text in ("resolution=32", "num_trajectories=16", "space_stride=1", "parameters=[0.1,0.4]")
    ],
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Operator, dict[str, Cache], Config]:
    """An operator with fitted bases and a few steps of the network behind it, that serves every task."""
    config = make_caches(tmp_path_factory.mktemp("forecast"), *SETTINGS)
    caches = {name: open_cache(config, name) for name in TASKS}
    heads = [
        select_base(cache, config.operator.base_steps, config.context(name), 0, torch.device("cpu"))[0]
        for name, cache in caches.items()
    ]
    torch.manual_seed(0)
    bases = {head.name: ({"description": head.facts.described()}, fitted_state(head)) for head in heads}
    settings = config.operator
    operator = build_operator(bases, settings.model, settings.train.precision)
    windows = Windows(caches, config.task, settings, config.run.seed)
    optimizer = build_optimizer(operator, settings.optim)
    for step in range(12):
        batch = windows.schedule.batch(step)
        u, u_ref, known = windows.read(operator.heads[batch.task], batch, slice(0, 8))
        loss, _ = operator_loss(operator, batch.task, u, u_ref, known)
        optimizer.zero_grad()
        loss.backward()
        scale_lr(optimizer, 0.1)
        optimizer.step()
    return operator.eval().requires_grad_(False), caches, config


def given(trained: tuple, name: str, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Physical (last frames or coefficient, parameters) of test trajectories."""
    operator, caches, _ = trained
    head, cache = operator.head(name), caches[name]
    some = cache.split["test"][:rows]
    z = cache.inputs(some) if cache.task.is_steady else cache.batch(some, 0, head.history)
    return head.input_codec.denormalise(head.input_codec.decode(z)), cache.parameters[some]


def forecast(operator: Operator, *arguments, **options) -> Tensor:
    return Forecaster(operator).forecast(*arguments, **options)


def quietly(*arguments, **options) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return forecast(*arguments, **options)


# ---------------------------------------------------------------- resampling


def band_limited(points: Tensor, boundary: str, modes: int, seed: int = 0) -> Tensor:
    """(5, points) random sums of the waves 0 .. modes - 1 of the boundary at `points` of (0, 1)."""
    source, k = torch.Generator().manual_seed(seed), torch.arange(modes, dtype=torch.float64)
    angle = (2 if boundary == PERIODIC else 1) * math.pi * k[:, None] * points
    even, odd = torch.randn(2, 5, modes, generator=source, dtype=torch.float64)
    return even @ angle.cos() + (odd @ angle.sin() if boundary == PERIODIC else 0)


def points(n: int, boundary: str) -> Tensor:
    return (torch.arange(n, dtype=torch.float64) + (0 if boundary == PERIODIC else 0.5)) / n


@pytest.mark.parametrize("boundary", [PERIODIC, NO_FLUX])
@pytest.mark.parametrize(("n", "m"), [(32, 16), (32, 64), (32, 25), (25, 32), (15, 31), (16, 16)])
def test_resampling_is_exact_for_the_modes_that_both_grids_hold_and_keeps_the_mean_of_all(n, m, boundary):
    modes = (min(n, m) + 1) // 2 if boundary == PERIODIC else min(n, m)
    u, right = (band_limited(points(size, boundary), boundary, modes) for size in (n, m))
    torch.testing.assert_close(resample(u, (m,), boundary), right, rtol=0, atol=1e-11)
    rough = torch.randn(3, n, dtype=torch.float64)
    torch.testing.assert_close(resample(rough, (m,), boundary).mean(-1), rough.mean(-1), rtol=0, atol=1e-13)
    if m > n:  # and a finer grid loses nothing, the last wave of an even grid included
        again = resample(resample(rough, (m,), boundary), (n,), boundary)
        torch.testing.assert_close(again, rough, rtol=0, atol=1e-12)
    assert interpolation(n, m, boundary).shape == (m, n)


@pytest.mark.parametrize("boundary", [PERIODIC, NO_FLUX])
def test_every_axis_is_resampled_by_itself(boundary):
    def field(*grid: int) -> torch.Tensor:
        waves = (band_limited(points(n, boundary), boundary, 4, axis) for axis, n in enumerate(grid))
        return torch.einsum("bx,by->bxy", *waves).float()

    torch.testing.assert_close(resample(field(12, 10), (20, 9), boundary), field(20, 9), rtol=0, atol=1e-5)


# ---------------------------------------------------------------- forecasts


@pytest.mark.parametrize("name", TASKS)
def test_on_the_trained_grid_a_forecast_is_the_rollout_of_the_latents(trained, name):
    operator, caches, _ = trained
    head, cache = operator.head(name), caches[name]
    u0, parameters = given(trained, name)
    frames, shown = 1 if cache.task.is_steady else 3, parameters if parameters.shape[1] else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        u_pred = forecast(operator, name, u0, shown, frames, dt=cache.dt)
    rows = cache.split["test"][:2]
    z = cache.inputs(rows) if cache.task.is_steady else cache.batch(rows, 0, head.history)
    right = operator.head(name).physical(operator.rollout(z, name, parameters, frames))
    torch.testing.assert_close(u_pred, right, rtol=1e-4, atol=1e-4)
    assert u_pred.shape == (len(u0), frames, head.codec.num_channels, *head.codec.space)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("factor", [0.5, 2, 0.8])
def test_another_grid_is_refused_or_on_request_gives_the_numbers_of_the_trained_one(trained, name, factor):
    """A field of waves that both grids hold is one field: so must its forecasts be."""
    operator = trained[0]
    head, (u0, parameters) = operator.head(name), given(trained, name)
    boundary, space = head.task.boundary, head.codec.space
    parameters = parameters if parameters.shape[1] else None
    other = tuple(int(factor * n) for n in space)
    few = [min(n, m) // 2 - 1 for n, m in zip(space, other, strict=True)]
    smooth = resample(resample(u0.double(), few, boundary), space, boundary)
    elsewhere, frames = resample(smooth, other, boundary), 1 if head.task.is_steady else 3
    with pytest.raises(
        ValueError,
        match=rf"{name} was given a field on the grid \({other[0]},.*; expected "
        rf"\({space[0]},.*on which the operator was trained. Pass a field on that grid, or re",
    ):
        forecast(operator, name, elsewhere, parameters, frames)
    with pytest.warns(
        UserWarning,
        match=rf"{name}: resampled from the grid \({other[0]},.* to the trained "
        rf"grid \({space[0]},.* and back .*e-1[0-9] of the variation of the",
    ):
        found = forecast(operator, name, elsewhere, parameters, frames, resample=True)
    right = resample(forecast(operator, name, smooth, parameters, frames), other, boundary)
    torch.testing.assert_close(found, right, rtol=0, atol=2e-5 * float(right.abs().max()))
    if factor == 2 and boundary == PERIODIC:  # every other point is a point of the trained grid
        here = forecast(operator, name, smooth, parameters, frames)
        torch.testing.assert_close(found[..., ::2], here, rtol=0, atol=2e-5 * float(right.abs().max()))


def test_waves_beyond_the_trained_grid_give_a_warning(trained):
    u0, parameters = given(trained, "burgers1d")
    fine = resample(u0.double(), (128,), PERIODIC)
    wave = torch.cos(2 * math.pi * 40 * torch.arange(128) / 128)  # of 64 cells the last wave number is 32
    wave = wave * float((fine - fine.mean()).norm() / wave.expand_as(fine).norm())
    with pytest.warns(UserWarning, match="7.1e-01 of the variation of the input field is finer than the"):
        rough = forecast(trained[0], "burgers1d", fine + wave, parameters, 2, resample=True)
    right = quietly(trained[0], "burgers1d", fine, parameters, 2, resample=True)
    torch.testing.assert_close(rough, right, rtol=0, atol=1e-5)


FIELDS = {  # task -> (change of the start u0, message)
    "burgers1d": [
        (lambda u: u.expand(-1, -1, 2, -1), "was given 2 channels; expected 1: u. Give"),
        (lambda u: u.to(torch.complex64), "was given torch.complex64; expected one array of real numbers"),
        (lambda u: u[:0], r"a field of shape \(0, 1, 1, 64\)"),
        (lambda u: u.index_fill(3, torch.tensor([5]), math.nan), "a field with NaN, infinity or masked"),
        (lambda u: 9 * u, r"was given u from -.* to .*; expected -.* to .*: the range of its training"),
    ],
    "diff_react2d": [
        (lambda u: u[:, :, :1], "was given 1 channels; expected 2: u, v. Give them"),
        (lambda u: u[:, :1], "was given 1 frames; expected its history of 2. Give the"),
        (lambda u: u[:, 0, 0], r"shape \(1, 16, 16\) .*; expected \(batch, 2, 2, \*space\)"),
    ],
}
OPTIONS = cases("forecast.options")  # task -> (changed options, message)
REFUSED = [
    *((name, {"u0": change}, text) for name, rows in FIELDS.items() for change, text in rows),
    *((name, change, text) for name, rows in OPTIONS.items() for change, text in rows),
]


@pytest.mark.parametrize(("name", "change", "text"), REFUSED)
def test_input_unlike_the_training_data_is_refused_by_name(trained, name, change, text):
    u0, parameters = given(trained, name)
    asked = {
        "operator": trained[0],
        "task": name,
        "u0": u0,
        "num_frames": 1 if name == "darcy2d" else 2,
        "parameters": parameters if parameters.shape[1] else None,
    }
    forecast(**asked)
    change = {key: value(u0) if callable(value) else value for key, value in change.items()}
    with pytest.raises(ValueError, match=text):
        forecast(**{**asked, **change})


def test_what_is_outside_the_trained_range_is_served_where_that_is_accepted(trained):
    u0, parameters = given(trained, "burgers1d")
    inside = forecast(trained[0], "burgers1d", u0, parameters, 2)
    for start, nu in ((u0, 0.04), (9 * u0, parameters)):
        outside = quietly(trained[0], "burgers1d", start, nu, 2, extrapolate=True)
        assert outside.isfinite().all() and not torch.equal(outside, inside)
    nearly = u0 - float(u0.max() - u0.min()) / 4, np.float32(0.1)  # within the bounds; 0.1 but for rounding
    assert forecast(trained[0], "burgers1d", *nearly, 2).isfinite().all()


def test_a_forecast_that_blows_up_names_the_frame(trained):
    operator = copy.deepcopy(trained[0])
    operator.heads["burgers1d"].out.bias.fill_(1e38)
    operator.heads["burgers1d"].scale.fill_(1e38)
    u0, parameters = given(trained, "burgers1d")
    with pytest.warns(
        UserWarning, match="burgers1d: the forecast is not finite from frame 1 of 4 on; expected"
    ):
        forecast(operator, "burgers1d", u0, parameters, 4)


# ---------------------------------------------------------------- latents and caches


def test_latents_of_another_grid_codec_or_batch_are_refused_inside_the_operator(trained):
    operator, caches, _ = trained
    z, parameters = caches["burgers1d"].batch([0, 1], 0, 1), caches["burgers1d"].parameters[:2]
    operator(z, "burgers1d", parameters)
    for wrong in (z[:, :, :8], torch.cat([z, z], 2), z[..., :2]):
        shape = tuple(wrong.shape[2:])
        with pytest.raises(
            ValueError,
            match=rf"was given 2 latents of shape \({shape[0]}, {shape[1]}\) and 2 rows "
            r"of parameters; expected \(16, 4\) .*: it was trained .* \(64,\)",
        ):
            operator(wrong, "burgers1d", parameters)
    with pytest.raises(ValueError, match="burgers1d was given 2 latents of shape .* and 1 rows of param"):
        operator(z, "burgers1d", parameters[:1])
    with pytest.raises(ValueError, match=r"parameters of shape \(2, 0\); expected \(batch, 1\): Nu. Give"):
        operator(z, "burgers1d", parameters[:, :0])
    with pytest.raises(ValueError, match="this operator does not know 'cfd1d'"):
        operator(z, "cfd1d", parameters)


OTHER_DATA = {
    r"burgers1d with the dt 0.\d+; expected 0.\d+, as the": lambda cache: setattr(cache, "dt", 2 * cache.dt),
    r"the parameters .'Nu': .0.1, 0.2..": lambda cache: setattr(cache, "parameters", 2 * cache.parameters),
    r"the grid \[32\]; expected \[64\]": lambda cache: setattr(cache.tokenizer, "space", (32,)),
    r"the fields \['v'\]; expected \['u'\]": lambda cache: setattr(cache.tokenizer, "fields", ("v",)),
    "with another codec; expected the codec of its cache": lambda cache: cache.tokenizer.basis.mul_(-1),
    "burgers1d with another codec": lambda cache: cache.tokenizer.mean.add_(1e-3),
}


@pytest.mark.parametrize(("text", "change"), OTHER_DATA.items())
def test_a_cache_of_other_data_is_refused_by_evaluation_and_corrector_alike(trained, change, text):
    operator, caches, config = trained
    assert operator.head_for(caches["burgers1d"]) is operator.heads["burgers1d"]
    TransientResiduals(operator, caches["burgers1d"])
    other = copy.copy(caches["burgers1d"])
    other.tokenizer = copy.deepcopy(other.tokenizer)
    change(other)
    residuals = functools.partial(TransientResiduals, operator)
    for serve in (operator.head_for, residuals):
        with pytest.raises(ValueError, match=text + ".*rm -r runs/RUN/operator"):
            serve(other)


def test_a_steady_cache_with_another_coefficient_is_refused(trained):
    operator, caches, config = trained
    other = copy.copy(caches["darcy2d"])
    other.input_tokenizer = copy.deepcopy(other.input_tokenizer)
    other.input_tokenizer.std.mul_(2)
    with pytest.raises(ValueError, match="holds darcy2d with another codec"):
        SteadyResiduals(operator, other)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("dt", None, "the weights of burgers1d have the dt .*; expected what"),
        ("parameters", None, "have the parameters"),
        ("boundary", "no_flux", "have the boundary no_flux; expected periodic"),
        ("domain", [-1.0, 1.0], r"have the domain \[-1.0, 1.0\]; expected \[0.0, 1.0\]"),
    ],
)
def test_weights_without_the_description_of_their_data_are_refused(trained, tmp_path, key, value, text):
    operator, description = trained[0], copy.deepcopy(trained[0].description)
    if value is None:
        del description["tasks"][0][key]
    else:
        description["tasks"][0][key] = value
    write_stage(tmp_path, description, operator.state_dict())
    with pytest.raises(ValueError, match=text + ".*rm -r runs/RUN/operator.*, then make operator"):
        load_operator(tmp_path)
