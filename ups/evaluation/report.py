"""results.json (schema, gates) and report.html: one self-contained page, no requests to anywhere.

results.json is strict JSON; null stands for "undefined or not finite". A number with an interval is {"value",
"low", "high"} (95 % bootstrap over trajectories). Keys that are not listed may be added and are shown as they
are:

    run, created (ISO 8601), config_hash: text
    environment: {"command", "git_revision", "device", ...: text, number, list}; shown under Reproduce
    protocol: {"split": "test" or "val", "context_frames": 10, "seed": 0, "legacy": false, ...}
    tasks: TASK -> {
        "num_trajectories", "num_frames_predicted": counts; "parameters": list; "fields": names; "grid": cells
        per axis; "times": [T] time since the last context frame ([0.0] for a steady task); "models":
        {"operator": ROW, "persistence": ROW (steady tasks: "train_mean"), "codec_floor": ROW, "fno", "unet",
        ...: ROW}; "spectra": ups.metrics.errors.summarise_spectra(...) or {}; "equation": text; "conserved":
        fields whose mean the equation keeps; "network_is_used": bool; "comparisons": {"operator / base":
        {metric: ratio with interval, on the same trajectories}} }
    ROW: ups.metrics.errors.summarise_errors(...) -> metric: number with interval; "error_growth(_low,
        _high)": [T]; "nrmse_by_field": [C]; "nonfinite_trajectories", "zero_frames": counts; and
        "ms_per_state", "evaluations_per_state": numbers
    gates: [{"stage": "operator" | "diffusion" | "consistency" | "rival" | "steady", "task", "name":
        "claim/task[/model]", "value", "low", "high": number or null, "bound": text, "passed": bool, "reason":
        a sentence}] from ups.evaluation.gates.check_gates
    verdicts: {TASK: {"usable": bool, "words": one or two sentences}} from ups.evaluation.gates.check_verdicts
    training: {"steps", "seconds", "parameters", ...}

Sections about ensembles and priors:

entry of a forecast: {"task", "members": M, "times": [T], "models": {model: ROW}, "comparisons": {"A vs B":
{metric: number with interval}}, "words": [paragraphs]}, ROW of ups.metrics.ensembles.summarise_ensemble plus
"evaluations_per_state" and "ms_per_state". entry of a steady prior: {"task", "members", "cases": {case:
{model: ROW}}, "words"}, ROW with crps, ssr, nrmse_mean, exact (distance, trace): numbers, with or without
interval. Samples as ups.evaluation.figures_ensemble describes them. A metric, figure or model that is not
there is left out; null is shown as a dash.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ups.evaluation import figures, figures_ensemble, summary
from ups.evaluation.bench_rows import NETWORKS
from ups.evaluation.gates import BASELINES
from ups.evaluation.tables import COSTS, COUNTS, cell, is_interval, metric_name, number, table
from ups.files import write_atomic
from ups.metrics.ensembles import ENSEMBLES
from ups.metrics.errors import ERRORS
from ups.metrics.intervals import Metric

TEMPLATE = Path(__file__).with_suffix(".html")
REQUIRED = {"run": str, "created": str, "config_hash": str, "environment": dict, "protocol": dict,
            "tasks": dict, "gates": list, "verdicts": dict, "training": dict}
TASK_REQUIRED = {"num_trajectories": int, "num_frames_predicted": int, "parameters": list, "fields": list,
                 "grid": list, "times": list, "models": dict, "spectra": dict}
TRAINED = Metric("train_seconds", "training time, s", "on this task alone, by make bench")
# of the table of models
ROWS = {metric.name: metric for metric in (*ERRORS, TRAINED, *COSTS) if metric.label}
EXACT = (   # of a steady prior, where the exact posterior is known
    Metric("distance", "distance to exact", "energy distance to the exact posterior, in units of its spread"),
    Metric("trace", "variance over exact", "total variance over that of the exact posterior", best=1.0),
)
ENSEMBLE_ROWS = {metric.name: metric for metric in (*ENSEMBLES, *COSTS) if metric.label}
STEADY = {metric.name: metric for metric in (*EXACT, *ENSEMBLE_ROWS.values())}
CAPTIONS = {
    "by_lead": "Scores by lead time, two with 95 % intervals; grey: spread within 10 % of the error.",
    "spread_and_skill": "Spread and error of the ensemble mean by lead time, physical units; calibrated "
                        "where they coincide.",
    "rank_histograms": "Rank of the truth among the sorted members. Flat: calibrated; high ends: too sure; a "
                       "hump: too unsure; a slope: biased.",
    "reliability": "Does the spread know where the error is? Points in bins of predicted spread; equal on "
                   "the diagonal.",
    "spectrum_errors": "Error of the energy spectra of single members and sampled residuals, in decades; "
                       "lines: 95 % intervals.",
}
BEST = '<b style="color:var(--good)" title="best of the row">'


def _bad(where: str, what: str, expected: str) -> ValueError:
    return ValueError(f"results.{where} is {what}; expected {expected}. Build it with "
                      "ups.metrics.errors.summarise_errors; the schema is in ups/evaluation/report.py.")


def _check_numbers(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise _bad(where, repr(value), "a finite number or null (JSON has no NaN)")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _check_numbers(item, f"{where}.{key}")


def validate_results(results: dict) -> None:
    """Raise ValueError with the dotted key when `results` does not follow the schema above."""
    _require(results, REQUIRED, "")
    for name, task in results["tasks"].items():
        where = f"tasks.{name}."
        _require(task, TASK_REQUIRED, where)
        if len(task["times"]) != task["num_frames_predicted"]:
            raise _bad(where + "times", f"{len(task['times'])} long",
                       f"{task['num_frames_predicted']}, one per predicted frame")
        if "operator" not in task["models"] or not any(b in task["models"] for b in BASELINES):
            raise _bad(where + "models", sorted(task["models"]), f"'operator' and one of {BASELINES}")
        for model, row in task["models"].items():
            if not is_interval(row.get("nrmse")):
                raise _bad(f"{where}models.{model}.nrmse", repr(row.get("nrmse")), "value, low and high")
            if len(row.get("error_growth", ())) != len(task["times"]):
                raise _bad(f"{where}models.{model}.error_growth", repr(row.get("error_growth")),
                           f"{len(task['times'])} numbers")
    for i, gate in enumerate(results["gates"]):
        _require(gate, {"stage": str, "task": str, "name": str, "bound": str, "passed": bool, "reason": str},
                 f"gates.{i}.")
    for name, entry in results["verdicts"].items():
        _require(entry, {"usable": bool, "words": str}, f"verdicts.{name}.")
    _check_numbers(results, "")


def _require(data: Any, keys: dict[str, type], where: str) -> None:
    for key, kind in keys.items():
        if not isinstance(data, dict) or not isinstance(data.get(key), kind):
            is_there = isinstance(data, dict) and key in data
            found = f"a {type(data[key]).__name__}" if is_there else "missing"
            raise _bad(where + key, found, f"a {kind.__name__}")


def write_results(results: dict, path: str | Path) -> Path:
    """Validate and write results.json: strict JSON, whole or not at all."""
    validate_results(results)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(Path(path), json.dumps(results, indent=1, allow_nan=False) + "\n")
    return Path(path)


def _model_table(task: dict) -> str:
    last = (*NETWORKS, *BASELINES, "codec_floor")
    order = [*[m for m in task["models"] if m not in last], *[m for m in last if m in task["models"]]]
    rows = []
    for name in dict.fromkeys([*ROWS, *[key for model in order for key in task["models"][model]]]):
        cells = [task["models"][model].get(name) for model in order]
        is_plain = not any(isinstance(value, (list, dict)) and not is_interval(value) for value in cells)
        is_empty = all(value is None for value in cells) or (name in COUNTS and not any(cells))
        if is_plain and not is_empty:
            rows.append([metric_name(ROWS.get(name, Metric(name, name))), *map(cell, cells)])
    return table(["", *[html.escape(figures.NAMES.get(model, model)) for model in order]], rows)


def _flat(group: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of a nested mapping; lists as text."""
    for key, value in group.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key} ")
        else:
            gap = " " if key == "command" else ", "
            yield prefix + key, gap.join(map(str, value)) if isinstance(value, list) else value


def _task_section(name: str, task: dict, samples: list[dict],
                  draw: Callable[[Figure, str, str], str]) -> str:
    steady, times = len(task["times"]) == 1, task["times"]
    facts = [task["equation"]] if task.get("equation") else []
    facts += [f"{task['num_trajectories']:,} trajectories", f"{' × '.join(map(str, task['grid']))} cells",
             f"field{'s' * (len(task['fields']) != 1)} {', '.join(task['fields'])}"]
    facts += [] if steady else [f"{len(times)} frames predicted, up to lead time {number(float(times[-1]))}"]
    facts += [f"parameters {', '.join(map(str, task['parameters']))}"] if task["parameters"] else []
    out = [f'<section id="{html.escape(name)}"><h2>{html.escape(name)}</h2><p '
           f'class=note>{html.escape("; ".join(facts))}.</p>']
    for rank, sample in enumerate(samples):
        errors = figures.field_errors(sample)
        order = np.argsort(-np.nan_to_num(errors, nan=-1.0, posinf=np.inf))  # undefined last
        label = sample["label"] + (f", {sample['parameter']}" if sample.get("parameter") is not None else "")
        for field in sorted(order[:2 if rank == 0 else 1]):
            file = f"{name}_{sample['label'].replace(' ', '_')}_{sample['fields'][field]}"
            caption = (f"{sample['fields'][field]}, trajectory with {label}; nRMSE "
                       f"{'' if steady else 'over all frames '}{number(float(errors[field]))}.")
            out.append(draw(figures.sample_figure(sample, int(field)), file, caption))
        if rank == 0 and not steady:
            out.append(f"<figure>{figures.player(sample, int(order[0]))}<figcaption>Rollout of "
                       f"{html.escape(label)}, "
                       f"{html.escape(sample['fields'][order[0]])}.</figcaption></figure>")
    if not steady:
        out.append(draw(figures.error_growth(task["models"], times), f"{name}_error_growth",
                         "nRMSE per lead time, mean over trajectories and fields; bands: 95 % intervals."))
    if task["spectra"]:
        by_field = task["models"]["operator"].get("nrmse_by_field") or [0]
        field = int(np.argmax([math.inf if v is None else v for v in by_field]))
        figure = figures.spectra(task["spectra"], field, task["fields"][field], times, min(task["grid"]) // 2)
        out.append(draw(figure, f"{name}_spectra",
                        f"Energy spectrum of {task['fields'][field]}, mean over trajectories."))
    return "".join([*out, _model_table(task), "</section>"])


def _value(found: Any) -> float | None:
    return found["value"] if is_interval(found) else found


def _marked(cells: list[Any], best: str | float | None) -> list[str]:
    """The cells as HTML, the best one marked: the smallest, or the closest to a calibrated ensemble's; none
    if all are equal."""
    texts = [cell(value) for value in cells]
    known = {i: value for i, value in enumerate(map(_value, cells)) if value is not None}
    distance = ({i: value if best == "low" else abs(value - best) for i, value in known.items()}
                if best is not None else {})
    if len(set(distance.values())) > 1:
        first = min(distance, key=distance.get)
        text = texts[first] if "<b>" in texts[first] else f"<b>{texts[first]}</b>"
        texts[first] = text.replace("<b>", BEST).replace("</b>", " *</b>")
    return texts


def _ensemble_table(models: dict) -> str:
    """Metrics in rows, models in columns, as the other tables of the report."""
    names, rows = figures_ensemble.ordered(models), []
    for metric in ENSEMBLE_ROWS.values():
        cells = [models[model].get(metric.name) for model in names]
        if any(_value(value) is not None for value in cells) and (metric.name not in COUNTS or any(cells)):
            rows.append([metric_name(metric), *_marked(cells, metric.best)])
    return table(["", *[html.escape(figures_ensemble.label(model)) for model in names]], rows)


def _comparison_table(comparisons: dict) -> str:
    """Paired ratios, below 1 is better than the second model."""
    metrics = [metric for metric in ENSEMBLE_ROWS.values()
               if any(metric.name in row for row in comparisons.values())]
    rows = [[html.escape(name), *[cell(row.get(metric.name)) for metric in metrics]]
            for name, row in comparisons.items()]
    return table(["ratio, paired", *map(metric_name, metrics)], rows)


def _words(entry: dict) -> str:
    return "".join(f"<p>{html.escape(text)}</p>" for text in entry.get("words", []))


def ensemble_section(entry: dict, sample: dict, name: str) -> str:
    """HTML of one ensemble forecast: what it says in words, table, ratios, a case as a forecaster sees it,
    calibration.

    Raises ValueError when the entry has no models or its times do not fit the lists by lead.
    """
    models, times = entry.get("models", {}), list(entry.get("times", []))
    if not models:
        raise ValueError(f"no models in the ensemble entry of {name!r}; expected {{model: row}} under "
                         "'models' in ensemble_section. Pass the rows of "
                         "ups.metrics.ensembles.summarise_ensemble.")
    wrong = [model for model, row in models.items() if len(row.get("crps_by_lead", times)) != len(times)]
    if wrong:
        raise ValueError(f"{len(times)} times but lists of another length in {', '.join(wrong)}; expected "
                         f"one time per predicted frame of {name!r} in ensemble_section. Cut the context "
                         "frames from both.")
    members = f"{entry['members']} members; " if "members" in entry else ""
    out = [_words(entry), _ensemble_table(models),
           f"<p class=note>{html.escape(name)}: {members}* marks the best of a row. Below a number: its 95 % "
           "bootstrap interval over trajectories. A dash: undefined for so few members, or not finite.</p>"]
    if entry.get("comparisons"):
        out.append(_comparison_table(entry["comparisons"]) + "<p class=note>Same trajectories; below 1 the "
                                                             "first is better.</p>")
    if sample and sample.get("members"):
        field = figures_ensemble.field_to_show(sample)
        what = f"{sample['fields'][field]} of {name}, trajectory with {sample['label']}"
        if len(sample["u_ref"].shape) == 3:
            caption = (f"{what}: truth, operator, members and the intervals that hold the central 50 % and "
                       "90 % of them.")
            out.append(figures.to_html(figures_ensemble.fan(sample, field), caption))
        else:
            for model in figures_ensemble.featured(sample["members"], 2):
                caption = (f"{what}, {figures_ensemble.label(model)}: mean, two members, their spread, the "
                           "error of the mean.")
                out.append(figures.to_html(figures_ensemble.members_2d(sample, model, field), caption))
    out += [figures.to_html(figures_ensemble.by_lead(models, times), CAPTIONS["by_lead"]),
            figures.to_html(figures_ensemble.spread_and_skill(models, times), CAPTIONS["spread_and_skill"]),
            figures.to_html(figures_ensemble.rank_histograms(models), CAPTIONS["rank_histograms"]),
            figures.to_html(figures_ensemble.reliability(models), CAPTIONS["reliability"]),
            figures.to_html(figures_ensemble.spectrum_errors(models), CAPTIONS["spectrum_errors"])]
    return "".join(out)


def steady_section(entry: dict, sample: dict, name: str) -> str:
    """HTML of a steady prior: a table of cases, and per case what was seen, the truth and what the ensemble
    makes of it.

    Raises ValueError when the entry has no cases or the sample is not 2D.
    """
    cases = entry.get("cases", {})
    if not cases:
        raise ValueError(f"no cases in the steady entry of {name!r}; expected {{case: {{model: row}}}} under "
                         "'cases' in steady_section. Pass one row per observation case and model.")
    cases = {case: {model: {**row, **row.get("exact", {})} for model, row in by_model.items()}
             for case, by_model in cases.items()}
    everything = {model: row for by_model in cases.values() for model, row in by_model.items()}
    rows, models = [], figures_ensemble.ordered(everything)
    metrics = [metric for metric in STEADY.values() if any(
        _value(row.get(metric.name)) is not None for by_model in cases.values() for row in by_model.values())]
    for case, by_model in cases.items():
        names = [model for model in models if model in by_model]
        columns = [_marked([by_model[model].get(metric.name) for model in names], metric.best)
                   for metric in metrics]
        for i, model in enumerate(names):
            case_cell = html.escape(figures_ensemble.case_name(case)) if i == 0 else ""
            rows.append([case_cell, html.escape(figures_ensemble.label(model)),
                         *[column[i] for column in columns]])
    out = [_words(entry), table(["observed", "model", *map(metric_name, metrics)], rows)]
    members = f"{number(entry['members'])} members; " if "members" in entry else ""
    out.append(f"<p class=note>{html.escape(name)}: {members}* marks the best model of a case.</p>")
    if sample and sample.get("cases"):
        shapes = {case: tuple(shown["observed"].shape) for case, shown in sample["cases"].items()}
        if any(len(shape) != 2 for shape in shapes.values()):
            raise ValueError(f"observed fields have shapes {shapes}; expected (nx, ny) in steady_section. "
                             "Pass 2D fields, NaN where nothing was seen.")
        caption = (f"{sample['fields'][0]} of {name}, {sample['label']}; grey cells were not seen. Spread "
                   "and error share the scale of their row.")
        out.append(figures.to_html(figures_ensemble.steady_cases(sample, 0), caption))
    return "".join(out)


def write_report(results: dict, samples: dict[str, list[dict]], history: list[dict], path: str | Path,
                 sections: Sequence[tuple[str, str]] = ()) -> Path:
    """Write the page of valid `results` to `path` and its figures as PNG beside it in figures/; returns
    the path.

    samples: task -> trajectories to show as `ups.evaluation.figures` describes them, the median one first,
    then the worst. history: rows of metrics.jsonl as ups.training.track writes them. sections: further
    (title, HTML body) placed after the tasks.
    """
    folder = Path(path).parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)

    def draw(figure: Figure, name: str, caption: str) -> str:
        return figures.to_html(figure, caption, folder / f"{name}.png")

    failed = sum(not gate["passed"] for gate in results["gates"])
    passed = f"{len(results['gates']) - failed} of {len(results['gates'])} gates pass"
    unusable = sum(not entry["usable"] for entry in results["verdicts"].values())
    gates = table(("gate", "", "value", "allowed", "reason"), [
        [html.escape(g["name"]),
         f"<em class={'pass' if g['passed'] else 'fail'}>{'pass' if g['passed'] else 'FAIL'}</em>",
         number(g.get("value")), html.escape(g["bound"]), html.escape(g["reason"])]
        for g in results["gates"]])
    parts = [f"<section id=summary><h2>Summary</h2>{summary.verdicts(results)}<p "
             f"class=verdict>{html.escape(summary.verdict(results))}</p>{summary.overview(results)}<p "
             "class=note>nRMSE and error of the mean (cRMSE): means over trajectories with 95 % bootstrap "
             "intervals. What the network takes off is judged on the same trajectories; a tie: the "
             "interval holds zero. Context frames are given to every model and are not scored. FNO and "
             "U-Net had the training time that is named, on the task alone.</p></section>"]
    parts += [_task_section(name, task, samples.get(name, []), draw)
              for name, task in results["tasks"].items()]
    parts += [f'<section id="{html.escape(title)}"><h2>{html.escape(title)}</h2>{body}</section>'
              for title, body in sections]
    parts.append(f"<section id=gates><details{' open' if failed else ''}><summary><h2>Gates</h2> "
                 f"{passed}</summary>{gates}</details></section>")
    if history:
        figure = draw(figures.training(history), "training",
                      "Training loss, validation score and learning rate.")
        parts.append(f"<section id=training><h2>Training</h2>{figure}</section>")
    facts = dict(_flat({"run": results["run"], "created": results["created"],
                        "config hash": results["config_hash"], **results["environment"],
                        **results["protocol"], "training": results["training"]}))
    rows = [[html.escape(key.replace("_", " ")), f"<code>{html.escape(number(value))}</code>"]
            for key, value in facts.items()]
    meanings = [[html.escape(row.label), html.escape(row.meaning)] for row in ROWS.values()]
    parts.append(f"<section id=reproduce class=facts><h2>Reproduce</h2>{table(('', ''), rows)}"
                 f"<h2>Definitions</h2>{table(('', ''), meanings)}</section>")
    anchors = ("summary", *results["tasks"], *[title for title, _ in sections], "gates", "reproduce")
    fill = {"TITLE": html.escape(f"UPS report: {results['run']}"), "DATE": html.escape(results["created"]),
            "BADGE": f"<em class={'fail' if failed else 'pass'}>{passed}</em>" + (
                f"<em class=fail>not usable: {unusable} of {len(results['verdicts'])} tasks</em>"
                if unusable else ""),
            "LINKS": "".join(f'<a href="#{html.escape(name)}">{html.escape(name)}</a>' for name in anchors),
            "BODY": "".join(parts)}
    text = TEMPLATE.read_text(encoding="utf-8")
    for key, value in fill.items():
        text = text.replace(f"<!--{key}-->", value)
    write_atomic(Path(path), text)
    return Path(path)
