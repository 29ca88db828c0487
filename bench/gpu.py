"""Measure a step of the operator's training on GPUs: samples per second, fractions of peak, memory.

    python -m bench.gpu --config configs/small_11task.yaml   on 1, 2, 4 and 8 GPUs, if there are so many
    python -m bench.gpu --config configs/small.yaml --run runs/small   also accuracy and placement of latents
    python -m bench.gpu --config configs/smoke.yaml --steps 2 --eager       a short test

A step is `Run.update` of the stage: forward, backward, reduction over ranks, optimizer and average, with
the heads of all tasks. The processes are those of accelerate_configs/, with operator.train.batch_size rows
each. Latents are random with the configured shapes, because the cost of a step does not depend on their
values; so no data are needed. The base is the last one of task.TASK.base, not fitted.

FLOP of forward and backward are counted by torch's flop counter. Bytes are those that every operator reads
and writes when it runs alone; compiled code keeps values in registers and may therefore exceed the
bandwidth. Both are divided by measured peaks of this machine, a matrix product and a copy; data sheet
values are printed beside them for known names.

--run: for a trained run, loss and rollouts of every task in bf16 and in float32, and steps with latents on
the device, mapped, and mapped with reading ahead. What was not run is listed with the reason. Writes
bench/out/gpu.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bench.command import parse
from bench.profiling import Moved
from ups.common.device import computed, precision_in_words
from ups.common.place import ROOT
from ups.config.command import DEFAULT_OVERLAY
from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.build_cache import plan
from ups.data.cache import open_cache, place
from ups.data.tokenizer import Tokenizer
from ups.models.bases.base import ParameterBatch
from ups.models.head_setup import base_settings, head_facts
from ups.models.loss import operator_loss, squared_errors
from ups.models.operator import Operator, load_operator
from ups.models.windows import Windows
from ups.select import pooled
from ups.tasks import get_task
from ups.training.ending import main_guard
from ups.training.run import Run

OUT = ROOT / "bench" / "out"
WARM_UP = 4  # steps of each task that are not counted; compiled ones are compiled in the first
PRECISIONS = ("no", "bf16")
TOPOLOGIES = {"cuda": {1: "single", 2: "2gpu", 4: "4gpu", 8: "8gpu"}, "cpu": {1: "cpu", 2: "cpu2"}}
# the makers' data sheets, dense, per second: FLOP in float32 and bf16, bytes
NOMINAL = {
    "H200": (67e12, 989e12, 4.8e12),
    "H100 PCIe": (51e12, 756e12, 2.0e12),
    "H100": (67e12, 989e12, 3.35e12),
    "A100-SXM4-80GB": (19.5e12, 312e12, 2.04e12),
    "A100": (19.5e12, 312e12, 1.56e12),
    "L40S": (91.6e12, 362e12, 0.86e12),
}

# ---------------------------------------------------------------- the machine


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


def precisions(device: torch.device) -> tuple[str, ...]:
    """Return those of PRECISIONS that the device computes in; it would replace others by float32."""
    return tuple(
        precision
        for precision in PRECISIONS
        if precision == "no" or computed(precision, device) == torch.bfloat16
    )


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peaks(device: torch.device) -> dict[str, Any]:
    """Measure FLOP per second of a matrix product in every available precision, and bytes per second of a
    copy; with the name of the device.
    """
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else f"CPU, {torch.get_num_threads()} threads"
    n, found = 8192 if is_gpu else 512, {"name": name}
    for precision in precisions(device):
        a = torch.randn(n, n, device=device, dtype=computed(precision, device))
        found[f"flop_{precision}"] = 2 * n**3 / seconds_of(partial(torch.matmul, a, a), device)
    source = torch.ones(2**28 if is_gpu else 2**23, device=device)
    target = torch.empty_like(source)
    found["bytes"] = 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)
    return found | {"nominal": next((values for key, values in NOMINAL.items() if key in name), None)}


# ---------------------------------------------------------------- a step without data


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
    facts = [facts_of(config, name) for name in kinds]
    operator = Operator(
        {
            "model": dataclasses.asdict(config.operator.model),
            "precision": precision,
            "tasks": [head_facts(one, kinds[one.task.name], base_settings(one)).described() for one in facts],
        }
    )
    for one in facts:
        head = operator.heads[one.task.name]
        head.codec.load_state_dict(one.tokenizer.state_dict())
        if one.input_tokenizer is not None:
            head.coefficient_codec.load_state_dict(one.input_tokenizer.state_dict())
    return operator


def batch_of(operator: Operator, name: str, rows: int) -> tuple[Tensor, Tensor, ParameterBatch]:
    """Return random input and target latents of one call, and the first parameter value."""
    head, device = operator.heads[name], operator.heads[name].scale.device
    shapes = [
        (rows, head.history, head.input_codec.num_channels, *head.input_codec.space),
        (rows, head.bundle, head.codec.num_channels, *head.codec.space),
    ]
    values = torch.tensor([[low for low, _ in head.facts.parameters.values()]], dtype=torch.float64)
    u, u_ref = (0.1 * torch.randn(shape, device=device) for shape in shapes)
    return u, u_ref, head.parameter_batch(values.expand(rows, -1))


def loss_of(
    operator: Operator, name: str, batch: tuple[Tensor, Tensor, ParameterBatch], part: slice
) -> tuple[Tensor, dict]:
    u, u_ref, parameters = batch
    return operator_loss(
        operator,
        name,
        u[part],
        u_ref[part],
        ParameterBatch(parameters.standard[part], parameters.index[part]),
        0.1,
    )


def cost_of(operator: Operator, name: str, batch: tuple[Tensor, Tensor, ParameterBatch]) -> dict[str, float]:
    """Return FLOP and bytes per row of a forward and backward pass."""
    rows = len(batch[0])
    with FlopCounterMode(display=False) as counter:
        loss_of(operator, name, batch, slice(rows))[0].backward()
    with Moved() as moved:
        loss_of(operator, name, batch, slice(rows))[0].backward()
    operator.zero_grad()
    return {"flop": counter.get_total_flops() / rows, "bytes": moved.num_bytes / rows}


def train(config: Config, steps: int) -> dict[str, Any]:
    """Run steps of every task in turn.

    Return task -> seconds per step on the slowest rank, cost of a row, memory, on the main process only.
    """
    found: dict[str, Any] = {}
    names, settings = config.data.tasks, config.operator.train

    @main_guard
    def main() -> None:
        run = Run.start(config, "operator", settings, config.operator.optim, {})
        run.seed_all()
        operator = run.attach(operator_of(config, settings.precision))
        own = settings.batch_size // run.world
        batches, times = {name: batch_of(operator, name, own) for name in names}, {name: [] for name in names}
        costs = (
            {}
            if settings.compile
            else {
                name: cost_of(
                    operator, name, batch_of(operator, name, min(own, run.updates.counters.micro_batch))
                )
                for name in names
            }
        )
        memory = {}
        for step in run.steps():
            name = names[step // (WARM_UP + steps)]
            if run.device.type == "cuda" and not times[name]:
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            # ends with a look at the norm: the device is done
            run.update(partial(loss_of, operator, name, batches[name]), own, only=name)
            times[name].append(time.perf_counter() - started)
            memory[name] = torch.cuda.max_memory_allocated() if run.device.type == "cuda" else None
        every = run.ranks.gather({name: statistics.median(some[WARM_UP:]) for name, some in times.items()})
        for name in names if run.is_main else ():
            found[name] = {
                "seconds": max(one[name] for one in every),
                "rows": own * run.world,
                "memory": memory[name],
                **costs.get(name, {}),
            }
        run.finish({}, operator.description)

    main()
    return found


# ---------------------------------------------------------------- of a trained run


def accuracy(config: Config, folder: Path, device: torch.device) -> dict[str, Any]:
    """Return per task, in bf16 and float32, the loss of one call and the error of rollouts, and the
    difference of the two predictions relative to the change that float32 predicts.
    """
    operator, found = load_operator(folder / "operator", device), {}
    for name in config.data.tasks:
        cache = open_cache(config, name)
        operator.head_for(cache)
        head, rows, context = (
            operator.heads[name],
            cache.rows_by_parameter("val", 16),
            config.context(name),
        )
        parameters, one = head.parameter_batch(cache.parameters[rows]), {}
        z = (
            cache.inputs(rows, device)
            if head.task.is_steady
            else cache.batch(rows, context - head.history, head.history, device)
        )
        z_ref = cache.batch(rows, 0 if head.task.is_steady else context, head.bundle, device)
        u, u_ref = head.input_codec.decode(z), head.codec.decode(z_ref)
        answers = {}
        for precision in PRECISIONS:
            operator.precision = precision
            with torch.no_grad():
                answers[precision], base = operator.step(u, name, parameters)
                rollouts = squared_errors(operator, cache, rows, context, device)
                one[precision] = {
                    "loss": float(operator_loss(operator, name, u, u_ref, parameters, 0.1)[0]),
                    "rollout": pooled(rollouts)["network"],
                }
        change = float((answers["no"] - base).norm())
        one["apart"] = float((answers["bf16"] - answers["no"]).norm()) / change if change else None
        found[name] = one
    return found


def placed(config: Config, folder: Path, device: torch.device, steps: int) -> dict[str, dict[str, float]]:
    """Return task -> seconds of a step with latents mapped, mapped and read ahead, and on the device."""
    found: dict[str, dict[str, float]] = {}
    for name in config.data.tasks:
        caches, found[name] = {name: open_cache(config, name)}, {}
        windows = Windows(caches, config.task, {name: config.context(name)}, config.operator, 0)
        for way in ("mapped", "read ahead", "device"):
            operator, times = load_operator(folder / "operator", device).train(), []
            if way == "device":
                place(caches.values(), device, "device")
            for step in range(WARM_UP + steps):
                started = time.perf_counter()
                batch = windows.schedule.batch(step)
                u, u_ref, parameters = windows.read(operator.heads[name], batch, slice(len(batch)))
                loss = operator_loss(operator, name, u, u_ref, parameters, 0.1)[0]
                loss.backward()
                if way == "read ahead":
                    windows.read_ahead(windows.schedule.batch(step + 1), device, slice(len(batch)))
                loss.item()  # as the ranks look at the norm
                times.append(time.perf_counter() - started)
            found[name][way] = statistics.median(times[WARM_UP:])
    return found


# ---------------------------------------------------------------- the report


def launched(topology: str, words: list[str]) -> tuple[dict[str, Any] | None, str]:
    """Return (results of the processes of a topology, "") or (None, the reason of the failure)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / "accelerate_configs" / f"{topology}.yaml"),
    ]
    done = subprocess.run(
        [sys.executable, *command, "-m", "bench.gpu", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"found": {"')]
    if done.returncode or not answers:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = [line for line in lines if "FAILED" in line or "Error" in line] or lines or ["no word"]
        return None, f"status {done.returncode}: {said[0].strip():.200}"
    return json.loads(answers[-1])["found"], ""


def rows_of(
    found: dict[str, Any],
    costs: dict[str, Any],
    world: int,
    precision: str,
    is_compiled: bool,
    machine: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return a row per task."""
    rows = []
    for name, one in found.items():
        seconds, each = one["seconds"], one["rows"] / world / one["seconds"]  # rows per second of one process
        cost = costs.get(name) or {"flop": math.nan, "bytes": math.nan}
        flop, traffic, memory = cost["flop"] * each, cost["bytes"] * each, one["memory"]
        rows.append(
            {
                "task": name,
                "processes": world,
                "precision": precision,
                "compiled": "yes" if is_compiled else "no",
                "samples/s": one["rows"] / seconds,
                "ms/step": 1e3 * seconds,
                "TFLOP/s": flop / 1e12,
                "of peak": flop / machine[f"flop_{precision}"],
                "GB/s": traffic / 1e9,
                "of bandwidth": traffic / machine["bytes"],
                "GiB": memory and memory / 2**30,
            }
        )
    return rows


def shown(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    heads = [*rows[0]] if rows else []
    lines = [heads, ["---"] * len(heads), *([cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(DEFAULT_OVERLAY))
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--steps", type=int, default=20, help="of each task that are counted")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--eager", action="store_true", help="no compiled steps, which take minutes on a CPU")
    parser.add_argument("--run", help="folder of a trained run: accuracy, and where latents lie")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parse(parser)
    if options.worker:
        print(
            json.dumps({"found": train(load_config(options.config, options.overrides), options.steps)}),
            flush=True,
        )
        return
    config, device, not_run = load_config(options.config, options.overrides), torch.device(options.device), []
    machine, rows, costs = peaks(device), [], {}
    reached = ", ".join(
        f"{machine[f'flop_{precision}'] / 1e12:.3g} TFLOP/s in {precision_in_words(precision, device)}"
        for precision in precisions(device)
    )
    print(
        f"{machine['name']}: {reached}, {machine['bytes'] / 1e9:.4g} GB/s; the maker's: "
        f"{machine['nominal'] or 'unknown'}",
        flush=True,
    )
    has_both = precisions(device) == PRECISIONS
    not_run += [] if has_both else [f"bf16: it would be {precision_in_words('bf16', device)}"]
    num_devices = torch.cuda.device_count() if device.type == "cuda" else len(os.sched_getaffinity(0))
    steps = len(config.data.tasks) * (WARM_UP + options.steps)
    settings = [
        (world, precision, is_compiled)
        for world in options.processes
        for precision in precisions(device)
        for is_compiled in ([False] if options.eager else [False, True])
    ]
    for world, precision, is_compiled in settings:
        what = f"{world} process(es), {precision}, {'compiled' if is_compiled else 'eager'}"
        topology = TOPOLOGIES[device.type].get(world)
        batch = config.operator.train.batch_size * world  # as many rows for each, however many there are
        if topology is None or world > num_devices:
            kind = "GPUs" if device.type == "cuda" else "cores (and files for 1 and 2)"
            not_run.append(f"{what}: there are {num_devices} {kind}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            words = [
                *options.overrides,
                f"run.root={folder}",
                "run.name=bench",
                f"operator.train.steps={steps}",
                f"operator.train.batch_size={batch}",
                f"operator.train.precision='{precision}'",
                f"operator.train.compile={str(is_compiled).lower()}",
                "operator.train.validate_every=0",
                "operator.train.save_every=0",
                "tracker.kind=none",
            ]
            found, why = launched(
                topology, ["--worker", "--config", options.config, "--steps", str(options.steps), *words]
            )
        if found is None:
            not_run.append(f"{what}: {why}")
            continue
        costs.setdefault(precision, {name: one for name, one in found.items() if "flop" in one})
        rows += rows_of(found, costs[precision], world, precision, is_compiled, machine)
        num, seconds = (sum(one[key] for one in found.values()) for key in ("rows", "seconds"))
        print(f"{what}: {num / seconds:.4g} samples/s", flush=True)
    not_run += ["compiled: not asked for"] * options.eager
    result: dict[str, Any] = {"machine": machine, "rows": rows}
    if options.run and has_both:
        result["accuracy"] = accuracy(config, Path(options.run), device)
        for name, one in result["accuracy"].items():
            apart = (
                "its base answers"
                if one["apart"] is None
                else f"a call is {one['apart']:.2g} of the network's change apart"
            )
            print(f"{name}: bf16 {one['bf16']}, float32 {one['no']}; {apart}")
    if options.run:
        if device.type == "cuda":
            result["placed"] = placed(config, Path(options.run), device, options.steps)
            for name, one in result["placed"].items():
                print(
                    f"{name}: "
                    + ", ".join(f"{way} {1e3 * seconds:.3g} ms" for way, seconds in one.items())
                    + " per step"
                )
        else:
            not_run.append("where latents lie: a CPU reads and computes by turns")
    else:
        not_run.append("accuracy in bf16, and where latents lie: they need a trained run (--run)")
    print(shown(rows), *[f"not run: {line}" for line in not_run], sep="\n")
    OUT.mkdir(exist_ok=True)
    (OUT / "gpu.json").write_text(
        json.dumps(result | {"not_run": not_run, "torch": torch.__version__}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
