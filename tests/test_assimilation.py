"""Starts estimated from noisy frames (ups/models/assimilation.py): against least squares for a linear map,
the spread of ensembles against their error, and where both must be refused."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.ours import fit_bases
from bench.rivals import Stopwatch
from bench.score import load
from bench.user_data import CONFIG, write, write_config
from ups import select
from ups.commands.stages import cache_context
from ups.config.load import load_config
from ups.data.build_cache import build_cache
from ups.data.cache import open_cache
from ups.forecaster import Forecaster
from ups.models import assimilation, base_selection
from ups.models.assimilation import estimated, noise_scale, perturbed, trajectory
from ups.models.base_selection import Candidate, Shortlist, cause_of_errors, fit_base
from ups.models.bases.base import Persistence
from ups.models.head_setup import build_operator
from ups_discovery.seeds import generator

SIGMA, CELLS, FRAMES = 0.1, 12, 6
CPU, NOISE, NUM_CELLS, NUM_FRAMES, DT = torch.device("cpu"), 0.1, 32, 31, 0.1


class Codec:
    fields, std = ("u",), torch.tensor([2.0])

    def masked(self, w):
        return w


def head_of(next_frame, history=1):
    """A head without a cache, of one field on CELLS cells whose next frame is a function of the last ones."""

    def base_frames(u, parameters, num_frames):
        frames = [*u.unbind(1)]
        for _ in range(num_frames):
            frames.append(next_frame(torch.stack(frames[-history:], 1)))
        return torch.stack(frames[history:], 1)

    return SimpleNamespace(
        history=history,
        codec=Codec(),
        task=SimpleNamespace(ndim=1),
        facts=SimpleNamespace(noise={"u": 2.0 * SIGMA}),
        base_frames=base_frames,
        parameter_batch=lambda raw: None,
    )


def linear_map(seed):
    matrix = torch.randn(CELLS, CELLS, generator=generator(seed, "map"), dtype=torch.float64)
    return 0.9 * torch.linalg.qr(matrix).Q


def noise(*shape, seed=0):
    return SIGMA * torch.randn(*shape, generator=generator(seed, "noise"), dtype=torch.float64)


@pytest.mark.parametrize("history", [1, 2])
def test_the_estimate_of_a_linear_map_is_that_of_least_squares(history, monkeypatch):
    maps = [linear_map(seed) / history for seed in range(history)]
    head = head_of(lambda u: sum(u[:, -1 - lag] @ one for lag, one in enumerate(maps)), history)
    w = torch.randn(3, FRAMES, 1, CELLS, generator=generator(1, "w"), dtype=torch.float64)
    basis = torch.eye(history * CELLS, dtype=torch.float64).view(-1, history, 1, CELLS)
    columns = trajectory(head, basis, None, FRAMES).flatten(1).mT
    start = torch.linalg.lstsq(columns, w.flatten(1).mT).solution.mT.reshape(3, history, 1, CELLS)
    exact = trajectory(head, start, None, FRAMES)[:, -history:]
    monkeypatch.setattr(assimilation, "NUM_GRADIENTS", 20)
    torch.testing.assert_close(estimated(head, w, torch.zeros(3, 0)), exact, rtol=0, atol=1e-6)


def test_spread_of_perturbed_frames_is_the_error_of_the_estimate():
    one = linear_map(0)
    head = head_of(lambda u: u[:, -1] @ one)
    clean = trajectory(head, torch.randn(40, 1, 1, CELLS, dtype=torch.float64), None, FRAMES)
    w = clean + noise(*clean.shape)
    members = perturbed(head, w, 0, list(range(40)), 16)
    members = estimated(head, members.flatten(0, 1), torch.zeros(640, 0)).unflatten(0, (40, 16))
    error = (members.mean(1) - clean[:, -1:]).square().mean().sqrt()
    ratio = float(members.var(1).mean().sqrt() / error)
    assert 0.9 < ratio < 1.1 and error < 0.7 * SIGMA
    assert float(noise_scale(head)) == pytest.approx(SIGMA)


def test_rows_that_no_trajectory_fits_better_stay_as_they_are():
    head = head_of(lambda u: torch.full_like(u[:, -1], torch.nan))
    w = noise(2, FRAMES, 1, CELLS)
    torch.testing.assert_close(estimated(head, w, torch.zeros(2, 0)), w[:, -1:], rtol=0, atol=0)


# ---- a chain: u_t = -u_x + 0.05 u_xx under noise of measurement


def films(kick: float = 0.0, num: int = 60) -> np.ndarray:
    """Exact solutions (num, NUM_FRAMES, 1, NUM_CELLS) of three waves, kicked before every frame."""
    random, k = np.random.default_rng(0), np.fft.rfftfreq(NUM_CELLS, 1 / NUM_CELLS)
    factor = np.exp(DT * (-1j * k - 0.05 * k**2)) * (k < 4)

    def waves() -> np.ndarray:
        return np.fft.rfft(random.standard_normal((num, 1, NUM_CELLS))) * ((k > 0) & (k < 4))

    modes = [waves()]
    while len(modes) < NUM_FRAMES:
        modes.append(factor * modes[-1] + kick * waves())
    return np.fft.irfft(np.stack(modes, 1), NUM_CELLS)


def opened(folder, u):
    """The cache of frames as user data, and their configuration."""
    write(folder / "film.npz", {"u": u[:, :, 0]})
    path = write_config(
        folder / "film.npz", CONFIG, "film", DT, domain=(0, 2 * np.pi), settings={"base": ["equation"]}
    )
    config = load_config(path, [])
    build_cache(config, "film", progress=False)
    return config, open_cache(config, "film")


@pytest.fixture(scope="module")
def clean():
    return films()


@pytest.fixture(scope="module")
def chain(clean, tmp_path_factory):
    """The noisy frames, their cache, and the operator with the equation that is found in them alone."""
    u = clean + NOISE * clean.std() * np.random.default_rng(1).standard_normal(clean.shape)
    config, cache = opened(tmp_path_factory.mktemp("film"), u)
    context = cache.context(config)
    assert context == 10 and config.context("film") == 1
    facts, weights = fit_base(cache, 0, context, 0, CPU)
    facts["description"]["network_weight"] = 0.0
    return u, cache, build_operator({"film": (facts, weights)}, config.operator.model, "no").eval()


@pytest.mark.faults  # a second of data, five of training
def test_make_bench_scores_noisy_films_as_the_report_does(chain, tmp_path):
    """The same frames are given and scored, and forecasts start from an estimate."""
    config, cache = opened(tmp_path, chain[0])
    context = cache.context(config)
    assert cache_context(config, "film") == context == 10 > config.context("film")
    problem, splits = load(config, "film")
    assert problem.context == splits["test"].given.shape[1] == 10
    assert splits["test"].truth.shape[1] == NUM_FRAMES - 10
    head, _ = fit_bases(cache, config, 0, CPU, Stopwatch(time.process_time))
    assert head.start_frames == 10


def error_of(u, clean):
    return float(np.sqrt(np.square(u - clean).mean() / np.square(clean).mean()))


def test_forecasts_of_noisy_films_start_from_all_frames(chain, clean):
    u, cache, operator = chain
    assert operator.head("film").start_frames == 10 and operator.head("film").is_deterministic
    rows, model = cache.split["test"].numpy(), Forecaster(operator)
    given, later = u[rows, :10].astype(np.float32), clean[rows, 10:]
    error = error_of(model.forecast("film", given, num_frames=21), later)
    with pytest.warns(UserWarning, match=r"starts from the noise of 1 input frame\(s\). Pass the last 10"):
        from_last = error_of(model.forecast("film", given[:, -1:], num_frames=21), later)
    assert error < 0.5 * from_last


def test_members_spread_as_they_err_and_noise_is_not_fed_back(chain, clean):
    u, cache, operator = chain
    rows = cache.split["test"].numpy()
    given, later = u[rows, :10].astype(np.float32), clean[rows, 10:]
    members = Forecaster(operator).sample("film", given, num_frames=21, members=16)
    for frames in (slice(0, 5), slice(16, 21)):
        error = np.square(members[:, :, frames].mean(1) - later[:, frames]).mean()
        assert 0.7 < np.sqrt(members[:, :, frames].var(1, ddof=1).mean() / error) < 1.4
    again = Forecaster(operator).sample("film", given[:2], num_frames=3, members=16)
    np.testing.assert_array_equal(again, members[:2, :, :3])
    for kind, most in (("state", np.inf), ("row", 1e-3)):
        pair = [
            Forecaster(operator).sample("film", u0, num_frames=3, members=16, noise=kind)
            for u0 in (given[:2], given[:2] * np.float32(1 + 1e-6))
        ]
        change = np.abs(pair[1] - pair[0]).mean() / pair[0].std(1).mean()
        assert change < most and (kind == "row" or change > 0.5)
    with pytest.raises(FileNotFoundError, match="an operator alone has no student"):
        Forecaster(operator).sample("film", given, by="student")


def test_noise_in_the_dynamics_is_not_taken_for_noise_of_measurement(chain, clean, tmp_path):
    kicked = films(kick=0.2)
    kicked = kicked + NOISE * clean.std() * np.random.default_rng(1).standard_normal(clean.shape)
    cache = opened(tmp_path, kicked)[1]
    assert "noise" in cache.header
    assert cause_of_errors(chain[2].head("film"), cache, 10, 0).chosen != select.MEASUREMENT


@pytest.mark.parametrize("is_tried", [True, False])
def test_an_equation_is_selected_with_its_estimated_start(chain, monkeypatch, is_tried):
    """Over a base that smooths noise and so is better than the equation from the last frame."""
    _, cache, operator = chain
    if not is_tried:
        monkeypatch.setattr(base_selection, "can_estimate", lambda head, context: False)
    head, candidates = copy.deepcopy(operator.head("film")), Shortlist(cache, 10, 0)
    candidates.add("equation", head)
    head.facts = replace(head.facts, start_frames=0)
    last = base_selection.evaluate_candidate("", head, cache, 10, candidates.rows)
    candidates.kept.append(replace(last, name="smooth", rmse=0.98 * last.rmse))
    assert min(candidates.kept, key=Candidate.error).name == ("equation" if is_tried else "smooth")


def test_a_start_that_is_no_better_is_not_estimated(chain):
    """Of a base that knows nothing of the dynamics, and of one frame."""
    _, cache, operator = chain
    head, base = operator.head("film"), operator.head("film").base
    one = Shortlist(cache, 1, 0).evaluate("one frame", head).head
    assert one.facts.start_frames is None and cause_of_errors(one, cache, 1, 0).chosen == select.MEASUREMENT
    head.base = Persistence()
    head.base.has_tangent = True
    one = Shortlist(cache, 10, 0).evaluate("persistence", head).head
    assert one.facts.start_frames == 0 and cause_of_errors(one, cache, 10, 0).chosen != select.MEASUREMENT
    head.base = base
