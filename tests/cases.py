"""Cases of parametrised tests: data, in tests/cases/."""

from pathlib import Path

import yaml


def cases(name: str) -> list | dict:
    """The cases FILE.KEY: those under KEY in tests/cases/FILE.yaml."""
    file, key = name.split(".")
    text = (Path(__file__).parent / "cases" / f"{file}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)[key]
