"""UPS, a latent simulator of partial differential equations, from a shell in any folder.

    ups describe FILE                                         the configuration that declares a data file
    ups check CONFIG                                          examine this machine and the data files
    ups train CONFIG [RUN=mine] [section.key=value ...]       train all stages, then report; continues a run
    ups report CONFIG [RUN=mine] [section.key=value ...]      evaluate on the test split
    ups forecast FILE --run RUN --task TASK --output OUTPUT   forecast every field in a file
    ups sample FILE --run RUN --task TASK --output OUTPUT     the same, with the members of an ensemble

`ups COMMAND --help` lists all options; `python -m ups` is the same command. check, train and report run make
with the Makefile of the clone; runs, data and caches are then in the working folder.
"""

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from ups.common.place import make_command, require_posix
from ups.config.command import read_command, run_script

MEMBERS = 16  # of `ups sample`, as in docs/forecasts.md


def describe(arguments: list[str]) -> int:
    """Print the section that declares a data file."""
    file = {"file": {"metavar": "FILE", "nargs": "+", "help": "a data file or zarr store"}}
    args = read_command(describe.__doc__, file, arguments, prog="ups describe")
    from ups.userdata.describe import describe_file

    print(describe_file(*args.file))
    return 0


def run_make(command: str, target: str, what: str, arguments: list[str]) -> NoReturn:
    """Become the make that makes a target of the clone, with this interpreter. what: for --help."""
    options = {
        "config": {"metavar": "CONFIG", "type": Path, "help": "a configuration, such as configs/small.yaml"},
        "settings": {
            "nargs": "*",
            "default": [],
            "metavar": "NAME=VALUE",
            "help": "RUN=mine, or a setting: run.seed=1",
        },
    }
    args = read_command(what, options, arguments, prog=f"ups {command}")
    require_posix("training")
    if not args.config.is_file():
        raise FileNotFoundError(
            f"no configuration file {args.config}; expected a YAML file. Name another, or write one: "
            "ups describe FILE > my.yaml"
        )
    make = make_command()
    if shutil.which("make") is None:
        raise FileNotFoundError("there is no make in PATH; expected GNU make. Install it.")
    variables = [text for text in args.settings if re.match("[A-Z]+=", text)]
    settings = shlex.join(text for text in args.settings if text not in variables).replace("$", "$$")
    given = [f"PYTHON={sys.executable}", f"CONFIG={args.config}", *[f"ARGS={settings}"] * bool(settings)]
    os.execvp("make", [*make, "--no-print-directory", target, *given, *variables])


def predict(command: str, members: int, arguments: list[str]) -> int:
    """Forecast or sample; the first argument may be the file of --input."""
    from ups.commands import predict

    given = ["--input", *arguments] if arguments and not arguments[0].startswith("-") else arguments
    return predict.main(given, members, prog=f"ups {command}")


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "describe": describe,
    "check": partial(run_make, "check", "doctor", "Examine this machine and the data files, by make doctor."),
    "train": partial(run_make, "train", "train", "Train all stages and report, by make train."),
    "report": partial(run_make, "report", "report", "Evaluate on the test split, by make report."),
    "forecast": partial(predict, "forecast", 0),
    "sample": partial(predict, "sample", MEMBERS),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit status. Raises ValueError for a command that is none of COMMANDS."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__, end="")
        return 0
    if command not in COMMANDS:
        raise ValueError(
            f"no command {command!r:.80}; expected one of: {', '.join(COMMANDS)}. Try ups --help."
        )
    return COMMANDS[command](rest)


def run() -> NoReturn:
    """The console command `ups`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a forecast cleans up
    run_script(main, "ups")


if __name__ == "__main__":
    run()
