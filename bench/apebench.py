"""Compare our operator with APEBench's networks on its scenarios, by its metric, after equal processor time.

    python -m bench.apebench --scenario burgers kdv --budget 45   # no --scenario: all
    python -m bench.apebench --scenario ks --own-steps            # its networks also by its own 10,000 steps
    python -m bench.table                                         # write the table of docs/results.md

APEBench (Koehler et al. 2024, arXiv 2411.00180) runs in an environment of its own (JAX), which is made in
bench/out/apebench-env unless --python names one. It generates the data, 50 trajectories of 51 frames to train
and 30 of 201 to test, with its seeds, and trains its networks by its own code (bench/apebench_jax.py). Its
reference takes one ETDRK2 step per frame in most scenarios: the data solve that scheme, not the PDE.

Columns: full (all usual bases of user data; the row has the base alone, too), bare (base: persistence), and
its networks. Our operator has 45 of the 50 trajectories and selects weights on the others; the networks have
all. Error: mean nRMSE of rollouts from the first frame, geometric mean over the first 100 steps. Every result
goes to bench/results/apebench/SCENARIO.json at once and is not computed again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from bench.command import parse, parser_of
from bench.entries import RESULTS, is_there, processor, put
from bench.ours import train_ours
from bench.rivals import Trained
from bench.score import with_cache
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config

OUT, FOLDER = ROOT / "bench" / "out" / "apebench", RESULTS / "apebench"
PACKAGES = ("apebench==0.1.1", "exponax==0.1.0", "pdequinox==0.1.2", "trainax==0.0.2", "jax==0.10.2")
SCORED, OWN_STEPS, NUM_VALIDATED = 100, 10_000, 5
# glibc gives large arrays back to the kernel after every step; kept, a U-Net in 2D takes 0.7 of the time
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_ARENA_MAX": "1"}
NETWORKS = {1: ("Res;26;8;relu", "Dil;2;32;2;relu", "FNO;12;18;4;gelu")}
NETWORKS[2] = ("FNO;12;18;4;gelu", "UNet;12;2;relu", "Res;26;8;relu")
LINES = ("adv", "diff", "adv_diff", "disp", "hyp_diff", "burgers", "kdv", "ks", "ks_cons", "fisher")
SMALL = {"num_spatial_dims": 2, "num_points": 48}
# scenario -> APEBench's name, settings, symmetries; 1D with 160 cells
SCENARIOS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    **{name: (f"diff_{name}", {}, ["shift"]) for name in LINES},
    "decay_turb": ("phy_decay_turb", SMALL, ["shift"]),
    "kolm_flow": ("phy_kolm_flow", SMALL, ["shift_x"]),  # its forcing varies along y
    "gs": ("phy_gs", SMALL, ["shift"]),
    "gs_03": ("phy_gs", SMALL | {"domain_extent": 0.3}, ["shift"]),
}
BASES: dict[str, Any] = {"full": [], "bare": ["persistence"]}


# ---- score -------------------------------------------------------------------------------------------------


def mean_nrmse(pred: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the error of every step (T,): |pred - reference| / |reference| over space, summed over channels,
    mean over trajectories. Both (trajectory, T, channel, *space). inf if a rollout diverged.
    """
    space = tuple(range(3, reference.ndim))
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.square(pred.astype(float) - reference).sum(space)
        ratio = np.sqrt(error / np.square(reference.astype(float)).sum(space))
    return np.nan_to_num(ratio, nan=np.inf).sum(2).mean(0)


def summary(errors: np.ndarray) -> dict[str, Any]:
    """Return the geometric mean over the first 100 steps, and the error after all steps."""
    scored = [float(value) for value in errors[:SCORED]]
    mean = math.exp(sum(map(math.log, scored)) / len(scored)) if min(scored) > 0 else 0.0
    return {"error": mean, "end": float(errors[-1])}


# ---- APEBench's environment --------------------------------------------------------------------------------


def environment(python: Path | None, module: str = "apebench", packages: Sequence[str] = PACKAGES) -> Path:
    """Return an interpreter that has `module`; without `python` an environment with `packages` is made once.

    Raises ValueError if `python` lacks it, OSError if pip fails.
    """
    if python is None:
        folder = OUT.with_name(f"{module}-env")
        python = folder / "bin" / "python"
        if not (folder / "complete").is_file():
            print(f"installing {' '.join(packages)} in {folder}", flush=True)
            venv.create(folder, with_pip=True, clear=True)
            if subprocess.run([python, "-m", "pip", "install", "-q", *packages]).returncode:
                raise OSError(
                    f"pip did not install {', '.join(packages)}; expected them in {folder}. Check the "
                    f"network, or name an interpreter that has them with --python."
                )
            (folder / "complete").touch()
    found = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError(
            f"{python} cannot import {module} ({found.stderr.strip().splitlines()[-1]:.200}); expected an "
            f"interpreter with {packages[0]}. Leave --python out to have one made, or install it there."
        )
    return python


def call(python: Path, command: str, request: dict[str, Any], out: Path) -> dict[str, np.ndarray]:
    """Return what a command of bench/apebench_jax.py writes; one thread."""
    asked = out.with_suffix(".json")
    asked.write_text(json.dumps(request), encoding="utf-8")
    one_thread = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": one_thread, "OMP_NUM_THREADS": "1"}
    environ |= KEEPS_MEMORY | {"PYTHONPATH": str(ROOT)}
    path, partial = Path(__file__).with_name("apebench_jax.py"), out.with_suffix(".partial.npz")
    # -P: not the folder of the script, where this file has the name of the package
    subprocess.run([python, "-P", path, command, asked, partial], check=True, env=environ)
    partial.replace(out)
    with np.load(out) as stored:
        return dict(stored)


def made(name: str, python: Path) -> Path:
    """Return the folder of a scenario with its data, generated once, and with our files made of them."""
    folder, (kind, settings, _) = OUT / name, SCENARIOS[name]
    if not (folder / "test" / "u.npy").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        data = call(python, "data", {"scenario": kind, "settings": settings}, folder / "data.npz")
        write_parts(folder, data["train"], data["test"], NUM_VALIDATED)
    return folder


def write_parts(folder: Path, train: np.ndarray, test: np.ndarray, num_validated: int) -> None:
    """Write our files: all but the last training trajectories to train, these to validate, the first frames
    of the test trajectories where user data have their test split, which no training reads.
    """
    parts = {"train": train[:-num_validated], "val": train[-num_validated:]}
    for part, u in (parts | {"test": test[:, : train.shape[1]]}).items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        np.save(folder / part / "u.npy", u)


# ---- columns -----------------------------------------------------------------------------------------------


def config_of(name: str, folder: Path, base: Any, overrides: list[str]) -> Config:
    """Return the configuration of a scenario as user data, with its cache built; written to the folder."""
    *_, settings, symmetries = SCENARIOS[name]
    space = ["x", "y", "z"][: settings.get("num_spatial_dims", 1)]
    section = {
        "files": str(folder / "*" / "u.npy"),
        "layout": {"u": ["trajectory", "time", "channel", *space]},
        "split": "folder",
        "boundary": "periodic",
        "domain": [0.0, 1.0],
        "dt": 1.0,
        "symmetries": symmetries,
    }
    text = {
        "include": str(ROOT / "configs" / "small.yaml"),
        "data": {"tasks": [task_of(name)], "source": "user"},
        "cache": {"root": str(folder / "cache")},
        "task": {task_of(name): section | ({"base": base} if base else {})},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(text, sort_keys=False), encoding="utf-8")
    return with_cache(load_config(path, overrides), task_of(name))


def task_of(name: str) -> str:
    return f"apebench_{name}"


def columns_of(name: str) -> list[str]:
    """Return the columns of a scenario."""
    return [*BASES, *NETWORKS[SCENARIOS[name][1].get("num_spatial_dims", 1)]]


@torch.no_grad()
def forecast_error(predict: Any, test: np.ndarray) -> dict[str, Any]:
    """Return the summary of forecasts (see `Trained.predict`) from the first frame of test."""
    given = torch.from_numpy(test[:, :1])
    pred = predict(given, torch.zeros(len(test), 0, dtype=torch.float64), test.shape[1] - 1)
    return summary(mean_nrmse(pred.numpy(), test[:, 1:]))


def ours(name: str, column: str, folder: Path, test: np.ndarray, seed: int, args: Any) -> dict[str, Any]:
    config = config_of(name, folder, BASES[column], args.overrides)
    trained: Trained = train_ours(config, task_of(name), args.budget, seed)
    row = forecast_error(trained.predict, test)
    alone = forecast_error(trained.predict_base, test)["error"]
    sizes = {key: getattr(trained, key) for key in ("steps", "seconds", "num_parameters")}
    return row | {"base": alone} | sizes


def network(
    name: str, column: str, folder: Path, test: np.ndarray, seed: int, steps: int, args: Any
) -> dict[str, Any]:
    """Return the row of one of APEBench's networks. Raises ValueError where our metric is not APEBench's."""
    kind, settings, _ = SCENARIOS[name]
    request = {
        "scenario": kind,
        "settings": settings,
        "network": column,
        "seed": seed,
        "steps": steps,
        "seconds": args.budget,
        "data": str(folder / "data.npz"),
    }
    out = folder / "network.npz"
    found = call(args.python, "train", request, out)
    out.unlink()
    errors, theirs = mean_nrmse(found["rollout"], test[:, 1:]), np.nan_to_num(found["errors"], nan=np.inf)
    if np.isfinite(theirs).all() and not np.allclose(errors, theirs, rtol=1e-3):
        raise ValueError(
            f"mean nRMSE of {column} on {name} is {errors[0]:.6g} after one step; expected APEBench's own, "
            f"{theirs[0]:.6g}. Its metric has changed: compare `mean_nrmse` with its components/_metrics.py."
        )
    sizes = {"steps": int(found["steps"]), "seconds": float(found["seconds"])}
    return (
        summary(errors) | sizes | {"num_parameters": int(found["num_parameters"]), "jax": str(found["jax"])}
    )


# ---- command -----------------------------------------------------------------------------------------------


def run_column(name: str, column: str, seed: int, steps: int, folder: Path, args: Any) -> None:
    """Train and score one column unless its result exists. steps: of a network, 0 for those that fit."""
    with np.load(folder / "data.npz") as data:
        digest, test = hashlib.sha256(data["train"].tobytes()).hexdigest()[:16], data["test"]
    is_ours = column in BASES
    key = {
        "column": column,
        "seed": seed,
        "data": digest,
        "budget_s": 0.0 if steps else args.budget,
        "steps": steps,
        "processor": processor("cpu"),
        "overrides": args.overrides if is_ours else [],
    }
    if is_there(name, FOLDER, key):
        return
    if is_ours:
        row = ours(name, column, folder, test, seed, args)
    else:
        row = network(name, column, folder, test, seed, steps, args)
    still = mean_nrmse(np.broadcast_to(test[:, :1], test[:, 1:].shape), test[:, 1:])
    scenario, settings = SCENARIOS[name][:2]
    facts = {"persistence": summary(still)["error"], "scenario": scenario, "settings": settings}
    put(name, FOLDER, key, {"row": row}, **facts)
    print(
        f"{name} {column} seed {seed}: {row['error']:.3g}, {row['steps']} steps in {row['seconds']:.0f} s, "
        f"{time.strftime('%H:%M')}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--scenario", nargs="+", choices=tuple(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--budget", type=float, default=45.0, help="processor seconds of one thread")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    every = [*BASES, *dict.fromkeys(name for networks in NETWORKS.values() for name in networks)]
    parser.add_argument("--column", nargs="+", choices=every, default=every)
    parser.add_argument("--own-steps", action="store_true", help=f"1D networks also by {OWN_STEPS} steps")
    parser.add_argument("--python", type=Path, help="an interpreter that has APEBench")
    args = parse(parser, argv)
    torch.set_num_threads(1)
    args.python = environment(args.python)
    for seed in args.seeds:
        for name in args.scenario:
            folder = made(name, args.python)
            for column in [one for one in columns_of(name) if one in args.column]:
                run_column(name, column, seed, 0, folder, args)
                if args.own_steps and column not in BASES and not SCENARIOS[name][1]:
                    run_column(name, column, seed, OWN_STEPS, folder, args)


if __name__ == "__main__":
    main()
