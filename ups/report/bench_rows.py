"""Networks of other kinds on the same data, as `make bench` measured them on the test split, for the report.

The bench trains and tunes them by time; here its results are read. A result counts if its cache has the same
fingerprint (data, split, tokenizer) and it had as many context frames: then the comparison is fair. Results
from before noisy data got more context frames have fewer.
"""

from pathlib import Path
from typing import Any

from ups.common.files import read_record
from ups.common.place import ROOT, make_target

FOLDER = ROOT / "bench" / "out"
NETWORKS = ("fno", "unet")


def data_key(fingerprint: str, context: int) -> dict[str, Any]:
    """What two comparable results on a task share: fingerprint and `Cache.context`."""
    return {"cache": fingerprint, "context_frames": context}


def find_bench_rows(task: str, key: dict[str, Any], folder: Path = FOLDER) -> dict[str, dict]:
    """{"fno", "unet"} -> row of results.json for `task`: of the results with this `data_key`, the best on
    validation. Raises DamagedError for a result that is not readable."""
    best: dict[str, dict] = {}
    for path in sorted(folder.glob(f"{task}_*.json")):
        record = read_record(
            path, "a result of make bench", f"Delete it and run {make_target('bench')} again."
        )
        for model, entry in record.get("models", {}).items() if record.get("data") == key else ():
            if model not in best or entry["validation"] < best[model]["validation"]:
                best[model] = entry
    return {model: entry["row"] for model, entry in best.items()}
