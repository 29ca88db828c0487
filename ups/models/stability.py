"""How a base grows beyond the data.

Bases with equal errors on the data may differ by orders of magnitude beyond them: a polynomial has many
coefficients that are fitted where the data are, and grows elsewhere."""

from dataclasses import replace

import torch
from torch import Tensor

from ups.common.progress import beat
from ups.data.cache import Cache
from ups.metrics.spectra import rms, space_axes
from ups.models.head import TaskHead
from ups_discovery.seeds import generator
from ups_discovery.spectral import FieldTransform

LONG_FACTOR = 4  # length of the rollouts, in lengths of the data
START_NOISE = 1e-3  # standard deviations, added to their start; modes of the data below it count as empty
SLACK = 2.0  # factor on the growth that the data allow


class Growth:
    """How far the trajectories of a task move from their start, and which modes they leave empty. A base that
    grows more, or fills those modes, is unstable.

    moved (frames, C): the largest distance from the start so far, RMS over space. Beyond the data, linear
    growth may continue, and exponential growth (of the distance or of the variation in space) at its rate
    over the last half.
    """

    @torch.no_grad()
    def __init__(self, cache: Cache, head: TaskHead, rows: Tensor):
        self.cache, self.num_frames = cache, cache.num_frames
        self.fields = cache.task.moving
        self.transform = FieldTransform(cache.tokenizer.space, cache.task.boundary).to(head.scale.device)
        moved, power, size = [], 0.0, 0.0
        for batch in cache.row_blocks(rows, cache.num_frames, len(rows)):
            w = head.codec.decode(cache.batch(batch, 0, cache.num_frames, head.scale.device))
            w = w[:, :, : len(self.fields)]
            moved.append(rms(w - w[:, :1]).amax(0))
            size = size + rms(w - w.mean(space_axes(w), True)).square().sum(0)
            power = power + self.transform(w).abs().square().mean(1).sum(0) / len(rows)
        self.is_empty = power.sqrt() < START_NOISE  # C, modes
        self.moved = torch.stack(moved).amax(0).cummax(0).values.clamp_min(START_NOISE)
        half, size = (self.num_frames - 1) // 2, (size / len(rows)).sqrt().clamp_min(START_NOISE)
        faster, larger = self.moved[-1] / self.moved[half], size[-1] / size[half]
        grown = torch.where(faster > 2, torch.maximum(faster, larger), larger)  # 2 is linear growth
        self.rate = grown.log().clamp_min(0) / (self.num_frames / 2)

    def allowed(self, num_frames: int) -> Tensor:
        """The factor (C,) by which a field may grow from the end of the data to frame `num_frames`."""
        later = max(0, num_frames - self.num_frames)
        return SLACK * (1 + later / self.num_frames) * (self.rate * later).exp()

    @torch.no_grad()
    def exceeded_by(self, head: TaskHead, rows: Tensor, context: int, seed: int) -> str:
        """How the base of a head exceeds the growth of the data, in words; "" if it does not. By rollouts of
        LONG_FACTOR times the length of the data, from a start with a little noise and without bounds."""
        device, num_fields = head.scale.device, len(self.fields)
        u = head.codec.decode(self.cache.batch(rows, 0, context, device))
        start, parameters = u[:, :1, :num_fields], head.parameters_of(self.cache, rows, 0, self.num_frames)
        forcing = parameters.forcing  # is repeated after its last frame
        noise = torch.randn(u[:, :, :num_fields].shape, generator=generator(seed, head.name, "growth"))
        u[:, :, :num_fields] += START_NOISE * noise.to(device)
        u, base, empty = u[:, -head.history :], head.base.unbounded(), torch.zeros(num_fields, device=device)
        parameters = base.settled(head.input_codec.bridged(u), parameters)
        for frame in range(context, LONG_FACTOR * self.num_frames):
            beat()
            if forcing is not None:
                now = [(frame - 1) % self.num_frames, frame % self.num_frames]
                parameters = replace(parameters, forcing=forcing[:, now])
            new = base(u, parameters)[:, None]
            for constraint in head.invariants:
                new = constraint(new, u[:, -1])
            u = torch.cat([u, new], 1)[:, -head.history :]
            moved = rms(new[:, :, :num_fields] - start).amax((0, 1))
            allowed = self.allowed(frame + 1)
            if wrong := self._names(~(moved <= allowed * self.moved[-1])):
                return f"{wrong} leaves all bounds of the data within {frame + 1} frames"
            if frame == self.num_frames - 1:
                empty = self._in_empty_modes(new[:, 0, :num_fields])
        grown = self._in_empty_modes(new[:, 0, :num_fields]) / empty.clamp_min(START_NOISE)
        if wrong := self._names(~(grown <= allowed)):
            return (
                f"modes of {wrong} that are empty in the data grow {float(grown.max()):.1e} times from "
                f"frame {self.num_frames} to {LONG_FACTOR * self.num_frames}"
            )
        return ""

    def _in_empty_modes(self, w: Tensor) -> Tensor:
        """RMS (C,) of fields w (rows, C, *space) in the modes that are empty in the data."""
        power = torch.where(self.is_empty, self.transform(w).abs().square().mean(0), 0.0)
        return (power.sum(1) / self.is_empty.sum(1).clamp_min(1)).sqrt()

    def _names(self, is_wrong: Tensor) -> str:
        return ", ".join(name for name, wrong in zip(self.fields, is_wrong.tolist(), strict=True) if wrong)
