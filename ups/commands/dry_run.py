"""What `--dry-run` prints: what a stage does, how long and how much, in a few lines, without writing
anything.

All of it follows from the configuration, so it is known before data and caches exist. Times are estimates: a
network of the stage's width and depth is run here, for a fraction of a second, on the tokens of each task;
the rest is arithmetic.
"""

import math
import os
import shutil
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import benchmark

from ups.common.files import partial_path
from ups.common.precision import autocast
from ups.config import STAGES, Config, ModelConfig, to_dict
from ups.data.build_cache import plan
from ups.data.download import is_verified
from ups.data.generate import num_done
from ups.generative.corrector import Corrector
from ups.models.backbone import backbone_of, task_of
from ups.models.operator import Operator
from ups.tasks import get_task
from ups.training.folder import DONE
from ups.training.ranks import asks_for_cpu

STATE_COPIES = 6  # weights, gradient, two moments, average, best average; float32 each
# tokens in the measured batch of a CPU, whose time grows with their number from far fewer on
MEASURED = 1024
REPEATS = 2  # the fastest counts
ENOUGH_S = 1.0  # of solving, or of a pass, to tell how long one takes
# trajectories solved together for so many frames, while they have no more cells: what a small grid's solver
# spends is mostly on single operations (cfd1d: a tenth of the time each)
TOGETHER, TIMED, MOST_CELLS = 16, 3, 2**17


def _work(config: Config, stage: str) -> tuple[float, float, int]:
    """Rows that go through the network per row of a batch: there and back, and only there; steps per task
    before the loop."""
    section = getattr(config, stage)
    if stage == "operator":
        return 1 + section.unroll_fraction * (section.unroll_steps - 1), 0, 0
    if stage == "consistency":  # two evaluations per sampler step, a solved batch every fourth step
        return 1 + section.tune_fraction * section.members, 2 * config.diffusion.sampler_steps / 4, 0
    return (section.members, 1, 0) if stage == "rival" else (section.noises, 1, section.scale_steps)


def print_training_plan(config: Config, stage: str) -> None:
    """Batch, parents, parameters, memory, disk and time of a training stage."""
    names, section = config.served(stage), getattr(config, stage)
    train, model = section.train, config.model_of(stage)
    trained, evaluated, fitted = _work(config, stage)
    if not names:
        print(f"{stage}: nothing to do, no such task reserves trajectories (task.TASK.reserve)")
        return
    print(f"{stage}: to {config.run_dir / stage}, on {', '.join(names)}")
    parents = {config.run_dir / parent / DONE: parent for parent in STAGES[stage].parents} or {
        config.cache_path(name): "cache" for name in names
    }
    if start := config.init_dir(stage):
        parents[start / DONE] = "the run to start from"
    missing = [path for path in parents if not path.is_file()]
    more = f"; {missing[0]} is missing: make {parents[missing[0]]}" if missing else ""
    print(f"  {len(parents) - len(missing)} of {len(parents)} parents are there{more}")
    world = int(os.environ.get("WORLD_SIZE") or os.environ.get("UPS_EXPECT_WORLD") or 1)
    share = -(-train.batch_size // world)
    micro = min(train.micro_batch, share)
    print(
        f"  {train.steps} steps of {train.batch_size} rows = {world} process(es) x {share}, in "
        f"micro-batches of {micro}"
    )
    networks = [_network(config, name, model, is_operator=stage == "operator") for name in names]
    seconds = [
        _seconds(network, tokens, micro, config.spec(name).boundary, train.precision)
        for name, (network, tokens) in zip(names, networks, strict=True)
    ]
    with torch.device("meta"):  # what the tasks share, and a row of the embedding each
        shared = (Operator if stage == "operator" else Corrector)(
            {"model": to_dict(model), "precision": train.precision, "tasks": []}
        )
    weights = dict(shared.named_parameters())
    for name, (network, _) in zip(names, networks, strict=True):
        weights |= {
            f"{name}.{key}" if task_of(key) or not key.startswith("backbone.") else key: p
            for key, p in network.named_parameters()
        }
    count = sum(p.numel() for p in weights.values()) + len(names) * model.width
    state = STATE_COPIES * 4 * count
    # per block: some 12 tensors of the width and 4 of the hidden width are kept for the backward pass, 2 to 4
    # bytes each
    tokens = max(math.prod(tokens) for _, tokens in networks)
    kept = micro * tokens * model.depth * model.width * (12 + 4 * model.mlp_ratio) * 3 * trained
    print(
        f"  some {count:,} parameters; per process {state / 2**20:.0f} MiB of state, {kept / 2**20:.0f} "
        f"MiB of activations; on disk {train.keep} checkpoints of {state / 2**20:.0f} MiB"
    )
    step = sum(share * (trained * both + evaluated * forth) for forth, both in seconds) / len(names)
    fits = sum(train.batch_size * fitted * both for _, both in seconds) / min(world, len(names))
    device = "the GPU" if _device().type == "cuda" else f"{torch.get_num_threads()} thread(s) of this CPU"
    print(
        f"  about {duration(train.steps * step + fits)}: an estimate from one step per task, measured now "
        f"on {device}; bases and validation come on top"
    )


def print_data_plan(
    config: Config, files: list[tuple], solve: Callable[..., object], num_workers: int
) -> None:
    """Per task: files, bytes, how much is there, and the time that the rest takes to solve.

    files: (task, parameter, path, bytes, what it is made from) of each; solve: what makes a trajectory.
    """
    missing, seconds, source = 0, 0.0, config.data.source
    print(f"data: to {config.data.root} ({source})")
    for task in dict.fromkeys(name for name, *_ in files):
        mine, there = [entry[2:] for entry in files if entry[0] == task], 0
        for path, size, made in mine:
            begun = partial_path(path)
            have = size if path.exists() else min(size, begun.stat().st_size if begun.exists() else 0)
            if source == "published" and made[2] and not path.exists():
                have = 0  # it is given its whole room at once
            if source == "generate":
                todo = made["num_trajectories"] - num_done(path, made)
                have = int(size * (1 - todo / made["num_trajectories"]))
                if todo and get_task(task).simulate:
                    seconds += _solver_seconds(solve, task, made) * todo / num_workers
            there += have
        total = sum(size for _, size, _ in mine)
        state = "up to date" if there == total else f"{there / total:.0%} there"
        if source == "published":
            state += f", MD5 of {sum(is_verified(path, made[1]) for path, _, made in mine)} compared"
        print(f"  {task}: {len(mine)} file(s), about {total / 2**20:,.1f} MiB, {state}")
        missing += total - there
    how = {
        "generate": f"to solve in about {duration(seconds)}, by some first trajectories of each begun now",
        "published": "to download",
        "user": "to be written by you",
    }[source]
    print(
        f"  {len(files)} files, about {missing / 2**20:,.1f} MiB {how}; "
        f"{free_bytes(config.data.root) / 2**20:,.0f} MiB free"
    )


def _solver_seconds(solve: Callable[..., object], task: str, made: dict[str, Any]) -> float:
    """Processor time of a trajectory, by as many frames of the first as take ENOUGH_S: some take hours; and
    by how much less each takes of a few that are solved together."""
    steps, frames = made["num_frames"] - 1, min(2, made["num_frames"])

    def spent(num: int, frames: int) -> float:
        started = time.process_time()
        solve(
            task,
            np.arange(num),
            seed=made["seed"],
            resolution=made["resolution"],
            num_frames=frames,
            parameter=made["parameter"],
            t_end=made["t_end"] * (frames - 1) / max(steps, 1),
        )
        return time.process_time() - started

    while (alone := spent(1, frames)) <= ENOUGH_S and frames < made["num_frames"]:
        frames = min(2 * frames, made["num_frames"])
    alone *= max(steps, 1) / max(frames - 1, 1)
    cells = made["resolution"] ** get_task(task).ndim * len(get_task(task).channels)
    num, few = min(TOGETHER, made["num_trajectories"], MOST_CELLS // cells), min(TIMED, frames)
    return alone if num <= 1 else alone * min(1.0, spent(num, few) / (num * spent(1, few)))


def print_report_plan(config: Config) -> None:
    """What the report reads and writes, and the time of its ensembles, which is most of it."""
    settings, total = config.evaluate, 0.0
    print(
        f"report: to {config.report_dir}: results.json, report.html, figures; on "
        f"{', '.join(config.evaluated)}"
    )
    for stage, section in (("diffusion", config.diffusion), ("steady", config.steady)):
        for name in config.served(stage, config.evaluated):
            network, x = _network(config, name, section.model, is_operator=False)
            forth, _ = _seconds(
                network, x, settings.batch_size, config.spec(name).boundary, section.train.precision
            )
            states = settings.ensemble_trajectories * (
                4 if stage == "steady" else 24 + settings.ensemble_frames
            )
            total += 2 * config.diffusion.sampler_steps * settings.members * states * forth
    print(
        f"  about {duration(total)} for ensembles of {settings.members} members of what is corrected: an "
        "estimate from one evaluation per task, measured now; the operator's rollouts take seconds per "
        "task"
    )


def duration(seconds: float) -> str:
    """Seconds as one reads them: no more digits than an estimate has."""
    return next(
        f"{float(f'{seconds / size:.2g}'):g} {unit}"
        for size, unit in ((3600, "h"), (60, "min"), (1, "s"))
        if seconds >= 1.5 * size or size == 1
    )


def free_bytes(root: str) -> int:
    """Room on the disk of a folder that need not be there yet."""
    folder = Path(root).absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not asks_for_cpu() else "cpu")


def _network(
    config: Config, name: str, model: ModelConfig, is_operator: bool
) -> tuple[nn.ModuleDict, tuple[int, ...]]:
    """A network of the stage's size for one task, and the task's grid of tokens. Latents count at full
    rank."""
    task, settings, shapes = config.spec(name), config.task[name], plan(config, name)["shapes"]
    *tokens, dim = shapes["state"][2:]
    outputs = dim * (1 if task.is_steady else settings.bundle)
    if is_operator:
        inputs = dim + (shapes["input"][-1] if task.is_steady else settings.history * dim)
    elif task.is_steady:
        # FieldConditions: what was seen, the guess, its spread, the mask; then the noisy residual, m and h
        inputs = (3 * len(task.inputs) + 1) * settings.patch**task.ndim + dim + 3 * outputs
    else:
        inputs = (
            (settings.history + 2 + settings.bundle) * dim + config.model_of("operator").width + 3 * outputs
        )
    return nn.ModuleDict(
        {
            "into": nn.Linear(inputs, model.width),
            "backbone": backbone_of(model, task),
            "out": nn.Linear(model.width, outputs),
        }
    ), tuple(tokens)


def _seconds(
    network: nn.ModuleDict, tokens: tuple[int, ...], micro: int, boundary: str, precision: str
) -> tuple[float, float]:
    """Seconds per row of a pass there, and there and back."""
    device = _device()
    is_cuda, part = device.type == "cuda", list(tokens)
    while not is_cuda and math.prod(part) > MEASURED:  # a pass costs in proportion to its tokens
        part[part.index(max(part))] = -(-max(part) // 2)
    rows = micro if is_cuda else max(1, min(micro, MEASURED // math.prod(part)))
    network = network.to(device)
    x = torch.randn(rows, *part, network.into.in_features, device=device)
    condition = torch.randn(rows, network.into.out_features, device=device)

    def forth() -> Tensor:
        with autocast(precision, device):
            return network.out(network.backbone(network.into(x), condition, boundary))

    def fastest(action: Callable[[], object]) -> float:
        """Of all but the first, which warms up, unless that alone took long enough to know; of a CPU its own
        time, so that what else runs now does not count."""
        clock = benchmark.timer if is_cuda else time.process_time
        seconds = timeit.timeit(action, timer=clock, number=1)
        if seconds < ENOUGH_S:
            seconds = min(timeit.repeat(action, timer=clock, number=1, repeat=REPEATS))
        seconds *= math.prod(tokens) / math.prod(part) / rows
        return seconds if is_cuda else seconds / torch.get_num_threads()

    with torch.no_grad():
        forward = fastest(forth)
    weights = list(network.parameters())
    return forward, fastest(lambda: torch.autograd.grad(forth().float().square().mean(), weights))
