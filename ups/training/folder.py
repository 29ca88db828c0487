"""The folder of a stage: whose it is, its lock, and the records of a start and of the end. Without torch.

Rank 0 locks the folder. Every rank keeps .lock open and, before each save, checks that the path still leads
to that file: the folder that is locked is the folder that is written. Between this check and a rename another
job may take the folder; it then finds files with a foreign identity and refuses them, or files that it would
have computed itself.
"""

import contextlib
import sys
import time
from dataclasses import asdict
from typing import IO, Any

import yaml

from ups.common.files import (
    NO_ACCESS,
    DamagedError,
    is_at,
    lock,
    message_of,
    open_plain,
    read_record,
    read_sealed,
    remove_named,
    value_hash,
    write_atomic,
    write_json,
    write_sealed,
)
from ups.common.place import make_target
from ups.common.text import read_yaml
from ups.config.schema import Config
from ups.training.artifact import (
    DONE,
    HEARTBEATS,
    finished_stage,
    relevant_keys,
    require_identity,
)

LOCK, MEMORY = ".lock", "memory"  # MEMORY: folder with the micro-batch that fitted on each rank
OCCUPIED = "another process is training in {path}; expected one at a time. Wait for it, or end it."


class StageFolder:
    """The folder of one stage. stage: its section of the configuration; parents: name -> fingerprint."""

    def __init__(self, config: Config, stage: str, parents: dict[str, str]) -> None:
        self.config, self.stage, self.path = config, stage, config.run_dir / stage
        self.relevant = relevant_keys(asdict(config), stage)
        self.identity = {"config_hash": value_hash({"stage": stage, **self.relevant}), "parents": parents}
        self.remedy = (
            f"Delete {self.path} (rm -r) and run {make_target(f'{stage} RUN={config.run.name}')} again, or "
            "choose another run.name."
        )
        self.is_open = False  # whether every rank has entered it; `write_if_open` writes nothing before
        self._lock: IO | None = None

    def examine(self) -> dict[str, Any] | None:
        """The record of the stage if it is finished, else None. Reads only.

        Raises FileExistsError if a record here has another configuration or other parents, DamagedError if a
        finished stage was altered.
        """
        self.require_same_settings()
        for path in (self.path / "environment.json", self.path / DONE):
            try:
                record = read_record(path, "a record of a stage", self.remedy, config_hash=str, parents=dict)
            except (DamagedError, FileNotFoundError):
                continue  # without an identity, or damaged: reading its content will raise
            require_identity(record, self.identity, self.path, path, self.remedy)
        return finished_stage(self.path)

    def require_same_settings(self) -> None:
        """Raise FileExistsError naming the keys that differ from config.yaml, if there is one; DamagedError
        if sections are missing in it.
        """
        path = self.path / "config.yaml"
        if not path.is_file():
            return
        saved, now = read_yaml(path), self.relevant
        try:
            before = relevant_keys(saved, self.stage)
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedError(
                f"{path} lacks a part ({error}); expected the configuration that this stage was started "
                f"with. {self.remedy}"
            ) from error
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
                f"{self.path} was started with another configuration ({'; '.join(changed)}); expected the "
                f"same one, to continue. {longer}{self.remedy}"
            )

    def take(self, wait_s: float) -> str:
        """Lock the folder, which is created if missing; "" or, after `wait_s`, the reason why it cannot be.

        The lock ends with this process.
        """
        until = time.monotonic() + wait_s
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = open_plain(self.path / LOCK)
                lock(self._lock, self.path / LOCK)
                if self.is_own():
                    self.examine()  # the previous owner of the lock may have started something else
                    return ""
                refusal = ""  # the folder was removed in the meantime
            except FileExistsError as error:
                refusal = str(error)
            except BlockingIOError:
                refusal = OCCUPIED.format(path=self.path) if time.monotonic() > until else ""
            except OSError as error:
                if error.errno not in NO_ACCESS:
                    raise
                refusal = message_of(error)
            if self._lock is not None:
                self._lock.close()
            if refusal:
                self._lock = None  # this process writes nothing here
                return refusal
            time.sleep(0.1)

    def enter(self, rank: int) -> None:
        """Open, on every rank, the folder that rank 0 locked. Raises FileNotFoundError if it is not there."""
        path, record = self.path / "environment.json", {}
        with contextlib.suppress(FileNotFoundError):
            self._lock = self._lock or (self.path / LOCK).open("rb")
            record = read_record(path, "the record of this start", self.remedy)
        if record.get("config_hash") != self.identity["config_hash"]:
            raise FileNotFoundError(
                f"rank {rank} does not see {path} that rank 0 wrote; expected run.root on a file system "
                f"shared by all machines. Set run.root to one."
            )

    def is_own(self) -> bool:
        """Whether the path still leads to the folder that was locked."""
        return self._lock is not None and is_at(self.path / LOCK, self._lock)

    def require_own(self) -> None:
        """Raise FileNotFoundError unless `is_own`."""
        if not self.is_own():
            raise FileNotFoundError(
                f"{self.path} was removed or replaced while this job trained in it; expected the folder that "
                f"it locked. Leave it alone while a job runs, and start this one again"
            )

    def keep(self, name: str, record: dict[str, Any]) -> None:
        """Write a record that `find` reads, in this start or a later one."""
        self.require_own()
        write_sealed(self.path / name, {**record, **self.identity})

    def find(self, name: str, what: str, do: str, **kinds: type) -> dict[str, Any]:
        """A record that `keep` wrote. what: its content in words; do: advice; kinds: type of each field.

        Raises DamagedError if it was altered, FileExistsError if it belongs to another stage.
        """
        record = read_sealed(self.path / name, what, do, **kinds)
        require_identity(record, self.identity, self.path / name, self.path / name, do)
        return record

    def begin(self, start: dict[str, Any]) -> None:
        """Write environment.json and config.yaml of this start, and delete the heartbeats of the last."""
        path, starts = self.path / "environment.json", []
        if path.is_file():
            starts = read_record(path, "the record of earlier starts", self.remedy, starts=list)["starts"]
        remove_named(self.path / "heartbeat", HEARTBEATS)
        write_atomic(self.path / "config.yaml", yaml.safe_dump(asdict(self.config), sort_keys=False))
        write_json(path, {**self.identity, "starts": [*starts, start]})

    def micro_batch(self, asked: int, now: int) -> int:
        """The smallest micro-batch that earlier starts with the same setting recorded when memory ran out,
        else `now`.
        """
        records = [
            read_record(path, "a micro-batch", "Delete it.", micro_batch=int, micro_batch_asked=int)
            for path in self.path.glob(f"{MEMORY}/rank*.json")
        ]
        return max(1, min([now, *(r["micro_batch"] for r in records if r["micro_batch_asked"] == asked)]))

    def write_if_open(self, name: str, record: dict[str, Any]) -> bool:
        """Write an optional record, with the time; whether it was written.

        A folder that belongs to another job or a full disk prevents it, and must not hide the first error.
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
        """Write done.json, last. hashes: digests of other files, part of the fingerprint; facts: the rest."""
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
