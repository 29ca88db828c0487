"""Bands around forecasts against the solvers that made the data.

    python -m bench.trust --run runs/trust      # of a run, on starts of our solvers
    python -m bench.trust --grid                # .. of models trained on the four families of a shift grid

For every task of a run with a band: of forecasts of fresh starts the fraction of whole rollouts inside, and
where 95 % of calibrations on so many rollouts put it; the median width over that of the smallest constant
band that covers 90 % of them, and the rank correlation of the stated with the true error. Then of shifted
starts (of other amplitudes, of a coefficient: of other powers; of half the wave length; of other parameters
where the base serves them; or the grid of bench/shift_grid.py): the area under the curve by which the verdict
finds errors above 3 times the trained ones (the 90 % quantile), how many of them and of the others it
refuses, and the fraction of stated errors within a factor of 2 where it does not. With 95 % intervals over
starts.
Writes bench/results/trust/KIND.json; the tables are made by bench/table.py.
"""

import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from scipy.stats import betabinom, rankdata, spearmanr
from torch import Tensor

import ups
from bench.command import parse, parser_of
from bench.entries import RESULTS, processor, put
from bench.inversion import trained
from bench.shift_grid import FAMILIES, MIDDLE, NUM_TEST, TRAINED, cells, training_config
from bench.shift_grid import NUM_STARTS as NUM_FILMS
from bench.tune import OUT
from bench.user_data import CONFIG
from ups.config.load import load_config
from ups.forecast_band import beyond
from ups.forecaster import Forecaster
from ups.models.band import LARGE, LEVEL, Band, differences, local
from ups.models.head import TaskHead
from ups.select import SELECTION_FACTOR
from ups_discovery.boundary import PERIODIC
from ups_solvers import SOLVERS

SEED = 2026
# amplitude and number of copies of starts; factors of parameters; how many times finer solutions are where
# starts on the grid do not determine them
SHIFTS, FACTORS = [(0.5, 1), (1.5, 1), (2.0, 1), (3.0, 1), (1.0, 2), (2.0, 2)], (0.5, 2.0)
NUM_STARTS, NUM_SHIFTED, REFINED = 500, 50, {"burgers1d": 32}
CONTEXT = 10  # frames before validated forecasts (evaluate.context_frames)
NUM_BOOTSTRAP = 1000
FIGURES = ("inside", "width", "rank", "auroc", "refused", "false", "within_2")
Case = tuple[bool, Tensor, Tensor, Tensor]  # whether it is as trained, start, later frames, raw parameters


def rollouts(
    head: TaskHead, value: float | None, seed: int, num: int, amplitude: float = 1.0, waves: int = 1
) -> tuple[Tensor, ...]:
    """(start, later frames), normalised, of fresh starts, which are multiplied and repeated."""
    solver, dt, history, n = SOLVERS[head.name], head.facts.dt, head.history, head.codec.space[0]
    num_frames = history + len(head.facts.band["profile"])
    first = 0 if head.task.is_steady else CONTEXT - history
    is_shifted = (amplitude, waves) != (1.0, 1)
    finer = REFINED.get(head.name, 1) if is_shifted else 1
    last = max(1, first if is_shifted else first + num_frames - 1)
    shape = {"resolution": finer * n, "num_frames": last + 1, "t_end": (dt or 1.0) * last}
    u = solver.simulate(range(num), seed=seed, parameter=value, **shape)[:, first:]
    if is_shifted:
        start = u[:, 0, : len(head.task.inputs)] ** amplitude if head.task.is_steady else amplitude * u[:, 0]
        for axis in range(2, start.ndim * (waves - 1)):
            half = start.unflatten(axis, (-1, 2)).mean(axis + 1)
            start = torch.cat([half, half if head.task.boundary == PERIODIC else half.flip(axis)], axis)
        later = solver.integrate(start, parameter=value, dt=dt, num_frames=num_frames - 1)
        u = torch.cat([start[:, None], later], 2 if head.task.is_steady else 1)
    for axis in range(3, u.ndim):
        u = u.unflatten(axis, (-1, finer)).mean(axis + 1)
    if head.task.is_steady:
        num = len(head.task.inputs)
        return head.input_codec.normalise(u[:, :, :num]), head.codec.normalise(u[:, :, num:])
    w = head.codec.normalise(u)
    return w[:, :history], w[:, history:]


def of_solver(head: TaskHead) -> Iterator[Case]:
    """Starts of our own solver."""
    solver = SOLVERS[head.name]
    values = head.facts.parameter_values if solver.parameter else [None]
    cases = [(value, NUM_STARTS // len(values)) for value in values]
    cases += [(value, NUM_SHIFTED, *shift) for value in values for shift in SHIFTS]
    if head.facts.parameters and not head.base.needs_fitted_parameters:
        cases += [(values[end] * factor, NUM_SHIFTED) for end, factor in zip((0, -1), FACTORS, strict=True)]
    spans = [*enumerate(head.facts.parameters.values())]
    for place, (value, num, *shift) in enumerate(cases):
        w, w_ref = rollouts(head, value, SEED + place, num, *shift)
        # the solver varies the first parameter, and others that are no constants with it
        row = [value if place == 0 or low < high else low for place, (low, high) in spans]
        yield place < len(values), w, w_ref, torch.tensor(row, dtype=torch.float64).expand(len(w), -1)


def of_grid(head: TaskHead) -> Iterator[Case]:
    """Starts of the trained regime, and the grid of bench/shift_grid.py."""
    facts, num = FAMILIES[head.name], NUM_STARTS // len(TRAINED)
    for place, scale in enumerate(TRAINED):
        first = NUM_FILMS + NUM_TEST + num * place
        u = head.codec.normalise(facts.solutions(range(first, first + num), facts.num_modes[MIDDLE], scale))
        yield True, u[:, :1], u[:, 1:], torch.full((num, 1), scale, dtype=torch.float64)
    for split in cells(head.name).values():
        yield False, head.codec.normalise(split.given), head.codec.normalise(split.truth), split.parameters


def judged(model: Forecaster, head: TaskHead, case: Case) -> np.ndarray:
    """(starts, 7): whether as trained, true and stated error, how far the verdict is past refusal, whether
    the rollout is inside of the band, mean half width of this, largest error."""
    is_trained, w, w_ref, raw = case
    band = Band(**head.facts.band)
    w_pred = model.operator.forecast(w, head.name, raw, w_ref.shape[1])
    given = model.operator, head.name, w, raw, w_pred, head.facts.network_weight, None
    s = band.expected(differences(*given))
    shape, (most, far) = (-1, *[1] * (w_pred.ndim - 1)), band.limits(head.extrapolates)
    profile = torch.tensor(band.profile).view(1, *w_pred.shape[1:3], *shape[3:])
    half = band.width * s.float().view(shape) * profile * local(head, w_pred)
    error = (w_pred - w_ref).abs().nan_to_num(math.inf)
    columns = (
        torch.full_like(s, is_trained),
        error.double().square().flatten(1).mean(1).sqrt(),
        s,
        torch.maximum(s / most, beyond(head, raw) / far),
        (error <= half).flatten(1).all(1),
        half.flatten(1).mean(1),
        error.flatten(1).amax(1),
    )
    return torch.stack([column.double() for column in columns], 1).numpy()


def figures(rows: np.ndarray) -> np.ndarray:
    """The FIGURES of rows of `judged`; NaN where there are no shifted starts."""
    is_trained = rows[:, 0] == 1
    _, true, stated, _, inside, width, most = rows[is_trained].T
    _, every, said, alarm, *_ = rows[~is_trained].T
    bad, place = every > LARGE * np.quantile(true, LEVEL), math.ceil(LEVEL * (len(most) + 1)) - 1
    ranks, is_refused = rankdata(alarm), ~(alarm <= 1)  # NaN is
    with np.errstate(all="ignore"):
        area = (ranks[bad].mean() - (bad.sum() + 1) / 2) / (~bad).sum()
        close = np.abs(np.log(said / every)) <= math.log(2)
        return np.array(
            [
                inside.mean(),
                np.median(width) / np.sort(most)[min(place, len(most) - 1)],
                spearmanr(stated, true)[0],
                area,
                is_refused[bad].mean(),
                is_refused[~bad].mean(),
                close[~is_refused].mean(),
            ]
        )


def kept(kind: str, run: Path, task: str, cases: Iterator[Case], num_films: int) -> None:
    """Score a task of a run, that has so many films, and keep it in bench/results/trust/KIND.json."""
    model, config = ups.load(run), load_config(run / "operator" / "config.yaml")
    head = model.operator.head(task)
    rows = np.concatenate([judged(model, head, case) for case in cases])
    source, found = np.random.default_rng(SEED), figures(rows)
    resampled = [figures(rows[source.integers(len(rows), size=len(rows))]) for _ in range(NUM_BOOTSTRAP)]
    ends = np.nanquantile(resampled, [0.025, 0.975], 0)
    num_val = int(num_films * config.data.val_fraction)
    num = min(num_val, SELECTION_FACTOR * config.operator.train.validate_trajectories) // 2
    starts, place = int(rows[:, 0].sum()), min(num, math.ceil((num + 1) * LEVEL))
    law = betabinom(starts, place, num + 1 - place)
    key = {"column": task, "calibrated_on": num, "processor": processor("cpu")}
    entry = {
        "base": head.facts.base["name"],
        "starts": starts,
        "shifted": len(rows) - starts,
        "expected": [float(end) / starts for end in law.interval(0.95)],
        **{name: [value, *end] for name, value, *end in zip(FIGURES, found, *ends, strict=True)},
    }
    put(kind, RESULTS / "trust", key, entry)
    print(task, {name: np.round(entry[name], 3).tolist() for name in FIGURES}, flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--run", type=Path, help="a run whose weights have bands")
    parser.add_argument("--tasks", nargs="+", help="some of the run or of the families")
    parser.add_argument("--grid", action="store_true")
    args = parse(parser)
    torch.set_num_threads(1)
    folder = OUT / "trust"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if args.run:
            heads = ups.load(args.run).operator.heads
            facts_of = load_config(args.run / "operator" / "config.yaml").task
            for task in args.tasks or [name for name, head in heads.items() if head.facts.band]:
                num = facts_of[task].num_trajectories * max(1, len(facts_of[task].parameters))
                kept("starts", args.run, task, of_solver(heads[task]), num)
        for family in (args.tasks or FAMILIES) if args.grid else ():
            config = training_config(family, CONFIG)
            head = trained(folder, config, family, args.overrides).operator.head(family)
            kept("grid", folder / family, family, of_grid(head), NUM_FILMS)


if __name__ == "__main__":
    main()
