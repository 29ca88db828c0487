"""Weights that travel: what of a run another machine needs, copied to a folder or to a model hub and back.

    python -m ups.travel runs/small pretrained            (or: make publish RUN=small TO=pretrained)
    python -m ups.travel runs/small hf://owner/name

What travels is a folder per stage, with its network (config.json, model.safetensors), who made it from what
(done.json, config.yaml, metrics.jsonl) and the card with its pictures that the report writes. Tensors are
safetensors and the rest is text: nothing that is loaded can run.
"""

import shutil
from pathlib import Path

from ups.config import STAGES, read_command, run_script
from ups.evaluation.card import CARD, IMAGES
from ups.files import remove
from ups.training.folder import DONE, MODEL, finished_stage

HUB = "hf://"   # before a name on a hub: without it a folder that is missing is no reason to ask the network
NEEDED = ("config.json", MODEL, DONE, "config.yaml", CARD)
FILES = (*NEEDED, "metrics.jsonl", f"{IMAGES}/*.png")


def travelling(run: Path) -> dict[str, Path]:
    """Path in a copy -> file, of every finished stage in the folder of a run.

    Raises FileNotFoundError for a run without operator, or a stage without its card; DamagedError for a stage
    that is not as it was left.
    """
    there = [stage for stage in STAGES if (run / stage / DONE).is_file() and finished_stage(run / stage)]
    if "operator" not in there:
        raise FileNotFoundError(f"{run} holds no finished operator; expected a run's folder, such as "
                                f"runs/small. Run make train, or name another.")
    for stage in there:
        for name in NEEDED:
            if not (run / stage / name).is_file():
                raise FileNotFoundError(f"{run / stage} has no {name}; expected a stage that a report on the "
                                        f"test split has judged, for that writes its card. Run make report "
                                        f"RUN={run.name}, or delete the stage.")
    return {path.relative_to(run).as_posix(): path for stage in there for pattern in FILES
            for path in sorted((run / stage).glob(pattern))}


def copy(run: str | Path, folder: str | Path) -> Path:
    """`travelling` of a run in `folder`, in place of what travelled there before; the folder."""
    files, folder = travelling(Path(run)), Path(folder)
    for stage in STAGES:
        remove(folder / stage)
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    return folder


def push(run: str | Path, name: str) -> str:
    """`travelling` of a run to NAME (OWNER/NAME) on the hub, in one commit, made if need be; its address.

    The operator's card is the model's. Raises ImportError without huggingface_hub, and its errors, which say
    what is wrong, for a name or token that the hub does not accept.
    """
    hub, files = _hub(), travelling(Path(run))
    api, name = hub.HfApi(), name.removeprefix(HUB)
    root = files[f"operator/{CARD}"].read_text(encoding="utf-8").replace(f"]({IMAGES}/",
                                                                         f"](operator/{IMAGES}/")
    api.create_repo(name, exist_ok=True)
    added = [hub.CommitOperationAdd(CARD, root.encode()),
             *(hub.CommitOperationAdd(place, path) for place, path in files.items())]
    return str(api.create_commit(name, added, commit_message=f"Weights of {Path(run).name}").commit_url)


def fetch(name: str) -> Path:
    """The folder of a run that `push` left under hf://OWNER/NAME, or hf://OWNER/NAME@REVISION, downloaded
    once and kept by huggingface_hub. Raises as `push`."""
    name, _, revision = name.removeprefix(HUB).partition("@")
    patterns = [f"{stage}/{pattern}" for stage in STAGES for pattern in FILES]
    return Path(_hub().snapshot_download(name, revision=revision or None, allow_patterns=patterns))


def _hub():   # its modules come with the first use
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(f"a name that begins with {HUB} needs huggingface_hub, which is not installed; "
                          f"expected it, or a folder. Run pip install huggingface_hub.") from error
    return huggingface_hub


def main() -> int:
    arguments = read_command(__doc__, {
        "run": {"help": "folder of a run"}, "to": {"help": f"a folder, or {HUB}OWNER/NAME"}},
        prog="python -m ups.travel")
    is_hub = arguments.to.startswith(HUB)
    print(push(arguments.run, arguments.to) if is_hub else copy(arguments.run, arguments.to))
    return 0


if __name__ == "__main__":
    run_script(main, "ups.travel")
