"""Small files of users, and sections that declare them, for the tests of user data."""

from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import torch
import yaml

from ups.common.user_solver import solvers_of
from ups.config.load import load_config
from ups.data.build_cache import build_cache
from ups.data.cache import open_cache
from ups.data.doctor import examine
from ups.data.sources import open_source, open_user
from ups.evaluation.gates import check_usability
from ups.models.base_selection import evaluate_candidate, fit_base
from ups.models.head_setup import MAX_TRAJECTORIES, build_operator
from ups.report.report import write_report
from ups.results import Entry, Results
from ups.userdata.describe import describe_file
from ups.userdata.readers.process import ReadingProcess

ROOT = Path(__file__).resolve().parent.parent


SMALL = ROOT / "configs" / "small.yaml"
ONE_BLOCK = ["operator.model.width=8", "operator.model.depth=1"]


N, T, X, Y = 6, 5, 16, 8


DT = 0.5


def waves(shape=(N, T, X), seed=0):
    """Smooth periodic fields (trajectory, time, *space)."""
    rng, (num, frames, *space) = np.random.default_rng(seed), shape
    phase = rng.random((num, 1) + (1,) * len(space)) * 6.28
    t = np.arange(frames).reshape(1, -1, *[1] * len(space))
    u = np.zeros(shape)
    for axis, n in enumerate(space):
        x = 2 * np.pi * np.arange(n) / n
        u = u + np.sin(x.reshape([-1 if i == axis else 1 for i in range(len(space))]) + phase + 0.3 * t)
    return u.astype(np.float32)


def write(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            if name.startswith("attr_"):
                file.attrs[name[5:]] = values
            else:
                file[name.replace("__", "/")] = values
    return path


def overlay(folder, section, name="ks", **more):
    config = {
        "include": str(SMALL),
        "data": {"tasks": [name], "source": "user"},
        "cache": {"root": str(folder / "cache")},
        "task": {name: section},
        **more,
    }
    path = folder / "my_data.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def section(folder, **changes):
    settings = {
        "files": str(folder / "*.h5"),
        "layout": {"u": ["trajectory", "time", "x"]},
        "boundary": "periodic",
        "domain": [0, 22],
        "dt": DT,
    }
    return {key: value for key, value in {**settings, **changes}.items() if value is not None}


def config_of(folder, overrides=(), **changes):
    """The configuration of a section with changes."""
    return load_config(overlay(folder, section(folder, **changes)), overrides)


def read(folder, settings=None, **changes):
    """Of a section, or of `section` with changes."""
    config = load_config(overlay(folder, settings)) if settings else config_of(folder, **changes)
    source = open_source(config, "ks")
    return config, source, source.read(0, source.num_trajectories)


def well_file(path, u, v):
    """A file to the specification of The Well: scalars u (n, t, x, y), vectors v (n, t, x, y, 2)."""
    with h5py.File(path, "w") as file:
        file.attrs.update(
            dataset_name="mine",
            grid_type="cartesian",
            n_spatial_dims=2,
            n_trajectories=len(u),
            simulation_parameters=["Re"],
            Re=100.0,
        )
        space = file.create_group("dimensions")
        space.attrs["spatial_dims"] = ["x", "y"]
        for name, values in (
            ("time", DT * np.arange(u.shape[1])),
            ("x", (np.arange(X) + 0.5) / X),
            ("y", (np.arange(Y) + 0.5) / Y),
        ):
            space[name] = values.astype(np.float32)
            space[name].attrs.update(sample_varying=False, time_varying=False)
        for axis, kind in (("x", "PERIODIC"), ("y", "WALL")):
            group = file.create_group(f"boundary_conditions/{axis}_{kind.lower()}")
            group.attrs.update(
                associated_dims=[axis],
                associated_fields=[],
                bc_type=kind,
                sample_varying=False,
                time_varying=False,
            )
            group["mask"] = np.ones(1, bool)
        scalars = file.create_group("scalars")
        scalars.attrs["field_names"] = ["Re"]
        scalars["Re"] = 100.0
        scalars["Re"].attrs.update(sample_varying=False, time_varying=False)
        for order, fields in enumerate(({"u": u, "depth": u[0, 0]}, {"v": v}, {})):
            group = file.create_group(f"t{order}_fields")
            group.attrs["field_names"] = list(fields)
            for name, values in fields.items():
                group[name] = values
                is_still = values.ndim == 2
                group[name].attrs.update(
                    dim_varying=[True, True], sample_varying=not is_still, time_varying=not is_still
                )


def operator_on(folder, settings, network=True, base="persistence"):
    """Configuration, cache and an operator with random weights, on the data of a section."""
    own = overlay(folder, {**settings, "base": [base]})
    config = load_config(own, [*ONE_BLOCK, "evaluate.num_bootstrap=50"])
    cache, operator, _ = fitted(config)
    torch.manual_seed(0)
    for parameter in operator.parameters() if network else ():
        torch.nn.init.normal_(parameter, std=0.05)
    return config, cache, operator


def fitted(config, name="ks"):
    """Cache, operator over the selected base, without the network's share of a training, and facts of
    `fit_base`."""
    build_cache(config, name, progress=False)
    cache = open_cache(config, name)
    found = fit_base(cache, 1, 1, 0, torch.device("cpu"))
    operator = build_operator({name: found}, config.operator.model, "no", solvers_of(config))
    return cache, operator, found[0]


@torch.no_grad()
def forecast(operator, cache, frames=6):
    """The first frames of three trajectories, and their forecast (n, T, C, *space)."""
    head, rows = operator.heads["ks"], torch.arange(3)
    z = cache.batch(rows, 0, 1)
    return head.physical(z), head.physical(operator.rollout(z, "ks", cache.parameters[rows], frames))


def doctor(config, name="ks", test_fraction=0.2):
    """What the doctor finds in the files that a section declares."""
    declared = {name: lambda: open_user(config, name)}
    [(_, findings)] = examine(
        [(name, Path(name))], val_fraction=0.2, test_fraction=test_fraction, declared=declared
    )
    return findings


def film(frames=200, cells=64):
    """A travelling wave with two harmonics (time, x)."""
    x, t = np.arange(cells) / cells, np.arange(frames)[:, None]
    return np.sin(2 * np.pi * (x - 0.013 * t)) + 0.3 * np.cos(4 * np.pi * (x - 0.026 * t))


def described(folder, **arrays):
    """(the section of a.npz as --describe prints it, its text)"""
    np.savez(folder / "a.npz", **arrays)
    text = describe_file(str(folder / "a.npz"))
    return yaml.safe_load(text)["task"]["a"], text


def counted_requests(monkeypatch):
    """Counter of the requests to the reading process, by method; "all" of any."""
    asked, call = Counter(), ReadingProcess.call

    def counted(process, path, *request):
        asked.update((request[0], "all"))
        return call(process, path, *request)

    monkeypatch.setattr(ReadingProcess, "call", counted)
    return asked


def page_of(folder: Path, entry: Entry, samples: list[dict]) -> str:
    """The page of a report on the task ks, written with its results and figures into `folder`."""
    about = {"run": "mine", "created": "now", "config_hash": "0", "protocol": {"split": "test"}}
    results = Results({**about, "environment": {}, "gates": [], "training": {}}, {"ks": entry})
    results.facts["usability"] = check_usability(results)
    results.save(folder)
    write_report(results, {"ks": samples}, [], folder / "report.html", {})
    return (folder / "report.html").read_text(encoding="utf-8")


def base_error(head, cache, context):
    """Pooled nRMSE of the base alone over validation rollouts."""
    rows = cache.rows_by_parameter("val", MAX_TRAJECTORIES)
    return evaluate_candidate("", head, cache, context, rows).error()
