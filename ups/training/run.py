"""One stage of one run, put together: ranks, folder, updates, checkpoints, log.

The `for` stays in the script:

    @main_guard
    def main():
        run = Run.start(config, "operator", config.operator.train, config.operator.optim, parents)
        if run.is_finished:
            return run.print("nothing to do")
        run.seed_all(); model = run.attach(build(config))
        for step in run.steps():
            batch = schedule.batch(step).shard(run.rank, run.world)
            run.update(lambda part: loss(model, batch, part), size=len(batch))
            if run.is_due(train.validate_every):
                run.validated(metrics, words)
                run.keep_best(score)
        run.finish(results)

What may fail on one rank is computed in `agreed` (ups/training/ranks.py) or in `update`
(ups/training/update.py), and all ranks hear of it; what no agreement can cover (a rank that is killed, hangs,
or fails where the others do not look) is the guard's (ups/training/guard.py); how it ends is
`main_guard` (ups/training/ranks.py).
"""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ups.common.files import file_hash, write_json
from ups.common.precision import in_words
from ups.common.progress import Bar, position
from ups.common.seeds import generator
from ups.config import Config, OptimConfig, TrainConfig, to_dict
from ups.training.checkpoint import write_weights
from ups.training.folder import DONE, MODEL, StageFolder
from ups.training.guard import EXIT_STOPPED
from ups.training.processes import tell
from ups.training.ranks import (
    Preempted,
    Ranks,
    describe_environment,
    differences,
    what_ranks_share,
)
from ups.training.saving import Log, Saving, seed_everything
from ups.training.strategies import LossFunction, gathered, plugin_of, strategy_of
from ups.training.track import Tracker, check_tracker
from ups.training.update import Meanwhile, Standing, Updates, nothing

LOCK_WAIT_S = 10.0  # for processes of an earlier start, which may be on their way out


def compile_blocks(model: nn.Module) -> None:
    """Compile, in place, every block of every ModuleList: few graphs, and parameter names stay as they
    are."""
    torch._dynamo.config.recompile_limit = 64  # every task has shapes of its own; the default is 8
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else it falls back to eager without a word
    for blocks in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for block in blocks:
            block.compile()


class Run:
    """One stage of one run, on this rank. Build it with `Run.start`."""

    # ---------------------------------------------------------------- start

    @classmethod
    def start(
        cls, config: Config, stage: str, train: TrainConfig, optim: OptimConfig, parents: dict[str, str]
    ) -> "Run":
        """Check everything, form the process group and open the stage directory.

        parents: name -> fingerprint of what the stage is made from. If the stage is finished with this
        configuration and these parents, `is_finished` is set and no process group is formed. Raises
        ValueError or FileExistsError for a launch, configuration or parents that do not fit, before any file
        is made.
        """
        run = cls(config, stage, train, optim, parents)
        Ranks.active = run.ranks
        check_tracker(config.tracker)
        run.ranks.is_finished = run.folder.examine() is not None
        if run.is_finished:
            tell("finished")
        else:
            run.ranks.check(train)
            run._open()
        return run

    def __init__(
        self, config: Config, stage: str, train: TrainConfig, optim: OptimConfig, parents: dict[str, str]
    ) -> None:
        self.config, self.stage, self.train, self.optim = config, stage, train, optim
        self.folder = StageFolder(config, stage, parents)
        self.directory = self.folder.path
        self.ranks = ranks = Ranks(self.folder, train.hang_s)
        self.rank, self.world, self.is_main = ranks.rank, ranks.world, ranks.is_main
        self.agreed, ranks.close = ranks.agreed, self.close
        share = -(-train.batch_size // self.world)
        self.standing = Standing(min(train.micro_batch, share), train.micro_batch)
        self.numbers = Log(self.ranks, self.standing)
        self.model = self.updates = self.saving = self.bar = None  # until `attach` and `steps`
        self._is_updated, self.is_preempted = True, False

    # What scripts ask of the parts
    device = property(lambda self: self.ranks.device)
    position = property(lambda self: position(self.stage, self.config.trained))
    is_finished = property(lambda self: self.ranks.is_finished)
    step = property(lambda self: self.standing.step)
    best_score = property(lambda self: self.standing.best_score)

    def print(self, *values: Any) -> None:
        """Print on the main process, above the progress bar."""
        if self.is_main:
            tqdm.write(" ".join(map(str, values)), file=sys.stdout)
            sys.stdout.flush()

    def _open(self) -> None:
        train, ranks = self.train, self.ranks
        self.accelerator = ranks.join(train.precision, train.timeout_s)
        self._plugin = plugin_of(self.accelerator.state, train.batch_size, self.config.ddp.overlap)
        facts = what_ranks_share(to_dict(self.config), self.folder.identity["parents"], self.stage)
        if different := differences(ranks.gather(facts)):
            raise ValueError(
                f"the ranks do not agree: {'; '.join(different[:5])}; expected the same "
                f"configuration, parents and versions on all. Start every process with the same "
                f"command, files and environment."
            )
        refusal = ranks.agreed(
            lambda: self.is_main and self.folder.take(LOCK_WAIT_S), "locking the stage directory"
        )
        refusal, job = ranks.gather((refusal, str(time.time_ns())))[0]
        if refusal:
            raise FileExistsError(refusal)
        ranks.agreed(lambda: self.is_main and self._write_start(), "opening the stage directory")
        ranks.agreed(self._see_directory, "looking for the stage directory")
        ranks.agreed(
            lambda: ranks.guard.open(self.directory / "heartbeat", job), "writing the first heartbeat"
        )
        self.folder.is_open = True
        ranks.status("running")
        tell("open", directory=str(self.directory.absolute()))
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        passes = math.ceil(train.batch_size / self.world / self.standing.micro_batch)
        self.print(
            f"{self.position}: {self.directory} on {self.world} x {device}, precision "
            f"{in_words(train.precision, self.device)}; batch {train.batch_size} = {self.world} "
            f"processes x {passes} passes of at most {self.standing.micro_batch}"
        )

    def _write_start(self) -> None:
        self.folder.begin(describe_environment(self.world, self.device))
        self.numbers.tracker = Tracker(
            self.directory, self.config.tracker, self.config.run.name, self.stage, to_dict(self.config)
        )

    def _see_directory(self) -> None:
        self.folder.enter(self.rank)
        self.standing.micro_batch = self.folder.micro_batch(self.train.micro_batch, self.standing.micro_batch)

    # ---------------------------------------------------------------- model

    def seed_all(self) -> None:
        """Seed Python, NumPy and torch alike on all ranks; call it before the model is built."""
        seed_everything(self.config.run.seed)

    def attach(self, model: nn.Module) -> nn.Module:
        """Take over the model: device, equal weights, optimizer, average; then resume from the newest intact
        checkpoint.

        Returns the same module, on the device. Raises DamagedError or StageError if there are checkpoints and
        none loads.
        """
        self.model = model.to(self.device)
        self.ranks.broadcast((*model.parameters(), *model.buffers()), "sending the first weights")
        seed_everything(generator(self.config.run.seed, "rank", self.rank).initial_seed())
        if self.train.compile:
            compile_blocks(model)
        with self.ranks.guard.waiting("sharing the model out"):
            strategy = strategy_of(model, self._plugin, self.config.ddp.overlap, self.device, self.world)
        self.updates = Updates(model, strategy, self.ranks, self.standing, self.train, self.optim, self.print)
        if not strategy.is_agreed:
            self.print(
                f"{strategy.mode}: a rank that runs out of memory or fails ends all of them; the same "
                f"command continues from the last checkpoint"
            )
        groups = self.updates.optimizer.param_groups
        num_muon = sum(p.numel() for group in groups if group["kind"] == "muon" for p in group["params"])
        self.print(f"{sum(p.numel() for p in model.parameters())} parameters, {num_muon} of them under Muon")
        self.saving = Saving(self.ranks, self.updates, self.numbers, self.train, self.print)
        self.saving.resume()
        return model

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Inside, the model holds its averaged weights, all of them on every rank.

        Entering is a collective.
        """
        with self.updates.ema.swap():
            self._hold_whole()
            try:
                yield
            finally:
                self.updates.strategy.share_out()

    def take_best(self) -> None:
        """From here on the model holds what `finish` exports, whole on every rank; nothing is trained after
        it. A collective.
        """
        self.updates.ema.write(self.updates.exported())
        self._hold_whole()

    def _hold_whole(self) -> None:
        with self.ranks.guard.waiting("gathering the weights"):
            self.updates.strategy.hold_whole()

    # ---------------------------------------------------------------- loop

    def steps(self) -> Iterator[int]:
        """Step numbers from the resumed one to train.steps; one `update` per step.

        Saves every save_every steps and at the end, after the body has run, so that what was logged and
        validated in a step is in its checkpoint. After an agreed SIGTERM or SIGINT: saves and raises
        SystemExit(143).
        """
        self.numbers.mark()
        bar = Bar(self.position, self.train.steps, self.is_main, initial=self.step, unit="step")
        with self.ranks.guard.in_loop(), bar as self.bar:
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
                        f"told to stop (signal): saved step {self.step}; the same command continues "
                        f"from there"
                    )
                    raise Preempted(EXIT_STOPPED)

    def _is_over(self) -> bool:
        return self.step >= self.train.steps or self.standing.is_stopped_early

    def is_due(self, every: int) -> bool:
        """Whether something done every `every` steps (0: never) is due now; always at the last step."""
        return every > 0 and (self.step % every == 0 or self.step == self.train.steps)

    def update(
        self, loss_function: LossFunction, size: int, meanwhile: Meanwhile = nothing, only: str | None = None
    ) -> bool:
        """One optimizer update over the global batch; whether the weights changed (False: skipped as
        non-finite).

        loss_function(rows) -> (mean loss over these rows of this rank's share, metrics likewise). It is
        called for the micro-batches of the `size` rows of this rank and may raise anything; it must not
        communicate. The gradient is that of the mean over the global batch, whatever the shares.
        meanwhile(rows): what the host may do for the first rows of the next step while a GPU computes this
        one. only: the batch's task, the same on all ranks; what is another task's own stays as it is. Raises
        StageError on all ranks alike.
        """
        if self._is_updated:
            raise RuntimeError(
                "run.update outside run.steps() or twice in a step; expected once in every turn of the loop."
            )

        def with_whole_log(rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
            self.numbers.require_whole()
            return loss_function(rows)

        done = self.updates.update(with_whole_log, size, meanwhile, only)
        self._is_updated, self.is_preempted = True, done.is_told_to_stop
        self.numbers.count(done)
        if done.is_finite:
            self.bar.lost(done.loss)
        if self.is_due(self.train.log_every):
            self.numbers.log_means(done)
        return done.is_finite

    def probe(self, loss_function: LossFunction, size: int) -> None:
        """Before the first step: lower the micro-batch, on all ranks, until one pass fits; `update`'s
        arguments, largest task.

        Nothing else changes. A collective; does nothing where memory does not run out with an error, and
        after a resume.
        """
        self.updates.probe(loss_function, size)

    # ---------------------------------------------------------------- validation

    def validated(self, metrics: dict[str, Any], words: str) -> None:
        """Log what a validation of the averaged weights has found, and print it in words."""
        self.numbers.log({f"validation/{name}": value for name, value in metrics.items()})
        self.print(f"step {self.step}: {words}")

    def keep_best(self, score: float, second: float = math.inf) -> bool:
        """Keep the averaged weights if `score` is the lowest so far, or equal to it with the lowest `second`;
        whether they are kept. Rank 0's decide for all. A collective.

        After train.patience calls in which neither became lower (0: never) the loop ends.
        """
        score, second = map(float, self.ranks.gather((score, second))[0])
        standing = self.standing
        is_lower = second < standing.lowest_second
        is_better = score < standing.best_score or (score == standing.best_score and is_lower)
        standing.best_score = score if is_better else standing.best_score
        standing.lowest_second = second if is_lower else standing.lowest_second
        return self.keep_if(is_better, is_lower)

    def keep_if(self, is_better: bool, is_promising: bool = False) -> bool:
        """`keep_best` for a decision in place of a score; best_score stays what it is. Promising weights do
        not count against patience.

        Rank 0's decides. A collective. What is kept is in the checkpoints too, and is what `finish` exports.
        """
        is_better = bool(self.ranks.gather(bool(is_better))[0])
        standing = self.standing
        standing.num_without_better = 0 if is_better or is_promising else standing.num_without_better + 1
        if is_better:
            self.updates.best_weights = self.updates.ema.snapshot()
        elif self.train.patience and standing.num_without_better >= self.train.patience:
            standing.is_stopped_early = True
            self.print(
                f"stopping early at step {self.step}: {standing.num_without_better} validations "
                f"without a better score"
            )
        return is_better

    # ---------------------------------------------------------------- end

    def finish(self, results: dict[str, Any], model_config: dict[str, Any]) -> None:
        """Export the best averaged weights (the last ones if nothing was validated) and mark the stage
        finished.

        Writes model.safetensors, config.json (`model_config`) and, last and atomically,
        done.json. A collective. Raises RuntimeError if training did not come to its end.
        """
        if not self._is_over():
            raise RuntimeError(
                f"finish at step {self.step} of {self.train.steps}; expected the loop to run to its end."
            )
        with self.ranks.guard.waiting("gathering the weights"):
            tensors = gathered(self.model, self.updates.exported(), self.is_main)
        self.agreed(
            lambda: self.is_main and self._export(tensors, results, model_config), "writing the results"
        )
        self.ranks.is_finished = True
        tell("finished")
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
                "num_skipped": self.standing.num_skipped,
                "results": results,
            },
        )
        self.ranks.status("finished")

    def close(self, exit_code: int) -> None:
        """Close the tracker with the true exit code and let go of everything large."""
        with self.ranks.phase("closing the tracker", self.train.timeout_s):
            self.numbers.close(exit_code)
        for parameter in self.model.parameters() if self.model is not None else ():
            parameter.grad = None
        self.model = self.updates = self.saving = self.bar = None
