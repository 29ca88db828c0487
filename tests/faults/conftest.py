"""Everything here is marked `faults`: -m "not faults" leaves it out."""

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items):  # gets those of other folders too
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)
