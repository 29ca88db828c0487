"""The equation of a task as an object."""

from torch import nn

from ups.common.device import plain_torch
from ups.models.bases.equation import Equation
from ups_discovery.statement import FoundEquation


class TaskEquation(FoundEquation):
    """The equation of a task at one parameter value; offsets: those of the task."""

    __call__ = plain_torch()(FoundEquation.__call__)


def found_equation(head: nn.Module, value: int = 0) -> TaskEquation:
    """The equation of a head's base. value: number of the parameter value. Raises ValueError if the base is
    no equation or was saved by a version without intervals, and for a value that it does not have."""
    base, name, task = head.base, head.name, head.task
    if not isinstance(base, Equation) or not base.found:
        raise ValueError(
            f"the base of {name} is {head.facts.base.get('name', base.kind)}; expected an equation "
            f"with intervals. Train the operator again with task.{name}.base: [equation]."
        )
    equations = base.found["equations"]
    if value not in range(len(equations)):
        raise ValueError(
            f"{name} has no parameter value {value}; expected 0 to {len(equations) - 1}, the number of one "
            f"of {head.facts.parameter_values}. Pass value=0."
        )
    offsets = [dict(task.offsets).get(field, 0.0) for field in task.fields]
    return TaskEquation.of(base, task.fields, task.axes, head.facts.dt or 1.0, offsets, value)
