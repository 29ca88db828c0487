"""Files of the published sizes, tens of gigabytes with holes that take no disk: a cache is built from them,
and training reads a cache of that size, with memory for what is looked at and no more."""

import textwrap
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import cases
from commands import python

from ups.data.layout import allocated

pytestmark = pytest.mark.faults  # half a minute

ROOT = Path(__file__).resolve().parent.parent
MEMORY = """
    def memory(of="VmHWM"):
        return int(next(line for line in open("/proc/self/status") if line.startswith(of)).split()[1]) * 1024
"""


def run(code: str) -> list[float]:
    """The numbers that the last line of a process of its own prints."""
    done = python("-c", textwrap.dedent(MEMORY) + textwrap.dedent(code), OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


def settings(task: str, folder: Path, num: int, *more: str) -> list[str]:
    return [
        f"data.tasks=[{task}]",
        "data.source=user",
        f"data.root={folder}/data",
        f"cache.root={folder}/cache",
        f"task.{task}.num_trajectories={num}",
        *more,
    ]


# arrays, name, published shape (in 3D half as many cells, nine frames), last time, trajectories asked for,
# attributes, and the MiB of memory; of whole trajectories those of cfd3d would take 1800
FILES = cases("full_size.files")


@pytest.mark.parametrize("task", FILES)
def test_a_cache_is_built_with_memory_for_a_few_megabytes_of_data_or_a_frame(task, tmp_path):
    keys, name, shape, t_end, num, attributes, most = FILES[task]
    (tmp_path / "data" / task).mkdir(parents=True)
    with h5py.File(tmp_path / "data" / task / name, "w") as file:
        for key in keys:
            file.create_dataset(key, shape, np.float32, dcpl=allocated())
            frames = np.random.default_rng(0).random(shape[1:], np.float32) + 0.5
            for row in range(num):  # no two equal: a frame in two parts of the split is refused
                file[key][row] = frames + np.float32(row / num)
        file["t-coordinate"] = np.linspace(0, t_end, shape[1], dtype=np.float32)
        file.attrs.update(attributes)
    parameter = next(iter(attributes.values()))
    overrides = settings(
        task,
        tmp_path,
        num,
        f"task.{task}.parameters=[{parameter}]",
        f"task.{task}.num_frames={shape[1]}",
        *[f"task.{task}.{axis}_stride=1" for axis in ("space", "time")],
        f"task.{task}.resolution={shape[2]}",
    )
    beyond, size = run(f"""
        import torch
        from ups.config.load import load_config
        from ups.data.build_cache import build_cache
        torch.linalg.eigh(torch.eye(64, dtype=torch.float64))
        config, before = load_config(None, {overrides!r}), memory("VmHWM")
        path = build_cache(config, {task!r}, progress=False)
        print(memory("VmHWM") - before, path.stat().st_size)
    """)
    # 134, 184 and 595 MiB measured
    assert beyond < most * 2**20 and size > 2**26, (beyond / 2**20, size / 2**20)


def test_training_reads_a_cache_of_any_size_with_memory_for_a_batch(tmp_path):
    """A cache of 20000 trajectories at full size, 16 GiB of holes around a small one's facts: 12 batches from
    all over it."""
    folder = tmp_path / "data" / "burgers1d"
    folder.mkdir(parents=True)
    for nu in (0.01, 0.1):
        with h5py.File(folder / f"1D_Burgers_Sols_Nu{nu}.hdf5", "w") as file:
            file["tensor"] = np.random.default_rng(0).random((12, 201, 1024), np.float32)
            file["t-coordinate"], file.attrs["Nu"] = np.linspace(0, 2, 201), nu
    overrides = settings(
        "burgers1d",
        tmp_path,
        12,
        "task.burgers1d.parameters=[0.01,0.1]",
        "task.burgers1d.num_frames=201",
        "task.burgers1d.space_stride=1",
        "task.burgers1d.time_stride=1",
        "task.burgers1d.reserve=0",
    )
    beyond, batch, size, num_rows = run(f"""
        import zlib
        from pathlib import Path
        import h5py
        import numpy as np
        import torch
        from ups.config.load import load_config
        from ups.data.build_cache import LIBVER, _allocate, build_cache
        from ups.data.sources import split_rows
        from ups.data.cache import Cache
        from ups.data.seal import write_seal
        from ups.models.head_setup import base_settings, head_facts
        from ups.models.operator import Operator
        from ups.models.windows import Windows
        config = load_config(None, {overrides!r})
        small, large = build_cache(config, "burgers1d", progress=False), {str(tmp_path / "large.h5")!r}
        num = 10000
        with h5py.File(small, "r") as file:
            shape, parts, floor = file["state/latents"].shape, {{}}, file["header"][()]
            codec = {{key: values[()] for key, values in file["state/tokenizer"].items()}}
        _allocate(large, {{"state": (2 * num, *shape[1:])}})
        cuts = np.split(np.arange(num), [num // 10, num // 5])
        with h5py.File(large, "r+", libver=LIBVER) as file:
            zeros = zlib.crc32(np.zeros(shape[1:], np.float32))
            arrays = {{"state/checksums": np.full(2 * num, zeros, np.uint32), "header": floor,
                       "parameters": np.repeat([0.01, 0.1], num)[:, None],
                       "parameter_index": np.arange(2).repeat(num),
                       "trajectory": np.tile(np.arange(num), 2)}}
            arrays |= {{f"state/tokenizer/{{key}}": values for key, values in codec.items()}}
            names = ("val", "test", "train")
            arrays |= {{f"split/{{name}}": split_rows(cut, 2, num) for name, cut in zip(names, cuts)}}
            for name, values in arrays.items():
                file.create_dataset(name, data=values)
        write_seal(Path(large))
        cache = Cache(large, config.task["burgers1d"])
        model = {{"kind": "flat", "width": 8, "depth": 1, "modes": 3, "kernel_size": 3, "mlp_ratio": 1.0}}
        operator = Operator({{"model": model, "precision": "no",
                              "tasks": [head_facts(cache, "persistence", base_settings(cache)).described()]}})
        caches = {{"burgers1d": cache}}
        windows = Windows(caches, config.task, config.operator, 0)
        head, last = operator.heads["burgers1d"], config.operator.train.steps - 1
        torch.set_grad_enabled(False)
        def read(step):
            batch = windows.schedule.batch(step)
            return windows.read(head, batch, slice(None))[1], batch.rows
        read(last)
        before, most, rows_read = memory("RssAnon"), 0, []
        for step in range(last - 12, last):
            z, rows = read(step)
            most = max(most, memory("RssAnon"))
            rows_read.append(rows)
        print(most - before, z.nbytes, Path(large).stat().st_size, len(torch.cat(rows_read).unique()))
    """)
    assert size > 15 * 2**30 and num_rows > 300 and beyond < 8 * batch
