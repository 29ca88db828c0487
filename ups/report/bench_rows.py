"""Networks of other kinds on the same data, as `make bench` measured them on the test split, for the report.

They are trained and tuned there, by the clock, and only read here. A result counts where the cache has the
same fingerprint (data, split, tokenizer) and as many context frames were given: then both were asked the
same.
"""

from pathlib import Path
from typing import Any

from ups.common.files import read_record
from ups.config import ROOT

FOLDER = ROOT / "bench" / "out"
NETWORKS = ("fno", "unet")


def data_key(fingerprint: str, context: int) -> dict[str, Any]:
    """What two results on a task must share to stand side by side: fingerprint of its cache, frames given."""
    return {"cache": fingerprint, "context_frames": context}


def find_bench_rows(task: str, key: dict[str, Any], folder: Path = FOLDER) -> dict[str, dict]:
    """ "fno", "unet" -> row of results.json of `task`, the best on validation of several results with this
    `data_key`.

    Raises DamagedError for a result that is not readable.
    """
    best: dict[str, dict] = {}
    for path in sorted(folder.glob(f"{task}_*.json")):
        record = read_record(path, "a result of make bench", "Delete it and run make bench again.")
        for model, entry in record.get("models", {}).items() if record.get("data") == key else ():
            if model not in best or entry["validation"] < best[model]["validation"]:
                best[model] = entry
    return {model: entry["row"] for model, entry in best.items()}
