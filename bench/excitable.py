"""barkley2d: ensembles beside exact samples over the first leads, and where they start new waves.

    make train CONFIG=configs/excitable.yaml
    python -m bench.excitable --config configs/excitable.yaml [--seeds 0 1 2] [run.name=..]

Needs finished runs, one per seed: run.name for seed 0, run.name_SEED for others. For every model and lead it
scores fair CRPS and for all leads the energy score of trajectories, over those of exact samples, of the best
cheap ensemble and of the network trained by scores, with paired 95 % intervals over initial conditions. A new
wave is at least CELLS connected cells in which u is above 0.5 at the first lead, and without kicks would be
below 0.2: its number per sample, its area, and v there at the start, which is large in refractory tissue.
`no_kicks` is the equation without noise. Writes bench/results/excitable/barkley2d.json, where entries of
other seeds are kept; the table is made by bench/table.py.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.command import parse
from bench.eleven import keep, processor, read
from ups.config.load import load_config
from ups.config.schema import Config
from ups.evaluation.ensemble import Ensembles, costs_per_state, load_samplers, rollouts
from ups.evaluation.reference_ensembles import RolloutErrors, sample_exactly, sample_law
from ups.evaluation.truth import Truth, open_truth
from ups.generative.residuals import TransientResiduals
from ups.metrics.ensembles import compare_ensembles, score_ensemble, summarise_ensemble
from ups.metrics.joint import score_joint
from ups.models.operator import load_operator
from ups.training.environment import describe_environment
from ups_solvers import barkley

TASK, LEADS, CELLS = "barkley2d", 4, 4
CHEAP = ("operator", "dressed_conditional", "waves", "dressed_resampled", "analogs")
RESULTS = Path(__file__).parent / "results" / "excitable"


def components(mask: Tensor) -> Tensor:
    """Numbers of the connected components (n, H, W) of a mask on the torus, 0 outside: the largest number of
    a cell of each."""
    label = torch.arange(1, mask[0].numel() + 1).view(mask.shape[1:]) * mask
    while True:
        around = [label.roll(step, axis) for step in (1, -1) for axis in (1, 2)]
        grown = torch.stack([label, *around]).amax(0) * mask
        if torch.equal(grown, label):
            return label
        label = grown


def new_waves(u: Tensor, quiet: Tensor, v: Tensor) -> dict[str, Any]:
    """numbers: fractions of the samples u (n, M, H, W) with 0, 1, 2, and 3 or more new waves; area in cells
    and v (n, H, W), the mean over waves. quiet (n, H, W): u without kicks."""
    is_new = (u > 0.5) & (quiet < 0.2)[:, None]
    label, places = components(is_new.flatten(0, 1)), v[:, None].expand_as(u).flatten(0, 1)
    counts, areas, heights = [], [], []
    for one, place in zip(label, places, strict=True):
        sizes = torch.bincount(one.flatten())[1:]
        waves = (sizes >= CELLS).nonzero()[:, 0] + 1
        counts.append(min(len(waves), 3))
        areas += sizes[waves - 1].tolist()
        heights += [float(place[one == wave].mean()) for wave in waves]
    numbers = torch.bincount(torch.tensor(counts), minlength=4) / len(counts)
    mean = [sum(part) / max(len(part), 1) for part in (areas, heights)]
    return {"numbers": numbers.tolist(), "area": mean[0], "v": mean[1]}


def without_kicks(truth: Truth, rows: Tensor) -> Tensor:
    """The equation without noise, as an ensemble of one member."""
    state = truth.frames(rows, truth.context - 1, 1)[:, 0].double()
    steps = barkley.num_steps(truth.cache.dt, barkley.longest_step(barkley.SIDE / state.shape[-1]))
    frames = []
    for _ in range(LEADS):
        for _ in range(steps):
            state = barkley.advance(state, truth.cache.dt / steps, barkley.SIDE / state.shape[-1])
        frames.append(state.float())
    return torch.stack(frames, 1)[:, None]


def load(config: Config, task: str, *stages: str) -> tuple[Ensembles, Tensor]:
    """The ensembles of finished stages of a run (none: those of evaluate.stages), and the rows on which they
    are scored.
    """
    device = torch.device("cpu")
    operator, truth = load_operator(config.run_dir / "operator", device), open_truth(config, task)
    stages = stages or [stage for stage in config.evaluate.stages if stage != "operator"]
    samplers = load_samplers(config.run_dir, stages, device, operator)
    source = TransientResiduals(operator, truth.cache)
    return Ensembles(source, truth, samplers, config.run.seed), scored_rows(config, truth)


def scored_rows(config: Config, truth: Truth) -> Tensor:
    """One start of each of evaluate.ensemble_trajectories of evaluate.split."""
    return truth.cache.split[truth.split][truth.one_of_each(config.evaluate.ensemble_trajectories)]


def assess(config: Config) -> dict[str, Any]:
    """The models of a finished run on the split of evaluate.split."""
    settings, seed = config.evaluate, config.run.seed
    ensembles, rows = load(config, TASK)
    truth = ensembles.truth
    groups, u_ref = truth.cache.trajectory[rows], truth.future(rows, LEADS)
    law = sample_law(truth, seed + 2, rows, LEADS, u_ref, settings.truth_members)
    quiet, v = without_kicks(truth, rows), truth.frames(rows, truth.context - 1, 1)[:, 0, 1]

    def score(members: Tensor) -> dict[str, Tensor]:
        joint = score_joint(members, u_ref, truth.task.boundary, None, law)
        return score_ensemble(members, u_ref, truth.task.boundary, exact=law) | joint

    errors = RolloutErrors(ensembles, LEADS)
    forecasts = {
        "exact": lambda: sample_exactly(truth, seed, rows, LEADS, settings.members),
        "no_kicks": lambda: quiet,
        "analogs": lambda: errors.sample(errors.nearest, rows, LEADS, settings.members),
        **{
            model: partial(rollouts, ensembles, model, rows, LEADS, settings.members)
            for model in ensembles.names
        },
    }
    scores, models = {}, {}
    for model, make in forecasts.items():
        started = time.perf_counter()
        members = make()
        seconds = time.perf_counter() - started
        scores[model] = score(members)
        row = summarise_ensemble(scores[model], settings.num_bootstrap, seed, groups)
        models[model] = {
            "ssr_by_lead": row["ssr_by_lead"]["value"],
            "new_waves": new_waves(members[:, :, 0, 0], quiet[:, 0, 0, 0], v),
            "ms_per_state": 1e3 * seconds / members[:, :, :, 0, 0, 0].numel(),
            "evaluations": costs_per_state(ensembles, model, 32)["evaluations_per_state"]
            if model in ensembles.samplers
            else 0.0,
        }
        print(f"{model:20}", models[model], flush=True)
    crps = {model: float(scores[model]["crps"].mean()) for model in CHEAP}
    cheap = min(crps, key=crps.get)
    others = {"exact": "exact", "cheap": cheap} | {name: name for name in ("scoring",) if name in scores}
    for model in models:
        for name, other in others.items():
            ratios = compare_ensembles(scores[model], scores[other], settings.num_bootstrap, seed, groups)
            models[model][f"over {name}"] = {
                key: ratios[key] for key in ("crps", "crps_by_lead", "trajectory_score") if key in ratios
            }
    key = {"column": "ensembles", "seed": seed, "split": truth.split, "processor": processor("cpu")}
    return {"key": key, "best_cheap": cheap, "starts": len(rows), "models": models}


def record_of(config: Config, task: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "task": task,
        "context_frames": config.evaluate.context_frames,
        "data_seed": config.data.seed,
        "entries": entries,
        "environment": describe_environment(1, torch.device("cpu")),
    }


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of all seeds, in their order; a new one replaces the old one of its seed."""
    by_seed = {entry["key"]["seed"]: entry for entry in (*old, *new)}
    return [by_seed[seed] for seed in sorted(by_seed)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/excitable.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parse(parser)
    runs, name = [], load_config(args.config, args.overrides).run.name
    for seed in args.seeds:
        run = [f"run.seed={seed}", f"run.name={name}_{seed}" if seed else f"run.name={name}"]
        config = load_config(args.config, [*args.overrides, *run])
        runs.append(assess(config))
        for model, row in runs[-1]["models"].items():
            over = row["over exact"]
            leads = zip(*over["crps_by_lead"].values(), strict=True)
            print(
                f"{model:20}",
                ", ".join("{:.3f} [{:.3f}, {:.3f}]".format(*lead) for lead in leads),
                "energy {value:.3f} [{low:.3f}, {high:.3f}]".format(**over["trajectory_score"]),
                *(
                    "{} {value:.3f} [{low:.3f}, {high:.3f}]".format(name, **row[name]["crps"])
                    for name in ("over cheap", "over scoring")
                    if name in row
                ),
            )
    keep(record_of(config, TASK, merged(read(TASK, args.out)["entries"], runs)), args.out)


if __name__ == "__main__":
    main()
