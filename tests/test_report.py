"""results.json, gates, report.html and the leaderboard, on advected waves and a noisy prediction of them."""

import copy
import functools
import math
import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import cases
from entries import drop
from markupsafe import escape
from PIL import Image

from bench import leaderboard
from ups.common.files import file_hash, write_sealed
from ups.common.text import markdown, number
from ups.evaluation.gates import PAIR, check_gates, check_usability, missing, network_gain, usability_of
from ups.evaluation.parts import in_words
from ups.metrics import errors as metrics
from ups.metrics.intervals import Resamples, compare
from ups.report import drawing, figures, figures_ensemble, model_card, report, sections
from ups.report.report import overview
from ups.report.tables import MODELS
from ups.results import Entry, Results
from ups.tasks import get_task

CONTEXT = 4


def waves(n, num_frames, fields, cells, ndim, seed):
    """Exact waves sin(2 pi (k.x - s t) + phase) and a prediction whose phase and noise drift with t."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.meshgrid(*[(torch.arange(cells) + 0.5) / cells] * ndim, indexing="ij")
    times = 0.05 * torch.arange(num_frames + 1)  # the first is the last context frame
    u = torch.zeros(2, n, num_frames + 1, fields, *[cells] * ndim)
    for _ in range(4):
        k = torch.randint(1, 5, (n, fields, ndim), generator=generator)
        phase, amplitude = torch.rand(2, n, fields, generator=generator)
        space = sum(k[:, None, :, d].reshape(n, 1, fields, *[1] * ndim) * x[d] for d in range(ndim))
        for i, drift in enumerate((0.0, 0.06)):
            angle = space - ((1 + drift * phase[:, None]) * times[None, :, None] - phase[:, None]).reshape(
                n, num_frames + 1, fields, *[1] * ndim
            )
            u[i] += amplitude.reshape(n, 1, fields, *[1] * ndim) * (2 * math.pi * angle).sin()
    u[1] += 0.03 * times.reshape(1, -1, 1, *[1] * ndim) * torch.randn(u[1].shape, generator=generator)
    return u[1, :, 1:], u[0, :, 1:], times[1:], u[0, :, :1]


def task_entry(name, u_pred, u_ref, times, context, fields, has_rivals):
    steady = u_ref.shape[1] == 1
    trivial = u_ref.mean(0, keepdim=True).expand_as(u_ref) if steady else context.expand_as(u_ref)
    noise = 0.005 * torch.randn(u_ref.shape, generator=torch.Generator().manual_seed(2))
    predictions = {
        "operator": u_pred,
        "base": u_ref + 1.25 * (u_pred - u_ref) + noise,
        "train_mean" if steady else "persistence": trivial,
        "codec_floor": u_ref + 0.002 * torch.randn(u_ref.shape, generator=torch.Generator().manual_seed(1)),
    }
    if has_rivals:
        predictions |= {"fno": u_ref + 1.7 * (u_pred - u_ref), "unet": u_ref + 2.9 * (u_pred - u_ref)}
    scores = {model: metrics.score(u, u_ref) for model, u in predictions.items()}
    facts = {
        "network_is_used": True,
        "parameters": [] if steady else [0.4, 1.0],
        "fields": fields,
        "grid": list(u_ref.shape[3:]),
        "times": times.tolist(),
        "equation": "∂u/∂t = 0",
        "conserved": fields[:1],
    }
    entry = Entry(name, "tasks", facts)
    counts = {"num_initial_conditions": len(u_ref), "num_trajectories": len(u_ref)}
    entry.add("", counts | {"num_frames_predicted": u_ref.shape[1]})
    for (model, s), milliseconds in zip(scores.items(), (0.81, 0.4, 0.0, 0.12, 1.9, 4.4), strict=False):
        row = metrics.summarise_errors(s, Resamples(100, 0), None if steady else times)
        entry.add(model, row | {"ms_per_state": milliseconds, "evaluations_per_state": 1})
    errors = metrics.nrmse_per_trajectory(scores["operator"])
    cells, ndim = u_ref.shape[3], u_ref.ndim - 3
    axis = (np.arange(cells) + 0.5) / cells
    samples = [
        {
            "u_ref": u_ref[i].numpy(),
            "u_pred": u_pred[i].numpy(),
            "times": times.numpy(),
            "fields": fields,
            "axes": ["x", "y", "z"][:ndim],
            "coordinates": [axis] * ndim,
            "label": label,
            "parameter": None if steady else "beta = 0.4",
        }
        for label, i in (
            ("median error", int(errors.argsort()[len(errors) // 2])),
            ("worst error", int(errors.argmax())),
        )
    ]
    if steady:
        for sample in samples:
            sample["inputs"] = {"a": (sample["u_ref"][0, 0] > 0).astype(float)}
    for other in ("base", "persistence", "train_mean"):
        if other in scores:
            ratio = compare(metrics.ERROR["nrmse"], scores["operator"], scores[other], Resamples(100, 0))
            entry.add(f"operator / {other}", {"nrmse": ratio})
    return entry, samples


GATES = SimpleNamespace(
    quality=True,
    min_initial_conditions=4,
)


def example():
    """A small made-up run, computed once, copied for whoever alters it."""
    return copy.deepcopy(make_example())


@functools.cache
def make_example(n=4):
    """(results, samples, history) of a made-up run: 1D, steady 2D, 2D with two fields, 3D."""
    facts = {
        "run": "example",
        "created": "2025-01-31T12:00:00Z",
        "config_hash": "3f9a1c0b7d21",
        "environment": {
            "command": ["evaluate.py", "--config", "configs/small.yaml"],
            "git_revision": "0123456789abcdef",
            "device": "2 CPU cores",
            "torch": torch.__version__,
        },
        "protocol": {"split": "test", "context_frames": CONTEXT, "seed": 0},
        "training": {"steps": 4000, "seconds": 5412.0, "parameters": 1_312_480},
    }
    results, samples = Results(facts), {}
    for seed, (name, frames, fields, cells, ndim) in enumerate(
        (
            ("advection1d", 16, ["u"], 64, 1),
            ("darcy2d", 1, ["u"], 32, 2),
            ("diff_react2d", 3, ["u", "v"], 32, 2),
            ("cfd3d", 6, ["density"], 12, 3),
        )
    ):
        u_pred, u_ref, times, context = waves(n, frames, len(fields), cells, ndim, seed)
        if frames == 1:
            u_pred, times = u_ref + 0.05 * (u_pred - u_ref) + 0.02 * u_ref.roll(3, 3), torch.zeros(1)
        results.tasks[name], samples[name] = task_entry(
            name, u_pred, u_ref, times, context, fields, name != "cfd3d"
        )
    facts["stages"] = {"operator": list(results.tasks)}
    gates = [*check_gates(results, GATES), missing("operator", "darcy2d")]  # one fails
    facts |= {"gates": gates, "usability": check_usability(results)}
    history = []
    for step in range(50, 4001, 50):
        loss = 0.9 * math.exp(-step / 900) + 0.02 + 0.01 * math.sin(step)
        rate = min(1.0, (4000 - step) / 2800)
        history.append({"step": step, "time": float(step), "train/loss": loss, "train/lr_factor": rate})
        if step % 500 == 0:
            error = 0.2 * math.exp(-step / 1200) + 0.01
            history.append({"step": step, **{f"validation/{task}": error for task in samples}})
    return results, samples, history


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    results, samples, history = example()
    shown = {
        "advection1d": samples["advection1d"],
        **{task: samples[task][:1] for task in ("darcy2d", "diff_react2d")},
    }
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write_report(
        results, shown, history, path, sections={"Ensembles": lambda: "<p>added by a later stage</p>"}
    )
    return results, samples, path


class Page(HTMLParser):
    VOID = {"meta", "input", "img", "br", "link", "hr"}

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.sources, self.words = [], set(), [], [], []
        self.attributes = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.attributes |= attributes.keys()
        self.ids.add(attributes.get("id"))
        self.links.append(attributes.get("href") or "#")
        self.sources.append(attributes.get("src") or attributes.get("xlink:href") or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_well_formed_and_requests_nothing(made):
    results, _, path = made
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    for source in [*page.sources, *page.links]:
        assert source == "" or source.startswith(("data:image/png;base64,", "#")), source[:80]
    assert not re.search(r"url\((?!#)|@import|<link|fetch\(|src=\"http", text)
    assert {"summary", "gates", "reproduce", "training", *results.tasks} <= page.ids
    assert all(link[1:] in page.ids for link in page.links if link != "#" and link[1:] in results.tasks)
    assert len(text) < 3_000_000 and "<!--" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.S)


def test_page_shows_the_numbers_of_results(made):
    results, _, path = made
    words = " ".join(Page(path.read_text(encoding="utf-8")).words)
    for name, task in results.tasks.items():
        for model in task.models():
            assert number(task.number(model, "nrmse")) in words, name
    for gate in results.facts["gates"]:
        assert gate["reason"] in words
    assert "added by a later stage" in words and "UPS operator" in words


def test_figures_are_written_as_readable_png_files(made):
    _, _, path = made
    names = {file.stem for file in (path.parent / "figures").glob("*.png")}
    assert {
        *(
            "training advection1d_median_error_u advection1d_worst_error_u darcy2d_median_error_u "
            "diff_react2d_median_error_v cfd3d_error_growth"
        ).split()
    } <= names and "darcy2d_error_growth" not in names
    for file in (path.parent / "figures").glob("*.png"):
        with Image.open(file) as image:
            assert min(image.size) > 200


ODD = (  # paths, mathematics, mark-up, and parts of the SVG that is made of a figure
    "m/s",
    "../../s",
    "$\\frac{1}$",
    r"\1 \g<0>",
    "<img src=x onerror=alert(1)>",
    '" onload="alert(1)',
    "data:image/png;base64,AAAA",
    "font: 9px <b>",
)


@pytest.mark.parametrize("units", [ODD[:3], ODD[3:6], ODD[5:]])
def test_text_of_users_is_shown_as_it_is_and_names_no_folder(tmp_path, units):
    sample = example()[1]["advection1d"][0]
    results, (field, label, time) = example()[0], (f"u ({unit})" for unit in units)
    results.tasks = {"advection1d": results.tasks["advection1d"]}
    results.tasks["advection1d"].facts["fields"] = [field]
    results.facts["run"], results.facts["environment"]["command"] = label, ["evaluate.py", time]
    sample |= {"fields": [field], "labels": [label], "time": time}
    path = tmp_path / "out" / "report.html"
    report.write_report(results, {"advection1d": [sample]}, [], path, {})
    assert sorted(entry.name for entry in tmp_path.rglob("*") if entry.is_dir()) == ["figures", "out"]
    pictures = [entry.name for entry in (tmp_path / "out/figures").iterdir()]
    assert sum(name.startswith("advection1d_median_error_u_") for name in pictures) == 1
    page = Page(path.read_text(encoding="utf-8"))
    assert not page.open and all(text in page.words for text in (field, label, time))
    assert not {"onerror", "onload"} & page.attributes


CARD = {"dt": 0.1, "history": 1, "domain": [[0, 1]], "boundary": "periodic", "parameters": {}, "grid": [16]}


@pytest.mark.parametrize("unit", [*ODD, "a | b", "[x](http://x)", "\x1b[2J"])
def test_a_card_shows_units_as_text(tmp_path, unit):
    results = example()[0]
    results.facts |= {"run": unit, "stages": {"operator": ["advection1d"]}}
    results.facts["training"] |= {"source": "user", "seed": 0, "data_seed": 0, "init": unit}
    results.tasks = {"advection1d": results.tasks["advection1d"]}
    results.tasks["advection1d"].facts["found"] = [f"d/dt u = {unit}"]
    known = {"advection1d": {**CARD, "fields": ["u"], "units": {"u": unit}}}
    text = model_card.card("operator", results, known, {"advection1d": "a.png"})
    assert text.count(markdown(unit)) >= 4 and "<img" not in text and "\x1b" not in text
    rows = [re.sub(r"\\.", "", line) for line in text.splitlines() if line.startswith("| advection1d")]
    assert rows[0].count("|") == 9 and "](http" not in re.sub(r"\\.", "", text)


def test_a_3d_field_is_shown_by_its_middle_slice():
    sample = example()[1]["cfd3d"][0]
    figure = figures.sample_figure(sample, 0)
    image = figure.axes[0].get_images()[0].get_array()
    assert np.array_equal(image.T, sample["u_ref"][0, 0, :, :, 6])


def test_a_broken_prediction_still_gets_its_report(tmp_path):
    results, _, _ = example()
    u_pred, u_ref, times, context = waves(4, 2, 2, 16, 1, 0)
    u_pred[:, 1, 0], u_ref[:, :, 1], context[:, :, 1] = torch.nan, 0.0, 0.0
    entry, samples = task_entry("advection1d", u_pred, u_ref, times, context, ["u", "v"], False)
    assert figures.field_errors(samples[0])[0] == np.inf and np.isnan(figures.field_errors(samples[0])[1])
    results.tasks, results.facts["stages"] = {"advection1d": entry}, {"operator": ["advection1d"]}
    gates = check_gates(results, GATES)
    results.facts |= {"gates": gates, "usability": check_usability(results)}
    report.write_report(results, {"advection1d": samples[:1]}, [], tmp_path / "report.html", {})
    words = " ".join(Page((tmp_path / "report.html").read_text(encoding="utf-8")).words)
    failed, count = sum(not gate["passed"] for gate in gates), len(gates)
    assert "nRMSE over all frames not finite." in words
    assert failed > 3 and f"{count - failed} of {count} gates pass" in words


def interval(value, low=None, high=None):
    return {"value": value, "low": value if low is None else low, "high": value if high is None else high}


def test_no_error_is_stated_without_its_horizon_in_frames_and_in_time(tmp_path):
    results, _, _ = example()
    for name, task in results.tasks.items():
        task.facts["units"] = {"time": "s"} if name == "cfd3d" else {}
    results.tasks["advection1d"].add("operator", {"nrmse": interval(9.0)})
    table = results
    table.save(tmp_path / "one" / "report-val")
    waves, cloud = " (scored up to 16 frames ahead, 0.8 time units)", " (scored up to 6 frames ahead, 0.3 s)"
    of_one = [*map(in_words, results.tasks.values())]
    assert [waves in words for words in of_one] == [True, False, False, False]
    assert [cloud in words for words in of_one] == [False, False, False, True]
    of_all = [overview(table)]
    of_all += [leaderboard.table(tmp_path, split="val")]
    for words in of_all:  # the steady task has none
        assert waves in words and cloud in words and words.count("(scored up to") == 3


def test_errors_of_a_field_that_vanishes_are_shown_pooled():
    """Relative errors of frames that are nearly zero, here 992, are in the table of all metrics alone."""
    results, _, _ = example()
    task = results.tasks["advection1d"]
    task.facts["error"] = "nrmse_pooled"
    for model in task.models():
        task.add(model, {"nrmse": interval(992.0)})
    for pair in task.ratios():
        task.add(pair, {"nrmse_pooled": task.value(pair, "nrmse")})
    pooled = task.number("operator", "nrmse_pooled")
    for text in (overview(results), str(model_card._forecasts(results)["rows"])):
        assert "992" not in text
    assert number(pooled) in overview(results) and "pooled" in usability_of(task, None)["words"]
    assert leaderboard.figure(task) == pooled


@pytest.mark.parametrize(("ratio", "kind", "cell"), cases("report.gains"))
def test_the_gain_of_the_network_is_paired_by_trajectory(ratio, kind, cell):
    """A network that ties with its base or loses to it gets no praise."""
    results, _, _ = example()
    task = results.tasks["advection1d"]
    results.tasks = {"advection1d": task}
    task.add(PAIR, {"nrmse": interval(*ratio)})
    assert network_gain(task)[0] == kind and cell in overview(results)
    task.add("", {"num_initial_conditions": 1})
    assert network_gain(task) == ("unknown", [])  # whose interval is none
    task.facts["network_is_used"] = False
    assert network_gain(task) == ("off", []) and ">the network is not used</span>" in overview(results)


def test_a_conservation_error_of_the_network_is_named():
    results, _, _ = example()
    task = results.tasks["advection1d"]
    task.add("operator", {"conservation_error": interval(0.027, 0.02, 0.03)})
    assert "<i>conserved: u, to 0.0270</i>" in overview(results)
    drop(task, model="operator", metric="conservation_error")  # of an equation that keeps nothing
    assert "conserved:" not in overview(results)


def columns(text):
    """Heads of the first table and the cells of its rows."""
    table = re.search(r"<table>(.*?)</table>", text, re.S)[1]
    head = re.findall(r"<th scope=col>(.*?)</th>", table)
    rows = [
        [re.sub(r"<[^>]+>", " ", cell) for cell in re.findall(r"(?s)<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in re.findall(r"(?s)<tr>(.*?)</tr>", table)[1:]
    ]
    return head, {row[0].strip(): dict(zip(head, row, strict=True)) for row in rows}


def test_the_first_table_compares_operator_base_rival_and_conservation(made):
    results, _, path = made
    head, rows = columns(path.read_text(encoding="utf-8"))
    assert head[:3] == ["nRMSE", "UPS operator", "base alone"]
    for name, task in results.tasks.items():
        row = rows[name]
        assert number(task.number("base", "nrmse")) in row["base alone"]
        assert number(task.number("operator", "crmse")) in row["error of the mean"]
        other = row["best FNO or U-Net"]
        if name == "cfd3d":
            assert "not trained" in other and "make bench TASK=cfd3d RUN=example" in other
        else:
            assert number(task.number("fno", "nrmse")) in other and "FNO" in other


def test_the_page_begins_with_usability_and_folds_gates_that_pass(made, tmp_path):
    results, _, path = made
    text = path.read_text(encoding="utf-8")
    places = [
        text.index(part)
        for part in (
            f"{escape(results.facts['usability']['advection1d']['words'])}</li>",
            "<table>",
            '<section id="cfd3d">',
            "added by a later stage",
            '<section id="gates">',
        )
    ]
    count = len(results.facts["gates"])
    assert places == sorted(places)
    assert f"<details open><summary><h2>Gates</h2> {count - 1} of {count} gates pass" in text
    results = copy.deepcopy(results)
    results.tasks = {}
    results.facts["gates"] = [gate for gate in results.facts["gates"] if gate["passed"]]
    results.facts["usability"]["cfd3d"] = {"usable": False, "words": "Not usable: as an example."}
    report.write_report(results, {}, [], tmp_path / "report.html", {})
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"<details><summary><h2>Gates</h2> {count - 1} of {count - 1} gates pass" in text
    assert "<details open" not in text
    results.facts["gates"][0] |= {"passed": False, "undecided": True}
    report.write_report(results, {}, [], tmp_path / "undecided.html", {})
    page = (tmp_path / "undecided.html").read_text(encoding="utf-8")
    assert f"{count - 2} of {count - 1} gates pass, 1 undecided" in page and "em class=undecided" in page
    assert "<em class=fail>cfd3d</em> Not usable: as an example." in text
    assert "not usable: 1 of 4 tasks" in text


def labels(figure):
    """Axis labels and titles."""
    return {text for ax in figure.axes for text in (ax.get_xlabel(), ax.get_ylabel(), ax.get_title())}


def test_axes_are_lead_time_and_the_tasks_own_space(made):
    results, samples, path = made
    plane, task = copy.deepcopy(samples["diff_react2d"][0]), get_task("diff_react2d")
    plane |= {
        "axes": list(task.axes),
        "coordinates": [
            np.array(task.centres(size, axis))
            for size, axis in zip(plane["u_ref"].shape[2:], task.axes, strict=True)
        ],
    }
    figure = figures.sample_figure(plane, 0)
    assert figure.axes[0].get_images()[0].get_extent() == pytest.approx([-1, 1, -1, 1])
    assert task.axes == ("y", "x") and figure.axes[6].get_xlabel() == "x"
    image = figure.axes[0].get_images()[0].get_array()  # rows are y from below; stored as (y, x)
    assert np.array_equal(image, plane["u_ref"][0, 0]) and f"lead {plane['times'][0]:.3g}" in labels(figure)
    line = labels(figures.sample_figure(samples["advection1d"][0], 0))
    growth = labels(figures.by_lead(results.tasks["advection1d"], sections.GROWTH, ()))
    assert "lead time" in line & growth
    assert not any(text.startswith(("t =", "time")) for text in line | growth)
    text = path.read_text(encoding="utf-8")
    assert "∂u/∂t = 0; 4 trajectories" in text and "up to lead time 0.800" in text and '"t = "' not in text


def test_the_legend_of_all_models_lies_inside_its_figure():
    curve = dict.fromkeys(("lead", "value", "low", "high"), [1.0, 2.0])
    entry = SimpleNamespace(models=lambda: [*MODELS], by_lead=lambda model, metric: curve)
    figure = figures.by_lead(entry, sections.GROWTH, ())
    figure.draw_without_rendering()
    [legend] = figure.legends
    extent = legend.get_window_extent()
    assert len(legend.texts) == len(MODELS) and 0 < extent.x0 < extent.x1 < figure.bbox.x1


def deuteranope(colour):
    """The colour in CIE Lab as an eye without green cones sees it (Machado et al. 2009, severity 1)."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    green_blind = [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ np.clip(np.array(green_blind) @ linear, 0, 1) / (0.9505, 1, 1.089)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_lines_of_a_figure_differ_without_green_and_without_colour():
    together = [
        ["truth", "operator", "base", "fno", "unet", "persistence", "codec_floor"],
        ["operator", *figures_ensemble.FEATURED, "bayes_mean"],
    ]
    for names in together:
        looks = {name: drawing.line(name, 30) for name in names}
        drawn = [(str(look["linestyle"]), look["marker"]) for look in looks.values()]
        assert len(set(drawn)) == len(drawn), drawn
    for pair in (
        "operator base",
        "operator student_1",
        "corrector student_1",
        "operator fno",
        "base persistence",
        "operator truth",
    ):
        one, other = pair.split()
        apart = np.linalg.norm(deuteranope(drawing.color(one)) - deuteranope(drawing.color(other)))
        assert apart > 25, (one, other, apart)


def test_results_that_are_not_finite_are_not_written(tmp_path):
    results, _, _ = example()
    results.tasks["cfd3d"].add("operator", {"nrmse": interval(math.nan)})
    with pytest.raises(ValueError, match="is not finite; expected None for what is undefined"):
        results.save(tmp_path)
    assert not [*tmp_path.iterdir()]


NUMBERS = {
    "0.0123": 0.0123456,
    "1.50×10⁻⁶": 1.5e-6,
    "–": None,
    "1,234,567": 1234567,
    "0": 0.0,
    "250": 250.0,
    "2.50×10⁷": 2.5e7,
    "True": True,
    "1,234": 1234.5,
}


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers_are_written_with_three_digits(value, text):
    assert number(value) == text


def fake_run(results, name, factor, runs):
    """The report of a run that is called `name`, under `runs`."""
    out = copy.deepcopy(results)
    out.facts["run"] = name
    for task in out.tasks.values():
        error = task.value("operator", "nrmse")
        task.add("operator", {"nrmse": error | {"value": factor * error["value"]}})
    out.save(runs / name / "report")
    record(runs / name / "report")


def record(folder):
    """The record of a report that passed its gates."""
    files = {name: file_hash(folder / name) for name in ("results.json", "results.csv")}
    write_sealed(folder / "done.json", {"files": files})


def test_leaderboard_has_a_row_per_run_and_sorts(tmp_path, monkeypatch, capsys):
    results, _, _ = example()
    assert leaderboard.table(tmp_path) == f"No reports in {tmp_path}."
    # slow was judged twice
    for name, factor in (("slow", 3.0), ("best", 0.5), ("middle", 1.0), ("slow", 2.0)):
        fake_run(results, name, factor, tmp_path)
    results.save(tmp_path / "best" / "report-val")
    record(tmp_path / "best" / "report-val")
    rows = [
        line for line in leaderboard.table(tmp_path).splitlines() if re.match(r"\| (slow|best|middle)", line)
    ]
    assert [row.split(" | ")[0] for row in rows] == ["| best", "| middle", "| slow"]
    middle = leaderboard.read_report(tmp_path / "middle" / "report")
    assert leaderboard.mean_of(middle) == pytest.approx(
        math.exp(np.mean([math.log(task.number("operator", "nrmse")) for task in results.tasks.values()])),
        rel=1e-6,
    )
    monkeypatch.setattr(sys, "argv", ["leaderboard", "--runs", str(tmp_path)])
    leaderboard.main()
    assert capsys.readouterr().out.strip() == leaderboard.table(tmp_path)


def test_leaderboard_keeps_runs_that_cannot_be_compared_apart(tmp_path):
    results, _, _ = example()
    fake_run(results, "one", 1.0, tmp_path)
    results.facts["protocol"]["seed"] += 1
    fake_run(results, "another_seed", 1.0, tmp_path)
    results.facts["protocol"]["context_frames"] = 10
    fake_run(results, "longer_context", 0.1, tmp_path)
    assert leaderboard.table(tmp_path).count("| run |") == 2


def test_leaderboard_shows_what_is_undefined_as_a_dash_and_names_as_text(tmp_path):
    results = example()[0]
    results.facts["run"] = "\x1b[2J | <b>"
    for task in results.tasks.values():
        task.add("operator", {"nrmse": dict.fromkeys(("value", "low", "high"))})
    results.save(tmp_path / "odd" / "report")
    record(tmp_path / "odd" / "report")
    row = leaderboard.table(tmp_path).splitlines()[-1]
    assert row.startswith(r"| \\x1b[2J \| &lt;b> | FAIL | – | – | – | – | – |")


def test_altered_results_have_no_row(tmp_path):
    """Refuses an edited figure, and a failed gate that was made to pass."""
    results = copy.deepcopy(example()[0])
    fake_run(results, "edited", 1.0, tmp_path)
    path = tmp_path / "edited" / "report" / "results.json"
    assert "edited" in leaderboard.table(tmp_path)
    for name, old, new in (("results.json", '"seed"', '"seed" '), ("results.csv", "nrmse,,0.", "nrmse,,0.0")):
        sound = (path.parent / name).read_text()
        (path.parent / name).write_text(sound.replace(old, new))
        with pytest.raises(
            ValueError, match=rf"edited/report/{name} was altered: its digest is not that in .*done.json"
        ):
            leaderboard.table(tmp_path)
        (path.parent / name).write_text(sound)
    (path.parent / "done.json").unlink()
    results.facts["gates"] = [gate | {"passed": True} for gate in results.facts["gates"]]
    results.save(path.parent)
    with pytest.raises(ValueError, match=r"no gate of .* failed and done.json is missing"):
        leaderboard.table(tmp_path)
    results.facts["gates"][0] |= {"passed": False, "undecided": False}
    results.save(path.parent)
    assert "FAIL" in leaderboard.table(tmp_path)
    results.facts["gates"][0]["undecided"] = True
    results.save(path.parent)
    record(path.parent)
    assert "| 1 undecided |" in leaderboard.table(tmp_path)
