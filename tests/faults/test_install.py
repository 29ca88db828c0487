"""The wheel elsewhere: a forecast with the oldest and the newest versions that pyproject.toml allows.

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

import ups
from ups.config import ROOT

RANGES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("data", "train")
USE = """
import importlib.util, sys
import h5netcdf, numpy as np, scipy.io, xarray, zarr
import ups
import ups.report.report, ups.training.run   # with accelerate and matplotlib
from ups.userdata.readers import open_store

assert ROOT not in ups.__file__, ups.__file__
assert not any(map(importlib.util.find_spec, ("wandb", "tensorboard")))
model = ups.load(ROOT + "/pretrained")
x = np.arange(256) / 256
u0 = np.sin(2 * np.pi * x)[None].astype("float32")
u = model.forecast("burgers1d", u0, {"Nu": 0.01}, num_frames=5)
labelled = model.forecast("burgers1d", xarray.DataArray(u0[0], {"x": x}, ("x",)), {"Nu": 0.01}, num_frames=5)
np.testing.assert_allclose(labelled, u[:, 0])
data = xarray.Dataset({"u": (("time", "x"), u[:, 0])})
data.to_netcdf("u.nc", engine="h5netcdf")
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "ups", folder / "ups", ignore=shutil.ignore_patterns("__pycache__"))
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


@pytest.mark.slow
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_the_wheel_forecasts_with_the_ends_of_its_ranges(wheel, tmp_path, which):
    link_torch(tmp_path / "torch")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "torch.pth").write_text(str(tmp_path / "torch"), encoding="utf-8")
    ranges = RANGES["dependencies"] + [
        text for name in EXTRAS for text in RANGES["optional-dependencies"][name]
    ]
    limits = tmp_path / "constraints.txt"
    limits.write_text(
        "\n".join(oldest(text) for text in ranges if not text.startswith("torch")) * (which == "oldest"),
        encoding="utf-8",
    )
    wanted = f"{wheel}[{','.join(EXTRAS)}]"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "-q",
            "--no-compile",
            "-c",
            limits,
            wanted,
        ],
        check=True,
        timeout=300,
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-c", f"ROOT = {str(ROOT)!r}{USE}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    u0 = np.sin(2 * np.pi * np.arange(256) / 256)[None].astype("float32")
    here = ups.load(ROOT / "pretrained").forecast("burgers1d", u0, {"Nu": 0.01}, num_frames=5)
    np.testing.assert_allclose(np.load(tmp_path / "u.npy"), here, rtol=1e-5, atol=1e-6)
