"""Sizes of a short training on user data, which have no settings of their own as built-in tasks have.

A fine, small network on small batches is better than the usual one after 25 s in 2D with a symmetry, many
trajectories and 48 cells along each axis, and worse without one of these (docs/lab/log.md).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ups.config.schema import Config, UserTaskConfig
from ups.userdata.grid import choose_patch

SHORT, MANY, CELLS = 3000, 24, 48  # steps; trajectories; cells along an axis
PATCH, USUAL_PATCH = 2, 4
SIZES = {"model": {"width": 48, "depth": 2, "kernel_size": 3}, "train": {"batch_size": 8}}


def with_sizes(config: Config, num: Mapping[str, int], written: Mapping[str, Any]) -> Config:
    """The configuration with a patch for every task of user data without one and, where they are better,
    SIZES. num: trajectories of these tasks; written: what the user's files and command line say, which stays.
    """
    user = {name: one for name, one in config.task.items() if isinstance(one, UserTaskConfig)}
    operator, tasks = config.operator, {}
    cells = {
        name: [-(-size // max(1, one.space_stride)) for size in one.resolution] for name, one in user.items()
    }
    is_fine = (
        operator.train.steps <= SHORT
        and operator.model.kind == "plain"
        and {*config.data.tasks} == {*user}
        and all(many >= MANY for many in num.values())
        and all(len(sizes) == 2 and min(sizes) >= CELLS for sizes in cells.values())
        and all(one.symmetries and not one.inputs and not one.reserve for one in user.values())
    )
    for name, one in user.items():
        patch = one.patch or choose_patch(cells[name], PATCH if is_fine else USUAL_PATCH)
        tasks[name] = replace(one, patch=patch)
    for part, sizes in SIZES.items() if is_fine else ():
        own = written.get("operator", {}).get(part, {})
        sizes = {key: size for key, size in sizes.items() if key not in own}
        operator = replace(operator, **{part: replace(getattr(operator, part), **sizes)})
    return replace(config, task=config.task | tasks, operator=operator)
