"""Figures of ensemble forecasts, in the style of ups.evaluation.figures: what a forecaster looks at, and
whether the spread can be believed.

A sample is one shown trajectory: u_ref (T, C, *space); members: {model: (M, T, C, *space)}; times (T,): lead
times; fields: names of the C channels; axes, coordinates: name and (cells,) centres of every space axis;
label. Of a 3D field the middle slice of the last axis is shown. A steady sample has instead cases: {case:
{"observed": (*space) with NaN where nothing was seen, "u_ref": (C, *space), "members": (M, C, *space)}}.
models: {model: row of ups.metrics.ensembles.summarise_ensemble}; what a row lacks is left out.
"""

from __future__ import annotations

import math

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from ups.evaluation import figures
from ups.evaluation.figures import (
    INK,
    _extent,
    _figure,
    _floats,
    _range,
    _shown,
    _styled,
    color,
    lead_title,
    line,
)

NAMES = {"operator": "operator alone", "dressed": "+ noise", "dressed_conditional": "+ conditional noise",
         "dressed_resampled": "+ drawn residual", "rival": "rival, no teacher", "corrector": "corrector",
         # in the order in which they are shown
         "student_1": "student, 1 step", "student_2": "student, 2 steps"}
FEATURED = ("corrector", "student_1", "dressed_conditional", "student_2", "rival", "dressed",
            "dressed_resampled")
SPREAD_MAP = "YlOrRd"  # light where the ensemble is sure
UNSEEN = "#b9c0c7"  # cells that were not observed
NUM_LINES = 8       # members drawn as lines
LEADS = 3


def ordered(models: dict) -> list[str]:
    """Known models in the order of NAMES, then any others."""
    return [*[name for name in NAMES if name in models], *[name for name in models if name not in NAMES]]


def label(model: str) -> str:
    return NAMES.get(model, model)


def featured(models: dict, count: int) -> list[str]:
    """The `count` models to show in full: the corrector, its student, the strongest of the cheap ones, then
    the others."""
    return [*[name for name in FEATURED if name in models],
            *[name for name in models if name not in NAMES]][:count]


def case_name(case: str) -> str:
    """A case of ups.generative.observation.CASES in words."""
    kind, _, number = case.partition("_")
    words = {"none": "nothing seen", "full": "all seen", "points": f"{number} % of cells",
             "coarse": f"means of {number}×{number}", "noisy": f"all, noise {number}"}
    return words.get(kind, case) if number or kind in ("none", "full") else case


def _members(sample: dict, model: str, field: int) -> np.ndarray:
    """(M, T, x) or (M, T, x, y): one field of every member as ups.evaluation.figures shows it."""
    members = np.asarray(sample["members"][model])
    return np.stack([_shown({**sample, "u": member}, "u", field) for member in members]).astype(float)


def _bands(members: np.ndarray) -> dict[float, np.ndarray]:
    """Central 90 % and 50 % intervals over members, (2, ...) each; positions i / (M + 1), at most the
    range."""
    return {level: np.quantile(members, [(1 - level) / 2, (1 + level) / 2], axis=0, method="weibull")
            for level in (0.9, 0.5)}


@_styled
def fan(sample: dict, field: int) -> Figure:
    """1D: truth, operator, members and their central intervals over x, leads in columns and models in
    rows."""
    ref, times = _shown(sample, "u_ref", field).astype(float), np.asarray(sample["times"], dtype=float)
    models, leads = featured(sample["members"], 3), figures.pick_leads(len(times), LEADS)
    cells = np.asarray(sample["u_ref"]).shape[2]
    x = np.asarray(sample["coordinates"][0])[::-(-cells // figures.MAX_CELLS)]
    fig = _figure(9.2, 0.7 + 2.0 * len(models))
    axes = fig.subplots(len(models), len(leads), sharex=True, sharey="col", squeeze=False)
    for row, model in zip(axes, models, strict=True):
        members, shade = _members(sample, model, field), color(model)
        for ax, lead in zip(row, leads, strict=True):
            for level, (low, high) in _bands(members[:, lead]).items():
                ax.fill_between(x, low, high, color=shade, alpha=0.2 if level > 0.5 else 0.34, linewidth=0,
                                label=f"{100 * level:.0f} % of members")
            for i, member in enumerate(members[:NUM_LINES, lead]):
                ax.plot(x, member, color=shade, linewidth=0.5, alpha=0.75,
                        label="members" if i == 0 else None)
            if "operator" in sample["members"]:
                ax.plot(x, _members(sample, "operator", field)[0, lead], color=color("operator"),
                        linewidth=1.2, linestyle=(0, (3, 1.5)), label=label("operator"))
            ax.plot(x, ref[lead], color=INK, linewidth=1.4, label="truth")
            ax.grid(axis="y")
            ax.xaxis.set_major_locator(MaxNLocator(4))
        row[0].set_ylabel(f"{label(model)}\n{sample['fields'][field]}")
    for top, bottom, lead in zip(axes[0], axes[-1], leads, strict=True):
        top.set_title(lead_title(times[lead]))
        bottom.set_xlabel("x")
    handles, names = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, names, loc="outside lower center", ncols=len(names))
    return fig


def _panel(ax: Axes, values: np.ndarray, sample: dict, cmap: str, low: float, high: float):
    tones = matplotlib.colormaps[cmap].with_extremes(bad=UNSEEN)
    image = ax.imshow(values.T, origin="lower", extent=_extent(sample), interpolation="none", cmap=tones,
                      vmin=low, vmax=high)
    ax.tick_params(labelsize=7)
    ax.xaxis.set_major_locator(MaxNLocator(2))
    ax.yaxis.set_major_locator(MaxNLocator(2))
    return image


def _bars(fig: Figure, groups) -> None:
    """A colour bar below each of (image, its columns of axes, label)."""
    for image, axes, text in groups:
        columns = axes.shape[1]
        bar = fig.colorbar(image, ax=axes, label=text, orientation="horizontal", fraction=0.03, pad=0.02,
                           aspect=12 * columns)
        bar.outline.set_visible(False)
        bar.ax.xaxis.set_major_locator(MaxNLocator(3 * columns))


def _logarithmic(axis) -> None:
    """Plain numbers at 1, 2, 3 and 5 of each decade, over many decades at each."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if high < 30 * low else (1, 3) if high < 300 * low
                                      else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _height(sample: dict, rows: int, columns: int) -> float:
    x0, x1, y0, y1 = _extent(sample)
    return 1.0 + rows * (7.4 / columns) * min((y1 - y0) / (x1 - x0), 2.0)


@_styled
def members_2d(sample: dict, model: str, field: int) -> Figure:
    """2D: truth, mean, two members, spread and error of the mean, leads in rows; the last two share one
    scale."""
    ref, members = _shown(sample, "u_ref", field).astype(float), _members(sample, model, field)
    times, name = np.asarray(sample["times"], dtype=float), sample["fields"][field]
    leads = figures.pick_leads(len(times), LEADS)
    mean = members.mean(0)
    spread, error = members.std(0, ddof=1) if len(members) > 1 else 0 * mean, np.abs(mean - ref)
    shown = [("truth", ref), ("mean", mean),
             *[(f"member {i + 1}", member) for i, member in enumerate(members[:2])]]
    columns = len(shown) + 2
    fig = _figure(9.2, _height(sample, len(leads), columns))
    axes = fig.subplots(len(leads), columns, sharex=True, sharey=True, squeeze=False)
    low, high = _range(ref[leads], members[:, leads])
    top = _range(np.zeros(1), spread[leads], error[leads])[1]
    for row, lead in zip(axes, leads, strict=True):
        for ax, (_, values) in zip(row, shown, strict=False):
            image = _panel(ax, values[lead], sample, figures.FIELD_MAP, low, high)
        for ax, values in zip(row[-2:], (spread, error), strict=True):
            other = _panel(ax, values[lead], sample, SPREAD_MAP, 0.0, top)
        row[0].set_ylabel(f"{lead_title(times[lead])}\ny" if len(times) > 1 else "y")
    for ax, title in zip(axes[0], [*[title for title, _ in shown], "spread", "error of mean"], strict=True):
        ax.set_title(title)
    for ax in axes[-1]:
        ax.set_xlabel("x")
    _bars(fig, ((image, axes[:, :-2], name), (other, axes[:, -2:], f"in {name}")))
    return fig


@_styled
def by_lead(models: dict, times: list[float]) -> Figure | None:
    """CRPS, nRMSE of the ensemble mean and spread over skill of every model against the lead time; None
    without leads."""
    panels = [(title, key, scale) for title, key, scale in (
        ("CRPS", "crps_by_lead", "log"), ("nRMSE of the ensemble mean", "nrmse_mean_by_lead", "log"),
        ("spread / error of the mean", "ssr_by_lead", "linear"))
              if any(len(row.get(key, ())) > 1 for row in models.values())]
    if not panels:
        return None
    fig = _figure(9.2, 3.4)
    for ax, (title, key, scale) in zip(fig.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for model in [model for model in ordered(models) if models[model].get(key)]:
            values, row = _floats(models[model][key]), models[model]
            if key == "ssr_by_lead" and not (values > 0).any():  # a single member has no spread
                continue
            ax.plot(times, values, label=label(model), **line(model, len(times)))
            # eight bands on top of one another show nothing
            if f"{key}_low" in row and model in featured(models, 2):
                ax.fill_between(times, _floats(row[f"{key}_low"]), _floats(row[f"{key}_high"]),
                                color=color(model), alpha=0.15, linewidth=0)
        if key == "ssr_by_lead":
            ax.axhspan(0.9, 1.1, color=figures.LINE, alpha=0.5, linewidth=0)
            ax.set_ylim(bottom=0)
        ax.set(title=title, xlabel="lead time", yscale=scale)
        if scale == "log":
            _logarithmic(ax.yaxis)
        ax.grid(axis="y")
        ax.xaxis.set_major_locator(MaxNLocator(4))
    handles = {name: handle for ax in fig.axes
               for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))
    return fig


def _grid(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """Small panels of equal axes, at most four in a row."""
    columns = min(count, 4)
    rows = -(-count // columns)
    fig = _figure(9.2 * max(columns, 2) / 4 if columns < 4 else 9.2, 0.4 + height * rows)
    axes = fig.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for ax in axes[count:]:
        ax.set_visible(False)
    for ax in axes[max(0, count - columns):count]:  # the lowest of each column
        ax.tick_params(labelbottom=True)
    return fig, list(axes[:count])


@_styled
def spread_and_skill(models: dict, times: list[float]) -> Figure | None:
    """Spread and error of the ensemble mean against the lead time, one panel per model: they coincide where
    it is calibrated."""
    kept = [model for model in ordered(models) if len(models[model].get("spread_by_lead", ())) > 1
            and (_floats(models[model]["spread_by_lead"]) > 0).any()]
    if not kept:
        return None
    fig, axes = _grid(len(kept), 1.7)
    for ax, model in zip(axes, kept, strict=True):
        ax.plot(times, _floats(models[model]["rmse_by_lead"]), color=INK, label="error of the mean")
        ax.plot(times, _floats(models[model]["spread_by_lead"]), color=color(model), linestyle=(0, (3, 1.5)),
                label="spread")
        ax.set_title(label(model), color=color(model))
        ax.grid(axis="y")
        ax.xaxis.set_major_locator(MaxNLocator(4))
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize=8, loc="best", handlelength=1.6)
    fig.supxlabel("lead time", fontsize=9)
    return fig


@_styled
def rank_histograms(models: dict) -> Figure | None:
    """Share of truths in each gap between sorted members over the expected share: flat at 1 where members are
    exchangeable."""
    kept = [model for model in ordered(models) if len(models[model].get("rank_histogram", ())) > 2]
    kept = [model for model in kept if np.isfinite(_floats(models[model]["rank_histogram"])).all()]
    if not kept:
        return None
    fig, axes = _grid(len(kept), 1.6)
    for ax, model in zip(axes, kept, strict=True):
        counts = _floats(models[model]["rank_histogram"])
        position = (np.arange(len(counts)) + 0.5) / len(counts)
        ax.bar(position, counts / counts.sum() * len(counts), width=0.92 / len(counts), color=color(model),
               alpha=0.85)
        ax.axhline(1.0, color=INK, linewidth=1.0)
        ax.set_title(label(model), color=color(model))
        ax.set_xticks([0, 0.5, 1], ["below", "", "above"])
        ax.tick_params(axis="x", length=0)
    top = max(ax.get_ylim()[1] for ax in axes)
    # the end bars of a confident ensemble may be many times the rest: cut, the table has them
    axes[0].set_ylim(0, min(top, 6.0))
    fig.supxlabel("rank of the truth among the members", fontsize=9)
    fig.supylabel("frequency / flat", fontsize=9)
    return fig


@_styled
def reliability(models: dict) -> Figure | None:
    """Error of the mean against predicted spread in bins of equally many points, logarithmic; the diagonal is
    right."""
    kept = {model: models[model]["spread_skill_bins"] for model in ordered(models)
            if len(models[model].get("spread_skill_bins", {}).get("spread", ())) > 1}
    if not kept:
        return None
    fig = _figure(6.6, 3.5)
    ax = fig.subplots()
    every = []
    for model, bins in kept.items():
        spread, rmse = _floats(bins["spread"]), _floats(bins["rmse"])
        slope = "" if bins["slope"] is None else f" (slope {bins['slope']:.2f})"
        ax.plot(spread, rmse, linewidth=1.2, label=label(model) + slope, **line(model, len(spread)))
        every += [*spread[spread > 0], *rmse[rmse > 0]]
    ends = [min(every) / 1.3, max(every) * 1.3]
    ax.plot(ends, ends, color=INK, linewidth=0.8)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal", anchor="W", ylabel="error of "
                                                                                                "the mean / "
                                                                                                "RMS",
           xlabel="predicted spread / RMS of the truth")
    _logarithmic(ax.xaxis)
    _logarithmic(ax.yaxis)
    ax.grid()
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return fig


@_styled
def spectrum_errors(models: dict) -> Figure | None:
    """Decades by which the energy of members, and of sampled residuals (the operator has none), is off; 95 %
    intervals."""
    panels = [(title, key)
              for title, key in (("members", "spectrum_error"),
                                 ("sampled residuals", "residual_spectrum_error"))
              if any(row.get(key, {}).get("value") is not None for row in models.values())]
    if not panels:
        return None
    fig = _figure(9.2, 0.9 + 0.24 * len(models))
    axes = fig.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    names = ordered(models)
    for ax, (title, key) in zip(axes, panels, strict=True):
        for i, model in enumerate(names):
            value, low, high = (models[model].get(key, {}).get(part) for part in ("value", "low", "high"))
            if value is not None and not (model == "operator" and key == "residual_spectrum_error"):
                ax.barh(i, value, color=color(model), alpha=0.85, height=0.66)
                ax.plot([low, high], [i, i], color=INK, linewidth=1.2)
        ax.set(title=f"spectrum of {title}", xlabel="mean |log₁₀ (energy / true energy)|",
               yticks=range(len(names)))
        ax.set_yticklabels([label(model) for model in names])
        ax.grid(axis="x")
        ax.set_axisbelow(True)
        ax.tick_params(axis="y", length=0)
    axes[0].invert_yaxis()
    return fig


@_styled
def steady_cases(sample: dict, field: int) -> Figure:
    """Steady 2D prior: per observation case (rows) what was seen, truth, mean, one member, spread, error of
    the mean; the last two on a scale of the case."""
    cases, name = sample["cases"], sample["fields"][field]
    titles = ("observed", "truth", "mean", "one member", "spread", "error of mean")
    fig = _figure(9.2, _height(sample, len(cases), len(titles)))
    axes = fig.subplots(len(cases), len(titles), sharex=True, sharey=True, squeeze=False)
    shown = {}
    for case, entry in cases.items():
        members = np.asarray(entry["members"], dtype=float)[:, field]
        mean, ref = members.mean(0), np.asarray(entry["u_ref"], dtype=float)[field]
        spread = members.std(0, ddof=1) if len(members) > 1 else 0 * mean
        shown[case] = [np.asarray(entry["observed"], dtype=float), ref, mean, members[0], spread,
                       np.abs(mean - ref)]
    seen = _range(*[panels[0] for panels in shown.values()])
    low, high = _range(*[u for panels in shown.values() for u in panels[1:4]])
    for row, (case, panels) in zip(axes, shown.items(), strict=True):
        # of this case: what is certain and what is not differ by decades
        top = _range(np.zeros(1), *panels[4:])[1]
        limits = [("cividis", *seen), *[(figures.FIELD_MAP, low, high)] * 3, *[(SPREAD_MAP, 0.0, top)] * 2]
        images = [_panel(ax, u, sample, *limit) for ax, u, limit in zip(row, panels, limits, strict=True)]
        row[0].set_ylabel(f"{case_name(case)}\ny")
        bar = fig.colorbar(images[4], ax=row[4:], fraction=0.05, pad=0.02, aspect=12)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=7)
        bar.ax.yaxis.set_major_locator(MaxNLocator(3))
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title)
    for ax in axes[-1]:
        ax.set_xlabel("x")
    _bars(fig, ((images[0], axes[:, :1], "observed"), (images[1], axes[:, 1:4], name)))
    return fig


def field_to_show(sample: dict) -> int:
    """The field with the largest relative error of the first shown model's mean."""
    model = (featured(sample["members"], 1) or list(sample["members"]))[0]
    errors = figures.field_errors({"u_ref": sample["u_ref"],
                                   "u_pred": np.asarray(sample["members"][model], dtype=float).mean(0)})
    return int(np.argmax(np.nan_to_num(errors, nan=-1.0, posinf=math.inf)))
