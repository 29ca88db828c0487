"""Train every combination of some settings and seeds with make, and compare them on validation.

    make sweep GRID="operator.optim.muon_lr=2e-3,4e-3 operator.model.depth=2,4" SEEDS="0 1" STAGES=operator

Commas outside brackets separate the values of a key. Each combination and seed is a run RUN-HASH-sSEED with a
report on the validation split (report-val/); finished runs are not trained again. A setting that changes the
latents gets its own folder of caches. The table of means and standard deviations over seeds, best first, is
printed and written to RUNS/RUN-sweep.md. For all runs see the leaderboard with --split val.
"""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.leaderboard import figure, mean_of, read_report
from ups.common.files import value_hash, write_atomic
from ups.common.place import make_command
from ups.common.text import number
from ups.config.command import DEFAULT_OVERLAY, read_command, run_script
from ups.config.load import load_config
from ups.evaluation.gates import horizon_of
from ups.report.tables import markdown_table

OPTIONS = {
    "--config": {"default": str(DEFAULT_OVERLAY)},
    "--run": {"required": True, "help": "first part of the names of runs"},
    "--runs": {"default": "runs", "help": "folder of all runs"},
    "--seeds": {"default": "0", "help": "such as '0 1 2'"},
    "--args": {"default": "", "help": "overrides of all runs"},
    "--stages": {"default": "", "help": "in place of evaluate.stages"},
    "--topology": {"default": "single"},
    "grid": {"nargs": "+", "metavar": "section.key=value,value"},
}
LATENT_KEYS = ("task.", "data.", "cache.")  # a change of these needs other caches
SPLIT = re.compile(r",(?![^\[{]*[\]}])")  # a comma outside brackets
INHERITED = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")  # set by the make that runs the sweep

RESULTS = Path("report-val") / "results.json"

Setting = tuple[str, ...]  # overrides, key=value


def settings_of(grid: Iterable[str]) -> list[Setting]:
    """Return every combination of the values in `key=value,value`. Raises ValueError for another text."""
    axes = []
    for text in grid:
        key, sign, values = text.partition("=")
        if not (key and sign and all(SPLIT.split(values))):
            raise ValueError(
                f"the grid has {text!r}; expected key=value,value, such as "
                "operator.optim.muon_lr=2e-3,4e-3. Fix it."
            )
        axes.append([f"{key}={value}" for value in SPLIT.split(values)])
    return list(itertools.product(*axes))


def name_of(run: str, setting: Setting, seed: int) -> str:
    return f"{run}-{value_hash(sorted(setting))[:6]}-s{seed}"


def overrides_of(run: str, setting: Setting, seed: int, cache_root: str) -> list[str]:
    """Return the overrides of one run."""
    needs_caches = any(override.startswith(LATENT_KEYS) for override in setting)
    cache = [f"cache.root={cache_root}/{run}-{value_hash(sorted(setting))[:6]}"] if needs_caches else []
    return [*setting, *cache, f"run.seed={seed}", "evaluate.split=val"]


def table(runs: Path, run: str, settings: Sequence[Setting], seeds: Sequence[int]) -> str:
    """Return a Markdown table of validation nRMSE, best first: mean and standard deviation over seeds."""
    rows, tasks, horizons = [], [], {}  # horizons: TASK -> every one that was scored, in words
    for setting in settings:
        paths = [runs / name_of(run, setting, seed) / RESULTS for seed in seeds]
        found = [read_report(path.parent)[0] for path in paths if path.is_file()]
        tasks = tasks or [name for results in found[:1] for name in results.tasks]
        for name, results in itertools.product(tasks, found):
            horizons.setdefault(name, {})[horizon_of(results.tasks[name].facts)] = None
        scores = [
            [mean_of(results, "nrmse") for results in found],
            *([figure(results.tasks[name], "nrmse") for results in found] for name in tasks),
        ]
        rows.append((setting, len(found), scores))
    rows.sort(key=lambda row: mean(row[2][0]) if row[1] and None not in row[2][0] else float("inf"))
    named = [name + " or".join(horizons[name]) for name in tasks]
    head = ["setting", f"seeds of {len(seeds)}", "nRMSE (geometric mean)", *named]
    lines = [[" ".join(setting), str(count), *map(_spread, scores)] for setting, count, scores in rows]
    return "\n".join(markdown_table(head, lines))


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return "–"
    return number(mean(known)) + (f" ± {number(stdev(known))}" if len(known) > 1 else "")


def train(name: str, arguments: Any, overrides: Iterable[str]) -> bool:
    """Make one run and return whether it has a report. A report with failed gates counts as well."""
    environment = {key: value for key, value in os.environ.items() if key not in INHERITED}
    variables = {
        "CONFIG": arguments.config,
        "RUN": name,
        "RUNS": arguments.runs,
        "STAGES": arguments.stages,
        "TOPOLOGY": arguments.topology,
        "PYTHON": sys.executable,
        "ARGS": " ".join(overrides),
    }
    done = subprocess.run(
        [
            *make_command(),
            "--no-print-directory",
            "report",
            *(f"{key}={value}" for key, value in variables.items()),
        ],
        env=environment,
    )
    return not done.returncode or (Path(arguments.runs) / name / RESULTS).is_file()


def main() -> int:
    arguments = read_command(__doc__, OPTIONS, prog="python -m bench.sweep")
    run, runs, shared = arguments.run, Path(arguments.runs), arguments.args.split()
    settings, seeds = settings_of(arguments.grid), list(map(int, arguments.seeds.split()))
    # all settings are checked before the first run is trained
    roots = {setting: load_config(arguments.config, [*shared, *setting]).cache.root for setting in settings}
    failed = []
    for setting, seed in itertools.product(settings, seeds):
        name = name_of(run, setting, seed)
        print(f"{name}: {' '.join(setting)}, seed {seed}", flush=True)
        if not train(name, arguments, [*shared, *overrides_of(run, setting, seed, roots[setting])]):
            failed.append(name)
    text = table(runs, run, settings, seeds)
    write_atomic(runs / f"{run}-sweep.md", text + "\n")
    print(f"\n{text}\n\n{runs / f'{run}-sweep.md'}")
    if failed:
        print(
            f"{len(failed)} of {len(settings) * len(seeds)} runs failed: {', '.join(failed)}", file=sys.stderr
        )
    return 1 if failed else 0


if __name__ == "__main__":
    run_script(main, "sweep")
