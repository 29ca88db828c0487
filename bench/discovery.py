"""Find the equation of noisy films whose equation is known: ours next to PySINDy's weak form.

    python -m bench.discovery                               # all films, noises and columns, 5 draws
    python -m bench.discovery --film kdv --noise 0.2 --draws 5
    python -m bench.discovery --starts                      # forecasts of the four sets from noisy frames
    python -m bench.table                                   # write the tables of docs/discovery.md

Five single films of the literature and four sets of user data (bench/discovery_films.py) get white noise of
standard deviation noise * RMS, with a seed per draw. Columns: ours, and PySINDy 2.1's weak form alone and as
an ensemble (bench/discovery_pysindy.py), which get a library of terms with the degree and order of the truth.
PySINDy runs in an environment of its own, which is made in bench/out/pysindy-env unless --python names one.
Ours reads the film from a file as user data, cut into windows, with the default library.

Scores: whether the equation has the terms of the truth and no other; the worst relative error of a true
coefficient (1 if its term is missing); the relative l2 error of all; how many of the true coefficients that
were found lie within their 95 % intervals; processor seconds of one thread. Every result goes to
bench/results/discovery/FILM.json at once and is not computed again, unless --again replaces those named.

--starts: errors against the clean truth of forecasts of test trajectories by the equation that was found and
by the true one, each from the last of the noisy input frames and from the start estimated from all of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.apebench import call, environment
from bench.command import parser_of
from bench.discovery_films import FILMS, Film, noisy
from bench.eleven import described, has, processor, put, read
from bench.user_data import CONFIG, write, write_config
from ups.common.files import value_hash
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.build_cache import build_cache
from ups.data.cache import open_cache
from ups.models.assimilation import estimated
from ups.models.base_selection import Shortlist, cause_of_errors, fitted_candidates, select_base
from ups.models.bases import equation
from ups.models.bases.base import field_units
from ups.models.found_equation import found_equation
from ups.models.head import TaskHead
from ups.select import MEASUREMENT
from ups_discovery.terms import Term
from ups_discovery.units import unit_of

OUT, RESULTS = ROOT / "bench" / "out" / "discovery", ROOT / "bench" / "results" / "discovery"
STARTS = ROOT / "bench" / "results" / "discovery_starts"
SETS, START_NOISES = ("burgers_set", "ks_set", "fisher_set", "advection_set"), (0.01, 0.05, 0.1)
TRUE_STEPS = 16  # of the true equation, per frame
PACKAGES = ("pysindy==2.1.0",)
COLUMNS = ("ours", "weak", "ensemble")
FRESH = 5  # draws before this one were looked at when the choices of ours were made
NOISES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
NUM_WINDOWS, MIN_FRAMES, MAX_FRAMES = 60, 3, 50  # that one film is cut into

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


def config_of(name: str, u: np.ndarray, folder: Path, test_fraction: float = 0.05) -> Config:
    """Return the configuration of a film (trajectory, time, channel, *space) as user data, written to
    `folder`; one film is cut into windows. Equations are found without the test trajectories.
    """
    film, path = FILMS[name], folder / "film.npz"
    write(path, {field: u[:, :, channel] for channel, field in enumerate(film.fields)})
    settings: dict[str, Any] = {"base": ["equation"], "symmetries": []}
    if len(u) == 1:
        settings["cut"] = max(MIN_FRAMES, min(MAX_FRAMES, u.shape[1] // NUM_WINDOWS))
    config = write_config(path, CONFIG, name, film.dt, film.boundary, film.domain, settings)
    return load_config(config, [f"data.test_fraction={test_fraction}"])


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
    """Return a term of `FoundEquation` as `term_text` writes it."""
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


# ---- forecasts from noisy frames ---------------------------------------------------------------------------


def true_head(head: TaskHead, film: Film) -> TaskHead:
    """Return the head with the true equation of its film as its base."""
    settings, units = head.facts.base["settings"], field_units(head.codec)
    places = {word: axis for axis, word in enumerate("xyz")}
    terms: list[Term] = []
    values: list[tuple[int, float]] = []
    for channel, right_side in enumerate(film.equation.values()):
        for text, value in right_side.items():
            powers, factors = [0] * len(film.fields), []
            for word in text.split():
                field, _, axes = word.partition("_")
                field, _, power = field.partition("^")
                if axes:
                    factors.append((film.fields.index(field), tuple(places[axis] for axis in axes)))
                else:
                    powers[film.fields.index(field)] += int(power or 1)
            terms.append((tuple(powers), tuple(factors)))
            unit = unit_of(terms[-1], channel, units, (), settings["cell"], settings["frame"])
            values.append((channel, value / unit))
    steps = {"num_steps": TRUE_STEPS, "is_stiff": True, "is_coupled": False, "found": {}}
    base = equation.Equation(**{**settings, **steps, "terms": terms})
    for place, (channel, value) in enumerate(values):
        base.weight[0, channel, place] = value
    base.mean.copy_(units.shift)
    base.std.copy_(units.scale)
    truth = copy.deepcopy(head)
    truth.base = base
    return truth


def forecast_errors(name: str, clean: np.ndarray, u: np.ndarray) -> dict[str, Any]:
    """Return the pooled nRMSE against the clean frames of forecasts from noisy frames u of test trajectories
    (trajectory, time, channel, *space): found and true, by the equation that was found, with its start as
    validation selects it, and by the true one, with an estimated start; the same from the last frame.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        config = config_of(name, u, Path(folder), test_fraction=0.2)
        build_cache(config, name, progress=False)
        cache = open_cache(config, name)
        context, seed = cache.context(config), config.run.seed
        head, _ = select_base(cache, config.operator.base_steps, context, seed, torch.device("cpu"))
        cause = cause_of_errors(head, cache, context, seed)
        rows = cache.split["test"]
        w, raw = head.codec.decode(cache.batch(rows, 0, context)), cache.parameters[rows]
        u_ref = torch.from_numpy(clean[rows.numpy(), context:])

        def error(head: TaskHead, num_frames: int) -> float:
            start = estimated(head, w, raw) if num_frames > head.history else w[:, -head.history :]
            with torch.no_grad():
                frames = head.base_frames(start, head.parameter_batch(raw), u_ref.shape[1])
            u_pred = head.codec.denormalise(frames).double()
            space = (0, *range(2, u_ref.ndim))
            square = (u_pred - u_ref).square().mean(space) / u_ref.square().mean(space)
            return float(square.sqrt().mean())

        true = true_head(head, FILMS[name])
        return {
            **({"is_deterministic": cause.chosen == MEASUREMENT} if cause else {}),
            "start_frames": head.start_frames,
            "base": head.facts.base["name"],
            "context": context,
            "found": error(head, head.start_frames),
            "true": error(true, context),
            "found_from_last": error(head, 0),
            "true_from_last": error(true, 0),
        }


def run_starts(name: str, noise: float, draw: int, args: argparse.Namespace) -> None:
    """Score the forecasts of a draw, if they are not there."""
    key = key_of(name, "ours", noise, draw)
    if not args.again and has(read(name, STARTS), key):
        return
    frames = np.load(clean(name))
    row = forecast_errors(name, frames, noisy(frames, noise, draw))
    put(name, STARTS, {"key": key, "row": row, "environment": described(args.command)})
    print(f"{name} noise {noise:g} draw {draw}: {row['found'] / row['true']:.3f} times the true one's {row}")


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


def key_of(name: str, column: str, noise: float, draw: int) -> dict[str, Any]:
    """Return what identifies a result."""
    film = FILMS[name]
    key = {"column": column, "noise": noise, "draw": draw, "film": edition(film)}
    key["processor"] = processor("cpu")
    return (
        key if column == "ours" else key | {"library": [film.degree, film.order, film.width, film.threshold]}
    )


def rows_of(name: str, column: str, noise: float, draws: list[int], python: Path | None) -> list[dict]:
    """Return the rows, each with its draw and column. PySINDy's two columns come together."""
    path, truth = clean(name), FILMS[name].equation
    if column == "ours":
        u = np.load(path)
        return [{"draw": draw, "column": column, **ours(name, noisy(u, noise, draw))} for draw in draws]
    request = {"film": name, "frames": str(path), "noise": noise, "draws": draws}
    found = call(python, "fit", request, OUT / f"{name}_found.npz", "discovery_pysindy.py")
    return [row | scores(row["equation"], truth) for row in json.loads(str(found["rows"]))]


def run_noise(name: str, column: str, noise: float, draws: range, args: argparse.Namespace) -> None:
    """Find and score the equations of all draws whose result does not exist."""
    keys = {draw: key_of(name, column, noise, draw) for draw in draws}
    missing = [draw for draw in draws if args.again or not has(read(name, RESULTS), keys[draw])]
    # one by one for ours, which takes longer, so that little is lost if it is interrupted
    for some in [[draw] for draw in missing] if column == "ours" else [missing] * bool(missing):
        for row in rows_of(name, column, noise, some, args.python):
            key = key_of(name, row.pop("column"), noise, row.pop("draw"))
            facts = {"truth": FILMS[name].equation, "published": FILMS[name].published}
            put(name, RESULTS, {"key": key, "row": row, "environment": described(args.command)}, **facts)
            print(
                f"{name} {key['column']} noise {noise:g} draw {key['draw']}: "
                f"{'right' if row['is_right'] else 'wrong'} terms, worst error {row['worst']:.2g}, "
                f"{row['seconds']:.0f} s {row.get('doubt', '')}",
                flush=True,
            )


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = parser_of(__doc__)
    parser.add_argument("--film", nargs="+", choices=tuple(FILMS), default=list(FILMS))
    parser.add_argument("--noise", nargs="+", type=float, default=list(NOISES), help="sigma over RMS")
    parser.add_argument("--column", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--first", type=int, help=f"number of the first draw; of ours {FRESH}, else 0")
    parser.add_argument("--starts", action="store_true", help="forecasts of the four sets from noisy frames")
    parser.add_argument("--again", action="store_true", help="compute results that exist, and replace them")
    parser.add_argument("--python", type=Path, help="an interpreter that has PySINDy")
    args = parser.parse_args(argv)
    args.command = ["python", "-m", "bench.discovery", *argv]
    torch.set_num_threads(1)
    if args.starts:
        for name in (name for name in SETS if name in args.film):
            for noise in (noise for noise in START_NOISES if noise in args.noise):
                for draw in range(args.first or FRESH, (args.first or FRESH) + args.draws):
                    run_starts(name, noise, draw, args)
        return
    columns = ["ours"] * ("ours" in args.column) + ["weak"] * bool({"weak", "ensemble"} & {*args.column})
    if "weak" in columns:
        args.python = environment(args.python, "pysindy", PACKAGES)
    for name in args.film:
        for noise in args.noise:
            for column in columns:
                first = args.first if args.first is not None else FRESH * (column == "ours")
                run_noise(name, column, noise, range(first, first + args.draws), args)


if __name__ == "__main__":
    main()
