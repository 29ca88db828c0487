"""Predict: the forecast of every field in a file, from a shell.

    u(t + dt) = decode(O(encode u(t))), and with --members M each of M draws has errors of its own

Reads:  RUN (a finished run's folder), INPUT (HDF5 in the task's layout; a forecast starts from its last
frames).
Writes: OUTPUT, whole or not at all, in the same layout, so that it can be the next input: the frames that
        were shown, then those that follow. Trajectory r * M + m is member m of row r. Attributes say which
        weights, rows, members and parameters.

    python predict.py --run runs/small --task burgers1d --input my.h5 --output out.h5 --frames 30
    python predict.py --run runs/small --task burgers1d_hidden --input my.h5 --output out.h5 --frames 10
    --members 16
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import ups
from ups.data.generate import generation_settings, write_data
from ups.data.pdebench import Trajectories, coordinate_key, data_bytes, open_data
from ups.files import file_hash, flush
from ups.forecaster import Forecaster
from ups.labelled import CLOSE
from ups.tasks import get_task

STATES = 64   # fields in one call of the network


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in (("run", "folder of a finished run, such as runs/small"), ("task", "name of a task it "
                                                                                         "was trained on"),
                       ("input", "HDF5 file in the task's layout"), ("output", "file to write; must not be "
                                                                               "there")):
        parser.add_argument(f"--{name}", required=True, help=what)
    parser.add_argument("--frames", type=int, default=1, help="frames to forecast (1)")
    parser.add_argument("--members", type=int, default=0, help="draws per row; 0: the operator's forecast "
                                                               "alone")
    parser.add_argument("--by", default="student", help="what draws the members: student or teacher")
    parser.add_argument("--seed", type=int, default=0, help="of the members")
    parser.add_argument("--rows", default=":", metavar="FIRST:LAST", help="trajectories of the input (all)")
    parser.add_argument("--shown", type=int, metavar="N", help="use the first N frames of the input only "
                                                               "(all)")
    parser.add_argument("--parameters", nargs="*", default=[], metavar="NAME=VALUE", help="in place of the "
                                                                                          "input's "
                                                                                          "attributes")
    parser.add_argument("--space-stride", type=int, default=1, metavar="N", help="every N-th cell of the "
                                                                                 "input")
    parser.add_argument("--time-stride", type=int, default=1, metavar="N", help="every N-th frame of the "
                                                                                "input")
    parser.add_argument("--resample", action="store_true", help="take another grid to the trained one and "
                                                                "back")
    parser.add_argument("--extrapolate", action="store_true", help="allow parameters outside the trained "
                                                                   "range")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done and write nothing")
    return parser.parse_args(arguments)


def rows_of(text: str, num: int) -> range:
    """FIRST:LAST as rows of a file of num. Raises ValueError."""
    try:
        first, last = (int(part) if part else default
                       for part, default in zip(text.split(":"), (0, num), strict=True))
    except ValueError:
        first = last = -1
    if not 0 <= first < last <= num:
        raise ValueError(f"--rows is {text!r}; expected FIRST:LAST with 0 <= FIRST < LAST <= {num}, as the "
                         "input has so many trajectories. Give such a range, or leave it out.")
    return range(first, last)


def parameters_of(given: list[str], known: dict[str, Any], source: Trajectories) -> dict[str, float] | None:
    """The values of the parameters that the model is shown, of the command line or else of the file."""
    try:
        named = {name: float(value) for name, value in (text.split("=") for text in given)}
    except ValueError:
        raise ValueError(f"--parameters is {' '.join(given)!r}; expected NAME=VALUE, such as Nu=0.01, of "
                         f"{', '.join(known) or 'none'}. Correct it.") from None
    values = {name: source.attributes[name] for name in known if name in source.attributes} | named
    if source.parameter is not None and known:
        values.setdefault(next(iter(known)), source.parameter)
    return values or None


def main(arguments: list[str] | None = None) -> int:
    # ---- config
    args = parse(arguments)
    output = Path(args.output)
    if output.exists() or not output.absolute().parent.is_dir():
        raise ValueError(f"--output is {output}; expected a new file in a folder that is there. Delete it, "
                         "or name another.")
    for name in ("space_stride", "time_stride"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; expected at least 1. "
                             "Leave it out for all.")

    # ---- model
    model = ups.load(args.run, args.device)
    head, task = model.operator.head(args.task), get_task(args.task)
    known = model.tasks[args.task]

    # ---- data
    source = open_data(args.input, args.task, space_stride=args.space_stride, time_stride=args.time_stride)
    rows, shown = rows_of(args.rows, source.num_trajectories), args.shown or source.num_frames
    if not head.history <= shown <= source.num_frames:
        raise ValueError(f"--shown is {shown} of the {source.num_frames} frames of {args.input}; expected "
                         f"{head.history} or more, the history of {args.task}. Give more frames.")
    values = parameters_of(args.parameters, known["parameters"], source)
    repeats, is_steady = max(1, args.members), task.is_steady
    num_frames = 1 if is_steady else head.history + args.frames
    settings = generation_settings(
        args.task, f"forecast of {file_hash(Path(args.run) / 'operator' / 'model.safetensors')}",
        seed=args.seed,
        num_trajectories=len(rows) * repeats, resolution=source.space[0], num_frames=num_frames,
        t_end=known["dt"] * (num_frames - 1),
        parameter=(values or {}).get(next(iter(task.parameters), ""), source.parameter))
    size = data_bytes(args.task, len(rows) * repeats, num_frames, source.space[0]) / 2**20
    print(f"{args.output}: {len(rows)} rows of {args.task} x {repeats} member(s) x {num_frames} frames, "
          f"{size:.1f} MiB{', not written' if args.dry_run else ''}")
    if args.dry_run:
        return 0

    # ---- loop
    with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=".predict-") as folder:
        path = Path(folder) / output.name
        write_data(path, args.task, lambda indices,
                   **_: predict(model, args, source, rows, indices, values, shown), settings,
                   chunk=repeats * max(1, STATES // repeats))
        describe(path, args, source, shown, head.history, rows, values, known["dt"])
        os.replace(path, output)
    flush(output.absolute().parent)
    print(f"{output}: written")
    return 0


def predict(model: Forecaster, args: argparse.Namespace, source: Trajectories, rows: range,
            indices: np.ndarray, values: dict[str, float] | None, shown: int) -> np.ndarray:
    """Trajectories `indices` of the output, all members of neighbouring rows: (n, frames, channels, *space)
    float32."""
    repeats, task = max(1, args.members), get_task(args.task)
    first, last = rows[indices[0] // repeats], rows[indices[-1] // repeats] + 1
    u = source.read(first, last)
    context = (u[:, :, : len(task.inputs)] if task.is_steady
               else u[:, :shown][:, -model.operator.head(args.task).history :])
    trained = model.tasks[args.task]["dt"]
    # times are float32
    step = None if abs(source.dt - trained) <= CLOSE * trained or shown == 1 else source.dt
    options = {"parameters": values, "num_frames": 1 if task.is_steady else args.frames,
               "resample": args.resample, "extrapolate": args.extrapolate, "dt": step}
    if args.members:
        u_pred = model.sample(args.task, context, members=repeats, by=args.by, seed=args.seed,
                              rows=range(first, last), **options)
        u_pred = u_pred.reshape(-1, *u_pred.shape[2:])
    else:
        u_pred = model.forecast(args.task, context, **options)
    return np.concatenate([context.repeat(repeats, 0), u_pred], 2 if task.is_steady else 1)


def describe(path: Path, args: argparse.Namespace, source: Trajectories, shown: int, history: int,
             rows: range, values: dict[str, float] | None, dt: float) -> None:
    """Times of the frames as they follow the input's, and attributes."""
    task = get_task(args.task)
    with h5py.File(path, "r+", locking=False) as file:
        file.attrs.update({"task": args.task, "run": args.run, "first_row": rows[0], "members": args.members,
                           "shown_frames": history, **(values or {})})
        if not task.is_steady:
            begin = source.coordinates["t"][shown - history]
            for place in file.values() if task.layout == "groups" else [file]:
                times = place[coordinate_key(task, "t")]
                times[...] = begin + dt * np.arange(times.shape[-1])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        # what a user can cause: the message says what to do, a traceback would hide it
        sys.exit(f"predict.py: {error}")
