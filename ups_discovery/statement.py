"""An identified equation as text: coefficients with their intervals, in the units of the data."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ups_discovery.certainty import SMALL, Certainty
from ups_discovery.terms import INVERSE, WAVE, Term
from ups_discovery.units import FieldUnits, unit_of

if TYPE_CHECKING:
    from ups_discovery.integrator import Model

NOT_STATED = "an equation was used as base but is not stated"
NO_INTERVALS = "it was fitted by a version without intervals (train the operator again)"


def described(
    models: "Sequence[Model]",
    certainties: Sequence[Certainty],
    library: Sequence[Term],
    terms: Sequence[Term],
    units: FieldUnits,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """The equations of all parameter values, JSON-able and in the units of the data.

    origins (C,): the value that is subtracted from each field before powers are taken. sizes (C,): the unit
    of each field. equations: for each value the doubt (why it is not stated, "" if it is) and rows of
    (channel, place in `terms`, coefficient, half width of its 95 % interval or None if it is unbounded,
    whether the term is negligible)."""
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
        equations.append({"doubt": one.doubt, "rows": rows})
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
) -> str:
    """A term as text, such as u ∂xx v. In waves x is in lengths of the axis; ∇⁻² is the inverse Laplacian.
    counted: names of the fields in powers, with their origin if it is not zero.
    """
    powers, factors = term
    counted = counted or fields
    parts = [
        counted[c] + (f"^{exponent}" if exponent != 1 else "")
        for c, exponent in enumerate(powers)
        if exponent
    ]
    for channel, along_axes in factors:
        if channel == WAVE:
            *numbers, part = along_axes
            phase = " ".join(f"{num:+d} {axis}" for num, axis in zip(numbers, axes, strict=True) if num)
            parts.append(f"{'sin' if part else 'cos'} 2π({phase.removeprefix('+')})")
            continue
        name = f"log {fields[channel]}" if channel in positive else fields[channel]
        inverse = "∇⁻² " * (INVERSE in along_axes)
        parts.append(f"∂{''.join(axes[axis] for axis in along_axes if axis != INVERSE)} {inverse}{name}")
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
