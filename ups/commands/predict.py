"""Forecast every field in a file, from a shell.

    u(t + dt) = decode(O(encode u(t))), with --members M plus a sampled residual in each of M draws

Reads:  RUN (a finished run's folder), INPUT (HDF5 in the task's layout; the last frames are the start).
Writes: OUTPUT, complete or not at all, in the same layout (for a task of yours an array per field, which
        xarray opens), so that it can be the next input: the context frames, then those that follow.
        Trajectory r * M + m is member m of row r. Attributes: weights, rows, members and parameters.

    ups forecast my.h5 --run runs/small --task burgers1d --output out.h5 --frames 30
    ups sample my.h5 --run runs/small --task burgers1d_forced --output out.h5 --members 16

In a clone `python predict.py --input my.h5 ...` does the same.
"""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import ups
from ups.common.files import flush, place_new, temporary_folder
from ups.common.place import require_posix
from ups.common.user_solver import solvers_named
from ups.config.command import DRY_RUN, read_command
from ups.data.generate import generation_settings, write_data
from ups.data.layout import layout_of
from ups.data.pdebench import open_data
from ups.forecast_inputs import require_room
from ups.forecast_xarray import AXIS_TOLERANCE
from ups.tasks import Task
from ups.userdata.open_files import open_input
from ups.userdata.trajectories import Trajectories
from ups.userdata.writer import write_user_file

STATES = 64  # fields in one call of the network
OPTIONS = {
    "--run": {"required": True, "help": "folder of a finished run, such as runs/small"},
    "--task": {"required": True, "help": "name of a task it was trained on"},
    "--input": {"required": True, "help": "HDF5 file in the task's layout"},
    "--output": {"required": True, "type": Path, "help": "file to write; must not exist"},
    "--frames": {"type": int, "default": 1, "help": "frames to forecast (1)"},
    "--members": {"type": int, "help": "ensemble members per row; 0: the operator's forecast (%(default)s)"},
    "--by": {"help": "sampler: student, student_2, teacher, scoring or waves (selected on validation)"},
    "--evaluations": {"type": int, "metavar": "N", "help": "network evaluations per step, instead of --by"},
    "--seed": {"type": int, "default": 0, "help": "of the members"},
    "--rows": {"default": ":", "metavar": "FIRST:LAST", "help": "trajectories of the input (all)"},
    "--context": {"type": int, "metavar": "N", "help": "start from the first N frames of the input (all)"},
    "--parameters": {"nargs": "*", "default": [], "metavar": "NAME=VALUE", "help": "instead of the input's"},
    "--space-stride": {"type": int, "default": 1, "metavar": "N", "help": "every N-th cell of the input"},
    "--time-stride": {"type": int, "default": 1, "metavar": "N", "help": "every N-th frame of the input"},
    "--resample": {"action": "store_true", "help": "interpolate to the trained grid and back"},
    "--extrapolate": {"action": "store_true", "help": "allow parameters and fields beyond the trained"},
    "--solver": {"nargs": "*", "default": [], "metavar": "TASK=MODULE:FUNCTION", "help": "coarse solvers"},
    "--device": {"default": "cpu"},
    **DRY_RUN,
}


def main(arguments: list[str] | None = None, members: int = 0, **about: Any) -> int:
    """Run the command; its exit status. members: those that are sampled unless --members says otherwise;
    about: keywords of the parser."""
    # ---- config
    default = {"--members": OPTIONS["--members"] | {"default": members}}
    args = read_command(__doc__, OPTIONS | default, arguments, **about)
    require_posix("writing forecasts to a file")
    output, folder = args.output, args.output.absolute().parent
    if output.exists() or output.is_symlink() or not folder.is_dir():
        raise ValueError(f"--output is {output}; expected a new file in an existing folder. Name another.")
    if args.frames < 1 or args.members < min(1, members):
        raise ValueError(
            f"--frames is {args.frames} and --members {args.members}; expected at least 1 "
            f"frame, and {min(1, members)} members or more. Correct them."
        )

    if min(args.space_stride, args.time_stride) < 1:
        raise ValueError(
            f"--space-stride is {args.space_stride} and --time-stride {args.time_stride}; expected at "
            "least 1. Correct them."
        )
    if not args.members and (args.by or args.evaluations is not None):
        raise ValueError(
            f"--by is {args.by} and --evaluations {args.evaluations} without members; expected how members "
            "are sampled. Add --members, or leave these out."
        )

    # ---- model
    model = ups.load(args.run, args.device, solvers_named(args.solver))
    head = model.operator.head(args.task)
    facts, is_user, is_steady = model.tasks[args.task], head.task.user_facts is not None, head.task.is_steady

    # ---- data
    strides = {"space_stride": args.space_stride, "time_stride": args.time_stride}
    if is_user:
        source = open_input(head.task, args.input, facts["dt"], args.parameters, **strides)
    else:
        source = open_data(args.input, args.task, **strides)
    rows = rows_of(args.rows, source.num_trajectories)
    num_input = source.num_frames if args.context is None else args.context
    if not head.history <= num_input <= source.num_frames:
        raise ValueError(
            f"--context is {num_input}; expected at least {head.history}, the history of {args.task}, "
            f"and at most {source.num_frames}, the frames of {args.input}. Correct it."
        )
    values = parameters_of(args.parameters, facts["parameters"], source)
    # members are conditioned on one frame more if there is one, as in training and in the report
    context = min(num_input, head.history + bool(args.members))
    repeats, num_frames = max(1, args.members), 1 if is_steady else context + args.frames
    # times in files are float32
    is_near = num_input == 1 or abs(source.dt - facts["dt"]) <= AXIS_TOLERANCE * facts["dt"]
    options = {
        "parameters": values,
        "num_frames": 1 if is_steady else args.frames,
        "resample": args.resample,
        "extrapolate": args.extrapolate,
        "dt": None if is_near else source.dt,
    }
    num_values = len(rows) * repeats * num_frames * math.prod((len(facts["fields"]), *source.space))
    free = shutil.disk_usage(folder).free
    require_room(4 * num_values, free, str(folder), "--frames, --members or --rows, or free some space")
    settings = generation_settings(
        args.task,
        f"forecast of {model.operator.record['model_sha256']}",
        seed=args.seed,
        num_trajectories=len(rows) * repeats,
        resolution=source.space[0],
        num_frames=num_frames,
        t_end=facts["dt"] * (num_frames - 1),
        parameter=(values or {}).get(next(iter(head.task.parameters), ""), source.parameter),
    )
    print(
        f"{output}: {len(rows)} rows of {args.task} x {repeats} member(s) x {num_frames} frames"
        f"{', not written' if args.dry_run else ''}"
    )
    if args.dry_run:
        return 0

    require_forcing(head.task, source, num_input, args.frames)

    # ---- loop
    def predict(indices: np.ndarray, **_: object) -> np.ndarray:
        """Trajectories of the output, all members of neighbouring rows: (n, frames, channels, *space)
        float32."""
        first, last = rows[indices[0] // repeats], rows[indices[-1] // repeats] + 1
        u = source.read(first, last)
        u, f = np.split(u, [u.shape[2] - len(head.task.forcing)], 2)
        f = head.task.absolute(f, head.task.forcing)[:, num_input - context : num_input + args.frames]
        u = u[:, :, : len(head.task.inputs)] if is_steady else u[:, num_input - context : num_input]
        options["forcing"] = by_name(head.task, f[:, context - 1 :])
        if is_user and not values and facts["parameters"]:
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

    with temporary_folder(folder) as temporary:
        path = temporary / output.name
        chunk = repeats * max(1, STATES // repeats)
        if not is_user:
            write_data(path, args.task, predict, settings, chunk=chunk)
        else:
            table = np.tile(list(values.values()), (len(rows), 1)) if values else source.parameters[rows]
            write_user_file(
                path,
                head.task,
                predict,
                len(rows) * repeats,
                source.space,
                chunk=chunk,
                times=facts["dt"] * np.arange(num_frames),
                parameters=table.repeat(repeats, 0),
            )
        with h5py.File(path, "r+", locking=False) as file:
            file.attrs.update(
                {
                    "task": args.task,
                    "run": args.run,
                    "first_row": rows[0],
                    "members": args.members,
                    "context_frames": context,
                    **(values or {}),
                }
            )
            layout = None if is_user else layout_of(head.task)
            names = filter(str.isdigit, file) if head.task.is_grouped else ("",)
            for name in () if is_steady or is_user else names:
                times = file[layout.coordinate("t", name)]  # continue those of the input
                begin = source.coordinates["t"][num_input - context]
                times[...] = begin + facts["dt"] * np.arange(times.shape[-1])
        place_new(path, output)

    # ---- finish
    flush(folder)
    print(f"{output}: written")
    return 0


def rows_of(text: str, num: int) -> range:
    """The rows FIRST:LAST of a file with `num` rows. Raises ValueError."""
    match = re.fullmatch(r"(\d*):(\d*)", text)
    rows = range(int(match[1] or 0), int(match[2] or num)) if match else range(0)
    if not rows or rows.stop > num:
        raise ValueError(
            f"--rows is {text!r}; expected FIRST:LAST with 0 <= FIRST < LAST <= {num}, the number of "
            "input trajectories. Correct the range, or leave it out."
        )
    return rows


def parameters_of(
    arguments: list[str], known: dict[str, Any], source: Trajectories
) -> dict[str, float] | None:
    """Parameters for the model: NAME=VALUE of the command line, else the values in the file.

    known: the parameters of the model, by name. Raises ValueError for text of another form.
    """
    try:
        named = {name: float(value) for name, value in (text.split("=") for text in arguments)}
    except ValueError:
        raise ValueError(
            f"--parameters is {' '.join(arguments)!r}; expected NAME=VALUE, such as Nu=0.01, of "
            f"{', '.join(known) or 'none'}. Correct it."
        ) from None
    values = {name: source.attributes[name] for name in known if name in source.attributes} | named
    if source.parameter is not None and known:
        values.setdefault(next(iter(known)), source.parameter)
    return values or None


def require_forcing(task: Task, source: Trajectories, num_inputs: int, num_frames: int) -> None:
    """Raise ValueError unless the file holds the forcing of `num_inputs` input frames and of `num_frames`
    frames to forecast."""
    if task.forcing and source.num_frames < num_inputs + num_frames:
        raise ValueError(
            f"{source.path} holds the forcing {', '.join(task.forcing)} of {source.num_frames} frames; "
            f"expected {num_inputs + num_frames}: {num_inputs} input frames and {num_frames} to forecast. "
            "Pass a file with so many frames (the fields of the last ones are not read), and --context."
        )


def by_name(task: Task, f: np.ndarray) -> dict[str, np.ndarray] | None:
    """Forcing (n, time, K, *space) by name, as `Forecaster.forecast` takes it; None for a task without."""
    cell = (..., *[0] * task.ndim)
    return {
        name: f[:, :, i][cell] if name in task.series else f[:, :, i] for i, name in enumerate(task.forcing)
    } or None
