"""The latent cache: what it holds, that it is shared and picklable, and that nothing damaged or stale passes
for whole."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import time
import zlib
from dataclasses import fields, replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from cases import cases

import prepare_cache
from ups.common import files
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config, TaskConfig
from ups.data import build_cache as cache_build
from ups.data import cache as cache_module
from ups.data import tokenizer
from ups.data.build_cache import build_cache, data_files, is_up_to_date, plan, same_source
from ups.data.cache import open_cache, place
from ups.data.generate import generation_settings, write_data
from ups.data.latents import Latents
from ups.data.pdebench import split_indices
from ups.data.seal import read_seal, write_seal
from ups.tasks import TASKS, get_task

NUM, FRAMES = 12, 7
SMALL = [f"task.{task}.num_trajectories={NUM}" for task in ("advection1d", "darcy2d", "diff_react2d")] + [
    *(
        "data.tasks=[advection1d,darcy2d,diff_react2d] task.advection1d.resolution=32 "
        f"task.advection1d.num_frames={FRAMES} task.darcy2d.resolution=16 "
        f"task.diff_react2d.resolution=16 task.diff_react2d.num_frames={FRAMES} "
        "task.diff_react2d.dim=5 cache.chunk=5"
    ).split(),
    *(f"task.{task}.history=1" for task in ("advection1d", "darcy2d", "diff_react2d")),
]


def settings(root: Path, *more: str) -> Config:
    return load_config(
        ROOT / "configs" / "smoke.yaml", [f"data.root={root}/data", f"cache.root={root}/cache", *SMALL, *more]
    )


def fake_solver(indices, *, seed, resolution, num_frames, parameter, t_end, task):
    """Travelling waves of random phase: (n, time, channel, *space), trajectory i a function of (seed, i)."""
    spec = get_task(task)
    x = np.stack(np.meshgrid(*[np.arange(resolution) / resolution] * spec.ndim, indexing="ij"))
    out = []
    for index in indices:
        generator = np.random.default_rng((seed, index))
        t = np.linspace(0, t_end, num_frames).reshape(-1, 1, *[1] * spec.ndim)
        wave = 0
        for k in range(1, 5):
            phase = generator.uniform(0, 2 * np.pi, (1, len(spec.channels), *[1] * spec.ndim))
            wave = wave + np.sin(2 * np.pi * k * (x.sum(0) - (parameter or 1.0) * t) + phase) / k
        out.append(2.0 + 0.3 * wave)
    return np.stack(out).astype(np.float32)


def write_all(config: Config) -> None:
    for task in config.data.tasks:
        wanted = config.task[task]
        for path, parameter in zip(data_files(config, task), wanted.parameters or [None], strict=True):
            made = generation_settings(
                task,
                "test",
                seed=1,
                num_trajectories=wanted.num_trajectories,
                t_end=wanted.t_end,
                resolution=wanted.resolution,
                num_frames=wanted.num_frames,
                parameter=parameter,
            )
            write_data(
                path,
                task,
                lambda indices, task=task, **kw: fake_solver(indices, task=task, **kw),
                made,
                chunk=50,
            )


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Config:
    config = settings(tmp_path_factory.mktemp("cache"))
    write_all(config)
    for task in config.data.tasks:
        build_cache(config, task, progress=False)
    return config


@pytest.fixture
def copy(built, tmp_path) -> tuple[Config, Path]:
    """A copy of the advection cache that a test may damage."""
    config = replace(built, cache=replace(built.cache, root=str(tmp_path)))
    path = config.cache_path("advection1d")
    path.write_bytes(built.cache_path("advection1d").read_bytes())
    return config, path


def damage(path: Path, position: int, mask: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


# ---------------------------------------------------------------------------------------------------- content


def test_rows_follow_file_order_and_decode_to_the_data(built):
    cache = open_cache(built, "advection1d")
    assert (cache.num_rows, cache.num_frames) == (2 * NUM, FRAMES)
    assert cache.parameters.tolist() == [[0.4]] * NUM + [[1.0]] * NUM
    assert cache.parameters.dtype == torch.float64
    assert cache.parameter_values[cache.parameter_index].tolist() == cache.parameters[:, 0].tolist()
    assert cache.trajectory.tolist() == [*range(NUM)] * 2
    assert cache.dt == pytest.approx(0.75 / (FRAMES - 1), rel=1e-5)
    for file, path in enumerate(data_files(built, "advection1d")):
        with h5py.File(path) as data:
            u = torch.from_numpy(data["tensor"][()])[:, :, None]
        z = cache.batch(range(file * NUM, file * NUM + NUM), 0, FRAMES)
        assert torch.allclose(cache.tokenizer.denormalise(cache.tokenizer.decode(z)), u, atol=2e-6)


@pytest.mark.parametrize("task", ["advection1d", "darcy2d"])
def test_data_files_are_those_of_the_cache_by_their_values_not_by_their_age(built, tmp_path, task):
    """What a report scores against must be what the latents are of."""
    config = replace(built, data=replace(built.data, root=str(tmp_path)))
    cache = open_cache(config, task)
    with pytest.raises(
        FileNotFoundError, match="no data file .*expected .* in PDEBench's layout. Run `make data`"
    ):
        same_source(config, cache)
    for old, new in zip(data_files(built, task), data_files(config, task), strict=True):
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(old.read_bytes())
    same_source(config, cache)  # a copy, younger than the cache
    with h5py.File(new, "r+") as file:
        name = "nu" if "nu" in file else "tensor"
        file[name][NUM - 1, ..., 3] = np.nextafter(file[name][NUM - 1, ..., 3], np.float32(9))
    with pytest.raises(
        ValueError,
        match="the data files of .* hold other values than those that .*h5 was built from; expected",
    ):
        same_source(config, cache)


def test_steady_cache_holds_input_and_solution_with_a_tokenizer_each(built):
    cache = open_cache(built, "darcy2d")
    assert cache.task.is_steady and (cache.num_frames, cache.dt) == (1, 0.0)
    assert (cache.tokenizer.fields, cache.input_tokenizer.fields) == (("u",), ("a",))
    with h5py.File(data_files(built, "darcy2d")[0]) as data:
        a, u = torch.from_numpy(data["nu"][()])[:, None, None], torch.from_numpy(data["tensor"][()])[:, None]
    rows = torch.arange(NUM)
    a_pred = cache.input_tokenizer.denormalise(cache.input_tokenizer.decode(cache.inputs(rows)))
    u_pred = cache.tokenizer.denormalise(cache.tokenizer.decode(cache.batch(rows, 0, 1)))
    assert torch.allclose(a_pred, a, atol=1e-5) and torch.allclose(u_pred, u, atol=1e-5)


def test_split_is_by_trajectory_and_the_same_for_all_parameters(built):
    cache = open_cache(built, "advection1d")
    by_index = split_indices("advection1d", NUM, built.data.val_fraction, built.data.test_fraction)
    assert sorted(torch.cat([*cache.split.values()]).tolist()) == list(range(cache.num_rows))
    assert len(cache.split["reserved"]) == 0
    for name in ("train", "val", "test"):
        rows = cache.split[name]
        assert sorted(set(cache.trajectory[rows].tolist())) == by_index[name].tolist()
        assert set(cache.parameter_index[rows].tolist()) == {0, 1}


def test_tokenizer_sees_the_training_split_only(built):
    cache = open_cache(built, "diff_react2d")
    index = split_indices("diff_react2d", NUM, 0.1, 0.1)["train"]
    with h5py.File(data_files(built, "diff_react2d")[0]) as data:
        u = np.stack([data[f"{i:04d}/data"][()] for i in index]).astype(np.float64)
    assert np.allclose(cache.tokenizer.mean, u.mean((0, 1, 2, 3)), rtol=1e-6)
    assert np.allclose(cache.tokenizer.std, u.std((0, 1, 2, 3)), rtol=1e-6)


def test_held_out_trajectories_decode_to_the_data_but_for_the_modes_that_are_not_kept(built):
    cache = open_cache(built, "diff_react2d")
    rows = cache.split["test"]
    with h5py.File(data_files(built, "diff_react2d")[0]) as data:
        u = (
            torch.from_numpy(np.stack([data[f"{i:04d}/data"][()] for i in rows.tolist()]))
            .permute(0, 1, 4, 2, 3)
            .double()
        )
    u_pred = cache.tokenizer.denormalise(cache.tokenizer.decode(cache.batch(rows, 0, FRAMES))).double()
    ratio = ((u_pred - u).square().mean((3, 4)) / u.square().mean((3, 4))).sqrt()
    assert 1e-3 < float(ratio.mean()) < 1.0  # 5 of 32


def test_batch_is_the_slice_it_names(built):
    cache = open_cache(built, "advection1d")
    everything = torch.stack([cache.batch([row], 0, FRAMES)[0] for row in range(cache.num_rows)])
    with h5py.File(cache.path) as file:
        assert np.array_equal(file["state/latents"][()], everything.numpy())
    rows, starts = torch.tensor([23, 0, 5, 5]), torch.tensor([4, 0, 2, 1])
    z = cache.batch(rows, starts, 3)
    assert z.shape == (4, 3, *cache.tokenizer.tokens, cache.tokenizer.dim) and z.dtype == torch.float32
    assert all(torch.equal(z[i], everything[rows[i], starts[i] : starts[i] + 3]) for i in range(4))
    z.zero_()  # a copy: the file is untouched
    assert torch.equal(cache.batch(rows, starts, 3)[0], everything[23, 4:7])


def test_placed_latents_give_the_same_batches(built):
    mapped, placed = open_cache(built, "darcy2d"), open_cache(built, "darcy2d")
    assert place([placed], "cpu", "device") == "device"
    assert place([mapped], "cpu", "auto") == "mmap"  # the page cache already is the copy
    rows = torch.tensor([3, 1])
    assert torch.equal(mapped.batch(rows, 0, 1), placed.batch(rows, 0, 1))
    assert torch.equal(mapped.inputs(rows), placed.inputs(rows))
    assert place([mapped, open_cache(built, "advection1d")], "cpu", "device", 0.5) == "device"


@pytest.mark.parametrize("task", ["advection1d", "diff_react2d"])
def test_long_trajectories_are_read_by_frames_and_give_the_same_bits(built, tmp_path, monkeypatch, task):
    """Two frames at a time, which need not divide how many there are, against whole trajectories; by one
    codec, as what is subtracted from the moments against cancellation is of the frames that come first."""
    config = fresh(built, tmp_path, "cache.chunk=1")
    path, spec = config.cache_path(task), get_task(task)
    size = 2 * math.prod(config.task[task].cells(spec.ndim)) * len(spec.channels)
    monkeypatch.setattr(tokenizer, "SLAB", size)
    found, read = [], []
    digests = cache_build.frame_digests
    monkeypatch.setattr(
        cache_build, "frame_digests", lambda u, task: read.append(u.shape[1]) or digests(u, task)
    )
    fitted, fit = [], tokenizer.Tokenizer.from_moments
    monkeypatch.setattr(
        tokenizer.Tokenizer, "from_moments", lambda *arguments: fitted.append(fit(*arguments)) or fitted[0]
    )
    for at_once in (2**30, size):
        monkeypatch.setattr(cache_build, "SLAB", at_once)
        build_cache(config, task, progress=False)
        with h5py.File(path, "r") as file:
            names = []
            file.visit(names.append)
            arrays = {name: file[name][()] for name in names if isinstance(file[name], h5py.Dataset)}
        found.append((json.loads(arrays.pop("header").tobytes()), arrays))
    assert set(read) == {FRAMES, 2, 1} and FRAMES % 2
    for one, two in zip(fitted[0].buffers(), fitted[1].buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    (whole, first), (parts, second) = found
    assert first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)
    assert whole == parts


def test_fingerprint_follows_the_data_and_the_settings(built, tmp_path):
    before = open_cache(built, "advection1d").fingerprint
    prints = {before}
    for more in ("task.advection1d.patch=8", "task.advection1d.time_stride=2", "data.val_fraction=0.2"):
        config = settings(tmp_path, f"data.root={built.data.root}", more)
        build_cache(config, "advection1d", progress=False)
        prints.add(open_cache(config, "advection1d").fingerprint)
    config = settings(tmp_path)
    write_all(config)
    with h5py.File(data_files(config, "advection1d")[1], "r+") as data:
        data["tensor"][3, 2, 1] += 1e-3
    build_cache(config, "advection1d", progress=False)
    prints.add(open_cache(config, "advection1d").fingerprint)
    assert len(prints) == 5


# ---------------------------------------------------------------------------------------------------- sharing


def test_cache_is_picklable_and_survives_a_fork(built):
    cache = open_cache(built, "advection1d")
    text = pickle.dumps(cache)
    assert len(text) < 5000  # the path, not the latents
    assert torch.equal(pickle.loads(text).batch([3], 1, 2), cache.batch([3], 1, 2))
    expected = float(cache.batch([3], 1, 2).sum())
    child = os.fork()
    if child == 0:
        os._exit(0 if float(cache.batch([3], 1, 2).sum()) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loader = torch.utils.data.DataLoader(
        range(4), num_workers=1, collate_fn=lambda rows: cache.batch(rows, 0, 2)
    )
    assert torch.equal(next(iter(loader)), cache.batch([0], 0, 2))


def test_damage_that_quick_opening_misses_is_found_when_its_row_is_read(copy, monkeypatch):
    config, path = copy
    monkeypatch.setattr(cache_module, "FULL_BYTES", 0)
    (start, num_bytes), whole = read_seal(path)["latents"][0], path.read_bytes()
    generator = np.random.default_rng(0)
    for position in generator.integers(num_bytes, size=30):
        damage(path, start + int(position), 1 << int(generator.integers(8)))
        cache = open_cache(config, "advection1d")
        row = int(position) // (num_bytes // cache.num_rows)
        others = [other for other in range(cache.num_rows) if other != row]
        cache.batch(others, 0, 2)
        with pytest.raises(ValueError, match=f"has a damaged row {row} in /state/latents; expected checksum"):
            cache.batch([*others[:3], row, row], FRAMES - 1, 1)
        path.write_bytes(whole)


def test_each_row_is_compared_once_while_the_file_stays_as_it_is(built, monkeypatch):
    cache, compared, crc32 = open_cache(built, "advection1d", "quick"), [], zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda row: compared.append(1) or crc32(row))
    for rows, expected in (
        ([1, 2, 2, 1], 2),
        ([2, 3, 1], 3),
        ([1, 2, 3], 3),
        (range(cache.num_rows), cache.num_rows),
    ):
        assert cache.batch(list(rows), 0, 2).isfinite().all() and len(compared) == expected


@pytest.mark.parametrize("verify", ["quick", "full"])
def test_a_file_that_is_overwritten_in_place_while_it_is_read_is_refused(copy, verify):
    config, path = copy
    cache = open_cache(config, "advection1d", verify)
    z_ref = cache.batch([0, 1], 0, 2)
    time.sleep(0.05)  # longer than a tick of the file system's clock
    with path.open("r+b") as file:
        file.seek(read_seal(path)["latents"][0][0] + 5)
        file.write(b"x")
    assert torch.equal(cache.batch([1], 0, 2), z_ref[1:])  # what was not hit
    for _ in range(2):  # it does not come round
        with pytest.raises(
            ValueError, match="has a damaged row 0 in /state/latents.*Rebuild it with `make cache`"
        ):
            cache.batch([1, 0], 0, 2)
    with pytest.raises(ValueError, match="has a damaged row 0"):
        place([cache], "cpu", "device")


def test_a_file_that_is_overwritten_while_a_batch_is_copied_is_refused(copy, monkeypatch):
    config, path = copy
    cache, select = open_cache(config, "advection1d"), torch.Tensor.index_select
    time.sleep(0.05)

    def late(*args):
        damage(path, read_seal(path)["latents"][0][0] + 5)
        return select(*args)

    monkeypatch.setattr(torch.Tensor, "index_select", late)
    with pytest.raises(ValueError, match="has a damaged row 0"):
        cache.batch([0], 0, 2)


def test_a_file_that_is_touched_replaced_or_removed_while_it_is_read_serves_on(built, copy):
    config, path = copy
    cache = open_cache(config, "advection1d")
    z_ref = cache.batch([0, 1], 0, 2)
    os.utime(path)
    assert torch.equal(cache.batch([0, 1], 0, 2), z_ref)
    other = settings(
        path.parent, f"data.root={built.data.root}", f"cache.root={path.parent}", "task.advection1d.patch=8"
    )
    build_cache(other, "advection1d", progress=False)
    assert torch.equal(cache.batch([0, 1], 0, 2), z_ref)
    path.unlink()
    assert torch.equal(cache.batch([0, 1], 0, 2), z_ref)


def test_a_file_that_is_truncated_while_it_is_read_is_refused_and_kills_nobody(copy):
    config, path = copy
    cache = open_cache(config, "advection1d")
    child = os.fork()  # a signal would end it
    if child == 0:
        os.truncate(path, 8192)
        try:
            cache.batch([cache.num_rows - 1], 0, 2)
        except ValueError as error:
            os._exit(0 if "holds 8192 bytes; expected" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_latents_are_mapped_from_the_file_and_open_no_shared_memory(built):
    cache = open_cache(built, "advection1d")
    assert cache._state.offset % 4096 == 0 and not cache._state.frames.is_shared()
    assert str(cache.path) in Path("/proc/self/maps").read_text()


def test_quick_opening_does_not_read_the_latents(built, copy, monkeypatch):
    config, path = copy
    monkeypatch.setattr(Latents, "verify", lambda self, rows=None: pytest.fail("read all latents"))
    open_cache(config, "advection1d", verify="quick")
    monkeypatch.setattr(cache_module, "FULL_BYTES", 10)
    open_cache(config, "advection1d")  # auto: too large to verify at every opening


# ----------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(("override", "found"), cases("cache.stale"))
def test_stale_cache_is_refused_with_the_change_and_the_command(built, override, found):
    config = settings(Path(built.cache.root).parent, override)
    with pytest.raises(
        ValueError, match=r"is stale .*`make cache`.*prepare_cache.py --config CONFIG --rebuild"
    ) as error:
        open_cache(config, "advection1d")
    assert found in str(error.value)
    assert is_up_to_date(config, "advection1d")[0] is False


def test_settings_that_do_not_touch_the_cache_leave_it_valid(built):
    config = settings(
        Path(built.cache.root).parent, "task.advection1d.history=2", "cache.chunk=3", "operator.train.steps=9"
    )
    assert open_cache(config, "advection1d").settings.history == 2


def test_every_task_key_is_listed_as_used_or_unused_by_the_cache():
    """A new key of TaskConfig must be sorted into one of the two, or stale caches would pass."""
    others = {"train_from", "history", "base", "solver", "degree", "reach", "reserve"}
    assert {field.name for field in fields(TaskConfig)} - others == set(cache_module.USED_SETTINGS)


@pytest.mark.parametrize("cut", [1, 100, 5000, 20000])
def test_truncated_or_extended_cache_is_refused(copy, cut):
    config, path = copy
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    with pytest.raises(ValueError, match="truncated or appended to.*make cache"):
        open_cache(config, "advection1d", verify="quick")
    path.write_bytes(data + b"\0" * cut)
    with pytest.raises(ValueError, match="truncated or appended to"):
        open_cache(config, "advection1d", verify="quick")
    path.write_bytes(data[: cut // 10])
    with pytest.raises(ValueError, match="not a finished UPS cache"):
        open_cache(config, "advection1d", verify="quick")


def test_every_kind_of_bit_flip_is_found(copy):
    config, path = copy
    whole = path.read_bytes()
    seal = read_seal(path)
    ((offset, num_bytes),) = seal["latents"]
    with h5py.File(path, "r") as file:
        basis, checksums = (
            file[name].id.get_offset() for name in ("state/tokenizer/basis", "state/checksums")
        )
        header = file["header"].id.get_offset()
    outside = [0, 20, 60, 4000, 4096, 4100, basis, basis + 5, checksums + 3, header + 1, len(whole) - 1]
    generator = np.random.default_rng(0)
    outside += [
        int(at) for at in generator.integers(0, len(whole), 200) if not offset <= at < offset + num_bytes
    ]
    for position in outside:  # seal, HDF5 structure, tokenizer, checksums, metadata, gaps
        damage(path, position, 1 << int(generator.integers(8)))
        with pytest.raises(ValueError, match="make cache"):
            open_cache(config, "advection1d", verify="quick")
        path.write_bytes(whole)
    row_bytes = num_bytes // (2 * NUM)
    for row, position in (
        (0, offset),
        (7, offset + 7 * row_bytes + 11),
        (2 * NUM - 1, offset + num_bytes - 1),
    ):
        damage(path, position)
        open_cache(config, "advection1d", verify="quick")  # milliseconds cannot see it ..
        for verify in ("full", "auto"):  # .. training, which opens with auto, does
            with pytest.raises(ValueError, match=f"damaged row {row} in /state/latents.*--rebuild"):
                open_cache(config, "advection1d", verify=verify)
        path.write_bytes(whole)
    open_cache(config, "advection1d", verify="full")


def test_other_format_version_is_refused(copy, monkeypatch):
    config, path = copy
    monkeypatch.setattr("ups.data.seal.FORMAT", 2)
    with pytest.raises(ValueError, match="has format 1; expected format 2"):
        open_cache(config, "advection1d")


@pytest.mark.parametrize(
    "key", ["header", "parameters", "split/val", "state/tokenizer/basis", "state/checksums", "state/latents"]
)
def test_missing_part_is_refused_even_when_sealed(copy, key):
    config, path = copy
    with h5py.File(path, "r+", libver=cache_build.LIBVER) as file:
        del file[key]
    write_seal(path)
    with pytest.raises(ValueError, match="lacks a part .*make cache"):
        open_cache(config, "advection1d")


def test_reading_outside_the_cache_is_refused(built):
    cache = open_cache(built, "advection1d")
    for rows, starts, length in (
        ([24], 0, 1),
        ([-1], 0, 1),
        ([0], 5, 3),
        ([0], -1, 2),
        ([0], 0, 8),
        ([], 0, 1),
    ):
        with pytest.raises(ValueError, match="reach outside /state/latents"):
            cache.batch(rows, starts, length)


# --------------------------------------------------------------------------------------------------- building


def fresh(built: Config, tmp_path: Path, *more: str) -> Config:
    """The built data with an empty cache folder."""
    return settings(tmp_path, f"data.root={built.data.root}", *more)


def test_non_finite_data_are_refused_with_trajectory_and_frame(tmp_path):
    config = settings(
        tmp_path,
        "data.tasks=[advection1d]",
        "task.advection1d.first_frame=1",
        "task.advection1d.time_stride=2",
    )
    write_all(config)
    for trajectory in (7, 0):  # in training and in held-out data
        with h5py.File(data_files(config, "advection1d")[1], "r+") as data:
            data["tensor"][trajectory, 5, 3] = np.nan
        with pytest.raises(
            ValueError,
            match=f"beta1.0.hdf5 holds nan in u of trajectory {trajectory}, frame 5; expected finite",
        ):
            build_cache(config, "advection1d", progress=False)
        assert not list(Path(config.cache.root).glob("*"))
        with h5py.File(data_files(config, "advection1d")[1], "r+") as data:
            data["tensor"][trajectory, 5, 3] = 0


@pytest.mark.parametrize(("override", "found"), cases("cache.other_data"))
def test_data_unlike_the_configuration_are_refused(built, tmp_path, override, found):
    with pytest.raises(ValueError, match=found):
        build_cache(fresh(built, tmp_path, override), "advection1d", progress=False)


def test_data_of_another_parameter_are_refused(tmp_path):
    config = settings(tmp_path, "data.tasks=[advection1d]")
    write_all(config)
    first, second = data_files(config, "advection1d")
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match="has 1.0 as parameter; expected 0.4"):
        build_cache(config, "advection1d", progress=False)


def test_data_that_change_while_being_read_are_refused(tmp_path, monkeypatch):
    config = settings(tmp_path, "data.tasks=[advection1d]")
    write_all(config)
    allocate = cache_build._allocate

    def touch(*args):
        os.utime(data_files(config, "advection1d")[0], (1, 1))
        return allocate(*args)

    monkeypatch.setattr(cache_build, "_allocate", touch)
    with pytest.raises(ValueError, match="changed while they were read"):
        build_cache(config, "advection1d", progress=False)


def overrides(config: Config) -> list[str]:
    return [f"data.root={config.data.root}", f"cache.root={config.cache.root}", *SMALL]


def test_disk_that_fills_up_later_is_a_clear_error(built, tmp_path, monkeypatch):
    config = fresh(built, tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="cannot write .*No space left.*change cache.root"):
        build_cache(config, "advection1d", progress=False)
    assert not list(Path(config.cache.root).iterdir())


@pytest.mark.parametrize("key", ["state/tokenizer/mean", "state/tokenizer"])
def test_a_cache_that_leads_to_another_file_is_refused(copy, key):
    config, path = copy
    elsewhere = path.parent / "elsewhere"
    with h5py.File(path, "r+", locking=False) as file:
        values = file["state/tokenizer/mean"][()]
        elsewhere.write_bytes(values.tobytes())
        del file[key]
        if key.endswith("mean"):
            file.create_dataset(
                key, values.shape, values.dtype, external=[(str(elsewhere), 0, values.nbytes)]
            )
        else:
            file[key] = h5py.ExternalLink(str(elsewhere), key)
    write_seal(path)
    with pytest.raises(ValueError, match="is (kept in|a link to) another file.*Rebuild it with `make cache`"):
        open_cache(config, "advection1d")


@pytest.mark.parametrize("stage", ["_allocate", "frame_digests", "write_seal"])
def test_kill_during_build_leaves_nothing_that_opens_and_the_next_build_succeeds(built, tmp_path, stage):
    config = fresh(built, tmp_path)
    child = os.fork()
    if child == 0:
        original = getattr(cache_build, stage)

        def run_and_die(*args):
            original(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(cache_build, stage, run_and_die)
        try:
            build_cache(config, "advection1d", progress=False)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    path = config.cache_path("advection1d")
    partial = path.with_name(path.name + ".partial")
    assert partial.exists() and not path.exists()
    with pytest.raises(FileNotFoundError, match="make cache"):
        open_cache(config, "advection1d")
    if stage != "write_seal":  # even under the final name it would not pass
        path.write_bytes(partial.read_bytes())
        with pytest.raises(ValueError, match="not a finished UPS cache"):
            open_cache(config, "advection1d")
    build_cache(config, "advection1d", progress=False)
    open_cache(config, "advection1d", verify="full")
    assert not partial.exists()


def test_failed_rebuild_keeps_the_old_cache(built, copy, monkeypatch):
    config, path = copy
    before = path.read_bytes()

    def fail(*_):
        raise ValueError("stop")

    monkeypatch.setattr(cache_build, "_encode", fail)
    with pytest.raises(ValueError, match="stop"):
        build_cache(config, "advection1d", progress=False)
    assert path.read_bytes() == before


# ----------------------------------------------------------------------------------------------------- script


def arguments(config: Config, *flags: str) -> list[str]:
    return ["--config", str(ROOT / "configs" / "smoke.yaml"), *overrides(config), "run.name=x", *flags]


def test_script_builds_once_then_says_up_to_date(built, tmp_path, capsys):
    config = fresh(built, tmp_path)
    assert prepare_cache.main(arguments(config)) == 0
    first = capsys.readouterr().out
    assert first.count("built") == 3 and "kept energy" in first and "fingerprint" in first
    times = {task: config.cache_path(task).stat().st_mtime_ns for task in config.data.tasks}
    assert prepare_cache.main(arguments(config)) == 0
    assert capsys.readouterr().out.count("up to date") == 3
    assert times == {task: config.cache_path(task).stat().st_mtime_ns for task in config.data.tasks}
    assert prepare_cache.main(arguments(config, "--rebuild")) == 0
    assert capsys.readouterr().out.count("built") == 3


def test_script_rebuilds_when_the_data_changed(built, tmp_path, capsys):
    config = settings(tmp_path)
    write_all(config)
    prepare_cache.main(arguments(config))
    path = data_files(config, "advection1d")[0]
    os.utime(path, ns=(time.time_ns(), time.time_ns()))
    is_current, reason = is_up_to_date(config, "advection1d")
    assert not is_current
    assert reason == f"the data files changed since {config.cache_path('advection1d')} was built"
    path.unlink()
    assert is_up_to_date(config, "advection1d")[0] is True  # a whole cache does not need its data


def test_dry_run_prints_the_plan_and_writes_nothing(built, tmp_path, capsys):
    config = fresh(built, tmp_path)
    assert prepare_cache.main(arguments(config, "--dry-run", "evaluate.context_frames=5")) == 0
    out = capsys.readouterr().out
    assert "24 rows" in out and " free" in out and not Path(config.cache.root).exists()
    expected = plan(config, "advection1d")
    actual = built.cache_path("advection1d").stat().st_size
    assert expected["shapes"] == {"state": (24, FRAMES, 8, 4)} and actual <= expected["bytes"]


def test_script_verify_reports_damage_with_exit_status_1(copy, built, capsys):
    config, path = copy
    for task in ("darcy2d", "diff_react2d"):
        config.cache_path(task).write_bytes(built.cache_path(task).read_bytes())
    assert prepare_cache.main(arguments(config, "--verify")) == 0
    assert capsys.readouterr().out.count("verified") == 3
    damage(path, read_seal(path)["latents"][0][0] + 100)
    assert prepare_cache.main(arguments(config, "--verify")) == 1
    assert "damaged row 0" in capsys.readouterr().out


def test_a_figure_has_the_axes_and_cell_centres_of_the_data(built):
    cache, task = open_cache(built, "diff_react2d"), get_task("diff_react2d")
    size = cache.tokenizer.space[0]
    assert task.domain == (-1, 1) and task.centres(2, task.axes[0]) == [-0.5, 0.5]
    for _ in ("as the file says", "as the task says, where the file has none"):
        scene = cache.scene()
        assert scene["fields"] == ["u", "v"] and scene["axes"] == ["y", "x"]
        expected = [task.centres(size, axis) for axis in task.axes]
        assert len(scene["coordinates"]) == 2 and np.allclose(scene["coordinates"], expected)
        cache.header["coordinates"] = {}


def test_every_task_names_its_equation_and_the_numbers_in_it():
    for task in TASKS.values():
        assert "∂" in task.equation or "∇" in task.equation, task.name
        # the Mach number is one of the initial state
        names = [name for name in task.parameters if name not in ("M",)]
        assert all(name in task.equation for name in names), task.name
        assert all(name in task.equation for name in task.inputs), task.name
