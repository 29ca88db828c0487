"""The patch-POD codec against linear algebra: orthonormality, Parseval, truncation, a plain SVD,
streaming."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toy_codec import fit_codec

from ups.data.tokenizer import PatchMoments, Tokenizer

CASES = [
    (1, ("u",), ()),
    (1, ("rho", "p", "v"), ("rho", "p")),
    (2, ("u", "v"), ()),
    (2, ("h",), ("h",)),
    (3, ("rho", "v"), ("rho",)),
]


def make_field(
    ndim: int, fields: tuple[str, ...], positive: tuple[str, ...], num: int = 6, size: int = 8, seed: int = 0
) -> np.ndarray:
    """Smooth correlated random fields (num, 3, C, *space), offset and scaled per channel, exp of them where
    positive."""
    generator = np.random.default_rng(seed)
    u = generator.standard_normal((num, 3, len(fields), *[size] * ndim))
    for axis in range(3, 3 + ndim):
        u = u.cumsum(axis) / 3
    u = 0.7 * u + 0.3 * u.mean(2, keepdims=True)
    for channel, name in enumerate(fields):
        u[:, :, channel] = (
            np.exp(0.3 * u[:, :, channel]) if name in positive else 5.0 + 10.0**channel * u[:, :, channel]
        )
    return u.astype(np.float32)


def fit(u: np.ndarray, fields: tuple[str, ...], positive: tuple[str, ...] = (), **settings) -> Tokenizer:
    return fit_codec([u], fields=fields, positive=positive, **{"patch": 4, **settings})


@pytest.mark.parametrize(("ndim", "fields", "positive"), CASES)
def test_full_rank_codec_is_orthonormal_isometric_and_exact(ndim, fields, positive):
    u = make_field(ndim, fields, positive)
    codec = fit(u, fields, positive)
    assert codec.dim == codec.width == len(fields) * 4**ndim
    assert codec.kept_energy == pytest.approx(1.0, abs=1e-6)
    basis = codec.basis.double()
    assert torch.allclose(basis.T @ basis, torch.eye(codec.dim, dtype=torch.float64), atol=1e-6)
    w = codec.normalise(torch.from_numpy(u))
    z = codec.encode(w)
    assert z.shape == (6, 3, *[2] * ndim, codec.dim) == (6, 3, *codec.tokens, codec.dim)
    assert float(z.double().square().sum()) == pytest.approx(float(w.double().square().sum()), rel=1e-6)
    assert torch.allclose(codec.decode(z), w, atol=5e-6)
    assert torch.allclose(
        codec.denormalise(codec.decode(z)), torch.from_numpy(u), rtol=2e-6, atol=2e-6 * float(np.abs(u).max())
    )


def test_normalised_field_has_mean_zero_and_variance_one_in_log_space_where_positive():
    u = make_field(2, ("h", "v"), ("h",))
    codec = fit(u, ("h", "v"), ("h",))
    assert codec.positive == ("h",)
    w = codec.normalise(torch.from_numpy(u)).double()
    assert torch.allclose(w.mean((0, 1, 3, 4)), torch.zeros(2, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(w.var((0, 1, 3, 4), correction=0), torch.ones(2, dtype=torch.float64), atol=1e-6)
    assert float(codec.mean[0]) == pytest.approx(np.log(u[:, :, 0].astype(np.float64)).mean(), rel=1e-6)


@pytest.mark.parametrize(("ndim", "fields", "positive"), CASES)
def test_basis_and_spectrum_equal_a_plain_svd_of_all_patches(ndim, fields, positive):
    u = make_field(ndim, fields, positive)
    codec = fit(u, fields, positive, patch=2)
    v = u.astype(np.float64)
    for channel, name in enumerate(fields):
        v[:, :, channel] = np.log(v[:, :, channel]) if name in positive else v[:, :, channel]
    axes = (0, 1, *range(3, 3 + ndim))
    w = (v - v.mean(axes, keepdims=True)) / v.std(axes, keepdims=True)
    rows = []  # patches cut by plain loops, independent of patchify
    for corner in np.ndindex(*[4] * ndim):
        cut = tuple(slice(2 * at, 2 * at + 2) for at in corner)
        rows.append(w[(slice(None), slice(None), slice(None), *cut)].reshape(18, -1))
    _, values, vectors = np.linalg.svd(np.concatenate(rows), full_matrices=False)
    assert np.allclose(codec.spectrum.numpy(), values**2 / (values**2).sum(), atol=1e-6)
    overlap = np.abs((vectors @ codec.basis.double().numpy()).diagonal())
    assert overlap[:3] == pytest.approx(1.0, abs=1e-5)


def test_truncation_error_on_the_training_data_is_the_discarded_energy():
    u = make_field(2, ("u", "v"), ())
    for dim in (1, 4, 9, 31):
        codec = fit(u, ("u", "v"), dim=dim)
        w = codec.normalise(torch.from_numpy(u))
        error = (codec.decode(codec.encode(w)) - w).double().square().sum() / w.double().square().sum()
        assert float(error) == pytest.approx(1.0 - codec.kept_energy, rel=1e-4)
        assert codec.kept_energy == pytest.approx(float(codec.spectrum[:dim].sum()), abs=1e-6)


def test_dim_by_energy_is_the_smallest_that_keeps_it():
    u = make_field(1, ("u",), (), size=32)
    for energy in (0.5, 0.9, 0.99, 0.9999):
        codec = fit(u, ("u",), patch=16, energy=energy)
        kept = codec.spectrum.double().cumsum(0)
        assert kept[codec.dim - 1] >= energy - 1e-6 and (codec.dim == 1 or kept[codec.dim - 2] < energy)
    assert fit(u, ("u",), patch=16, energy=1.0).dim == 16


def test_streamed_fit_equals_fit_at_once():
    u = make_field(2, ("rho", "v"), ("rho",), num=9)
    whole = PatchMoments(("rho", "v"), ("rho",), u.shape[3:], 4)
    whole.add(u)
    parts = PatchMoments(("rho", "v"), ("rho",), u.shape[3:], 4)
    for part in (u[:1], u[1:2], u[2:7], u[7:]):
        parts.add(part)
    assert whole.count == parts.count == 9 * 3 * 4
    first, second = Tokenizer.from_moments(whole, 7, 1.0), Tokenizer.from_moments(parts, 7, 1.0)
    for name, value in first.state_dict().items():
        assert torch.allclose(value, second.state_dict()[name], rtol=1e-6, atol=1e-6), name


def test_statistics_survive_a_mean_far_above_the_deviation():
    u = make_field(1, ("u",), ()).astype(np.float64)
    far = (1e4 + u).astype(np.float32)
    assert float(fit(far, ("u",)).std) == pytest.approx(float(far.astype(np.float64).std()), rel=1e-5)


def test_fit_is_deterministic_and_the_sign_of_a_mode_is_fixed():
    u = make_field(1, ("u",), (), size=32)
    first, second = fit(u, ("u",)), fit(u.copy(), ("u",))
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    mirrored = fit(2 * u.mean() - u, ("u",))  # same covariance: the modes must not flip
    assert torch.allclose(first.basis, mirrored.basis, atol=1e-4)
    leaders = first.basis.abs().argmax(0)
    assert bool((first.basis.gather(0, leaders[None]) > -1e-3).all())


def test_constant_channel_is_kept_exactly():
    u = make_field(1, ("u", "v"), ())
    u[:, :, 1] = 3.25
    codec = fit(u, ("u", "v"))
    w = codec.normalise(torch.from_numpy(u))
    assert float(codec.std[1]) == 1.0 and w[:, :, 1].abs().max() == 0
    assert torch.allclose(
        codec.denormalise(codec.decode(codec.encode(w)))[:, :, 1], torch.tensor(3.25), atol=1e-5
    )


def test_state_restores_the_codec_bitwise(tmp_path):
    codec = fit(make_field(2, ("h", "v"), ("h",)), ("h", "v"), ("h",), dim=6)
    from safetensors.torch import load_file, save_file

    save_file(codec.state_dict(), tmp_path / "codec.safetensors")
    restored = Tokenizer.from_state(load_file(tmp_path / "codec.safetensors"), codec.meta())
    u = torch.from_numpy(make_field(2, ("h", "v"), ("h",), seed=1))
    assert torch.equal(codec.encode(codec.normalise(u)), restored.encode(restored.normalise(u)))
    assert restored.meta() == codec.meta() and repr(restored) == repr(codec)


def test_non_positive_value_in_a_log_channel_is_refused():
    u = make_field(1, ("h",), ("h",))
    codec = fit(u, ("h",), ("h",))
    u[2, 1, 0, 3] = -0.5
    with pytest.raises(ValueError, match="h reaches -0.5; expected positive values"):
        codec.normalise(torch.from_numpy(u))
    with pytest.raises(ValueError, match="expected positive values"):
        fit(u, ("h",), ("h",))
