"""Solving many trajectories: a large file by one process per core, a small one by this process, with the same
numbers. A GPU replaces the processes for solvers that gain by it, with the same numbers up to rounding."""

import contextlib
import functools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from multiprocessing import active_children, get_context, parent_process
from typing import Any

import numpy as np

from ups_solvers import SOLVERS

MIN_PER_WORKER = 16  # trajectories: a worker first imports torch for seconds
MAX_SLICES = 4  # of a chunk per worker; with several all workers end at about the same time


def solve(task: str, indices: np.ndarray, **settings: Any) -> np.ndarray:
    """Trajectories `indices` of `task` by its solver, (n, time, channel, *space) float32."""
    return SOLVERS[task].solve(indices, **settings)


def num_slices(task: str, count: int, resolution: int, num_workers: int) -> int:
    """Number of slices that `count` trajectories are cut into.

    At least one per worker; more only if slices stay as large as the solver computes at once, because on few
    cells it waits for Python (cfd1d: 0.45 s per trajectory in slices of 32, 0.2 s in slices of 128)."""
    at_once = SOLVERS[task].cells_at_once // resolution ** SOLVERS[task].ndim
    full = math.ceil(count / max(at_once, 1))
    return min(count, max(num_workers, min(MAX_SLICES * num_workers, full)))


def _start_worker(load: Callable[[], None] | None) -> None:
    """End with the parent: otherwise a pool's workers outlive a killed parent."""

    def wait() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends the others
    if load:
        load()


@contextlib.contextmanager
def worker_pool(num_workers: int, load: Callable[[], None] | None = None) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that end with this one, or at once if the block raises. load: called in each."""
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker, (load,))
    try:
        yield pool
    except BaseException:
        for worker in active_children():  # otherwise shutdown waits for their work
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def solver_pool(num_trajectories: int, num_workers: int) -> Iterator[Callable[..., np.ndarray]]:
    """`solve`, with every call distributed over at most `num_workers` processes. Files of few trajectories,
    and tasks solved on a GPU, are solved in this process."""
    num_workers = min(num_workers, num_trajectories // MIN_PER_WORKER)
    if num_workers <= 1:
        yield solve
        return

    def shared(task: str, indices: np.ndarray, **settings: Any) -> np.ndarray:
        if SOLVERS[task].device != "cpu":
            return solve(task, indices, **settings)
        slices = np.array_split(indices, num_slices(task, len(indices), settings["resolution"], num_workers))
        try:
            return np.concatenate(list(pool.map(functools.partial(solve, task, **settings), slices)))
        except BrokenExecutor as error:
            raise OSError(
                f"a process that solved trajectories of {task} from {indices[0]} on died; expected a result. "
                f"If memory is short use --workers {num_workers // 2}; the same command continues there."
            ) from error

    with worker_pool(num_workers) as pool:
        yield shared
