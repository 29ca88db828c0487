"""Updates: one optimizer over one model, the same on all ranks, whatever happened on one of them.

With `Agreed` (ups/training/strategies.py) forward and backward pass contain no collective. Each update is one
all-reduce of a flat buffer: the counts of ranks that were told to stop, ran out of memory or failed, then the
gradients of what the tasks share and of the batch's task's own. All ranks then decide the same: step, skip
(non-finite), halve the micro-batch and repeat the same batch, raise, or save and stop. docs/reliability.md
has what it costs against DDP, and what every fault that was injected led to.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ups.common.files import is_out_of_memory
from ups.config import OptimConfig, TrainConfig
from ups.training import strategies
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

Meanwhile = Callable[[slice], object]  # what the host may do with the first rows of the next step
STOP, OUT_OF_MEMORY, FATAL, ROWS, LOSS, SQUARES = range(6)  # before the gradients; summed over ranks
WATCH_S = 0.02  # for which a rank on a CPU looks again and again whether a sum is there
PROBED = ("cuda",)  # devices on which memory runs out with an error; a CPU's processes are killed instead


def nothing(rows: slice) -> None:
    """A `Meanwhile`: there is nothing to do."""


def wait_for(work: torch.distributed.Work, device: torch.device) -> None:
    """Wait for a collective of small messages. On a CPU the core is offered to others for a moment before the
    rank sleeps.

    To be woken takes up to a scheduler's tick (4 ms) where gloo's threads share the core; looking took a
    third of the time.
    """
    until = time.perf_counter() + WATCH_S
    while device.type == "cpu" and not work.is_completed() and time.perf_counter() < until:
        os.sched_yield()
    work.wait()


def torch_random_state(device: torch.device) -> list[Tensor]:
    """torch's generators on this rank: CPU and, where used, the GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_torch_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


@dataclass
class Standing:
    """Where a run stands: plain numbers, equal on all ranks, in every checkpoint."""

    micro_batch: int
    micro_batch_asked: int
    step: int = 0
    num_skipped: int = 0
    num_skipped_in_row: int = 0
    num_without_better: int = 0
    best_score: float = math.inf
    lowest_second: float = math.inf
    is_stopped_early: bool = False


@dataclass(frozen=True)
class Update:
    """What became of an update.

    loss: mean over the global batch; metrics: (name, mean, rows) of this rank's passes.
    """

    is_finite: bool
    loss: float
    norm: float
    num_rows: int
    factor: float
    metrics: list[tuple[str, Tensor, int]]
    is_told_to_stop: bool


class Updates:
    """The updates of `model`, whose gradients, optimizer and average (`ema`) are here."""

    def __init__(
        self,
        model: nn.Module,
        strategy: Agreed,
        ranks: Ranks,
        standing: Standing,
        train: TrainConfig,
        optim: OptimConfig,
        say: Callable[..., None],
    ) -> None:
        self.model, self.strategy, self.ranks = model, strategy, ranks
        self.standing, self.train, self.optim, self.say = standing, train, optim, say
        self.best_weights: dict[str, Tensor] | None = None
        self.saved: int | None = None  # step of the last checkpoint
        self.optimizer = build_optimizer(model, optim)
        self.optimizer.allocate()
        self.ema = EMA(model, optim.ema_decay)
        # tasks' own gradients share a place where the sum over ranks is ours
        self._whole, self._ends = place_gradients(model, ranks.device, SQUARES + 1, strategy.is_agreed)
        self._counts = self._whole[: SQUARES + 1]
        self._begin(None)

    def _begin(self, only: str | None) -> None:
        """Of the buffer, what a step of this task needs: its own part and what is shared; None: all."""
        self._buffer = self._whole[: self._ends.get(only, self._ends[None])]
        self._gradients = self._buffer[aligned(SQUARES + 1) :]

    def update(
        self, loss_function: LossFunction, size: int, meanwhile: Meanwhile = nothing, only: str | None = None
    ) -> Update:
        """One update over the global batch, of which this rank has `size` rows; see `Run.update`."""
        if len(self._ends) > 1 and only is None:
            raise ValueError(
                "an update of a model of several tasks was told none; expected the task that "
                "its loss is of, for gradients of tasks share a place. Call it with only=TASK."
            )
        self._begin(only)
        step = self.standing.step
        metrics, counts, norm = self._try_until_it_fits(
            lambda: self._try(loss_function, size, f"computing step {step}", meanwhile),
            f"in step {step}; every rank repeats the batch with",
        )
        loss, norm = counts[LOSS] / counts[ROWS], norm / counts[ROWS]
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        factor = learning_rate(step, self.train.steps, self.optim)
        if is_finite:
            self._gradients.mul_(min(1.0, self.optim.clip_norm / (norm + 1e-6)) / counts[ROWS])
            self._apply(factor, only)
        self._count(is_finite, loss)
        self.standing.step = self.ranks.guard.step = step + 1
        return Update(is_finite, loss, norm, int(counts[ROWS]), factor, metrics, counts[STOP] > 0)

    def probe(self, loss_function: LossFunction, size: int) -> None:
        """Lower the micro-batch, on all ranks, until a pass of it fits; see `Run.probe`."""
        if self.ranks.device.type not in PROBED or self.standing.step > 0:
            return
        before = self.standing.micro_batch
        with torch.random.fork_rng([self.ranks.device] if self.ranks.device.type == "cuda" else []):
            self._try_until_it_fits(
                lambda: self._try(
                    loss_function, min(size, self.standing.micro_batch), "looking for a micro-batch that fits"
                ),
                "before the first step; every rank tries",
            )
        if self.standing.micro_batch != before:
            self.say(f"micro-batch {self.standing.micro_batch} fits (asked: {before})")

    # ---------------------------------------------------------------- gradients

    def _try_until_it_fits(self, attempt: Callable[[], tuple], then: str) -> tuple[list, list[float], float]:
        """What `attempt`, a call of `_try`, gives once no rank runs out of memory in it."""
        random_state = torch_random_state(self.ranks.device)
        while num_short := int((tried := attempt())[1][OUT_OF_MEMORY]):
            self._halve(num_short, then)
            set_torch_random_state(random_state, self.ranks.device)
        return tried

    def _try(
        self, loss_function: LossFunction, size: int, doing: str, meanwhile: Meanwhile = nothing
    ) -> tuple[list, list[float], float]:
        """Gradients of the sum over the global batch; metrics of this rank, counts over all ranks, the
        gradient's norm.
        """
        with self.ranks.phase(doing):
            metrics, cause = self._backward(loss_function, size, meanwhile)
        with self.ranks.guard.waiting("summing gradients"):
            self._counts[SQUARES] = self.strategy.squares(self._gradients)
            if self.ranks.world > 1:
                summed = self.strategy.to_sum(self._buffer, self._counts)
                wait_for(dist.all_reduce(summed, async_op=True), self.ranks.device)
            norm = self.strategy.norm(self._gradients, self._counts[SQUARES])
            norm, *counts = torch.cat((norm[None], self._counts)).tolist()
        if counts[FATAL]:
            self.ranks.raise_if_any(cause, doing)
        return metrics, counts, norm

    def _backward(
        self, loss_function: LossFunction, size: int, meanwhile: Meanwhile = nothing
    ) -> tuple[list, str | None]:
        """Gradients of the sum over rows into the buffer, counts before them; metrics and the cause of a
        failure. `meanwhile` is called once a GPU has been told all of it.
        """
        self._buffer.zero_()
        metrics, loss_sum, status, cause = [], 0.0, None, None
        try:
            for first in range(0, size, self.standing.micro_batch):
                rows = slice(first, min(first + self.standing.micro_batch, size))
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
            meanwhile(slice(0, self.standing.micro_batch))
        except Exception as error:  # told through the buffer: all ranks take part in the all-reduce
            is_memory = is_out_of_memory(error)
            if not self.strategy.is_agreed:
                if is_memory:
                    raise self._want_of_memory(self.strategy.why_alone) from error
                raise
            status, cause = (OUT_OF_MEMORY, None) if is_memory else (FATAL, self.ranks.record(error))
        loss = values = None  # the graph of a failed pass would keep its memory
        self._counts[LOSS], self._counts[ROWS] = loss_sum, size
        self._counts[STOP] = float(self.ranks.guard.stop_signal != 0)
        if status is not None:
            self._counts[status] = 1.0
        return metrics, cause

    def _apply(self, factor: float, only: str | None = None) -> None:
        """The optimizer's step.

        What fails in it may have changed some weights and not others: nothing of it is kept.
        """
        scale_lr(self.optimizer, factor)
        try:
            self.optimizer.step(only=only)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            where = "in the optimizer's step, which may have changed some of the weights"
            raise self._want_of_memory(where) from error
        self.ema.update()

    # ---------------------------------------------------------------- what all ranks decide alike

    def _halve(self, num_ranks: int, then: str) -> None:
        """All ranks: half the micro-batch after an agreed shortage of memory."""
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        where = f"on {num_ranks} of {self.ranks.world} ranks"
        if self.standing.micro_batch == 1:
            raise self._want_of_memory(where, is_agreed=True)
        self.standing.micro_batch = max(1, self.standing.micro_batch // 2)
        self.say(f"WARNING: out of memory {where} {then} a micro-batch of {self.standing.micro_batch}")

    def _want_of_memory(self, where: str, is_agreed: bool = False) -> StageError:
        """The end of all ranks; the next start takes half the micro-batch, where there is half a one."""
        now = self.standing.micro_batch
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

    def _count(self, is_finite: bool, loss: float) -> None:
        standing = self.standing
        standing.num_skipped_in_row = in_row = 0 if is_finite else standing.num_skipped_in_row + 1
        if is_finite:
            return
        standing.num_skipped += 1
        self.say(
            f"WARNING: step {standing.step} skipped: loss {loss} or its gradient is not finite "
            f"({in_row} in a row)"
        )
        if in_row > self.train.max_skips:
            section = self.ranks.folder.stage
            saved = (
                "start (no checkpoint was written yet)"
                if self.saved is None
                else f"checkpoint of step {self.saved}"
            )
            raise StageError(
                f"{in_row} updates in a row were not finite, none was applied",
                "non_finite",
                f"The same command continues from the {saved} at the same rates. Look at the "
                f"data with make doctor. Lower {section}.optim.muon_lr and adamw_lr in a run of "
                f"another name (RUN= of make): this one is refused with other rates.",
            )

    # ---------------------------------------------------------------- state

    def exported(self) -> dict[str, Tensor]:
        """The averaged weights that were kept (`Run.keep_best`), else the last ones."""
        return self.best_weights if self.best_weights is not None else self.ema.averages

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a checkpoint holds of a run: (equal on all ranks, of this one)."""
        shared, own = self.strategy.split(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "ema": self.ema.state_dict(),
                "best_weights": self.best_weights,
            }
        )
        return shared | {"is_sharded": self.strategy.is_sharded, **asdict(self.standing)}, own

    def load(
        self, shared: dict[str, Any], own: dict[str, Any] | None, of_all: Callable[[], list[dict]]
    ) -> None:
        """Take over what `state` gave; own: None if another number of ranks wrote it; of_all(): that of every
        rank.

        Raises ValueError, RuntimeError or KeyError if it belongs to another model.
        """
        mine = (self.ranks.rank, self.ranks.world) if self.strategy.is_sharded else None
        state = strategies.joined(shared, own, of_all, strategies.shapes_of(self.model, self.optimizer), mine)
        own_model = self.model.state_dict()
        self.model.load_state_dict(
            {name: strategies.like(own_model[name], tensor) for name, tensor in state["model"].items()}
        )
        self.optimizer.load_state_dict(state["optimizer"])
        self.ema.load_state_dict(state["ema"])
        self.best_weights = state["best_weights"]
        if self.best_weights is not None:
            require_alike(self.best_weights, self.ema.averages, "average")
        saved = {name: shared.get(name, value) for name, value in vars(self.standing).items()}
        asked, micro_batch = saved.pop("micro_batch_asked"), saved.pop("micro_batch")
        vars(self.standing).update(saved)
        if asked == self.train.micro_batch:  # else the user asked for another since
            self.standing.micro_batch = min(micro_batch, self.standing.micro_batch)
        self.saved = self.ranks.guard.step = self.standing.step
