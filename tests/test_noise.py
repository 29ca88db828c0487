"""Noise of measurement: found to a few percent in films of every kind, and nowhere where there is none
(ups_discovery/noise.py)."""

from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from test_data import SPLIT, examine, messages, moving, saved

from ups.evaluation.forecast import add_noise
from ups.report.tables import noise_in_words
from ups.results import Entry
from ups_discovery.noise import measurement_noise, noise_by_field

CELLS, FRAMES = 64, 40
X, T = np.arange(CELLS) / CELLS, np.arange(FRAMES)[:, None]


def rng():
    return np.random.default_rng(0)


def waves(rows=8):
    """Smooth waves that travel and decay."""
    phase = rng().random((rows, 3, 1, 1))
    return sum(
        np.exp(-0.01 * m * T) * np.sin(2 * np.pi * (m * (X - 0.01 * T) + phase[:, m - 1])) for m in (1, 2, 3)
    )


def shock(width=0.002):
    """Fronts as sharp as a cell, that travel less than a cell per frame."""
    speed = np.array([0.2, 0.33, 0.41, -0.27])[:, None, None] / CELLS
    return -np.tanh((X - 0.5 - speed * T) / width) * (1 + 0.3 * np.sin(2 * np.pi * X))


def driven(smooth=0.0):
    """A field that noise drives: white in time, white or smooth in space."""
    force = np.fft.rfft(rng().standard_normal((8, FRAMES, CELLS)))
    force *= np.exp(-smooth * np.arange(CELLS // 2 + 1) ** 2)
    decay = np.exp(-0.002 * np.arange(CELLS // 2 + 1) ** 2)
    u_hat = [force[:, 0]]
    for frame in range(1, FRAMES):
        u_hat.append(decay * u_hat[-1] + force[:, frame])
    return np.fft.irfft(np.stack(u_hat, 1), CELLS)


def lorenz(frames=400):
    s, found = rng().standard_normal((8, 3)) * 5, []

    def slope(s):
        x, y, z = s.T
        return np.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], 1)

    for _ in range(frames * 10):
        half = s + 0.001 * slope(s)
        s = s + 0.002 * slope(half)
        found.append(s[:, :1])
    return np.stack(found[::10], 1)


def rounded(u, levels):
    step = np.ptp(u) / levels
    return np.round(u / step) * step


@pytest.mark.parametrize("fraction", [0.002, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("made", [waves, shock, lambda: driven(0.1), lambda: waves(1)])
def test_the_noise_of_a_film_is_found(made, fraction):
    u = made()
    sigma = fraction * u.std()
    found = measurement_noise(u + sigma * rng().standard_normal(u.shape))
    assert found == pytest.approx(sigma, rel=0.06)


def test_noise_louder_than_the_field_is_found_and_a_field_of_noise_alone_is_not():
    noise = rng().standard_normal(waves().shape)
    sigma = 2.5 * waves().std()
    assert measurement_noise(waves() + sigma * noise) == pytest.approx(sigma, rel=0.06)
    assert measurement_noise(noise) is None


CLEAN = {
    "smooth waves": waves,
    "a shock of one cell": shock,
    "a step": lambda: np.sign(shock()),
    "noise that drives, smooth in space": lambda: driven(0.02),
    "noise that drives, white in space": driven,
    "random walks": lambda: np.cumsum(rng().standard_normal((8, FRAMES, CELLS)), 1),
    "chaos of one cell": lorenz,
    "chaos, far apart in time": lambda: lorenz()[:, ::20],
    "few frames": lambda: waves()[:, :4],
    "at rest": lambda: np.repeat(rng().standard_normal((8, 1, CELLS)), FRAMES, 1),
    "one number": lambda: np.ones((2, FRAMES, CELLS)),
    "a rough field that moves by a cell": lambda: np.stack(
        [np.roll(rng().standard_normal((8, CELLS)), i, -1) for i in range(FRAMES)], 1
    ),
    "float16": lambda: waves().astype(np.float16),
    "float16, far from zero": lambda: (10 + waves()).astype(np.float16),
    "int16, packed": lambda: rounded(waves(), 65000),
    "int8, packed": lambda: rounded(waves(), 250),
    "float32": lambda: waves().astype(np.float32),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_film_has_no_noise(name):
    assert measurement_noise(CLEAN[name]()) is None


def test_noise_follows_the_unit_and_leaves_out_cells_without_a_value():
    u = waves()[:, :, None] + 0.05 * rng().standard_normal((8, FRAMES, 1, CELLS))
    [sigma] = noise_by_field(u, ["u"]).values()
    assert sigma == pytest.approx(0.05, rel=0.03)
    assert noise_by_field(1e9 * u, ["u"])["u"] == pytest.approx(1e9 * sigma, rel=1e-6)
    both = np.concatenate([u, waves()[:, :, None], 3 * u], 2)
    assert noise_by_field(both, ["a", "b", "c"]) == pytest.approx({"a": sigma, "c": 3 * sigma})
    mask = np.zeros((1, CELLS), bool)
    mask[:, 20:30] = True
    filled = np.where(mask, u.mean(-1, keepdims=True), u)
    assert noise_by_field(filled, ["u"], mask)["u"] == pytest.approx(0.05, rel=0.03)


def test_noise_of_maps_is_found():
    y = np.arange(24)[:, None] / 24
    u = np.sin(2 * np.pi * (X[:24] * CELLS / 24 + y - 0.02 * T[:20, :, None]))[None]
    noisy = u + 0.03 * rng().standard_normal((2, 20, 24, 24))
    assert measurement_noise(noisy) == pytest.approx(0.03, rel=0.03)
    assert measurement_noise(u) is None


def test_the_doctor_states_noise(tmp_path):
    u = moving(0.4, 12, 64, 40).astype(np.float32)
    path = saved(tmp_path, u)
    assert "noise" not in " ".join(finding.what for finding in examine(path, "advection1d", **SPLIT))
    with h5py.File(path, "r+") as file:
        values = file["tensor"][()]
        file["tensor"][...] = values + 0.05 * values.std() * rng().standard_normal(values.shape)
    found = messages(examine(path, "advection1d", **SPLIT), "caution").split("noise: ")[1]
    assert 0.045 < float(found.split(" %")[0]) / 100 < 0.055


def test_the_error_without_the_noise_of_the_truth_is_that_against_the_clean_truth():
    gen = torch.Generator().manual_seed(0)
    clean = torch.sin(torch.linspace(0, 6.3, 4000)).expand(8, 5, 1, 4000).double()
    pred = clean + 0.02 * torch.cos(torch.linspace(0, 20, 4000))
    noisy = clean + 0.05 * torch.randn(clean.shape, generator=gen, dtype=torch.float64)
    scores = {
        "operator": {
            "rmse": (pred - noisy).square().mean(-1).sqrt(),
            "ref_rms": noisy.square().mean(-1).sqrt(),
        }
    }
    facts = SimpleNamespace(noise={"u": 0.05}, start_frames=10, is_deterministic=None)
    task = Entry("a", "tasks", {"fields": ["u"]})
    add_noise(task, facts, scores)
    expected = float(((pred - clean).square().mean() / clean.square().mean()).sqrt())
    measured, beyond = task.listed("operator", "nrmse", "noise")["value"]
    assert beyond == pytest.approx(expected, rel=0.05) and measured > 2 * expected
    assert task.number("", "fraction/u", "noise") == pytest.approx(
        0.05 / float(clean.square().mean().sqrt()), rel=0.01
    )
    words = noise_in_words(task)
    assert "7.0" in words and "estimated from 10 frames" in words
    clean = Entry("a", "tasks", {"fields": ["u"]})
    add_noise(clean, SimpleNamespace(noise=None), scores)
    assert not clean.rows and "noise" not in clean.facts
