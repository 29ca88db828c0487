"""Power of drawn noise by wave number, over that of exact draws.

    python -m bench.spectrum --config configs/small.yaml --task burgers1d_forced

Needs a finished run of a task whose law is known. The figure is the power of members' deviations from the
mean of their ensemble over that of exact draws: 1 is right, above 1 is noise that the equation does not have.
One frame ahead, starts lie all along the test trajectories; at later leads members follow the context. Exact
power is printed as a fraction of its sum: where it is at rounding, the ratio compares float32 rounding
errors."""

import argparse
import itertools
from pathlib import Path

import torch
from torch import Tensor

from ups.config import load_config
from ups.evaluation.ensemble import Ensembles, load_samplers, one_step, rollouts
from ups.evaluation.reference_ensembles import draw_exactly
from ups.evaluation.truth import open_truth
from ups.generative.residuals import TransientResiduals
from ups.metrics.spectra import energy_spectrum
from ups.models.operator import load_operator

STAGES = ("diffusion", "consistency", "rival")


def deviation_power(members: Tensor, boundary: str) -> Tensor:
    """Power of the deviations from the mean of each ensemble by wave number, of members (rows, M, T, C,
    *space): (T, shells), summed over channels and averaged over rows."""
    num = members.shape[1]
    deviations = members.double() - members.double().mean(1, keepdim=True)
    return energy_spectrum(deviations.flatten(0, 1), boundary).sum(2).mean(0) * num / (num - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/small.yaml")
    parser.add_argument("--task", default="burgers1d_forced")
    parser.add_argument("--models", nargs="+", help="all trained ones and conditional waves")
    parser.add_argument(
        "--edges",
        type=int,
        nargs="+",
        default=[0, 1, 2, 4, 8, 16, 32, 43, 64],
        help="first wave number of every band, and the end of the last",
    )
    parser.add_argument("--lead", type=int, default=10, help="the later lead")
    parser.add_argument("--windows", type=int, default=512, help="starts of a single frame")
    parser.add_argument("--rows", type=int, default=100, help="rollouts")
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()

    config = load_config(args.config, args.overrides)
    device = torch.device("cpu")
    operator, truth = load_operator(config.run_dir / "operator", device), open_truth(config, args.task)
    stages = [stage for stage in STAGES if (Path(config.run_dir) / stage / "done.json").is_file()]
    ensembles = Ensembles(
        TransientResiduals(operator, truth.cache),
        truth,
        load_samplers(config.run_dir, stages, device),
        config.run.seed,
    )
    names, boundary = args.models or ["dressed_waves", *ensembles.samplers], truth.task.boundary
    rows = truth.cache.split[truth.split][truth.one_of_each(args.rows)]

    def bands(members: Tensor) -> Tensor:
        power = deviation_power(members, boundary)[0]
        return torch.stack([power[first:end].sum() for first, end in itertools.pairwise(args.edges)])

    windows = one_step(ensembles, args.windows, args.members, names, num_exact=4 * args.members)
    later = draw_exactly(truth, config.run.seed + 7, rows, args.lead, 4 * args.members)[:, :, -1:]
    laws = {1: bands(windows.law), args.lead: bands(later)}
    print(f"{'waves':>24}", *[f"{first:>4}-{end - 1:<4}" for first, end in itertools.pairwise(args.edges)])
    for lead, law in laws.items():
        print(
            f"{'exact, fraction':>16} lead {lead:3}",
            *[f"{value:9.1e}" for value in (law / law.sum()).tolist()],
        )
    for model in names:
        later = rollouts(ensembles, model, rows, args.lead, args.members)[:, :, -1:]
        drawn = {1: bands(ensembles.residuals.decode(windows.draws[model])), args.lead: bands(later)}
        for lead, law in laws.items():
            print(
                f"{model:>16} lead {lead:3}",
                *[f"{value:9.3g}" for value in (drawn[lead] / law).tolist()],
                flush=True,
            )


if __name__ == "__main__":
    main()
