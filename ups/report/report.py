"""results.json (schema) and report.html: one self-contained page that loads nothing.

results.json is strict JSON; null means undefined or not finite. A number with an interval is {"value", "low",
"high"} (95 % bootstrap over trajectories). Further keys are allowed and not shown:

    run, created (ISO 8601), config_hash: text
    environment: {"command", "git_revision", "device", ...: text, number, list}; shown under Reproduce
    protocol: {"split": "test" or "val", "context_frames": 10, "seed": 0, "legacy": false, ...}
    tasks: TASK -> {
        "num_trajectories", "num_frames_predicted", "num_frames_beyond" (if test trajectories are longer than
        those of training): counts; "parameters": list; "fields": names of the scored ones; "grid": cells per
        axis; "times": [T] lead times ([0.0] for a steady task); "models": {"operator": ROW, "persistence":
        ROW (steady tasks: "train_mean"), "codec_floor": ROW, "fno", "unet", ...: ROW}; "spectra":
        ups.metrics.errors.summarise_spectra(...) or {}; "units": field, axis or "time" -> unit, if known;
        "equation": text; "found": lines, the equations of the base; "conserved": fields whose mean the
        equation keeps; "network_is_used": bool; "selection": the validation that decided it
        (ups.select.select_network), null for older weights; "offset": field -> the constant that is
        subtracted if its mean dominates; "measure": the reference of relative errors, in words;
        "comparisons": {"operator / base": {metric: ratio with interval, on the same trajectories}};
        "break_even": ups.evaluation.break_even.assess_break_even(...): "forecasts": N* or null, "n_star":
        "about 300", "at least 300", "at most 300", "never" or "unknown", "words"; if there is a solver also
        "budget_s": {"data", "base", "training"}, "operator" and "solver": {"error", "seconds" per forecast} }
    ROW: ups.metrics.errors.summarise_errors(...) -> metric: number with interval; "error_growth(_low,
        _high)": [T]; "nrmse_by_field": [C]; "nonfinite_trajectories", "zero_frames": counts; and
        "ms_per_state", "evaluations_per_state": numbers
    gates: [{"stage": "operator" | "diffusion" | "consistency" | "rival" | "steady", "task", "name":
        "claim/task[/model]", "value", "low", "high": number or null, "bound": text, "passed": bool, "reason":
        a sentence, "refuses": the fakes}] from ups.evaluation.gates.check_gates
    usability: {TASK: {"usable": bool, "words": sentences}} from ups.evaluation.gates.check_usability
    decisions: [ups.select.Decision]
    training: {"steps", "seconds", "parameters", ...}
    ensembles: TASK -> {"task", "members": M, "times": [T], "models": {model: ROW of
        ups.metrics.ensembles.summarise_ensemble with "evaluations_per_state", "networks_per_state" and
        "ms_per_state"}, "comparisons": {"A / B": {metric: number with interval}}, "words": paragraphs}
    steady: TASK -> {"task", "members", "cases": {case: {model: ROW with crps, ssr, nrmse_mean, exact
        (distance, trace): numbers with or without interval}}, "words"}
"""

import json
import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from markupsafe import Markup

from ups.common.files import write_atomic
from ups.common.text import file_stem
from ups.report import drawing, figures, summary
from ups.report.sections import ROWS, task_section
from ups.report.tables import Row
from ups.report.templates import render

# key -> type or nested schema; "*": all other keys; a list: all elements. What may be missing may be None.
NUMBER, TEXT = (float, int, NoneType), (str, NoneType)
INTERVAL = dict.fromkeys(("value", "low", "high"), NUMBER)
COMPARED_TASK = {
    "num_trajectories": int,
    "num_frames_predicted": int,
    "parameters": list,
    "grid": list,
    "times": (list, NoneType),
    "models": {"operator": dict},
    "error": TEXT,
    "base": TEXT,
    "network_is_used": (bool, NoneType),
}
COMPARED = {  # of a report that the leaderboard lists
    "run": str,
    "environment": {"git_revision": TEXT},
    "protocol": dict,
    "tasks": {"*": COMPARED_TASK},
    "gates": [{"passed": bool}],
    "training": dict.fromkeys(("parameters", "seconds", "muon_lr", "adamw_lr", "seed"), NUMBER),
}
ROW = {"nrmse": INTERVAL, "error_growth": list}
TASK = COMPARED_TASK | {
    "fields": list,
    "times": list,
    "models": {"operator": ROW, "*": ROW},
    "spectra": dict,
}
GATE = {"stage": str, "task": str, "name": str, "bound": str, "passed": bool, "reason": str}
SCHEMA = COMPARED | {
    "created": str,
    "config_hash": str,
    "tasks": {"*": TASK},
    "gates": [GATE],
    "usability": {"*": {"usable": bool, "words": str}},
}
REPRODUCE = ("run", "created", "config_hash", "environment", "protocol", "training")


def check_results(data: Any, kind: Any = SCHEMA, where: str = "results") -> None:
    """Raise ValueError with the dotted key where `data` does not match the schema `kind`."""
    kinds = kind if isinstance(kind, tuple) else (kind if isinstance(kind, type) else type(kind),)
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    if type(data) not in kinds or (is_number and not abs(data) <= sys.float_info.max):
        expected = "finite number" if float in kinds else kinds[0].__name__
        raise ValueError(
            f"{where} is {'missing' if data is None else reprlib.repr(data)}; expected a {expected}. Make "
            "the report again; the schema is in ups/report/report.py."
        )
    if isinstance(kind, dict):
        for key in kind.keys() - {"*"} | (data.keys() if "*" in kind else set()):
            check_results(data.get(key), kind.get(key, kind.get("*")), f"{where}.{key}")
    if isinstance(kind, list):
        for i, item in enumerate(data):
            check_results(item, kind[0], f"{where}.{i}")


def write_results(results: dict, path: Path) -> None:
    """Check results and write them as strict JSON; the file is complete or not there."""
    check_results(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


def write_report(
    results: dict,
    samples: dict[str, list[dict]],
    history: list[dict],
    path: Path,
    sections: Mapping[str, Markup],
) -> None:
    """Write the page of valid `results` to `path` and its figures as PNG files to figures/ beside it.

    samples: TASK -> trajectories to show, the median one first (form: `ups.report.figures`). history: rows of
    metrics.jsonl. sections: further sections, title -> HTML, after those of the tasks.
    """
    folder = path.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    page = render(
        "report.html",
        results=results,
        failed=sum(not gate["passed"] for gate in results["gates"]),
        unusable=sum(not entry["usable"] for entry in results["usability"].values()),
        summary=summary.paragraph(results),
        overview=summary.overview(results),
        sections={
            **{
                name: task_section(name, task, samples.get(name, []), folder)
                for name, task in results["tasks"].items()
            },
            **sections,
        },
        figure=lambda fig, caption, name: drawing.to_html(fig, caption, folder / f"{file_stem(name)}.png"),
        training=figures.training(history),
        reproduce=json.dumps({key: results[key] for key in REPRODUCE}, indent=2, ensure_ascii=False),
        definitions=[Row(metric.label, [metric.meaning]) for metric in ROWS],
    )
    write_atomic(path, page)
