"""Forecasts that take no model (ups/evaluation/trivial.py): the climatology and, where frames have dates, its
annual cycle stand beside persistence in results, gates and verdicts."""

from __future__ import annotations

import math
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from test_linear import temperatures
from user_files import ONE_BLOCK, config_of, fitted

from ups.config.load import load_config
from ups.data.build_cache import build_cache
from ups.evaluation.forecast import assess_forecasts
from ups.evaluation.gates import check_usability, operator_gates
from ups.evaluation.trivial import Trivial
from ups.evaluation.truth import Truth, open_truth
from ups.report.model_card import _forecasts
from ups.report.report import overview
from ups.results import Results
from ups.userdata.times import in_years

CPU, DAYS, CUT = torch.device("cpu"), 1500, 30


def opened(folder, unit: str | None = "days since 2001-03-01", **said):
    """(configuration, truth) of one run of temperatures, cut into windows."""
    u = temperatures(DAYS)["u"]
    with h5py.File(folder / "a.h5", "w") as file:
        file["u"] = u
        if unit:
            file["time"] = np.arange(DAYS, dtype=float)
            file["time"].attrs["units"] = unit
    said = {
        "layout": {"u": ["time", "x"]},
        "cut": CUT,
        "boundary": "no_flux",
        "dt": 1.0,
        "base": ["persistence"],
        **said,
    }
    config = config_of(folder, [*ONE_BLOCK, "evaluate.num_bootstrap=20"], **said)
    build_cache(config, "ks", progress=False)
    return config, open_truth(config, "ks"), u


def errors(truth: Truth) -> dict[str, float]:
    """RMS of the test errors of every trivial forecast."""
    rows = truth.rows
    u_ref, start = truth.future(rows), truth.frames(rows, truth.context - 1, 1)
    found = Trivial(truth, 4).forecasts(rows, u_ref, start)
    return {name: float((u - u_ref).square().mean().sqrt()) for name, u in found.items()}


def test_climatology_is_the_mean_of_training_frames_per_cell_and_the_season_is_known_from_dates(tmp_path):
    config, truth, u = opened(tmp_path)
    cache, found = truth.cache, errors(truth)
    offset = cache.task.offsets.get("u", 0.0)
    train = cache.split["train"].numpy()
    windows = u[: len(u) // CUT * CUT].reshape(-1, CUT, u.shape[1]) - offset
    late = windows[truth.rows.numpy(), truth.context :]
    assert found["climatology"] == pytest.approx(
        np.sqrt(np.square(late - windows[train].mean((0, 1))).mean()), rel=1e-4
    )
    years = truth.years(torch.arange(2), CUT).numpy()
    assert years.shape == (2, CUT) and years[1, 0] == pytest.approx(2001 + 2 / 12 + CUT / 365.2425)
    noise = np.std(windows - u.mean(0) + offset - windows.mean(1, keepdims=True))
    assert found["seasonal_climatology"] < 0.6 * found["climatology"]
    assert found["seasonal_climatology"] < 1.6 * noise


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        (None, {}),
        ("days", {}),
        ("hours since 2001-03-01", {}),
        ("days since 2001-03-01", {"first_frame": 900}),
    ],
)
def test_without_dates_or_less_than_two_years_of_them_no_season_is_made(tmp_path, unit, said):
    assert errors(opened(tmp_path, unit, **said)[1]).keys() == {"persistence", "climatology"}


@pytest.mark.parametrize(
    ("units", "calendar", "times", "years"),
    [
        ("days since 1900-01-01", "360_day", [360.0, 540.0], [1901.0, 1901.5]),
        ("Hours Since 2000-1-1 00:00:0.0", "", [24 * 365.2425], [2001.0]),
        (b"seconds since 1970-07-01", b"noleap", [0.0], [1970.5]),
        ("months since 2000-01-01", "standard", [0.0, 6.0], [2000.0, 2000.5]),
        ("m since 2000-01-01", "", [0.0], None),
        ("days", "", [0.0], None),
        ("", "", [0.0], None),
    ],
)
def test_dates_are_read_as_cf_writes_them(units, calendar, times, years):
    found = in_years(np.array(times), {"units": units, "calendar": calendar})
    assert found is None if years is None else found == pytest.approx(years, abs=1e-3)


def test_a_model_that_is_worse_than_climatology_is_not_usable_and_every_table_shows_it(tmp_path):
    config, truth, _ = opened(tmp_path)
    _, operator, _ = fitted(config)  # persistence
    operator.heads["ks"].facts = replace(operator.heads["ks"].facts, network_weight=0.0)
    entry, _ = assess_forecasts(operator, truth, config.evaluate, 0)
    rivals = ("climatology", "seasonal_climatology")
    assert {"persistence", *rivals} <= {*entry.models()}
    assert {f"operator / {name}" for name in rivals} <= {*entry.ratios()}
    for ratio in (0.9, 1.1):  # of the season's error
        for name, value in (("persistence", 0.5), (rivals[0], 0.6), (rivals[1], ratio)):
            entry.add(f"operator / {name}", {"nrmse": dict.fromkeys(("value", "low", "high"), value)})
        entry.add("operator", {"nrmse": dict.fromkeys(("value", "low", "high"), 0.2)})
        results = Results({"run": "r"}, {"ks": entry})
        rows = operator_gates("operator", "ks", entry, load_config(None).evaluate)
        gates = {row["name"]: row["passed"] for row in rows}
        assert gates["trivial/ks"]
        assert gates["trivial/ks/climatology"]
        assert gates["trivial/ks/seasonal_climatology"] is (ratio < 1)
        verdict = check_usability(results)["ks"]
        assert verdict["usable"] is (ratio < 1)
        assert ("not clearly better than the seasonal climatology" in verdict["words"]) is (ratio > 1)
    assert all(
        word in text
        for word in ("persistence", "climatology", "seasonal climatology")
        for text in (overview(results), str(_forecasts(results)))
    )
    assert math.isfinite(entry.number("seasonal_climatology", "nrmse"))
