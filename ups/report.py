"""results.json (schema, gates) and report.html: one self-contained page, no requests to anywhere.

results.json is strict JSON; null stands for "undefined or not finite". A number with an interval is {"value", "low", "high"}
(95 % bootstrap over trajectories). Keys that are not listed may be added and are shown as they are:

    run, created (ISO 8601), config_hash: text
    environment: {"command", "git_revision", "device", ...: text, number, list}     shown in the reproducibility box
    protocol: {"split": "test" or "val", "context_frames": 10, "seed": 0, "legacy": false, ...}
    tasks: TASK -> {
        "num_trajectories", "num_frames_predicted": counts; "parameters": list; "fields": names; "grid": cells per axis;
        "times": [T] time since the last context frame ([0.0] for a steady task);
        "models": {"operator": ROW, "persistence": ROW (steady tasks: "train_mean"), "codec_floor": ROW, "fno", "unet", ...: ROW};
        "spectra": metrics.summarise_spectra(...) or {} }
    ROW: metrics.summarise(...) -> metric: number with interval; "error_growth(_low, _high)": [T]; "nrmse_by_field": [C];
        "nonfinite_trajectories", "zero_frames": counts; and "ms_per_state", "evaluations_per_state": numbers
    gates: [{"stage": "operator" | "diffusion" | "consistency" | "rival" | "steady", "task", "name": "claim/task[/model]",
        "value", "low", "high": number or null, "bound": text, "passed": bool, "reason": a sentence}] from ups.gates.check_gates
    verdicts: {TASK: {"usable": bool, "words": one or two sentences}} from ups.gates.check_verdicts
    training: {"steps", "seconds", "parameters", ...}
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ups import figures
from ups.files import write_atomic
from ups.gates import BASELINES

TEMPLATE = Path(__file__).with_suffix(".html")
REQUIRED = {"run": str, "created": str, "config_hash": str, "environment": dict, "protocol": dict, "tasks": dict, "gates": list,
            "verdicts": dict, "training": dict}
TASK_REQUIRED = {"num_trajectories": int, "num_frames_predicted": int, "parameters": list, "fields": list, "grid": list,
                 "times": list, "models": dict, "spectra": dict}
METRICS = {  # name -> label, meaning
    "nrmse": ("nRMSE", "RMS error over RMS of the truth per frame and field, mean over frames, fields, trajectories (PDEBench)"),
    "nrmse_global": ("nRMSE, global", "one ratio per trajectory over all frames, fields and cells (relative L2)"),
    "nrmse_pooled": ("nRMSE, pooled", "per frame and field, squares averaged over trajectories before the ratio"),
    "nrmse_legacy": ("nRMSE, legacy", "PDEBench's published convention: context frames counted as perfect"),
    "rmse": ("RMSE", "RMS error in physical units"),
    "crmse": ("cRMSE", "RMS error of the spatial mean, the conserved quantity"),
    "max_error": ("max error", "largest error over cells and trajectories, mean over frames and fields; no interval"),
    "brmse": ("boundary RMSE", "RMS error in the outermost cells"),
    "frmse_low": ("Fourier RMSE, low", "error of wave numbers below 4"),
    "frmse_mid": ("Fourier RMSE, mid", "error of wave numbers 4 to 11"),
    "frmse_high": ("Fourier RMSE, high", "error of wave numbers from 12"),
    "correlation_time": ("correlation time", "lead time at which the correlation falls below 0.8 (the horizon if it never does)"),
    "ms_per_state": ("ms per state", "wall-clock time per predicted state, decoding included"),
    "evaluations_per_state": ("evaluations per state", "network calls per predicted state"),
    "nonfinite_trajectories": ("non-finite trajectories", "predictions that hold NaN or inf"),
    "zero_frames": ("zero frames", "frames whose truth is zero: no relative error, left out"),
}


def is_interval(value: Any) -> bool:
    return isinstance(value, dict) and {"value", "low", "high"} <= set(value)


def _bad(where: str, what: str, expected: str) -> ValueError:
    return ValueError(f"results.{where} is {what}; expected {expected}. Build it with ups.metrics.summarise; the schema is in "
                      "ups/report.py.")


def _check_numbers(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise _bad(where, repr(value), "a finite number or null (JSON has no NaN)")
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _check_numbers(item, f"{where}.{key}")


def validate_results(results: dict) -> None:
    """Raise ValueError with the dotted key when `results` does not follow the schema above."""
    _require(results, REQUIRED, "")
    for name, task in results["tasks"].items():
        where = f"tasks.{name}."
        _require(task, TASK_REQUIRED, where)
        if len(task["times"]) != task["num_frames_predicted"]:
            raise _bad(where + "times", f"{len(task['times'])} long", f"{task['num_frames_predicted']}, one per predicted frame")
        if "operator" not in task["models"] or not any(b in task["models"] for b in BASELINES):
            raise _bad(where + "models", sorted(task["models"]), f"'operator' and one of {BASELINES}")
        for model, row in task["models"].items():
            if not is_interval(row.get("nrmse")):
                raise _bad(f"{where}models.{model}.nrmse", repr(row.get("nrmse")), "value, low and high")
            if len(row.get("error_growth", ())) != len(task["times"]):
                raise _bad(f"{where}models.{model}.error_growth", repr(row.get("error_growth")), f"{len(task['times'])} numbers")
    for i, gate in enumerate(results["gates"]):
        _require(gate, {"stage": str, "task": str, "name": str, "bound": str, "passed": bool, "reason": str}, f"gates.{i}.")
    for name, entry in results["verdicts"].items():
        _require(entry, {"usable": bool, "words": str}, f"verdicts.{name}.")
    _check_numbers(results, "")


def _require(data: Any, keys: dict[str, type], where: str) -> None:
    for key, kind in keys.items():
        if not isinstance(data, dict) or not isinstance(data.get(key), kind):
            found = "missing" if not isinstance(data, dict) or key not in data else f"a {type(data[key]).__name__}"
            raise _bad(where + key, found, f"a {kind.__name__}")


def write_results(results: dict, path: str | Path) -> Path:
    """Validate and write results.json: strict JSON, whole or not at all."""
    validate_results(results)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(Path(path), json.dumps(results, indent=1, allow_nan=False) + "\n")
    return Path(path)


def number(value: Any) -> str:
    """Three significant digits, powers of ten written out; a dash for null."""
    if value is None:
        return "–"
    if isinstance(value, (bool, str)) or (isinstance(value, int) and abs(value) < 10**15):
        return f"{value:,}" if type(value) is int else str(value)
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "not finite" if math.isinf(value) else "undefined"
    if not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}×10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def _nrmse(task: dict, model: str) -> float | None:
    return task["models"].get(model, {}).get("nrmse", {}).get("value")


def _baseline(task: dict) -> str:
    return next(b for b in BASELINES if b in task["models"])


def _factor(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def _fail(count: int) -> str:
    return f"{count} gate{'s' * (count != 1)} fail{'s' * (count == 1)}"


def verdict(results: dict) -> str:
    """A paragraph in plain words, from the numbers alone."""
    tasks, gates = results["tasks"], results["gates"]
    failed = [gate["name"] for gate in gates if not gate["passed"]]
    total = sum(task["num_trajectories"] for task in tasks.values())
    out = [f"The operator was scored on {total:,} {results['protocol'].get('split', '')} trajectories of {len(tasks)} "
           f"task{'s' * (len(tasks) != 1)}."]
    out.append(f"{len(failed)} of {len(gates)} gates fail: {', '.join(failed)}." if failed else f"All {len(gates)} gates pass.")
    for baseline, meaning in (("persistence", "persistence (the last known frame)"), ("train_mean", "the training mean")):
        parts = []
        for name, task in tasks.items():
            ours, trivial = _nrmse(task, "operator"), _nrmse(task, baseline)
            if _baseline(task) == baseline and ours and trivial:
                words = "lower" if trivial >= ours else "higher"
                parts.append(f"{_factor(max(trivial / ours, ours / trivial))} times {words} on {name}")
        if parts:
            out.append(f"Against {meaning} its error is {', '.join(parts)}.")
    for rival in ("fno", "unet"):
        better, worse, level = [], [], []
        for name, task in tasks.items():
            ours, theirs = task["models"]["operator"]["nrmse"], task["models"].get(rival, {}).get("nrmse")
            if theirs and None not in (*ours.values(), *theirs.values()):
                apart = ours["high"] < theirs["low"] or theirs["high"] < ours["low"]
                (level if not apart else better if ours["value"] < theirs["value"] else worse).append(name)
        parts = [f"{words} on {', '.join(names)}" for words, names in
                 (("lower", better), ("higher", worse), ("the same within the intervals", level)) if names]
        if parts:
            out.append(f"Beside the {figures.NAMES[rival]} it is {'; '.join(parts)}.")
    floors = {name: _nrmse(task, "codec_floor") / _nrmse(task, "operator") for name, task in tasks.items()
              if _nrmse(task, "codec_floor") is not None and _nrmse(task, "operator")}
    if floors:
        name = max(floors, key=floors.get)
        out.append(f"The codec's reconstruction error is at most {100 * floors[name]:.2g} % of the operator's ({name}).")
    broken = [name for name, task in tasks.items() if _nrmse(task, "operator") is None]
    if broken:
        out.append(f"On {', '.join(broken)} the prediction is not finite or the error undefined.")
    known = {name: _nrmse(task, "operator") for name, task in tasks.items() if name not in broken}
    if known:
        name = max(known, key=known.get)
        row, task = tasks[name]["models"]["operator"], tasks[name]
        entry, growth = row["nrmse"], row["error_growth"]
        text = f"The largest error is on {name}: nRMSE {number(entry['value'])}"
        text += f" ({number(entry['low'])} to {number(entry['high'])})"
        by_field = row.get("nrmse_by_field", [])
        if len(by_field) > 1 and None not in by_field:
            text += f", most of it in {task['fields'][int(np.argmax(by_field))]}"
        if len(growth) > 1 and None not in (growth[0], growth[-1]):
            text += f", from {number(growth[0])} at the first to {number(growth[-1])} at the last predicted frame"
        out.append(text + ".")
    return " ".join(out)


def _cell(value: Any) -> str:
    if not is_interval(value):
        return number(value)
    text = f"<b>{number(value['value'])}</b>"
    return text if value["low"] is None else text + f"<small>{number(value['low'])} – {number(value['high'])}</small>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already."""
    body = "".join(f"<tr><th scope=row>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{''.join(f'<th scope=col>{cell}</th>' for cell in head)}</tr>{body}</table></div>"


def _overview(results: dict) -> str:
    rows = []
    for name, task in results["tasks"].items():
        ours, trivial, models = _nrmse(task, "operator"), _nrmse(task, _baseline(task)), task["models"]
        rivals = [_cell(models[key]["nrmse"]) if key in models else "–" for key in ("fno", "unet", "codec_floor")]
        rows.append([f'<a href="#{html.escape(name)}">{html.escape(name)}</a>', _cell(models["operator"]["nrmse"]),
                     f"{_cell(models[_baseline(task)]['nrmse'])}<i>{figures.NAMES[_baseline(task)]}</i>",
                     f"{_factor(trivial / ours)}×" if ours and trivial else "–", *rivals, number(task["num_trajectories"])])
    head = ("nRMSE", "UPS operator", "trivial baseline", "baseline / operator", "FNO", "U-Net", "codec floor", "trajectories")
    used = [i for i in range(len(head)) if i < 4 or any(row[i] != "–" for row in rows)]
    return _table([head[i] for i in used], [[row[i] for i in used] for row in rows])


def _model_table(task: dict) -> str:
    order = [*[m for m in task["models"] if m not in ("fno", "unet", *BASELINES, "codec_floor")],
             *[m for m in ("fno", "unet", *BASELINES, "codec_floor") if m in task["models"]]]
    names = [*METRICS, *[k for m in order for k in task["models"][m] if k not in METRICS]]
    rows = []
    for name in dict.fromkeys(names):
        cells = [task["models"][model].get(name) for model in order]
        if any(isinstance(cell, list) or (isinstance(cell, dict) and not is_interval(cell)) for cell in cells):
            continue
        if all(cell is None for cell in cells) or (name in ("zero_frames", "nonfinite_trajectories") and not any(cells)):
            continue
        label, meaning = METRICS.get(name, (name, ""))
        rows.append([f'<span title="{html.escape(meaning)}">{html.escape(label)}</span>', *[_cell(cell) for cell in cells]])
    return _table(["", *[html.escape(figures.NAMES.get(model, model)) for model in order]], rows)


def _flat(group: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """(name, value) of a nested mapping; lists as text."""
    out: list[tuple[str, Any]] = []
    for key, value in group.items():
        name = f"{prefix}{key}"
        if isinstance(value, list):
            value = (" " if key == "command" else ", ").join(map(str, value))
        out += _flat(value, f"{name} ") if isinstance(value, dict) else [(name, value)]
    return out


class _Figures:
    """Writes each figure as PNG into the folder and returns it as an HTML <figure>."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, figure: Any, name: str, caption: str) -> str:
        figures.to_png(figure, self.folder / f"{name}.png")
        return f"<figure>{figures.to_svg(figure, caption)}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _task_section(name: str, task: dict, samples: list[dict], draw: _Figures) -> str:
    steady, times = len(task["times"]) == 1, task["times"]
    facts = [f"{task['num_trajectories']:,} trajectories", f"{' × '.join(map(str, task['grid']))} cells",
             f"field{'s' * (len(task['fields']) != 1)} {', '.join(task['fields'])}"]
    facts += [] if steady else [f"{len(times)} frames predicted up to t = {number(float(times[-1]))}"]
    facts += [f"parameters {', '.join(map(str, task['parameters']))}"] if task["parameters"] else []
    out = [f'<section id="{html.escape(name)}"><h2>{html.escape(name)}</h2><p class=note>{html.escape("; ".join(facts))}.</p>',
           _model_table(task)]
    for rank, sample in enumerate(samples):
        errors = figures.field_errors(sample)
        order = np.argsort(-np.nan_to_num(errors, nan=-1.0, posinf=np.inf))  # undefined last
        label = sample["label"] + (f", {sample['parameter']}" if sample.get("parameter") is not None else "")
        for field in sorted(order[:2 if rank == 0 else 1]):
            file = f"{name}_{sample['label'].replace(' ', '_')}_{sample['fields'][field]}"
            caption = (f"{sample['fields'][field]}, trajectory with {label}; nRMSE {'' if steady else 'over all frames '}"
                       f"{number(float(errors[field]))}.")
            out.append(draw(figures.sample_figure(sample, int(field)), file, caption))
        if rank == 0 and not steady:
            out.append(f"<figure>{figures.player(sample, int(order[0]))}<figcaption>Rollout of {html.escape(label)}, "
                       f"{html.escape(sample['fields'][order[0]])}.</figcaption></figure>")
    if not steady:
        out.append(draw(figures.error_growth(task["models"], times), f"{name}_error_growth",
                         "nRMSE per lead time, mean over trajectories and fields; bands: 95 % intervals."))
    if task["spectra"]:
        by_field = task["models"]["operator"].get("nrmse_by_field") or [0]
        field = int(np.argmax([math.inf if v is None else v for v in by_field]))
        figure = figures.spectra(task["spectra"], field, task["fields"][field], times, min(task["grid"]) // 2)
        out.append(draw(figure, f"{name}_spectra", f"Energy spectrum of {task['fields'][field]}, mean over trajectories."))
    return "".join([*out, "</section>"])


def write_report(results: dict, samples: dict[str, list[dict]], history: list[dict], path: str | Path,
                 sections: Sequence[tuple[str, str]] = ()) -> Path:
    """Write the page to `path` and its figures as PNG beside it in figures/; returns the path.

    samples: task -> trajectories to show as `ups.figures` describes them, the median one first, then the worst. history: rows
    of metrics.jsonl as ups.track writes them. sections: further (title, HTML body) placed after the tasks.
    """
    validate_results(results)
    draw = _Figures(Path(path).parent / "figures")
    failed = sum(not gate["passed"] for gate in results["gates"])
    gates = _table(("gate", "", "value", "allowed", "reason"), [
        [html.escape(g["name"]), f"<em class={'pass' if g['passed'] else 'fail'}>{'pass' if g['passed'] else 'FAIL'}</em>",
         number(g.get("value")), html.escape(g["bound"]), html.escape(g["reason"])] for g in results["gates"]])
    parts = [f"<section id=summary><h2>Summary</h2><p class=verdict>{html.escape(verdict(results))}</p>{_overview(results)}"
             "<p class=note>Mean over trajectories with its 95 % bootstrap interval. Context frames are given to every model and "
             "are not scored.</p></section>", f"<section id=gates><h2>Gates</h2>{gates}</section>"]
    parts += [_task_section(name, task, samples.get(name, []), draw) for name, task in results["tasks"].items()]
    parts += [f'<section id="{html.escape(title)}"><h2>{html.escape(title)}</h2>{body}</section>' for title, body in sections]
    if history:
        figure = draw(figures.training(history), "training", "Training loss, validation score and learning rate.")
        parts.append(f"<section id=training><h2>Training</h2>{figure}</section>")
    facts = {"run": results["run"], "created": results["created"], "config hash": results["config_hash"]}
    for prefix, group in (("", results["environment"]), ("", results["protocol"]), ("training ", results["training"])):
        facts |= {prefix + key: value for key, value in _flat(group)}
    rows = [[html.escape(key.replace("_", " ")), f"<code>{html.escape(number(value))}</code>"] for key, value in facts.items()]
    meanings = [[html.escape(label), html.escape(meaning)] for label, meaning in METRICS.values() if meaning]
    parts.append(f"<section id=reproduce class=facts><h2>Reproduce</h2>{_table(('', ''), rows)}<h2>Definitions</h2>"
                 f"{_table(('', ''), meanings)}</section>")
    anchors = ("summary", "gates", *results["tasks"], *[title for title, _ in sections], "reproduce")
    fill = {"TITLE": html.escape(f"UPS report: {results['run']}"), "DATE": html.escape(results["created"]),
            "BADGE": f"<em class={'fail' if failed else 'pass'}>{_fail(failed) if failed else 'all gates pass'}</em>",
            "LINKS": "".join(f'<a href="#{html.escape(name)}">{html.escape(name)}</a>' for name in anchors),
            "BODY": "".join(parts)}
    text = TEMPLATE.read_text(encoding="utf-8")
    for key, value in fill.items():
        text = text.replace(f"<!--{key}-->", value)
    write_atomic(Path(path), text)
    return Path(path)
