"""Kill -9 at random moments of saving, of the stage's end, of building a cache, and the same command
again."""

from __future__ import annotations

import hashlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inject_runs import CASE_S, ROOT, SCRIPTS, STEPS, References, Result, compare, fork, settings_of, wait

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.truncate")


def strike_at(number: int, count: Path, owner: Any, names: tuple[str, ...]) -> None:
    """Kill this process at the `number`-th file operation inside owner.names (count them if it is 0)."""
    inside, seen, fsync = [0], [0], os.fsync

    def moment(*_: Any) -> None:
        if not inside[0]:
            return
        seen[0] += 1
        if seen[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def flushing(handle: int) -> None:
        moment()
        fsync(handle)
        moment()

    os.fsync = flushing
    sys.addaudithook(lambda event, _: moment() if event in EVENTS else None)

    def watched(before: Callable) -> Callable:
        def changed(*arguments: Any, **options: Any) -> Any:
            inside[0] += 1
            try:
                return before(*arguments, **options)
            finally:
                inside[0] -= 1
                if number == 0:
                    inside_now, inside[0] = inside[0], 0
                    count.write_text(str(seen[0]))
                    inside[0] = inside_now

        return changed

    for name in names:
        setattr(owner, name, watched(getattr(owner, name)))


def moments_case(references: References, stage: str, where: str, number: int) -> Result:
    """Kill -9 at `number` random file operations of saving or of the stage's end, each time followed by the
    same command."""
    import injected

    import ups.training.checkpoint
    import ups.training.run

    work = references.work
    result = Result(f"{stage}/kill at {number} moments of {where}", [])
    started = time.monotonic()
    targets = {
        "saving": (ups.training.checkpoint.Checkpoints, ("save",)),
        "the end": (ups.training.run.Run, ("finish", "close")),
    }
    folder = work / "cases" / f"{stage}_moments_{where.replace(' ', '')}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reference, before = folder / "reference", folder / "before"
    script = str(ROOT / SCRIPTS[stage])

    def run(root: Path, at: int | None, steps: str = "none") -> int | None:
        def child() -> None:
            if at is not None:
                strike_at(at, folder / "count", *targets[where])
            fault = (
                {"kind": "term", "ranks": [0], "step": int(steps), "once": str(folder / "term")}
                if steps != "none"
                else {}
            )
            injected.run_script(
                {"ranks": [], **fault}, script, settings_of(work, root, stage, ("save_every=1",))
            )

        return wait([fork(child, root.with_suffix(".log"), {})], time.monotonic() + CASE_S)[0][0]

    for root in (reference, before):
        references.parents(stage, root)
    if run(reference, 0) != 0 or run(before, None, str(STEPS - 3)) != 143:
        result.problems.append("a run without a kill failed")
        return result
    draws = random.Random(f"{stage} {where}")
    total = int((folder / "count").read_text())
    # the kills hit the last two steps' saves
    total = max(1, total * 3 // STEPS) if where == "saving" else total
    for turn in range(number):
        at, root = draws.randint(1, total), folder / f"turn{turn}"
        shutil.copytree(before, root)
        code = run(root, at)
        if code not in (-9, 0):
            result.problems.append(f"killed at operation {at}, it ended with {code}")
        again = run(root, None)
        wrong = (
            [f"the same command again ended with {again}"]
            if again != 0
            else compare(reference / "smoke" / stage, root / "smoke" / stage, True)
        )
        result.problems += [f"killed at operation {at} of {total}: {text}" for text in wrong]
        if wrong:
            result.note = f"see {root}"
            break
        shutil.rmtree(root)
    result.total_s = time.monotonic() - started
    return result


def cache_case(references: References, number: int) -> Result:
    """Kill -9 at `number` random moments of building a cache, each time followed by the same command."""
    import prepare_cache

    work, result, started = references.work, Result(f"cache/kill at {number} moments", []), time.monotonic()
    folder = work / "cases" / "cache"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def build(*more: str, limit: int | None = None) -> int:
        arguments = [*settings_of(work, folder, "operator"), f"cache.root={folder / 'cache'}", *more]

        def child() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            try:
                sys.exit(prepare_cache.main(arguments))
            except (ValueError, OSError) as error:  # as the script itself does
                sys.exit(f"prepare_cache.py: {error}")

        return fork(child, folder / "log", {})

    def hashes() -> dict[str, str]:
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((folder / "cache").iterdir())
        }

    if wait([build()], time.monotonic() + CASE_S)[0] != [0]:
        result.problems.append("building without a kill failed")
        return result
    reference, begun = hashes(), time.monotonic()
    shutil.rmtree(folder / "cache")
    wait([build()], time.monotonic() + CASE_S)
    duration, draws = time.monotonic() - begun, random.Random("cache")
    for _ in range(number):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        after = draws.uniform(0.0, duration)
        pid = build()
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if (
            wait([build()], time.monotonic() + CASE_S)[0] != [0]
            or hashes() != reference
            or wait([build("--verify")], time.monotonic() + CASE_S)[0] != [0]
        ):
            result.problems.append(
                f"killed after {after:.3f} of {duration:.3f} s, the same command did not give the same caches"
            )
            break
    shutil.rmtree(folder / "cache", ignore_errors=True)
    (folder / "log").unlink()  # the limit is on it, too
    code, _ = wait([build(limit=20_000)], time.monotonic() + CASE_S)
    if code != [1] or not re.search(r"cannot write .*File too large", (folder / "log").read_text()):
        result.problems.append(f"without space it ended with {code} and no clear message")
    if wait([build()], time.monotonic() + CASE_S)[0] != [0] or hashes() != reference:
        result.problems.append("after a full disk the same command did not give the same caches")
    result.total_s = time.monotonic() - started
    return result
