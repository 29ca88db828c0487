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
# Model -> label, colour, dash and marker, in the order of the tables: no two lines differ by colour alone.
# Colours after Okabe and Ito (2008), distinct for the colour-blind (tested); mid-tones, readable on white and
# on black. INK is replaced by the page's colour in SVG.
INK = "#1f2933"
MODELS = {
    "truth": ("truth", INK, "-", ""),
    "operator": ("UPS operator", "#0072b2", "-", "o"),
    "base": ("base alone", "#d55e00", (0, (5, 2)), "s"),
    "dressed": ("+ noise", "#8a939c", (0, (4, 2)), "x"),
    "dressed_conditional": ("+ conditional noise", "#8c6d46", (0, (4, 2)), "+"),
    "waves": ("+ Gaussian waves", "#8c6d46", (0, (1, 2)), "x"),
    "dressed_resampled": ("+ drawn residual", "#7a8a2e", (0, (4, 2)), "1"),
    "linear_posterior": ("linear posterior, pushed", "#8a939c", "-", ""),
    "unconditional": ("any solution", "#8a939c", "-", ""),
    "analogs": ("+ errors of analogs", "#d55e00", (0, (2, 1)), "3"),
    "starts": ("noisy starts", "#0072b2", (0, (2, 1)), "2"),
    "exact": ("exact draws", INK, (0, (1, 1)), "*"),
    "bayes_mean": ("mean of exact draws", INK, (0, (4, 1)), "_"),
    "scoring": ("trained by scores", "#e69f00", (0, (7, 1.5, 1.5, 1.5, 1.5, 1.5)), "P"),
    "corrector": ("corrector", "#e377c2", "-", "D"),
    "student_1": ("student, 1 step", "#009e73", (0, (7, 1.5, 1.5, 1.5)), "^"),
    "student_2": ("student, 2 steps", "#56b4e9", (0, (3, 1)), "v"),
    "fno": ("FNO", "#e69f00", (0, (3, 1)), "P"),
    "unet": ("U-Net", "#8c6d46", (0, (7, 1.5, 1.5, 1.5)), "X"),
    "persistence": ("persistence", "#8a939c", (0, (4, 2)), ""),
    "climatology": ("climatology", "#8a939c", (0, (1, 2)), ""),
    "seasonal_climatology": ("seasonal climatology", "#8a939c", (0, (6, 1, 1, 1)), ""),
    "train_mean": ("training mean", "#8a939c", (0, (4, 2)), ""),
    "codec_floor": ("codec floor", "#7a8a2e", (0, (1, 1.5)), ""),
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
    return MODELS[model][0] if model in MODELS else model


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(map(markdown, line))} |" for line in (head, ["---"] * len(head), *rows)]


def ordered(models: Collection[str]) -> list[str]:
    """Known models in the order of MODELS, then any others."""
    return [*[name for name in MODELS if name in models], *[name for name in models if name not in MODELS]]


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
