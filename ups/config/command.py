"""The command line of scripts: options of a configuration, and how a script ends."""

import argparse
import ctypes
import dataclasses
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import yaml

from ups.common.files import is_out_of_memory, message_of
from ups.common.place import require_posix
from ups.common.text import print_plain, printable
from ups.config.load import DEFAULT_OVERLAY, load_config, to_dict
from ups.config.schema import Config

CONFIG_OPTIONS = {
    "--config": {
        "default": str(DEFAULT_OVERLAY),
        "metavar": "FILE",
        "help": "YAML overlay of configs/default.yaml (configs/small.yaml)",
    },
    "overrides": {"nargs": "*", "metavar": "section.key=value"},
}
DRY_RUN = {"--dry-run": {"action": "store_true", "help": "print what would be done and write nothing"}}
SHOW_CONFIG = {"--show-config": {"action": "store_true", "help": "print the resolved configuration and end"}}


def read_command(
    description: str, options: dict[str, dict[str, Any]], arguments: list[str] | None = None, **about: Any
) -> argparse.Namespace:
    """The parsed command line. options: name -> keywords of `add_argument`, such as CONFIG_OPTIONS; about:
    further keywords of the parser."""
    parser = argparse.ArgumentParser(
        description=description, **about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, keywords in options.items():
        parser.add_argument(name, **keywords)
    return parser.parse_intermixed_args(arguments)


def keep_freed_memory() -> None:
    """Let glibc keep up to 2 GB of freed memory. To give it back and allocate it again at every operation on
    large tensors cost a report a sixth of its time in page faults."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3  # of malloc.h
        mallopt(m_mmap_threshold, 32 * 2**20)  # the largest that it takes
        mallopt(m_trim_threshold, 2**31 - 1)


def run_script(main: Callable[[], int], name: str) -> NoReturn:
    """End the process with the status of main(). Errors that a user can cause end it with status 1 and their
    message alone: a traceback would hide it."""
    print_plain()
    keep_freed_memory()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run the same command again", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
        if isinstance(error, (RuntimeError, MemoryError)) and not is_out_of_memory(error):
            raise
        if isinstance(error, ImportError) and error.name:  # not one of ours, which say what to install
            raise
        sys.exit(f"{name}: " + "\n".join(map(printable, message_of(error).split("\n"))))


def parse_arguments(description: str) -> tuple[Config, bool]:
    """(configuration, whether --dry-run was given) of a stage script's command line; description: its
    docstring. Raises OSError on Windows."""
    require_posix("training")
    arguments = read_command(description, CONFIG_OPTIONS | DRY_RUN | SHOW_CONFIG)
    config = load_config(arguments.config, arguments.overrides)
    if arguments.show_config:
        show(config)
        raise SystemExit(0)
    return config, arguments.dry_run


def show(config: Config) -> None:
    """Print the configuration, itself one, with the sections of the tasks that it trains."""
    asked = {name: config.task[name] for name in config.data.tasks}
    print(yaml.safe_dump(to_dict(dataclasses.replace(config, task=asked)), sort_keys=False), end="")
