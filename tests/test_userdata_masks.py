"""Cells without a value: in the same cells of every frame they are a mask, which nothing is fitted to,
forecast in or judged by; in a few frames they are gaps, which are refused or left out."""

import numpy as np
import pytest
import torch
import yaml
from user_files import (
    DT,
    SMALL,
    T,
    X,
    Y,
    base_error,
    config_of,
    doctor,
    forecast,
    operator_on,
    overlay,
    page_of,
    read,
    section,
    waves,
    write,
)

from ups.config.load import load_config, to_dict
from ups.data.build_cache import build_cache
from ups.data.cache import open_cache
from ups.data.sources import open_user
from ups.data.tokenizer import PatchMoments, Tokenizer, mask_as_text, mask_from_text
from ups.evaluation.forecast import assess_forecasts
from ups.evaluation.truth import open_truth
from ups.forecaster import Forecaster
from ups.metrics.ensembles import score_ensemble
from ups.metrics.errors import score
from ups.metrics.joint import score_trajectories
from ups.metrics.spectra import energy_spectrum
from ups.models.base_selection import fitted_candidates
from ups.userdata.describe import describe_file

LAND = (np.arange(X)[:, None] - 10) ** 2 + (np.arange(Y) - 3) ** 2 < 9
AXES = {"u": ["trajectory", "time", "x", "y"]}


def sea(value=np.nan, num=12):
    """A wave round a disc of land."""
    u = waves((num, T, X, Y))
    u[:, :, LAND] = value
    return u


def test_scores_of_a_masked_field_are_those_of_its_other_cells():
    """The fake: masked cells that count as cells without an error."""
    rng = torch.Generator().manual_seed(0)
    u = torch.randn(3, 4, 2, 8, 10, generator=rng).double()
    noise = torch.randn(3, 6, 4, 2, 8, 10, generator=rng).double()
    mask = torch.rand(8, 10, generator=rng) < 0.3
    masked, members = u.masked_fill(mask, torch.nan), u[:, None] + 0.1 * noise
    cells = ~mask
    found = score(members[:, 0], masked)
    flat = score(members[:, 0][..., cells], u[..., cells])
    for name in ("rmse", "ref_rms", "bias", "correlation"):
        assert torch.allclose(found[name], flat[name], rtol=1e-12, atol=1e-14), name
    assert torch.allclose(energy_spectrum(masked, "periodic").sum(-1), flat["ref_rms"].square(), rtol=1e-10)
    other = mask.clone()
    other[0] = ~mask[0]
    two = torch.stack([mask, other])  # one of each field
    found = score(members[:, 0], u.masked_fill(two, torch.nan))
    for channel in range(2):
        flat = score(*(v[:, :, channel : channel + 1][..., ~two[channel]] for v in (members[:, 0], u)))
        assert torch.allclose(found["rmse"][:, :, channel], flat["rmse"][:, :, 0], rtol=1e-12)
    for law in (None, u[:, None] + 0.1 * noise.flip(1)):
        flat = score_ensemble(
            members[..., cells],
            u[..., cells],
            rank_stride=1,
            exact=None if law is None else law[..., cells],
        )
        found = score_ensemble(members.masked_fill(mask, torch.nan), masked, rank_stride=1, exact=law)
        for name in flat:
            assert torch.allclose(found[name], flat[name], rtol=1e-10, atol=1e-13), name
        found, flat = (
            score_trajectories(members, masked, law),
            score_trajectories(members[..., cells], u[..., cells], None if law is None else law[..., cells]),
        )
        assert torch.allclose(found["trajectory_score"], flat["trajectory_score"], rtol=1e-10)
    broken = members[:, 0].clone()
    broken[0, 2, 0, 0, int(cells[0].int().argmax())] = torch.nan
    assert score(broken, masked)["rmse"].isinf().sum() == 1


@pytest.mark.parametrize("positive", [[], ["a", "b"]])
def test_statistics_are_those_of_the_cells_with_a_value(positive):
    u = np.random.default_rng(0).random((5, 3, 2, 8, 8)).astype("f4") + np.float32([1, 7])[:, None, None]
    mask = np.random.default_rng(1).random((2, 8, 8)) < 0.4
    u[:, :, mask] = np.nan
    moments = PatchMoments(["a", "b"], positive, (8, 8), 4, mask)
    for part in np.split(u, [2]):
        moments.add(part)
    codec = Tokenizer.from_moments(moments, 0, 1.0)
    w = (np.log(u) if positive else u).astype("f8")
    assert np.allclose(codec.mean, np.nanmean(w, (0, 1, 3, 4)), rtol=1e-6)
    assert np.allclose(codec.std, np.nanstd(w, (0, 1, 3, 4)), rtol=1e-5)
    w = codec.normalise(torch.from_numpy(u))
    z = codec.encode(w)
    assert (w[:, :, mask] == 0).all() and torch.equal(codec.decode(z)[:, :, mask], w[:, :, mask])
    energy = z.double().square().flatten(0, -2).mean(0)  # of the components, largest first
    assert torch.allclose(energy / energy.sum(), codec.spectrum.double(), atol=1e-6)
    assert np.allclose(codec.denormalise(codec.decode(z)).numpy(), u, rtol=1e-4, equal_nan=True)
    assert codec.is_sound() and codec.is_same(Tokenizer.from_state(codec.state_dict(), codec.meta()))
    assert np.array_equal(mask_from_text(mask_as_text(mask), mask.shape), mask)
    for text in ("1 2", "-1 129", "9" * 30, "x", "64.0 64"):
        with pytest.raises(ValueError, match="is not a mask of"):
            mask_from_text(text, mask.shape)


def test_land_is_the_same_however_it_is_written_and_no_forecast_is_there(tmp_path):
    found = {}
    for name, value in {"nan": np.nan, "fill": 1e20}.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder / "a.h5", u=sea(value))
        settings = section(folder, layout=AXES, **({} if name == "nan" else {"missing": value}))
        config, cache, operator = operator_on(folder, settings)
        start, u_pred = forecast(operator, cache)
        assert np.array_equal(u_pred.isnan().numpy(), np.broadcast_to(LAND, u_pred.shape))
        entry, samples = assess_forecasts(operator, open_truth(config, "ks"), config.evaluate, 0)
        found[name] = (
            entry.value("operator", "nrmse"),
            entry.value("persistence", "nrmse"),
            u_pred.nan_to_num(0),
        )
        words = [finding.what for finding in doctor(config) if "mask" in finding.what]
        assert words == [f"u: {LAND.mean():.0%} of its cells are a mask, the same in all frames"]
    assert found["nan"][:2] == found["fill"][:2] and torch.equal(found["nan"][2], found["fill"][2])
    u = open_user(config, "ks").read(0, 12)[cache.split["test"].numpy()][..., ~LAND]
    assert found["fill"][1]["value"] == pytest.approx(
        float(np.mean(np.sqrt(((u[:, 1:] - u[:, :1]) ** 2).mean(-1) / (u[:, 1:] ** 2).mean(-1)))), rel=1e-4
    )
    page_of(tmp_path, entry, samples)
    model = Forecaster(operator)
    u_pred = model.forecast("ks", sea()[:2, 0, None, None], num_frames=2)
    assert np.array_equal(np.isnan(u_pred), np.broadcast_to(LAND, u_pred.shape))
    filled = np.where(LAND, 123.0, sea()[:2, 0, None, None])  # whatever lies there
    assert np.array_equal(model.forecast("ks", filled, num_frames=2), u_pred, equal_nan=True)
    with pytest.raises(ValueError, match="expected finite numbers, but in the cells of its mask"):
        model.forecast("ks", np.full((1, 1, 1, X, Y), np.nan, "f4"))
    with pytest.raises(
        ValueError, match=r"on the grid \(8, 8\); expected \(16, 8\), as cells of it have no value"
    ):
        model.forecast("ks", np.zeros((1, 1, 1, 8, 8), "f4"), resample=True)
    with pytest.raises(ValueError, match="holds ks with the mask None; expected of .* runs"):
        write(folder / "a.h5", u=waves((12, T, X, Y)))
        config = config_of(folder, layout=AXES)
        build_cache(config, "ks", progress=False)
        operator.head_for(open_truth(config, "ks").cache)


def test_bases_see_no_coast(tmp_path, monkeypatch):
    """The fake: zeros at the coast, by which a spectral propagator has three times the error."""
    x = 2 * np.pi * np.arange(32) / 32
    phase, t = np.random.default_rng(0).random((12, 1, 1, 1)) * 6.28, np.arange(6)[:, None, None]
    u = np.sin(x[:, None] + x - 0.3 * t + phase).astype("f4")
    mask = (np.arange(32)[:, None] - 12) ** 2 + (np.arange(32) - 9) ** 2 < 20
    u[:, :, mask] = np.nan
    write(tmp_path / "a.h5", u=u)
    config = config_of(tmp_path, layout=AXES, base=["propagator"], degree=1)
    build_cache(config, "ks", progress=False)
    cache, errors = open_cache(config, "ks"), []
    for _ in range(2):
        [(_, head), *_] = fitted_candidates(cache, 1, 0, torch.device("cpu"))
        errors.append(base_error(head, cache, 1))
        monkeypatch.setattr(Tokenizer, "bridged", lambda self, w: w)
    assert errors[0] < 0.5 * errors[1], errors


def test_a_coefficient_and_a_solution_may_have_different_masks(tmp_path):
    a, u = waves((12, 1, X, Y))[:, 0], waves((12, 2, X, Y))[:, 1]
    u[:, LAND], a[:, ~LAND] = np.nan, np.nan
    write(tmp_path / "a.h5", a=a, u=u)
    axes = ["trajectory", "x", "y"]
    settings = section(tmp_path, layout={"a": axes, "u": axes}, inputs=["a"], dt=None)
    config, cache, operator = operator_on(tmp_path, settings, base="mean")
    u_pred = Forecaster(operator).forecast("ks", a[:3, None, None])
    assert np.array_equal(np.isnan(u_pred), np.broadcast_to(LAND, u_pred.shape))
    entry, _ = assess_forecasts(operator, open_truth(config, "ks"), config.evaluate, 0)
    assert entry.number("operator", "nrmse") > 0


def test_what_is_no_mask_is_refused(tmp_path):
    """Cells of a mask hold no number anywhere, and no symmetry moves them."""
    u = sea()
    u[4, 1, LAND] = 1.0
    write(tmp_path / "a.h5", u=u)
    config = config_of(tmp_path, layout=AXES)
    with pytest.raises(
        ValueError, match=r"a.h5 holds 1 in u of trajectory 4, frame 1; expected none, as this cell has no"
    ):
        build_cache(config, "ks", progress=False)
    assert any("trajectory 4, frame 1, u, cell" in finding.what for finding in doctor(config))
    write(tmp_path / "a.h5", u=sea())
    config = config_of(tmp_path, layout=AXES, symmetries=["shift"])
    with pytest.raises(
        ValueError, match=r"task.ks.symmetries: it names shift, and cells of .*a.h5 have no value"
    ):
        build_cache(config, "ks", progress=False)
    config = config_of(tmp_path, layout=AXES, missing=[1e20, -9999, "nan"])
    path = tmp_path / "kept.yaml"  # as stages keep it
    path.write_text(yaml.safe_dump(to_dict(config)), encoding="utf-8")
    assert load_config(path) == config
    with pytest.raises(
        ValueError, match="task.ks.missing: it is 'land'; expected a number that means missing"
    ):
        config_of(tmp_path, layout=AXES, missing="land")


@pytest.mark.parametrize(("cut", "begins"), [(0, [0] * 10), (2, [0, 2] * 10 + [0, 3] + [0])])
def test_frames_with_gaps_are_refused_or_skipped(tmp_path, cut, begins):
    u = waves((12, T, X))
    u[10, 2, 5], u[11, 2:, 3] = np.nan, np.nan
    write(tmp_path / "a.h5", u=u)
    settings = section(tmp_path, cut=cut or None)
    config = load_config(overlay(tmp_path, settings))
    with pytest.raises(
        ValueError, match=r"a.h5 holds nan in u of trajectory 10, frame 2; .* task.ks.skip_missing: true"
    ):
        build_cache(config, "ks", progress=False)
    assert (
        any(
            "trajectory 10, frame 2, u, cell (5,)" in finding.what
            and "task.ks.skip_missing: true" in finding.do
            for finding in doctor(config)
        )
        or cut
    )
    config, source, found = read(tmp_path, settings | {"skip_missing": True})
    assert source.rows[:, 2].tolist() == begins and np.isfinite(found).all()
    assert (
        source.notes[0] == "4 of 60 frames are left out, in which cells have no value that have one elsewhere"
    )
    build_cache(config, "ks", progress=False)
    write(
        tmp_path / "a.h5",
        u=np.where(np.arange(T)[:, None] % 2 * (np.arange(X) == np.arange(12)[:, None, None]), np.nan, u),
    )
    with pytest.raises(
        ValueError, match=r"task.ks.cut: no \d+ frames follow each other, as cells have no value in"
    ):
        read(tmp_path, settings | {"skip_missing": True})


def test_runs_of_other_lengths_in_groups_are_as_those_in_files(tmp_path):
    u, lengths = waves((6, 2 * T, X)), [T, T + 3, 2 * T, T, T + 1, T]
    write(
        tmp_path / "a.h5",
        **{f"run_{i}__u": u[i, :n] for i, n in enumerate(lengths)},
        **{f"run_{i}__t": DT * np.arange(n) for i, n in enumerate(lengths)},
    )
    (tmp_path / "files").mkdir()
    for i, n in enumerate(lengths):
        write(tmp_path / "files" / f"run_{i}.h5", u=u[i, :n])
    _, source, found = read(tmp_path, layout={"*/u": ["time", "x"]}, dt=None)
    _, other, same = read(tmp_path, files=str(tmp_path / "files/*.h5"), layout={"u": ["time", "x"]})
    assert np.array_equal(found, same) and source.dt == DT
    assert "the first 5 frames, of up to 10" in source.notes
    assert "the first 5 frames, of up to 10" in other.notes
    _, source, _ = read(tmp_path, layout={"*/u": ["time", "x"]}, dt=None, cut=4)
    assert source.rows.tolist() == [
        [0, i, begin] for i, n in enumerate(lengths) for begin in range(0, n - 3, 4)
    ]
    write(tmp_path / "a.h5", **{f"run_{i}__u": u[i, :n] for i, n in enumerate(lengths[1:])})
    with pytest.raises(
        ValueError,
        match=r"task.ks.num_frames: .*a.h5 holds 5 frames in run_2; expected 8 as in .*run_0.*: 5 to",
    ):
        read(tmp_path, layout={"*/u": ["time", "x"]})


PHASE = np.random.default_rng(0).random((8, 1, 1, 1)) * 6.28
WAVE = np.sin(
    2 * np.pi * (np.arange(32)[:, None] + np.arange(32)) / 32 - 0.3 * np.arange(6)[:, None, None] + PHASE
)


def at(u, index, value):
    u = u.copy()
    u[index] = value
    return u


@pytest.mark.parametrize(
    ("u", "value"),
    [
        (at(WAVE, np.s_[:, :, :9], -9999), -9999),
        (at(WAVE, np.s_[:, :, :29], -9999), -9999),
        (at(WAVE, np.s_[3, 4, 5:9, 5:9], 1e20), 1e20),
        (at(5 + WAVE, np.s_[3, 4], 0), 0),
        (at(at(280 + 20 * WAVE, np.s_[0, 0, 1, 1], 0), np.s_[5, 3, 1, 1], 0), 0),
        (at(0.5 + 0.5 * WAVE, np.s_[3, 4, 5:9, 5:9], -1), -1),
    ],
)
def test_a_value_far_from_all_others_is_refused_with_a_question(tmp_path, u, value):
    write(tmp_path / "a.h5", u=u.astype("f4"))
    config = config_of(tmp_path, layout=AXES)
    found = [finding for finding in doctor(config) if "seems to stand for none" in finding.what]
    assert [finding.do.split(",")[0] for finding in found] == [f"write task.ks.missing: {value:g}"]
    if (u == value).sum() > 1000 and value:  # few cells and frames are looked at
        assert f"    missing: {value:g}   # u is {value:g} in many cells" in describe_file(
            str(tmp_path / "a.h5")
        )
    config = config_of(tmp_path, layout=AXES, missing="nan")
    assert not any("seems to stand for none" in finding.what for finding in doctor(config))


@pytest.mark.parametrize(
    "u",
    [
        np.maximum(WAVE, 0),
        np.clip(1.5 * WAVE, -1, 1),
        (WAVE > 0) * 1.0,
        np.round(10 * WAVE),
        np.where(WAVE > 0, 12.0, 3.0),
        np.maximum(0, 4 * WAVE - 3),
        np.exp(6 * WAVE),
        0 * WAVE + 3,
    ],
)
def test_plateaus_and_phases_are_values_of_a_field(tmp_path, u):
    write(tmp_path / "a.h5", u=u.astype("f4"))
    config = config_of(tmp_path, layout=AXES)
    assert not any("seems to stand for none" in finding.what for finding in doctor(config))
    assert "missing:" not in describe_file(str(tmp_path / "a.h5"))


def test_a_description_of_land_loads_and_reads_as_land(tmp_path):
    write(
        tmp_path / "a.h5",
        u=sea(-9999),
        x=(np.arange(X) + 0.5) / X,
        y=(np.arange(Y) + 0.5) / Y,
        t=DT * np.arange(T),
    )
    path = tmp_path / "my_data.yaml"
    text = describe_file(str(tmp_path / "a.h5")).replace(
        "configs/small.yaml", f"{SMALL}\ncache: {{root: {tmp_path}}}"
    )
    path.write_text(text, encoding="utf-8")
    config = load_config(path)
    assert config.task["a"].missing == ["-9999"] and config.task["a"].boundary == "periodic"
    assert np.array_equal(open_user(config, "a").mask[0], LAND)
    with pytest.raises(
        ValueError, match="u is -9999 in .* seems to stand for none; .* write task.a.missing: -9999, and"
    ):
        build_cache(load_config(path, ["task.a.missing=[]"]), "a", progress=False)


def test_a_description_of_runs_in_groups_is_one_field_of_many_runs(tmp_path):
    lengths = [T + 3, T, 2 * T, T, T + 1, T]
    write(
        tmp_path / "a.h5",
        **{
            f"run_{i}__{name}": waves((6, 2 * T, X), seed)[i, :n]
            for i, n in enumerate(lengths)
            for seed, name in enumerate(("u", "v"))
        },
    )
    text = describe_file(str(tmp_path / "a.h5"))
    assert '"*/u": [time, x]' in text
    assert '"*/v": [time, x]' in text
    assert f"num_frames: {T}   # runs hold {T} to {2 * T}" in text
