"""bench/excitable.py: new waves are counted on the torus, and where they start is told."""

from __future__ import annotations

import pytest
import torch

from bench.excitable import new_waves


def field(*cells: tuple[int, int]) -> torch.Tensor:
    u = torch.zeros(8, 8)
    for x, y in cells:
        u[x, y] = 1.0
    return u


SQUARE = [(x, y) for x in (7, 0) for y in (7, 0)]  # across both edges
LINE = [(3, y) for y in range(2, 7)]


def test_new_waves_are_numbers_areas_and_places():
    """Three samples of one start: none, one, two, of which one is across both edges; cells that are excited
    anyway, and single ones, do not count, and a diagonal does not connect."""
    v = torch.where(torch.arange(8) < 4, 0.1, 0.5).view(1, 8, 1).expand(1, 8, 8)
    quiet = field((5, 5), (5, 6), (6, 5), (6, 6))[None]
    members = torch.stack([quiet[0] + field((2, 1)), quiet[0] + field(*LINE, (4, 7)), field(*LINE, *SQUARE)])
    found = new_waves(members[None], quiet, v)
    assert found["numbers"] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert found["area"] == pytest.approx((5 + 5 + 4) / 3)
    assert found["v"] == pytest.approx((0.1 + 0.1 + 0.3) / 3)
