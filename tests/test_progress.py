"""The bar (ups/progress.py): where a stage stands, a loss that can be read, and what is being done before the first step."""

import io
import os
import shutil
import subprocess
import sys

import pytest
import torch

from ups import progress
from ups.config import ROOT
from ups.models import choose
from ups.models.bases import Transport, base
from ups.models.bases.base import Known
from ups.progress import Bar, note, position


class Terminal(io.StringIO):
    def isatty(self):
        return True


def open_terminal(monkeypatch):
    """A terminal in place of stderr; in the test itself, for pytest puts its own there after the fixtures."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_a_stage_knows_its_place_in_the_chain_of_make(monkeypatch):
    monkeypatch.setenv(progress.CHAIN, "data cache operator report")
    assert position("operator") == "operator (3 of 4)" and position("rival") == "rival"
    monkeypatch.delenv(progress.CHAIN)
    assert position("operator") == "operator"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("given", "stages"), [
    (["STAGES=operator steady"], "operator steady"), (["CONFIG=configs/small.yaml"], "operator diffusion consistency steady"),
    (["CONFIG=configs/small_11task.yaml"], "operator"), (["CONFIG=configs/small_11task.yaml", "STAGES=operator steady"],
                                                         "operator steady"),
    (["CONFIG=configs/uncertain.yaml"], "operator diffusion consistency rival"),
    ([], "operator diffusion consistency steady")])
def test_make_hands_the_chain_down_from_data_to_report_with_the_stages_that_the_configuration_says(given, stages):
    command = ["make", "--eval", "chain: ; @echo $$UPS_CHAIN", "chain", *given]
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "STAGES")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"data cache {stages} report", done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("text", [
    "evaluate:\n  members: 3\n  stages:   # some\n  - operator\n  - steady\n  members: 4\n",
    "evaluate:\n  stages: [operator, steady]\n",
    "# evaluate: {stages: [rival]}\nevaluate: {members: 3, stages: [operator,steady]}   # stages: [rival]\nrun: {name: a}\n"])
def test_make_reads_the_stages_of_a_configuration_however_it_is_written(text, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    command = ["make", "--eval", "chain: ; @echo $$UPS_CHAIN", "chain", f"CONFIG={tmp_path / 'mine.yaml'}"]
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "STAGES")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "data cache operator steady report", done.stderr


def test_the_loss_shown_is_a_mean_over_tasks_not_that_of_the_last_one(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with Bar("operator", 200) as bar:
        for step in range(200):
            bar.lost(100.0 if step % 2 else 1.0)
            bar.update()
        assert bar.postfix == f"mean loss of {progress.RECENT}: 5.050e+01"
    assert "operator: 100%" in terminal.getvalue()


def test_a_note_is_shown_on_the_main_process_alone_with_what_others_did(monkeypatch):
    terminal = open_terminal(monkeypatch)
    note("no bar is open")
    with Bar("bases", 6, False, lambda: 3):
        note("another process")
    assert terminal.getvalue() == ""
    done = [1]
    with Bar("bases", 6, True, lambda: done[0], unit="tasks") as bar:
        note("burgers1d: transport")
        assert bar.n == 1 and "1/6 tasks" in terminal.getvalue() and "burgers1d: transport" in terminal.getvalue()
        done[0] = 6                      # of which another process fitted five
    assert "6/6 tasks" in terminal.getvalue() and progress._shown is None


def test_the_fit_of_a_base_tells_its_steps(monkeypatch):
    told = []
    monkeypatch.setattr(base, "note", told.append)
    u, none = torch.randn(2, 1, 1, 16), Known(torch.zeros(2, 0), torch.zeros(2, dtype=torch.long))
    Transport(0, 1, (16,), "periodic", 4).descend(lambda step: (u, none, u[:, 0] + 1), 3, "burgers1d")
    assert told == [f"burgers1d: transport, step {step} of 3" for step in (1, 2, 3)]


def test_every_base_of_a_task_is_announced(monkeypatch, tmp_path):
    from test_choose import make_caches

    from ups.data.cache import open_cache
    config = make_caches(tmp_path, "data.tasks=[burgers1d]", "operator.base_steps=4")
    told = []
    for module in (choose, base):
        monkeypatch.setattr(module, "note", told.append)
    choose.choose_base(open_cache(config, "burgers1d"), 4, 10, 0, torch.device("cpu"))
    kinds = config.task["burgers1d"].base
    assert [f"burgers1d: {kind}" for kind in kinds] == [text for text in told if "step" not in text]
    assert "burgers1d: transport, step 4 of 4" in told
