"""The base that every forecast is compared with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ups.models.bases.base import Base
from ups.models.known import Known


class Persistence(Base):
    """The last frame again."""

    kind = "persistence"

    def __init__(self, **_: Any):
        super().__init__()

    def forward(self, u: Tensor, known: Known) -> Tensor:
        return u[:, -1]
