"""`torch.export` of the operator: one graph per task, for any number of rows, that answers as the operator
does and refuses the parameter values that it refuses."""

import io

import pytest
import torch
from torch.export import Dim, export

from bench import gpu
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.model import BACKBONES
from ups.models.bases import flow
from ups.models.bases.elliptic import Elliptic
from ups.tasks import get_task

SMALL = ["operator.model.width=8", "operator.model.depth=1", "operator.model.modes=3"]
CONFIG = load_config(
    ROOT / "configs" / "small_11task.yaml", [*SMALL, "task.cfd3d.resolution=8", "task.cfd3d.patch=2"]
)
FIRST = {}  # (kind of base, number of axes, with walls) -> the first task that has these; persistence once
for task in CONFIG.data.tasks:
    for base in CONFIG.task[task].base:
        geometry = (get_task(task).ndim, get_task(task).boundary != "periodic")
        FIRST.setdefault((base, *geometry) if base != "persistence" else base, (task, base))
STORED = {base: task for task, base in reversed(FIRST.values())}  # kind of base -> the first task alone
PAIRS = [
    pytest.param(*pair, marks=[] if pair == ("advection1d", "propagator") else pytest.mark.faults)
    for pair in FIRST.values()
]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_the_exported_operator_answers_as_the_operator_for_any_number_of_rows(monkeypatch, name, kind):
    monkeypatch.setattr(Elliptic, "ITERATIONS", 2)  # a graph repeats the code of an iteration, and of a tap
    monkeypatch.setattr(flow, "TAPS", (0, 1))
    one = gpu.facts_of(CONFIG, name)
    torch.manual_seed(0)
    operator = gpu.operator_of(CONFIG, "no", {name: kind}).eval()
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)

    def given(rows: int) -> tuple[torch.Tensor, str, torch.Tensor]:
        z = operator.head(name).input_codec.encode(gpu.batch_of(operator, name, rows)[0])
        return z, name, one.parameters[:1].expand(rows, -1).contiguous()

    rows, stored = Dim("rows", min=1, max=1024), io.BytesIO()
    program = export(operator, given(2), dynamic_shapes=({0: rows}, None, {0: rows}))
    if STORED[kind] == name:  # as another machine, without this code, has it
        torch.export.save(program, stored)
        stored.seek(0)
        program = torch.export.load(stored)
    exported = program.module()
    for num in (1, 2, 5):
        inputs = given(num)
        torch.testing.assert_close(exported(*inputs), operator(*inputs), rtol=1e-5, atol=1e-6)
    z, _, parameters = given(2)
    base, _ = operator.predict(z, name, operator.heads[name].parameter_batch(parameters), "base")
    assert not torch.equal(operator(z, name, parameters), base)  # the network has its say
    if operator.heads[name].base.needs_fitted_parameters and len(one.parameter_values):
        with pytest.raises(ValueError, match=f"{name} was asked for the parameter value .*; expected one of"):
            operator(z, name, 1.5 * parameters)
        with pytest.raises(
            RuntimeError, match=f"{name} was asked for the parameter value of another case; expected one of"
        ):
            exported(z, name, 1.5 * parameters)


@pytest.mark.faults
@pytest.mark.parametrize("kind", sorted(BACKBONES))
def test_every_backbone_can_be_exported(kind):
    name = "diff_react2d"
    config = load_config(ROOT / "configs" / "small_11task.yaml", [*SMALL, f"operator.model.kind={kind}"])
    one = gpu.facts_of(config, name)
    operator = gpu.operator_of(config, "no", {name: "persistence"}).eval()

    def given(rows: int) -> tuple[torch.Tensor, str, torch.Tensor]:
        z = operator.head(name).input_codec.encode(gpu.batch_of(operator, name, rows)[0])
        return z, name, one.parameters[:1].expand(rows, -1).contiguous()

    rows = Dim("rows", min=1, max=1024)
    exported = export(operator, given(2), dynamic_shapes=({0: rows}, None, {0: rows})).module()
    inputs = given(5)
    torch.testing.assert_close(exported(*inputs), operator(*inputs), rtol=1e-4, atol=1e-5)
