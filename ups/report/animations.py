"""Animations of the report: a rollout or some members of an ensemble beside the truth, with a button and a
slider. The script in report.html moves them; nothing is loaded from outside. Samples: ups.report.figures and
figures_ensemble."""

import json
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from ups.report.drawing import (
    FIELD_MAP,
    MAX_CELLS,
    SPREAD_MAP,
    UNSEEN,
    axis_labels,
    colours,
    compared,
    data_uri,
    pick_leads,
    plotted,
)
from ups.report.templates import render

MAX_FRAMES = 24
NUM_MEMBERS = {1: 6, 2: 3}  # lines over each other in 1D, maps beside each other in 2D


def sprite(frames: np.ndarray, cmap: Any, vmin: float, vmax: float) -> str:
    """Frames (T, x, y) below one another in one palette PNG, as a data URI. Cells that are NaN in all frames
    are grey, other values that are not finite magenta."""
    known, masked = np.isfinite(frames), np.isnan(frames).all(0)
    scaled = np.clip((np.where(known, frames, vmin) - vmin) / (vmax - vmin) * 253, 0, 253)
    index = np.where(known, scaled.round(), 254 + (~masked | masked.all())).astype(np.uint8)
    image = Image.fromarray(np.concatenate([frame.T[::-1] for frame in index]))
    palette = (cmap(np.linspace(0, 1, 254))[:, :3] * 255).round().astype(np.uint8)
    image.putpalette(palette.tobytes() + bytes.fromhex(UNSEEN[1:]) + bytes((255, 0, 255)))
    return data_uri(image)


def _player(times: np.ndarray, lines: list[list[list]], **values: Any) -> Markup:
    """A player's HTML. lines: for each polyline its heights, frame by frame; none for maps."""
    leads = [f"{float(time):.3g}" for time in times]
    data = json.dumps({"times": leads, "lines": lines}, separators=(",", ":"))
    return render("player.html", times=leads, lines=lines, data=data, **values)


def _lines(
    times: np.ndarray, sample: dict, field: int, ref: np.ndarray, others: list[tuple[str, np.ndarray]]
) -> Markup:
    """Lines (T, x) over x at heights from 0 to 999: others, as (class, values), below the truth."""
    low, high = (colours(FIELD_MAP, ref)[end] for end in ("vmin", "vmax"))
    margin = 0.1 * (high - low)
    drawn = [*others, ("truth", ref)]
    scaled = [np.clip((u - low + margin) / (high - low + 2 * margin) * 999, -99, 1099) for _, u in drawn]
    rows = [[[round(v) if np.isfinite(v) else None for v in row] for row in u.tolist()] for u in scaled]
    return _player(
        times,
        rows,
        num_cells=ref.shape[1],
        name=sample["fields"][field],
        across=axis_labels(sample)[0],
        kinds=[kind for kind, _ in drawn],
        legend=list(dict.fromkeys(["truth", *dict(others)])),
        range=f"{low - margin:.3g} to {high + margin:.3g}",
    )


def _fields(times: np.ndarray, *rows: list[tuple[str, np.ndarray, dict]]) -> Markup:
    """Maps (T, x, y) side by side in rows: (title, values, colours)."""
    some = (..., *[slice(None, None, -(-max(rows[0][0][1].shape[1:]) // (MAX_CELLS // 2)))] * 2)
    return _player(
        times,
        [],
        rows=[
            [
                {
                    "title": title,
                    "size": u[some].shape[1:],
                    "image": sprite(u[some], **scale),
                    "range": f"{scale['vmin']:.3g} to {scale['vmax']:.3g}",
                }
                for title, u, scale in panels
            ]
            for panels in rows
        ],
    )


def player(sample: dict, field: int) -> Markup:
    """HTML: truth and prediction of one field; in 2D also the error."""
    frames = pick_leads(len(sample["times"]), MAX_FRAMES)
    ref, pred = (plotted(sample, sample[key], field)[frames] for key in ("u_ref", "u_pred"))
    times = np.asarray(sample["times"])[frames]
    if ref.ndim == 2:
        return _lines(times, sample, field, ref, [("prediction", pred)])
    return _fields(times, compared(ref, pred))


def members_player(sample: dict, model: str, field: int) -> Markup:
    """HTML: truth and the first members of a model's ensemble, beside exact draws if there are any; in 2D
    also the spread of all members."""
    frames = pick_leads(len(sample["times"]), MAX_FRAMES)
    ref = plotted(sample, sample["u_ref"], field)[frames]
    names = {model: "member"} | ({"exact": "exact draw"} if "exact" in sample["members"] else {})
    ensembles = {
        title: plotted(sample, sample["members"][name], field)[:, frames] for name, title in names.items()
    }
    times, num = np.asarray(sample["times"])[frames], NUM_MEMBERS[ref.ndim - 1]
    if ref.ndim == 2:
        return _lines(
            times, sample, field, ref, [(title, u) for title, x in ensembles.items() for u in x[:num]]
        )
    scale = colours(FIELD_MAP, ref, *(x[:num] for x in ensembles.values()))
    spreads = {title: x.std(0, ddof=1) for title, x in ensembles.items() if len(x) > 1}
    rows = [
        [
            ("truth", ref, scale),
            *((f"{title} {i + 1}", u, scale) for i, u in enumerate(x[:num])),
            *(
                [("spread", spreads[title], colours(SPREAD_MAP, *spreads.values()))]
                if title in spreads
                else []
            ),
        ]
        for title, x in ensembles.items()
    ]
    return _fields(times, *rows)
