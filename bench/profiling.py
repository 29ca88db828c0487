"""Profile a training step: time of its parts, fractions of the machine's peaks, slowest operators.

    make profile STAGE=operator CONFIG=configs/small.yaml
    python -m bench.profiling operator --config configs/small.yaml [--first-step 2000]
    [operator.train.micro_batch=16]

Runs the stage's script on one process, in a temporary folder, for a few steps: warm-up, timed steps
(processor time on a CPU, wall-clock time on a GPU with synchronisation at the ends of a part), one step
that counts operations, and some under torch.profiler. FLOPs are those of matrix products and convolutions.
Bytes are those that every operator reads and writes without a cache, so with small tensors the fraction of
the bandwidth may exceed 1. Peaks are measured at the same time: a product of large matrices in the stage's
precision, and a copy. Writes profile.txt and trace.json (for chrome://tracing or ui.perfetto.dev) to
RUN/profile-STAGE/.
"""

import contextlib
import importlib
import math
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from ups.common.device import computed, precision_in_words
from ups.common.files import write_atomic
from ups.common.place import ROOT, STAGES
from ups.config.command import CONFIG_OPTIONS, read_command, run_script
from ups.config.load import load_config
from ups.data.cache import Cache
from ups.training.artifact import finished_stage
from ups.training.run import Run
from ups.training.strategies import LossFunction
from ups.training.update import Updates

OPTIONS = {
    "stage": {"choices": list(STAGES)},
    **CONFIG_OPTIONS,
    "--warm-up": {"type": int, "default": 3},
    "--steps": {"type": int, "default": 8, "help": "by the clock"},
    "--first-step": {"type": int, "default": 0, "help": "late ones are unrolled, or tuned"},
}
PROFILED = 3  # steps under torch.profiler
MATRIX = {"cpu": 1024, "cuda": 8192}
COPY = {"cpu": 2**26, "cuda": 2**30}  # bytes
SHOWN = 15  # operators
LAX = ["diffusion.min_residual_ratio=1e-9", "diffusion.max_whitened_std=1e9"]
# what is fitted before the first step is fitted for a few steps only: it is as fast then, not as good
FEW = {
    "operator": ["operator.base_steps=4"],
    "diffusion": ["diffusion.scale_steps=10", *LAX],
    "steady": ["steady.scale_steps=10", *LAX],
}
# part of a step -> what it is the time of; those of a part within another count for the inner one
PARTS = {
    "reading latents": ((Cache, "batch"), (Cache, "inputs")),
    "forward pass": (),  # the stage's loss function: `Observed.update`
    "backward pass": ((Updates, "_backward"),),
    "optimizer and average": ((Updates, "_apply"),),
    "the rest of the update": ((Run, "update"),),
}


class Clock:
    """Seconds of the parts of a step, each without the parts inside it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.turn()
        self._open.append(name)
        try:
            with record_function(name):
                yield
        finally:
            self.turn()
            self._open.pop()

    def turn(self) -> float:
        """Add the time since the last turn to the open part; return the time now."""
        now = self.now()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
        return now


class Moved(TorchDispatchMode):
    """Counts the bytes of operators' input and output tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None
    ) -> Any:
        out = function(*arguments, **(options or {}))
        if not function.is_view:
            self.num_bytes += sum(
                tensor.numel() * tensor.element_size()
                for tensor in tree_flatten((arguments, options, out))[0]
                if isinstance(tensor, Tensor)
            )
        return out


def best_of(action: Callable[[], Any], clock: Clock, num: int = 4) -> float:
    """Return the fewest seconds of a call, without the first."""
    seconds = []
    for _ in range(num):
        begun = clock.now()
        action()
        seconds.append(clock.now() - begun)
    return min(seconds[1:])


def peaks(device: torch.device, dtype: torch.dtype, clock: Clock) -> tuple[float, float]:
    """Return FLOP/s of a product of large matrices and bytes/s of a copy, each the best of a few."""
    size = MATRIX[device.type]
    one, two = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(COPY[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size**3 / best_of(lambda: one @ two, clock), 2 * COPY[device.type] / best_of(
        lambda: target.copy_(source), clock
    )


class Observed:
    """Measurements of a stage while its script runs; `update` replaces Run.update."""

    def __init__(self, warm_up: int, steps: int, first_step: int, trace: Path) -> None:
        self.warm_up, self.steps, self.first_step, self.trace = warm_up, steps, first_step, trace
        self.clock, self.profiler, self.flops, self.num_bytes, self.table = None, None, 0, 0, ""
        self.seconds: dict[str, float] = {}
        self.losses: list[float] = []
        self._done = 0

    def within(self, original: Callable, name: str) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.clock is None:
                return original(*arguments, **options)
            with self.clock.part(name):
                return original(*arguments, **options)

        return call

    def update(self, original: Callable) -> Callable:
        def call(run: Run, loss_function: LossFunction, *others: Any) -> bool:
            if self._done == 0:
                run.counters.step, self.run = self.first_step, run
            arguments = (self.within(loss_function, "forward pass"), *others)
            if self._done == self.warm_up + self.steps:
                with FlopCounterMode(display=False) as counter, Moved() as moved:
                    result = original(run, *arguments)
                self.flops, self.num_bytes = counter.get_total_flops(), moved.num_bytes
                activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (run.device.type == "cuda")
                self.profiler = profile(activities=activities)
                self.profiler.__enter__()
            else:
                result = original(run, *arguments)
            self._done += 1
            if self._done == self.warm_up:
                self.clock = Clock(run.device)
                self._begun = self.clock.now()
            if self._done == self.warm_up + self.steps:
                self._read_clock()
            if self._done == self.warm_up + self.steps + 1 + PROFILED:
                self._finish(run)
            return result

        return call

    def _read_clock(self) -> None:
        whole = (self.clock.turn() - self._begun) / self.steps
        self.seconds = {name: self.clock.seconds[name] / self.steps for name in PARTS}
        self.seconds["between updates"] = whole - sum(self.seconds.values())

    def _finish(self, run: Run) -> None:
        """End the script after the last measurement."""
        self.profiler.__exit__(None, None, None)
        self.profiler.export_chrome_trace(str(self.trace))
        key = "self_device_time_total" if run.device.type == "cuda" else "self_cpu_time_total"
        self.table = self.profiler.key_averages().table(
            sort_by=key, row_limit=SHOWN, max_name_column_width=40
        )
        run.ranks.is_finished = True
        raise SystemExit(0)


def observe(stage: str, arguments: list[str], observed: Observed) -> None:
    """Run the script of a stage with `arguments` until all is measured."""
    script = importlib.import_module(f"train_{stage}")
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(sys, "argv", [f"train_{stage}.py", *arguments]))
        for name, places in PARTS.items():
            for owner, attribute in places:
                original = getattr(owner, attribute)
                inner = observed.update(original) if owner is Run else original
                patched.enter_context(
                    mock.patch.object(owner, attribute, _method(observed.within(inner, name)))
                )
        script.main()


def _method(function: Callable) -> Callable:
    return lambda self, *arguments, **options: function(self, *arguments, **options)


def summary(stage: str, observed: Observed, peak_flops: float, peak_bytes: float) -> str:
    """Return the measurements as text."""
    step = sum(observed.seconds.values())
    lines = [
        f"{stage}: {1e3 * step:.1f} ms a step "
        f"({'processor time' if observed.run.device.type == 'cpu' else 'wall-clock'}, mean of "
        f"{observed.steps} from step {observed.first_step + observed.warm_up} on, "
        f"{observed.run.train.batch_size} rows) on {observed.run.device}, {torch.get_num_threads()} "
        f"thread(s), precision {precision_in_words(observed.run.train.precision, observed.run.device)}"
    ]
    lines += [
        f"  {name:24s} {1e3 * seconds:9.2f} ms  {seconds / step:6.1%}"
        for name, seconds in observed.seconds.items()
    ]
    lines += [
        f"  {observed.flops / 1e9:.2f} GFLOP a step: {observed.flops / step / 1e9:.1f} GFLOP/s, "
        f"{observed.flops / step / peak_flops:.1%} of {peak_flops / 1e9:.1f} measured here",
        f"  {observed.num_bytes / 1e9:.2f} GB through operators a step: "
        f"{observed.num_bytes / step / 1e9:.2f} GB/s, "
        f"{observed.num_bytes / step / peak_bytes:.1%} of {peak_bytes / 1e9:.2f} measured here",
        "",
        f"slowest operators, {PROFILED} steps:",
        observed.table,
    ]
    return "\n".join(lines)


def main() -> int:
    arguments = read_command(__doc__, OPTIONS, prog="python -m bench.profiling")
    stage, config = arguments.stage, load_config(arguments.config, arguments.overrides)
    out = config.run_dir / f"profile-{stage}"
    with tempfile.TemporaryDirectory() as root:
        for parent in STAGES[stage].parents:
            if finished_stage(config.run_dir / parent) is None:
                raise FileNotFoundError(
                    f"stage {parent} of run {config.run.name} is not finished; expected it in "
                    f"{config.run_dir}, as {stage} is made from it. Run: make {parent} RUN={config.run.name}"
                )
            shutil.copytree(
                config.run_dir / parent,
                Path(root) / config.run.name / parent,
                ignore=shutil.ignore_patterns("state"),
            )
        out.mkdir(parents=True, exist_ok=True)
        observed = Observed(arguments.warm_up, arguments.steps, arguments.first_step, out / "trace.json")
        never = [f"{stage}.train.{key}=0" for key in ("log_every", "validate_every", "save_every")]
        never += FEW.get(stage, [])
        seen = arguments.first_step + arguments.warm_up + arguments.steps + PROFILED + 2
        steps = max(getattr(config, stage).train.steps, seen)
        observe(
            stage,
            [
                "--config",
                arguments.config,
                *arguments.overrides,
                *never,
                f"run.root={root}",
                f"{stage}.train.steps={steps}",
            ],
            observed,
        )
    run = observed.run
    text = summary(
        stage, observed, *peaks(run.device, computed(run.train.precision, run.device), Clock(run.device))
    )
    assert math.isfinite(observed.flops)
    write_atomic(out / "profile.txt", text + "\n")
    print(f"{text}\n{out / 'trace.json'}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # the scripts
    run_script(main, "profile")
