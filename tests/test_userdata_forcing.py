"""What varies in time and is known in advance: heating and controls are inputs of every model and predicted
by none."""

import json
import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest
import scipy.fft
import torch
import xarray
from cases import cases
from golden_table import base_scores
from test_house import ROOT
from user_files import doctor, overlay

import ups
from ups.commands import predict
from ups.common.user_solver import solvers_of
from ups.config.load import load_config
from ups.data.build_cache import build_cache
from ups.data.cache import open_cache
from ups.data.schedule import Batch
from ups.data.sources import open_user
from ups.evaluation.forecast import assess_forecasts
from ups.evaluation.truth import open_truth
from ups.forecaster import Forecaster
from ups.generative.residuals import TransientResiduals
from ups.generative.sampling import Starts, sample_rollout
from ups.models.base_selection import fit_base
from ups.models.bases.base import Samples
from ups.models.head_setup import build_operator
from ups.models.operator import Operator
from ups.models.starts import laws_of
from ups.models.windows import Windows
from ups.userdata.describe import describe_file

CPU, DT = torch.device("cpu"), 0.2
AXES = ["trajectory", "time", "x", "y"]


def heat(folder, shape=(24, 8, 16), kind="field", boundary="periodic", mean=0.0):
    """u_t = 0.05 lap u - 0.5 u + f, f linear in time between frames, solved exactly in modes: u and f in a
    file, or the series q of f = q s(x)."""
    num, frames, *space = shape
    rng, axes = np.random.default_rng(0), tuple(range(-len(space), 0))
    forward, back = (
        (scipy.fft.fftn, scipy.fft.ifftn) if boundary == "periodic" else (scipy.fft.dctn, scipy.fft.idctn)
    )
    k = [
        2 * np.pi * np.fft.fftfreq(n, 1 / n) if boundary == "periodic" else np.pi * np.arange(n)
        for n in space
    ]
    rate = -0.5 - 0.05 * sum(np.meshgrid(*[one**2 for one in k], indexing="ij"))
    grow = np.exp(rate * DT)
    late = (grow - 1 - rate * DT) / (rate**2 * DT)
    early = (grow - 1) / rate - late
    x = np.meshgrid(*[(np.arange(n) + 0.5) / n for n in space], indexing="ij")
    s = [np.exp(-sum(((one - at) / 0.15) ** 2 for one in x)) for at in (0.4, 0.6)]
    q = rng.standard_normal((2, 1 if kind == "shared" else num, frames)) + mean
    f = np.stack([np.multiply.outer(q[0], s[0]), np.multiply.outer(q[1], s[1])])[
        : 2 if kind == "field" else 1
    ].sum(0)
    f_hat = forward(f, axes=axes) + np.zeros((num, 1, *[1] * len(space)))
    u = [forward(np.multiply.outer(rng.standard_normal(num), s[1]) + mean, axes=axes)]
    for i in range(frames - 1):
        u.append(grow * u[-1] + early * f_hat[:, i] + late * f_hat[:, i + 1])
    u = np.real(back(np.stack(u, 1), axes=axes))
    with h5py.File(folder / "heat.h5", "w") as file:
        file["u"] = u[0] if num == 1 else u
        file["f"] = (
            (f if kind == "field" else q[0])[0]
            if num == 1 or kind == "shared"
            else f
            if kind == "field"
            else q[0]
        )
    words = AXES[num == 1 : 2 + len(space)]
    return {
        "files": str(folder / "heat.h5"),
        "boundary": boundary,
        "domain": [0, 1],
        "dt": DT,
        "forcing": ["f"],
        "layout": {
            "u": words,
            "f": words
            if kind == "field"
            else ["time"]
            if kind == "shared" or num == 1
            else ["trajectory", "time"],
        },
        "base": ["persistence", "propagator"],
        "degree": 1,
    }


def configured(folder, keys, *overrides):
    return load_config(
        overlay(folder, keys, "heat"),
        [
            "operator.model.width=8",
            "operator.model.depth=1",
            "evaluate.num_bootstrap=50",
            "operator.model.kernel_size=3",
            *overrides,
        ],
    )


def fitted(folder, keys, *overrides):
    """Configuration, cache, operator over its fitted base and the base's validation error."""
    config = configured(folder, keys, *overrides)
    build_cache(config, "heat", progress=False)
    cache = open_cache(config, "heat")
    facts, weights = fit_base(cache, 1, config.context("heat"), 0, CPU)
    operator = build_operator(
        {"heat": (facts, weights)}, config.operator.model, "no", solvers_of(config)
    ).eval()
    return config, cache, operator, base_scores(facts)[facts["description"]["base"]["name"]]


def stirred(operator):
    """With a network of random weights."""
    torch.manual_seed(0)
    for parameter in operator.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return operator


# ---------------------------------------------------------------- the known answer

CASES = {
    "a field": {},
    "a series for each": {"kind": "series"},
    "a series for all": {"kind": "shared"},
    "a series with a mean between walls": {"kind": "series", "boundary": "no_flux", "mean": 3.0},
    "a field in two dimensions": {"shape": (24, 6, 8, 12)},
    "a long run that is cut": {"shape": (1, 480, 16), "keys": {"cut": 8}},
    "a mean that is subtracted": {"keys": {"offset": {"f": 2.0, "u": 1.0}}},
    "two input frames": {"keys": {"history": 2}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_linear_base_follows_what_is_known_in_advance_to_rounding(tmp_path, case):
    settings = dict(CASES[case])
    more = settings.pop("keys", {})
    keys = heat(tmp_path, **settings) | more
    config, cache, operator, error = fitted(tmp_path, keys)
    task = cache.task
    assert task.fields == task.moving == ("u",) and task.forcing == ("f",)
    assert error < 2e-5, error
    entry, _ = assess_forecasts(operator, open_truth(config, "heat"), config.evaluate, 0)
    assert entry.facts["fields"] == ["u"] and entry.facts["given"] == ["f"]
    assert entry.number("base", "nrmse") < 5e-5
    # the public interface: the same from a start of its own, frames counted from there
    source = open_user(config, "heat")
    u = source.read(0, 3).astype(np.float64)
    f, u = task.absolute(u[:, :, 1:], ["f"])[:, :, 0], task.absolute(u[:, :, :1], ["u"])
    first = config.context("heat")
    forcing = (
        f[:, first - 1 :] if not task.series else f[(slice(None), slice(first - 1, None), *[0] * task.ndim)]
    )
    u_pred = Forecaster(operator).forecast(
        "heat", u[:, :first], num_frames=u.shape[1] - first, forcing={"f": forcing}
    )
    scale = np.abs(u - u.mean()).max()
    assert np.abs(u_pred - u[:, first:]).max() < 1e-4 * scale


def test_without_the_key_the_same_data_cannot_be_predicted(tmp_path):
    keys = heat(tmp_path, kind="series")
    del keys["forcing"], keys["layout"]["f"]
    assert fitted(tmp_path, keys)[-1] > 0.2


def test_a_coefficient_that_varies_in_time_is_followed_by_products(tmp_path):
    """u_t = 0.05 u_xx - q(t) u: a tenth of the error of what is linear in u and q."""
    keys, errors = heat(tmp_path, kind="series"), []
    with h5py.File(tmp_path / "heat.h5", "r+") as file:
        k, u = 2 * np.pi * np.fft.rfftfreq(16, 1 / 16), file["u"][:]
        for i in range(7):
            q = file["f"][:, i : i + 2].mean(1, keepdims=True)
            u[:, i + 1] = np.exp(-q * DT) * np.fft.irfft(np.exp(-0.05 * k**2 * DT) * np.fft.rfft(u[:, i]), 16)
        file["u"][...] = u
    for degree in (1, 2):
        errors.append(fitted(tmp_path, keys | {"degree": degree})[-1])
    assert 10 * errors[1] < errors[0], errors


def test_an_unknown_forcing_has_the_posterior_of_the_formula_and_not_that_of_independent_frames(tmp_path):
    """From half of the cells, by a linear map; the forcing is a Markov chain in every wave."""
    _, cache, operator, _ = fitted(tmp_path, heat(tmp_path))
    model, head, laws = Forecaster(operator), operator.heads["heat"], laws_of(cache)
    size, change = (sum(row) for row in laws["forcings"])
    assert abs(change / size / 2 - 1) < 0.2  # that of the data is white
    k, num, noise, rng = np.arange(9), 5, 0.05, np.random.default_rng(1)
    v, rho = np.exp(-k / 2), 0.8 / (1 + k)
    rows = np.zeros((2, 17))
    rows[:, ::2] = v, 2 * v * (1 - rho)
    at, mode, lag = np.arange(16), np.minimum(np.arange(16), 16 - np.arange(16)), np.arange(num + 1)
    waves = np.exp(2j * np.pi * np.outer(at, at) / 16) / 4
    chain = rho[mode, None, None] ** abs(lag[:, None] - lag)
    std, mean = (float(one) for one in (head.forcing_codec.std, head.forcing_codec.mean))
    prior = std**2 * np.einsum("xk,k,kst,yk->sxty", waves, v[mode], chain, waves.conj()).real.reshape(96, 96)
    u0, unit = rng.standard_normal((1, 16)), np.eye(96).reshape(96, 6, 16)
    starts, free = np.broadcast_to(u0, (97, 1, 1, 16)), np.concatenate([0 * unit[:1], unit])
    films = model.forecast("heat", starts, num_frames=num, forcing=free, extrapolate=True)[
        :, :, 0, ::2
    ].reshape(97, -1)
    a = (films[1:] - films[0]).T
    f = mean + np.linalg.cholesky(prior + 1e-9 * np.eye(96)) @ rng.standard_normal(96)
    y = np.full((num, 1, 16), np.nan)
    y[:, 0, ::2] = (films[0] + a @ f + noise * rng.standard_normal(len(a))).reshape(num, 8)
    gain = prior @ a.T @ np.linalg.inv(a @ prior @ a.T + noise**2 * np.eye(len(a)))
    expected = mean + gain @ (y[:, 0, ::2].ravel() - films[0] - a.sum(1) * mean)
    spread = np.sqrt(np.diag(prior - gain @ a @ prior))

    def off(changes) -> float:
        head.facts = replace(head.facts, forcings=[rows[0].tolist(), changes.tolist()])
        given = {"frames": [*range(1, num + 1)], "values": y, "noise": noise}
        found = ups.invert(model, "heat", given, ["f"], u0=u0, members=4096)
        assert found.values["f"].shape == (6, 16) and abs(found.misfit - 1) < 0.4
        error = (
            (found.values["f"].ravel() - expected) / spread,
            found.samples["f"].std(0).ravel() / spread - 1,
        )
        return float(np.abs(error).max())

    assert off(rows[1]) < 0.06 and off(2 * rows[0]) > 0.3
    given = {"frames": [1], "values": y[:1], "noise": noise}
    for forcing, text in (({"f": f}, "f both as unknown and as given"), (f, "in part unknown as ndarray")):
        with pytest.raises(ValueError, match=text):
            ups.invert(model, "heat", given, ["f"], u0=u0, forcing=forcing)
    head.facts = replace(head.facts, forcings=None)
    with pytest.raises(ValueError, match="an unknown forcing, but its weights hold no law of it"):
        ups.invert(model, "heat", given, ["f"], u0=u0)


@pytest.mark.parametrize("masked", [("u", "f"), ("u",)])
def test_cells_without_a_value_have_none_in_the_forcing_either(tmp_path, masked):
    keys = heat(tmp_path, boundary="no_flux")
    with h5py.File(tmp_path / "heat.h5", "r+") as file:
        for name in masked:
            file[name][..., :2] = np.nan
    config, _, operator, error = fitted(tmp_path, keys)
    assert error < 0.1, error
    u = open_user(config, "heat").read(0, 3)
    u_pred = Forecaster(operator).forecast("heat", u[:, :1, :1], num_frames=7, forcing=u[:, :, 1])
    assert np.isnan(u_pred[..., :2]).all()
    assert np.abs(u_pred - u[:, 1:, :1])[..., 2:].max() < 0.1 * np.nanmax(np.abs(u[:, :, 0]))


@pytest.mark.parametrize(("kind", "mean"), [("series", 0.0), ("field", 50.0)])
def test_a_user_solver_gets_the_forcing_in_its_units(tmp_path, monkeypatch, kind, mean):
    keys = heat(tmp_path, kind=kind, mean=mean)
    with h5py.File(tmp_path / "heat.h5") as file:
        np.savez(tmp_path / "known.npz", f=file["f"][:], u=file["u"][:])
    (tmp_path / f"forced_{kind}.py").write_text(
        f"""
import numpy as np
known = np.load({str(tmp_path / "known.npz")!r})
starts, frames = known["f"][:, :-1].reshape(-1, *known["f"].shape[2:]), known["u"][:, 1:].reshape(-1, 1, 16)
def step(u, forcing):   # by looking up which frame it is
    at = [np.abs(starts - one).reshape(len(starts), -1).sum(1).argmin() for one in forcing["f"][:, 0]]
    assert forcing["f"].shape == (len(u), 2, *starts.shape[1:])
    return frames[at]
""",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert fitted(tmp_path, keys | {"base": {"solver": f"forced_{kind}:step"}})[-1] < 1e-5
    sys.modules.pop(f"forced_{kind}")


# ---------------------------------------------------------------- training, samples


def test_windows_and_residuals_move_the_forcing_with_the_state(tmp_path):
    """The fake: forcing of another frame, or that stays where it was when the state is shifted or
    mirrored."""
    keys = heat(tmp_path) | {"symmetries": ["shift", "mirror"], "reserve": 0.3, "history": 2}
    config, cache, operator, _ = fitted(tmp_path, keys)
    head = operator.heads["heat"]
    head.facts = replace(head.facts, network_weight=0.0)
    windows = Windows({"heat": cache}, config.task, config.operator, 0)
    batch = Batch("heat", torch.arange(6), torch.tensor([0, 1, 2, 3, 0, 1]))
    for step in (0, config.operator.train.steps - 1):  # one call, and several in a row
        u, u_ref, known = windows.read(head, replace(batch, step=step), slice(None))
        for frame in range(u_ref.shape[1]):
            u_pred = operator.step(u, "heat", known.later(frame))[0]
            assert (u_pred - u_ref[:, frame : frame + 1]).abs().max() < 1e-3
            u = torch.cat([u[:, 1:], u_ref[:, frame : frame + 1]], 1)
    residuals = TransientResiduals(operator, cache)
    for seed in range(3):
        samples = residuals.batch(
            "reserved", torch.arange(4), torch.tensor([0, 1, 2, 3]), torch.Generator().manual_seed(seed)
        )
        assert samples.r.abs().max() < 1e-3
        # the residual of the last frame
        led = samples.tokens[..., 4 * cache.tokenizer.dim : 5 * cache.tokenizer.dim]
        assert led[1:].abs().max() < 1e-3


def test_members_are_sampled_around_the_forecast_with_the_same_forcing(tmp_path):
    _, cache, operator, _ = fitted(tmp_path, heat(tmp_path))
    stirred(operator)
    rows, parameters, head = torch.arange(3), torch.zeros(3, 0), operator.heads["heat"]
    forcing = head.forcing_of(cache, rows, 1, 5)
    states = TransientResiduals(operator, cache)
    zero = torch.zeros(3, *cache.tokenizer.tokens, cache.tokenizer.dim)
    members = sample_rollout(
        states,
        lambda tokens, facts, noise, second: noise,
        Starts(cache.batch(rows, 0, 2), parameters, forcing=forcing),
        4,
        lambda lead: (zero, zero),
    )
    alone = operator.rollout(cache.batch(rows, 1, 1), "heat", parameters, 4, forcing=forcing)
    torch.testing.assert_close(members, alone, rtol=1e-4, atol=1e-5)
    other = operator.rollout(cache.batch(rows, 1, 1), "heat", parameters, 4, forcing=forcing.flip(1))
    assert (other - alone).abs().max() > 0.01


def test_the_network_gets_the_forcing_and_its_description_is_plain_values(tmp_path):
    _, cache, operator, _ = fitted(tmp_path, heat(tmp_path) | {"base": ["persistence"]})
    stirred(operator)
    again = Operator(json.loads(json.dumps(operator.description))).eval()
    again.load_state_dict(operator.state_dict())
    z, none = cache.batch([0, 1], 0, 1), torch.zeros(2, 0)
    forcing = again.heads["heat"].forcing_of(cache, torch.arange(2), 0, 2)
    z_pred = again.predict(z, "heat", again.heads["heat"].parameter_batch(none, forcing))[0]
    torch.testing.assert_close(z_pred, operator(z, "heat", none, forcing))
    assert (z_pred - operator(z, "heat", none, -forcing)).abs().max() > 1e-3
    with pytest.raises(ValueError, match="was given no forcing; expected"):
        operator(z, "heat", none)
    bad = json.loads(json.dumps(operator.description))
    bad["tasks"][0]["forcing_codec"]["space"] = [32]
    with pytest.raises(ValueError, match="the forcing of heat has space"):
        Operator(bad)
    bad = json.loads(json.dumps(operator.description))
    bad["tasks"][0]["base"]["settings"]["num_forcing"] = 2
    with pytest.raises(ValueError, match="base of heat has 2 forcing fields, .* expected 1"):
        Operator(bad)
    # as before
    assert not [key for key in fitted_without(tmp_path).heads["heat"].facts.described() if "forcing" in key]


def fitted_without(folder):
    keys = heat(folder)
    del keys["forcing"], keys["layout"]["f"]
    return fitted(folder, keys)[2]


# ---------------------------------------------------------------- the public interface

REFUSED = {
    "None": (
        lambda f: None,
        "needs the forcing f.*expected forcing={'f': \\(4, 16\\)}, .*frames from the start",
    ),
    "frames": (lambda f: f[:3], "forcing f of shape \\(3, 16\\)"),
    "cells": (lambda f: f[:, :8], "forcing f of shape \\(4, 8\\)"),
    "name": (lambda f: {"g": f}, "forcing 'g'"),
    "nan": (lambda f: np.where(f == f[0, 0], np.nan, f), "forcing f with NaN"),
    "range": (lambda f: 100 + f, "forcing f from 9.*half as much on both sides"),
    "late": (
        lambda f: xarray.DataArray(f, {"time": DT * (2 + np.arange(4))}, ("time", "x")),
        "from 0.4 on; expected it from 0",
    ),
    "step": (lambda f: xarray.DataArray(f, {"time": np.arange(4.0)}, ("time", "x")), "time with steps of 1"),
}


def test_forecasts_take_forcing_of_every_kind_and_refuse_what_does_not_fit(tmp_path):
    config, cache, operator, _ = fitted(tmp_path, heat(tmp_path))
    model, u = Forecaster(operator), open_user(config, "heat").read(0, 2)
    f, start, frames = u[:, :4, 1], u[:, :1, :1], 3
    right = model.forecast("heat", start, num_frames=frames, forcing={"f": f})
    assert "forcing f" in repr(model) and model.tasks["heat"]["forcing"] == ["f"]
    labelled = xarray.DataArray(
        f.transpose(0, 2, 1)[:, ::-1], {"time": DT * np.arange(4), "x": cells()[::-1]}, ("run", "x", "time")
    )
    for given in (f, torch.from_numpy(f), labelled, {"f": labelled}, xarray.Dataset({"f": labelled})):
        assert np.allclose(model.forecast("heat", start, num_frames=frames, forcing=given), right, atol=1e-6)
    shared = model.forecast("heat", start, num_frames=frames, forcing=f[0])
    assert np.allclose(shared[0], right[0], atol=1e-6) and np.abs(shared[1] - right[1]).max() > 0.01
    u0 = xarray.DataArray(start[:, :, 0], {"time": [0.0], "x": cells()}, ("run", "time", "x"), "u")
    for change, message in REFUSED.values():
        with pytest.raises(ValueError, match=message):
            model.forecast("heat", u0, num_frames=frames, forcing=change(f[0]))
    model.forecast("heat", u0, num_frames=frames, forcing=100 + f[0], extrapolate=True)
    with pytest.raises(ValueError, match="has no forcing; it was trained without"):
        Forecaster(fitted_without(tmp_path)).forecast("heat", start, num_frames=1, forcing=f[0, :2])


def cells(n=16):
    return (np.arange(n) + 0.5) / n


def test_predict_reads_the_forcing_of_the_frames_to_come(tmp_path, monkeypatch):
    config, cache, operator, _ = fitted(tmp_path, heat(tmp_path, kind="series"))
    operator.record = {"model_sha256": "0"}
    monkeypatch.setattr(predict.ups, "load", lambda *_: Forecaster(operator))
    with h5py.File(tmp_path / "heat.h5", "r+") as file:
        u = file["u"][:]
        file["u"][:, 4:] = np.nan  # not known yet
    places = f"--input {tmp_path / 'heat.h5'} --output {tmp_path / 'out.h5'}"
    arguments = f"--run none --task heat {places} --rows 2:4 --context 4 --frames".split()
    assert predict.main([*arguments, "4"]) == 0
    with h5py.File(tmp_path / "out.h5") as file, h5py.File(tmp_path / "heat.h5") as given:
        assert np.abs(file["u"][:] - u[2:4, 3:]).max() < 1e-4
        assert np.allclose(file["f"][:], given["f"][2:4, 3:])
    (tmp_path / "out.h5").unlink()
    with pytest.raises(ValueError, match="holds the forcing f of 8 frames; expected 9"):
        predict.main([*arguments, "5"])


# ---------------------------------------------------------------- declarations


@pytest.mark.parametrize(("changes", "message"), cases("userdata_forcing.declarations"))
def test_wrong_declarations_are_refused(tmp_path, changes, message):
    keys = heat(tmp_path)
    with h5py.File(tmp_path / "heat.h5", "r+") as file:
        file["short"] = file["f"][:, :7]
        if "x" == changes.get("layout", {}).get("f", [""])[-1]:
            file["f2"] = file["f"][:, 0]
            del file["f"]
            file.move("f2", "f")
    with pytest.raises(ValueError, match=message):
        configured(tmp_path, keys | changes)


def test_a_series_beside_a_field_is_described_as_a_question_and_the_doctor_looks_at_it(tmp_path):
    keys = heat(tmp_path, kind="series", shape=(24, 12, 16))
    text = describe_file(keys["files"])
    assert "f: [trajectory, time]" in text
    assert "forcing: [f]   # known in advance, and so not predicted?" in text
    (tmp_path / "mine.yaml").write_text(
        text.replace("configs/small", str(ROOT / "configs/small")), encoding="utf-8"
    )
    assert load_config(tmp_path / "mine.yaml").spec("heat").series == ("f",)
    with h5py.File(tmp_path / "heat.h5", "r+") as file, h5py.File(tmp_path / "runs.h5", "w") as runs:
        for i in range(24):
            runs[f"run_{i}/u"], runs[f"run_{i}/f"] = file["u"][i], file["f"][i]
        file["f"][3, 2] = np.nan
    text = describe_file(str(tmp_path / "runs.h5"))  # a group for each run
    assert '"*/f": [time]' in text and "forcing: [f]" in text and "parameters: {" not in text
    config = configured(tmp_path, keys)
    findings = doctor(config, "heat")
    assert any(
        found.severity == "error" and "trajectory 3, frame 2, f" in found.what for found in findings
    ), findings


def test_bases_are_fitted_to_the_values_of_the_same_frames(tmp_path):
    _, cache, operator, _ = fitted(tmp_path, heat(tmp_path) | {"history": 2})
    head = operator.heads["heat"]
    rows, starts = torch.tensor([1, 5]), torch.tensor([0, 3])
    _, known, _ = Samples(head, cache, 0).read(rows, starts)
    every = head.forcing_of(cache, rows, 0, cache.num_frames)
    torch.testing.assert_close(known.forcing, torch.stack([every[0, 1:3], every[1, 4:6]]))
    again = head.forcing_of(cache, rows, cache.num_frames - 1, 2)  # beyond the data from the first frame on
    torch.testing.assert_close(again, every[:, [-1, 0]])
