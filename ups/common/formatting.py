"""Numbers as text for figures and tables."""

import math
from typing import Any

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: Any, digits: int = 3) -> str:
    """`value` with `digits` significant digits and powers of ten written out; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, (bool, str)) or (isinstance(value, int) and abs(value) < 10**15):
        return f"{value:,}" if type(value) is int else str(value)
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "not finite" if math.isinf(value) else "undefined"
    if not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}×10{str(int(exponent)).translate(RAISED)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.{digits}g}".rstrip(".")
