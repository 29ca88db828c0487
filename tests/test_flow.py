"""The base of incompressible flow: its projection, and flows that it knows beside fakes that it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from test_base_selection import make_caches
from torch import Tensor
from user_files import base_error

from ups.data.cache import open_cache
from ups.models.base_selection import base_settings, select_base, unfitted_head
from ups.models.bases.base import ParameterBatch, Samples
from ups.models.bases.flow import Flow, Projection

PERIODIC_BOX, WALLS = "periodic", "dirichlet"


def grid(n: int, m: int) -> tuple[Tensor, Tensor]:
    """Centres (n, m) of the cells of (0, 1) x (0, 1)."""
    return torch.meshgrid((torch.arange(n) + 0.5) / n, (torch.arange(m) + 0.5) / m, indexing="ij")


def norm(u: Tensor) -> float:
    return float(u.square().mean().sqrt())


@pytest.mark.parametrize("boundary", [PERIODIC_BOX, WALLS, "periodic,no_flux"])
def test_a_projection_takes_gradients_and_leaves_what_has_no_divergence(boundary):
    n, m = 48, 32
    x, y = grid(n, m)
    project = Projection((n, m), (1.0, 1.0), boundary)
    wave = [2 * math.pi if end == "periodic" else math.pi for end in (boundary.split(",") * 2)[:2]]
    # a stream function that is zero at walls, a potential that is even there
    is_walled = [k == math.pi for k in wave]
    s = [torch.sin(k * at) for k, at in zip(wave, (x, y), strict=True)]
    c = [torch.cos(k * at) for k, at in zip(wave, (x, y), strict=True)]
    turning = torch.stack([wave[1] * s[0] * c[1], -wave[0] * c[0] * s[1]])[None]
    gradient = torch.stack([-wave[0] * s[0] * c[1], -wave[1] * c[0] * s[1]])[None]
    assert norm(project(turning) - turning) < 5e-3 * norm(turning)
    assert norm(project(gradient)) < 1e-2 * norm(gradient)
    both = project(turning + gradient)
    assert norm(both - turning) < 2e-2 * norm(turning) and norm(project(both) - both) < 1e-2 * norm(both)
    uniform = torch.ones(1, 2, n, m)
    left = project(uniform)[0].mean((1, 2))
    # walls stop it
    assert torch.allclose(left, torch.tensor([0.0 if wall else 1.0 for wall in is_walled]), atol=0.1)


def flow(
    boundary: str, n: int, m: int, dt: float, num_channels: int = 3, vectors=((0, 1),), num_moving: int = 3
) -> Flow:
    settings = {"num_values": 1, "num_channels": num_channels, "space": (n, m), "boundary": boundary}
    return Flow((1.0, 1.0), dt, vectors, num_moving, **settings)


def parameter_batch(rows: int) -> ParameterBatch:
    return ParameterBatch(torch.zeros(rows, 0), torch.zeros(rows, dtype=torch.long))


@pytest.mark.parametrize(("boundary", "shift"), [(PERIODIC_BOX, (5.3, -70.6)), (PERIODIC_BOX, (0.25, 0.5))])
def test_a_uniform_wind_carries_everything_over_the_edge_of_a_periodic_box(boundary, shift):
    n, m, dt = 64, 32, 0.1
    x, y = grid(n, m)
    base = flow(boundary, n, m, dt)
    base.mean.copy_(torch.tensor([0.3, -0.2, 1.0]))
    base.std.copy_(torch.tensor([2.0, 0.5, 3.0]))

    def blob(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(2 * math.pi * x) * torch.cos(2 * math.pi * y + 1)

    wind = torch.tensor(shift) / torch.tensor([n, m]) / dt
    fields = torch.stack([wind[0].expand(n, m), wind[1].expand(n, m), blob(x, y)])
    u = ((fields - base.mean.view(-1, 1, 1)) / base.std.view(-1, 1, 1))[None, None]
    later = base(u, parameter_batch(1))[0] * base.std.view(-1, 1, 1) + base.mean.view(-1, 1, 1)
    assert torch.allclose(later[:2], fields[:2], atol=1e-4)
    exact = blob(x - shift[0] / n, y - shift[1] / m)
    assert norm(later[2] - exact) < 1e-3
    assert norm(blob(x + shift[0] / n, y + shift[1] / m) - exact) > 0.1  # the fake: carried against the wind


def test_a_vortex_between_walls_turns_and_stays():
    """A steady flow of Euler's equation: the pressure takes all that carrying changes, and without it does
    not."""
    n, dt = 64, 0.05
    x, y = grid(n, n)
    s, c = (lambda at: torch.sin(math.pi * at)), (lambda at: torch.cos(math.pi * at))
    v = torch.stack([s(x) * c(y), -c(x) * s(y)])
    base = flow(WALLS, n, n, dt)
    # what is carried is a function of the stream function
    u = torch.cat([v, (s(x) * s(y))[None]])[None, None]
    later = base(u, parameter_batch(1))
    assert norm(later - u[:, 0]) < 5e-3
    base.projection.forward = lambda v: v
    assert norm((base(u, parameter_batch(1)) - u[:, 0])[:, :2]) > 5e-2
    backwards = torch.cat([-v, u[0, 0, 2:]])[None, None]
    assert norm(flow(WALLS, n, n, dt)(backwards, parameter_batch(1)) - backwards[:, 0]) < 5e-3


def test_constant_fields_drive_the_flow_and_do_not_change():
    n, dt = 32, 0.1
    x, y = grid(n, n)
    base = flow(PERIODIC_BOX, n, n, dt, 5, ((0, 1), (3, 4)), 3)
    names = base.weight_real.shape[2]
    assert names == 3 + 2 * (1 + 1 + 2)  # carried; force, force times scalar, scalar along x and along y
    turning = torch.stack([torch.sin(2 * math.pi * y), torch.sin(2 * math.pi * x)])
    u = torch.cat([torch.zeros(3, n, n), turning])[None, None]
    u[0, 0, 2] = 1.0
    start, phi = base.start_and_terms(u, None)
    assert torch.allclose(start, u[:, 0], atol=1e-6) and torch.equal(start[:, 3:], u[:, 0, 3:])
    pushed = base.transform.inverse(phi)[0]
    assert torch.allclose(pushed[3:5], turning, atol=1e-2) and torch.allclose(pushed[5:7], turning, atol=1e-2)
    assert torch.allclose(pushed[7:], torch.tensor([1.0, 0, 0, 1]).view(-1, 1, 1).expand(-1, n, n), atol=1e-5)
    base.weight_real[0, :, 3, 0] = base.weight_real[0, :, 4, 1] = 0.5
    wind = u + torch.eye(5)[0].view(5, 1, 1)  # which carries no constant field
    assert torch.equal(base.start_and_terms(wind, None)[0][:, 3:], u[:, 0, 3:])
    later = base(u, parameter_batch(1))
    assert torch.allclose(later[0, :2], 0.5 * turning, atol=1e-2) and torch.equal(later[:, 3:], u[:, 0, 3:])


@pytest.mark.faults  # six seconds: of the slow half
def test_a_driven_flow_between_walls_is_found_and_chosen_and_one_whose_velocity_is_another_is_not(tmp_path):
    """Fake refused: a base that any fields will do for. With the components of the velocity exchanged the
    carrying is wrong."""
    config = make_caches(
        tmp_path,
        "data.tasks=[ns_incom2d]",
        *(
            f"task.ns_incom2d.{change}"
            for change in ("num_trajectories=16", "resolution=32", "num_frames=9", "t_end=0.4")
        ),
    )
    cache, device = open_cache(config, "ns_incom2d"), torch.device("cpu")
    head, decisions = select_base(cache, 0, 3, 0, device)
    scores = decisions[0].scores
    best = {
        kind: min(score for name, score in scores.items() if name.startswith(kind))
        for kind in config.task["ns_incom2d"].base
    }
    assert head.base.kind == "flow" and best["flow"] < 0.5 * min(best["propagator"], best["persistence"])
    settings = base_settings(cache)
    samples = Samples(head, cache, 0)
    exchanged = settings | {"vectors": [[1, 0], *settings["vectors"][1:]]}
    for name, fitted, base in Flow.fit(samples, exchanged):
        wrong = unfitted_head(cache, "flow", fitted, device)
        wrong.base.load_state_dict(base.state_dict())
        assert base_error(wrong, cache, 3) > 1.3 * best["flow"], name
    # a velocity that stands still carries nothing
    assert not list(Flow.fit(samples, settings | {"vectors": [[3, 4]]}))
