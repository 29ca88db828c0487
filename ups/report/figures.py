"""Figures of the report: matplotlib figures that become inline SVG or PNG files.

A sample is one shown trajectory, a dict of numpy arrays: u_ref, u_pred (T, C, *space); times (T,); fields:
names of the C channels; axes: names of the space axes as they are stored; coordinates: one (cells,) array per
axis; label, such as "median error"; parameter: text or None; optional `inputs`: {name: (*space)} coefficient
fields of a steady task. times are lead times, from the last frame that was given. Of a 3D field the middle
slice of the last axis is shown; x is drawn across, however stored.

The SVG takes its ink from the page (`var(--ink)`, `var(--line)`), so one figure is legible on light and on
dark.
"""

import base64
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from ups.report.tables import label, ordered

INK, LINE = "#1f2933", "#c5ccd3"  # replaced by the page's colours in SVG; as they are in PNG files
FIELD_MAP, ERROR_MAP, INPUT_MAP = "viridis", "RdBu_r", "cividis"
SPREAD_MAP = "YlOrRd"  # light where the ensemble is sure
UPRIGHT = ("y", "j", "row", "lat", "rlat", "z", "k", "lev", "height", "depth")  # axes, how names begin
UNSEEN = "#b9c0c7"  # cells that were not observed, or hold no number
DASHED = (0, (3, 1.5))
# Colour, dash and marker of every model, so that no line is told by its colour alone. Colours after Okabe and
# Ito 2008, which stay apart for the colour-blind (a test simulates it); mid-tones, readable on white and on
# black.
LOOKS = {
    "truth": (INK, "-", ""),
    "operator": ("#0072b2", "-", "o"),
    "base": ("#d55e00", (0, (5, 2)), "s"),
    "corrector": ("#e377c2", "-", "D"),
    "student_1": ("#009e73", (0, (7, 1.5, 1.5, 1.5)), "^"),
    "student_2": ("#56b4e9", (0, (3, 1)), "v"),
    "rival": ("#e69f00", (0, (7, 1.5, 1.5, 1.5, 1.5, 1.5)), "P"),
    "fno": ("#e69f00", (0, (3, 1)), "P"),
    "unet": ("#8c6d46", (0, (7, 1.5, 1.5, 1.5)), "X"),
    "persistence": ("#8a939c", (0, (4, 2)), ""),
    "climatology": ("#8a939c", (0, (1, 2)), ""),
    "seasonal_climatology": ("#8a939c", (0, (6, 1, 1, 1)), ""),
    "train_mean": ("#8a939c", (0, (4, 2)), ""),
    "codec_floor": ("#7a8a2e", (0, (1, 1.5)), ""),
    "dressed": ("#8a939c", (0, (4, 2)), "x"),
    "dressed_conditional": ("#8c6d46", (0, (4, 2)), "+"),
    "dressed_waves": ("#8c6d46", (0, (1, 2)), "x"),
    "dressed_resampled": ("#7a8a2e", (0, (4, 2)), "1"),
    "dressed_leads": ("#882255", (0, (2, 1)), "2"),
    "analogs": ("#d55e00", (0, (2, 1)), "3"),
    "normal_leads": ("#882255", (0, (1, 2)), "4"),
    "normal_analogs": ("#d55e00", (0, (1, 2)), "|"),
    "exact": (INK, (0, (1, 1)), "*"),
    "bayes_mean": (INK, (0, (4, 1)), "_"),
}
CYCLE = [
    LOOKS[name]
    for name in ("operator", "base", "student_1", "corrector", "rival", "student_2", "persistence")
]  # of tasks
# per axis in a shown field; finer grids are strided (never averaged, which would hide errors)
MAX_CELLS = 128
LOWEST = 0.9  # height of a row of maps, inches
COLUMNS = 5  # leads shown of a 2D field
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ups",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "legend.frameon": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "figure.constrained_layout.use": True,
    "image.origin": "lower",
    "image.interpolation": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
}
styled = matplotlib.rc_context(STYLE)  # decorator of what draws


def color(name: str) -> str:
    """The colour of a model."""
    return LOOKS[name][0]


def line(look: str | tuple, num_points: int) -> dict:
    """How a line of so many points is drawn, by the name of its model: keywords of `Axes.plot`."""
    shade, dash, marker = LOOKS.get(look, look)
    return {
        "color": shade,
        "linestyle": dash,
        "marker": marker,
        "markersize": 4,
        "markevery": max(1, num_points // 8),
    }


def lead_title(time: float) -> str:
    return f"lead {time:.3g}"


def data_uri(image: Image.Image) -> str:
    """A PNG as text that an HTML file can hold."""
    out = io.BytesIO()
    image.save(out, "png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _smaller(match: re.Match) -> str:
    """An embedded RGBA image as a palette one: a colour-mapped field has at most 256 colours."""
    image = Image.open(io.BytesIO(base64.b64decode(match.group(1)))).convert("RGB")
    return data_uri(image.quantize(256, dither=Image.Dither.NONE))


@styled
def to_html(fig: Figure | None, caption: str, png: Path | None = None) -> str:
    """`fig` as an HTML <figure> with its caption: an inline <svg> that scales with the page and takes its ink
    and font from it; nothing of no figure. png: written too, on white; the file a README or a slide uses."""
    if fig is None:
        return ""
    if png:
        fig.savefig(png, dpi=130, facecolor="white")
        fig.set_layout_engine("none")  # laid out now; a second pass for the SVG would only cost time
    out = io.StringIO()
    fig.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue().replace(INK, "var(--ink)").replace(LINE, "var(--line)")
    width = float(re.search(r'<svg[^>]* width="([\d.]+)pt"', text).group(1)) * 4 / 3
    for pattern, new in (
        (r"(?s)^.*?(?=<svg)", ""),
        (r"(?s)<metadata>.*?</metadata>", ""),
        (r"data:image/png;base64,\s*([A-Za-z0-9+/=\s]+)", _smaller),
        (r"(font: [^;\"]*?px )[^;\"]*", r"\1system-ui, sans-serif"),
        (r'(<svg[^>]*?) height="[\d.]+pt"', r"\1"),
        (
            r'(<svg[^>]*?) width="[\d.]+pt"',
            rf'\1 role="img" aria-label="{html.escape(caption)}" '
            rf'style="width:100%;max-width:{width:.0f}px;height:auto"',
        ),
    ):
        text = re.sub(pattern, new, text)
    return f"<figure>{text}<figcaption>{html.escape(caption)}</figcaption></figure>"


def shown(sample: dict, u: Any, field: int) -> np.ndarray:
    """(..., x[, y]) of u (..., C, *space): one field, a 3D one's middle slice, strided to MAX_CELLS."""
    num_axes = len(sample["axes"])
    u = np.asarray(u, dtype=float).take(field, axis=-1 - num_axes)
    if num_axes == 3:
        u = u[..., u.shape[-1] // 2]
    if shown_axes(sample)[0] > 0:
        u = u.swapaxes(-1, -2)
    return u[(..., *(slice(None, None, -(-n // MAX_CELLS)) for n in u.shape[-min(num_axes, 2) :]))]


def shown_axes(sample: dict) -> list[int]:
    """Which axes a figure shows, the horizontal one first: y, z and latitudes go upwards."""
    kept = list(range(len(sample["axes"])))[:2]
    return sorted(
        kept,
        key=lambda axis: next(
            (rank for rank, begin in enumerate(UPRIGHT, 1) if sample["axes"][axis].lower().startswith(begin)),
            0,
        ),
    )


def axis_labels(sample: dict) -> list[str]:
    """The names of the shown axes, with their units where they have any."""
    return [sample.get("labels", sample["axes"])[axis] for axis in shown_axes(sample)]


def shown_name(sample: dict, field: int) -> str:
    """The name of a field, and of a 3D one where its slice lies."""
    name, last, centres = sample["fields"][field], sample["axes"][-1], sample["coordinates"][-1]
    return f"{name} at {last} = {centres[len(centres) // 2]:.3g}" if len(sample["axes"]) == 3 else name


def _both(sample: dict, field: int) -> list[np.ndarray]:
    """Truth and prediction as they are shown."""
    return [shown(sample, sample[key], field) for key in ("u_ref", "u_pred")]


def _extent(sample: dict) -> tuple[float, ...]:
    """Cell edges of the shown axes, x first, from the cell centres: x0, x1 [, y0, y1]."""
    axes = [sample["coordinates"][axis] for axis in shown_axes(sample)]
    halves = [(axis, (axis[1] - axis[0]) / 2 if len(axis) > 1 else 0.5) for axis in axes]
    return tuple(float(edge) for axis, half in halves for edge in (axis[0] - half, axis[-1] + half))


def field_errors(sample: dict) -> np.ndarray:
    """nRMSE of each field of one sample, sqrt(sum e^2 / sum u^2) over time and space -> (C,).

    As in ups.metrics.errors: inf where the prediction is not finite, NaN (undefined) where the truth is zero.
    """
    u_ref, u_pred = (np.asarray(sample[key], dtype=float) for key in ("u_ref", "u_pred"))
    axes = (0, *range(2, u_ref.ndim))
    energy, squared = (
        np.where(np.isnan(u_ref), 0, square).sum(axes)  # but for the cells of a mask
        for square in (u_ref**2, (u_pred - u_ref) ** 2)
    )
    return np.where(np.isfinite(squared), np.sqrt(squared / np.where(energy > 0, energy, np.nan)), np.inf)


def pick_leads(num_frames: int, count: int) -> list[int]:
    """`count` frames spread evenly from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, num_frames - 1, count)})


def colours(kind: str, *arrays: np.ndarray) -> dict[str, Any]:
    """Keywords of `Axes.imshow`: the least to the largest finite value; of an error as far on both sides of
    zero, of a spread from zero."""
    values = np.concatenate([a[np.isfinite(a)].ravel() for a in arrays])
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    low = {ERROR_MAP: min(low, -high), SPREAD_MAP: 0.0}.get(kind, low)
    high = max(high, -low) if kind == ERROR_MAP else high
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    return {"cmap": matplotlib.colormaps[kind].with_extremes(bad=UNSEEN), "vmin": low, "vmax": high}


def compared(ref: np.ndarray, pred: np.ndarray) -> list[tuple[str, np.ndarray, dict]]:
    """(title, values, colours) of truth and prediction, which share one scale, and of the error."""
    scale, error = colours(FIELD_MAP, ref, pred), pred - ref
    return [("truth", ref, scale), ("prediction", pred, scale), ("error", error, colours(ERROR_MAP, error))]


def maps(
    sample: dict, rows: Mapping[str, Sequence[tuple[str, np.ndarray, dict]]]
) -> tuple[Figure, np.ndarray]:
    """A figure and its axes: the name of each row -> (title, values (x, y), colours) of each column; titles
    are those of the first row."""
    x0, x1, y0, y1 = extent = _extent(sample)
    across, up = axis_labels(sample)
    num_columns = len(next(iter(rows.values())))
    height = (7.4 / num_columns) * min((y1 - y0) / (x1 - x0), 2.0)
    is_flat = height < LOWEST  # then rows have room for their names, and axes have scales of their own
    fig = Figure(figsize=(9.2, 1.0 + len(rows) * max(height, LOWEST)))
    axes = fig.subplots(len(rows), num_columns, sharex=True, sharey=True, squeeze=False)
    for row, (name, panels) in zip(axes, rows.items(), strict=True):
        row[0].set_ylabel(f"{name}\n{up}".lstrip())
        for ax, (title, values, scale) in zip(row, panels, strict=True):
            ax.imshow(values.T, extent=extent, aspect="auto" if is_flat else "equal", **scale)
            ax.tick_params(labelsize=7)
            ax.locator_params(nbins=2)
            ax.set(title=title if ax in axes[0] else "", xlabel=across if ax in axes[-1] else "")
    return fig, axes


def bar(axes: Any, text: str, num_ticks: int = 4, **options: Any) -> None:
    """A colour bar beside axes whose images share one scale."""
    ax = np.ravel(axes)[0]
    options = {"label": text, "ticks": MaxNLocator(num_ticks), "fraction": 0.05, "pad": 0.02, **options}
    ax.figure.colorbar(ax.images[0], ax=axes, **options).outline.set_visible(False)


def floats(values: Iterable) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], dtype=float)


def finish(ax: Axes, **settings: Any) -> None:
    """Titles, labels and scales of lines, and a grid behind them."""
    ax.set(**settings)
    ax.grid(axis="y")
    ax.xaxis.set_major_locator(MaxNLocator(4))


@styled
def by_lead(
    models: dict,
    times: list[float],
    panels: Iterable[tuple[str, str, str]],
    banded: Iterable[str],
    lead: str = "lead time",
) -> Figure | None:
    """A line over lead time for each model's list `key`, in a panel for every (title, key, scale) that there
    is; for those in `banded` its 95 % interval as a band. lead: the name of that axis. None without leads."""
    panels = [panel for panel in panels if any(len(row.get(panel[1], ())) > 1 for row in models.values())]
    if not panels:
        return None
    fig = Figure(figsize=(3.1 * max(len(panels), 2), 3.4))
    for ax, (title, key, scale) in zip(fig.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        curves = {name: floats(models[name].get(key, ())) for name in ordered(models)}
        # not NaN, nor no spread
        kept = {name: values for name, values in curves.items() if (values > 0).any()}
        for name, values in kept.items():
            ax.plot(times, values, label=label(name), **line(name, len(times)))
            if f"{key}_low" in models[name] and name in banded:
                ax.fill_between(
                    times,
                    *(floats(models[name][f"{key}_{end}"]) for end in ("low", "high")),
                    color=color(name),
                    alpha=0.2,
                    linewidth=0,
                )
        finish(ax, xlabel=lead, title=title, yscale=scale)
        # a periodic truth passes through its first frame again; persistence would stretch the axis there
        known = [values[values > 0].min() for name, values in kept.items() if name != "persistence"]
        if scale == "linear":
            ax.axhspan(0.9, 1.1, color=LINE, alpha=0.5, linewidth=0)  # calibrated
            ax.set_ylim(bottom=0)
        elif known:
            ax.set_ylim(bottom=0.6 * min(known))
    fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


@styled
def space_time(sample: dict, field: int) -> Figure:
    """1D: truth, prediction and error over space and time, and both as lines at several leads."""
    ref, pred = _both(sample, field)
    times, name, x = sample["times"], sample["fields"][field], shown(sample, sample["coordinates"], 0)
    half, lead = (times[1] - times[0]) / 2, sample.get("time", "lead time")
    extent = (*_extent(sample), times[0] - half, times[-1] + half)
    fig = Figure(figsize=(9.2, 5.1))
    top, bottom = fig.subfigures(2, 1, height_ratios=(1.25, 1))
    fig.get_layout_engine().set(w_pad=0.08)
    axes = top.subplots(1, 3, sharey=True)
    for ax, (title, values, scale) in zip(axes, compared(ref, pred), strict=True):
        ax.imshow(values, aspect="auto", extent=extent, **scale)
        ax.set(title=title, xlabel=axis_labels(sample)[0], ylabel=lead if title == "truth" else "")
        ax.locator_params(axis="x", nbins=4)
    bar(axes[:2], name)
    bar(axes[2], f"error in {name}")
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
    """2D: rows truth, prediction, error over columns of lead times; truth and prediction share one scale."""
    leads, name = pick_leads(len(sample["times"]), COLUMNS), shown_name(sample, field)
    titles = [lead_title(sample["times"][lead]) for lead in leads]
    fig, axes = maps(
        sample,
        {
            row: [(title, u, scale) for title, u in zip(titles, values, strict=True)]
            for row, values, scale in compared(*(u[leads] for u in _both(sample, field)))
        },
    )
    bar(axes[:2], name)
    bar(axes[2], f"error in {name}")
    return fig


@styled
def profiles(sample: dict, field: int) -> Figure:
    """1D, one frame: the coefficient of a steady task, truth with prediction, and error over x."""
    name, x = sample["fields"][field], shown(sample, sample["coordinates"], 0)
    ref, pred = (u[0] for u in _both(sample, field))
    panels = [
        (f"coefficient {key}", key, [(shown(sample, [a], 0), "truth", key)])
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
    """2D, one frame: the coefficient of a steady task, truth, prediction and error side by side."""
    name = sample["fields"][field]
    inputs = [(f"coefficient {key}", shown(sample, [a], 0)) for key, a in sample.get("inputs", {}).items()]
    panels = [
        *((title, a, colours(INPUT_MAP, a)) for title, a in inputs),
        *compared(*(u[0] for u in _both(sample, field))),
    ]
    fig, axes = maps(sample, {"": panels})
    for ax, (title, _, _) in zip(axes[0], panels, strict=True):
        text = {"error": f"error in {name}", "truth": name, "prediction": name}.get(title, title.split()[-1])
        bar(ax, text, orientation="horizontal", fraction=0.06)
    return fig


def sample_figure(sample: dict, field: int) -> Figure:
    """The figure that fits the sample: one frame or several, of a 1D or a 2D (or sliced 3D) field."""
    one_frame, several = (profiles, space_time) if len(sample["axes"]) == 1 else (steady, frames_2d)
    return (one_frame if len(sample["times"]) == 1 else several)(sample, field)


@styled
def spectra(spectrum: dict, field: int, name: str, times: list[float], max_shell: int) -> Figure:
    """Energy spectra of truth and models at the kept leads, up to the Nyquist shell."""
    leads, wave = spectrum["leads"], floats(spectrum["wavenumber"])
    kept = (wave >= 1) & (wave <= max_shell)
    energy = {
        key: [floats(lead[field])[kept] for lead in leads_of]
        for key, leads_of in spectrum.items()
        if key not in ("leads", "wavenumber")
    }
    positive = np.concatenate(energy["truth"])[np.concatenate(energy["truth"]) > 0]
    fig = Figure(figsize=(9.2 if len(leads) > 1 else 4.6, 2.9))
    axes = fig.subplots(1, len(leads), sharey=True, squeeze=False)[0]
    for column, (ax, lead) in enumerate(zip(axes, leads, strict=True)):
        for key, values in energy.items():
            style = {"linewidth": 2.4, "alpha": 0.75} if key == "truth" else {}
            ax.loglog(wave[kept], values[column], label=label(key), **line(key, int(kept.sum())), **style)
        ax.set_xscale("log", base=2)  # octaves: on a small grid there is no power of ten but the first
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set(xlabel="wave number (cycles per box)", title=lead_title(times[lead]) if len(times) > 1 else "")
        ax.grid(axis="y")
    if positive.size:  # float32 fields carry no information below about 1e-14 of their largest energy
        ax.set_ylim(max(positive.min() / 10, positive.max() * 1e-14), positive.max() * 4)
    axes[0].set_ylabel(f"energy of {name}")
    axes[0].legend(fontsize=8, loc="lower left")
    return fig


@styled
def training(history: list[dict]) -> Figure:
    """Losses, validation scores and the learning rate over the steps, from rows of metrics.jsonl (see
    ups.training.run, ups.training.track)."""
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
