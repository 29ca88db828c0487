"""Plain numbers that describe how far a run is, and the outcome of an update."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Counters:
    """Step, micro-batch, skips and scores of a run: equal on all ranks, part of every checkpoint.

    micro_batch_asked: the setting, of which micro_batch is what fits. num_without_better: validations in a
    row, for early stopping; best_score and lowest_second: of `Run.keep_best`.
    """

    micro_batch: int
    micro_batch_asked: int
    step: int = 0
    num_skipped: int = 0
    num_skipped_in_row: int = 0
    num_without_better: int = 0
    best_score: float = math.inf
    lowest_second: float = math.inf
    is_stopped_early: bool = False


@dataclass(frozen=True)
class Update:
    """The outcome of an update. loss: mean over the global batch; metrics: (name, mean, rows) of each pass on
    this rank; factor: on the learning rates; is_told_to_stop: whether any rank received a signal.
    """

    is_finite: bool
    loss: float
    norm: float
    num_rows: int
    factor: float
    metrics: list[tuple[str, Tensor, int]]
    is_told_to_stop: bool
