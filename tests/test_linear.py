"""The linear map of reduced rank (ups/models/bases/linear.py): beside plain least squares of the same data,
on data for which no symmetry holds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from user_files import config_of, write

from ups.config.schema import Config
from ups.data.build_cache import build_cache
from ups.data.cache import Cache, open_cache
from ups.models import base_selection
from ups.models.base_selection import evaluate_candidate
from ups.models.bases import linear
from ups.models.bases.base import ParameterBatch, Samples
from ups.models.bases.linear import Linear
from ups.models.bases.reduced_rank import Directions

CPU = torch.device("cpu")
TRANSIENT = {
    "boundary": "no_flux",
    "domain": [0, 1],
    "dt": 1.0,
    "base": ["persistence", "propagator", "linear"],
}
STEADY = {
    "layout": {name: ["trajectory", "x", "y"] for name in "au"},
    "inputs": ["a"],
    "dt": None,
    "base": ["mean", "linear"],
    "domain": {"x": [0, 1], "y": [0, 1]},
    "boundary": "no_flux",
}
FLOAT32 = 2e-5  # nRMSE of a rollout that rounding makes: least squares here are of float64


def fields(num: int, *cells: int, seed: int = 0) -> np.ndarray:
    """Random smooth fields (num, *cells)."""
    waves = np.stack(np.meshgrid(*[np.fft.fftfreq(n, 1 / n) for n in cells], indexing="ij"))
    noise, axes = np.random.default_rng(seed).standard_normal((num, *cells)), range(1, len(cells) + 1)
    u = np.fft.ifftn(np.fft.fftn(noise, axes=axes) / ((waves**2).sum(0) + 4), axes=axes).real
    return u / u.std()


def moved(num: int = 160) -> dict[str, np.ndarray]:
    """A field moved over the edge of the grid, 1.3 times as many numbers as pairs to learn from."""
    a = fields(num, 13, 13)
    return {"a": a, "u": -np.roll(a, (5, 3), (1, 2))}


def blocks() -> dict[str, np.ndarray]:
    """Blocks of 8 cells reversed and moved on."""
    frames = [fields(60, 40)]
    for _ in range(5):
        frames.append(np.roll(frames[-1].reshape(60, 5, 8)[..., ::-1], 2, 1).reshape(60, 40))
    return {"u": np.stack(frames, 1)}


def reaction(num: int = 16, frames: int = 14, n: int = 20) -> dict[str, np.ndarray]:
    """Two species between walls; rates and diffusivities vary in space."""
    x = (np.arange(n) + 0.5) / n
    laplacian = np.diff(np.pad(np.eye(n), ((1, 1), (0, 0)), "edge"), 2, 0)
    decay, grow = np.diag(0.3 + 0.5 * x), np.diag(0.2 + 0.3 * np.cos(3 * x))
    values, vectors = np.linalg.eig(
        np.block([[(0.1 + 0.3 * x)[:, None] * laplacian - decay, grow], [decay, 0.1 * laplacian - grow]])
    )
    step = (vectors * np.exp(0.3 * values) @ np.linalg.inv(vectors)).real
    states = [fields(num, 2 * n, seed=1) * 1e-7]  # in any unit
    for _ in range(frames - 1):
        states.append(states[-1] @ step.T)
    return {name: part for name, part in zip("uv", np.split(np.stack(states, 1), 2, 2), strict=True)}


def temperatures(days: int = 1500, n: int = 24) -> dict[str, np.ndarray]:
    """One run at stations: a season of each, noise that each remembers in its own way and hands on, and one
    broken sensor."""
    draw, x, u, noise = np.random.default_rng(2), np.linspace(0, 1, n), [], np.zeros(n)
    root = np.linalg.cholesky(np.exp(-np.abs(x[:, None] - x) / 0.2))
    for day in range(days):
        noise = (
            (0.6 + 0.2 * np.sin(5 * x)) * noise + 0.15 * np.roll(noise, 1) + root @ draw.standard_normal(n)
        )
        u.append(285 + 10 * x + (8 + 4 * x) * np.cos(2 * np.pi * (day / 365.25 - 0.05 * x)) + 1.5 * noise)
    u = np.stack(u)
    u[:, 5] = 280.0
    return {"u": u}


def prepared(folder: Path, said: dict, **arrays: np.ndarray) -> tuple[Config, Cache]:
    write(folder / "a.h5", **arrays)
    config = config_of(folder, **said)
    build_cache(config, "ks", progress=False)
    return config, open_cache(config, "ks")


def by_least_squares(cache: Cache, context: int) -> float:
    """The least test error, as `Candidate.error` has it, of lstsq, ridge and reduced rank, chosen on
    validation."""

    def of(split: str) -> tuple[np.ndarray, np.ndarray]:
        rows = cache.split[split]
        u = cache.tokenizer.denormalise(
            cache.tokenizer.decode(cache.batch(rows, 0, cache.num_frames))
        ).double()
        a = (
            u
            if cache.input_tokenizer is None
            else cache.input_tokenizer.denormalise(cache.input_tokenizer.decode(cache.inputs(rows))).double()
        )
        return a.flatten(2).numpy(), u.flatten(2).numpy()

    (a, u), is_steady = of("train"), cache.task.is_steady
    x = (a if is_steady else a[:, :-1]).reshape(-1, a.shape[2])
    y = (u if is_steady else u[:, 1:]).reshape(-1, u.shape[2])
    mean, mean_next = x.mean(0), y.mean(0)
    _, size, right = np.linalg.svd(x - mean, full_matrices=False)

    def error(weights: np.ndarray, split: str) -> float:
        a, u = of(split)
        last, out = a[:, 0 if is_steady else context - 1], []
        for _ in range(u.shape[1] - context):
            last = (last - mean) @ weights + mean_next
            out.append(last)
        out, u = (
            part.reshape(len(u), -1, cache.tokenizer.num_channels, u.shape[2] // cache.tokenizer.num_channels)
            for part in (np.stack(out, 1), u[:, context:])
        )
        return float(np.sqrt(np.square(out - u).mean((0, 3)) / np.square(u).mean((0, 3))).mean())

    tried_out = [np.linalg.lstsq(x - mean, y - mean_next, rcond=None)[0]]
    for ridge in [10.0**-power for power in range(1, 12)]:
        cross = right @ ((x - mean).T @ (y - mean_next))
        full = right.T @ (cross / (size**2 + ridge * size[0] ** 2)[:, None])
        out = np.linalg.svd((x - mean) @ full, full_matrices=False)[2]
        tried_out += [full, *[full @ out[:rank].T @ out[:rank] for rank in (2, 4, 8, 16)]]
    best = min(tried_out, key=lambda weights: error(weights, "val"))
    return min(error(best, "test"), error(tried_out[0], "test"))


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (moved(), STEADY),
        (blocks(), {**TRANSIENT, "patch": 8}),
        (reaction(), {**TRANSIENT, "layout": {name: ["trajectory", "time", "x"] for name in "uv"}}),
    ],
    ids=["moved", "blocks", "reaction"],
)
def test_the_base_is_as_good_as_plain_least_squares(tmp_path, arrays, said):
    config, cache = prepared(tmp_path, said, **arrays)
    head, _ = base_selection.select_base(cache, 1, config.context("ks"), 0, CPU)
    assert head.base.kind == head.twin.kind == "linear" and not head.facts.base["unstable"]
    error = evaluate_candidate("", head, cache, config.context("ks"), cache.split["test"]).error()
    assert error < max(1.05 * by_least_squares(cache, config.context("ks")), FLOAT32)


def windows_of_fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of windows of every fit from now on."""
    counts, windows = [], Linear.windows

    def counted(self: Linear, samples: Samples, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        counts.append(count)
        return windows(self, samples, count)

    monkeypatch.setattr(Linear, "windows", counted)
    return counts


@pytest.mark.parametrize(
    ("most_work", "wanted"),
    [
        (math.inf, {"moved": [60, 120, 240, 480, 960], "noise": [60, 120]}),
        (0.2, {"moved": [60, 120, 240, 480]}),
    ],
)
def test_a_costly_map_is_fitted_to_more_windows_while_they_help_and_within_its_work(
    tmp_path, monkeypatch, capsys, most_work, wanted
):
    """Every window of fields that move tells something of the map, more noise tells nothing."""
    counts = windows_of_fits(monkeypatch)
    monkeypatch.setattr(linear, "CHEAP", 1e-3)
    monkeypatch.setattr(linear, "FEWEST", 60)
    moved = [fields(120, 12, 12)]
    for _ in range(10):
        moved.append(np.roll(moved[-1], 1, 1) * np.linspace(0.8, 1, 12))
    noise = np.random.default_rng(0).standard_normal((120, 11, 12, 12))
    for name, u in {"moved": np.stack(moved, 1), "noise": noise}.items():
        if name in wanted:
            counts.clear()
            (tmp_path / name).mkdir()
            said = {**TRANSIENT, "layout": {"u": ["trajectory", "time", "x", "y"]}, "base": ["linear"]}
            said |= {"domain": {"x": [0, 1], "y": [0, 1]}, "patch": 1}
            _, cache = prepared(tmp_path / name, said, u=u)
            assert [*base_selection.fitted_candidates(cache, 1, 0, CPU, most_work)]
            assert counts == wanted[name]
    is_cut = "linear: a candidate is left out, as its fit would take" in capsys.readouterr().out
    assert is_cut == (most_work < 1)


def test_an_equation_that_explains_the_changes_of_frames_is_fitted_whatever_it_takes(tmp_path, capsys):
    rng = np.random.default_rng(0)
    k = np.fft.rfftfreq(32, 1 / 32)
    waves = np.fft.rfft(rng.standard_normal((40, 1, 32))) * (k <= 4)
    heat = np.fft.irfft(waves * np.exp(-0.03 * k**2 * np.arange(8)[:, None]), n=32)
    for name, u in {"heat": heat, "noise": rng.standard_normal(heat.shape)}.items():
        (tmp_path / name).mkdir()
        said = {
            **TRANSIENT,
            "layout": {"u": ["trajectory", "time", "x"]},
            "base": ["persistence", "equation"],
        }
        _, cache = prepared(tmp_path / name, said | {"domain": {"x": [0, 1]}}, u=u)
        found = [name for name, _ in base_selection.fitted_candidates(cache, 1, 0, CPU, 0.05)]
        assert len(found) == (2 if name == "heat" else 1)
    assert capsys.readouterr().out.count("its fit would take too much") == 1


def test_a_map_between_cells_is_no_candidate_if_windows_are_shifted(tmp_path, capsys):
    u = fields(12, 16)[:, None].repeat(3, 1)
    said = {**TRANSIENT, "boundary": "periodic", "symmetries": ["shift"]}
    config, cache = prepared(tmp_path, said, u=u)
    _, decisions = base_selection.select_base(cache, 1, 1, 0, CPU)
    scores = decisions[0].scores
    assert not any("linear" in name for name in scores)
    assert "linear: left out, as ks is shifted" in capsys.readouterr().out
    assert "linear" not in config_of(tmp_path, **{**said, "base": None}).task["ks"].base


@pytest.mark.parametrize("shape", [(40, 7), (7, 40)])
def test_principal_directions_are_those_of_the_singular_value_decomposition(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = Directions.of(x)
    torch.testing.assert_close(found.variances.sqrt(), torch.linalg.svdvals(x.double()))
    axes = found.combined(torch.eye(7, dtype=torch.float64)).double()
    torch.testing.assert_close(axes.T @ axes, torch.eye(7, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.scores @ axes.T, x.double(), atol=1e-5, rtol=0)


def test_cells_fixed_in_time_stay_and_parameters_shift_the_answer():
    base = Linear(num_channels=1, num_parameters=1, space=[2], rank=1)
    base.kept[1], base.mean[:], base.mean_in[:2] = 1.0, 2.0, 2.0
    base.reads[2, 0], base.gives[0, 0] = 3.0, 1.0
    known = ParameterBatch(torch.tensor([[0.5]]), torch.zeros(1, dtype=torch.long))
    assert base(torch.tensor([[[[7.0, 9.0]]]]), known).tolist() == [[[2.0 + 1.5, 9.0]]]


def test_masked_cells_take_no_part(tmp_path):
    """Cells without a value hold NaN in the files and what their neighbours say in the windows."""
    arrays = temperatures()
    arrays["u"][:, 8:14] = np.nan
    said = {**TRANSIENT, "layout": {"u": ["time", "x"]}, "cut": 12, "base": ["persistence", "linear"]}
    config, cache = prepared(tmp_path, said, **arrays)
    head, decisions = base_selection.select_base(cache, 1, config.context("ks"), 0, CPU)
    scores = decisions[0].scores
    assert head.base.kind == "linear" and scores[head.facts.base["name"]] < scores["persistence"]
    for part in (head.base.reads, head.base.gives):
        assert part[8:14].abs().max() < 1e-6 * part.abs().max()


def test_the_linear_base_reads_the_forcing(tmp_path):
    """Heated by a number that differs from frame to frame, at places that differ from cell to cell."""
    draw, where, u = np.random.default_rng(3), np.linspace(0, 2, 16), [np.zeros((30, 16))]
    heat = draw.standard_normal((30, 12))
    for frame in range(11):
        u.append(0.8 * u[-1] + where * heat[:, frame, None] + 0.5 * where[::-1] * heat[:, frame + 1, None])
    layout = {"u": ["trajectory", "time", "x"], "q": ["trajectory", "time"]}
    said = {**TRANSIENT, "layout": layout, "forcing": ["q"], "base": ["persistence", "linear"]}
    config, cache = prepared(tmp_path, said, u=np.stack(u, 1), q=heat)
    head, decisions = base_selection.select_base(cache, 1, config.context("ks"), 0, CPU)
    scores = decisions[0].scores
    assert head.base.kind == "linear" and scores[head.facts.base["name"]] < 1e-4 < 0.5 < scores["persistence"]
