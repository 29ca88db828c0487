"""The frame player of the report: truth and prediction frame by frame, as HTML without requests."""

from __future__ import annotations

import base64
import html
import io
import json

import matplotlib
import numpy as np
from PIL import Image

from ups.evaluation.figures import ERROR_MAP, FIELD_MAP, MAX_CELLS, _error_limit, _range, _shown, pick_leads

MAX_FRAMES = 24


def _sprite(frames: np.ndarray, low: float, high: float, cmap: str) -> str:
    """Frames (T, x, y) below one another in one palette PNG, as a data URI; what is not finite is magenta."""
    scaled = np.clip((np.where(np.isfinite(frames), frames, low) - low) / (high - low) * 254, 0, 254)
    index = np.where(np.isfinite(frames), scaled.round(), 255).astype(np.uint8)
    image = Image.fromarray(np.concatenate([frame.T[::-1] for frame in index]))
    colors = (matplotlib.colormaps[cmap](np.linspace(0, 1, 255))[:, :3] * 255).round().astype(np.uint8)
    image.putpalette(colors.tobytes() + bytes((255, 0, 255)))
    out = io.BytesIO()
    image.save(out, "png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _line_player(ref: np.ndarray, pred: np.ndarray, name: str) -> tuple[str, dict]:
    low, high = _range(ref)
    margin = 0.1 * (high - low)
    scaled = [np.clip((u - low + margin) / (high - low + 2 * margin) * 999, -99, 1099) for u in (ref, pred)]
    rows = [[[round(v) if np.isfinite(v) else None for v in row] for row in u.tolist()] for u in scaled]
    body = (f'<svg viewBox="0 0 {ref.shape[1] - 1} 999" preserveAspectRatio="none" role="img" '
            f'aria-label="rollout of {name}"><polyline class="truth"/><polyline class="pred"/></svg><p '
            f'class="note">{name} over x: <b class="truth">truth</b>, <b class="pred">prediction</b>; '
            f'vertical range {low - margin:.3g} to {high + margin:.3g}</p>')
    return body, {"truth": rows[0], "pred": rows[1]}


def _field_player(ref: np.ndarray, pred: np.ndarray) -> str:
    stride = -(-max(ref.shape[1:]) // (MAX_CELLS // 2))
    pred, ref = pred[:, ::stride, ::stride], ref[:, ::stride, ::stride]
    (low, high), limit = _range(ref, pred), _error_limit(pred - ref)
    panels = (("truth", ref, low, high, FIELD_MAP), ("prediction", pred, low, high, FIELD_MAP),
              ("error", pred - ref, -limit, limit, ERROR_MAP))
    return '<div class="panels">' + "".join(
        f'<figure><canvas width="{u.shape[1]}" height="{u.shape[2]}"></canvas><img alt="" '
        f'src="{_sprite(u, vmin, vmax, cmap)}">'
        f"<figcaption>{title} <span>{vmin:.3g} to {vmax:.3g}</span></figcaption></figure>"
        for title, u, vmin, vmax, cmap in panels) + "</div>"


def player(sample: dict, field: int) -> str:
    """HTML of a small animation: truth and prediction (2D: and error) frame by frame, a button and a slider,
    no requests."""
    pred, ref = (_shown(sample, key, field).astype(float) for key in ("u_pred", "u_ref"))
    frames = pick_leads(len(ref), MAX_FRAMES)
    pred, ref, data = pred[frames], ref[frames], {"times": [f"{float(sample['times'][i]):.3g}"
                                                            for i in frames]}
    if ref.ndim == 2:
        body, lines = _line_player(ref, pred, html.escape(sample["fields"][field]))
        kind, data = "line", data | lines
    else:
        kind, body = "field", _field_player(ref, pred)
    return (f'<div class="player {kind}">{body}<div class="controls"><button type="button" aria-label="play '
            f'or pause">&#9654;</button><input type="range" min="0" max="{len(frames) - 1}" value="0" '
            f'aria-label="frame"><output>lead {data["times"][0]}</output></div><script '
            f'type="application/json">{json.dumps(data, separators=(",", ":"))}</script></div>')
