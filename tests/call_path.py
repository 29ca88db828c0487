"""The path of one call: how many functions and files of ours run, and how deeply they are nested."""

import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self

from ups.common.place import ROOT


class CallPath(NamedTuple):
    """functions and files that run; depth: most functions of ours inside one another."""

    functions: int
    files: int
    depth: int

    @classmethod
    def of(cls, codes: Iterable[CodeType], depth: int) -> Self:
        codes = {*codes}
        return cls(len(codes), len({code.co_filename for code in codes}), depth)


COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")  # before Python 3.12 calls as well


def is_ours(code: CodeType) -> bool:
    """Whether it is a function of ups/ or of a package beside it; lambdas and closures count."""
    return code.co_filename.startswith(f"{ROOT}/ups") and code.co_name not in COMPREHENSIONS


def depth_of(frame: FrameType | None) -> int:
    """The number of frames of ours on the stack."""
    count = 0
    while frame is not None:
        count, frame = count + is_ours(frame.f_code), frame.f_back
    return count


def path_of(call: Callable[[], Any]) -> CallPath:
    """The path of call()."""
    codes, deepest = set(), 0

    def on_call(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal deepest
        if event == "call" and is_ours(frame.f_code):
            codes.add(frame.f_code)
            deepest = max(deepest, depth_of(frame))

    sys.setprofile(on_call)
    try:
        call()
    finally:
        sys.setprofile(None)
    return CallPath.of(codes, deepest)
