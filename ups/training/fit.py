"""Fits that a stage makes once, before its first step, and reads when it resumes: bases, scales."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ups.common.files import file_hash, require_hash
from ups.common.progress import Bar, note, peer_failed, waiting
from ups.training.folder import StageFolder
from ups.training.weights import read_weights, write_weights

if TYPE_CHECKING:
    from ups.training.run import Run

Fit = tuple[dict[str, Any], dict[str, Tensor]]  # plain facts, weights


def fit_once(run: "Run", folder: str, fits: dict[str, Callable[[], Fit]], doing: str) -> dict[str, Fit]:
    """Name -> the result of fits[name](), which one rank calls once; later starts read it from FOLDER of the
    stage.

    A collective. Raises StageError on every rank if one of them fails, or reads a file that was altered or
    belongs to another configuration or parent.
    """

    def missing() -> list[str]:
        return [name for name in fits if not (run.directory / folder / f"{name}.json").is_file()]

    def fit_or_find() -> dict[str, Fit]:
        for name in list(fits)[run.ranks.rank :: run.ranks.world]:
            if name in missing():
                _keep_fit(run.folder, f"{folder}/{name}", *fits[name]())
        # fits may take longer than the time limit of a collective; `agreed` raises errors of other ranks
        with waiting("waiting for what other processes fit"):
            while (waited_for := missing()) and not peer_failed():
                note(f"other processes fit {', '.join(waited_for)}")
                time.sleep(0.2)
        return {} if waited_for else {name: find_fit(run.folder, f"{folder}/{name}") for name in fits}

    def done() -> int:
        return len(fits) - len(missing())

    with Bar(f"{run.stage}: {folder}", len(fits), run.ranks.is_main, done, unit="tasks"):
        return run.agreed(fit_or_find, doing)


def _keep_fit(folder: StageFolder, name: str, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write NAME.safetensors and, last, NAME.json: facts, digest of the weights, identity of the stage."""
    weights = folder.path / f"{name}.safetensors"
    weights.parent.mkdir(exist_ok=True)
    write_weights(weights, {key: value.detach().cpu().contiguous() for key, value in tensors.items()})
    folder.keep(f"{name}.json", {"facts": facts, "sha256": file_hash(weights)})


def find_fit(folder: StageFolder, name: str) -> Fit:
    """A result that `fit_once` wrote.

    Raises DamagedError if it was altered, FileExistsError if it belongs to another stage.
    """
    weights = folder.path / f"{name}.safetensors"
    again = f"Delete {weights.parent} and run the stage again."
    record = folder.find(f"{name}.json", "what was fitted once", again, facts=dict, sha256=str)
    require_hash(weights, record["sha256"], f"{name}.json", again)
    return record["facts"], read_weights(weights, again)
