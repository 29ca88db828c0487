"""The chain: the stages of a run, and what each is made from. Without torch, as make asks every time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import h5py

from ups.config import Config
from ups.files import DamagedError
from ups.training.folder import DONE, StageFolder, finished_stage, require_identity


@dataclass(frozen=True)
class Kind:
    """What the stage of a script is made of.

    section: of the configuration; parents: stages; tasks: whose caches it reads.
    """

    section: str
    parents: tuple[str, ...]
    tasks: Callable[[Config], list[str]]


def _in_time(config: Config) -> list[str]:
    return config.corrected(is_steady=False)


def _steady(config: Config) -> list[str]:
    return config.corrected(is_steady=True)


STAGES = {
    "operator": Kind("operator", (), lambda config: config.data.tasks),
    "diffusion": Kind("diffusion", ("operator",), _in_time),
    "consistency": Kind("consistency", ("operator", "diffusion"), _in_time),
    "rival": Kind("rival", ("operator", "diffusion"), _in_time),
    "steady": Kind("steady", ("operator",), _steady),
}


def parents_of(config: Config, stage: str, caches: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Name -> fingerprint of what `stage` is to be made from, itself finished and of this configuration.

    caches: task -> the open cache that the stage reads; else what the files say now.
    Raises FileNotFoundError, ValueError or FileExistsError, naming the make target, for a parent that is not
    there, was altered or was made otherwise.
    """
    kind = STAGES[stage]
    return {**{name: require_stage(config, name)["fingerprint"] for name in kind.parents},
            **{name: caches[name].fingerprint if caches else cache_fingerprint(config, name)
               for name in kind.tasks(config)}}


def cache_fingerprint(config: Config, task: str) -> str:
    """The fingerprint that the cache of `task` carries.

    Reading the cache itself checks much more: ups/data/cache.py.
    """
    path = config.cache_path(task)
    try:
        with h5py.File(path, "r", locking=False) as file:
            return str(json.loads(bytes(file["header"][()]))["fingerprint"])
    except FileNotFoundError:
        raise FileNotFoundError(f"no cache of {task} at {path}; expected the latents there (key cache.root). "
                                f"Build it with "
                                f"`make cache` (python prepare_cache.py --config CONFIG).") from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path} has no header that can be read ({error}); expected a whole cache. "
                           f"Rebuild it with "
                           f"python prepare_cache.py --config CONFIG --rebuild.") from error


def require_stage(config: Config, stage: str) -> dict[str, Any]:
    """The record of the finished `stage` of this run, its "fingerprint" being what a child records.

    Raises FileNotFoundError naming the make target if it is missing or unfinished, DamagedError if it was
    altered, FileExistsError if it was made with another configuration or from other parents than those there
    now.
    """
    path, name = config.run_dir / stage, config.run.name
    done = finished_stage(path)
    if done is None:
        raise FileNotFoundError(f"stage {stage} of run {name} is "
                                f"{'unfinished' if path.is_dir() else 'missing'}; expected "
                                f"{path / DONE}. Run: make {stage} RUN={name}")
    folder = stage_folder(config, stage)
    folder.require_same_settings()
    require_identity(done, folder.identity, f"stage {stage} of run {name}", path / DONE, folder.remedy)
    return done


def stage_folder(config: Config, stage: str) -> StageFolder:
    """The folder of a script's stage, made from what is there now. Raises as `parents_of`."""
    return StageFolder(config, stage, STAGES[stage].section, parents_of(config, stage))
