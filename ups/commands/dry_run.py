"""What `--dry-run` prints: tasks, parents and batch arithmetic of a stage, files and disk of data. Writes
nothing.

Everything follows from the configuration, before data and caches exist. A stage prints its parameters when it
starts, and its progress bar the time; `python -m bench.gpu updates` times an update of every task.
"""

import os
import shutil
from pathlib import Path

from ups.common.files import partial_path
from ups.common.place import STAGES, make_target
from ups.config.schema import Config
from ups.data.download import is_verified
from ups.data.generate import num_done, solver_of
from ups.tasks import get_task
from ups.training.artifact import DONE

MIB = 2**20


def print_training_plan(config: Config, stage: str) -> None:
    """Print tasks, parents and batch of a training stage."""
    names, section = config.served(stage), getattr(config, stage)
    if not names:
        print(f"{stage}: nothing to do, no task of this stage reserves trajectories (task.TASK.reserve)")
        return
    train = section.train
    print(f"{stage}: to {config.run_dir / stage}, on {', '.join(names)}")
    print(f"  {_parents(config, stage)}")
    world = int(os.environ.get("WORLD_SIZE") or os.environ.get("UPS_EXPECT_WORLD") or 1)
    shard = -(-train.batch_size // world)
    micro = min(train.micro_batch, shard)
    print(
        f"  {train.steps} steps of {train.batch_size} rows = {world} process(es) x {shard}, in "
        f"micro-batches of {micro}"
    )


def _parents(config: Config, stage: str) -> str:
    parents = {config.run_dir / parent / DONE: parent for parent in STAGES[stage].parents} or {
        config.cache_path(name): "cache" for name in config.served(stage)
    }
    if start := config.init_dir(stage):
        parents[start / DONE] = "the run to start from"
    missing = [path for path in parents if not path.is_file()]
    fix = f"; {missing[0]} is missing: {make_target(parents[missing[0]])}" if missing else ""
    return f"{len(parents) - len(missing)} of {len(parents)} parents are there{fix}"


def print_data_plan(config: Config, files: list[tuple], num_workers: int) -> None:
    """Print files, bytes, what exists already and the time to solve the rest, per task.

    files: (task, parameter, path, bytes, settings) of each.
    """
    missing, seconds, source = 0, 0.0, config.data.source
    print(f"data: to {config.data.root} ({source})")
    for task in dict.fromkeys(name for name, *_ in files):
        of_task, present = [entry[2:] for entry in files if entry[0] == task], 0
        for path, size, made in of_task:
            partial = partial_path(path)
            have = size if path.exists() else min(size, partial.stat().st_size if partial.exists() else 0)
            if source == "published" and made[2] and not path.exists():
                have = 0  # a partial file has its full size from the start
            if source == "generate":
                todo = made["num_trajectories"] - num_done(path, made)
                have = int(size * (1 - todo / made["num_trajectories"]))
                if todo:
                    seconds += solver_of(get_task(task)).seconds(made) * todo / num_workers
            present += have
        total = sum(size for _, size, _ in of_task)
        state = "up to date" if present == total else f"{present / total:.0%} there"
        if source == "published":
            state += f", MD5 of {sum(is_verified(path, made[1]) for path, _, made in of_task)} compared"
        print(f"  {task}: {len(of_task)} file(s), about {total / MIB:,.1f} MiB, {state}")
        missing += total - present
    how = {
        "generate": f"to solve in about {duration(seconds)}, estimated from a few trajectories of each file",
        "published": "to download",
        "user": "to be written by you",
    }[source]
    print(
        f"  {len(files)} files, about {missing / MIB:,.1f} MiB {how}; "
        f"{free_bytes(config.data.root) / MIB:,.0f} MiB free"
    )


def print_report_plan(config: Config) -> None:
    """Print what the report writes."""
    evaluated = ", ".join(config.evaluated)
    print(f"report: to {config.report_dir}: results.csv, results.json, report.html, figures; on {evaluated}")


def duration(seconds: float) -> str:
    """Return seconds as "1.2 h", "3 min" or "5 s", with two digits."""
    return next(
        f"{float(f'{seconds / size:.2g}'):g} {unit}"
        for size, unit in ((3600, "h"), (60, "min"), (1, "s"))
        if seconds >= 1.5 * size or size == 1
    )


def free_bytes(root: str) -> int:
    """Return the free bytes on the disk of a folder, which need not exist."""
    folder = Path(root).absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
