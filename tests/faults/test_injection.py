"""The injection matrix, a representative part of it (tests/faults/inject.py --quick), and that the tool
notices what is wrong."""

import json
from types import SimpleNamespace

import pytest
import torch
from commands import python
from inject_launches import LAUNCHES, QUICK_LAUNCHES
from inject_ranks import KINDS, QUICK, QUICK_DIFFERENCES, SHARDED
from inject_runs import CASE_S, SCRIPTS, Ended, check_digests, compare
from inject_storage import QUICK_STORAGE, Scene
from injected import FAULTS
from safetensors.torch import save_file

from ups.common.place import ROOT

NAMES = [
    *(f"{stage}/{name}/{ranks}" for stage, faults in QUICK.items() for name, ranks in faults.items()),
    *(f"operator/ranks differ in {name}" for name in QUICK_DIFFERENCES),
    *(f"storage/{name}" for name in QUICK_STORAGE),
    *(f"launcher/{name}" for name in QUICK_LAUNCHES),
    *(f"operator/kill at 3 moments of {where}" for where in ("saving", "the end")),
    "cache/kill at 3 moments",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Case -> what became of it."""
    folder = tmp_path_factory.mktemp("injection")
    done = python(
        str(ROOT / "tests" / "faults" / "inject.py"),
        "--quick",
        "--work",
        str(folder / "work"),
        "--json",
        str(folder / "results.json"),
        timeout=1500,
    )
    assert (folder / "results.json").is_file(), done.stdout + done.stderr
    found = {entry["case"]: entry for entry in json.loads((folder / "results.json").read_text())}
    assert done.returncode == int(any(entry["problems"] for entry in found.values())), done.stdout
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_never_hangs_names_its_cause_and_the_next_run_ends_as_if_nothing_had_happened(results, name):
    assert results[name]["problems"] == []
    assert results[name]["end_s"] is None or results[name]["end_s"] < CASE_S


def test_the_short_matrix_has_every_stage_rank_and_outcome():
    assert set(QUICK) == set(SCRIPTS)
    assert {ranks for faults in QUICK.values() for ranks in faults.values()} == {"0", "1"}
    chosen = {name for faults in QUICK.values() for name in faults}
    assert {KINDS[name].outcome for name in chosen} == {"completes", "skips", "ends"}
    assert all(ranks in KINDS[name].ranks for faults in QUICK.values() for name, ranks in faults.items())


def test_every_fault_of_the_matrix_exists():
    used = {kind.description["kind"] for kind in (*KINDS.values(), *SHARDED.values())}
    used |= {case.fault.get("kind", "none") for case in LAUNCHES.values()}
    assert used <= set(FAULTS)
    assert set(FAULTS) - used == {"slow", "other_version", "held_back", "overwritten"}  # other cases


# ---------------------------------------------------------------- the tool fails where it should


def end_of_run(folder, value=1.0, steps=(1, 2, 3), loss=0.5):
    folder.mkdir()
    save_file({"w": torch.full((3,), value)}, folder / "model.safetensors")
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "time": 1.0, "train/loss": loss}) + "\n" for step in steps)
    )
    return folder


@pytest.mark.parametrize(
    ("other", "is_exact", "text"),
    [
        ({"value": 1.0 + 1e-6}, True, "weights differ in w"),
        ({"value": 1.1}, False, "weights differ in w"),
        ({"steps": (1, 3)}, True, "gaps or repetitions: 3 and 2 lines"),
        ({"steps": (1, 2, 2, 3)}, False, "gaps or repetitions: 3 and 4 lines"),
        ({"loss": 0.5000001}, True, "logged numbers differ from step 1 on"),
    ],
)
def test_another_end_is_noticed(tmp_path, other, is_exact, text):
    one, two = end_of_run(tmp_path / "one"), end_of_run(tmp_path / "two", **other)
    assert any(text in problem for problem in compare(one, two, is_exact))
    assert compare(one, one, is_exact) == []
    (two / "metrics.jsonl").unlink()
    assert compare(one, two, is_exact) == [f"{two / 'metrics.jsonl'} is missing"]


def scene_of(tmp_path) -> Scene:
    references = SimpleNamespace(work=tmp_path, get=lambda stage: end_of_run(tmp_path / "reference"))
    return Scene(references, "a case")


def test_a_damage_that_is_not_refused_is_noticed(tmp_path):
    for codes, text in (([0, 0], ""), ([0, 2], "the file"), ([None, 1], "the file"), ([1, 1], "other words")):
        scene = scene_of(tmp_path)
        scene.refused(Ended(codes, [], text, []), "the file")
        assert scene.problems
    scene = scene_of(tmp_path)
    scene.refused(Ended([1, 2], [], "says: the file", []), "the file")
    assert scene.problems == []


def test_a_stage_that_ends_with_what_another_made_is_noticed(tmp_path):
    scene = scene_of(tmp_path)
    scene.directory.parent.mkdir(parents=True)
    scene.run = lambda *more: Ended([0, 0], [], "", [])
    end_of_run(scene.directory, value=1.5)
    scene.ends_right()
    assert any("weights differ" in problem for problem in scene.problems)


def test_ranks_whose_weights_differ_are_noticed():
    assert check_digests(Ended([0, 0], [], "", [{"1": "a", "2": "b"}, {"1": "a", "2": "c"}])) == [
        "the ranks' weights differ after steps [2]"
    ]
    assert check_digests(Ended([0, 0], [], "", [{"1": "a", "2": "b"}, {"1": "a"}])) == []
