"""Push files to a model hub or fetch them from one: the process that ups/hub.py starts for it.

Reads a request (JSON) from stdin and writes an answer or an error (JSON) as the last line of stdout. A client
of a hub waits for a slow server without limit, in threads that nobody can end; this process ends itself. It
is a script that does not import ups.
"""

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import huggingface_hub as hub
from huggingface_hub.constants import HF_HUB_CACHE


def push(name: str, files: dict[str, str], card: str, message: str) -> str:
    """Commit files (path in the repository -> path here) and the card; the address of the commit."""
    api = hub.HfApi()
    api.create_repo(name, exist_ok=True)
    added = [hub.CommitOperationAdd("README.md", card.encode())]
    added += [hub.CommitOperationAdd(place, path) for place, path in files.items()]
    return str(api.create_commit(name, added, commit_message=message).commit_url)


def fetch(name: str, revision: str | None, patterns: list[str], is_local: bool = False) -> str:
    """Download a repository once; its folder."""
    return hub.snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=is_local)


def num_fetched() -> int:
    """Bytes in the cache, also of files that are not complete."""
    return sum(path.stat().st_size for path in Path(HF_HUB_CACHE).glob("*/blobs/*"))


def leave(function: Any, **facts: Any) -> None:
    """Write what the function returns, or its error, and end the process with all its threads."""
    try:
        found = {"answer": function(**facts)}
    except Exception as error:  # of several libraries; a strange answer of a hub raises anything
        found = {"error": f"{type(error).__name__}: {error}"}
    os.write(sys.stdout.fileno(), f"\n{json.dumps(found)}\n".encode())
    os._exit(int("error" in found))


def watch(limit_s: float, num_bytes: int, facts: dict[str, Any]) -> None:
    """Leave once fewer than num_bytes were fetched in limit_s, with what an earlier call fetched if that is
    all."""
    before = num_fetched()
    while True:
        time.sleep(limit_s)
        before, least = num_fetched(), before + num_bytes
        if before < least:
            break

    def stop() -> None:
        raise TimeoutError(f"the hub did not answer, or almost nothing in {limit_s:.0f} s")

    with contextlib.suppress(Exception):
        fetch(**facts, is_local=True)
        leave(fetch, **facts, is_local=True)
    leave(stop)


if __name__ == "__main__":
    request = json.load(sys.stdin)
    facts = request["facts"]
    limits = (request["limit_s"], request["num_bytes"], facts)
    threading.Thread(target=watch, args=limits, daemon=True).start()
    leave({"push": push, "fetch": fetch}[request["call"]], **facts)
