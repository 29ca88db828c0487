"""The operator's answer as the first iterate of the user's own iterative solver, for steady tasks.

    start = ups.start("runs/darcy")
    x, _ = scipy.sparse.linalg.cg(A, b, x0=start(a).ravel(), M=M, rtol=1e-8)

The solver iterates to its own tolerance, so the result is as exact as from zeros; it takes fewer iterations.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from ups.common.device import refuse_gradient
from ups.forecast_inputs import Values
from ups.forecast_xarray import as_tensor
from ups.forecaster import Forecaster


class Start:
    """x0 = start(a, parameters=..). See `ups.start`. counts: starts that were not used, and why."""

    def __init__(self, model: Forecaster, task: str | None = None):
        steady = [name for name, known in model.tasks.items() if known["inputs"]]
        if task not in steady and not (task is None and len(steady) == 1):
            raise ValueError(
                f"the task is {task!r:.80}; expected one of the steady ones: {', '.join(steady) or 'none'}. "
                "Name it: ups.start(.., task=..)."
            )
        self.model, self.task = model, task or steady[0]
        self.counts = {"starts": 0, "finite": 0, "residual": 0}

    def __call__(
        self, a: Any, parameters: Values = None, residual: Callable[[np.ndarray], Any] | None = None
    ) -> np.ndarray:
        """The first iterate (channel, *space), NumPy float64, for a coefficient a (channel, *space) on the
        trained grid; zeros if the operator's answer is not finite, or if residual(x0), b - A x0 of
        the user's system, is not smaller than residual(zeros).
        """
        refuse_gradient(self.task, "a first iterate has none", a)
        a = as_tensor(a, self.task).cpu().numpy()
        self.counts["starts"] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # outside of the trained range it is a worse start, not an error
            u = self.model.forecast(self.task, a[None, None], parameters, extrapolate=True)
        x0 = np.asarray(u, dtype=np.float64)[0, 0]
        why = "" if np.isfinite(x0).all() else "finite"
        if not why and residual is not None:
            found = [
                as_tensor(residual(x), f"{self.task}'s residual").detach() for x in (x0, np.zeros_like(x0))
            ]
            sizes = [float(one.norm()) for one in found]
            why = "" if sizes[0] < sizes[1] else "residual"
        if not why:
            return x0
        self.counts[why] += 1
        return np.zeros_like(x0)
