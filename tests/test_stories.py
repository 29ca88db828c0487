"""The two stories of docs/own_data.md run as they are written, with fewer steps of training."""

import re
import shutil
from pathlib import Path

import pytest
import xarray
from commands import of_page
from packages import PACKAGES

from ups.results import load

ROOT = Path(__file__).resolve().parent.parent
STORIES = re.findall(
    r"^## Story: (.*?)(?=^## )", (ROOT / "docs/own_data.md").read_text(encoding="utf-8"), re.S | re.M
)


def run(folder, command):
    done = of_page(folder, command.replace("train.steps=60", "train.steps=4"), 300, TOPOLOGY="cpu")
    assert done.returncode == 0, command + done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def outputs_of(folder, story):
    """What the commands of a story print, in a folder that has the project's scripts."""
    for path in (
        *ROOT.glob("*.py"),
        *(ROOT / name for name in ("Makefile", *PACKAGES, "configs", "accelerate_configs")),
    ):
        (folder / path.name).symlink_to(path)
    (folder / "my").mkdir()
    outputs = []
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", story, re.S | re.M):
        if language == "python":
            (folder / "block.py").write_text(text, encoding="utf-8")
        outputs += [
            run(folder, command) for command in (["python block.py"] if language else text.splitlines())
        ]
    return outputs


@pytest.mark.slow
@pytest.mark.faults  # whole chains, most of a minute each
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.split()[0])
def test_a_story_ends_with_its_forecast(tmp_path, story):
    outputs = outputs_of(tmp_path, story)
    if story.startswith("sea"):
        later = xarray.open_dataset(tmp_path / "my/forecast.nc").sst
        task = load(tmp_path / "runs/sst/report").tasks["sst"]
        assert "sst: 9% of its cells are a mask" in outputs[2] and "sst: Usable: " in outputs[3]
        assert task.number("operator", "nrmse") < 0.5 * task.number("seasonal_climatology", "nrmse")
        assert later.isnull().mean() == pytest.approx(0.09, abs=0.005) and later.latitude[0] == 52.5
        assert str(later.time.values[0]).startswith("2004-01-01") and later.attrs["units"] == "K"
    else:
        [[terms]] = [re.findall(r"∂t usol = (.*)", text) for text in outputs if "∂t usol" in text]
        for term in ("usol (∂x usol)", "∂xx usol", "∂xxxx usol"):
            assert (
                abs(float(re.search(rf"- ?\(([\d.]+) ± [\d.]+\) {re.escape(term)}", terms)[1]) - 1) < 0.02
            ), terms
        assert float(outputs[-1].split()[-1]) < 0.05
