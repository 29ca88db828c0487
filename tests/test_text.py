"""Text that is not ours cannot become code, mark-up, a command of the terminal or a path."""

import subprocess
import sys
import unicodedata
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import cases
from user_files import overlay

from ups.common.text import (
    file_stem,
    frames_ahead,
    markdown,
    printable,
    require_plain_name,
    require_plain_text,
)
from ups.config.load import load_config
from ups.userdata.readers import open_store

ROOT = Path(__file__).resolve().parent.parent
# end of a line, escape code, C1, bell, NUL, Unicode's ends of lines, a direction, half a character
STRANGE = ("\n", "\x1b[31m", "\x9b1m", "\a", "\0", "\u2028", "\u2029", "\u202e", "\ud800")
WAVES = np.sin(np.arange(12)[:, None, None] + np.arange(8)[:, None] / 3 + np.arange(16) / 2).astype("f4")


@pytest.mark.parametrize("sign", STRANGE)
def test_control_characters_are_shown_and_refused_in_names(sign):
    text = printable(f"a{sign}b")
    assert text.isprintable() and text.startswith("a\\") and text.endswith("b")
    for value in (f"a{sign}b", {f"a{sign}b": 1}, [{"units": {"u": f"a{sign}b"}}]):
        with pytest.raises(ValueError, match=r"^my\.h5 holds the name .*Rename it\.$"):
            require_plain_text(value, "my.h5")
    assert require_plain_name("ü/µ °C", "my.h5") == "ü/µ °C" and require_plain_name("u" * 255, "my.h5")
    with pytest.raises(ValueError, match=r"^my\.h5 holds the name .* of 256 characters; .* Rename it\.$"):
        require_plain_name("a/" + "u" * 256, "my.h5")


def test_names_that_nest_or_repeat_without_end_are_looked_at_once():
    tree = ["u"]
    for _ in range(100):
        tree = [tree, tree]
    tree[0].append(tree)
    require_plain_text(tree, "my.yaml")


def test_different_texts_have_different_files_in_the_same_folder():
    texts = ["u", "u (m/s)", "u (m s)", "u_(m_s)", "../u", "", ".", "..", "-rf", "a\0", "µ", "x" * 999]
    texts += ["\ud800", "\ud801"]
    stems = [file_stem(text) for text in [*texts, *map(file_stem, texts)]]
    assert len({*stems[: len(texts)]}) == len(texts)
    for text in texts[1:]:  # a text that is another one's file name
        assert file_stem(file_stem(text)) != file_stem(text)
    for stem in stems:
        assert stem[0] not in ".-" and len(stem) < 150 and stem.isascii() and "/" not in stem
    assert file_stem("burgers1d_median_error_u") == "burgers1d_median_error_u"


@pytest.mark.parametrize(("text", "shown"), cases("text.markdown"))
def test_markdown_shows_text_as_it_is(text, shown):
    assert markdown(text) == shown.replace(r"\x1b", r"\\x1b")


def test_a_command_prints_no_control_characters():
    code = (
        "import sys, warnings\nfrom ups.config.command import run_script\n"
        "def main():\n print('out \\x1b[2J\\u202e\\ud800 end')\n warnings.warn('warned \\x1b]0;x\\a')\n"
        " raise ValueError('my\\x1b[31m.h5\\r is odd\\nsecond line')\nrun_script(main, 'script')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60)
    out, errors = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 1 and out == "out \\x1b[2J\\u202e\\ud800 end\n"
    assert errors.endswith("script: my\\x1b[31m.h5\\r is odd\nsecond line\n")
    assert "warned \\x1b]0;x\\x07" in errors
    assert not any(unicodedata.category(letter) == "Cc" for letter in (out + errors).replace("\n", ""))


# ---- data files


@pytest.mark.parametrize("what", ["group", "attribute", "attribute of an array", "axis"])
def test_names_of_groups_attributes_and_axes_are_looked_at(tmp_path, what):
    path, name = tmp_path / "my.h5", "x\x1b[31m"
    with h5py.File(path, "w") as file:
        file["u"] = WAVES
        if what == "group":
            file[f"{name}/u"] = WAVES
        elif what == "axis":
            for number, label in enumerate(("run", "time", name)):
                file["u"].dims[number].label = label
        else:
            (file if what == "attribute" else file["u"]).attrs[name] = 1.0
    with pytest.raises(ValueError, match=r"my\.h5 holds the name .*Rename it"), open_store(path) as store:
        store.names(), store.array("u"), store.attributes(), store.attributes("u")


def test_a_file_whose_own_name_has_a_control_character_is_refused(tmp_path):
    path = tmp_path / "my\n\x1b[31m.npy"
    np.save(path, WAVES)
    with pytest.raises(ValueError) as caught:
        open_store(path)
    assert str(caught.value).isprintable()


SECTION = {"layout": {"u": ["trajectory", "time", "x"]}, "boundary": "periodic", "domain": [0, 1], "dt": 0.1}


@pytest.mark.parametrize(
    "changes",
    [
        {"units": {"u": "m\x1b[31m"}},
        {"parameters": {"nu\u202e": "nu"}},
        {"layout": {"u\n": ["trajectory", "time", "x"]}},
    ],
)
def test_configured_names_are_looked_at(tmp_path, changes):
    np.savez(tmp_path / "my.npz", u=WAVES, nu=np.arange(12.0))
    section = {"files": str(tmp_path / "my.npz"), **SECTION, **changes}
    path = overlay(tmp_path, section, "mine")
    with pytest.raises(ValueError, match="my_data.yaml, section task, holds the name .*Rename it") as caught:
        load_config(path)
    assert str(caught.value).isprintable()


def test_a_unit_in_a_file_becomes_plain_text(tmp_path):
    with h5py.File(tmp_path / "my.h5", "w") as file:
        file["u"], file["x"] = WAVES, np.arange(16) / 16
        file["u"].attrs["units"] = "m\x1b[31m / s"
        file["x"].attrs["units"] = "a text " * 100
    section = {"files": str(tmp_path / "my.h5"), **SECTION}
    assert load_config(overlay(tmp_path, section, "mine")).task["mine"].units == {"u": "m\\x1b[31m / s"}


def test_a_horizon_is_worded_without_powers_of_ten_where_it_has_few_digits():
    assert frames_ahead(2, 17532, "hours") == "2 frames ahead, 17532 hours"
    assert frames_ahead(1, 387.5 * 4e3, None) == "1 frame ahead, 1.55e+06 time units"
