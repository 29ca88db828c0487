"""Small animations of the report, frame by frame, with a button and a slider and without requests: a rollout
beside the truth, and members of an ensemble beside it. Samples as in ups.report.figures and
figures_ensemble; what moves them is the script of report.html."""

import html
import json
from typing import Any

import numpy as np
from PIL import Image

from ups.report.figures import (
    FIELD_MAP,
    MAX_CELLS,
    SPREAD_MAP,
    UNSEEN,
    axis_labels,
    colours,
    compared,
    data_uri,
    pick_leads,
    shown,
)

MAX_FRAMES = 24
NUM_MEMBERS = {1: 6, 2: 3}  # by axes shown: lines over each other, maps beside each other


def sprite(frames: np.ndarray, cmap: Any, vmin: float, vmax: float) -> str:
    """Frames (T, x, y) below one another in one palette PNG, as a data URI. Cells without a value in any
    frame are grey, what else is not finite is magenta."""
    known, masked = np.isfinite(frames), np.isnan(frames).all(0)
    scaled = np.clip((np.where(known, frames, vmin) - vmin) / (vmax - vmin) * 253, 0, 253)
    index = np.where(known, scaled.round(), 254 + (~masked | masked.all())).astype(np.uint8)
    image = Image.fromarray(np.concatenate([frame.T[::-1] for frame in index]))
    palette = (cmap(np.linspace(0, 1, 254))[:, :3] * 255).round().astype(np.uint8)
    image.putpalette(palette.tobytes() + bytes.fromhex(UNSEEN[1:]) + bytes((255, 0, 255)))
    return data_uri(image)


def _player(kind: str, body: str, times: np.ndarray, lines: list[list[list]]) -> str:
    """A player's HTML: lines, one list of rows of heights for each polyline of the body."""
    data = {"times": [f"{float(time):.3g}" for time in times], "lines": lines}
    return (
        f'<div class="player {kind}">{body}<div class="controls"><button type="button" aria-label="play '
        f'or pause">&#9654;</button><input type="range" min="0" max="{len(times) - 1}" value="0" '
        f'aria-label="frame"><output>lead {data["times"][0]}</output></div><script '
        f'type="application/json">{json.dumps(data, separators=(",", ":"))}</script></div>'
    )


def _lines(
    times: np.ndarray, sample: dict, field: int, ref: np.ndarray, others: list[tuple[str, np.ndarray]]
) -> str:
    """Lines (T, x) over x: the truth, below it the others with the class of each, heights 0 to 999."""
    name, across = html.escape(sample["fields"][field]), html.escape(axis_labels(sample)[0])
    low, high = (colours(FIELD_MAP, ref)[end] for end in ("vmin", "vmax"))
    margin = 0.1 * (high - low)
    drawn = [*others, ("truth", ref)]
    scaled = [np.clip((u - low + margin) / (high - low + 2 * margin) * 999, -99, 1099) for _, u in drawn]
    rows = [[[round(v) if np.isfinite(v) else None for v in row] for row in u.tolist()] for u in scaled]
    polylines = "".join(f'<polyline class="{kind}"/>' for kind, _ in drawn)
    legend = ", ".join(f'<b class="{kind}">{kind}</b>' for kind in dict.fromkeys(["truth", *dict(others)]))
    body = (
        f'<svg viewBox="0 0 {ref.shape[1] - 1} 999" preserveAspectRatio="none" role="img" '
        f'aria-label="rollout of {name}">{polylines}'
        f'</svg><p class="note">{name} over {across}: {legend}; vertical range {low - margin:.3g} to '
        f"{high + margin:.3g}</p>"
    )
    return _player("line", body, times, rows)


def _fields(times: np.ndarray, panels: list[tuple[str, np.ndarray, dict]]) -> str:
    """Maps (T, x, y) side by side: (title, values, colours)."""
    some = (..., *[slice(None, None, -(-max(panels[0][1].shape[1:]) // (MAX_CELLS // 2)))] * 2)
    panels = [(title, u[some], scale) for title, u, scale in panels]
    body = "".join(
        f'<figure><canvas width="{u.shape[1]}" height="{u.shape[2]}"></canvas><img alt="" '
        f'src="{sprite(u, **scale)}"><figcaption>{title} <span>{scale["vmin"]:.3g} to '
        f"{scale['vmax']:.3g}</span></figcaption></figure>"
        for title, u, scale in panels
    )
    return _player("field", f'<div class="panels">{body}</div>', times, [])


def player(sample: dict, field: int) -> str:
    """HTML: truth and prediction of one field, of a 2D one the error too."""
    frames = pick_leads(len(sample["times"]), MAX_FRAMES)
    ref, pred = (shown(sample, sample[key], field)[frames] for key in ("u_ref", "u_pred"))
    times = np.asarray(sample["times"])[frames]
    if ref.ndim == 2:
        return _lines(times, sample, field, ref, [("prediction", pred)])
    return _fields(times, compared(ref, pred))


def members_player(sample: dict, model: str, field: int) -> str:
    """HTML: truth and some members of a model's ensemble, of a 2D field the spread of all members too."""
    frames = pick_leads(len(sample["times"]), MAX_FRAMES)
    ref = shown(sample, sample["u_ref"], field)[frames]
    members = shown(sample, sample["members"][model], field)[:, frames]
    times = np.asarray(sample["times"])[frames]
    some = members[: NUM_MEMBERS[ref.ndim - 1]]
    if ref.ndim == 2:
        return _lines(times, sample, field, ref, [("member", u) for u in some])
    scale = colours(FIELD_MAP, ref, some)
    panels = [("truth", ref, scale), *((f"member {i + 1}", u, scale) for i, u in enumerate(some))]
    if len(members) > 1:
        spread = members.std(0, ddof=1)
        panels.append(("spread", spread, colours(SPREAD_MAP, spread)))
    return _fields(times, panels)
