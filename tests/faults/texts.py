"""Mutated names, attributes, labels of axes, units and text: of data files of every kind, of sections and of
results.json."""

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import yaml
from cases import cases
from mutate import VALUES, places_of

KINDS = ("h5", "nc", "nc3", "npz", "mat", "pt", "zarr")
TEXTS = [  # as names, keys, units and other text
    *("\n", "\r\n", "a\x1b[2Jb", "\x9b31m", "\a\b", "\u2028", "\u202eabc", "\ufeff", "\ud800", "\0", "a\0b"),
    *("", ".", "..", "/", "../../x", "/etc/passwd", "~", "*", "?", "[a]", "{}", "a{}b", "@", "a@b", "x.real"),
    *(
        "null",
        "true",
        "no",
        "1e400",
        ".inf",
        "0x10",
        "2020-01-01",
        "- a",
        "? a",
        "a: b",
        "#",
        "a #b",
        "&a",
        "*a",
    ),
    *(
        "!!python/object/apply:os.system [x]",
        "%YAML",
        "`",
        "'",
        '"',
        "\\",
        "<<",
        "---",
        "...",
        "{a: b}",
        "|",
        ">",
    ),
    *(
        "<img src=x onerror=alert(1)>",
        "</script>",
        "$\\frac{1}$",
        "a | b",
        "[x](javascript:1)",
        "{{ 7 * 7 }}",
    ),
    *("m/s", "µm", "日本", "days since 2000-01-01", "months since x", "degrees_north", "s" * 5000, "é" * 200),
    *"time t x data tensor dimensions task files layout base solver 1/u 0".split(),
    'v\n    base: {solver: "evil:step"}\n#',
    'v"\n    base: {solver: "evil:step"}\n#',
    "v\u2028    solver: evil:step",
]
KEYS = (
    "DIMENSION_LIST DIMENSION_LABELS CLASS NAME _Netcdf4Dimid units scale_factor _FillValue "
    "spatial_dims n_spatial_dims field_names calendar axis"
).split()
TYPES = [
    *(np.bytes_(b"\xff\xfe"), np.float16(1), np.complex64(1j), np.bool_(True), np.array(["a", "b"], object)),
    *(np.zeros((2, 0)), np.array([(1, 2.0)], "i4,f8"), np.arange(2**12), np.array([np.nan, np.inf]), "1 2"),
]
SECTION = cases("texts.section")
RESULTS = cases("texts.results")


def mutate_texts(value: Any, rng: random.Random) -> Any:
    """One to three texts of a tree replaced: keys, values, entries."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        node, key = rng.choice(places_of(value))
        if isinstance(node, dict) and rng.random() < 0.5:
            node[rng.choice(TEXTS)] = node.pop(key)
        else:
            node[key] = rng.choice([*TEXTS, *VALUES])
    return value


def write_yaml(path: Path, value: Any) -> None:
    path.write_text(yaml.safe_dump(value, allow_unicode=True), encoding="utf-8", errors="surrogatepass")


def sound_contents() -> dict[str, Any]:
    """Arrays, labels of axes and attributes of a file; arrays may lie in groups."""
    x, t, nu = np.arange(16) / 16, 0.1 * np.arange(8), np.arange(1.0, 13)
    u = np.sin(2 * np.pi * (x - t[:, None] * nu[:, None, None] / 10)).astype("f4")
    return {
        "arrays": {"u": u, "x": x, "t": t, "nu": nu},
        "axes": {"u": ["trajectory", "t", "x"], "x": ["x"], "t": ["t"], "nu": ["trajectory"]},
        "attributes": {"": {"source": "a solver", "dt": 0.1}, "u": {"units": "m s-1"}, "t": {"units": "s"}},
    }


def mutated_contents(rng: random.Random) -> dict[str, Any]:
    found = sound_contents()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind, name, text = rng.randrange(5), rng.choice([*found["arrays"]]), rng.choice(TEXTS)
        if kind == 0:
            for part in found.values():
                if name in part:
                    part[text] = part.pop(name)
        elif kind == 1:
            found["arrays"][text] = found["arrays"][name]
            found["axes"][text] = found["axes"][name]
        elif kind == 2 and found["axes"][name]:
            axes = found["axes"][name] = [*found["axes"][name]]
            axes[rng.randrange(len(axes))] = text
        else:
            about = found["attributes"].setdefault(rng.choice(["", name]), {})
            about[text if kind == 3 else rng.choice(KEYS)] = rng.choice([*TEXTS, *VALUES, *TYPES])
    return found


def write_mutated(folder: Path, rng: random.Random) -> None:
    """A file with mutated contents. What a library refuses to write is written over the bytes of its file."""
    kind, contents = rng.choice(KINDS), mutated_contents(rng)
    (folder / "evil.py").write_text("open('RAN', 'w')\ndef step(u):\n    return u\n")
    try:
        path = write_file(kind, folder, contents)
    except Exception:  # noqa: BLE001, of any library
        for path in folder.glob("my*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        contents = sound_contents()
        for name in ("u", "nu"):
            contents["arrays"][f"{name}_placeholder"] = contents["arrays"].pop(name)
        contents["axes"], contents["attributes"] = {}, {"": {"key_placeholder": "text_placeholder"}}
        path = write_file("h5" if kind == "zarr" else kind, folder, contents)
        old = rng.choice([b"u_placeholder", b"nu_placeholder", b"key_placeholder", b"text_placeholder"])
        new = rng.choice(TEXTS).encode(errors="surrogatepass")[: len(old)].ljust(len(old), b"_")
        path.write_bytes(path.read_bytes().replace(old, new))
    if rng.random() < 0.1:
        name = (
            rng.choice(TEXTS)
            .replace("/", "")
            .replace("\0", "")
            .encode(errors="replace")[:80]
            .decode("latin-1")
        )
        path.rename(folder / f"my{name}{path.suffix}")


def write_file(kind: str, folder: Path, contents: dict[str, Any]) -> Path:
    """A data file of one kind; each keeps what it can of labels and attributes."""
    arrays, axes, attributes = contents["arrays"], contents["axes"], contents["attributes"]
    path = folder / f"my.{'nc' if kind == 'nc3' else kind}"
    if kind == "h5":
        with h5py.File(path, "w") as file:
            for name, values in arrays.items():
                file[name] = values
                for number, label in enumerate(axes.get(name, ())):
                    file[name].dims[number].label = label
            for name, about in attributes.items():
                (file[name] if name else file).attrs.update(about)
    elif kind in ("nc", "nc3"):
        import xarray

        found = {
            name: ([*axes.get(name, [f"{name}{axis}" for axis in range(values.ndim)])], values)
            for name, values in arrays.items()
        }
        data = xarray.Dataset({name: (*value, attributes.get(name, {})) for name, value in found.items()})
        data.attrs = attributes.get("", {})
        data.to_netcdf(path, engine="h5netcdf" if kind == "nc" else "scipy")
    elif kind == "npz":
        np.savez(path, **arrays)
    elif kind == "mat":
        from scipy.io import savemat

        savemat(path, arrays)
    elif kind == "pt":
        torch.save({name: torch.tensor(values) for name, values in arrays.items()}, path)
    else:
        import zarr

        root = zarr.open_group(path, mode="w")
        for name, values in arrays.items():
            array = root.create_array(name, data=values, dimension_names=axes.get(name))
            array.attrs.update(attributes.get(name, {}))
        root.attrs.update(attributes.get("", {}))
    return path
