"""The command line of benchmarks, which may take settings of the configuration."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ups.common.place import ROOT


def parser_of(documentation: str) -> argparse.ArgumentParser:
    """A parser whose help begins with the documentation of a script, as it is."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of `argv` (None: of the process) and, as `overrides`, its section.key=value. These
    may stand anywhere, also behind --seeds 0 1, where argparse would take them for more seeds.
    """
    argv = sys.argv[1:] if argv is None else argv
    overrides = [text for text in argv if "=" in text and not text.startswith("-")]
    options = [text for text in argv if text not in overrides]
    return parser.parse_args(options, argparse.Namespace(overrides=overrides))


def run_scripts(config: Path | str, options: Sequence[str], *scripts: str) -> None:
    """Run scripts of the clone, such as prepare_cache, one after the other. Raises CalledProcessError."""
    for script in scripts:
        command = [sys.executable, f"{script}.py", "--config", str(config), *options]
        subprocess.run(command, cwd=ROOT, check=True)
