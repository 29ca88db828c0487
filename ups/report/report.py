"""report.html: one self-contained page that loads nothing, of results (ups/results.py)."""

import json
import operator
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from markupsafe import Markup

from ups.common.files import write_atomic
from ups.common.text import file_stem
from ups.evaluation.gates import error_of, horizon_of, network_gain, not_passed, trivial_of
from ups.report import drawing, figures
from ups.report.bench_rows import NETWORKS
from ups.report.sections import ROWS, task_section
from ups.report.tables import Row, render
from ups.results import Entry, Results

# key -> type or nested schema; "*": all other keys; a list: all elements. What may be missing may be None.
NUMBER, TEXT = (float, int, NoneType), (str, NoneType)
COMPARED = {  # of a report that the leaderboard lists
    "run": str,
    "environment": {"git_revision": TEXT},
    "protocol": dict,
    "tasks": {
        "*": {
            "parameters": list,
            "grid": list,
            "times": (list, NoneType),
            "units": (dict, NoneType),
            "error": TEXT,
            "base": TEXT,
            "network_is_used": (bool, NoneType),
        }
    },
    "gates": [{"passed": bool, "undecided": bool}],
    "training": dict.fromkeys(("parameters", "seconds", "muon_lr", "adamw_lr", "seed"), NUMBER),
}
call_each = partial(map, operator.call)  # functions -> what they return
REPRODUCE = ("run", "created", "config_hash", "environment", "protocol", "training")


def check_results(data: Any, kind: Any, where: str) -> None:
    """Raise ValueError with the dotted key where `data` does not match the schema `kind`."""
    kinds = kind if isinstance(kind, tuple) else (kind if isinstance(kind, type) else type(kind),)
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    if type(data) not in kinds or (is_number and not abs(data) <= sys.float_info.max):
        expected = "finite number" if float in kinds else kinds[0].__name__
        raise ValueError(
            f"{where} is {'missing' if data is None else reprlib.repr(data)}; expected a {expected}. Make "
            "the report again."
        )
    if isinstance(kind, dict):
        for key in [*(name for name in kind if name != "*"), *(data if "*" in kind else ())]:
            check_results(data.get(key), kind.get(key, kind.get("*")), f"{where}.{key}")
    if isinstance(kind, list):
        for i, item in enumerate(data):
            check_results(item, kind[0], f"{where}.{i}")


def best_other(task: Entry) -> str | None:
    """The FNO or U-Net with the lower error; None if none was trained on these data."""
    errors = {name: task.value(name, error_of(task)) for name in NETWORKS}
    known = {name: error["value"] for name, error in errors.items() if error and error["value"] is not None}
    return min(known, key=known.get, default=None)


def overview(results: Results) -> str:
    """HTML of the first table of the page, one row per task.

    Everything looks good beside the trivial forecast. So the operator is compared with its own base (what
    does the network add?) and with the best network of another kind trained on the same data. A difference
    counts only if its paired interval excludes zero.
    """
    rows = {}
    for name, task in results.tasks.items():
        kind, shares = network_gain(task)
        rows[name] = {
            "task": task,
            "horizon": horizon_of(task.facts),
            "error": error_of(task),
            "trivial": trivial_of(task),
            "kind": kind,
            "shares": shares,
            "other": best_other(task),
        }
    return render("overview.html", rows=rows, run=results.facts["run"])


def write_report(
    results: Results,
    samples: dict[str, list[dict]],
    history: list[dict],
    path: Path,
    sections: Mapping[str, Callable[[], Markup]],
    call: Callable[[Iterable[Callable[[], Markup]]], Iterable[Markup]] = call_each,
) -> None:
    """Write the page of `results` to `path` and its figures as PNG files to figures/ beside it.

    samples: TASK -> trajectories to show, the median one first (form: `ups.report.figures`). history: rows of
    metrics.jsonl. sections: further sections, title -> what makes their HTML, after those of the tasks. call:
    makes all sections.
    """
    folder = path.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    facts = results.facts
    failed, undecided = not_passed(facts["gates"])
    makers = {
        name: partial(task_section, task, samples.get(name, []), folder)
        for name, task in results.tasks.items()
    } | dict(sections)
    page = render(
        "report.html",
        results=facts,
        failed=len(failed),
        undecided=len(undecided),
        unusable=sum(not entry["usable"] for entry in facts["usability"].values()),
        overview=overview(results),
        sections=dict(zip(makers, call(makers.values()), strict=True)),
        figure=lambda fig, caption, name: drawing.to_html(fig, caption, folder / f"{file_stem(name)}.png"),
        training=figures.training(history),
        reproduce=json.dumps({key: facts[key] for key in REPRODUCE}, indent=2, ensure_ascii=False),
        definitions=[Row(metric.label, [metric.meaning]) for metric in ROWS],
    )
    write_atomic(path, page)
