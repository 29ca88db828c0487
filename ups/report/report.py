"""report.html: one self-contained page that loads nothing, of results (ups/results.py)."""

import json
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
from ups.evaluation.gates import not_passed
from ups.report import drawing, figures, summary
from ups.report.sections import ROWS, task_section
from ups.report.tables import Row, render
from ups.results import Results

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


def call_each(functions: Iterable[Callable[[], Markup]]) -> list[Markup]:
    return [function() for function in functions]


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
        overview=summary.overview(results),
        sections=dict(zip(makers, call(makers.values()), strict=True)),
        figure=lambda fig, caption, name: drawing.to_html(fig, caption, folder / f"{file_stem(name)}.png"),
        training=figures.training(history),
        reproduce=json.dumps({key: facts[key] for key in REPRODUCE}, indent=2, ensure_ascii=False),
        definitions=[Row(metric.label, [metric.meaning]) for metric in ROWS],
    )
    write_atomic(path, page)
