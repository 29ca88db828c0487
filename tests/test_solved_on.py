"""What is solved on a GPU, shown without one: a device that is the CPU under another name, and refuses what
mixes the two."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ups.tasks import get_task
from ups_solvers import SOLVERS, compressible, processes, solver
from ups_solvers.gas import conserved

SETTINGS = {"seed": 3, "num_frames": 3, "parameter": 0.01, "t_end": 0.005}
COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class Elsewhere(TorchDispatchMode):
    """Computes on the CPU what is asked of the device "meta", and knows of every tensor where it would be."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        homes = [getattr(x, "home", "cpu") for x in inputs]
        if (
            len({home for home, x in zip(homes, inputs, strict=True) if x.ndim}) > 1
            and function not in COPIES
        ):
            raise RuntimeError(f"{function} of tensors on different devices")
        home = str(kwargs["device"]) if kwargs.get("device") is not None else homes[0] if homes else "cpu"
        found = function(*args, **kwargs | ({"device": torch.device("cpu")} if "device" in kwargs else {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                x.home = home
        return found


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with memory for 5000 cells of a gas."""
    monkeypatch.setattr(solver, "GPU", "meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * 5000 * compressible.CELL_BYTES, 2**40))


@pytest.mark.parametrize(("name", "cells"), [("cfd1d_trans", 512), ("cfd2d", 16), ("cfd3d_turb", 8)])
def test_a_gas_is_solved_on_the_gpu_in_batches_that_fit_its_memory(name, cells, gpu, monkeypatch):
    evolve, seen, batch = compressible.evolve, [], 5000 // cells ** get_task(name).ndim
    rows = batch + 2

    def watched(state, *args, **kwargs):
        seen.append((len(state), state.home))
        for found in evolve(state, *args, **kwargs):
            seen.append((len(found), found.home))
            yield found

    expected = SOLVERS[name].simulate(range(rows), resolution=cells, **SETTINGS).numpy()
    monkeypatch.setattr(compressible, "evolve", watched)
    with Elsewhere():
        found = processes.solve(name, np.arange(rows), resolution=cells, **SETTINGS)
    assert np.array_equal(found, expected)
    assert seen[:4] == [(batch, "meta")] * 4


def test_a_solver_that_mixes_devices_is_found(gpu, monkeypatch):
    monkeypatch.setattr(
        compressible, "conserved", lambda fields: conserved(fields) * torch.ones(16, device="cpu")
    )
    with Elsewhere(), pytest.raises(RuntimeError, match="tensors on different devices"):
        processes.solve("cfd1d", np.arange(2), resolution=16, **SETTINGS)


def test_tasks_that_gain_nothing_on_a_gpu_are_solved_by_processes(gpu, monkeypatch):
    names = ("cfd1d", "cfd3d_turb", "burgers1d", "darcy2d")
    assert [SOLVERS[name].device for name in names] == ["meta", "meta", "cpu", "cpu"]
    given = []
    monkeypatch.setattr(
        processes.ProcessPoolExecutor,
        "map",
        lambda pool, function, slices: given.extend(slices) or [np.zeros(1)],
    )
    with processes.solver_pool(1000, 2) as solve, Elsewhere():
        assert solve("cfd1d", np.arange(3), resolution=16, **SETTINGS).shape == (3, 3, 3, 16) and not given
        solve("burgers1d", np.arange(3), resolution=16, **SETTINGS)
        assert given
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [SOLVERS[name].device for name in names] == ["cpu"] * 4
