"""What `--dry-run` prints: the resolved configuration and what a stage would cost, without writing anything."""

from __future__ import annotations

import math
import os

import yaml

from ups.cache import open_cache
from ups.choose import base_settings, head_description
from ups.config import Config, TrainConfig, to_dict
from ups.operator import Operator

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


def print_batch(train: TrainConfig) -> None:
    """How the global batch is shared out."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    share = -(-train.batch_size // world)
    micro = min(train.micro_batch, share)
    print(f"batch: {train.batch_size} global = {world} process(es) x {share}, in micro-batches of {micro}; {train.steps} steps")
