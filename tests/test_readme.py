"""README, the pages of docs/ and the notebook: what they name exists, their code runs in a fresh clone with a
shrunken configs/small.yaml."""

import dataclasses
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cases import cases
from commands import WORDS, of_page
from packages import PACKAGES

from ups.config.command import DEFAULT_OVERLAY
from ups.config.load import load_config, to_dict
from ups.config.schema import TaskConfig, UserTaskConfig
from ups.results import load

ROOT = Path(__file__).resolve().parent.parent
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
LAB = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs" / "lab").glob("*.md"))
}
RUN_PAGES = ("README.md", "docs/training.md", "docs/forecasts.md", "docs/tasks.md", "docs/own_data.md")
QUICK_PAGE = "docs/trust.md"  # its blocks need pretrained/ alone
OVERLAYS = cases("readme.overlays")  # replace configurations that the pages name: trained for seconds
IN_PLACE = cases("readme.in_place")  # command -> what runs in its place
# of my_data.py
SHORTER = {"standard_normal((80, n))": "standard_normal((24, n))", "range(10000)": "range(6500)"}


def blocks_of(page: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a page, without the stories, which test_stories.py runs."""
    text = re.sub(r"^## Story.*?(?=^## (?!Story))", "", PAGES[page], flags=re.S | re.M)
    return [
        (language, block.replace("\\\n", " "))
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
    ]


BLOCKS = {
    f"{page} {text.splitlines()[0][:50]}": (page, language, text)
    for page in RUN_PAGES
    for language, text in blocks_of(page)
    if "film" not in text  # of a story of docs/own_data.md
}
CHAIN = "docs/training.md make cache"  # the block that trains what the others use


def run(folder: Path, command: str) -> subprocess.CompletedProcess:
    return of_page(folder, command, HF_HOME=str(folder / "home"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The tree as a fresh clone has it, but for a small configs/small.yaml."""
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name in (*PACKAGES, "configs", "accelerate_configs", "docs", "pretrained", "bench"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__", "out"))
        elif path.suffix == ".py" or path.name in ("Makefile", "requirements.txt", "requirements-dev.txt"):
            shutil.copy(path, folder)
    for name, stands_in in (("tiny", "smoke"), ("seven", "pretrained")):
        (folder / "configs" / f"{stands_in}.yaml").rename(folder / "configs" / f"{name}.yaml")
    for name, overlay in OVERLAYS.items():
        text = yaml.safe_dump({**overlay, "run": {"name": name}})
        (folder / "configs" / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(clone) -> Path:
    """The clone after CHAIN, which names no configuration and no run."""
    for command in BLOCKS[CHAIN][2].splitlines():
        done = run(clone, command)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return clone


# ---------------------------------------------------------------- what the pages name


def code_of(text: str) -> list[str]:
    """Fenced, indented and inline code of a page."""
    plain = re.sub(r"```.*?```", "", text, flags=re.S)
    return [
        *re.findall(r"```\w*\n(.*?)```", text, re.S),
        *re.findall(r"^    (\S.*)$", plain, re.M),
        *re.findall(r"`([^`\n]+)`", plain),
    ]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *LAB])
def test_links_of_a_page_lead_somewhere(page):
    folder = (ROOT / page).parent
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", {**PAGES, **LAB}[page]):
        target = folder / path if path else ROOT / page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_targets_files_and_modules_that_a_page_names_exist(page):
    code = code_of(PAGES[page])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", makefile, re.M)[1].replace("\\\n", " ").split()
    named = {target for text in code for target in re.findall(r"(?<![\w./])make ([a-z][a-z0-9-]*)", text)}
    assert named <= {*targets}
    paths = {
        path
        for text in code
        for path in re.findall(r"(?<![\w/.*])((?:[\w.-]+/)*[\w-]+\.(?:py|sh|yaml|txt|md|toml))\b", text)
    }
    of_a_user = {path for path in paths if path.startswith("my")}
    generated = {"config.yaml", "report.html"}
    assert not [path for path in paths - of_a_user - generated if not (ROOT / path).exists()]
    modules = {module for text in code for module in re.findall(r"-m ((?:ups|bench)\.[\w.]*\w)", text)}
    assert not [module for module in modules if not (ROOT / f"{module.replace('.', '/')}.py").is_file()]


def test_pages_that_code_and_configurations_name_exist():
    files = (
        path for kind in ("py", "yaml") for path in ROOT.glob(f"**/*.{kind}") if ".venv" not in path.parts
    )
    named = {
        page
        for path in files
        for page in re.findall(r"(?<!\w)docs/[a-z_/]+\.md(?! of )", path.read_text("utf-8"))
    }
    assert not [page for page in named if not (ROOT / page).is_file()]


def dotted(values: dict, key: str = "") -> list[str]:
    """Every key of a configuration, and every section, with dots."""
    inner = [name for k, v in values.items() if isinstance(v, dict) for name in dotted(v, f"{key}{k}.")]
    return [*(f"{key}{name}" for name in values), *inner]


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_a_page_names_exist(page):
    """`train.hang_s` is a key of every stage, `task.TASK.reserve` one of every task."""
    keys = dotted(to_dict(load_config(None)))
    sections = "train|ddp|run|cache|tracker|data|evaluate|operator|diffusion|consistency|scoring|steady|task"
    text = re.sub(r"task\.\w+\.", "task.burgers1d.", " ".join(code_of(PAGES[page])))
    named = set(re.findall(rf"(?<![\w./-])((?:{sections})(?:\.(?!py\b)\w+)+)(?![\w/(.])", text))
    assert not [name for name in named if not any(f".{key}".endswith(f".{name}") for key in keys)]


@pytest.mark.parametrize("page", PAGES)
def test_overrides_of_a_page_are_understood(page):
    for text in re.findall(r"(?<=[ \"`])([a-z_]+(?:\.[a-z_0-9]+)+=(?:\[[^\]]*\]|[\w./-]+))", PAGES[page]):
        load_config(None, [text])


def test_the_page_on_user_data_lists_every_key_of_a_section():
    text = PAGES["docs/own_data.md"].split("## Every key")[1].split("\n## ")[0]
    listed = {*re.findall(r"^\| `(\w+)` \|", text, re.M)}
    every = {field.name for field in dataclasses.fields(UserTaskConfig)}
    # of every task; parameters are listed
    settings = {field.name for field in dataclasses.fields(TaskConfig)}
    found_by_reading = {"coordinates", "times"}  # domain and dt, where these name arrays
    assert every - settings - found_by_reading <= listed <= every


# ---------------------------------------------------------------- one default for scripts and make


@needs_make
def test_make_and_scripts_have_the_same_default_configuration(clone, monkeypatch):
    planned = subprocess.run(
        ["make", f"PYTHON={sys.executable}", "-n", "data"], cwd=clone, capture_output=True, text=True
    )
    assert (
        f"prepare_data.py --config {DEFAULT_OVERLAY.relative_to(ROOT)} run.name=small run.root=runs"
        in planned.stdout
    )
    config = yaml.safe_load(run(clone, "python prepare_data.py --show-config").stdout)
    assert config["run"] == {"name": "small", "root": "runs", "seed": 0}
    assert (config["data"]["root"], config["cache"]["root"]) == ("data/small", "cache/small")


@needs_make
@pytest.mark.slow
@pytest.mark.faults  # minutes: of the slow half
def test_stages_launched_without_arguments_after_make_cache_are_found_by_make_report(trained):
    results = load(trained / "runs" / "small" / "report")
    assert [*results.ensembles] == ["burgers1d_forced"] and [*results.steady] == ["darcy2d_grf"]
    assert not (trained / "runs" / "default").exists()
    assert {path.name for path in (trained / "cache").iterdir()} == {"small"}


@needs_make
@pytest.mark.slow
@pytest.mark.faults
def test_a_stage_launched_before_its_parent_ends_in_one_line_that_names_the_make_target(trained):
    done = run(trained, "accelerate launch --quiet train_diffusion.py run.name=empty")
    [line] = [line for line in done.stderr.splitlines() if "FAILED" in line]
    assert done.returncode != 0
    assert "stage operator of run empty is missing" in line
    assert "make operator RUN=empty" in line
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- every block


def test_the_first_block_of_readme_forecasts_what_it_says(tmp_path, monkeypatch, capsys):
    _, text = next(block for block in blocks_of("README.md") if block[0] == "python")
    (tmp_path / "block.py").write_text(text, encoding="utf-8")
    (tmp_path / "pretrained").symlink_to(ROOT / "pretrained")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("block.py")
    assert capsys.readouterr().out.strip() == text.strip().rsplit("# ", 1)[1]


def test_the_blocks_of_derivatives_run_on_the_published_weights(tmp_path, monkeypatch):
    """With less than half of the frames, and less noise, as they tell less of a viscosity."""
    monkeypatch.chdir(ROOT)
    text = "".join(text for kind, text in blocks_of(QUICK_PAGE) if kind)
    for long, short in {"num_frames=20": "num_frames=8", "0.01 * np.random": "0.001 * np.random"}.items():
        assert long in text
        text = text.replace(long, short)
    (tmp_path / "blocks.py").write_text(text)
    runpy.run_path(str(tmp_path / "blocks.py"))


@needs_make
@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("name", [name for name in BLOCKS if name != CHAIN])
def test_every_block_runs_where_make_train_has_run(trained, name):
    """In their order, as a reader would: a block of docs/own_data.md writes files that its commands read."""
    page, language, text = BLOCKS[name]
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    if text.startswith("# my_"):
        (trained / text.split()[1]).write_text(text, encoding="utf-8")
    if language == "yaml":
        section = yaml.safe_load(text)
        (trained / "section.yaml").write_text(
            yaml.safe_dump(section if "task" in section else {"task": section})
        )
        command = "python prepare_data.py --config section.yaml --show-config data.tasks=[burgers1d]"
        assert run(trained, command).returncode == 0
        return
    if language == "python":
        script = "my_data.py" if text.startswith("# my_data.py") else "block.py"
        if script == "block.py":
            first = next(block for kind, block in blocks_of(page) if kind == "python")
            (trained / script).write_text(text if text == first else first + text, encoding="utf-8")
        commands = [f"python {script}"]
    else:
        commands = [line for line in text.splitlines() if line.split()[0] in WORDS]
        assert commands
    for command in commands:
        done = run(trained, IN_PLACE.get(command, command))
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def test_every_replaced_command_is_on_a_page():
    lines = {line for _, language, text in BLOCKS.values() if not language for line in text.splitlines()}
    assert {*IN_PLACE} <= lines


@needs_make
@pytest.mark.slow
@pytest.mark.faults
def test_the_notebook_runs_as_it_is_where_make_train_has_run(trained):
    book = json.loads((trained / "docs" / "lab" / "tour.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(book["cells"]) <= 30 and not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    text = "\n".join("".join(cell["source"]) for cell in cells)
    assert text.count("train.steps=200") == 1
    text = text.replace("train.steps=200", "train.steps=20")
    checks = (
        "assert done.returncode == 0 and tuned.folder != model.folder and np.isfinite(change).all()",
        "before, after = (one.operator.state_dict() for one in (model, tuned))",
        "assert any((after[name] != value).any() for name, value in before.items())",
        "assert members.shape == (16, 10, 1, 128) and coarse.shape == (10, 1, 64)",
    )
    (trained / "tour.py").write_text(
        "\n".join(["import matplotlib", "matplotlib.use('Agg')", text, *checks]), encoding="utf-8"
    )
    done = run(trained, "python tour.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "was given a field on the grid" in done.stdout


@needs_make
@pytest.mark.slow
@pytest.mark.faults
def test_make_train_does_nothing_again_and_nothing_stale_missing_or_altered_is_up_to_date(trained):
    """The last test, as it removes the data."""
    results, page = (trained / "runs" / "small" / "report" / name for name in ("results.json", "report.html"))
    stamps = {
        path: path.stat().st_mtime_ns
        for folder in ("data/small", "cache/small", "runs/small")
        for path in (trained / folder).rglob("*.*")
    }
    again = run(trained, "make train")
    assert again.returncode == 0 and page in stamps
    assert again.stdout.count("up to date") == 3 + 3 + 5  # files of data, caches, four stages and the report

    changed = run(trained, "make operator ARGS=operator.train.steps=11")
    assert changed.returncode != 0 and "operator.train.steps 10 -> 11" in changed.stderr
    assert "runs/small/operator (rm -r) and run make operator RUN=small again" in changed.stderr
    included = trained / "configs" / "tiny.yaml"  # by configs/small.yaml
    before = included.read_text(encoding="utf-8")
    included.write_text(before.replace("run: {name", "run: {seed: 1, name"), encoding="utf-8")
    assert "run.seed 0 -> 1" in run(trained, "make operator").stderr
    included.write_text(before, encoding="utf-8")
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}

    page.rename(trained / "moved.html")
    missing = run(trained, "python -m ups.commands.stages report --of-report --config configs/small.yaml")
    assert missing.returncode == 3  # what make runs evaluate.py for
    assert "report.html: to do, report.html is missing or was altered" in missing.stdout
    (trained / "moved.html").rename(page)
    other = run(trained, "make -n report ARGS=run.name=other STAGES=operator").stdout
    named = re.findall(r"run.name=small run.root=\S+ run.name=other", other)
    assert named and len(named) == other.count("run.name=small")

    weights = trained / "runs" / "small" / "consistency" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    flipped = run(trained, "make train")
    assert flipped.returncode != 0 and "as done.json says" in flipped.stderr
    assert "consistency/model.safetensors is " in flipped.stderr
    content[-1] ^= 1
    weights.write_bytes(content)

    wider = run(trained, "python evaluate.py operator.model.width=64")
    assert wider.returncode != 0
    assert "started with another configuration (operator.model.width " in wider.stderr
    for path in (trained / "data" / "small").rglob("*.hdf5"):  # of another seed, beside the old caches
        path.unlink()
    assert run(trained, "make data ARGS=data.seed=7").returncode == 0
    page.unlink()
    foreign = run(trained, "python evaluate.py")
    assert foreign.returncode != 0 and "hold other values than those that" in foreign.stderr
    assert results.is_file() and not page.exists()
