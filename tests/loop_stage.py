"""A tiny stage for the tests of ups/training/run.py, and the processes that run it.

Ranks are forked from a server that has imported torch once, so a run takes well under a second; each is a
process of its own with a hard time limit, its own exit code and a log file."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forced_fsdp
import torch
from safetensors.torch import load_file

import ups.training.activity
import ups.training.run
import ups.training.update
import ups.training.weights
from ups.common.place import STAGES
from ups.config.load import load_config
from ups.data.schedule import Batch, Schedule
from ups.training.ending import main_guard
from ups.training.run import Run
from ups.training.sharding import local_shard

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 60
SETTINGS = (
    "operator.train.steps=20 operator.train.batch_size=8 operator.train.micro_batch=8 "
    "operator.train.precision='no' operator.train.save_every=5 operator.train.log_every=1 "
    "operator.train.validate_every=4 operator.train.timeout_s=20 operator.train.hang_s=10 "
    "operator.optim.warmup_steps=3"
).split()


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("injected")


class Block(torch.nn.Module):
    """Parameters whose axes divide evenly among few ranks, or not at all."""

    is_repeated_layer = True

    def __init__(self, width: int):
        super().__init__()
        self.mix = torch.nn.Parameter(torch.randn(2, 3, width, width) / width)
        self.up, self.down = torch.nn.Linear(width, 25, bias=False), torch.nn.Linear(25, width)
        self.up.weight.is_hidden_matrix = self.down.weight.is_hidden_matrix = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.einsum("bi,smij->bj", x, self.mix)
        return x + self.down(torch.nn.functional.gelu(self.up(x + mixed)))


class Blocks(torch.nn.Module):
    """What the real networks have: blocks called twice and without gradients, frozen ones, heads of which a
    step uses one, an empty parameter."""

    def __init__(self):
        super().__init__()
        self.turn = 0
        self.into = torch.nn.Linear(6, 16)
        self.frozen = Block(16).requires_grad_(False)
        self.blocks = torch.nn.ModuleList(Block(16) for _ in range(2))
        self.heads = torch.nn.ModuleList(torch.nn.Linear(16, 1) for _ in range(2))
        self.none = torch.nn.Parameter(torch.zeros(0))
        self.register_buffer("scale", torch.ones(()))

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        h = self.into(x)
        with torch.no_grad():
            condition = self.frozen(self.blocks[0](h))
        for _ in range(2):
            for block in self.blocks:
                h = block(h + 0.1 * condition)
        return self.heads[self.turn % 2](h) * self.scale

    # as in the real ones, another way in than the loss takes
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.predict(x)


def build_model(has_blocks: bool = False) -> torch.nn.Module:
    if has_blocks:
        return Blocks()
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(16, 16),
        torch.nn.GELU(),
        torch.nn.Linear(16, 1),
    )
    model[3].weight.is_hidden_matrix = True
    return model


def inject(fault: dict, run: Run, loss: torch.Tensor, num_calls: int) -> torch.Tensor:
    """Do what `fault` says: kind, and optionally rank, step (`until` makes it a range) and call within the
    step."""
    if fault.get("kind") in (None, "disk", "return", "export"):
        return loss
    first, last = fault.get("step", 0), fault.get("until", fault.get("step", 0))
    if (
        fault.get("rank", run.ranks.rank) != run.ranks.rank
        or not first <= run.step <= last
        or num_calls != fault.get("call", num_calls)
    ):
        return loss
    kind = fault["kind"]
    if kind == "nan":
        return loss * float("nan")
    if kind == "memory":
        raise torch.OutOfMemoryError("injected")
    if kind == "memory_backward":
        return FailInBackward.apply(loss)
    if kind == "error":
        raise KeyError("injected cause")
    if kind == "one_sided":
        run.ranks.gather("alone")
        return loss
    if kind == "exit0":
        sys.exit(0)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM}[kind])
    return loss


def errors_of_nine(model: torch.nn.Module, held_out: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Squared errors of the rows that are this rank's, zeros elsewhere."""
    errors, mine = torch.zeros(9), slice(rank, None, world)
    errors[mine] = (model(held_out[mine]).squeeze(-1) - held_out[mine].square().sum(-1)).square()
    return errors


@main_guard()
def stage(root: str, overrides: list[str], fault: dict, parents: dict, options: dict) -> None:
    torch.set_num_threads(1)
    config = load_config(None, [f"run.root={root}", *SETTINGS, *overrides])
    if options.get("fsdp", False):
        forced_fsdp.force()
    if options.get("deaf", False):  # the reader of what is printed goes away, as a terminal that is closed
        ends = os.pipe()
        os.close(ends[0])
        os.dup2(ends[1], 1)
        os.dup2(ends[1], 2)
    if options.get("unwatched", False):  # as where ups_launch is not installed
        ups.training.activity.ups_launch = None
    if options.get("impatient", False):
        ups.training.run.LOCK_WAIT_S = 0.2
    run = Run.start(
        config, stage="operator", train=config.operator.train, optim=config.operator.optim, parents=parents
    )
    if run.is_finished:
        return run.print("nothing to do")
    run.seed_all()
    model = build_model(options.get("blocks", False))
    if not options.get("dropout", False) and not options.get("blocks", False):
        model[2].p = 0.0
    if options.get("double", False) and options.get("blocks", False):
        model.none.data = model.none.data.double()
    run.attach(model)
    data, held_out = torch.randn(49, 6, generator=torch.Generator().manual_seed(5)).split([40, 9])
    schedule = Schedule({"a": (40, 1)}, config.operator.train.batch_size, seed=config.run.seed)
    if fault.get("kind") == "disk" and fault["rank"] == run.ranks.rank:
        write, full = run.saving.checkpoints._write, fault["steps"]

        def fail(temporary: Path, *parts: dict) -> None:
            if run.step in full:
                raise OSError(28, "No space left on device")
            write(temporary, *parts)

        run.saving.checkpoints._write = fail

    def loss_of(batch: Batch) -> Callable[[slice], tuple[torch.Tensor, dict]]:
        calls = []

        def loss_function(rows: slice) -> tuple[torch.Tensor, dict]:
            calls.append(rows)
            x = data[batch.rows[rows]]
            if len(x) > options.get("fits", 99) and run.ranks.rank == run.ranks.world - 1:
                raise torch.OutOfMemoryError("injected")
            model.turn = run.step
            error = (model.predict if options.get("blocks", False) else model)(x).squeeze(
                -1
            ) - x.square().sum(-1)
            return inject(fault, run, error.square().mean(), len(calls)), {"absolute": error.abs().mean()}

        return loss_function

    if fault.get("kind") == "export":

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        ups.training.weights.save_file = full
    for step in run.steps():
        batch = schedule.batch(step).shard(run.ranks.rank, run.ranks.world)
        if options.get("slow", False):
            time.sleep(0.1)
        with (Path(root) / f"rows{run.ranks.rank}.jsonl").open("a") as file:
            file.write(json.dumps([step, batch.rows.tolist()]) + "\n")
        if step in options.get("twice", ()):  # and the checkpoint before it loaded between the two
            run.saving.save(is_required=True)
            run.update(loss_of(batch), size=len(batch))
            once = [local_shard(p).clone() for p in model.parameters()]
            run.agreed(lambda: run.saving.load(run.step - 1), "loading")
            assert run.step == step, "not loaded"
            assert not all(map(torch.equal, once, map(local_shard, model.parameters()))), "not loaded"
            run._is_updated = False
        run.update(loss_of(batch), size=len(batch))
        assert step not in options.get("twice", ()) or all(
            map(torch.equal, once, map(local_shard, model.parameters()))
        ), "ends differ"
        if run.is_due(config.operator.train.validate_every):
            with run.ema_weights(), torch.no_grad():
                model.eval()
                for _ in range(run.ranks.rank):  # ranks may call the model unequally often
                    model(data)
                errors = run.agreed(
                    lambda: errors_of_nine(model, held_out, run.ranks.rank, run.ranks.world), "validation"
                )
                model.train()
            score = float(run.ranks.reduce_sum(errors).mean())
            run.validated({"score": score}, f"score {score}")
            run.keep_best(*(options["scores"].pop(0) if "scores" in options else [score]))
        if fault.get("kind") == "return" and run.step == fault["step"]:
            return None
    if options.get("fsdp", False):
        run.take_best()
    digest = [float(p.detach().double().sum()) for p in model.parameters()]
    assert all(other == digest for other in run.ranks.gather(digest)), "ranks differ"
    run.finish({"digest": digest}, {"width": 16})


def run_script(module: str, arguments: list[str], before: Callable[[], object] | None = None) -> None:
    """Call main() of a script, after before()."""
    if before is not None:
        before()
    sys.argv = [f"{module}.py", *arguments]
    if status := importlib.import_module(module).main():
        sys.exit(status)


def _rank_process(log: str, environment: dict, target: Callable, arguments: tuple) -> None:
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "MASTER_")) or name in ("RANK", "WORLD_SIZE", "UPS_EXPECT_WORLD"):
            del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported
    target(*arguments)


def dying_at(step: int) -> Callable:
    """`Run.update`, in place of which it is killed before a step."""
    update = Run.update

    def update_or_die(run: Run, *rest: Any, **options: Any) -> None:
        if run.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        update(run, *rest, **options)

    return update_or_die


class Left:
    """What a stage left in its directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def json(self, name: str) -> dict:
        return json.loads((self.directory / name).read_text())

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    def logged(self, name: str) -> torch.Tensor:
        values = [line[name] for line in self.lines() if name in line]
        return torch.tensor(values, dtype=torch.float64)

    def losses(self) -> torch.Tensor:
        return self.logged("train/loss")

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.directory / "model.safetensors")


def same_end(one: Left, two: Left) -> None:
    """Bitwise: exported weights, results, and every logged number but the clock."""
    a, b = one.weights(), two.weights()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert one.json("done.json")["results"] == two.json("done.json")["results"]
    clocks, a, b = ("time", "steps_per_s", "processor_s", "memory_gib"), one.lines(), two.lines()
    for line in (*a, *b):
        for name in clocks:
            line.pop(name, None)
    assert a == b


class Outcome(Left):
    """What a launch left, with exit codes and logs by rank."""

    def __init__(self, codes: list[int], logs: list[str], directory: Path) -> None:
        super().__init__(directory)
        self.codes, self.logs = codes, logs


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment that a launcher gives to a rank on a CPU; empty for one process."""
    if world == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }


def free_port() -> int:
    """A port that nobody listens on and that no connection is given by chance, as those of bind(0) may be
    before we use them."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


_context = multiprocessing.get_context("forkserver")
# FSDP imports torch._dynamo
_context.set_forkserver_preload(["loop_stage", "torch._dynamo", *map("train_{}".format, STAGES)])


def start_ranks(
    root: Path,
    target: Callable,
    arguments_of: Callable[[int], tuple],
    world: int = 1,
    environment: dict | None = None,
) -> list[tuple[multiprocessing.Process, Path]]:
    """`world` processes that call target(*arguments_of(rank)), and their log files. All must be picklable."""
    root.mkdir(parents=True, exist_ok=True)
    # the server reads these when it starts
    os.environ["PYTHONPATH"] = ":".join(map(str, (HERE, HERE / "faults", HERE.parent)))
    os.environ["OMP_NUM_THREADS"] = "1"
    port, started = free_port(), []
    for rank in range(world):
        group = rank_environment(rank, world, port) | (environment or {})
        log = root / f"log{time.monotonic_ns()}.rank{rank}"
        arguments = (str(log), group, target, arguments_of(rank))
        process = _context.Process(target=_rank_process, args=arguments)
        process.start()
        started.append((process, log))
    return started


def end_ranks(
    started: list[tuple[multiprocessing.Process, Path]], timeout_s: float = TIMEOUT_S
) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of started processes. One that outlives the limit fails the test."""
    limit = time.monotonic() + timeout_s
    for process, _ in started:
        process.join(max(0.1, limit - time.monotonic()))
    hanging = [process for process, _ in started if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    texts = [log.read_text() if log.is_file() else "" for _, log in started]
    assert not hanging, "a rank hangs:\n" + "\n".join(texts)
    return [process.exitcode for process, _ in started], texts


def run_ranks(*arguments: Any, timeout_s: float = TIMEOUT_S, **options: Any) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of the processes of start_ranks(...)."""
    return end_ranks(start_ranks(*arguments, **options), timeout_s)


def run_scripts(root: Path, arguments: list[str], *modules: str, before: Callable | None = None) -> None:
    """`run_script` of scripts with the same arguments, each in a process of its own, which ends well."""
    for module in modules:
        given = (module, arguments, before)
        codes, logs = run_ranks(root, run_script, lambda _rank, given=given: given, timeout_s=300)
        assert codes == [0], logs


def launch(
    root: Path,
    *overrides: str,
    world: int = 1,
    fault: dict | None = None,
    parents: dict | None = None,
    options: dict | None = None,
    environment: dict | None = None,
) -> Outcome:
    """Run the stage on `world` ranks."""
    parents = {"cache": "c0ffee"} if parents is None else parents

    def arguments_of(rank: int) -> tuple:
        return str(root), [*overrides], fault or {}, parents, options or {}

    codes, logs = run_ranks(root, stage, arguments_of, world, environment)
    return Outcome(codes, logs, root / "default" / "operator")
