"""UPS, the Universal Physics Stack: a latent simulator of partial differential equations one can trust.

    model = ups.load("runs/small")
    u = model.forecast("burgers1d", u0, parameters={"Nu": 0.01}, num_frames=30)

See `ups.forecaster`. The import is cheap: torch is imported by the first `load`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    import torch

    from ups.analysis import Analysis
    from ups.forecast_corrector import StepCorrector
    from ups.forecast_start import Start
    from ups.forecaster import Forecaster
    from ups.inversion import Inversion

__all__ = ["assimilate", "corrector", "invert", "load", "push", "start"]
__version__ = "0.1.0"


def load(
    folder: "str | Path",
    device: "str | torch.device" = "cpu",
    solvers: "Mapping[str, Callable[..., Any]] | Callable[..., Any] | None" = None,
) -> "Forecaster":
    """A trained model: see `ups.forecaster.Forecaster`.

    folder: of a run (such as runs/small) or of its operator, or hf://OWNER/NAME on a model hub.
    device: of the network and of latents; fields come back where the input was.
    solvers: TASK -> step(u), or one step for all tasks, for a model that corrects your own coarse solver
    (weights contain no code).
    Raises FileNotFoundError, with the make target, if there is no model, ValueError if it is damaged.
    """
    from ups.forecaster import Forecaster

    return Forecaster.load(folder, device, solvers)


def corrector(
    folder: "str | Path",
    step: "Callable[..., Any]",
    task: str | None = None,
    check: "Callable[[Any, Any, Any], Any] | None" = None,
) -> "StepCorrector":
    """u_next = correct(u, dt, t=.., parameters=..): your own step, corrected, in your own loop.

    folder: of a run whose base is this step (`make corrector`). task: needed if there are several. check:
    your own condition on (u, step's result, corrected result), each (batch, channel, *space): True, or one
    value for each state, where the corrected one may be used. See `ups.forecast_corrector`.
    """
    from ups.forecast_corrector import StepCorrector
    from ups.forecaster import Forecaster

    return StepCorrector(Forecaster.load(folder, solvers=step), step, task, check)


def push(folder: "str | Path", name: str) -> str:
    """Upload a run to a model hub as OWNER/NAME and return its address. See `ups.commands.publish`."""
    from ups.commands.publish import push

    return push(folder, name)


def invert(
    model: "Forecaster",
    task: str,
    observations: "Mapping[str, Any]",
    unknown: "Sequence[str]" = ("u0",),
    **options: "Any",
) -> "Inversion":
    """The start, coefficient, forcing or parameters of a forecast from noisy observations, with intervals.

    observations: {"frames": [0, 2, 5] (0 is the start; none for a steady task), "values": (frames, C, *grid),
    NaN where nothing is observed, "noise": standard deviation, a number, one by field, or an array, "mask":
    1 where observed (default: all that is not NaN)}, physical units.
    unknown: "u0" (of a steady task the coefficient), names of parameters and of forcings (in every frame).
    u0, parameters, forcing: what is known, as in `Forecaster.forecast`.
    prior: typical starts (rows, C, *grid), instead of those of the training data.
    members, seed: of the samples of the posterior.
    Raises ValueError, by name, for what cannot be inverted. See `ups.inversion.Inversion`.
    """
    from ups.common.device import refuse_gradient
    from ups.inversion import invert

    refuse_gradient(task, "an inversion has none", observations, options)
    return invert(model, task, observations, unknown, **options)


def assimilate(
    model: "Any",
    task: str,
    ensemble: "Any",
    observations: "Mapping[str, Any]",
    parameters: "Any" = None,
    **options: "Any",
) -> "Analysis":
    """The state given observations as they come, by a local ensemble transform Kalman filter.

    model: a `Forecaster`, or any object with `tasks` and `forecast` of the same form.
    ensemble: members (N, [history,] C, *grid) at frame 0.
    observations: {"frames": [1, 2] (1 is the first after the ensemble), "values": (frames, C, *grid), NaN
    where nothing is observed, "noise": standard deviation, a number, one by field, or an array, "mask": 1
    where observed}, physical units.
    radius: distance, in units of the domain, from which on an observation has no effect; default: none.
    inflation: factor of the deviations from the mean after every observation.
    seed: of the random rotation of members. Other options: of `model.forecast`, forcing for one frame alone.
    Raises ValueError for what does not fit. See `ups.analysis.Analysis`.
    """
    from ups.analysis import assimilate
    from ups.common.device import refuse_gradient

    refuse_gradient(task, "an analysis has none", ensemble, observations, parameters, options)
    return assimilate(model, task, ensemble, observations, parameters, **options)


def start(folder: "str | Path", task: str | None = None) -> "Start":
    """x0 = start(a): the first iterate of your own CG, GMRES or Newton for a steady task of a run.

    task: needed if there are several. See `ups.forecast_start`.
    """
    from ups.forecast_start import Start
    from ups.forecaster import Forecaster

    return Start(Forecaster.load(folder), task)
