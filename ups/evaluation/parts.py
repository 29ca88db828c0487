"""The parts of a report: ensembles, priors and forecasts of its tasks. No part needs another, so two
processes compute them, the longest first."""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import cached_property, partial
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar

import torch

from ups.common.place import TRANSIENT
from ups.common.progress import note, show_notes_by
from ups.common.user_solver import solvers_of
from ups.config.schema import Config
from ups.evaluation import ensemble, forecast, gates, steady, transient, trust
from ups.evaluation.truth import open_truth
from ups.generative import validation
from ups.generative.corrector import Corrector, load_corrector
from ups.generative.residuals import SteadyResiduals, TransientResiduals
from ups.generative.sampling import Sampler
from ups.models.operator import load_operator
from ups.results import Entry

Found = tuple[Entry, Any, list[str]]  # of a task: its entry, what the report shows of it, and lines to print
NUM_WORKERS = 2  # a single task takes half of a report or more
NOTES_EVERY = 1.0  # seconds between looks at what the workers do
T = TypeVar("T")


class Inputs:
    """What the parts read, in one process. stages: those whose samples are assessed."""

    def __init__(self, config: Config, stages: list[str], device: torch.device):
        self.config, self.stages, self.device = config, stages, device
        self.truths = {name: open_truth(config, name) for name in config.evaluated}
        self.operator = load_operator(config.operator_dir, device, solvers_of(config))
        log = (config.operator_dir / "metrics.jsonl").read_text(encoding="utf-8")
        self.history = [json.loads(line) for line in log.splitlines()]

    @cached_property
    def samplers(self) -> dict[str, Sampler]:
        networks = [name for name in self.stages if name in TRANSIENT]
        return ensemble.load_samplers(self.config.run_dir, networks, self.device, self.operator)

    @cached_property
    def prior(self) -> Corrector:
        return load_corrector(self.config.run_dir / "steady", self.device, self.operator)


def train_seconds(history: list[dict]) -> float:
    """Wall-clock seconds in the training loop, from the log lines with a rate."""
    rated = [line for line in history if "steps_per_s" in line]
    steps = itertools.pairwise([0, *(line["step"] for line in rated)])
    return round(
        sum(
            (now - before) / max(line["steps_per_s"], 1e-9)
            for (before, now), line in zip(steps, rated, strict=True)
        ),
        1,
    )


def forecasts(inputs: Inputs, name: str) -> Found:
    """Errors of the operator's forecasts, and what their stated errors are worth."""
    config, operator, truth = inputs.config, inputs.operator, inputs.truths[name]
    settings, started = config.evaluate, time.perf_counter()
    entry, samples = forecast.assess_forecasts(operator, truth, settings, config.run.seed)
    words = f"{name}: {in_words(entry)}, in {time.perf_counter() - started:.1f} s"
    trust.assess_trust(entry, operator, truth, config)
    return entry, samples, [words]


def ensembles_of(inputs: Inputs, name: str) -> ensemble.Ensembles:
    residuals = TransientResiduals(inputs.operator, inputs.truths[name].cache)
    return ensemble.Ensembles(residuals, inputs.truths[name], inputs.samplers, inputs.config.run.seed)


def ensembles(inputs: Inputs, name: str) -> Found:
    """Scores of all ways to sample the future of a corrected task."""
    config, found = inputs.config, ensembles_of(inputs, name)
    serves = validation.default_sampler(config.run_dir, name)
    serves = "starts" if found.residuals.head.is_deterministic else serves
    entry, shown = transient.assess_transient(found, config.evaluate, serves)
    words = entry.facts["words"]
    words.append(validation.describe(config.run_dir, name))
    return entry, shown, words


def long_rollouts(inputs: Inputs, name: str) -> Found:
    """The rows of long rollouts of a corrected task."""
    return transient.assess_long(ensembles_of(inputs, name), inputs.config.evaluate), None, []


def priors(inputs: Inputs, name: str) -> Found:
    """Scores of the prior of a steady task."""
    config, truth, prior = inputs.config, inputs.truths[name], inputs.prior
    residuals = SteadyResiduals(inputs.operator, truth.cache, prior.heads[name].guess)
    entry, shown = steady.assess_steady(residuals, prior, truth, config.evaluate, config.run.seed)
    return entry, shown, entry.facts["words"]


# by section of the results; "long": rows of the ensembles
PARTS = {"ensembles": ensembles, "steady": priors, "long": long_rollouts, "tasks": forecasts}


def in_words(task: Entry) -> str:
    """The operator's error on a task, with the horizon of the forecasts."""
    error = task.value("operator", gates.error_of(task))
    relative = f", relative to the {task.facts.get('measure')}," * bool(task.facts.get("offset"))
    return (
        f"nRMSE {error['value']:.2e} [{error['low']:.2e}, {error['high']:.2e}]{relative} over "
        f"{task.number('', 'num_trajectories')} trajectories{gates.horizon_of(task.facts)}"
    )


# ---- processes

_inputs: Inputs | None = None  # of a worker


def _load(config: Config, stages: list[str], num_threads: int, notes: SimpleQueue) -> None:
    global _inputs
    torch.set_num_threads(num_threads)
    show_notes_by(notes.put)
    _inputs = Inputs(config, stages, torch.device("cpu"))


def _compute(section: str, name: str) -> Found:
    return PARTS[section](_inputs, name)


def _call(function: Callable[[], T]) -> T:
    return function()


class Workers:
    """Computes parts and draws sections: by the processes of `pool`, or here without one."""

    def __init__(self, inputs: Inputs, pool: ProcessPoolExecutor | None = None, notes: Any = None):
        self.inputs, self.pool, self.notes = inputs, pool, notes

    def compute(self, parts: list[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], Found]]:
        """((section, task), what was found) of every part, as soon as it is computed."""
        if self.pool is None:
            for section, name in parts:
                note(f"{section} of {name}")
                yield (section, name), PARTS[section](self.inputs, name)
            return
        waiting = {self.pool.submit(_compute, *part): part for part in parts}
        while waiting:
            done, _ = wait(waiting, NOTES_EVERY, FIRST_COMPLETED)
            while not self.notes.empty():
                note(self.notes.get())
            for one in done:
                yield waiting.pop(one), one.result()

    def call(self, functions: Iterable[Callable[[], T]]) -> list[T]:
        """The results of these functions, which must be picklable."""
        return list(map(_call, functions) if self.pool is None else self.pool.map(_call, functions))


@contextmanager
def workers(inputs: Inputs, pool_of: Callable[..., Any], num_cores: int) -> Iterator[Workers]:
    """Workers on a CPU of several cores if samples are assessed; otherwise, and on a GPU, this process.
    pool_of: `ups_solvers.processes.worker_pool`. Raises OSError if a process dies."""
    if inputs.device.type != "cpu" or num_cores < NUM_WORKERS or not inputs.stages:
        yield Workers(inputs)
        return
    notes = get_context("spawn").SimpleQueue()
    load = partial(_load, inputs.config, inputs.stages, num_cores // NUM_WORKERS, notes)
    try:
        with pool_of(NUM_WORKERS, load) as pool:
            yield Workers(inputs, pool, notes)
    except BrokenExecutor as error:
        raise OSError(
            "a process of the report died; expected its figures. If memory is short, lower "
            "evaluate.batch_size or evaluate.members, or allow one core (taskset -c 0): then none is started."
        ) from error
