"""The leaderboard: one JSON line per run, the same run replaced; only runs with the same protocol and data
share a table.

    python -m ups.evaluation.leaderboard [--path runs/leaderboard.jsonl] [--metric nrmse] [--task TASK]

A row: run, created, config_hash, git, passed (all gates), parameters, seconds, protocol, tasks: TASK ->
{num_frames, grid, parameters, num_trajectories, metrics: {name: value}, ratio: operator over its trivial
baseline}.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
from pathlib import Path

from ups.evaluation.gates import trivial_of
from ups.evaluation.tables import is_interval, number
from ups.files import write_atomic

PATH = "runs/leaderboard.jsonl"


def row_of(results: dict) -> dict:
    """The leaderboard row of valid `results` (see ups.evaluation.report)."""
    tasks = {}
    for name, task in results["tasks"].items():
        operator = task["models"]["operator"]
        trivial, ours = (task["models"][model]["nrmse"]["value"] for model in (trivial_of(task), "operator"))
        tasks[name] = {"num_frames": task["num_frames_predicted"], "grid": task["grid"],
                       "parameters": task["parameters"], "num_trajectories": task["num_trajectories"],
                       "metrics": {key: value["value"] if is_interval(value) else value
                                   for key, value in operator.items() if is_interval(value)
                                   or (key == "ms_per_state" and value is not None)},
                       "ratio": ours / trivial if ours is not None and trivial else None}
    return {"run": results["run"], "created": results["created"], "config_hash": results["config_hash"],
            "git": results["environment"].get("git_revision"),
            "passed": all(gate["passed"] for gate in results["gates"]),
            "parameters": results["training"].get("parameters"),
            "seconds": results["training"].get("seconds"),
            "protocol": {key: value for key, value in results["protocol"].items() if key != "seed"},
            "tasks": tasks}


def read(path: str | Path = PATH) -> list[dict]:
    """Rows of the file, none when it does not exist. Raises ValueError naming the line that is not a row."""
    path = Path(path)
    rows = []
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), start=1):
        try:
            rows.append(json.loads(line))
            rows[-1]["run"], rows[-1]["tasks"], rows[-1]["protocol"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} line {i} is {line[:60]!r}; expected one JSON row per run. Delete that "
                             "line.") from error
    return rows


def add(results: dict, path: str | Path = PATH) -> None:
    """Put the row of valid `results` into the file, replacing the row of the same run.

    Several processes may add at once: under a lock the file is written anew beside itself and renamed, so
    neither a reader nor a crash sees half of it.
    """
    path, row = Path(path), row_of(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [other for other in read(path) if other["run"] != row["run"]] + [row]
        write_atomic(path, "".join(json.dumps(other, allow_nan=False) + "\n" for other in rows))


def mean_of(row: dict, metric: str, task: str | None = None) -> float | None:
    """Geometric mean of `metric` over the row's tasks, or over `task` alone: a ratio counts the same on an
    easy and on a hard task."""
    values = [entry["metrics"].get(metric) for name, entry in row["tasks"].items() if task in (None, name)]
    if not values or any(value is None or value <= 0 for value in values):
        return None
    return math.exp(sum(map(math.log, values)) / len(values))


def table(path: str | Path = PATH, metric: str = "nrmse", task: str | None = None) -> str:
    """Markdown, best first (lower is better except for correlation_time), by `task` or by the mean over
    tasks.

    Runs that differ in protocol, tasks, grid, frames, parameters or number of trajectories are not comparable
    and get tables of their own. A value that is missing or not finite sorts last.
    """
    groups: dict[str, list[dict]] = {}
    for row in read(path):
        data = {name: [entry[key] for key in ("num_frames", "grid", "parameters", "num_trajectories")]
                for name, entry in row["tasks"].items()}
        groups.setdefault(json.dumps([row["protocol"], data], sort_keys=True), []).append(row)
    if not groups:
        return f"No runs in {path}."
    known = {name for rows in groups.values() for row in rows for entry in row["tasks"].values()
             for name in entry["metrics"]}
    if metric not in known:
        raise ValueError(f"no run has the metric {metric!r}; expected one of {', '.join(sorted(known))} in "
                         f"{path}. Change --metric.")
    shown = [_markdown(rows, metric, task) for rows in groups.values() if task in (None, *rows[0]["tasks"])]
    if not shown:
        raise ValueError(f"no run was scored on {task!r}; expected a task of {path}. Leave --task out to see "
                         "all.")
    return "\n\n".join(shown)


def _markdown(rows: list[dict], metric: str, task: str | None) -> str:
    """One table, of runs that can be compared."""
    tasks, sign = sorted(rows[0]["tasks"]), -1 if metric == "correlation_time" else 1
    horizon = ", ".join(f"{name} {'×'.join(map(str, rows[0]['tasks'][name]['grid']))} cells, "
                        f"{rows[0]['tasks'][name]['num_frames']} frames" for name in tasks)
    settings = ", ".join(f"{name} {value}" for name, value in sorted(rows[0]["protocol"].items()))
    head = ["run", "gates", f"{metric} (geometric mean)", *tasks, "parameters", "seconds", "git"]
    ranked = sorted(((mean_of(row, metric, task), row) for row in rows),
                    key=lambda pair: (pair[0] is None, sign * (pair[0] or 0.0)))
    cells = [[row["run"], "pass" if row["passed"] else "FAIL", number(mean_of(row, metric)),
              *[number(row["tasks"][name]["metrics"].get(metric)) for name in tasks],
              number(row["parameters"]), number(row["seconds"]), str(row["git"] or "–")[:10]]
             for _, row in ranked]
    return "\n".join([f"{horizon} ({settings})", "",
                      *(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells))])


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the leaderboard as Markdown.")
    parser.add_argument("--path", default=PATH)
    parser.add_argument("--metric", default="nrmse")
    parser.add_argument("--task")
    arguments = parser.parse_args()
    print(table(arguments.path, arguments.metric, arguments.task))


if __name__ == "__main__":
    main()
