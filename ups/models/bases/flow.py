"""The flow base for incompressible flow: the velocity, free of divergence, advects every field."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ups.models.bases.base import Fit, ParameterBatch, Samples
from ups.models.bases.propagator import Modal
from ups_discovery.boundary import PERIODIC, along
from ups_discovery.spectral import apply_axes, apply_axis
from ups_discovery.terms import comparable

TAPS = -1, 0, 1, 2  # cells of cubic (Lagrange) interpolation along an axis


class Projection(nn.Module):
    """Projects a vector field at cell centres on fields without divergence.

    It subtracts the gradient of the pressure for which the flow through the faces (the mean of both sides)
    has no divergence; no flow passes a wall. The divergence at the centres becomes small, but not zero: for
    that, the pressure would have to change its sign from cell to cell.
    """

    def __init__(self, space: Sequence[int], lengths: Sequence[float], boundary: str):
        super().__init__()
        total, ends = torch.zeros(1, dtype=torch.float64), along(boundary, len(space))
        for axis, (n, length, end) in enumerate(zip(space, lengths, ends, strict=True)):
            cell = torch.eye(n, dtype=torch.float64)
            after = cell.roll(1, 1)  # row i holds cell i + 1
            faces = slice(None) if end == PERIODIC else slice(-1)
            mean, slope = (0.5 * (after + cell))[faces], ((after - cell) * (n / length))[faces]
            values, vectors = torch.linalg.eigh(slope.mT @ slope)
            total = total[..., None] + values
            self.register_buffer(f"gradient{axis}", (mean.mT @ slope).float(), persistent=False)
            self.register_buffer(f"basis{axis}", vectors.mT.float(), persistent=False)
        total = total[0]
        inverse = torch.where(total > 1e-9 * total.max(), 1 / total, 0.0)  # a constant pressure has no effect
        self.register_buffer("inverse", inverse.float(), persistent=False)

    def forward(self, v: Tensor) -> Tensor:
        """The projection of v (batch, axes, *space), in one unit along all axes."""
        gradients, bases = (
            [getattr(self, f"{name}{axis}") for axis in range(v.shape[1])] for name in ("gradient", "basis")
        )
        source = sum(
            apply_axis(part, gradient.mT, axis)
            for axis, (part, gradient) in enumerate(zip(v.unbind(1), gradients, strict=True), 1)
        )
        pressure = apply_axes(apply_axes(source, bases) * self.inverse, [basis.mT for basis in bases])
        return v - torch.stack(
            [apply_axis(pressure, gradient, axis) for axis, gradient in enumerate(gradients, 1)], 1
        )


class Flow(Modal):
    """Semi-Lagrangian advection (Staniforth and Cote 1991) of every field, one step per frame, by cubic
    interpolation along the path through the midpoint; projection of the velocity (Chorin 1968); then `Modal`
    terms.

    Those are the advected fields (friction and other linear effects) and possible forces on the velocity,
    projected: every other vector, its product with each scalar, and each scalar along each axis (buoyancy).
    vectors: channels of each vector, the velocity first. num_moving: number of channels that change; the
    fixed ones come last.
    """

    kind = "flow"

    def __init__(
        self,
        lengths: Sequence[float],
        dt: float,
        vectors: Sequence[Sequence[int]],
        num_moving: int,
        cell: Sequence[float] = (),
        **settings: Any,
    ):
        num_channels, space, boundary = (settings[key] for key in ("num_channels", "space", "boundary"))
        self.velocity, *self.others = [list(vector) for vector in vectors]
        taken = {channel for vector in vectors for channel in vector}
        self.scalars = [channel for channel in range(num_channels) if channel not in taken]
        num_vectors = len(self.others) * (1 + len(self.scalars)) + len(space) * len(self.scalars)
        super().__init__(num_moving + len(space) * num_vectors, **settings)
        self.ends, self.num_moving = along(boundary, len(space)), num_moving
        lengths = comparable(lengths, cell)
        self.projection = Projection(space, lengths, boundary)
        self.register_buffer("mean", torch.zeros(num_channels))
        self.register_buffer("std", torch.ones(num_channels))
        cells = torch.tensor([dt * n / length for n, length in zip(space, lengths, strict=True)])
        self.register_buffer("cells", cells.view(-1, *[1] * len(space)), persistent=False)  # at a speed of 1
        places = torch.meshgrid(*(torch.arange(n).float() for n in space), indexing="ij")
        self.register_buffer("places", torch.stack(places), persistent=False)

    def physical(self, w: Tensor, channels: list[int]) -> Tensor:
        """Some channels of normalised w (batch, C, *space), in physical units."""
        return torch.stack(
            [w[:, channel] * self.std[channel] + self.mean[channel] for channel in channels], 1
        )

    def start_and_terms(self, u: Tensor, parameters: ParameterBatch) -> tuple[Tensor, Tensor]:
        w = u[:, -1]
        shift = self.physical(w, self.velocity) * self.cells
        middle = self.read(shift, self.places - shift / 2)
        carried = torch.cat(
            [self.read(w[:, : self.num_moving], self.places - middle), w[:, self.num_moving :]], 1
        )
        change = self.physical(carried, self.velocity) - self.physical(w, self.velocity)
        pressure, fields = (self.projection(change) - change).unbind(1), [*carried.unbind(1)]
        for channel, push in zip(self.velocity, pressure, strict=True):
            fields[channel] = fields[channel] + push / self.std[channel]
        start = torch.stack(fields, 1)
        terms = [start[:, : self.num_moving], *map(self.projection, self.forces(w, start))]
        return start, self.transform.forward(torch.cat(terms, 1))

    def forces(self, w: Tensor, start: Tensor) -> Iterator[Tensor]:
        """Possible forces (batch, axes, *space), at the middle between w and start."""
        between = (w + start) / 2
        scalars = [between[:, channel : channel + 1] for channel in self.scalars]
        for vector in self.others:
            push = self.physical(between, vector) / self.std[vector[0]]
            yield push
            yield from (push * scalar for scalar in scalars)
        for scalar in scalars:
            for along_axis in self.velocity:
                yield torch.cat(
                    [scalar if along_axis == axis else torch.zeros_like(scalar) for axis in self.velocity], 1
                )

    def read(self, w: Tensor, at: Tensor) -> Tensor:
        """Fields w (batch, C, *space) interpolated at places `at` (batch, axes, *space), counted in cells
        from the first centre; beyond a wall with the values of the cell beside it.
        """
        sides: list[list[tuple[Tensor, Tensor]]] = []  # for each axis: cells to read, and their weights
        for place, n, end in zip(at.unbind(1), w.shape[2:], self.ends, strict=True):
            place = place if end == PERIODIC else place.clamp(-0.5, n - 0.5)
            first = place.floor()
            cells, fraction = first.long(), place - first
            sides.append(
                [
                    (
                        (cells + tap).remainder(n) if end == PERIODIC else (cells + tap).clamp(0, n - 1),
                        math.prod((fraction - other) / (tap - other) for other in TAPS if other != tap),
                    )
                    for tap in TAPS
                ]
            )
        values, out = w.flatten(2), torch.zeros_like(w)
        for taps in itertools.product(*sides):
            index = torch.zeros_like(taps[0][0])
            for (cells, _), n in zip(taps, w.shape[2:], strict=True):
                index = index * n + cells
            found = values.gather(2, index.flatten(1)[:, None].expand(-1, w.shape[1], -1)).view(w.shape)
            out = out + math.prod(weight for _, weight in taps)[:, None] * found
        return out

    @classmethod
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> Fit["Flow"]:
        """Yield a candidate for every ridge. None in one dimension, for a fixed first vector, or if the
        normal equations do not fit into memory.
        """
        vectors = settings["vectors"]
        if not vectors or len(settings["space"]) == 1 or max(vectors[0]) >= settings["num_moving"]:
            return "it needs a velocity that moves, in two dimensions or three"
        made = cls(**settings).to(samples.device)
        if not cls.has_room(settings, made.weight_real.shape[2]):
            return f"its normal equations take more than {cls.MOST_BYTES >> 20} MiB"
        for name in ("mean", "std"):  # of the velocity in the narrowest cells per frame
            values = getattr(samples.head.codec, name).double().clone()
            values[vectors[0]] *= settings["frame"] / min(settings["cell"])
            getattr(made, name).copy_(values)
        sums = [made.normal_equations(samples, value) for value in range(settings["num_values"])]
        for ridge, base in made.fits(sums):
            yield f"flow ridge {ridge:g}", {**settings, "ridge": ridge}, base
        return None
