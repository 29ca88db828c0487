"""One update of the weights, the same on all ranks, whatever happens on one of them.

With `Agreed` (ups/training/strategies.py) forward and backward pass contain no collective. An update has one
all-reduce of a flat buffer: counts (ranks with a signal, out of memory or failed; rows; loss), then the
gradients of the shared weights and of the private weights of the batch's task. All ranks then decide alike:
to step, skip (non-finite), repeat the batch with half the micro-batch, raise, or save and stop.
docs/reliability.md compares the cost with DDP and lists the injected faults.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ups.common.files import is_out_of_memory
from ups.common.place import make_target
from ups.config.schema import OptimConfig, TrainConfig
from ups.training import sharding
from ups.training.counters import Counters, Update
from ups.training.folder import MEMORY
from ups.training.optim import (
    EMA,
    aligned,
    build_optimizer,
    learning_rate,
    place_gradients,
    require_alike,
    scale_lr,
)
from ups.training.ranks import Ranks, StageError
from ups.training.strategies import Agreed, LossFunction

ReadAhead = Callable[[slice], object]  # reads the first rows of the next step
STOP, OUT_OF_MEMORY, FATAL, ROWS, LOSS, SQUARES = range(6)  # counts before the gradients, summed over ranks
WATCH_S = 0.02  # for which a rank on a CPU polls for the end of the all-reduce
PROBED = ("cuda",)  # devices that raise an error when memory runs out; on a CPU the process is killed


def read_nothing(rows: slice) -> None:
    """The `ReadAhead` of stages that read nothing ahead."""


def wait_for(work: torch.distributed.Work, device: torch.device) -> None:
    """Wait for a collective of small messages. On a CPU, poll for a moment and let other threads run.

    A sleeping rank wakes up to a scheduler's tick (4 ms) late if gloo's threads share its core; polling took
    a third of the time.
    """
    until = time.perf_counter() + WATCH_S
    while device.type == "cpu" and not work.is_completed() and time.perf_counter() < until:
        os.sched_yield()
    work.wait()


def torch_random_state(device: torch.device) -> list[Tensor]:
    """States of torch's generators on this rank: CPU and, if used, the GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_torch_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


class Gradient(NamedTuple):
    """A gradient summed over the global batch, which lies in the buffer. metrics: of this rank's passes;
    counts: over all ranks; norm: of the whole sum.
    """

    metrics: list[tuple[str, Tensor, int]]
    counts: list[float]
    norm: float


class Updates:
    """The updates of `model`, with its gradients, optimizer and average (`ema`)."""

    def __init__(
        self,
        model: nn.Module,
        strategy: Agreed,
        ranks: Ranks,
        counters: Counters,
        train: TrainConfig,
        optim: OptimConfig,
        notify: Callable[..., None],
    ) -> None:
        self.model, self.strategy, self.ranks = model, strategy, ranks
        self.counters, self.train, self.optim, self.notify = counters, train, optim, notify
        self.best_weights: dict[str, Tensor] | None = None
        self.saved: int | None = None  # step of the last checkpoint
        self.optimizer = build_optimizer(model, optim)
        self.optimizer.allocate()
        self.ema = EMA(model, optim.ema_decay)
        # tasks can share a place for their private gradients only if this module sums over ranks
        self._flat, self._ends = place_gradients(model, ranks.device, SQUARES + 1, strategy.is_agreed)
        self._counts = self._flat[: SQUARES + 1]
        self._select(None)

    def _select(self, task: str | None) -> None:
        """Limit the buffer to the gradients of a step of this task; None: of any step."""
        self._buffer = self._flat[: self._ends.get(task, self._ends[None])]
        self._gradients = self._buffer[aligned(SQUARES + 1) :]

    def update(
        self,
        loss_function: LossFunction,
        size: int,
        read_ahead: ReadAhead = read_nothing,
        only: str | None = None,
    ) -> Update:
        """One update over the global batch, of which this rank has `size` rows; see `Run.update`."""
        if len(self._ends) > 1 and only is None:
            raise ValueError(NO_TASK)
        self._select(only)
        step = self.counters.step
        metrics, counts, norm = self._repeat_until_it_fits(
            lambda: self._sum_gradient(loss_function, size, f"computing step {step}", read_ahead),
            f"in step {step}; every rank repeats the batch with",
        )
        loss, norm = counts[LOSS] / counts[ROWS], norm / counts[ROWS]
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        factor = learning_rate(step, self.train.steps, self.optim)
        if is_finite:
            self._gradients.mul_(min(1.0, self.optim.clip_norm / (norm + 1e-6)) / counts[ROWS])
            self._apply(factor, only)
            self.counters.num_skipped_in_row = 0
        else:
            self._skip(loss)
        self.counters.step = self.ranks.activity.step = step + 1
        return Update(is_finite, loss, norm, int(counts[ROWS]), factor, metrics, counts[STOP] > 0)

    # ---------------------------------------------------------------- gradients

    def _sum_gradient(
        self, loss_function: LossFunction, size: int, doing: str, read_ahead: ReadAhead = read_nothing
    ) -> Gradient:
        """The gradient of the sum of the loss over the rows of all ranks. A collective."""
        with self.ranks.phase(doing):
            metrics, cause = self._backward(loss_function, size, read_ahead)
        with self.ranks.activity.waiting("summing gradients"):
            self._counts[SQUARES] = self.strategy.squares(self._gradients)
            if self.ranks.world > 1:
                summed = self.strategy.to_sum(self._buffer, self._counts)
                wait_for(dist.all_reduce(summed, async_op=True), self.ranks.device)
            norm = self.strategy.norm(self._gradients, self._counts[SQUARES])
            norm, *counts = torch.cat((norm[None], self._counts)).tolist()
        if counts[FATAL]:
            self.ranks.raise_if_any(cause, doing)
        return Gradient(metrics, counts, norm)

    def _backward(
        self, loss_function: LossFunction, size: int, read_ahead: ReadAhead = read_nothing
    ) -> tuple[list, str | None]:
        """Fill the buffer with this rank's counts and gradients; (metrics, cause of a failure).

        `read_ahead` is called when a GPU has all its work.
        """
        self._buffer.zero_()
        metrics, loss_sum, status, cause = [], 0.0, None, None
        try:
            for first in range(0, size, self.counters.micro_batch):
                rows = slice(first, min(first + self.counters.micro_batch, size))
                num_rows = rows.stop - rows.start
                with self.strategy.synchronised(rows.stop == size):
                    loss, values = self.strategy.loss(loss_function, rows)
                    loss = loss.float() * num_rows
                    (loss * self.strategy.scale).backward()
                loss_sum = loss_sum + loss.detach()
                metrics += [
                    (name, torch.as_tensor(value).detach().float(), num_rows)
                    for name, value in values.items()
                ]
            read_ahead(slice(0, self.counters.micro_batch))
        except Exception as error:
            status, cause = self._status_of(error)
        loss = values = None  # the graph of a failed pass would keep its memory
        self._counts[LOSS], self._counts[ROWS] = loss_sum, size
        self._counts[STOP] = float(self.ranks.activity.stop_signal != 0)
        if status is not None:
            self._counts[status] = 1.0
        return metrics, cause

    def _apply(self, factor: float, only: str | None = None) -> None:
        """The optimizer's step. After a failure in it some weights may have changed, so none are kept."""
        scale_lr(self.optimizer, factor)
        try:
            self.optimizer.step(only=only)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            where = "in the optimizer's step, which may have changed some of the weights"
            raise self._memory_error(where) from error
        self.ema.update()

    # ---------------------------------------------------------------- failures, handled alike on all ranks

    def _repeat_until_it_fits(self, attempt: Callable[[], Gradient], then: str) -> Gradient:
        """attempt(), repeated with half the micro-batch while any rank runs out of memory in it."""
        random_state = torch_random_state(self.ranks.device)
        while num_short := int((gradient := attempt()).counts[OUT_OF_MEMORY]):
            self._halve(num_short, then)
            set_torch_random_state(random_state, self.ranks.device)
        return gradient

    def probe(self, loss_function: LossFunction, size: int) -> None:
        """Lower the micro-batch, on all ranks, until a pass of it fits; see `Run.probe`."""
        if self.ranks.device.type in PROBED and self.counters.step == 0:
            self._probe(loss_function, size)

    def _probe(self, loss_function: LossFunction, size: int) -> None:
        before, doing = self.counters.micro_batch, "looking for a micro-batch that fits"
        with torch.random.fork_rng([self.ranks.device] if self.ranks.device.type == "cuda" else []):
            self._repeat_until_it_fits(
                lambda: self._sum_gradient(loss_function, min(size, self.counters.micro_batch), doing),
                "before the first step; every rank tries",
            )
        if self.counters.micro_batch != before:
            self.notify(f"micro-batch {self.counters.micro_batch} fits (asked: {before})")

    def _status_of(self, error: Exception) -> tuple[int, str | None]:
        """(count that is set for all ranks, cause) of a failed pass. Raises if ranks cannot agree."""
        is_memory = is_out_of_memory(error)
        if not self.strategy.is_agreed:
            if is_memory:
                raise self._memory_error(self.strategy.why_alone) from error
            raise error
        return (OUT_OF_MEMORY, None) if is_memory else (FATAL, self.ranks.record(error))

    def _halve(self, num_ranks: int, then: str) -> None:
        """Halve the micro-batch on all ranks. Raises StageError if it is one row already."""
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        where = f"on {num_ranks} of {self.ranks.world} ranks"
        if self.counters.micro_batch == 1:
            raise self._memory_error(where, is_agreed=True)
        self.counters.micro_batch = max(1, self.counters.micro_batch // 2)
        self.notify(f"WARNING: out of memory {where} {then} a micro-batch of {self.counters.micro_batch}")

    def _memory_error(self, where: str, is_agreed: bool = False) -> StageError:
        """The error that ends all ranks. The next start takes half the micro-batch, if it is above one."""
        now = self.counters.micro_batch
        cause = f"out of memory with a micro-batch of {now} {where}"
        if now == 1:
            advice = f"Make {self.ranks.folder.stage}.model smaller, or use a device with more memory."
            return StageError(cause, "out_of_memory", advice, is_agreed)
        self.ranks.folder.note(
            f"{MEMORY}/rank{self.ranks.rank}.json",
            {"micro_batch": now // 2, "micro_batch_asked": self.train.micro_batch},
        )
        advice = "The same command continues from the last checkpoint with half the micro-batch."
        return StageError(cause, "memory", advice, is_agreed)

    def _skip(self, loss: float) -> None:
        """Count a non-finite update. Raises StageError after max_skips in a row."""
        counters = self.counters
        counters.num_skipped += 1
        counters.num_skipped_in_row += 1
        in_row = counters.num_skipped_in_row
        self.notify(
            f"WARNING: step {counters.step} skipped: loss {loss} or its gradient is not finite "
            f"({in_row} in a row)"
        )
        if in_row > self.train.max_skips:
            saved = "start (no checkpoint was written yet)"
            saved = saved if self.saved is None else f"checkpoint of step {self.saved}"
            raise StageError(
                f"{in_row} updates in a row were not finite, none was applied",
                "non_finite",
                NON_FINITE.format(saved=saved, section=self.ranks.folder.stage, doctor=make_target("doctor")),
            )

    # ---------------------------------------------------------------- state

    def exported(self) -> dict[str, Tensor]:
        """The averaged weights kept by `Run.keep_best`, else the last ones."""
        return self.best_weights if self.best_weights is not None else self.ema.averages

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state for a checkpoint: (equal on all ranks, of this rank)."""
        shared, own = self.strategy.split(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "ema": self.ema.state_dict(),
                "best_weights": self.best_weights,
            }
        )
        return shared | {"is_sharded": self.strategy.is_sharded, **asdict(self.counters)}, own

    def load(
        self, shared: dict[str, Any], own: dict[str, Any] | None, read_all: Callable[[], list[dict]]
    ) -> None:
        """Load what `state` returned. own: None if another number of ranks wrote it; read_all(): the own
        state of every rank.

        Raises ValueError, RuntimeError or KeyError if it belongs to another model.
        """
        place = (self.ranks.rank, self.ranks.world) if self.strategy.is_sharded else None
        shapes = sharding.shapes_of(self.model, self.optimizer)
        state = sharding.local_state(shared, own, read_all, shapes, place)
        current = self.model.state_dict()
        self.model.load_state_dict(
            {name: sharding.as_sharded(current[name], tensor) for name, tensor in state["model"].items()}
        )
        self.optimizer.load_state_dict(state["optimizer"])
        self.ema.load_state_dict(state["ema"])
        self.best_weights = state["best_weights"]
        if self.best_weights is not None:
            require_alike(self.best_weights, self.ema.averages, "average")
        saved = {name: shared.get(name, value) for name, value in vars(self.counters).items()}
        asked, micro_batch = saved.pop("micro_batch_asked"), saved.pop("micro_batch")
        vars(self.counters).update(saved)
        if asked == self.train.micro_batch:  # else the user has changed the setting
            self.counters.micro_batch = min(micro_batch, self.counters.micro_batch)
        self.saved = self.ranks.activity.step = self.counters.step


NO_TASK = (
    "an update of a model of several tasks got no task; expected the task of its loss, because the private "
    "gradients of all tasks use the same memory. Call it with only=TASK."
)
NON_FINITE = (
    "The same command continues from the {saved} at the same rates. Look at the data with {doctor}. Lower "
    "{section}.optim.muon_lr and adamw_lr in a run of another name (RUN= of make): a run keeps its rates."
)
