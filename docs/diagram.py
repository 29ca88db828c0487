"""The diagram of docs/design.md, drawn from the imports: python docs/diagram.py [--write]

An arrow means "imports". Arrows that follow from others are left out.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design.md"
FACE = "forecaster"  # ups/forecast*.py and ups/hub*.py: one box
BLOCK = re.compile(r"(?<=```mermaid\n)flowchart.*?(?=```)", re.DOTALL)


def box(name: str) -> str:
    """The box of a module: the package below ups, another package at the root, or the forecaster."""
    top, _, rest = name.partition(".")
    if top != "ups":
        return top if top.startswith("ups_") else ""
    inside = rest.partition(".")[0]
    return (
        FACE if inside.startswith(("forecast", "hub")) else inside if (ROOT / "ups" / inside).is_dir() else ""
    )


def imports() -> dict[str, set[str]]:
    """Box -> boxes that it imports anywhere, except for annotations alone."""
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.glob("ups*/**/*.py")):
        here = box(".".join(path.relative_to(ROOT).with_suffix("").parts))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        names = {
            name
            for node in ast.walk(tree)
            for name in (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if isinstance(node, ast.ImportFrom) and node.module
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
        }
        found.setdefault(here, set()).update(box(name) for name in names if name.startswith("ups"))
    return {here: targets - {here, ""} for here, targets in found.items() if here}


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that lead where others lead too."""

    def reach(box: str) -> set[str]:
        return graph[box] | {far for near in graph[box] for far in reach(near)}

    return {
        here: targets - {far for near in targets for far in reach(near)} for here, targets in graph.items()
    }


def diagram() -> str:
    arrows = sorted((here, target) for here, targets in reduced(imports()).items() for target in targets)
    return "\n".join(["flowchart TD", *(f"    {here} --> {target}" for here, target in arrows)]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(BLOCK.sub(lambda _: diagram(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(diagram(), end="")
