"""Style, colours and helpers of all figures; matplotlib figures become inline SVG and PNG files.

Of a 3D field the middle slice of the last axis is plotted; x is horizontal in whatever order axes are stored.
The SVG takes its ink from the page (`var(--ink)`, `var(--line)`), so a figure is legible on light and on
dark.
"""

import base64
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, MaxNLocator
from PIL import Image

from ups.common.text import RAISED
from ups.report.tables import INK, MODELS

LINE = "#c5ccd3"  # as INK replaced by the page's colour in SVG; as it is in PNG files
FIELD_MAP, ERROR_MAP, INPUT_MAP = "viridis", "RdBu_r", "cividis"
SPREAD_MAP = "YlOrRd"  # light where the ensemble is sure
# first letters of the names of vertical axes
UPRIGHT = ("y", "j", "row", "lat", "rlat", "z", "k", "lev", "height", "depth")
UNSEEN = "#b9c0c7"  # cells that are not observed or hold no number
DASHED = (0, (3, 1.5))
MAX_CELLS = 128  # per axis of a plotted field; finer grids are strided, as averages would hide errors
LOWEST = 0.9  # height of a row of maps, inches
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ups",
    "text.parse_math": False,
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
styled = matplotlib.rc_context(STYLE)  # decorator of functions that draw


def color(name: str) -> str:
    """The colour of a model."""
    return MODELS[name][1]


def line(look: str | tuple, num_points: int) -> dict:
    """Keywords of `Axes.plot` for a line of num_points. look: a model, or (colour, dash, marker)."""
    shade, dash, marker = MODELS[look][1:] if isinstance(look, str) else look
    return {
        "color": shade,
        "linestyle": dash,
        "marker": marker,
        "markersize": 4,
        "markevery": max(1, num_points // 8),
    }


def lead_title(time: float) -> str:
    return f"lead {time:.3g}"


def _smaller(match: re.Match) -> str:
    """An embedded RGBA image as a palette one: a colour-mapped field has at most 256 colours."""
    image = Image.open(io.BytesIO(base64.b64decode(match.group(1)))).convert("RGB")
    out = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _restyled(tag: re.Match) -> str:
    """A tag of an SVG with smaller images and the page's ink and font. Text between tags, which may look
    alike, is left alone."""
    text = tag[0].replace(INK, "var(--ink)").replace(LINE, "var(--line)")
    text = re.sub(r"data:image/png;base64,\s*([A-Za-z0-9+/=\s]+)", _smaller, text)
    return re.sub(r"(font: [^;\"]*?px )[^;\"]*", r"\1system-ui, sans-serif", text)


class Powers(LogFormatterSciNotation):
    """Numbers of a logarithmic axis as text, 2×10⁻³: matplotlib takes 50 ms to set a formula."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        formula = super().__call__(x, pos).removeprefix(r"$\mathdefault{").removesuffix("}$")
        text, _, power = formula.replace(r"\times", "×").partition("^")
        return text + power.strip("{}").translate(RAISED)


def draw_as_written(fig: Figure) -> None:
    """Draw all texts as they are: a dollar sign in a unit is no mathematics (STYLE), nor are numbers."""
    for axis in [axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis) if axis.get_scale() == "log"]:
        numbers = Powers(axis.get_transform().base)
        axis.set_minor_formatter(numbers)
        if isinstance(axis.get_major_formatter(), LogFormatterSciNotation):
            axis.set_major_formatter(numbers)


@styled
def to_html(fig: Figure | None, caption: str, png: Path | None = None) -> Markup:
    """`fig` as an HTML <figure> with its caption: an inline <svg> that scales with the page and takes ink and
    font from it; empty if fig is None. png: path of a file on white for a README or a slide."""
    if fig is None:
        return Markup()
    draw_as_written(fig)
    if engine := fig.get_layout_engine():
        engine.execute(fig)  # once; every format would repeat it
        fig.set_layout_engine("none")
    if png:
        fig.set(dpi=130, facecolor="white")
        FigureCanvasAgg(fig).print_png(png)
    fig.set_facecolor("none")
    out = io.StringIO()
    FigureCanvasSVG(fig).print_svg(out, metadata={"Date": None})
    text = out.getvalue()
    width = float(re.search(r'<svg[^>]* width="([\d.]+)pt"', text).group(1)) * 4 / 3
    for pattern, new in (
        (r"(?s)^.*?(?=<svg)", ""),
        (r"(?s)<metadata>.*?</metadata>", ""),
        (r"<[^<>]+>", _restyled),
        (r'(<svg[^>]*?) height="[\d.]+pt"', r"\1"),
        (
            r'(<svg[^>]*?) width="[\d.]+pt"',
            lambda tag: (
                f'{tag[1]} role="img" aria-label="{escape(caption)}" '
                f'style="width:100%;max-width:{width:.0f}px;height:auto"'
            ),
        ),
    ):
        text = re.sub(pattern, new, text)
    return Markup("<figure>{}<figcaption>{}</figcaption></figure>").format(Markup(text), caption)


def plotted(sample: dict, u: Any, field: int) -> np.ndarray:
    """One field of u (..., C, *space) as (..., x[, y]), strided to MAX_CELLS; in 3D the middle slice."""
    num_axes = len(sample["axes"])
    u = np.asarray(u, dtype=float).take(field, axis=-1 - num_axes)
    if num_axes == 3:
        u = u[..., u.shape[-1] // 2]
    if plotted_axes(sample)[0] > 0:
        u = u.swapaxes(-1, -2)
    return u[(..., *(slice(None, None, -(-n // MAX_CELLS)) for n in u.shape[-min(num_axes, 2) :]))]


def plotted_axes(sample: dict) -> list[int]:
    """Indices of the plotted axes, the horizontal one first: y, z and latitudes are vertical."""
    kept = list(range(len(sample["axes"])))[:2]
    return sorted(
        kept,
        key=lambda axis: next(
            (rank for rank, begin in enumerate(UPRIGHT, 1) if sample["axes"][axis].lower().startswith(begin)),
            0,
        ),
    )


def axis_labels(sample: dict) -> list[str]:
    """Names of the plotted axes, with units if known."""
    return [sample.get("labels", sample["axes"])[axis] for axis in plotted_axes(sample)]


def plotted_name(sample: dict, field: int) -> str:
    """Name of a field; of a 3D field also the position of the slice."""
    name, last, centres = sample["fields"][field], sample["axes"][-1], sample["coordinates"][-1]
    return f"{name} at {last} = {centres[len(centres) // 2]:.3g}" if len(sample["axes"]) == 3 else name


def truth_and_prediction(sample: dict, field: int) -> list[np.ndarray]:
    """Truth and prediction of one field, as they are plotted."""
    return [plotted(sample, sample[key], field) for key in ("u_ref", "u_pred")]


def edges(sample: dict) -> tuple[float, ...]:
    """Outer cell edges of the plotted axes, x first: x0, x1 [, y0, y1]."""
    axes = [sample["coordinates"][axis] for axis in plotted_axes(sample)]
    halves = [(axis, (axis[1] - axis[0]) / 2 if len(axis) > 1 else 0.5) for axis in axes]
    return tuple(float(edge) for axis, half in halves for edge in (axis[0] - half, axis[-1] + half))


def pick_leads(num_frames: int, count: int) -> list[int]:
    """`count` frames spread evenly from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, num_frames - 1, count)})


def colours(kind: str, *arrays: np.ndarray) -> dict[str, Any]:
    """Keywords of `Axes.imshow`: from the least to the largest finite value; symmetric about zero for errors,
    from zero for spreads."""
    values = np.concatenate([a[np.isfinite(a)].ravel() for a in arrays])
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    low = {ERROR_MAP: min(low, -high), SPREAD_MAP: 0.0}.get(kind, low)
    high = max(high, -low) if kind == ERROR_MAP else high
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    return {"cmap": matplotlib.colormaps[kind].with_extremes(bad=UNSEEN), "vmin": low, "vmax": high}


def compared(ref: np.ndarray, pred: np.ndarray) -> list[tuple[str, np.ndarray, dict]]:
    """(title, values, colours) of truth and prediction, on one scale, and of the error."""
    scale, error = colours(FIELD_MAP, ref, pred), pred - ref
    return [("truth", ref, scale), ("prediction", pred, scale), ("error", error, colours(ERROR_MAP, error))]


def maps(
    sample: dict, rows: Mapping[str, Sequence[tuple[str, np.ndarray, dict]]]
) -> tuple[Figure, np.ndarray]:
    """A figure of maps and its axes. rows: name -> (title, values (x, y), colours) of each column; the first
    row has the titles."""
    x0, x1, y0, y1 = extent = edges(sample)
    across, up = axis_labels(sample)
    num_columns = len(next(iter(rows.values())))
    height = (7.4 / num_columns) * min((y1 - y0) / (x1 - x0), 2.0)
    is_flat = height < LOWEST  # then rows are made higher, so that their names fit
    fig = Figure(figsize=(9.2, 1.0 + len(rows) * max(height, LOWEST)))
    axes = fig.subplots(len(rows), num_columns, sharex=True, sharey=True, squeeze=False)
    for row, (name, panels) in zip(axes, rows.items(), strict=True):
        row[0].set_ylabel(f"{name}\n{up}".lstrip())
        for ax, (title, values, scale) in zip(row, panels, strict=True):
            ax.imshow(values.T, extent=extent, aspect="auto" if is_flat else "equal", **scale)
            ax.tick_params(labelsize=7)
            ax.locator_params(nbins=2)
            ax.xaxis.set_visible(ax in axes[-1])
            ax.yaxis.set_visible(ax is row[0])
            ax.set(title=title if ax in axes[0] else "", xlabel=across if ax in axes[-1] else "")
    return fig, axes


def colour_bar(axes: Any, text: str, num_ticks: int = 4, **options: Any) -> None:
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
