"""Steady prior: the solution u given a partly observed coefficient a, as a distribution.

    r = log u - log O(v_guess)    under the conditions of ups.generative.conditions.FieldConditions

v is the normalised coefficient, v_guess the linear guess of it from what was seen, O the frozen operator. The
solution of a diffusion equation with a positive source is positive, and where little is known its size varies
by factors: hence the logarithm. The conditional mean and scale of ups/generative/corrector.py and a diffusion
do the rest, from certainty to the spread of all solutions. A fully observed steady equation has one answer,
so calibration is judged on partial observations of a task whose exact posterior is known
(ups/evaluation/posterior.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ups.data.cache import Cache
from ups.generative.conditions import FieldConditions
from ups.generative.guess import LinearGuess
from ups.generative.observation import draw_levels, observe, row_generators
from ups.models.augment import augment
from ups.models.operator import Operator

FLOOR = 1e-3          # of the solution's mean: a guess is lifted to it before its logarithm is taken
SIZED = 64            # training solutions behind that mean


class SteadyResiduals(FieldConditions):
    """Residuals of a steady task of a cache under random observations of its coefficient.

    linear: of a trained prior; None: fitted here to the cache's training fields.
    """

    def __init__(self, operator: Operator, cache: Cache, linear: LinearGuess | None = None):
        head, self.cache = operator.serve(cache), cache
        if linear is None:
            rows, device = cache.split["train"], head.scale.device
            known = head.input_codec.decode(cache.inputs(rows, device)[:, 0])
            mean = head.physical(cache.batch(rows[:SIZED], 0, 1, device)).mean()
            linear = LinearGuess.fit(known, FLOOR * float(mean))
        super().__init__(operator, cache.task.name, linear)

    def windows(self, split: str) -> tuple[int, int]:
        return len(self.cache.split[split]), 1

    def start_weights(self) -> dict[str, Tensor]:
        return {}

    def fields(self, split: str, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(coefficient latents (batch, 1, *tokens, dim_a), solution latents (batch, 1, *tokens, dim),
        parameters)."""
        rows = self.cache.split[split][places]
        return (self.cache.inputs(rows, self.device), self.cache.batch(rows, 0, 1, self.device),
                self.cache.parameters[rows])

    @torch.no_grad()
    def draw(self, split: str, places: Tensor, starts: Tensor, draw: torch.Generator | None,
             is_disturbed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(r, tokens, facts) of rows `places` (positions in the split); draw: symmetry and observations,
        never None.

        is_disturbed changes nothing: no state is fed back.
        """
        z_in, z_ref, parameters = self.fields(split, places)
        z_in, z_ref = augment(self.head.task, [(z_in, self.head.input_codec), (z_ref, self.head.codec)], draw)
        v = self.head.input_codec.decode(z_in[:, 0])
        sources = row_generators(draw.initial_seed(), rows=places.tolist())
        guess, tokens, facts = self.predict(observe(v, draw_levels(v.shape[2:], sources), sources),
                                            parameters)
        return self.logarithm(self.head.physical(z_ref[:, 0])) - guess, tokens, facts
