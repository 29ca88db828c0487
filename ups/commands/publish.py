"""Weights that travel: what of a run another machine needs, copied to a folder or to a model hub and back.

    python -m ups.commands.publish runs/small pretrained            (or: make publish RUN=small TO=pretrained)
    python -m ups.commands.publish runs/small hf://owner/name

What travels is a folder per stage, with its network (config.json, model.safetensors), who made it from what
(done.json, config.yaml, metrics.jsonl) and the card with its pictures that the report writes. Tensors are
safetensors and the rest is text: nothing that is loaded can run.

A copy is made beside its target, opened as `ups.load` opens it, and renamed. It takes the place of an earlier
copy alone: of a folder that holds such files of finished stages and nothing else.
"""

import shutil
import signal
import sys
import tempfile
from pathlib import Path

from ups.common.files import DamagedError, flush, require_plain
from ups.config import STAGES, read_command, run_script
from ups.report.model_card import CARD, IMAGES
from ups.training.folder import DONE, MODEL, finished_stage, stage_config, stage_of_run

HUB = "hf://"  # before a name on a hub: without it a folder that is missing is no reason to ask the network
NEEDED = ("config.json", MODEL, DONE, "config.yaml", CARD)
FILES = (*NEEDED, "metrics.jsonl", f"{IMAGES}/*.png")


def travelling(run: Path) -> dict[str, Path]:
    """Path in a copy -> file, of every finished stage in the folder of a run.

    Raises FileNotFoundError for a run without operator, or a stage without its card; DamagedError for a stage
    that is not as it was left, of another run or behind a link.
    """
    again = "Publish files of the run itself."
    there = [stage for stage in STAGES if (run / stage / DONE).is_file() and stage_of_run(run, stage)]
    if "operator" not in there:
        raise FileNotFoundError(
            f"{run} holds no finished operator; expected a run's folder, such as "
            f"runs/small. Run make train, or name another."
        )
    for stage in there:
        for name in NEEDED:
            if not (run / stage / name).is_file():
                raise FileNotFoundError(
                    f"{run / stage} has no {name}; expected a stage that a report on the "
                    f"test split has judged, for that writes its card. Run make report "
                    f"RUN={run.name}, or delete the stage."
                )
        stage_config(run / stage, finished_stage(run / stage))
        if (run / stage / IMAGES).is_symlink():
            raise DamagedError(f"{run / stage / IMAGES} is a link; expected a folder of its own. {again}")
    files = {
        path.relative_to(run).as_posix(): path
        for stage in there
        for pattern in FILES
        for path in sorted((run / stage).glob(pattern))
    }
    for path in files.values():
        require_plain(path, again)
    return files


def require_target(run: Path, folder: Path) -> None:
    """Raise ValueError unless a copy of `run` may take the place of `folder`: nothing, an empty folder or an
    earlier copy, outside of the run.
    """
    here, there = run.resolve(), folder.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(
            f"{folder} is the run {run} itself, or in it or around it; expected another place. "
            "Name another with TO=."
        )
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(
            f"{folder} is a link or a file; expected a folder, or nothing. Name another with TO=."
        )
    known = {
        path
        for stage in STAGES
        if _is_copy(folder / stage)
        for pattern in FILES
        for path in (folder / stage).glob(pattern)
    }
    strange = (
        path for path in folder.rglob("*") if path.is_symlink() or not (path.is_dir() or path in known)
    )
    if (first := next(strange, None)) is not None:
        raise ValueError(
            f"{folder} holds {first.relative_to(folder)}; expected nothing, or an earlier copy "
            "alone, which this one replaces. Name another with TO=, or delete it yourself."
        )


def _is_copy(folder: Path) -> bool:
    """Whether a folder is a finished stage, as it was left."""
    try:
        return not folder.is_symlink() and finished_stage(folder) is not None
    except DamagedError:
        return False


def copy(run: str | Path, folder: str | Path) -> Path:
    """`travelling` of a run in `folder`, in place of an earlier copy, whole or not at all; the folder.

    Raises as `travelling` and `require_target`.
    """
    run, folder = Path(run), Path(folder)
    files = travelling(run)
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
        require_target(run, folder)  # it took a while
        try:
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except BaseException:  # a signal, too: else what was there would go with the temporary folder
            if old.exists() and not folder.exists():
                old.rename(folder)
            raise
        flush(folder.parent)
    return folder


def require_loadable(folder: Path) -> None:
    """Raise DamagedError unless every stage of a copy opens as `ups.load` opens it, but for a solver of the
    user's, which nobody runs here."""
    from ups.generative.corrector import Corrector
    from ups.models.operator import Operator
    from ups.training.stage import load_stage

    for stage in (stage for stage in STAGES if (folder / stage).is_dir()):
        stage_of_run(folder, stage)
        load_stage(folder / stage, Operator if stage == "operator" else Corrector, stage, "Publish it again.")


def push(run: str | Path, name: str) -> str:
    """`travelling` of a run to NAME (OWNER/NAME) on the hub, in one commit, made if need be; its address.

    The operator's card is the model's. Raises ImportError without huggingface_hub, and its errors, which say
    what is wrong, for a name or token that the hub does not accept.
    """
    hub, files = _hub(), travelling(Path(run))
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
    """The folder of a run that `push` left under hf://OWNER/NAME, or hf://OWNER/NAME@REVISION, downloaded
    once and kept by huggingface_hub. Raises ImportError as `push`, and FileNotFoundError with what the hub
    said."""
    name, _, revision = name.removeprefix(HUB).partition("@")
    patterns = [f"{stage}/{pattern}" for stage in STAGES for pattern in FILES]
    hub = _hub()
    try:
        return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{HUB}{name} is neither on this machine nor to be had from its hub "
            f"({' '.join(str(error).split()):.200}); expected OWNER/NAME of weights that "
            "were pushed. Check the name and the network, or give a folder."
        ) from error


def _hub():  # its modules come with the first use
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"a name that begins with {HUB} needs huggingface_hub, which is not installed; "
            f"expected it, or a folder. Run pip install huggingface_hub."
        ) from error
    return huggingface_hub


def main() -> int:
    arguments = read_command(
        __doc__,
        {"run": {"help": "folder of a run"}, "to": {"help": f"a folder, or {HUB}OWNER/NAME"}},
        prog="python -m ups.commands.publish",
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of `copy`'s clean-up
    is_hub = arguments.to.startswith(HUB)
    print(push(arguments.run, arguments.to) if is_hub else copy(arguments.run, arguments.to))
    return 0


if __name__ == "__main__":
    run_script(main, "ups.commands.publish")
