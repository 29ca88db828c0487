"""Make the training data of a corrector from the user's own solvers, and say when it pays.

Reads:  functions of the user, MODULE:FUNCTION, on Python's path:
        starts()     -> (n, channel, *fine grid), NumPy; n starts
        fine(u)      -> the state a time step later, as accurate as wanted, (batch, channel, *fine grid)
        solver(u)    -> the same on the coarse grid; this one is corrected (both get dt if they accept it)
Writes: FOLDER/part_NNNN.npz: trajectories of the fine solver, restricted to the coarse grid by means over
        cells (--restrict means, for volumes), by taking every k-th point (points) or the waves that the
        coarse grid has (waves, for periodic spectral solvers); FOLDER/NAME.yaml: the configuration of the
        operator stage, with the coarse solver as its base. An interrupted run continues.

    make corrector SOLVER=my_module:coarse FINE=my_module:fine STARTS=my_module:starts RUN=mine
    python -m ups.commands.corrector_data .. --break-even runs/mine    # after training
"""

import inspect
import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from ups.commands.corrector_costs import break_even
from ups.common.files import replacing, write_atomic, write_json
from ups.common.place import ROOT
from ups.common.user_solver import load_step, solver_digest
from ups.config.command import read_command, run_script
from ups_discovery.boundary import PERIODIC
from ups_discovery.spectral import resample

CHUNK = 4  # trajectories in a file
GROWTH = 10  # times the largest value so far, after the first frame: the solution blows up
FACTS = "ratio", "frames", "dt", "restrict", "fields", "horizons"
OPTIONS: dict[str, dict[str, Any]] = {
    "--solver": {"required": True, "metavar": "MODULE:FUNCTION", "help": "a step on the coarse grid"},
    "--fine": {"required": True, "metavar": "MODULE:FUNCTION", "help": "a step on the fine grid"},
    "--starts": {"required": True, "metavar": "MODULE:FUNCTION", "help": "starts on the fine grid"},
    "--folder": {"required": True, "type": Path, "help": "of the data; its name is that of the task"},
    "--ratio": {"type": int, "default": 4, "help": "fine cells per coarse cell and axis"},
    "--frames": {"type": int, "default": 41, "help": "of a trajectory, the start included"},
    "--horizons": {"type": int, "default": 1, "help": "times --frames that runs will last (`moved_on`)"},
    "--dt": {"type": float, "default": 1.0, "help": "time between frames"},
    "--boundary": {"default": "periodic", "help": "periodic, no_flux, dirichlet or outflow"},
    "--length": {"type": float, "default": 1.0, "help": "of the domain along each axis"},
    "--restrict": {"choices": ("means", "points", "waves"), "default": "means", "help": "to the coarse grid"},
    "--symmetries": {"default": "", "help": "of the solver: shift, or shift,mirror"},
    "--vector": {"default": "", "help": "fields whose sign a mirror changes, one per axis: u,v"},
    "--fields": {"default": "u", "help": "names of the channels: u,v"},
    "--break-even": {"metavar": "RUN", "type": Path, "help": "measure a finished run instead"},
}


def restricted(u: np.ndarray, ratio: int, how: str) -> np.ndarray:
    """u (batch, channel, *space) on a grid with `ratio` times fewer cells per axis.

    Raises ValueError if they do not divide.
    """
    if wrong := [size for size in u.shape[2:] if size % ratio]:
        raise ValueError(
            f"the fine grid has {wrong[0]} cells along an axis; expected a multiple of --ratio {ratio}. "
            "Change one of them."
        )
    if how == "waves":
        return resample(torch.from_numpy(u), [size // ratio for size in u.shape[2:]], PERIODIC).numpy()
    for axis in range(2, u.ndim):
        blocks = u.reshape(*u.shape[:axis], -1, ratio, *u.shape[axis + 1 :])
        u = blocks.mean(axis + 1) if how == "means" else blocks.take(0, axis + 1)
    return u


def interpolated(u: np.ndarray, ratio: int, how: str, boundary: str) -> np.ndarray:
    """u (batch, channel, *space) on a grid with `ratio` times the cells per axis: linear, or of the waves."""
    if how == "waves":
        return resample(torch.from_numpy(u), [size * ratio for size in u.shape[2:]], PERIODIC).numpy()
    for axis in range(2, u.ndim):
        size, shift = u.shape[axis], 0.5 if how == "means" else 0.0
        place = (np.arange(size * ratio) + shift) / ratio - shift  # in coarse cells
        low = np.floor(place).astype(int)
        part = (place - low).reshape(-1, *[1] * (u.ndim - axis - 1))
        rows = (end % size if boundary == "periodic" else end.clip(0, size - 1) for end in (low, low + 1))
        u = sum(u.take(end, axis) * one for end, one in zip(rows, (1 - part, part), strict=True))
    return u


def solved(name: str, step: Any, u: np.ndarray, num: int) -> Iterator[np.ndarray]:
    """u and `num` states after it. Raises ValueError if the solution blows up."""
    yield u
    most, largest = np.finfo(float).max, abs(u).max()
    for frame in range(1, num + 1):
        u = np.asarray(step(u))
        size = abs(u).max()
        if not size <= most:
            raise ValueError(
                f"{name} gave values up to {size:.3g} at frame {frame}, {largest:.3g} before; expected a "
                "solution. Take smaller steps, or other starts."
            )
        yield u
        largest = max(size, largest)
        most = GROWTH * largest


def moved_on(args: Any, u: np.ndarray, coarse: Any) -> np.ndarray:
    """Starts u (n, channel, *space), of which the coarse solver has moved every second one on, by 1 ..
    --horizons - 1 times the frames in turn: so the data hold states that only longer runs meet."""
    u = 1.0 * u
    for horizon in range(1, min(args.horizons, len(u) // 2 + 1)):
        rows = slice(2 * horizon - 1, None, 2 * (args.horizons - 1))
        *_, some = solved(
            args.solver, coarse, restricted(u[rows], args.ratio, args.restrict), horizon * (args.frames - 1)
        )
        u[rows] = interpolated(some, args.ratio, args.restrict, args.boundary)
    return u


def write_data(args: Any) -> None:
    """The parts that are missing, and made.json with their processor seconds. Raises ValueError if the folder
    holds data of other functions or settings."""
    record, task = args.folder / "made.json", args.folder.name
    facts = {name: getattr(args, name) for name in FACTS}
    facts |= {name: solver_digest(getattr(args, name), task) for name in ("fine", "starts")}
    made = {"facts": facts, "parts": {}}
    if record.is_file():
        made = json.loads(record.read_text(encoding="utf-8"))
        made["facts"] = {"horizons": 1} | made["facts"]
    if made["facts"] != json.loads(json.dumps(facts)):
        changed = [name for name, value in facts.items() if made["facts"].get(name) != value]
        raise ValueError(
            f"{args.folder} holds data of another {', '.join(changed)}; expected the same functions and "
            "settings. Remove the folder, or name another RUN."
        )
    names = args.fields.split(",")
    coarse, fine = (load_step(name, task) for name in (args.solver, args.fine))
    coarse, fine = (
        partial(step, dt=args.dt) if "dt" in inspect.signature(step).parameters else step
        for step in (coarse, fine)
    )
    started = time.process_time()
    starts = np.asarray(load_step(args.starts, task)())
    if starts.ndim < 3 or starts.shape[1] != len(names):
        raise ValueError(
            f"{args.starts} gave an array of shape {starts.shape}; expected (n, channel, *fine grid) with "
            f"the channels {args.fields}. Change it, or --fields."
        )
    starts = moved_on(args, starts, coarse)
    made["starts"] = time.process_time() - started
    args.folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(starts), CHUNK):
        path = args.folder / f"part_{first:04d}.npz"
        if path.name in made["parts"] and path.is_file():
            continue
        started = time.process_time()
        frames = solved(args.fine, fine, starts[first : first + CHUNK], args.frames - 1)
        u = np.stack([restricted(frame, args.ratio, args.restrict) for frame in frames], 1)
        with replacing(path) as new, new.open("wb") as file:
            np.savez(file, **{name: u[:, :, channel] for channel, name in enumerate(names)})
        made["parts"][path.name] = time.process_time() - started
        write_json(record, made)
        print(f"{path}: {len(u)} trajectories in {made['parts'][path.name]:.1f} s", flush=True)
    write_config(args, starts.shape[2:])


def write_config(args: Any, space: Sequence[int]) -> None:
    task, axes = args.folder.name, "xyz"[: len(space)]
    section = {
        "files": str(args.folder / "part_*.npz"),
        "layout": {name: ["trajectory", "time", *axes] for name in args.fields.split(",")},
        "boundary": args.boundary,
        "domain": {axis: [0, args.length] for axis in axes},
        "dt": args.dt,
        "symmetries": list(filter(None, args.symmetries.split(","))),
        "vector": list(filter(None, args.vector.split(","))),
        "history": 1,
        # a coarse solver errs locally: validation errors are 0.65 and 0.90 of those with patches of 4
        "patch": math.gcd(2, *(size // args.ratio for size in space)),
        "base": {"solver": args.solver},
    }
    config = {
        "include": str(ROOT / "examples" / "corrector.yaml"),
        "data": {"source": "user", "tasks": [task]},
        "cache": {"root": str(args.folder / "cache")},
        "task": {task: section},
    }
    text = yaml.safe_dump(config, sort_keys=False)
    write_atomic(args.folder / f"{task}.yaml", text)


def main(arguments: Sequence[str] | None = None) -> int:
    args = read_command(__doc__, OPTIONS, arguments)
    if args.break_even:
        print(break_even(args.break_even, args.folder, load_step(args.solver, args.folder.name)))
    else:
        write_data(args)
    return 0


if __name__ == "__main__":
    run_script(main, "corrector")
