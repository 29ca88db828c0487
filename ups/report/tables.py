"""Names of models, columns of metrics and rows of tables, as the report and the model cards have them, and
their templates, which jinja2 fills in."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from ups.common.text import markdown, number
from ups.metrics.intervals import Metric
from ups.results import Entry

COSTS = (
    Metric(
        "evaluations_per_state",
        "evaluations per state",
        "network calls per predicted state and member, in ensembles without the operator",
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
NAMES = {  # of the models, in the order of the tables
    "operator": "UPS operator",
    "base": "base alone",
    "dressed": "+ noise",
    "dressed_conditional": "+ conditional noise",
    "waves": "+ Gaussian waves",
    "dressed_resampled": "+ drawn residual",
    "linear_posterior": "linear posterior, pushed",
    "unconditional": "any solution",
    "analogs": "+ errors of analogs",
    "starts": "noisy starts",
    "exact": "exact draws",
    "bayes_mean": "mean of exact draws",
    "scoring": "trained by scores",
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
START_IN_WORDS = {  # sign of start_frames: not tried, no better on validation, used
    -1: "",
    0: "; its start is its last frame, as on validation one that is estimated from more frames is no better",
    1: "; its start is estimated from {start_frames} frames, which is better on validation",
}
NOISY_START = "; noise of measurement explains its errors, so members of ensembles differ in their start"
COUNTS = ("zero_frames", "nonfinite_trajectories")  # a row of the table only if one is not zero


def is_interval(value: Any) -> bool:
    return isinstance(value, dict) and {"value", "low", "high"} <= set(value)


def value_of(found: Any) -> float | None:
    """The number of a row, with or without an interval."""
    return found["value"] if is_interval(found) else found


def label(model: str) -> str:
    return NAMES.get(model, model)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(map(markdown, line))} |" for line in (head, ["---"] * len(head), *rows)]


def ordered(models: Collection[str]) -> list[str]:
    """Known models in the order of NAMES, then any others."""
    return [*[name for name in NAMES if name in models], *[name for name in models if name not in NAMES]]


class Row(NamedTuple):
    """One row of a table in HTML: its name, the values of the other columns, and which of them are best."""

    name: str | Metric
    values: Sequence[Any]
    best: Collection[int] = ()


def best_of(values: Iterable[Any], metric: Metric) -> int | None:
    """Position of the best value: the lowest ("low"), or the closest to that of a calibrated ensemble. None
    if the metric has no best or if all values are equal."""
    found = {i: value_of(value) for i, value in enumerate(values)}
    distance = {
        i: value if metric.best == "low" else abs(value - metric.best)
        for i, value in found.items()
        if None not in (metric.best, value)
    }
    return min(distance, key=distance.get) if len(set(distance.values())) > 1 else None


def metrics_in(
    metrics: Iterable[Metric], entry: Entry, models: Iterable[str], cases: Iterable[str] = ("",)
) -> list[Metric]:
    """The metrics that any of the models, or ratios, has in any case; counts only if one is not zero."""
    places = [(model, case) for case in cases for model in models]
    return [
        metric
        for metric in metrics
        if any(
            entry.number(model, metric.name, case) not in ((None, 0) if metric.name in COUNTS else (None,))
            for model, case in places
        )
    ]


def noise_in_words(task: Entry) -> str:
    """The noise of the data, the operator's error with and without that of the truth, and its start."""
    noise: Mapping[str, Any] = task.facts["noise"]
    fields = ", ".join(
        f"{task.number('', f'fraction/{name}', 'noise'):.2%} of {name} "
        f"(standard deviation {number(task.number('', f'sigma/{name}', 'noise'))})"
        for name in noise["fields"]
    )
    measured, beyond = map(number, task.listed("operator", "nrmse", "noise")["value"])
    return (
        f"the data have white noise: {fields}; the operator's pooled nRMSE is {measured} as measured and "
        f"{beyond} without the noise of the truth (the noise of its first frames is part of it)"
        + START_IN_WORDS[min(1, noise.get("start_frames", -1))].format(**noise)
        + NOISY_START * noise.get("is_deterministic", False)
    )


# ---- templates

ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
ENVIRONMENT.filters |= {"number": number, "value_of": value_of, "label": label}
ENVIRONMENT.tests |= {"interval": is_interval, "metric": lambda value: isinstance(value, Metric)}


IN_MARKDOWN = ENVIRONMENT.overlay(
    finalize=lambda value: value if isinstance(value, Markup) else markdown(value)
)


def render(template: str, **values: Any) -> str:
    """The filled-in template, an .html or .md file. All values are escaped unless they are Markup, as is the
    HTML."""
    if template.endswith(".md"):
        return IN_MARKDOWN.get_template(template).render(values)
    return Markup(ENVIRONMENT.get_template(template).render(values))
