"""What a section declares as known in advance: `forcing: [f]`."""

from collections.abc import Sequence
from typing import Any

from ups.tasks import Place
from ups.userdata.inspect_file import wrong


def check_forcing(key: str, forcing: Any, places: Sequence[Place]) -> None:
    """Raise ValueError unless `forcing` names fields that vary in time and leaves one to predict."""
    where, fields = f"{key}.forcing", [field for place in places for field in place.fields]
    if (
        not isinstance(forcing, list)
        or not all(isinstance(name, str) for name in forcing)
        or len({*forcing}) < len(forcing)
    ):
        raise wrong(
            where, f"it is {forcing!r:.80}", "a list of different names", f"Write forcing: [{fields[-1]}]."
        )
    if strange := [name for name in forcing if name not in fields]:
        raise wrong(
            where,
            f"it names {strange[0]!r:.80}",
            f"fields of the layout ({', '.join(fields)})",
            f"Correct the list, or add the array to {key}.layout: fields as [trajectory, time, x], "
            "series as [trajectory, time] or [time].",
        )
    constant = [field for place in places for field in place.fields if place.is_steady]
    if forcing and len(constant) == len(fields):
        raise wrong(
            where,
            f"it names {forcing[0]}, and no array has a time axis, so the task is steady",
            "none",
            f"Write inputs: [{forcing[0]}], which is what a steady task is given.",
        )
    if fixed := [name for name in forcing if name in constant]:
        raise wrong(
            where,
            f"it names {fixed[0]}, whose array has no time axis",
            "what varies in time",
            f"Leave {fixed[0]} out: fields without a time axis are given already.",
        )
    if forcing and not {*fields} - {*forcing, *constant}:
        raise wrong(
            where,
            f"it is {forcing}, so nothing is predicted",
            "fields beside those that are predicted",
            "Take out what is to be predicted.",
        )
