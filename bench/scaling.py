"""Measure rows per second of a small operator on one and on two CPU processes of one thread each.

    python -m bench.scaling                     on an idle machine with two cores or more
    python -m bench.scaling --steps 20          a short test

Two processes are measured with the same rows per process as one (throughput, twice the global batch) and with
half of them (the same training in less time; every process repeats the optimizer's step). Every process is
bound to its own core. The settings alternate, so that changes of the machine's speed affect all. Data and
cache are made in a temporary folder. Writes bench/out/scaling.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ups.common.place import ROOT

OUT = ROOT / "bench" / "out"
TASK = "burgers1d"
ROWS = 32  # of one process
SETTINGS = (
    f"data.tasks=[{TASK}] task.{TASK}.num_trajectories=64 task.{TASK}.resolution=256 "
    f"task.{TASK}.base=[persistence] task.{TASK}.num_frames=16 task.{TASK}.reach=0 "
    "operator.model.width=64 operator.model.depth=3 operator.model.modes=12 "
    f"operator.train.batch_size={ROWS} operator.train.micro_batch={ROWS} "
    "operator.train.precision='no' operator.train.validate_every=0 operator.train.save_every=0 "
    "operator.train.log_every=50 operator.unroll_fraction=0.0"
).split()
WARM_UP = 5  # steps that are not counted


def overrides(work: Path, name: str, steps: int, *more: str) -> list[str]:
    """Return the command line of one run."""
    return [
        f"run.root={work}/runs",
        f"run.name={name}",
        f"data.root={work}/data",
        f"cache.root={work}/cache",
        f"operator.train.steps={steps + WARM_UP}",
        *SETTINGS,
        *more,
    ]


def prepare(work: Path) -> None:
    """Make data and cache."""
    for script in ("prepare_data.py", "prepare_cache.py"):
        subprocess.run(
            [sys.executable, script, "--config", "configs/smoke.yaml", *overrides(work, "none", 1)],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def train(arguments: list[str]) -> dict[str, float]:
    """Train the operator on this rank; return seconds per step (mean and median) after the warm-up, on the
    slowest rank.
    """
    import torch

    from bench.ours import loss_of
    from ups.config.load import load_config
    from ups.data.cache import open_cache
    from ups.models.base_selection import fit_base
    from ups.models.head_setup import build_operator
    from ups.models.windows import Windows
    from ups.training.ending import main_guard
    from ups.training.run import Run

    torch.set_num_threads(1)
    cores, found = sorted(os.sched_getaffinity(0)), {}
    os.sched_setaffinity(0, {cores[int(os.environ.get("RANK", 0)) % len(cores)]})
    config = load_config(ROOT / "configs" / "smoke.yaml", arguments)

    @main_guard
    def main() -> None:
        cache = open_cache(config, TASK)
        contexts, settings = {TASK: config.context(TASK)}, config.operator
        windows = Windows({TASK: cache}, config.task, contexts, settings, config.run.seed)
        run = Run.start(
            config, "operator", config.operator.train, config.operator.optim, {TASK: cache.fingerprint}
        )
        fact, weights = fit_base(
            cache, config.operator.base_steps, config.context(TASK), config.run.seed, run.device
        )
        run.seed_all()
        operator = run.attach(
            build_operator({TASK: (fact, weights)}, settings.model, settings.train.precision)
        )
        times = []
        for step in run.steps():
            started = time.perf_counter()
            batch = windows.schedule.batch(step).shard(run.rank, run.world)
            run.update(partial(loss_of, operator, windows, batch), len(batch), only=batch.task)
            times.append(time.perf_counter() - started)
        times = times[WARM_UP:]
        every = run.ranks.gather((statistics.fmean(times), statistics.median(times)))
        found.update(mean=max(mean for mean, _ in every), median=max(median for _, median in every))
        run.finish({}, {})

    main()
    return found


def measure(work: Path, name: str, world: int, steps: int, *more: str) -> dict[str, float]:
    """Run `train` on `world` processes."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(world):
        group = (
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            if world > 1
            else {}
        )
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "bench.scaling", "--worker", *overrides(work, name, steps, *more)],
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **group,
                    "ACCELERATE_USE_CPU": "true",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT),
                },
            )
        )
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(
            f"{name} failed; expected a run to its end. Give python -m bench.scaling --worker its settings "
            f"to see "
            f"why:\n{outputs[0]}"
        )
    return json.loads(outputs[0].splitlines()[-1])


def parse(
    text: str, steps: int, worker: Callable[[list[str]], dict[str, float]]
) -> argparse.Namespace | None:
    """Return the options of a benchmark; in a process that it started, print the result of `worker` and
    return None.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is None:
        return options
    print(json.dumps(worker(options.worker)))
    return None


def main() -> None:
    options = parse(__doc__, 100, train)
    if options is None:
        return
    settings = {"one": (1, ROWS), "two, same rows each": (2, 2 * ROWS), "two, same global batch": (2, ROWS)}
    rates: dict[str, list[float]] = {name: [] for name in settings}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work)
        for turn in range(options.repeats):
            for name, (world, size) in settings.items():
                found = measure(
                    work,
                    f"run{turn}_{world}_{size}",
                    world,
                    options.steps,
                    f"operator.train.batch_size={size}",
                )
                rates[name].append(size / found["mean"])
                print(f"{name}: {rates[name][-1]:.0f} rows per second", flush=True)
    one, each, same = (statistics.median(rates[name]) for name in settings)
    print(
        f"2 processes x 1 thread over 1 process x 1 thread: {each / one:.2f} with {ROWS} rows each (wanted: "
        f"at least 1.8), {same / one:.2f} with a global batch of {ROWS}"
    )
    OUT.mkdir(exist_ok=True)
    (OUT / "scaling.json").write_text(
        json.dumps(
            {"rates": rates, "throughput": each / one, "same_batch": same / one, "cores": os.cpu_count()},
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
