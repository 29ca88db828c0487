"""Every fake in the place of a stage is refused by a gate that is named, and exact draws in all places by
none.

The world is forced Burgers on 32 cells with its own data, cache and an operator that is a base alone.
Corrector and students draw the exact next state: noise drives the equation, and a network's noise is that
noise. Each fake is scored beside them as `assess_transient` scores a model, and put in the place of a stage
in the report's entry."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from cases import cases
from entries import place
from test_base_selection import base_alone
from torch import Tensor

from bench import power
from ups.config.load import load_config, to_dict
from ups.evaluation import transient
from ups.evaluation.ensemble import Ensembles, one_step
from ups.evaluation.gates import ensemble_gates, not_passed
from ups.evaluation.one_step import ranks_of_data
from ups.generative.conditions import StateConditions
from ups.generative.corrector import Corrector
from ups.generative.residuals import TransientResiduals
from ups.metrics.intervals import Resamples
from ups.results import Entry
from ups_solvers import burgers_forced

pytestmark = pytest.mark.faults  # tests/test_gates.py refuses fakes in seconds
NAME, CELLS, NU, DT, CPU = "burgers1d_forced", 32, 0.02, 0.03, torch.device("cpu")
STEPS = 2  # of the solver between two frames, 24 normal numbers of the 32 that a draw has
SETTINGS = dataclasses.replace(
    load_config(None).evaluate,
    members=10,
    ensemble_trajectories=40,
    ensemble_frames=8,
    num_bootstrap=100,
    truth_members=32,
)
FEW = 32  # rows in a call whose costs are counted


@dataclasses.dataclass
class Exact:
    """Draws of the exact next state as a sampler: of what the condition holds, the state and its prediction.

    The network is called `calls` times where calls are counted, and changes nothing. changed: what becomes of
    the condition; sign: of the noise; white: white noise of so many times the residual's size in place of the
    draw."""

    network: Corrector
    calls: int
    changed: Callable[[Tensor], Tensor] = torch.clone
    sign: float = 1.0
    white: float = 0.0
    num_steps: int = 0

    def residual(
        self,
        states: StateConditions,
        tokens: Tensor,
        facts: Tensor,
        noise: Tensor,
        second: Tensor,
        shuffle: Tensor | None = None,
    ) -> Tensor:
        head, codec = self.network.heads[NAME], states.head.codec
        every = torch.arange(len(tokens)).repeat_interleave(len(noise) // len(tokens))
        for _ in range(self.calls if len(noise) == FEW else 0):
            self.network.velocity(head.condition(tokens, facts).rows(every))(noise, torch.ones(len(noise)))
        if self.white:
            return self.white * head.r_std * noise
        seen = self.changed(tokens if shuffle is None else tokens[shuffle])[every]
        z, change = seen[..., : codec.dim], seen[..., 2 * codec.dim : 3 * codec.dim]
        modes = torch.fft.rfft(codec.denormalise(codec.decode(z[:, None]))[:, 0, 0].double(), norm="forward")
        modes[:, -(-CELLS // 3) :] = 0
        forced = burgers_forced.equation(CELLS, NU, DT / STEPS)
        for drawn in (
            (self.sign * noise).flatten(1)[:, : 12 * STEPS].double().view(len(noise), STEPS, 6, 2).unbind(1)
        ):
            modes = forced.advance(modes, drawn)
        u_next = torch.fft.irfft(modes, n=CELLS, norm="forward").float()
        return codec.encode(codec.normalise(u_next[:, None, None]))[:, 0] - (z + change)


def of_the_batch(tokens: Tensor) -> Tensor:
    return tokens.mean(0, keepdim=True).expand_as(tokens)


def permuted(u: Tensor, draw: torch.Generator, _: Tensor) -> Tensor:
    return torch.stack(
        [u[:, torch.randperm(u.shape[1], generator=draw), lead] for lead in range(u.shape[2])], 2
    )


def leaked(u: Tensor, _: torch.Generator, u_ref: Tensor) -> Tensor:
    return torch.cat([u_ref[:, None], u[:, 1:]], 1)


def inflated(u: Tensor, _: torch.Generator, __: Tensor) -> Tensor:
    mean = u.mean(1, keepdim=True)
    return mean + 1.2 * (u - mean)


# of whole rollouts, made from the corrector's
ROLLOUTS = {"permuted": permuted, "leaked": leaked, "inflated": inflated}
EQUAL = ("student_1", "student_2", "copied", "antithetic", *ROLLOUTS)  # draws from the corrector's noise


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(ensembles, entry with exact draws as corrector and students, and every fake)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(burgers_forced, "SPIN", 0.2)  # a state is as good as another here
        config, truth, operator = base_alone(
            tmp_path_factory.mktemp("fakes"),
            NAME,
            f"task.{NAME}={{num_trajectories: 600, resolution: {CELLS}, num_frames: 20, t_end: {19 * DT}, "
            f"parameters: [{NU}], reserve: 0.5, base: [propagator]}}",
        )
    source = TransientResiduals(operator, truth.cache)
    network = (
        Corrector(
            {
                "model": to_dict(config.operator.model),
                "precision": "no",
                "tasks": [source.description],
                "sampler_steps": 4,
            }
        )
        .eval()
        .requires_grad_(False)
    )
    ours = network.heads[NAME]
    r, *_ = source.batch("reserved", torch.arange(200), torch.arange(200) % 15, None)
    ours.r_std.copy_(r.flatten(0, -2).std(0))
    ours.marginal_std.copy_(ours.r_std)
    ours.waves.fit(r / ours.r_std)
    sampler = functools.partial(Exact, network)
    samplers = {
        "corrector": sampler(8),
        "student_1": sampler(1),
        "student_2": sampler(2),
        "blind": sampler(1, torch.zeros_like),
        "of_the_batch": sampler(1, of_the_batch),
        "white": sampler(1, white=1.0),
        "white_0.69": sampler(1, white=0.69),
        "copied": Exact(copy.deepcopy(network), 8),
        "antithetic": sampler(1, sign=-1.0),
        **{name: sampler(1) for name in ROLLOUTS},
    }
    ensembles = Ensembles(source, truth, samplers, 0)
    rollouts = functools.cache(
        lambda model, rows, num_frames, num_members: original(
            ensembles, model, torch.tensor(rows), num_frames, num_members
        )
    )
    original = transient.rollouts

    def changed(_, model, rows, num_frames, num_members):
        u = rollouts("corrector" if model in EQUAL else model, tuple(rows.tolist()), num_frames, num_members)
        if num_frames > SETTINGS.ensemble_frames:  # tests/test_climate.py has the fakes of long rollouts
            return u
        if model == "antithetic":
            mirrored = rollouts("antithetic", tuple(rows.tolist()), num_frames, num_members)
            return torch.cat([part[:, : num_members // 2] for part in (u, mirrored)], 1)
        if model in ROLLOUTS:
            return ROLLOUTS[model](u, torch.Generator().manual_seed(1), truth.future(rows, num_frames))
        return u

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transient, "rollouts", changed)
        patch.setattr(transient, "LONG", 2)
        entry, _ = transient.assess_transient(ensembles, SETTINGS)
        entry.numbers |= transient.assess_long(ensembles, SETTINGS).numbers
    return ensembles, entry


def placed(entry: Entry, **fakes: str) -> Entry:
    """The entry with the figures of other models in the places of these."""
    out = copy.deepcopy(entry)
    for other, fake in fakes.items():
        place(out, fake, other)
    return out


def failed(entry: Entry) -> dict[str, str]:
    """Gate -> reason."""
    rows = [
        row for stage in ("diffusion", "consistency") for row in ensemble_gates(stage, "t", entry, SETTINGS)
    ]
    assert len(rows) > 15
    return {row["name"]: row["reason"] for row in not_passed(rows)[0]}


def test_exact_samples_in_the_place_of_every_stage_fail_no_gate(world):
    assert not failed(world[1]), failed(world[1])


@pytest.mark.parametrize(
    ("fake", "gates"),
    [
        ("white", {"samples"}),
        ("white_0.69", {"samples"}),
        ("blind", {"condition"}),
        ("of_the_batch", {"condition"}),
        ("permuted", {"samples"}),
        ("leaked", {"samples"}),
        ("copied", {"evaluations", "operations"}),
        ("inflated", {"samples"}),
        ("antithetic", {"samples"}),
    ],
)
def test_a_fake_student_is_refused_by_the_gates_that_name_it(world, fake, gates):
    for student in ("student_1", "student_2"):
        found = failed(placed(world[1], **{student: fake}))
        assert {f"{gate}/t/{student}" for gate in gates} <= set(found), found


@pytest.mark.parametrize("fake", ["white_0.69", "permuted", "leaked", "inflated", "antithetic"])
def test_a_fake_in_the_place_of_corrector_and_students_is_refused(world, fake):
    """What is compared with the teacher is equal then."""
    models = ("corrector", "student_1", "student_2")
    found = failed(placed(world[1], **dict.fromkeys(models, fake)))
    assert {f"samples/t/{model}" for model in models} <= set(found), found


def test_fair_scores_reward_dependent_members_which_is_why_their_correlation_has_a_margin(world):
    entry = world[1]
    for fake in ("inflated", "antithetic"):
        assert entry.value(f"{fake} / exact", "crps")["high"] < 1.0


def test_linear_waves_without_a_network_may_be_the_law(world):
    """On a task that is linear and Gaussian in a step they pass as the corrector does."""
    assert world[1].value("corrector / waves", "crps")["high"] > 1.0


@pytest.mark.parametrize(
    ("noise", "viscosity", "passes"),
    [(1.0, 1.0, True), (0.85, 1.0, False), (1.2, 1.0, False), (1.0, 0.5, False), (1.0, 2.0, False)],
)
def test_samples_of_another_law_are_not_exact(world, monkeypatch, noise, viscosity, passes):
    ensembles, entry = world
    truth, seed = ensembles.truth, 3

    def draw(u: Tensor, num: int, parameter: float, **settings) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(burgers_forced, "AMPLITUDE", noise * burgers_forced.AMPLITUDE)
            burgers_forced.equation.cache_clear()
            exact_futures = burgers_forced.SOLVERS["burgers1d_forced"].exact_futures
            found = exact_futures(u, num, parameter=viscosity * parameter, **settings)
        burgers_forced.equation.cache_clear()
        return found

    monkeypatch.setattr("ups.evaluation.truth.solver_of", lambda _: SimpleNamespace(exact_futures=draw))
    found = placed(entry)
    windows = one_step(ensembles, 480, SETTINGS.members, [], num_exact=SETTINGS.truth_members)
    groups = truth.cache.trajectory[truth.cache.split["test"][windows.rows]]
    ranks = ranks_of_data(windows.u_ref, windows.law, "periodic", Resamples(100, seed, groups))
    found.add("", {"ranks_of_data": ranks}, "one step")
    names = failed(found)
    assert not names if passes else "law_ranks/t" in names, names


# ---- the fakes of bench/power.py, through the gate on samples


@pytest.mark.parametrize(("task", "starts", "undecided"), cases("fakes.undecided"))
def test_every_fake_of_the_list_is_refused_or_undecided_and_exact_samples_are_not_refused(
    task, starts, undecided
):
    world = power.make_world(task, starts)
    found = {
        name: power.judge(world, members, None, slice(starts))
        for name, members in (power.fakes(world) | power.unlisted(world)).items()
    }
    assert "FAIL" not in {found.pop("exact"), found.pop("exact, other noise")}
    assert {name for name, one in found.items() if one != "FAIL"} <= {*undecided}, found
    assert "pass" not in found.values(), found


def test_members_around_the_truth_are_refused_if_no_law_is_known_and_exact_samples_are_not():
    world = power.make_world("burgers1d_forced", 40)
    second = power.fakes(world._replace(members=world.again, again=world.other))
    members = power.fakes(world)
    found = {
        name: power.judge(world, members[name], second[name], slice(40))
        for name in ("exact", "truth + 0.3 deviations", "truth in one member", "permuted at half time")
    }
    assert found.pop("exact") != "FAIL" and {*found.values()} == {"FAIL"}, found
