"""Readers of mutated files give a clear error or a right result. mutate.py runs more cases."""

import json
import os
import pickle
import signal
import time

import mutate
import pytest
import torch
from finished import write_stage
from mutate import TARGETS, Finding, Target, attempt, is_clear

from ups.common.files import DamagedError, read_record
from ups.config.load import load_config
from ups.training.weights import load_stage, read_weights

IN_PROCESS = {"config": 60, "cache": 60, "checkpoint": 40}


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


@pytest.mark.parametrize("name", IN_PROCESS)
def test_mutated_files_give_a_clear_error_or_a_right_result(place, alarm, name):
    outcomes = {number: attempt(TARGETS[name], place, number, name) for number in range(IN_PROCESS[name])}
    assert not {number: outcome for number, outcome in outcomes.items() if outcome[0].startswith("FAILED")}
    kinds = {outcome for outcome, _ in outcomes.values()}
    assert "refused" in kinds and kinds <= {"refused", "same", "other", "fallback"}


def test_mutated_data_files_do_so_too_in_a_process_that_they_may_kill(place):
    results = mutate.run_target("data", place, range(30))
    assert len(results) == 30
    assert not [result for result in results if result["outcome"].startswith("FAILED")]
    assert {"refused", "same"} <= {result["outcome"] for result in results}


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


def test_the_tool_survives_a_process_that_dies(place, monkeypatch):
    monkeypatch.setattr(mutate, "START_S", 0.05)  # killed before its first case, every time
    results = mutate.run_target("cache", place, range(2))
    assert [result["outcome"] for result in results] == ["FAILED: the process died (-9)"] * 2


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


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"run: {name: \xe8}")
    with pytest.raises(ValueError, match="config.yaml is not valid YAML: 'utf-8' codec.*Expected a mapping"):
        load_config(path)


def test_records_and_weights_are_refused_with_what_to_do(tmp_path):
    path = tmp_path / "record.json"
    for text, message in (
        ("{", "is not readable"),
        ("[]", "holds a list"),
        ('{"step": "3"}', "has no valid 'step'"),
        ('{"step": true}', "has no valid 'step'"),
        ("{}", "has no valid 'step'"),
        ("[" * 9999, "is not readable"),
    ):
        path.write_text(text)
        with pytest.raises(DamagedError, match=f"{message}.*expected a record. Delete it."):
            read_record(path, "a record", "Delete it.", step=int)
    with pytest.raises(DamagedError, match="is not readable .*; expected a safetensors file. Make it."):
        read_weights(tmp_path / "w.safetensors", "Make it.")
    layer, description = torch.nn.Linear(2, 1), {"model": {"depth": 1}, "tasks": [{}]}
    for state, message in (
        ({"weight": layer.weight.data}, "has bias as missing; expected .torch.float32"),
        ({"weight": torch.zeros(1, 3), "bias": layer.bias.data}, "has weight as .*1, 3.*expected .*1, 2"),
        (
            {"weight": layer.weight.data * torch.nan, "bias": layer.bias.data},
            r"in \['weight'\] that are not finite",
        ),
    ):
        with pytest.raises(DamagedError, match=f"{message}.*Make it."):
            write_stage(tmp_path / "operator", description, state)
            load_stage(tmp_path / "operator", lambda _: layer, "stage", "Make it.")
