"""What a run depends on outside its mathematics and configuration: the device it gets, random generators,
versions.
"""

from __future__ import annotations

import hashlib
import os
import platform
import random
import subprocess
import sys
import time
from typing import Any

import accelerate
import numpy
import torch
from torch import Tensor, nn

from ups import __version__
from ups.config import ROOT
from ups.training.folder import dotted

WATCH_S = 0.02   # for which a rank on a CPU looks again and again whether a sum is there


def wait_for(work: torch.distributed.Work, device: torch.device) -> None:
    """Wait for a collective of small messages. On a CPU the core is offered to others for a moment before the
    rank sleeps.

    To be woken takes up to a scheduler's tick (4 ms) where gloo's threads share the core; looking took a
    third of the time.
    """
    until = time.perf_counter() + WATCH_S
    while device.type == "cpu" and not work.is_completed() and time.perf_counter() < until:
        os.sched_yield()
    work.wait()


def what_ranks_share(config: dict[str, Any], parents: dict[str, str], stage: str) -> dict[str, Any]:
    """Name -> value of everything that must be the same on all ranks: a difference would be a hang or a wrong
    result.
    """
    source = hashlib.sha256()
    for path in sorted((*ROOT.glob("*.py"), *(ROOT / "ups").rglob("*.py"))):
        source.update(path.read_bytes())
    return {**dict(dotted(config, "")), **{f"the parent {name}": value for name, value in parents.items()},
            "the stage": stage,
            "the version of ups": __version__, "the source of ups (SHA-256)": source.hexdigest()[:12],
            "the version of torch": torch.__version__, "the version of Python": platform.python_version()}


def differences(facts: list[dict[str, Any]]) -> list[str]:
    """What is not the same in the facts of all ranks, in words: the key, and who has which value."""
    found = []
    for key in sorted(set().union(*facts)):
        holders: dict[str, list[str]] = {}
        for rank, values in enumerate(facts):
            holders.setdefault(f"{values.get(key, 'absent')!r:.60}", []).append(str(rank))
        if len(holders) > 1:
            words = (f"{value} on rank {', '.join(ranks)}" for value, ranks in holders.items())
            found.append(f"{key} is {', '.join(words)}")
    return found


def asks_for_cpu() -> bool:
    """Whether the launch says that the CPU is meant: ACCELERATE_USE_CPU, or no visible GPU by choice
    (cpu2.yaml).
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_hidden = visible is not None and not visible.replace("-1", "").strip(", ")
    return is_hidden or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller micro-batch can cure `error`.

    An asynchronous CUDA error is not curable: the context is lost.
    """
    texts = ("CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "not enough memory")
    return (isinstance(error, (torch.OutOfMemoryError, MemoryError))
            or isinstance(error, RuntimeError) and any(text in str(error) for text in texts))


def compile_blocks(model: nn.Module) -> None:
    """Compile, in place, every block of every ModuleList: few graphs, and parameter names stay as they are.
    """
    torch._dynamo.config.recompile_limit = 64  # every task has shapes of its own; the default is 8
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else it falls back to eager without a word
    for blocks in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for block in blocks:
            block.compile()


def torch_random_state(device: torch.device) -> list[Tensor]:
    """torch's generators on this rank: CPU and, where used, the GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_torch_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """All generators of this rank as tensors and plain values."""
    name, keys, position, has_gauss, gauss = numpy.random.get_state()
    return {"torch": torch_random_state(device), "python": random.getstate(),
            "numpy": [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss]}


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    set_torch_random_state(state["torch"], device)
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


def describe_environment(world: int, device: torch.device) -> dict[str, Any]:
    """Versions, hardware, revision and command line of this start."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    gpus = range(torch.cuda.device_count() if device.type == "cuda" else 0)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": sys.argv, "world": world,
        "device": str(device), "gpus": [torch.cuda.get_device_name(index) for index in gpus],
        "python": platform.python_version(), "torch": torch.__version__, "accelerate": accelerate.__version__,
        "numpy": numpy.__version__, "platform": platform.platform(), "cpus": os.cpu_count(),
        "git_revision": git("rev-parse", "HEAD"),
        "git_is_dirty": git("status", "--porcelain") not in ("", "unknown"),
    }
