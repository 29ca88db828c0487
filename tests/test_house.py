"""The house: a file of ups/ imports from its own floor's folder or from floors below, never in a circle;
the public face is lazy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [
    {"files", "progress", "seeds", "spectral", "boundary", "interpreter", "lazy"}, {"tasks", "metrics"}, {"config"},
    {"data", "training"}, {"models"}, {"generative"}, {"evaluation"},
    {"forecaster", "labelled", "chain", "ask", "dry_run", "machine", "devices"},
]
# who may import what of a floor below: rooms of one floor know nothing of each other, and these know less than their floor allows
NARROW = {
    "metrics": FLOORS[0],
    "training": FLOORS[0] | {"config"},
}
FROM_TRAINING = {room: {"checkpoint", "optim", "fit", "fitted"} for room in ("models", "generative")}   # never Run


def modules() -> dict[str, Path]:
    """Dotted name below ups -> file; a package by its own name."""
    paths = {path.relative_to(ROOT / "ups"): path for path in (ROOT / "ups").rglob("*.py")}
    return {".".join(path.with_suffix("").parts).removesuffix("__init__").rstrip("."): file for path, file in paths.items()}


def imports(text: str) -> set[str]:
    """Modules below ups that a file imports anywhere, also within functions and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ups":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "ups"}
    return {name.removeprefix("ups").removeprefix(".") for name in found}


def resolve(name: str, known: dict) -> str:
    """The module that `from a import b` reads: a.b where that is one, else a."""
    return name if name in known else name.rpartition(".")[0]


def floor(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def arrows() -> dict[str, set[str]]:
    known = modules()
    return {name: {resolve(found, known) for found in imports(path.read_text(encoding="utf-8"))} - {""}
            for name, path in known.items() if name}


def test_nothing_imports_upwards_and_rooms_of_a_floor_keep_apart():
    wrong = []
    for name, found in arrows().items():
        room = name.split(".")[0]
        for target in found:
            into = target.split(".")[0]
            is_below = into == room or floor(into) < floor(room) or (floor(into) == floor(room) and floor(room) in (0, 7))
            if not is_below or (into != room and into not in NARROW.get(room, {into})):
                wrong.append(f"{name} imports {target}")
            if into == "training" and target.split(".")[1] not in FROM_TRAINING.get(room, {target.split(".")[1]}):
                wrong.append(f"{name} imports {target}")
    assert not sorted(wrong)


def test_no_imports_go_in_a_circle():
    graph, done = arrows(), set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join((*path[path.index(name):], name))}"
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_scripts_and_benches_are_imported_by_nothing_of_the_product():
    scripts = {path.stem for path in ROOT.glob("*.py")} | {"bench", "tests"}
    files = [*ROOT.glob("*.py"), *(ROOT / "ups").rglob("*.py")]
    found = [f"{path.name} imports {name}" for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             for name in ([node.module] if isinstance(node, ast.ImportFrom) else
                          [alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
             if (name or "").split(".")[0] in scripts]
    assert not found


@pytest.mark.parametrize("module", ["ups", "ups.tasks", "ups.config", "ups.training.launch", "ups.interpreter", "ups.ask"])
def test_what_starts_without_torch_imports_none(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
