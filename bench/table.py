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
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

from bench.command import parser_of
from bench.discovery_films import FILMS
from ups.common.place import ROOT
from ups.tasks import TASKS, Task

RESULTS = ROOT / "bench" / "results"
MISSING = "-"
ENDS = ("value", "low", "high")
EXCITABLE = {  # models of bench/excitable.py in words
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
AUTHORS = {"pypde": "Burgers, py-pde", "phiflow": "Burgers, PhiFlow", "exponax": "Burgers, exponax"}
CORRECTORS = {
    "full": ", the full grid",
    "corrected": ", **corrected**",
    "fno": ", corrected by an FNO",
    "alone": ", a network without the solver",
}
TRUST = ("inside", "width", "rank", "auroc", "refused", "false", "within_2")  # figures of bench/trust.py
LABELS = {"ours": "UPS", "fno": "FNO", "unet": "U-Net"}
COUNTS = (0, 4, 16, 64)  # problems of bench/transfer.py


def results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Task -> results of bench/eleven.py on the processor with most of them, on a tie the latest."""
    records = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return {
        record["task"]: of_one_processor(record)
        for record in records
        if "entries" in record and "task" in record
    }


def of_one_processor(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the entries of one processor, without columns that correct a solver, whose program is
    gone. Trainings by a number of steps count, too."""
    every = [entry for entry in record["entries"] if not entry["key"]["column"].endswith("_correction")]
    kinds = [entry["key"]["processor"] for entry in every]
    chosen = max(reversed(kinds), key=kinds.count, default="")
    entries = [entry for entry in every if entry["key"]["processor"] == chosen or entry["key"].get("steps")]
    return record | {"processor": chosen, "entries": entries}


def longest(record: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """The entries of a column with the longest training, one per seed and, if there are any, author."""
    mine = [entry for entry in record.get("entries", []) if entry["key"]["column"] == column]
    budget = max((entry["key"]["budget_s"] for entry in mine), default=0)
    return [entry for entry in mine if entry["key"]["budget_s"] == budget]


def rows(record: dict[str, Any], column: str) -> dict[int, dict[str, Any]]:
    """Seed -> row of a column, of the longest training."""
    return {entry["key"]["seed"]: entry["row"] for entry in longest(record, column)}


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


def error(record: dict[str, Any], column: str, key: str = "error") -> float | None:
    return mean(row.get(key) for row in rows(record, column).values())


def ratio(record: dict[str, Any], one: str, others: tuple[str, ...]) -> float | None:
    """Error of a column over the best of others, on the seeds that all have; None if there is none."""
    found = [rows(record, name) for name in (one, *others)]
    seeds = set.intersection(*map(set, found))
    values = [mean(part[seed]["error"] for seed in seeds) for part in found]
    if not seeds or not math.isfinite(min(values[1:])):
        return None
    return values[0] / min(values[1:])


def grid(task: Task) -> str:
    return " x ".join([str(task.resolution)] * task.ndim)


def frames(task: Task) -> str:
    return "steady" if task.is_steady else f"{task.num_frames} to t = {task.t_end:g}"


def source(task: Task) -> str:
    """Where the data come from: published files, our solver, or the files of another task."""
    kinds = [
        *(["published"] if task.published and not task.files_of else []),
        *(["generated"] if task.user_facts is None else []),
    ]
    return (" or ".join(kinds) or "user data") + (f", files of {task.files_of}" if task.files_of else "")


def protocol(record: dict[str, Any]) -> str:
    """Grid and horizon of a comparison, such as 256, 31 frames, 1.55 time units."""
    data = record.get("data", {})
    size = " x ".join(map(str, data.get("grid", []))) or MISSING
    if TASKS[record["task"]].is_steady:
        return f"{size}, steady"
    scored = data["frames_scored"]  # after the context; its first frame is the start
    until = data["t_end"] * scored / (data["context_frames"] + scored - 1)
    return f"{size}, {scored} frames, {until:.3g} time units"


def table(header: str, body: Iterable[tuple[str, ...]]) -> str:
    """A table of Markdown; header: names of the columns, between semicolons."""
    names = header.split("; ")
    lines = [names, ["---"] * len(names), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def task_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/tasks.md: every task of the registry."""
    return table(
        "task; source; published grid; frames",
        ((f"`{task.name}`", source(task), grid(task), frames(task)) for task in TASKS.values()),
    )


def comparison_table(found: dict[str, dict[str, Any]]) -> str:
    """README.md: errors of ours, its base, FNO and U-Net on every task that was compared."""

    def line(record: dict[str, Any]) -> tuple[str, ...]:
        return (
            f"`{record['task']}`",
            number(error(record, "ours")),
            number(error(record, "fno")),
            number(error(record, "unet")),
            number(error(record, "ours", "base")),
            number(record["trivial"]["error"]),
            protocol(record),
        )

    header = "task; UPS; FNO; U-Net; UPS base alone; trivial; grid, horizon"
    return table(header, map(line, found.values()))


def equal_time_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/results.md: errors after equal training time."""
    others = ("fno", "unet")

    def line(record: dict[str, Any]) -> tuple[str, ...]:
        return (
            record["task"],
            number(record["trivial"]["error"]),
            *(number(error(record, name)) for name in ("ours_generic", "ours", *others)),
            number(ratio(record, "ours_generic", others), True),
            number(ratio(record, "ours", others), True),
            " ".join(map(str, sorted(rows(record, "ours")))) or MISSING,
        )

    header = "task; trivial; UPS, generic bases; UPS; FNO; U-Net; generic / best; UPS / best; seeds"
    return table(header, map(line, found.values()))


def long_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/results.md: errors at the end of one and of three horizons."""

    def ends(parts: list[dict[str, Any]], key: str) -> str:
        return ", ".join(number(mean(part[key][mark] for part in parts)) for mark in (0, 2))

    def line(record: dict[str, Any]) -> tuple[str, ...]:
        long = {
            column: [row["long"] for row in rows(record, column).values() if "long" in row]
            for column in LABELS
        }
        every = [part for parts in long.values() for part in parts]
        return (
            record["task"],
            *(ends(parts, "error") for parts in long.values()),
            ends(every, "persistence"),
        )

    is_long = [record for record in found.values() if not TASKS[record["task"]].is_steady]
    return table("; ".join(("task", *LABELS.values(), "persistence")), map(line, is_long))


def pays_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/forecasts.md: seconds of solver and forecast at equal error, and N* with its
    interval (bench/pays.py); families first."""

    def words(value: float | None) -> str:
        return "never" if value is None else f"{float(f'{value:.2g}'):,.0f}"

    def cells(row: dict[str, Any], kind: str) -> tuple[str, str, str]:
        ours, base, pays = row[f"UPS {kind}"], row[f"base {kind}"], "UPS"
        low, high = words(ours["low"]), words(ours["high"])
        if ours["n_star"] is None:
            has_base = base["n_star"] is not None and base["forecast"]["error"] != ours["forecast"]["error"]
            pays = f"the base from {words(base['n_star'])} on" if has_base else "the solver"
        times = ", ".join(number(ours[name]["seconds"]) for name in ("solver", "forecast"))
        return times, words(ours["n_star"]) + f" [{low}, {high}]" * (low != high), pays

    def line(name: str) -> tuple[str, ...]:
        row = found[name]["entries"][0]["row"]
        batch, alone = cells(row, "batch"), cells(row, "alone")
        solver, total = row["UPS batch"]["solver"], f"{sum(row['budget'].values()):.0f}"
        errors = (number(row[f"{model} batch"]["forecast"]["error"]) for model in ("UPS", "base"))
        compared = f"{solver['grid']} ({number(solver['error']) if solver['error'] else 0})"
        return AUTHORS.get(name, name), *errors, total, compared, *batch, *alone

    header = "row; nRMSE of UPS; of its base alone; data and training, s; grid of the solver (nRMSE); "
    header += "batch: solver, UPS, s; N*; pays; one start: solver, UPS, s; N*; pays"
    return table(header, map(line, sorted(found, key=lambda name: (name in AUTHORS, name))))


def error_map(record: dict[str, Any], column: str) -> list[list[float]]:
    """The errors [scale][wave number] of a column of the shift grid, mean over seeds; inf: one diverged."""
    maps = [entry["errors"] for entry in longest(record, column)]
    return [[mean(cell) for cell in zip(*rows, strict=True)] for rows in zip(*maps, strict=True)]


def shift_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/peers.md: error in the trained regime, and factors of it outside."""

    def line(record: dict[str, Any], column: str) -> tuple[str, ...]:
        errors, middle = error_map(record, column), len(record["scales"]) // 2
        centre = errors[middle][middle]
        outside = [errors[0][middle], errors[-1][middle], errors[middle][0], errors[middle][-1]]
        cells = [cell for row in errors for cell in row]
        still = [cell for row in record["persistence"] for cell in row]
        num_better = sum(cell < other for cell, other in zip(cells, still, strict=True))
        return (
            record["task"],
            LABELS[column],
            number(centre),
            *(number(cell / centre, True) for cell in (*outside, max(cells))),
            f"{num_better} of {len(cells)}",
        )

    header = "family; model; error in the trained regime; slowest; fastest; fewest waves; most waves; worst; "
    header += "better than persistence"
    named = ((record, name) for record in found.values() for name in LABELS if longest(record, name))
    return table(header, (line(record, name) for record, name in named))


def apebench_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/peers.md: errors on APEBench's scenarios, with its best network of those that were trained."""

    def best(record: dict[str, Any], prefix: str, is_own: bool = False) -> tuple[float | None, str]:
        """Error of the network with the lowest one, and a cell with its name and number of steps."""
        entries = [entry for entry in record["entries"] if bool(entry["key"]["steps"]) == is_own]
        part = record | {"entries": entries}
        names = {entry["key"]["column"] for entry in entries} - {"full", "bare", "correction"}
        values = {name: error(part, name) for name in names if name.startswith("correct ") == bool(prefix)}
        if not values:
            return None, MISSING
        name = min(values, key=values.get)
        steps = mean(row["steps"] for row in rows(part, name).values())
        kind = name.removeprefix(prefix).split(";")[0]
        return values[name], f"{number(values[name])} ({kind}, {steps:.0f})"

    def over(value: float | None, other: float | None) -> str:
        return MISSING if value is None or not other else number(value / other, True)

    def line(record: dict[str, Any]) -> tuple[str, ...]:
        record = record | {"entries": [one for one in record["entries"] if not one["key"]["overrides"]]}
        full, bare, corrected = (error(record, name) for name in ("full", "bare", "correction"))
        (rival, cell), (_, own), (other, corrects) = (
            best(record, ""),
            best(record, "", True),
            best(record, "correct "),
        )
        return (
            record["task"],
            number(record["persistence"]),
            number(full),
            number(error(record, "full", "end")),
            number(error(record, "full", "base")),
            number(bare),
            cell,
            own,
            over(full, rival),
            over(bare, rival),
            number(corrected),
            corrects,
            over(corrected, other),
        )

    header = "scenario; persistence; UPS; at step 200; its base alone; UPS without bases; best network; "
    header += "by 10 000 steps; UPS / best; without bases / best; UPS corrects; network corrects; ratio"
    return table(header, map(line, found.values()))


def discovery_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/discovery.md: how many draws gave the right terms, in how many more they are doubted, and the
    median of the worst coefficient error at every noise; at the noise of E-WSINDy the median of the relative
    l2 error; true coefficients inside their intervals; seconds.
    """
    labels = {"ours": "UPS", "weak": "PySINDy, weak form", "ensemble": "PySINDy, ensemble"}

    def chosen(record: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
        return [one["row"] for one in record["entries"] if wanted.items() <= one["key"].items()]

    def middle(some: list[dict[str, Any]], key: str) -> float:
        return statistics.median(row[key] for row in some)

    def terms(equation: dict[str, dict[str, float]]) -> set[tuple[str, str]]:
        return {(name, term) for name, right_side in equation.items() for term in right_side}

    def cell(some: list[dict[str, Any]], truth: dict[str, dict[str, float]]) -> str:
        if not some:
            return MISSING
        doubted = sum(terms(row.get("doubted", {})) == terms(truth) for row in some)
        right = f"{sum(row['is_right'] for row in some)}{f' + {doubted}' * bool(doubted)} of {len(some)}"
        return f"{right}, {percent(middle(some, 'worst'))}"

    noises = sorted({one["key"]["noise"] for record in found.values() for one in record["entries"]})
    header = "; ".join(("film", "method", *(f"{100 * noise:g} %" for noise in noises)))

    def lines(record: dict[str, Any]) -> Iterable[tuple[str, ...]]:
        name, (noise, error) = f"`{record['task']}`", record["published"] or (None, None)
        for column, label in labels.items():
            every = chosen(record, column=column)
            published = chosen(record, column=column, noise=noise)
            num = sum(row.get("num_intervals", 0) for row in every)
            inside = sum(row.get("num_inside", 0) for row in every)
            yield (
                name,
                label,
                *(cell(chosen(record, column=column, noise=one), record["truth"]) for one in noises),
                f"{percent(middle(published, 'l2'))} at {100 * noise:g} %" if published else MISSING,
                f"{inside} of {num}" if num else MISSING,
                f"{middle(every, 'seconds'):.2g}" if every else MISSING,
            )
        if error:
            last = (f"{percent(error)} at {100 * noise:g} %", MISSING, MISSING)
            yield name, "E-WSINDy, published", *[MISSING] * len(noises), *last

    names = [name for name in FILMS if name in found]
    return table(
        f"{header}; l2 error at the noise of E-WSINDy; inside the interval; seconds",
        (line for name in names for line in lines(found[name])),
    )


def starts_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/discovery.md: errors of forecasts from noisy frames by the equation that was found and by the true
    one, medians over draws, and the largest ratio of both."""
    columns = ("found", "true", "found_from_last", "true_from_last")

    def lines() -> Iterable[tuple[str, ...]]:
        for name in (name for name in FILMS if name in found):
            entries = found[name]["entries"]
            for noise in sorted({one["key"]["noise"] for one in entries}):
                some = [one["row"] for one in entries if one["key"]["noise"] == noise]
                ratios = [row["found"] / row["true"] for row in some]
                frames = "; ".join(sorted({str(row.get("start_frames", 0)) for row in some}))
                yield (
                    f"`{name}`",
                    f"{100 * noise:g} %",
                    str(len(some)),
                    *(percent(statistics.median(row[column] for row in some)) for column in columns),
                    f"{statistics.median(ratios):.2f} ({max(ratios):.2f})",
                    frames,
                )

    header = "films; noise; draws; found; true; found, from the last frame; true, from the last frame; "
    header += "found / true (largest); frames of the start"
    return table(header, lines())


def interval(parts: list[dict[str, Any]]) -> str:
    """The mean over seeds, and the widest interval of any."""
    values, low, high = ([part[key] for part in parts] for key in ENDS)
    return f"{mean(values):.3f} [{min(low):.3f}, {max(high):.3f}]"


def excitable_label(record: dict[str, Any], model: str) -> tuple[str, list[dict[str, Any]]]:
    """A model of barkley2d in words, and its rows of all seeds."""
    runs, label = [run for run in record["entries"] if model in run["models"]], EXCITABLE.get(model, model)
    if len(runs) < len(record["entries"]):
        seeds = ", ".join(str(run["key"]["seed"]) for run in runs)
        label += f", seed{'s' if len(runs) > 1 else ''} {seeds} only"
    return label, [run["models"][model] for run in runs]


def sampler_table(found: dict[str, dict[str, Any]]) -> str:
    """README.md: every way to sample barkley2d with frames far apart, from the simplest to the exact one."""

    def lines(record: dict[str, Any]) -> Iterable[tuple[str, ...]]:
        [cheap] = {run["best_cheap"] for run in record["entries"]}
        for model in ("dressed_resampled", "waves", "corrector", "student_1", "scoring", "exact"):
            label, rows = excitable_label(record, model)
            yield (
                f"{label}, the best cheap ensemble" if model == cheap else label,
                interval([row["over exact"]["crps"] for row in rows]),
                interval([row["over exact"]["trajectory_score"] for row in rows]),
                f"{mean(row['evaluations'] for row in rows):.0f}",
            )

    header = "sampler; CRPS; energy score; network evaluations"
    return table(header, (line for record in found.values() for line in lines(record)))


def excitable_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/uncertain.md: scores of ensembles of barkley2d over those of exact samples, and their new
    waves; means over seeds, the widest interval of any.
    """

    def line(record: dict[str, Any], model: str) -> tuple[str, ...]:
        label, rows = excitable_label(record, model)
        leads = [row["over exact"]["crps_by_lead"] for row in rows]
        _, *later = zip(*(part["value"] for part in leads), strict=True)
        waves = [row["new_waves"] for row in rows]
        numbers = zip(*(part["numbers"] for part in waves), strict=True)
        return (
            label,
            interval([{key: part[key][0] for key in ENDS} for part in leads]),
            ", ".join(f"{mean(values):.3f}" for values in later),
            interval([row["over exact"]["trajectory_score"] for row in rows]),
            interval([row["over cheap"]["crps"] for row in rows]),
            ", ".join(f"{mean(values):.2f}" for values in numbers),
            f"{mean(part['area'] for part in waves):.0f}, {mean(part['v'] for part in waves):.2f}",
            f"{mean(row['evaluations'] for row in rows):.0f}",
        )

    header = "model; CRPS at lead 1; at leads 2, 3, 4; energy score; CRPS over the best cheap ensemble's; "
    header += "0, 1, 2, 3 or more new waves; their area and v; evaluations"
    lines = (
        line(record, model)
        for record in found.values()
        for model in dict.fromkeys(model for run in record["entries"] for model in run["models"])
    )
    return table(header, lines)


def corrector_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/corrector.md: runs on every grid, with and without correction, and when a correction pays."""

    def line(record: dict[str, Any], column: str, row: dict[str, Any]) -> tuple[str, ...]:
        [full] = [one["row"] for one in record["entries"] if one["key"]["column"] == "full"]
        errors, over = [mean(some) for some in row["errors"]], row.get("over the full grid", [])
        low, *_, high = sorted(row["octaves"])
        return (
            f"{record['task']}, {record['leads'][0]} steps",
            f"{row['cells']}{CORRECTORS.get(column, '')}",
            ", ".join(map(number, errors)),
            ", ".join(f"{value:.2g} [{a:.2g}, {b:.2g}]" for value, a, b in over) or MISSING,
            number(mean(row["on the full grid"][0])),
            f"{number(row['variance'], True)}; {number(low, True)} to {number(high, True)}",
            f"{number(mean(row['seconds']))}; {number(mean(row['seconds']) / mean(full['seconds']), True)}",
            "{:.0f} + {:.0f}".format(row["data"], row["training"]) if "paid" in row else MISSING,
            paid(row["paid"]) if "paid" in row else MISSING,
            number(max(row["grown"]), True) if "grown" in row else MISSING,
        )

    def paid(ends: list[float]) -> str:
        cells = [f"{one:,.0f}" if math.isfinite(one) else "never" for one in ends]
        return f"{cells[0]} [{cells[1]}, {cells[2]}]" if math.isfinite(ends[0]) else "never"

    header = "example; cells per axis; nRMSE after 1, 3 (10) times the trained steps; over that of the full "
    header += "grid; nRMSE on the full grid; variance, energy in octaves over the truth's; seconds of a run, "
    header += "over full; seconds of data + training; N*; largest value after ten times the trained steps, "
    header += "over the start's"
    entries = ((record, one) for record in found.values() for one in record["entries"])
    return table(header, [line(record, one["key"]["column"], one["row"]) for record, one in entries])


def few_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/peers.md: errors after few trajectories, and of networks after many: the best of APEBench's, or
    the FNO of bench/eleven.py."""
    scenarios, families = results(RESULTS / "apebench"), results()

    def line(name: str) -> tuple[str, ...]:
        record = scenarios.get(name) or families[name]
        names = {one["key"]["column"] for one in record["entries"]} - {"full", "bare", "correction"}
        some = [one for one in names if " " not in one] if name in scenarios else ["fno"]
        of_rivals = [one["row"]["error"] for one in record["entries"] if one["key"]["column"] in some]
        rival = min(value for value in of_rivals if value is not None)
        ours = [error(found[name], column) for column in ("full 1", "full 5", "bare 5")]
        ratios = (None if value is None else value / rival for value in ours)
        cell = f"{number(rival)} ({50 if name in scenarios else record['data']['train']})"
        return name, *map(number, ours), cell, *(number(one, True) for one in ratios)

    header = "data; UPS with 1; with 5; without bases with 5; best network or FNO (trajectories); "
    header += "1 / network; 5 / network; without bases with 5 / network"
    return table(header, map(line, found))


def transfer_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/results.md: errors after few trajectories, by the number of problems behind the trunk."""

    def values(
        record: dict[str, Any], column: str, problems: int, is_plain: bool = False
    ) -> dict[int, float]:
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
        ends = " to ".join(number(end) for end in (min(errors.values()), max(errors.values())))
        return f"{number(statistics.geometric_mean(errors.values()))}" + f" ({ends})" * (len(errors) > 1)

    def lines(record: dict[str, Any]) -> Iterable[tuple[str, ...]]:
        for column in sorted({one["key"]["column"] for one in record["entries"]}, key=str.split):
            own = {count: values(record, column, count) for count in COUNTS}
            of_plain, last = values(record, column, 0, True), own[COUNTS[-1]]
            ratios = [last[seed] / own[0][seed] for seed in last if seed in own[0]]
            mean_ratio = number(statistics.geometric_mean(ratios), True) if ratios else MISSING
            bases, num = column.split()
            yield record["task"], bases, num, *map(cell, (of_plain, *own.values())), mean_ratio

    counts = "; ".join(map(str, COUNTS))
    header = f"family; bases; trajectories; 0, `plain`; {counts}; {COUNTS[-1]} / 0"
    return table(header, (line for record in found.values() for line in lines(record)))


def strangers_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/peers.md: UPS and networks by the code of their authors; first frame, 20 frames, frame 60."""

    def cell(row: dict[str, float]) -> str:
        return ", ".join(number(row[part]) for part in ("first", "error", "late"))

    labels = {
        "ours": "UPS",
        "fno": "FNO of the bench",
        **{name: name for name in ("FNO", "TFNO", "UNO")},
    }

    def line(record: dict[str, Any]) -> tuple[str, ...]:
        own = {one["key"]["column"]: one for one in record["entries"]}
        cells = (
            f"{cell(own[name]['row'])} ({own[name]['steps']})" if name in own else MISSING for name in labels
        )
        errors = {name: one["row"]["error"] for name, one in own.items()}
        rivals = [errors[name] for name in errors if name != "ours"]
        ratio = number(errors["ours"] / min(rivals), True) if "ours" in errors and rivals else MISSING
        return record["task"], cell(record["persistence"]), *cells, ratio

    header = f"problem; persistence; {'; '.join(labels.values())}; UPS / best"
    return table(header, map(line, found.values()))


def climate_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/uncertain.md: long rollouts over exact samples, in the second half of their frames."""
    lines = []
    for name, run in ((name, run) for name, record in found.items() for run in record["entries"]):
        where = f"{name}, {run['starts']} starts, {run['frames']} frames"
        for (model, row), (i, field) in product(run["models"].items(), enumerate(run["fields"])):
            over, start = ([row[key][end][i] for end in ENDS] for key in ("over exact", "start less exact"))
            cells = ["{:.2f} [{:.2f}, {:.2f}]".format(*ends) for ends in zip(*over, strict=True)]
            memory = "{:.2f} [{:.2f}, {:.2f}]".format(*start)
            lines.append((where, EXCITABLE.get(model, model), field, cells[0], ", ".join(cells[1:]), memory))
    header = "run; sampler; field; variance; energy in octaves from wave 1 on; memory of the start"
    return table(header, lines)


def trust_table(found: dict[str, dict[str, Any]]) -> str:
    """docs/trust.md: bands and stated errors, on fresh and on shifted starts."""

    def cell(value: float | None, low: float | None, high: float | None) -> str:
        return MISSING if value is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"

    def line(one: dict[str, Any]) -> tuple[str, ...]:
        inside, width, rank, *shifted = (cell(*one[name]) for name in TRUST)
        expected = "{:.2f} to {:.2f}".format(*one["expected"])
        facts = one["key"]["column"], one["base"], str(one["key"]["calibrated_on"]), str(one["starts"])
        return *facts, inside, expected, width, rank, *shifted

    header = "task; base; calibrated on; starts; inside; of a calibration; width; rank; AUROC; refused; "
    header += "false; within x 2"
    entries = [
        one for name in ("starts", "grid", "authors") for one in found.get(name, {}).get("entries", ())
    ]
    return table(header, map(line, entries))


def percent(value: float) -> str:
    """A fraction in percent, with two digits; limits for very small and very large ones."""
    if value and not 1e-4 <= value <= 10:
        return "< 0.01 %" if value < 1e-4 else "> 1000 %"
    return f"{100 * value:.0f} %" if value > 0.0995 else f"{100 * value:.2g} %"


# name -> page, folder of bench/results, function
TABLES: dict[str, tuple[str, str, Callable[[dict], str]]] = {
    "comparison": ("README.md", "", comparison_table),
    "samplers": ("README.md", "excitable_far", sampler_table),
    "pays": ("docs/forecasts.md", "pays", pays_table),
    "tasks": ("docs/tasks.md", "", task_table),
    "equal_time": ("docs/results.md", "", equal_time_table),
    "long": ("docs/results.md", "", long_table),
    "apebench": ("docs/peers.md", "apebench", apebench_table),
    "few": ("docs/peers.md", "few", few_table),
    "strangers": ("docs/peers.md", "strangers", strangers_table),
    "transfer": ("docs/results.md", "transfer", transfer_table),
    "shift_grid": ("docs/peers.md", "shift_grid", shift_table),
    "excitable": ("docs/uncertain.md", "excitable", excitable_table),
    "excitable_far": ("docs/uncertain.md", "excitable_far", excitable_table),
    "trust": ("docs/trust.md", "trust", trust_table),
    "corrector": ("docs/corrector.md", "corrector", corrector_table),
    "climate": ("docs/uncertain.md", "climate", climate_table),
    "discovery": ("docs/discovery.md", "discovery", discovery_table),
    "discovery_starts": ("docs/discovery.md", "discovery_starts", starts_table),
}


def between(name: str) -> re.Pattern:
    return re.compile(
        rf"(<!-- table {name}: python -m bench.table -->\n).*?(<!-- end of table {name} -->)", re.S
    )


def written(root: Path = ROOT) -> dict[str, tuple[str, str]]:
    """Page -> (text now, text as it should be). Raises ValueError for a page without its comments."""
    pages: dict[str, tuple[str, str]] = {}
    for name, (page, folder, make) in TABLES.items():
        before, after = pages.get(page) or [(root / page).read_text(encoding="utf-8")] * 2
        text = make(results(root / "bench" / "results" / folder))
        after, num = between(name).subn(lambda match: f"{match[1]}{text}\n{match[2]}", after)  # noqa: B023
        if num != 1:
            raise ValueError(
                f"{page} has {num} places for the table {name}; expected one, between "
                f"<!-- table {name}: python -m bench.table --> and <!-- end of table {name} -->. "
                f"Put the comments where the table belongs."
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
