"""The golden table of a run: what validation decided, the weights, and every error of the report. It is the
same before and after code is moved, bitwise on one machine with as many processes and threads.

    python tests/golden_table.py runs/small > before.json
    python tests/golden_table.py runs/small --against before.json    prints what differs; status 1 if any does

Times and the names of folders are left out. tests/golden/small.json is of `make train TOPOLOGY=cpu2`
(stages without the report, AMD EPYC); the log names its commits, and other processors round differently.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
TIMES = ("seconds", "ms_per_state", "run", "config_hash", "versions")


def flat(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """(place, number, text or list) of everything in nested mappings, without the entries of TIMES."""
    if isinstance(value, dict):
        for key in sorted(value):
            if key not in TIMES:
                yield from flat(value[key], f"{place}/{key}".strip("/"))
    else:
        yield place, value


def base_scores(facts: dict[str, Any]) -> dict[str, float | None]:
    """The pooled nRMSE of every candidate, from the facts of `fit_base`; None if it blew up."""
    return {name: score for name, (score, *_) in facts["decisions"][0]["candidates"].items()}


def table(run: Path) -> dict[str, Any]:
    """Place -> value of all finished stages and of the report of a run."""
    from ups.common.files import file_hash, value_hash
    from ups.common.place import STAGES
    from ups.generative.validation import default_sampler
    from ups.results import load
    from ups.training.artifact import stage_of_run

    found: dict[str, Any] = {}
    for stage in STAGES:
        if (finished := stage_of_run(run, stage)) is None:
            continue
        found[f"{stage}/weights"] = file_hash(run / stage / "model.safetensors")
        heads = finished.description["tasks"]
        for head in heads:
            name = head["name"]
            base = head.pop("base", None)
            if base is not None:
                facts = json.loads((run / stage / "bases" / f"{name}.json").read_text(encoding="utf-8"))
                head["base"] = {
                    "kind": base["kind"],
                    "name": base.get("name"),
                    "unstable": base.get("unstable"),
                    "settings": value_hash(base["settings"]),
                }
                facts = facts.get("facts", facts)
                head |= {"validation_nrmse": base_scores(facts), "findings": facts["findings"]}
            found |= flat(head, f"{stage}/{name}")
        for one in finished.description.get("decisions", []):
            decided = {"chosen": one["chosen"], "candidates": one["candidates"]}
            found |= flat(decided, f"{stage}/decisions/{one['question']}")
        scores = finished.description.get("validation_crps", {})
        found |= flat(scores, f"{stage}/validation_crps")
        if stage == "operator":
            names = [head["name"] for head in heads]
    found |= {f"default_sampler/{name}": default_sampler(run, name) for name in names}
    if (run / "report" / "results.json").is_file():
        results = load(run / "report")
        found |= flat(results.record, "report")
        for row in results.rows:
            if not {*row.metric.split("/")} & {*TIMES}:
                place = "/".join(map(str, ("report", *row[:4], *[row.lead] * (row.lead is not None))))
                found[place] = [row.value, row.low, row.high]
    return found


def differences(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> list[str]:
    """A line for every place whose values differ by more than `tolerance`, relative."""

    def is_same(one: Any, other: Any) -> bool:
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(is_same, one, other))
        if isinstance(one, float) and isinstance(other, float) and one == one:
            return abs(one - other) <= tolerance * max(abs(one), abs(other))
        return repr(one) == repr(other)

    return [
        f"{place}: {found.get(place, 'missing')!r:.120}, expected {expected.get(place, 'nothing')!r:.120}"
        for place in sorted(found.keys() | expected.keys())
        if not (place in found and place in expected and is_same(found[place], expected[place]))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    found = json.loads(json.dumps(table(args.run)))
    if args.against is None:
        rows = (f"{json.dumps(place)}: {json.dumps(value)}" for place, value in found.items())
        print("{", ",\n".join(rows), "}", sep="\n")
        return 0
    lines = differences(found, json.loads(args.against.read_text(encoding="utf-8")))
    print(*(lines or [f"{len(found)} entries are equal"]), sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
