"""What `--dry-run` prints: parents, batch arithmetic, memory, disk and time of a stage. Writes nothing.

Everything follows from the configuration, before data and caches exist. For the time, one step of a network
of the stage's size is measured on each task's token grid, for a fraction of a second.
"""

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ups.common.device import autocast
from ups.common.files import partial_path
from ups.common.place import STAGES, make_target
from ups.config.load import to_dict
from ups.config.model import ModelConfig
from ups.config.schema import Config
from ups.data.build_cache import plan
from ups.data.download import is_verified
from ups.data.generate import num_done, solver_of
from ups.evaluation.transient import num_samples
from ups.generative.corrector import Corrector
from ups.models.backbones import backbone_of
from ups.models.backbones.backbone import task_of
from ups.models.operator import Operator
from ups.tasks import get_task
from ups.training.artifact import DONE
from ups.training.environment import asks_for_cpu

STATE_COPIES = 6  # weights, gradient, two moments, average, best average; float32 each
FORWARD = 1 / 3  # time of a forward pass over forward and backward: the backward pass is two products for one
MEASURED = 1024  # tokens in the measured batch on a CPU, where time is proportional to tokens
MIB = 2**20


def print_training_plan(config: Config, stage: str) -> None:
    """Print batch, parents, parameters, memory, disk and time of a training stage."""
    names, section = config.served(stage), getattr(config, stage)
    if not names:
        print(f"{stage}: nothing to do, no task of this stage reserves trajectories (task.TASK.reserve)")
        return
    train, model = section.train, config.model_of(stage)
    print(f"{stage}: to {config.run_dir / stage}, on {', '.join(names)}")
    print(f"  {_parents(config, stage)}")
    world = int(os.environ.get("WORLD_SIZE") or os.environ.get("UPS_EXPECT_WORLD") or 1)
    shard = -(-train.batch_size // world)
    micro = min(train.micro_batch, shard)
    print(
        f"  {train.steps} steps of {train.batch_size} rows = {world} process(es) x {shard}, in "
        f"micro-batches of {micro}"
    )
    networks = {name: _network(config, name, model, is_operator=stage == "operator") for name in names}
    passes = section.passes(config.diffusion.sampler_steps)
    count = _num_weights(config, stage, networks)
    state = STATE_COPIES * 4 * count
    # for the backward pass a block keeps about 12 tensors of the width and 4 of the hidden width, of 3 bytes
    # per number on average
    tokens = max(math.prod(grid) for _, grid in networks.values())
    kept = micro * tokens * model.depth * model.width * (12 + 4 * model.mlp_ratio) * 3 * passes.trained
    print(
        f"  some {count:,} parameters; per process {state / MIB:.0f} MiB of state, {kept / MIB:.0f} MiB of "
        f"activations; on disk {train.keep} checkpoints of {state / MIB:.0f} MiB"
    )
    seconds = sum(
        _seconds(network, grid, micro, train.precision) for name, (network, grid) in networks.items()
    )
    step = shard * seconds / len(names) * (passes.trained + FORWARD * passes.evaluated)
    before = train.batch_size * passes.steps_before * seconds / min(world, len(names))
    device = "the GPU" if _device().type == "cuda" else f"{torch.get_num_threads()} thread(s) of this CPU"
    print(
        f"  about {duration(train.steps * step + before)}, estimated from one step per task on {device}; "
        "fits of bases and validation are not included"
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


def _num_weights(config: Config, stage: str, networks: dict[str, tuple[nn.Module, Any]]) -> int:
    """Count shared weights once, and private ones and a row of the embedding for every task."""
    model = config.model_of(stage)
    shared = (Operator if stage == "operator" else Corrector)(
        {"model": to_dict(model), "precision": getattr(config, stage).train.precision, "tasks": []}
    )
    weights = dict(shared.named_parameters())
    for name, (network, _) in networks.items():
        for key, weight in network.named_parameters():
            is_private = task_of(key) or not key.startswith("backbone.")
            weights[f"{name}.{key}" if is_private else key] = weight
    return sum(weight.numel() for weight in weights.values()) + len(networks) * model.width


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
    """Print what the report writes and the time of its ensembles, which is most of it."""
    settings, total = config.evaluate, 0.0
    evaluated = ", ".join(config.evaluated)
    print(f"report: to {config.report_dir}: results.csv, results.json, report.html, figures; on {evaluated}")
    for stage in (stage for stage in STAGES.values() if None in stage.samplers.values()):
        section, is_steady = getattr(config, stage.name), stage.tasks == "steady"
        for name in config.served(stage.name, config.evaluated):
            network, grid = _network(config, name, section.model, is_operator=False)
            forward = FORWARD * _seconds(network, grid, settings.batch_size, section.train.precision)
            steps = section.sampler_steps
            fields = 4 * settings.ensemble_trajectories * settings.members
            total += 2 * steps * forward * (fields if is_steady else num_samples(settings))
    print(
        f"  about {duration(total)} for ensembles of {settings.members} members, estimated from one step per "
        "task; the operator's rollouts take seconds per task"
    )


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


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not asks_for_cpu() else "cpu")


def _network(
    config: Config, name: str, model: ModelConfig, is_operator: bool
) -> tuple[nn.ModuleDict, tuple[int, ...]]:
    """Return a network of the stage's size for one task, and the task's token grid.

    The latents have full rank here, since their rank is only known once the cache is built.
    """
    task, settings, shapes = config.spec(name), config.task[name], plan(config, name)["shapes"]
    *grid, dim = shapes["state"][2:]
    if is_operator:
        inputs = dim + (shapes["input"][-1] if task.is_steady else settings.history * dim)
    elif task.is_steady:
        # FieldConditions: observed coefficient, its guess and spread, the mask; then noisy residual, m and h
        inputs = (3 * len(task.inputs) + 1) * settings.patch**task.ndim + 4 * dim
    else:
        inputs = (settings.history + 6) * dim + config.model_of("operator").width
    network = {
        "into": nn.Linear(inputs, model.width),
        "backbone": backbone_of(model, task),
        "out": nn.Linear(model.width, dim),
    }
    return nn.ModuleDict(network), tuple(grid)


def _seconds(network: nn.ModuleDict, grid: tuple[int, ...], micro: int, precision: str) -> float:
    """Measure the seconds per row of a forward and backward pass; on a CPU, of processor time per thread."""
    device, measured = _device(), list(grid)
    is_cuda = device.type == "cuda"
    while not is_cuda and math.prod(measured) > MEASURED:
        measured[measured.index(max(measured))] = -(-max(measured) // 2)
    rows = micro if is_cuda else max(1, min(micro, MEASURED // math.prod(measured)))
    network = network.to(device)
    weights = list(network.parameters())
    x = torch.randn(rows, *measured, network.into.in_features, device=device)
    condition = torch.randn(rows, network.into.out_features, device=device)

    def step() -> None:
        with autocast(precision, device):
            z_pred = network.out(network.backbone(network.into(x), condition))
        torch.autograd.grad(z_pred.float().square().mean(), weights)

    threads = torch.get_num_threads()
    from torch.utils import benchmark  # it imports setuptools: a fifth of a second

    timer = benchmark.Timer(
        "step()",
        globals={"step": step},
        timer=benchmark.timer if is_cuda else time.process_time,
        num_threads=threads,
    )
    seconds = timer.timeit(1).mean * math.prod(grid) / math.prod(measured) / rows
    return seconds if is_cuda else seconds / threads
