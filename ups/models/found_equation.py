"""The equation of a task as an object: terms, values, intervals, LaTeX and right-hand side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ups.common.torch_state import plain_torch
from ups.models.bases.equation import Equation
from ups_discovery.terms import INVERSE, WAVE, Term


class FoundTerm(NamedTuple):
    """A term in the equation of a field. latex: without its coefficient. value, low, high: the coefficient in
    the units of the data and its 95 % interval, infinite if it is unbounded."""

    field: str
    latex: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class FoundEquation:
    """The equation of a task at one parameter value.

    terms: without negligible ones; doubt: why the equation is not stated in reports, "" if it is. A call
    returns the right-hand side. base: integrates it; frame: time between frames; offsets: of the fields,
    which the task subtracts; value: number of the parameter value."""

    terms: tuple[FoundTerm, ...]
    doubt: str
    base: Equation
    frame: float
    offsets: tuple[float, ...]
    value: int

    @property
    def latex(self) -> str:
        """An equation per field, in LaTeX."""
        lines = {}
        for one in self.terms:
            number, exponent = f"{abs(one.value):.4g}", ""
            if "e" in number:
                number, power = number.split("e")
                exponent = rf" \cdot 10^{{{int(power)}}}"
            sign = "-" if one.value < 0 else "+" if one.field in lines else ""
            lines[one.field] = f"{lines.get(one.field, '')} {sign} {number}{exponent}\\, {one.latex}".strip()
        return "\n".join(rf"\partial_t {field} = {right}" for field, right in lines.items())

    def __str__(self) -> str:
        lines = [
            f"{one.field}: {one.value:.6g} [{one.low:.6g}, {one.high:.6g}] {one.latex}" for one in self.terms
        ]
        return "\n".join([*lines, *[f"not stated in reports: {self.doubt}"] * bool(self.doubt)])

    @plain_torch()
    def __call__(self, u: Tensor) -> Tensor:
        """The time derivative of u (batch, C, *space), physical units, all fields of the task; of its shape.
        Negligible terms are part of it. Raises ValueError for another grid."""
        space, base, found = tuple(u.shape[2:]), self.base, self.base.found
        if space != base.terms.space:
            raise ValueError(
                f"the equation was given a field on the grid {space}; expected {base.terms.space}, on which "
                "it was found. Interpolate the field, or use the terms and values."
            )
        size, origin, offset = (
            torch.tensor(values, dtype=torch.float64, device=u.device).view(-1, *[1] * len(space))
            for values in (found["sizes"], found["origins"], self.offsets)
        )
        counted = u.double() - offset
        s = (counted - origin) / size
        logarithms = base.terms.positive
        s[:, logarithms] = (counted[:, logarithms] / size[logarithms]).log()
        weights = base.terms.grouped(base.weight[[self.value]].double().expand(len(u), -1, -1))
        slope = base.terms.weighted(s, weights) / self.frame
        derivative = slope * size
        derivative[:, logarithms] = slope[:, logarithms] * counted[:, logarithms]
        return derivative.to(u)


def found_equation(head: nn.Module, value: int = 0) -> FoundEquation:
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
    names = [
        f"({field} - {origin:.6g})" if origin else field
        for field, origin in zip(task.fields, base.found["origins"], strict=True)
    ]
    terms = []
    for channel, place, number, width, is_small in equations[value]["rows"]:
        half = math.inf if width is None else width
        latex = latex_of(base.terms.terms[place], task.fields, names, base.terms.positive, task.axes)
        if not is_small:
            terms.append(FoundTerm(task.fields[channel], latex, number, number - half, number + half))
    frame = head.facts.dt or 1.0
    offsets = tuple(dict(task.offsets).get(field, 0.0) for field in task.fields)
    return FoundEquation(tuple(terms), equations[value]["doubt"], base, frame, offsets, value)


def latex_of(
    term: Term, fields: Sequence[str], counted: Sequence[str], positive: Sequence[int], axes: Sequence[str]
) -> str:
    """A term in LaTeX. counted: names of the fields in powers, with their origin if it is not zero."""
    powers, factors = term
    parts = [
        name + (f"^{{{power}}}" if power != 1 else "")
        for name, power in zip(counted, powers, strict=True)
        if power
    ]
    for channel, along in factors:
        if channel == WAVE:
            *numbers, is_sine = along
            phase = "".join(
                f"{number:+d} {axis}" for number, axis in zip(numbers, axes, strict=True) if number
            )
            parts.append(rf"\{'sin' if is_sine else 'cos'} 2 \pi ({phase.removeprefix('+')})")
            continue
        name = rf"\log {fields[channel]}" if channel in positive else fields[channel]
        inverse = r"\nabla^{-2} " * (INVERSE in along)
        letters = " ".join(axes[axis] for axis in along if axis != INVERSE)
        parts.append((rf"\partial_{{{letters}}} " if letters else "") + inverse + name)
    return r"\, ".join(parts) or "1"
