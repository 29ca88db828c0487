"""Find the equation of noisy films whose equation is known.

    python -m bench.discovery                               # all films and noises, 5 draws
    python -m bench.discovery --film kdv --noise 0.2 --draws 5
    python -m bench.table                                   # write the table of docs/discovery.md

Five single films of the literature and four sets of user data (bench/discovery_films.py) get white noise of
standard deviation noise * RMS, with a seed per draw. The film is read from a file as user data, cut into
windows, with the default library. The table has PySINDy's weak form beside it, whose program is gone.

Scores: whether the equation has the terms of the truth and no other; the worst relative error of a true
coefficient (1 if its term is missing); the relative l2 error of all; how many of the true coefficients that
were found lie within their 95 % intervals; processor seconds of one thread. Every result goes to
bench/results/discovery/FILM.json at once and is not computed again.
"""

from __future__ import annotations

import itertools
import math
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.command import parser_of
from bench.discovery_films import FILMS, NOISES, Film, noisy
from bench.entries import RESULTS, is_there, processor, put
from bench.user_data import CONFIG, write, write_config
from ups.common.files import value_hash
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.build_cache import build_cache
from ups.data.cache import open_cache
from ups.models.base_selection import Shortlist, fitted_candidates
from ups.models.found_equation import found_equation

OUT, FOLDER = ROOT / "bench" / "out" / "discovery", RESULTS / "discovery"
FRESH = 5  # draws before this one were looked at when the choices of ours were made
NUM_WINDOWS, MIN_FRAMES, MAX_FRAMES = 60, 3, 50  # that one film is cut into
TEST_FRACTION = 0.05  # of the trajectories, which are not read

Equation = Mapping[str, Mapping[str, float]]  # field -> term -> coefficient
Intervals = Mapping[str, Mapping[str, float | None]]  # field -> term -> half width; None: unbounded


# ---- score -------------------------------------------------------------------------------------------------


def scores(found: Equation, truth: Equation, intervals: Intervals | None = None) -> dict[str, Any]:
    """Return is_right (the terms are those of the truth), worst and l2 (relative errors of coefficients),
    and with intervals num_inside of num_intervals true coefficients that were found.
    """
    pairs = [
        (found.get(name, {}).get(term, 0.0), truth[name].get(term, 0.0), name, term)
        for name in truth
        for term in {**truth[name], **found.get(name, {})}
    ]
    row: dict[str, Any] = {
        "is_right": all((value != 0) == (true != 0) for value, true, *_ in pairs),
        "worst": max(abs(value - true) / abs(true) for value, true, *_ in pairs if true),
        "l2": math.sqrt(sum((v - t) ** 2 for v, t, *_ in pairs) / sum(t**2 for _, t, *_ in pairs)),
    }
    if intervals is not None:
        widths = [(v - t, intervals[name][term]) for v, t, name, term in pairs if v and t]
        row["num_inside"] = sum(width is None or abs(error) <= width for error, width in widths)
        row["num_intervals"] = len(widths)
    return row


# ---- ours --------------------------------------------------------------------------------------------------


def config_of(name: str, u: np.ndarray, folder: Path) -> Config:
    """Return the configuration of a film (trajectory, time, channel, *space) as user data, written to
    `folder`; one film is cut into windows. Equations are found without the test trajectories.
    """
    film, path = FILMS[name], folder / "film.npz"
    write(path, {field: u[:, :, channel] for channel, field in enumerate(film.fields)})
    settings: dict[str, Any] = {"base": ["equation"], "symmetries": []}
    if len(u) == 1:
        settings["cut"] = max(MIN_FRAMES, min(MAX_FRAMES, u.shape[1] // NUM_WINDOWS))
    config = write_config(path, CONFIG, name, film.dt, film.boundary, film.domain, settings)
    return load_config(config, [f"data.test_fraction={TEST_FRACTION}"])


def equation_of(config: Config, task: str) -> tuple[Equation, Intervals, str]:
    """Return the equation that validation prefers, half widths of its 95 % intervals, and the reason why it
    is not stated, "" if it is; no terms if no equation beats persistence.
    """
    build_cache(config, task, progress=False)
    cache = open_cache(config, task)
    shortlist = Shortlist(cache, config.context(task), config.run.seed)
    for name, head in fitted_candidates(cache, config.operator.base_steps, 0, torch.device("cpu")):
        shortlist.add(name, head)
    if not shortlist.kept:
        return {}, {}, "no equation beats persistence"
    # what `model.equation(task)` returns of a trained model with this base
    found = found_equation(shortlist.select()[0])
    values: dict[str, dict[str, float]] = {}
    widths: dict[str, dict[str, float | None]] = {}
    for one in found.terms:
        term, width = text_of(one.latex), one.high - one.value
        values.setdefault(one.field, {})[term] = one.value
        widths.setdefault(one.field, {})[term] = width if math.isfinite(width) else None
    return values, widths, found.doubt


def text_of(latex: str) -> str:
    """Return a term of `FoundEquation` as `Film.equation` has it, such as "u^2 v" or "u u_x"."""
    derivative = re.compile(r"\\partial_\{([^}]*)\} (\w+)")
    words = [
        derivative.sub(lambda match: f"{match[2]}_{match[1].replace(' ', '')}", word)
        for word in latex.split(r"\, ")
    ]
    return " ".join(words).replace("{", "").replace("}", "")


def ours(name: str, u: np.ndarray) -> dict[str, Any]:
    """Return the row of ours. An equation that is not stated counts as none; it is kept as "doubted"."""
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        config = config_of(name, u, Path(folder))
        started = time.process_time()
        found, widths, doubt = equation_of(config, name)
        seconds = time.process_time() - started
    row = {"equation": found, "widths": widths, "seconds": seconds, "doubt": doubt}
    if doubt:
        row |= {"equation": {}, "widths": {}, "doubted": found}
    return row | scores(row["equation"], FILMS[name].equation, row["widths"])


# ---- command -----------------------------------------------------------------------------------------------


def clean(name: str) -> Path:
    """Return the file with the frames of a film (trajectory, time, channel, *space), solved once."""
    path = OUT / f"{name}_{edition(FILMS[name])}.npy"
    if not path.is_file():
        OUT.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npy")
        np.save(partial, FILMS[name].make())
        partial.replace(path)
    return path


def edition(film: Film) -> str:
    """Return what identifies a film: its equation, domain and time step."""
    return value_hash([film.equation, film.domain, film.dt, film.boundary])[:8]


def run(name: str, noise: float, draw: int) -> None:
    """Find and score the equation of a draw unless the result exists."""
    film = FILMS[name]
    key = {"column": "ours", "noise": noise, "draw": draw, "film": edition(film)}
    key["processor"] = processor()
    if is_there(name, FOLDER, key):
        return
    row = ours(name, noisy(np.load(clean(name)), noise, draw))
    put(name, FOLDER, key, {"row": row}, truth=film.equation, published=film.published)
    print(
        f"{name} noise {noise:g} draw {draw}: {'right' if row['is_right'] else 'wrong'} terms, worst error "
        f"{row['worst']:.2g}, {row['seconds']:.0f} s {row['doubt']}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--film", nargs="+", choices=tuple(FILMS), default=list(FILMS))
    parser.add_argument("--noise", nargs="+", type=float, default=list(NOISES), help="sigma over RMS")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--first", type=int, default=FRESH, help="number of the first draw")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    draws = range(args.first, args.first + args.draws)
    for name, noise, draw in itertools.product(args.film, args.noise, draws):
        run(name, noise, draw)


if __name__ == "__main__":
    main()
