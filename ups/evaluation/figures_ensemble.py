"""Figures of ensemble forecasts, in the style of ups.evaluation.figures: what a forecaster looks at, and
whether the spread can be believed.

A sample is one shown trajectory: u_ref (T, C, *space); members: {model: (M, T, C, *space)}; times (T,): lead
times; fields: names of the C channels; axes, coordinates: name and (cells,) centres of every space axis;
label. Of a 3D field the middle slice of the last axis is shown. A steady sample has instead cases: {case:
{"observed": (*space) with NaN where nothing was seen, "u_ref": (C, *space), "members": (M, C, *space)}}.
models: {model: row of ups.metrics.ensembles.summarise_ensemble}; what a row lacks is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ups.evaluation import figures
from ups.evaluation.figures import DASHED, INK, color, floats, lead_title, line, shown, styled

NAMES = {"operator": "operator alone", "dressed": "+ noise", "dressed_conditional": "+ conditional noise",
         "dressed_resampled": "+ drawn residual", "rival": "rival, no teacher", "corrector": "corrector",
         # in the order in which they are shown
         "student_1": "student, 1 step", "student_2": "student, 2 steps"}
FEATURED = ("corrector", "student_1", "dressed_conditional", "student_2", "rival", "dressed",
            "dressed_resampled")
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


@styled
def fan(sample: dict, field: int) -> Figure:
    """1D: truth, operator, members and their central intervals (positions i / (M + 1), at most the range)
    over x, leads in columns and models in rows."""
    ref, x = shown(sample, sample["u_ref"], field), shown(sample, sample["coordinates"], 0)
    models, leads = featured(sample["members"], 3), figures.pick_leads(len(ref), LEADS)
    drawn = {model: shown(sample, sample["members"][model], field)
             for model in {*models, "operator"} & sample["members"].keys()}
    fig = Figure(figsize=(9.2, 0.7 + 2.0 * len(models)))
    axes = fig.subplots(len(models), len(leads), sharex=True, sharey="col", squeeze=False)
    for row, model in zip(axes, models, strict=True):
        for ax, lead in zip(row, leads, strict=True):
            members, shade = drawn[model][:, lead], color(model)
            for level, alpha in ((0.9, 0.2), (0.5, 0.34)):
                ends = np.quantile(members, [(1 - level) / 2, (1 + level) / 2], axis=0, method="weibull")
                ax.fill_between(x, *ends, color=shade, alpha=alpha, linewidth=0,
                                label=f"{100 * level:.0f} % of members")
            lines = ax.plot(x, members[:NUM_LINES].T, color=shade, linewidth=0.5, alpha=0.75)
            lines[0].set_label("members")
            if "operator" in drawn:
                ax.plot(x, drawn["operator"][0, lead], color=color("operator"), linewidth=1.2,
                        linestyle=DASHED, label=label("operator"))
            ax.plot(x, ref[lead], color=INK, linewidth=1.4, label="truth")
            figures.finish(ax, title=lead_title(sample["times"][lead]) if model == models[0] else "",
                           xlabel="x" if model == models[-1] else "")
        row[0].set_ylabel(f"{label(model)}\n{sample['fields'][field]}")
    handles, names = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, names, loc="outside lower center", ncols=len(names))
    return fig


def _logarithmic(axis) -> None:
    """Plain numbers at 1, 2, 3 and 5 of each decade, over many decades at each."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if high < 30 * low else (1, 3) if high < 300 * low
                                      else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _moments(members: np.ndarray, ref: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean of members (M, ...), their spread (nothing of one) and the error of the mean."""
    mean = members.mean(0)
    return mean, members.std(0, ddof=1) if len(members) > 1 else 0 * mean, np.abs(mean - ref)


@styled
def members_2d(sample: dict, model: str, field: int) -> Figure:
    """2D: truth, mean, two members, spread and error of the mean, leads in rows; the last two share one
    scale."""
    leads, name = figures.pick_leads(len(sample["times"]), LEADS), sample["fields"][field]
    ref, members = (shown(sample, u, field)[..., leads, :, :]
                    for u in (sample["u_ref"], sample["members"][model]))
    mean, spread, error = _moments(members, ref)
    field_scale = figures.colours(figures.FIELD_MAP, ref, members)
    spread_scale = figures.colours(figures.SPREAD_MAP, spread, error)
    panels = [("truth", ref, field_scale), ("mean", mean, field_scale),
              *((f"member {i + 1}", member, field_scale) for i, member in enumerate(members[:2])),
              ("spread", spread, spread_scale), ("error of mean", error, spread_scale)]
    fig, axes = figures.maps(sample, [[(u[i], scale) for _, u, scale in panels] for i in range(len(leads))],
                             [lead_title(sample["times"][lead]) for lead in leads],
                             [title for title, _, _ in panels])
    _bar_below(axes[:, :-2], name)
    _bar_below(axes[:, -2:], f"in {name}")
    return fig


def _bar_below(axes: np.ndarray, text: str) -> None:
    """A colour bar as wide as its columns."""
    columns = axes.shape[1]
    figures.bar(axes, text, 3 * columns, orientation="horizontal", fraction=0.03, aspect=12 * columns)


@styled
def by_lead(models: dict, times: list[float]) -> Figure | None:
    """CRPS, nRMSE of the ensemble mean and spread over skill of every model against the lead time; None
    without leads."""
    panels = [(title, key, scale) for title, key, scale in (
        ("CRPS", "crps_by_lead", "log"), ("nRMSE of the ensemble mean", "nrmse_mean_by_lead", "log"),
        ("spread / error of the mean", "ssr_by_lead", "linear"))
              if any(len(row.get(key, ())) > 1 for row in models.values())]
    if not panels:
        return None
    fig = Figure(figsize=(9.2, 3.4))
    models = {model: models[model] for model in ordered(models)}
    for ax, (title, key, scale) in zip(fig.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        # eight bands on top of one another show nothing
        figures.curves(ax, models, times, key, NAMES, featured(models, 2), title=title, yscale=scale)
        if scale == "log":
            _logarithmic(ax.yaxis)
        else:
            ax.axhspan(0.9, 1.1, color=figures.LINE, alpha=0.5, linewidth=0)
            ax.set_ylim(bottom=0)
    handles = {name: handle for ax in fig.axes
               for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))
    return fig


def _small_panels(models: dict, key: str, is_shown: Callable[[np.ndarray], bool], height: float,
                  xlabel: str) -> tuple[Figure | None, dict[str, Axes]]:
    """A panel of equal axes for each model whose list `key` can be shown, at most four in a row; no figure
    without any."""
    kept = [model for model in ordered(models) if is_shown(floats(models[model].get(key, ())))]
    if not kept:
        return None, {}
    columns = min(len(kept), 4)
    rows = -(-len(kept) // columns)
    fig = Figure(figsize=(9.2 * max(columns, 2) / 4, 0.4 + height * rows))
    axes = fig.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for i, ax in enumerate(axes):
        ax.set_visible(i < len(kept))
        ax.tick_params(labelbottom=i >= len(kept) - columns)   # the lowest of each column
    for ax, model in zip(axes, kept, strict=False):
        ax.set_title(label(model), color=color(model))
    fig.supxlabel(xlabel, fontsize=9)
    return fig, dict(zip(kept, axes, strict=False))


@styled
def spread_and_skill(models: dict, times: list[float]) -> Figure | None:
    """Spread and error of the ensemble mean against the lead time, one panel per model: they coincide where
    it is calibrated."""
    fig, axes = _small_panels(models, "spread_by_lead", lambda u: len(u) > 1 and (u > 0).any(), 1.7,
                              "lead time")
    for model, ax in axes.items():
        ax.plot(times, floats(models[model]["rmse_by_lead"]), color=INK, label="error of the mean")
        ax.plot(times, floats(models[model]["spread_by_lead"]), color=color(model), linestyle=DASHED,
                label="spread")
        figures.finish(ax)
    if fig:
        fig.axes[0].set_ylim(bottom=0)
        fig.axes[0].legend(fontsize=8, loc="best", handlelength=1.6)
    return fig


@styled
def rank_histograms(models: dict) -> Figure | None:
    """Share of truths in each gap between sorted members over the expected share: flat at 1 where members are
    exchangeable."""
    fig, axes = _small_panels(models, "rank_histogram", lambda u: len(u) > 2 and np.isfinite(u).all(), 1.6,
                              "rank of the truth among the members")
    for model, ax in axes.items():
        counts = floats(models[model]["rank_histogram"])
        ax.bar((np.arange(len(counts)) + 0.5) / len(counts), counts / counts.sum() * len(counts),
               width=0.92 / len(counts), color=color(model), alpha=0.85)
        ax.axhline(1.0, color=INK, linewidth=1.0)
        ax.set_xticks([0, 0.5, 1], ["below", "", "above"])
        ax.tick_params(axis="x", length=0)
    if fig:
        # the end bars of a confident ensemble may be many times the rest: cut, the table has them
        fig.axes[0].set_ylim(0, min(6.0, fig.axes[0].get_ylim()[1]))
        fig.supylabel("frequency / flat", fontsize=9)
    return fig


@styled
def reliability(models: dict) -> Figure | None:
    """Error of the mean against predicted spread in bins of equally many points, logarithmic; the diagonal is
    right."""
    kept = {model: models[model]["spread_skill_bins"] for model in ordered(models)
            if len(models[model].get("spread_skill_bins", {}).get("spread", ())) > 1}
    if not kept:
        return None
    fig = Figure(figsize=(6.6, 3.5))
    ax = fig.subplots()
    for model, bins in kept.items():
        slope = "" if bins["slope"] is None else f" (slope {bins['slope']:.2f})"
        ax.plot(floats(bins["spread"]), floats(bins["rmse"]), linewidth=1.2, label=label(model) + slope,
                **line(model, len(bins["spread"])))
    every = [value for bins in kept.values() for value in (*bins["spread"], *bins["rmse"]) if value]
    ends = [min(every) / 1.3, max(every) * 1.3]
    ax.plot(ends, ends, color=INK, linewidth=0.8)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal", anchor="W",
           xlabel="predicted spread / RMS of the truth", ylabel="error of the mean / RMS")
    _logarithmic(ax.xaxis)
    _logarithmic(ax.yaxis)
    ax.grid()
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return fig


@styled
def spectrum_errors(models: dict) -> Figure | None:
    """Decades by which the energy of members, and of sampled residuals (the operator has none), is off; 95 %
    intervals."""
    panels = [(title, key) for title, key in (("members", "spectrum_error"),
                                              ("sampled residuals", "residual_spectrum_error"))
              if any(row.get(key, {}).get("value") is not None for row in models.values())]
    if not panels:
        return None
    fig, names = Figure(figsize=(9.2, 0.9 + 0.24 * len(models))), ordered(models)
    axes = fig.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for ax, (title, key) in zip(axes, panels, strict=True):
        for i, model in enumerate(names):
            value, low, high = (models[model].get(key, {}).get(part) for part in ("value", "low", "high"))
            if value is not None and not (model == "operator" and key == "residual_spectrum_error"):
                ax.barh(i, value, color=color(model), alpha=0.85, height=0.66)
                ax.plot([low, high], [i, i], color=INK, linewidth=1.2)
        ax.set(title=f"spectrum of {title}", xlabel="mean |log₁₀ (energy / true energy)|", axisbelow=True)
        ax.set_yticks(range(len(names)), [label(model) for model in names])
        ax.grid(axis="x")
        ax.tick_params(axis="y", length=0)
    axes[0].invert_yaxis()
    return fig


@styled
def steady_cases(sample: dict, field: int) -> Figure:
    """Steady 2D prior: per observation case (rows) what was seen, truth, mean, one member, spread, error of
    the mean; the last two on a scale of the case."""
    panels = []
    for entry in sample["cases"].values():
        members, ref = (shown(sample, entry[key], field) for key in ("members", "u_ref"))
        mean, spread, error = _moments(members, ref)
        panels.append([shown(sample, [entry["observed"]], 0), ref, mean, members[0], spread, error])
    seen = figures.colours(figures.INPUT_MAP, *[row[0] for row in panels])
    scale = figures.colours(figures.FIELD_MAP, *[u for row in panels for u in row[1:4]])
    # of each case: what is certain and what is not differ by decades
    own = [figures.colours(figures.SPREAD_MAP, *row[4:]) for row in panels]
    rows = [list(zip(row, [seen, scale, scale, scale, last, last], strict=True))
            for row, last in zip(panels, own, strict=True)]
    fig, axes = figures.maps(sample, rows, map(case_name, sample["cases"]),
                             ("observed", "truth", "mean", "one member", "spread", "error of mean"))
    for row in axes:
        figures.bar(row[4:], "", 3, aspect=12)
    _bar_below(axes[:, :1], "observed")
    _bar_below(axes[:, 1:4], sample["fields"][field])
    return fig


def field_to_show(sample: dict) -> int:
    """The field with the largest relative error of the first shown model's mean."""
    model = (featured(sample["members"], 1) or list(sample["members"]))[0]
    errors = figures.field_errors({"u_ref": sample["u_ref"],
                                   "u_pred": np.asarray(sample["members"][model], dtype=float).mean(0)})
    return int(np.argmax(np.nan_to_num(errors, nan=-1.0, posinf=np.inf)))
