"""The sections of the report on one task, one ensemble forecast and one steady prior, as HTML.

An entry is one of ups.results; the form of a sample is in ups.report.figures and figures_ensemble. Metrics,
figures and models that an entry does not have are not shown; null is a dash.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ups.common.files import DamagedError
from ups.common.place import make_target
from ups.common.text import file_stem, number
from ups.evaluation.claims import worst
from ups.generative.validation import validated_samplers
from ups.metrics.ensembles import ENSEMBLES
from ups.metrics.errors import ERRORS
from ups.metrics.intervals import Metric
from ups.models.band import MIN_ROWS
from ups.report import drawing, figures, figures_ensemble
from ups.report.tables import COSTS, Row, best_of, label, metrics_in, noise_in_words, ordered, render
from ups.results import OBSERVED, Entry, Interval
from ups.select import Decision, select_sampler
from ups.tasks import in_unit
from ups.training.artifact import read_stage

TRAINED = Metric("train_seconds", "training time, s", "on this task alone, by make bench")
ROWS = [metric for metric in (*ERRORS, TRAINED, *COSTS) if metric.label]
OVER_EXACT = Metric("crps_over_exact", "CRPS over exact", "over the CRPS of exact draws; at best 1")
ENSEMBLE_ROWS = [OVER_EXACT, *[metric for metric in (*ENSEMBLES, *COSTS) if metric.label]]
STEADY_ROWS = [  # the first two if the exact posterior is known
    Metric("distance", "distance to exact", "energy distance to the exact posterior, in units of its spread"),
    Metric("log_trace", "variance over exact", "variance of log u over that of the exact one", best=1.0),
    *ENSEMBLE_ROWS,
]
CLIMATE = {  # family of figures (ups/metrics/climate.py): its figure in words
    "late mean": "mean",
    "late variance": "variance, ratio",
    "late spectrum": "energy in the worst octave, ratio",
    "late slope": "steepest gradient, ratio",
    "late memory": "correlation in time",
    "late start": "correlation with the start",
}
TRUST = {
    "inside": "inside the band",
    "cells_inside": "inside the band of cells",
    "within_2": "stated error within a factor of 2",
    "doubtful": "doubtful",
    "refused": "refused",
    "derivative": "derivative, cosine with the solver's",
}
DECIDED = ("question", "chosen", "its score", "others", "rule", "trajectories")
NUM_OTHERS = 4  # in a row of the table of decisions
GROWTH = (("nRMSE over the rollout", "error_growth", "log"),)


# ---- tables


def _model_table(entry: Entry, metrics: list[Metric], is_marked: bool = False) -> dict[str, Any]:
    """Metrics in rows, models in columns; the best of each row is marked."""
    names = ordered(entry.models())
    rows = []
    for metric in metrics_in(metrics, entry, names):
        values = [entry.value(name, metric.name) for name in names]
        rows.append(Row(metric, values, {best_of(values, metric)} if is_marked else ()))
    return {"head": ["", *map(label, names)], "rows": rows}


def _comparison_table(entry: Entry) -> dict[str, Any]:
    """Paired ratios; below 1 the first model is better. {} if there are none."""
    metrics = metrics_in(ENSEMBLE_ROWS, entry, entry.ratios())
    rows = [Row(name, [entry.value(name, metric.name) for metric in metrics]) for name in entry.ratios()]
    return {"head": ["ratio, paired", *metrics], "rows": rows} if rows else {}


def climate_of(entry: Entry, model: str) -> list[Interval | None]:
    """The worst figure of every family of CLIMATE, None for none; those of logarithms as a ratio."""
    found = [worst(entry.listed(model, f"likeness/{family}", "long"), 0.0) for family in CLIMATE]
    return [
        {end: math.exp(number) for end, number in one.items()}
        if one and None not in one.values() and words.endswith("ratio")
        else one
        for one, words in zip(found, CLIMATE.values(), strict=True)
    ]


def _climate_table(entry: Entry) -> dict[str, Any]:
    """Long rollouts beyond the scored leads less exact samples or the data, a row per model; {} if there are
    none."""
    rows = [
        Row(label(model), [*found, entry.number(model, "blown_up", "long")])
        for model in ordered(entry.models("long"))
        if any(found := climate_of(entry, model))
    ]
    until = f"{entry.number('', 'frames', 'long')} frames, less the truth's"
    head = [until, *CLIMATE.values(), "members blown up"]
    return {"head": head, "rows": rows} if rows else {}


def _steady_table(entry: Entry) -> dict[str, Any]:
    """Cases and models in rows, metrics in columns; the best model of each case is marked."""
    cases = {case: ordered(entry.models(case)) for case in entry.cases(OBSERVED)}
    every = dict.fromkeys(model for models in cases.values() for model in models)
    metrics, rows = metrics_in(STEADY_ROWS, entry, every, cases), []
    for case, models in cases.items():
        values = [[entry.value(model, metric.name, case) for metric in metrics] for model in models]
        best = [
            best_of(column, metric) for column, metric in zip(zip(*values, strict=True), metrics, strict=True)
        ]
        for index, (model, row) in enumerate(zip(models, values, strict=True)):
            name = figures_ensemble.case_name(case) if index == 0 else ""
            marked = [column for column, place in enumerate(best, 1) if place == index]
            rows.append(Row(name, [label(model), *row], marked))
    return {"head": ["observed", "model", *metrics], "rows": rows}


# ---- sections


def task_section(entry: Entry, samples: list[dict], folder: Path) -> Markup:
    """Facts, rollouts of the samples, error over lead time and metrics of one task. Its figures are
    also written as PNG files to `folder`."""

    def draw(figure: Figure | None, caption: str, file: str) -> Markup:
        return drawing.to_html(figure, caption, folder / f"{file_stem(file)}.png")

    task = entry.facts
    is_rollout = len(task["times"]) > 1
    lead = in_unit("lead time", task.get("units", {}).get("time"))
    return render(
        "task.html",
        name=entry.name,
        task=task,
        facts=list(_facts(entry)),
        figure=draw,
        is_rollout=is_rollout,
        samples=[_shown_sample(sample, rank) for rank, sample in enumerate(samples)],
        growth=figures.by_lead(entry, GROWTH, entry.models(), lead) if is_rollout else None,
        **_model_table(entry, ROWS),
    )


def _shown_sample(sample: dict, rank: int) -> dict[str, Any]:
    """A trajectory with the figures of its worst fields: two of the first trajectory, one of the others."""
    errors = figures.field_errors(sample)
    worst, *others = np.argsort(-np.nan_to_num(errors, nan=-1.0, posinf=np.inf))  # undefined last
    return {
        "label": sample["label"],
        "parameter": sample.get("parameter"),
        "fields": [
            {
                "name": sample["fields"][field],
                "error": float(errors[field]),
                "figure": figures.sample_figure(sample, int(field)),
            }
            for field in sorted([worst, *others[: 1 - rank]])
        ],
    }


def _facts(entry: Entry) -> Iterator[str]:
    """What the task is, how many trajectories were scored, and where it holds."""
    task = entry.facts
    times, fields, units = task["times"], task["fields"], task.get("units", {})
    trained, beyond = (entry.number("", name) for name in ("num_training", "num_frames_beyond"))
    if task.get("equation"):
        yield task["equation"]
    others = f", trained on {trained:,} others" if trained is not None else ""
    yield f"{entry.number('', 'num_trajectories'):,} trajectories{others}"
    yield f"{' × '.join(map(str, task['grid']))} cells{_domain(task)}"
    yield f"field{'s' * (len(fields) > 1)} {', '.join(in_unit(field, units.get(field)) for field in fields)}"
    if task.get("offset"):
        yield f"errors relative to the {task['measure']}, as the mean dominates"
    if task.get("given"):
        yield f"given {', '.join(task['given'])}"
    if times != [0.0]:
        end = f"{number(float(times[-1]))} {units.get('time', '')}".rstrip()
        yield f"{len(times)} frame{'s' * (len(times) > 1)} predicted, up to lead time {end}" + (
            f", {beyond} of them beyond the length of training trajectories" if beyond else ""
        )
    if task["parameters"]:
        yield f"parameters {_parameters(task)}"
    if "noise" in task:
        yield noise_in_words(entry)


def _domain(task: dict) -> str:
    """Range and boundary of every axis; "" if the entry has none."""
    ends = task.get("boundary", "").split(",")
    spans = zip(task.get("axes", []), task.get("domain", []), ends * len(task.get("axes", [])), strict=False)
    words = [f"{axis} from {low:g} to {high:g} ({end.replace('_', ' ')})" for axis, (low, high), end in spans]
    return f": {', '.join(words)}" if words else ""


def _parameters(task: dict) -> str:
    """The trained values, or their range if every trajectory has its own."""
    if not isinstance(task["parameters"][0], list):
        return ", ".join(map(str, task["parameters"]))
    ranges = task["parameter_ranges"].items()
    return ", ".join(f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in ranges)


def trust_section(tasks: dict[str, Entry]) -> Markup:
    """How far bands hold and stated errors are right (ups/evaluation/trust.py)."""
    banded = {name: entry for name, entry in tasks.items() if entry.value("operator", "inside", "band")}
    rows = [Row(name, [one.value("operator", key, "band") for key in TRUST]) for name, one in banded.items()]
    return render(
        "trust.html",
        head=["task", *TRUST.values()],
        rows=rows,
        curves=figures.trust(banded),
        figure=drawing.to_html,
        without=[name for name in tasks if name not in banded],
        least=MIN_ROWS,
    )


def ensemble_section(entry: Entry, sample: dict) -> Markup:
    """Words, scores, paired ratios, members of one trajectory and calibration of an ensemble forecast."""
    name = entry.name
    featured = partial(figures_ensemble.featured, sample.get("members", {}))
    maps, case = [], ""
    if sample.get("members"):
        field = figures_ensemble.field_to_show(sample)
        case = f"{sample['fields'][field]} of {name}, trajectory with {sample['label']}"
        maps = list(_member_maps(sample, field, featured(2)))
    return render(
        "ensemble.html",
        name=name,
        words=entry.facts.get("words", []),
        members=entry.number("", "members"),
        figure=drawing.to_html,
        case=case,
        maps=maps,
        comparisons=_comparison_table(entry),
        climate=_climate_table(entry),
        by_lead=figures.by_lead(
            entry, figures_ensemble.LEAD_PANELS, figures_ensemble.featured(entry.models(), 2)
        ),
        **_model_table(entry, ENSEMBLE_ROWS, is_marked=True),
    )


def _member_maps(sample: dict, field: int, models: list[str]) -> Iterator[tuple[Figure, str]]:
    """(figure, how its caption goes on): intervals over x in 1D, maps of each model in 2D."""
    if len(sample["axes"]) == 1:
        yield (
            figures_ensemble.fan(sample, field),
            ": truth, operator, members and the intervals that hold the central 50 % and 90 % of them.",
        )
        return
    for model in models:
        yield (
            figures_ensemble.members_2d(sample, model, field),
            f", {label(model)}: mean, two members, their spread, the error of the mean.",
        )


def steady_section(entry: Entry, sample: dict) -> Markup:
    """Scores of a steady prior by observation, and for each observation the truth and the ensemble."""
    has_cases = bool(sample.get("cases"))
    return render(
        "steady.html",
        name=entry.name,
        words=entry.facts.get("words", []),
        members=entry.number("", "members"),
        figure=drawing.to_html,
        cases=figures_ensemble.steady_cases(sample, 0) if has_cases else None,
        case=f"{sample['fields'][0]} of {entry.name}, {sample['label']}" if has_cases else "",
        is_map=len(sample.get("axes", ())) > 1,
        **_steady_table(entry),
    )


def decisions_of(folders: Mapping[str, Path], run: Path, tasks: Iterable[str]) -> list[Decision]:
    """The decisions of finished stages (stage -> folder), as their config.json has them, and those on the
    samplers of `tasks` in a run. Stages of older versions have none."""
    found = []
    for stage, folder in folders.items():
        records = read_stage(folder, stage).description.get("decisions", [])
        try:
            found += map(Decision.read, records)
        except (TypeError, ValueError) as error:
            raise DamagedError(
                f"{folder}/config.json has no readable decisions ({error!s:.100}); expected those that this "
                f"version writes. Take another copy of the stage, or run {make_target(stage)} again."
            ) from error
    samplers = {name: validated_samplers(run, name) for name in tasks}
    return found + [select_sampler(name, scores) for name, scores in samplers.items() if scores]


def decisions_section(decisions: Sequence[Decision]) -> Markup:
    """The questions, what was chosen over what, and the rules."""
    rows = [
        Row(
            one.question,
            [
                one.chosen,
                dict(zip(("value", "low", "high"), one.candidates[one.chosen], strict=True)),
                "; ".join(map(one.words, one.others[:NUM_OTHERS])),
                one.rule,
                one.rows,
            ],
        )
        for one in decisions
    ]
    return render("decisions.html", head=DECIDED, rows=rows)
