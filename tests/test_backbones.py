"""Every backbone of the table keeps the contract (ups/models/backbones/backbone.py), and each computes what
its paper says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from ups.config.model import ModelConfig
from ups.models.backbones import ANY, BACKBONES, Backbone, build
from ups.models.backbones.backbone import task_of
from ups.models.backbones.fno import FourierConvolution
from ups.models.backbones.layers import Convolution
from ups.models.backbones.plain import PlainBlock
from ups.models.backbones.transformer import WindowAttention
from ups_discovery.boundary import BOUNDARIES, DIRICHLET, NO_FLUX, OUTFLOW, PERIODIC, along

WIDTH, MODES = 8, 4
GRIDS = [(12,), (3,), (7, 8), (5, 4, 6)]
MIXED = ("periodic", "no_flux", "dirichlet")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(kind: str, ends: tuple[str, ...], depth: int = 2, tasks: tuple[str, ...] = (ANY,)) -> Backbone:
    """A backbone whose gates and shifts are not zero, as after training."""
    torch.manual_seed(0)
    model = ModelConfig(kind=kind, width=WIDTH, depth=depth, modes=MODES, kernel_size=3, mlp_ratio=2.0)
    backbone = build(model, dict.fromkeys(tasks, ends))
    for name, parameter in backbone.named_parameters():
        if "modulation" in name or "position" in name:
            nn.init.normal_(parameter, std=0.3)
    return backbone


def boundaries_of(ndim: int) -> list[str]:
    return [*BOUNDARIES, ",".join(MIXED[:ndim]), ",".join(reversed(MIXED[:ndim]))]


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("grid", GRIDS)
def test_any_grid_and_boundary_keeps_its_shape_and_samples_do_not_mix(kind, grid):
    x, condition = noise(2, *grid, WIDTH), noise(2, WIDTH, seed=1)
    for boundary in boundaries_of(len(grid)):
        backbone = trained(kind, along(boundary, len(grid)))
        y = backbone(x, condition)
        assert y.shape == x.shape and y.isfinite().all(), boundary
        alone = torch.cat([backbone(x[i : i + 1], condition[i : i + 1]) for i in range(2)])
        torch.testing.assert_close(y, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("grid", [(12,), (9, 8), (6, 5, 6)])
@pytest.mark.parametrize("boundary", [PERIODIC, NO_FLUX])
def test_every_parameter_gets_a_gradient(kind, grid, boundary):
    backbone = trained(kind, along(boundary, len(grid)))
    loss = backbone(noise(2, *grid, WIDTH), noise(2, WIDTH, seed=1)) * noise(2, *grid, WIDTH, seed=2)
    loss.sum().backward()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().amax() > 0, name


@pytest.mark.parametrize("kind", BACKBONES)
def test_the_condition_matters_after_training_and_not_at_the_start(kind):
    x, one, other = noise(2, 8, 8, WIDTH), noise(2, WIDTH, seed=1), noise(2, WIDTH, seed=2)
    backbone = trained(kind, (PERIODIC,) * 2)
    assert (backbone(x, one) - backbone(x, other)).abs().max() > 0.01
    for name, parameter in backbone.named_parameters():
        if "modulation" in name:
            nn.init.zeros_(parameter)
    assert torch.equal(backbone(x, one), backbone(x, other))


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("grid", [(16,), (16, 8), (8, 8, 8)])
def test_a_shift_commutes_with_a_periodic_backbone_and_not_with_walls(kind, grid):
    """By four tokens: strides and windows of this size allow no shorter ones."""
    x, condition = noise(1, *grid, WIDTH), noise(1, WIDTH, seed=1)
    for boundary, is_equal in ((PERIODIC, True), (DIRICHLET, False)):
        backbone = trained(kind, along(boundary, len(grid)))
        shifted = backbone(torch.roll(x, 4, 1), condition)
        expected = torch.roll(backbone(x, condition), 4, 1)
        assert torch.allclose(shifted, expected, rtol=1e-3, atol=1e-4) == is_equal, boundary


@pytest.mark.parametrize("kind", BACKBONES)
def test_sharding_compiling_and_muon_find_their_marks(kind):
    backbone = trained(kind, (PERIODIC,) * 2)
    layers = [module for module in backbone.modules() if getattr(module, "is_repeated_layer", False)]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    weights = {name: p for name, p in backbone.named_parameters()}
    assert sum(p.numel() for p in weights.values() if id(p) in inside) > 0.5 * sum(
        p.numel() for p in weights.values()
    )
    flagged = {name for name, p in weights.items() if getattr(p, "is_hidden_matrix", False)}
    assert flagged and all(weights[name].ndim in (2, 3) for name in flagged)
    assert not [name for name in flagged if "modulation" in name or "bias" in name]


@pytest.mark.parametrize("kind", BACKBONES)
def test_private_weights_of_a_task_change_no_other_task(kind):
    backbone, tasks = (
        trained(kind, (PERIODIC,), tasks=("burgers1d", "advection1d")),
        ("burgers1d", "advection1d"),
    )
    x, condition = noise(1, 12, WIDTH), noise(1, WIDTH, seed=1)
    before = [backbone(x, condition, task) for task in tasks]
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if task_of(name) == "burgers1d":
                parameter.add_(0.1)
    after = [backbone(x, condition, task) for task in tasks]
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [False, True]


# ---- each against its definition


@pytest.mark.parametrize("sizes", [(10,), (9, 8), (6, 5, 8)])
def test_a_periodic_fourier_convolution_is_a_matrix_per_mode_of_the_fft(sizes):
    layer, modes = FourierConvolution(3, 3, (PERIODIC,) * len(sizes)), 3
    x, axes = noise(*sizes, 2, 3), list(range(len(sizes)))
    x_hat = torch.fft.rfftn(x, dim=axes[::-1], norm="forward")  # the last axis of dim is the halved one
    y_hat, kept = torch.zeros_like(x_hat), torch.tensor([*range(modes), *range(1 - modes, 0)])
    index = torch.meshgrid(torch.arange(modes), *[kept] * (len(sizes) - 1), indexing="ij")
    weight = torch.view_as_complex(layer.weight.detach().contiguous())
    y_hat[index] = torch.einsum("...bi,...io->...bo", x_hat[index], weight)
    expected = torch.fft.irfftn(y_hat, s=sizes[::-1], dim=axes[::-1], norm="forward")
    torch.testing.assert_close(layer(x, x), x + expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("end", "wave"), [(DIRICHLET, math.sin), (NO_FLUX, math.cos), (OUTFLOW, math.cos)])
def test_a_fourier_convolution_between_walls_keeps_the_waves_that_meet_them(end, wave):
    """Wave 2 along an axis with walls passes with its own weight, beside a periodic axis; wave 9 is cut."""
    layer = FourierConvolution(1, 4, (PERIODIC, end))
    line = [[wave(math.pi * k * (j + 0.5) / 16) for j in range(16)] for k in (2, 9)]
    low, high = torch.tensor(line)[:, None, :, None, None].expand(2, 6, 16, 1, 1)
    with torch.no_grad():
        layer.weight.zero_()
        # walls come first; wave 0 of the other
        layer.weight[2 - (end == DIRICHLET), 0] = torch.tensor([3.0, 0.0])
    u = low + high
    torch.testing.assert_close(layer(u, u), u + 3 * low, rtol=0, atol=1e-5)


def test_a_coarser_grid_uses_the_modes_that_it_resolves():
    """The same wave on 24 and on 6 cells gives the same function."""
    layer = FourierConvolution(1, 9, (PERIODIC, PERIODIC))
    waves = [
        torch.tensor([[math.sin(2 * math.pi * (i - 2 * j) / n) for j in range(n)] for i in range(n)])
        for n in (24, 6)
    ]
    fine, coarse = (layer(u[..., None, None], u[..., None, None])[..., 0, 0] for u in waves)
    torch.testing.assert_close(coarse, fine[::4, ::4], rtol=0, atol=1e-5)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("end", "mode"), [(PERIODIC, "circular"), (NO_FLUX, "replicate"), (DIRICHLET, "zeros")]
)
def test_a_convolution_is_that_of_torch(ndim, stride, end, mode):
    ours = Convolution(2, 3, (end,) * ndim, stride)
    options = {"stride": stride, "padding": 1, "padding_mode": mode}
    theirs = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[ndim - 1](2, 3, 3, **options)
    theirs.weight.data = ours.weight.detach().unflatten(1, (*[3] * ndim, 2)).movedim(-1, 1)
    theirs.bias.data = ours.bias.detach()
    x = noise(2, *(5, 6, 7)[:ndim], 2)
    torch.testing.assert_close(ours(x), theirs(x.movedim(-1, 1)).movedim(1, -1))


def reach(backbone: Backbone, n: int) -> list[int]:
    """The tokens of a line that the middle one depends on."""
    x = noise(1, n, WIDTH).requires_grad_(True)
    backbone(x, noise(1, WIDTH, seed=1))[0, n // 2].square().sum().backward()
    return (x.grad[0].abs().amax(-1) > 0).nonzero().flatten().tolist()


def test_a_window_attends_to_itself_and_half_a_window_around():
    """Windows of four tokens: 16 is the first of 16..19, which attend to 14..21."""
    assert reach(trained("transformer", (PERIODIC,), depth=1), 32) == list(range(14, 22))


@pytest.mark.parametrize("end", [PERIODIC, NO_FLUX])
def test_a_window_attention_is_plain_attention_over_the_tokens_in_reach(end):
    attention, n, window, halo = WindowAttention(WIDTH, 4, (end,)), 12, 4, 2
    nn.init.normal_(attention.bias)
    x = noise(1, n, WIDTH)
    query, key, value = attention.qkv(x[0]).chunk(3, -1)
    expected = []
    for i in range(n):
        start = window * (i // window) - halo
        places = [j for j in range(start, start + window + 2 * halo) if end == PERIODIC or 0 <= j < n]
        bias = torch.stack([attention.bias[0, 0, j - i + window + halo - 1] for j in places])
        weight = torch.softmax(key[[j % n for j in places]] @ query[i] / math.sqrt(WIDTH) + bias, 0)
        expected.append(attention.out(weight @ value[[j % n for j in places]]))
    torch.testing.assert_close(attention(x)[0], torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_a_unet_has_wider_levels_downwards_and_follows_the_finest_grid():
    network = trained("unet", (PERIODIC,), depth=4).own[ANY]
    widths = [block.conv2.weight.shape[0] for block in (*network.down, network.middle[0])]
    assert widths == [WIDTH, 2 * WIDTH, 2 * WIDTH, 4 * WIDTH]
    sizes = []
    for block in itertools.chain(network.down, network.middle, network.up):
        block.register_forward_hook(lambda _, inputs, y: sizes.append(y.shape[1]))
    network(noise(1, 13, WIDTH), noise(1, WIDTH))
    assert sizes == [13, 7, 4, 2, 2, 4, 7, 13]


# ---- plain


def test_a_plain_block_is_that_of_the_formula():
    """Width 1 and a condition of zeros: a constant field keeps its wave 0 in spectral mixing, by hand."""
    model = ModelConfig(kind="plain", width=1, depth=1, modes=1, kernel_size=1, mlp_ratio=1.0)
    block = PlainBlock(model, (PERIODIC,))
    with torch.no_grad():
        block.spectral.weight.copy_(torch.tensor([0.5, 0.0]).view(2, 1, 1, 1))
        block.local.weight.fill_(0.25)
        block.up.weight.copy_(torch.tensor([[0.2], [0.3]]))
        block.up.bias.copy_(torch.tensor([0.5, -0.5]))
        block.down.weight.fill_(0.1)
    x = torch.tensor([4.0, -4.0]).view(2, 1, 1).expand(2, 6, 1)
    mixed = torch.tensor([6.0, -6.0]).view(2, 1, 1).expand(2, 6, 1)  # x + x / 2
    h = 1.25 * mixed
    a = 0.2 * h + 0.5
    expected = mixed + 0.1 * a * torch.sigmoid(a) * torch.tanh(0.3 * h - 0.5)
    torch.testing.assert_close(block(x, torch.zeros(2, 1)), expected)
