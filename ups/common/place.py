"""Where a model is found and where this runs: in a clone, another folder or installed by pip; the system."""

import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the clone; of an installed wheel the folder of all packages
HUB = "hf://"  # marks a name on a model hub: a folder that is missing never causes a request


def make_command() -> list[str]:
    """The words that run make with the clone's Makefile from the working folder.

    Raises FileNotFoundError if pip installed the package without a clone.
    """
    makefile, here = ROOT / "Makefile", Path("Makefile")
    if not makefile.is_file():
        raise FileNotFoundError(
            f"{Path(__file__).parents[1]} is installed without a clone of UPS; expected one, as training and "
            "reports run there. Clone the repository, run make venv in it, and use .venv/bin/ups."
        )
    return ["make"] if here.is_file() and here.samefile(makefile) else ["make", "-f", str(makefile)]


def make_target(target: str) -> str:
    """How a message names a target of make, such as "operator RUN=small": as a command that runs in the
    working folder."""
    try:
        return f"{shlex.join(make_command())} {target}"
    except FileNotFoundError:
        return f"make {target} (in a clone of UPS)"


def script(name: str) -> str:
    """How a message names a script of the clone, with its path from the working folder."""
    return f"python {os.path.relpath(ROOT / name)}"


def require_posix(what: str) -> None:
    """Raise OSError on Windows. what: the subject of the message, such as "training"."""
    if sys.platform == "win32":
        raise OSError(
            f"{what} needs Linux or macOS, and this is Windows; expected POSIX locks and signals. "
            "Use WSL or another machine. ups.load(...) and its forecasts work here."
        )
