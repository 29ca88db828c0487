"""What `--dry-run` prints: the resolved configuration and what a stage would cost, without writing anything."""

from __future__ import annotations

import math
import os

import yaml

from ups.cache import open_cache
from ups.choose import base_settings, head_description
from ups.config import Config, TrainConfig, to_dict
from ups.corrector import Corrector
from ups.operator import Operator
from ups.tasks import get_task

STATE_COPIES = 6   # weights, gradient, two moments, average, best average; float32 each


def print_operator_plan(config: Config) -> None:
    """Configuration, parents, parameters, batch arithmetic, memory and disk of the operator stage."""
    print(yaml.safe_dump(to_dict(config), sort_keys=False))
    print(f"stage directory: {config.run_dir / 'operator'}")
    descriptions, largest = [], 0
    for name in config.data.tasks:
        try:
            cache = open_cache(config, name, verify="quick")
        except (FileNotFoundError, ValueError) as error:
            print(f"parent {config.cache_path(name)}: {error}")
            continue
        kind = config.task[name].base[-1]
        descriptions.append(head_description(cache, config, kind, base_settings(cache, config)))
        largest = max(largest, math.prod(cache.tokenizer.tokens))
        print(f"parent {cache.path}: {cache.num_rows} trajectories, {cache.num_bytes / 2**20:.0f} MiB of latents, "
              f"fingerprint {cache.fingerprint[:12]}")
    print_batch(config.operator.train)
    if not descriptions:
        print("parameters: known once the caches exist (make cache)")
        return
    operator = Operator({"model": to_dict(config.operator.model), "precision": config.operator.train.precision,
                         "tasks": descriptions})
    count = sum(p.numel() for p in operator.parameters())
    state = STATE_COPIES * 4 * count
    model, train = config.operator.model, config.operator.train
    # per block: some 12 tensors of the width and 4 of the hidden width are kept for the backward pass, 2 to 4 bytes each
    kept = train.micro_batch * largest * model.depth * model.width * (12 + 4 * model.mlp_ratio) * 3 * config.operator.unroll_steps
    print(f"parameters: {count} ({sum(p.numel() for p in operator.backbone.parameters())} shared by all tasks)")
    print(f"estimated memory: {state / 2**20:.0f} MiB of state, {kept / 2**20:.0f} MiB of activations per process")
    print(f"estimated disk: {train.keep} checkpoints of {state / 2**20:.0f} MiB")
    # a multiply-add is 2 FLOPs, the backward pass twice the forward one: 6 per weight and token
    flops = 6 * count * train.batch_size * largest * train.steps
    print(f"estimated work: at most {flops:.1e} FLOPs in the shared network, {flops / 3600e11:.2f} h at 100 GFLOP/s")


def print_corrector_plan(config: Config, stage: str, train: TrainConfig, names: list[str], parents: list[str]) -> None:
    """Configuration, parents, parameters, batch arithmetic, memory, disk and work of a stage on the operator's errors."""
    print(yaml.safe_dump(to_dict(config), sort_keys=False))
    print(f"stage directory: {config.run_dir / stage}; corrected tasks: {', '.join(names) or 'none (task.TASK.reserve is 0)'}")
    for parent in parents:
        done = config.run_dir / parent / "done.json"
        print(f"parent {done}: {'finished' if done.is_file() else f'missing: make {parent} RUN={config.run.name}'}")
    print_batch(train)
    descriptions, tokens = [], 0
    for name in names:
        task, settings = get_task(name), config.task[name]
        width = settings.patch**task.ndim
        dim = settings.dim or width * len(task.fields)
        steady = (3 * len(task.inputs) + 1) * width + dim   # ups/steady.py: what was seen, the guess, its spread, the mask
        num_conditions = steady if task.is_steady else (settings.history + 1 + settings.bundle) * dim
        outputs = dim * (1 if task.is_steady else settings.bundle)
        descriptions.append({"name": name, "dim": outputs, "num_conditions": num_conditions})
        tokens = max(tokens, (-(-settings.resolution // settings.space_stride) // settings.patch) ** task.ndim)
    model = config.steady.model if stage == "steady" else config.diffusion.model
    corrector = Corrector({"model": to_dict(model), "precision": train.precision, "tasks": descriptions})
    count = sum(p.numel() for p in corrector.parameters() if p.requires_grad)
    kept = train.micro_batch * tokens * model.depth * model.width * (12 + 4 * model.mlp_ratio) * 3
    frozen, state = sum(p.numel() for p in corrector.parameters()) - count, STATE_COPIES * 4 * count / 2**20
    print(f"parameters: at most {count} trained, {frozen} in conditional Gaussians")
    print(f"estimated memory: {state:.0f} MiB of state, {kept / 2**20:.0f} MiB of activations per process")
    print(f"estimated disk: {train.keep} checkpoints of {state:.0f} MiB")
    flops = 6 * count * train.batch_size * tokens * train.steps
    print(f"estimated work: {flops:.1e} FLOPs, {flops / 3600e11:.2f} h at 100 GFLOP/s")


def print_batch(train: TrainConfig) -> None:
    """How the global batch is shared out."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    share = -(-train.batch_size // world)
    micro = min(train.micro_batch, share)
    print(f"batch: {train.batch_size} global = {world} process(es) x {share}, in micro-batches of {micro}; {train.steps} steps")
