"""One thread for all tests: sums then have one order, and the suite does not fight for the cores."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
