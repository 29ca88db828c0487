"""The command `python -m ups_launch`, in its three roles: the supervisor, and below it the launcher and each
rank.

Accelerate and torchrun would print a traceback and a summary after the messages of the ranks; the launcher
prints at most one line. A rank dies with its launcher, by the kernel, even while it imports torch or is in a
call that holds the interpreter's lock. Its first event shows the supervisor that it has started.
"""

import logging
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from ups_launch.processes import die_with_parent, print_raw, send_event
from ups_launch.supervisor import main

LAUNCHER = "UPS_LAUNCHER"  # environment variable with the process number of the launcher


def launcher(arguments: list[str]) -> int:
    """Run `accelerate launch`; its exit code."""
    from accelerate.commands import launch
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # the ranks, or the exceptions below, report the same
    os.environ[LAUNCHER] = str(os.getpid())
    sys.argv, who, code = ["accelerate launch", *arguments], "the only rank", 0
    try:
        launch.main()
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        who, code = f"rank {number} (process {failure.pid})", failure.exitcode
    except subprocess.CalledProcessError as error:
        code = error.returncode
    except SignalException as error:
        return 128 + error.sigval
    except (ConnectionError, DistNetworkError) as error:  # the address or the port is not free
        cause = (
            f"{' '.join(str(error).split())[:200]}; expected a free port on this machine. Set PORT= of "
            f"cluster/node.sh on all machines, or --main_process_port"
        )
        send_event("failed", kind="configuration", code=2, cause=cause)
        return 2
    if code < 0:  # ended by a signal, which the rank could not report
        print_raw(f"launcher: {who} was ended by {signal.Signals(-code).name}")
    return int(code != 0)


def rank(arguments: list[str]) -> int:
    """Run a script as `python SCRIPT ...` would."""
    die_with_parent(int(os.environ[LAUNCHER]))
    send_event("born", pid=os.getpid())
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    role = {"launcher": launcher, "rank": rank}.get("".join(sys.argv[1:2]))
    sys.exit(role(sys.argv[2:]) if role else main())
