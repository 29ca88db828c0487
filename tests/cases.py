"""Cases of parametrised tests: data, in tests/cases/."""

from pathlib import Path

import yaml


def cases(name: str) -> list | dict:
    """The cases FILE.KEY: those under KEY in tests/cases/FILE.yaml."""
    file, key = name.split(".")
    text = (Path(__file__).parent / "cases" / f"{file}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)[key]


def configured(folder: Path, name: str) -> Path:
    """folder/tiny.yaml: the settings FILE.KEY of a run `tiny` with data, caches and results in the folder,
    which they call FOLDER."""
    settings = yaml.safe_load(yaml.safe_dump(cases(name)).replace("FOLDER", str(folder)))
    settings["run"] = {"name": "tiny", "root": str(folder)}
    for section in ("data", "cache"):
        settings[section] = {"root": str(folder / section), **settings.get(section, {})}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return folder / "tiny.yaml"
