"""How near to the exact law of a coefficient the Gaussian behind the steady prior is, by the basis of its
covariance.

    python -m bench.covariance --fields 800

darcy2d_grf on 32 x 32 cells, whose covariance is known. Of every basis that `LinearPosterior.fit` chooses
from: the Kullback- Leibler divergence of the exact Gaussian from the fitted one, in nats (means aside), and
the code length by which it is chosen, sums of logarithms of held-out variances, beside that of the exact
covariance; with eight images of every field under the square's symmetries. No test data: fields are drawn for
it."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from ups.common.seeds import generator
from ups.generative import observation
from ups.models.windows import symmetry
from ups.report.tables import markdown
from ups.tasks import darcy_grf, get_task

CELLS = 32


def rows(fields: Tensor) -> list[list[str]]:
    unit = torch.eye(CELLS * CELLS, dtype=torch.float64).view(-1, CELLS, CELLS)
    exact = darcy_grf.apply_covariance(unit).flatten(1)
    draw = generator(0, "images")
    task = get_task("darcy2d_grf")  # without vectors: no codec is asked what their components are
    images = [symmetry(task, (CELLS, CELLS), draw)(fields, None) for _ in range(observation.IMAGES)]
    mean = torch.stack([part.flatten(1).double().mean(0) for part in images]).mean(0)
    kinds = {
        "principal components": observation.component_basis(images, mean),
        **{kind.__name__: observation.wave_basis(images, mean, kind) for kind in observation.WAVES},
    }

    def row(name: str, basis: Tensor, variance: Tensor) -> list[str]:
        along = torch.einsum("ik,ij,jk->k", basis, exact, basis) / variance
        code = float(variance.log().sum())
        divergence = 0.5 * (float(along.sum()) - len(along) + code - float(torch.logdet(exact)))
        return [name, f"{divergence:.3g}", f"{code:.1f}"]

    return [
        *(row(name, *found) for name, found in kinds.items()),
        ["exact", "0", f"{float(torch.logdet(exact)):.1f}"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fields", type=int, default=800)
    count = parser.parse_args().fields
    fields = torch.stack([darcy_grf.sample_log_coefficient(0, index, CELLS) for index in range(count)])[
        :, None
    ].float()
    print("\n".join(markdown(["basis", "divergence, nats", "code length"], rows(fields))))


if __name__ == "__main__":
    main()
