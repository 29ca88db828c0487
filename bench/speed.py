"""Time per predicted state of UPS, FNO and U-Net, on the tasks and with the settings of bench/eleven.py.

    python -m bench.numerics
    python -m bench.speed --budget 40
    python -m bench.table                 # writes docs/peers.md

The models of a task are trained for a short time with the settings that were found for the comparison at
equal time, because times hardly depend on how well the weights are trained. Then all models forecast the
test trajectories in turns, in one process, so that whatever else the machine does is the same for all. A time
is the median of the turns, in processor milliseconds of one thread per predicted state. Writes
bench/results/speed/TASK.json.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from bench.baselines import Trained
from bench.command import parser_of
from bench.compare import fit
from bench.eleven import RESULTS, entry, found_before, identity, keep, key_of, read
from bench.numerics import CONFIG, NUMERICS
from bench.score import Split, load, with_cache
from bench.tune import add_arguments, prepare
from ups.config.load import load_config

OUT = RESULTS / "speed"
COLUMNS = ("ours_generic", "ours", "fno", "unet")
SIDE_BY_SIDE = 64  # trajectories, or as many as there are
SEARCHED = 180.0  # seconds of training and of search of the results whose settings serve
TURNS = 7


@torch.no_grad()
def times_in_turns(models: dict[str, Trained], split: Split, num_rows: int) -> dict[str, float]:
    """Processor milliseconds per state of every model, for so many trajectories at once."""
    given, parameters, num_frames = split.given[:num_rows], split.parameters[:num_rows], split.truth.shape[1]
    found: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(1 + TURNS):  # the first one warms up
        for name, model in models.items():
            start = time.process_time()
            model.predict(given, parameters, num_frames)
            if turn:
                found[name].append(1e3 * (time.process_time() - start) / (len(given) * num_frames))
    return {name: sorted(values)[TURNS // 2] for name, values in found.items()}


@torch.no_grad()
def is_base_alone(model: Trained, split: Split) -> bool:
    """Whether validation chose not to use the network."""
    if model.predict_base is None:
        return False
    start = split.given[:1], split.parameters[:1], 1
    return torch.equal(model.predict(*start), model.predict_base(*start))


def measure(task: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train all models of a task and take their times."""
    config = with_cache(load_config(args.config, args.overrides), task)
    problem, splits = load(config, task)
    args = argparse.Namespace(**vars(args) | {"task": task})
    searched = argparse.Namespace(**vars(args) | {"budget": SEARCHED, "search": SEARCHED})
    data, models, entries = identity(config, task), {}, []
    for column in COLUMNS:
        settings = found_before(read(task), key_of(searched, column, 0, data))
        if settings is None:
            raise FileNotFoundError(
                f"{task}: no settings of {column}; expected a result of the same data in {RESULTS}. "
                f"Run python -m bench.eleven --budget {SEARCHED:g} --search {SEARCHED:g} --task {task} first."
            )
        models[column] = fit(column, config, problem, splits["val"], settings, args, 0, args.budget)
        entries.append(entry(key_of(args, column, 0, data), settings, args))
    alone = times_in_turns(models, splits["test"], 1)
    together = times_in_turns(models, splits["test"], SIDE_BY_SIDE)
    for one in entries:
        column = one["key"]["column"]
        one["row"] = {
            "state_ms": together[column],
            "state_ms_alone": alone[column],
            "steps": models[column].steps,
            "is_base_alone": is_base_alone(models[column], splits["test"]),
        }
    return {"task": task, "rows": min(SIDE_BY_SIDE, len(splits["test"].truth)), "entries": entries}


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--task", nargs="+", choices=tuple(NUMERICS), default=list(NUMERICS))
    add_arguments(parser)
    parser.set_defaults(config=CONFIG, search=0.0, overrides=[], settings={})
    args = parser.parse_args(argv)
    prepare(args)
    for task in args.task:
        record = measure(task, args)
        keep(record, OUT)
        for one in record["entries"]:
            print(task, one["key"]["column"], one["row"], flush=True)


if __name__ == "__main__":
    main()
