"""Fit every base predictor a task may use and select one by its validation rollouts.

One-step errors mislead: on steep Burgers fronts a linear propagator is good in one step and useless after
thirty. So each candidate predicts every frame after the context of held-out trajectories, and the pooled
nRMSE of that decides, ties as ups/models/shortlist.py says.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ups.common.boundary import PERIODIC, along
from ups.common.progress import note
from ups.data.cache import Cache
from ups.models.bases import BASES
from ups.models.bases.base import Base, Fit, Samples
from ups.models.bases.per_field import Part, PerField, joined, parts_of, samples_of, settings_of
from ups.models.bases.units import widened
from ups.models.conserve import correction
from ups.models.head import FORCING_RANGE, HORIZON, TaskHead, describe_data
from ups.models.shortlist import Candidate, Shortlist, tried

# validation trajectories per candidate, spread over the parameter values; 16 let a base pass that blows up
NUM_ROLLOUTS = 64
BATCH = 32
POOR = 0.1  # error of a field from which it may spoil the fit of others
HOPELESS = 0.5  # error of a field from which the others are tried without it
HALVED = 2.0  # times less is what a base per field must leave of some field, as it takes as many calls
KEPT = 1e-5  # of a channel's spread, RMS; advection of waves that a grid samples loses 3e-5, half its error

# fields -> candidates that see these alone
CandidatesOf = Callable[[Sequence[int]], Iterator[tuple[str, TaskHead]]]


def head_description(cache: Cache, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON-able description of a task's head with the base `kind`; see `Operator`."""
    task, is_steady = cache.settings, cache.task.is_steady
    return {
        **cache.task.description,
        "history": 1 if is_steady else task.history,
        "bundle": 1 if is_steady else task.bundle,
        **describe_data(cache),
        "base": {"kind": kind, "settings": settings},
        "network_weight": 1.0,
        "is_conservative": False,
        # user data may be in any units: the network counts their time in frames
        "time_unit": cache.dt if cache.task.user_facts is not None and cache.dt else 1.0,
    }


def base_settings(cache: Cache) -> dict[str, Any]:
    """Geometry and hyper-parameters of a base for this cache.

    lengths and dt are counted in cells and frames, so that no base depends on the units of the data; cell
    (per axis) and frame say what a cell and a frame are in those units.
    """
    task, spec, space = cache.settings, cache.task, list(cache.tokenizer.space)
    ends = along(spec.boundary, spec.ndim)
    is_scalar = len(spec.fields) == 1 and not (spec.positive or spec.vector)
    return {
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
        **(
            {"num_forcing": len(spec.forcing), "series": [*map(spec.forcing.index, spec.series)]}
            if spec.forcing
            else {}
        ),
        "vectors": [[spec.fields.index(name) for name in vector] for vector in spec.vectors],
        "positive": [i for i, name in enumerate(spec.fields) if name in spec.positive],
        "vorticity": [0] if is_scalar and ends == (PERIODIC, PERIODIC) else [],
        "driven": [
            i
            for i, (end, name) in enumerate(zip(ends, spec.axes, strict=True))
            if end == PERIODIC and (not spec.is_shifted or name in spec.fixed_axes)
        ],
    }


def normalised_walls(cache: Cache) -> list[list[float]]:
    """`Task.walls` in units of the codec; [] for a task that states none."""
    if not cache.task.walls:
        return []
    ends = torch.tensor(cache.task.walls)  # fields, 2
    return cache.tokenizer.normalise(ends.T[:, :, None])[:, :, 0].T.tolist()


def head_with(cache: Cache, kind: str, settings: dict[str, Any], device: torch.device) -> TaskHead:
    """A head of width 1 with the codecs of the cache and a base that is not fitted."""
    head = TaskHead(head_description(cache, kind, settings), width=1)
    head.codec.load_state_dict(cache.tokenizer.state_dict())
    if cache.input_tokenizer is not None:
        head.input_codec.load_state_dict(cache.input_tokenizer.state_dict())
    if cache.forcing_tokenizer is not None:
        head.forcing_codec.load_state_dict(cache.forcing_tokenizer.state_dict())
    return head.to(device)


def head_of(cache: Cache, parts: Sequence[Part], device: torch.device) -> TaskHead:
    """A head of width 1 with a base per field, of fitted parts."""
    base = PerField.of(parts).to(device)
    head = head_with(cache, PerField.kind, {"parts": base.described}, device)
    head.base = base
    return head


def base_error(head: TaskHead, cache: Cache, context_frames: int) -> float:
    """Pooled nRMSE of the base alone over validation rollouts (single calls for a steady task), of what it
    predicts and is not zero throughout; inf if it blows up."""
    return tried("", head, cache, context_frames, stratified_rows(cache, "val", NUM_ROLLOUTS)).error()


def stratified_rows(cache: Cache, split: str, count: int) -> Tensor:
    """`count` rows (<= count,) of a split, all if fewer, the same number of each parameter value as far as it
    goes."""
    rows = cache.split[split]
    values = cache.parameter_index[rows]
    groups = [rows[values == value] for value in values.unique()]
    picked = [row for turn in zip_longest(*groups) for row in turn if row is not None]
    return torch.stack(picked[:count])


def data_conserve(head: TaskHead, cache: Cache) -> bool:
    """Whether the training data, on the grid of the cache, keep what the task's equation keeps, from the
    first frame to the middle and the last. A front that is read at every fourth cell does not."""
    if not cache.task.conserved:
        return False
    rows, last = stratified_rows(cache, "train", NUM_ROLLOUTS), cache.num_frames - 1
    start, *later = (
        head.physical(cache.batch(rows, frame, 1, head.scale.device)) for frame in (0, last // 2, last)
    )
    moved = torch.cat([correction(cache.task, u, start[:, 0], head.codec.valid) for u in later], 1)
    moved = moved / head.codec.std
    return bool(moved.square().mean((0, 1)).sqrt().max() <= KEPT)


def candidates(
    cache: Cache, base_steps: int, seed: int, device: torch.device, fields: Sequence[int] | None = None
) -> Iterator[tuple[str, TaskHead]]:
    """Yield (name, head on `device` with a fitted base) for every base in task.TASK.base; heads are of width
    1. With `fields`, bases of these predicted fields, which see no others but those that are given.

    base_steps: gradient steps of 16 windows for bases that are learnt. The weights depend on `seed` and the
    cache alone, not on what was drawn before. Raises ValueError when a parameter value has no training
    window.
    """
    settings = base_settings(cache)
    samples = Samples(head_with(cache, "persistence", settings, device), cache, seed, 16 * base_steps)
    is_conservative = data_conserve(samples.head, cache)
    if fields is not None:
        reads = [*fields, *range(len(cache.task.moving), len(cache.task.fields))]
        samples, settings = samples_of(samples, reads), settings_of(settings, reads)
    for kind in cache.settings.base:
        if cache.is_sampled and BASES[kind].needs_fitted_parameters:
            print(
                f"{cache.task.name}: {kind} serves a few parameter values alone, and these are many: left out"
            )
            continue
        if fields is not None and not BASES[kind].can_fit_subset:
            continue
        note(f"{cache.task.name}: {kind}")
        for name, fitted, base in reported(BASES[kind].fit(samples, settings), f"{cache.task.name}: {kind}"):
            if fields is None:
                head = head_with(cache, kind, fitted, device)
                head.base.load_state_dict(base.state_dict())
                if base.is_user_solver:
                    head.base.use(base.step)
            else:
                head = head_of(cache, [Part(base, kind, fitted, reads, list(fields))], device)
                name = f"{name} of {', '.join(cache.task.fields[channel] for channel in reads)} alone"
            head.description["is_conservative"] = is_conservative
            yield name, head


def reported(fits: Fit[Base], who: str) -> Iterator[tuple[str, dict[str, Any], Base]]:
    """The candidates of a base; a line is printed where there are fewer than might be."""
    try:
        missing = yield from fits
    except torch.linalg.LinAlgError as error:
        missing = f"its equations have no solution ({error})"
    if missing:
        print(f"{who}: left out, as {missing}")


@torch.no_grad()
def residual_scale(head: TaskHead, cache: Cache, seed: int) -> Tensor:
    """RMS over training windows of encode(u_next - base), per parameter value; the unit of the network's
    output."""
    scales, samples = [], Samples(head, cache, seed + 1)
    for value in range(len(head.scale)):
        windows = (read() for read in samples.batches(4 * BATCH, BATCH, value))
        squares = [
            head.codec.encode(u_next - head.next_frame(u, parameters)).square().mean()
            for u, parameters, u_next in windows
        ]
        scales.append(torch.stack(squares).mean().sqrt())
    # float32 rounding of a normalised field: nothing below it can be learnt
    return torch.stack(scales).clamp_min(1e-7)


def select_base(
    cache: Cache, base_steps: int, context_frames: int, seed: int, device: torch.device
) -> tuple[TaskHead, dict[str, float]]:
    """The head with the base that serves, selected by validation rollouts, and the pooled nRMSE of every
    candidate for all fields (inf: it blew up).

    Raises ValueError if all of them blow up.
    """
    shortlist = shortlist_of(cache, context_frames, seed)
    for name, head in candidates(cache, base_steps, seed, device):
        shortlist.add(name, head)
    return selected(shortlist, lambda fields: candidates(cache, base_steps, seed, device, fields))


def shortlist_of(cache: Cache, context_frames: int, seed: int) -> Shortlist:
    """The empty shortlist of a task, for candidates that are tried on its validation trajectories."""
    return Shortlist(
        cache,
        context_frames,
        stratified_rows(cache, "val", NUM_ROLLOUTS),
        stratified_rows(cache, "train", NUM_ROLLOUTS),
        seed,
    )


def selected(shortlist: Shortlist, candidates_of: CandidatesOf) -> tuple[TaskHead, dict[str, float]]:
    """The head of what serves, complete, and the scores of all. Raises ValueError for an empty shortlist."""
    cache, name = shortlist.cache, shortlist.cache.task.name
    if not shortlist.all.kept:
        raise ValueError(
            f"no base of {name} survives its validation rollouts (tried: "
            f"{', '.join(shortlist.scores)}); expected one that stays finite. Add persistence "
            f"to task.{name}.base, or look at the data with the doctor."
        )
    best = per_field(shortlist, shortlist.select(shortlist.all), candidates_of)
    head, is_steady = best.head, cache.task.is_steady
    head.description["base"] |= {"name": best.name, "unstable": shortlist.unstable(best)}
    head.description[HORIZON] = 1 if is_steady else cache.num_frames - shortlist.context
    settle(head, cache, shortlist.seed)
    return head, shortlist.scores


def per_field(shortlist: Shortlist, whole: Candidate, candidates_of: CandidatesOf) -> Candidate:
    """A base for every field or vector if that is better than one base for all of them, else `whole`.

    A field that is predicted badly may have spoiled what was fitted to all: then bases of each field alone
    are tried, and of all fields that are not hopeless together.
    """
    cache = shortlist.cache
    units = [ties for ties in shortlist.units if ties.kept]  # a field that is zero throughout has no error
    if len(units) < 2:
        return whole
    errors = {tuple(ties.fields): ties.error(whole) for ties in units}
    if not cache.task.is_steady and max(errors.values()) > POOR:
        for fields in groups_of(errors):
            for name, head in candidates_of(fields):
                found = shortlist.try_out(name, head)
                for ties in units:
                    if {*ties.fields} <= {*fields}:
                        ties.add(found)
    parts, names = [], []
    for ties in units:
        best = shortlist.select(ties)
        if ties.is_as_good(whole, best) or HALVED * ties.error(best) > ties.error(whole):
            best = whole
        parts += parts_of(best.head.base, best.head.description["base"], ties.fields)
        names.append(f"{', '.join(cache.task.fields[channel] for channel in ties.fields)}: {best.name}")
    if all(part.base is whole.head.base for part in parts):
        return whole
    head = head_of(cache, joined(parts), whole.head.scale.device)
    head.description["is_conservative"] = whole.head.description["is_conservative"]
    found = shortlist.try_out("; ".join(names), head)
    if not all(ties.is_as_good(found, whole) for ties in units) or all(
        HALVED * ties.error(found) > ties.error(whole) for ties in units
    ):
        return whole
    shortlist.scores[found.name] = found.error()
    return found


def groups_of(errors: dict[tuple[int, ...], float]) -> list[list[int]]:
    """Fields to fit bases of alone: each unit of channels, and together those that are not hopeless; where
    all are, all but one."""
    units = list(errors)
    rest = [[unit for unit in units if errors[unit] < HOPELESS]]
    if not rest[0]:
        rest = [[unit for unit in units if unit != one] for one in units]
    together = [group for group in rest if 1 < len(group) < len(units)]
    return [
        sorted(channel for unit in group for channel in unit)
        for group in [*([unit] for unit in units), *together]
    ]


def settle(head: TaskHead, cache: Cache, seed: int) -> None:
    """What a head with its base takes from the training data besides: the network's unit and the bounds."""
    head.scale.copy_(residual_scale(head, cache, seed))
    for end, value in zip((head.low, head.high), bounds(head, cache), strict=True):
        end.copy_(value)
    if cache.task.forcing:
        head.description[FORCING_RANGE] = forcing_range(head, cache)


@torch.no_grad()
def bounds(head: TaskHead, cache: Cache) -> tuple[Tensor, Tensor]:
    """What no channel of a rollout leaves, normalised, (C,) each: the range of training trajectories,
    widened."""
    ends, every = [], stratified_rows(cache, "train", NUM_ROLLOUTS)
    for rows in cache.parts(every, cache.num_frames, NUM_ROLLOUTS):
        w = head.codec.decode(cache.batch(rows, 0, cache.num_frames, head.scale.device)).transpose(0, 2)
        ends.append((w.flatten(1).amin(1), w.flatten(1).amax(1)))
    low, high = torch.stack([a for a, _ in ends]).amin(0), torch.stack([b for _, b in ends]).amax(0)
    return widened(low, high, len(every))


@torch.no_grad()
def forcing_range(head: TaskHead, cache: Cache) -> dict[str, list[float]]:
    """`bounds` of what is known in advance: name -> physical units counted from the task's offsets."""
    codec, ends, every = head.forcing_codec, [], cache.split["train"]
    for rows in cache.parts(every, cache.num_frames, NUM_ROLLOUTS):
        w = head.forcing_of(cache, rows, 0, cache.num_frames).transpose(0, 2).flatten(1)
        ends.append((w.amin(1), w.amax(1)))
    low, high = torch.stack([a for a, _ in ends]).amin(0), torch.stack([b for _, b in ends]).amax(0)
    low, high = (
        codec.denormalise(end.view(-1, *[1] * codec.ndim)).flatten().tolist()
        for end in widened(low, high, len(every))
    )
    return dict(zip(codec.fields, map(list, zip(low, high, strict=True)), strict=True))


def fit_base(
    cache: Cache, base_steps: int, context_frames: int, seed: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and weights of the chosen base of a task, for `fit_once`.

    Facts: description (of the head, for `Operator`), seconds, says (`Base.findings`) and validation_nrmse:
    candidate -> number, None for one that blew up.
    """
    started = time.perf_counter()
    head, scores = select_base(cache, base_steps, context_frames, seed, device)
    facts = {
        "description": head.description,
        "seconds": time.perf_counter() - started,
        "findings": head.findings(),
        "validation_nrmse": {k: (v if math.isfinite(v) else None) for k, v in scores.items()},
    }
    return facts, fitted_state(head)


def in_words(name: str, facts: dict[str, Any]) -> str:
    """Which base `fit_base` chose for a task, its error, whether it is stable, and what it found."""
    base, horizon = facts["description"]["base"], facts["description"][HORIZON]
    lines = [
        f"base of {name}: {base['name']}, validation nRMSE {facts['validation_nrmse'][base['name']]:.2e}"
    ]
    if base["unstable"]:
        lines.append(
            f"no base as good as this one is stable beyond the data: {base['unstable']}. Trust no "
            f"forecast of more than {horizon} frames, or add trajectories with more frames."
        )
    return "\n    ".join([*lines, *facts.get("findings", [])])


def fitted_state(head: TaskHead) -> dict[str, Tensor]:
    """Codec, base and scale; the rest is trained."""
    return {
        name: value for name, value in head.state_dict().items() if not name.startswith(("into.", "out."))
    }


def load_base(head: TaskHead, state: dict[str, Tensor]) -> None:
    """Fill codec, base and scale of a head with the weights of `fit_base`. Raises ValueError if they do not
    fit the head."""
    wanted = fitted_state(head)
    wrong = sorted(
        name
        for name in state.keys() | wanted.keys()
        if name not in state or name not in wanted or state[name].shape != wanted[name].shape
    )
    if wrong:
        raise ValueError(
            f"the fitted base of {head.name} does not fit the model ({', '.join(wrong[:3])}); "
            "expected the base of this version and configuration. Delete the folder bases of "
            "the stage and train again."
        )
    head.load_state_dict(state, strict=False)
