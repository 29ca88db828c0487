"""Make the head of a task from its cache: facts, settings of the base, bounds and scales."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ups.config.load import to_dict
from ups.config.model import ModelConfig
from ups.data.cache import Cache
from ups.data.tokenizer import Tokenizer
from ups.models.bases.base import Samples
from ups.models.constraints import Shells, correction
from ups.models.facts import HeadFacts, data_facts
from ups.models.head import TaskHead
from ups.models.operator import Operator
from ups_discovery.boundary import PERIODIC, along
from ups_discovery.units import widened

MAX_TRAJECTORIES = 64  # per statistic, stratified by parameter; with 16, bases that blow up were not found
BATCH = 32
# Largest change of a mean, relative to the channel's RMS, that counts as conserved. Advection of waves that a
# grid samples has 3e-5: half of the error.
CONSERVED_TOLERANCE = 1e-5
NUM_COMPARED = 8  # frames after the first one


def head_facts(cache: Cache, kind: str, settings: dict[str, Any]) -> HeadFacts:
    """The facts of a task's head with a base of this kind, before anything is decided."""
    task, is_steady = cache.settings, cache.task.is_steady
    return HeadFacts(
        **cache.task.description,
        history=1 if is_steady else task.history,
        **data_facts(cache),
        base={"kind": kind, "settings": settings},
        network_weight=1.0,
        is_conservative=False,
        # user data may be in any units: the network counts their time in frames
        time_unit=cache.dt if cache.task.user_facts is not None and cache.dt else 1.0,
    )


def base_settings(cache: Cache) -> dict[str, Any]:
    """Geometry and hyper-parameters of a base for this cache, JSON-able.

    lengths and dt are counted in cells and frames, so that no base depends on the units of the data; cell
    (per axis) and frame are the size of a cell and of a frame in those units.
    """
    task, spec, space = cache.settings, cache.task, list(cache.tokenizer.space)
    ends = along(spec.boundary, spec.ndim)
    is_scalar = len(spec.fields) == 1 and not (spec.positive or spec.vector)
    settings = {
        "num_values": max(1, len(cache.parameter_values)),
        "num_parameters": cache.parameters.shape[1],
        "num_channels": cache.tokenizer.num_channels,
        "num_inputs": len(cache.task.inputs),
        "space": space,
        "lengths": [float(num_cells) for num_cells in space],
        "dt": 1.0,
        "cell": [(high - low) / num_cells for (low, high), num_cells in zip(spec.spans, space, strict=True)],
        "frame": cache.dt or 1.0,
        "boundary": spec.boundary,
        "walls": normalised_walls(cache),
        "degree": task.degree,
        "history": task.history,
        "reach": task.reach,
        "num_moving": len(spec.moving),
    }
    if spec.forcing:
        settings["num_forcing"] = len(spec.forcing)
        settings["series"] = [spec.forcing.index(name) for name in spec.series]
    settings["vectors"] = [[spec.fields.index(name) for name in vector] for vector in spec.vectors]
    settings["positive"] = [i for i, name in enumerate(spec.fields) if name in spec.positive]
    settings["vorticity"] = [0] if is_scalar and ends == (PERIODIC, PERIODIC) else []
    settings["driven"] = [
        i
        for i, (end, name) in enumerate(zip(ends, spec.axes, strict=True))
        if end == PERIODIC and (not spec.is_shifted or name in spec.fixed_axes)
    ]
    return settings


def normalised_walls(cache: Cache) -> list[list[float]]:
    """`Task.walls`, normalised by the codec; [] for a task without."""
    if not cache.task.walls:
        return []
    ends = torch.tensor(cache.task.walls)  # fields, 2
    return cache.tokenizer.normalise(ends.T[:, :, None])[:, :, 0].T.tolist()


def unfitted_head(cache: Cache, kind: str, settings: dict[str, Any], device: torch.device) -> TaskHead:
    """A head of width 1 with the codecs of the cache and an unfitted base."""
    head = TaskHead(head_facts(cache, kind, settings), width=1)
    head.codec.load_state_dict(cache.tokenizer.state_dict())
    if cache.input_tokenizer is not None:
        head.input_codec.load_state_dict(cache.input_tokenizer.state_dict())
    if cache.forcing_tokenizer is not None:
        head.forcing_codec.load_state_dict(cache.forcing_tokenizer.state_dict())
    return head.to(device)


def conserved_facts(head: TaskHead, cache: Cache) -> dict[str, Any]:
    """is_conservative: whether the training data, on the grid of the cache, conserve what the equation
    conserves, from the first frame to later ones. A front that is sampled at every fourth cell does not. For
    user data whose section names no conserved field also conserved: those whose mean the data keep, if any,
    and that are not bounded, because both corrections would undo each other. Not with forcing: another one
    may change the mean.
    """
    task, last = cache.task, cache.num_frames - 1
    is_sought = task.user_facts is not None and not (task.is_steady or task.conserved or task.forcing)
    names = [name for name in task.moving if name not in task.bounded] if is_sought else task.conserved
    if not names:
        return {"is_conservative": False}
    rows = cache.rows_by_parameter("train", MAX_TRAJECTORIES)
    later = sorted({last * part // NUM_COMPARED for part in range(1, NUM_COMPARED + 1)} - {0})

    def u(frame: int) -> Tensor:
        return head.physical(cache.batch(rows, frame, 1, head.scale.device))

    start = u(0)[:, 0]
    changes = [correction(task, names, u(frame), start, head.codec.valid) for frame in later]
    change = (torch.cat(changes, 1) / head.codec.std).square().mean((0, 1)).sqrt()
    if not is_sought:
        return {"is_conservative": bool(change.max() <= CONSERVED_TOLERANCE)}
    kept = [name for name in names if change[task.fields.index(name)] <= CONSERVED_TOLERANCE]
    return {"is_conservative": bool(kept)} | ({"conserved": kept} if kept else {})


def calibrated(head: TaskHead, cache: Cache, seed: int) -> TaskHead:
    """The head with what it takes from the training data once its base is fitted: the network's unit, the
    bounds of the fields and of their waves, and the range of the forcing or the coefficient.
    """
    head.scale.copy_(residual_scale(head, cache, seed))
    for end, value in zip((head.low, head.high), bounds(head, cache), strict=True):
        end.copy_(value)
    ranges = {}
    if cache.task.forcing:
        ranges["forcing_range"] = _physical_range(
            head.forcing_codec, cache, lambda some: head.forcing_of(cache, some, 0, cache.num_frames)
        )
    if cache.task.is_steady:
        ranges["input_range"] = _physical_range(
            head.input_codec,
            cache,
            lambda some: head.input_codec.decode(cache.inputs(some, head.scale.device)),
        )
    else:
        ranges["waves"] = strongest_waves(head, cache)
    return head.with_facts(**ranges)


@torch.no_grad()
def residual_scale(head: TaskHead, cache: Cache, seed: int) -> Tensor:
    """RMS over training windows of encode(u_next - base), per parameter value: the unit of the network's
    output. One for all if every trajectory has parameters of its own: a unit that jumps between two values is
    a step function of the parameter that the network would have to learn as well."""
    scales, samples = [], Samples(head, cache, seed + 1)
    for value in range(len(head.scale)):
        windows = (read() for read in samples.batches(4 * BATCH, BATCH, value))
        squares = [
            head.codec.encode(u_next - head.base_frames(u, parameters, 1)[:, 0]).square().mean()
            for u, parameters, u_next in windows
        ]
        scales.append(torch.stack(squares).mean().sqrt())
    found = torch.stack(scales)
    if cache.is_sampled:
        found = found.square().mean().sqrt().expand_as(found)
    return found.clamp_min(1e-7)  # float32 rounding of a normalised field: nothing below it can be learnt


@torch.no_grad()
def bounds(head: TaskHead, cache: Cache) -> tuple[Tensor, Tensor]:
    """The smallest and the largest normalised value of each channel (C,) in a rollout: the range of the
    training trajectories, widened.
    """
    rows = cache.rows_by_parameter("train", MAX_TRAJECTORIES)
    return _widened_range(
        cache, rows, lambda some: head.codec.decode(cache.batch(some, 0, cache.num_frames, head.scale.device))
    )


@torch.no_grad()
def strongest_waves(head: TaskHead, cache: Cache) -> list[list[float]]:
    """The largest size of `Shells` in the training trajectories, by moving field and shell, widened as the
    `bounds`."""
    shells = Shells(cache.tokenizer.space, cache.task.boundary).to(head.scale.device)
    rows, found = cache.rows_by_parameter("train", MAX_TRAJECTORIES), []
    for some in cache.row_blocks(rows, cache.num_frames, MAX_TRAJECTORIES):
        w = head.codec.decode(cache.batch(some, 0, cache.num_frames, head.scale.device))
        found.append(shells(w[:, :, : len(cache.task.moving)]).amax((0, 1)))
    largest = torch.stack(found).amax(0)
    _, most = widened(torch.zeros_like(largest), largest, len(rows))
    return [[float(f"{value:.5g}") for value in row] for row in most.tolist()]


@torch.no_grad()
def _physical_range(
    codec: Tokenizer, cache: Cache, read: Callable[[Tensor], Tensor]
) -> dict[str, list[float]]:
    """Field of a codec -> `_widened_range` of the training data in physical units, relative to the task's
    offsets."""
    ends = _widened_range(cache, cache.split["train"], read)
    low, high = (codec.denormalise(end.view(-1, *[1] * codec.ndim)).flatten().tolist() for end in ends)
    return dict(zip(codec.fields, map(list, zip(low, high, strict=True)), strict=True))


def _widened_range(cache: Cache, rows: Tensor, read: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each channel (C,) of read(rows) (rows, time, C, *space), widened.
    It is called with a few rows at a time."""
    lows, highs = [], []
    for some in cache.row_blocks(rows, cache.num_frames, MAX_TRAJECTORIES):
        w = read(some).transpose(0, 2).flatten(1)
        lows.append(w.amin(1))
        highs.append(w.amax(1))
    return widened(torch.stack(lows).amin(0), torch.stack(highs).amax(0), len(rows))


def fitted_state(head: TaskHead) -> dict[str, Tensor]:
    """The fitted tensors of a head (codecs, base, scale and bounds), without the trained maps."""
    return {
        name: value for name, value in head.state_dict().items() if not name.startswith(("into.", "out."))
    }


def load_base(head: TaskHead, state: dict[str, Tensor]) -> None:
    """Load a `fitted_state` into a head. Raises ValueError if names or shapes differ."""
    wanted = fitted_state(head)
    wrong = sorted(
        name
        for name in state.keys() | wanted.keys()
        if name not in state or name not in wanted or state[name].shape != wanted[name].shape
    )
    if wrong:
        raise ValueError(
            f"the fitted base of {head.name} does not fit the model ({', '.join(wrong[:3])}); expected the "
            "base of this version and configuration. Delete the folder bases of the stage and train again."
        )
    head.load_state_dict(state, strict=False)


def build_operator(
    bases: dict[str, tuple[dict[str, Any], dict[str, Tensor]]],
    model: ModelConfig,
    precision: str,
    solvers: Mapping[str, Callable[..., Any]] | None = None,
) -> Operator:
    """An operator with an untrained network over fitted bases (task -> facts and weights of `fit_base`).
    solvers: as in `load_operator`.
    """
    descriptions = [facts["description"] for facts, _ in bases.values()]
    operator = Operator({"model": to_dict(model), "precision": precision, "tasks": descriptions})
    for name, (_, weights) in bases.items():
        load_base(operator.heads[name], weights)
    return operator.use_solvers(solvers or {})
