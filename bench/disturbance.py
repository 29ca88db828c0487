"""How the corrector's training states are disturbed, and whether it sees what was before: chosen on
validation.

    python -m bench.disturbance --config configs/small.yaml --task burgers1d_forced --steps 450 --seeds 0 1

Needs the task's cache (`make cache`). Trains one operator for the task and, for every variant and seed, a
corrector of the configured length (train_operator.py and train_diffusion.py as they are, under
bench/out/disturbance/). Scores rollouts of the validation split: fair CRPS over the operator's, error of the
mean over the operator's at the last lead, spread over skill by lead. No test trajectory is read. Prints a row
per corrector, writes bench/out/disturbance/results.json."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from ups.config import DEFAULT_OVERLAY, load_config
from ups.evaluation.ensemble import Ensembles, load_samplers, rollouts
from ups.evaluation.truth import open_truth
from ups.generative import conditions
from ups.generative import residuals as residual
from ups.metrics import ensembles as probabilistic
from ups.models.base_selection import stratified_rows
from ups.models.bases.base import ParameterBatch
from ups.models.operator import load_operator

ROOT = Path("bench/out/disturbance")
# share of disturbed states, smallest and largest size over the residual's, whether what was before is seen
VARIANTS = {
    "clean": (0.0, 0.01, 1.0, True),
    "half_0.006_0.6": (0.5, 0.006, 0.6, True),
    "half_0.01_1": (0.5, 0.01, 1.0, True),
    "most_0.006_0.6": (0.75, 0.006, 0.6, True),
    "most_0.01_1": (0.75, 0.01, 1.0, True),
    "most_0.01_1_no_memory": (0.75, 0.01, 1.0, False),
}


def put_in(variant: str) -> None:
    """Make this process's correctors be trained, and run, as the variant says."""
    residual.DISTURBED, residual.SMALLEST, residual.LARGEST, has_memory = VARIANTS[variant]
    conditions.SMALLEST = residual.SMALLEST
    if not has_memory:
        see = conditions.StateConditions.predict

        def forget(
            self: conditions.StateConditions,
            z: torch.Tensor,
            parameters: ParameterBatch,
            error: torch.Tensor | float = 0.0,
            led: torch.Tensor | None = None,
        ) -> tuple:
            return see(self, z[:, -self.head.history :], parameters, error)  # nothing is before

        conditions.StateConditions.predict = forget


def train(script: str, arguments: list[str], variant: str | None = None) -> None:
    """One stage by its script, in a process of its own."""
    put = f"from bench import disturbance; disturbance.put_in({variant!r})" if variant else ""
    run = (
        f"import runpy, sys; sys.argv = {[script, *arguments]!r}; runpy.run_path({script!r}, "
        f"run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", f"{put}\n{run}"], check=True, env={**os.environ, "PYTHONPATH": "."})


@torch.no_grad()
def score(
    config_path: str, overrides: list[str], task: str, variant: str, num_initial: int, num_members: int
) -> dict[str, object]:
    """Scores of the variant's rollouts on validation."""
    config = load_config(config_path, [*overrides, "evaluate.split=val"])
    put_in(variant)
    device = torch.device("cpu")
    operator = load_operator(config.run_dir / "operator", device)
    truth, samplers = open_truth(config, task), load_samplers(config.run_dir, ["diffusion"], device)
    ensembles = Ensembles(
        residual.TransientResiduals(operator, truth.cache), truth, samplers, config.run.seed
    )
    cache = truth.cache
    values = len(cache.parameter_index.unique())
    rows, num_frames = (
        stratified_rows(cache, "val", num_initial * values),
        min(config.evaluate.ensemble_frames, truth.num_frames),
    )
    u_ref = truth.future(rows, num_frames)
    groups, parts = cache.trajectory[rows], {}
    reference = rollouts(ensembles, "operator", rows, num_frames, 1)[:, 0]
    for model, members in (
        ("operator", reference[:, None]),
        ("corrector", rollouts(ensembles, "corrector", rows, num_frames, num_members)),
    ):
        parts[model] = probabilistic.score_ensemble(members, u_ref, cache.task.boundary, reference)
    seed, count = config.run.seed, config.evaluate.num_bootstrap
    summary = {
        model: probabilistic.summarise_ensemble(part, count, seed, groups) for model, part in parts.items()
    }
    versus = probabilistic.compare_ensembles(parts["corrector"], parts["operator"], count, seed, groups)
    ours, operator = (summary[model]["nrmse_mean_by_lead"] for model in ("corrector", "operator"))
    return {
        "crps": versus["crps"],
        "mean_by_lead": [a / b for a, b in zip(ours, operator, strict=True)],
        "ssr_by_lead": summary["corrector"]["ssr_by_lead"],
        "initial_conditions": len(groups.unique()),
    }


def scored_apart(args: argparse.Namespace, overrides: list[str], variant: str) -> dict[str, object]:
    """`score` in a process of its own, for `put_in` changes the module."""
    call = (args.config, overrides, args.task, variant, args.initial, args.members)
    code = f"import json; from bench import disturbance; print(json.dumps(disturbance.score(*{call!r})))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(DEFAULT_OVERLAY))
    parser.add_argument("--task", default="burgers1d_forced")
    parser.add_argument("--steps", type=int, default=450, help="of the operator, for this task alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--initial", type=int, default=100, help="initial conditions of the validation split")
    parser.add_argument("--members", type=int, default=8)
    args = parser.parse_args()
    results: dict[str, dict] = {}
    path = ROOT / "results.json"
    if path.is_file():
        results = json.loads(path.read_text(encoding="utf-8"))
    for seed in args.seeds:
        shared = [
            f"data.tasks=[{args.task}]",
            f"run.root={ROOT}",
            f"run.seed={seed}",
            f"operator.train.steps={args.steps}",
        ]
        first = f"operator-{seed}"
        train("train_operator.py", ["--config", args.config, *shared, f"run.name={first}"])
        for variant in args.variants:
            name = f"{variant}-{seed}"
            if name not in results:
                folder = ROOT / name
                folder.mkdir(parents=True, exist_ok=True)
                if not (folder / "operator").exists():
                    (folder / "operator").symlink_to((ROOT / first / "operator").absolute())
                overrides = [*shared, f"run.name={name}"]
                train("train_diffusion.py", ["--config", args.config, *overrides], variant)
                results[name] = scored_apart(args, overrides, variant)
                path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            row = results[name]
            crps, calibration = (
                row["crps"],
                ", ".join(f"{row['ssr_by_lead'][lead]:.2f}" for lead in (0, 2, -1)),
            )
            print(
                f"{name:24} CRPS over the operator's {crps['value']:.3f} [{crps['low']:.3f}, "
                f"{crps['high']:.3f}], error of the "
                f"mean at the last lead {row['mean_by_lead'][-1]:.3f}, spread/skill at leads 1, 3, last "
                f"{calibration}",
                flush=True,
            )


if __name__ == "__main__":
    main()
