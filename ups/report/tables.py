"""Numbers, intervals and tables as the report writes them."""

import html
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ups.common.formatting import number
from ups.metrics.intervals import Metric

COSTS = (  # what a model is measured to cost
    Metric(
        "evaluations_per_state",
        "evaluations per state",
        "network calls per predicted state and member; of ensembles the operator aside",
        best=None,
    ),
    Metric(
        "networks_per_state",
        "networks per state",
        "calls of every network per predicted state and member: of the one that draws, of the "
        "operator, and of the Gaussian that gives mean and scale by its share of weights",
        best=None,
    ),
    Metric(
        "operations_per_state",
        "operations per state",
        "floating-point operations of matrix products and convolutions per predicted state and member",
        best=None,
    ),
    Metric(
        "ms_per_state",
        "ms per state",
        "wall-clock time per predicted state and member, operator and decoding included",
        best=None,
    ),
)
NAMES = {  # of the models, in the order in which they are shown
    "operator": "UPS operator",
    "base": "base alone",
    "dressed": "+ noise",
    "dressed_conditional": "+ conditional noise",
    "dressed_waves": "+ conditional waves",
    "dressed_resampled": "+ drawn residual",
    "linear_posterior": "linear posterior, pushed",
    "unconditional": "any solution",
    "dressed_leads": "+ errors by lead",
    "analogs": "+ errors of analogs",
    "normal_leads": "+ noise by lead",
    "normal_analogs": "+ noise of analogs",
    "exact": "exact draws",
    "bayes_mean": "mean of exact draws",
    "rival": "rival, no teacher",
    "corrector": "corrector",
    "student_1": "student, 1 step",
    "student_2": "student, 2 steps",
    "fno": "FNO",
    "unet": "U-Net",
    "persistence": "persistence",
    "climatology": "climatology",
    "seasonal_climatology": "seasonal climatology",
    "train_mean": "training mean",
    "codec_floor": "codec floor",
}
COUNTS = ("zero_frames", "nonfinite_trajectories")  # shown where they are not zero


def is_interval(value: Any) -> bool:
    return isinstance(value, dict) and {"value", "low", "high"} <= set(value)


def value_of(found: Any) -> float | None:
    """The number of a row, with or without an interval."""
    return found["value"] if is_interval(found) else found


def label(model: str) -> str:
    return NAMES.get(model, model)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def ordered(models: Collection[str]) -> list[str]:
    """Known models in the order of NAMES, then any others."""
    return [*[name for name in NAMES if name in models], *[name for name in models if name not in NAMES]]


def cell(value: Any) -> str:
    """A number as HTML, its interval below it."""
    if not is_interval(value):
        return number(value)
    text = f"<b>{number(value['value'])}</b>"
    return (
        text
        if value["low"] is None
        else text + f"<small>{number(value['low'])} – {number(value['high'])}</small>"
    )


def metric_name(metric: Metric) -> str:
    """Its label as HTML, with what it means."""
    return f'<span title="{html.escape(metric.meaning)}">{html.escape(metric.label)}</span>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already. A narrow page shows each row as a card, where every cell names its column."""
    names = [html.escape(html.unescape(re.sub(r"<[^>]+>", "", name)), quote=True) for name in head]
    lines = []
    for first, *others in rows:
        named = zip(names[1:], others, strict=True)
        cells = "".join(f'<td data-name="{name}">{content}</td>' for name, content in named)
        lines.append(f"<tr><th scope=row>{first}</th>{cells}</tr>")
    top = "".join(f"<th scope=col>{name}</th>" for name in head)
    return f"<div class=scroll><table><tr>{top}</tr>{''.join(lines)}</table></div>"
