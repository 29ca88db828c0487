"""Codecs of fields in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ups.data.tokenizer import PatchMoments, Tokenizer


def fit_codec(
    stream: Iterable[np.ndarray],
    *,
    fields: Sequence[str],
    positive: Sequence[str] = (),
    patch: int,
    dim: int = 0,
    energy: float = 1.0,
) -> Tokenizer:
    """The codec of a stream of batches (n, T, C, *space), each read once."""
    first, *rest = stream
    moments = PatchMoments(fields, positive, np.shape(first)[3:], patch)
    for u in (first, *rest):
        moments.add(u)
    return Tokenizer.from_moments(moments, dim, energy)
