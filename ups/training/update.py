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
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ups.common.files import is_out_of_memory
from ups.common.graphs import Captured, CudaGraphs
from ups.common.place import make_target
from ups.config.schema import OptimConfig, TrainConfig
from ups.training.folder import MEMORY
from ups.training.optim import EMA, aligned, build_optimizer, learning_rate, place_gradients, scale_lr
from ups.training.ranks import Ranks, StageError
from ups.training.strategies import Agreed, LossFunction, SplitLoss

STOP, OUT_OF_MEMORY, FATAL, ROWS, LOSS, SQUARES = range(6)  # counts before the gradients, summed over ranks
GRADIENTS = aligned(SQUARES + 1)  # the first number of the gradients in the buffer
WATCH_S = 0.02  # for which a rank on a CPU polls for the end of the all-reduce


def wait_for(work: dist.Work, device: torch.device) -> None:
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


@dataclass
class Counters:
    """Step, micro-batch, skips and scores of a run: equal on all ranks, part of every checkpoint.

    micro_batch_asked: the setting, of which micro_batch is what fits. best_score and lowest_second: of
    `Run.keep_best`. is_skipped: no step is taken.
    """

    micro_batch: int
    micro_batch_asked: int
    step: int = 0
    num_skipped: int = 0
    num_skipped_in_row: int = 0
    best_score: float = math.inf
    lowest_second: float = math.inf
    is_skipped: bool = False


@dataclass(frozen=True)
class Update:
    """The outcome of an update. loss: mean over the global batch; metrics: (name, mean, rows) of each pass on
    this rank; factor: on the learning rates; is_told_to_stop: whether any rank received a signal.
    """

    is_finite: bool
    loss: float
    norm: float
    num_rows: int
    factor: float
    metrics: list[tuple[str, Tensor, int]]
    is_told_to_stop: bool


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
    ) -> None:
        self.model, self.strategy, self.ranks = model, strategy, ranks
        self.counters, self.train, self.optim = counters, train, optim
        self.best_weights: dict[str, Tensor] | None = None
        self.saved: int | None = None  # step of the last checkpoint
        self.optimizer = build_optimizer(model, optim)
        self.ema = EMA(model, optim.ema_decay)
        # tasks can share a place for their private gradients only if this module sums over ranks
        self._flat, self._ends = place_gradients(model, ranks.device, SQUARES + 1, strategy.is_agreed)
        self._counts, self._buffer = self._flat[: SQUARES + 1], self._flat
        if ranks.device.type == "cuda" and strategy.is_agreed:  # else passes have collectives
            self.optimizer.call = Captured(CudaGraphs.of(ranks.device), ranks.print)
            model.call = self.optimizer.call.evaluate  # of `TaskNetwork`

    def update(self, loss_function: LossFunction, size: int, only: str | None = None) -> Update:
        """One update over the global batch, of which this rank has `size` rows; see `Run.update`.

        A collective. The gradient is computed again, with half the micro-batch, while any rank runs out of
        memory.
        """
        if len(self._ends) > 1 and only is None:
            raise ValueError(NO_TASK)
        self._buffer = self._flat[: self._ends.get(only, self._ends[None])]  # what a step of this task uses
        step, doing = self.counters.step, f"computing step {self.counters.step}"
        random_state = torch_random_state(self.ranks.device)
        while True:
            with self.ranks.phase(doing):
                metrics, cause = self._backward(loss_function, size)
            with self.ranks.activity.waiting("summing gradients"):
                summed = self.strategy.to_sum(self._buffer, self._counts, GRADIENTS)
                if self.ranks.world > 1:
                    wait_for(dist.all_reduce(summed, async_op=True), self.ranks.device)
                norm = self.strategy.norm(self._buffer[GRADIENTS:], self._counts[SQUARES])
                norm, *counts = torch.cat((norm[None], self._counts)).tolist()
            if counts[FATAL]:
                self.ranks.raise_if_any(cause, doing)
            if not counts[OUT_OF_MEMORY]:
                break
            self._halve(int(counts[OUT_OF_MEMORY]))
            set_torch_random_state(random_state, self.ranks.device)
        loss, norm = counts[LOSS] / counts[ROWS], norm / counts[ROWS]
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        factor = learning_rate(step, self.train.steps, self.optim)
        if is_finite:
            scale = min(1.0, self.optim.clip_norm / (norm + 1e-6)) / counts[ROWS]
            self._buffer[GRADIENTS:].mul_(scale)
            self._apply(factor, only)
            self.counters.num_skipped_in_row = 0
        else:
            self._skip(loss)
        self.counters.step = self.ranks.activity.step = step + 1
        return Update(is_finite, loss, norm, int(counts[ROWS]), factor, metrics, counts[STOP] > 0)

    def _backward(self, loss_function: LossFunction, size: int) -> tuple[list, str | None]:
        """Fill the buffer with this rank's counts and gradients; (metrics, cause of a failure)."""
        self._buffer.zero_()
        metrics, status, cause = [], None, None
        try:
            if self.ranks.unreported is not None:
                raise self.ranks.unreported
            for first in range(0, size, self.counters.micro_batch):
                rows = slice(first, min(first + self.counters.micro_batch, size))
                num_rows = rows.stop - rows.start
                if self.strategy.is_agreed and isinstance(loss_function, SplitLoss):
                    given = loss_function.compute, num_rows, *loss_function.read(rows)
                    loss, values = self.optimizer.call(self._pass, *given)
                else:
                    with self.strategy.synchronised(rows.stop == size):
                        loss, values = self._pass(self.strategy.wrapped(loss_function), num_rows, rows)
                self._counts[LOSS].add_(loss)
                metrics += [
                    (name, torch.as_tensor(value).detach().float().clone(), num_rows)
                    for name, value in values.items()
                ]
        except Exception as error:
            is_memory = is_out_of_memory(error)
            if not self.strategy.is_agreed:  # the others are in a collective of this pass
                if is_memory:
                    raise self._memory_error(self.strategy.why_alone) from error
                raise
            status, cause = (OUT_OF_MEMORY, None) if is_memory else (FATAL, self.ranks.record(error))
        # filled: a number that is assigned to a place is copied from main memory, for which a GPU waits
        self._counts[ROWS].fill_(size)
        self._counts[STOP].fill_(self.ranks.activity.stop_signal != 0)
        if status is not None:
            self._counts[status].fill_(1)
        return metrics, cause

    def _pass(self, compute: Callable, num_rows: int, *arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradient of the loss summed over rows to the buffer; (that sum, metrics)."""
        loss, values = compute(*arguments)
        loss = loss.float() * num_rows
        (loss * self.strategy.scale).backward()
        return loss.detach(), values

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

    def _halve(self, num_ranks: int) -> None:
        """Halve the micro-batch on all ranks. Raises StageError if it is one row already."""
        if self.ranks.device.type == "cuda":
            self.optimizer.call.recorded.clear()  # graphs of larger passes keep their memory
            torch.cuda.empty_cache()
        where = f"on {num_ranks} of {self.ranks.world} ranks"
        if self.counters.micro_batch == 1:
            raise self._memory_error(where, is_agreed=True)
        self.counters.micro_batch = max(1, self.counters.micro_batch // 2)
        self.ranks.print(
            f"WARNING: out of memory {where} in step {self.counters.step}; every rank repeats the batch with "
            f"a micro-batch of {self.counters.micro_batch}"
        )

    def _memory_error(self, where: str, is_agreed: bool = False) -> StageError:
        """The error that ends all ranks. The next start takes half the micro-batch, if it is above one."""
        now = self.counters.micro_batch
        cause = f"out of memory with a micro-batch of {now} {where}"
        if now == 1:
            advice = f"Make {self.ranks.folder.stage}.model smaller, or use a device with more memory."
            return StageError(cause, "out_of_memory", advice, is_agreed)
        self.ranks.folder.write_if_open(
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
        self.ranks.print(
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

    def exported(self) -> dict[str, Tensor]:
        """The averaged weights kept by `Run.keep_best`, else the last ones."""
        return self.best_weights if self.best_weights is not None else self.ema.averages


NO_TASK = (
    "an update of a model of several tasks got no task; expected the task of its loss, because the private "
    "gradients of all tasks use the same memory. Call it with only=TASK."
)
NON_FINITE = (
    "The same command continues from the {saved} at the same rates. Look at the data with {doctor}. Lower "
    "{section}.optim.muon_lr and adamw_lr in a run of another name (RUN= of make): a run keeps its rates."
)
