"""The reconstruction floor of a cache: the error that encoding and decoding alone make on held-out data."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ups.data.tokenizer import Tokenizer
from ups.metrics.errors import rmse
from ups.metrics.intervals import ratio
from ups.metrics.spectra import rms


class CodecErrors:
    """Errors of a codec for some trajectories, from consecutive blocks of frames."""

    def __init__(self, codec: Tokenizer) -> None:
        self.codec, self.norms, self.squares, self.last = codec, [], [], None

    def add(self, u: Tensor, stored: Tensor) -> None:
        """Add the next frames `u` (n, T, C, *space), whose latents were stored as `stored`."""
        codec = self.codec
        w = codec.normalise(u)
        w_pred = codec.decode(stored)
        self.norms.append(torch.stack([rmse(codec.denormalise(w_pred), u), rms(u)]))
        change = (w if self.last is None else torch.cat([self.last, w], 1)).diff(dim=1)
        self.squares.append(
            [(x.shape[1], x.double().square().flatten(1).mean(1, keepdim=True)) for x in (w_pred - w, change)]
        )
        self.last = w[:, -1:].clone()

    def result(self) -> Tensor:
        """Errors (n, C + 3), float64, of all frames added.

        Columns: relative error per frame of each channel (mean over frames; NaN if the truth is zero
        throughout); relative error of the whole trajectory; mean squares, in normalised units, of the error
        and of the change from one frame to the next (NaN for one frame).
        """
        errors, sizes = torch.cat(self.norms, 2)
        total, size = (norms.square().sum((1, 2)).sqrt() for norms in (errors, sizes))
        columns = [ratio(errors, sizes).nanmean(1), ratio(total, size)[:, None]]
        for blocks in zip(*self.squares, strict=True):
            num = sum(count for count, _ in blocks)
            columns.append(
                sum(count / num * mean for count, mean in blocks if count) if num else blocks[0][1]
            )
        return torch.cat(columns, 1)


def mean_floor(fields: Sequence[str], errors: Tensor) -> dict[str, Any]:
    """Means of `CodecErrors.result` over trajectories, as JSON: nrmse per field and overall, and the error
    over the one-step change."""
    *channels, total, error, change = (None if math.isnan(x) else x for x in errors.nanmean(0).tolist())
    defined = [x for x in channels if x is not None]
    return {
        "nrmse": sum(defined) / len(defined) if defined else None,
        "nrmse_global": total,
        "fields": dict(zip(fields, channels, strict=True)),
        "over_change": math.sqrt(error / change) if change else None,
    }
