"""What the supervisor (ups/training/launch.py) starts: accelerate's launcher, and the ranks, before they
import torch.

    python -m ups.training.tree launcher [accelerate launch's options] --module ups.training.tree rank SCRIPT
    [its arguments]

Where accelerate and torchrun print a traceback and a summary, which bury what a rank has said, the launcher
says one line at most. A rank dies with its launcher, from its first line on: the kernel sees to it
(ups.training.processes.die_with_parent), so no import, and no call that holds the interpreter's lock, is in
the way. Its first word tells the supervisor that it is there.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from ups.training.processes import die_with_parent, tell

LAUNCHER = "UPS_LAUNCHER"   # number of the launcher's process, for its ranks


def launcher(arguments: list[str]) -> int:
    """Run `accelerate launch`; its exit code."""
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)   # of what the ranks told already, or the exceptions below tell
    os.environ[LAUNCHER] = str(os.getpid())
    sys.argv = ["accelerate launch", *arguments]
    try:
        launch.main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _ended(f"rank {rank} (process {failure.pid})", failure.exitcode)
    except subprocess.CalledProcessError as error:
        return _ended("the only rank", error.returncode)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _ended(who: str, code: int) -> int:
    """Name the signal that ended a rank, which could not say so itself; the launcher's exit code."""
    if code < 0:
        print(f"launcher: {who} was ended by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
    return 1


def rank(arguments: list[str]) -> int:
    """Run a script as `python SCRIPT ...` would."""
    die_with_parent(int(os.environ[LAUNCHER]))
    tell("born", pid=os.getpid())
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit({"launcher": launcher, "rank": rank}[sys.argv[1]](sys.argv[2:]))
