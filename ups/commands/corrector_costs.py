"""What a corrector costs and saves: errors and seconds of runs by the coarse solver, with and without
correction, from starts that no training saw, and the number of runs after which it pays.

    N* = (data + training) / (seconds of a fine run - seconds of a corrected run)

Seconds are processor time of one process; a run goes over the trained frames, one state at a time.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ups
from ups.config.load import load_config
from ups.data.cache import open_cache
from ups.evaluation.break_even import train_seconds
from ups.models.rollout import NUM_FIRST_CALLS

MOST_RUNS, NUM_DRAWS = 20, 1000  # measured; resamples of an interval
Step = Callable[[np.ndarray], np.ndarray]


def run_of(step: Step, u: np.ndarray, num: int) -> tuple[np.ndarray, float]:
    """(frames (num, channel, *space) after u (channel, *space), processor seconds of all of the loop)."""
    frames, state, started = [], u[None], time.process_time()
    for _ in range(num):
        state = np.asarray(step(state))
        frames.append(state[0])
    return np.stack(frames), time.process_time() - started


def relative_errors(u: np.ndarray, u_ref: np.ndarray) -> np.ndarray:
    """nRMSE of every frame of u (frames, channel, *space): RMS of the error over RMS of the truth about its
    mean."""
    space = tuple(range(2, u.ndim))
    error = np.square(u - u_ref).mean(space)
    size = np.square(u_ref - u_ref.mean(space, keepdims=True)).mean(space)
    return np.sqrt(error / np.maximum(size, 1e-30)).mean(1)


def paying_runs(
    invested: float, fine_s: Sequence[float], corrected_s: Sequence[float], seed: int = 0
) -> list[float]:
    """[N*, low, high]: 95 % over resampled runs; inf where a fine run does not take longer."""

    def runs(fine: Any, corrected: Any) -> float:
        gain = float(np.mean(fine) - np.mean(corrected))
        return invested / gain if gain > 0 else math.inf

    draw = np.random.default_rng(seed)
    some = [
        runs(*(draw.choice(seconds, len(seconds)) for seconds in (fine_s, corrected_s)))
        for _ in range(NUM_DRAWS)
    ]
    return [runs(fine_s, corrected_s), *np.quantile(some, [0.025, 0.975], method="nearest").tolist()]


def training_seconds(run: Path, task: str) -> float:
    """Of the fit of the bases and of the loop."""
    folder = run / "operator"
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    base = json.loads((folder / "bases" / f"{task}.json").read_text(encoding="utf-8"))
    return train_seconds([*map(json.loads, lines)]) + base["facts"]["seconds"]


def break_even(run: Path, folder: Path, step: Step) -> str:
    """Errors, times and N* of a trained corrector in words. folder: of its data."""
    task = folder.name
    cache = open_cache(load_config(folder / f"{task}.yaml"), task)
    correct, rows = ups.corrector(run, step, task), cache.split["test"][:MOST_RUNS]
    z = cache.batch(rows, 0, cache.num_frames)
    truth = correct.head.physical(z).double().numpy()
    num, found = cache.num_frames - 1, {}
    for name, one in {"coarse": correct.theirs, "corrected": correct}.items():
        run_of(one, truth[0, 0], NUM_FIRST_CALLS)  # compiles what is compiled, and makes the graph
        runs = [run_of(one, u[0], num) for u in truth]
        errors = [relative_errors(u, u_ref[1:])[-1] for (u, _), u_ref in zip(runs, truth, strict=True)]
        found[name] = float(np.mean(errors)), [seconds for _, seconds in runs]
    made = json.loads((folder / "made.json").read_text(encoding="utf-8"))["parts"]
    count = len(cache.trajectory.unique())
    data, training = sum(made.values()), training_seconds(run, task)
    fine_s = [data / count] if len(made) == 1 else [s * len(made) / count for s in made.values()]
    paid, low, high = paying_runs(data + training, fine_s, found["corrected"][1])
    seconds = {name: float(np.mean(times)) for name, (_, times) in found.items()}
    after = "never" if math.isinf(paid) else f"after {paid:.0f} [{low:.0f}, {high:.0f}] runs"
    states = correct.counts.pop("states")
    errors = {name: error for name, (error, _) in found.items()}
    return (
        f"{task}: nRMSE at step {num}: {errors['coarse']:.2e} coarse, {errors['corrected']:.2e} corrected; "
        f"seconds of such a run: {seconds['coarse']:.3g} coarse, {seconds['corrected']:.3g} corrected, "
        f"{np.mean(fine_s):.3g} fine; data {data:.0f} s, training {training:.0f} s: it pays {after}; "
        f"{correct.counts.total()} of {states} states without correction"
    )
