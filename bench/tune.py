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
import hashlib
import json
import math
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from bench.baselines import CLOCKS, Problem, Stopwatch, Trained, train
from bench.rivals import KNOWN, Settings, settings_for
from bench.score import Split, headline, rollout, with_cache
from bench.search import Changes, Trial, search
from ups.config.command import DEFAULT_OVERLAY
from ups.config.load import load_config, to_dict
from ups.config.model import BASES
from ups.config.schema import Config
from ups.data.cache import open_cache
from ups.report.bench_rows import FOLDER
from ups.tasks import get_task

OUT = FOLDER
SEARCH = 3.0  # seconds of a search per second of a training
BASELINES = ("fno", "unet")
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


def rival_starts(family: str, problem: Problem) -> list[Changes]:
    return [{}, *KNOWN["starts"][family][problem.ndim]]


def rival_changes(problem: Problem) -> list[Changes]:
    """Return single changes to the best start, the most promising first."""
    if problem.is_steady:
        return [change for change in COMMON if change.get("loss") != "change"]
    return [*COMMON, *(change for change in TRANSIENT if change.get("history", 1) <= problem.context)]


def generic(changes: Changes, config: Config, task: str) -> Changes:
    """Return `changes` with generic bases only: those named there or in the configuration, else persistence,
    or the mean of a steady task.
    """
    key = f"task.{task}.base"
    names = [name for name in changes.get(key, config.task[task].base) if name in GENERIC]
    return changes | {key: names or ["mean" if get_task(task).is_steady else "persistence"]}


def sizes(settings: Changes) -> Changes:
    return {f"operator.model.{name}": value for name, value in settings.items()}


def batch_of(size: int) -> Changes:
    return {"operator.train.batch_size": size, "operator.train.micro_batch": size}


def our_starts(config: Config, problem: Problem, kinds: Collection[str] = tuple(BASES)) -> list[Changes]:
    """Return where the search of our operator starts: its network without a fitted base, with large and small
    patches and, if the task has them, four frames; the configuration; the same with four frames and with the
    base `equation`, if it is among `kinds`. In 2D and 3D with small batches.

    If no base fits in 1D, one frame without a base is better by a third after training (compressible flow,
    100 s), but neither of its two changes alone is; in a short trial the network on a fitted base is always
    ahead.
    """
    key, ndim, bases = f"task.{problem.name}", problem.ndim, config.task[problem.name].base
    bare = {f"{key}.history": 1, f"{key}.base": ["mean" if problem.is_steady else "persistence"]}
    some, few = ({}, {}) if ndim == 1 else (batch_of(8), batch_of(4))
    fine = {f"{key}.patch": max(1, config.task[problem.name].patch // 2)}
    small = {} if ndim <= PLANE else sizes({"width": 48, "depth": 2, "kernel_size": 3})
    starts = [some | bare, few | bare | fine | small]
    if not problem.is_steady and problem.context >= FRAMES:
        starts.append(some | bare | {f"{key}.history": FRAMES})
    starts.append(some)
    if not problem.is_steady and config.task[problem.name].history < FRAMES <= problem.context:
        starts.append(some | {f"{key}.history": FRAMES})  # a polynomial of four frames may be nearly exact
    if "equation" in kinds and "equation" not in bases and not problem.is_steady:
        starts.append(some | {f"{key}.base": [*bases, "equation"]})
    return starts


def our_changes(config: Config, problem: Problem, kinds: Collection[str] = tuple(BASES)) -> list[Changes]:
    """Return changes to the best start, the most promising first: batches, frames, other backbones, single
    settings. The last add a base among `kinds`, whose fit takes time.
    """
    now, key = config.task[problem.name], f"task.{problem.name}"
    rates = [
        {name: factor * getattr(config.operator.optim, name.split(".")[-1]) for name in OPTIM}
        for factor in (2.0, 0.5)
    ]
    unrolled = [] if problem.is_steady else [{"operator.unroll_fraction": 0.0}]
    history = [
        {f"{key}.history": frames}
        for frames in (2, FRAMES)
        if frames <= problem.context and not problem.is_steady
    ]
    added = [
        {f"{key}.base": [*now.base, name]}
        for name in kinds
        if name not in (*now.base, "solver") and problem.is_steady in BASES[name].serves
    ]
    for change in added:
        if "transport" in change[f"{key}.base"] and not now.reach:
            # over three eighths of the grid, as its check proposes
            change[f"{key}.reach"] = 3 * min(problem.train.shape[3:]) // 8
    batches = [batch_of(8)] if problem.ndim == 1 else [batch_of(2)]
    backbones = [sizes(kind) | {f"{key}.patch": PATCH[kind["kind"]]} for kind in KINDS[problem.ndim]]
    return [
        *batches,
        *history,
        *backbones,
        sizes({"depth": 2}),
        *rates,
        *unrolled,
        sizes({"depth": 4}),
        *added,
    ]


# ---- one training ------------------------------------------------------------------------------------------


def overrides_of(changes: Changes) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def changed(args: argparse.Namespace, changes: Changes) -> Config:
    """Return the configuration with `changes`, with its own cache if they need another patch."""
    config = load_config(args.config, [*args.overrides, *overrides_of(changes)])
    if (patch := changes.get(f"task.{args.task}.patch")) is not None:
        config = dataclasses.replace(
            config,
            cache=dataclasses.replace(config.cache, root=str(Path(config.cache.root) / f"patch{patch}")),
        )
        with_cache(config, args.task)
    return config


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
    """Train one baseline; its weights are selected on validation. more: of `train`."""

    def score(trained: Trained) -> float:
        errors, _ = rollout(trained, val, config.evaluate.batch_size)
        return float(headline(errors.moments(problem.is_steady).mean(0, keepdim=True), problem.is_steady)[0])

    return train(problem, settings, budget, seed, score, CLOCKS[args.clock], args.device, enough, **more)


def train_ours(args: argparse.Namespace, changes: Changes, seed: int, budget: float, **given: Any) -> Trained:
    """Our operator with `changes` to the configuration; see bench/ours.py."""
    from bench.ours import (
        train_ours as train_operator,  # it imports the operator, which the rivals do not need
    )

    return train_operator(
        changed(args, changes), args.task, budget, seed, args.device, CLOCKS[args.clock], **given
    )


def best_error(run: Trained) -> float:
    """Return the validation error at the end of a training; inf if it diverged."""
    return min(point["val"] if math.isfinite(point["val"]) else math.inf for point in run.history)


class OurTrials:
    """Trainings of our operator for a search.

    Bases are fitted once per history, patch and candidates; the trial that needs the fit is charged, except
    for `starts`, because every training pays for some fit. A whole trial is a scaled-down training: the
    fraction of the budget that the fit takes is missing from its steps, too; if that is all of it, nothing
    remains to try.
    """

    def __init__(self, args: argparse.Namespace, starts: list[Changes]):
        self.args, self.starts, self.fits = args, starts, {}

    def fitted(self, config: Config) -> tuple[Any, float, float]:
        """Return (head, its validation error, seconds of the fit)."""
        from bench.ours import fit_bases  # it imports the operator, which the rivals do not need

        task, watch = config.task[self.args.task], Stopwatch(CLOCKS[self.args.clock])
        key = (task.history, task.patch, *task.base)
        if key not in self.fits:
            head, error = fit_bases(
                open_cache(config, self.args.task),
                config,
                self.args.seeds[0],
                torch.device(self.args.device),
                watch,
            )
            self.fits[key] = (head, error, watch())
        return self.fits[key]

    def __call__(self, changes: Changes, seconds: float, is_whole: bool) -> Trial:
        from ups.models.loss import is_worth_training

        begun = len(self.fits)
        head, error, cost = self.fitted(changed(self.args, changes))
        charged = cost if len(self.fits) > begun and changes not in self.starts else 0.0
        if cost >= self.args.budget:
            return Trial(math.inf, 0, charged)
        left = seconds * (1 - cost / self.args.budget) if is_whole else seconds
        run = train_ours(self.args, changes, self.args.seeds[0], left, fitted=(copy.deepcopy(head), error))
        steps = run.steps if is_worth_training(head.scale) else 1  # a base that is exact needs none
        return Trial(best_error(run), steps, run.seconds + charged)


def rival_trial(
    family: str,
    args: argparse.Namespace,
    config: Config,
    problem: Problem,
    val: Split,
    changes: Changes,
    seconds: float,
    is_whole: bool,
) -> Trial:
    settings = settings_for(family, problem.name, problem.ndim, changes)
    run = train_rival(args, config, problem, val, settings, args.seeds[0], seconds)
    return Trial(best_error(run), run.steps, run.seconds)


# ---- found once --------------------------------------------------------------------------------------------


def found(
    family: str, args: argparse.Namespace, config: Config, problem: Problem, val: Split
) -> dict[str, Any]:
    """Return the record of the search for `family` on these data; search if there is none."""
    is_ours, kinds = family.startswith("ours"), tuple(BASES)
    if family == "ours_generic":
        kinds = GENERIC
        only = generic({}, config, args.task)
        args = argparse.Namespace(**vars(args) | {"overrides": [*args.overrides, *overrides_of(only)]})
        config = load_config(args.config, args.overrides)
    start = (
        to_dict(config.operator) | to_dict(config.task[args.task])
        if is_ours
        else dataclasses.asdict(settings_for(family, args.task, problem.ndim))
    )
    seconds = search_seconds(args)
    asked = {
        "data": open_cache(config, args.task).fingerprint,
        "clock": args.clock,
        "seed": args.seeds[0],
        "start": hashlib.sha256(json.dumps(start, sort_keys=True).encode()).hexdigest()[:16],
    }
    path = OUT / "tuned" / f"{args.task}-{family}-{asked['data'][:8]}.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if any(record.get(key) != value for key, value in asked.items()) or record["search_s"] < seconds:
        changes = our_changes(config, problem, kinds) if is_ours else rival_changes(problem)
        starts = our_starts(config, problem, kinds) if is_ours else rival_starts(family, problem)
        run: Callable[..., Trial] = (
            OurTrials(args, starts) if is_ours else partial(rival_trial, family, args, config, problem, val)
        )
        print(
            f"{family}: {len(starts)} starts and {len(changes)} changes in {seconds:g} s of {args.clock}",
            flush=True,
        )
        record = (
            asked
            | {"search_s": seconds}
            | search(starts, changes, run, seconds, args.budget, partial(print, flush=True))
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1), encoding="utf-8")
        if is_ours:
            path.with_suffix(".yaml").write_text(overlay(record, args), encoding="utf-8")
    print(
        f"{family}: chosen on validation in {record['seconds']:.0f} s, {record['tried']} trials: "
        f"{record['changes'] or 'as it starts'} ({path})",
        flush=True,
    )
    return record


def overlay(record: dict[str, Any], args: argparse.Namespace) -> str:
    """Return our settings as a YAML overlay, with a comment on the search."""
    tree: dict[str, Any] = {}
    for key, value in record["changes"].items():
        *sections, name = key.split(".")
        part = tree
        for section in sections:
            part = part.setdefault(section, {})
        part[name] = value
    return (
        f"# {args.task}: chosen on the validation split (error {record['val']:.3g}) by {record['tried']} "
        f"trials in "
        f"{record['seconds']:.0f} of {record['search_s']:g} s of {record['clock']},\n# seed "
        f"{record['seed']}, data "
        f"{record['data'][:12]}, {record['made']}; laid over {args.config}\n"
        + yaml.safe_dump(tree, sort_keys=False)
    )


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
    parser.add_argument(
        "--clock", choices=tuple(CLOCKS), help="cpu: seconds of one thread, where no GPU computes; else wall"
    )
    parser.add_argument("--config", type=Path, default=DEFAULT_OVERLAY)


def search_seconds(args: argparse.Namespace) -> float:
    return SEARCH * args.budget if args.search is None else args.search


def prepare(args: argparse.Namespace) -> None:
    """Set clock and threads.

    Raises ValueError for times that are not positive or a clock that does not see the work.
    """
    args.clock = args.clock or ("cpu" if args.device == "cpu" else "wall")
    if args.budget <= 0 or search_seconds(args) < 0:
        raise ValueError(
            f"--budget {args.budget:g} --search {search_seconds(args):g}; expected the first above zero, the "
            f"second not below. Change them."
        )
    if args.clock == "cpu" and args.device != "cpu":
        raise ValueError(
            f"--clock cpu misses what {args.device} computes; expected wall there. Leave --clock out."
        )
    # processor seconds count all threads, and two runs side by side have a core each
    torch.set_num_threads(1)
