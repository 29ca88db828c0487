"""UPS, the Universal Physics Stack: a latent simulator of partial differential equations one can trust.

    model = ups.load("runs/small")
    u = model.forecast("burgers1d", u0, parameters={"Nu": 0.01}, num_frames=30)

See `ups.forecaster`. Importing this costs nothing: torch comes with the first `load`.
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
    """The model of a run's folder (such as runs/small), of its operator's, or of a hub's hf://OWNER/NAME; see
    `ups.forecaster.Forecaster`.

    solvers: task -> step(u), of a model that corrects a coarse solver of yours: weights name no code to run.
    Raises FileNotFoundError, naming the make target, where there is none, and ValueError where it is damaged.
    """
    from ups.forecaster import Forecaster

    return Forecaster.load(folder, device, solvers)


def push(folder: "str | Path", name: str) -> str:
    """Put what travels of a run on a model hub as OWNER/NAME; its address. See `ups.commands.publish`."""
    from ups.commands.publish import push

    return push(folder, name)
