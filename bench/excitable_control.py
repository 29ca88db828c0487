"""The control of bench/excitable.py: in barkley2d_shown the kicks are forcing, so the future is certain.

    make train CONFIG=configs/excitable.yaml RUN=shown ARGS="data.tasks=[barkley2d_shown]"
    python -m bench.excitable_control --config configs/excitable.yaml run.name=shown

Needs a finished run, and the cache of barkley2d. Writes the spread of every ensemble and the error of its
mean by lead, both over the spread of exact samples of barkley2d, to bench/results/excitable_control/, and the
same at lead 1 over starts whose first frame has no kick. The table is made by bench/table.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.command import parse
from bench.eleven import keep, processor
from bench.excitable import LEADS, load, record_of, scored_rows
from bench.excitable import TASK as DRIVEN
from ups.config.load import load_config
from ups.config.schema import Config
from ups.evaluation.ensemble import rollouts
from ups.evaluation.reference_ensembles import sample_exactly
from ups.evaluation.truth import open_truth
from ups.metrics.ensembles import score_ensemble, summarise_ensemble
from ups.metrics.intervals import Resamples

TASK = "barkley2d_shown"
RESULTS = Path(__file__).parent / "results" / "excitable_control"
KICK = 0.01  # largest value of the forcing `kick` in a frame without one


def spread_of_exact_samples(config: Config) -> list[float]:
    """Of barkley2d, by lead."""
    truth = open_truth(config, DRIVEN)
    rows = scored_rows(config, truth)
    members = sample_exactly(truth, config.run.seed, rows, LEADS, config.evaluate.members)
    scores = score_ensemble(members, truth.future(rows, LEADS), truth.task.boundary)
    return summarise_ensemble(scores, Resamples(1, 0))["spread_by_lead"]


def assess(config: Config) -> dict[str, Any]:
    """The models of a finished run on the split of evaluate.split."""
    unit, (ensembles, rows) = spread_of_exact_samples(config), load(config, TASK)
    truth, head, models = ensembles.truth, ensembles.residuals.head, {}
    u_ref, forcing = truth.future(rows, LEADS), truth.forced(rows, head, LEADS)
    is_still = head.forcing_codec.denormalise(forcing)[:, 1, 0].flatten(1).amax(1) < KICK
    for model in ("operator", *ensembles.samplers):
        members = rollouts(ensembles, model, rows, LEADS, config.evaluate.members)
        scores = score_ensemble(members, u_ref, truth.task.boundary)
        still = summarise_ensemble({name: part[is_still] for name, part in scores.items()}, Resamples(1, 0))
        every = summarise_ensemble(scores, Resamples(1, 0))
        models[model] = {
            name: {
                "by_lead": [v / one for v, one in zip(every[f"{name}_by_lead"], unit, strict=True)],
                "without_kick": still[f"{name}_by_lead"][0] / unit[0],
            }
            for name in ("spread", "rmse")
        }
        print(f"{model:12}", models[model], flush=True)
    key = {"column": "control", "seed": config.run.seed, "split": truth.split, "processor": processor("cpu")}
    return {"key": key, "starts": len(rows), "without_kick": int(is_still.sum()), "models": models}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/excitable.yaml")
    args = parse(parser)
    config = load_config(args.config, [*args.overrides, f"data.tasks=[{DRIVEN}, {TASK}]"])
    keep(record_of(config, TASK, [assess(config)]), RESULTS)


if __name__ == "__main__":
    main()
