"""barkley2d: ensembles beside exact samples over the first leads, and where they start new waves.

    make train CONFIG=configs/excitable.yaml
    python -m bench.excitable --config configs/excitable.yaml [--seeds 0 1 2] [run.name=..]

Needs finished runs, one per seed: run.name for seed 0, run.name_SEED for others. For every model and lead it
scores fair CRPS and for all leads the energy score of trajectories, over those of exact samples, of the best
cheap ensemble and of the network trained by scores, with paired 95 % intervals over initial conditions. A new
wave is at least CELLS connected cells in which u is above 0.5 at the first lead, and without kicks would be
below 0.2: its number per sample, its area, and v there at the start, which is large in refractory tissue.
`no_kicks` is the equation without noise. Writes bench/results/NAME/barkley2d.json, NAME of the run, where
entries of other seeds are kept; the table is made by bench/table.py.

    python -m bench.excitable --climate 40 --config configs/excitable.yaml
    python -m bench.excitable --climate 400 --task burgers1d_forced --starts 100 --exact 8 \
        --config configs/small.yaml

instead writes bench/results/climate/NAME.json: rollouts of --members from each start, by resampled residuals
and samplers with at most one evaluation a frame. Of the second half of the frames: variance and energy by
octave over those of exact samples from the same starts, and the correlation with the start.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.command import parse, parser_of
from bench.entries import RESULTS, processor, put
from ups.config.load import load_config
from ups.config.schema import Config
from ups.evaluation.ensemble import Ensembles, costs_per_state, load_samplers, rollouts
from ups.evaluation.reference_ensembles import RolloutErrors, sample_exactly, sample_law
from ups.evaluation.truth import Truth, open_truth
from ups.generative.residuals import TransientResiduals
from ups.metrics.ensembles import compare_ensembles, score_ensemble
from ups.metrics.intervals import Resamples, halves
from ups.metrics.joint import score_trajectories
from ups.metrics.spectra import octaves
from ups.models.operator import load_operator
from ups_solvers import barkley

TASK, LEADS, CELLS = "barkley2d", 4, 4
CHEAP = ("operator", "dressed_conditional", "waves", "dressed_resampled", "analogs")


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
    with patch.object(barkley, "RATE", 0.0):
        return sample_exactly(truth, 0, rows, LEADS, 1)


def load(config: Config, task: str) -> tuple[Ensembles, Tensor]:
    """The ensembles of the finished stages of a run, and the rows on which they are scored: one start of each
    of evaluate.ensemble_trajectories of evaluate.split."""
    device = torch.device("cpu")
    operator, truth = load_operator(config.run_dir / "operator", device), open_truth(config, task)
    stages = [stage for stage in config.evaluate.stages if stage != "operator"]
    samplers = load_samplers(config.run_dir, stages, device, operator)
    source = TransientResiduals(operator, truth.cache)
    rows = truth.cache.split[truth.split][truth.one_of_each(config.evaluate.ensemble_trajectories)]
    return Ensembles(source, truth, samplers, config.run.seed), rows


def assess(config: Config) -> dict[str, Any]:
    """The first leads of all models of a finished run on the split of evaluate.split."""
    settings, seed = config.evaluate, config.run.seed
    ensembles, rows = load(config, TASK)
    truth = ensembles.truth
    groups, u_ref = truth.cache.trajectory[rows], truth.future(rows, LEADS)
    law = sample_law(truth, seed + 2, rows, LEADS, u_ref, settings.truth_members)
    quiet, v = without_kicks(truth, rows), truth.frames(rows, truth.context - 1, 1)[:, 0, 1]

    def score(members: Tensor) -> dict[str, Tensor]:
        return score_ensemble(members, u_ref, exact=law) | score_trajectories(members, u_ref, law)

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
        members = make()
        scores[model] = score(members)
        models[model] = {
            "new_waves": new_waves(members[:, :, 0, 0], quiet[:, 0, 0, 0], v),
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
            ratios = compare_ensembles(
                scores[model], scores[other], Resamples(settings.num_bootstrap, seed, groups)
            )
            models[model][f"over {name}"] = {
                key: ratios[key] for key in ("crps", "crps_by_lead", "trajectory_score") if key in ratios
            }
    return {"best_cheap": cheap, "starts": len(rows), "models": models}


def late_figures(
    u: Tensor, exact: Tensor, start: Tensor, boundary: str, resamples: Resamples
) -> dict[str, Any]:
    """Of the second half of rollouts u (n, M, T, C, *space), by field: variance and energy by octave over
    those of exact samples (n, K, T, C, *space), and correlation with the start (n, C, *space), less
    theirs."""
    points = (0, 1, 2, *range(4, u.ndim))
    mean, std = exact.double().mean(points, keepdim=True), exact.double().std(points, keepdim=True)

    def moments(x: Tensor) -> Tensor:
        d = (x[:, :, x.shape[2] // 2 :] - mean) / std
        energy = octaves(d.flatten(0, 1), boundary).unflatten(0, d.shape[:2]).mean((1, 2))
        products = (d.square(), d * ((start[:, None, None] - mean) / std))
        return torch.cat([*(part.flatten(4).mean((1, 2, 4))[..., None] for part in products), energy], 2)

    ours, theirs = moments(u), moments(exact)
    kept = [0, *range(2, ours.shape[2])]
    both = torch.cat([ours[:, :, kept].flatten(1), theirs[:, :, kept].flatten(1)], 1)
    found = resamples.interval(both, halves)
    return {
        "over exact": {end: torch.tensor(row).view(-1, len(kept)).tolist() for end, row in found.items()},
        "start less exact": resamples.interval(ours[:, :, 1] - theirs[:, :, 1], lambda mean: mean),
    }


def assess_climate(config: Config, args: Namespace) -> dict[str, Any]:
    """Long rollouts of the cheap samplers of a finished run."""
    ensembles, rows = load(config, args.task)
    truth, rows, members, seed = ensembles.truth, rows[: args.starts], args.members, config.run.seed
    exact = sample_exactly(truth, seed + 3, rows, args.climate, members + args.exact)
    start = truth.task.predicted(truth.frames(rows, truth.context - 1, 1))[:, 0]
    resamples, models = Resamples(config.evaluate.num_bootstrap, seed), {}
    cheap = [name for name, sampler in ensembles.samplers.items() if sampler.evaluations in (0, 1)]
    for model in ("exact", "dressed_resampled", *cheap):
        u = exact[:, :members]
        if model != "exact":
            u = rollouts(ensembles, model, rows, args.climate, members)
        models[model] = late_figures(u, exact[:, members:], start, truth.task.boundary, resamples)
        print(model, models[model], flush=True)
    facts = {"frames": args.climate, "task": args.task, "starts": len(rows), "members": members}
    facts |= {"fields": [*truth.task.moving], "base": ensembles.residuals.head.facts.base["name"]}
    return {**facts, "models": models}


def kept(config: Config, task: str, folder: Path, column: str, found: dict[str, Any]) -> None:
    """Write what was found, in place of an entry of the same seed."""
    key = {"column": column, "seed": config.run.seed, "split": config.evaluate.split}
    facts = {"context_frames": config.evaluate.context_frames, "data_seed": config.data.seed}
    put(task, folder, key | {"processor": processor("cpu")}, found, **facts)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--config", default="configs/excitable.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--climate", type=int, metavar="FRAMES")
    for name, default in (("task", TASK), ("starts", 32), ("exact", 2), ("members", 1)):
        parser.add_argument(f"--{name}", default=default, type=type(default), help="of long rollouts")
    args = parse(parser)
    config = load_config(args.config, args.overrides)
    if args.climate:
        kept(config, config.run.name, RESULTS / "climate", "climate", assess_climate(config, args))
        return
    name = config.run.name
    for seed in args.seeds:
        run = [f"run.seed={seed}", f"run.name={name}_{seed}" if seed else f"run.name={name}"]
        own = load_config(args.config, [*args.overrides, *run])
        kept(own, TASK, RESULTS / name, "ensembles", assess(own))


if __name__ == "__main__":
    main()
