"""Iterations and seconds of the user's CG on Darcy flow from zeros and from `ups.start`.

    make operator RUN=starts CONFIG=configs/small.yaml ARGS="data.tasks=[darcy2d]"
    OMP_NUM_THREADS=1 python -m bench.starts --run runs/starts    # adds to bench/results/starts.json

The system is a sparse matrix of SciPy (cell-centred finite volumes), its preconditioner the inverse for a = 1
by sine transforms, as in ups_solvers/darcy.py, or none; to a relative residual of 1e-8, 20 coefficients that
no training saw. Seconds: processor time; those of the start include the forecast.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import LinearOperator, cg

import ups
from bench.command import parser_of
from bench.entries import RESULTS, save
from ups_solvers import SOLVERS
from ups_solvers.darcy import apply_operator
from ups_solvers.initial import eigenbasis

UNSEEN, NUM, TOLERANCE, NUM_DRAWS = 10_000, 20, 1e-8, 1000


def matrix(a: np.ndarray) -> sp.csc_matrix:
    """-div(a grad) on cells (n, n), u = 0 on the wall."""
    n, at = len(a), np.arange(a.size).reshape(a.shape)
    rows, columns, values, diagonal = [], [], [], np.zeros(a.shape)
    for left, right in (((slice(-1), ...), (slice(1, None), ...)), ((..., slice(-1)), (..., slice(1, None)))):
        face = 0.5 * (a[left] + a[right]) * n * n
        diagonal[left] += face
        diagonal[right] += face
        rows += [at[left].ravel(), at[right].ravel()]
        columns += [at[right].ravel(), at[left].ravel()]
        values += [-face.ravel()] * 2
    for wall in ((0, ...), (-1, ...), (..., 0), (..., -1)):
        diagonal[wall] += 2 * a[wall] * n * n
    off = sp.coo_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))))
    return (off + sp.diags(diagonal.ravel())).tocsc()


def poisson(a: np.ndarray) -> LinearOperator:
    """The inverse of `matrix` for a = 1."""
    basis, values = (found.numpy() for found in eigenbasis(len(a), is_zero=True))
    inverse = 1 / (values[:, None] + values)

    def apply(r: np.ndarray) -> np.ndarray:
        return (basis.T @ (basis @ r.reshape(a.shape) @ basis.T * inverse) @ basis).ravel()

    return LinearOperator((a.size, a.size), apply)


def timed(function: Callable, *arguments: object) -> tuple:
    """The result of a call and its processor seconds."""
    started = time.process_time()
    return function(*arguments), time.process_time() - started


def solved(A: sp.csc_matrix, b: np.ndarray, M: LinearOperator | None, x0: np.ndarray | None) -> tuple:
    """(solution, number of iterations)."""
    count = [0]
    x, failed = cg(A, b, x0=x0, M=M, rtol=TOLERANCE, callback=lambda _: count.__setitem__(0, count[0] + 1))
    assert not failed and np.linalg.norm(b - A @ x) <= 2 * TOLERANCE * np.linalg.norm(b)
    return x, count[0]


def ratio(pairs: np.ndarray) -> list[float]:
    """[ratio of sums, low, high], 95 % over coefficients."""
    draw = np.random.default_rng(0).integers(0, len(pairs), (NUM_DRAWS, len(pairs)))
    some = pairs[draw].sum(1)
    return [
        float(pairs[:, 1].sum() / pairs[:, 0].sum()),
        *np.quantile(some[:, 1] / some[:, 0], [0.025, 0.975]),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--run", default="pretrained", help="a run with one Darcy task")
    options = parser.parse_args()
    start, path = ups.start(options.run), RESULTS / "starts.json"
    task, results = start.task, json.loads(path.read_text())
    size, rows = start.model.operator.head(task).codec.space[0], range(UNSEEN, UNSEEN + NUM)
    fields = [SOLVERS[task].trajectory(2022, row, resolution=size, parameter=1.0)[0].numpy() for row in rows]
    starts = [timed(start, u[:1]) for u in fields]
    for name in ("none", "Poisson"):
        found = []
        for (a, u), (x0, took) in zip(fields, starts, strict=True):
            A, b = matrix(a), np.ones(a.size)
            check = apply_operator(torch.from_numpy(a), torch.from_numpy(u)).numpy().ravel()
            assert np.allclose(A @ u.ravel(), check)
            M = None if name == "none" else poisson(a)
            (_, cold), cold_s = timed(solved, A, b, M, None)
            (_, warm), warm_s = timed(solved, A, b, M, x0.ravel())
            found.append([cold, warm, cold_s, warm_s + took, np.linalg.norm(x0 - u) / np.linalg.norm(u)])
        numbers = np.array(found)
        results[f"{options.run}, {task}, {name}"] = row = {
            "iterations": numbers[:, :2].mean(0).tolist(),
            "ratio": ratio(numbers[:, :2]),
            "seconds": numbers[:, 2:4].mean(0).tolist(),
            "ratio of seconds": ratio(numbers[:, 2:4]),
            "error of the start": float(np.median(numbers[:, 4])),
        }
        print(task, name, row, flush=True)
    save(path, results)


if __name__ == "__main__":
    main()
