"""Our operator on APEBench's scenarios, by its metric, after the processor time that its networks had.

    python -m bench.apebench --scenario burgers kdv --budget 45   # no --scenario: all
    python -m bench.table                                         # write the table of docs/peers.md

APEBench (Koehler et al. 2024, arXiv 2411.00180) runs in an environment of its own (JAX), which is made in
bench/out/apebench-env unless --python names one. It generates the data, 50 trajectories of 51 frames to train
and 30 of 201 to test, with its seeds (bench/apebench_data.py). Its reference takes one ETDRK2 step per frame
in most scenarios: the data solve that scheme, not the PDE.

Columns: full (all usual bases of user data; the row has the base alone, too) and bare (base: persistence).
Our operator has 45 of the 50 trajectories and selects weights on the others. Its networks had all; their
version, seeds and data are fixed, and so are their results. Error: mean nRMSE of rollouts from the first
frame, geometric mean over the first 100 steps. Every result goes to bench/results/apebench/SCENARIO.json at
once and is not computed again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import time
import venv
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from bench.baselines import Trained
from bench.command import parse, parser_of
from bench.entries import RESULTS as KEPT
from bench.entries import is_there, processor, put
from bench.ours import train_ours
from bench.score import with_cache
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config

OUT, RESULTS = ROOT / "bench" / "out" / "apebench", KEPT / "apebench"
PACKAGES = ("apebench==0.1.1", "exponax==0.1.0", "pdequinox==0.1.2", "trainax==0.0.2", "jax==0.10.2")
SCORED, NUM_VALIDATED = 100, 5
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
    """Return the geometric mean over the first 100 steps, and the error after 1, 100 and all steps."""
    scored = [float(value) for value in errors[:SCORED]]
    mean = math.exp(sum(map(math.log, scored)) / len(scored)) if min(scored) > 0 else 0.0
    return {"error": mean, "first": scored[0], "last": scored[-1], "end": float(errors[-1])}


# ---- APEBench's environment --------------------------------------------------------------------------------


def environment(python: Path | None) -> Path:
    """Return an interpreter that has APEBench; without `python` an environment with PACKAGES is made once.

    Raises ValueError if `python` lacks it, OSError if pip fails.
    """
    if python is None:
        folder = OUT.with_name("apebench-env")
        python = folder / "bin" / "python"
        if not (folder / "complete").is_file():
            print(f"installing {' '.join(PACKAGES)} in {folder}", flush=True)
            venv.create(folder, with_pip=True, clear=True)
            if subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES]).returncode:
                raise OSError(
                    f"pip did not install {', '.join(PACKAGES)}; expected them in {folder}. Check the "
                    f"network, or name an interpreter that has them with --python."
                )
            (folder / "complete").touch()
    found = subprocess.run([python, "-c", "import apebench"], capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError(
            f"{python} cannot import apebench ({found.stderr.strip().splitlines()[-1]:.200}); expected an "
            f"interpreter with {PACKAGES[0]}. Leave --python out to have one made, or install it there."
        )
    return python


def made(name: str, python: Path) -> Path:
    """Return the folder of a scenario with its data, generated once, and with our files made of them."""
    folder, (kind, settings, _) = OUT / name, SCENARIOS[name]
    if not (folder / "test" / "u.npy").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        one_thread = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": one_thread, "OMP_NUM_THREADS": "1"}
        script, out = Path(__file__).with_name("apebench_data.py"), folder / "data.npz"
        # -P: not the folder of the script, where this file has the name of the package
        subprocess.run([python, "-P", script, kind, json.dumps(settings), out], check=True, env=environ)
        with np.load(out) as data:
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


# ---- command -----------------------------------------------------------------------------------------------


def run_column(name: str, column: str, seed: int, folder: Path, args: Any) -> None:
    """Train and score one column unless its result exists."""
    with np.load(folder / "data.npz") as data:
        digest, test = hashlib.sha256(data["train"].tobytes()).hexdigest()[:16], data["test"]
    key = {
        "column": column,
        "seed": seed,
        "data": digest,
        "budget_s": args.budget,
        "steps": 0,  # not as networks by a number of steps
        "processor": processor("cpu"),
        "overrides": args.overrides,
    }
    if is_there(name, RESULTS, key):
        return
    row = ours(name, column, folder, test, seed, args)
    still = mean_nrmse(np.broadcast_to(test[:, :1], test[:, 1:].shape), test[:, 1:])
    scenario, settings = SCENARIOS[name][:2]
    facts = {"persistence": summary(still)["error"], "scenario": scenario, "settings": settings}
    put(name, RESULTS, key, {"row": row}, **facts)
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
    parser.add_argument("--column", nargs="+", choices=tuple(BASES), default=tuple(BASES))
    parser.add_argument("--python", type=Path, help="an interpreter that has APEBench")
    args = parse(parser, argv)
    torch.set_num_threads(1)
    args.python = environment(args.python)
    for seed in args.seeds:
        for name in args.scenario:
            folder = made(name, args.python)
            for column in args.column:
                run_column(name, column, seed, folder, args)


if __name__ == "__main__":
    main()
