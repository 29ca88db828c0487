"""Cells of user data without a value. The same cells in every frame are a mask, such as land. Cells of a few
frames are gaps: such frames are refused or, with the key skip_missing, left out.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ups.common.lazy import np
from ups.userdata.inspect_file import ConfigError
from ups_discovery.boundary import PERIODIC, along

READ = 2**22  # numbers at a time
WHOLE: dict[tuple, list["np.ndarray"]] = {}  # files -> whether each frame is whole
LOOKED_AT = 8  # trajectories in which a mask is sought, spread over all of them
FILL_TOLERANCE = 1e-6  # relative, of a number that means missing: float32 rounds 1e20


def find_mask(data: Any) -> "np.ndarray | None":
    """The cells (channels, *space) without a value in all sampled frames, None if there are none. Raises
    ValueError if a symmetry of the task moves the mask."""
    rows = np.unique(np.linspace(0, data.num_trajectories - 1, LOOKED_AT).astype(int))
    mask = None
    for row in rows.tolist():
        for frame in sorted({0, data.num_frames // 2, data.num_frames - 1}):
            is_missing = np.isnan(data.read(row, row + 1, range(frame, frame + 1))[0, 0])
            mask = is_missing if mask is None else mask & is_missing
            if not mask.any():
                return None
    task = data.task
    axes = {name: number - task.ndim for number, name in enumerate(task.axes)}
    shifted = [
        axis
        for axis, end in zip(task.axes, along(task.boundary, task.ndim), strict=True)
        if task.is_shifted and end == PERIODIC and axis not in task.fixed_axes
    ]
    images = [("shift", np.roll(mask, 1, axes[axis])) for axis in shifted]
    images += [("mirror", np.flip(mask, axis)) for axis in axes.values() if task.is_symmetric]
    if moved := [name for name, image in images if not np.array_equal(image, mask)]:
        raise ConfigError(
            f"task.{task.name}.symmetries: it names {moved[0]}, and cells of {data.path} have no value in "
            f"any frame (land, a solid); expected symmetries that do not move them. Leave {moved[0]} out of "
            "it."
        )
    return mask


def _whole_frames(data: Any, lengths: Sequence[int]) -> list["np.ndarray"]:
    """For every run, whether each frame is whole: only cells of the mask have no value. Files that did not
    change are read once by a process."""
    about = [(file.path, file.path.stat()) for file in data.files]
    files = tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in about)
    key = files, json.dumps(data.task.user_facts, sort_keys=True), data.space, tuple(lengths)
    if key not in WHOLE:
        at_once = max(1, READ // (len(data.task.channels) * math.prod(data.space)))
        WHOLE[key] = [
            np.concatenate(
                [
                    ~is_wrong(data.read(row, row + 1, range(first, min(first + at_once, frames))), data.mask)[
                        0
                    ].any(tuple(range(1, 2 + data.task.ndim)))
                    for first in range(0, frames, at_once)
                ]
            )
            for row, frames in enumerate(lengths)
        ]
    return WHOLE[key]


def first_frames(is_whole: "np.ndarray", jumps: "np.ndarray", used: range, cut: int) -> Iterator[int]:
    """The first frames of the windows of one run; arguments as of `whole_windows`."""
    begin, last = used[0], used[-1] - used[0]
    while begin + max(last, cut - 1) < len(is_whole):
        gaps = begin + used.step * np.flatnonzero(~is_whole[begin : begin + last + 1 : used.step])
        crossed = jumps[(begin <= jumps) & (jumps < begin + last)]
        if stops := [*gaps[-1:], *crossed[-1:]]:
            begin = 1 + int(max(stops))
            continue
        yield begin
        if not cut:
            return
        begin += cut


def whole_windows(data: Any, used: range, cut: int, skip_missing: bool) -> "tuple[np.ndarray, int]":
    """(Rows of the windows without a gap, the number of frames that are not whole.)

    data: one row for every run, from its first frame on; used: frames of a window; cut: frames from window to
    window, 0: one window of each run; skip_missing: only whole frames may be in a window. Raises ValueError
    if no window remains."""
    lengths = [frames for file in data.files for frames in file.lengths]
    breaks = [file.jumps for file in data.files for _ in file.lengths]
    whole = _whole_frames(data, lengths) if skip_missing else [np.ones(frames, bool) for frames in lengths]
    left_out = sum(int((~one).sum()) for one in whole)
    rows = [
        (*data.rows[row, :2], begin)
        for row, (is_whole, jumps) in enumerate(zip(whole, breaks, strict=True))
        for begin in first_frames(is_whole, jumps, used, cut)
    ]
    if not rows:
        key, why = f"task.{data.task.name}", f"cells have no value in {left_out} of {sum(lengths)} frames"
        num_breaks = sum(map(len, breaks))
        why = " and ".join([why] * (left_out > 0) + [f"times have {num_breaks} gaps"] * (num_breaks > 0))
        raise ConfigError(
            f"{key}.cut: no {used[-1] - used[0] + 1} frames follow each other, as {why}; expected at least "
            f"one window. Cut into shorter windows: {key}.cut, or {key}.num_frames for one of every run."
        )
    return np.array(rows), left_out


def is_wrong(u: "np.ndarray", mask: "np.ndarray | None") -> "np.ndarray":
    """Where u (n, T, channels, *space) is not finite outside the mask, or a number inside it."""
    return ~np.isfinite(u) if mask is None else np.where(mask, ~np.isnan(u), ~np.isfinite(u))


def settled(u: "np.ndarray") -> "np.ndarray":
    """u (..., cells) with the first number of its row in place of NaN: a row of equal numbers stays one."""
    is_missing = np.isnan(u)
    if not is_missing.any():
        return u
    first = np.take_along_axis(u, (~is_missing).argmax(-1)[..., None], -1)
    return np.where(is_missing, np.nan_to_num(first), u)


def averaged(u: "np.ndarray", ndim: int) -> "np.ndarray":
    """u (..., *space) with the mean of its frame in place of NaN."""
    is_missing = np.isnan(u)
    if not is_missing.any():
        return u
    axes = tuple(range(-ndim, 0))
    count = np.maximum(1, (~is_missing).sum(axes, keepdims=True))
    mean = np.where(is_missing, 0, u).sum(axes, keepdims=True, dtype=np.float64) / count
    return np.where(is_missing, mean, u).astype(u.dtype)


def mask_words(mask: "np.ndarray | None", channels: Sequence[str]) -> Iterator[str]:
    """The fraction of cells in the mask of each channel, in words."""
    for name, cells in zip(channels, mask if mask is not None else (), strict=mask is not None):
        if cells.any():
            yield f"{name}: {cells.mean():.0%} of its cells are a mask, the same in all frames"


def missing_values(key: str, missing: Any) -> list[str]:
    """The numbers that mean missing, as text, which YAML gives back exactly; "nan" means that no other number
    does. Raises ValueError if one is no number."""
    values = missing if isinstance(missing, list) else [missing]
    try:
        texts = [f"{float(str(value)):.17g}" for value in values]  # true is no number
    except ValueError:
        raise ConfigError(
            f"{key}.missing: it is {missing!r:.80}; expected a number that means missing in the files, or a "
            "list of such numbers. Write missing: -9999, or missing: nan if no number does."
        ) from None
    # with a point: YAML 1.1 then writes quotes, and so gives back text
    return [text.replace("e", ".0e") if "e" in text and "." not in text else text for text in texts]


def with_nan(block: "np.ndarray", values: Sequence[str]) -> "np.ndarray":
    """Stored numbers as floats, with NaN in place of those in `values`."""
    if values or block.dtype.kind != "f":  # whole numbers have neither NaN nor an infinity
        block = block.astype(np.promote_types(block.dtype, np.float32))
    for value in map(float, values):
        block[np.abs(block - value) <= FILL_TOLERANCE * abs(value)] = np.nan
    return block
