"""PDEBench's published files: names, DaRUS ids and MD5s, from its download table (data set
doi:10.18419/darus-2986), read from published.csv.

Of incompressible flow the table has 274 files of four trajectories with one viscosity (number 49 is missing);
24 of them repeat another byte for byte and are left out here, as they would stand in training and in test.
"""

import csv
from pathlib import Path

Files = dict[str, dict[str, tuple[int, str]]]  # task -> file -> (id, MD5)

PUBLISHED: Files = {}  # what a task uses by default; of incompressible flow the first file
FURTHER: Files = {}  # test problems and further parts, which `prepare_data.py --file` fetches by name
# file -> first digits of the MD5 of its first edition, which was withdrawn and may still circulate: advection
# moves at twice beta (PDEBench issue 46, replaced in 2023), Burgers has a wrong flux and domain (51, 2024)
WITHDRAWN: dict[str, str] = {}

with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as _table:
    for _row in csv.DictReader(_table):
        _files = PUBLISHED if _row["set"] == "default" else FURTHER
        _files.setdefault(_row["task"], {})[_row["file"]] = int(_row["id"]), _row["md5"]
        if _row["withdrawn"]:
            WITHDRAWN[_row["file"]] = _row["withdrawn"]
