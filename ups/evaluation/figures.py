"""Figures of the report: matplotlib figures that become inline SVG or PNG files.

A sample is one shown trajectory, a dict of numpy arrays: u_ref, u_pred (T, C, *space); times (T,); fields:
names of the C channels; axes: names of the space axes as they are stored; coordinates: one (cells,) array per
axis; label, such as "median error"; parameter: text or None; optional `inputs`: {name: (*space)} coefficient
fields of a steady task. times are lead times, from the last frame that was given. Of a 3D field the middle
slice of the last axis is shown; x is drawn across, however stored.

The SVG takes its ink from the page (`var(--ink)`, `var(--line)`), so one figure is legible on light and on
dark.
"""

from __future__ import annotations

import base64
import html
import io
import re

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

INK, LINE = "#1f2933", "#c5ccd3"  # replaced by the page's colours in SVG; as they are in PNG files
FIELD_MAP, ERROR_MAP = "viridis", "RdBu_r"
# Colour, dash and marker of every model, so that no line is told by its colour alone. Colours after Okabe and
# Ito 2008, which stay apart for the colour-blind (a test simulates it); mid-tones, readable on white and on
# black.
LOOKS = {"truth": (INK, "-", ""), "operator": ("#0072b2", "-", "o"), "base": ("#d55e00", (0, (5, 2)), "s"),
         "corrector": ("#e377c2", "-", "D"), "student": ("#009e73", (0, (7, 1.5, 1.5, 1.5)), "^"),
         "student_1": ("#009e73", (0, (7, 1.5, 1.5, 1.5)), "^"), "student_2": ("#56b4e9", (0, (3, 1)), "v"),
         "rival": ("#e69f00", (0, (7, 1.5, 1.5, 1.5, 1.5, 1.5)), "P"), "fno": ("#e69f00", (0, (3, 1)), "P"),
         "unet": ("#8c6d46", (0, (7, 1.5, 1.5, 1.5)), "X"), "persistence": ("#8a939c", (0, (4, 2)), ""),
         "train_mean": ("#8a939c", (0, (4, 2)), ""), "codec_floor": ("#7a8a2e", (0, (1, 1.5)), ""),
         "dressed": ("#8a939c", (0, (4, 2)), "x"), "dressed_conditional": ("#8c6d46", (0, (4, 2)), "+"),
         "dressed_resampled": ("#7a8a2e", (0, (4, 2)), "1")}
SPARE = (("#a03c3c", (0, (2, 1)), "*"), ("#3c7a8c", (0, (2, 1)), "h"))   # models from elsewhere
NAMES = {"operator": "UPS operator", "base": "base alone", "corrector": "UPS corrector", "student": "UPS "
                                                                                                    "student",
         "fno": "FNO",
         "unet": "U-Net", "persistence": "persistence", "train_mean": "training mean", "codec_floor": "codec "
                                                                                                      "floor",
         "truth": "truth"}
# of tasks
CYCLE = [LOOKS[name]
         for name in ("operator", "base", "student", "corrector", "rival", "student_2", "persistence")]
# per axis in a shown field; finer grids are strided (never averaged, which would hide errors)
MAX_CELLS = 128
COLUMNS = 5  # leads shown of a 2D field
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "ups", "font.size": 9, "axes.titlesize": 9,
         "axes.labelsize": 9,
         "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "legend.frameon": False,
         "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK,
         "ytick.color": INK,
         "axes.titlecolor": INK, "axes.facecolor": "none", "grid.color": LINE, "grid.linewidth": 0.6,
         "lines.linewidth": 1.6}


def color(name: str) -> str:
    """The colour of a model."""
    return _look(name)[0]


def _look(name: str) -> tuple:
    return LOOKS.get(name, SPARE[sum(name.encode()) % len(SPARE)])


def line(look: str | tuple, num_points: int) -> dict:
    """How a line of so many points is drawn, by the name of its model: keywords of `Axes.plot`."""
    shade, dash, marker = _look(look) if isinstance(look, str) else look
    return {"color": shade, "linestyle": dash, "marker": marker, "markersize": 4,
            "markevery": max(1, num_points // 8)}


def lead_title(time: float) -> str:
    return f"lead {time:.3g}"


def _figure(width: float, height: float, layout: str = "constrained") -> Figure:
    return Figure(figsize=(width, height), layout=layout)


def _styled(draw):
    def wrapper(*args, **kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)
    wrapper.__doc__ = draw.__doc__
    return wrapper


def to_png(fig: Figure, path) -> None:
    """Write `fig` on white; the files a README or a slide uses."""
    with matplotlib.rc_context(STYLE):
        fig.savefig(path, dpi=130, facecolor="white")
    fig.set_layout_engine("none")  # laid out now; a second pass for the SVG would only cost time


def _smaller(match: re.Match) -> str:
    """An embedded RGBA image as a palette one: a colour-mapped field has at most 256 colours, so nothing is
    lost."""
    image = Image.open(io.BytesIO(base64.b64decode(match.group(1)))).convert("RGB")
    out = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def to_svg(fig: Figure, alt: str) -> str:
    """`fig` as an inline <svg> that scales with the page and takes its ink and font from it."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        fig.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"data:image/png;base64,\s*([A-Za-z0-9+/=\s]+)", _smaller, text)
    text = re.sub(r"(font: [^;\"]*?px )[^;\"]*", r"\1system-ui, sans-serif", text)
    text = text.replace(INK, "var(--ink)").replace(LINE, "var(--line)")
    width = float(re.search(r'<svg[^>]* width="([\d.]+)pt"', text).group(1)) * 4 / 3
    text = re.sub(r'(<svg[^>]*?) height="[\d.]+pt"', r"\1", text, count=1)
    return re.sub(r'(<svg[^>]*?) width="[\d.]+pt"', rf'\1 role="img" aria-label="{html.escape(alt)}" '
                  rf'style="width:100%;max-width:{width:.0f}px;height:auto"', text, count=1)


def to_html(fig: Figure | None, caption: str) -> str:
    """`fig` as an HTML <figure> with its caption; nothing of no figure."""
    if fig is None:
        return ""
    return f"<figure>{to_svg(fig, caption)}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _shown(sample: dict, key: str, field: int) -> np.ndarray:
    """(T, x) or (T, x, y): one field, the middle slice of a 3D one, strided to MAX_CELLS per axis."""
    u = np.asarray(sample[key])[:, field]
    if u.ndim == 4:
        u = u[..., u.shape[-1] // 2]
    if u.ndim == 3 and list(sample["axes"]) == ["y", "x"]:
        u = u.swapaxes(1, 2)
    return u[(slice(None), *(slice(None, None, -(-n // MAX_CELLS)) for n in u.shape[1:]))]


def _extent(sample: dict) -> tuple[float, ...]:
    """Cell edges of the shown axes, x first, from the cell centres: x0, x1 [, y0, y1]."""
    ends: list[float] = []
    for _, axis in sorted(zip(sample["axes"], sample["coordinates"], strict=True),
                          key=lambda pair: pair[0])[:2]:
        half = (axis[1] - axis[0]) / 2 if len(axis) > 1 else 0.5
        ends += [float(axis[0] - half), float(axis[-1] + half)]
    return tuple(ends)


def field_errors(sample: dict) -> np.ndarray:
    """nRMSE of each field of one sample, sqrt(sum e^2 / sum u^2) over time and space -> (C,).

    As in ups.metrics.errors: inf where the prediction is not finite, NaN (undefined) where the truth is zero.
    """
    u_ref, u_pred = (np.asarray(sample[key], dtype=float) for key in ("u_ref", "u_pred"))
    axes = (0, *range(2, u_ref.ndim))
    energy, squared = (u_ref**2).sum(axes), ((u_pred - u_ref) ** 2).sum(axes)
    return np.where(np.isfinite(squared), np.sqrt(squared / np.where(energy > 0, energy, np.nan)), np.inf)


def _range(*arrays: np.ndarray) -> tuple[float, float]:
    values = np.concatenate([a[np.isfinite(a)].ravel() for a in arrays])
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _error_limit(error: np.ndarray) -> float:
    finite = np.abs(error[np.isfinite(error)])
    return float(finite.max()) if finite.size and finite.max() > 0 else 1.0


def pick_leads(num_frames: int, count: int) -> list[int]:
    """`count` frames spread evenly from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, num_frames - 1, count)})


def _bar(fig: Figure, image, axes, label: str) -> None:
    bar = fig.colorbar(image, ax=axes, label=label, fraction=0.05, pad=0.02, shrink=0.92)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_locator(MaxNLocator(4))


@_styled
def space_time(sample: dict, field: int) -> Figure:
    """1D: truth, prediction and error over space and time, and both as lines at several leads."""
    pred, ref = (_shown(sample, key, field).astype(float) for key in ("u_pred", "u_ref"))
    times, name, (x0, x1) = np.asarray(sample["times"], dtype=float), sample["fields"][field], _extent(sample)
    fig = _figure(9.2, 5.1)
    top, bottom = fig.subfigures(2, 1, height_ratios=(1.25, 1))
    fig.get_layout_engine().set(w_pad=0.08)
    axes = top.subplots(1, 3, sharey=True)
    half = (times[1] - times[0]) / 2 if len(times) > 1 else 0.5
    extent = (x0, x1, times[0] - half, times[-1] + half)
    low, high = _range(pred, ref)
    for ax, values, title in zip(axes, (ref, pred, pred - ref), ("truth", "prediction", "error"),
                                 strict=True):
        limits = {"vmin": low, "vmax": high, "cmap": FIELD_MAP}
        if title == "error":
            limit = _error_limit(pred - ref)
            limits = {"vmin": -limit, "vmax": limit, "cmap": ERROR_MAP}
        image = ax.imshow(values, origin="lower", aspect="auto", extent=extent, interpolation="none",
                          **limits)
        ax.set(title=title, xlabel="x")
        ax.xaxis.set_major_locator(MaxNLocator(4))
        if title != "truth":
            _bar(top, image, axes[:2] if title == "prediction" else ax,
                 name if title == "prediction" else f"error in {name}")
    axes[0].set_ylabel("lead time")
    leads = pick_leads(len(times), 4)
    x = np.asarray(sample["coordinates"][0])[::-(-np.asarray(sample["u_ref"]).shape[2] // MAX_CELLS)]
    for column, (ax,
                 lead) in enumerate(zip(np.atleast_1d(bottom.subplots(1, len(leads), sharey=True)), leads,
                                        strict=True)):
        ax.plot(x, ref[lead], color=INK, label="truth")
        ax.plot(x, pred[lead], color=color("operator"), linestyle=(0, (3, 1.5)), label="prediction")
        ax.set(title=lead_title(times[lead]), xlabel="x", ylabel=name if column == 0 else "")
        ax.grid(axis="y")
    bottom.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return fig


@_styled
def frames_2d(sample: dict, field: int) -> Figure:
    """2D: rows truth, prediction, error over columns of lead times; truth and prediction share one scale."""
    pred, ref = (_shown(sample, key, field).astype(float) for key in ("u_pred", "u_ref"))
    times, name, extent = np.asarray(sample["times"], dtype=float), sample["fields"][field], _extent(sample)
    leads = pick_leads(len(times), COLUMNS)
    aspect = (extent[3] - extent[2]) / (extent[1] - extent[0])
    fig = _figure(9.2, 0.5 + 3 * 1.42 * min(aspect, 2.0))
    axes = fig.subplots(3, len(leads), sharex=True, sharey=True, squeeze=False)
    low, high = _range(pred[leads], ref[leads])
    limit = _error_limit((pred - ref)[leads])
    rows = (("truth", ref, FIELD_MAP, low, high), ("prediction", pred, FIELD_MAP, low, high),
            ("error", pred - ref, ERROR_MAP, -limit, limit))
    for row, (title, values, cmap, vmin, vmax) in enumerate(rows):
        for ax, lead in zip(axes[row], leads, strict=True):
            image = ax.imshow(values[lead].T, origin="lower", extent=extent, interpolation="none", cmap=cmap,
                              vmin=vmin, vmax=vmax)
            ax.tick_params(labelsize=7)
            ax.xaxis.set_major_locator(MaxNLocator(2))
            ax.yaxis.set_major_locator(MaxNLocator(2))
            if row == 0:
                ax.set_title(lead_title(times[lead]))
        axes[row, 0].set_ylabel(f"{title}\ny")
        if row:
            _bar(fig, image, axes[0:2] if row == 1 else axes[2], name if row == 1 else f"error in {name}")
    for ax in axes[2]:
        ax.set_xlabel("x")
    return fig


@_styled
def steady(sample: dict, field: int) -> Figure:
    """Steady task: coefficient, truth, prediction and error side by side (lines instead of images in 1D)."""
    pred, ref = (_shown(sample, key, field)[0].astype(float) for key in ("u_pred", "u_ref"))
    inputs = {key: np.asarray(a) for key, a in sample.get("inputs", {}).items()}
    name, low, high, limit = sample["fields"][field], *_range(pred, ref), _error_limit(pred - ref)
    panels = [*((f"coefficient {key}", a, "cividis", *_range(a), key) for key, a in inputs.items()),
              ("truth", ref, FIELD_MAP, low, high, name), ("prediction", pred, FIELD_MAP, low, high, name),
              ("error", pred - ref, ERROR_MAP, -limit, limit, f"error in {name}")]
    fig = _figure(9.2, 2.9, "compressed")
    axes = fig.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, values, cmap, vmin, vmax, label) in zip(axes, panels, strict=True):
        if values.ndim == 1:
            ax.plot(np.linspace(*_extent(sample), len(values)), values, color=color("operator"))
            ax.set(title=title, xlabel="x", ylabel=label)
            continue
        values = values[..., values.shape[-1] // 2] if values.ndim == 3 else values
        image = ax.imshow(values.T, origin="lower", extent=_extent(sample), interpolation="none", cmap=cmap,
                          vmin=vmin, vmax=vmax)
        ax.set(title=title, xlabel="x", ylabel="y" if ax is axes[0] else "")
        ax.tick_params(labelsize=7)
        fig.colorbar(image, ax=ax, label=label, orientation="horizontal",
                     fraction=0.06).outline.set_visible(False)
    return fig


def sample_figure(sample: dict, field: int) -> Figure:
    """The figure that fits the sample: steady, 1D over time, or frames of a 2D (or sliced 3D) field."""
    if len(sample["times"]) == 1:
        return steady(sample, field)
    return space_time(sample, field) if np.asarray(sample["u_ref"]).ndim == 3 else frames_2d(sample, field)


def _floats(values: list) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], dtype=float)


@_styled
def error_growth(models: dict, times: list[float]) -> Figure:
    """nRMSE per lead time of every model with its 95 % interval, logarithmic."""
    fig = _figure(7.4, 3.1)
    ax = fig.subplots()
    smallest = []
    for name, row in models.items():
        values = _floats(row["error_growth"])
        if not (values > 0).any():
            continue
        if name != "persistence":
            smallest.append(np.nanmin(values[values > 0]))
        ax.plot(times, values, label=NAMES.get(name, name), **line(name, len(times)))
        if "error_growth_low" in row:
            ax.fill_between(times, _floats(row["error_growth_low"]), _floats(row["error_growth_high"]),
                            color=color(name), alpha=0.22, linewidth=0)
    ax.set(xlabel="lead time", ylabel="nRMSE", yscale="log", title="error growth over the rollout")
    ax.grid(axis="y")
    # a periodic truth passes through its first frame again; persistence would stretch the axis there
    if smallest:
        ax.set_ylim(bottom=0.4 * min(smallest))
        ax.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return fig


@_styled
def spectra(spectrum: dict, field: int, name: str, times: list[float], max_shell: int) -> Figure:
    """Energy spectra of truth and models at the kept leads, up to the Nyquist shell."""
    leads, wave = spectrum["leads"], _floats(spectrum["wavenumber"])
    fig = _figure(9.2 if len(leads) > 1 else 4.6, 2.9)
    shown = (wave >= 1) & (wave <= max_shell)
    truth = np.stack([_floats(lead[field]) for lead in spectrum["truth"]])[:, shown]
    positive = truth[truth > 0]
    for column, (ax,
                 lead) in enumerate(zip(fig.subplots(1, len(leads), sharey=True, squeeze=False)[0], leads,
                                        strict=True)):
        for key in [key for key in spectrum if key not in ("leads", "wavenumber")]:
            style = {"linewidth": 2.4, "alpha": 0.75} if key == "truth" else {}
            ax.loglog(wave[shown], _floats(spectrum[key][column][field])[shown], label=NAMES.get(key, key),
                      **line(key, int(shown.sum())), **style)
        ax.set(xlabel="wave number (cycles per box)", ylabel=f"energy of {name}" if column == 0 else "",
               title=lead_title(times[lead]) if len(times) > 1 else "")
        if positive.size:  # float32 fields carry no information below about 1e-14 of their largest energy
            ax.set_ylim(max(positive.min() / 10, positive.max() * 1e-14), positive.max() * 4)
        ax.grid(axis="y")
        if column == 0:
            ax.legend(fontsize=8, loc="lower left")
    return fig


@_styled
def training(history: list[dict]) -> Figure:
    """Losses, validation scores and the learning rate over the steps, from rows of metrics.jsonl (see
    ups.training.run, ups.training.track)."""
    fig = _figure(9.2, 3.8)
    panels = (("training loss", "train/loss"), ("validation", "validation/"),
              ("learning rate / peak", "train/lr_factor"))
    for ax, (title, prefix) in zip(fig.subplots(1, 3), panels, strict=True):
        names, looks = sorted({name for row in history for name in row if name.startswith(prefix)}), {}
        for name in names:
            rows = [row for row in history if name in row]
            label = name.split("/", 1)[1]
            # a task keeps its colour and marker; its base alone is dashed
            group = label.split("/")[0]
            shade, _, marker = looks.setdefault(group, CYCLE[len(looks) % len(CYCLE)])
            dash = (0, (3, 1.5)) if label.endswith("/base") else "-"
            style = line((shade, dash, marker if prefix == "validation/" else ""), len(rows))
            ax.plot([row["step"] for row in rows], _floats([row[name] for row in rows]),
                    label=label.replace("/", ", "), linewidth=1.1, **style)
        ax.set(title=title, xlabel="step (optimizer updates)",
               yscale="linear" if prefix == "train/lr_factor" else "log")
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.grid(axis="y")
        if len(names) > 1:
            ax.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, handlelength=3)
    return fig
