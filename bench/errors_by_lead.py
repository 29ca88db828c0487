"""Cheap ensembles from the errors of the operator's rollouts, lead by lead, beside those of the report.

    python -m bench.errors_by_lead --config configs/uncertain.yaml --task burgers1d_forced

    dressed_leads      the operator's rollout plus the errors of random reserved rollouts
    normal_leads       the operator's rollout plus Gaussian noise with the mean and scale of all errors
    normal_analogs     the same, of the NEAR rollouts from the most similar starts

Needs a finished run with a diffusion stage. Prints the fair CRPS over the operator's, with its 95 % interval
over initial conditions. In no recorded run was one of them the best of the cheap ensembles, so the report
leaves them out.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.command import parse
from bench.excitable import load
from ups.common.device import send
from ups.config.load import load_config
from ups.evaluation.ensemble import rollouts
from ups.evaluation.reference_ensembles import RolloutErrors
from ups.metrics.ensembles import compare_ensembles, score_ensemble
from ups_discovery.seeds import generator

NEAR = 64  # rollouts to which a Gaussian of each start is fitted


class ErrorsByLead(RolloutErrors):
    def random(self, rows: Tensor, num_members: int) -> Tensor:
        """Positions (rows, num_members) of random errors, different for each row."""
        orders = [
            torch.randperm(len(self.rows), generator=generator(self.seed, "errors", row))
            for row in rows.tolist()
        ]
        return torch.stack(orders)[:, torch.arange(num_members) % len(self.rows)]

    @torch.no_grad()
    def sample_normal(
        self, choose: Callable[[Tensor, int], Tensor] | None, rows: Tensor, num_frames: int, num_members: int
    ) -> Tensor:
        """The operator's rollouts plus noise with the mean and scale of the NEAR errors that `choose` returns
        positions of, or of all errors, in physical units."""
        parts = []
        for some in self.truth.cache.row_blocks(rows, num_frames * max(num_members, NEAR), 64):
            near = self.errors[choose(some, NEAR)] if choose else self.errors[None]
            mean, scale = near.mean(1, keepdim=True), near.std(1, keepdim=True)
            shape = (num_members, *self.errors.shape[1:])
            noise = [
                torch.randn(shape, generator=generator(self.seed, "normal", row)) for row in some.tolist()
            ]
            parts.append(self.add(some, mean + scale * send(torch.stack(noise), self.device)))
        return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/uncertain.yaml")
    parser.add_argument("--task", default="burgers1d_forced")
    args = parse(parser)
    config = load_config(args.config, args.overrides)
    settings, seed = config.evaluate, config.run.seed
    ensembles, rows = load(config, args.task, "diffusion")
    truth = ensembles.truth
    num_frames = min(settings.ensemble_frames, truth.num_frames, truth.cache.num_frames - truth.context)
    errors = ErrorsByLead(ensembles, num_frames)
    u_ref, groups = truth.future(rows, num_frames), truth.cache.trajectory[rows]

    def score(members: Tensor) -> dict[str, Tensor]:
        return score_ensemble(members, u_ref, truth.task.boundary)

    operator_scores = score(rollouts(ensembles, "operator", rows, num_frames, 1))
    for name, forecasts in {
        **{name: partial(rollouts, ensembles, name) for name in ("waves", "dressed_resampled")},
        "analogs": partial(errors.sample, errors.nearest),
        "dressed_leads": partial(errors.sample, errors.random),
        "normal_leads": partial(errors.sample_normal, None),
        "normal_analogs": partial(errors.sample_normal, errors.nearest),
    }.items():
        scores = score(forecasts(rows, num_frames, settings.members))
        ratio = compare_ensembles(scores, operator_scores, settings.num_bootstrap, seed, groups)["crps"]
        print(f"{name:18} {ratio['value']:.4f} [{ratio['low']:.4f}, {ratio['high']:.4f}]", flush=True)


if __name__ == "__main__":
    main()
