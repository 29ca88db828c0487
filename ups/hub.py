"""Weights on a model hub: hf://OWNER/NAME is a published copy (ups/commands/publish.py).

huggingface_hub keeps what was fetched and limits waits (HF_HUB_ETAG_TIMEOUT, HF_HUB_DOWNLOAD_TIMEOUT).
"""

from pathlib import Path
from types import ModuleType

from ups.common.place import HUB, STAGES
from ups.common.text import printable
from ups.training.artifact import CARD, DONE, IMAGES, MODEL

# files of a stage in a copy
NEEDED = ("config.json", MODEL, DONE, "config.yaml", CARD)
FILES = (*NEEDED, "metrics.jsonl", f"{IMAGES}/*.png")


def client() -> ModuleType:
    """huggingface_hub. Raises ImportError with what to install."""
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(
            f"a name that begins with {HUB} needs huggingface_hub, which is not installed; "
            "expected it, or a folder. Run pip install huggingface_hub."
        ) from None
    return huggingface_hub


def reason(error: Exception) -> str:
    """The error of a hub, on one line."""
    return f"{printable(' '.join(f'{type(error).__name__}: {error}'.split())):.200}"


def fetch(name: str) -> Path:
    """Download hf://OWNER/NAME or hf://OWNER/NAME@REVISION once, and return its folder.

    Raises ImportError without huggingface_hub, and FileNotFoundError with the hub's reason.
    """
    name, _, revision = name.removeprefix(HUB).partition("@")
    patterns = [f"{stage}/{pattern}" for stage in STAGES for pattern in FILES]
    hub = client()
    try:
        return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # of several libraries; a strange answer of a hub raises anything
        raise FileNotFoundError(
            f"{HUB}{name} is neither on this machine nor on its hub ({reason(error)}); expected OWNER/NAME "
            "of weights that were pushed. Check the name and the network, or pass a folder."
        ) from None
