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

    from ups.forecaster import Forecaster

__all__ = ["load", "push"]
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


def push(folder: "str | Path", name: str) -> str:
    """Upload a run to a model hub as OWNER/NAME and return its address. See `ups.commands.publish`."""
    from ups.commands.publish import push

    return push(folder, name)
