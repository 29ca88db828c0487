"""Figures of forecasts, their errors, and training.

A sample is one trajectory, a dict of numpy arrays: u_ref, u_pred (T, C, *space); times (T,), lead times since
the last context frame; fields: names of the C channels; axes: names of the space axes in their stored order;
coordinates: one (cells,) array per axis; label, such as "median error"; parameter: text or None; optional
`inputs`: {name: (*space)} coefficient fields of a steady task.
"""

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
from matplotlib.figure import Figure

from ups.report.drawing import (
    DASHED,
    INK,
    INPUT_MAP,
    LINE,
    axis_labels,
    color,
    colour_bar,
    colours,
    compared,
    edges,
    finish,
    floats,
    lead_title,
    line,
    maps,
    pick_leads,
    plotted,
    plotted_name,
    styled,
    truth_and_prediction,
)
from ups.report.tables import MODELS, label, ordered
from ups.results import Entry

CYCLE = [
    MODELS[name][1:]
    for name in ("operator", "base", "student_1", "corrector", "scoring", "student_2", "persistence")
]  # of tasks
COLUMNS = 5  # leads shown of a 2D field


def field_errors(sample: dict) -> np.ndarray:
    """nRMSE of each field of one sample, sqrt(sum e^2 / sum u^2) over time and space -> (C,); inf where the
    prediction is not finite, NaN (undefined) where the truth is zero, as in ups.metrics.errors."""
    u_ref, u_pred = (np.asarray(sample[key], dtype=float) for key in ("u_ref", "u_pred"))
    axes = (0, *range(2, u_ref.ndim))
    energy, squared = (
        np.where(np.isnan(u_ref), 0, square).sum(axes)  # masked cells
        for square in (u_ref**2, (u_pred - u_ref) ** 2)
    )
    return np.where(np.isfinite(squared), np.sqrt(squared / np.where(energy > 0, energy, np.nan)), np.inf)


@styled
def by_lead(
    entry: Entry, panels: Iterable[tuple[str, str, str]], banded: Iterable[str], lead: str = "lead time"
) -> Figure | None:
    """A line over lead time for each model. panels: (title, metric, scale). banded: models whose 95 %
    interval is drawn as a band. lead: label of the time axis. None without leads."""
    models = ordered(entry.models())
    found = {
        metric: {model: series for model in models if (series := entry.by_lead(model, metric))}
        for _, metric, _ in panels
    }
    panels = [panel for panel in panels if any(len(part["value"]) > 1 for part in found[panel[1]].values())]
    if not panels:
        return None
    fig = Figure(figsize=(3.1 * max(len(panels), 2), 3.4))
    for ax, (title, key, scale) in zip(fig.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        curves = {name: {end: floats(series[end]) for end in series} for name, series in found[key].items()}
        # not all NaN, not all zero
        kept = {name: curve for name, curve in curves.items() if (curve["value"] > 0).any()}
        for name, curve in kept.items():
            times = curve["lead"]
            ax.plot(times, curve["value"], label=label(name), **line(name, len(times)))
            if name in banded and not np.isnan(curve["low"]).all():
                ends = curve["low"], curve["high"]
                ax.fill_between(times, *ends, color=color(name), alpha=0.2, linewidth=0)
        finish(ax, xlabel=lead, title=title, yscale=scale)
        # persistence has zero error where a periodic truth returns to its first frame: not on the log axis
        every = [curve["value"] for name, curve in kept.items() if name != "persistence"]
        known = [values[values > 0].min() for values in every]
        if scale == "linear":
            ax.axhspan(0.9, 1.1, color=LINE, alpha=0.5, linewidth=0)  # calibrated
            ax.set_ylim(bottom=0)
        elif known:
            ax.set_ylim(bottom=0.6 * min(known))
    fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig


@styled
def trust(entries: Mapping[str, Entry]) -> Figure | None:
    """Fraction of forecasts inside their bands by lead, and error of those with the smallest stated errors, a
    line for each task."""
    if not entries:
        return None
    fig = Figure(figsize=(9.2, 3.6))
    left, right = fig.subplots(1, 2)
    left.axhline(0.9, color=INK, linewidth=0.8)
    for (name, entry), look in zip(entries.items(), itertools.cycle(CYCLE), strict=False):
        inside = floats(entry.by_lead("operator", "inside", "band")["value"])
        leads = np.arange(1, len(inside) + 1) / len(inside)
        left.plot(leads, inside, label=name, **line(look, len(inside)))
        for metric, width in (("risk", 1.6), ("risk_best", 0.6)):
            risk = floats(entry.listed("operator", metric, "band")["value"])
            fraction = np.arange(1, len(risk) + 1) / len(risk)
            size = {"linewidth": width, "markersize": 2 * width}
            right.plot(fraction, risk, **line(look, len(risk)) | size)
    finish(left, xlabel="lead / horizon", title="inside the band", ylim=(0, 1.02))
    finish(right, xlabel="fraction of forecasts kept", title="error / error of all", ylim=(0, None))
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


@styled
def space_time(sample: dict, field: int) -> Figure:
    """1D: truth, prediction and error over space and time; truth and prediction as lines at several leads."""
    ref, pred = truth_and_prediction(sample, field)
    times, name, x = sample["times"], sample["fields"][field], plotted(sample, sample["coordinates"], 0)
    half, lead = (times[1] - times[0]) / 2, sample.get("time", "lead time")
    extent = (*edges(sample), times[0] - half, times[-1] + half)
    fig = Figure(figsize=(9.2, 5.1))
    top, bottom = fig.subfigures(2, 1, height_ratios=(1.25, 1))
    fig.get_layout_engine().set(w_pad=0.08)
    axes = top.subplots(1, 3, sharey=True)
    for ax, (title, values, scale) in zip(axes, compared(ref, pred), strict=True):
        ax.imshow(values, aspect="auto", extent=extent, **scale)
        ax.set(title=title, xlabel=axis_labels(sample)[0], ylabel=lead if title == "truth" else "")
        ax.locator_params(axis="x", nbins=4)
    colour_bar(axes[:2], name)
    colour_bar(axes[2], f"error in {name}")
    leads = pick_leads(len(times), 4)
    for ax, lead in zip(bottom.subplots(1, len(leads), sharey=True), leads, strict=True):
        ax.plot(x, ref[lead], color=INK, label="truth")
        ax.plot(x, pred[lead], color=color("operator"), linestyle=DASHED, label="prediction")
        finish(
            ax,
            title=lead_title(times[lead]),
            xlabel=axis_labels(sample)[0],
            ylabel=name if lead == leads[0] else "",
        )
    bottom.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


@styled
def frames_2d(sample: dict, field: int) -> Figure:
    """2D: truth, prediction and error in rows, lead times in columns; truth and prediction on one scale."""
    leads, name = pick_leads(len(sample["times"]), COLUMNS), plotted_name(sample, field)
    titles = [lead_title(sample["times"][lead]) for lead in leads]
    fig, axes = maps(
        sample,
        {
            row: [(title, u, scale) for title, u in zip(titles, values, strict=True)]
            for row, values, scale in compared(*(u[leads] for u in truth_and_prediction(sample, field)))
        },
    )
    colour_bar(axes[:2], name)
    colour_bar(axes[2], f"error in {name}")
    return fig


@styled
def profiles(sample: dict, field: int) -> Figure:
    """1D, one frame: coefficient of a steady task, truth with prediction, and error."""
    name, x = sample["fields"][field], plotted(sample, sample["coordinates"], 0)
    ref, pred = (u[0] for u in truth_and_prediction(sample, field))
    panels = [
        (f"coefficient {key}", key, [(plotted(sample, [a], 0), "truth", key)])
        for key, a in sample.get("inputs", {}).items()
    ]
    panels += [
        ("truth and prediction", name, [(ref, "truth", "truth"), (pred, "operator", "prediction")]),
        ("error", f"error in {name}", [(pred - ref, "operator", "error")]),
    ]
    fig = Figure(figsize=(9.2, 3.0))
    axes = fig.subplots(1, len(panels))
    for ax, (title, text, lines) in zip(axes, panels, strict=True):
        for values, look, what in lines:
            ax.plot(
                x, values, color=color(look), linestyle=DASHED if what == "prediction" else "-", label=what
            )
        finish(ax, title=title, xlabel=axis_labels(sample)[0], ylabel=text)
    fig.legend(*axes[-2].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


@styled
def steady(sample: dict, field: int) -> Figure:
    """2D, one frame: coefficient of a steady task, truth, prediction and error."""
    name = sample["fields"][field]
    inputs = [(f"coefficient {key}", plotted(sample, [a], 0)) for key, a in sample.get("inputs", {}).items()]
    panels = [
        *((title, a, colours(INPUT_MAP, a)) for title, a in inputs),
        *compared(*(u[0] for u in truth_and_prediction(sample, field))),
    ]
    fig, axes = maps(sample, {"": panels})
    for ax, (title, _, _) in zip(axes[0], panels, strict=True):
        text = {"error": f"error in {name}", "truth": name, "prediction": name}.get(title, title.split()[-1])
        colour_bar(ax, text, orientation="horizontal", fraction=0.06)
    return fig


def sample_figure(sample: dict, field: int) -> Figure:
    """The figure for one frame or several, of a 1D or a 2D (or sliced 3D) field."""
    one_frame, several = (profiles, space_time) if len(sample["axes"]) == 1 else (steady, frames_2d)
    return (one_frame if len(sample["times"]) == 1 else several)(sample, field)


@styled
def training(history: list[dict]) -> Figure:
    """Losses, validation scores and learning rate over the steps. history: rows of metrics.jsonl."""
    fig = Figure(figsize=(9.2, 3.8))
    panels = (
        ("training loss", "train/loss", "log"),
        ("validation", "validation/", "log"),
        ("learning rate / peak", "train/lr_factor", "linear"),
    )
    for ax, (title, prefix, scale) in zip(fig.subplots(1, 3), panels, strict=True):
        names, looks = sorted({name for row in history for name in row if name.startswith(prefix)}), {}
        for name in names:
            rows = [row for row in history if name in row]
            text = name.split("/", 1)[1]
            # a task keeps its colour and marker; its base alone is dashed
            shade, _, marker = looks.setdefault(text.split("/")[0], CYCLE[len(looks) % len(CYCLE)])
            style = line(
                (shade, DASHED if text.endswith("/base") else "-", marker if title == "validation" else ""),
                len(rows),
            )
            ax.plot(
                [row["step"] for row in rows],
                floats(row[name] for row in rows),
                label=text.replace("/", ", "),
                linewidth=1.1,
                **style,
            )
        finish(ax, title=title, xlabel="step (optimizer updates)", yscale=scale)
        if len(names) > 1:
            ax.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, handlelength=3)
    return fig
