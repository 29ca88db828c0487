"""Power of drawn noise by wave number, over that of exact draws.

    python -m bench.spectrum --config configs/small.yaml --task burgers1d_forced

Needs a finished run of a task whose law is known. Members start at the context of test trajectories. The figure is the power of
their deviations from the mean of their ensemble, after the first and after a later frame, over that of exact draws: 1 is right,
above 1 is noise that the equation does not have. Exact power is printed as a fraction of its sum: where it is at rounding,
the ratio compares float32 rounding errors.
"""

import argparse
import itertools
from pathlib import Path

import torch
from torch import Tensor

from ups.config import load_config
from ups.evaluation.ensemble import Ensembles, load_samplers, rollouts
from ups.evaluation.rivals import draw_exactly
from ups.evaluation.truth import open_truth
from ups.generative.residuals import TransientResiduals
from ups.metrics.spectra import energy_spectrum
from ups.models.operator import load_operator

STAGES = ("diffusion", "consistency", "rival")


def deviation_power(members: Tensor, boundary: str) -> Tensor:
    """Power of the deviations from the mean of each ensemble by wave number, of members (rows, M, T, C, *space): (T, shells),
    summed over channels and averaged over rows."""
    num = members.shape[1]
    deviations = members.double() - members.double().mean(1, keepdim=True)
    return energy_spectrum(deviations.flatten(0, 1), boundary).sum(2).mean(0) * num / (num - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/small.yaml")
    parser.add_argument("--task", default="burgers1d_forced")
    parser.add_argument("--models", nargs="+", help="all trained ones and conditional waves")
    parser.add_argument("--edges", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16, 32, 43, 64],
                        help="first wave number of every band, and the end of the last")
    parser.add_argument("--lead", type=int, default=10, help="the later frame")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()

    config = load_config(args.config, args.overrides)
    device = torch.device("cpu")
    operator, truth = load_operator(config.run_dir / "operator", device), open_truth(config, args.task)
    stages = [stage for stage in STAGES if (Path(config.run_dir) / stage / "done.json").is_file()]
    ensembles = Ensembles(TransientResiduals(operator, truth.cache), truth, load_samplers(config.run_dir, stages, device),
                          config.run.seed)
    rows = truth.cache.split[truth.split][truth.one_of_each(args.rows)]
    boundary, leads = truth.task.boundary, [0, args.lead - 1]
    exact = deviation_power(draw_exactly(truth, config.run.seed + 7, rows, args.lead, 4 * args.members)[:, :, leads], boundary)

    def bands(power: Tensor) -> Tensor:
        return torch.stack([power[:, first:end].sum(1) for first, end in itertools.pairwise(args.edges)], 1)

    print(f"{'waves':>24}", *[f"{first:>4}-{end - 1:<4}" for first, end in itertools.pairwise(args.edges)])
    law = bands(exact)
    for lead, line in zip(leads, law / exact.sum(1, keepdim=True), strict=True):
        print(f"{'exact, fraction':>16} frame {lead + 1:2}", *[f"{value:9.1e}" for value in line.tolist()])
    for model in args.models or ["dressed_waves", *ensembles.samplers]:
        members = rollouts(ensembles, model, rows, args.lead, args.members)[:, :, leads]
        for lead, line in zip(leads, bands(deviation_power(members, boundary)) / law, strict=True):
            print(f"{model:>16} frame {lead + 1:2}", *[f"{value:9.3g}" for value in line.tolist()], flush=True)


if __name__ == "__main__":
    main()
