"""What ranks tell their supervisor (ups/training/launch.py): lines of JSON in a file that it names.

Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

EVENTS = "UPS_LAUNCH_EVENTS"   # environment variable: the file


def tell(event: str, **facts: Any) -> bool:
    """Append a line to the supervisor's file; whether there is a supervisor, and it was told."""
    path = os.environ.get(EVENTS)
    if not path:
        return False
    line = json.dumps({"event": event, "rank": int(os.environ.get("RANK", 0)), **facts})
    try:
        with open(path, "a", encoding="utf-8") as file:   # one short write: lines of several ranks do not mix
            file.write(f"\n{line}\n")   # and none is glued to one that a full disk has torn
    except OSError as error:
        print(f"WARNING: the supervisor was not told of {event!r} ({error})", file=sys.stderr, flush=True)
        return False
    return True


def tell_of_machine(event: str, **facts: Any) -> None:
    """`tell` by one rank of each machine: every machine has a supervisor."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tell(event, **facts)


def hear(path: Path, first: int) -> tuple[list[dict[str, Any]], list[bytes], int]:
    """What was told from byte `first` on: events, lines that are none, and the byte after the last whole
    line.
    """
    with path.open("rb") as file:
        file.seek(first)
        text = file.read()
    text = text[: text.rfind(b"\n") + 1]
    events, torn = [], []
    for line in filter(None, text.split(b"\n")):
        try:
            events.append(json.loads(line))
        except ValueError:
            torn.append(line)
    return events, torn, first + len(text)
