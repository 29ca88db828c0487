"""The shared network (ups/models/backbones/): against the FFT and hand arithmetic, its symmetries, its
start, its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ups.config.model import ModelConfig
from ups.models.backbones import ANY
from ups.models.backbones.flat import Block, FlatBackbone, LocalBackbone
from ups.models.backbones.layers import BoxMixing, LocalMixing, SpectralMixing
from ups_discovery.boundary import DIRICHLET, NO_FLUX, OUTFLOW, PERIODIC, along

MODEL = ModelConfig(kind="flat", width=8, depth=2, modes=4, kernel_size=5, mlp_ratio=2.0)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flat(ndim: int = 2, boundary: str = PERIODIC) -> FlatBackbone:
    return FlatBackbone(MODEL, {ANY: along(boundary, ndim)})


@pytest.mark.parametrize("n", [9, 10])
@pytest.mark.parametrize("modes", [3, 99])
def test_periodic_spectral_mixing_is_a_complex_matrix_per_fourier_mode(n, modes):
    mixing = SpectralMixing(6, modes)
    x = noise(2, n, 6)
    x_hat = torch.fft.rfft(x, dim=1)
    y_hat = torch.zeros_like(x_hat)
    for k in range(min(modes, n // 2 + 1)):
        y_hat[:, k] = x_hat[:, k] @ torch.complex(*mixing.weight[:, k].detach())
    torch.testing.assert_close(mixing(x, (PERIODIC,)), torch.fft.irfft(y_hat, n=n, dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("boundary", [NO_FLUX, DIRICHLET, OUTFLOW])
def test_spectral_mixing_between_walls_is_that_of_the_mirrored_field(boundary):
    """Even extension: on 2n tokens the cosine modes are the Fourier modes of the mirrored field, real weights
    act alike."""
    mixing = SpectralMixing(6, 4)
    x = noise(2, 7, 6)
    mirrored = torch.cat([x, x.flip(1)], 1)
    both = SpectralMixing(6, 4)
    both.weight.data = torch.stack([mixing.weight[0].detach(), torch.zeros(4, 6, 6)])
    torch.testing.assert_close(mixing(x, (boundary,)), both(mirrored, (PERIODIC,))[:, :7], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("boundary", "outside"),
    [
        (PERIODIC, [8.0, 9, 1, 2]),
        (NO_FLUX, [1.0, 1, 9, 9]),
        (OUTFLOW, [1.0, 1, 9, 9]),
        (DIRICHLET, [0.0, 0, 0, 0]),
    ],
)
def test_local_mixing_continues_the_tokens_as_the_boundary_says(boundary, outside):
    mixing = LocalMixing(1, 5)
    mixing.weight.data = torch.tensor([[[1.0, 10, 100, 1000, 10000]]])
    row = [*outside[:2], *range(1, 10), *outside[2:]]
    expected = [
        sum(weight * row[i + j] for j, weight in enumerate((1, 10, 100, 1000, 10000))) for i in range(9)
    ]
    assert mixing(torch.arange(1.0, 10)[None, :, None], (boundary,)).flatten().tolist() == expected


@pytest.mark.parametrize(
    ("sizes", "modes"), [((6, 7, 8), 3), ((4, 7, 5), 3), ((9, 9, 9), 4), ((16, 8), 8), ((15, 15), 8)]
)
def test_periodic_box_mixing_is_a_complex_matrix_per_wave_vector(sizes, modes):
    """Against the FFT, of all waves that the tokens hold: those of 4 tokens are 0, 1 and -1."""
    mixing, x = BoxMixing(6, modes, along(PERIODIC, len(sizes))), noise(2, *sizes, 6)
    axes = tuple(range(1, 1 + len(sizes)))
    x_hat = torch.fft.fftn(x, dim=axes)
    y_hat, num = torch.zeros_like(x_hat), 0
    for k, weight in zip(mixing.k, torch.complex(*mixing.weight.detach()), strict=True):
        if all(abs(wave) <= (n - 1) // 2 for wave, n in zip(k, sizes, strict=True)):
            y_hat[:, *k] = x_hat[:, *k] @ weight
            opposite, num = [-wave for wave in k], num + 1
            if any(k):
                y_hat[:, *opposite] = x_hat[:, *opposite] @ weight.conj()
            else:  # the mean of a real field: the imaginary part has nothing to act on
                y_hat[:, *k] = x_hat[:, *k] @ weight.real.to(weight.dtype)
    assert 2 * num - 1 == math.prod(min(2 * modes - 1, 2 * ((n - 1) // 2) + 1) for n in sizes)
    y = torch.fft.ifftn(y_hat, dim=axes)
    torch.testing.assert_close(mixing(x), y.real, rtol=0, atol=1e-5)
    assert float(y.imag.abs().max()) < 1e-5


@pytest.mark.parametrize("boundary", [NO_FLUX, "no_flux,periodic,outflow", "periodic,no_flux,periodic"])
def test_box_mixing_between_walls_is_that_of_the_mirrored_field(boundary):
    """Even extension: the weight of a wave serves its mirror images alike, and its imaginary part acts along
    periodic axes."""
    ends = along(boundary, 3)
    mixing, x = BoxMixing(6, 3, ends), noise(2, 5, 6, 7, 6)
    walls = [axis for axis, end in enumerate(ends, 1) if end != PERIODIC]
    mirrored = x
    for axis in walls:
        mirrored = torch.cat([mirrored, mirrored.flip(axis)], axis)
    both = BoxMixing(6, 3, along(PERIODIC, 3))
    weight_of = {k: weight for k, weight in zip(mixing.k, mixing.weight.detach().unbind(1), strict=True)}
    with torch.no_grad():
        for number, k in enumerate(both.k):
            like = tuple(abs(wave) if axis in walls else wave for axis, wave in enumerate(k, 1))
            opposite = tuple(abs(wave) if axis in walls else -wave for axis, wave in enumerate(k, 1))
            real, imag = (
                weight_of[like]
                if like in weight_of
                else weight_of[opposite] * torch.tensor([1, -1]).view(2, 1, 1)
            )
            has_phase = any(wave for axis, wave in enumerate(k, 1) if axis not in walls)
            both.weight[:, number] = torch.stack([real, imag * has_phase])
    torch.testing.assert_close(mixing(x), both(mirrored)[:, :5, :6, :7], rtol=0, atol=1e-5)


def test_a_network_for_3d_only_has_no_mixing_along_axes():
    both = FlatBackbone(MODEL, {"burgers1d": along(PERIODIC, 1), "cfd3d": along(PERIODIC, 3)})
    names = {name for name, _ in both.named_parameters() if name.startswith("blocks.0") and "weight" in name}
    assert {"blocks.0.spectral.weight", "blocks.0.own.cfd3d.mixing.weight"} <= names
    assert "blocks.0.own.burgers1d.mixing.weight" not in names
    assert not [name for name, _ in flat(3).named_parameters() if "spectral" in name]


def test_the_gated_mlp_is_that_of_the_formula():
    """Block of width 1 with both gates 1 and no mixing: x + down(silu(a) b), (a, b) = up(norm x), by hand."""
    block = Block(1, 2, 3, 1.0, {ANY: (PERIODIC,)})
    with torch.no_grad():
        block.spectral.weight.zero_()
        block.local.weight.zero_()
        (own,) = block.own.values()
        own.up.weight.copy_(torch.tensor([[2.0], [3.0]]))
        own.down.weight.fill_(0.5)
        own.modulation.bias.copy_(torch.tensor([0.0, 0, 1, 0, 0, 1]))  # shift, scale, gate, twice
    x = torch.tensor([[[4.0], [-4.0]]])  # norm x = 1, -1
    silu = [2 / (1 + 2.718281828**-2), -2 / (1 + 2.718281828**2)]
    expected = torch.tensor([4 + 0.5 * silu[0] * 3, -4 + 0.5 * silu[1] * -3]).view(1, 2, 1)
    torch.testing.assert_close(block(x, torch.zeros(1, 1)), expected, rtol=1e-5, atol=1e-5)


def test_tasks_share_the_mixing_of_tokens_and_have_private_weights_at_a_token():
    torch.manual_seed(0)
    both = {"advection1d": (PERIODIC,), "burgers1d": (PERIODIC,)}
    backbone, x, condition = FlatBackbone(MODEL, both), noise(2, 7, 8, 8), noise(2, 8, seed=1)
    alone = (torch.manual_seed(0), flat())[1].state_dict()
    for name, value in backbone.state_dict().items():  # all begin as the one of a single task
        assert torch.equal(value, alone[name.replace("advection1d", ANY).replace("burgers1d", ANY)]), name
    for block in backbone.blocks:
        for own in block.own.values():
            nn.init.normal_(own.modulation.bias, std=0.3)

    def change_of(part: str) -> list[bool]:
        before = [backbone(x, condition, task) for task in block.own]
        with torch.no_grad():
            backbone.get_parameter(part).mul_(1.5)
        after = [backbone(x, condition, task) for task in block.own]
        return [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]

    for part in ("up.weight", "down.weight", "modulation.bias"):
        assert change_of(f"blocks.0.own.burgers1d.{part}") == [False, True]
    assert change_of("blocks.0.spectral.weight") == change_of("blocks.0.local.weight") == [True, True]


def test_a_local_backbone_has_a_finite_receptive_field_and_is_zero_at_initialisation():
    torch.manual_seed(0)
    backbone, x, condition = (
        LocalBackbone(MODEL, 2, (PERIODIC,) * 2),
        noise(2, 21, 21, 8),
        noise(2, 8, seed=1),
    )
    assert torch.equal(backbone(x, condition), nn.functional.rms_norm(x, (8,)))
    for point in backbone.points:
        nn.init.normal_(point.modulation.weight, std=0.3)
        nn.init.normal_(point.down.weight, std=0.3)
    x.requires_grad_(True)
    y = backbone(x, condition)
    assert (y - nn.functional.rms_norm(x, (8,))).abs().max() > 0.1
    y[0, 10, 10].square().sum().backward()
    seen = x.grad.abs().amax(-1) > 0  # two tokens to either side, twice
    assert (
        seen[0, 10].nonzero().flatten().tolist()
        == seen[0, :, 10].nonzero().flatten().tolist()
        == list(range(6, 15))
    )
    assert not seen[1].any() and not seen[0, :6].any() and not seen[0, 15:].any()
    assert all(
        getattr(p.weight, "is_hidden_matrix", False)
        for point in backbone.points
        for p in (point.up, point.down)
    )
