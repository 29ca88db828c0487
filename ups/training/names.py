"""The names of the files that UPS writes into the folder of a stage: what it may delete there.

Such a folder may also hold notes, links and copies of its user. So nothing is deleted with its folder: a
plain file goes if its path in the folder matches these patterns (`ups.common.files.remove_named`). Without
torch.
"""

import contextlib
import re
from pathlib import Path

from ups.common.text import read_yaml
from ups.training.finished import CARD, IMAGES

OF_RANKS = r"rank\d+\.json"
HEARTBEATS = rf"{OF_RANKS}|stop-\d+\.json"
CHECKPOINT = r"manifest\.json|shared\.pt|rank_\d+\.pt"
STARTS = r"errors_of_start_\d{4,}"
WANDB_RUN = r"wandb/(offline-)?run-\d{8}_\d{6}-\w+"
STAGE = (
    r"(config|done|environment|memory|status|tuning|wandb)\.json|config\.yaml|metrics\.jsonl|\.lock",
    r"model\.safetensors|README\.md",
    rf"(errors|{STARTS}|memory)/{OF_RANKS}|heartbeat/({HEARTBEATS})",
    rf"state/(step_|\.tmp-|\.damaged-)\d{{9}}/({CHECKPOINT})",
    r"tensorboard/events\.out\.tfevents\.[^/]+",
    r"wandb/(latest-run|debug(-core|-internal)?\.log)",  # links into the folder
    rf"{WANDB_RUN}/(run-\w+\.wandb(\.synced)?|logs/debug(-core|-internal)?\.log)",
    rf"{WANDB_RUN}/files/(config\.yaml|output\.log|requirements\.txt|wandb-(metadata|summary)\.json)",
)


def of_stage(folder: Path) -> str:
    """Pattern of the files of a stage. Its fits are named by the tasks of its config.yaml."""
    tasks = []
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # without it every fit stays
        tasks = [re.escape(name) for name in read_yaml(folder / "config.yaml")["data"]["tasks"]]
    fits = (rf"(bases|scales|posteriors)/{name}\.(json|safetensors)" for name in tasks)
    return "|".join((*STAGE, *fits, *(f"{IMAGES}/{name}" for name in pictures_of_card(folder).split("|"))))


def pictures_of_card(folder: Path) -> str:
    """Pattern of the pictures that the card of a stage shows, under the names that a report gives them."""
    text = ""
    with contextlib.suppress(OSError, ValueError):
        text = (folder / CARD).read_text(encoding="utf-8")
    return "|".join(
        map(re.escape, re.findall(rf"\]\({IMAGES}/([^/\n]+?_median_error_[^/\n]+?\.png)\)", text))
    )
