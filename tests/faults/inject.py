"""The injection matrix: what becomes of a run when something goes wrong, for every stage, rank and fault;
anyone can run it.

    python tests/faults/inject.py                                   all of it (some 50 minutes on one core)
    python tests/faults/inject.py --quick   a representative part of every stage (a few minutes)
    python tests/faults/inject.py --match "operator/(kill|hang_c)/1"
    python tests/faults/inject.py --list

Every case runs a real stage script on two CPU processes, with a fault put in by tests/faults/injected.py,
then the same command again. It passes if everything ended within LIMIT_S of the fault, exit codes are right,
a message names the cause, the ranks' weights were equal after every update, the end equals that of a run
without the fault (bit by bit, but where the micro-batch changed), and no process is left. Ranks are forked
from this process, which has imported torch once; the cases called launcher/* go through
ups_launch and accelerate launch. Prints a table, writes it as JSON, exits 1 if a case failed. See
docs/reliability.md."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from inject_launches import LAUNCHES, MACHINES, QUICK_LAUNCHES, launcher_case
from inject_moments import cache_case, moments_case
from inject_ranks import (
    DIFFERENCES,
    KINDS,
    QUICK,
    QUICK_DIFFERENCES,
    RANKS,
    SHARDED,
    difference_case,
    rank_case,
)
from inject_runs import ROOT, SCRIPTS, References, Result, prepare
from inject_storage import QUICK_STORAGE, STORAGE, storage_case

from ups_launch.processes import adopt_orphans

MOMENTS = 50  # random ones of saving, ending, building a cache


def cases(is_quick: bool, references: References) -> Iterator[tuple[str, Callable[[], Result]]]:
    """(name, case) of everything, or of a representative part."""
    moments = 3 if is_quick else MOMENTS
    for stage in SCRIPTS:
        for name in (name for name, kind in KINDS.items() if stage in kind.stages):
            wanted = QUICK[stage].get(name, ()) if is_quick else KINDS[name].ranks
            for ranks in (ranks for ranks in RANKS if ranks in wanted):
                yield f"{stage}/{name}/{ranks}", partial(rank_case, references, stage, ranks, name)
        for where in ("saving", "the end") if stage == "operator" or not is_quick else ():
            yield f"{stage}/moments/{where}", partial(moments_case, references, stage, where, moments)
    for name in () if is_quick else SHARDED:
        case = partial(rank_case, references, "operator", "1", name, is_sharded=True)
        yield f"operator/sharded {name}/1", case
    for name in QUICK_DIFFERENCES if is_quick else DIFFERENCES:
        yield f"operator/ranks differ in {name}", partial(difference_case, references, name)
    for name in QUICK_STORAGE if is_quick else STORAGE:
        yield f"storage/{name}", partial(storage_case, references, name)
    yield "cache", partial(cache_case, references, moments)
    for name in QUICK_LAUNCHES if is_quick else [*LAUNCHES, *MACHINES]:
        run = MACHINES.get(name) or partial(launcher_case, name=name)
        yield f"launcher/{name}", partial(run, references)


def chosen(options: argparse.Namespace, references: References) -> Iterator[tuple[str, Callable[[], Result]]]:
    return ((name, case) for name, case in cases(options.quick, references) if re.search(options.match, name))


def summary(results: list[dict[str, Any]]) -> str:
    """A Markdown table: cases, how many passed, and the time from the fault to the end of the last process,
    by fault."""
    groups: dict[str, list[dict]] = {}
    for entry in results:
        stage, name, *_ = entry["case"].split("/")
        groups.setdefault(f"{stage}: {name}" if stage in ("launcher", "storage") else name, []).append(entry)
    lines = ["| fault | cases | passed | median s | longest s |", "|---|---|---|---|---|"]
    for name, entries in groups.items():
        ends = [entry["end_s"] for entry in entries if entry["end_s"] is not None]
        times = f"{statistics.median(ends):.1f} | {max(ends):.1f}" if ends else "- | -"
        lines.append(
            f"| {name} | {len(entries)} | {sum(not entry['problems'] for entry in entries)} | {times} |"
        )
    return "\n".join(lines)


def main() -> int:
    # ignored in a background shell, and so in what it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--match", default="", help="the cases whose name matches this pattern")
    parser.add_argument("--quick", action="store_true", help="a representative part")
    parser.add_argument("--json", type=Path, default=Path("injection.json"), help="where the results go")
    parser.add_argument(
        "--work", type=Path, help="folder for data and runs (default: a temporary one, removed)"
    )
    parser.add_argument(
        "--summary", type=Path, nargs="+", help="print a table by fault of such files and end"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    options = parser.parse_args()
    if options.list:
        print("\n".join(name for name, _ in chosen(options, References(Path()))))
        return 0
    if options.summary:
        print(summary([entry for path in options.summary for entry in json.loads(path.read_text())]))
        return 0
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ups-inject-")))
        work = work.resolve()
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(ROOT)
        adopt_orphans()
        # once, for all forks
        import injected  # noqa: F401
        import torch._dynamo  # noqa: F401

        import train_consistency  # noqa: F401
        import train_operator  # noqa: F401
        import train_steady  # noqa: F401

        prepare(work)
        references, results = References(work), []
        for _, case in chosen(options, references):
            result = case()
            results.append(result)
            end = "" if result.end_s is None else f"{result.end_s:.1f} s"
            print(
                f"{'ok  ' if not result.problems else 'FAIL'}  {result.case:<48} {end:>8} "
                f"{result.total_s:7.1f} s  "
                f"{'; '.join(result.problems)} {result.note}".rstrip(),
                flush=True,
            )
            options.json.write_text(json.dumps([vars(entry) for entry in results], indent=1) + "\n")
    failed = [result for result in results if result.problems]
    ends = [result.end_s for result in results if result.end_s is not None]
    print(
        f"{len(results) - len(failed)} of {len(results)} cases passed; longest time from a fault to the end "
        f"{max(ends, default=0.0):.1f} s"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
