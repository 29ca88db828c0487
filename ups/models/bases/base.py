"""What a base predictor is, and what it is fitted on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from ups.models.known import Known

# u (batch, history, C, *space), what is known of its rows, u_next (batch, C, *space)
Window = tuple[Tensor, Known, Tensor]


class Samples(Protocol):
    """The training windows of a task as normalised fields, drawn by a seed; for a steady task coefficient and
    solution."""

    name: str
    seed: int
    budget: int                # windows that gradient steps may see
    device: torch.device

    def count(self, value: int) -> int:
        """How many different windows there are of a parameter value."""

    def batches(self, count: int, size: int, value: int | None = None) -> list[Callable[[], Window]]:
        """Readers of `count` windows, `size` at a time, of one parameter value or of all."""

    def at_zero(self) -> Tensor:
        """The normalised values (C,) of u = 0."""


class Base(nn.Module):
    """A call takes normalised u (batch, history, C, *space) and gives the next frame (batch, C, *space)."""

    kind: str
    knows_fitted_only = False   # whether it serves no other parameter values than those it was fitted on
    is_learnt = False           # whether it has weights that gradient steps train, rather than a closed form
    lr_factor = 1.0             # of the rate, once it trains beside the network
    settings: dict[str, Any]

    @classmethod
    def build(cls, settings: dict[str, Any]) -> Self:
        """Not yet fitted. settings: geometry and hyper-parameters, JSON-able; those of other bases are left
        alone."""
        base = cls(**settings)
        base.settings = settings
        return base

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> Iterator[tuple[str, Self]]:
        """Yield (name, fitted base) for every candidate worth trying; here the one that there is nothing to
        fit of."""
        yield cls.kind, cls.build(settings)

    def forward(self, u: Tensor, known: Known) -> Tensor:
        raise NotImplementedError
