"""The facts about the training data that are stored with the weights: grid, codec, dt, boundary, ranges."""

from typing import Any

import torch

from ups.common.files import value_hash
from ups.data.cache import Cache
from ups.data.tokenizer import Tokenizer
from ups.models.description_checks import FORCING


def plain(domain: tuple) -> list:
    """A domain as JSON reads it."""
    return [list(span) if isinstance(span, tuple) else span for span in domain]


def empty_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """A codec of the described shape, to be filled by a state_dict."""
    return Tokenizer.from_state(
        {name: torch.zeros(size) for name, size in meta["shape"].items()},
        {key: value for key, value in meta.items() if key != "shape"},
    )


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The facts and tensor shapes of a codec, JSON-able: enough to build it empty."""
    return {
        **tokenizer.meta(),
        "shape": {name: list(value.shape) for name, value in tokenizer.state_dict().items()},
    }


def describe_data(cache: Cache) -> dict[str, Any]:
    """The facts about the training data that the weights are valid for, JSON-able.

    codec, input_codec (None unless steady) and, for a task with forcing, forcing_codec, each with grid,
    fields and patch; boundary; domain of every axis; dt between frames (0 if steady); noise: field ->
    standard deviation of white noise in the data, if there is any; parameters: name -> smallest and largest
    value, empty if the task has none or hides them; parameter_values: of the first one.
    """
    return {
        "codec": describe_tokenizer(cache.tokenizer),
        "input_codec": describe_tokenizer(cache.input_tokenizer) if cache.input_tokenizer else None,
        **({FORCING: describe_tokenizer(cache.forcing_tokenizer)} if cache.forcing_tokenizer else {}),
        "boundary": cache.task.boundary,
        "domain": plain(cache.task.domain),
        "dt": cache.dt,
        **({"noise": cache.header["noise"]} if "noise" in cache.header else {}),
        "parameters": {
            name: [float(column.min()), float(column.max())]
            # hidden ones have no column
            for name, column in zip(cache.task.parameters, cache.parameters.unbind(1), strict=False)
        },
        "parameter_values": cache.parameter_values.tolist(),
    }


def flat_facts(description: dict[str, Any]) -> dict[str, Any]:
    """`describe_data` with the names that messages use."""
    names = {"space": "grid", "fields": "fields", "positive": "logarithms", "patch": "patch", "shape": "size"}
    codecs = {
        "": description["codec"],
        "input ": description["input_codec"] or {},
        "forcing ": description.get(FORCING) or {},
    }
    facts = {prefix + name: codec.get(key) for prefix, codec in codecs.items() for key, name in names.items()}
    facts |= {
        f"{prefix}mask": f"of {len(mask.split())} runs ({value_hash(mask)[:8]})" if mask else None
        for prefix, mask in ((prefix, codec.get("mask")) for prefix, codec in codecs.items())
    }
    return facts | {
        key: description[key] for key in ("boundary", "domain", "dt", "parameters", "parameter_values")
    }
