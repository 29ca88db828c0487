"""Model cards: what the weights in a stage's folder are, what they were measured to do and where they hold,
as README.md beside them, written from results.json; with a picture per task.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ups.common.files import remove, write_atomic
from ups.common.formatting import number
from ups.common.stages import STAGES
from ups.evaluation.gates import TRIVIAL
from ups.evaluation.selected import in_words
from ups.report.bench_rows import NETWORKS
from ups.report.figures_ensemble import case_name
from ups.report.tables import is_interval, label, markdown, ordered
from ups.tasks import in_unit
from ups.training.finished import CARD, IMAGES

SCORES = {
    "crps": "fair CRPS",
    "energy_score": "energy score",
    "ssr": "spread / skill",
    "nrmse_mean": "nRMSE of the mean",
}
LICENCES = {
    "generate": "MIT; the data were made by this project's solvers",
    "published": "of the weights MIT; the data are PDEBench's and keep their own licence",
    "user": "the data were the user's own, whose owner says how the weights may be passed on",
}


def write_cards(run_dir: Path, results: Mapping[str, Any], known: Mapping[str, dict], figures: Path) -> None:
    """README.md and images/ in the folder of every stage that `results` judge.

    known: task -> what the operator knows of it (`ups.forecaster.Forecaster.tasks`); figures: the report's.
    """
    for stage, tasks in results["stages"].items():
        folder = run_dir / stage
        if not folder.is_dir():
            continue
        remove(folder / IMAGES)
        pictures = {
            name: found[0]
            for name in tasks
            if stage == "operator" and (found := sorted(figures.glob(f"{name}_median_error_*.png")))
        }
        if pictures:
            (folder / IMAGES).mkdir()
        for path in pictures.values():
            shutil.copyfile(path, folder / IMAGES / path.name)
        write_atomic(
            folder / CARD, card(stage, results, known, {name: path.name for name, path in pictures.items()})
        )


def card(
    stage: str, results: Mapping[str, Any], known: Mapping[str, dict], pictures: Mapping[str, str]
) -> str:
    """The card of a stage as Markdown, with the head that a model hub reads. pictures: task -> file name."""
    training, environment = results["training"], results["environment"]
    gates = [gate for gate in results["gates"] if gate["stage"] == stage]
    failed = [gate for gate in gates if not gate["passed"]]
    scores = {"operator": _forecasts, "steady": _priors}.get(stage, _ensembles)(stage, results)
    return "\n".join(
        [
            "---",
            "license: mit" if training["source"] == "generate" else "license: other",
            "library_name: ups",
            "tags: [physics, partial-differential-equations, forecasting]",
            "---",
            "",
            f"# {results['run']}: {STAGES[stage].title}",
            "",
            f"Weights of UPS, made {results['created'][:10]}. In Python:",
            "",
            "```python",
            "import ups",
            "",
            'model = ups.load("FOLDER")   # of the run; from a hub "hf://OWNER/NAME"',
            f"model.{STAGES[stage].call}",
            "```",
            "",
            "## Where it holds",
            "",
            *_table(
                ["task", "fields", "grid", "domain", "boundary", "dt", "history", "parameters"],
                [
                    [
                        name,
                        ", ".join(in_unit(field, facts["units"].get(field)) for field in facts["fields"]),
                        "×".join(map(str, facts["grid"])),
                        *_geometry(facts["domain"], facts["boundary"]),
                        f"{facts['dt']:g} {facts['units'].get('time', '')}".rstrip()
                        if facts["dt"]
                        else "steady",
                        facts["history"],
                        ", ".join(
                            f"{key} {low:g} to {high:g}" for key, (low, high) in facts["parameters"].items()
                        )
                        or "none",
                    ]
                    for name, facts in known.items()
                    if name in results["stages"][stage]
                ],
            ),
            "",
            "Another grid, time step or parameter value is refused by name; see `ups.load(..).forecast`.",
            "",
            "## What was measured",
            "",
            f"On the {results['protocol']['split']} split, which chose nothing; in brackets 95 % intervals "
            f"over "
            "initial conditions.",
            "",
            *scores,
            "",
            f"{len(gates) - len(failed)} of {len(gates)} gates of this stage passed."
            + "".join(f" Failed: {gate['name']}, {gate['reason']}." for gate in failed),
            "",
            *[
                line
                for name, file in pictures.items()
                for line in (
                    f"![{name}: truth, forecast and error of the trajectory with the median "
                    f"error]({IMAGES}/{file})",
                    "",
                )
            ],
            "## How it was made",
            "",
            *_table(
                ["", ""],
                [
                    ["data", f"{training['source']}, seed {training['data_seed']}"],
                    ["seed", training["seed"]],
                    ["started from", training["init"] or "nothing"],
                    ["operator's steps", training["steps"]],
                    ["operator's parameters", training["parameters"]],
                    ["seconds in the operator's loop", training["seconds"]],
                    ["judged on", f"{environment.get('device')}, torch {environment.get('torch')}"],
                    ["revision", environment.get("git_revision") or "unknown"],
                    ["licence", LICENCES[training["source"]]],
                ],
            ),
            "",
            "All settings: `config.yaml`. Loss and validation: `metrics.jsonl`.",
            "",
        ]
    )


def _geometry(domain: Sequence, boundary: str | Sequence[str]) -> tuple[str, str]:
    """Domain and boundary in words; one for all axes, or one each."""
    spans = domain if isinstance(domain[0], (list, tuple)) else [domain]
    kinds = [boundary] if isinstance(boundary, str) else boundary
    return " × ".join(f"{low:g} to {high:g}" for low, high in spans), ", ".join(kinds)


def _table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> list[str]:
    head, *lines = [list(map(_text, line)) for line in (head, *rows)]
    return markdown(head, lines)


def _text(value: Any) -> str:
    """A cell; of a number with an interval both."""
    if not is_interval(value):
        return number(value)
    ends = "" if value["low"] is None else f" [{number(value['low'])}, {number(value['high'])}]"
    return number(value["value"]) + ends


def _forecasts(_: str, results: Mapping[str, Any]) -> list[str]:
    """nRMSE of the operator beside its base, trivial forecasts and what else was trained."""
    tasks = results["tasks"].values()
    others = [name for name in (*TRIVIAL, *NETWORKS) if any(name in task["models"] for task in tasks)]
    rows = []
    for name, task in results["tasks"].items():
        models = ["operator", "base", *others]
        rows.append(
            [
                name,
                task["num_frames_predicted"],
                task["num_trajectories"],
                *[task["models"].get(model, {}).get("nrmse") for model in models],
                "on" if task["network_is_used"] else "off",
            ]
        )
    head = ["task", "frames", "trajectories", "nRMSE", "base alone", *map(label, others), "network"]
    return [
        *_table(head, rows),
        "",
        *[
            f"- {name}: {in_words(task['selection'])}"
            for name, task in results["tasks"].items()
            if task.get("selection")
        ],
    ]


def _ensembles(_: str, results: Mapping[str, Any]) -> list[str]:
    """Scores of every ensemble of a task."""
    rows = [
        [name, label(model), *[entry["models"][model].get(key) for key in SCORES]]
        for name, entry in results["ensembles"].items()
        for model in ordered(entry["models"])
    ]
    return _table(["task", "ensemble", *SCORES.values()], rows)


def _priors(_: str, results: Mapping[str, Any]) -> list[str]:
    """Scores of every prior of a task by what was seen of the coefficient."""
    rows = [
        [name, case_name(case), label(model), *[models[model].get(key) for key in SCORES]]
        for name, entry in results["steady"].items()
        for case, models in entry["cases"].items()
        for model in ordered(models)
    ]
    return _table(["task", "observed", "ensemble", *SCORES.values()], rows)
