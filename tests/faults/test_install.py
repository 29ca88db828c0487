"""The package elsewhere: a wheel forecasts with the oldest and the newest versions that pyproject.toml
allows, and its command works; the clone that make venv installs.

pip downloads all packages but torch: the new environments link to torch, and to what torch requires, of the
environment that runs the test. So the range of torch is tested at the version of requirements.txt alone.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packages import PACKAGES

import prepare_data
import ups
from ups.commands import predict
from ups.common.place import ROOT

RANGES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("data", "train")
USE = """
import importlib.util, os, sys
import h5py, numpy as np, scipy.io, xarray, zarr
import ups, ups_solvers
import ups.report.report, ups.training.run   # with accelerate and matplotlib
from ups.userdata.readers import open_store

assert ROOT not in ups.__file__ + ups_solvers.__file__, ups.__file__
assert "py.typed" in os.listdir(os.path.dirname(ups.__file__))
assert not any(map(importlib.util.find_spec, ("wandb", "tensorboard")))
model = ups.load(ROOT + "/pretrained")
x = np.arange(256) / 256
u0 = np.sin(2 * np.pi * x)[None].astype("float32")
u = model.forecast("burgers1d", u0, {"Nu": 0.01}, num_frames=5)
labelled = model.forecast("burgers1d", xarray.DataArray(u0[0], {"x": x}, ("x",)), {"Nu": 0.01}, num_frames=5)
np.testing.assert_allclose(labelled, u[:, 0])
data = xarray.Dataset({"u": (("time", "x"), u[:, 0])})
with h5py.File("u.nc", "w") as file:  # netCDF-4
    file["u"] = u[:, 0]
data.to_netcdf("classic.nc", engine="scipy")
data.to_zarr("u.zarr")
scipy.io.savemat("u.mat", {"u": u[:, 0]})
for name in ("u.nc", "classic.nc", "u.zarr", "u.mat"):
    with open_store(name) as store:
        np.testing.assert_array_equal(store.read("u", (slice(None), slice(None))), u[:, 0])
np.save("u.npy", u)
"""


def link_torch(folder: Path) -> None:
    """Fill `folder` with links to torch and the packages that it requires."""
    folder.mkdir()
    waiting, found = ["torch"], set()
    while waiting:
        name = waiting.pop()
        if name in found or not any(metadata.distributions(name=name)):
            continue
        found.add(name)
        package = metadata.distribution(name)
        for top in {path.parts[0] for path in package.files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(package.locate_file(top))
        waiting += [
            re.match(r"[\w.-]+", text)[0] for text in package.requires or [] if "extra ==" not in text
        ]


def oldest(text: str) -> str:
    """The requirement of the lowest version of a range: numpy>=1.26,<3 -> numpy==1.26"""
    return text.split(",")[0].replace(">=", "==")


def copy_clone(folder: Path) -> None:
    for name in (*PACKAGES, "configs", "accelerate_configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    names = ("Makefile", "pyproject.toml", "README.md", "LICENSE", "requirements*.txt", "*.py")
    for path in (path for name in names for path in ROOT.glob(name)):
        shutil.copy(path, folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel") / "clone"
    copy_clone(folder)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "dist",
        ".",
    ]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    return next((folder / "dist").glob("*.whl"))


def install(folder: Path, *words: str) -> Path:
    """The folder of the programs of a new environment, with torch, into which pip installs `words`."""
    link_torch(folder / "torch")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    (site / "torch.pth").write_text(str(folder / "torch"), encoding="utf-8")
    programs = folder / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "-q", "--no-compile"]
    done = run(folder, *pip, *words)
    assert done.returncode == 0, done.stderr
    return programs


def run(folder: Path, *words: str | Path) -> subprocess.CompletedProcess:
    """Without PYTHONPATH: a worker of pytest puts the clone there, whose ups.egg-info pip takes for an
    installation."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MAKE"))}
    return subprocess.run(words, cwd=folder, env=kept, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_the_wheel_forecasts_with_the_ends_of_its_ranges(wheel, tmp_path, which):
    ranges = RANGES["dependencies"] + [
        text for name in EXTRAS for text in RANGES["optional-dependencies"][name]
    ]
    limits = tmp_path / "constraints.txt"
    limits.write_text(
        "\n".join(oldest(text) for text in ranges if not text.startswith("torch")) * (which == "oldest"),
        encoding="utf-8",
    )
    programs = install(tmp_path, "-c", str(limits), f"{wheel}[{','.join(EXTRAS)}]")
    done = run(tmp_path, programs / "python", "-c", f"ROOT = {str(ROOT)!r}{USE}")
    assert done.returncode == 0, done.stderr
    u0 = np.sin(2 * np.pi * np.arange(256) / 256)[None].astype("float32")
    here = ups.load(ROOT / "pretrained").forecast("burgers1d", u0, {"Nu": 0.01}, num_frames=5)
    np.testing.assert_allclose(np.load(tmp_path / "u.npy"), here, rtol=1e-5, atol=1e-6)
    if which == "newest":
        use_the_command(programs, tmp_path)


def use_the_command(programs: Path, folder: Path) -> None:
    """`ups` of a wheel: describes and forecasts; training, which needs a clone, is refused in one line."""
    few = "data.tasks=[burgers1d] task.burgers1d.parameters=[0.01] task.burgers1d.num_trajectories=20"
    given = ["--config", str(ROOT / "configs" / "pretrained.yaml"), *few.split(), f"data.root={folder}"]
    assert prepare_data.main(given) == 0
    [data] = (folder / "burgers1d").glob("*.hdf5")
    words = ["--run", str(ROOT / "pretrained"), "--task", "burgers1d", "--context", "1", "--rows", ":2"]
    assert predict.main(["--input", str(data), *words, "--output", f"{folder}/o.h5", "--frames", "3"]) == 0
    right = predict.open_data(folder / "o.h5", "burgers1d").read(0, 2)
    for name, command in (("script", [programs / "ups"]), ("module", [programs / "python", "-m", "ups"])):
        helped = run(folder, *command)
        assert helped.returncode == 0 and "ups describe FILE" in helped.stdout, helped.stderr
        described = run(folder, *command, "describe", data)
        assert "include: configs/small.yaml" in described.stdout, described.stderr
        done = run(folder, *command, "forecast", data, *words, "--output", f"{name}.h5", "--frames", "3")
        assert done.returncode == 0, done.stderr
        u = predict.open_data(folder / f"{name}.h5", "burgers1d").read(0, 2)
        np.testing.assert_allclose(u, right, rtol=1e-5, atol=1e-6)
    (folder / "my.yaml").write_text("include: configs/small.yaml\n")
    for command in ("check", "train", "report"):
        done = run(folder, programs / "ups", command, "my.yaml")
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert "is installed without a clone of UPS; expected one" in done.stderr


@pytest.mark.slow
def test_make_venv_installs_the_clone_so_that_a_script_in_any_folder_imports_it(tmp_path):
    clone, notes = tmp_path / "clone", tmp_path / "notes"
    notes.mkdir()
    copy_clone(clone)
    planned = run(clone, "make", "-n", "venv").stdout
    assert re.search(r"pip install .*-r requirements-dev\.txt -e \.$", planned, re.M)
    programs = install(tmp_path, "--no-build-isolation", "-e", f"{clone}[data,train]")
    (notes / "script.py").write_text("import ups\nprint(ups.__file__)\nups.load('nowhere')\n")
    done = run(notes, programs / "python", "script.py")
    assert done.stdout.strip() == str(clone / "ups" / "__init__.py")
    assert f"Run make -f {clone}/Makefile operator RUN=nowhere." in done.stderr
    (notes / "my.yaml").write_text("include: configs/smoke.yaml\n")
    done = run(notes, programs / "ups", "train", "my.yaml", "data.tasks=[no]")
    assert "unknown task 'no'" in done.stderr or "it lacks" in done.stderr, done.stderr
