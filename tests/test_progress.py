"""The bar (ups/common/progress.py): where a stage stands, a loss that can be read, and what is being done
before the first step."""

import io
import os
import sys

from ups.common import progress
from ups.common.progress import Bar, note


class Terminal(io.StringIO):
    def isatty(self):
        return True


def open_terminal(monkeypatch):
    """A terminal in place of stderr; in the test itself, for pytest puts its own there after the fixtures."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_the_loss_shown_is_a_mean_over_tasks_not_that_of_the_last_one(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with Bar("operator", 200) as bar:
        for step in range(200):
            bar.lost(100.0 if step % 2 else 1.0)
            bar.update()
        assert bar.postfix == f"mean loss of {progress.RECENT}: 5.050e+01"
    assert "operator: 100%" in terminal.getvalue()


def test_a_terminal_of_no_size_shows_the_bar(monkeypatch):
    screen, end = os.openpty()  # 0 x 0
    with os.fdopen(end, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Bar("operator", 2) as bar:
            bar.update(2)
        assert b"operator: 100%" in os.read(screen, 4096)
    os.close(screen)


def test_a_note_is_shown_on_the_main_process_alone_with_what_others_did(monkeypatch):
    terminal = open_terminal(monkeypatch)
    note("no bar is open")
    with Bar("bases", 6, False, lambda: 3):
        note("another process")
    assert terminal.getvalue() == ""
    done = [1]
    with Bar("bases", 6, True, lambda: done[0], unit="tasks") as bar:
        note("burgers1d: transport")
        assert bar.n == 1
        assert "1/6 tasks" in terminal.getvalue()
        assert "burgers1d: transport" in terminal.getvalue()
        done[0] = 6  # of which another process fitted five
    assert "6/6 tasks" in terminal.getvalue() and progress._shown is None
