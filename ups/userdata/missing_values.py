"""Stored numbers that stand for none, as the key missing names them."""

from collections.abc import Sequence
from typing import Any

from ups.common.lazy import np
from ups.userdata.inspect_file import wrong

CLOSE = 1e-6  # relative, of a number that stands for none: float32 rounds 1e20


def missing_values(key: str, said: Any) -> list[str]:
    """One value or several as text: that a configuration gives them back as they are, "nan" too, which says
    that no other stands for none. Raises ValueError for what is no number.
    """
    values = said if isinstance(said, list) else [said]
    try:
        texts = [f"{float(str(value)):.17g}" for value in values]  # of true there is none
    except ValueError:
        raise wrong(
            f"{key}.missing",
            f"it is {said!r:.80}",
            "a number that stands for none in the files, or a list of such numbers",
            "Write missing: -9999, or missing: nan if no number does.",
        ) from None
    # with a point, for which YAML 1.1 puts it in quotes, and so gives back text
    return [text.replace("e", ".0e") if "e" in text and "." not in text else text for text in texts]


def without(block: "np.ndarray", values: Sequence[str]) -> "np.ndarray":
    """Stored numbers with NaN where they are one of `values`."""
    if not values:
        return block
    block = block.astype(np.promote_types(block.dtype, np.float32))
    for value in map(float, values):
        block[np.abs(block - value) <= CLOSE * abs(value)] = np.nan
    return block
