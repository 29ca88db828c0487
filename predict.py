"""Predict: the forecast of every field in a file, from a shell.

    u(t + dt) = decode(O(encode u(t))), and with --members M each of M draws has errors of its own

Reads:  RUN (a finished run's folder), INPUT (HDF5 in the task's layout; the last frames are the start).
Writes: OUTPUT, whole or not at all, in the same layout, so that it can be the next input: the frames that
        were shown, then those that follow. Trajectory r * M + m is member m of row r. Attributes say which
        weights, rows, members and parameters.

    python predict.py --run runs/small --task burgers1d --input my.h5 --output out.h5 --frames 30
    python predict.py --run runs/small --task burgers1d_forced --input my.h5 --output out.h5 --members 16
"""

import math
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

import ups
from ups.common.files import flush, place_new
from ups.common.user_solver import solvers_named
from ups.config import DRY_RUN, read_command, run_script
from ups.data.arguments import by_name, parameters_of, require_forcing, rows_of
from ups.data.generate import generation_settings, write_data
from ups.data.layout import layout_of
from ups.data.pdebench import open_data
from ups.forecast_xarray import CLOSE
from ups.userdata.open_files import open_input
from ups.userdata.writer import write_user_file

STATES = 64  # fields in one call of the network
OPTIONS = {
    "--run": {"required": True, "help": "folder of a finished run, such as runs/small"},
    "--task": {"required": True, "help": "name of a task it was trained on"},
    "--input": {"required": True, "help": "HDF5 file in the task's layout"},
    "--output": {"required": True, "type": Path, "help": "file to write; must not be there"},
    "--frames": {"type": int, "default": 1, "help": "frames to forecast (1)"},
    "--members": {"type": int, "default": 0, "help": "draws per row; 0: the operator's forecast alone"},
    "--by": {"help": "what draws the members: student, student_2, teacher or rival (the one that serves)"},
    "--evaluations": {"type": int, "metavar": "N", "help": "of a network per call, in place of --by"},
    "--seed": {"type": int, "default": 0, "help": "of the members"},
    "--rows": {"default": ":", "metavar": "FIRST:LAST", "help": "trajectories of the input (all)"},
    "--shown": {"type": int, "metavar": "N", "help": "start from the first N frames of the input (all)"},
    "--parameters": {"nargs": "*", "default": [], "metavar": "NAME=VALUE", "help": "in place of the input's"},
    "--space-stride": {"type": int, "default": 1, "metavar": "N", "help": "every N-th cell of the input"},
    "--time-stride": {"type": int, "default": 1, "metavar": "N", "help": "every N-th frame of the input"},
    "--resample": {"action": "store_true", "help": "take another grid to the trained one and back"},
    "--extrapolate": {"action": "store_true", "help": "allow parameters and fields beyond the trained"},
    "--solver": {"nargs": "*", "default": [], "metavar": "TASK=MODULE:FUNCTION", "help": "coarse solvers"},
    "--device": {"default": "cpu"},
    **DRY_RUN,
}


def main(arguments: list[str] | None = None) -> int:
    # ---- config
    args = read_command(__doc__, OPTIONS, arguments)
    output, folder = args.output, args.output.absolute().parent
    if output.exists() or not folder.is_dir():
        raise ValueError(f"--output is {output}; expected a new file in an existing folder. Name another.")
    if args.frames < 1 or args.members < 0:
        raise ValueError(
            f"--frames is {args.frames} and --members {args.members}; expected at least 1 "
            f"frame, and 0 members or more. Correct them."
        )

    # ---- model
    model = ups.load(args.run, args.device, solvers_named(args.solver))
    head, known = model.operator.head(args.task), model.tasks.get(args.task)

    # ---- data
    strides, own = {"space_stride": args.space_stride, "time_stride": args.time_stride}, head.task.user_facts
    source = (
        open_data(args.input, args.task, **strides)
        if own is None
        else open_input(head.task, args.input, known["dt"], args.parameters, **strides)
    )
    rows, shown = rows_of(args.rows, source.num_trajectories), args.shown or source.num_frames
    if not head.history <= shown <= source.num_frames:
        raise ValueError(
            f"--shown is {shown}; expected at least {head.history}, the history of {args.task}, "
            f"and at most {source.num_frames}, the frames of {args.input}. Correct it."
        )
    values, is_steady = parameters_of(args.parameters, known["parameters"], source), head.task.is_steady
    # members are conditioned on one frame more where there is one, as in training and in the report
    context = min(shown, head.history + bool(args.members))
    repeats, num_frames = max(1, args.members), 1 if is_steady else context + args.frames
    is_near = shown == 1 or abs(source.dt - known["dt"]) <= CLOSE * known["dt"]  # times in files are float32
    options = {
        "parameters": values,
        "num_frames": 1 if is_steady else args.frames,
        "resample": args.resample,
        "extrapolate": args.extrapolate,
        "dt": None if is_near else source.dt,
    }
    size, free = (
        4 * len(rows) * repeats * num_frames * math.prod((len(known["fields"]), *source.space)),
        shutil.disk_usage(folder).free,
    )
    if size > free:
        raise ValueError(
            f"the forecast takes {size:.3g} bytes and {folder} has room for {free:.3g}; "
            f"expected less. Ask for fewer --frames, --members or --rows, or free space."
        )
    settings = generation_settings(
        args.task,
        f"forecast of {model.operator.record['model_sha256']}",
        seed=args.seed,
        num_trajectories=len(rows) * repeats,
        resolution=source.space[0],
        num_frames=num_frames,
        t_end=known["dt"] * (num_frames - 1),
        parameter=(values or {}).get(next(iter(head.task.parameters), ""), source.parameter),
    )
    print(
        f"{output}: {len(rows)} rows of {args.task} x {repeats} member(s) x {num_frames} frames"
        f"{', not written' if args.dry_run else ''}"
    )
    if args.dry_run:
        return 0

    require_forcing(head.task, source, shown, args.frames)

    # ---- loop
    def predict(indices: np.ndarray, **_: object) -> np.ndarray:
        """Trajectories of the output, all members of neighbouring rows: (n, frames, channels, *space)
        float32."""
        first, last = rows[indices[0] // repeats], rows[indices[-1] // repeats] + 1
        u = source.read(first, last)
        u, f = np.split(u, [u.shape[2] - len(head.task.forcing)], 2)
        f = head.task.absolute(f, head.task.forcing)[:, shown - context : shown + args.frames]
        u = u[:, :, : len(head.task.inputs)] if is_steady else u[:, shown - context : shown]
        options["forcing"] = by_name(head.task, f[:, context - 1 :])
        if own is not None and not values and known["parameters"]:
            options["parameters"] = source.parameters[first:last]
        if args.members:
            options.update(
                members=args.members,
                by=args.by,
                evaluations=args.evaluations,
                seed=args.seed,
                rows=range(first, last),
            )
        u = head.task.absolute(u, head.input_codec.fields)
        u_pred = (model.sample if args.members else model.forecast)(args.task, u, **options)
        u_pred = u_pred.reshape(-1, *u_pred.shape[2:]) if args.members else u_pred
        u = np.concatenate([u.repeat(repeats, 0), u_pred], 2 if is_steady else 1)
        return np.concatenate([u, f.repeat(repeats, 0)], 2) if head.task.forcing else u

    with tempfile.TemporaryDirectory(dir=folder, prefix=".predict-") as temporary:
        path = Path(temporary) / output.name
        chunk = repeats * max(1, STATES // repeats)
        if own is None:
            write_data(path, args.task, predict, settings, chunk=chunk)
        else:
            table = np.tile(list(values.values()), (len(rows), 1)) if values else source.parameters[rows]
            write_user_file(
                path,
                head.task,
                predict,
                len(rows) * repeats,
                num_frames,
                source.space,
                chunk=chunk,
                times=known["dt"] * np.arange(num_frames),
                parameters=table.repeat(repeats, 0),
            )
        with h5py.File(path, "r+", locking=False) as file:
            file.attrs.update(
                {
                    "task": args.task,
                    "run": args.run,
                    "first_row": rows[0],
                    "members": args.members,
                    "shown_frames": context,
                    **(values or {}),
                }
            )
            layout = layout_of(head.task) if own is None else None
            for name in () if is_steady or own is not None else layout.names(file) or ("",):
                times = file[layout.coordinate("t", name)]  # those that follow the input's
                begin = source.coordinates["t"][shown - context]
                times[...] = begin + known["dt"] * np.arange(times.shape[-1])
        place_new(path, output)

    # ---- finish
    flush(folder)
    print(f"{output}: written")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of main's clean-up
    run_script(main, "predict.py")
