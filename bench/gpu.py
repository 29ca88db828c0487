"""Measure on one GPU what captured updates are worth. bench/gpu_check.sh runs all parts and prints one table.

    bash bench/gpu_check.sh                   on a GPU, at most 9 minutes
    bash bench/gpu_check.sh --tiny            the same parts, small: a rehearsal, also on a CPU
    python -m bench.gpu updates               one part

    machine    bf16 product of matrices and copy, at best: what fractions refer to
    updates    an update of every task of configs/small.yaml, eager and replayed from a CUDA graph
    curve      losses of a training, eager and replayed
    sizes      passes of configs/pdebench_11task.yaml and of other backbones, replayed: FLOP per second
    forecast   a forecast of one start by pretrained/, on the CPU and on this device
    train      make train: seconds of the whole and of the trained stages, and of a step of each
    sampling   a frame of every sampler of that run, or of another (--run), on the CPU and on this device

Inputs are random with the configured shapes, because the cost of a pass does not depend on their values, so
no data are needed; bases are the last of task.TASK.base, not fitted. FLOP are those of torch's flop counter,
forward and backward. What was measured on which card: docs/gpu.md.
"""

import argparse
import contextlib
import itertools
import json
import operator as functions
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import ups
from bench.command import parse, parser_of
from ups.common.device import computed, precision_in_words
from ups.common.graphs import NUM_FIRST_CALLS, Captured
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.build_cache import plan
from ups.data.tokenizer import Tokenizer
from ups.models.bases.base import ParameterBatch
from ups.models.head_setup import base_settings, build_operator, fitted_state, unfitted_head
from ups.models.loss import operator_loss
from ups.models.operator import Operator
from ups.tasks import get_task
from ups.training.artifact import DONE
from ups.training.checkpoint import sum_in_one_order
from ups.training.strategies import Agreed, SplitLoss
from ups.training.update import Counters, Updates

INHERITED = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")  # set by the make that runs this
WARM_UP = NUM_FIRST_CALLS + 2  # updates before those by the clock: the last of them replays
MOST_OF_TRAIN = 235  # seconds of `make train`, which ends with the part
TINY_TRAIN = (
    " data.tasks=[burgers1d_hidden] operator.base_steps=2 operator.train.steps=8 consistency.members=2"
)
# (task, rows, settings) of configs/pdebench_11task.yaml: its flat 256 x 6, and other backbones
SIZES = [
    ("burgers1d", 64, []),
    ("diff_react2d", 16, []),
    ("cfd2d", 4, []),
    ("ns_incom2d", 4, []),
    ("cfd3d", 1, []),
    *[
        ("diff_react2d", 32, [f"operator.model.{key}={value}" for key, value in model.items()])
        for model in (
            {"kind": "plain", "width": 256, "depth": 6},
            {"kind": "transformer", "width": 512, "depth": 8},
            {"kind": "unet", "width": 128, "depth": 4},
            {"kind": "fno", "width": 128, "depth": 4},
        )
    ],
]
TINY_SIZES = [("burgers1d", 2, ["operator.model.width=8", "operator.model.depth=1"])]
Row = tuple[str, str]  # what, measured


def seconds_of(action: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the time of the fastest of `repeats` calls after a warm-up call."""
    times = []
    for _ in range(repeats + 1):
        wait(device)
        started = time.perf_counter()
        action()
        wait(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def peaks(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return FLOP/s of a product of large matrices and bytes/s of a copy."""
    size, num_bytes = (8192, 2**30) if device.type == "cuda" else (1024, 2**26)
    one, two = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    product, copy = (seconds_of(f, device, 3) for f in (lambda: one @ two, lambda: target.copy_(source)))
    return 2 * size**3 / product, 2 * num_bytes / copy


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------- an update without data


def facts_of(config: Config, name: str) -> SimpleNamespace:
    """Return the facts that describe a head, with the configured sizes, in place of a cache."""
    task, settings, planned = get_task(name), config.task[name], plan(config, name)

    def codec(fields: tuple[str, ...], dim: int) -> Tokenizer:
        width = len(fields) * settings.patch**task.ndim
        return Tokenizer(
            torch.zeros(len(fields)),
            torch.ones(len(fields)),
            torch.eye(width, dim),
            torch.ones(width) / width,
            space=planned["space"],
            patch=settings.patch,
            fields=fields,
            positive=[field for field in fields if field in task.positive],
        )

    values = torch.tensor([] if task.hides else settings.parameters, dtype=torch.float64)
    return SimpleNamespace(
        task=task,
        settings=settings,
        dt=0.0 if task.is_steady else 0.01,
        parameter_values=values,
        parameters=values[:, None].expand(-1, len(task.parameters))
        if len(values)
        else torch.zeros(1, 0, dtype=torch.float64),
        tokenizer=codec(task.fields, planned["shapes"]["state"][-1]),
        input_tokenizer=codec(task.inputs, planned["shapes"]["input"][-1]) if task.is_steady else None,
        forcing_tokenizer=None,
        header={},
    )


def operator_of(config: Config, precision: str, kinds: dict[str, str] | None = None) -> Operator:
    """Return an operator without fit or training. kinds: task -> base; None: the last base of every task."""
    kinds = kinds or {name: config.task[name].base[-1] for name in config.data.tasks}
    facts, bases = [facts_of(config, name) for name in kinds], {}
    for one in facts:
        head = unfitted_head(one, kinds[one.task.name], base_settings(one), torch.device("cpu"))
        bases[head.name] = {"description": head.facts.described()}, fitted_state(head)
    return build_operator(bases, config.operator.model, precision)


def batch_of(operator: Operator, name: str, rows: int) -> tuple[Tensor, Tensor, ParameterBatch]:
    """Return random input and target latents of one call, and the first parameter value."""
    head, device = operator.heads[name], operator.heads[name].scale.device
    shapes = [
        (rows, head.history, head.input_codec.num_channels, *head.input_codec.space),
        (rows, 1, head.codec.num_channels, *head.codec.space),
    ]
    values = torch.tensor([[low for low, _ in head.facts.parameters.values()]], dtype=torch.float64)
    u, u_ref = (0.1 * torch.randn(shape, device=device) for shape in shapes)
    return u, u_ref, head.parameter_batch(values.expand(rows, -1))


def losses_of(operator: Operator, name: str, rows: int, num: int = 1) -> list[SplitLoss]:
    """Return the losses of `num` random batches."""
    batches = [batch_of(operator, name, rows) for _ in range(num)]
    compute = partial(operator_loss, operator, name)
    return [SplitLoss(partial(rows_of, batch), compute) for batch in batches]


def rows_of(batch: tuple[Tensor, Tensor, ParameterBatch], rows: slice) -> tuple:
    u, u_ref, parameters = batch
    return u[rows], u_ref[rows], parameters.rows(rows)


def updates_of(config: Config, operator: Operator, rows: int, is_replayed: bool = True) -> Updates:
    """Return the updates of an operator by this process alone, in one pass of `rows` rows."""

    def failed(error: Exception) -> None:
        raise error

    def around(*_: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    alone = SimpleNamespace(
        device=operator.task_embedding.device,
        world=1,
        print=partial(print, flush=True),
        record=failed,
        phase=around,
        unreported=None,
        activity=SimpleNamespace(stop_signal=0, step=0, waiting=around),
    )
    sections = config.operator.train, config.operator.optim
    updates = Updates(operator, Agreed(), alone, Counters(rows, rows), *sections)
    if not is_replayed:
        updates.optimizer.call = functions.call
    return updates


def prepared(
    config: Config, name: str, rows: int, device: torch.device, is_replayed: bool = True
) -> tuple[Operator, Updates]:
    """Return the operator of a task with its last base, and its updates."""
    last = {name: config.task[name].base[-1]}
    operator = operator_of(config, config.operator.train.precision, last).to(device).train()
    return operator, updates_of(config, operator, rows, is_replayed)


def tasks_of(options: argparse.Namespace) -> tuple[Config, list[str]]:
    """Return the configuration of updates, and its tasks that are measured."""
    config = load_config(ROOT / "configs" / ("smoke.yaml" if options.tiny else "small.yaml"))
    return config, config.data.tasks[: 1 if options.tiny else None]


def was_replayed(updates: Updates) -> bool:
    """Return whether all that was called often enough was captured."""
    call = updates.optimizer.call
    return isinstance(call, Captured) and all(one.is_replayed for one in call.recorded.values())


# ---------------------------------------------------------------- the parts


def machine(options: argparse.Namespace) -> Iterator[Row]:
    device, is_gpu = options.device, options.device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else f"CPU, {torch.get_num_threads()} threads"
    product, copy = peaks(device, computed("bf16", device))
    speed = f"{product / 1e12:.4g} TFLOP/s in {precision_in_words('bf16', device)}"
    yield f"{name}, torch {torch.__version__}", f"{speed}, {copy / 1e9:.4g} GB/s"


def updates(options: argparse.Namespace) -> Iterator[Row]:
    config, names = tasks_of(options)
    for name, rows in itertools.product(names, options.rows):
        times: dict[str, float] = {}
        for is_replayed in (False, True):
            operator, one = prepared(config, name, rows, options.device, is_replayed)
            seconds = times_of(one, losses_of(operator, name, rows), name, options.steps)
            times["replayed" if was_replayed(one) else "eager"] = statistics.median(seconds)
        eager, replayed = times["eager"], times.get("replayed")
        text = "not replayed" if replayed is None else f"{1e3 * replayed:.2f} ms replayed"
        speed = f"{rows / (replayed or eager):.4g} rows/s"
        yield f"update of {name}, {rows} rows", f"{1e3 * eager:.2f} ms eager, {text}, {speed}"


def times_of(made: Updates, losses: list[SplitLoss], name: str, steps: int) -> list[float]:
    """Return the seconds of `steps` updates after WARM_UP; an update ends when its counts are on the host."""
    times = []
    for step in range(WARM_UP + steps):
        wait(made.ranks.device)
        started = time.perf_counter()
        made.update(losses[step % len(losses)], made.counters.micro_batch, only=name)
        wait(made.ranks.device)
        times.append(time.perf_counter() - started)
    return times[WARM_UP:]


def curve(options: argparse.Namespace) -> Iterator[Row]:
    config, names = tasks_of(options)
    for name in names:
        found, weights = [], []
        for is_replayed in (False, True):
            torch.manual_seed(0)
            operator, one = prepared(config, name, options.rows[0], options.device, is_replayed)
            losses = losses_of(operator, name, options.rows[0], num=8)
            steps = range(WARM_UP + 2 * options.steps)
            found.append([one.update(losses[step % 8], options.rows[0], only=name).loss for step in steps])
            weights.append([p.detach().clone() for p in operator.parameters()])
        apart = max(abs(first / last - 1) for first, last in zip(*found, strict=True))
        same = "bitwise equal" if all(map(torch.equal, *weights)) else "not bitwise equal"
        text = f"{apart:.1g} apart at most, weights {same}" + ("" if was_replayed(one) else ", not replayed")
        yield f"losses of {name}, {len(steps)} updates, from {found[0][0]:.3g} to {found[0][-1]:.3g}", text


def sizes(options: argparse.Namespace) -> Iterator[Row]:
    name_of_config = "small_11task" if options.tiny else "pdebench_11task"
    device = options.device
    best, _ = peaks(device, computed("bf16", device))
    for name, rows, settings in TINY_SIZES if options.tiny else SIZES:
        config = load_config(ROOT / "configs" / f"{name_of_config}.yaml", settings)
        operator, one = prepared(config, name, rows, options.device)
        pass_of = partial(one._backward, *losses_of(operator, name, rows), rows)
        with FlopCounterMode(display=False) as counter:
            pass_of()
        for _ in range(WARM_UP):
            pass_of()
        seconds = seconds_of(pass_of, options.device)
        model, flop = config.operator.model, counter.get_total_flops() / seconds
        yield (
            f"pass of {name}, {rows} rows, {model.kind} {model.width} x {model.depth}",
            f"{1e3 * seconds:.3g} ms, {flop / 1e12:.3g} TFLOP/s, {flop / best:.1%} of the best"
            + ("" if was_replayed(one) else ", not replayed"),
        )
        del operator, one, pass_of


def forecast(options: argparse.Namespace) -> Iterator[Row]:
    models = {device: ups.load(ROOT / "pretrained", device=device) for device in {"cpu", options.device.type}}
    for name, facts in list(models["cpu"].tasks.items())[: 1 if options.tiny else None]:
        num_frames = 1 if facts["inputs"] else options.frames
        call = {"parameters": lowest(facts), "num_frames": num_frames, "extrapolate": True}
        found = in_turn(
            models, lambda model, *given, call=call: model.forecast(*given, **call), name, start(facts)
        )
        yield f"forecast of {name}, one start, {num_frames} frames", found


def start(facts: dict[str, Any]) -> Tensor:
    """Return a random start of a task, positive as densities are."""
    return 1 + 0.1 * torch.rand(facts["history"], len(facts["inputs"] or facts["fields"]), *facts["grid"])


def lowest(facts: dict[str, Any]) -> dict[str, float]:
    return {key: low for key, (low, _) in facts["parameters"].items()}


def train(options: argparse.Namespace) -> Iterator[Row]:
    goal, name = ("consistency", "smoke") if options.tiny else ("train", "small")
    given = f"data.root={options.folder}/data cache.root={options.folder}/cache"
    command = f"timeout {MOST_OF_TRAIN} make {goal} CONFIG=configs/{name}.yaml RUN=run".split()
    command += [
        f"RUNS={options.folder}",
        f"PYTHON={sys.executable}",
        f"ARGS={given}{TINY_TRAIN * options.tiny}",
    ]
    alone = {key: value for key, value in os.environ.items() if key not in INHERITED}
    started, total = time.perf_counter(), 0.0
    status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False, env=alone).returncode
    seconds = f"{time.perf_counter() - started:.0f} s" + f", status {status} (124: not finished)" * bool(
        status
    )
    yield f"make {goal} of configs/{name}.yaml", seconds
    for stage in (path.parent for path in sorted(options.folder.glob(f"run/*/{DONE}"))):
        spent = (stage / DONE).stat().st_mtime - (stage / "environment.json").stat().st_mtime
        lines = map(json.loads, (stage / "metrics.jsonl").read_text().splitlines())
        rates = [line["steps_per_s"] for line in lines if "steps_per_s" in line]
        step = f", {1e3 / statistics.median(rates):.3g} ms a step with validation" if rates else ""
        yield f"stage {stage.name}", f"{spent:.0f} s{step}"
        total += spent
    yield "trained stages together", f"{total:.0f} s"


def sampling(options: argparse.Namespace) -> Iterator[Row]:
    run = options.run or options.folder / "run"
    if not (run / "diffusion" / DONE).is_file():
        yield "sampling", "not measured: it needs a trained run (--run runs/small)"
        return
    models = {device: ups.load(run, device=device) for device in {"cpu", options.device.type}}
    name = json.loads((run / "diffusion" / "config.json").read_text())["tasks"][0]["name"]
    facts = models["cpu"].tasks[name]
    call = {"parameters": lowest(facts), "num_frames": options.frames, "members": 16, "extrapolate": True}
    for by in ("waves", "student", "student_2", "teacher"):
        found = in_turn(
            models, lambda model, *given, by=by: model.sample(*given, by=by, **call), name, start(facts)
        )
        yield f"{options.frames} frames of 16 members of {name} by {by}", found


def in_turn(models: dict[str, Any], call: Callable[..., object], *given: Any) -> str:
    """Return the seconds of call(model, *given) with the model on each device, as text."""
    times = {
        device: seconds_of(partial(call, model, *given), torch.device(device))
        for device, model in models.items()
    }
    return ", ".join(f"{1e3 * seconds:.3g} ms on {device}" for device, seconds in sorted(times.items()))


PARTS = {part.__name__: part for part in (machine, updates, curve, sizes, forecast, train, sampling)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal on a CPU")
    parser.add_argument("--run", type=Path, help="folder of a trained run")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="for data and run of `train`")
    parser.add_argument("--table", type=Path, help="file to which the rows are added")
    options = parse(parser)
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.rows, options.steps, options.frames = ((2, 4), 2, 2) if options.tiny else ((16, 256), 30, 20)
    if options.device.type == "cuda":
        sum_in_one_order()  # as stages do
    for row in PARTS[options.part](options):
        line = f"| {' | '.join(row)} |"
        print(line, flush=True)
        if options.table is not None:
            with options.table.open("a") as file:
                file.write(f"{line}\n")


if __name__ == "__main__":
    main()
