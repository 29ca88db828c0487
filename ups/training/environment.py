"""What a start depends on: whether the launch fits the settings, and what must be the same on all ranks."""

import contextlib
import hashlib
import os
import platform
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

import accelerate
import numpy as np
import torch

from ups import __version__
from ups.common.place import ROOT
from ups.config.schema import TrainConfig
from ups.training.artifact import dotted

UNKNOWN, FACT_S = "unknown", 2.0  # git answers in a tenth of a second


def asks_for_cpu() -> bool:
    """Whether the launch asks for the CPU: ACCELERATE_USE_CPU is set, or all GPUs are hidden (cpu2.yaml)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_hidden = visible is not None and not visible.replace("-1", "").strip(", ")
    return is_hidden or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")


def check_launch(train: TrainConfig, stage: str, world: int) -> None:
    """Raise ValueError if `world` processes, as launched, cannot train with these settings."""
    names, expected = os.environ.keys(), os.environ.get("UPS_EXPECT_WORLD", world)
    is_for_several = {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= names
    for is_wrong, message in (
        (int(expected) != world, OTHER_WORLD),
        (is_for_several and not names & {"UPS_EXPECT_WORLD", "WORLD_SIZE"}, ONE_OF_SEVERAL),
        (world > 1 and not torch.cuda.is_available() and not asks_for_cpu(), NO_GPU),
        (train.batch_size < world, SMALL_BATCH),
    ):
        if is_wrong:
            raise ValueError(message.format(expected=expected, world=world, stage=stage, train=train))


OTHER_WORLD = (
    "{expected} processes were asked for (UPS_EXPECT_WORLD), but this launch has {world}; expected "
    "{expected}. Use accelerate launch --config_file with a file from accelerate_configs/."
)
ONE_OF_SEVERAL = (
    "accelerate was asked for several processes and started one (it does so for --cpu --num_processes and "
    "for MULTI_CPU); expected WORLD_SIZE to be set. Use --config_file accelerate_configs/cpu2.yaml."
)
NO_GPU = (
    "{world} processes were started for GPUs, but this machine shows none; each would believe it is alone. "
    "Use --config_file accelerate_configs/cpu2.yaml, or export ACCELERATE_USE_CPU=true."
)
SMALL_BATCH = (
    "{stage}.train.batch_size is {train.batch_size}, the global batch; expected at least one row for each of "
    "the {world} processes. Raise it or use fewer processes."
)


def shared_facts(config: dict[str, Any], parents: dict[str, str], stage: str) -> dict[str, Any]:
    """Name -> value of everything that must be the same on all ranks: a difference would make them hang or
    compute wrong results.
    """
    files = sorted((*ROOT.glob("*.py"), *ROOT.glob("ups*/**/*.py")))
    source = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return {
        **dict(dotted(config, "")),
        **{f"the parent {name}": value for name, value in parents.items()},
        "the stage": stage,
        "the version of ups": __version__,
        "the source of ups (SHA-256)": source[:12],
        "the version of torch": torch.__version__,
        "the version of Python": platform.python_version(),
    }


def require_equal_facts(facts: list[dict[str, Any]]) -> None:
    """Raise ValueError naming the keys, and which ranks have which value, if the ranks' facts differ."""
    if different := differences(facts):
        raise ValueError(
            f"the ranks do not agree: {'; '.join(different[:5])}; expected the same configuration, parents "
            f"and versions on all. Start every process with the same command, files and environment."
        )


def differences(facts: list[dict[str, Any]]) -> list[str]:
    """One line for each key whose value is not the same on all ranks, with the ranks of each value."""
    found = []
    for key in sorted(set().union(*facts)):
        values = [f"{of_rank.get(key, 'absent')!r:.60}" for of_rank in facts]
        ranks = {value: [str(r) for r, other in enumerate(values) if other == value] for value in values}
        if len(ranks) > 1:
            parts = (f"{value} on rank {', '.join(of)}" for value, of in ranks.items())
            found.append(f"{key} is {', '.join(parts)}")
    return found


def output_of(*command: str) -> str:
    """What a program prints; "unknown" if it is missing, fails or takes longer than FACT_S: what it would say
    only describes a run, and must not end it."""
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace", **quiet)
        try:
            text, _ = process.communicate(timeout=FACT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children
    except (OSError, subprocess.TimeoutExpired):
        return UNKNOWN
    return text.strip() if process.returncode == 0 else UNKNOWN


def describe_environment(world: int, device: torch.device) -> dict[str, Any]:
    """Versions, hardware, git revision and command line of this start."""
    git = partial(output_of, "git", "-C", str(ROOT))
    changes = git("status", "--porcelain")
    gpus = range(torch.cuda.device_count() if device.type == "cuda" else 0)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "world": world,
        "device": str(device),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "git_revision": git("rev-parse", "HEAD"),
        "git_is_dirty": changes if changes == UNKNOWN else bool(changes),
    }
