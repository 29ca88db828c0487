"""Gates and verdicts of a finished evaluation: is each stage worth having, and can each task's model be used?

A gate is a minimal claim about one stage and one task, with the figure that decides it:

    {"stage": operator | diffusion | consistency | rival | steady, "task", "name": "claim/task[/model]", "value", "low", "high",
     "bound": text, "passed": bool, "reason": a sentence}

A verdict is {"usable": bool, "words": one or two sentences}, for every task. Both come from results.json alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

BASELINES = ("persistence", "train_mean")  # the trivial forecast of a time-dependent and of a steady task
OTHERS = (*BASELINES, "codec_floor", "fno", "unet")   # models of an entry that no stage of ours made
LARGEST_ERROR = 0.5    # nRMSE of a usable model: a quarter of the field's energy is wrong then

Interval = dict[str, float | None]


def point(value: float | None) -> Interval:
    """A count or a figure without an interval."""
    return {"value": value, "low": value, "high": value}


def gate(stage: str, task: str, name: str, what: str, found: Interval, low: float | None = None,
         high: float | None = None) -> dict[str, Any]:
    """The record of one gate: passed where the whole interval of `found` lies within low to high. Undefined fails."""
    value, ends = found["value"], [found["value"] if found[end] is None else found[end] for end in ("low", "high")]
    passed = value is not None and (low is None or ends[0] >= low) and (high is None or ends[1] <= high)
    bound = f"at most {high:g}" if low is None else f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
    shown = "undefined (not finite)" if value is None else f"{value:.4g}"
    shown += f" [{ends[0]:.4g}, {ends[1]:.4g}]" if value is not None and ends[0] != ends[1] else ""
    return {"stage": stage, "task": task, "name": name, "value": value, "low": ends[0], "high": ends[1], "bound": bound,
            "passed": passed, "reason": f"{what} is {shown}; allowed is {bound}"}


def operator_gates(name: str, task: dict[str, Any], settings: Any) -> Iterator[dict]:
    models = task["models"]
    for model in [model for model in models if model not in OTHERS]:
        yield gate("operator", name, f"finite/{name}/{model}", "the number of trajectories with NaN or inf",
                   point(models[model].get("nonfinite_trajectories")), high=0)
    if "persistence" in models:
        ours, trivial = (models[model]["nrmse"]["value"] for model in ("operator", "persistence"))
        yield gate("operator", name, f"persistence/{name}", "nRMSE of the operator over that of persistence",
                   point(ours / trivial if ours is not None and trivial else None), high=settings.max_ratio_to_persistence)


def check_gates(results: dict[str, Any], settings: Any) -> list[dict]:
    """Every gate of `results` under the limits of `settings`, an EvaluateConfig."""
    gates = [row for name, task in results["tasks"].items() for row in operator_gates(name, task, settings)]
    for name, entry in results.get("ensembles", {}).items():
        pair = f"corrector / {entry['best_cheap']}"
        gates.append(gate("diffusion", name, f"crps/{name}", f"fair CRPS, {pair},",
                          point(entry["comparisons"][pair]["crps"]["value"]), high=settings.max_crps_ratio))
        gates.append(gate("diffusion", name, f"spread_skill/{name}", "spread over skill of the corrector",
                          entry["models"]["corrector"]["one_step"]["ssr"], *settings.spread_skill))
    for name, limit in settings.max_nrmse.items():
        if name in results["tasks"]:
            gates.append(gate("operator", name, f"nrmse/{name}", "nRMSE of the operator",
                              results["tasks"][name]["models"]["operator"]["nrmse"], high=limit))
        else:
            gates.append({**gate("operator", name, f"nrmse/{name}", "nRMSE of the operator", point(None), high=limit),
                          "reason": f"{name} was not evaluated, yet evaluate.max_nrmse sets a limit for it"})
    return gates


def judge_task(task: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one task: usable, or the first reason why not."""
    models = task["models"]
    error, trivial = models["operator"]["nrmse"], next(models[name]["nrmse"] for name in BASELINES if name in models)
    if None in error.values():
        words = "Not usable: its predictions are not finite, or their error is undefined."
    elif trivial["value"] is not None and error["high"] >= trivial["value"]:
        words = (f"Not usable: its error ({error['value']:.3g}, up to {error['high']:.3g}) is not clearly below that of the "
                 f"trivial forecast ({trivial['value']:.3g}).")
    elif error["high"] > LARGEST_ERROR:
        words = (f"Not usable: its relative error is {error['value']:.3g} [{error['low']:.3g}, {error['high']:.3g}]; above "
                 f"{LARGEST_ERROR:g} more than a quarter of the field's energy is wrong.")
    else:
        words = f"Usable: its relative error is {error['value']:.3g} [{error['low']:.3g}, {error['high']:.3g}]."
    return {"usable": words.startswith("Usable"), "words": words}


def check_verdicts(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """TASK -> {"usable", "words"}."""
    return {name: judge_task(task) for name, task in results["tasks"].items()}
