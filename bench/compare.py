"""The judge of the operator: ours, an FNO and a U-Net on the same cache, splits, protocol, threads and wall-clock.

    python -m bench.compare --task burgers1d --budget 300 --seeds 0 1 --models ours fno unet
    python -m bench.compare --task burgers1d --budget 60 --tune fno              # try settings, choose on validation

A rival with no settings of its own for these data is tuned first, on validation, for up to three times the budget (ours
chooses its base within the budget): one for all short trials, two to train what they found and the start at length. It
is kept in bench/out/tuned/ for the same data and no longer a budget. No ratio is printed against settings given by hand.

Reads the data and the latent cache of the configuration (`make cache`); writes bench/out/TASK_*.json. Context frames
(evaluate.context_frames) are given to every model and never scored; weights are selected on validation rollouts, everything
printed is on test.
Overrides: section.key=value for the configuration, fno.lr=1e-3 or unet.width=32 for a baseline.

Errors of a rollout, e = u_pred - u_ref in physical units, <.> means over cells, averaged over frames and channels:
pooled sqrt(sum_n <e^2> / sum_n <u^2>), what time-dependent tasks are judged by; nrmse mean_n sqrt(<e^2> / <u^2>), PDEBench's,
what steady tasks are judged by (relative L2); median over trajectories, frames and channels of sqrt(<e^2> / <u^2>).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from bench.baselines import BEST, Problem, Settings, Trained, settings_for, train
from ups.config import ROOT, Config, load_config
from ups.data.build_cache import open_sources
from ups.data.cache import cache_settings, open_cache
from ups.evaluation.bench_rows import FOLDER, NETWORKS, data_key
from ups.evaluation.truth import Truth
from ups.metrics.errors import rmse, score, summarise_errors
from ups.metrics.intervals import bootstrap, merge
from ups.metrics.spectra import rms

OUT = FOLDER
BASELINES = ("fno", "fno_library", "unet")
BEST_ON = ROOT / "configs" / "small.yaml"   # the data that BEST was tuned on
TOLERANCE = 1.05  # a model that took more than this share of its budget is marked, and so are its ratios


# ---- ours ----------------------------------------------------------------------------------------------------------------


def ours(config: Config, task: str, budget_seconds: float, seed: int, device: str = "cpu") -> Trained:
    """Our operator, trained on `task` for `budget_seconds` of wall-clock (closed-form fits included, validation not).

    Like the others it is given physical context frames and parameters, and sees nothing else of the test trajectories. Unlike
    them it may have an equation's structure built in (its base predictors, ups/models/bases/__init__.py): a fair comparison of
    tools, not of generic networks.
    """
    from bench.ours import train_ours  # it imports the operator stage, which the baselines do not need

    return train_ours(config, task, budget_seconds, seed, device)


# ---- data ----------------------------------------------------------------------------------------------------------------


@dataclass
class Split:
    """Physical fields of some rows. given: context frames, or the coefficient; truth: what is to be predicted."""

    given: Tensor
    truth: Tensor
    parameters: Tensor
    groups: Tensor  # rows of one trajectory number share an initial condition: resampled together


def fields(config: Config, cache: Any, split: str) -> tuple[Tensor, Tensor | None]:
    """Physical fields (row, time, channel, *space) of a split and, of a steady task, the coefficients, as the data files hold
    them: no model is judged by a codec's loss."""
    truth = Truth(cache, open_sources(config, cache.task.name), split, context=0)
    return truth.future(truth.rows), truth.inputs(truth.rows) if cache.task.is_steady else None


def load(config: Config, task: str) -> tuple[Problem, dict[str, Split]]:
    """The training problem of the baselines and the rows to score."""
    cache = open_cache(config, task)
    context, spec = config.context(task), cache.task
    u, a = {}, {}
    for name in ("train", "val", "test"):
        u[name], a[name] = fields(config, cache, name)
    if not spec.is_steady and cache.num_frames <= context:
        raise ValueError(f"{task} has {cache.num_frames} frames; expected more than the {context} of evaluate.context_frames. "
                         f"Lower it.")
    parameters = {name: cache.parameters[rows] for name, rows in cache.split.items()}
    splits = {}
    for name in ("val", "test"):
        rows = cache.split[name]
        given, truth = (a[name], u[name]) if spec.is_steady else (u[name][:, :context], u[name][:, context:])
        splits[name] = Split(given, truth, parameters[name], cache.trajectory[rows])
    offset = torch.tensor([0.0 if field in spec.positive else float(mean / std) for field, mean, std in
                           zip(spec.fields, cache.tokenizer.mean, cache.tokenizer.std, strict=True)])
    problem = Problem(task, spec.ndim, spec.boundary, spec.is_steady, spec.is_symmetric and not spec.vector, context,
                      u["train"], u["val"], parameters["train"], parameters["val"],
                      cache.tokenizer.normalise, cache.tokenizer.denormalise, offset,
                      a["train"], a["val"], cache.input_tokenizer.normalise if spec.is_steady else None)
    return problem, splits


# ---- scores --------------------------------------------------------------------------------------------------------------


@dataclass
class Errors:
    """Mean squares over cells per trajectory, frame and channel (n, T, C), float64: of the error and of the truth."""

    error: Tensor
    truth: Tensor

    @classmethod
    def of(cls, pred: Tensor, truth: Tensor) -> Errors:
        return cls(rmse(pred, truth).square().nan_to_num(nan=torch.inf), rms(truth).square())

    def moments(self, is_steady: bool) -> Tensor:
        """(n, M), whose mean over trajectories `headline` turns into the number a task is judged by."""
        if is_steady:
            return (self.error / self.truth).sqrt().flatten(1)
        return torch.cat((self.error.flatten(1), self.truth.flatten(1)), 1)

    def pooled(self) -> Tensor:
        """(T,) mean over channels."""
        return (self.error.mean(0) / self.truth.mean(0)).sqrt().mean(1)


def headline(mean: Tensor, is_steady: bool) -> Tensor:
    """(B, M) mean moments to (B,)."""
    if is_steady:
        return mean.mean(1)
    half = mean.shape[1] // 2
    return (mean[:, :half] / mean[:, half:]).sqrt().mean(1)


def summary(errors: Errors, split: Split, is_steady: bool, num_bootstrap: int) -> dict[str, Any]:
    """The numbers of one model on one split; `error` is the one it is judged by."""
    relative, pooled = (errors.error / errors.truth).sqrt(), errors.pooled()
    value, low, high = bootstrap(errors.moments(is_steady), lambda m: headline(m, is_steady), num_bootstrap, 0, split.groups)
    by_parameter = {}
    for key in sorted(set(map(tuple, split.parameters.tolist()))) if split.parameters.shape[1] else ():
        rows = (split.parameters == torch.tensor(key, dtype=split.parameters.dtype)).all(1)
        moments = Errors(errors.error[rows], errors.truth[rows]).moments(is_steady)
        by_parameter[",".join(f"{v:g}" for v in key)] = float(headline(moments.mean(0, keepdim=True), is_steady)[0])
    return {"error": float(value), "low": float(low), "high": float(high), "pooled": float(pooled.mean()),
            "nrmse": float(relative.mean()), "median": float(relative.median()), "first_frame": float(pooled[0]),
            "last_frame": float(pooled[-1]), "by_parameter": by_parameter}


def paired_ratio(one: list[Errors], other: list[Errors], split: Split, is_steady: bool, num_bootstrap: int) -> dict[str, float]:
    """Error of `one` over that of `other`, each averaged over its seeds, with the interval over common trajectories."""
    moments = [errors.moments(is_steady) for errors in (*one, *other)]
    width, num_one = moments[0].shape[1], len(one)

    def ratio(mean: Tensor) -> Tensor:
        values = torch.stack([headline(part, is_steady) for part in mean.split(width, 1)])
        return values[:num_one].mean(0) / values[num_one:].mean(0)

    value, low, high = bootstrap(torch.cat(moments, 1), ratio, num_bootstrap, 0, split.groups)
    return {"ratio": float(value), "low": float(low), "high": float(high)}


@torch.no_grad()
def rollout(trained: Trained, split: Split, batch_size: int) -> tuple[Errors, float]:
    """Errors of all rows, and milliseconds per predicted state (median over full batches)."""
    parts, times = [], []
    for rows in torch.arange(len(split.truth)).split(batch_size):
        truth = split.truth[rows]
        start = time.perf_counter()
        pred = trained.predict(split.given[rows], split.parameters[rows], truth.shape[1])
        if len(rows) == min(batch_size, len(split.truth)):
            times.append(1e3 * (time.perf_counter() - start) / (len(rows) * truth.shape[1]))
        parts.append(Errors.of(pred, truth))
    joined = Errors(torch.cat([part.error for part in parts]), torch.cat([part.truth for part in parts]))
    return joined, sorted(times)[len(times) // 2]


@torch.no_grad()
def report_row(trained: Trained, split: Split, config: Config, cache: Any, state_ms: float) -> dict[str, Any]:
    """The model's row of results.json, as evaluate.py scores the operator; see ups/evaluation/bench_rows.py."""
    parts, num_frames = [], split.truth.shape[1]
    for rows in torch.arange(len(split.truth)).split(config.evaluate.batch_size):
        pred = trained.predict(split.given[rows], split.parameters[rows], num_frames)
        parts.append(score(pred, split.truth[rows], cache.task.boundary))
    times = torch.zeros(1) if cache.task.is_steady else cache.dt * torch.arange(1, num_frames + 1)
    row = summarise_errors(merge(parts), config.evaluate.num_bootstrap, config.run.seed, times, 0, split.groups)
    return {**row, "ms_per_state": state_ms, "train_seconds": round(trained.seconds, 1)}


def trivial(problem: Problem, split: Split) -> tuple[str, Errors]:
    """Persistence of the last context frame; of a steady task, the mean solution of the training split."""
    if problem.is_steady:
        return "training mean", Errors.of(problem.train.mean(0, keepdim=True).expand_as(split.truth), split.truth)
    return "persistence", Errors.of(split.given[:, -1:].expand_as(split.truth), split.truth)


# ---- running -------------------------------------------------------------------------------------------------------------


def fit(model: str, config: Config, problem: Problem, val: Split, settings: Settings | None, args: argparse.Namespace,
        seed: int, budget: float) -> Trained:
    """Train one model; the weights it comes with were selected on validation."""
    if model == "ours":
        return ours(config, problem.name, budget, seed, args.device)

    def score(trained: Trained) -> float:
        errors, _ = rollout(trained, val, config.evaluate.batch_size)
        return float(headline(errors.moments(problem.is_steady).mean(0, keepdim=True), problem.is_steady)[0])

    return train(problem, settings, budget, seed, score, CLOCKS[args.clock], args.device)


def best_error(run: Trained) -> float:
    """The validation error that a training ended with; inf where it diverged."""
    return min(point["val"] if math.isfinite(point["val"]) else math.inf for point in run.history)


# cpu: processor seconds of one thread, to tune on a machine that others use; never for a comparison with ours
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def number(value: float) -> str:
    return f"{value:9.2e}" if math.isfinite(value) else " diverged"


def line(name: str, seed: str, row: dict[str, Any], trained: Trained | None = None) -> str:
    cost = "" if trained is None else (
        f" {trained.num_parameters / 1e3:8.0f}k {trained.steps:6d} {trained.step_ms:8.1f} {row['state_ms']:9.3f} "
        f"{trained.seconds:7.1f} {trained.cpu_seconds:7.1f}" + (f"  {trained.skipped} skipped" if trained.skipped else "")
        + ("  OVER BUDGET" if row["is_over_budget"] else ""))
    return (f"{name:14} {seed:>4} {number(row['error'])} [{number(row['low']).strip()}, {number(row['high']).strip()}]"
            + "".join(f" {number(row[key])}" for key in ("nrmse", "median", "first_frame", "last_frame")) + cost)


HEADER = (f"{'model':14} {'seed':>4} {'error':>9} {'[95 %: low, high]':>20} {'nrmse':>9} {'median':>9} {'first':>9} {'last':>9}"
          f" {'params':>9} {'steps':>6} {'ms/step':>8} {'ms/state':>9} {'wall s':>7} {'cpu s':>7}")


def describe(args: argparse.Namespace, problem: Problem, splits: dict[str, Split]) -> dict[str, Any]:
    """Where and on what this ran."""
    return {"task": problem.name, "budget_s": args.budget, "clock": args.clock, "threads": args.threads, "device": args.device,
            "config": str(args.config), "overrides": args.overrides, "torch": torch.__version__, "machine": platform.processor(),
            "cores": os.cpu_count(), "load": os.getloadavg()[0], "rows": {"train": len(problem.train), **{
                name: len(split.truth) for name, split in splits.items()}}, "frames_scored": splits["test"].truth.shape[1],
            "context_frames": 0 if problem.is_steady else problem.context, "started": time.strftime("%Y-%m-%dT%H:%M:%S")}


def clean(value: Any) -> Any:
    """`value` for JSON, which has no NaN or inf: null there means the model diverged or the number is undefined."""
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(clean(result), indent=1), encoding="utf-8")


def compare(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Train and score every model and seed; print and save the table."""
    problem, splits = load(config, args.task)
    test, num_bootstrap = splits["test"], config.evaluate.num_bootstrap
    steady = problem.is_steady
    by_hand = {model for model in args.models if args.settings.get(model)}
    settings = {model: settings_for(model, args.task, problem.ndim, args.settings.get(model)
                                    or tuned(model, config, args, problem, splits["val"]))
                for model in args.models if model in BASELINES}
    result = {"kind": "compare", **describe(args, problem, splits), "judged_by": "nrmse" if steady else "pooled",
              "settings": {model: asdict(value) for model, value in settings.items()}, "rows_printed": [], "ratios": {}}
    cache = open_cache(config, args.task)
    result |= {"data": data_key(cache.fingerprint, config.context(args.task)), "models": {}}
    path = OUT / f"{args.task}_{args.budget:g}s_{'-'.join(args.models)}_{time.strftime('%m%d-%H%M%S')}.json"
    name, errors = trivial(problem, test)
    result["trivial"] = {"name": name, **summary(errors, test, steady, num_bootstrap)}
    print(f"{args.task}: {result['rows']} rows, {test.truth.shape[1]} frames scored, {args.budget:g} s of {args.clock} each, "
          f"{args.threads} threads, judged by {result['judged_by']} on test\n{HEADER}")
    print(line(name, "-", result["trivial"]), flush=True)
    scored: dict[str, list[Errors]] = {}
    for seed in args.seeds:
        for model in args.models:
            trained = fit(model, config, problem, splits["val"], settings.get(model), args, seed, args.budget)
            errors, state_ms = rollout(trained, test, config.evaluate.batch_size)
            scored.setdefault(model, []).append(errors)
            row = {"model": model, "seed": seed, **summary(errors, test, steady, num_bootstrap), "state_ms": state_ms,
                   **{key: getattr(trained, key) for key in ("num_parameters", "steps", "step_ms", "seconds", "cpu_seconds",
                                                             "skipped", "history")},
                   "is_over_budget": trained.seconds > TOLERANCE * args.budget}
            result["rows_printed"].append(row)
            print(line(model, str(seed), row, trained), flush=True)
            if model in NETWORKS and model not in by_hand:   # the report shows the best seed, and no network made weak by hand
                validation = min(point["val"] for point in trained.history)
                if validation < result["models"].get(model, {"validation": math.inf})["validation"]:
                    entry = {"validation": validation, "row": report_row(trained, test, config, cache, state_ms)}
                    result["models"][model] = entry
            save(path, result)
    for model, parts in scored.items():
        rows = [row for row in result["rows_printed"] if row["model"] == model]
        by_parameter = {key: sum(row["by_parameter"][key] for row in rows) / len(rows) for key in rows[0]["by_parameter"]}
        print(f"{model}: mean over seeds {number(sum(row['error'] for row in rows) / len(rows)).strip()}"
              + "".join(f", {key}: {number(value).strip()}" for key, value in by_parameter.items()))
        if model == args.models[0]:
            continue
        if hand := sorted(by_hand & {model, args.models[0]}):
            print(f"no ratio {args.models[0]} / {model}: the settings of {hand[0]} are given by hand; expected settings "
                  f"that validation chose. Leave out {hand[0]}.KEY=VALUE, and it is tuned first.")
        else:
            unequal = [row["model"] for row in result["rows_printed"] if row["is_over_budget"]]
            ratio = paired_ratio(scored[args.models[0]], parts, test, steady, num_bootstrap)
            result["ratios"][f"{args.models[0]}/{model}"] = ratio
            print(f"{args.models[0]} / {model}: {ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] (below 1: "
                  f"{args.models[0]} is better; interval over trajectories, not seeds)"
                  + (f" NOT AT EQUAL TIME: {', '.join(sorted(set(unequal)))} over budget" if unequal else ""))
    save(path, result)
    print(f"wrote {path}")
    return result


# ---- tuning --------------------------------------------------------------------------------------------------------------


COMMON = ({}, {"lr": 1e-3}, {"lr": 2e-3}, {"lr": 4e-3}, {"lr": 8e-3}, {"loss": "change"}, {"loss": "field"},
          {"weight_decay": 1e-2}, {"decay_start": 0.0}, {"ema": 0.995})
TRANSIENT = ({"history": 2}, {"history": 4}, {"unroll_fraction": 0.0}, {"is_scored_only": True}, {"is_scored_only": False})
FOLDED = ({"patch": 1, "width": 24, "depth": 4}, {"patch": 2, "width": 32, "depth": 3}, {"patch": 2, "width": 32, "depth": 4},
          {"patch": 4, "width": 48, "depth": 3}, {"patch": 4, "width": 64, "depth": 3})
CANDIDATES: dict[tuple[str, int], tuple[dict, ...]] = {
    ("fno", 1): ({"width": 32}, {"width": 64}, {"modes": 12}, {"modes": 16}, {"modes": 24}, {"modes": 40},
                 {"modes": 64, "width": 32}, {"depth": 3}, {"depth": 5}, {"kernel": 5}, {"mlp": True}, {"batch_size": 8},
                 {"batch_size": 32}),
    ("fno", 2): ({"width": 24}, {"width": 48}, {"modes": 8}, {"modes": 12}, {"modes": 16}, {"modes": 24}, {"basis": "dct"},
                 {"basis": "dst"}, {"basis": "dft", "padding": 8, "modes": 12}, {"depth": 3}, {"depth": 5}, {"kernel": 3},
                 {"mlp": True}, {"batch_size": 2}, {"batch_size": 4}, {"batch_size": 8}),
    ("unet", 1): (*FOLDED, {"batch_size": 8}, {"batch_size": 32}),
    ("unet", 2): (*FOLDED, {"batch_size": 4}, {"batch_size": 8}),
}


def candidates(model: str, problem: Problem) -> list[dict]:
    """One change at a time to the present best settings, what changes the network most first."""
    family = "unet" if model == "unet" else "fno"
    best, seen, out = settings_for(model, problem.name, problem.ndim), [], []
    for change in ({}, *CANDIDATES[family, problem.ndim], *COMMON, *(() if problem.is_steady else TRANSIENT)):
        settings = settings_for(model, problem.name, problem.ndim, change)
        is_idle = change.get("loss") == "change" and problem.is_steady
        if settings not in seen and not is_idle and not (change and settings == best):
            seen.append(settings)
            out.append(change)
    return out


def tune(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Train every candidate for the budget, rank on validation; test is not looked at."""
    problem, splits = load(config, args.task)
    changes = args.candidates or candidates(args.tune, problem)
    start = BEST.get((args.tune, args.task), {})
    result = {"kind": "tune", "model": args.tune, **describe(args, problem, splits), "start": start, "candidates": []}
    path = OUT / f"{args.task}_tune-{args.tune}_{args.budget:g}s_{time.strftime('%m%d-%H%M%S')}.json"
    print(f"{args.task}: {len(changes)} candidates for {args.tune} at {args.budget:g} s of {args.clock}, seeds {args.seeds}, "
          f"about {len(changes) * len(args.seeds) * args.budget / 60:.0f} min; validation error", flush=True)
    for change in changes:
        settings = settings_for(args.tune, args.task, problem.ndim, {**args.settings.get(args.tune, {}), **change})
        runs = [fit(args.tune, config, problem, splits["val"], settings, args, seed, args.budget) for seed in args.seeds]
        values = [best_error(run) for run in runs]
        row = {"change": change, "val": sum(values) / len(values), "values": values, "num_parameters": runs[0].num_parameters,
               "steps": runs[0].steps, "step_ms": runs[0].step_ms, "seconds": runs[0].seconds, "cpu_seconds": runs[0].cpu_seconds,
               "skipped": sum(run.skipped for run in runs), "settings": asdict(settings)}
        result["candidates"].append(row)
        save(path, result)
        print(show(row), flush=True)
    print("\nbest first")
    for row in sorted(result["candidates"], key=lambda row: row["val"] if math.isfinite(row["val"]) else math.inf):
        print(show(row))
    print(f"wrote {path}")
    return result


def tuned(model: str, config: Config, args: argparse.Namespace, problem: Problem, val: Split) -> dict[str, Any]:
    """What `settings_for` is given for these data: nothing where BEST was tuned on them, else what `climb` finds.

    That is kept by task, grid and model, and holds for the same data and a budget no longer than it was tuned for.
    """
    family, known = "unet" if model == "unet" else "fno", load_config(BEST_ON)
    if (family, args.task) in BEST and cache_settings(config, args.task) == cache_settings(known, args.task):
        return {}
    data = open_cache(config, args.task).fingerprint
    grid = "x".join(map(str, problem.train.shape[3:]))
    path = OUT / "tuned" / f"{args.task}-{grid}-{family}.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if record.get("data") != data or record["budget_s"] < args.budget or record["clock"] != args.clock:
        record = {"data": data, "budget_s": args.budget, "clock": args.clock, "threads": args.threads,
                  **climb(family, config, args, problem, val)}
        save(path, record)
    print(f"{family}: tuned on validation for {record['seconds']:.0f} s, {record['tried']} settings: "
          f"{record['changes'] or 'as it starts'} ({path})", flush=True)
    return record["changes"]


def climb(family: str, config: Config, args: argparse.Namespace, problem: Problem, val: Split) -> dict[str, Any]:
    """One change after the other, kept where validation improves; together they train for the budget.

    So short a training prefers small networks: what was found then trains for the whole budget beside the start, and the
    better of the two serves. Raises ValueError where nothing that was tried fits the grid.
    """
    def error_of(changes: dict[str, Any], budget: float) -> float:
        settings = settings_for(family, problem.name, problem.ndim, changes)
        run = fit(family, config, problem, val, settings, args, args.seeds[0], budget)
        spent.append(run.seconds)
        return best_error(run)

    most, spent = min(problem.train.shape[3:]) // 2, []
    start = {"modes": most} if most < settings_for(family, problem.name, problem.ndim).modes else {}
    best, error, changes, start_fits = start, math.inf, candidates(family, problem), False
    print(f"{family}: no settings are tuned on these data; trying {len(changes)} for {args.budget:g} s together", flush=True)
    for change in changes:
        try:
            found = error_of({**best, **change}, args.budget / len(changes))
        except ValueError as misfit:   # a grid that does not halve so often, more modes than it has
            print(f"  left out {change}: {misfit}")
            continue
        start_fits |= not change
        if found < error:
            best, error = {**best, **change}, found
            print(f"  {number(error)} {best}", flush=True)
    if not spent:
        raise ValueError(f"no settings of {family} fit the grid {tuple(problem.train.shape[3:])}; expected some of "
                         f"{len(changes)}. Leave it out of --models, or add settings that fit to CANDIDATES.")
    tried = len(spent)
    if start_fits and best != start:
        first, error = (error_of(one, args.budget) for one in (start, best))
        print(f"  at {args.budget:g} s: start {number(first)}, found {number(error)}", flush=True)
        best, error = (best, error) if error < first else (start, first)
    return {"changes": best, "val": error, "tried": tried, "seconds": sum(spent)}


def show(row: dict[str, Any]) -> str:
    change = " ".join(f"{key}={value}" for key, value in row["change"].items()) or "(present best)"
    return (f"{number(row['val'])}  {row['num_parameters'] / 1e3:7.0f}k {row['steps']:6d} steps {row['step_ms']:7.1f} ms "
            f"{row['seconds']:6.1f} s wall {row['cpu_seconds']:6.1f} s cpu  {change}")


def read_pairs(texts: list[str]) -> dict[str, Any]:
    """["lr=1e-3", "width=32"] as values; numbers are read as Python does, so that 1e-3 is one."""
    pairs = {}
    for text in texts:
        key, _, value = text.partition("=")
        read = yaml.safe_load(value)
        try:
            read = float(read) if isinstance(read, str) else read
        except ValueError:
            pass  # text such as dct
        pairs[key] = read
    return pairs


def main(argv: list[str] | None = None) -> dict[str, Any]:
    argv = sys.argv[1:] if argv is None else argv
    overrides = [text for text in argv if "=" in text and not text.startswith("-") and "," not in text and " " not in text]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True)
    parser.add_argument("--budget", type=float, required=True, help="seconds of training per model and seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--models", nargs="+", default=["ours", "fno", "unet"], choices=("ours", *BASELINES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "small.yaml")
    parser.add_argument("--tune", choices=BASELINES, help="rank settings of this baseline on validation")
    parser.add_argument("--try", dest="candidates", action="append", metavar="KEY:VALUE,KEY:VALUE",
                        help="a candidate for --tune (may be repeated) in place of the built-in list")
    args = parser.parse_args([text for text in argv if text not in overrides])
    args.candidates = [read_pairs([p.replace(":", "=", 1) for p in text.split(",")]) for text in args.candidates or ()]
    args.overrides, args.settings = overrides, {}
    for text in overrides:
        model, _, rest = text.partition(".")
        if model in BASELINES:
            args.settings.setdefault(model, {}).update(read_pairs([rest]))
    if args.budget <= 0 or args.threads < 1:
        raise ValueError(f"--budget {args.budget:g} --threads {args.threads}; expected both above zero. Change them.")
    if args.clock == "cpu" and (args.threads > 1 or "ours" in args.models and not args.tune):
        raise ValueError("--clock cpu counts one thread of a baseline; expected --threads 1 and no model ours. Use --clock wall.")
    config = load_config(args.config, [text for text in overrides if text.partition(".")[0] not in BASELINES])
    torch.set_num_threads(args.threads)
    return tune(config, args) if args.tune else compare(config, args)


if __name__ == "__main__":
    main()
