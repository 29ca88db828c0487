"""The units of the data do not change the model: fields, lengths, times and parameters of any size."""

from __future__ import annotations

from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from golden_table import base_scores
from test_equation import UX, UXX, UXXXX, few_windows, kuramoto
from user_files import overlay, section

import prepare_cache
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.data.cache import open_cache
from ups.models.base_selection import fit_base
from ups.models.bases.base import ParameterBatch, field_units
from ups.models.bases.flow import Flow
from ups.models.facts import HeadFacts
from ups.models.head import TaskHead
from ups_discovery.library import library
from ups_discovery.seeds import generator
from ups_discovery.terms import Terms
from ups_discovery.units import unit_of

CPU = torch.device("cpu")
# of the field, lengths, times
UNITS = {"as made": (1.0, 1.0, 1.0), "tiny": (1e-30, 1e-9, 1e-12), "huge": (1e30, 3e16, 1e12)}


def fitted(folder, u: np.ndarray, length: float, dt: float) -> tuple[dict, dict]:
    """Facts and weights of the base that is chosen for u (trajectory, time, x)."""
    folder.mkdir()
    with h5py.File(folder / "u.h5", "w") as file:
        file["u"] = u
    settings = section(folder, dt=dt, domain=[0.0, length], base=["persistence", "equation"])
    path = overlay(folder, settings, "made", include=str(ROOT / "configs" / "smoke.yaml"))
    assert prepare_cache.main(["--config", str(path)]) == 0
    return fit_base(open_cache(load_config(path), "made"), 4, 1, 0, CPU)


def coefficients(facts: dict) -> dict[tuple, float]:
    """Of the equation that was chosen, as its description has them: term -> coefficient."""
    settings = facts["description"]["base"]["settings"]
    return {
        settings["terms"][place]: value for _, place, value, *_ in settings["found"]["equations"][0]["rows"]
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, tuple[dict, dict]]:
    """What is fitted to the equation of Kuramoto and Sivashinsky in all units."""
    u, folder = kuramoto(24, 12, n=32, dt=0.25)[:, :, 0].numpy(), tmp_path_factory.mktemp("units")
    with pytest.MonkeyPatch.context() as patch:
        few_windows(patch)
        return {name: fitted(folder / name, u * a, 22.0 * x, 0.25 * t) for name, (a, x, t) in UNITS.items()}


@pytest.mark.parametrize("name", [*UNITS][1:])
def test_the_same_data_in_other_units_have_the_same_base_error_and_terms(made, name):
    (one, _), (other, _) = made["as made"], made[name]
    errors = base_scores(one)
    assert len(errors) == 2 and base_scores(other) == pytest.approx(errors, rel=1e-2)
    assert min(errors.values()) < 0.05 and coefficients(one).keys() == coefficients(other).keys()
    # stated in all units
    assert one["findings"][0].replace("e", "").count("±") == other["findings"][0].count("±") == 3


@pytest.mark.parametrize("name", UNITS)
def test_coefficients_are_in_the_units_of_the_data(made, name):
    a, x, t = UNITS[name]
    found = coefficients(made[name][0])
    wanted = {UX: -x / (a * t), UXX: -(x**2) / t, UXXXX: -(x**4) / t}
    # within what this coarse grid makes of them
    assert {term: found[term] / wanted[term] for term in wanted} == pytest.approx(
        dict.fromkeys(wanted, 1.0), rel=0.06
    )


def test_a_served_base_and_the_time_step_of_a_network_do_not_depend_on_the_units(made):
    heads = {}
    for name, (facts, weights) in made.items():
        heads[name] = TaskHead(HeadFacts.read(facts["description"]), width=1)
        heads[name].load_state_dict(weights, strict=False)
    w = torch.randn(4, 1, 1, 32, generator=generator(0, "start"))
    parameters = ParameterBatch(torch.zeros(4, 0), torch.zeros(4, dtype=torch.long))
    first = heads["as made"].base_frames(w, parameters, 1)
    assert float((first - w).std()) > 0.01
    for head in heads.values():
        torch.testing.assert_close(head.base_frames(w, parameters, 1), first, rtol=0, atol=1e-2)
        assert head.log_dt == 0.0


def test_a_unit_of_a_coefficient_is_that_of_its_term():
    """Of every term of two libraries: its value in scaled units times its unit is its value in those of the
    data."""
    rng, dt = generator(0, "fields"), 3e-7
    for positive, names in (([1], ["v", "p"]), ([], ["w"])):
        channels, space = len(names), (12, 10)
        # rounding of the inverse Laplacian is that of its longest wave
        lengths = (5e6, 2e-4) if positive else (5e6, 2e6)
        cell = [length / n for length, n in zip(lengths, space, strict=True)]
        terms = library(channels, positive, 2, [0] if channels == 1 else [], [0])
        w = torch.randn(3, channels, *space, generator=rng, dtype=torch.float64)
        codec = SimpleNamespace(
            mean=torch.tensor([2e4, -7.0][:channels]),
            std=torch.tensor([1e4, 0.4][:channels]),
            fields=names,
            positive=["p"],
        )
        units = field_units(codec)
        every = (...,) + (None,) * 2
        s = w * units.scale[every] + units.shift[every]
        physical = w * codec.std.double()[every] + codec.mean.double()[every]
        scaled = Terms(terms, positive, space, [float(n) for n in space], "periodic", cell)(s)
        exact = Terms(terms, positive, space, lengths, "periodic")(physical)
        for place, term in enumerate(terms):
            for channel, size in enumerate(
                [1.0 if c in positive else units.size[c] for c in range(channels)]
            ):
                rate = scaled[:, place] * size / dt  # a coefficient of 1, as a rate in the units of the data
                unit = unit_of(term, channel, units, positive, cell, dt)
                torch.testing.assert_close(
                    exact[:, place] * unit, rate, rtol=1e-6, atol=1e-6 * float(rate.abs().max())
                )


def test_a_mean_far_from_zero_is_the_origin_of_its_field():
    codec = SimpleNamespace(
        mean=torch.tensor([101325.0, 3.0]), std=torch.tensor([0.01, 1.0]), fields=["p", "u"], positive=[]
    )
    units = field_units(codec)
    assert units.origin == [pytest.approx(101325), 0.0] and units.shift.tolist() == [0.0, 3.0]


@pytest.mark.parametrize(("length", "speed"), [(1e-26, 1.0), (1e24, 1e-12), (1e-3, 1e3)])
def test_a_flow_in_other_units_is_the_same_flow(length, speed):
    rng, space = generator(0, "flow"), (16, 12)
    u = torch.randn(2, 1, 3, *space, generator=rng)
    parameters = ParameterBatch(torch.zeros(2, 0), torch.zeros(2, dtype=torch.long))

    def made(length: float, speed: float) -> torch.Tensor:
        frame, cell = 0.05 * length / speed, [length / 16, 2 * length / 12]
        codec = SimpleNamespace(mean=torch.full((3,), 0.3 * speed), std=torch.full((3,), speed))
        settings = {
            "num_values": 1,
            "num_channels": 3,
            "space": space,
            "boundary": "periodic",
            "dt": 1.0,
            "lengths": [16.0, 12.0],
            "vectors": [[0, 1]],
            "num_moving": 3,
            "cell": cell,
            "frame": frame,
        }
        samples = SimpleNamespace(device=CPU, head=SimpleNamespace(codec=codec))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Flow, "normal_equations", lambda *_: None)
            patch.setattr(Flow, "fits", lambda base, _: [(0.0, base)])
            return next(Flow.fit(samples, settings))[2](u, parameters)

    moved = made(1.0, 1.0)
    assert float((moved - u[:, -1]).abs().max()) > 0.1
    torch.testing.assert_close(made(length, speed), moved, rtol=0, atol=1e-4)
