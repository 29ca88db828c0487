"""Numbers and names of every kind: those that a forecast, a file or a folder cannot take are refused in one
line."""

from pathlib import Path

import numpy as np
import pytest
from torch import nn
from user_files import overlay, section

import ups
from ups.config.load import load_config
from ups.tasks import require_name

PRETRAINED = Path(__file__).resolve().parents[2] / "pretrained"
U0 = np.sin(np.arange(256) / 256 * 2 * np.pi, dtype=np.float32)[None, None, None]  # batch, time, channel, x
NU = {"Nu": 0.1}


@pytest.fixture(scope="module")
def model():
    return ups.load(PRETRAINED)


def test_numbers_of_other_kinds_forecast_the_same(model):
    expected = model.forecast("burgers1d", U0, NU, num_frames=2)
    for given in (
        {"u0": np.ma.masked_array(U0)},
        {"num_frames": np.int64(2)},
        {"dt": np.float32(0.05)},
        {"parameters": {"Nu": np.float64(0.1)}},
        {"parameters": np.ma.masked_array([0.1])},
        {"parameters": [[0.1]]},
    ):
        found = model.forecast("burgers1d", **({"u0": U0, "parameters": NU, "num_frames": 2} | given))
        assert np.array_equal(found, expected), given


def declared(folder: Path, name: str) -> Path:
    np.save(folder / "u.npy", np.sin(np.arange(6 * 5 * 16)).reshape(6, 5, 16))
    return overlay(folder, section(folder, files=str(folder / "u.npy"), domain=[0, 1], dt=0.1), name)


@pytest.mark.parametrize(
    "name", ["a.b", "up/../../esc", "x" * 300, "", "a b", "1d", "*", "-x", "a\n", "train", "keys"]
)
def test_the_name_of_a_task_is_an_identifier(tmp_path, name):
    what = {"x" * 300: "of 300 characters; expected at most 255", "a\n": "with control characters; expected"}
    refusal = what.get(name, "cannot name a task; expected at most 64")
    with pytest.raises(ValueError, match=refusal) as caught:
        load_config(declared(tmp_path, name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["KS_2", "strömung", "class"])
def test_identifiers_are_names_of_tasks(tmp_path, name):
    assert load_config(declared(tmp_path, name)).cache_path(name).parent == tmp_path / "cache"


def test_no_name_of_a_task_is_an_attribute_of_torchs_modules():
    for name in dir(nn.ModuleDict()):
        with pytest.raises(ValueError, match="cannot name a task"):
            require_name(name)
