"""Find settings for a task on validation, by the same search for our operator, the FNO and the U-Net.

A search takes SEARCH times the budget of one training (or --search seconds) of processor time of one thread.
For ours it tries backbone, patch, history, bases, batch, rates, depth and unrolling; for the rivals the lists
of this file. It never reads the test split.

The settings are kept with all trials in bench/out/tuned/, ours as an overlay for train_operator.py, too. A
search for the same data, start, clock and seed that was no shorter is not repeated. bench/compare.py and
others begin with it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from bench.entries import processor
from bench.ours import fit_bases, train_ours
from bench.rivals import (
    CLOCKS,
    KNOWN,
    Problem,
    Settings,
    Stopwatch,
    Trained,
    best_error,
    settings_for,
    train,
)
from bench.score import Split, error_of, rollout, with_cache
from bench.search import Changes, Trial, search
from ups.common.files import value_hash
from ups.config.command import DEFAULT_OVERLAY
from ups.config.load import load_config, to_dict
from ups.config.model import BASES
from ups.config.schema import Config
from ups.data.cache import open_cache
from ups.models.loss import is_worth_training
from ups.report.bench_rows import FOLDER, NETWORKS

OUT = FOLDER
SEARCH = 3.0  # seconds of a search per second of a training
OURS = ("ours", "ours_generic")
MODELS = (*OURS, *NETWORKS)
GENERIC = ("persistence", "propagator", "mean")  # bases that know no equation


# ---- what is tried -----------------------------------------------------------------------------------------


# of a rival on top of the best of them, the most promising first
COMMON = ({"lr": 4e-3}, {"loss": "change"}, {"lr": 1e-3}, {"loss": "field"})
TRANSIENT = ({"history": 4}, {"unroll_fraction": 0.0}, {"history": 2})
PLANE, FRAMES = 2, 4
OPTIM = ("operator.optim.muon_lr", "operator.optim.adamw_lr")
# backbones beside that of the configuration that may suit ours better, by dimension
KINDS: dict[int, tuple[dict, ...]] = {
    1: ({"kind": "fno", "width": 32, "modes": 24},),
    PLANE: ({"kind": "fno", "width": 32, "modes": 8}, {"kind": "unet", "width": 32}),
    3: ({"kind": "fno", "width": 12, "modes": 4}, {"kind": "unet", "width": 16}),
}
PATCH = {"fno": 1, "unet": 2}  # of these backbones


def sizes(settings: Changes) -> Changes:
    return {f"operator.model.{name}": value for name, value in settings.items()}


def batch_of(size: int) -> Changes:
    return {"operator.train.batch_size": size, "operator.train.micro_batch": size}


def overrides_of(changes: Changes) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


# ---- the models of a comparison ----------------------------------------------------------------------------


def train_rival(
    args: argparse.Namespace,
    config: Config,
    problem: Problem,
    val: Split,
    settings: Settings,
    seed: int,
    budget: float,
    enough: float = -math.inf,
    **more: Any,
) -> Trained:
    """Train one rival; its weights are selected on validation. more: of `train`."""

    def score(trained: Trained) -> float:
        scores, _ = rollout(trained, val, config.evaluate.batch_size)
        return error_of(scores, problem.is_steady)

    return train(problem, settings, budget, seed, score, CLOCKS[args.clock], args.device, enough, **more)


class Contestant:
    """A model of a comparison on the data of one configuration: what a search for it tries, and its training.

    Settings are whole ones of a rival (`rivals.Settings` as a dictionary), changes to the configuration of
    ours.
    """

    def __init__(self, name: str, config: Config, problem: Problem, val: Split, args: argparse.Namespace):
        self.name, self.config, self.problem, self.val, self.args = name, config, problem, val, args
        self.task, self.overrides = problem.name, args.overrides

    def settings(self) -> Changes:
        """Return what a search finds; without one (0 s) what it would start from."""
        return self.completed(self.found()["changes"] if search_seconds(self.args) else {})

    def found(self) -> dict[str, Any]:
        """Return the record of the search on these data; search if there is none."""
        seconds, budget, seed = search_seconds(self.args), self.args.budget, self.args.seeds[0]
        asked = {
            "data": open_cache(self.config, self.task).fingerprint,
            "clock": self.args.clock,
            "seed": seed,
            "start": value_hash(self.start())[:16],
        }
        path = OUT / "tuned" / f"{self.task}-{self.name}-{asked['data'][:8]}.json"
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if any(record.get(key) != value for key, value in asked.items()) or record["search_s"] < seconds:
            starts, changes, say = self.starts(), self.changes(), partial(print, flush=True)
            tried = f"{len(starts)} starts and {len(changes)} changes"
            say(f"{self.name}: {tried} in {seconds:g} s of {self.args.clock}")
            found = search(starts, changes, self.trial, seconds, budget, say)
            record = asked | {"search_s": seconds} | found
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1), encoding="utf-8")
            self.write_overlay(path.with_suffix(".yaml"), record)
        print(
            f"{self.name}: chosen on validation in {record['seconds']:.0f} s, {record['tried']} trials: "
            f"{record['changes'] or 'as it starts'} ({path})",
            flush=True,
        )
        return record

    def write_overlay(self, path: Path, record: dict[str, Any]) -> None:
        """Write settings for the stages, where they are some."""


class Network(Contestant):
    """A rival. All get physical context frames and parameters, and nothing else of the test trajectories."""

    def completed(self, changes: Changes) -> Changes:
        return dataclasses.asdict(settings_for(self.name, self.task, self.problem.ndim, changes))

    def start(self) -> Changes:
        return self.completed({})

    def starts(self) -> list[Changes]:
        return [{}, *KNOWN["starts"][self.name][self.problem.ndim]]

    def changes(self) -> list[Changes]:
        """Return single changes to the best start, the most promising first."""
        if self.problem.is_steady:
            return [change for change in COMMON if change.get("loss") != "change"]
        return [*COMMON, *(one for one in TRANSIENT if one.get("history", 1) <= self.problem.context)]

    def trial(self, changes: Changes, seconds: float, is_whole: bool) -> Trial:
        run = self.train(self.completed(changes), self.args.seeds[0], seconds)
        return Trial(best_error(run), run.steps, run.seconds)

    def train(self, settings: Changes, seed: int, budget: float, enough: float = -math.inf) -> Trained:
        """Train and return it with weights selected on validation. An error of at most `enough` there ends
        the training early."""
        given = (self.args, self.config, self.problem, self.val)
        return train_rival(*given, Settings(**settings), seed, budget, enough)


class Ours(Contestant):
    """Our operator. It may have the structure of an equation built in by its bases: this compares tools, not
    generic networks. ours_generic has only bases that know no equation: those that are configured, else
    persistence, or the mean of a steady task.

    Bases are fitted once per history, patch and candidates; the trial that needs the fit is charged, except
    for `starts`, because every training pays for some fit. A whole trial is a scaled-down training: the
    fraction of the budget that the fit takes is missing from its steps, too; if that is all of it, nothing
    remains to try.
    """

    def __init__(self, name: str, config: Config, problem: Problem, val: Split, args: argparse.Namespace):
        super().__init__(name, config, problem, val, args)
        self.kinds, self.fits, self.key = tuple(BASES), {}, f"task.{self.task}"
        if name == "ours_generic":
            self.kinds, bases = GENERIC, [one for one in config.task[self.task].base if one in GENERIC]
            only = bases or ["mean" if problem.is_steady else "persistence"]
            self.overrides = [*self.overrides, *overrides_of({f"{self.key}.base": only})]
            self.config = load_config(args.config, self.overrides)

    def completed(self, changes: Changes) -> Changes:
        return changes

    def start(self) -> Changes:
        return to_dict(self.config.operator) | to_dict(self.config.task[self.task])

    def starts(self) -> list[Changes]:
        """Return where the search starts: the network without a fitted base, with large and small patches
        and, if the task has them, four frames; the configuration; the same with four frames and with the base
        `equation`, if it is among the kinds. In 2D and 3D with small batches.

        If no base fits in 1D, one frame without a base is better by a third after training (compressible
        flow, 100 s), but neither of its two changes alone is; in a short trial the network on a fitted base
        is always ahead.
        """
        key, problem, now = self.key, self.problem, self.config.task[self.task]
        bare = {f"{key}.history": 1, f"{key}.base": ["mean" if problem.is_steady else "persistence"]}
        some, few = ({}, {}) if problem.ndim == 1 else (batch_of(8), batch_of(4))
        fine = {f"{key}.patch": max(1, now.patch // 2)}
        small = {} if problem.ndim <= PLANE else sizes({"width": 48, "depth": 2, "kernel_size": 3})
        longer = {f"{key}.history": FRAMES}
        has_frames = not problem.is_steady and problem.context >= FRAMES
        starts = [some | bare, few | bare | fine | small, *[some | bare | longer] * has_frames, some]
        if has_frames and now.history < FRAMES:
            starts.append(some | longer)  # a polynomial of four frames may be nearly exact
        if "equation" in self.kinds and "equation" not in now.base and not problem.is_steady:
            starts.append(some | {f"{key}.base": [*now.base, "equation"]})
        return starts

    def changes(self) -> list[Changes]:
        """Return changes to the best start, the most promising first: batches, frames, other backbones,
        single settings. The last add a base among the kinds, whose fit takes time.
        """
        key, problem, now = self.key, self.problem, self.config.task[self.task]
        rates = [
            {name: factor * getattr(self.config.operator.optim, name.split(".")[-1]) for name in OPTIM}
            for factor in (2.0, 0.5)
        ]
        unrolled = [] if problem.is_steady else [{"operator.unroll_fraction": 0.0}]
        counts = [] if problem.is_steady else [num for num in (2, FRAMES) if num <= problem.context]
        added = [
            {f"{key}.base": [*now.base, name]}
            for name in self.kinds
            if name not in (*now.base, "solver") and problem.is_steady in BASES[name].serves
        ]
        for change in added:
            if "transport" in change[f"{key}.base"] and not now.reach:
                # over three eighths of the grid, as its check proposes
                change[f"{key}.reach"] = 3 * min(problem.train.shape[3:]) // 8
        return [
            batch_of(8 if problem.ndim == 1 else 2),
            *({f"{key}.history": num} for num in counts),
            *(sizes(kind) | {f"{key}.patch": PATCH[kind["kind"]]} for kind in KINDS[problem.ndim]),
            sizes({"depth": 2}),
            *rates,
            *unrolled,
            sizes({"depth": 4}),
            *added,
        ]

    def configured(self, changes: Changes) -> Config:
        """Return the configuration with `changes`, with its own cache if they need another patch."""
        config = load_config(self.args.config, [*self.overrides, *overrides_of(changes)])
        if (patch := changes.get(f"{self.key}.patch")) is not None:
            cache = dataclasses.replace(config.cache, root=str(Path(config.cache.root) / f"patch{patch}"))
            config = with_cache(dataclasses.replace(config, cache=cache), self.task)
        return config

    def train(
        self, settings: Changes, seed: int, budget: float, enough: float = -math.inf, **given: Any
    ) -> Trained:
        """As that of a rival. given: of `train_ours`."""
        config, device, clock = self.configured(settings), self.args.device, CLOCKS[self.args.clock]
        return train_ours(config, self.task, budget, seed, device, clock, enough=enough, **given)

    def fitted(self, config: Config) -> tuple[Any, float, float]:
        """Return (head, its validation error, seconds of the fit)."""
        task, watch = config.task[self.task], Stopwatch(CLOCKS[self.args.clock])
        key = (task.history, task.patch, *task.base)
        if key not in self.fits:
            cache, device = open_cache(config, self.task), torch.device(self.args.device)
            self.fits[key] = (*fit_bases(cache, config, self.args.seeds[0], device, watch), watch())
        return self.fits[key]

    def trial(self, changes: Changes, seconds: float, is_whole: bool) -> Trial:
        begun, budget = len(self.fits), self.args.budget
        head, error, cost = self.fitted(self.configured(changes))
        charged = cost if len(self.fits) > begun and changes not in self.starts() else 0.0
        if cost >= budget:
            return Trial(math.inf, 0, charged)
        left = seconds * (1 - cost / budget) if is_whole else seconds
        run = self.train(changes, self.args.seeds[0], left, fitted=(copy.deepcopy(head), error))
        steps = run.steps if is_worth_training(head.scale) else 1  # a base that is exact needs none
        return Trial(best_error(run), steps, run.seconds + charged)

    def write_overlay(self, path: Path, record: dict[str, Any]) -> None:
        """Write our settings as an overlay for train_operator.py, with a comment on the search."""
        tree: dict[str, Any] = {}
        for key, value in record["changes"].items():
            *sections, name = key.split(".")
            part = tree
            for section in sections:
                part = part.setdefault(section, {})
            part[name] = value
        comment = (
            f"# {self.task}: chosen on the validation split (error {record['val']:.3g}) by {record['tried']} "
            f"trials in {record['seconds']:.0f} of {record['search_s']:g} s of {record['clock']},\n# seed "
            f"{record['seed']}, data {record['data'][:12]}, {record['made']}; laid over {self.args.config}\n"
        )
        path.write_text(comment + yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


def contestant(
    name: str, config: Config, problem: Problem, val: Split, args: argparse.Namespace
) -> Network | Ours:
    return (Ours if name in OURS else Network)(name, config, problem, val, args)


# ---- options -----------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser, budget: float | None = None) -> None:
    """Add the options of all benchmarks that train. budget: what --budget is if it is not given."""
    parser.add_argument(
        "--budget",
        type=float,
        default=budget,
        required=budget is None,
        help="seconds of training per model and seed",
    )
    parser.add_argument(
        "--search",
        type=float,
        help=f"seconds of a search per model ({SEARCH:g} times the budget); 0: none, usual settings",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="the first is that of the search")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--config", type=Path, default=DEFAULT_OVERLAY)


def search_seconds(args: argparse.Namespace) -> float:
    return SEARCH * args.budget if args.search is None else args.search


def key_of(args: argparse.Namespace, column: str, seed: int, data: str) -> dict[str, Any]:
    """Return what identifies the result of one training."""
    return {
        "column": column,
        "seed": seed,
        "data": data,
        "budget_s": args.budget,
        "search_s": search_seconds(args),
        "clock": args.clock,
        "processor": processor(args.device),
    }


def prepare(args: argparse.Namespace, clock: str = "") -> None:
    """Set clock (where it is not given, cpu: seconds of one thread, unless a GPU computes) and threads.
    Raises ValueError for times that are not positive.
    """
    args.clock = clock or ("cpu" if args.device == "cpu" else "wall")
    if args.budget <= 0 or search_seconds(args) < 0:
        raise ValueError(
            f"--budget {args.budget:g} --search {search_seconds(args):g}; expected the first above zero, the "
            f"second not below. Change them."
        )
    # processor seconds count all threads, and two runs side by side have a core each
    torch.set_num_threads(1)
