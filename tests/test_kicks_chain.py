"""The stage scripts on a law with a point mass: either no kick or one, anywhere that the state allows.

    u_next = A u + HEIGHT e_i + LOCAL eps on a ring of 16 cells; i with probability RATE any cell, if u_i < 0

So the residual is near zero or large, in one cell; where the state is above zero there is none, as behind a
wave of an excitable medium. Every check is refused to a fake, and passes exact samples.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import closed_form as world
import h5py
import numpy as np
import pytest
import torch
from closed_form import NOISY, failed
from known_answers import names
from torch import Tensor

import prepare_cache
from ups.generative.corrector import load_corrector
from ups.tasks import get_task
from ups_discovery.seeds import generator

pytestmark = pytest.mark.faults  # the stages train for half a minute
CELLS, NUM, RATE, HEIGHT, LOCAL, MEMBERS = 16, 8000, 0.5, 3.0, 0.02, 8
SETTINGS = [
    f"data.tasks=[{NOISY}]",
    f"task.{NOISY}={{resolution: {CELLS}, patch: 2, num_trajectories: {NUM}}}",
    "operator.train.steps=300",  # of one task, as in the whole world
    "diffusion.train.steps=800",
    "consistency.train.steps=400",
    "evaluate.stages=[operator, diffusion, consistency]",
]


def states(count: int, draws: torch.Generator) -> Tensor:
    """u (count, CELLS): smooth noise with a variance of 1."""
    white = torch.randn(count, CELLS, generator=draws)
    return (white.roll(1, 1) + 2 * white + white.roll(-1, 1)) / 6**0.5


def kicks(u: Tensor, draws: torch.Generator) -> Tensor:
    """u_next - A u of states (n, CELLS)."""
    place = torch.randint(CELLS, (len(u), 1), generator=draws)
    is_kicked = (torch.rand(len(u), 1, generator=draws) < RATE) & (u.gather(1, place) < 0)
    r = torch.zeros_like(u).scatter_(1, place, HEIGHT * is_kicked.float())
    return r + LOCAL * torch.randn(u.shape, generator=draws)


def measure(u: Tensor, r: Tensor) -> dict[str, float]:
    """r (n, M, CELLS) sampled at states u (n, CELLS). A kick is a cell above HEIGHT / 2.

    rate: kicks over those of the law; response: the slope of a state's rate over the number of cells that
    allow one, in units of the law's; refused: fraction of the kicks in cells where u > 0.1; pairs: fraction
    of the samples with kicks in two cells; height: mean of kicks over HEIGHT; background: RMS of other
    cells."""
    is_kick, allowed = r > HEIGHT / 2, (u < 0).double().mean(1)
    count = is_kick.double().sum(2)
    excess = allowed - allowed.mean()
    return {
        "rate": float(count.mean() / (RATE * allowed.mean())),
        "response": float((excess * count.mean(1)).sum() / (RATE * excess.square().sum())),
        "refused": float((is_kick & (u > 0.1)[:, None]).sum() / is_kick.sum().clamp_min(1)),
        "pairs": float((count > 1).double().mean()),
        "height": float(r[is_kick].mean() / HEIGHT) if is_kick.any() else 0.0,
        "background": float(r[~is_kick].square().mean().sqrt()),
    }


LAW = {
    "rate": (0.75, 1.25),
    "response": (0.6, 1.4),
    "refused": (0.0, 0.1),
    "pairs": (0.0, 0.05),
    "height": (0.85, 1.1),
    "background": (0.0, 0.15),
}


def check(u: Tensor, r: Tensor) -> set[str]:
    return names(failed(measure(u, r), LAW))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Data, cache, operator, corrector and student."""
    root = tmp_path_factory.mktemp("kicks")
    task, u = get_task(NOISY), states(NUM, generator(1, "states"))
    path = root / "data" / NOISY / task.file_for(1.0)
    path.parent.mkdir(parents=True)
    with h5py.File(path, "w") as file:
        file.attrs.update(task.attributes(1.0))
        file["x-coordinate"] = ((np.arange(CELLS) + 0.5) / CELLS).astype(np.float32)
        file["t-coordinate"] = np.arange(3, dtype=np.float32)
        file["tensor"] = torch.stack([u, world.propagate(u) + kicks(u, generator(1, "kicks"))], 1).numpy()
    assert prepare_cache.main(world.arguments_of(root, *SETTINGS)) == 0
    for stage in ("train_operator", "train_diffusion", "train_consistency"):
        world.run_stage(root, stage, *SETTINGS)
    return root


@pytest.fixture(scope="module")
def u() -> Tensor:
    return states(512, generator(2, "states"))


@pytest.fixture(scope="module")
def samples(root, u) -> dict[str, Tensor]:
    return world.sample_residuals(world.ensembles_of(world.config_of(root, *SETTINGS)), u, MEMBERS)


def test_exact_samples_pass_and_no_cheap_ensemble_does(samples, u):
    exact = torch.stack([kicks(u, generator(5, i)) for i in range(MEMBERS)], 1)
    assert not check(u, exact), measure(u, exact)
    assert "background" in check(u, samples["dressed_conditional"])
    assert {"refused", "response"} <= check(u, samples["dressed_resampled"])
    assert "rate" in check(u, samples["operator"])


def test_a_mixture_of_scales_is_selected(root):
    head = load_corrector(world.config_of(root, *SETTINGS).run_dir / "diffusion").heads[NOISY]
    assert head.facts.is_localized and head.mixture.std[0].max() < 0.1 * head.mixture.std[1].max()


@pytest.mark.parametrize("model", ["corrector", "student_2"])
def test_samples_have_kicks_where_the_state_allows_them(samples, u, model):
    assert not check(u, samples[model]), measure(u, samples[model])


def test_a_corrector_blind_to_its_state_is_caught(root, u, tmp_path):
    shutil.copytree(root / "runs/default/operator", tmp_path / "default/operator")
    more = [*SETTINGS, f"run.root={tmp_path}", "diffusion.train.steps=300"]
    world.run_stage(root, "train_diffusion", *more, fake=world.blind)
    found = world.sample_residuals(world.ensembles_of(world.config_of(root, *more)), u, MEMBERS)
    assert {"refused", "response"} & check(u, found["corrector"])
