"""Mutations of config.json, done.json, the headers of weights and data, the names, attributes and text in
data files of every kind, sections and results.json: each is read or refused in one clear sentence; none
imports, writes, runs or opens anything else, hangs or ends in a traceback (fuzzed.py)."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import fuzzed
import pytest

ROOT = Path(__file__).resolve().parents[2]
SEED, NUM = 0, 2_400  # the command of docs/reliability.md makes more


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[tuple[object, str]]]:
    """Target -> (number, outcome) of its cases."""
    print(
        f"seed {SEED}, {NUM} mutations: PYTHONPATH=.:tests:tests/faults python tests/faults/fuzzed.py FOLDER "
        f"{SEED} {NUM}, and CASE to read one again"
    )
    command = [
        sys.executable,
        fuzzed.__file__,
        tmp_path_factory.mktemp("fuzz") / "place",
        str(SEED),
        str(NUM),
    ]
    paths = ":".join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "faults")))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"seed {SEED}, after {done.stdout[-200:]}:\n{done.stderr[-3000:]}"
    found = collections.defaultdict(list)
    for line in done.stdout.splitlines():
        case, end = json.JSONDecoder().raw_decode(line)
        found[case["target"]].append((case["number"], json.loads(line[end:])["outcome"]))
    assert sum(map(len, found.values())) == NUM + len(fuzzed.CONTROLS)
    return found


@pytest.mark.parametrize("target", fuzzed.PARTS)
def test_a_mutated_file_is_read_or_refused_and_does_nothing_else(outcomes, target):
    assert not [case for case in outcomes[target] if case[1].startswith("FAILED")]
    assert {outcome for _, outcome in outcomes[target]} >= {"refused"}


def test_what_must_not_happen_would_be_noticed(outcomes):
    assert [*dict(outcomes["control"])] == [*fuzzed.CONTROLS]
    for name, outcome in outcomes["control"]:
        assert outcome.startswith("FAILED: "), (name, outcome)
