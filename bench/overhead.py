"""Measure the cost of agreed updates, heartbeat and log, against a torch loop and against overlapped DDP.

    python -m bench.overhead                    on an idle machine
    python -m bench.overhead --steps 20         a short test

bare: the same model, rows, loss, optimizer, clipping and average in a loop without `Run`. The two alternate
step by step in one process. The guard's thread is measured separately (it runs during both) and added. DDP:
two processes with ddp.overlap=true alternate with two without. Writes bench/out/overhead.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from bench.scaling import OUT, TASK, WARM_UP, measure, overrides, parse, prepare
from ups.common.place import ROOT


def thread_seconds(native_id: int) -> float:
    """Return the CPU seconds of a thread of this process."""
    fields = Path(f"/proc/self/task/{native_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare_with_bare(arguments: list[str]) -> dict[str, float]:
    """Return mean seconds per step with `Run` and bare, and the guard's fraction of the time."""
    import torch

    from bench.ours import loss_of
    from ups.config.load import load_config
    from ups.data.cache import open_cache
    from ups.models.base_selection import fit_base
    from ups.models.head_setup import build_operator
    from ups.models.windows import Windows
    from ups.training.ending import main_guard
    from ups.training.optim import EMA, build_optimizer, learning_rate, scale_lr
    from ups.training.run import Run

    torch.set_num_threads(1)
    config, found = load_config(ROOT / "configs" / "smoke.yaml", arguments), {}
    train, optim = config.operator.train, config.operator.optim

    @main_guard
    def main() -> None:
        cache = open_cache(config, TASK)
        contexts = {TASK: config.context(TASK)}
        windows = Windows({TASK: cache}, config.task, contexts, config.operator, config.run.seed)
        run = Run.start(config, "operator", train, optim, {TASK: cache.fingerprint})
        fact, weights = fit_base(
            cache, config.operator.base_steps, config.context(TASK), config.run.seed, run.device
        )
        both = []
        for _ in range(2):  # a copy of a parameter forgets which optimizer it is for
            run.seed_all()
            both.append(build_operator({TASK: (fact, weights)}, config.operator.model, train.precision))
        operator, bare = run.attach(both[0]), both[1]
        parameters, optimizer, ema = (
            list(bare.parameters()),
            build_optimizer(bare, optim),
            EMA(bare, optim.ema_decay),
        )

        def bare_step(step: int) -> None:
            batch = windows.schedule.batch(step)
            for first in range(0, len(batch), train.micro_batch):
                part = slice(first, min(first + train.micro_batch, len(batch)))
                loss, _ = loss_of(bare, windows, batch, part)
                gradients = torch.autograd.grad(
                    loss * ((part.stop - part.start) / len(batch)), parameters, allow_unused=True
                )
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            torch.nn.utils.clip_grad_norm_(parameters, optim.clip_norm)
            scale_lr(optimizer, learning_rate(step, train.steps, optim))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            ema.update()

        def run_step(step: int) -> None:
            batch = windows.schedule.batch(step).shard(run.rank, run.world)
            run.update(partial(loss_of, operator, windows, batch), len(batch), only=batch.task)

        times: dict[str, list[float]] = {"run": [], "bare": []}
        guard, begun = run.ranks.activity.guard._thread.native_id, time.perf_counter()
        used = thread_seconds(guard)
        for step in run.steps():
            order = [("run", run_step), ("bare", bare_step)]
            for name, function in order if step % 2 else order[::-1]:
                started = time.perf_counter()
                function(step)
                times[name].append(time.perf_counter() - started)
            if step + 1 == WARM_UP:  # later what is rounded differently has grown: Muon rounds to bf16
                pairs = zip(operator.parameters(), parameters, strict=True)
                apart = max(
                    float((a - b).norm() / (a.norm() + 1e-3))
                    for a, b in ((a.detach(), b.detach()) for a, b in pairs)
                )
                assert apart < 0.01, f"the bare loop does not compute the same: weights {apart:.1e} apart"
        share = (thread_seconds(guard) - used) / (time.perf_counter() - begun)
        found.update(
            {name: statistics.fmean(values[WARM_UP:]) for name, values in times.items()},
            guard=share,
            median_ratio=statistics.median(a / b for a, b in zip(times["run"], times["bare"], strict=True)),
        )
        run.finish({}, {})

    main()
    return found


def main() -> None:
    options = parse(__doc__, 200, compare_with_bare)
    if options is None:
        return
    results: dict[str, list] = {"bare": [], "agreed": [], "overlapped": []}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work)
        for turn in range(options.repeats):
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "bench.overhead",
                    "--worker",
                    *overrides(work, f"bare{turn}", options.steps),
                ],
                cwd=ROOT,
                text=True,
                capture_output=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
                check=False,
            )
            if done.returncode:
                raise RuntimeError(
                    f"the comparison with a bare loop failed; expected numbers:\n{done.stderr}"
                )
            found = json.loads(done.stdout.splitlines()[-1])
            results["bare"].append(found)
            print(
                f"Run {found['run'] * 1e3:.2f} ms, bare {found['bare'] * 1e3:.2f} ms per step (median of "
                f"the ratio {found['median_ratio']:.4f}); guard's thread {found['guard']:.4f} of a core",
                flush=True,
            )
        for turn in range(options.repeats):
            for name, more in (("agreed", ()), ("overlapped", ("ddp.overlap=true",))):
                results[name].append(measure(work, f"{name}{turn}", 2, options.steps, *more))
                print(f"two processes, {name}: {results[name][-1]['mean'] * 1e3:.2f} ms per step", flush=True)
    bare = statistics.median(found["median_ratio"] - 1.0 + found["guard"] for found in results["bare"])
    agreed, overlapped = (
        statistics.median(found["mean"] for found in results[name]) for name in ("agreed", "overlapped")
    )
    over_ddp = agreed / overlapped - 1.0
    print(
        f"over a bare loop: {100 * bare:+.1f} % (wanted: at most 2); over overlapped DDP: "
        f"{100 * over_ddp:+.1f} %"
    )
    OUT.mkdir(exist_ok=True)
    (OUT / "overhead.json").write_text(
        json.dumps({**results, "over_bare": bare, "over_ddp": over_ddp}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
