"""A base per field (ups/models/bases/per_field.py): what one frame predicts is not left to what serves a
field that none does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from user_files import overlay, section, write

from ups.config import load_config
from ups.data.build_cache import build_cache
from ups.data.cache import Cache, open_cache
from ups.models import base_selection
from ups.models.bases.base import ParameterBatch, Persistence
from ups.models.bases.equation import Equation
from ups.models.bases.per_field import Component, PerField, components_of, merged, subset_settings
from ups.models.bases.propagator import Propagator
from ups.models.bases.solver import Solver
from ups.models.head_setup import build_operator
from ups_discovery.boundary import PERIODIC

CPU = torch.device("cpu")
NUM, FRAMES, CELLS, DT = 24, 16, 16, 0.1
X = 2 * np.pi * np.arange(CELLS) / CELLS
# one frame does not show where it goes
CLOCK = np.sin(0.3 * np.arange(FRAMES)[:, None] + np.arange(NUM)[:, None, None]) + 0 * X
ALONE = ParameterBatch(torch.zeros(3, 0), torch.zeros(3, dtype=torch.long))


def logistic(seed: int = 0) -> np.ndarray:
    """u_t = 0.3 (u - u^3) from waves, exactly: polynomial propagators follow it, linear ones do not."""
    draw, grown = np.random.default_rng(seed), np.exp(0.3 * DT * np.arange(FRAMES)[:, None])
    u = 0.6 * draw.standard_normal((NUM, 1, 1)) * np.sin(X + 6.28 * draw.random((NUM, 1, 1)))
    return u * grown / np.sqrt(1 + u**2 * (grown**2 - 1))


def cache_of(folder: Path, **fields: np.ndarray) -> Cache:
    folder.mkdir(exist_ok=True)
    said = section(
        folder,
        layout={name: ["trajectory", "time", "x"] for name in fields},
        domain=[0, 2 * math.pi],
        dt=DT,
        base=["persistence", "propagator"],
    )
    write(folder / "a.h5", **{name: values.astype(np.float32) for name, values in fields.items()})
    config = load_config(overlay(folder, said))
    build_cache(config, "ks", progress=False)
    return open_cache(config, "ks")


def served(cache: Cache) -> tuple[dict, dict, dict[str, float]]:
    """Facts and weights of the base that serves, and each field's pooled nRMSE of its test rollouts, by an
    operator that was built from what is written to files."""
    facts, weights = base_selection.fit_base(cache, 1, 1, 0, CPU)
    settings = load_config(
        overlay(cache.path.parent, section(cache.path.parent.parent)),
        ["operator.model.width=8", "operator.model.depth=1"],
    ).operator.model
    operator = build_operator({"ks": (json.loads(json.dumps(facts)), weights)}, settings, "no")
    rows = cache.split["test"]
    with torch.no_grad():
        z = cache.batch(rows, 0, FRAMES)
        z_pred = operator.rollout(z[:, :1], "ks", cache.parameters[rows], FRAMES - 1, "base")
        u_pred, u_ref = (operator.heads["ks"].physical(part).double() for part in (z_pred, z[:, 1:]))
    pooled = (u_pred - u_ref).square().sum((0, 3)) / u_ref.square().sum((0, 3))
    errors = pooled.sqrt().mean(0).tolist()
    return facts, weights, dict(zip(cache.task.fields, errors, strict=True))


# ---------------------------------------------------------------- what is selected


def test_a_field_that_cannot_be_predicted_takes_no_base_from_another(tmp_path):
    _, _, alone = served(cache_of(tmp_path / "alone", u=logistic()))
    facts, weights, both = served(cache_of(tmp_path / "both", u=logistic(), q=CLOCK))
    assert alone["u"] < 5e-3 and both["u"] < 1.2 * alone["u"]
    again = served(cache_of(tmp_path / "again", u=logistic(), q=CLOCK))
    assert again[0]["description"]["base"] == facts["description"]["base"]
    assert again[1].keys() == weights.keys() and all(
        torch.equal(again[1][name], weights[name]) for name in weights
    )


def test_fields_that_one_base_serves_best_are_served_by_it_alone(tmp_path):
    """Two fields of which each drives the other, and two that have nothing to do with each other."""
    # no frame is there twice
    phase = X - DT * np.arange(FRAMES)[:, None] + 2.4 * np.arange(NUM)[:, None, None] ** 1.1
    wave, slope = np.sin(phase), np.cos(phase)
    for name, q in (("coupled", slope), ("apart", logistic(1))):
        cache = cache_of(tmp_path / name, u=wave if name == "coupled" else logistic(), q=q)
        head, scores = base_selection.select_base(cache, 1, 1, 0, CPU)
        assert head.facts.base["kind"] == "propagator" and not any(":" in name for name in scores)


def test_a_field_that_is_zero_throughout_has_no_error_and_stays_zero(tmp_path):
    facts, _, errors = served(cache_of(tmp_path, u=logistic(), q=CLOCK, z=np.zeros(CLOCK.shape)))
    assert (
        facts["description"]["base"]["kind"] == "per_field" and errors["u"] < 5e-3 and math.isnan(errors["z"])
    )


class Exact(Propagator):
    """Does what a function of the last frame does."""

    def __init__(self, cache: Cache, step):
        super().__init__(**base_selection.base_settings(cache) | {"degree": 1, "history": 1})
        self.step = step

    def forward(self, u: torch.Tensor, parameters: ParameterBatch) -> torch.Tensor:
        return self.step(u[:, -1])


def test_of_three_fields_the_two_that_go_together_are_tried_together(tmp_path, monkeypatch):
    """u and v turn into each other, q is a clock. Every base sees what it was fitted to, and serves what it
    is best at."""
    phase = 0.5 * np.arange(FRAMES)[:, None] + np.arange(NUM)[:, None, None] + X
    cache = cache_of(tmp_path, u=np.sin(phase), v=np.cos(phase), q=CLOCK)
    order, asked = [cache.task.fields.index(name) for name in "uvq"], []
    turn = torch.tensor([[math.cos(0.5), math.sin(0.5)], [-math.sin(0.5), math.cos(0.5)]])

    def fake(cache, base_steps, seed, device, fields=None):
        if fields is None:
            for number, factor in ((0, 0.9), (1, 0.95)):
                head = base_selection.unfitted_head(
                    cache,
                    "propagator",
                    base_selection.base_settings(cache) | {"degree": 1, "history": 1},
                    device,
                )
                head.base = Exact(cache, lambda u, factor=factor: factor * u)
                yield f"damped {number}", head
            return
        asked.append(tuple(fields))
        if {*fields} == {*order[:2]}:
            place = [list(fields).index(channel) for channel in order[:2]]
            back = np.argsort(place).tolist()
            base = Exact(cache, lambda u: torch.einsum("ij,bjx->bix", turn, u[:, place])[:, back])
            settings = subset_settings(base_selection.base_settings(cache), fields) | {
                "degree": 1,
                "history": 1,
            }
            yield (
                "turn",
                base_selection.per_field_head(
                    cache, [Component(base, "propagator", settings, list(fields), list(fields))], device
                ),
            )

    monkeypatch.setattr(base_selection, "fitted_candidates", fake)
    head, scores = base_selection.select_base(cache, 1, 1, 0, CPU)
    assert (
        sorted(asked) == [(0,), (0, 1), (0, 2), (1,), (1, 2), (2,)] and head.facts.base["kind"] == "per_field"
    )
    assert all(scores[head.facts.base["name"]] < error for name, error in scores.items() if ":" not in name)


def test_fields_that_are_followed_are_tried_together_without_the_hopeless():
    assert base_selection.field_groups({(0,): 0.2, (1, 2): 0.9, (3,): 0.1}) == [[0], [1, 2], [3], [0, 3]]
    assert (
        base_selection.field_groups({(0,): 0.2, (1,): 0.3})
        == [[0], [1]]
        == base_selection.field_groups({(0,): 0.8, (1,): 0.9})
    )


def test_components_of_a_vector_stay_together():
    settings = {
        "num_channels": 4,
        "num_moving": 3,
        "vectors": [[1, 2]],
        "positive": [0],
        "space": [8, 8],
        "boundary": PERIODIC,
        "vorticity": [],
        "walls": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    assert subset_settings(settings, [1, 2, 3]) == {
        **settings,
        "num_channels": 3,
        "num_moving": 2,
        "vectors": [[0, 1]],
        "positive": [],
        "walls": [[2, 3], [4, 5], [6, 7]],
    }
    alone = subset_settings(settings | {"positive": []}, [0])
    assert alone["vectors"] == [] and alone["vorticity"] == [0] and alone["walls"] == [[0, 1]]
    assert subset_settings(settings, [0])["vorticity"] == [] and subset_settings(settings, [0])[
        "positive"
    ] == [0]


# ---------------------------------------------------------------- the base itself


def fitted(num_channels: int, degree: int = 1, seed: int = 0) -> tuple[Propagator, dict]:
    settings = {
        "num_values": 1,
        "num_channels": num_channels,
        "space": [CELLS],
        "boundary": PERIODIC,
        "degree": degree,
        "history": 1,
    }
    base, draw = Propagator(**settings), torch.Generator().manual_seed(seed)
    for weight in (base.weight_real, base.weight_imag):
        weight.copy_(0.1 * torch.randn(weight.shape, generator=draw))
    return base, settings


def test_each_field_comes_from_its_base_which_gets_the_fields_that_it_reads():
    (one, small), (two, large) = fitted(1, 3), fitted(3, 1, 1)
    base = PerField.of(
        [Component(one, "propagator", small, [2], [2]), Component(two, "propagator", large, None, [0])]
    )
    u = torch.randn(3, 1, 3, CELLS, generator=torch.Generator().manual_seed(2))
    found = base(u, ALONE)
    assert torch.equal(found[:, 2], one(u[:, :, 2:], ALONE)[:, 0]) and torch.equal(
        found[:, 0], two(u, ALONE)[:, 0]
    )
    assert torch.equal(found[:, 1], u[:, 0, 1])  # which none answers for
    spoiled = u.clone()
    spoiled[:, :, 1] = torch.nan
    assert torch.equal(base(spoiled, ALONE)[:, 2], found[:, 2]) and base(spoiled, ALONE)[:, 0].isnan().all()
    again = PerField(json.loads(json.dumps(base.described)))
    again.load_state_dict(base.state_dict())
    assert torch.equal(again(u, ALONE), found)
    assert base.complexity == (3, one.num_fitted + two.num_fitted) and base.needs_fitted_parameters
    assert not base.is_learnt and base.lr_factor == 1.0


def test_components_of_one_base_are_merged_and_called_once():
    one, settings = fitted(2)
    described = {"kind": "propagator", "settings": settings}
    components = merged(
        [
            *components_of(one, described, [0]),
            *components_of(Persistence(), {"kind": "persistence", "settings": {}}, [2]),
            *components_of(one, described, [1]),
        ]
    )
    assert [one.fields for one in components] == [[0, 1], [2]]
    inner = PerField.of([Component(one, "propagator", settings, [0, 2], [0, 2])])
    assert components_of(inner, {}, [2, 1])[0].fields == [2] and components_of(inner, {}, [1]) == []


def test_findings_name_the_fields_of_their_base_and_bounds_can_be_lifted():
    settings = {
        "num_values": 1,
        "num_channels": 2,
        "space": [CELLS],
        "boundary": PERIODIC,
        "lengths": [1.0],
        "dt": 0.1,
        "positive": [],
        "terms": [((1, 0), ()), ((0, 1), ())],
        "found": {
            "origins": [0.0, 0.0],
            "sizes": [1.0, 1.0],
            "equations": [{"doubt": "", "rows": [[0, 0, 0.5, 0.01, False], [1, 1, 0.5, 0.01, False]]}],
        },
    }
    equation = Equation(**settings)
    equation.weight.fill_(0.5)
    equation.high.fill_(1.0)
    base = PerField.of(
        [
            Component(equation, "equation", settings, None, [1]),
            Component(Persistence(), "persistence", {}, None, [0]),
        ]
    )
    assert [line.split(" =")[0] for line in base.findings(("u", "uv"), ("x",))] == ["∂t uv"]
    u = 5 * torch.ones(3, 1, 2, CELLS)
    assert float(base(u, ALONE)[:, 1].max()) == 1.0 < 5 < float(base.unbounded()(u, ALONE)[:, 1].min())
    assert float(base(u, ALONE)[:, 1].max()) == 1.0  # as before


def test_a_solver_of_the_users_may_serve_some_fields():
    settings = {
        "num_channels": 2,
        "solver": "mine:step",
        "task": "ks",
        "positive": [],
        "names": [],
        "dt": 0.1,
    }
    (one, small), solver = fitted(1), Solver(**settings)
    base = PerField.of(
        [Component(solver, "solver", settings, None, [1]), Component(one, "propagator", small, [0], [0])]
    )
    assert (
        base.is_user_solver
        and base.solver == "mine:step"
        and not PerField.of([Component(one, "propagator", small, [0], [0])]).is_user_solver
    )
    u = torch.ones(3, 1, 2, CELLS)
    assert bool((base.use(lambda u: 2 * u)(u, ALONE)[:, 1] == 2).all())


def test_bases_per_field_do_not_wait_for_the_device():
    (one, small), (two, large) = fitted(1, 3), fitted(3, 1, 1)
    base = PerField.of(
        [Component(one, "propagator", small, [2], [2]), Component(two, "propagator", large, None, [0, 1])]
    ).to("meta")
    parameters = ParameterBatch(
        torch.zeros(3, 0, device="meta"), torch.zeros(3, dtype=torch.long, device="meta")
    )
    assert base(torch.zeros(3, 1, 3, CELLS, device="meta"), parameters).shape == (3, 3, CELLS)
