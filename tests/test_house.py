"""The house: a file of ups/ imports from its own floor's folder or from floors below, never in a circle;
the public face is lazy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [
    {"common"},
    {"tasks", "metrics"},
    {"userdata"},
    {"config"},
    {"data", "training"},
    {"models"},
    {"generative"},
    {"evaluation"},
    {"report"},
    {"commands", "forecaster", "forecast_inputs", "forecast_xarray"},
]
TOP = len(FLOORS) - 1
# packages that may import less than their floor allows
NARROW = {"metrics": FLOORS[0], "training": FLOORS[0] | {"config"}}
OF_TRAINING = {"checkpoint", "optim", "fit", "fitted", "folder", "stage"}
FROM_TRAINING = {room: OF_TRAINING for room in ("models", "generative")}  # never Run


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name below ups -> file; a package by its own name."""
    paths = {path.relative_to(root / "ups"): path for path in (root / "ups").rglob("*.py")}
    return {
        ".".join(path.with_suffix("").parts).removesuffix("__init__").rstrip("."): file
        for path, file in paths.items()
    }


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


def arrows(root: Path = ROOT) -> dict[str, set[str]]:
    known = modules(root)
    return {
        name: {resolve(found, known) for found in imports(path.read_text(encoding="utf-8"))} - {""}
        for name, path in known.items()
        if name
    }


def wrong_arrows(root: Path = ROOT) -> list[str]:
    """Every import that the floors forbid, in words."""
    wrong = []
    for name, found in arrows(root).items():
        room = name.split(".")[0]
        for target in found:
            into = target.split(".")[0]
            is_below = (
                into == room
                or floor(into) < floor(room)
                or (floor(into) == floor(room) and floor(room) in (0, TOP))
            )
            if not is_below or (into != room and into not in NARROW.get(room, {into})):
                wrong.append(f"{name} imports {target}")
            if into == "training" and target.split(".")[1] not in FROM_TRAINING.get(
                room, {target.split(".")[1]}
            ):
                wrong.append(f"{name} imports {target}")
    return sorted(wrong)


def circle(root: Path = ROOT) -> list[str]:
    """Modules that import each other in a circle, in order; empty if there is none."""
    graph, done = arrows(root), set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        found = (
            []
            if name in done
            else next((way for target in graph[name] if (way := visit(target, [*path, name]))), [])
        )
        done.add(name)
        return found

    return next((way for name in graph if (way := visit(name, []))), [])


def scripts_imported(root: Path = ROOT) -> list[str]:
    """What of the product imports a script, a benchmark or a test, in words."""
    scripts = {path.stem for path in root.glob("*.py")} | {"bench", "tests"}
    files = [*root.glob("*.py"), *(root / "ups").rglob("*.py")]
    return [
        f"{path.stem} imports {name}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        if (name or "").split(".")[0] in scripts
    ]


def test_nothing_imports_upwards_and_rooms_of_a_floor_keep_apart():
    assert not wrong_arrows()


def test_no_imports_go_in_a_circle():
    assert not circle()


def test_scripts_and_benches_are_imported_by_nothing_of_the_product():
    assert not scripts_imported()


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("ups/tasks/burgers.py", "from ups.config import load_config", "tasks.burgers imports config"),
        ("ups/tasks/burgers.py", "from ups.metrics import errors", "tasks.burgers imports metrics.errors"),
        (
            "ups/training/run.py",
            "def f():\n    from ups.data import cache",
            "training.run imports data.cache",
        ),
        ("ups/training/run.py", "from ups.tasks import burgers", "training.run imports tasks.burgers"),
        (
            "ups/models/operator.py",
            "from ups.training.run import Run",
            "models.operator imports training.run",
        ),
        ("ups/data/cache.py", "import ups.training.run", "data.cache imports training.run"),
        ("train_steady.py", "from train_diffusion import main", "train_steady imports train_diffusion"),
        ("ups/common/files.py", "import bench.compare", "files imports bench.compare"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, path, text, words):
    for name in (
        "tasks/burgers",
        "config/__init__",
        "metrics/errors",
        "training/run",
        "data/cache",
        "models/operator",
        "common/files",
    ):
        (tmp_path / f"ups/{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"ups/{name}.py").touch()
    for name in ("train_diffusion.py", "train_steady.py"):
        (tmp_path / name).touch()
    assert not [*wrong_arrows(tmp_path), *scripts_imported(tmp_path), *circle(tmp_path)]
    (tmp_path / path).write_text(text)
    assert words in [*wrong_arrows(tmp_path), *scripts_imported(tmp_path)]


def test_a_circle_is_found(tmp_path):
    (tmp_path / "ups/data").mkdir(parents=True)
    (tmp_path / "ups/data/one.py").write_text("from ups.data.two import x")
    (tmp_path / "ups/data/two.py").write_text("def f():\n    from ups.data.one import y")
    way = circle(tmp_path)
    assert way[0] == way[-1] and set(way) == {"data.one", "data.two"}


@pytest.mark.parametrize(
    "module",
    [
        "ups",
        "ups.tasks",
        "ups.config",
        "ups.training.launch",
        "ups.commands.interpreter",
        "ups.commands.stages",
    ],
)
def test_what_starts_without_torch_imports_none(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
