"""Publish the weights of a run: copy what another machine needs to a folder or a model hub.

    python -m ups.commands.publish runs/small weights               (or: make publish RUN=small TO=weights)
    python -m ups.commands.publish runs/small hf://owner/name

A copy has one folder per stage: the network (config.json, model.safetensors), its origin (done.json,
config.yaml, metrics.jsonl) and the report's model card with pictures. Tensors are safetensors and the rest is
text, so loading a copy runs no code.

The copy is made beside its target and opened as `ups.load` opens it before it gets its name. It replaces
nothing.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from ups.common.files import DamagedError, flush, require_plain, temporary_folder
from ups.common.place import HUB, STAGES, make_target
from ups.config.command import read_command, run_script
from ups.hub import FILES, NEEDED, client, reason
from ups.training.artifact import CARD, DONE, IMAGES, finished_stage, stage_config, stage_of_run


def published_files(run: Path) -> dict[str, Path]:
    """Return path in the copy -> file, for every finished stage in the folder of a run.

    Raises FileNotFoundError for a run without operator or a stage without its card; DamagedError for a stage
    that was altered, belongs to another run or is a link.
    """
    fix = "Publish files of the run itself."
    finished = [stage for stage in STAGES if (run / stage / DONE).is_file() and stage_of_run(run, stage)]
    if "operator" not in finished:
        raise FileNotFoundError(
            f"{run} holds no finished operator; expected a run's folder, such as runs/small. "
            f"Run {make_target('train')}, or name another."
        )
    for stage in finished:
        for name in NEEDED:
            if not (run / stage / name).is_file():
                raise FileNotFoundError(
                    f"{run / stage} has no {name}; expected a stage with the card that a report on the "
                    f"test split writes. Run {make_target(f'report RUN={run.name}')}, or delete the stage."
                )
        stage_config(run / stage, finished_stage(run / stage))
        if (run / stage / IMAGES).is_symlink():
            raise DamagedError(f"{run / stage / IMAGES} is a link; expected a folder of its own. {fix}")
    files = {
        path.relative_to(run).as_posix(): path
        for stage in finished
        for pattern in FILES
        for path in sorted((run / stage).glob(pattern))
    }
    for path in files.values():
        require_plain(path, fix)
    return files


def copy(run: str | Path, folder: str | Path) -> Path:
    """Copy `published_files` of a run to `folder`, completely or not at all; return the folder.

    Raises as `published_files`, and FileExistsError if there is anything but an empty folder.
    """
    run, folder = Path(run), Path(os.path.abspath(folder))
    files = published_files(run)
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} is there already; expected nothing or an empty folder, as publishing replaces "
            "nothing. Name another with TO=, or delete it (rm -r) first."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent) as work:
        new = work / folder.name
        for name, path in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, new / name, follow_symlinks=False)
            flush(new / name)
        require_loadable(new)
        new.rename(folder)  # fails unless it is missing or empty
    flush(folder.parent)
    return folder


def require_loadable(folder: Path) -> None:
    """Raise DamagedError unless `ups.load` can open every stage of a copy. The user's solver is not run."""
    from ups.generative.corrector import Corrector
    from ups.models.operator import Operator
    from ups.training.weights import load_stage

    for stage in (stage for stage in STAGES if (folder / stage).is_dir()):
        stage_of_run(folder, stage)
        load_stage(folder / stage, Operator if stage == "operator" else Corrector, stage, "Publish it again.")


def push(run: str | Path, name: str) -> str:
    """Commit `published_files` of a run to OWNER/NAME on the hub; return the address of the commit.

    The repository is created if it is missing. The operator's card becomes the model's. Raises ImportError
    without huggingface_hub, ConnectionError with the hub's reason.
    """
    files, name, hub = published_files(Path(run)), name.removeprefix(HUB), client()
    card = files[f"operator/{CARD}"].read_text(encoding="utf-8")
    card = card.replace(f"]({IMAGES}/", f"](operator/{IMAGES}/")
    added = [hub.CommitOperationAdd("README.md", card.encode())]
    added += [hub.CommitOperationAdd(place, str(path.resolve())) for place, path in files.items()]
    try:
        hub.create_repo(name, exist_ok=True)
        commit = hub.create_commit(name, added, commit_message=f"Weights of {Path(run).name}")
    except Exception as error:  # of several libraries; a strange answer of a hub raises anything
        raise ConnectionError(
            f"{HUB}{name} did not take {run} ({reason(error)}); expected OWNER/NAME of a repository that "
            "your token may write. Check the name, the network and huggingface-cli whoami, and publish again."
        ) from None
    return str(commit.commit_url)


def main() -> int:
    arguments = read_command(
        __doc__,
        {"run": {"help": "folder of a run"}, "to": {"help": f"a folder, or {HUB}OWNER/NAME"}},
        prog="python -m ups.commands.publish",
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `copy` cleans up
    is_hub = arguments.to.startswith(HUB)
    print(push(arguments.run, arguments.to) if is_hub else copy(arguments.run, arguments.to))
    return 0


if __name__ == "__main__":
    run_script(main, "ups.commands.publish")
