"""The mechanics of a training stage: processes, agreed updates, averaging, checkpoints, logs, endings.

The `for` stays in the script:

    @main_guard
    def main():
        run = Run.start(config, stage="operator", train=config.operator.train, optim=config.operator.optim, parents=parents)
        if run.is_finished: return run.print("nothing to do")
        run.seed_all(); model = run.attach(build(config))
        for step in run.steps():
            batch = schedule.batch(step).share(run.rank, run.world)
            run.update(lambda part: loss(model, batch, part), size=len(batch))
            if run.is_due(train.validate_every):
                run.validated(metrics)
                run.keep_best(score)
        run.finish(results)

Never hang: the model is not wrapped in DDP, so forward and backward contain no collective. Each update is one all-reduce,
whatever happened on a rank: the flat gradient buffer with the counts of ranks that were told to stop, ran out of memory or
failed behind it. All ranks then decide the same: step, skip (non-finite), halve the micro-batch and repeat the same batch,
raise, or save and stop. docs/reliability.md has what it costs against DDP, and what every fault that was injected led to.
What no agreement can cover (a rank that is killed, hangs, or fails where the others do not look) is the guard's: ups/training/guard.py.
Where gradients are reduced in the backward pass (ddp.overlap, FSDP: ups/training/sharded.py) a rank's failure is of that kind.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from ups.config import Config, OptimConfig, TrainConfig, to_dict
from ups.files import file_hash, read_record, value_hash, write_json, write_sealed
from ups.progress import Bar, position
from ups.seeds import generator
from ups.training import ending, sharded
from ups.training.checkpoint import Checkpoints, write_weights
from ups.training.ending import Preempted, StageError, main_guard
from ups.training.environment import (
    asks_for_cpu,
    compile_blocks,
    describe_environment,
    differences,
    is_out_of_memory,
    random_state,
    set_random_state,
    set_torch_random_state,
    torch_random_state,
    wait_for,
    what_ranks_share,
)
from ups.training.events import tell
from ups.training.guard import Guard
from ups.training.optim import EMA, MuonAdamW, build_optimizer, learning_rate, place_gradients
from ups.training.sharded import Loss, Sharding
from ups.training.stage import DONE, MODEL, StageFolder
from ups.training.track import Tracker, check_tracker

STOP, OUT_OF_MEMORY, FATAL, ROWS, LOSS, SQUARES = range(6)  # what follows the gradients in the buffer; summed over ranks
MAX_FAILED_SAVES = 3  # in a row; a disk that stays full must not let days of work go unsaved
LOCK_WAIT_S = 10.0  # for processes of an earlier start, which may be on their way out
PROBED = ("cuda",)  # devices on which memory runs out with an error; a CPU's processes are killed instead

__all__ = ["Run", "StageError", "main_guard"]


class Run:
    """One stage of one run, on this rank. Build it with `Run.start`."""

    # ---------------------------------------------------------------- start

    @classmethod
    def start(
        cls,
        config: Config,
        stage: str,
        train: TrainConfig,
        optim: OptimConfig,
        parents: dict[str, str] | None = None,
        extra: dict[str, Any] | None = None,
        section: str | None = None,
    ) -> Run:
        """Check everything, form the process group and open the stage directory.

        parents: name -> fingerprint of what the stage is made from. extra: plain facts for environment.json, and the
        model's description (config.json) unless `finish` is given another. section: of the configuration (default: `stage`).
        If the stage is finished with this configuration and these parents, `is_finished` is set and no process group is
        formed. Raises ValueError or FileExistsError for a launch, configuration or parents that do not fit, before any file is
        made.
        """
        run = cls(config, stage, train, optim, parents or {}, extra or {}, section)
        ending.active = run
        check_tracker(config.tracker)
        run.is_finished = run.folder.examine() is not None
        if run.is_finished:
            tell("finished")
        else:
            run._check_launch()
            run._open()
        return run

    def __init__(self, config: Config, stage: str, train: TrainConfig, optim: OptimConfig, parents: dict[str, str],
                 extra: dict[str, Any], section: str | None = None) -> None:
        self.section = section or stage
        self.config, self.stage, self.train, self.optim, self.extra = config, stage, train, optim, extra
        self.folder = StageFolder(config, stage, self.section, parents)
        self.directory, self.identity = self.folder.path, self.folder.identity
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.is_finished = self.is_stopped_early = self.is_preempted = False
        self.step = self.num_skipped = self.num_skipped_in_row = self.num_failed_saves = self.num_without_better = 0
        self.best_score, self.best_weights = math.inf, None
        self.micro_batch = min(train.micro_batch, -(-train.batch_size // self.world))
        self.tracker: Tracker | None = None
        self.model: nn.Module | None = None
        self.optimizer: MuonAdamW | None = None
        self.ema: EMA | None = None
        self.bar: Bar | None = None
        self.guard: Guard | None = None
        self._window: dict[str, list] = {}  # name -> [sum of value * rows, rows] on this rank since the last log
        self._is_updated, self._is_open, self._is_recorded = True, False, False
        self._saved: int | None = None   # step of the last checkpoint
        self._log_error: OSError | None = None   # of rank 0; raised where all ranks hear of it
        self.sharding: Sharding | None = None
        self._overlapped: nn.Module | None = None   # what to call for a loss where gradients are reduced in the backward pass
        self._why = "with ddp.overlap, where ranks cannot agree to repeat a batch"

    @property
    def ranks(self) -> Run:
        """What speaks for all ranks: rank, world, device, gather, agreed, reduce_sum, reduce_mean."""
        return self

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def print(self, *values: Any) -> None:
        """Print on the main process, above the progress bar."""
        if self.is_main:
            tqdm.write(" ".join(map(str, values)), file=sys.stdout)
            sys.stdout.flush()

    def _check_launch(self) -> None:
        """Refuse launches that would not give what was asked for; knows nothing but the environment."""
        environ = os.environ
        expected = environ.get("UPS_EXPECT_WORLD")
        if expected is not None and int(expected) != self.world:
            raise ValueError(f"{expected} processes were asked for (UPS_EXPECT_WORLD), but this launch has {self.world}; "
                             "expected as many. Use accelerate launch --config_file with a file from accelerate_configs/.")
        is_from_accelerate = "ACCELERATE_MIXED_PRECISION" in environ
        if expected is None and is_from_accelerate and "MASTER_PORT" in environ and "WORLD_SIZE" not in environ:
            raise ValueError("accelerate was asked for several processes and started one (it does so for --cpu --num_processes "
                             "and for MULTI_CPU); expected WORLD_SIZE to be set. Use --config_file accelerate_configs/cpu2.yaml.")
        if self.train.precision not in ("no", "bf16"):
            raise ValueError(f"{self.section}.train.precision is {self.train.precision!r}; expected 'no' or 'bf16' (Accelerate "
                             "ignores fp16 on a CPU without a word). Change it.")
        if self.world > 1 and not torch.cuda.is_available() and not asks_for_cpu():
            raise ValueError(f"{self.world} processes were started for GPUs, but this machine shows none; each would believe it "
                             "is alone. Use --config_file accelerate_configs/cpu2.yaml, or export ACCELERATE_USE_CPU=true.")
        if self.train.batch_size < self.world:
            raise ValueError(f"{self.section}.train.batch_size is {self.train.batch_size}, the global batch; expected at "
                             f"least one row for each of the {self.world} processes. Raise it or use fewer processes.")

    def _open(self) -> None:
        is_cpu = asks_for_cpu() or not torch.cuda.is_available()
        group = InitProcessGroupKwargs(timeout=timedelta(seconds=self.train.timeout_s), **({"backend": "gloo"} if is_cpu else {}))
        self.guard = Guard(self.rank, self.world, self.stage, self.train.hang_s, self._on_guard)
        self.guard.start()
        with self.guard.waiting("joining the process group"):
            self.accelerator = Accelerator(mixed_precision=self.train.precision, cpu=is_cpu,
                                           kwargs_handlers=[group] if self.world > 1 else [])
        self.device = self.accelerator.device
        state = self.accelerator.state
        if (state.num_processes, state.process_index) != (self.world, self.rank):
            raise ValueError(f"Accelerate sees process {state.process_index} of {state.num_processes}; expected {self.rank} of "
                             f"{self.world} as the launcher says. Start with a file from accelerate_configs/.")
        self._plugin = sharded.plugin_of(state, self.train.batch_size, self.config.ddp.overlap)
        if state.mixed_precision != self.train.precision:
            raise ValueError(f"Accelerate computes in {state.mixed_precision!r}; expected {self.train.precision!r} as "
                             f"{self.section}.train.precision says. Unset ACCELERATE_MIXED_PRECISION.")
        if different := differences(self.gather(what_ranks_share(to_dict(self.config), self.identity["parents"], self.stage))):
            raise ValueError(f"the ranks do not agree: {'; '.join(different[:5])}; expected the same configuration, parents and "
                             "versions on all. Start every process with the same command, files and environment.")
        self.checkpoints = Checkpoints(self.directory / "state", self.train.keep, self.rank, self.agreed, self.identity)
        refusal = self.agreed(lambda: self.is_main and self.folder.take(LOCK_WAIT_S), "locking the stage directory")
        refusal, job = self.gather((refusal, str(time.time_ns())))[0]
        if refusal:
            raise FileExistsError(refusal)
        self.agreed(lambda: self.is_main and self._write_start(), "opening the stage directory")
        self.agreed(self._see_directory, "looking for the stage directory")
        self.agreed(lambda: self.guard.open(self.directory / "heartbeat", job), "writing the first heartbeat")
        self._is_open = True
        self._tell_machine("open", directory=str(self.directory.absolute()))
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        passes = math.ceil(self.train.batch_size / self.world / self.micro_batch)
        self.print(f"{position(self.stage)}: {self.directory} on {self.world} x {device}, precision {self.train.precision}; "
                   f"batch {self.train.batch_size} = {self.world} processes x {passes} passes of at most {self.micro_batch}")

    def _tell_machine(self, event: str, **facts: Any) -> None:
        """One word to the supervisor; every machine has one, so one rank of each speaks."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            tell(event, **facts)

    def _write_start(self) -> None:
        for path in self.directory.glob("errors/rank*.json"):   # of a rank that had to leave for want of memory
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                memory = {name: int(record[name]) for name in ("micro_batch", "micro_batch_asked") if name in record}
            except (ValueError, TypeError) as error:
                self.print(f"WARNING: {path} of an earlier start is not readable ({error}); it is set aside.")
                continue
            if memory:
                write_json(self.directory / "memory.json", memory)
        self.folder.begin({"extra": self.extra}, describe_environment(self.world, self.device))
        self.tracker = Tracker(self.directory, self.config.tracker, self.config.run.name, self.stage, to_dict(self.config))
        self._write_status("running")

    def _see_directory(self) -> None:
        self.folder.enter(self.rank)
        if (self.directory / "memory.json").is_file():
            memory = read_record(self.directory / "memory.json", "a micro-batch", "Delete it.", micro_batch=int,
                                 micro_batch_asked=int)
            if memory["micro_batch_asked"] == self.train.micro_batch:  # else the user asked for another since
                self.micro_batch = max(1, min(self.micro_batch, memory["micro_batch"]))

    def _write_status(self, status: str, **facts: Any) -> None:
        if self.is_main and self.folder.is_own():
            try:
                write_json(self.directory / "status.json", {"status": status, "step": self.step, "time": time.time(), **facts})
            except OSError as error:  # nothing is decided by this file
                print(f"WARNING: status.json was not written ({error})", file=sys.stderr, flush=True)

    # ---------------------------------------------------------------- agreement

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order. A collective."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with self.guard.waiting(f"gathering after {self.guard.doing}"):
            dist.all_gather_object(values, value)
        return values

    def phase(self, doing: str, limit_s: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Inside, heartbeats say `doing`; limit_s: longest time without progress there, if not train.hang_s.

        Reading a cache, a rollout and a sampler make progress by themselves; other long work calls ups.progress.beat.
        """
        return self.guard.phase(doing, limit_s)

    def agreed(self, function: Callable[[], Any], doing: str) -> Any:
        """function() on this rank; raises StageError on every rank, naming the culprit, if it raised on any. A collective.

        The function itself must not communicate: compute locally inside, reduce afterwards.
        """
        result = cause = None
        with self.phase(doing):
            try:
                result = function()
            except Exception as error:  # told to all ranks, which raise
                cause = self._record_error(error)
            self.guard.has_failed = cause is not None
            self._raise_if_any(cause, doing)
        return result

    def _raise_if_any(self, cause: str | None, doing: str) -> None:
        for rank, other in enumerate(self.gather(cause)):
            if other is not None:
                raise StageError(f"rank {rank} failed while {doing}: {other}", "error",
                                 f"See {self.directory / 'errors'}; the same command continues from the last checkpoint.")

    def _record_error(self, error: BaseException, kind: str = "error", **facts: Any) -> str:
        """Print the traceback, write errors/rankN.json; the cause as one line."""
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        self._write_error(kind, cause, text, **facts)
        return cause

    def _write_error(self, kind: str, cause: str, text: str, **facts: Any) -> None:
        if not self._is_open or not self.folder.is_own():
            return
        try:
            folder = self.directory / "errors"
            folder.mkdir(exist_ok=True)
            write_json(folder / f"rank{self.rank}.json", {"rank": self.rank, "stage": self.stage, "step": self.step, "kind": kind,
                                                         "cause": cause, "time": time.time(), **facts, "traceback": text})
            self._is_recorded = True
        except OSError as error:  # a full disk must not hide what happened
            print(f"WARNING: rank {self.rank} could not write its error ({error})", file=sys.stderr, flush=True)

    def _on_guard(self, code: int, kind: str, cause: str, stack: str) -> None:
        """In the guard's thread, before it ends this process."""
        self._write_error(kind, cause, stack)
        self._write_status("failed", kind=kind, cause=cause, exit_code=code)

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum of `tensor` over ranks (a new tensor, equal on all). A collective."""
        total = tensor.detach().clone()
        if self.world > 1:
            with self.guard.waiting("summing"):
                dist.all_reduce(total)
                if total.is_cuda:   # where a collective returns before it is done, and the wait would be elsewhere
                    torch.cuda.synchronize(total.device)
        return total

    def reduce_mean(self, tensor: Tensor) -> Tensor:
        """Mean of `tensor` over ranks. A collective; for unequal shares divide two `reduce_sum`s."""
        return self.reduce_sum(tensor) / self.world

    # ---------------------------------------------------------------- model

    def seed_all(self) -> None:
        """Seed Python, NumPy and torch alike on all ranks; call it before the model is built."""
        self._seed(self.config.run.seed)

    def _seed(self, seed: int) -> None:
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def attach(self, model: nn.Module) -> nn.Module:
        """Take over the model: device, equal weights, optimizer, average; then resume from the newest intact checkpoint.

        Returns the same module, on the device. Raises DamagedError or StageError if there are checkpoints and none loads.
        """
        self.model = model.to(self.device)
        if self.world > 1:
            with torch.no_grad(), self.guard.waiting("sending the first weights"):
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor, 0)
        self._seed(generator(self.config.run.seed, "rank", self.rank).initial_seed())
        if self.train.compile:
            compile_blocks(model)
        if self._plugin is not None:
            with self.guard.waiting("sharing the model out"):
                self.sharding = Sharding(model, self._plugin, self.device, self.world)
            self._overlapped, self._why = self.sharding.loss, "with a sharded model, whose ranks cannot agree to repeat a batch"
        self.optimizer = build_optimizer(model, self.optim)
        self.optimizer.allocate()
        self.ema = EMA(model, self.optim.ema_decay)
        self._place_gradients()
        if self.config.ddp.overlap and self.world > 1:
            self._overlapped = DistributedDataParallel(Loss(model), find_unused_parameters=True, forward_sync_buffers=False)
        if self._overlapped is not None:
            mode = "the model is sharded (FSDP)" if self.sharding else "gradients are reduced in the backward pass (ddp.overlap)"
            self.print(f"{mode}: a rank that runs out of memory or fails ends all of them; the same command continues from the "
                       "last checkpoint")
        num_parameters = sum(p.numel() for p in model.parameters())
        self.print(f"{num_parameters} parameters, {sum(p.numel() for p in self._muon_parameters())} of them under Muon")
        self._resume()
        return model

    def _muon_parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups if group["kind"] == "muon" for p in group["params"]]

    def _place_gradients(self) -> None:
        """One flat float32 buffer: every gradient is a view of it, the agreement's counts are its end."""
        self._flat = place_gradients(self.model, self.device, SQUARES + 1)
        self._gradients, self._counts = self._flat[: -SQUARES - 1], self._flat[-SQUARES - 1 :]

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Inside, the model holds its averaged weights, all of them on every rank. Entering is a collective."""
        with self.ema.swap():
            self._hold_whole()
            try:
                yield
            finally:
                if self.sharding:
                    self.sharding.share_out()

    def take_best(self) -> None:
        """From here on the model holds what `finish` exports, whole on every rank; nothing is trained after it. A collective."""
        self.ema.write(self._exported())
        self._hold_whole()

    def _exported(self) -> dict[str, Tensor]:
        return self.best_weights if self.best_weights is not None else self.ema.averages

    def _hold_whole(self) -> None:
        if self.sharding:
            with self.guard.waiting("gathering the weights"):
                self.sharding.hold_whole()

    # ---------------------------------------------------------------- loop

    def steps(self) -> Iterator[int]:
        """Step numbers from the resumed one to train.steps; one `update` per step.

        Saves every save_every steps and at the end, after the body has run, so that what was logged and validated in a
        step is in its checkpoint. After an agreed SIGTERM or SIGINT: saves and raises SystemExit(143).
        """
        self._logged_at, self._logged_step = time.perf_counter(), self.step
        bar = Bar(position(self.stage), self.train.steps, self.is_main, initial=self.step, unit="step")
        with self._in_loop(), bar as self.bar:
            while self.step < self.train.steps and not self.is_stopped_early:
                self._is_updated = False
                self.guard.step = self.step
                yield self.step
                if not self._is_updated:
                    raise RuntimeError(f"step {self.step} had no run.update; expected one in every turn of the loop.")
                self.bar.update()
                is_last = self.step >= self.train.steps or self.is_stopped_early
                if self.is_preempted or is_last or self.is_due(self.train.save_every):
                    self._save(is_required=self.is_preempted or is_last)
                if self.is_preempted and not is_last:
                    self.print(f"told to stop (signal): saved step {self.step}; the same command continues from there")
                    raise Preempted

    @contextlib.contextmanager
    def _in_loop(self) -> Iterator[None]:
        """Inside, a signal means: stop after this step, together, with a checkpoint. Elsewhere it ends the process."""
        self.guard.is_in_loop = True
        try:
            with self.phase("between updates"):
                yield
        finally:
            self.guard.is_in_loop = False

    def is_due(self, every: int) -> bool:
        """Whether something done every `every` steps (0: never) is due now; always at the last step."""
        return every > 0 and (self.step % every == 0 or self.step == self.train.steps)

    def update(self, loss_function: Callable[[slice], tuple[Tensor, dict[str, Tensor]]], size: int) -> bool:
        """One optimizer update over the global batch; whether the weights changed (False: skipped as non-finite).

        loss_function(rows) -> (mean loss over these rows of this rank's share, metrics likewise). It is called for the
        micro-batches of the `size` rows of this rank and may raise anything; it must not communicate. The gradient is that
        of the mean over the global batch, whatever the shares. Raises StageError on all ranks alike.
        """
        if self._is_updated:
            raise RuntimeError("run.update outside run.steps() or twice in a step; expected once in every turn of the loop.")
        random_state = torch_random_state(self.device)
        while True:
            metrics, counts, norm = self._try_pass(loss_function, size, f"computing step {self.step}")
            if not counts[OUT_OF_MEMORY]:
                break
            self._halve(int(counts[OUT_OF_MEMORY]), f"in step {self.step}; every rank repeats the batch with")
            set_torch_random_state(random_state, self.device)
        self.is_preempted = counts[STOP] > 0
        loss, norm = counts[LOSS] / counts[ROWS], norm / counts[ROWS]
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        factor = learning_rate(self.step, self.train.steps, self.optim)
        if is_finite:
            self._gradients.mul_(min(1.0, self.optim.clip_norm / (norm + 1e-6)) / counts[ROWS])
            self._apply(factor)
        self._count(is_finite, loss)
        self.step, self._is_updated = self.step + 1, True
        if is_finite:
            for name, value, rows in metrics:
                total = self._window.setdefault(name, [0.0, 0])
                total[0], total[1] = total[0] + value * rows, total[1] + rows
            if self.is_main:
                total = self._window.setdefault("loss", [0.0, 0])
                total[0], total[1] = total[0] + loss * counts[ROWS], total[1] + int(counts[ROWS])
                self.bar.lost(loss)
        if self.is_due(self.train.log_every):
            self._log_window(factor, norm)
        return is_finite

    def _try_pass(self, loss_function: Callable, size: int, doing: str) -> tuple[list, list[float], float]:
        """Gradients of the sum over the global batch; metrics of this rank, counts over all ranks and the gradient's norm."""
        with self.guard.phase(doing):
            metrics, cause = self._backward(loss_function, size)
        with self.guard.waiting("summing gradients"):
            if self.sharding:
                self._counts[SQUARES] = self._gradients.norm().square()
            if self.world > 1:
                wait_for(dist.all_reduce(self._flat if self._overlapped is None else self._counts, async_op=True), self.device)
            norm = self._counts[SQUARES].sqrt() if self.sharding else self._gradients.norm()
            norm, *counts = torch.cat((norm[None], self._counts)).tolist()
        if counts[FATAL]:
            self._raise_if_any(cause, doing)
        return metrics, counts, norm

    def _backward(self, loss_function: Callable, size: int) -> tuple[list[tuple[str, Tensor, int]], str | None]:
        """Gradients of the sum over rows into the buffer, counts behind them; metrics and the cause of a failure."""
        self._flat.zero_()
        metrics, loss_sum, status, cause = [], 0.0, None, None
        try:
            if self._log_error is not None:
                raise self._log_error
            for first in range(0, size, self.micro_batch):
                rows = slice(first, min(first + self.micro_batch, size))
                num_rows = rows.stop - rows.start
                with self._synchronised(rows.stop == size):
                    with self.accelerator.autocast():
                        loss, values = self._loss(loss_function, rows)
                    loss = loss.float() * num_rows
                    (loss if self._overlapped is None else loss * self.world).backward()  # DDP and FSDP divide by the world
                loss_sum = loss_sum + loss.detach()
                metrics += [(name, torch.as_tensor(value).detach().float(), num_rows) for name, value in values.items()]
        except Exception as error:  # reported through the buffer: all ranks take part in the all-reduce that follows
            status = OUT_OF_MEMORY if is_out_of_memory(error) else FATAL
            if self._overlapped is not None:
                if status == OUT_OF_MEMORY:
                    raise self._want_of_memory(self._why) from error
                raise
            if status == FATAL:
                cause = self._record_error(error)
        loss = values = None  # the graph of a failed pass would keep its memory
        self._counts[LOSS], self._counts[ROWS], self._counts[STOP] = loss_sum, size, float(self.guard.stop_signal != 0)
        if status is not None:
            self._counts[status] = 1.0
        return metrics, cause

    def _loss(self, loss_function: Callable, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        if self._overlapped is None:
            return loss_function(rows)
        return self._overlapped(loss_function, rows), getattr(self._overlapped, "module", self._overlapped).values

    def _synchronised(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Inside, DDP (if asked for) reduces gradients in the last pass and accumulates in those before; FSDP in every pass."""
        is_quiet = self._overlapped is not None and not self.sharding and not is_last
        return self._overlapped.no_sync() if is_quiet else contextlib.nullcontext()

    def _apply(self, factor: float) -> None:
        """The optimizer's step. What fails in it may have changed some weights and not others: nothing of it is kept."""
        self.optimizer.scale_lr(factor)
        try:
            self.optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self._want_of_memory("in the optimizer's step, which may have changed some of the weights") from error
        self.ema.update()

    def _want_of_memory(self, where: str) -> StageError:
        """The end of this rank, on which the others end too; the next start takes half the micro-batch."""
        if self.micro_batch == 1:
            return StageError(f"out of memory with a micro-batch of 1 {where}", "out_of_memory", self._smaller_model(), False)
        return StageError(f"out of memory with a micro-batch of {self.micro_batch} {where}", "memory",
                          "The same command continues from the last checkpoint with half the micro-batch.", False,
                          micro_batch=self.micro_batch // 2, micro_batch_asked=self.train.micro_batch)

    def _smaller_model(self) -> str:
        return f"Make {self.section}.model smaller, or use a device with more memory."

    def probe(self, loss_function: Callable[[slice], tuple[Tensor, dict[str, Tensor]]], size: int) -> None:
        """Before the first step: lower the micro-batch, on all ranks, until one pass fits; `update`'s arguments, largest task.

        Nothing else changes. A collective; does nothing where memory does not run out with an error, and after a resume.
        """
        if self.device.type not in PROBED or self.step > 0:
            return
        random_state, before = torch_random_state(self.device), self.micro_batch
        while True:
            _, counts, _ = self._try_pass(loss_function, min(size, self.micro_batch), "looking for a micro-batch that fits")
            set_torch_random_state(random_state, self.device)
            if not counts[OUT_OF_MEMORY]:
                break
            self._halve(int(counts[OUT_OF_MEMORY]), "before the first step; every rank tries")
        if self.micro_batch != before:
            self.print(f"micro-batch {self.micro_batch} fits (asked: {before})")

    def _halve(self, num_ranks: int, then: str) -> None:
        """All ranks: half the micro-batch after an agreed shortage of memory."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.micro_batch == 1:
            raise StageError(f"out of memory on {num_ranks} of {self.world} ranks with a micro-batch of 1", "out_of_memory",
                             self._smaller_model())
        self.micro_batch = max(1, self.micro_batch // 2)
        self.print(f"WARNING: out of memory on {num_ranks} of {self.world} ranks {then} a micro-batch of {self.micro_batch}")

    def _count(self, is_finite: bool, loss: float) -> None:
        if is_finite:
            self.num_skipped_in_row = 0
            return
        self.num_skipped, self.num_skipped_in_row = self.num_skipped + 1, self.num_skipped_in_row + 1
        self.print(f"WARNING: step {self.step} skipped: loss {loss} or its gradient is not finite "
                   f"({self.num_skipped_in_row} in a row)")
        if self.num_skipped_in_row > self.train.max_skips:
            saved = f"checkpoint of step {self._saved}" if self._saved is not None else "start (no checkpoint was written yet)"
            raise StageError(f"{self.num_skipped_in_row} updates in a row were not finite, none was applied", "non_finite",
                             f"The same command continues from the {saved}. Lower {self.section}.optim.muon_lr and adamw_lr, or "
                             f"look at the data with the doctor.")

    # ---------------------------------------------------------------- numbers

    def log(self, values: dict[str, Any]) -> None:
        """Write numbers at the current step to metrics.jsonl and the tracker (main process; a no-op elsewhere)."""
        if self.is_main and self._log_error is None:
            try:
                self.tracker.log(self.step, values)
            except OSError as error:  # a line is missing: no checkpoint may follow, and the others must hear of it
                self._log_error = error

    def _log_window(self, factor: float, norm: float) -> None:
        """Means over all rows of all ranks since the last log."""
        totals: dict[str, list[float]] = {}
        for window in self.gather({name: (float(total), rows) for name, (total, rows) in self._window.items()}):
            for name, (total, rows) in window.items():
                entry = totals.setdefault(name, [0.0, 0])
                entry[0], entry[1] = entry[0] + total, entry[1] + rows
        self._window.clear()
        now = time.perf_counter()
        rate = (self.step - self._logged_step) / max(now - self._logged_at, 1e-9)
        self._logged_at, self._logged_step = now, self.step
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None
        self.log({**{f"train/{name}": total / rows for name, (total, rows) in sorted(totals.items())},
                  "train/lr_factor": factor, "train/gradient_norm": norm, "train/skipped": self.num_skipped,
                  "train/micro_batch": self.micro_batch, "steps_per_s": round(rate, 3),
                  **({"memory_gib": round(memory, 3)} if memory is not None else {})})

    def validated(self, metrics: dict[str, Any]) -> None:
        """Log what a validation of the averaged weights has found."""
        self.log({f"validation/{name}": value for name, value in metrics.items()})

    def keep_best(self, score: float) -> bool:
        """Keep the averaged weights if `score` is the lowest so far; whether it is. Rank 0's decides for all. A collective.

        After train.patience calls without a better one (0: never) the loop ends.
        """
        score = float(self.gather(float(score))[0])
        is_better = score < self.best_score
        self.best_score = score if is_better else self.best_score
        return self._keep(is_better)

    def keep_if(self, is_better: bool) -> bool:
        """`keep_best` for a decision in place of a score; best_score stays what it is. Rank 0's decides. A collective."""
        return self._keep(bool(self.gather(bool(is_better))[0]))

    def _keep(self, is_better: bool) -> bool:
        """What is kept is in the checkpoints too, and is what `finish` exports."""
        self.num_without_better = 0 if is_better else self.num_without_better + 1
        if is_better:
            self.best_weights = self.ema.snapshot()
        elif self.train.patience and self.num_without_better >= self.train.patience:
            self.is_stopped_early = True
            self.print(f"stopping early at step {self.step}: {self.num_without_better} validations without a better score")
        return is_better

    # ---------------------------------------------------------------- save and resume

    def _save(self, is_required: bool) -> None:
        """Commit a checkpoint; a failure is reported and bounded, and fatal if the checkpoint is required."""
        self.agreed(self._ready_to_save, "looking for the stage directory and writing metrics.jsonl")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "ema": self.ema.state_dict(),
                 "best_weights": self.best_weights}
        shared = {
            "is_sharded": self.sharding is not None, "best_score": self.best_score, "step": self.step,
            "micro_batch": self.micro_batch, "micro_batch_asked": self.train.micro_batch,
            "num_skipped": self.num_skipped, "num_skipped_in_row": self.num_skipped_in_row,
            "num_without_better": self.num_without_better, "is_stopped_early": self.is_stopped_early,
        }
        own = {"random": random_state(self.device),
               "window": {name: [float(total), rows] for name, (total, rows) in self._window.items()}}
        if self.sharding:
            shared["model"], own["shards"] = sharded.split(state)
        else:
            shared |= state
        try:
            self.checkpoints.save(self.step, shared, own, {"world": self.world})
            self.num_failed_saves, self._saved = 0, self.step
        except StageError as error:
            self.num_failed_saves += 1
            if is_required or self.num_failed_saves >= MAX_FAILED_SAVES:
                advice = f"Free space on, or repair, the disk of {self.directory}; the last checkpoint is intact."
                raise StageError(f"{error} ({self.num_failed_saves} failed in a row)", "save", advice) from error
            self._is_recorded = False
            self.print(f"WARNING: {error}. Training goes on; the next try is after {self.train.save_every} more steps.")

    def _ready_to_save(self) -> None:
        self.folder.require_own()
        if self._log_error is not None:
            raise self._log_error
        if self.is_main:
            self.tracker.flush()

    def _resume(self) -> None:
        manifest = self.agreed(lambda: self.checkpoints.newest() if self.is_main else None, "looking for checkpoints")
        manifest = self.gather(manifest)[0]
        if manifest is not None:
            self.agreed(lambda: self.checkpoints.taken(manifest["step"], self._load),
                        f"loading the checkpoint of step {manifest['step']}")
            note = "" if manifest["world"] == self.world else f" (written by {manifest['world']} processes)"
            self._saved = self.step
            self.print(f"resumed at step {self.step}{note}")
        self.agreed(lambda: self.is_main and self.tracker.rewind(self.step), "cutting metrics.jsonl back to the resumed step")

    def _load(self, step: int) -> None:
        shared, own = self.checkpoints.read(step, self.world)
        state = sharded.joined(shared, own, lambda: self.checkpoints.parts(step), sharded.shapes_of(self.model, self.optimizer),
                               (self.rank, self.world) if self.sharding else None)
        sharded.load(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ema.load_state_dict(state["ema"])
        self.best_weights = state["best_weights"]
        if self.best_weights is not None:
            self.ema.check(self.best_weights)
        for name in ("best_score", "step", "num_skipped", "num_skipped_in_row", "num_without_better",
                     "is_stopped_early"):
            setattr(self, name, shared[name])
        if shared["micro_batch_asked"] == self.train.micro_batch:  # else the user asked for another since
            self.micro_batch = min(shared["micro_batch"], self.micro_batch)
        if own is not None:  # else another number of processes: the streams of `_seed` stay, batches are functions of step
            set_random_state(own["random"], self.device)
            self._window = own["window"]

    # ---------------------------------------------------------------- end

    def finish(self, results: dict[str, Any], model_config: dict[str, Any] | None = None) -> None:
        """Export the best averaged weights (the last ones if nothing was validated) and mark the stage finished.

        Writes model.safetensors, config.json (`model_config`, else `extra`) and, last and atomically, done.json. A
        collective. Raises RuntimeError if training did not come to its end.
        """
        if self.step < self.train.steps and not self.is_stopped_early:
            raise RuntimeError(f"finish at step {self.step} of {self.train.steps}; expected the loop to run to its end.")
        with self.guard.waiting("gathering the weights"):
            tensors = sharded.gathered(self.model, self._exported(), self.is_main)
        self.agreed(lambda: self.is_main and self._export(tensors, results, model_config or self.extra), "writing the results")
        self.is_finished = True
        self._tell_machine("finished")
        self.print(f"finished {self.stage}: {self.directory / DONE}")

    def _export(self, tensors: dict[str, Tensor], results: dict[str, Any], model_config: dict[str, Any]) -> None:
        self._ready_to_save()
        write_weights(self.directory / MODEL, tensors)
        write_json(self.directory / "config.json", model_config)
        record = {"model_sha256": file_hash(self.directory / MODEL), "config_sha256": file_hash(self.directory / "config.json"),
                  **self.identity}
        self.folder.require_own()
        write_sealed(self.directory / DONE, {
            "stage": self.stage, "run": self.config.run.name, "step": self.step, "fingerprint": value_hash(record), **record,
            "best_score": self.best_score if math.isfinite(self.best_score) else None, "num_skipped": self.num_skipped,
            "results": results,
        })
        self._write_status("finished")

    def close(self, exit_code: int) -> None:
        """Close the tracker with the true exit code and let go of everything large."""
        if self.tracker is not None:
            with self.phase("closing the tracker", self.train.timeout_s):
                try:
                    self.tracker.finish(exit_code)
                except OSError as error:  # a full disk; that lines are missing was raised by `log`
                    print(f"WARNING: {error} in closing {self.tracker.path}", file=sys.stderr, flush=True)
        if self.model is not None:
            for parameter in self.model.parameters():
                parameter.grad = None
        self.model = self.optimizer = self.ema = self.best_weights = self._flat = self._gradients = self._counts = None
        self.bar = self.tracker = self._overlapped = self.sharding = None
