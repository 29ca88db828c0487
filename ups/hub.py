"""Weights on a model hub: hf://OWNER/NAME is a published copy (ups/commands/publish.py)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ups.common.place import HUB, STAGES
from ups.common.text import printable
from ups.data.download import MIN_SPEED
from ups.training.artifact import CARD, DONE, IMAGES, MODEL

HUB_S = 30.0  # without an answer, or almost without data, from a hub
# files of a stage in a copy
NEEDED = ("config.json", MODEL, DONE, "config.yaml", CARD)
PLAIN = (*NEEDED, "metrics.jsonl")
FILES = (*PLAIN, f"{IMAGES}/*.png")


def fetch(name: str) -> Path:
    """Download hf://OWNER/NAME or hf://OWNER/NAME@REVISION once, and return its folder.

    huggingface_hub keeps the files. Raises ImportError without huggingface_hub, and
    FileNotFoundError with the hub's reason.
    """
    name, _, revision = name.removeprefix(HUB).partition("@")
    patterns = [f"{stage}/{pattern}" for stage in STAGES for pattern in FILES]
    try:
        return Path(ask("fetch", name=name, revision=revision or None, patterns=patterns))
    except ConnectionError as error:
        raise FileNotFoundError(
            f"{HUB}{name} is neither on this machine nor on its hub ({error}); expected OWNER/NAME of "
            "weights that were pushed. Check the name and the network, or pass a folder."
        ) from None


def ask(call: str, more_s: float = 0.0, **facts: Any) -> str:
    """What a function of ups/hub_client.py returns. Raises ConnectionError with its error, on one
    line, and if fewer than MIN_SPEED bytes a second are fetched over HUB_S + more_s seconds."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ImportError(
            f"a name that begins with {HUB} needs huggingface_hub, which is not installed; "
            "expected it, or a folder. Run pip install huggingface_hub."
        )
    limit_s = HUB_S + more_s
    request = {"call": call, "facts": facts, "limit_s": limit_s, "num_bytes": int(MIN_SPEED * limit_s)}
    done = subprocess.run(
        [sys.executable, "-P", Path(__file__).with_name("hub_client.py")],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        env={"HF_HUB_VERBOSITY": "error", **os.environ},
    )
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):  # it was killed
        found = {"error": f"its client ended with exit code {done.returncode}"}
    if "error" in found:
        raise ConnectionError(f"{printable(' '.join(found['error'].split())):.200}")
    return str(found["answer"])
