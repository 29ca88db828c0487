"""What a corrector costs and saves: errors and seconds of runs by the coarse solver, with and without
correction, from starts that no training saw, and the number of runs after which it pays.

    N* = (data + training) / (seconds of a fine run - seconds of a corrected run)

Seconds are processor time of one process; a run goes over the trained frames, one state at a time. The
numbers are refused where the measurement is not fair (`corrected_runs`).
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ups
from ups.config.load import load_config
from ups.data.cache import open_cache
from ups.forecast_corrector import KEPT, StepCorrector
from ups.metrics.errors import nrmse
from ups.models.rollout import NUM_FIRST_CALLS

MOST_RUNS, NUM_DRAWS = 20, 1000  # measured; resamples of an interval
SAME = 1e-5  # relative: closer states are the same, as data are stored in float32
# of the seconds of the step and of its correction, each alone: a run of both takes at least this, with noise
NOT_LESS = 0.7
Step = Callable[[np.ndarray], np.ndarray]


def run_of(step: Step, u: np.ndarray, num: int) -> tuple[np.ndarray, float]:
    """(frames (num, channel, *space) after u (channel, *space), processor seconds of all of the loop)."""
    frames, state, started = [], u[None], time.process_time()
    for _ in range(num):
        state = np.asarray(step(state))
        frames.append(state[0])
    return np.stack(frames), time.process_time() - started


def require(is_fair: bool, found: str, expected: str) -> None:
    if not is_fair:
        raise ValueError(f"the measurement is not fair: {found}; expected {expected}.")


def require_unseen(starts: np.ndarray, trained: np.ndarray) -> None:
    """Raise ValueError if one of `starts` is one of the `trained` ones; both (n, channel, *space)."""
    mine, others = (torch.from_numpy(np.asarray(u, np.float64)).flatten(1) for u in (starts, trained))
    seen = (torch.cdist(mine, others).amin(1) < SAME * mine.norm(dim=1)).nonzero().flatten().tolist()
    require(not seen, f"starts {seen} are in the training data, too", "new ones from starts()")


def corrected_runs(
    correct: StepCorrector, starts: np.ndarray, num: int, trained: np.ndarray
) -> dict[str, list[tuple[np.ndarray, float]]]:
    """`run_of` all starts (n, channel, *space), "coarse" and "corrected". trained: starts of the training.
    Raises ValueError for what is not fair."""
    require_unseen(starts, trained)
    first, _, again = (np.asarray(correct.theirs(starts[some][None])) for some in (0, -1, 0))
    moved = abs(first - again).max() / abs(first).max()
    require(moved <= SAME, f"a second call with a state differs by {moved:.1e}", "a step without a memory")
    found = {}
    for name, one in {"coarse": correct.theirs, "corrected": correct}.items():
        run_of(one, starts[0], NUM_FIRST_CALLS)  # compiles what is compiled, and makes the graph
        found[name] = [run_of(one, u, num) for u in starts]
    (theirs, coarse_s), (mine, corrected_s) = (
        map(np.stack, zip(*runs, strict=True)) for runs in found.values()
    )
    size = abs(starts).max()
    lost, kept = (np.ptp(u.mean(tuple(range(3, u.ndim))), 1).max() / size for u in (mine, theirs))
    require(kept > KEPT or lost < SAME, f"corrected runs move a mean by {lost:.1e}", "none, as of the step")
    state, (_, batch, _) = starts[:1], correct._conditions(None, 1)
    later = correct.theirs(state)
    alone = [run_of(lambda u: correct.corrected(state, later, batch), starts[0], num)[1] for _ in starts]
    least = NOT_LESS * (coarse_s.min() + min(alone))
    took = f"a corrected run takes {corrected_s.min():.3g} s"
    require(corrected_s.min() >= least, took, f"{least:.3g} s of all its parts, or a quieter machine")
    return found


def paying_runs(
    invested: float, fine_s: Sequence[float], corrected_s: Sequence[float], seed: int = 0
) -> list[float]:
    """[N*, low, high]: 95 % over resampled runs; inf where a fine run does not take longer."""

    draw = np.random.default_rng(seed)
    means = [draw.choice(part, (NUM_DRAWS, len(part))).mean(1) for part in (fine_s, corrected_s)]
    gain = np.array([np.mean(fine_s) - np.mean(corrected_s), *(means[0] - means[1])])
    found = np.divide(invested, gain, out=np.full_like(gain, math.inf), where=gain > 0)
    return [float(found[0]), *np.quantile(found[1:], [0.025, 0.975], method="nearest").tolist()]


def data_seconds(made: dict[str, Any]) -> float:
    """Processor seconds of all that made.json records: starts and trajectories."""
    return sum(made["parts"].values()) + made.get("starts", 0.0)


def training_seconds(run: Path) -> float:
    """Processor seconds of the operator stage, from the start of Python to the last validation."""
    lines = (run / "operator" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    spent = [line["processor_s"] for line in map(json.loads, lines) if "processor_s" in line]
    # a process that continues an interrupted training counts from zero
    return sum(now for now, later in itertools.pairwise([*spent, 0.0]) if later < now)


def break_even(run: Path, folder: Path, step: Step) -> str:
    """Errors, times and N* of a trained corrector in words. folder: of its data."""
    task = folder.name
    cache = open_cache(load_config(folder / f"{task}.yaml"), task)
    correct, rows = ups.corrector(run, step, task), cache.split["test"][:MOST_RUNS]
    num, errors, seconds = cache.num_frames - 1, {}, {}
    truth, trained = (
        correct.head.physical(cache.batch(some, 0, count)).double()
        for some, count in ((rows, num + 1), (cache.split["train"], 1))
    )
    found = corrected_runs(correct, truth[:, 0].numpy(), num, trained[:, 0].numpy())
    for name, runs in found.items():
        last = torch.from_numpy(np.stack([u[-1:] for u, _ in runs]))
        errors[name], seconds[name] = float(nrmse(last, truth[:, -1:]).mean()), [s for _, s in runs]
    made = json.loads((folder / "made.json").read_text(encoding="utf-8"))
    count = len(cache.trajectory.unique())
    data, training, parts = data_seconds(made), training_seconds(run), made["parts"].values()
    fine_s = [seconds * len(parts) / count for seconds in parts]
    paid, low, high = paying_runs(data + training, fine_s, seconds["corrected"])
    coarse_s, corrected_s = (float(np.mean(seconds[name])) for name in ("coarse", "corrected"))
    after = "never" if math.isinf(paid) else f"after {paid:.0f} [{low:.0f}, {high:.0f}] runs"
    states = correct.counts.pop("states")
    return (
        f"{task}: nRMSE at step {num}: {errors['coarse']:.2e} coarse, {errors['corrected']:.2e} corrected; "
        f"seconds of such a run: {coarse_s:.3g} coarse, {corrected_s:.3g} corrected, "
        f"{np.mean(fine_s):.3g} fine; data {data:.0f} s, training {training:.0f} s: it pays {after}; "
        f"{correct.counts.total()} of {states} states without correction"
    )
