"""Every layout of PDEBench's files, made here to its description and not by our writer, is read as what was
written; the largest with no more memory than what is asked for."""

import textwrap
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import cases
from commands import python

from ups.data.layout import allocated
from ups.data.pdebench import open_data
from ups.tasks import get_task
from ups.tasks.published import FURTHER

ROOT = Path(__file__).resolve().parent.parent
NUM, FRAMES = 5, 4
SINGLE = cases(
    "layouts.single"
)  # task: arrays of its channels, name of its file, attributes; (b, t, x[, y[, z]])
MULT = {
    "diff_sorp1d": ("1D_diff-sorp_NA_NA.h5", "x", 1),
    "diff_react2d": ("2D_diff-react_NA_NA.h5", "yx", 2),
    "shallow_water2d": ("2D_rdb_NA_NA.h5", "xy", 1),
}
SIZES = {"x": 6, "y": 8, "z": 10}


def numbers(*shape):
    return np.random.default_rng(0).random(shape, np.float32) + 0.5


def coordinates(file, axes, where="{}-coordinate", times=FRAMES + 1):
    for axis in axes:
        file[where.format(axis)] = ((np.arange(SIZES[axis]) + 0.5) / SIZES[axis]).astype(np.float32)
    if times:
        file[where.format("t")] = (0.05 * np.arange(times)).astype(np.float32)


@pytest.mark.parametrize("is_behind_a_device_axis", [False, True])
@pytest.mark.parametrize("task", SINGLE)
def test_arrays_with_trajectories_and_time_first(task, is_behind_a_device_axis, tmp_path):
    keys, name, attributes = SINGLE[task]
    axes = "xyz"[: get_task(task).ndim]
    u = numbers(NUM, FRAMES, len(keys), *[SIZES[axis] for axis in axes])
    with h5py.File(tmp_path / name, "w") as file:
        for channel, key in enumerate(keys):
            file[key] = u[None, :, :, channel] if is_behind_a_device_axis else u[:, :, channel]
        coordinates(file, axes)
        file.attrs.update(attributes)
    data = open_data(tmp_path / name, task)
    assert np.array_equal(data.read(0, NUM), u) and np.array_equal(data.read(2, 4), u[2:4])
    assert data.parameter == next(iter(attributes.values())) and data.dt == pytest.approx(0.05)
    assert len(data.notes) == is_behind_a_device_axis * len(keys) and len(data.coordinates["t"]) == FRAMES
    strided = open_data(tmp_path / name, task, space_stride=2, time_stride=3)
    kept = (slice(1, 3), slice(None, None, 3), slice(None), *[slice(None, None, 2)] * len(axes))
    assert np.array_equal(strided.read(1, 3), u[kept])


# task -> viscosity, axes, frames and their distance of its single test problems, as far as they are known
PROBLEMS = {
    "cfd1d_shock": (1e-8, 81, 0.005),
    "cfd2d": (1e-3, 51, 0.1),
    "cfd3d": (1e-8, 21, 0.05),
    "cfd3d_turb": (1e-8, 21, 0.05),
}


@pytest.mark.parametrize(("task", "name"), [(task, name) for task in PROBLEMS for name in FURTHER[task]])
def test_a_single_test_problem_is_read_as_one_trajectory(task, name, tmp_path):
    """Sod1 to 7, shocks, Kelvin-Helmholtz, Orszag-Tang, blast wave, turbulence: their names tell no
    viscosity, so the file must. Of their axes no more is documented than of the other files': one without
    trajectories is refused by the names of the axes."""
    spec, (eta, frames, dt) = get_task(task), PROBLEMS[task]
    axes = "xyz"[: spec.ndim]
    u = numbers(1, frames, len(spec.fields), *[SIZES[axis] for axis in axes])
    with h5py.File(tmp_path / name, "w") as file:
        for channel, key in enumerate(spec.fields):
            file[key] = u[:, :, channel]
        coordinates(file, axes, times=0)
        file["t-coordinate"] = (dt * np.arange(frames + 1)).astype(np.float32)
    with pytest.raises(
        ValueError, match=f"{name}: no attribute eta .*and its name tells no value; expected a number"
    ):
        open_data(tmp_path / name, task)
    with h5py.File(tmp_path / name, "r+") as file:
        file.attrs.update({"eta": eta, "zeta": eta} | ({"M": 0.1} if "M" in spec.parameters else {}))
    data = open_data(tmp_path / name, task)
    assert data.num_trajectories == 1 and np.array_equal(data.read(0, 1), u)
    assert data.parameter == eta and data.dt == pytest.approx(dt, rel=1e-5) and data.num_frames == frames
    assert np.array_equal(data.sample(8), u)
    with h5py.File(tmp_path / name, "r+") as file:
        for key in spec.fields:
            values = file.pop(key)[0]
            file[key] = values
    with pytest.raises(
        ValueError,
        match=rf"density in \S+{name} has {1 + spec.ndim} axes, .*{2 + spec.ndim} words \(traj",
    ):
        open_data(tmp_path / name, task)


@pytest.mark.parametrize("is_behind_a_device_axis", [False, True])
def test_darcys_coefficient_has_no_time_and_its_answer_one(is_behind_a_device_axis, tmp_path):
    nu, u = numbers(NUM, 6, 8), numbers(NUM, 1, 6, 8)
    with h5py.File(tmp_path / "2D_DarcyFlow_beta0.1_Train.hdf5", "w") as file:
        file["nu"], file["tensor"] = (nu[None], u[None]) if is_behind_a_device_axis else (nu, u)
        coordinates(file, "xy", times=0)
        file.attrs["beta"] = 0.1
    data = open_data(tmp_path / "2D_DarcyFlow_beta0.1_Train.hdf5", "darcy2d")
    assert np.array_equal(data.read(0, NUM), np.stack([nu[:, None], u], 2)) and data.space == (6, 8)
    assert len(data.notes) == 2 * is_behind_a_device_axis


@pytest.mark.parametrize("is_behind_a_device_axis", [False, True])
@pytest.mark.parametrize("task", MULT)
def test_a_group_per_trajectory_with_channels_last(task, is_behind_a_device_axis, tmp_path):
    name, axes, channels = MULT[task]
    u = numbers(NUM, FRAMES, channels, *[SIZES[axis] for axis in axes])
    with h5py.File(tmp_path / name, "w") as file:
        for i in range(NUM):
            group = file.create_group(f"{i:04d}")
            values = np.moveaxis(u[i], 1, -1)
            group.create_dataset(
                "data", data=values[None] if is_behind_a_device_axis else values, compression="lzf"
            )
            coordinates(group, axes, "grid/{}", FRAMES)
    data = open_data(tmp_path / name, task)
    assert np.array_equal(data.read(0, NUM), u) and np.array_equal(data.read(2, 4), u[2:4])
    assert data.space == tuple(SIZES[axis] for axis in axes) and data.dt == pytest.approx(0.05)
    assert len(data.notes) == is_behind_a_device_axis


@pytest.mark.parametrize("is_behind_a_device_axis", [False, True])
def test_incompressible_flow_in_frames_with_force_and_times_of_every_trajectory(
    is_behind_a_device_axis, tmp_path
):
    velocity, particles = numbers(NUM, FRAMES, 6, 8, 2), numbers(NUM, FRAMES, 6, 8, 1)
    path, lead = tmp_path / "ns_incom_inhom_2d_512-0.h5", (1,) * is_behind_a_device_axis
    with h5py.File(path, "w") as file:
        for key, values in (("velocity", velocity), ("particles", particles)):
            file.create_dataset(
                key,
                data=values.reshape(*lead, *values.shape),
                compression="lzf",
                shuffle=True,
                chunks=(*lead, 1, 1, *values.shape[2:]),
            )
        file["force"] = (force := numbers(NUM, 6, 8, 2)).reshape(*lead, *force.shape)
        file["t"] = np.tile(0.005 * np.arange(FRAMES, dtype=np.float32), (NUM, 1))
        file.attrs.update(config="{NU: 0.01, sim_name: test}", latestIndex=FRAMES - 1)
    data = open_data(path, "ns_incom2d")
    force_frames = np.broadcast_to(force[:, None], velocity.shape)  # of every frame the same
    expected = np.moveaxis(np.concatenate([velocity, particles, force_frames], -1), -1, 2)
    assert np.array_equal(data.read(0, NUM), expected) and np.array_equal(data.read(2, 4), expected[2:4])
    assert np.array_equal(data.read(1, 3, range(2, 4)), expected[1:3, 2:4])
    assert data.dt == pytest.approx(0.005) and data.attributes["config"].startswith("{NU: 0.01")
    with h5py.File(path, "r+") as file:
        del file["force"]
        file["force"] = numbers(NUM, 6, 6, 2)
    with pytest.raises(
        ValueError, match="y is 6 long in force of .* and 8 in velocity; expected one size per axis"
    ):
        open_data(path, "ns_incom2d")


FULL = {  # published shapes, and what of them is asked for: rows, strides in space and time, bytes asked for
    "advection1d": (["tensor"], (10000, 201, 1024), (5000, 5100), 1, 1),
    "darcy2d": (["tensor"], (10000, 1, 128, 128), (9000, 9100), 1, 1),
    "cfd2d": (["density", "pressure", "Vx", "Vy"], (10000, 21, 128, 128), (9990, 9994), 1, 1),
    "cfd2d_turb": (["density", "pressure", "Vx", "Vy"], (1000, 21, 512, 512), (998, 999), 4, 5),
    "cfd3d": (["density", "pressure", "Vx", "Vy", "Vz"], (100, 21, 128, 128, 128), (98, 99), 4, 5),
}


@pytest.mark.parametrize("task", FULL)
def test_a_file_of_the_published_size_is_read_with_no_more_memory_than_the_batch(task, tmp_path):
    """Up to 88 GB in size; the files have holes and take no disk. A block of 16 MiB, and twice that where a
    stride drops most of it, is what reading adds to the batch."""
    keys, shape, (low, high), space, time = FULL[task]
    spec = get_task(task)
    attributes = {"beta": 1.0, "eta": 0.1, "zeta": 0.1}
    with h5py.File(tmp_path / "full.hdf5", "w") as file:
        arrays = {key: shape for key in keys} | ({"nu": (shape[0], *shape[2:])} if spec.is_steady else {})
        for key, size in arrays.items():
            file.create_dataset(key, size, np.float32, dcpl=allocated())
            file[key][high - 1, ..., 0] = 3.0
        if not spec.is_steady:
            file["t-coordinate"] = np.arange(shape[1] + 1, dtype=np.float32)
        file.attrs.update({name: attributes[name] for name in spec.parameters if name in attributes})
    assert (tmp_path / "full.hdf5").stat().st_size > np.prod(shape) * 4 * len(keys)
    code = f"""
        import resource
        from ups.data.pdebench import open_data
        def peak():
            status = open("/proc/self/status")
            return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
        before = peak()
        data = open_data({str(tmp_path / "full.hdf5")!r}, {task!r}, space_stride={space}, time_stride={time})
        u = data.read({low}, {high})
        print(float(u[-1].max()), float(u[0].min()), peak() - before - u.nbytes, u.nbytes)
    """
    result = python("-c", textwrap.dedent(code), OPENBLAS_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    largest, smallest, beyond, batch = map(float, result.stdout.split())
    assert (largest, smallest) == (3.0, 0.0)
    assert beyond < 48 * 2**20 and batch > 2**20, (beyond / 2**20, batch / 2**20)
