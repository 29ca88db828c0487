"""`make data` on a disk that is too small, or that somebody else fills meanwhile: what is said, confirmed and
there at last.

    python tests/small_disk.py advection1d 0.99         a quota of 0.99 of the file; free space looks enough
    python tests/small_disk.py diff_react2d 1.3 taken   the room is taken while trajectories are solved

`outcome` does the same from a test: in a mount namespace of its own (no root needed), so nothing is left.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from ups.common import files  # noqa: E402
from ups.common.files import partial_path  # noqa: E402
from ups.data import generate  # noqa: E402
from ups.data.generate import num_done, write_data  # noqa: E402
from ups.data.layout import layout_of  # noqa: E402
from ups.data.pdebench import data_bytes  # noqa: E402
from ups.tasks import get_task  # noqa: E402

# trajectories, cells, frames
SHAPES = {"advection1d": (131, 64, 21), "darcy2d": (131, 32, 1), "diff_react2d": (41, 16, 21)}
CHUNK = 5  # 30 KiB: below the buffer in which HDF5 loses a full disk
MOUNT = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'


def on_small_disk(folder: object, *command: object, size: int = 65536, mode: str = "rw") -> list[str]:
    """The words of a command that finds a disk of `size` bytes in place of `folder`; it needs no root."""
    isolated = ["unshare", "--user", "--map-root-user", "--mount"]
    return [*isolated, "sh", "-c", MOUNT, "sh", f"{mode},size={size}", *map(str, (folder, *command))]


def reason_to_skip() -> str:
    """Why no small disk can be made here; empty if one can."""
    if shutil.which("unshare") is None:
        return "there is no unshare, which makes a small disk"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(on_small_disk(folder, "true", size=8192), capture_output=True, text=True)
    return f"no small disk may be made here: {done.stderr.strip()}" if done.returncode else ""


def outcome(task: str, share: float, is_taken: bool = False) -> dict[str, Any]:
    """Generate `task` on a disk of `share` of its size, then again with room.

    first, second: exit statuses; said: last line of the first; solved: trajectories it solved; confirmed: of
    those, how many it counted as done; wrong: of these, how many are not what was solved; is_whole: whether
    the file is right at last."""
    num, cells, frames = SHAPES[task]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, task, str(share), *["taken"] * is_taken, "--inside", folder]
        words = on_small_disk(folder, *command, size=int(share * data_bytes(task, num, frames, cells)))
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def given(task: str) -> tuple[dict[str, Any], Callable[..., np.ndarray]]:
    """Settings and a stand-in for a solver whose numbers depend on (seed, i) only; no zeros: those are what
    is not there."""
    num, cells, frames = SHAPES[task]
    spec = get_task(task)

    def solve(indices: Any, *, seed: int, resolution: int, num_frames: int, **_: Any) -> np.ndarray:
        shape = (num_frames, len(spec.channels), *[resolution] * spec.ndim)
        return np.stack([1 + np.random.default_rng([seed, i]).random(shape, np.float32) for i in indices])

    return generate.generation_settings(
        task,
        "small disk",
        seed=3,
        num_trajectories=num,
        resolution=cells,
        num_frames=frames,
        t_end=1.0,
        parameter=0.1 if spec.parameters else None,
    ), solve


def write(task: str, path: Path, is_taken: bool) -> None:
    """In a process of its own: HDF5 may take it down."""
    made, exact = given(task)
    files.require_room = lambda file, num_bytes: None  # a quota does not show in the free space

    def solve(indices: np.ndarray, **rest: Any) -> np.ndarray:
        with path.with_name("solved").open("a") as file:
            file.write("x" * len(indices))
        if is_taken and not (theirs := path.with_name("theirs")).exists():
            handle = os.open(theirs, os.O_CREAT | os.O_WRONLY)
            try:
                while os.write(handle, bytes(4096)):
                    pass
            except OSError:  # full: that was the point
                pass
        return exact(indices, **rest)

    write_data(path, task, solve, made, chunk=CHUNK)


def examine(task: str, path: Path) -> tuple[int, int]:
    """(trajectories that the file or its .partial counts as done, how many of them are not what the solver
    gave)."""
    made, exact = given(task)
    confirmed = num_done(path, made)
    u_ref = exact(
        range(made["num_trajectories"]), **{key: made[key] for key in ("seed", "resolution", "num_frames")}
    )
    wrong = np.zeros(confirmed, bool)
    if confirmed:
        with h5py.File(path if path.exists() else partial_path(path), "r", locking=False) as file:
            for key, rows, values in layout_of(get_task(task)).placed(0, u_ref[:confirmed]):
                if rows == ():
                    wrong[int(key[:4])] |= not np.array_equal(file[key][()], values)
                else:
                    wrong |= (file[key][rows] != values).reshape(confirmed, -1).any(1)
    return confirmed, int(wrong.sum())


def inside(task: str, folder: Path, is_taken: bool) -> dict[str, Any]:
    """`outcome`, on the small disk that is mounted at `folder`."""
    path = folder / "data.h5"
    command = [sys.executable, __file__, task, "1", *["taken"] * is_taken, "--write", str(path)]
    first = subprocess.run(command, capture_output=True, text=True)
    confirmed, wrong = examine(task, path)
    solved = path.with_name("solved").stat().st_size if path.with_name("solved").exists() else 0
    subprocess.run(["mount", "-o", "remount,size=64M", str(folder)], check=True)
    second = subprocess.run(command, capture_output=True, text=True)
    num_whole, num_wrong = examine(task, path)
    return {
        "first": first.returncode,
        "said": (first.stderr.splitlines() or [""])[-1],
        "solved": solved,
        "confirmed": confirmed,
        "wrong": wrong,
        "second": second.returncode,
        "is_whole": path.exists() and num_whole == SHAPES[task][0] and num_wrong == 0,
    }


if __name__ == "__main__":
    words, is_filled = sys.argv[1:], "taken" in sys.argv
    if "--write" in words:
        write(words[0], Path(words[-1]), is_filled)
    elif "--inside" in words:
        print(json.dumps(inside(words[0], Path(words[-1]), is_filled)))
    else:
        print(json.dumps(outcome(words[0], float(words[1]), is_filled), indent=1))
