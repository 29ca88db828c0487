"""What a stage is, and its folder: whose it is, what lies in it, what is recorded of a start and of the end.
Without torch.

Identity: a stage is what its configuration (`relevant_keys`) and its parents make of it, so the hash of the
one and the fingerprints of the others name it. Everything that a stage writes to read it again carries both:
environment.json, the manifest of a checkpoint, what was fitted once, done.json. They are compared whenever
one of these is read, before the folder is locked and again after.

The folder that is locked is the folder that is written: every rank keeps .lock open, and before each save
looks whether the path still leads to that file. A moment is left between that look and a rename. What another
job could then find in its folder is refused by its identity, or is what that job would have computed itself.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import yaml

from ups.common.files import (
    NO_ACCESS,
    DamagedError,
    in_words,
    is_at,
    lock,
    read_record,
    read_sealed,
    remove,
    require_hash,
    require_plain,
    require_small,
    value_hash,
    write_atomic,
    write_json,
    write_sealed,
)
from ups.config import STAGES, Config, read_yaml, to_dict

DONE, MODEL, MANIFEST = "done.json", "model.safetensors", "manifest.json"
CARD, IMAGES = "README.md", "images"  # the model card and its pictures

# Keys of these sections decide what a stage computes; of them, these last parts only say how and where.
SECTIONS = ("data", "cache", "task")
REMOVED_SECTIONS = ("sampling",)  # still part of the hash of a stage that was trained with them
FREE_KEYS = {
    "data.root",
    "data.url",
    "data.chunk",
    "cache.root",
    "cache.place",
    "cache.device_fraction",
    "cache.chunk",
}
FREE_TRAIN_KEYS = {
    "micro_batch",
    "compile",
    "log_every",
    "save_every",
    "keep",
    "max_skips",
    "hang_s",
    "timeout_s",
}
LOCK, MEMORY = ".lock", "memory"  # MEMORY: folder of what each rank had to go down to for want of memory
CARRIERS = ("*.json", "*/*.json", f"state/*/{MANIFEST}")  # where records lie that carry an identity
KEPT_ERRORS = 5  # starts whose errors are kept


def dotted(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf of nested mappings, below `key`."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from dotted(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def relevant_keys(config: dict[str, Any], section: str) -> dict[str, Any]:
    """Dotted key -> value of what decides the stage's result; the rest may change when a run continues."""
    # where a start is read from is free as well: the fingerprint of what lies there is a parent
    free = FREE_KEYS | {f"{section}.init", *(f"{section}.train.{name}" for name in FREE_TRAIN_KEYS)}
    removed = [name for name in REMOVED_SECTIONS if name in config]
    found = [
        ("run.seed", config["run"]["seed"]),
        *(pair for name in (*SECTIONS, *removed, section) for pair in dotted(config[name], name)),
    ]
    return {
        key: value
        for key, value in found
        if key not in free
        and not (key.startswith("task.") and key.split(".")[1] not in config["data"]["tasks"])
    }


def require_identity(
    record: Mapping[str, Any], identity: Mapping[str, Any], what: str | Path, path: Path, do: str
) -> None:
    """Raise FileExistsError unless `record`, read from `path`, carries `identity`; what: whose it is."""
    then, now = record.get("config_hash", "none"), identity["config_hash"]
    if then != now:
        raise FileExistsError(
            f"{what} was made with another configuration (hash {then!s:.12} in "
            f"{path.name}, {now[:12]} now); expected the same one. {do}"
        )
    before, parents = record.get("parents", {}), identity["parents"]
    for name in sorted(before.keys() | parents.keys()):
        if before.get(name) != parents.get(name):
            said = [f"{of.get(name, 'none')!s:.80}" for of in (before, parents)]  # whatever a file holds
            raise FileExistsError(
                f"{what} was made from another {name!s:.80} ({said[0]} then, {said[1]} "
                f"now); expected the same one. {do}"
            )


class FinishedStage(NamedTuple):
    """The verified records of a finished stage: done.json and config.json, which describes its network."""

    done: dict[str, Any]
    description: dict[str, Any]


def read_stage(folder: Path, stage: str = "") -> FinishedStage | None:
    """The records of a finished stage, without a look at its weights; None if it is not finished. stage: its
    name, where that is not the folder's.

    Raises DamagedError if they are not as they were left, or are links that lead elsewhere.
    """
    again = f"Delete {folder / DONE} and run the stage again; it resumes from its last checkpoint."
    try:
        done = read_sealed(
            folder / DONE,
            "the record of a finished stage",
            again,
            model_sha256=str,
            config_sha256=str,
            fingerprint=str,
            config_hash=str,
            parents=dict,
            stage=str,
            step=int,
        )
    except FileNotFoundError:
        return None
    if done["stage"] != (stage or folder.name):
        raise DamagedError(
            f"{folder / DONE} is of stage {done['stage']!s:.80}; expected {stage or folder.name}. {again}"
        )
    path, what = folder / "config.json", "the description of a network"
    require_small(path, what, again)
    require_hash(path, done["config_sha256"], DONE, again)
    return FinishedStage(done, read_record(path, what, again))


def finished_stage(folder: Path, stage: str = "") -> dict[str, Any] | None:
    """The record of a finished stage whose weights are as they were left, or None if it is not finished.

    Raises DamagedError as `read_stage`, and for altered weights.
    """
    if (found := read_stage(folder, stage)) is not None:
        require_weights(folder, found.done)
    return found and found.done


def require_weights(folder: Path, done: Mapping[str, Any]) -> None:
    """Raise DamagedError unless the weights of a stage are those of its record."""
    again = f"Delete {folder / DONE} and run the stage again; it resumes from its last checkpoint."
    require_plain(folder / MODEL, again)
    require_hash(folder / MODEL, done["model_sha256"], DONE, again)


def stage_config(folder: Path, done: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that a finished stage was trained with, as its config.yaml says and done.json
    confirms. Raises DamagedError."""
    path = folder / "config.yaml"
    require_small(path, "a configuration", "Take another copy of the stage.")
    try:
        saved = read_yaml(path)
        found = value_hash({"stage": done["stage"], **relevant_keys(saved, done["stage"])})
    except (KeyError, TypeError, AttributeError, ValueError, FileNotFoundError) as error:
        raise DamagedError(
            f"{path} is not readable ({error!s:.200}); expected the configuration that this "
            f"stage was trained with. Take another copy of the stage."
        ) from error
    if found != done["config_hash"]:
        raise DamagedError(
            f"{path} has hash {found[:12]}; expected {done['config_hash']:.12} as {DONE} "
            f"says. Take another copy of the stage."
        )
    return saved


def stage_of_run(run: Path, stage: str) -> FinishedStage | None:
    """`read_stage` of a run's folder that may come from elsewhere: a stage that is no link, made from the
    stages beside it. Raises DamagedError, by name, where it is not, or another stage lies beside it.
    """
    folder = run / stage
    if folder.is_symlink():
        raise DamagedError(f"{folder} is a link; expected a folder of its own. Copy the stage there.")
    if (found := read_stage(folder)) is None:
        return None
    for parent in STAGES[stage].parents:
        beside, then = read_stage(run / parent), found.done["parents"].get(parent, "none")
        now = beside.done["fingerprint"] if beside is not None else "none"
        if now != then:
            raise DamagedError(
                f"{folder} was made from another {parent} than the one beside it "
                f"({then!s:.12}, not {now!s:.12}); expected stages of one run. Put the stages "
                f"of one run together, or run make {stage} again."
            )
    return found


class StageFolder:
    """The folder of one stage.

    A stage has the name of its section of the configuration. parents: name -> fingerprint of what it is made
    from.
    """

    def __init__(self, config: Config, stage: str, parents: dict[str, str]) -> None:
        self.config, self.stage, self.path = config, stage, config.run_dir / stage
        self.relevant = relevant_keys(to_dict(config), stage)
        self.identity = {"config_hash": value_hash({"stage": stage, **self.relevant}), "parents": parents}
        self.remedy = (
            f"Delete {self.path} (make remove STAGE={stage} RUN={config.run.name}) and run "
            f"make {stage} RUN={config.run.name} again, or choose another run.name."
        )
        self.is_open = False  # once every rank is in it; nothing is noted before
        self._lock: IO | None = None

    def examine(self) -> dict[str, Any] | None:
        """The record of the stage if it is finished, else None; reads only.

        Raises FileExistsError if anything here is of another configuration or other parents, DamagedError if
        a finished stage is not as it was left.
        """
        self.require_same_settings()
        for path in (path for pattern in CARRIERS for path in sorted(self.path.glob(pattern))):
            try:
                record = read_record(path, "a record of a stage", self.remedy, config_hash=str, parents=dict)
            except (DamagedError, FileNotFoundError):
                continue  # without an identity, or damaged: who reads it for its content will say so
            require_identity(record, self.identity, self.path, path, self.remedy)
        return finished_stage(self.path)

    def require_same_settings(self) -> None:
        """Raise FileExistsError naming the keys in which config.yaml, where it is, differs; DamagedError if
        it lacks a part.
        """
        path = self.path / "config.yaml"
        if not path.is_file():
            return
        saved = read_yaml(path)
        try:
            before = relevant_keys(saved, self.stage)
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedError(
                f"{path} lacks a part ({error}); expected the configuration that this stage "
                f"was started with. "
                f"{self.remedy}"
            ) from error
        now = self.relevant
        if changed := [
            f"{key} {before.get(key, 'absent')} -> {now.get(key, 'absent')}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]:
            is_longer = (self.path / DONE).is_file() and len(changed) == 1 and "train.steps" in changed[0]
            longer = (
                f"To train on from its end, choose another run.name (RUN= of make) and give "
                f"{self.stage}.init={self.path} and the number of further steps. "
            ) * is_longer
            raise FileExistsError(
                f"{self.path} was started with another configuration "
                f"({'; '.join(changed)}); expected the "
                f"same one, to continue. {longer}{self.remedy}"
            )

    def take(self, wait_s: float) -> str:
        """Lock the folder, made if it is missing; what speaks against it, or "".

        The lock dies with this process.
        """
        until, refusal = time.monotonic() + wait_s, ""
        while not refusal:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = (self.path / LOCK).open("a")
                lock(self._lock, self.path / LOCK)
                if self.is_own():  # else it was removed while we waited
                    self.examine()  # who had the lock until now may have started something else
                    return ""
            except FileExistsError as error:
                refusal = str(error)
            except BlockingIOError:
                if time.monotonic() > until:
                    refusal = (
                        f"another process is training in {self.path}; expected one at a time. Wait "
                        f"for it, or end it."
                    )
            except OSError as error:
                if error.errno not in NO_ACCESS:
                    raise
                refusal = in_words(error)
            if self._lock is not None:
                self._lock.close()
            time.sleep(0.1)
        self._lock = None  # nothing of this process is written here
        return refusal

    def enter(self, rank: int) -> None:
        """Keep hold, on every rank, of the folder that rank 0 locked.

        Raises FileNotFoundError if this rank does not see it.
        """
        path, record = self.path / "environment.json", {}
        with contextlib.suppress(FileNotFoundError):
            self._lock = self._lock or (self.path / LOCK).open("rb")
            record = read_record(path, "the record of this start", self.remedy)
        if record.get("config_hash") != self.identity["config_hash"]:
            raise FileNotFoundError(
                f"rank {rank} does not see {path} that rank 0 wrote; expected run.root "
                f"on a file system "
                "shared by all machines. Set run.root to one."
            )

    def is_own(self) -> bool:
        """Whether the path still leads to the folder that was locked."""
        return self._lock is not None and is_at(self.path / LOCK, self._lock)

    def require_own(self) -> None:
        """Raise FileNotFoundError unless `is_own`."""
        if not self.is_own():
            raise FileNotFoundError(
                f"{self.path} was removed or replaced while this job trained in it; "
                f"expected the folder that "
                f"it locked. Leave it alone while a job runs, and start this one again"
            )

    def keep(self, name: str, record: dict[str, Any]) -> None:
        """Write a record of this stage for `find`, perhaps of another start."""
        self.require_own()
        write_sealed(self.path / name, {**record, **self.identity})

    def find(self, name: str, what: str, do: str, **kinds: type) -> dict[str, Any]:
        """What `keep` kept.

        Raises DamagedError if it was altered, FileExistsError if it is another stage's.
        """
        record = read_sealed(self.path / name, what, do, **kinds)
        require_identity(record, self.identity, self.path / name, self.path / name, do)
        return record

    def begin(self, start: dict[str, Any]) -> None:
        """Record this start; what earlier ones left of errors is set aside, their heartbeats go."""
        path, starts = self.path / "environment.json", []
        if path.is_file():
            starts = read_record(path, "the record of earlier starts", self.remedy, starts=list)["starts"]
        if (self.path / "errors").exists():
            aside = self.path / f"errors_of_start_{len(starts):04d}"
            remove(aside)
            (self.path / "errors").rename(aside)
            for old in sorted(self.path.glob("errors_of_start_*"))[:-KEPT_ERRORS]:
                remove(old)
        remove(self.path / "heartbeat")
        write_atomic(self.path / "config.yaml", yaml.safe_dump(to_dict(self.config), sort_keys=False))
        write_json(path, {**self.identity, "starts": [*starts, start]})

    def micro_batch(self, asked: int, now: int) -> int:
        """`now`, or what earlier starts that were `asked` for the same have left of it for want of memory."""
        left = [
            read_record(path, "a micro-batch", "Delete it.", micro_batch=int, micro_batch_asked=int)
            for path in self.path.glob(f"{MEMORY}/rank*.json")
        ]
        return max(1, min([now, *(m["micro_batch"] for m in left if m["micro_batch_asked"] == asked)]))

    def note(self, name: str, record: dict[str, Any]) -> bool:
        """Write a record without which a run goes on as well; whether it is there.

        It is not in a folder that is another's by now, nor on a full disk, which must not hide what happened.
        """
        if not (self.is_open and self.is_own()):
            return False
        path = self.path / name
        try:
            path.parent.mkdir(exist_ok=True)
            write_json(path, {**record, "time": time.time()})
        except OSError as error:
            print(f"WARNING: {path} was not written ({error})", file=sys.stderr, flush=True)
            return False
        return True

    def finish(self, hashes: dict[str, str], facts: dict[str, Any]) -> None:
        """Write done.json, last; hashes: of what it vouches for, for its fingerprint."""
        self.require_own()
        record = {**hashes, **self.identity}
        write_sealed(
            self.path / DONE,
            {
                "stage": self.stage,
                "run": self.config.run.name,
                **record,
                "fingerprint": value_hash(record),
                **facts,
            },
        )
