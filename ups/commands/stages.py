"""Decide whether a stage must run: it is skipped if its config, inputs and checksums are unchanged.

    python -m ups.commands.stages operator --config configs/small.yaml
    python -m ups.commands.stages stages --config configs/small.yaml     prints the stages that a report needs

Exit status: 0 up to date, 3 to do, 1 refused with a reason. make runs this before every stage, so it does not
import torch. `data` and `cache` are always to do: their scripts check every file themselves.
"""

import json
from collections.abc import Mapping
from typing import Any

import h5py

from ups.common.files import DamagedError, file_hash, read_record, read_sealed, value_hash
from ups.common.place import STAGES, make_target, script
from ups.common.progress import position
from ups.common.user_solver import solver_digest
from ups.config.command import CONFIG_OPTIONS, read_command, run_script
from ups.config.load import load_config, to_dict
from ups.config.schema import Config
from ups.data.counts import context_frames
from ups.report.bench_rows import data_key, find_bench_rows
from ups.training.artifact import DONE, finished_stage, require_identity
from ups.training.folder import StageFolder

TO_DO = 3  # exit status
OPTIONS = {
    "stage": {"choices": ["stages", "data", "cache", *STAGES, "report"]},
    **CONFIG_OPTIONS,
    "--of-report": {"action": "store_true", "help": "to do only if the report needs the stage"},
}


def parents_of(config: Config, stage: str, caches: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return name -> fingerprint of every input of `stage`: parent stages, caches, initial weights, solvers.

    caches: task -> open cache; without it the fingerprints are read from the files.
    Raises FileNotFoundError, DamagedError or FileExistsError, which name the make target, if a parent is
    missing, was altered or was made with another configuration.
    """
    return {
        **{name: require_stage(config, name)["fingerprint"] for name in STAGES[stage].parents},
        **{
            name: caches[name].fingerprint if caches else cache_fingerprint(config, name)
            for name in config.served(stage)
        },
        **init_fingerprint(config, stage),
        **(solver_digests(config) if stage == "operator" else {}),
    }


def init_fingerprint(config: Config, stage: str) -> dict[str, str]:
    """Return {"init": fingerprint} of the finished stage in `STAGE.init`; {} if `init` is empty.

    Raises FileNotFoundError if that folder holds no finished stage of the same kind, ValueError if its
    network has another size.
    """
    if (folder := config.init_dir(stage)) is None:
        return {}
    key, own = f"{stage}.init", config.run_dir / stage
    done = finished_stage(folder) if folder.resolve() != own.resolve() else None
    if done is None or (done["stage"] == "operator") != (stage == "operator"):
        raise FileNotFoundError(
            f"{key} leads to {folder}, which is no finished {stage} stage of another run; expected one with "
            f"{DONE}, or its run's folder. Name one with {key}=, or leave it empty to start afresh."
        )
    found = read_record(folder / "config.json", "the description of a network", "Name another.", model=dict)
    section = STAGES[stage].network
    if different := [
        f"{section}.model.{name} {value} (there {found['model'].get(name, 'none')})"
        for name, value in to_dict(config.model_of(stage)).items()
        if found["model"].get(name) != value
    ]:
        raise ValueError(
            f"{key} leads to {folder}, whose network is another: {', '.join(different)}; "
            "expected the same, as its weights are to be taken over. Set the keys to what is "
            f"there, or name another with {key}=."
        )
    return {"init": done["fingerprint"]}


def solver_digests(config: Config) -> dict[str, str]:
    """Return "solver of TASK" -> digest of the user's coarse solver, for every task whose bases include it.

    Raises ValueError if Python cannot import it.
    """
    return {
        f"solver of {name}": solver_digest(config.task[name].solver, name)
        for name in config.data.tasks
        if "solver" in config.task[name].base
    }


def cache_fingerprint(config: Config, task: str) -> str:
    """Return the fingerprint in the header of a task's cache. Only `open_cache` verifies the contents."""
    return _header(config, task)[0]["fingerprint"]


def cache_context(config: Config, task: str) -> int:
    """Return `Cache.context`."""
    header, num_frames = _header(config, task)
    return context_frames(config, task, "noise" in header, num_frames)


def _header(config: Config, task: str) -> tuple[dict[str, Any], int]:
    """Return the header of a task's cache, and its frames. Raises as `parents_of`."""
    path = config.cache_path(task)
    try:
        with h5py.File(path, "r", locking=False) as file:
            header = json.loads(bytes(file["header"][()]).decode())
            return header | {"fingerprint": str(header["fingerprint"])}, file["state/latents"].shape[1]
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no cache of {task} at {path}; expected the latents there (key cache.root). "
            f"Build it with `{make_target('cache')}`."
        ) from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            f"{path} has no header that can be read ({error}); expected a whole cache. "
            f"Rebuild it with {script('prepare_cache.py')} --config CONFIG --rebuild."
        ) from error


def require_stage(config: Config, stage: str) -> dict[str, Any]:
    """Return done.json of a finished stage of this run. Its "fingerprint" identifies the stage.

    Raises FileNotFoundError with the make target if the stage is missing or unfinished, DamagedError if it
    was altered, FileExistsError if it was made with another configuration or from other parents.
    """
    path, name = config.run_dir / stage, config.run.name
    done = finished_stage(path)
    if done is None:
        raise FileNotFoundError(
            f"stage {stage} of run {name} is {'unfinished' if path.is_dir() else 'missing'}; expected "
            f"{path / DONE}. Run: {make_target(f'{stage} RUN={name}')}"
        )
    folder = stage_folder(config, stage)
    folder.require_same_settings()
    require_identity(done, folder.identity, f"stage {stage} of run {name}", path / DONE, folder.remedy)
    return done


def stage_folder(config: Config, stage: str) -> StageFolder:
    """Return the folder of a stage, with its present parents. Raises as `parents_of`."""
    return StageFolder(config, stage, parents_of(config, stage))


def why_to_do(config: Config, stage: str) -> str:
    """Return why a stage or the report must run; "" if it is up to date. Raises as `require_stage`."""
    if stage == "report":
        return why_report(config, report_parents(config))
    folder = stage_folder(config, stage)
    return "" if folder.examine() else "it is unfinished" if folder.path.is_dir() else "it is missing"


def evaluated_operator(config: Config) -> dict[str, Any]:
    """Return done.json of the operator that the report evaluates: this run's, or that of evaluate.weights.

    With evaluate.weights, its parents are the caches of this run. Raises as `require_stage`.
    """
    if not config.evaluate.weights:
        return require_stage(config, "operator")
    folder = config.operator_dir
    if (done := finished_stage(folder)) is None:
        raise FileNotFoundError(
            f"evaluate.weights leads to {folder}, which is no finished operator; expected one with {DONE}, "
            "or its run's folder. Name one, or leave it empty to evaluate this run's."
        )
    return done | {"parents": {name: cache_fingerprint(config, name) for name in config.evaluated}}


def report_parents(config: Config) -> dict[str, str]:
    """Return name -> fingerprint of every input of the report.

    Inputs are caches, stages in `Config.reported_stages`, the section `evaluate` and the results of make
    bench. A stage that has not run is no error here: a gate of the report fails. Raises as `require_stage`.
    """
    present = [
        stage
        for stage in STAGES
        if stage in config.reported_stages and (config.run_dir / stage).is_dir() and stage != "operator"
    ]
    operator = evaluated_operator(config)
    stages = {"operator": operator, **{stage: require_stage(config, stage) for stage in present}}
    return {
        **{name: operator["parents"][name] for name in config.evaluated},
        **{stage: done["fingerprint"] for stage, done in stages.items()},
        "evaluate": value_hash(to_dict(config)["evaluate"]),
        "bench": value_hash(bench_rows(config, operator["parents"])),
    }


def bench_rows(config: Config, parents: dict[str, str]) -> dict[str, dict[str, dict]]:
    """Return TASK -> {"fno", "unet": row of results.json} by make bench, for every evaluated task.

    The rows are empty unless the report is on the whole test split. parents: of the operator; they hold the
    fingerprint of every cache. Raises as `find_bench_rows`.
    """
    is_whole = config.evaluate.split == "test" and not config.evaluate.max_trajectories
    return {
        name: find_bench_rows(name, data_key(parents[name], cache_context(config, name))) if is_whole else {}
        for name in config.evaluated
    }


def report_record(config: Config, parents: dict[str, str]) -> dict[str, Any]:
    """Return the contents of the report's done.json: its parents and a digest of each of its files."""
    folder = config.report_dir
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / DONE]
    return {
        "stage": "report",
        "run": config.run.name,
        "parents": parents,
        "files": {path.relative_to(folder).as_posix(): file_hash(path) for path in files},
    }


def why_report(config: Config, parents: dict[str, str]) -> str:
    """Return why the report must be made; "" if it is complete, unaltered and has these parents."""
    try:
        done = read_sealed(config.report_dir / DONE, "the record of a report", "", parents=dict, files=dict)
    except FileNotFoundError:
        return "it is missing, or a gate failed"
    except DamagedError as error:
        return str(error)
    if done["parents"] != parents:
        return "what it was made from has changed"
    changed = [
        name
        for name, digest in done["files"].items()
        if not (path := config.report_dir / name).is_file() or file_hash(path) != digest
    ]
    return f"{changed[0]} is missing or was altered" if changed else ""


def main() -> int:
    arguments = read_command(__doc__, OPTIONS, prog="python -m ups.commands.stages", allow_abbrev=False)
    config, stage = load_config(arguments.config, arguments.overrides), arguments.stage
    if stage == "stages":
        print(*config.trained)
        return 0
    name = position(stage, config.trained)
    if stage in ("data", "cache"):
        print(name, flush=True)
        return TO_DO
    if stage in STAGES and not config.served(stage):
        print(
            f"{name}: nothing to do, no {STAGES[stage].tasks} task reserves trajectories for it "
            "(task.TASK.reserve)",
            flush=True,
        )
        return 0
    if stage in STAGES and arguments.of_report and stage not in config.trained:
        key = "evaluate.weights" if config.evaluate.weights else "evaluate.stages"
        print(f"{name}: nothing to do, the report does not need it ({key})", flush=True)
        return 0
    why = why_to_do(config, stage)
    place = config.report_dir / "report.html" if stage == "report" else config.run_dir / stage
    print(f"{name}: {place}: {f'to do, {why}' if why else 'up to date'}", flush=True)
    return TO_DO if why else 0


if __name__ == "__main__":
    run_script(main, "ups.commands.stages")
