"""An identified equation as an object and as text: terms, coefficients with their intervals in the units of
the data, LaTeX and right-hand side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from ups_discovery.equation import Equation
from ups_discovery.terms import INVERSE, WAVE, Term
from ups_discovery.units import FieldUnits, unit_of

if TYPE_CHECKING:
    from ups_discovery.certainty import Certainty
    from ups_discovery.integrator import Model

SMALL = 1e-2  # of the RMS of the time derivative: a term below it is stated only if it is certain
NOT_STATED = "an equation was used as base but is not stated"
NO_INTERVALS = "it was fitted by a version without intervals (train the operator again)"


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
        """From an equation with its `found` (see `described`), and the names of fields and axes."""
        counted = [
            f"({field} - {origin:.6g})" if origin else field
            for field, origin in zip(fields, equation.found["origins"], strict=True)
        ]
        positive = equation.terms.positive
        row, terms = equation.found["equations"][value], []
        for channel, place, number, width, is_small in row["rows"]:
            half = math.inf if width is None else width
            latex = written(equation.terms.terms[place], fields, positive, axes, counted, is_latex=True)
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


def described(
    models: "Sequence[Model]",
    certainties: "Sequence[Certainty]",
    library: Sequence[Term],
    terms: Sequence[Term],
    units: FieldUnits,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """The equations of all parameter values, JSON-able and in the units of the data.

    origins (C,): the value that is subtracted from each field before powers are taken. sizes (C,): the unit
    of each field. equations: for each value the doubt (why it is not stated, "" if it is) and rows of
    (channel, place in `terms`, coefficient, half width of its 95 % interval or None if it is unbounded,
    whether the term is negligible), and others: those of `Certainty` over the coefficients, 1 if infinite."""
    equations = []
    for model, one in zip(models, certainties, strict=True):
        rows = []
        for (channel, place), value, width, is_small in zip(
            model.unknowns,
            model.values.tolist(),
            one.half_width.tolist(),
            one.is_negligible.tolist(),
            strict=True,
        ):
            unit = unit_of(
                library[place], channel, units, settings["positive"], settings["cell"], settings["frame"]
            )
            rows.append(
                [
                    channel,
                    terms.index(library[place]),
                    value * unit,
                    width * unit if math.isfinite(width) else None,
                    is_small,
                ]
            )
        others = [ratio if math.isfinite(ratio) else 1.0 for ratio in (one.others / model.values).tolist()]
        equations.append({"doubt": one.doubt, "rows": rows, "others": others})
    return {"origins": units.origin, "sizes": units.size, "equations": equations}


def stated(
    found: dict[str, Any],
    terms: Sequence[Term],
    fields: Sequence[str],
    positive: Sequence[int],
    axes: Sequence[str],
) -> list[str]:
    """A line for every field and parameter value, and one for each reason why equations are not stated.

    found: of `described`; {} for weights that were saved before it existed.
    """
    if not found:
        return [f"{NOT_STATED}: {NO_INTERVALS}"]
    counted = [
        f"({name} - {_number(origin, size / 1000)})" if origin else name
        for name, origin, size in zip(fields, found["origins"], found["sizes"], strict=True)
    ]
    words = [written(term, fields, positive, axes, counted) for term in terms]
    lines, doubts = [], {}
    for place, equation in enumerate(found["equations"], 1):
        if equation["doubt"]:
            doubts.setdefault(equation["doubt"], []).append(place)
            continue
        for channel, field in enumerate(fields):
            rows = [row for row in equation["rows"] if row[0] == channel]
            if not rows and channel not in {row[0] for each in found["equations"] for row in each["rows"]}:
                continue
            large = [row for row in rows if not row[4]]
            right = " ".join(
                f"{'-' if value < 0 else '+'} {with_interval(abs(value), width)} {words[term]}".rstrip()
                for _, term, value, width, _ in large
            )
            right = f"-{right[2:]}" if right.startswith("-") else right[2:] or "0"
            if few := len(rows) - len(large):
                right += f" (and {few} term{'s' * (few > 1)} below {SMALL:.0%} of it)"
            lines.append(f"∂t {'log ' if channel in positive else ''}{field} = {right}")
    num = len(found["equations"])
    return lines + [
        f"{NOT_STATED}: {doubt}"
        + (f" (parameter values {', '.join(map(str, places))} of {num})" if len(places) < num else "")
        for doubt, places in doubts.items()
    ]


def written(
    term: Term,
    fields: Sequence[str],
    positive: Sequence[int],
    axes: Sequence[str],
    counted: Sequence[str] = (),
    is_latex: bool = False,
) -> str:
    """A term as text, such as u ∂xx v, or in LaTeX. In waves x is in lengths of the axis; ∇⁻² is the inverse
    Laplacian. counted: names of the fields in powers, with their origin if it is not zero.
    """
    powers, factors = term
    parts = []
    for name, power in zip(counted or fields, powers, strict=True):
        if power:
            parts.append(name if power == 1 else f"{name}^{{{power}}}" if is_latex else f"{name}^{power}")
    for channel, along in factors:
        if channel == WAVE:
            *numbers, is_sine = along
            waves = [f"{number:+d} {axis}" for number, axis in zip(numbers, axes, strict=True) if number]
            wave, phase = "sin" if is_sine else "cos", ("" if is_latex else " ").join(waves).removeprefix("+")
            parts.append(rf"\{wave} 2 \pi ({phase})" if is_latex else f"{wave} 2π({phase})")
            continue
        letters, name = [axes[axis] for axis in along if axis != INVERSE], fields[channel]
        if is_latex:
            inverse = r"\nabla^{-2} " * (INVERSE in along)
            name = rf"\log {name}" if channel in positive else name
            parts.append((rf"\partial_{{{' '.join(letters)}}} " if letters else "") + inverse + name)
        else:
            name = "∇⁻² " * (INVERSE in along) + ("log " if channel in positive else "") + name
            parts.append(f"∂{''.join(letters)} {name}")
    if is_latex:
        return r"\, ".join(parts) or "1"
    return " ".join(
        f"({part})" if " " in part and part[0] != "(" and len(parts) > 1 else part for part in parts
    )


def with_interval(value: float, half_width: float) -> str:
    """(value ± half width) as text, to the first digit of the half width, which is rounded up."""
    exponent = math.floor(math.log10(value)) if not 1e-3 <= value < 1e4 else 0
    value, half_width = value / 10.0**exponent, half_width / 10.0**exponent
    digits = max(0, -math.floor(math.log10(half_width))) if half_width > 0 else 6
    digits = min(digits, 12)
    step = 10.0**-digits
    text = f"({value:.{digits}f} ± {max(1, math.ceil(half_width / step - 1e-9)) * step:.{digits}f})"
    return text + (f"e{exponent:+03d}" if exponent else "")


def _number(value: float, resolution: float) -> str:
    digits = max(1, math.ceil(math.log10(abs(value) / resolution)))
    return f"{value:.{digits}g}"
