"""Imports: a file of ups/ imports from its own package or from layers below, never in a cycle; `ups_solvers`
knows nothing of ups, and ups needs it in one place; what make runs often does not import torch."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import python
from packages import PACKAGES, product, top_imports, tree

ROOT = Path(__file__).resolve().parent.parent
LAYERS = [
    {"common"},
    {"tasks", "metrics", "results"},
    {"userdata", "select"},
    {"config"},
    {"data", "training"},
    {"models"},
    {"generative"},
    {"evaluation"},
    {"report"},
    {
        "commands",
        "forecaster",
        "forecast_band",
        "forecast_corrector",
        "forecast_derivatives",
        "forecast_inputs",
    }
    | {
        "forecast_measured",
        "forecast_start",
        "forecast_xarray",
        "analysis",
        "inversion",
        "hub",
        "__main__",
    },
]
TOP = len(LAYERS) - 1
# packages that may import less than their layer allows
NARROW = {"metrics": LAYERS[0], "training": LAYERS[0] | {"config"}}
OF_TRAINING = {"artifact", "fit", "folder", "optim", "weights"}
FROM_TRAINING = dict.fromkeys(("models", "generative"), OF_TRAINING)  # never Run but its type


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name below ups -> file; a package by its own name."""
    paths = {path.relative_to(root / "ups"): path for path in (root / "ups").rglob("*.py")}
    return {
        ".".join(path.with_suffix("").parts).removesuffix("__init__").rstrip("."): file
        for path, file in paths.items()
    }


def imports(path: Path, for_types: bool = True) -> set[str]:
    """Modules below ups that a file imports anywhere, also within functions and for types alone."""
    found, nodes = set(), [*ast.walk(tree(path))]
    blocks = [node for node in nodes if isinstance(node, ast.If)]
    typed = {n for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for n in block.body}
    for node in nodes if for_types else {*nodes} - typed:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ups":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "ups"}
    return {name.removeprefix("ups").removeprefix(".") for name in found}


def resolve(name: str, known: dict) -> str:
    """The module that `from a import b` reads: a.b where that is one, else a."""
    return name if name in known else name.rpartition(".")[0]


def layer(package: str) -> int:
    return next(number for number, packages in enumerate(LAYERS) if package in packages)


def import_graph(root: Path = ROOT, for_types: bool = True) -> dict[str, set[str]]:
    known = modules(root)
    return {
        name: {resolve(found, known) for found in imports(path, for_types)} - {""}
        for name, path in known.items()
        if name
    }


def forbidden_imports(root: Path = ROOT) -> list[str]:
    wrong, needed = [], import_graph(root, for_types=False)
    for name, targets in import_graph(root).items():
        package = name.split(".")[0]
        for target in targets:
            other, *module = target.split(".")
            is_below = layer(other) < layer(package)
            is_beside = layer(other) == layer(package) in (0, TOP)
            is_narrow = other == package or other in NARROW.get(package, {other})
            may_train = other != "training" or module[0] in FROM_TRAINING.get(package, module)
            may_train = may_train or target not in needed[name]
            if not (other == package or is_below or is_beside) or not is_narrow or not may_train:
                wrong.append(f"{name} imports {target}")
    return sorted(wrong)


def cycle(root: Path = ROOT) -> list[str]:
    """Modules that import each other in a cycle, in order."""
    graph, done = import_graph(root), set()

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


def imports_of_ups(root: Path = ROOT) -> list[str]:
    """Files of ups_discovery that import ups."""
    return [
        f"{path.relative_to(root)} imports {name}"
        for path in sorted(root.glob("ups_discovery/*.py"))
        for name in sorted(imports(path))
    ]


def scripts_imported(root: Path = ROOT) -> list[str]:
    scripts = {path.stem for path in root.glob("*.py")} | {"bench", "tests"}
    files = [*root.glob("*.py"), *root.glob("ups*/**/*.py")]
    return [f"{path.stem} imports {name}" for path in files for name in top_imports(path) & scripts]


def test_the_solvers_import_no_file_of_ups_and_ups_imports_them_in_one_place():
    allowed = {"numpy", "torch", "ups_solvers"} | sys.stdlib_module_names
    files = list((ROOT / "ups_solvers").glob("*.py"))
    assert files and not set.union(*map(top_imports, files)) - allowed
    users = [name for name, path in modules().items() if "ups_solvers" in top_imports(path)]
    assert users == ["data.generate"]


def test_nothing_imports_from_layers_above():
    assert not forbidden_imports()


def test_no_imports_go_in_a_cycle():
    assert not cycle()


def test_the_discovery_of_equations_does_not_import_ups():
    assert not imports_of_ups()


def test_the_package_imports_no_script_benchmark_or_test():
    assert not scripts_imported()


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        (
            "ups/training/run.py",
            "def f():\n    from ups.data import cache",
            "training.run imports data.cache",
        ),
        (
            "ups/models/operator.py",
            "from ups.training.run import Run",
            "models.operator imports training.run",
        ),
        ("train_steady.py", "from train_diffusion import main", "train_steady imports train_diffusion"),
        ("ups/common/files.py", "import bench.compare", "files imports bench"),
        (
            "ups_discovery/terms.py",
            "def f():\n    from ups.common import files",
            "ups_discovery/terms.py imports common.files",
        ),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, path, text, words):
    for name in (
        "tasks/families config/__init__ metrics/errors training/run data/cache models/operator common/files"
    ).split():
        (tmp_path / f"ups/{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"ups/{name}.py").touch()
    (tmp_path / "ups_discovery").mkdir()
    for name in ("train_diffusion.py", "train_steady.py"):
        (tmp_path / name).touch()

    def found() -> list[str]:
        return [*forbidden_imports(tmp_path), *scripts_imported(tmp_path), *imports_of_ups(tmp_path)]

    assert not [*found(), *cycle(tmp_path)]
    (tmp_path / path).write_text(text)
    assert words in found()


SERVING = {"boundary", "equation", "seeds", "spectral", "terms"}  # modules of ups_discovery


def test_loading_weights_imports_nothing_that_only_fits_solves_or_supervises():
    done = python("-c", "import sys, ups; ups.load('pretrained'); print(*sys.modules)")
    loaded = done.stdout.split()
    assert done.returncode == 0 and "ups.models.bases.equation" in loaded, done.stderr
    assert {name for name in loaded if name.startswith("ups_discovery.")} <= {
        f"ups_discovery.{name}" for name in SERVING
    }
    never = {"ups.common.user_solver", "ups.models.bases.reduced_rank", "ups.training.optim"}
    assert not (never | {"ups_solvers", "ups_launch"}) & {*loaded}
    ours = [name for name in loaded if name.split(".")[0] in PACKAGES]
    assert len(ours) <= 45, ours


def test_the_supervisor_knows_no_ups_and_one_file_of_ups_knows_the_supervisor():
    using = {path.relative_to(ROOT): top_imports(path) for path in ROOT.glob("ups*/**/*.py")}
    assert not [name for name, found in using.items() if name.parts[0] == "ups_launch" and "ups" in found]
    users = [name for name, found in using.items() if name.parts[0] == "ups" and "ups_launch" in found]
    assert users == [Path("ups/training/activity.py")]


def test_training_needs_no_supervisor():
    """None in sys.modules makes the import fail, as of a package that is not installed."""
    absent = "import sys; sys.modules['ups_launch'] = None; from ups.training import activity, run; "
    used = "guard = activity.Activity(0, 1, 'operator', 1.0).guard; assert guard is None; "
    done = python("-c", f"{absent}{used}assert not activity.send_event('finished')")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("ups.tasks ups.config.command ups_launch.__main__", {"torch", "accelerate", "numpy"}),
        ("ups ups.commands.interpreter ups.commands.stages ups_discovery.boundary", {"torch", "accelerate"}),
    ],
)
def test_what_runs_often_starts_without_heavy_packages(modules, heavy):
    code = f"import importlib, sys\nfor name in '{modules}'.split():\n importlib.import_module(name)"
    done = python("-c", f"{code}\n assert not {heavy} & {{*sys.modules}}, name")
    assert done.returncode == 0, done.stderr


def test_the_diagram_of_the_design_page_is_that_of_the_imports():
    done = python("docs/diagram.py")
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert f"```mermaid\n{done.stdout}```" in page, "run python docs/diagram.py --write"


# ---------------------------------------------------------------- collectives, trackers, messages, types


COLLECTIVES = {
    *(
        "all_reduce all_gather all_gather_object broadcast broadcast_object_list barrier reduce gather "
        "gather_object scatter reduce_scatter all_to_all send recv monitored_barrier wait_for_everyone"
    ).split()
}
OF_RUN = {
    *(
        "gather agreed reduce_sum attach update keep_best keep_if finish take_best ema_weights _unshard"
    ).split()
}


def calls(top: ast.AST, within: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.Call, tuple[ast.AST, ...]]]:
    """Every call with the nodes around it."""
    for node in ast.iter_child_nodes(top):
        if isinstance(node, ast.Call):
            yield node, within
        yield from calls(node, (*within, node))


@pytest.fixture(scope="module")
def calls_of() -> dict[Path, list[tuple[ast.Call, tuple[ast.AST, ...]]]]:
    """Every call of the scripts and packages, by file."""
    return {path: [*calls(tree(path))] for path in product()}


def named(call: ast.Call) -> tuple[str, str]:
    """(owner, name) of owner.name(...), ("", name) of name(...)."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return ast.unparse(function.value), function.attr
    return "", getattr(function, "id", "")


def test_collectives_are_in_two_modules_and_each_says_that_it_waits(calls_of):
    for path, found in calls_of.items():
        for call, within in found:
            owner, name = named(call)
            if (
                owner in ("dist", "torch.distributed", "self.accelerator", "accelerator", "utils")
                and name in COLLECTIVES
            ):
                # the doctor's probe, in processes of its own with their own limit
                if path.name == "machine_check.py":
                    continue
                assert path.name in ("ranks.py", "update.py"), f"{path}:{call.lineno}"
                texts = [
                    ast.unparse(item.context_expr)
                    for node in within
                    if isinstance(node, ast.With)
                    for item in node.items
                ]
                assert any("activity.waiting(" in text for text in texts), f"{path}:{call.lineno}"


def test_no_collective_is_called_by_one_rank_only(calls_of):
    for path, found in calls_of.items():
        for call, within in found:
            owner, name = named(call)
            if (
                owner in ("run", "self", "ranks", "self.ranks")
                and name in OF_RUN
                or owner == "dist"
                and name in COLLECTIVES
            ):
                tests = [
                    ast.unparse(node.test)
                    for node in within
                    if isinstance(node, (ast.If, ast.IfExp, ast.While))
                ]
                tests += [ast.unparse(node) for node in within if isinstance(node, ast.BoolOp)]
                sided = [text for text in tests if re.search(r"is_main|\brank\b", text)]
                assert not sided, f"{path}:{call.lineno}: {name} under {sided}"


def test_ranks_are_known_before_anything_is_shared_out_and_no_loader_shares_out_by_itself(calls_of):
    for path, found in calls_of.items():
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"DataLoader|DistributedSampler|prepare_data_loader|accelerator\.prepare\(", text
        ), path
        lines = {
            name: [call.lineno for call, _ in found if named(call)[1] == name] for name in ("start", "shard")
        }
        if path.name.startswith("train_") and lines["shard"]:
            start = [call.lineno for call, _ in found if named(call) in (("Run", "start"), ("", "start_run"))]
            assert start and min(start) < min(lines["shard"]), path


def test_every_selection_by_validation_is_one_of_at_most_ten_rules_in_one_file(calls_of):
    """A rule is a function that calls `choose`; the tenth keeps weights by scores (`Run.keep_best`)."""
    deciding = [
        (path, within)
        for path, found in calls_of.items()
        for call, within in found
        if named(call) == ("", "choose")
    ]
    assert {path.name for path, _ in deciding} == {"select.py"}
    rules = {
        next(node.name for node in within if isinstance(node, ast.FunctionDef)) for _, within in deciding
    }
    assert 0 < len(rules) <= 9, rules
