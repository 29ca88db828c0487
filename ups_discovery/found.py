"""An identified equation as an object: terms, values, intervals, LaTeX and right-hand side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ups_discovery.equation import Equation
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
    """The equation of fields at one parameter value.

    terms: without negligible ones; doubt: why the equation should not be stated, "" if nothing speaks against
    it. A call returns the right-hand side. equation: integrates it; frame: time between frames; offsets: of
    the fields, which are subtracted before the equation applies; value: number of the parameter value."""

    terms: tuple[FoundTerm, ...]
    doubt: str
    equation: Equation
    frame: float
    offsets: tuple[float, ...]
    value: int

    @classmethod
    def of(
        cls,
        equation: Equation,
        fields: Sequence[str],
        axes: Sequence[str],
        frame: float,
        offsets: Sequence[float] = (),
        value: int = 0,
    ) -> Self:
        """From an equation with its `found` (see `statement.described`), and the names of fields and axes."""
        names = [
            f"({field} - {origin:.6g})" if origin else field
            for field, origin in zip(fields, equation.found["origins"], strict=True)
        ]
        row, terms = equation.found["equations"][value], []
        for channel, place, number, width, is_small in row["rows"]:
            half = math.inf if width is None else width
            latex = latex_of(equation.terms.terms[place], fields, names, equation.terms.positive, axes)
            if not is_small:
                terms.append(FoundTerm(fields[channel], latex, number, number - half, number + half))
        offsets = tuple(offsets) or (0.0,) * len(fields)
        return cls(tuple(terms), row["doubt"], equation, frame, offsets, value)

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
        return "\n".join([*lines, *[f"not stated: {self.doubt}"] * bool(self.doubt)])

    def __call__(self, u: Tensor) -> Tensor:
        """The time derivative of u (batch, C, *space), physical units, all fields; of its shape. Negligible
        terms are part of it. Raises ValueError for another grid."""
        space, terms, found = tuple(u.shape[2:]), self.equation.terms, self.equation.found
        if space != terms.space:
            raise ValueError(
                f"the equation was given a field on the grid {space}; expected {terms.space}, on which "
                "it was found. Interpolate the field, or use the terms and values."
            )
        size, origin, offset = (
            torch.tensor(values, dtype=torch.float64, device=u.device).view(-1, *[1] * len(space))
            for values in (found["sizes"], found["origins"], self.offsets)
        )
        counted = u.double() - offset
        s = (counted - origin) / size
        logarithms = terms.positive
        s[:, logarithms] = (counted[:, logarithms] / size[logarithms]).log()
        weights = terms.grouped(self.equation.weight[[self.value]].double().expand(len(u), -1, -1))
        slope = terms.weighted(s, weights) / self.frame
        derivative = slope * size
        derivative[:, logarithms] = slope[:, logarithms] * counted[:, logarithms]
        return derivative.to(u)


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
