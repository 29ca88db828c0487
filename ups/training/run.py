"""One stage of a run: joins ranks, folder, updates, checkpoints and metrics.

The `for` stays in the script (train_operator.py), whose every turn calls `update` once.

Work that may fail on one rank runs in `agreed` (ups/training/ranks.py) or `update` (ups/training/update.py),
which raise on all ranks. The guard of ups_launch, if installed, covers the rest: a rank that is killed, hangs
or fails elsewhere. `main_guard` (ups/training/ending.py) ends the process.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ups.common.device import precision_in_words
from ups.common.files import file_hash, write_json
from ups.common.progress import Bar, position
from ups.config.load import to_dict
from ups.config.schema import Config, OptimConfig, TrainConfig
from ups.training.activity import EXIT_STOPPED, send_event
from ups.training.artifact import DONE, MODEL
from ups.training.checkpoint import Saving, seed_everything, sum_in_one_order
from ups.training.ending import Preempted
from ups.training.environment import check_launch, describe_environment, require_equal_facts, shared_facts
from ups.training.folder import StageFolder
from ups.training.ranks import Ranks
from ups.training.sharding import full_weights
from ups.training.strategies import LossFunction, is_fsdp_requested, require_fsdp, strategy_of
from ups.training.track import MetricsLog, Tracker, check_tracker
from ups.training.update import Counters, Updates
from ups.training.weights import write_weights
from ups_discovery.seeds import generator

LOCK_WAIT_S = 10.0  # for processes of an earlier start, which may still be ending


class Run:
    """One stage of one run, on this rank. Build it with `Run.start`."""

    # ---------------------------------------------------------------- start

    @classmethod
    def start(
        cls, config: Config, stage: str, train: TrainConfig, optim: OptimConfig, parents: dict[str, str]
    ) -> "Run":
        """Check everything, form the process group and open the stage's folder.

        parents: name -> fingerprint of the inputs of the stage. If the stage is finished with this
        configuration and these parents, `is_finished` is true and no process group is formed. Raises
        ValueError or FileExistsError, before any file is written, for a launch, configuration or parents that
        do not fit.
        """
        run = cls(config, stage, train, optim, parents)
        Ranks.active = run.ranks
        check_tracker(config.tracker)
        run.ranks.is_finished = run.folder.examine() is not None
        if run.is_finished:
            send_event("finished")
        else:
            check_launch(train, stage, run.ranks.world)
            run._open()
        return run

    def __init__(
        self, config: Config, stage: str, train: TrainConfig, optim: OptimConfig, parents: dict[str, str]
    ) -> None:
        self.config, self.stage, self.train, self.optim = config, stage, train, optim
        self.folder = StageFolder(config, stage, parents)
        self.directory = self.folder.path
        self.ranks = ranks = Ranks(self.folder, train.hang_s)
        self.agreed, self.print, ranks.close = ranks.agreed, ranks.print, self.close
        num_rows = -(-train.batch_size // ranks.world)
        self.counters = Counters(min(train.micro_batch, num_rows), train.micro_batch)
        self.metrics = MetricsLog(self.ranks, self.counters)
        self.model = self.updates = self.saving = self.bar = None  # until `attach` and `steps`
        self.accelerator: Accelerator | None = None  # until `start` joins the ranks
        self._is_updated, self.is_preempted = True, False

    # read by scripts
    device = property(lambda self: self.ranks.device)
    position = property(lambda self: position(self.stage, self.config.trained))
    is_finished = property(lambda self: self.ranks.is_finished)
    step = property(lambda self: self.counters.step)
    best_score = property(lambda self: self.counters.best_score)

    def _open(self) -> None:
        train, ranks, config = self.train, self.ranks, to_dict(self.config)
        self.accelerator = ranks.join(train.timeout_s)
        if self.device.type == "cuda":
            sum_in_one_order()
        # the first collective: a rank that is refused before it cuts off those that still join
        require_equal_facts(ranks.gather(shared_facts(config, self.folder.identity["parents"], self.stage)))
        if is_fsdp_requested(self.accelerator):
            require_fsdp(self.accelerator, train.batch_size, self.config.ddp.overlap)
        refusal = ranks.agreed(
            lambda: ranks.is_main and self.folder.take(LOCK_WAIT_S), "locking the stage directory"
        )
        if refusal := ranks.gather(refusal)[0]:
            raise FileExistsError(refusal)
        ranks.agreed(lambda: ranks.is_main and self._write_start(), "opening the stage directory")
        ranks.agreed(self._enter_folder, "looking for the stage directory")
        ranks.agreed(lambda: ranks.activity.open(self.directory / "heartbeat"), "writing the first heartbeat")
        self.folder.is_open = True
        ranks.status("running")
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        passes = math.ceil(train.batch_size / ranks.world / self.counters.micro_batch)
        precision = precision_in_words(train.precision, self.device)
        self.print(
            f"{self.position}: {self.directory} on {ranks.world} x {device}, precision {precision}; batch "
            f"{train.batch_size} = {ranks.world} processes x {passes} passes of at most "
            f"{self.counters.micro_batch}"
        )

    def _write_start(self) -> None:
        self.folder.begin(describe_environment(self.ranks.world, self.device))
        self.metrics.tracker = Tracker(
            self.directory, self.config.tracker, self.config.run.name, self.stage, to_dict(self.config)
        )

    def _enter_folder(self) -> None:
        self.folder.enter(self.ranks.rank)
        self.counters.micro_batch = self.folder.micro_batch(self.train.micro_batch, self.counters.micro_batch)

    # ---------------------------------------------------------------- model

    def seed_all(self) -> None:
        """Seed Python, NumPy and torch, equally on all ranks; call it before the model is built."""
        seed_everything(self.config.run.seed)

    def attach(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, copy rank 0's weights to all ranks, build optimizer and average, and
        resume from the newest intact checkpoint.

        Returns the same module. Raises DamagedError or StageError if there are checkpoints and none loads.
        """
        self.model = model.to(self.device)
        self.ranks.broadcast((*model.parameters(), *model.buffers()), "sending the first weights")
        seed_everything(generator(self.config.run.seed, "rank", self.ranks.rank).initial_seed())
        with self.ranks.activity.waiting("wrapping the model"):
            strategy = strategy_of(model, self.accelerator, self.config.ddp.overlap)
        self.updates = Updates(model, strategy, self.ranks, self.counters, self.train, self.optim)
        if not strategy.is_agreed:
            self.print(
                f"{strategy.mode}: a rank that runs out of memory or fails ends all of them; the same "
                f"command continues from the last checkpoint"
            )
        groups = self.updates.optimizer.param_groups
        num_muon = sum(p.numel() for group in groups if group["kind"] == "muon" for p in group["params"])
        self.print(f"{sum(p.numel() for p in model.parameters())} parameters, {num_muon} of them under Muon")
        self.saving = Saving(self.ranks, self.updates, self.metrics, self.train)
        self.saving.resume()
        return model

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Around validation: the model has its averaged weights, whole on every rank. Entering is a
        collective.
        """
        with self.updates.ema.swap():
            self._unshard()
            try:
                yield
            finally:
                self.updates.strategy.reshard()

    def take_best(self) -> None:
        """Give the model the weights that `finish` exports, whole on every rank, after training. A
        collective.
        """
        self.updates.ema.write(self.updates.exported())
        self._unshard()

    def _unshard(self) -> None:
        with self.ranks.activity.waiting("gathering the weights"):
            self.updates.strategy.unshard()

    # ---------------------------------------------------------------- loop

    def steps(self) -> Iterator[int]:
        """Step numbers from the resumed one to train.steps; the body calls `update` once.

        Saves every save_every steps and at the end, after the body, so a checkpoint has the metrics and the
        validation of its step. After a SIGTERM or SIGINT on any rank: saves and raises SystemExit(143).
        """
        self.metrics.mark()
        bar = Bar(self.position, self.train.steps, self.ranks.is_main, initial=self.step, unit="step")
        with self.ranks.activity.in_loop(), bar as self.bar:
            while not self._is_over():
                self._is_updated = False
                yield self.step
                if not self._is_updated:
                    raise RuntimeError(
                        f"step {self.step} had no run.update; expected one in every turn of the loop."
                    )
                self.bar.update()
                if self.is_preempted or self._is_over() or self.is_due(self.train.save_every):
                    self.saving.save(is_required=self.is_preempted or self._is_over())
                if self.is_preempted and not self._is_over():
                    self.print(
                        f"told to stop (signal): saved step {self.step}; the same command continues from "
                        f"there"
                    )
                    raise Preempted(EXIT_STOPPED)

    def _is_over(self) -> bool:
        return self.step >= self.train.steps or self.counters.is_skipped

    def skip_loop(self, reason: str) -> None:
        """Take no step: `steps` ends at once, and the weights are exported as they are."""
        self.counters.is_skipped = True
        self.print(f"no training: {reason}")

    def is_due(self, every: int) -> bool:
        """Whether work done every `every` steps (0: never) is due now; always at the last step."""
        step = self.counters.step
        return every > 0 and (step % every == 0 or step == self.train.steps)

    def update(self, loss_function: LossFunction, size: int, only: str | None = None) -> bool:
        """One optimizer update over the global batch; whether the weights changed (False: skipped as
        non-finite).

        loss_function(rows): the mean loss over these rows of this rank's shard of the batch, and metrics
        likewise. It is called for each micro-batch of the `size` rows of this rank, must not communicate and
        may raise anything. The gradient is that of the mean over the global batch, for any sizes.
        only: the batch's task; private weights of other tasks stay unchanged. Raises StageError on all ranks.
        """
        if self._is_updated:
            raise RuntimeError(
                "run.update outside run.steps() or twice in a step; expected once in every turn of the loop."
            )
        done = self.updates.update(loss_function, size, only)
        self._is_updated, self.is_preempted = True, done.is_told_to_stop
        self.metrics.add(done)
        if done.is_finite:
            self.bar.lost(done.loss)
        if self.is_due(self.train.log_every):
            self.metrics.log_means(done)
        return done.is_finite

    # ---------------------------------------------------------------- validation

    def validated(self, metrics: dict[str, Any], text: str) -> None:
        """Log the metrics of a validation of the averaged weights, and print the text."""
        self.metrics.log({f"validation/{name}": value for name, value in metrics.items()})
        self.print(f"step {self.step}: {text}")

    def keep_best(self, score: float, second: float = math.inf) -> None:
        """Keep the averaged weights if `score` is the lowest so far, or equals it and `second` is the lowest.
        Rank 0's scores count. A collective."""
        score, second = map(float, self.ranks.gather((score, second))[0])
        counters = self.counters
        is_lower = second < counters.lowest_second
        is_better = score < counters.best_score or (score == counters.best_score and is_lower)
        counters.best_score = score if is_better else counters.best_score
        counters.lowest_second = second if is_lower else counters.lowest_second
        self.keep_if(is_better)

    def keep_if(self, is_better: bool) -> None:
        """`keep_best` with a decision instead of a score.

        Rank 0's decision counts. A collective. Checkpoints hold the kept weights; `finish` exports them.
        """
        if self.ranks.gather(bool(is_better))[0]:
            self.updates.best_weights = self.updates.ema.snapshot()

    # ---------------------------------------------------------------- end

    def finish(self, results: dict[str, Any], model_config: dict[str, Any]) -> None:
        """Export the best averaged weights (the last ones without validation) and mark the stage finished.

        Writes model.safetensors, config.json (`model_config`) and, last and atomically, done.json. A
        collective. Raises RuntimeError before the last step.
        """
        if not self._is_over():
            raise RuntimeError(
                f"finish at step {self.step} of {self.train.steps}; expected the loop to run to its end."
            )
        with self.ranks.activity.waiting("gathering the weights"):
            tensors = full_weights(self.model, self.updates.exported(), self.ranks.is_main)
        self.agreed(
            lambda: self.ranks.is_main and self._export(tensors, results, model_config), "writing the results"
        )
        self.ranks.is_finished = True
        send_event("finished")
        self.print(f"finished {self.stage}: {self.directory / DONE}")

    def _export(
        self, tensors: dict[str, Tensor], results: dict[str, Any], description: dict[str, Any]
    ) -> None:
        self.saving.require_ready()
        model, config = self.directory / MODEL, self.directory / "config.json"
        write_weights(model, tensors)
        write_json(config, description)
        self.folder.finish(
            {"model_sha256": file_hash(model), "config_sha256": file_hash(config)},
            {
                "step": self.step,
                "best_score": self.best_score if math.isfinite(self.best_score) else None,
                "num_skipped": self.counters.num_skipped,
                "results": results,
            },
        )
        self.ranks.status("finished")

    def close(self, exit_code: int) -> None:
        """Close the tracker with the true exit code and release everything large."""
        with self.ranks.phase("closing the tracker", self.train.timeout_s):
            self.metrics.close(exit_code)
        for parameter in self.model.parameters() if self.model is not None else ():
            parameter.grad = None
        self.model = self.updates = self.saving = self.bar = self.accelerator = None
