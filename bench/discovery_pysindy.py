"""What bench/discovery.py runs in PySINDy's own environment: its weak form, alone and as an ensemble.

    python discovery_pysindy.py fit REQUEST.json OUT.npz

REQUEST has a film of bench/discovery_films.py, the file with its frames, a noise and the draws of it. OUT has
a list in JSON: for each draw and column the equation (field -> term -> coefficient) and processor seconds.

The library has all powers up to the film's degree, its derivatives and, if the equation has any, products of
both. Columns of the weak form and the change in time are scaled to length 1; then the film's threshold is the
smallest contribution of a term. Widths of test functions and thresholds were chosen per film, knowing the
truth, on two other draws of noise. The ensemble refits bags of test functions and takes the median: a term
stays if most bags have it.
"""

import itertools
import json
import sys
import time
import warnings

import numpy as np
import pysindy
from pysindy.feature_library import PolynomialLibrary, WeakPDELibrary
from pysindy.optimizers import STLSQ, EnsembleOptimizer

from bench.discovery_films import FILMS, Film, noisy, term_text

NUM_WINDOWS, NUM_BAGS, NUM_TRAJECTORIES = (
    500,
    50,
    16,
)  # test functions of a film, refits, trajectories of a set
RIDGE = 1e-5
DEGREE = 6  # of the test functions (1 - x^2)^p, more than the highest derivative


def library_of(film: Film, shape: tuple[int, ...], num_windows: int) -> tuple[WeakPDELibrary, list[str]]:
    """Return the library for films of shape (*space, time), and its terms in order."""
    low, high = film.domain
    axes = [low + (high - low) * (np.arange(num) + 0.5) / num for num in shape[:-1]]
    axes.append(film.dt * np.arange(shape[-1]))
    powers = PolynomialLibrary(degree=film.degree, include_bias=False)
    lengths = [high - low] * len(shape[:-1]) + [float(axes[-1][-1])]
    library = WeakPDELibrary(
        function_library=powers,
        derivative_order=film.order,
        spatiotemporal_grid=np.stack(np.meshgrid(*axes, indexing="ij"), -1),
        include_interaction=film.has_products,
        K=num_windows,
        H_xt=[film.width * length for length in lengths],
        p=DEGREE,
    )
    channels = range(len(film.fields))
    powers.fit(np.zeros((2, len(film.fields))))
    zero, rows = tuple(0 for _ in channels), [tuple(map(int, row)) for row in powers.powers_]
    axes_of = [
        [axis for axis, order in enumerate(orders) for _ in range(order)] for orders in library.multiindices
    ]
    terms = [
        *((row, ()) for row in rows),
        *((zero, ((channel, axes),)) for axes in axes_of for channel in channels),
    ]
    if film.has_products:
        terms += [(row, ((c, axes),)) for axes, c, row in itertools.product(axes_of, channels, rows)]
    return library, [term_text(*term, film.fields) for term in terms]


def weak_form(library: WeakPDELibrary, films: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix A (test functions, terms) and b (test functions, fields) of films (*space, time,
    channel).
    """
    library.fit(films)
    a = np.concatenate([np.asarray(part) for part in library.transform(films)])
    return a, np.concatenate([library.convert_u_dot_integral(u) for u in films])


def equations(
    a: np.ndarray, b: np.ndarray, terms: list[str], film: Film, is_ensemble: bool
) -> dict[str, dict[str, float]]:
    """Return field -> term -> coefficient."""
    sizes, found = np.linalg.norm(a, axis=0), {}
    for name, column in zip(film.fields, b.T, strict=True):
        size = np.linalg.norm(column)
        scaled, target = a / sizes, column[:, None] / size
        optimizer = STLSQ(threshold=film.threshold, alpha=RIDGE)
        if is_ensemble:
            optimizer = EnsembleOptimizer(optimizer, bagging=True, n_models=NUM_BAGS)
        w = optimizer.fit(scaled, target).coef_[0] * size / sizes
        found[name] = {term: float(value) for term, value in zip(terms, w, strict=True) if value}
    return found


def fit(request: dict) -> list[dict]:
    warnings.filterwarnings("ignore", "Sparsity parameter is too big")  # then the equation has no terms
    film, rows = FILMS[request["film"]], []
    clean = np.load(request["frames"])
    for draw in request["draws"]:
        u = noisy(clean, request["noise"], draw)[:NUM_TRAJECTORIES]
        u = np.moveaxis(u, (1, 2), (-2, -1))  # trajectory, *space, time, channel
        np.random.seed(draw)  # PySINDy places its test functions by the global state
        started = time.process_time()
        library, terms = library_of(film, u.shape[1:-1], NUM_WINDOWS // len(u))
        a, b = weak_form(library, list(u))
        shared = time.process_time() - started
        for column in ("weak", "ensemble"):
            started = time.process_time()
            found = equations(a, b, terms, film, column == "ensemble")
            seconds = shared + time.process_time() - started
            row = {"draw": draw, "column": column, "equation": found, "seconds": seconds}
            rows.append(row | {"pysindy": pysindy.__version__})
    return rows


if __name__ == "__main__":
    command, request, out = sys.argv[1:]
    with open(request, encoding="utf-8") as file:
        np.savez(out, rows=json.dumps({"fit": fit}[command](json.load(file))))
