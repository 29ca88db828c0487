"""Derivatives of forecasts, and bands around them, against the solvers that made the data.

    python -m bench.trust                       # derivatives by the published weights
    python -m bench.trust --run runs/trust      # bands of a run, on starts of our solvers

For every published task whose solver starts from a frame: the error of the last frame, and the cosine between
the derivatives of <v, last frame> along smooth changes of the start, v the last frame itself: by the solver,
in float64 (central differences, which need no adjoint of the solver), and by `Forecaster.vjp`.

    python -m bench.trust --defect              # forecasts by the published weights, corrected

The median errors of 20 fresh starts before and after a correction by the defect (`corrected`), and its time.

    python -m bench.trust --grid                # .. of models trained on the four families of a shift grid
    python -m bench.trust --authors             # .. on data of other authors' solvers

For every task of a run with a band: of forecasts of fresh starts the fraction of whole rollouts inside, and
where 95 % of calibrations on so many rollouts put it; the median width over that of the smallest constant
band that covers 90 % of them, and the rank correlation of the stated with the true error. Then of shifted
starts (of other amplitudes, of a coefficient: of other powers; of half the wave length; of other parameters
where the base serves them; or the grid of bench/shift_grid.py): the area under the curve by which the verdict
finds errors above 3 times the trained ones (the 90 % quantile), how many of them and of the others it
refuses, how many of them it calls fine, and the fraction of stated errors within a factor of 2 where it does
not refuse. With 95 % intervals over starts.
Writes bench/results/trust/KIND.json; the tables are made by bench/table.py.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.stats import betabinom, rankdata, spearmanr
from torch import Tensor

import ups
from bench.authors import DT, NUM_CELLS, solve, starts
from bench.authors_solvers import AUTHORS
from bench.command import parse, parser_of
from bench.entries import RESULTS, processor, put
from bench.inversion import trained
from bench.shift_grid import FAMILIES, MIDDLE, NUM_TEST, TRAINED, cells, training_config
from bench.shift_grid import NUM_STARTS as NUM_FILMS
from bench.table import TRUST as FIGURES
from bench.tune import OUT
from bench.user_data import CONFIG, write, write_config
from ups.common.text import number
from ups.config.load import load_config
from ups.forecast_band import beyond
from ups.forecaster import Forecaster
from ups.models.band import LARGE, LEVEL, Band, differences, local
from ups.models.head import TaskHead
from ups.report.tables import markdown_table
from ups.select import SELECTION_FACTOR
from ups_discovery.boundary import PERIODIC
from ups_discovery.seeds import generator
from ups_solvers import SOLVERS
from ups_solvers.darcy import apply_operator
from ups_solvers.darcy import solve as solve_darcy

# task -> (frames of the forecast, first frame of the start in a solver's trajectory)
CASES = {
    "advection1d": (20, 0),
    "burgers1d": (20, 1),
    "diff_sorp1d": (20, 5),
    "cfd2d": (5, 1),
    "darcy2d": (1, 0),
    "ns_incom2d": (5, 1),
}
NUM_CHANGES, MOST_WAVES, SIZE = 24, 4, 1e-4  # directions, waves along an axis, relative size of a difference
SEED = 2026
# amplitude and number of copies of starts; factors of parameters; how many times finer solutions are where
# starts on the grid do not determine them
SHIFTS, FACTORS = [(0.5, 1), (1.5, 1), (2.0, 1), (3.0, 1), (1.0, 2), (2.0, 2)], (0.5, 2.0)
NUM_STARTS, NUM_SHIFTED, REFINED = 500, 50, {"burgers1d": 32}
CONTEXT = 10  # frames before validated forecasts (evaluate.context_frames)
# of other authors, steps in a frame (of py-pde: its tolerance), and films for training and validation
NUM_STEPS, NUM_GIVEN = 10, 2000
NUM_BOOTSTRAP, NUM_CORRECTED = 1000, 20
Case = tuple[bool, Tensor, Tensor, Tensor]  # whether it is as trained, start, later frames, raw parameters
Cases = Callable[[TaskHead], Iterator[Case]]


def directions(u: Tensor) -> Tensor:
    """Smooth changes (NUM_CHANGES, *u.shape[1:]) of a start u (1, C, *space), with its size per channel."""
    points = torch.meshgrid(*[(torch.arange(n) + 0.5).double() / n for n in u.shape[2:]], indexing="ij")
    source, found = generator(SEED, "changes"), []
    for _ in range(NUM_CHANGES * u.shape[1]):
        waves = torch.randint(0, MOST_WAVES + 1, (len(points),), generator=source)
        phase = 2 * torch.pi * torch.rand((), generator=source)
        found.append((2 * torch.pi * sum(k * x for k, x in zip(waves, points, strict=True)) + phase).sin())
    scale = u.double().flatten(2).std(2).clamp_min(1e-6).view(1, -1, *[1] * len(points))
    return torch.stack(found).view(NUM_CHANGES, u.shape[1], *u.shape[2:]) * scale


Films = Callable[..., Tensor]


def case_of(model: Forecaster, task: str, seed: int) -> tuple[Tensor, Films, Tensor, dict[str, float]]:
    """(state u (1, C, *space), the solver's frames from it, start of a forecast, parameters)."""
    num_frames, first = CASES[task]
    known, solver, head = model.tasks[task], SOLVERS[task], model.operator.head(task)
    value = head.facts.parameter_values[-1] if solver.parameter else None
    parameters = {name: high for name, (_, high) in known["parameters"].items()}
    shape = {"resolution": known["grid"][0], "num_frames": 1 + first, "parameter": value}
    u = solver.simulate([0], seed=seed, t_end=max(first, 1) * (known["dt"] or 1.0), **shape)[:, -1].double()
    u = u[:, : len(known["inputs"])] if known["inputs"] else u
    times = {"parameter": value, "dt": known["dt"] or 1.0}

    def films(u: Tensor, count: int = num_frames + known["history"] - 1) -> Tensor:
        """The start and the `count` frames that follow it, (n, frames, C, *space)."""
        later = solver.integrate(u, num_frames=count, **times)
        return later if known["inputs"] else torch.cat([u[:, None], later], 1)

    return u, films, u[:, None] if known["inputs"] else films(u)[:, : known["history"]], parameters


def compared(model: Forecaster, task: str, seed: int) -> tuple[float, float]:
    """(relative error of the last frame, cosine of the derivatives)."""
    (u, films, start, parameters), known = case_of(model, task, seed), model.tasks[task]
    film, num_frames = films(u), CASES[task][0]
    u_pred, pull = model.vjp(task, start.numpy(), parameters, num_frames)
    last = film[:, -1].numpy()
    v = np.zeros_like(u_pred)
    v[:, -1] = last
    gradient, changes = torch.from_numpy(pull(v)["u0"]), SIZE * directions(u)
    by_solver = (films(u + changes) - films(u - changes)) / (2 * SIZE)
    of_start = changes[:, None] / SIZE if known["inputs"] else by_solver[:, : known["history"]]
    found = (gradient * of_start).flatten(1).sum(1)
    expected = (by_solver[:, -1] * film[:, -1]).flatten(1).sum(1)
    error = np.linalg.norm(u_pred[:, -1] - last) / np.linalg.norm(last)
    return float(error), float(torch.cosine_similarity(found, expected, 0))


def corrected(model: Forecaster, task: str, seed: int) -> tuple[float, ...]:
    """(relative errors of a forecast u and of v, which its defect corrects; processor seconds of both, and of
    the solver alone). v(n + 1) = M(v(n)) + S(u(n)) - M(u(n)), M the operator, S the solver, called once for
    all frames. Of Darcy's equation v - u solves it for the residual of u, to a tenth of this."""
    (state, films, start, parameters), head = case_of(model, task, seed), model.operator.head(task)
    num_frames, history = CASES[task][0], head.history
    raw = torch.tensor([[*parameters.values()]], dtype=torch.float64)
    forecast = partial(model.operator.forecast, task=task, parameters=raw)
    forecast(head.input_codec.normalise(start.float()), num_frames=num_frames)  # what a first call prepares
    times = [time.process_time()]
    u_ref = films(state)[:, -num_frames:]
    times.append(time.process_time())
    w = head.input_codec.normalise(start.float())
    w_pred = forecast(w, num_frames=num_frames)
    u = head.codec.denormalise(w_pred).double()
    times.append(time.process_time())
    if head.task.is_steady:
        source = torch.full_like(u[:, 0, 0], *parameters.values())
        residual = source - apply_operator(start[:, 0, 0], u[:, 0, 0])
        v = u + solve_darcy(start[:, 0, 0], residual, tolerance=0.1)[:, None, None]
    else:
        before = torch.cat([start[:, -1:], u[:, :-1]], 1)[0]
        defect = head.codec.normalise(films(before, 1)[None, :, -1].float()) - w_pred
        for number in range(num_frames):
            next_one = forecast(w[:, -history:], num_frames=1) + defect[:, number : number + 1]
            w = torch.cat([w, next_one], 1)
        v = head.codec.denormalise(w[:, -num_frames:]).double()
    times.append(time.process_time())
    alone, once, more = np.diff(times).tolist()
    errors = [float((one - u_ref).norm() / u_ref.norm()) for one in (u, v)]
    return *errors, once, once + more, alone


def defect_rows(model: Forecaster) -> Iterator[list[str]]:
    """Of every task with NUM_CORRECTED starts: median errors, and median ratios with 95 % intervals."""
    source = np.random.default_rng(SEED)
    for task in CASES:
        found = np.array([corrected(model, task, SEED + start) for start in range(NUM_CORRECTED)])
        error, after, once, both, alone = found.T
        row = [task, number(np.median(error)), number(np.median(after))]
        for ratio in (after / error, both / once, alone / once):
            some = np.median(ratio[source.integers(len(ratio), size=(NUM_BOOTSTRAP, len(ratio)))], 1)
            row.append("{:.3g} [{:.3g}, {:.3g}]".format(np.median(ratio), *np.quantile(some, [0.025, 0.975])))
        print(*row, flush=True)
        yield row


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
    cases += [(value, NUM_SHIFTED, *shift) for value in values for shift in SHIFTS if solver.integrate]
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


def of_author(u: np.ndarray, head: TaskHead) -> Iterator[Case]:
    w = head.codec.normalise(torch.from_numpy(u)[:, :, None])
    yield True, w[:, :1], w[:, 1:], torch.zeros(len(w), 0, dtype=torch.float64)


def judged(model: Forecaster, head: TaskHead, case: Case) -> np.ndarray:
    """(starts, 8): whether as trained, true and stated error, how far the verdict is past refusal, whether
    the rollout is inside of the band, mean half width of this, largest error, whether the verdict is fine."""
    is_trained, w, w_ref, raw = case
    band = Band(**head.facts.band)
    w_pred = model.operator.forecast(w, head.name, raw, w_ref.shape[1])
    given = model.operator, head.name, w, raw, w_pred, head.facts.network_weight, None
    s = band.expected(differences(*given))
    shape, (most, far) = (-1, *[1] * (w_pred.ndim - 1)), band.limits(head.extrapolates)
    over = beyond(head, raw)
    verdicts = [band.verdict(*one, head.extrapolates) for one in zip(s.tolist(), over.tolist(), strict=True)]
    profile = torch.tensor(band.profile).view(1, *w_pred.shape[1:3], *shape[3:])
    half = band.width * s.float().view(shape) * profile * local(head, w_pred)
    error = (w_pred - w_ref).abs().nan_to_num(math.inf)
    columns = (
        torch.full_like(s, is_trained),
        error.double().square().flatten(1).mean(1).sqrt(),
        s,
        torch.maximum(s / most, over / far),
        (error <= half).flatten(1).all(1),
        half.flatten(1).mean(1),
        error.flatten(1).amax(1),
        torch.tensor([verdict == "fine" for verdict in verdicts]),
    )
    return torch.stack([column.double() for column in columns], 1).numpy()


def figures(rows: np.ndarray) -> np.ndarray:
    """The figures of the table, of rows of `judged`; NaN where there are no shifted starts."""
    is_trained = rows[:, 0] == 1
    _, true, stated, _, inside, width, most, _ = rows[is_trained].T
    _, every, said, alarm, *_, is_fine = rows[~is_trained].T
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
                is_fine[bad].mean(),
                close[~is_refused].mean(),
            ]
        )


def kept(kind: str, model: Forecaster, run: Path, task: str, cases_of: Cases, num_films: int) -> None:
    """Score a task of a run, that has so many films, and keep it in bench/results/trust/KIND.json."""
    config, head = load_config(run / "operator" / "config.yaml"), model.operator.head(task)
    rows = np.concatenate([judged(model, head, case) for case in cases_of(head)])
    source, found = np.random.default_rng(SEED), figures(rows)
    resampled = [figures(rows[source.integers(len(rows), size=len(rows))]) for _ in range(NUM_BOOTSTRAP)]
    ends = np.nanquantile(resampled, [0.025, 0.975], 0)
    num_val = int(num_films * config.data.val_fraction)
    num = min(num_val, SELECTION_FACTOR * config.operator.train.validate_trajectories) * 3 // 4
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
    parser.add_argument("--tasks", nargs="+", help="some of the run, of the families or of the authors")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--authors", action="store_true")
    parser.add_argument("--defect", action="store_true")
    parser.add_argument("--python", type=Path, help="an interpreter that has the authors' packages")
    args = parse(parser)
    torch.set_num_threads(1)
    folder = OUT / "trust"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if args.run:
            model = ups.load(args.run)
            facts_of = load_config(args.run / "operator" / "config.yaml").task
            for task in args.tasks or [one.name for one in model.operator.heads.values() if one.facts.band]:
                num = facts_of[task].num_trajectories * max(1, len(facts_of[task].parameters))
                kept("starts", model, args.run, task, of_solver, num)
        for family in (args.tasks or FAMILIES) if args.grid else ():
            model = trained(folder, training_config(family, CONFIG), family, args.overrides)
            kept("grid", model, folder / family, family, of_grid, NUM_FILMS)
        for author in (args.tasks or AUTHORS) if args.authors else ():
            path = folder / f"burgers_{author}.npz"
            given = [starts(NUM_CELLS, NUM_GIVEN + NUM_STARTS)]
            u = solve(author, args.python, path, [(NUM_CELLS, NUM_STEPS)], given)["u0"].astype(np.float32)
            write(path, {"u": u[:NUM_GIVEN]})
            model = trained(folder, write_config(path, CONFIG, path.stem, DT), path.stem, args.overrides)
            run, cases = folder / path.stem, partial(of_author, u[NUM_GIVEN:])
            kept("authors", model, run, path.stem, cases, NUM_GIVEN)
    if args.run or args.grid or args.authors:
        return
    model, rows = ups.load("pretrained"), []
    if args.defect:
        header = ["task", "error", "corrected", "corrected over error", "time over the forecast's"]
        with torch.no_grad():
            rows = [*defect_rows(model)]
        print("\n".join(markdown_table([*header, "solver alone over the forecast's"], rows)))
        return
    for task, (num_frames, _) in CASES.items():
        errors, cosines = zip(*[compared(model, task, SEED + start) for start in range(3)], strict=True)
        rows.append([task, str(num_frames), number(max(errors)), f"{min(cosines):.4f}"])
        print(*rows[-1], flush=True)
    print("\n".join(markdown_table(["task", "frames", "largest error", "least cosine"], rows)))


if __name__ == "__main__":
    main()
