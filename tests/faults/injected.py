"""One rank with a fault: replaces a few functions, then runs a stage script as it is. The product has no
hooks for this.

    accelerate launch ... tests/faults/injected.py '{"kind": "kill", "ranks": [1], "step": 5}'
    train_operator.py --config ...

A fault: kind (a key of FAULTS), ranks that have it, step at which it strikes, and `once`: a path to which the
rank is added, of a file that is made when it strikes, and that keeps it from striking again. is_sharded:
FSDP2; is_large: caches count as large. Every rank, with a fault or without, notes after each update a digest
of its weights; they go to `digests` (a path that ends in the rank) when the script ends."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forced_fsdp
import torch

import ups.data.cache
import ups.data.latents
import ups.models.base_selection
import ups.training.checkpoint
import ups.training.ranks
import ups.training.run
import ups.training.track
import ups.training.update
import ups_launch.guard
import ups_launch.processes

NEVER_S = 600  # longer than any case may last


class Bad(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory or makes NaN."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        if ctx.kind == "oom":
            raise torch.OutOfMemoryError("injected in backward")
        return gradient * float("nan"), None


class Fault:
    """The fault of this rank. `strike` says whether it is time, and notes when that was."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.kind, self.step = description["kind"], description.get("step", 5)
        self.description = description

    def strike(self, is_time: bool = True) -> bool:
        once = Path(f"{self.description['once']}{os.environ.get('RANK', 0)}")
        if not is_time or once.exists() and self.description.get("repeat", 1) == 1:
            return False
        if not once.exists():
            once.write_text(repr(time.time()))
        return True


def in_loss(change: Callable[[Fault, Callable, slice, int], Any]) -> Callable[[Fault], None]:
    """A fault inside the loss function of a step: change(fault, loss_function, rows, number of the call in
    this step)."""

    def install(fault: Fault) -> None:
        update = ups.training.run.Run.update

        def changed(
            run: ups.training.run.Run, loss_function: Callable, size: int, *others: Any, **options: Any
        ) -> bool:
            calls = []

            def loss(rows: slice) -> tuple:
                calls.append(rows)
                is_time = fault.step <= run.step < fault.step + fault.description.get("repeat", 1)
                is_time = is_time and len(calls) == fault.description.get("call", 1)
                return (
                    change(fault, loss_function, rows, run)
                    if is_time and fault.strike()
                    else loss_function(rows)
                )

            return update(run, loss, size, *others, **options)

        ups.training.run.Run.update = changed

    return install


def around(
    owner: type, name: str, action: Callable[[Fault, Any], None], is_time: Callable[[Fault, Any, tuple], bool]
) -> Callable[[Fault], None]:
    """A fault at a call of owner.name: action(fault, self) before it."""

    def install(fault: Fault) -> None:
        before = getattr(owner, name)

        def changed(self: Any, *arguments: Any, **options: Any) -> Any:
            if is_time(fault, self, arguments) and fault.strike():
                action(fault, self)
            return before(self, *arguments, **options)

        setattr(owner, name, changed)

    return install


def raising(error: Exception) -> Callable[..., Any]:
    def action(*_: Any) -> None:
        raise error

    return action


def sending(number: int, then: Callable = lambda function, rows: function(rows)) -> Callable[..., Any]:
    def action(fault: Fault, function: Any = None, rows: Any = None, run: Any = None) -> Any:
        os.kill(os.getpid(), number)
        return then(function, rows) if rows is not None else None

    return action


def hanging(sleep: Callable[[int], Any]) -> Callable[..., Any]:
    def action(fault: Fault, function: Callable, rows: slice, run: Any) -> Any:
        sleep(NEVER_S)
        return function(rows)

    return action


def with_loss(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def action(fault: Fault, function: Callable, rows: slice, run: Any) -> tuple:
        loss, metrics = function(rows)
        return change(loss), metrics

    return action


def at_step(fault: Fault, checkpoints: ups.training.checkpoint.Checkpoints, arguments: tuple) -> bool:
    """Whether a part of the checkpoint of the fault's step is being written."""
    return int(arguments[0].name.removeprefix(".tmp-")) == fault.step


def full_disk(owner: type, name: str, room: Callable[[Any], int]) -> Callable[[Fault], None]:
    """From the fault's step on, for the time of a call (for good if "lasting"), no file may grow beyond
    room(self) bytes."""

    def install(fault: Fault) -> None:
        before = getattr(owner, name)

        def changed(self: Any, *arguments: Any) -> Any:
            step = arguments[0] if name == "log" else int(arguments[0].name.removeprefix(".tmp-"))
            if step != fault.step or not fault.strike():
                return before(self, *arguments)
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room(self), limit[1]))
            try:
                return before(self, *arguments)
            finally:
                if name != "log":
                    resource.setrlimit(resource.RLIMIT_FSIZE, limit)

        setattr(owner, name, changed)

    return install


def in_loader(fault: Fault) -> None:
    update, gather, step = ups.training.run.Run.update, ups.data.latents.Latents.gather, [-1]

    def noting(run: ups.training.run.Run, *arguments: Any, **options: Any) -> bool:
        step[0] = run.step
        return update(run, *arguments, **options)

    def failing(self: Any, *arguments: Any) -> torch.Tensor:
        if step[0] == fault.step and fault.strike():
            raise OSError(errno.EIO, "injected in reading the cache")
        return gather(self, *arguments)

    ups.training.run.Run.update, ups.data.latents.Latents.gather = noting, failing


def in_validation(action: Callable[..., Any]) -> Callable[[Fault], None]:
    """A fault in what a rank computes in a validation during training, where the others would wait for it."""

    def install(fault: Fault) -> None:
        agreed = ups.training.ranks.Ranks.agreed

        def changed(ranks: ups.training.ranks.Ranks, function: Callable, doing: str) -> Any:
            def local() -> Any:
                if doing == "validating" and ranks.activity.step >= fault.step and fault.strike():
                    action(fault)
                return function()

            return agreed(ranks, local, doing)

        ups.training.ranks.Ranks.agreed = changed

    return install


def in_optimizer(fault: Fault) -> None:
    """Out of memory when some of the weights have been changed."""
    apply = ups.training.update.Updates._apply

    def changed(updates: ups.training.update.Updates, *arguments: Any) -> None:
        if updates.counters.step == fault.step and fault.strike():
            adamw = updates.optimizer._step_adamw

            def failing(*given: Any) -> None:
                adamw(*given)
                raise torch.OutOfMemoryError("injected in the optimizer")

            updates.optimizer._step_adamw = failing
        apply(updates, *arguments)

    ups.training.update.Updates._apply = changed


def in_fitting(fault: Fault) -> None:
    """At once, when the other rank still fits, and has not begun to wait."""

    def failing(*_: Any) -> None:
        fault.strike()
        raise ArithmeticError("injected in fitting")

    ups.models.base_selection.select_base = failing


def twice(fault: Fault, function: Callable, rows: slice, run: Any) -> Any:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.02)
    return function(rows)


def torn_word(fault: Fault, function: Callable, rows: slice, run: Any) -> Any:
    with open(os.environ[ups_launch.processes.EVENTS], "ab") as file:
        file.write(b'{"event": "fai')
    return function(rows)


def other_version(fault: Fault) -> None:
    torch.__version__ = "0.0.1"


def held_back(fault: Fault) -> None:
    """Between the look at what lies in the stage's folder and the opening of it, until a file is there."""
    open_run = ups.training.run.Run._open

    def late(run: Any) -> None:
        fault.strike()
        while not Path(fault.description["until"]).exists():
            time.sleep(0.05)
        open_run(run)

    ups.training.run.Run._open = late


def overwrite(path: Path, name: str = "state/latents") -> None:
    """Other numbers in all rows of a cache, in place."""
    import h5py

    with h5py.File(path, "r", locking=False) as file:
        first, size = file[name].id.get_offset(), file[name].nbytes
    with path.open("r+b") as file:
        file.seek(first)
        numbers = bytearray(file.read(size))
        numbers[3::4] = bytes(byte ^ 1 for byte in numbers[3::4])  # in the exponent of a float32
        file.seek(first)
        file.write(numbers)


def overwriting(fault: Fault, function: Callable, rows: slice, run: Any) -> Any:
    for path in Path(fault.description["cache"]).glob("*.h5"):
        overwrite(path)
    return function(rows)


def leave_quietly(*_: Any) -> None:
    os._exit(0)  # what no exit code can tell from success


SLEEP_IN_C, SLEEP_WITH_LOCK = ctypes.CDLL(None).sleep, ctypes.PyDLL(None).sleep
RUN = ups.training.run.Run
CHECKPOINTS = ups.training.checkpoint.Checkpoints
TRACKER = ups.training.track.Tracker
FULL = OSError(errno.ENOSPC, "No space left on device (injected)")

FAULTS: dict[str, Callable[[Fault], None]] = {
    "none": lambda fault: None,
    "oom_forward": in_loss(raising(torch.OutOfMemoryError("injected in forward"))),
    "oom_backward": in_loss(with_loss(lambda loss: Bad.apply(loss, "oom"))),
    "oom_optimizer": in_optimizer,
    "nan_loss": in_loss(with_loss(lambda loss: loss * float("nan"))),
    "nan_gradient": in_loss(with_loss(lambda loss: Bad.apply(loss, "nan"))),
    "error_loader": in_loader,
    "error_validation": in_validation(raising(ArithmeticError("injected in validation"))),
    "error_alone": around(
        RUN,
        "keep_if",
        raising(ArithmeticError("injected where no one looks")),
        lambda fault, run, _: run.step >= fault.step,
    ),
    "error_saving": around(CHECKPOINTS, "_write", raising(FULL), at_step),
    "full_saving": full_disk(CHECKPOINTS, "_write", lambda _: 500),
    "full_logging": full_disk(TRACKER, "log", lambda tracker: tracker.path.stat().st_size + 10),
    "kill": in_loss(sending(signal.SIGKILL)),
    "kill_validation": in_validation(sending(signal.SIGKILL)),
    "kill_saving": around(CHECKPOINTS, "_write", sending(signal.SIGKILL), at_step),
    "term": in_loss(sending(signal.SIGTERM)),
    "term_saving": around(CHECKPOINTS, "_write", sending(signal.SIGTERM), at_step),
    "int": in_loss(sending(signal.SIGINT)),
    "stop": in_loss(sending(signal.SIGSTOP)),
    "hang_python": in_loss(hanging(time.sleep)),
    "hang_c": in_loss(hanging(SLEEP_IN_C)),
    "hang_lock": in_loss(hanging(SLEEP_WITH_LOCK)),
    "exit0": in_loss(leave_quietly),
    "slow": in_loss(hanging(lambda _: time.sleep(0.3))),
    "error_fitting": in_fitting,
    "term_twice": in_loss(twice),
    "torn_word": in_loss(torn_word),
    "other_version": other_version,
    "held_back": held_back,
    "overwritten": in_loss(overwriting),
}


def note_digests(path: Path) -> None:
    """After every update: a digest of the weights, and the rows this rank was given."""
    update, close, found = ups.training.run.Run.update, ups.training.run.Run.close, {}

    def noting(run: ups.training.run.Run, *arguments: Any, **options: Any) -> bool:
        done = update(run, *arguments, **options)
        digest = hashlib.sha256()
        for parameter in run.model.parameters():
            digest.update(parameter.detach().reshape(-1).view(torch.uint8).numpy())
        found[run.step] = digest.hexdigest()[:16]
        return done

    def closing(run: ups.training.run.Run, *arguments: Any) -> None:
        path.write_text(json.dumps(found))
        close(run, *arguments)

    ups.training.run.Run.update, ups.training.run.Run.close = noting, closing


def run_script(description: dict[str, Any], script: str, arguments: list[str]) -> None:
    """The script, as if it were called, with the fault if this rank has it."""
    torch.set_num_threads(1)
    if description.get("is_sharded", False):
        os.environ.update(forced_fsdp.ENVIRONMENT)
        forced_fsdp.force()
    elif "digests" in description:  # of a sharded model every rank has other numbers
        note_digests(Path(f"{description['digests']}{os.environ.get('RANK', 0)}"))
    if "grace_s" in description:
        ups_launch.guard.GRACE_S = description["grace_s"]
    if description.get("is_large", False):  # caches count as too large to be verified when opened
        ups.data.cache.FULL_BYTES = 0
    if int(os.environ.get("RANK", 0)) in description.get("ranks", []):
        FAULTS[description["kind"]](Fault(description))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run_script(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:])
