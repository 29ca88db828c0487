"""Gates and usability of a finished evaluation: is each stage worth having, is each task's model usable?

A gate is a minimal claim about one stage and one task, with the figure that decides it:

    {"stage": operator | diffusion | consistency | scoring | steady, "task", "name": "claim/task[/model]",
     "value", "low", "high", "bound": text, "passed": bool, "undecided": bool, "reason": a sentence}

It passes if the whole 95 % interval over initial conditions is within the bound, so fewer data make it
harder. Ratios are paired, and equal is not better. Claims on ensembles are rows of ups/evaluation/claims.py,
with the fakes that they refuse. They are tests of equivalence (Schuirmann 1987) with three outcomes: passed;
failed, if the whole interval is outside the bound; else undecided, with the number of initial conditions that
would decide. Undecided is not passed, but does not fail a report: a sampler that is expensive is scored on
few. Claims on the operator have two outcomes:

    made             every requested stage exists                  a stage deleted or never run
    finite           no forecast has NaN or inf                    a diverged network
    trivial, base    the operator beats every trivial forecast (ups/evaluation/trivial.py), and is not worse
                     than its base by more than a margin

tests/test_fakes.py puts each fake, and exact samples, in the place of the stages. With evaluate.quality=false
only claims remain that hold after seconds of training.

Usability is {"usable": bool, "words": a few sentences} for every task. All is computed from the table of
results (ups/results.py).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ups.common.place import STAGES, TRANSIENT, make_target
from ups.common.text import frames_ahead
from ups.evaluation.claims import ENSEMBLE, PRIOR, TRAINED, Claim, point, worst_figure
from ups.metrics.errors import LARGEST_ERROR
from ups.results import Entry, Interval, Results

TRIVIAL = {  # forecasts without a model (ups/evaluation/trivial.py), in words
    "persistence": "the last known frame",
    "train_mean": "the mean",
    "climatology": "the climatology",
    "seasonal_climatology": "the seasonal climatology",
}
OTHERS = (*TRIVIAL, "codec_floor", "fno", "unet")  # models of an entry that are no stage's
MAX_RATIO_TO_TRIVIAL = 1.0  # of nRMSE: of the operator over that of every trivial forecast
MAX_RATIO_TO_BASE = 1.25  # and of its base, as selections are made on validation: chance may leave it worse
BEST_MEAN = 1.1  # times the error of the best mean; below it a forecast is as good as can be
SHORTEST = 0.5  # fraction of the horizon over which a usable model stays correlated with the truth

MANY = 1e5  # initial conditions that no data set has

PAIR = "operator / base"  # of a task's comparisons
BESIDE = "({value:.3f} [{low:.3f}, {high:.3f}] times the base's error)"
NETWORK = {  # sentence by `network_gain`
    "off": " Its network is not used: on validation it is not better than the base alone.",
    "unknown": "",
    "less": f" Its network makes it better than its base alone {BESIDE}.",
    "more": f" Its network makes it worse than its base alone {BESIDE}.",
    "tie": f" Its network adds nothing significant to its base {BESIDE}.",
}


def trivial_of(task: Entry) -> list[str]:
    """The trivial forecasts of a task."""
    return [name for name in TRIVIAL if name in task.models()]


def error_of(task: Entry) -> str:
    """The error by which a task's forecasts are judged: PDEBench's nRMSE, or the pooled one
    (`ups.metrics.errors.are_pooled`)."""
    return task.facts.get("error", "nrmse")


def gate(
    stage: str,
    name: str,
    what: str,
    found: Interval,
    above: float | None = None,
    below: float | None = None,
    bound: str = "",
    count: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """The record of one gate: the only place where one is written. It passes if the interval of `found` is
    strictly between the bounds; undefined fails. count: initial conditions of a test of equivalence. more:
    further entries, or another reason."""
    known = None not in found.values()
    passed = known and (above is None or found["low"] > above) and (below is None or found["high"] < below)
    is_outside = not known or not (
        (above is None or found["high"] > above) and (below is None or found["low"] < below)
    )
    undecided = bool(count) and not passed and not is_outside
    bound = bound or (
        f"below {below:g}"
        if above is None
        else f"above {above:g}"
        if below is None
        else f"{above:g} to {below:g}"
    )
    text = f"{found['value']:.4g}" if known else "undefined (not finite)"
    if known and found["low"] != found["high"]:
        text += f" [{found['low']:.4g}, {found['high']:.4g}]"
    return {
        "stage": stage,
        "task": name.split("/")[1],
        "name": name,
        **found,
        "bound": bound,
        "passed": passed,
        "undecided": undecided,
        "reason": f"{what} is {text}; allowed is {bound}"
        + (f"; {deciding(found, above, below, count)} would decide" if undecided else ""),
        **more,
    }


def deciding(found: Interval, above: float | None, below: float | None, count: int) -> str:
    """How many initial conditions would decide, in words, if the value stays and the interval shrinks as the
    root of their number."""
    needed = 1.0
    for edge in (above, below):
        if edge is not None and found["low"] <= edge <= found["high"]:
            end, away = found["low" if edge < found["value"] else "high"], abs(edge - found["value"])
            needed = max(needed, abs(end - found["value"]) / away if away else math.inf)
    number = count * needed**2
    return (
        f"about {math.ceil(number)} initial conditions"
        if number < MANY
        else "no number of initial conditions"
    )


def missing(stage: str, name: str) -> dict[str, Any]:
    reason = (
        f"stage {stage} is missing; expected its samples of {name}. Run {make_target(stage)}, or remove it "
        "from evaluate.stages (make: STAGES)."
    )
    return gate(stage, f"made/{name}/{stage}", "", point(None), bound="there", reason=reason)


def operator_gates(stage: str, name: str, task: Entry, settings: Any) -> Iterator[dict]:
    models = task.models()
    for model in [model for model in models if model not in OTHERS]:
        yield gate(
            stage,
            f"finite/{name}/{model}",
            "the number of trajectories with NaN or inf",
            point(task.number(model, "nonfinite_trajectories")),
            below=1,
            bound="none",
        )
    error = error_of(task)
    first, *others = trivial_of(task)
    limits = {
        first: (f"trivial/{name}", MAX_RATIO_TO_TRIVIAL),
        **{other: (f"trivial/{name}/{other}", MAX_RATIO_TO_TRIVIAL) for other in others},
        "base": (f"base/{name}", MAX_RATIO_TO_BASE),
    }
    for other, (claim, limit) in limits.items() if settings.quality else ():
        if other in models:
            yield gate(
                stage,
                claim,
                f"nRMSE of the operator over that of {other}",
                task.value(f"operator / {other}", error) or point(None),
                below=limit,
            )


def claimed(
    claims: tuple[Claim, ...], stage: str, name: str, entry: Entry, settings: Any, model: str
) -> Iterator[dict]:
    """The gates of one model by the rows that apply to it."""
    for claim in claims:
        found = claim.figure(entry, model) if claim.applies(stage, settings) else None
        if found is not None:
            where = claim.name if claim.of_task else f"{claim.name}/{name}/{model}"
            words = claim.words.format(
                model=model, cheap=entry.facts["best_cheap"], worst=worst_figure(entry, model, claim.case)
            )
            above, below = claim.bounds(model)
            own = None if claim.of_task else entry.number(model, "num_trajectories", claim.case)
            count = own or entry.number("", "num_initial_conditions")
            count = 0 if claim.is_better else count or 1
            yield gate(stage, where.format(task=name), words, found, above, below, count=count)


def ensemble_gates(stage: str, name: str, entry: Entry, settings: Any) -> Iterator[dict]:
    """Gates of a stage's samplers; with the corrector's, those of what serves if no stage has trained it."""
    serves = entry.facts.get("serves")
    is_extra = stage == TRANSIENT[0] and serves in entry.models() and serves not in TRAINED
    rows: dict[str, dict] = {}
    for model in [*STAGES[stage].trained_samplers, *([serves] if is_extra else [])]:
        for row in claimed(ENSEMBLE, stage, name, entry, settings, model):
            rows.setdefault(row["name"], row)  # a claim on the task is one row for all models
    yield from rows.values()


def steady_gates(stage: str, name: str, entry: Entry, settings: Any) -> Iterator[dict]:
    yield from claimed(PRIOR, stage, name, entry, settings, "prior")


# tasks of a stage (ups/common/place.py) -> its section of the results, and the gates of an entry
GATES = {
    "all": ("tasks", operator_gates),
    "transient": ("ensembles", ensemble_gates),
    "steady": ("steady", steady_gates),
}


def check_gates(results: Results, settings: Any) -> list[dict]:
    """All gates of `results` for the requested stages and tasks. settings: an EvaluateConfig, with the
    limits."""
    gates: list[dict] = []
    for stage, name in [(stage, name) for stage, names in results.facts["stages"].items() for name in names]:
        section, gates_of = GATES[STAGES[stage].tasks]
        entry = getattr(results, section).get(name)
        samplers = STAGES[stage].trained_samplers if section == "ensembles" else ()
        if entry is None or any(sampler not in entry.models() for sampler in samplers):
            gates.append(missing(stage, name))
        else:
            count = entry.number("", "num_initial_conditions")
            gates += [
                few(row, count, settings.min_initial_conditions)
                for row in gates_of(stage, name, entry, settings)
            ]
    return gates


def outcome(gate: dict[str, Any]) -> str:
    return "pass" if gate["passed"] else "UNDECIDED" if gate["undecided"] else "FAIL"


def not_passed(gates: list[dict[str, Any]]) -> tuple[list[dict], list[dict]]:
    """(failed, undecided)."""
    rest = [gate for gate in gates if not gate["passed"]]
    return [gate for gate in rest if not gate["undecided"]], [gate for gate in rest if gate["undecided"]]


def few(row: dict[str, Any], count: int, least: int) -> dict[str, Any]:
    """The gate, failed if it has too few initial conditions: a bootstrap of two is no interval."""
    if count >= least or not row["passed"] or row["name"].startswith("finite"):
        return row
    return {
        **row,
        "passed": False,
        "reason": f"{row['reason']}, but only {count} initial conditions were scored; expected at least "
        f"{least} (evaluate.min_initial_conditions). Raise data.test_fraction or add trajectories.",
    }


# ---- usability


def network_gain(task: Entry) -> tuple[str, list[float]]:
    """(less | more | tie | off | unknown, [percent, low, high]): by how much the network reduces the error of
    its base, paired by trajectory. tie: the interval contains zero. No numbers if the network is off or there
    is no interval."""
    ratio = task.value(PAIR, error_of(task)) or point(None)
    if not task.facts["network_is_used"]:
        return "off", []
    if None in ratio.values() or task.number("", "num_initial_conditions") < 2:
        return "unknown", []
    _, low, high = percent = [100 * (1 - ratio[key]) for key in ("value", "high", "low")]
    return "tie" if low <= 0 <= high else "less" if low > 0 else "more", percent


def horizon_of(facts: Mapping[str, Any]) -> str:
    """How far ahead a task's forecasts were scored, in words; "" of a steady task. No error is stated without
    these words."""
    times = facts.get("times") or [0.0]
    if not (isinstance(until := times[-1], float) and until):
        return ""
    return f" (scored up to {frames_ahead(len(times), until, (facts.get('units') or {}).get('time'))})"


def usability_of(task: Entry, ensembles: Entry | None) -> dict[str, Any]:
    """Whether a task's model is usable and why not, and what its network adds. ensembles: the task's entry
    there, if it has one.

    No forecast can be right about noise. If the best mean is known and this one is as good (within
    BEST_MEAN), a large error or lost correlation is no fault of the model.
    """
    key, facts, faults = error_of(task), task.facts, []
    error = task.value("operator", key) or point(None)
    until = task.value("operator", "correlation_time") or point(None)
    best = (ensembles and ensembles.value("operator / bayes_mean", "nrmse_mean")) or point(None)
    is_best = best["high"] is not None and best["high"] <= BEST_MEAN
    if None in error.values():
        faults.append("its predictions are not finite, or their error is undefined")
    else:
        text = f"{error['value']:.3g} [{error['low']:.3g}, {error['high']:.3g}]"
        if facts.get("offset"):  # the mean dominates the variation
            text += f" of the {facts['measure']}"
        if "error" in facts:
            text += " (pooled over trajectories, because a field vanishes in some frames)"
        if error["high"] > LARGEST_ERROR and not is_best:
            faults.append(
                f"its relative error is {text}, and above {LARGEST_ERROR:g} more than a quarter "
                "of the field's energy is wrong"
            )
        ratios = {
            name: (task.value(f"operator / {name}", key) or point(None))["high"] for name in trivial_of(task)
        }
        if beaten_by := [TRIVIAL[name] for name, high in ratios.items() if high is None or high >= 1]:
            faults.append(f"it is not clearly better than {' or '.join(beaten_by)}")
        if until["high"] is not None and until["high"] < SHORTEST * facts["times"][-1] and not is_best:
            faults.append(
                f"it follows the truth (correlation above 0.8) for {until['value']:.3g} of "
                f"{facts['times'][-1]:.3g} time units only"
            )
    words = f"Not usable: {'; '.join(faults)}" if faults else f"Usable: its relative error is {text}"
    words += f"{horizon_of(facts)}."
    if best["high"] is not None:
        words += (
            f" The future is uncertain: its error is {best['value']:.3f} [{best['low']:.3f}, "
            f"{best['high']:.3f}] times that of the best possible mean."
        )
    kind, _ = network_gain(task)
    return {
        "usable": not faults,
        "words": words + NETWORK[kind].format(**task.value(PAIR, key) or {}),
    }


def check_usability(results: Results) -> dict[str, dict[str, Any]]:
    """TASK -> {"usable", "words"}."""
    return {name: usability_of(task, results.ensembles.get(name)) for name, task in results.tasks.items()}
