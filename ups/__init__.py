"""UPS, the Universal Physics Stack: a latent simulator of partial differential equations one can trust.

    model = ups.load("runs/small")
    u = model.forecast("burgers1d", u0, parameters={"Nu": 0.01}, num_frames=30)

See `ups.forecaster`. The import is cheap: torch is imported by the first `load`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Any

    import torch

    from ups.forecast_corrector import StepCorrector
    from ups.forecaster import Forecaster

__all__ = ["corrector", "load", "push"]
__version__ = "0.1.0"


def load(
    folder: "str | Path",
    device: "str | torch.device" = "cpu",
    solvers: "Mapping[str, Callable[..., Any]] | None" = None,
) -> "Forecaster":
    """A trained model: see `ups.forecaster.Forecaster`.

    folder: of a run (such as runs/small) or of its operator, or hf://OWNER/NAME on a model hub.
    device: of the network and of latents; fields come back where the input was.
    solvers: TASK -> step(u), for a model that corrects your own coarse solver (weights contain no code).
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
    from ups.forecast_corrector import Everywhere, StepCorrector
    from ups.forecaster import Forecaster

    return StepCorrector(Forecaster.load(folder, solvers=Everywhere({"": step})), step, task, check)


def push(folder: "str | Path", name: str) -> str:
    """Upload a run to a model hub as OWNER/NAME and return its address. See `ups.commands.publish`."""
    from ups.commands.publish import push

    return push(folder, name)
