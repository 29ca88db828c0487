"""The posterior of a two-valued field: of fields whose law can be enumerated, its samples have that law."""

import pytest
import torch

from ups.config.load import load_config
from ups.config.model import ModelConfig
from ups.generative import cell_posterior
from ups.generative.cell_posterior import CellPosterior, known_cells, posterior_of, two_levels
from ups.generative.linear_posterior import LinearPosterior
from ups.generative.observation import observe_all, observe_cells
from ups.tasks import TASKS
from ups.training.optim import build_optimizer, fit
from ups_discovery.seeds import generator

SIZE, LOW, HIGH = 4, -1.0, 1.5
STEPS = 300


def fields(count: int) -> torch.Tensor:
    """High left of a wall behind 1 to 3 columns, each as likely: (count, 1, SIZE, SIZE)."""
    wall = torch.randint(1, SIZE, (count, 1, 1, 1), generator=generator(0, "walls"))
    is_high = torch.arange(SIZE).expand(count, 1, SIZE, SIZE) < wall
    return torch.where(is_high, HIGH, LOW)


@pytest.fixture(scope="module")
def posterior():
    torch.manual_seed(0)
    v = fields(512)
    model = ModelConfig(kind="flat", width=24, depth=2, modes=2, kernel_size=3, mlp_ratio=2.0)
    cells = CellPosterior(LinearPosterior.fit(v), two_levels(v), model, TASKS["darcy2d"])

    def loss_of(step):
        rng = generator(1, step)
        return cells.loss(v[torch.randint(len(v), (32,), generator=rng)], rng)

    optim = load_config(None).steady.optim
    fit(cells, loss_of, range(STEPS), build_optimizer(cells, optim), lambda step: 8 * (1 - step / STEPS), 1.0)
    return cells.eval()


def observed() -> tuple[torch.Tensor, torch.Tensor]:
    """A field and a mask: the first (high) and last (low) cell of a row, so every wall is possible."""
    v, mask = torch.full((1, 1, SIZE, SIZE), LOW), torch.zeros(1, 1, SIZE, SIZE)
    v[..., :2], mask[..., 0, 0], mask[..., 0, 3] = HIGH, 1, 1
    return v, mask


def walls(samples: torch.Tensor) -> torch.Tensor:
    """Columns in front of the wall of every sample (M, 1, SIZE, SIZE) that is such a field."""
    is_high = samples[:, 0] == HIGH
    walls = is_high[:, 0].sum(1)
    is_valid = (is_high == (torch.arange(SIZE) < walls[:, None, None])).flatten(1).all(1)
    return walls[is_valid]


def draws(posterior: CellPosterior, count: int = 400) -> torch.Tensor:
    noise = torch.randn(1, count, 2, 1, SIZE, SIZE, generator=generator(2))
    return posterior(observe_cells(*observed()), noise).samples[0]


def test_samples_have_the_enumerated_law_given_two_cells(posterior):
    samples = draws(posterior)
    assert set(samples.unique().tolist()) == {LOW, HIGH}
    assert (samples[..., 0, 0] == HIGH).all() and (samples[..., 0, 3] == LOW).all()
    found = walls(samples)
    assert len(found) > 0.4 * len(samples)  # after so few steps: 0.53
    shares = torch.bincount(found, minlength=SIZE)[1:] / len(found)
    assert (shares - 1 / 3).abs().max() < 0.1, shares
    cells = posterior(observe_cells(*observed()))
    exact = LOW + (HIGH - LOW) * torch.tensor([1, 2 / 3, 1 / 3, 0])
    assert (cells.mean[0, 0].mean(0) - exact).abs().max() < 0.4
    assert cells.std[0, 0, 0, 0] == 0 and (cells.std[0, 0, :, 1:3] / (HIGH - LOW) > 0.2).all()


def test_cells_sampled_all_at_once_or_by_the_gaussian_are_refused(posterior, monkeypatch):
    gaussian = posterior.linear(observe_cells(*observed()), torch.randn(1, 400, 2, 1, SIZE, SIZE))
    assert len(walls(gaussian.samples[0])) == 0
    monkeypatch.setattr(cell_posterior, "ROUNDS", 1)
    assert len(walls(draws(posterior))) < 0.1 * 400


def test_a_field_observed_everywhere_is_returned(posterior):
    v = fields(3)
    noise = torch.randn(3, 2, 2, 1, SIZE, SIZE)
    found = posterior(observe_all(v), noise)
    assert torch.equal(found.mean, v) and not found.std.any()
    assert torch.equal(found.samples, v[:, None].expand(-1, 2, -1, -1, -1))
    assert known_cells(observe_all(v)).all()


def test_a_copy_from_its_description_samples_the_same(posterior):
    again = posterior_of(posterior.description, ModelConfig("flat", 24, 2, 2, 3, 2.0), TASKS["darcy2d"])
    again.load_state_dict(posterior.state_dict())
    assert torch.equal(draws(again.eval(), 8), draws(posterior, 8))


def test_two_levels_are_found_only_if_there_are_no_others():
    v = fields(20)
    assert two_levels(v + 1e-6 * torch.randn(v.shape)) == pytest.approx([LOW, HIGH], abs=1e-4)
    assert two_levels(torch.randn(4, 1, 8, 8)) is None
    assert two_levels(torch.ones(4, 1, 8, 8)) is None
    assert two_levels(v.repeat(1, 2, 1, 1)) is None
