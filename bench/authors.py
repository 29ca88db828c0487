"""One equation, several authors' solvers: train on the data of one author, test on those of all.

    python -m bench.authors --budget 60 --search 60                       # both equations
    python -m bench.authors --budget 60 --search 60 --equation burgers --python other/bin/python
    python -m bench.table                                                 # the table of docs/results.md

    burgers: u_t + u u_x = nu u_xx          periodic, 1D
    fisher:  u_t = nu lap u + r u (1 - u)   periodic, 2D

All authors get the same starts, coefficients, grid and frame interval (bench/authors_solvers.py says how each
solves them). Their packages are installed in an environment of their own, bench/out/phi-env. The distance
between two authors' data is the error of one if the other is the truth: a model trained on the one is not
expected to be closer to the other.

Columns: ours; ours_persistence (no other base, settings of the search with generic bases); fno. Settings are
searched on the data of the first author and serve for all (bench/tune.py). Every model is trained for the
same processor time and gets the first frame. Results: bench/results/authors/EQUATION.json, one entry per
training, written at once; an existing one is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.apebench import environment
from bench.authors_solvers import AUTHORS
from bench.command import parser_of
from bench.compare import fit, settings_of
from bench.eleven import RESULTS, entry, has, keep, key_of, read
from bench.rivals import Settings
from bench.score import Errors, Split, load, rollout, summary, trivial, with_cache
from bench.search import Changes
from bench.tune import OUT, add_arguments, prepare
from bench.user_data import CONFIG, random_waves, write, write_config
from ups.common.files import value_hash
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config
from ups_discovery.boundary import PERIODIC

FOLDER = RESULTS / "authors"
PACKAGES = ("py-pde==0.59.0", "exponax==0.2.0", "jax[cpu]==0.10.2", "phiflow==3.4.0")
COLUMNS = ("ours", "ours_persistence", "fno", "unet")
SEED, NUM_TRAJECTORIES, NUM_FRAMES = 36, 120, 41


@dataclass(frozen=True)
class Equation:
    """Grid, frame interval, coefficients and starts: offset + amplitude * random waves."""

    ndim: int
    resolution: int
    num_modes: int
    dt: float
    coefficients: dict[str, float]
    offset: float = 0.0
    amplitude: float = 1.0

    def starts(self, count: int = NUM_TRAJECTORIES) -> np.ndarray:
        """Return (count, *space) float64."""
        waves = random_waves(range(count), SEED, self.num_modes, self.resolution, self.ndim, PERIODIC)
        return (self.offset + self.amplitude * waves).numpy()


EQUATIONS = {
    "burgers": Equation(1, 128, 5, 0.025, {"diffusivity": 0.01}),
    "fisher": Equation(2, 32, 3, 0.02, {"diffusivity": 0.005, "rate": 5.0}, offset=0.25, amplitude=0.25),
}


# ---- data --------------------------------------------------------------------------------------------------


def identity(equation: str) -> str:
    """Return what identifies the data of all authors."""
    return value_hash([asdict(EQUATIONS[equation]), SEED, NUM_TRAJECTORIES, NUM_FRAMES, PACKAGES])


def made(equation: str, author: str, python: Path | None) -> Path:
    """Return the file with an author's solutions; solve unless it is there."""
    path, facts = OUT / "authors" / identity(equation)[:8] / f"{equation}_{author}.npz", EQUATIONS[equation]
    if not path.is_file():
        found = solve(author, python, path, equation, [(facts.resolution, 0)], [facts.starts()])
        write(path, {"u": checked(found["u0"], facts, author)})
    return path


def solve(
    author: str,
    python: Path | None,
    path: Path,
    equation: str,
    tried: Sequence[tuple[int, int]],
    starts: Sequence[np.ndarray],
    **more: Any,
) -> dict[str, np.ndarray]:
    """Return what bench/authors_solvers.py makes of starts (n, *space), one array per grid. path: beside it
    are files for as long as it runs. Raises CalledProcessError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    given, result = (path.with_suffix(end) for end in (".given.npz", ".result.npz"))
    facts, grids = EQUATIONS[equation], {f"u{u.shape[-1]}": u for u in starts}
    more |= {"equation": equation, "dt": facts.dt, "num_frames": NUM_FRAMES, **facts.coefficients}
    np.savez(given, tried=tried, **grids, **more)
    script = ROOT / "bench" / "authors_solvers.py"
    subprocess.run([environment(python, "phi", PACKAGES), script, author, given, result], check=True)
    with np.load(result) as file:
        found = {name: file[name] for name in file.files}
    for done in (given, result):
        done.unlink()
    return found


def checked(u: np.ndarray, facts: Equation, author: str) -> np.ndarray:
    """Return u. Raises ValueError unless it has the right shape, the given starts and finite numbers."""
    starts = facts.starts()
    expected = (len(starts), NUM_FRAMES, *starts.shape[1:])
    if u.shape != expected or not np.isfinite(u).all() or not np.allclose(u[:, 0], starts, atol=1e-6):
        raise ValueError(
            f"{author} returned {u.shape} with {np.isfinite(u).mean():.0%} finite numbers; expected "
            f"{expected}, all finite, that begin with the given starts. See bench/authors_solvers.py and the "
            f"package's version."
        )
    return u


# ---- one training ------------------------------------------------------------------------------------------


def load_author(args: argparse.Namespace, author: str) -> tuple[argparse.Namespace, Config]:
    """Return arguments and configuration of one author's data, with its cache."""
    path = made(args.task, author, args.python)
    mine = vars(args) | {"config": write_config(path, args.config, args.task, EQUATIONS[args.task].dt)}
    return argparse.Namespace(**mine), with_cache(load_config(mine["config"], []), args.task)


def find_settings(column: str, args: argparse.Namespace, author: str) -> Settings | Changes:
    """Return the settings that a search finds on the data of `author`."""
    mine, config = load_author(args, author)
    problem, splits = load(config, args.task)
    if column != "ours_persistence":
        return settings_of(column, config, problem, splits["val"], mine)
    found = settings_of("ours_generic", config, problem, splits["val"], mine)
    return found | {f"task.{args.task}.base": ["persistence"]}


def distances(splits: dict[str, Split]) -> dict[str, dict[str, float]]:
    """Return author -> truth -> error of the author's data if the other author's are the truth."""
    return {
        one: {
            other: summary(Errors.of(mine.truth, truth.truth), truth, False, 1)["error"]
            for other, truth in splits.items()
        }
        for one, mine in splits.items()
    }


def evaluate(args: argparse.Namespace, author: str, column: str, seed: int) -> None:
    """Train a column on the data of `author` and score it on those of all, unless the result exists."""
    key = key_of(args, column, seed, identity(args.task)) | {"author": author}
    if has(read(args.task, FOLDER), key):
        print(f"{args.task} {column} trained on {author}, seed {seed}: there", flush=True)
        return
    loaded = {name: load_author(args, name) for name in AUTHORS}
    tests = {name: load(config, args.task)[1]["test"] for name, (_, config) in loaded.items()}
    settings = find_settings(column, args, next(iter(AUTHORS)))
    mine, config = loaded[author]
    problem, splits = load(config, args.task)
    model = "ours" if column == "ours_persistence" else column
    trained = fit(model, config, problem, splits["val"], settings, mine, seed, args.budget)
    scored, still = {}, {}
    for name, test in tests.items():
        errors, _ = rollout(trained, test, config.evaluate.batch_size)
        scored[name] = summary(errors, test, False, config.evaluate.num_bootstrap)
        still[name] = summary(trivial(problem, test)[1], test, False, 1)["error"]
    record = read(args.task, FOLDER)
    record |= {
        "packages": PACKAGES,
        "equation": asdict(EQUATIONS[args.task]),
        "rows": {"train": len(problem.train), "test": len(splits["test"].truth)},
        "distance": distances(tests),
        "persistence": still,
    }
    cost = {"steps": trained.steps, "seconds": trained.seconds}
    record["entries"].append(entry(key, settings, args, **cost, errors=scored))
    keep(record, FOLDER)
    row = ", ".join(f"{name} {found['error']:.3g}" for name, found in scored.items())
    print(f"{args.task} {column} trained on {author}, seed {seed}: {row}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--equation", nargs="+", choices=tuple(EQUATIONS), default=list(EQUATIONS))
    parser.add_argument("--column", nargs="+", choices=COLUMNS, default=list(COLUMNS[:3]))
    parser.add_argument("--python", type=Path, help="an interpreter that has the authors' packages")
    add_arguments(parser)
    parser.set_defaults(config=CONFIG, overrides=[], settings={})
    args = parser.parse_args(argv)
    prepare(args)
    seeds, args.seeds = args.seeds, [0]  # settings are searched from one seed
    for equation, seed, column, author in itertools.product(args.equation, seeds, args.column, AUTHORS):
        evaluate(argparse.Namespace(**vars(args) | {"task": equation}), author, column, seed)


if __name__ == "__main__":
    main()
