"""Publish the weights of a run: copy what another machine needs to a folder or a model hub.

    python -m ups.commands.publish runs/small pretrained            (or: make publish RUN=small TO=pretrained)
    python -m ups.commands.publish runs/small hf://owner/name

A copy has one folder per stage: the network (config.json, model.safetensors), its origin (done.json,
config.yaml, metrics.jsonl) and the report's model card with pictures. Tensors are safetensors and the rest is
text, so loading a copy runs no code.

The copy is made beside its target, opened as `ups.load` opens it, and renamed. It replaces nothing but an
earlier copy: a folder with such files of finished stages and nothing else.
"""

import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from ups.common.files import DamagedError, flush, require_plain
from ups.common.place import make_target
from ups.config import STAGES, read_command, run_script
from ups.training.finished import CARD, DONE, IMAGES, MODEL, finished_stage, stage_config, stage_of_run

HUB = "hf://"  # marks a name on a hub: a folder that is missing never causes a request
NEEDED = ("config.json", MODEL, DONE, "config.yaml", CARD)
FILES = (*NEEDED, "metrics.jsonl", f"{IMAGES}/*.png")


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


def require_target(run: Path, folder: Path) -> None:
    """Raise ValueError unless `folder` is outside of the run and is missing, empty or an earlier copy."""
    source, target = run.resolve(), folder.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise ValueError(
            f"{folder} is the run {run} itself, or in it or around it; expected another place. "
            "Name another with TO=."
        )
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(
            f"{folder} is a link or a file; expected a folder, or nothing. Name another with TO=."
        )
    copied = {
        path
        for stage in STAGES
        if _is_copy(folder / stage)
        for pattern in FILES
        for path in (folder / stage).glob(pattern)
    }
    strange = (
        path for path in folder.rglob("*") if path.is_symlink() or not (path.is_dir() or path in copied)
    )
    if (first := next(strange, None)) is not None:
        raise ValueError(
            f"{folder} holds {first.relative_to(folder)}; expected nothing, or an earlier copy "
            "alone, which this one replaces. Name another with TO=, or delete it yourself."
        )


def _is_copy(folder: Path) -> bool:
    """Whether a folder is a finished, unaltered stage."""
    try:
        return not folder.is_symlink() and finished_stage(folder) is not None
    except DamagedError:
        return False


def copy(run: str | Path, folder: str | Path) -> Path:
    """Copy `published_files` of a run to `folder`, completely or not at all; return the folder.

    Raises as `published_files` and `require_target`.
    """
    run, folder = Path(run), Path(folder)
    files = published_files(run)
    require_target(run, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.publishing-") as temporary:
        new, old = Path(temporary) / "new", Path(temporary) / "old"
        new.mkdir()
        for name, path in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, new / name, follow_symlinks=False)
            flush(new / name)
        require_loadable(new)
        require_target(run, folder)  # it may have changed meanwhile
        try:
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except BaseException:  # signals too: else the earlier copy would be lost with the temporary folder
            if old.exists() and not folder.exists():
                old.rename(folder)
            raise
        flush(folder.parent)
    return folder


def require_loadable(folder: Path) -> None:
    """Raise DamagedError unless `ups.load` can open every stage of a copy. The user's solver is not run."""
    from ups.generative.corrector import Corrector
    from ups.models.operator import Operator
    from ups.training.stage import load_stage

    for stage in (stage for stage in STAGES if (folder / stage).is_dir()):
        stage_of_run(folder, stage)
        load_stage(folder / stage, Operator if stage == "operator" else Corrector, stage, "Publish it again.")


def push(run: str | Path, name: str) -> str:
    """Commit `published_files` of a run to OWNER/NAME on the hub; return the address of the commit.

    The repository is created if it is missing. The operator's card becomes the model's. Raises ImportError
    without huggingface_hub, and the client's own errors for a name or token that the hub refuses.
    """
    hub, files = _hub(), published_files(Path(run))
    api, name = hub.HfApi(), name.removeprefix(HUB)
    root = (
        files[f"operator/{CARD}"].read_text(encoding="utf-8").replace(f"]({IMAGES}/", f"](operator/{IMAGES}/")
    )
    api.create_repo(name, exist_ok=True)
    added = [
        hub.CommitOperationAdd(CARD, root.encode()),
        *(hub.CommitOperationAdd(place, path) for place, path in files.items()),
    ]
    return str(api.create_commit(name, added, commit_message=f"Weights of {Path(run).name}").commit_url)


def fetch(name: str) -> Path:
    """Download hf://OWNER/NAME or hf://OWNER/NAME@REVISION once, and return its folder.

    huggingface_hub keeps the files. Raises ImportError as `push`, FileNotFoundError with the hub's reason.
    """
    name, _, revision = name.removeprefix(HUB).partition("@")
    patterns = [f"{stage}/{pattern}" for stage in STAGES for pattern in FILES]
    hub = _hub()
    try:
        return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{HUB}{name} is neither on this machine nor on its hub ({' '.join(str(error).split()):.200}); "
            "expected OWNER/NAME of weights that were pushed. Check the name and the network, or pass a "
            "folder."
        ) from error


def _hub() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"a name that begins with {HUB} needs huggingface_hub, which is not installed; "
            "expected it, or a folder. Run pip install huggingface_hub."
        ) from error
    return huggingface_hub


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
