"""The injection matrix: what becomes of a run when something goes wrong, for every stage, rank and fault;
anyone can run it.

    python tests/faults/inject.py                                   all of it (some 50 minutes on one core)
    python tests/faults/inject.py --quick   a representative part of every stage (a few minutes)
    python tests/faults/inject.py --stages operator --ranks 1 --faults kill,hang_c
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

OTHERS = ("moments", "sharded", "differ", "storage", "cache", "launcher")  # beside faults of a rank


def cases(options: argparse.Namespace, references: References) -> Iterator[tuple[str, Callable[[], Result]]]:
    """(name, case) of everything that was asked for."""
    faults = options.faults or [*KINDS, *OTHERS]
    moments = 3 if options.quick else options.moments
    for stage in options.stages:
        for name in (fault for fault in faults if fault in KINDS and stage in KINDS[fault].stages):
            wanted = QUICK[stage].get(name, ()) if options.quick else KINDS[name].ranks
            for ranks in (ranks for ranks in options.ranks if ranks in wanted):
                yield (
                    f"{stage}/{name}/{ranks}",
                    lambda s=stage, r=ranks, n=name: rank_case(references, s, r, n),
                )
        if "moments" in faults and (stage == "operator" or not options.quick):
            for where in ("saving", "the end"):
                yield (
                    f"{stage}/moments/{where}",
                    lambda s=stage, w=where: moments_case(references, s, w, moments),
                )
        if stage == "operator":
            if "sharded" in faults and not options.quick:
                for name in SHARDED:
                    case = partial(rank_case, references, "operator", "1", name, is_sharded=True)
                    yield f"operator/sharded {name}/1", case
            if "differ" in faults:
                for name in QUICK_DIFFERENCES if options.quick else DIFFERENCES:
                    yield f"operator/ranks differ in {name}", partial(difference_case, references, name)
            if "storage" in faults:
                for name in QUICK_STORAGE if options.quick else STORAGE:
                    yield f"storage/{name}", partial(storage_case, references, name)
    if "cache" in faults:
        yield "cache", lambda: cache_case(references, moments)
    if "launcher" in faults:
        for name in options.launches or (QUICK_LAUNCHES if options.quick else [*LAUNCHES, *MACHINES]):
            run = MACHINES.get(name) or partial(launcher_case, name=name)
            yield f"launcher/{name}", partial(run, references)


def chosen(options: argparse.Namespace, references: References) -> Iterator[tuple[str, Callable[[], Result]]]:
    return ((name, case) for name, case in cases(options, references) if re.search(options.match, name))


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

    def some(allowed: Any) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            if unknown := [word for word in text.split(",") if word not in allowed]:
                raise argparse.ArgumentTypeError(
                    f"{unknown[0]!r} is unknown; expected some of {', '.join(allowed)}"
                )
            return text.split(",")

        return read

    parser.add_argument("--stages", type=some(SCRIPTS), default=list(SCRIPTS), help=",".join(SCRIPTS))
    parser.add_argument("--ranks", type=some(RANKS), default=list(RANKS), help=",".join(RANKS))
    parser.add_argument("--faults", type=some([*KINDS, *OTHERS]), default=[], help="see --list")
    parser.add_argument(
        "--launches", type=some([*LAUNCHES, *MACHINES]), default=[], help="of the group launcher"
    )
    parser.add_argument("--match", default="", help="of all these, the cases whose name matches this pattern")
    parser.add_argument(
        "--moments", type=int, default=50, help="random moments of saving, ending, building a cache"
    )
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
