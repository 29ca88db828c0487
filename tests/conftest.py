"""One thread for all tests: sums then have one order, and the suite does not fight for the cores. The longest
files come first, so that no worker still runs one while the others have nothing left to do."""

import gc
import importlib
import os
import sys
from pathlib import Path

if "UPS_TEST_GPU" not in os.environ:  # `make test-gpu` sets it; else tests use the CPU, whatever there is
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest

gc.disable()  # while tests are imported and collected: 9 processor seconds in place of 15
LONGEST = (  # files above 10 s of one core in a half, the longest first
    *("test_readme", "test_stories", "test_injection", "test_chain", "test_uncertain", "test_sharded"),
    *("test_real_files", "test_stages", "test_face", "test_device", "test_loop"),
    *("test_multinode", "test_kicks_chain", "test_install", "test_fuzz", "test_export", "test_any_grid"),
    *("test_operator", "test_publish", "test_report", "test_known_answers", "test_compressible"),
    *("test_launching", "test_base_selection", "test_launch", "test_pde", "test_forced", "test_house"),
    *("test_weak", "test_machine", "test_userdata_read", "test_userdata_chain", "test_first", "test_track"),
    *("test_project", "test_certainty", "test_pdebench", "test_bench", "test_fakes", "test_guard"),
    *("test_warm", "test_drift"),
)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    import torch  # not above: the process that starts the workers runs no test, and they wait for it

    torch.set_num_threads(1)
    gc.enable()
    gc.freeze()  # else every collection, as at the end of a stage, looks at all imports and tests: 0.3 s


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(Path(item.fspath).stem, len(place)))


@pytest.fixture
def main_here(monkeypatch, capsys):
    """main of a script in this process, for what ends before any process group: (exit code, output)."""

    def run(script: str, *arguments: str) -> tuple[int, str]:
        for name in ("RANK", "WORLD_SIZE", "UPS_EXPECT_WORLD", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
        code = 0
        try:
            importlib.import_module(script).main()
        except SystemExit as error:
            code = error.code or 0
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run
