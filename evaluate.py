"""Report: rollouts of the test split by the finished operator and honest baselines, scored against the data files.
evaluate.split=val, for choices: the same on the validation split, apart from the report.

Reads:  data files, cache/TASK.h5, RUN/operator/, and diffusion/, consistency/, rival/, steady/ as evaluate.stages asks.
Writes: RUN/report/ (report-val/): results.json, report.html, figures/, done.json; on the test split a row of
RUN/../leaderboard.jsonl. Exit status 1, with the reasons, when a gate fails (then there is no done.json).

    python evaluate.py --config configs/small.yaml
    python evaluate.py --config configs/small.yaml evaluate.split=val "evaluate.tasks=[burgers1d_hidden]"
    python evaluate.py --config configs/small.yaml --dry-run

Expected (configs/small.yaml): the numbers and the one gate that fails are in the README.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from ups.ask import report_parents, report_record, why_report
from ups.chain import require_stage
from ups.config import Config, parse_arguments, to_dict
from ups.data.build_cache import data_files, open_sources, require_same_data
from ups.data.cache import Cache, open_cache
from ups.evaluation import leaderboard
from ups.evaluation.assess import assess_steady, assess_transient
from ups.evaluation.gates import BASELINES, check_gates, check_verdicts
from ups.evaluation.report import write_report, write_results
from ups.evaluation.report_ensemble import ensemble_section, steady_section
from ups.evaluation.rivals import find_rivals
from ups.files import value_hash, write_sealed
from ups.metrics import errors as metrics
from ups.metrics.intervals import compare, merge
from ups.models.operator import Operator, load_operator
from ups.training.environment import describe_environment
from ups.training.stage import DONE


class TestSet:
    """The evaluated trajectories of a task in physical units, read from the data files as they are asked for."""

    __test__ = False   # not a pytest class

    def __init__(self, config: Config, name: str, cache: Cache):
        self.cache = cache
        self.context = config.context(name)
        self.rows = cache.split[config.evaluate.split]
        if config.evaluate.max_trajectories:
            order = torch.argsort(cache.trajectory[self.rows], stable=True)      # the same initial conditions of every parameter
            self.rows = self.rows[order[: config.evaluate.max_trajectories]]
        self.sources = open_sources(config, name, data_files(config, name))
        if self.context and cache.num_frames <= self.context:
            raise ValueError(f"{name} has {cache.num_frames} frames; expected more than evaluate.context_frames = "
                             f"{self.context}. Lower evaluate.context_frames or keep more frames.")

    def truth(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(input channels (n, 1, C_in, *space) of a steady task, predicted frames (n, T, C, *space)), float32."""
        files = self.cache.parameter_index[rows].tolist()
        u = torch.stack([torch.from_numpy(self.sources[file].read(i, i + 1)[0]) for file, i in
                         zip(files, self.cache.trajectory[rows].tolist(), strict=True)])
        num_inputs = len(self.cache.task.inputs)
        return u[:, :, :num_inputs], u[:, self.context :, num_inputs:]

    def given(self, rows: Tensor, device: torch.device) -> Tensor:
        """The latents a model is shown: context frames, or the coefficient of a steady task."""
        return self.cache.inputs(rows, device) if self.cache.task.is_steady else self.cache.batch(rows, 0, self.context, device)


def forecasts(operator: Operator, test: TestSet, rows: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Model -> predicted frames (n, T, C, *space), physical units: the operator, its base alone, and the baselines."""
    cache, name = test.cache, test.cache.task.name
    num_frames = cache.num_frames - test.context
    given, parameters = test.given(rows, device), cache.parameters[rows]
    latents = {"operator": operator.rollout(given, name, parameters, num_frames),
               "base": operator.rollout(given, name, parameters, num_frames, part="base")}
    latents["codec_floor"] = cache.batch(rows, test.context, num_frames, device)
    if not cache.task.is_steady:
        latents["persistence"] = given[:, -1:].expand(-1, num_frames, *given.shape[2:])
    return {model: operator.physical(name, z).cpu() for model, z in latents.items()}


def milliseconds_per_state(operator: Operator, test: TestSet, rows: Tensor, device: torch.device) -> float:
    """Median over five rollouts of wall-clock time per predicted state, decoding included, at this batch size."""
    name, num_frames = test.cache.task.name, test.cache.num_frames - test.context
    given, parameters = test.given(rows, device), test.cache.parameters[rows]
    seconds = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        operator.physical(name, operator.rollout(given, name, parameters, num_frames)).cpu()
        seconds.append(time.perf_counter() - start)
    return 1e3 * sorted(seconds[1:])[2] / (len(rows) * num_frames)


@torch.no_grad()
def evaluate_task(operator: Operator, config: Config, name: str, device: torch.device) -> tuple[dict, list[dict]]:
    """The task's entry of results.json and the trajectories the report shows: the median and the worst."""
    cache = open_cache(config, name)
    head = operator.serve(cache)
    test, settings = TestSet(config, name, cache), config.evaluate
    mean_field = None
    if cache.task.is_steady:
        mean_field = test.truth(cache.split["train"])[1].mean(0, keepdim=True)
    parts: dict[str, list] = {}
    for rows in test.rows.split(settings.batch_size):
        _, u_ref = test.truth(rows)
        predictions = forecasts(operator, test, rows, device)
        if mean_field is not None:
            predictions["train_mean"] = mean_field.expand_as(u_ref)
        for model, u_pred in predictions.items():
            parts.setdefault(model, []).append(metrics.score(u_pred, u_ref, cache.task.boundary))
    scores = {model: merge(part) for model, part in parts.items()}

    num_frames = cache.num_frames - test.context
    times = cache.dt * torch.arange(1, num_frames + 1) if not cache.task.is_steady else torch.zeros(1)
    legacy = (test.context or 1) if settings.legacy else 0
    groups = cache.trajectory[test.rows]
    models = {model: metrics.summarise_errors(score, settings.num_bootstrap, config.run.seed, times, legacy, groups)
              for model, score in scores.items()}
    models["operator"]["ms_per_state"] = milliseconds_per_state(operator, test, test.rows[: settings.batch_size], device)
    models["operator"]["evaluations_per_state"] = 1 / head.bundle
    comparisons = {f"operator / {other}": {metric: compare(metrics.ERROR[metric], scores["operator"], scores[other],
                                                                   settings.num_bootstrap, config.run.seed, groups)
                                           for metric in ("nrmse", "crmse")}
                   for other in ("base", *BASELINES) if other in scores}
    entry = {
        "num_initial_conditions": len(groups.unique()), "comparisons": comparisons, "kept_energy": cache.tokenizer.kept_energy,
        "num_trajectories": len(test.rows), "num_frames_predicted": num_frames, "parameters": list(config.task[name].parameters),
        "fields": list(cache.task.fields), "grid": list(cache.tokenizer.space), "times": times.tolist(), "models": models,
        "spectra": metrics.summarise_spectra({m: s for m, s in scores.items() if m in ("operator", "persistence", "train_mean")}),
        "base": head.description["base"]["kind"], "network_is_used": head.is_network_used,
        "equation": cache.task.equation, "conserved": list(cache.task.conserved), "latent_dim": cache.tokenizer.dim,
    }

    error = metrics.nrmse_per_trajectory(scores["operator"])
    order = torch.argsort(torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf))
    samples = []
    for label, place in (("median error", len(order) // 2), ("worst error", len(order) - 1)):
        row = test.rows[order[place]][None]
        inputs, u_ref = test.truth(row)
        u_pred = forecasts(operator, test, row, device)["operator"]
        values = cache.parameters[row][0].tolist()
        names = cache.task.parameters[: len(values)]
        samples.append({
            **cache.scene(), "u_ref": u_ref[0].numpy(), "u_pred": u_pred[0].numpy(), "times": times.numpy(), "label": label,
            "parameter": ", ".join(f"{key} = {value:g}" for key, value in zip(names, values, strict=True)) or None,
            **({"inputs": {cache.task.inputs[0]: inputs[0, 0, 0].numpy()}} if cache.task.is_steady else {}),
        })
    return entry, samples


def main() -> int:
    # ---- config
    config, is_dry_run = parse_arguments(__doc__)
    directory = config.report_dir
    if is_dry_run:
        from ups.dry_run import print_report_plan

        print_report_plan(config)
        return 0

    # ---- setup
    parents, parent = report_parents(config), require_stage(config, "operator")
    stages = [name for name in parents if name not in ("operator", "evaluate", "bench")]   # whose draws are assessed
    if not why_report(config, parents):
        print(f"{directory / 'report.html'} is up to date: nothing to do")
        return 0
    for name in config.evaluated:
        require_same_data(config, open_cache(config, name))
    (directory / DONE).unlink(missing_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    operator = load_operator(config.run_dir / "operator", device)

    # ---- evaluate
    tasks, rivals = {}, find_rivals(config, parent["parents"])
    samples: dict[str, list[dict]] = {}
    for name in config.evaluated:
        started = time.perf_counter()
        tasks[name], samples[name] = evaluate_task(operator, config, name, device)
        tasks[name]["models"] |= rivals[name]
        row = tasks[name]["models"]["operator"]
        print(f"{name}: nRMSE {row['nrmse']['value']:.2e} [{row['nrmse']['low']:.2e}, {row['nrmse']['high']:.2e}] over "
              f"{tasks[name]['num_trajectories']} trajectories ({time.perf_counter() - started:.1f} s)", flush=True)

    ensembles, steady, sections = {}, {}, []
    for name in config.asked["diffusion"] if "diffusion" in stages else []:
        ensembles[name], shown = assess_transient(config, operator, name, device)
        sections.append((f"{name}: ensembles", ensemble_section(ensembles[name], shown, name)))
        print(*ensembles[name]["words"], sep="\n", flush=True)
    for name in config.asked["steady"] if "steady" in stages else []:
        steady[name], shown = assess_steady(config, operator, name, device)
        sections.append((f"{name}: prior of partly observed coefficients", steady_section(steady[name], shown, name)))
    print(f"stages beyond the operator: {', '.join(stages) or 'none is there, so the report is on the operator alone'}")

    # ---- report
    log = config.run_dir / "operator" / "metrics.jsonl"
    history = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    results = {
        "run": config.run.name, "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config_hash": value_hash(to_dict(config)),
        "environment": describe_environment(1, device),
        "protocol": {"split": config.evaluate.split, "context_frames": config.evaluate.context_frames, "seed": config.run.seed,
                     "legacy": config.evaluate.legacy, "bootstrap": config.evaluate.num_bootstrap},
        "tasks": tasks, "ensembles": ensembles, "steady": steady, "stages": config.asked,
        "training": {"steps": parent["step"], "parameters": sum(p.numel() for p in operator.parameters()),
                     "precision": operator.precision, "seconds": train_seconds(history)},
    }
    results |= {"gates": check_gates(results, config.evaluate), "verdicts": check_verdicts(results)}
    directory.mkdir(parents=True, exist_ok=True)
    write_results(results, directory / "results.json")
    write_report(results, samples, history, directory / "report.html", sections)
    if config.evaluate.split == "test":
        leaderboard.add(results, Path(config.run.root) / "leaderboard.jsonl")
    print(*[f"{name}: {verdict['words']}" for name, verdict in results["verdicts"].items()], sep="\n")
    failed = [gate for gate in results["gates"] if not gate["passed"]]
    for gate in failed:
        print(f"GATE FAILED {gate['name']}: {gate['reason']}", file=sys.stderr)
    print(f"{directory / 'report.html'}: {len(results['gates']) - len(failed)} of {len(results['gates'])} gates passed")
    if failed:
        return 1
    write_sealed(directory / DONE, report_record(config, parents))
    return 0


def train_seconds(history: list[dict]) -> float:
    """Wall-clock seconds in the training loop: steps over rate, summed over the log lines that carry a rate."""
    seconds, before = 0.0, 0
    for line in history:
        if "steps_per_s" in line:
            seconds += (line["step"] - before) / max(line["steps_per_s"], 1e-9)
            before = line["step"]
    return round(seconds, 1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:   # what a user can cause: the message says what to do
        sys.exit(f"evaluate.py: {error}")
