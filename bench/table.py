"""Write the tables of README.md and docs/ that come from the registry of tasks and from bench/results/.

    python -m bench.table           # write the pages
    python -m bench.table --check   # exit 1 if a page differs from what this would write

Each table stands between two comments of its page. A number is the mean over the available seeds; a cell
without a result reads "-"."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from bench.command import parser_of
from bench.discovery_films import FILMS, NOISES
from bench.entries import RESULTS
from ups.common.place import ROOT
from ups.tasks import TASKS, Task

MISSING = "-"
ENDS = ("value", "low", "high")
LABELS = {"ours": "UPS", "fno": "FNO", "unet": "U-Net"}
Record = dict[str, Any]
Rows = Iterable[tuple[str, ...]]


class Table(NamedTuple):
    """page: where it stands. folder: of bench/results. header: names of the columns, between semicolons.
    rows: of one record. order: tasks that come last, in this order; the others are sorted by name."""

    page: str
    folder: str
    header: str
    rows: Callable[[Record], Rows]
    order: Sequence[str] = ()

    def text(self, found: dict[str, Record]) -> str:
        places = {name: place + 1 for place, name in enumerate(self.order)}
        names = sorted(found, key=lambda name: places.get(name, 0))
        rows = (row for name in names for row in self.rows(found[name]))
        return lines_of(self.header, rows)


def lines_of(header: str, rows: Rows) -> str:
    names = header.split("; ")
    return "\n".join("| " + " | ".join(line) + " |" for line in (names, ["---"] * len(names), *rows))


TABLES: dict[str, Table] = {}


def table(name: str, page: str, folder: str, header: str, order: Sequence[str] = ()) -> Callable:
    """Declare a table by a function from a record to its rows."""

    def declared(rows: Callable[[Record], Rows]) -> Callable[[Record], Rows]:
        TABLES[name] = Table(page, folder, header, rows, order)
        return rows

    return declared


# ---- records -----------------------------------------------------------------------------------------------


def results(folder: Path = RESULTS) -> dict[str, Record]:
    """Task -> record, with the entries of the processor with most of them, on a tie the latest."""
    records = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return {
        record["task"]: of_one_processor(record)
        for record in records
        if "entries" in record and "task" in record
    }


def of_one_processor(record: Record) -> Record:
    """The record with the entries of one processor. Trainings by a number of steps count, too."""
    every = record["entries"]
    kinds = [entry["key"]["processor"] for entry in every]
    chosen = max(reversed(kinds), key=kinds.count, default="")
    entries = [entry for entry in every if entry["key"]["processor"] == chosen or entry["key"].get("steps")]
    return record | {"processor": chosen, "entries": entries}


def columns(record: Record) -> list[str]:
    return list(dict.fromkeys(entry["key"]["column"] for entry in record["entries"]))


def longest(record: Record, column: str) -> list[Record]:
    """The entries of a column with the longest training, one per seed."""
    mine = [entry for entry in record["entries"] if entry["key"]["column"] == column]
    budget = max((entry["key"].get("budget_s", 0) for entry in mine), default=0)
    return [entry for entry in mine if entry["key"].get("budget_s", 0) == budget]


def rows(record: Record, column: str) -> dict[int, Record]:
    """Seed -> row of a column, of the longest training."""
    return {entry["key"]["seed"]: entry["row"] for entry in longest(record, column)}


def error(record: Record, column: str, key: str = "error") -> float | None:
    return mean(row.get(key) for row in rows(record, column).values())


def ratio(record: Record, one: str, others: tuple[str, ...]) -> float | None:
    """Error of a column over the best of others, on the seeds that all have; None if there is none."""
    found = [rows(record, name) for name in (one, *others)]
    seeds = set.intersection(*map(set, found))
    values = [mean(part[seed]["error"] for seed in seeds) for part in found]
    if not seeds or not math.isfinite(min(values[1:])):
        return None
    return values[0] / min(values[1:])


# ---- cells -------------------------------------------------------------------------------------------------


def mean(values: Iterable[float | None]) -> float | None:
    """The mean; None without values, inf if one diverged (None in the results)."""
    found = [math.inf if value is None else value for value in values]
    return sum(found) / len(found) if found else None


def number(value: float | None, is_ratio: bool = False) -> str:
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "diverged"
    return f"{value:.2g}" if is_ratio or 1e-2 <= value < 1e3 else f"{value:.1e}".replace("e-0", "e-")


def span(values: Collection[float | None], is_ratio: bool = False) -> str:
    """The smallest and the largest of some values, or the only one."""
    found = [math.inf if value is None else value for value in values]
    return " to ".join(number(end, is_ratio) for end in sorted({min(found), max(found)}))


def over(value: float | None, other: float | None) -> str:
    return MISSING if value is None or not other else number(value / other, True)


def with_ends(value: float | None, low: float, high: float, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def percent(value: float) -> str:
    """A fraction in percent, with two digits; limits for very small and very large ones."""
    if value and not 1e-4 <= value <= 10:
        return "< 0.01 %" if value < 1e-4 else "> 1000 %"
    return f"{100 * value:.0f} %" if value > 0.0995 else f"{100 * value:.2g} %"


# ---- the registry, and the eleven families -----------------------------------------------------------------


def source(task: Task) -> str:
    """Where the data come from: published files, our solver, or the files of another task."""
    kinds = ["published"] * bool(task.published and not task.files_of)
    kinds += ["generated"] * (task.user_facts is None)
    return (" or ".join(kinds) or "user data") + (f", files of {task.files_of}" if task.files_of else "")


def task_rows() -> Rows:
    for task in TASKS.values():
        grid = " x ".join([str(task.resolution)] * task.ndim)
        frames = "steady" if task.is_steady else f"{task.num_frames} to t = {task.t_end:g}"
        yield f"`{task.name}`", source(task), grid, frames


def protocol(record: Record) -> str:
    """Grid and horizon of a comparison, such as 256, 31 frames, 1.55 time units."""
    data = record.get("data", {})
    size = " x ".join(map(str, data.get("grid", []))) or MISSING
    if TASKS[record["task"]].is_steady:
        return f"{size}, steady"
    scored = data["frames_scored"]  # after the context; its first frame is the start
    until = data["t_end"] * scored / (data["context_frames"] + scored - 1)
    return f"{size}, {scored} frames, {until:.3g} time units"


COMPARISON = "task; UPS; FNO; U-Net; UPS base alone; trivial; grid, horizon"
EQUAL_TIME = "task; trivial; UPS, generic bases; UPS; FNO; U-Net; generic / best; UPS / best; seeds"


@table("comparison", "README.md", "", COMPARISON)
def comparison(record: Record) -> Rows:
    errors = (error(record, name) for name in LABELS)
    others = (error(record, "ours", "base"), record["trivial"]["error"])
    yield f"`{record['task']}`", *map(number, (*errors, *others)), protocol(record)


@table("equal_time", "docs/results.md", "", EQUAL_TIME)
def equal_time(record: Record) -> Rows:
    others = ("fno", "unet")
    errors = (error(record, name) for name in ("ours_generic", "ours", *others))
    ratios = (number(ratio(record, name, others), True) for name in ("ours_generic", "ours"))
    seeds = " ".join(map(str, sorted(rows(record, "ours")))) or MISSING
    yield record["task"], *map(number, (record["trivial"]["error"], *errors)), *ratios, seeds


@table("long", "docs/results.md", "", "; ".join(("task", *LABELS.values(), "persistence")))
def long(record: Record) -> Rows:
    """Errors at the end of one and of three horizons."""

    def ends(parts: list[Record], key: str) -> str:
        return ", ".join(number(mean(part[key][mark] for part in parts)) for mark in (0, 2))

    if not TASKS[record["task"]].is_steady:
        found = [[row["long"] for row in rows(record, name).values() if "long" in row] for name in LABELS]
        yield record["task"], *(ends(one, "error") for one in found), ends(sum(found, []), "persistence")


# ---- costs -------------------------------------------------------------------------------------------------


AUTHORS = {"exponax": "Burgers, exponax", "phiflow": "Burgers, PhiFlow", "pypde": "Burgers, py-pde"}
PAYS = "row; nRMSE of UPS; of its base alone; data and training, s; grid of the solver (nRMSE); "
PAYS += "batch: solver, UPS, s; N*; pays; one start: solver, UPS, s; N*; pays"


@table("pays", "docs/forecasts.md", "pays", PAYS, order=[*AUTHORS])
def pays(record: Record) -> Rows:
    """Seconds of solver and forecast at equal error, and N* with its interval (bench/pays.py)."""

    def words(value: float | None) -> str:
        return "never" if value is None else f"{float(f'{value:.2g}'):,.0f}"

    def cells(row: Record, kind: str) -> tuple[str, str, str]:
        ours, base, pays = row[f"UPS {kind}"], row[f"base {kind}"], "UPS"
        low, high = words(ours["low"]), words(ours["high"])
        if ours["n_star"] is None:
            has_base = base["n_star"] is not None and base["forecast"]["error"] != ours["forecast"]["error"]
            pays = f"the base from {words(base['n_star'])} on" if has_base else "the solver"
        times = ", ".join(number(ours[name]["seconds"]) for name in ("solver", "forecast"))
        return times, words(ours["n_star"]) + f" [{low}, {high}]" * (low != high), pays

    name, row = record["task"], record["entries"][0]["row"]
    solver, total = row["UPS batch"]["solver"], f"{sum(row['budget'].values()):.0f}"
    errors = (number(row[f"{model} batch"]["forecast"]["error"]) for model in ("UPS", "base"))
    compared = f"{solver['grid']} ({number(solver['error']) if solver['error'] else 0})"
    yield AUTHORS.get(name, name), *errors, total, compared, *cells(row, "batch"), *cells(row, "alone")


CORRECTORS = {
    "full": ", the full grid",
    "corrected": ", **corrected**",
    "fno": ", corrected by an FNO",
    "alone": ", a network without the solver",
}
CORRECTOR = "example; cells per axis; nRMSE after 1, 3 (10) times the trained steps; over that of the full "
CORRECTOR += "grid; nRMSE on the full grid; variance, energy in octaves over the truth's; seconds of a run, "
CORRECTOR += "over full; seconds of data + training; N*; largest value after ten times the trained steps, "
CORRECTOR += "over the start's"


@table("corrector", "docs/corrector.md", "corrector", CORRECTOR)
def corrector(record: Record) -> Rows:
    """Runs on every grid, with and without correction, and when a correction pays."""

    def paid(ends: list[float]) -> str:
        cells = [f"{one:,.0f}" if math.isfinite(one) else "never" for one in ends]
        return f"{cells[0]} [{cells[1]}, {cells[2]}]" if math.isfinite(ends[0]) else "never"

    found = {entry["key"]["column"]: entry["row"] for entry in record["entries"]}
    for column, row in found.items():
        low, *_, high = sorted(row["octaves"])
        seconds, ratios = mean(row["seconds"]), row.get("over the full grid", [])
        yield (
            f"{record['task']}, {record['leads'][0]} steps, {len(row['seconds'])} starts",
            f"{row['cells']}{CORRECTORS.get(column, '')}",
            ", ".join(number(mean(some)) for some in row["errors"]),
            ", ".join(f"{value:.2g} [{a:.2g}, {b:.2g}]" for value, a, b in ratios) or MISSING,
            number(mean(row["on the full grid"][0])),
            f"{number(row['variance'], True)}; {number(low, True)} to {number(high, True)}",
            f"{number(seconds)}; {over(seconds, mean(found['full']['seconds']))}",
            f"{row['data']:.0f} + {row['training']:.0f}" if "paid" in row else MISSING,
            paid(row["paid"]) if "paid" in row else MISSING,
            number(max(row["grown"]), True) if "grown" in row else MISSING,
        )


# ---- data and networks of others ---------------------------------------------------------------------------


SHIFT = "family; model; error in the trained regime; slowest; fastest; fewest waves; most waves; worst; "
SHIFT += "better than persistence"


@table("shift_grid", "docs/peers.md", "shift_grid", SHIFT)
def shift_grid(record: Record) -> Rows:
    """Error in the trained regime, and factors of it outside; mean over seeds, inf where one diverged."""
    still = [cell for line in record["persistence"] for cell in line]
    for column in (name for name in LABELS if longest(record, name)):
        maps = [entry["errors"] for entry in longest(record, column)]
        errors = [[mean(cell) for cell in zip(*lines, strict=True)] for lines in zip(*maps, strict=True)]
        middle, cells = len(errors) // 2, [cell for line in errors for cell in line]
        outside = [errors[0][middle], errors[-1][middle], errors[middle][0], errors[middle][-1], max(cells)]
        factors = (number(cell / errors[middle][middle], True) for cell in outside)
        num_better = sum(cell < other for cell, other in zip(cells, still, strict=True))
        better = f"{num_better} of {len(cells)}"
        yield record["task"], LABELS[column], number(errors[middle][middle]), *factors, better


APEBENCH = "scenario; persistence; UPS; at step 200; its base alone; UPS without bases; best network; "
APEBENCH += "by 10 000 steps; UPS / best; without bases / best; UPS corrects; network corrects; ratio"


@table("apebench", "docs/peers.md", "apebench", APEBENCH)
def apebench(record: Record) -> Rows:
    """Errors on APEBench's scenarios, with its best network of those that were trained."""

    def best(prefix: str, is_own: bool = False) -> tuple[float | None, str]:
        """Error of the network with the lowest one, and a cell with its name and number of steps."""
        part = record | {"entries": [one for one in entries if bool(one["key"]["steps"]) == is_own]}
        names = {*columns(part)} - {"full", "bare", "correction"}
        values = {name: error(part, name) for name in names if name.startswith("correct ") == bool(prefix)}
        if not values:
            return None, MISSING
        name = min(values, key=values.get)
        kind = name.removeprefix(prefix).split(";")[0]
        return values[name], f"{number(values[name])} ({kind}, {error(part, name, 'steps'):.0f})"

    entries = [one for one in record["entries"] if not one["key"]["overrides"]]
    record = record | {"entries": entries}
    full, bare, corrected = (error(record, name) for name in ("full", "bare", "correction"))
    (rival, cell), (_, own), (other, corrects) = best(""), best("", True), best("correct ")
    ours = (record["persistence"], full, error(record, "full", "end"), error(record, "full", "base"), bare)
    ratios = over(full, rival), over(bare, rival)
    corrections = number(corrected), corrects, over(corrected, other)
    yield record["task"], *map(number, ours), cell, own, *ratios, *corrections


FEW = "data; UPS with 1; with 5; without bases with 5; best network or FNO (trajectories); "
FEW += "1 / network; 5 / network; without bases with 5 / network"


@table("few", "docs/peers.md", "few", FEW)
def few(record: Record) -> Rows:
    """Errors after few trajectories, and of networks after many: the best of APEBench's, or the FNO of
    bench/eleven.py."""
    name = record["task"]
    is_scenario = name in (scenarios := results(RESULTS / "apebench"))
    many = scenarios[name] if is_scenario else results()[name]
    some = [one for one in columns(many) if one not in ("full", "bare", "correction") and " " not in one]
    own = [one for one in many["entries"] if one["key"]["column"] in (some if is_scenario else ["fno"])]
    rival = min(one["row"]["error"] for one in own if one["row"]["error"] is not None)
    ours = [error(record, column) for column in ("full 1", "full 5", "bare 5")]
    cell = f"{number(rival)} ({50 if is_scenario else many['data']['train']})"
    yield name, *map(number, ours), cell, *(over(value, rival) for value in ours)


COUNTS = (0, 4, 16, 64)  # problems of bench/transfer.py
TRANSFER = f"family; bases; trajectories; 0, `plain`; {'; '.join(map(str, COUNTS))}; {COUNTS[-1]} / 0"


@table("transfer", "docs/results.md", "transfer", TRANSFER)
def transfer(record: Record) -> Rows:
    """Errors after few trajectories, by the number of problems behind the trunk."""

    def values(column: str, problems: int, is_plain: bool = False) -> dict[int, float]:
        """Seed -> error."""
        keys = {"column": column, "problems": problems}
        return {
            one["key"]["seed"]: one["row"]["home"]["error"]
            for one in record["entries"]
            if one["key"] | keys == one["key"] and bool(one["key"]["overrides"]) == is_plain
        }

    def cell(errors: dict[int, float]) -> str:
        if not errors:
            return MISSING
        ends = f" ({span(errors.values())})" * (len(errors) > 1)
        return number(statistics.geometric_mean(errors.values())) + ends

    for column in sorted(columns(record), key=str.split):
        own = [values(column, count) for count in COUNTS]
        ratios = [own[-1][seed] / own[0][seed] for seed in own[-1] if seed in own[0]]
        mean_ratio = number(statistics.geometric_mean(ratios), True) if ratios else MISSING
        yield record["task"], *column.split(), *map(cell, (values(column, 0, True), *own)), mean_ratio


STRANGERS = {"ours": "UPS", "fno": "FNO of the bench", "FNO": "FNO", "TFNO": "TFNO", "UNO": "UNO"}
HEADER = f"problem; persistence; {'; '.join(STRANGERS.values())}; UPS / best"


@table("strangers", "docs/peers.md", "strangers", HEADER)
def strangers(record: Record) -> Rows:
    """UPS and networks by the code of their authors: first frame, 20 frames (the range over seeds), frame 60,
    steps; and the ratios of common seeds to the best rival."""
    found = {name: own for name in STRANGERS if (own := rows(record, name))}

    def cell(name: str, some: dict[int, Record]) -> str:
        first, late = (mean(row[part] for row in some.values()) for part in ("first", "late"))
        errors = span([row["error"] for row in some.values()])
        return f"{number(first)}, {errors}, {number(late)} ({longest(record, name)[0]['steps']})"

    cells = [cell(name, found[name]) if name in found else MISSING for name in STRANGERS]
    best = min({*found} - {"ours"}, key=lambda name: error(record, name), default="ours")
    ours, rival = (rows(record, name) for name in ("ours", best))
    persistence = ", ".join(number(record["persistence"][part]) for part in ("first", "error", "late"))
    ratios = [ours[seed]["error"] / rival[seed]["error"] for seed in ours if seed in rival]
    yield record["task"], persistence, *cells, span(ratios, True) if ratios else MISSING


# ---- films and their equations -----------------------------------------------------------------------------


DISCOVERY = "; ".join(("film", "method", *(f"{100 * noise:g} %" for noise in NOISES)))
DISCOVERY += "; l2 error at the noise of E-WSINDy; inside the interval; seconds"


@table("discovery", "docs/discovery.md", "discovery", DISCOVERY, order=[*FILMS])
def discovery(record: Record) -> Rows:
    """How many draws gave the right terms, in how many more they are doubted, and the median of the worst
    coefficient error at every noise; at the noise of E-WSINDy the median of the relative l2 error; true
    coefficients inside their intervals; seconds.
    """
    name, (noise, published) = f"`{record['task']}`", record["published"] or (None, None)

    def chosen(**wanted: Any) -> list[Record]:
        return [one["row"] for one in record["entries"] if wanted.items() <= one["key"].items()]

    def middle(some: list[Record], key: str) -> float:
        return statistics.median(row[key] for row in some)

    def terms(equation: dict[str, dict[str, float]]) -> set[tuple[str, str]]:
        return {(name, term) for name, right_side in equation.items() for term in right_side}

    def cell(some: list[Record]) -> str:
        if not some:
            return MISSING
        doubted = sum(terms(row.get("doubted", {})) == terms(record["truth"]) for row in some)
        right = f"{sum(row['is_right'] for row in some)}{f' + {doubted}' * bool(doubted)} of {len(some)}"
        return f"{right}, {percent(middle(some, 'worst'))}"

    labels = {"ours": "UPS", "weak": "PySINDy, weak form", "ensemble": "PySINDy, ensemble"}
    for column, label in labels.items():
        every, at_noise = chosen(column=column), chosen(column=column, noise=noise)
        num, inside = (sum(row.get(f"num_{key}", 0) for row in every) for key in ("intervals", "inside"))
        yield (
            name,
            label,
            *(cell(chosen(column=column, noise=one)) for one in NOISES),
            f"{percent(middle(at_noise, 'l2'))} at {100 * noise:g} %" if at_noise else MISSING,
            f"{inside} of {num}" if num else MISSING,
            f"{middle(every, 'seconds'):.2g}" if every else MISSING,
        )
    if published:
        last = (f"{percent(published)} at {100 * noise:g} %", MISSING, MISSING)
        yield name, "E-WSINDy, published", *[MISSING] * len(NOISES), *last


# ---- ensembles and bands -----------------------------------------------------------------------------------


SAMPLERS = {  # models of bench/excitable.py in words
    "exact": "exact samples",
    "no_kicks": "the equation without kicks",
    "dressed": "operator + white noise",
    "dressed_conditional": "operator + conditional Gaussian",
    "waves": "operator + Gaussian waves",
    "dressed_resampled": "operator + resampled residuals",
    "analogs": "operator + residuals of analogs",
    "scoring": "network trained by scores",
    "student_1": "student, 1 evaluation",
    "student_2": "student, 2 evaluations",
}


def interval(parts: list[Record]) -> str:
    """The mean over seeds, and the widest interval of any."""
    values, low, high = ([part[key] for part in parts] for key in ENDS)
    return with_ends(mean(values), min(low), max(high), 3)


def sampler(record: Record, model: str) -> tuple[str, list[Record]]:
    """A model of barkley2d in words, and its rows of all seeds."""
    runs, label = [run for run in record["entries"] if model in run["models"]], SAMPLERS.get(model, model)
    if len(runs) < len(record["entries"]):
        seeds = ", ".join(str(run["key"]["seed"]) for run in runs)
        label += f", seed{'s' if len(runs) > 1 else ''} {seeds} only"
    return label, [run["models"][model] for run in runs]


@table("samplers", "README.md", "excitable_far", "sampler; CRPS; energy score; network evaluations")
def samplers(record: Record) -> Rows:
    """Every way to sample barkley2d with frames far apart, from the simplest to the exact one."""
    [cheap] = {run["best_cheap"] for run in record["entries"]}
    for model in ("dressed_resampled", "waves", "corrector", "student_1", "scoring", "exact"):
        label, rows = sampler(record, model)
        figures = ([row["over exact"][key] for row in rows] for key in ("crps", "trajectory_score"))
        label += ", the best cheap ensemble" * (model == cheap)
        yield label, *map(interval, figures), f"{mean(row['evaluations'] for row in rows):.0f}"


EXCITABLE = "model; CRPS at lead 1; at leads 2, 3, 4; energy score; CRPS over the best cheap ensemble's; "
EXCITABLE += "0, 1, 2, 3 or more new waves; their area and v; evaluations"


@table("excitable", "docs/uncertain.md", "excitable", EXCITABLE)
@table("excitable_seed0", "docs/uncertain.md", "excitable_seed0", EXCITABLE)
@table("excitable_far", "docs/uncertain.md", "excitable_far", EXCITABLE)
def excitable(record: Record) -> Rows:
    """Scores of ensembles of barkley2d over those of exact samples, and their new waves; means over seeds,
    the widest interval of any."""
    for model in dict.fromkeys(model for run in record["entries"] for model in run["models"]):
        label, rows = sampler(record, model)
        leads = [row["over exact"]["crps_by_lead"] for row in rows]
        _, *later = zip(*(part["value"] for part in leads), strict=True)
        waves = [row["new_waves"] for row in rows]
        numbers = zip(*(part["numbers"] for part in waves), strict=True)
        yield (
            label,
            interval([{key: part[key][0] for key in ENDS} for part in leads]),
            ", ".join(f"{mean(values):.3f}" for values in later),
            interval([row["over exact"]["trajectory_score"] for row in rows]),
            interval([row["over cheap"]["crps"] for row in rows]),
            ", ".join(f"{mean(values):.2f}" for values in numbers),
            f"{mean(part['area'] for part in waves):.0f}, {mean(part['v'] for part in waves):.2f}",
            f"{mean(row['evaluations'] for row in rows):.0f}",
        )


CLIMATE = "run; sampler; field; variance; energy in octaves from wave 1 on; memory of the start"


@table("climate", "docs/uncertain.md", "climate", CLIMATE)
def climate(record: Record) -> Rows:
    """Long rollouts over exact samples, in the second half of their frames."""
    for run in record["entries"]:
        where = f"{record['task']}, {run['starts']} starts x {run.get('members', 1)}, {run['frames']} frames"
        for (model, row), (i, field) in product(run["models"].items(), enumerate(run["fields"])):
            ratios, memory = (
                [row[key][end][i] for end in ENDS] for key in ("over exact", "start less exact")
            )
            variance, *energy = (with_ends(*ends) for ends in zip(*ratios, strict=True))
            label = SAMPLERS.get(model, model)
            yield where, label, field, variance, ", ".join(energy), with_ends(*memory)


TRUST = ("inside", "width", "rank", "auroc", "refused", "false", "fine", "within_2")  # of bench/trust.py
BANDS = "task; base; calibrated on; starts; inside; of a calibration; width; rank; AUROC; refused; "
BANDS += "false; called fine; within x 2"


@table("trust", "docs/trust.md", "trust", BANDS, order=("starts", "grid", "authors"))
def trust(record: Record) -> Rows:
    """Bands and stated errors, on fresh and on shifted starts."""
    for one in record["entries"]:
        inside, *figures = (with_ends(*one.get(name, [None] * 3)) for name in TRUST)
        expected = "{:.2f} to {:.2f}".format(*one["expected"])
        facts = one["key"]["column"], one["base"], str(one["key"]["calibrated_on"]), str(one["starts"])
        yield *facts, inside, expected, *figures


# ---- pages -------------------------------------------------------------------------------------------------


def texts() -> dict[str, tuple[str, str]]:
    """Name of a table -> (page, text)."""
    tasks = lines_of("task; source; published grid; frames", task_rows())
    found = {name: (one.page, one.text(results(RESULTS / one.folder))) for name, one in TABLES.items()}
    return {"tasks": ("docs/tasks.md", tasks)} | found


def written(root: Path = ROOT) -> dict[str, tuple[str, str]]:
    """Page -> (text now, text as it should be). Raises ValueError for a page without its comments."""
    pages: dict[str, tuple[str, str]] = {}
    for name, (page, text) in texts().items():
        before, after = pages.get(page) or [(root / page).read_text(encoding="utf-8")] * 2
        opening, closing = f"<!-- table {name}: python -m bench.table -->", f"<!-- end of table {name} -->"
        place = re.compile(f"({re.escape(opening)}\n).*?({re.escape(closing)})", re.S)
        after, num = place.subn(lambda match: f"{match[1]}{text}\n{match[2]}", after)  # noqa: B023
        if num != 1:
            raise ValueError(
                f"{page} has {num} places for the table {name}; expected one, between {opening} and "
                f"{closing}. Put the comments where the table belongs."
            )
        pages[page] = before, after
    return pages


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page differs")
    args = parser.parse_args(argv)
    differing = {page: after for page, (before, after) in written(root).items() if before != after}
    for page, after in differing.items():
        print(f"{page}: {'differs; run python -m bench.table' if args.check else 'written'}")
        if not args.check:
            (root / page).write_text(after, encoding="utf-8")
    return int(args.check and bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
