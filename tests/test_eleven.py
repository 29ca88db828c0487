"""The judgement of the eleven families: data of other numerics are true to their equations, results are kept,
pages derive."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from cases import cases

from bench import numerics, table
from ups.tasks import get_task
from ups_solvers import SOLVERS

SMALL = {"seed": 3, "resolution": 32, "num_frames": 5}
ENDS = cases("eleven.ends")
PARAMETERS = cases("eleven.parameters")
# of the last frame's RMS: these are coarse schemes on few cells, a wrong equation is off by the field itself
CLOSE = cases("eleven.close")


def made(task, count=2, **changes):
    given = {
        **SMALL,
        "resolution": 16 if task in ("cfd3d", "ns_incom2d") else 32,
        "parameter": PARAMETERS.get(task),
        "t_end": ENDS.get(task, 0.5),
        **changes,
    }
    if get_task(task).is_steady:
        given["num_frames"] = 1
    return torch.from_numpy(numerics.solve(task, np.arange(count), **given)), SOLVERS[task].simulate(
        range(count), **given
    )


@pytest.mark.parametrize("task", numerics.NUMERICS)
def test_other_numerics_solve_the_same_problem_and_not_alike(task):
    other, ours = made(task)
    assert other.shape == ours.shape and other.dtype == torch.float32 and bool(other.isfinite().all())
    space = tuple(range(3, ours.ndim))
    gap = ((other - ours)[:, -1:].square().mean((0, *space)) / ours[:, -1:].square().mean((0, *space))).sqrt()
    assert 1e-6 < float(gap.max())
    if task in CLOSE:
        assert float(gap.max()) < CLOSE[task]
    kept = {"density"} if task.startswith("cfd") else set(get_task(task).conserved)
    for name in kept:  # of what is stored: fine cells that are strided give it only roughly
        mass = other[:, :, get_task(task).fields.index(name)].mean(tuple(range(2, other.ndim - 1)))
        bound = 0.05 if task in ("advection1d", "burgers1d", "ns_incom2d") else 1e-5
        assert float((mass - mass[:, :1]).abs().max()) < bound
    if positive := [get_task(task).fields.index(name) for name in get_task(task).positive]:
        assert float(other[:, :, positive].min()) > 0


def test_upwind_is_first_order_and_its_diffusion_the_known_one():
    """A mode decays by exp(-k^2 D t), D = beta dx (1 - courant) / 2 of the fine cells."""
    given = {"seed": 0, "resolution": 64, "num_frames": 2, "parameter": 1.0, "t_end": 0.5}
    wave = torch.from_numpy(numerics.solve("advection1d", [0], **given))
    start, end = torch.fft.rfft(wave[0, :, 0].double()).abs()
    num_steps = math.ceil(0.5 * 256 / 0.8)
    diffusion = 0.5 / 256 * (1 - 0.5 * 256 / num_steps)
    k = 2 * math.pi * torch.arange(1, 4)
    strong = start[1:4] > 1.0
    torch.testing.assert_close(
        (end / start)[1:4][strong], torch.exp(-diffusion * k.double() ** 2 * 0.5)[strong], rtol=0.02, atol=0
    )


def test_a_still_gas_and_a_still_lake_stay_and_vortices_of_no_force_decay():
    still = torch.ones(1, 4, 8, 8)
    still[:, 2:] = 0
    *_, last = numerics.waves(
        still, numerics.GAS, width=0.1, is_periodic=True, dt=0.1, num_frames=2, viscosity=0.1
    )
    torch.testing.assert_close(last, still)
    shear = still[..., :1].repeat(1, 1, 1, 32)  # rub alone acts: V_x = sin(2 pi y) decays by exp(-eta k^2 t)
    shear[:, 2] = 1e-3 * torch.sin(2 * math.pi * (torch.arange(32) + 0.5) / 32)
    *_, last = numerics.waves(
        shear, numerics.GAS, width=1 / 32, is_periodic=True, dt=0.2, num_frames=2, viscosity=0.1
    )
    assert float(last[0, 2].abs().max() / 1e-3) == pytest.approx(
        math.exp(-0.1 * 4 * math.pi**2 * 0.2), rel=0.05
    )
    *_, last = numerics.waves(
        still[:, 1:], numerics.WATER, width=0.1, is_periodic=False, dt=0.1, num_frames=2
    )
    torch.testing.assert_close(last, still[:, 1:])


def entry(column, seed, error, budget=180.0, processor="AVX2", **more):
    return {
        "key": {"column": column, "seed": seed, "budget_s": budget, "processor": processor},
        "row": {"error": error, "seconds": budget, "base": 0.4, **more},
    }


def test_seconds_of_two_processors_are_never_compared(tmp_path):
    """Fake refused: a fast machine's network beside the rivals of a slow one."""
    fast = [entry("ours", 0, 0.001, processor="AVX512"), entry("ours", 1, 0.001, processor="AVX512")]
    slow = [entry("ours", 0, 0.02), entry("fno", 0, 0.05)]
    for entries, chosen, ours in (
        (fast + slow, "AVX2", 0.02),
        (slow + fast, "AVX512", 0.001),
        (fast[:1] + slow, "AVX2", 0.02),
    ):
        (tmp_path / "cfd1d.json").write_text(json.dumps({"task": "cfd1d", "entries": entries}))
        found = table.results(tmp_path)["cfd1d"]
        assert found["processor"] == chosen and table.error(found, "ours") == ours
        assert (table.error(found, "fno") is None) == (chosen == "AVX512")


def test_the_pages_are_what_the_results_and_the_registry_give():
    assert not [page for page, (before, after) in table.written().items() if before != after]


def test_a_page_that_differs_is_refused_and_rewritten(tmp_path, capsys):
    for page in {page for page, _ in table.texts().values()}:
        text, at = (table.ROOT / page).read_text(), tmp_path / page
        at.parent.mkdir(exist_ok=True)
        at.write_text(text.replace("| `cfd1d` | ", "| `cfd1d` | mine, "))
    assert table.main(["--check"], tmp_path) == 1 and "README.md: differs" in capsys.readouterr().out
    assert table.main([], tmp_path) == 0 and table.main(["--check"], tmp_path) == 0
    (tmp_path / "README.md").write_text("no table")
    with pytest.raises(
        ValueError,
        match="README.md has 0 places for the table comparison; expected one, between <!-- table comparison",
    ):
        table.main([], tmp_path)
