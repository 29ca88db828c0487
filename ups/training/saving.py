"""A run's state on disk: when it is saved, what a failure to save means, and resuming."""

from __future__ import annotations

from collections.abc import Callable

from ups.config import TrainConfig
from ups.training.checkpoint import Checkpoints
from ups.training.environment import random_state, set_random_state
from ups.training.log import Log
from ups.training.ranks import Ranks, StageError
from ups.training.update import Updates

MAX_FAILED_SAVES = 3  # in a row; a disk that stays full must not let days of work go unsaved


class Saving:
    """Saves and finds again the state of `updates`, with the numbers that are logged and the random
    generators.
    """

    def __init__(self, ranks: Ranks, updates: Updates, numbers: Log, train: TrainConfig,
                 say: Callable[..., None]) -> None:
        self.ranks, self.updates, self.numbers, self.train, self.say = ranks, updates, numbers, train, say
        self.checkpoints = Checkpoints(ranks.folder.path / "state", train.keep, ranks.rank, ranks.agreed,
                                       ranks.folder.identity)
        self.num_failed = 0   # in a row

    def save(self, is_required: bool) -> None:
        """Commit a checkpoint; a failure is reported and bounded, and fatal if the checkpoint is required."""
        self.ranks.agreed(self.require_ready, "looking for the stage directory and writing metrics.jsonl")
        shared, own = self.updates.state()
        own |= {"random": random_state(self.ranks.device), "window": self.numbers.plain_window()}
        try:
            self.checkpoints.save(shared["step"], shared, own, {"world": self.ranks.world})
            self.num_failed, self.updates.saved = 0, shared["step"]
        except StageError as error:
            self.num_failed += 1
            if is_required or self.num_failed >= MAX_FAILED_SAVES:
                advice = (f"Free space on, or repair, the disk of {self.ranks.folder.path}; the last "
                          f"checkpoint is intact.")
                raise StageError(f"{error} ({self.num_failed} failed in a row)", "save", advice) from error
            self.ranks.is_recorded = False
            self.say(f"WARNING: {error}. Training goes on; the next try is after {self.train.save_every} "
                     f"more steps.")

    def require_ready(self) -> None:
        """Raise OSError unless the folder is still this run's and everything that was logged is on disk."""
        self.ranks.folder.require_own()
        self.numbers.flush()

    def resume(self) -> None:
        """Continue from the newest intact checkpoint, if there is any. A collective."""
        ranks = self.ranks
        manifest = ranks.agreed(lambda: self.checkpoints.newest() if ranks.is_main else None,
                                "looking for checkpoints")
        manifest = ranks.gather(manifest)[0]
        if manifest is not None:
            step, world = manifest["step"], manifest["world"]
            ranks.agreed(lambda: self.checkpoints.taken(step, self.load),
                         f"loading the checkpoint of step {step}")
            note = "" if world == ranks.world else f" (written by {world} processes)"
            self.say(f"resumed at step {step}{note}")
        ranks.agreed(self.numbers.rewind, "cutting metrics.jsonl back to the resumed step")

    def load(self, step: int) -> None:
        """Take over the checkpoint of `step`."""
        shared, own = self.checkpoints.read(step, self.ranks.world)
        self.updates.load(shared, own, lambda: self.checkpoints.parts(step))
        # else another number of processes wrote it: random streams stay, batches are functions of step
        if own is not None:
            set_random_state(own["random"], self.ranks.device)
            self.numbers.window = own["window"]
