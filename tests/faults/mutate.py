"""Mutated input: what every reader makes of files that are damaged, altered or hostile.

    PYTHONPATH=. python tests/faults/mutate.py all 3000      so many files of each target
    PYTHONPATH=. python tests/faults/mutate.py cache 300

Records and weights of finished stages: fuzzed.py. A case is a function of (target, number): a sound file is
mutated (bits flipped, cut short, filled with noise; keys deleted, renamed or given values of another type or
size; NaN; payloads that would run code if anything unpickled or built them) and read as the product reads it.
Wanted is one of
    same      read, and the result is that of the sound file
    other     read, and the result is what the file now says (a changed number in a configuration)
    fallback  refused, and the checkpoint before it taken, with a warning
    refused   ValueError or a documented OSError that says what is wrong, what was expected and what to do
Anything else is a failure: another error, a death, CASE_S without an end, more memory than LIMIT_GIB, a
result that differs from what the file says, a payload that ran. Files are read in worker processes, which a
bad file may kill. Prints a table, exits 1 if a case failed."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import yaml

from ups.common.files import file_hash, write_sealed
from ups.config.load import DEFAULT, load_config, to_dict
from ups.config.schema import Config
from ups.data.build_cache import build_cache, data_files
from ups.data.cache import open_cache
from ups.data.doctor import examine
from ups.data.generate import generation_settings, write_data
from ups.data.pdebench import open_data
from ups.data.seal import MAGIC, SEAL_BYTES, write_seal
from ups.models.head_setup import base_settings, head_facts
from ups.models.operator import Operator
from ups.tasks import get_task
from ups.training.artifact import MANIFEST
from ups.training.checkpoint import SHARED, Saving
from ups.training.run import Run
from ups.training.strategies import Agreed
from ups.training.update import Updates

CASE_S = 20  # for one case
START_S = 60  # for a worker that no alarm can end; the first case reads the sound files, too
LIMIT_GIB = 6  # of address space above what a worker has at its start
TASKS = ("burgers1d", "darcy2d", "diff_react2d")
CANARY = "mutate-canary"  # a payload that runs makes this folder


class Finding(Exception):
    """A case that failed, in words."""


# -------------------------------------------------------------------------------------------------- mutations


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flip bits, cut, blank, overwrite, insert or append."""
    data, kind = bytearray(data), draw.randrange(8)
    at = draw.randrange(len(data)) if data else 0
    if kind <= 2:
        for _ in range((1, 8, 64)[kind]):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == 3:
        del data[at:]
    elif kind == 4:
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    elif kind == 5:
        data[at : at + 64] = draw.randbytes(len(data[at : at + 64]))
    elif kind == 6:
        data[at:at] = draw.randbytes(draw.randrange(1, 64))
    else:
        data += draw.choice([b"\0", draw.randbytes(100), bytes(data)])
    return bytes(data)


VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    2**31,
    2**63,
    10**30,
    0.5,
    -0.0,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "no",
    "x",
    "1e400",
    "../../../etc/passwd",
    "\0",
    "é" * 1000,
    [],
    [[]],
    [1, "2"],
    {},
    {"a": 1},
    [None] * 1000,
    "9" * 5000,
]


def places_of(value: Any) -> list[tuple[Any, Any]]:
    """(mapping or list, key) of everything in a tree."""
    places, todo = [], [value]
    while todo:
        node = todo.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        places += [(node, key) for key in keys]
        todo += [node[key] for key in keys if isinstance(node[key], (dict, list))]
    return places


def mutate_tree(value: Any, draw: random.Random) -> Any:
    """One to three changes of a tree of mappings and lists: delete, rename, replace, duplicate, nest."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if not (places := places_of(value)):
            return draw.choice(VALUES)
        node, key = draw.choice(places)
        kind = draw.randrange(5)
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, dict):
            node[draw.choice([f"{key}x", str(key)[1:], str(key).upper(), ""])] = node.pop(key)
        elif kind == 2 and isinstance(node[key], (int, float)) and not isinstance(node[key], bool):
            node[key] = draw.choice(
                [
                    -node[key],
                    node[key] * 10 ** draw.randrange(1, 12),
                    str(node[key]),
                    [node[key]],
                    node[key] + draw.choice([0.5, 1, -1]),
                ]
            )
        elif kind == 3:
            node[key] = {"nested": node[key]}
        else:
            node[key] = copy.deepcopy(draw.choice(VALUES))
    return value


class Payload:
    """Unpickled, it makes the folder CANARY."""

    def __reduce__(self) -> tuple:
        return os.mkdir, (CANARY,)


# ---------------------------------------------------------------------------------------------------- targets


@dataclass
class Target:
    """mutate(folder, draw): alters a copy of the sound files in `folder`, says how. read(folder): reads it;
    see the module.

    needs: which of the sound files.
    """

    mutate: Callable[[Path, random.Random], str]
    read: Callable[[Path], str]
    needs: str


@functools.lru_cache
def settings(folder: Path) -> Config:
    tiny = {
        "burgers1d": "patch=4 space_stride=1 time_stride=1 history=1 num_trajectories=6 resolution=16 "
        "num_frames=8 parameters=[0.01] reach=4 reserve=0.0",
        "darcy2d": "patch=4 space_stride=1 num_trajectories=6 resolution=8 parameters=[1.0]",
        "diff_react2d": "patch=4 num_trajectories=6 resolution=8 num_frames=12 history=2 train_from=0",
    }
    return load_config(
        None,
        [
            f"data.root={folder}/data",
            f"cache.root={folder}/cache",
            f"run.root={folder}/runs",
            "run.name=run",
            f"data.tasks=[{', '.join(TASKS)}]",
            *(
                "operator.model.width=8 operator.model.depth=1 operator.model.modes=2 "
                "operator.model.kernel_size=3 operator.train.precision='no' operator.train.steps=4 "
                "evaluate.context_frames=4"
            ).split(),
            *(f"task.{task}.{text}" for task in TASKS for text in tiny[task].split()),
        ],
    )


def prepare(folder: Path) -> None:
    """The sound files: configuration, data, caches, checkpoints of steps 2 and 4."""
    folder.mkdir()
    shutil.copy(DEFAULT.parent / "small.yaml", folder / "config.yaml")
    config = settings(folder)
    for task in TASKS:
        spec, wanted = get_task(task), config.task[task]

        def solve(
            indices: np.ndarray, *, resolution: int, num_frames: int, spec: Any = spec, **_: Any
        ) -> np.ndarray:
            shape = (num_frames, len(spec.channels), *[resolution] * spec.ndim)
            return np.stack([np.random.default_rng(int(i)).uniform(0.5, 1.5, shape) for i in indices]).astype(
                np.float32
            )

        for path, value in zip(data_files(config, task), wanted.parameters or [None], strict=True):
            write_data(
                path,
                task,
                solve,
                generation_settings(
                    task,
                    "mutate",
                    seed=0,
                    num_trajectories=wanted.num_trajectories,
                    resolution=wanted.resolution,
                    num_frames=wanted.num_frames,
                    t_end=wanted.t_end,
                    parameter=value,
                ),
                chunk=4,
            )
        build_cache(config, task, progress=False)
    run = make_run(config)
    run.folder.take(0.0)
    run._write_start()
    for step in (2, 4):
        run.counters.step, run.counters.best_score = step, 0.5
        run.updates.best_weights = run.updates.ema.snapshot()
        run.saving.save(is_required=True)
    run.metrics.close(0)


@functools.lru_cache
def sound_state(folder: Path, step: int) -> dict[str, Any]:
    run = sound_run(folder)
    run.saving.checkpoints.directory = run.directory / "state"
    run.saving.load(step)
    return copy.deepcopy(state_of(run))


@functools.lru_cache
def sound_run(folder: Path) -> Run:
    return make_run(settings(folder))


@functools.lru_cache
def sound_config(folder: Path) -> Config:
    return load_config(folder / "config.yaml")


def make_run(config: Config) -> Run:
    """A run of one process over a small operator, without a process group or guard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        caches = [open_cache(config, task) for task in TASKS]
    torch.manual_seed(0)
    descriptions = [
        head_facts(
            cache, "elliptic" if cache.task.is_steady else "persistence", base_settings(cache)
        ).described()
        for cache in caches
    ]
    run = Run(config, "operator", config.operator.train, config.operator.optim, {"cache": "c0ffee"})
    run.model = Operator({"model": to_dict(config.operator.model), "precision": "no", "tasks": descriptions})
    for head in run.model.heads.values():  # as `select_base` does: weights are finite
        head.low.fill_(-3.0), head.high.fill_(3.0)
    run.updates = Updates(run.model, Agreed(), run.ranks, run.counters, run.train, run.optim)
    run.saving = Saving(run.ranks, run.updates, run.metrics, run.train)
    return run


def state_of(run: Run) -> dict[str, Any]:
    return run.saving.state()[0]


def is_equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return (
            isinstance(two, dict)
            and one.keys() == two.keys()
            and all(is_equal(one[key], two[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(is_equal, one, two))
    return type(one) is type(two) and one == two


def rewrite(path: Path, draw: random.Random) -> str:
    path.write_bytes(mutate_bytes(path.read_bytes(), draw))
    return f"bytes of {path.name}"


# -------- configurations


def mutate_config(folder: Path, draw: random.Random) -> str:
    path, kind = folder / "config.yaml", draw.randrange(10)
    text = DEFAULT.read_text(encoding="utf-8") if draw.random() < 0.2 else path.read_text(encoding="utf-8")
    if kind < 5:
        tree = mutate_tree(yaml.safe_load(text), draw)
        path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
        return "tree"
    if kind < 8:
        path.write_text(text, encoding="utf-8")
        return rewrite(path, draw)
    letters = [chr(97 + i) for i in range(25)]
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip(letters, letters[1:], strict=False)
    )
    hostile = [
        f"run: !!python/object/apply:os.mkdir [{CANARY}]",
        f"run: {{name: !!python/object/new:os.mkdir [{CANARY}]}}",
        bomb + "run: {name: *y}",
        bomb + "data: {tasks: *y}",
        "run: " + "[" * 20000,
        "run: " + "{a: " * 5000,
        "include: [1]",
        "include: ../..",
        "include: config.yaml",
        "run: {seed: " + "9" * 5000 + "}",
        "run: {seed: 0x" + "f" * 9000 + "}",
        "task: {burgers1d: &t {patch: *t}}",
        "run: &r {name: *r}",
        "? [a, b]\n: 1",
        "? {a: b}\n: 1",
        "run: 2022-01-01",
        "run: {name: 2022-13-45}",
        "run: !!binary abc",
        "run: !!set {a, b}",
        "\t",
        "---\na: 1\n---\nb: 2",
        "run: {seed: .nan}",
        "%YAML 9.9\n---\nrun: {}",
        'run: {name: "\\ud800"}',
        "operator: {base_steps: " + "1" * 400 + "}",
        "task: {burgers1d: {patch: 1000000000000}}",
        "data: {tasks: [" + "burgers1d, " * 5000 + "]}",
    ]
    path.write_text(draw.choice(hostile), encoding="utf-8")
    return "hostile text"


def read_config(folder: Path) -> str:
    config = load_config(folder / "config.yaml")
    if re.search(r"\b(nan|inf)\b", repr(config)):
        raise Finding("a number that is not finite was taken")
    (folder / "saved.yaml").write_text(yaml.safe_dump(to_dict(config), sort_keys=False), encoding="utf-8")
    if load_config(folder / "saved.yaml") != config:
        raise Finding("the resolved configuration is not the configuration")
    return "same" if config == sound_config(folder.parent / "sound") else "other"


# -------- data files


def mutate_data(folder: Path, draw: random.Random) -> str:
    config = settings(folder)
    task = draw.choice(TASKS)
    path = data_files(config, task)[0]
    (folder / "which").write_text(task)
    if draw.random() < 0.5:
        return rewrite(path, draw)
    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        arrays = [name for name in names if isinstance(file[name], h5py.Dataset)]
        name, kind = draw.choice(arrays if draw.random() < 0.7 else names), draw.randrange(9)
        if kind == 0 or (name not in arrays and kind < 7):
            del file[name]
            return f"no {name}"
        if kind == 1:
            values = file[name][()]
            values.flat[draw.randrange(values.size)] = draw.choice([np.nan, np.inf, -np.inf, 3e38, -1.0])
            file[name][...] = values
            return f"a number of {name}"
        if kind < 5:
            old, shape = file[name], file[name].shape
            kinds = [np.float64, np.float16, np.int32, np.complex64, "S4", np.bool_, h5py.string_dtype()]
            values = [
                lambda: old[()].astype(draw.choice(kinds[:4])),
                lambda: old[()].reshape(-1),
                lambda: old[()][None],
                lambda: old[()][..., None],
                lambda: old[()][:1],
                lambda: old[()][:0],
                lambda: np.full(shape, b"text"),
                lambda: h5py.Empty("f"),
                lambda: "text",
                lambda: old[()].astype(bool),
            ][draw.randrange(10)]()
            del file[name]
            file[name] = values
            return f"another {name}"
        if kind == 5:
            shape, huge = file[name].shape, draw.choice([10**6, 10**9, 2**40, 2**62])
            axis = draw.randrange(len(shape))
            del file[name]
            file.create_dataset(
                name,
                (*shape[:axis], huge, *shape[axis + 1 :]),
                "f4",
                chunks=tuple(min(s, 4) or 1 for s in shape),
            )
            return f"a huge {name}"
        if kind == 6:
            del file[name]
            file[name] = draw.choice(
                [
                    h5py.SoftLink("/nowhere"),
                    h5py.SoftLink(f"/{name}"),
                    h5py.ExternalLink("/dev/zero", "/x"),
                    h5py.ExternalLink(path.name, f"/{name}"),
                ]
            )
            return f"a link for {name}"
        if kind == 7:
            holder = file[name] if draw.random() < 0.3 else file
            keys = list(holder.attrs)
            key = draw.choice(keys) if keys else "ups_settings"
            value = draw.choice(
                [v for v in VALUES if isinstance(v, (str, int, float)) and v not in ("\0", 10**30)]
            )
            holder.attrs[key] = draw.choice(
                [value, [1.0, 2.0], np.bytes_(b"\xff\xfe"), h5py.Empty("f"), "{}", "[]", "{"]
            )
            return f"attribute {key}"
        for key in list(file.attrs):
            del file.attrs[key]
        return "no attributes"


def read_data(folder: Path) -> str:
    config, task = settings(folder), (folder / "which").read_text()
    path = data_files(config, task)[0]
    ((_, findings),) = examine(
        [(task, path)], val_fraction=config.data.val_fraction, test_fraction=config.data.test_fraction
    )
    try:
        build_cache(config, task, progress=False)
    except ValueError as error:
        if "is damaged" in str(error) and all(finding.severity == "info" for finding in findings):
            raise Finding(f"the doctor finds nothing in a file that is refused ({error})") from error
        raise
    data = open_data(path, task)
    u = data.read(0, config.task[task].num_trajectories)
    cache = open_cache(config, task, verify="full")
    z = cache.batch(torch.arange(cache.num_rows), 0, cache.num_frames)
    state = slice(len(cache.task.inputs), None)
    expected = cache.tokenizer.encode(cache.tokenizer.normalise(torch.from_numpy(u[:, :, state])))
    if not torch.equal(z, expected):
        raise Finding("the cache is not what the file says")
    sound = open_cache(settings(folder.parent / "sound"), task)
    return "same" if sound.fingerprint == cache.fingerprint else "other"


# -------- caches


def mutate_cache(folder: Path, draw: random.Random) -> str:
    task = draw.choice(TASKS)
    path = settings(folder).cache_path(task)
    (folder / "which").write_text(task)
    if draw.random() < 0.5:
        return rewrite(path, draw)
    if draw.random() < 0.1:  # the seal alone
        data = path.read_bytes()
        seal = json.loads(data[len(MAGIC) : SEAL_BYTES - 4].rstrip(b"\0"))
        text = (MAGIC + json.dumps(mutate_tree(seal, draw)).encode()).ljust(SEAL_BYTES - 4, b"\0")[
            : SEAL_BYTES - 4
        ]
        path.write_bytes(text + zlib.crc32(text).to_bytes(4, "little") + data[SEAL_BYTES:])
        return "seal, with its checksum"
    with h5py.File(path, "r+", locking=False) as file:  # and sealed again: what a faulty writer would leave
        names: list[str] = []
        file.visit(names.append)
        names.append("header")
        name = "header" if draw.random() < 0.4 else draw.choice(names)
        if name == "header":
            header = mutate_tree(json.loads(bytes(file["header"][()])), draw)
            del file["header"]
            file["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        elif draw.random() < 0.3 or isinstance(file[name], h5py.Group):
            del file[name]
        else:
            old = file[name][()]
            values = draw.choice(
                [
                    old.astype(np.float64) * np.nan,
                    old.astype(np.int64) * 10**9,
                    old.reshape(-1),
                    old[None],
                    old[:1],
                    old[:0],
                    np.array(["text"], "S4"),
                    -np.ones_like(old, np.int64),
                    old.astype(np.float64) + 0.5,
                ]
            )
            del file[name]
            file[name] = values
    try:
        write_seal(path)
    except (KeyError, TypeError, AttributeError):  # nothing left to seal
        pass
    return f"{name}, sealed again"


def read_cache(folder: Path) -> str:
    task = (folder / "which").read_text()
    cache = open_cache(settings(folder), task, verify="full")
    sound = open_cache(settings(folder.parent / "sound"), task)

    def content(cache: Any) -> dict[str, Any]:
        rows = torch.arange(cache.num_rows)
        return {
            "z": cache.batch(rows, 0, cache.num_frames),
            "codec": cache.tokenizer.state_dict(),
            "split": cache.split,
            "parameters": cache.parameters,
            "index": cache.parameter_index,
            "trajectory": cache.trajectory,
            "dt": cache.dt,
            "fingerprint": cache.fingerprint,
            "input": cache.inputs(rows) if cache.task.inputs else None,
            "codec_a": cache.input_tokenizer.state_dict() if cache.task.inputs else None,
        }

    if not is_equal(content(cache), content(sound)):
        raise Finding("a cache with other content was taken")
    # coordinates and the like, which nothing computes with
    return "same" if cache.header == sound.header else "other"


# -------- checkpoints


def mutate_checkpoint(folder: Path, draw: random.Random) -> str:
    path = settings(folder).run_dir / "operator" / "state"
    both = [path / "step_000000004", path / "step_000000002"][: draw.choice((1, 1, 2))]
    said = ""
    for place in both:
        kind = draw.randrange(6)
        if kind < 2:
            said = rewrite(place / draw.choice([SHARED, "rank_0.pt", MANIFEST]), draw)
        elif kind == 2:
            manifest = mutate_tree(json.loads((place / MANIFEST).read_text()), draw)
            (place / MANIFEST).write_text(json.dumps(manifest))
            said = "manifest"
        elif kind == 3:
            (place / draw.choice([SHARED, "rank_0.pt", MANIFEST])).unlink()
            said = "a file is gone"
        else:
            name = draw.choice([SHARED, "rank_0.pt"])
            value = torch.load(place / name, weights_only=True)
            if kind == 4:
                if draw.random() < 0.5:
                    value = draw.choice([Payload(), {**value, "model": Payload()}, [Payload()]])
                    torch.save(value, place / name)
                else:
                    (place / name).write_bytes(pickle.dumps(Payload()))
                said = "payload, signed"
            else:
                damage(value, draw)
                torch.save(value, place / name)
                said = "content, signed"
            manifest = json.loads((place / MANIFEST).read_text())  # as if it had been written so
            manifest["files"][name] = {
                "size": (place / name).stat().st_size,
                "sha256": file_hash(place / name),
            }
            del manifest["seal"]
            write_sealed(place / MANIFEST, manifest)
    return said


def damage(value: dict, draw: random.Random) -> None:
    """One tensor of a tree gets a NaN, another shape or type, or is gone."""
    places = places_of(value)
    node, key = draw.choice([(node, key) for node, key in places if isinstance(node[key], torch.Tensor)])
    kind, old = draw.randrange(4), node[key]
    if kind == 0 and old.is_floating_point():
        node[key] = old.clone().float()
        node[key].view(-1)[0] = draw.choice([float("nan"), float("inf")])
    elif kind == 1:
        node[key] = torch.cat([old.reshape(-1), old.reshape(-1)])
    elif kind == 2:
        node[key] = "text"
    else:
        del node[key]


def read_checkpoint(folder: Path) -> str:
    wanted = {step: sound_state(folder.parent / "sound", step) for step in (2, 4)}
    run = sound_run(folder.parent / "sound")
    run.saving.checkpoints.directory = settings(folder).run_dir / "operator" / "state"
    manifest = run.saving.checkpoints.newest()
    run.saving.load(manifest["step"])
    if not is_equal(state_of(run), wanted[manifest["step"]]):
        raise Finding("a checkpoint with other content was taken")
    return "same" if manifest["step"] == 4 else "fallback"


TARGETS = {
    "config": Target(mutate_config, read_config, "config.yaml"),
    "data": Target(mutate_data, read_data, "data"),
    "cache": Target(mutate_cache, read_cache, "cache"),
    "checkpoint": Target(mutate_checkpoint, read_checkpoint, "runs"),
}


# --------------------------------------------------------------------------------------------------- one case


def is_clear(error: Exception) -> bool:
    """Whether an error is of a documented kind and says what was expected and what to do."""
    text = str(error)
    kinds = (ValueError, FileNotFoundError, FileExistsError, PermissionError)
    raw = (json.JSONDecodeError, UnicodeError)
    return (
        isinstance(error, kinds)
        and not isinstance(error, raw)
        and len(text) < 3000
        and re.search(r"xpected|did you mean|valid YAML", text) is not None
        and len(re.findall(r"[.;]\s|[.;]$", text)) >= 1
    )


def attempt(target: Target, folder: Path, number: int, name: str) -> tuple[str, str]:
    """(outcome, how it was mutated) of one case; failures are "FAILED: .."."""
    shutil.rmtree(folder / "case", ignore_errors=True)
    shutil.copytree(
        folder / "sound",
        folder / "case",
        ignore=lambda place, names: set(names) - {target.needs} if Path(place) == folder / "sound" else set(),
    )
    draw, said = random.Random(f"{name} {number}"), ""
    signal.setitimer(signal.ITIMER_REAL, CASE_S)
    try:
        said = target.mutate(folder / "case", draw)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            outcome = target.read(folder / "case")
    except Finding as finding:
        outcome = f"FAILED: {finding}"
    except Exception as error:
        outcome = (
            "refused"
            if is_clear(error)
            else f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if Path(CANARY).exists():
        os.rmdir(CANARY)
        outcome = "FAILED: code from the file ran"
    return outcome, said


def worker(name: str, folder: Path, numbers: list[int], out: Connection) -> None:
    """Send the results of cases of one target."""

    def late(*_: Any) -> None:
        raise Finding(f"no end within {CASE_S} s")

    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    torch.set_num_threads(1)
    os.chdir(folder)
    signal.signal(signal.SIGALRM, late)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_GIB * 2**30,) * 2)
    for number in numbers:
        out.send(attempt(TARGETS[name], folder, number, name))


def results_of(name: str, folder: Path, numbers: range) -> dict[int, tuple[str, str]]:
    """Number -> (outcome, how it was mutated); a worker that dies or that no alarm ends costs one."""
    found, context = {}, multiprocessing.get_context("fork")
    while left := [number for number in numbers if number not in found]:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(name, folder, left, there))
        process.start()
        there.close()
        with contextlib.suppress(EOFError):
            while len(found) < len(numbers) and here.poll(START_S):
                found[left[0]] = here.recv()
                del left[0]
        process.kill()
        process.join()
        found |= {number: ("FAILED: the process died or hung", "") for number in left[:1]}
    return found


def main() -> int:
    names, num = (TARGETS if sys.argv[1] == "all" else [sys.argv[1]]), int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="ups-mutate-") as place:
        prepare(Path(place) / "sound")
        found = {name: results_of(name, Path(place), range(num)) for name in names}
    failed = [
        (name, number, *result)
        for name, of_target in found.items()
        for number, result in of_target.items()
        if result[0].startswith("FAILED")
    ]
    print(*failed, f"{num * len(found)} mutated files, {len(failed)} failed", sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
