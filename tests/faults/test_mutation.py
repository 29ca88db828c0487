"""Readers of mutated files give a clear error or a right result. mutate.py runs more cases."""

import json
import os
import pickle
import signal
import time

import mutate
import pytest
from mutate import TARGETS, Finding, Target, attempt, is_clear

from ups.config.load import load_config

NUM = {"config": 60, "cache": 60, "checkpoint": 40, "data": 30}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the sound files."""
    folder = tmp_path_factory.mktemp("mutate")
    mutate.prepare(folder / "sound")
    return folder


@pytest.fixture
def alarm(monkeypatch, tmp_path):
    """Cases in this process: late ones are found, payloads would run in a folder of the test."""

    def late(*_):
        raise Finding("no end")

    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", NUM)
def test_mutated_files_give_a_clear_error_or_a_right_result(place, name):
    results = mutate.results_of(name, place, range(NUM[name]))
    assert [*results] == [*range(NUM[name])]
    assert not {number: result for number, result in results.items() if result[0].startswith("FAILED")}
    kinds = {outcome for outcome, _ in results.values()}
    assert {"refused", "fallback" if name == "checkpoint" else "same"} <= kinds
    assert kinds <= {"refused", "same", "other", "fallback"}


# ---------------------------------------------------------------- the tool finds what it looks for


def outcome_of(place, read):
    return attempt(Target(lambda folder, draw: "", read, "config.yaml"), place, 0, "fake")[0]


def test_the_tool_finds_hangs_other_errors_and_code_that_ran(place, alarm, monkeypatch):
    monkeypatch.setattr(mutate, "CASE_S", 0.2)
    assert outcome_of(place, lambda folder: "same") == "same"
    assert outcome_of(place, lambda folder: time.sleep(30)) == "FAILED: no end"
    assert outcome_of(place, lambda folder: {}["missing"]) == "FAILED: KeyError: 'missing'"
    assert outcome_of(place, lambda folder: json.loads("{")).startswith("FAILED: JSONDecodeError")
    payload = pickle.dumps(mutate.Payload())
    assert (
        outcome_of(place, lambda folder: pickle.loads(payload) or "same") == "FAILED: code from the file ran"
    )
    assert not os.path.exists(mutate.CANARY)


@pytest.mark.parametrize("read", [lambda _: os.kill(os.getpid(), signal.SIGKILL), lambda _: time.sleep(30)])
def test_the_tool_survives_a_process_that_dies_or_hangs(place, monkeypatch, read):
    monkeypatch.setattr(mutate, "START_S", 0.5)  # less than CASE_S, so no alarm ends it
    monkeypatch.setitem(TARGETS, "cache", Target(lambda folder, draw: "", read, "config.yaml"))
    results = mutate.results_of("cache", place, range(2))
    assert results == dict.fromkeys(range(2), ("FAILED: the process died or hung", ""))


def test_a_clear_error_says_what_was_expected_and_is_of_a_documented_kind():
    assert is_clear(ValueError("x is 3; expected 4. Change it."))
    assert not is_clear(ValueError("x is 3"))
    assert not is_clear(KeyError("expected a key. Add it."))
    assert not is_clear(ValueError("expected " + "x" * 5000 + ". Shorten it."))


# ---------------------------------------------------------------- what it found once


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: " + "[" * 20000, "is not valid YAML"),
        ("run: {name: 2022-13-45}", "is not valid YAML"),
        ("? [a]\n: 1", "is not valid YAML"),
        ('run: {name: "\x00"}', "is not valid YAML"),
        ("run: {seed: 0x" + "f" * 9000 + "}", "a number of 9002 characters"),
        ("run: {seed: 1.0e400}", "run.seed is '1.0e400'|run.seed is inf"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nrun: {seed: *b}", "unknown key a"),
    ],
)
def test_hostile_yaml_is_refused_in_a_message_of_readable_length(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as info:
        load_config(path)
    assert len(str(info.value)) < 3000
