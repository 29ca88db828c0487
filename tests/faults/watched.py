"""Load folders of weights, one after another, and tell what each did: python watched.py SOUND FOLDER ..

A line of JSON for each: the error, seconds, the largest size of this process so far in MB, and what was
imported, run, compiled, connected, changed or opened outside of the folder meanwhile."""

import atexit
import contextlib
import json
import re
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from pkgutil import resolve_name

import numpy as np

import ups
from ups.common.place import ROOT
from ups.config.model import BACKBONES, BASES
from ups.userdata.readers.process import COMMAND

NEVER = (
    "import exec compile subprocess socket os.system os.exec os.posix_spawn os.fork os.remove "
    "os.rename os.mkdir os.rmdir os.link os.symlink os.truncate os.chmod shutil ctypes.dlopen "
    "webbrowser"
).split()
folder, seen = None, []
DESCRIBED = "my_data.yaml"  # in a temporary folder
# what may be read beside the folder: what overlays include, and how much memory is free
READABLE = (ROOT / "configs", Path("/proc/meminfo"))


def begin() -> None:
    """Watch from here on, but for our own parts that weights name, which are imported first. --describe loads
    what it prints in temporary folders, which lie in one of ours."""
    for part in (
        *(f"ups.models.bases.{row.implementation}" for row in BASES.values()),
        *(f"ups.models.backbones.{row}" for row in BACKBONES.values()),
    ):
        resolve_name(part)
    tempfile.tempdir = tempfile.mkdtemp(prefix="watched-")
    atexit.register(shutil.rmtree, tempfile.tempdir)
    sys.addaudithook(watch)


def watch(event: str, arguments: tuple) -> None:
    first = str(arguments[0]) if arguments else ""
    # a temporary folder is emptied with names relative to it
    is_ours = first.startswith(f"{tempfile.tempdir}/") or (event, first) == ("os.remove", DESCRIBED)
    if folder is None or is_ours:
        return
    if event == "open" and isinstance(arguments[0], str | bytes):
        path, mode = Path(str(arguments[0])), arguments[1]
        is_ours = any(path.absolute().is_relative_to(place) for place in (folder, *READABLE))
        if not is_ours or (mode or "r")[0] not in "r":
            seen.append(f"open {path} {mode}")
    # the process that reads data files, started again; ast.literal_eval parses
    elif event == "subprocess.Popen" and arguments[1][-1] == COMMAND:
        return
    elif event.startswith((*NEVER,)) and (event, arguments[-1]) != ("compile", "<unknown>"):
        seen.append(f"{event} {str(arguments)[:80]}")


def largest() -> int:
    """MB; ru_maxrss would have the parent's, from before exec."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) // 1024


def use(path: Path) -> None:
    """What a user does: load, forecast, draw."""
    model = ups.load(path)
    for name, known in model.tasks.items():
        if not known["inputs"]:
            u0 = np.full((1, known["history"], len(known["fields"]), *known["grid"]), 0.5, "float32")
            values = {key: low for key, (low, _) in known["parameters"].items()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.forecast(name, u0, values or None, 2, extrapolate=True)
                with contextlib.suppress(FileNotFoundError):
                    model.sample(name, u0, values or None, 1, 2, by="teacher", extrapolate=True)


def main() -> None:
    global folder
    sound, *folders = map(Path, sys.argv[1:])
    use(sound)  # imports what a model needs
    begin()
    for folder in folders:  # noqa: B007, PLW0603: the hook reads it
        started, text = time.perf_counter(), ""
        seen.clear()
        try:
            use(folder)
        except BaseException as error:  # noqa: BLE001, SystemExit would be a find
            text = f"{type(error).__name__}: {error}"
        seconds, found, folder = time.perf_counter() - started, [*seen], None
        print(json.dumps({"error": text, "seconds": seconds, "seen": found, "mb": largest()}), flush=True)


if __name__ == "__main__":
    main()
