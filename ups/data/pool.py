"""The processes that solve: one per core for a large file, none for a small one, the same numbers either way."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context, parent_process

import numpy as np

from ups.tasks import get_task

# trajectories of a file per worker: a worker imports torch for seconds before it solves the first
MIN_SHARE = 16
NUM_SLICES = 4   # slices of a chunk per worker, so that all end at about the same time


def solve(task: str, indices: np.ndarray, **settings) -> np.ndarray:
    """Trajectories `indices` of `task` by its solver, (n, time, channel, *space) float32, on one thread: for
    arrays this small a second one only waits (diff_react2d under load: 0.3 s per trajectory on one, 9 s on
    two)."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return np.asarray(get_task(task).simulate(indices, **settings))
    finally:
        torch.set_num_threads(num_threads)


def _start_worker() -> None:
    """End when the parent does, however it does: a pool's workers outlive a killed parent otherwise."""

    def wait() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends the others


@contextmanager
def solver_pool(num_trajectories: int, num_workers: int) -> Iterator[Callable[..., np.ndarray]]:
    """`solve`, every call shared among at most `num_workers` processes; in this one where files of so few are
    not worth more."""
    num_workers = min(num_workers, num_trajectories // MIN_SHARE)
    if num_workers <= 1:
        yield solve
        return

    def shared(task: str, indices: np.ndarray, **settings) -> np.ndarray:
        slices = np.array_split(indices, min(len(indices), NUM_SLICES * num_workers))
        try:
            return np.concatenate(list(pool.map(partial(solve, task, **settings), slices)))
        except BrokenExecutor as error:
            raise OSError(f"a process that solved trajectories of {task} from {indices[0]} on died; expected "
                          f"an answer. If memory is short use --workers {num_workers // 2}; `make data` "
                          "again continues there.") from error

    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker)
    try:
        yield shared
    except BaseException:
        for worker in active_children():  # else the slices in hand would be waited for
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
