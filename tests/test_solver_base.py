"""A coarse solver of one's own as a base: what it gives in physical units is the prediction, exactly; weights
hold its name and no way to run it, so whoever loads them passes the function."""

import sys

import h5py
import numpy as np
import pytest
import torch
import yaml
from cases import cases
from user_files import overlay, section

from ups.commands.stages import parents_of
from ups.common.user_solver import load_step, solver_digest, solvers_of
from ups.config.load import load_config
from ups.data.build_cache import build_cache
from ups.data.cache import open_cache
from ups.models.base_selection import fitted_state, select_base
from ups.models.bases.base import ParameterBatch
from ups.models.bases.solver import Solver
from ups.models.head_setup import build_operator
from ups.models.windows import Windows
from ups.training.artifact import require_identity
from ups.training.folder import StageFolder

MODULES = {
    "exact_step": """
import numpy as np
def step(u, dt, parameters):   # u_t = nu u_xx on [0, 1), exactly
    k = 2 * np.pi * np.fft.rfftfreq(u.shape[-1], 1 / u.shape[-1])
    assert isinstance(u, np.ndarray) and u.dtype == np.float64
    decay = np.exp(-parameters["nu"][:, None, None] * k**2 * dt)
    return np.fft.irfft(np.fft.rfft(u) * decay, u.shape[-1])
def wrong_shape(u):
    return u[..., :1]
""",
    "torch_step": """
import torch
def step(u, parameter):
    assert isinstance(u, torch.Tensor) and isinstance(parameter, float)
    return u * parameter
""",
}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Modules on Python's path, and a cache of decaying waves of two parameter values."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    x, t = np.arange(32) / 32, 0.1 * np.arange(6)
    draw = np.random.default_rng(0)
    for nu in (0.01, 0.02):
        k = 2 * np.pi * np.arange(1, 4)[:, None, None]
        a, phase = draw.random((2, 8, 3, 1, 1))
        waves = a * np.sin(k * x + 6 * phase) * np.exp(-nu * k**2 * t[:, None])
        with h5py.File(tmp_path / f"heat_{nu}.h5", "w") as file:
            file["u"], file.attrs["nu"] = 3 + waves.sum(1).astype(np.float32), nu
    found = {"parameters": ["nu"], "positive": ["u"], "base": {"solver": "exact_step:step"}}
    yield overlay(tmp_path, section(tmp_path, domain=[0, 1], dt=0.1, **found), "heat")
    for name in MODULES:
        sys.modules.pop(name, None)


def test_an_exact_solver_has_no_residual_and_is_selected(mine):
    config = load_config(mine, ["task.heat.base=[persistence, {solver: exact_step:step}]"])
    assert (config.task["heat"].base, config.task["heat"].solver) == (
        ["persistence", "solver"],
        "exact_step:step",
    )
    build_cache(config, "heat", progress=False)
    cache = open_cache(config, "heat")
    best, decisions = select_base(cache, 0, 1, 0, torch.device("cpu"))
    scores = decisions[0].scores
    assert best.base.kind == "solver"
    assert scores["solver exact_step:step"] < 1e-5 < 1e-2 < scores["persistence"]
    assert best.facts.base["settings"]["solver"] == "exact_step:step"  # named in the weights
    operator = build_operator(
        {"heat": ({"description": best.facts.described()}, fitted_state(best))},
        config.operator.model,
        "no",
        solvers_of(config),
    )
    z = cache.batch(cache.split["val"], 0, 1)
    operator.rollout(z, "heat", cache.parameters[cache.split["val"]], 2)
    again = type(operator)(operator.description)  # as weights are read: without the function
    with pytest.raises(
        ValueError,
        match="the base of heat is a solver of the user's, 'exact_step:step'; expected the function "
        r"itself.* ups.load\(path, solvers=\{TASK: step\}\)",
    ):
        again.rollout(z, "heat", cache.parameters[cache.split["val"]], 2)
    with pytest.raises(ValueError, match="the base of heat is a solver of the user's, 'exact_step:step'"):
        again.use_solvers({"other": operator.heads["heat"].base.step})
    assert "exact_step" in sys.modules
    assert again.use_solvers(solvers_of(config)).heads["heat"].base.step is not None


def test_half_of_the_windows_are_drawn_in_proportion_to_the_change_and_ranks_share_them(mine):
    config = load_config(mine, ["operator.unroll_steps=3"])
    build_cache(config, "heat", progress=False)
    cache = open_cache(config, "heat")
    head, _ = select_base(cache, 0, 1, 0, torch.device("cpu"))
    windows = Windows({"heat": cache}, config.task, config.operator, 0)
    u = head.codec.decode(cache.batch(cache.split["train"], 0, 6)).double()
    change, size = (w.square().mean((2, 3)).sqrt() for w in (u[:, 1:] - u[:, :-1], u[:, :-1]))
    for length in (2, 4):  # windows of one call and of three in a row
        relative = (change / size.clamp_min(0.1))[:, : 7 - length]
        weights = (0.5 / relative.numel() + 0.5 * relative / relative.sum()).flatten()
        drawn = [windows._moving(head, step, length) for step in range(400)]
        found = torch.cat([rows * (7 - length) + starts for rows, starts in drawn])
        expected, freedom = len(found) * weights, len(weights)
        chi = ((found.bincount(minlength=freedom) - expected) ** 2 / expected).sum()
        assert chi < freedom + 4 * (2 * freedom) ** 0.5
        assert weights.max() > 1.5 * weights.min()
    batch, half = windows.schedule.batch(0), config.operator.train.batch_size // 2
    whole = windows._window(head, batch, slice(0, 2 * half))
    shards = [windows._window(head, batch.shard(rank, 2), slice(0, half)) for rank in (0, 1)]
    for one, two in zip(whole[:2], zip(*shards, strict=True), strict=False):
        assert torch.equal(one, torch.cat(two))


def test_tensors_and_a_number_per_value_go_to_a_function_of_torch(mine):
    base = Solver(1, "torch_step:step", "heat", [], ["nu"], 0.1).use(load_step("torch_step:step", "heat"))
    base.mean.fill_(1.0)
    base.std.fill_(2.0)
    u, raw = torch.randn(4, 1, 1, 8), torch.tensor([[0.5], [2.0], [0.5], [1.0]])
    expected = ((u[:, 0] * 2 + 1) * raw[:, :, None] - 1) / 2
    torch.testing.assert_close(base(u, ParameterBatch(raw, torch.zeros(4, dtype=torch.long), raw)), expected)


@pytest.mark.parametrize(("place", "message"), cases("solver_base.missing"))
def test_a_missing_solver_is_named(mine, place, message):
    with pytest.raises(ValueError, match=message):
        load_step(place, "heat")


def test_a_wrong_shape_and_a_wrong_name_are_refused(mine):
    base = Solver(1, "exact_step:wrong_shape", "heat", [], [], 0.1).use(
        load_step("exact_step:wrong_shape", "heat")
    )
    with pytest.raises(
        ValueError, match=r"exact_step:wrong_shape gave \(2, 1, 1\) float64 for a field of shape \(2, 1, 8\)"
    ):
        base(torch.zeros(2, 1, 1, 8), ParameterBatch(torch.zeros(2, 0), torch.zeros(2, dtype=torch.long)))
    with pytest.raises(ValueError, match=r"task.heat.solver is 'step'; expected MODULE:FUNCTION"):
        load_config(mine, ["task.heat.base={solver: step}"])


def test_a_changed_solver_is_another_stage_and_a_missing_one_is_named_before_anything_starts(mine):
    """The fake: a base that is found again by its name, whatever it computes now."""
    config = load_config(mine)
    build_cache(config, "heat", progress=False)
    before = StageFolder(config, "operator", parents_of(config, "operator"))
    assert [*before.identity["parents"]] == ["heat", "solver of heat"]
    assert "solver of heat" not in parents_of(load_config(mine, ["task.heat.base=[persistence]"]), "operator")
    record, source = dict(before.identity), mine.parent / "exact_step.py"
    source.write_text(source.read_text(encoding="utf-8").replace("dt)", "2 * dt)"), encoding="utf-8")
    after = StageFolder(config, "operator", parents_of(config, "operator"))
    with pytest.raises(FileExistsError, match="made from another solver of heat .*expected the same one"):
        require_identity(record, after.identity, "stage operator", mine, after.remedy)
    with pytest.raises(
        ValueError,
        match=r"task.heat.solver is 'no_such:step', and Python finds no file of a module "
        r"no_such; expected one, such as no_such.py in .*PYTHONPATH",
    ):
        parents_of(load_config(mine, ["task.heat.base={solver: no_such:step}"]), "operator")


def test_a_digest_covers_the_modules_that_a_solver_imports_and_runs_none(tmp_path, monkeypatch):
    """The fakes: a digest of the named file alone, and one whose search imports the packages around it."""
    ran = "exit('was run')\n"  # a raise would make the rest unreachable, which is no import then
    files = {
        "pkg/__init__.py": ran,
        "pkg/mod.py": ran + "import helper, numpy, big\nfrom . import beside\nfrom .deep.end import f\n",
        "pkg/beside.py": "",
        "pkg/deep/end.py": "import folder.late",  # neither has an __init__.py
        "helper.py": "import pkg.mod",
        "folder/late.py": "",
        "other.py": "",
        "target/big.py": "",  # installed by pip install --target
        "target/big-1.dist-info/METADATA": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    for folder in (tmp_path, tmp_path / "target"):
        monkeypatch.syspath_prepend(str(folder))
    before = solver_digest("pkg.mod:step", "ks")
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n# changed", encoding="utf-8")
        is_users = not name.startswith(("other", "target"))
        assert (solver_digest("pkg.mod:step", "ks") != before) == is_users, name
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert solver_digest("pkg.mod:step", "ks") == before
    assert not {"pkg", "helper", "folder"} & sys.modules.keys()


def test_a_run_s_own_configuration_names_no_solver(mine, tmp_path):
    """It may come with weights from elsewhere: make takes it where no other configuration has the run's
    name."""
    folder = tmp_path / "runs" / "x" / "operator"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({**yaml.safe_load(mine.read_text()), "include": None}), encoding="utf-8"
    )
    named = "task.heat.base={solver: exact_step:step}"
    with pytest.raises(
        ValueError, match="names no code to run; expected the solver of heat from you. Give it again"
    ):
        load_config(folder / "config.yaml")
    assert load_config(folder / "config.yaml", [named]).task["heat"].solver == "exact_step:step"
    (folder / "config.yaml").write_text("include: /etc/hostname", encoding="utf-8")
    with pytest.raises(
        ValueError, match="includes '/etc/hostname'; expected the whole configuration of a run"
    ):
        load_config(folder / "config.yaml")


def test_a_solver_outside_of_torch_refuses_a_gradient_that_it_would_lose(mine):
    u, raw = torch.ones(2, 1, 1, 32), torch.full((2, 1), 0.01)
    settings = {"num_channels": 1, "task": "heat", "positive": [], "names": ["nu"], "dt": 0.1}
    text = "heat was given a tensor that requires a gradient; .*is called with plain numbers"
    for name, lost in (("exact_step:step", (u, raw)), ("torch_step:step", (raw,))):
        base = Solver(solver=name, **settings).use(load_step(name, "heat"))
        index = torch.zeros(2, dtype=torch.long)
        for one in lost:
            one.requires_grad_()
            with pytest.raises(ValueError, match=text):
                base.eval()(u, ParameterBatch(raw, index, raw))
            with torch.no_grad():
                base(u, ParameterBatch(raw, index, raw))
            one.requires_grad_(False)
    u.requires_grad_()
    base.eval()(u, ParameterBatch(raw, index, raw)).sum().backward()
    assert torch.allclose(u.grad, torch.full_like(u, 0.01))
