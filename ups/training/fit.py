"""What is fitted outside a stage's own loop: bases, a Gaussian, scales, the models of the bench.

The gradient loop for it, and what a stage fits once, before its first step, and finds again when it resumes.

The loop runs in one process, takes seconds to minutes and starts again when it was interrupted. A stage's
steps go through `Run.update` instead, which agrees with the other ranks and can resume.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ups.files import file_hash, require_hash
from ups.progress import Bar, note, peer_failed, position, waiting
from ups.training.checkpoint import read_weights, write_weights
from ups.training.folder import StageFolder
from ups.training.optim import EMA

if TYPE_CHECKING:
    from ups.training.run import Run

Fit = tuple[dict[str, Any], dict[str, Tensor]]   # plain facts, weights


def fit(module: nn.Module, loss_of: Callable[[int], Tensor], steps: Iterable[int],
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float], clip_norm: float, ema: EMA | None = None) -> int | None:
    """Take a gradient step on the scalar loss_of(step) for each of `steps`; None when all were taken.

    optimizer: its groups have base_lr, and a step's learning rate is rate(step) times that. Gradients are
    clipped to `clip_norm` in all; `ema` follows the weights. Stops before the first step whose gradient is
    not finite and returns it.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    stopped = None
    for step in steps:
        gradients = torch.autograd.grad(loss_of(step), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if not math.isfinite(float(nn.utils.clip_grad_norm_(parameters, clip_norm))):
            stopped = step
            break
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * rate(step)
        optimizer.step()
        if ema is not None:
            ema.update()
    module.zero_grad()
    return stopped


def fit_once(run: Run, folder: str, fits: dict[str, Callable[[], Fit]], doing: str) -> dict[str, Fit]:
    """Name -> what fits[name]() returned when it was first called, perhaps by another rank or start.

    Kept in FOLDER of the stage's directory. A collective. Raises StageError on every rank if one of them
    fails, or finds a file that was altered or that another configuration or parent left.
    """
    directory = run.directory / folder

    def fit_or_find() -> dict[str, Fit]:
        for name in list(fits)[run.rank :: run.world]:
            if not (directory / f"{name}.json").is_file():
                _keep_fit(run.folder, f"{folder}/{name}", *fits[name]())
        is_all = _wait([directory / f"{name}.json" for name in fits])
        return {name: find_fit(run.folder, f"{folder}/{name}") for name in fits} if is_all else {}

    def count() -> int:
        return sum((directory / f"{name}.json").is_file() for name in fits)

    with Bar(f"{position(run.stage)}: {folder}", len(fits), run.is_main, count, unit="tasks"):
        return run.agreed(fit_or_find, doing)


def _keep_fit(folder: StageFolder, name: str, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write NAME.safetensors and, last, NAME.json: facts, digest of the weights, identity of the stage."""
    weights = folder.path / f"{name}.safetensors"
    weights.parent.mkdir(exist_ok=True)
    write_weights(weights, {key: value.detach().cpu().contiguous() for key, value in tensors.items()})
    folder.keep(f"{name}.json", {"facts": facts, "sha256": file_hash(weights)})


def find_fit(folder: StageFolder, name: str) -> Fit:
    """What `fit_once` kept.

    Raises DamagedError if it was altered, FileExistsError if it is another stage's.
    """
    weights = folder.path / f"{name}.safetensors"
    again = f"Delete {weights.parent} and run the stage again."
    record = folder.find(f"{name}.json", "what was fitted once", again, facts=dict, sha256=str)
    require_hash(weights, record["sha256"], f"{name}.json", again)
    return record["facts"], read_weights(weights, again)


def _wait(paths: list[Path]) -> bool:
    """Whether all `paths` are on disk at last; fitting them may take longer than a collective would wait.

    False as soon as another process has failed, whose error the agreement then raises.
    """
    with waiting("waiting for what other processes fit"):
        while (missing := [path.stem for path in paths if not path.is_file()]) and not peer_failed():
            note(f"other processes fit {', '.join(missing)}")
            time.sleep(0.2)
    return not missing
