"""Ensemble sections of the report: everything measured is shown, what is missing is left out, nothing is
fetched."""

import copy
import functools
import math
import re

import numpy as np
import pytest
import torch
from entries import drop, entry_of
from test_report import Page, example

from ups.common.text import number
from ups.metrics.ensembles import compare_ensembles, score_ensemble, summarise_ensemble
from ups.metrics.intervals import Resamples
from ups.report import report
from ups.report.sections import ENSEMBLE_ROWS, ensemble_section, steady_section
from ups.report.tables import label
from ups.results import Entry

NUM_MEMBERS = 16
EVALUATIONS = {"corrector": 4.0, "student_1": 1.0, "student_2": 2.0, "scoring": 1.0}
SPREADS = {
    "operator": 0.0,
    "dressed": 0.5,
    "dressed_conditional": 0.8,
    "dressed_resampled": 0.7,
    "scoring": 1.2,
    "corrector": 1.0,
    "student_1": 0.95,
    "student_2": 1.0,
}


def smooth(generator, *shape, ndim):
    """Periodic noise with a 1/k^2 spectrum, of unit variance."""
    axes = tuple(range(-ndim, 0))
    waves = torch.meshgrid(*[torch.fft.fftfreq(n, 1 / n) for n in shape[-ndim:]], indexing="ij")
    decay = 1 / (1 + sum(k.square() for k in waves)).sqrt() ** (1 + ndim / 2)
    u = torch.fft.ifftn(
        torch.fft.fftn(torch.randn(*shape, generator=generator), dim=axes) * decay, dim=axes
    ).real
    return u / u.std()


def forecasts(space, n=12, num_frames=6, fields=1):
    """An ensemble per model around a known mean whose uncertainty grows with lead and x; the truth is one
    more such draw."""
    generator, ndim = torch.Generator().manual_seed(len(space)), len(space)
    shape = (num_frames, fields, *space)
    grow = torch.linspace(0.05, 0.5, num_frames).reshape(-1, *[1] * (1 + ndim))
    width = grow * torch.linspace(0.2, 2.0, space[0]).reshape(-1, *[1] * (ndim - 1))
    mean = 2 + smooth(generator, n, *shape, ndim=ndim)
    u_ref = mean + width * smooth(generator, n, *shape, ndim=ndim)
    members = {
        model: mean[:, None]
        + spread * width * smooth(generator, n, 1 if spread == 0 else NUM_MEMBERS, *shape, ndim=ndim)
        for model, spread in SPREADS.items()
    }
    noise = torch.randn(n, NUM_MEMBERS, *shape, generator=generator)
    members["dressed"] = mean[:, None] + 0.5 * grow * noise  # white and the same everywhere
    return members, u_ref


def sample_of(members, u_ref):
    space, fields = u_ref.shape[3:], u_ref.shape[2]
    return {
        "u_ref": u_ref[0].numpy(),
        "members": {model: x[0].numpy() for model, x in members.items()},
        "times": [0.2 * (i + 1) for i in range(u_ref.shape[1])],
        "fields": ["u", "v"][:fields],
        "axes": ["x", "y", "z"][: len(space)],
        "coordinates": [(np.arange(cells) + 0.5) / cells for cells in space],
        "label": "median error",
    }


def of_corrector():
    return entry_of("ensembles", main={"corrector": {"crps": 0.5}})


@functools.cache
def make_forecast():
    members, u_ref = forecasts((64,))
    times = [0.2 * (i + 1) for i in range(u_ref.shape[1])]
    scores = {model: score_ensemble(x, u_ref) for model, x in members.items()}
    words = ["The corrector knows its <error>.", "Its student keeps that."]
    entry = Entry("burgers1d", "ensembles", {"times": times, "words": words})
    entry.add("", {"members": NUM_MEMBERS})
    for i, (model, s) in enumerate(scores.items()):
        entry.add(model, summarise_ensemble(s, Resamples(100, 0)))
        costs = {"evaluations_per_state": EVALUATIONS.get(model, 0.0), "ms_per_state": 0.71 * i + 0.5}
        entry.add(model, costs)
    pair = scores["corrector"], scores["dressed_conditional"]
    entry.add("corrector / dressed_conditional", compare_ensembles(*pair, Resamples(100, 0)))
    return entry, sample_of(members, u_ref)


@functools.cache
def make_steady(cells=24):
    """Less seen, more spread."""
    generator = torch.Generator().manual_seed(5)
    cases, entry = {}, Entry("darcy2d_grf", "steady", {"words": ["What is seen narrows what remains."]})
    entry.add("", {"members": 16})
    for i, case in enumerate(("none", "points_1", "points_10", "coarse_4", "noisy_0.3", "full")):
        spread = 0.6 / (1 + 2 * i)
        mean = smooth(generator, 1, cells, cells, ndim=2)
        observed = mean[0].clone().exp()
        observed[torch.rand(cells, cells, generator=generator) > (0.0, 0.01, 0.1, 1.0, 1.0, 1.0)[i]] = (
            math.nan
        )
        draws = mean + spread * smooth(generator, 17, 1, cells, cells, ndim=2)
        cases[case] = {"observed": observed.numpy(), "u_ref": draws[0].numpy(), "members": draws[1:].numpy()}
        for model, factor in (("dressed", 1.5), ("corrector", 1.0)):
            ends = {"value": 1.0, "low": 0.9, "high": 1.1}
            crps = {end: times * factor * spread for end, times in ends.items()}
            ssr = {"value": 0.8 + 0.02 * i, "low": 0.7, "high": 1.1}
            others = {"nrmse_mean": 0.123 + i, "distance": 1.31 + i, "log_trace": 0.97}
            entry.add(model, {"crps": crps, "ssr": ssr, **others}, f"observed {case}")
    axis = (np.arange(cells) + 0.5) / cells
    sample = {
        "cases": cases,
        "fields": ["u"],
        "axes": ["x", "y"],
        "coordinates": [axis, axis],
        "label": "test field 3",
    }
    return entry, sample


@functools.cache
def page_of_forecast():
    return ensemble_section(*forecast())


@functools.cache
def page_of_steady():
    return steady_section(*steady())


def forecast():
    return copy.deepcopy(make_forecast())


def steady():
    return copy.deepcopy(make_steady())


def text_of(page):
    return re.sub(r"<[^>]+>", " ", page)


def test_the_section_names_every_model_and_every_number():
    entry, page = forecast()[0], page_of_forecast()
    words = text_of(page)
    for model in entry.models():
        assert label(model) in page
        for metric in (metric.name for metric in ENSEMBLE_ROWS):
            found = entry.value(model, metric)
            if found and metric != "nonfinite_trajectories":
                assert number(found["value"]) in words, (model, metric)
                if found["low"] is not None:
                    assert f"{number(found['low'])} – {number(found['high'])}" in words
    for text in (
        "The corrector knows its &lt;error&gt;.",
        "Its student keeps that.",
        "corrector / dressed",
        "16 members",
    ):
        assert text in page
    assert number(entry.number("corrector / dressed_conditional", "crps")) in page
    assert page.count("<svg") == page.count("<figure>") == 2


def test_the_best_is_marked_by_the_smallest_or_by_the_calibrated_number():
    rows = {"dressed": (0.31, 1.4), "corrector": (0.2, None), "student_1": (0.22, 0.85)}
    entry = Entry("t", "ensembles")
    for model, (crps, ssr) in rows.items():
        entry.add(model, {"crps": {"value": crps, "low": 0.1, "high": 0.4}})
        entry.add(model, {"ssr": dict.fromkeys(("value", "low", "high"), ssr)})
    page = ensemble_section(entry, {})
    assert re.findall(r'title="best of the row">([^<]*)</b>', page) == ["0.200 *", "0.850 *"]
    assert text_of(page).count("–  ") >= 1 and "<svg" not in page


def test_sections_fit_into_the_page_without_requests(tmp_path):
    results, _, _ = example()
    results.tasks = {}
    report.write_report(
        results,
        {},
        [],
        tmp_path / "report.html",
        {"Ensemble of burgers1d": page_of_forecast, "Steady prior": page_of_steady},
    )
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert not page.open and "Ensemble of burgers1d" in text and len(text) < 3_000_000
    assert all(source.startswith(("data:", "#")) for source in page.sources if source)
    assert all(link.startswith("#") for link in page.links)
    assert "http" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize("space", [(24, 16), (8, 8, 8)])
def test_maps_of_the_mean_two_members_and_the_spread(space):
    sample = sample_of(*forecasts(space, n=1, num_frames=2))
    page = ensemble_section(of_corrector(), sample)
    assert page.count("<svg") == 2 and page.count("data:image/png;base64,") >= 2 * 2 * 6
    for text in ("mean", "member 1", "member 2", "spread", "error of mean"):
        assert f">{text}</text>" in page, text


def test_sections_without_data_are_omitted():
    entry, sample = forecast()
    entry.facts["words"] = []
    for model in (*entry.models(), *entry.ratios()):
        if model != "operator":
            drop(entry, model=model)
    page = ensemble_section(entry, {})
    assert "corrector" not in page and "coverage" not in page and page.count("<svg") == 1  # scores by lead
    del entry.numbers["rollout", "operator", "crps", True]
    drop(entry, metric="energy_score")
    page = ensemble_section(entry, {"members": {}})
    assert "CRPS" in page and "energy score" not in page
    one = ensemble_section(of_corrector(), {})
    assert "0.500" in one and "<svg" not in one
    sample["members"] = {"student_1": sample["members"]["student_1"]}
    assert "student, 1 step" in ensemble_section(of_corrector(), sample)


def test_a_broken_model_is_shown_with_dashes_and_does_not_stop_the_others():
    entry, sample = forecast()
    for model in entry.models():
        if model not in ("scoring", "corrector"):
            drop(entry, model=model)
    for (case, model, *_), rows in entry.numbers.items():
        if (case, model) == ("rollout", "scoring"):
            rows[:] = [row._replace(value=None, low=None, high=None) for row in rows]
    entry.add("scoring", {"nonfinite_trajectories": 3})
    sample["members"]["corrector"][3, 2:] = np.nan
    page = ensemble_section(entry, sample)
    assert "non-finite trajectories" in page
    assert "trained by scores" in page
    assert "nan" not in text_of(page).lower()


def test_steady_section_has_a_row_per_case_and_model():
    (entry, sample), page = steady(), page_of_steady()
    for text in (
        "nothing observed",
        "1 % of cells",
        "10 % of cells",
        "means of 4×4",
        "all, noise 0.3",
        "all observed",
        "test field 3",
        "What is seen narrows",
        "0.123",
        "1.31",
    ):
        assert text in page, text
    assert page.count("<th scope=row>") == 12 and page.count("<svg") == 1
    # CRPS of the corrector in every case; the other numbers are equal
    assert page.count("best of the row") == 6
    del sample["cases"]
    entry.add("student_1", {"crps": None}, "observed new_case")
    page = steady_section(entry, sample)
    assert "new_case" in page and "student, 1 step" in page and "<svg" not in page
