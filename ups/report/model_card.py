"""Model cards: README.md beside the weights of a stage, from the results: what they are, where they hold,
what was measured; with a picture per task.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ups.common.files import remove_named, replacing, write_atomic
from ups.common.place import STAGES
from ups.common.text import number
from ups.evaluation.gates import TRIVIAL, error_of, horizon_of, not_passed
from ups.report.bench_rows import NETWORKS
from ups.report.figures_ensemble import case_name
from ups.report.tables import is_interval, label, markdown_table, noise_in_words, ordered, render
from ups.results import OBSERVED, Results
from ups.tasks import in_unit
from ups.training.artifact import CARD, IMAGES, is_changed_card, pictures_of_card, signed_card

SCORES = {
    "crps": "fair CRPS",
    "energy_score": "energy score",
    "ssr": "spread / skill",
    "nrmse_mean": "nRMSE of the mean",
}
Scores = dict[str, list]  # head and rows of a table, and notes below it
LICENCES = {
    "generate": "MIT; the data were made by this project's solvers",
    "published": "of the weights MIT; the data are PDEBench's and keep their own licence",
    "user": "the data are the user's own; their owner decides how the weights may be shared",
}


def write_cards(run_dir: Path, results: Results, known: Mapping[str, dict], figures: Path) -> None:
    """Write README.md and images/ to the folder of every stage in `results`. A card that somebody changed
    since it was written is kept, and named.

    known: TASK -> its facts (`ups.forecaster.Forecaster.tasks`); figures: folder of the report's figures.
    """
    for stage, tasks in results.facts["stages"].items():
        folder = run_dir / stage
        if not folder.is_dir():
            continue
        if is_changed_card(folder / CARD):
            print(
                f"{folder / CARD} was changed since a report wrote it and is kept, with the numbers and "
                "pictures of then. Delete it and make the report again for a card of this report."
            )
            continue
        remove_named(folder / IMAGES, "|".join(pictures_of_card(folder)))
        pictures = {
            name: found[0]
            for name in tasks
            if stage == "operator" and (found := sorted(figures.glob(f"{name}_median_error_*.png")))
        }
        if pictures:
            (folder / IMAGES).mkdir(exist_ok=True)
        for path in pictures.values():
            with replacing(folder / IMAGES / path.name) as temporary:
                shutil.copyfile(path, temporary)
        names = {name: path.name for name, path in pictures.items()}
        write_atomic(folder / CARD, signed_card(card(stage, results, known, names)))


def card(stage: str, results: Results, known: Mapping[str, dict], pictures: Mapping[str, str]) -> str:
    """The card of a stage as Markdown, with the head that a model hub reads. pictures: TASK -> file name."""
    facts = results.facts
    training, environment = facts["training"], facts["environment"]
    gates = [gate for gate in facts["gates"] if gate["stage"] == stage]
    failed, undecided = not_passed(gates)
    return render(
        "model_card.md",
        run=facts["run"],
        created=facts["created"],
        split=facts["protocol"]["split"],
        training=training,
        device=environment.get("device"),
        torch=environment.get("torch"),
        revision=environment.get("git_revision"),
        licence=LICENCES[training["source"]],
        title=STAGES[stage].title,
        call=Markup(STAGES[stage].call),
        domains=[_domain(name, known[name]) for name in known if name in facts["stages"][stage]],
        scores=SCORES_OF[STAGES[stage].tasks](results),
        gates=gates,
        failed=failed,
        undecided=undecided,
        pictures=pictures,
        images=IMAGES,
        table=_table,
    )


def _domain(name: str, facts: Mapping[str, Any]) -> list[Any]:
    """Fields, grid, domain, time step, history and parameters of a task."""
    units, step = facts["units"], facts["dt"]
    spans = [f"{key} {low:g} to {high:g}" for key, (low, high) in facts["parameters"].items()]
    return [
        name,
        ", ".join(in_unit(field, units.get(field)) for field in facts["fields"]),
        "×".join(map(str, facts["grid"])),
        *_geometry(facts["domain"], facts["boundary"]),
        f"{step:g} {units.get('time', '')}".rstrip() if step else "steady",
        facts["history"],
        ", ".join(spans) or "none",
    ]


def _geometry(domain: Sequence, boundary: str | Sequence[str]) -> tuple[str, str]:
    """Domain and boundary in words, one for all axes or one for each."""
    spans = domain if isinstance(domain[0], (list, tuple)) else [domain]
    kinds = [boundary] if isinstance(boundary, str) else boundary
    return " × ".join(f"{low:g} to {high:g}" for low, high in spans), ", ".join(kinds)


def _table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> Markup:
    head, *lines = [list(map(_text, line)) for line in (head, *rows)]
    return Markup("\n".join(markdown_table(head, lines)))


def _text(value: Any) -> str:
    """A cell: a number, with its interval if it has one."""
    if not is_interval(value):
        return number(value)
    ends = "" if value["low"] is None else f" [{number(value['low'])}, {number(value['high'])}]"
    return number(value["value"]) + ends


def _forecasts(results: Results) -> Scores:
    """nRMSE of the operator, its base, trivial forecasts and networks of other kinds."""
    tasks = results.tasks
    others = [name for name in (*TRIVIAL, *NETWORKS) if any(name in task.models() for task in tasks.values())]
    rows = [
        [
            name,
            task.number("", "num_frames_predicted"),
            task.number("", "num_trajectories"),
            *[task.value(model, error_of(task)) for model in ("operator", "base", *others)],
            "on" if task.facts["network_is_used"] else "off",
        ]
        for name, task in tasks.items()
    ]
    head = ["task", "frames", "trajectories", "nRMSE", "base alone", *map(label, others), "network"]
    facts = {name: task.facts for name, task in tasks.items()}
    notes = [f"{name}{words}" for name, of in facts.items() if (words := horizon_of(of))]
    notes += [f"{name}: {noise_in_words(tasks[name])}" for name, of in facts.items() if "noise" in of]
    notes += [f"{name}: {line}" for name, of in facts.items() for line in of.get("found", [])]
    return {"head": head, "rows": rows, "notes": notes}


def _ensembles(results: Results) -> Scores:
    """Scores of every ensemble of a task."""
    rows = [
        [name, label(model), *[entry.value(model, key) for key in SCORES]]
        for name, entry in results.ensembles.items()
        for model in ordered(entry.models())
    ]
    return {"head": ["task", "ensemble", *SCORES.values()], "rows": rows, "notes": []}


def _priors(results: Results) -> Scores:
    """Scores of every prior of a task, by which part of the coefficient is observed."""
    rows = [
        [name, case_name(case), label(model), *[entry.value(model, key, case) for key in SCORES]]
        for name, entry in results.steady.items()
        for case in entry.cases(OBSERVED)
        for model in ordered(entry.models(case))
    ]
    return {"head": ["task", "observed", "ensemble", *SCORES.values()], "rows": rows, "notes": []}


# tasks of a stage (ups/common/place.py) -> its table of scores
SCORES_OF = {"all": _forecasts, "transient": _ensembles, "steady": _priors}
