"""A boundary per axis, as in a channel: periodic along it, walls across; each part is that of its own
axis."""

import math
from dataclasses import replace

import pytest
import torch

from ups.metrics.spectra import energy_spectrum
from ups.models.backbones.layers import LocalMixing, SpectralMixing
from ups.models.bases.base import ParameterBatch
from ups.models.bases.elliptic import Elliptic
from ups.models.bases.transport import Transport
from ups.models.windows import symmetry
from ups.tasks import get_task
from ups_discovery.boundary import DIRICHLET, NO_FLUX, PERIODIC, along
from ups_discovery.spectral import FieldTransform, cosine, resample

CHANNEL = f"{PERIODIC},{NO_FLUX}"


def noise(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_one_name_is_for_all_axes_and_several_for_one_each():
    assert along(PERIODIC, 3) == (PERIODIC,) * 3 and along(CHANNEL, 2) == (PERIODIC, NO_FLUX)
    with pytest.raises(AssertionError):
        along(CHANNEL, 3)


def test_the_modes_of_a_channel_are_fourier_along_and_cosine_across():
    transform, x, y = FieldTransform((8, 6), CHANNEL), torch.arange(8) / 8, (torch.arange(6) + 0.5) / 6
    u = torch.cos(2 * math.pi * 2 * x)[:, None] * torch.cos(math.pi * 3 * y)
    size = transform.forward(u).unflatten(-1, transform.shape).abs()
    assert torch.nonzero(size > 1e-5).tolist() == [[2, 3]]  # of axis 0 the half spectrum


@pytest.mark.parametrize("mixing", [SpectralMixing(4, 3), LocalMixing(4, 3)])
def test_mixing_is_the_sum_over_axes_of_that_behind_each_axis_own_ends(mixing):
    x = noise(2, 6, 5, 4)
    lines = mixing(x.transpose(1, 2).reshape(10, 6, 4), (PERIODIC,)).view(2, 5, 6, 4).transpose(1, 2)
    columns = mixing(x.reshape(12, 5, 4), (NO_FLUX,)).view(2, 6, 5, 4)
    torch.testing.assert_close(mixing(x, along(CHANNEL, 2)), lines + columns, rtol=0, atol=1e-5)
    assert not torch.allclose(mixing(x, along(CHANNEL, 2)), mixing(x, (PERIODIC,) * 2), atol=1e-3)


def test_a_mixed_spectrum_holds_all_energy_and_a_wave_where_it_is():
    u = noise(1, 1, 1, 8, 6, dtype=torch.float64)
    torch.testing.assert_close(energy_spectrum(u, CHANNEL).sum(), u.square().mean())
    x = torch.arange(8, dtype=torch.float64) / 8
    wave = torch.cos(2 * math.pi * 3 * x)[:, None].expand(8, 6)[None, None, None]
    assert int(energy_spectrum(wave, CHANNEL).argmax()) == 3
    shear = cosine(6)[4].expand(8, 6)[None, None, None]  # two cycles per box
    assert int(energy_spectrum(shear, CHANNEL).argmax()) == 2


def test_a_field_of_few_modes_is_resampled_exactly_along_each_kind_of_axis():
    def field(n, m):
        x, y = torch.arange(n) / n, (torch.arange(m) + 0.5) / m
        return torch.sin(2 * math.pi * x)[:, None] * (1 + torch.cos(2 * math.pi * y))

    torch.testing.assert_close(resample(field(8, 6), (16, 9), CHANNEL), field(16, 9), rtol=0, atol=1e-5)


def test_shifts_go_along_periodic_axes_alone_and_axes_of_other_ends_are_not_exchanged():
    u = noise(1, 1, 1, 6, 6)
    task = replace(get_task("diff_react2d"), boundary=CHANNEL, is_symmetric=False, vector=())

    def images(task):
        rng = torch.Generator().manual_seed(1)
        return [symmetry(task, (6, 6), rng)(u, None) for _ in range(40)]

    shifted = images(task)
    rows = {tuple(u[0, 0, 0].roll(s, 0).flatten().tolist()) for s in range(6)}
    assert {tuple(image.flatten().tolist()) for image in shifted} == rows
    mirrored = images(replace(task, is_symmetric=True, is_shifted=False))
    assert len({tuple(image.flatten().tolist()) for image in mirrored}) == 4  # two mirrors, no exchange
    assert all(torch.equal(image, u) for image in images(replace(task, is_shifted=False)))


def test_transport_and_the_elliptic_solve_wrap_around_periodic_axes_alone():
    base = Transport(0, 1, (8, 6), CHANNEL, reach=2)
    torch.nn.init.constant_(base.log_width, 0.0)
    u = torch.zeros(1, 1, 1, 8, 6)
    parameters = ParameterBatch(torch.zeros(1, 0), torch.zeros(1, dtype=torch.long))
    u[..., 0, 0] = 1.0
    out = base(u, parameters)[0, 0]
    assert out[-1].abs().max() > 0.01 and out[:, -1].abs().max() < 1e-7
    torch.manual_seed(0)
    solve = Elliptic(0, 1, 1, (8, 6), f"{PERIODIC},{DIRICHLET}")
    a = noise(1, 1, 1, 8, 6)
    one, other = solve(a, parameters), solve(a.roll(3, -2), parameters)
    torch.testing.assert_close(one.roll(3, -2), other, rtol=1e-4, atol=1e-4 * float(one.detach().abs().max()))
    assert not torch.allclose(solve(a.roll(3, -1), parameters), one.roll(3, -1), rtol=0.1)
