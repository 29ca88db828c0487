"""results.json (schema, gates) and report.html: one self-contained page, no requests to anywhere.

results.json is strict JSON; null stands for "undefined or not finite". A number with an interval is {"value",
"low", "high"} (95 % bootstrap over trajectories). Keys that are not listed may be added, and are not
shown:

    run, created (ISO 8601), config_hash: text
    environment: {"command", "git_revision", "device", ...: text, number, list}; shown under Reproduce
    protocol: {"split": "test" or "val", "context_frames": 10, "seed": 0, "legacy": false, ...}
    tasks: TASK -> {
        "num_trajectories", "num_frames_predicted", "num_frames_beyond" (where test trajectories are longer
        than those of training): counts; "parameters": list; "fields": names of
        those scored; "grid": cells per axis; "times": [T] time since the last context frame ([0.0] for a
        steady task); "models": {"operator": ROW, "persistence": ROW (steady tasks: "train_mean"),
        "codec_floor": ROW, "fno", "unet", ...: ROW}; "spectra": ups.metrics.errors.summarise_spectra(...) or
        {}; "units": field, axis or "time" -> unit, where any is known; "equation": text; "found": lines, what
        the base found; "conserved": fields whose mean the equation keeps; "network_is_used": bool;
        "selection": what decided that on validation, ups.models.selection.select(...), or null from older
        weights;
        "offset": field -> the number it is counted from, where its mean dominates; "measure": what relative
        errors are relative to, in words;
        "comparisons": {"operator / base": {metric: ratio with interval, on the same trajectories}} }
    ROW: ups.metrics.errors.summarise_errors(...) -> metric: number with interval; "error_growth(_low,
        _high)": [T]; "nrmse_by_field": [C]; "nonfinite_trajectories", "zero_frames": counts; and
        "ms_per_state", "evaluations_per_state": numbers
    gates: [{"stage": "operator" | "diffusion" | "consistency" | "rival" | "steady", "task", "name":
        "claim/task[/model]", "value", "low", "high": number or null, "bound": text, "passed": bool, "reason":
        a sentence, "refuses": the fakes}] from ups.evaluation.gates.check_gates
    verdicts: {TASK: {"usable": bool, "words": one or two sentences}} from ups.evaluation.gates.check_verdicts
    training: {"steps", "seconds", "parameters", ...}

Sections about ensembles and priors:

entry of a forecast: {"task", "members": M, "times": [T], "models": {model: ROW}, "comparisons": {"A vs B":
{metric: number with interval}}, "words": [paragraphs]}, ROW of ups.metrics.ensembles.summarise_ensemble plus
"evaluations_per_state", "networks_per_state" and "ms_per_state". entry of a steady prior: {"task", "members",
"cases": {case: {model: ROW}}, "words"}, ROW with crps, ssr, nrmse_mean, exact (distance, trace): numbers,
with or without interval. Samples as ups.report.figures_ensemble describes them. A metric, figure or model
that is not there is left out; null is shown as a dash.
"""

import html
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ups.common.files import write_atomic
from ups.common.formatting import number
from ups.metrics.ensembles import ENSEMBLES
from ups.metrics.errors import ERRORS
from ups.metrics.intervals import Metric
from ups.report import animations, figures, figures_ensemble, summary
from ups.report.tables import COSTS, COUNTS, cell, label, metric_name, ordered, table, value_of
from ups.tasks import in_unit

TEMPLATE = Path(__file__).with_suffix(".html")
# key -> type or further keys, "*": every other key; a list: every element
ROW = {"nrmse": dict, "error_growth": list}
TASK = {
    "num_trajectories": int,
    "num_frames_predicted": int,
    "parameters": list,
    "fields": list,
    "grid": list,
    "times": list,
    "models": {"operator": ROW, "*": ROW},
    "spectra": dict,
}
GATE = {"stage": str, "task": str, "name": str, "bound": str, "passed": bool, "reason": str}
SCHEMA = {
    "run": str,
    "created": str,
    "config_hash": str,
    "environment": dict,
    "protocol": dict,
    "tasks": {"*": TASK},
    "gates": [GATE],
    "verdicts": {"*": {"usable": bool, "words": str}},
    "training": dict,
}
TRAINED = Metric("train_seconds", "training time, s", "on this task alone, by make bench")
# of the tables
ROWS = [metric for metric in (*ERRORS, TRAINED, *COSTS) if metric.label]
OVER_EXACT = Metric(
    "crps_over_exact",
    "CRPS over exact",
    "over that of exact draws from the shown state; 1 is the best there can be",
)
INDEPENDENCE = Metric(
    "independence",
    "independence",
    "variance of the ensemble mean over that of independent members; 1 for exact draws",
    best=1.0,
)
ENSEMBLE_ROWS = [OVER_EXACT, *[metric for metric in (*ENSEMBLES, INDEPENDENCE, *COSTS) if metric.label]]
STEADY_ROWS = [  # the first two where the exact posterior is known
    Metric("distance", "distance to exact", "energy distance to the exact posterior, in units of its spread"),
    Metric("trace", "variance over exact", "total variance over that of the exact posterior", best=1.0),
    *ENSEMBLE_ROWS,
]
CLIMATE = {
    "variance": "variance over the truth's",
    "spectrum_error": "spectrum error, decades",
    "distance": "distance of values, standard deviations",
    "memory": "memory over the truth's",
}
CAPTIONS = {
    "by_lead": "Scores by lead time, two with 95 % intervals; grey: within 10 % of one, a calibrated spread "
    "and the CRPS of exact draws.",
    "rank_histograms": "Rank of the truth among the sorted members. Flat: calibrated; high ends: too sure; a "
    "hump: too unsure; a slope: biased.",
    "reliability": "Does the spread know where the error is? Points in bins of predicted spread; equal on "
    "the diagonal.",
    "spectrum_errors": "Error of the energy spectra of single members and sampled residuals, in decades; "
    "lines: 95 % intervals.",
}
GROWTH = (("nRMSE over the rollout", "error_growth", "log"),)
REPRODUCE = ("run", "created", "config_hash", "environment", "protocol", "training")
BEST = '<b style="color:var(--good)" title="best of the row">'


def check_results(data: Any, kind: Any = SCHEMA, where: str = "results") -> None:
    """Raise ValueError with the dotted key where `data` does not follow `kind`, the schema or a part of
    it."""
    expected = kind if isinstance(kind, type) else type(kind)
    if not isinstance(data, expected):
        raise ValueError(
            f"{where} is {'missing' if data is None else repr(data)}; expected a "
            f"{expected.__name__}. Build it with ups.metrics.errors.summarise_errors; the "
            "schema is in ups/report/report.py."
        )
    if isinstance(kind, dict):
        for key in kind.keys() - {"*"} | (data.keys() if "*" in kind else set()):
            check_results(data.get(key), kind.get(key, kind.get("*")), f"{where}.{key}")
    if isinstance(kind, list):
        for i, item in enumerate(data):
            check_results(item, kind[0], f"{where}.{i}")


def write_results(results: dict, path: Path) -> None:
    """Check and write results.json: strict JSON, whole or not at all."""
    check_results(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


# ---- tables


def _shown(metrics: Iterable[Metric], rows: Iterable[dict]) -> list[Metric]:
    """What any of `rows` has; a count where one is not zero."""
    rows = list(rows)
    return [
        metric
        for metric in metrics
        if any(
            value_of(row.get(metric.name)) not in ((None, 0) if metric.name in COUNTS else (None,))
            for row in rows
        )
    ]


def _cells(rows: Iterable[dict], metric: Metric, best: str | float | None = None) -> list[str]:
    """What `rows` have of a metric as HTML, the best one marked: the smallest ("low"), or the closest to a
    calibrated ensemble's; none if all are equal."""
    found = [row.get(metric.name) for row in rows]
    texts, values = [cell(value) for value in found], map(value_of, found)
    distance = (
        {}
        if best is None
        else {
            i: value if best == "low" else abs(value - best)
            for i, value in enumerate(values)
            if value is not None
        }
    )
    if len(set(distance.values())) > 1:
        first = min(distance, key=distance.get)
        text = texts[first] if "<b>" in texts[first] else f"<b>{texts[first]}</b>"
        texts[first] = text.replace("<b>", BEST).replace("</b>", " *</b>")
    return texts


def _model_table(models: dict, metrics: Iterable[Metric], is_marked: bool) -> str:
    """Metrics in rows, models in columns."""
    rows = {html.escape(label(model)): models[model] for model in ordered(models)}
    return table(
        ["", *rows],
        [
            [metric_name(metric), *_cells(rows.values(), metric, metric.best if is_marked else None)]
            for metric in _shown(metrics, rows.values())
        ],
    )


def _comparison_table(comparisons: dict) -> str:
    """Paired ratios, below 1 is better than the second model."""
    metrics = _shown(ENSEMBLE_ROWS, comparisons.values())
    lines = zip(*[_cells(comparisons.values(), metric) for metric in metrics], strict=True)
    return table(
        ["ratio, paired", *map(metric_name, metrics)],
        [[html.escape(name), *line] for name, line in zip(comparisons, lines, strict=True)],
    )


def _climate_table(long: dict) -> str:
    """Statistics of long rollouts beside the truth's, a row per model."""
    rows = long.get("climate", {})
    lines = [
        [
            html.escape("truth, one half beside the other" if model == "truth" else label(model)),
            *[number(rows[model][key]) for key in CLIMATE],
            number(long["blown_up"].get(model)),
        ]
        for model in ordered(rows)
    ]
    return (
        table([f"{long['frames']} frames, second half", *CLIMATE.values(), "members blown up"], lines)
        if lines
        else ""
    )


def _steady_table(cases: dict) -> str:
    """Cases and models in rows, metrics in columns."""
    cases = {
        case: {model: {**models[model], **models[model].get("exact", {})} for model in ordered(models)}
        for case, models in cases.items()
    }
    metrics, lines = _shown(STEADY_ROWS, (row for rows in cases.values() for row in rows.values())), []
    for case, rows in cases.items():
        names = zip([figures_ensemble.case_name(case), *[""] * len(rows)], map(label, rows), strict=False)
        columns = [_cells(rows.values(), metric, metric.best) for metric in metrics]
        lines += [
            [*map(html.escape, name), *line]
            for name, line in zip(names, zip(*columns, strict=True), strict=True)
        ]
    return table(["observed", "model", *map(metric_name, metrics)], lines)


# ---- sections


def _task_section(name: str, task: dict, samples: list[dict], draw: Callable[[Figure, str, str], str]) -> str:
    times, fields = task["times"], task["fields"]
    is_steady, is_rollout, units = times == [0.0], len(times) > 1, task.get("units", {})
    facts = (
        task.get("equation"),
        f"{task['num_trajectories']:,} trajectories"
        + (f", trained on {task['num_training']:,} others" if "num_training" in task else ""),
        f"{' × '.join(map(str, task['grid']))} cells{_where(task)}",
        f"field{'s' * (len(fields) != 1)} " + ", ".join(in_unit(field, units.get(field)) for field in fields),
        task.get("offset") and f"errors relative to the {task['measure']}, as the mean dominates",
        task.get("given") and f"given {', '.join(task['given'])}",
        not is_steady
        and (
            f"{len(times)} frame{'s' * is_rollout} predicted, up to lead time "
            f"{number(float(times[-1]))} {units.get('time', '')}".rstrip()
            + f", {task.get('num_frames_beyond')} of them beyond the length of training "
            "trajectories" * ("num_frames_beyond" in task)
        ),
        task["parameters"] and f"parameters {_parameters(task)}",
    )
    out = [f"<h2>{html.escape(name)}</h2><p class=note>{html.escape('; '.join(filter(None, facts)))}.</p>"]
    if found := task.get("found"):
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in found)
        out.append(f"<p class=note>Its base found in the data:</p><ul class=note>{lines}</ul>")
    for rank, sample in enumerate(samples):
        errors = figures.field_errors(sample)
        worst, *others = np.argsort(-np.nan_to_num(errors, nan=-1.0, posinf=np.inf))  # undefined last
        what = ", ".join(filter(None, (sample["label"], sample.get("parameter"))))
        for field in sorted([worst, *others[: 1 - rank]]):
            caption = (
                f"{fields[field]}, trajectory with {what}; nRMSE "
                f"{'over all frames ' * is_rollout}{number(float(errors[field]))}."
            )
            out.append(
                draw(
                    figures.sample_figure(sample, int(field)),
                    f"{name}_{sample['label'].replace(' ', '_')}_{fields[field]}",
                    caption,
                )
            )
        if rank == 0 and is_rollout:
            out.append(
                f"<figure>{animations.player(sample, int(worst))}<figcaption>Rollout of "
                f"{html.escape(what)}, {html.escape(fields[worst])}.</figcaption></figure>"
            )
    if is_rollout:
        out.append(
            draw(
                figures.by_lead(
                    task["models"], times, GROWTH, task["models"], in_unit("lead time", units.get("time"))
                ),
                f"{name}_error_growth",
                "nRMSE per lead time, mean over trajectories and fields; bands: 95 % intervals.",
            )
        )
    if task["spectra"]:
        field = int(np.argmax(figures.floats(task["models"]["operator"].get("nrmse_by_field", [0]))))
        out.append(
            draw(
                figures.spectra(task["spectra"], field, fields[field], times, min(task["grid"]) // 2),
                f"{name}_spectra",
                f"Energy spectrum of {fields[field]}, mean over trajectories.",
            )
        )
    return "".join([*out, _model_table(task["models"], ROWS, False)])


def _where(task: dict) -> str:
    """Which axes there are, from where to where, and what is at their ends; "" where nothing is said."""
    ends = task.get("boundary", "").split(",")
    spans = zip(task.get("axes", []), task.get("domain", []), ends * len(task.get("axes", [])), strict=False)
    words = [f"{axis} from {low:g} to {high:g} ({end.replace('_', ' ')})" for axis, (low, high), end in spans]
    return f": {', '.join(words)}" if words else ""


def _parameters(task: dict) -> str:
    """The values that were trained, or from where to where they go if every trajectory has its own."""
    if not isinstance(task["parameters"][0], list):
        return ", ".join(map(str, task["parameters"]))
    return ", ".join(
        f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in task["parameter_ranges"].items()
    )


def _words(entry: dict) -> str:
    return "".join(f"<p>{html.escape(text)}</p>" for text in entry.get("words", []))


def ensemble_section(entry: dict, sample: dict, name: str) -> str:
    """HTML of one ensemble forecast: what it says in words, table, ratios, a case as a forecaster sees it,
    calibration."""
    models, times = entry["models"], entry.get("times", [])
    members = f"{entry['members']} members; " if "members" in entry else ""
    out = [
        _words(entry),
        _model_table(models, ENSEMBLE_ROWS, True),
        f"<p class=note>{html.escape(name)}: {members}* marks the best of a row. Below a number: its 95 % "
        "bootstrap interval over trajectories. A dash: undefined for so few members, or not finite.</p>",
    ]
    if entry.get("comparisons"):
        out.append(
            _comparison_table(entry["comparisons"]) + "<p class=note>Same trajectories; below 1 the "
            "first is better.</p>"
        )
    out.append(_climate_table(entry.get("checks", {}).get("long", {})))
    if sample.get("members"):
        field = figures_ensemble.field_to_show(sample)
        if len(sample["axes"]) == 1:
            drawn = [
                (
                    figures_ensemble.fan(sample, field),
                    ": truth, operator, members and the intervals that hold the central 50 % and 90 % of "
                    "them.",
                )
            ]
        else:
            drawn = [
                (
                    figures_ensemble.members_2d(sample, model, field),
                    f", {label(model)}: mean, two members, their spread, the error of the mean.",
                )
                for model in figures_ensemble.featured(sample["members"], 2)
            ]
        out += [
            figures.to_html(
                figure, f"{sample['fields'][field]} of {name}, trajectory with {sample['label']}{caption}"
            )
            for figure, caption in drawn
        ]
        out += [
            f"<figure>{animations.members_player(sample, model, field)}<figcaption>"
            + html.escape(
                f"{label(model)}: members beside the truth, {sample['fields'][field]} of "
                f"{name}, trajectory with {sample['label']}."
            )
            + "</figcaption></figure>"
            for model in figures_ensemble.featured(sample["members"], len(sample["times"]) > 1)
        ]
    out += [
        figures.to_html(
            figures.by_lead(
                models, times, figures_ensemble.LEAD_PANELS, figures_ensemble.featured(models, 2)
            ),
            CAPTIONS["by_lead"],
        ),
        figures.to_html(figures_ensemble.rank_histograms(models), CAPTIONS["rank_histograms"]),
        figures.to_html(figures_ensemble.reliability(models), CAPTIONS["reliability"]),
        figures.to_html(figures_ensemble.spectrum_errors(models), CAPTIONS["spectrum_errors"]),
    ]
    return "".join(out)


def steady_section(entry: dict, sample: dict, name: str) -> str:
    """HTML of a steady prior: a table of cases, and per case what was seen, the truth and what the ensemble
    makes of it."""
    out = [
        _words(entry),
        _steady_table(entry["cases"]),
        f"<p class=note>{html.escape(name)}: {entry['members']} members; * marks the best model of a "
        "case.</p>",
    ]
    if sample.get("cases"):
        is_map = len(sample["axes"]) > 1
        caption = (
            f"{sample['fields'][0]} of {name}, {sample['label']}"
            + is_map * ("; grey cells were not observed. Spread and error share the scale of their row")
            + "."
        )
        out.append(figures.to_html(figures_ensemble.steady_cases(sample, 0), caption))
    return "".join(out)


def write_report(
    results: dict,
    samples: dict[str, list[dict]],
    history: list[dict],
    path: Path,
    sections: Mapping[str, str],
) -> None:
    """Write the page of valid `results` to `path` and its figures as PNG beside it in figures/.

    samples: task -> trajectories to show as `ups.report.figures` describes them, the median one first,
    then the worst. history: rows of metrics.jsonl as ups.training.track writes them. sections: further ones,
    title -> HTML, placed after the tasks.
    """
    folder = path.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)

    def draw(figure: Figure, name: str, caption: str) -> str:
        return figures.to_html(figure, caption, folder / f"{name}.png")

    failed = sum(not gate["passed"] for gate in results["gates"])
    passed = f"{len(results['gates']) - failed} of {len(results['gates'])} gates pass"
    unusable = sum(not entry["usable"] for entry in results["verdicts"].values())
    gates = table(
        ("gate", "", "value", "allowed", "reason"),
        [
            [
                html.escape(g["name"]),
                f"<em class={'pass' if g['passed'] else 'fail'}>{'pass' if g['passed'] else 'FAIL'}</em>",
                number(g.get("value")),
                html.escape(g["bound"]),
                html.escape(g["reason"]),
            ]
            for g in results["gates"]
        ],
    )
    reproduce = json.dumps({key: results[key] for key in REPRODUCE}, indent=2, ensure_ascii=False)
    body = {
        "summary": f"<h2>Summary</h2>{summary.verdicts(results)}<p "
        f"class=verdict>{html.escape(summary.verdict(results))}</p>{summary.overview(results)}<p "
        "class=note>nRMSE and error of the mean (cRMSE): means over trajectories with 95 % "
        "bootstrap intervals. What the network takes off is judged on the same trajectories; a "
        "tie: the interval holds zero. Context frames are given to every model and are not "
        "scored. FNO and U-Net had the training time that is named, on the task alone.</p>",
        **{
            name: _task_section(name, task, samples.get(name, []), draw)
            for name, task in results["tasks"].items()
        },
        **{title: f"<h2>{html.escape(title)}</h2>{text}" for title, text in sections.items()},
        "gates": f"<details{' open' if failed else ''}><summary><h2>Gates</h2> {passed}</summary>{gates}"
        "</details>",
        "training": "<h2>Training</h2>"
        + draw(figures.training(history), "training", "Training loss, validation score and learning rate."),
        "reproduce": f"<h2>Reproduce</h2><pre>{html.escape(reproduce)}</pre>"
        "<h2>Definitions</h2><div class=facts>"
        + table(("", ""), [[html.escape(row.label), html.escape(row.meaning)] for row in ROWS])
        + "</div>",
    }
    fill = {
        "TITLE": html.escape(f"UPS report: {results['run']}"),
        "DATE": html.escape(results["created"]),
        "BADGE": f"<em class={'fail' if failed else 'pass'}>{passed}</em>"
        + (
            f"<em class=fail>not usable: {unusable} of {len(results['verdicts'])} tasks</em>"
            if unusable
            else ""
        ),
        "LINKS": "".join(f'<a href="#{html.escape(name)}">{html.escape(name)}</a>' for name in body),
        "BODY": "".join(f'<section id="{html.escape(name)}">{text}</section>' for name, text in body.items()),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for key, value in fill.items():
        text = text.replace(f"<!--{key}-->", value)
    write_atomic(path, text)
