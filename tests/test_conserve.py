"""What an equation keeps, an operator keeps whatever its network says (ups/models/constraints.py), where its
data do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_codec import fit_codec

from ups.data.cache import Cache
from ups.evaluation.forecast import conservation_error
from ups.generative.conditions import StateConditions
from ups.generative.sampling import Starts, sample_rollout
from ups.models.constraints import Shells, correction
from ups.models.facts import HeadFacts, describe_tokenizer
from ups.models.head import TaskHead
from ups.models.head_setup import conserved_facts
from ups.models.operator import Operator
from ups.tasks import Task, get_task
from ups_solvers import SOLVERS

GAS = ("cfd1d", "cfd2d", "cfd3d")
MODEL = {"kind": "flat", "width": 8, "depth": 1, "modes": 4, "kernel_size": 3, "mlp_ratio": 2.0}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def states(task: Task, count: int = 3, frames: int = 4, cells: int = 8, seed: int = 0) -> Tensor:
    """Any fields (count, frames, C, *space), positive where they have to be, that keep nothing."""
    u = noise(count, frames, len(task.fields), *[cells] * task.ndim, seed=seed)
    return torch.stack(
        [
            (0.3 * part).exp() if name in task.positive else part + 0.5
            for name, part in zip(task.fields, u.unbind(2), strict=True)
        ],
        2,
    )


def operator_of(name: str, is_conservative: bool = True, dim: int = 0) -> Operator:
    """One whose network says anything."""
    task = get_task(name)
    codec = fit_codec([states(task, 8).numpy()], fields=task.fields, positive=task.positive, patch=2, dim=dim)
    operator = Operator(
        {
            "model": MODEL,
            "precision": "no",
            "tasks": [
                {
                    "name": name,
                    "history": 1,
                    "codec": describe_tokenizer(codec),
                    "input_codec": None,
                    "dt": 0.1,
                    "parameter_values": [],
                    "boundary": task.boundary,
                    "domain": list(task.domain),
                    "parameters": {},
                    "base": {"kind": "persistence", "settings": {}},
                    "network_weight": 1.0,
                    "is_conservative": is_conservative,
                }
            ],
        }
    )
    operator.heads[name].codec.load_state_dict(codec.state_dict())
    torch.manual_seed(0)
    for parameter in operator.parameters():
        nn.init.normal_(parameter, std=0.05)
    return operator


@pytest.mark.parametrize("name", [*GAS, "burgers1d", "ns_incom2d"])
def test_an_operator_conserves_what_its_equation_conserves_with_any_network(name):
    task, moved = get_task(name), {}
    u = states(task)
    for is_conservative in (True, False):
        operator = operator_of(name, is_conservative)
        head = operator.heads[name]
        z = head.codec.encode(head.codec.normalise(u[:, :1]))
        u_pred = head.physical(operator.rollout(z, name, torch.zeros(len(u), 0), 4))
        assert all((u_pred[:, :, task.fields.index(field)] > 0).all() for field in task.positive)
        # what stands still
        fixed = u[:, :1, len(task.moving) :].expand_as(u_pred[:, :, len(task.moving) :])
        torch.testing.assert_close(u_pred[:, :, len(task.moving) :], fixed, rtol=1e-5, atol=1e-5)
        assert (u_pred[:, -1] - u[:, 0]).abs().max() > 0.05  # the network does say something
        moved[is_conservative] = conservation_error(task, u_pred, u[:, :1])["conservation_error"].abs().max()
    assert moved[True] < 1e-5 and moved[False] > 1e-2


def test_the_base_conserves_it_too_and_gradients_pass():
    operator = operator_of("cfd1d")
    head, u = operator.heads["cfd1d"], states(get_task("cfd1d"))
    head.base.forward = lambda u, known: 1.1 * u[:, -1]  # a base that loses everything
    z = head.codec.encode(head.codec.normalise(u[:, :1]))
    full, base = operator.predict(z, "cfd1d", head.parameter_batch(torch.zeros(len(u), 0)))
    assert (
        conservation_error(head.task, head.physical(base), u[:, :1])["conservation_error"].abs().max() < 1e-5
    )
    full.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.out.parameters())


def test_rollouts_bound_the_waves_of_the_network_and_training_does_not():
    operator, w, none = operator_of("burgers1d", False), noise(3, 1, 1, 8), torch.zeros(3, 0)
    head, shells = operator.heads["burgers1d"], Shells((8,), "periodic")
    known = head.parameter_batch(none)
    free, base = operator.step(w, "burgers1d", known)
    assert (shells(free) > 1.1 * shells(base)).any()  # the network amplifies waves
    operator.heads["burgers1d"] = head.with_facts(waves=[[0.0] * len(shells)])
    assert torch.equal(operator.step(w, "burgers1d", known)[0], free)
    for is_training in (True, False):  # validation, which has no gradient, and service
        found = operator.train(is_training).forecast(w.requires_grad_(not is_training), "burgers1d", none, 2)
        assert (shells(found) <= 1.001 * shells(base) + 1e-5).all()


@pytest.mark.parametrize("name", [*GAS, "ns_incom2d"])
def test_a_correct_prediction_stays_as_it_is(name):
    """Solutions of the equation, and the same moved as a whole: what is kept does not notice."""
    task = get_task(name)
    value = 0.1 if task.parameters else None
    u = (
        SOLVERS[task.name]
        .simulate(range(2), seed=0, resolution=16, num_frames=3, parameter=value, t_end=0.1)
        .double()
    )
    assert correction(task, task.conserved, u, u[:, 0]).abs().max() < 2e-7
    assert correction(task, task.conserved, u.roll(3, -1), u[:, 0]).abs().max() < 2e-7


def test_a_gas_with_too_little_energy_left_keeps_a_positive_pressure():
    task = get_task("cfd1d")
    u = states(task, frames=1)
    wild = u.clone()
    wild[:, :, 2] *= 50 * noise(8)  # more energy of motion than there is energy
    change = correction(task, task.conserved, wild, u[:, 0])[..., None]
    found = torch.stack(
        [
            part * step.exp() if name in task.positive else part + step
            for name, part, step in zip(task.fields, wild.unbind(2), change.unbind(2), strict=True)
        ],
        2,
    )
    assert found.isfinite().all() and (found[:, :, :2] > 0).all()
    torch.testing.assert_close(found[:, :, 0].mean(-1), u[:, :, 0].mean(-1))  # the mass is kept all the same
    torch.testing.assert_close(found[:, :, 1], 0.5 * wild[:, :, 1])


def test_a_quantity_that_the_data_do_not_conserve_is_not_corrected():
    class Held:
        """As much of a cache as is asked."""

        rows_by_parameter = Cache.rows_by_parameter

        def __init__(self, u: Tensor):
            self.task, self.u, self.num_frames = get_task("burgers1d"), u, u.shape[1]
            self.split = {"train": torch.arange(len(u))}
            self.parameter_index = torch.zeros(len(u), dtype=torch.long)
            self.codec = fit_codec([u.numpy()], fields=("u",), patch=2)

        def batch(self, rows: Tensor, frame: int, count: int, device: torch.device) -> Tensor:
            return self.codec.encode(self.codec.normalise(self.u[rows, frame : frame + count]))

    def found(u: Tensor, **facts: Any) -> dict[str, Any]:
        held, codec = Held(u), fit_codec([u.numpy()], fields=("u",), patch=2)
        description = {
            **operator_of("burgers1d").heads["burgers1d"].facts.described(),
            "codec": describe_tokenizer(codec),
        }
        head = TaskHead(HeadFacts.read(description), 1)
        head.codec.load_state_dict(codec.state_dict())
        held.task = dataclasses.replace(get_task("burgers1d"), **facts)
        return conserved_facts(head, held)

    kept = states(get_task("burgers1d"), 8, 5, 16)
    kept = kept - kept.mean(-1, keepdim=True)
    assert found(kept) == {"is_conservative": True}
    lost = kept.clone()
    lost[:, -1] += 1e-3  # by the last frame, a thousandth of the spread
    assert found(lost) == {"is_conservative": False}
    # of user data it is found out, unless the user names what is conserved
    of_user = {"user_facts": {}, "conserved": (), "bounded": ()}
    assert found(kept, **of_user) == {"is_conservative": True, "conserved": ["u"]}
    assert found(lost, **of_user) == {"is_conservative": False}
    assert found(kept, **of_user | {"bounded": ("u",)}) == {"is_conservative": False}
    assert found(kept, **of_user | {"forcing": ("f",)}) == {"is_conservative": False}
    front = torch.tanh(
        8 * (0.4 + torch.sin(torch.arange(64) / 64 * 2 * torch.pi - torch.linspace(0, 1, 5)[:, None]))
    )
    front = front[None, :, None].expand(8, -1, -1, -1).contiguous()
    assert found(front)["is_conservative"]
    few = found(front[..., ::8].contiguous())  # of few of its cells the mean does not stay
    assert not few["is_conservative"]


def test_rollouts_stay_within_the_bounds_and_are_unchanged_inside_them():
    operator, u = operator_of("burgers1d", is_conservative=False), states(get_task("burgers1d"))
    head = operator.heads["burgers1d"]
    z = head.codec.encode(head.codec.normalise(u[:, :1]))

    def rolled() -> Tensor:
        return head.codec.decode(operator.rollout(z, "burgers1d", torch.zeros(len(u), 0), 40))

    free = rolled()
    for end, value in ((head.low, -100.0), (head.high, 100.0)):
        end.fill_(value)
    assert torch.equal(rolled(), free)  # to the last bit
    head.low.fill_(-2.0)
    head.high.fill_(3.0)
    # a polynomial that blows up, as a fitted one may
    head.base.forward = lambda u, known: -1.5 * u[:, -1] ** 3
    u_pred = rolled()
    assert u_pred.min() >= -2 - 1e-5 and u_pred.max() <= 3 + 1e-5 and u_pred.max() > 2.9
    base = head.codec.decode(operator.rollout(z, "burgers1d", torch.zeros(len(u), 0), 40, "base"))
    assert base.isfinite().all() and base.abs().max() <= 3 + 1e-5
    head.low.fill_(-torch.inf)
    head.high.fill_(torch.inf)
    assert not rolled().isfinite().all()  # the fake


@torch.no_grad()
def test_samples_that_leave_the_data_come_back(monkeypatch):
    """The base comes back from any state of the data and runs away beyond, as Barkley's equation does. The
    fake: without the range of the data, samples stay at the bounds."""
    operator = operator_of("burgers1d", is_conservative=False)
    head, states_of = operator.heads["burgers1d"], StateConditions(operator, "burgers1d")
    head.out.weight.zero_(), head.out.bias.zero_(), head.low.fill_(-7.0), head.high.fill_(7.0)
    head.base.forward = lambda u, known: torch.where(u[:, -1].abs() > 5, 2.0, 0.5) * u[:, -1]
    peak = torch.zeros(1, 1, 8).index_fill(-1, torch.tensor([3]), 6.0)

    def rolled(start: float, kick: float) -> Tensor:
        starts = Starts(head.codec.encode(start * peak[:, None]), torch.zeros(1, 0))
        noises = [head.codec.encode(size * peak) for size in (kick, *[0.0] * 7)]
        made = sample_rollout(states_of, lambda *given: given[2], starts, 8, lambda lead: (noises[lead],) * 2)
        return head.codec.decode(made)[0, :, 0, 3]

    assert rolled(0.0, 1.0).tolist()[:4] == pytest.approx([6.0, 3.5, 1.75, 0.875])
    assert rolled(1.0, 0.0).tolist() == pytest.approx([6.0] * 8)  # not below values of the start
    monkeypatch.setattr(head, "range_of_data", lambda z: (-torch.inf, torch.inf))
    assert float(rolled(0.0, 1.0)[-1]) == pytest.approx(7.0)
