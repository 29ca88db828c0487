"""Whether this interpreter can run the project: its version, and the packages of requirements.txt.

Any Python 3.8 or later runs this file.

    python -m ups.interpreter    exit status 1, with one line that says what to do
"""

import re
import sys
from importlib import metadata
from pathlib import Path

OLDEST = (3, 11)
REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements.txt"


def what_lacks(names=None):
    """What is missing, in words; "" if nothing is. names: of packages (those of requirements.txt)."""
    if sys.version_info < OLDEST:
        is_now, oldest = (".".join(map(str, version[:2])) for version in (sys.version_info, OLDEST))
        return f"it is Python {is_now}, expected {oldest} or later"
    names = names or re.findall(r"(?m)^([\w-]+)==", REQUIREMENTS.read_text(encoding="utf-8"))
    missing = [name for name in names if not any(metadata.distributions(name=name))]
    return f"it lacks {', '.join(missing)}, expected all packages of requirements.txt" if missing else ""


if __name__ == "__main__":
    if lacks := what_lacks():
        sys.exit(f"PYTHON={sys.executable} cannot run this: {lacks}. Run: {sys.executable} -m pip install -r "
                 f"requirements-dev.txt, or leave PYTHON out, and make sets up .venv")
