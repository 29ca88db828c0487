"""Whether this interpreter can run the project: its version, and the packages of a requirements file.

Any Python 3.8 or later runs this file.

    python -m ups.commands.interpreter [FILE]   exit status 1 and one line with the fix (requirements.txt)
"""

import re
import sys
from importlib import metadata
from pathlib import Path

OLDEST = (3, 11)
OPTIONAL = "wandb"  # the stage asks for it if tracker.kind does
ROOT = Path(__file__).resolve().parents[2]


def pinned(file: str) -> list:
    """(package, version) of every line of a requirements file, those that it includes first."""
    text = (ROOT / file).read_text(encoding="utf-8")
    included = [pair for name in re.findall(r"(?m)^-r (\S+)", text) for pair in pinned(name)]
    return included + re.findall(r"(?m)^([\w-]+)==(\S+)", text)


def what_lacks(file: str = "requirements.txt") -> str:
    """What is missing of a requirements file, in words; "" if nothing is."""
    if sys.version_info < OLDEST:
        is_now, oldest = (".".join(map(str, version[:2])) for version in (sys.version_info, OLDEST))
        return f"it is Python {is_now}, expected {oldest} or later"
    missing = [n for n, _ in pinned(file) if n != OPTIONAL and not any(metadata.distributions(name=n))]
    return f"it lacks {', '.join(missing)}, expected all packages of {file}" if missing else ""


if __name__ == "__main__":
    if lacks := what_lacks(*sys.argv[1:]):
        sys.exit(
            f"PYTHON={sys.executable} cannot run this: {lacks}. Run: {sys.executable} -m pip install -r "
            f"requirements-dev.txt, or leave PYTHON out, and make sets up .venv"
        )
