"""The bar (ups/common/progress.py): where a stage stands, a loss that can be read, and what is being done
before the first step."""

import io
import sys

import torch

from ups.common import progress
from ups.common.progress import Bar, note, position
from ups.models import base_selection
from ups.models.bases import base
from ups.models.bases.base import ParameterBatch
from ups.models.bases.transport import Transport


class Terminal(io.StringIO):
    def isatty(self):
        return True


def open_terminal(monkeypatch):
    """A terminal in place of stderr; in the test itself, for pytest puts its own there after the fixtures."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_a_stage_knows_its_place_among_those_that_the_report_needs():
    assert (
        position("operator", ["operator"]) == "operator (3 of 4)"
        and position("scoring", ["operator"]) == "scoring"
    )


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
        assert (
            bar.n == 1
            and "1/6 tasks" in terminal.getvalue()
            and "burgers1d: transport" in terminal.getvalue()
        )
        done[0] = 6  # of which another process fitted five
    assert "6/6 tasks" in terminal.getvalue() and progress._shown is None


def test_the_fit_of_a_base_tells_its_steps(monkeypatch):
    told = []
    monkeypatch.setattr(base, "note", told.append)
    u, none = torch.randn(2, 1, 1, 16), ParameterBatch(torch.zeros(2, 0), torch.zeros(2, dtype=torch.long))
    Transport(0, 1, (16,), "periodic", 4).descend([lambda: (u, none, u[:, 0].roll(1, -1))] * 3, "burgers1d")
    assert told == [f"burgers1d: transport, step {step} of at most 3" for step in (1, 2, 3)]


def test_every_base_of_a_task_is_announced(monkeypatch, tmp_path):
    from test_base_selection import make_caches

    from ups.data.cache import open_cache

    config = make_caches(tmp_path, "data.tasks=[burgers1d]", "operator.base_steps=4")
    told = []
    for module in (base_selection, base):
        monkeypatch.setattr(module, "note", told.append)
    base_selection.select_base(open_cache(config, "burgers1d"), 4, 10, 0, torch.device("cpu"))
    kinds = config.task["burgers1d"].base
    assert [f"burgers1d: {kind}" for kind in kinds] == [text for text in told if "step" not in text]
    assert "burgers1d: transport, step 4 of at most 4" in told
