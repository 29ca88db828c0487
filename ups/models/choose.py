"""Fit every base predictor a task may use and keep the one whose validation rollouts are best.

One-step errors mislead: on steep Burgers fronts a linear propagator is good in one step and useless after thirty. So each
candidate predicts every frame after the context of held-out trajectories, and the pooled nRMSE of that decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ups.config import Config
from ups.data.cache import Cache
from ups.metrics.errors import nrmse_pooled
from ups.models.bases import fit_by_gradient, fit_propagators
from ups.models.head import TaskHead, describe_data
from ups.models.known import Known
from ups.models.rollout import rollout
from ups.progress import note
from ups.seeds import generator

MAX_WINDOWS = 2000     # per parameter value, in the normal equations: some fifty times the unknowns of one mode
NUM_ROLLOUTS = 64      # validation trajectories per candidate, spread over the parameter values; 16 let a base pass that blows up
BATCH = 32


def head_description(cache: Cache, config: Config, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON-able description of a task's head with the base `kind`; see `Operator`."""
    task, is_steady = config.task[cache.task.name], cache.task.is_steady
    return {
        "name": cache.task.name, "history": 1 if is_steady else task.history, "bundle": 1 if is_steady else task.bundle,
        **describe_data(cache), "base": {"kind": kind, "settings": settings}, "is_network_used": True,
    }


def base_settings(cache: Cache, config: Config) -> dict[str, Any]:
    """Geometry and hyper-parameters of a base for this cache."""
    task = config.task[cache.task.name]
    inputs = cache.input_tokenizer.num_channels if cache.input_tokenizer is not None else 0
    return {"num_values": max(1, len(cache.parameter_values)), "num_parameters": cache.parameters.shape[1],
            "num_channels": cache.tokenizer.num_channels, "num_inputs": inputs, "space": list(cache.tokenizer.space),
            "boundary": cache.task.boundary, "degree": task.degree, "history": task.history, "reach": task.reach}


def _training_rows(cache: Cache, value: int) -> Tensor:
    """Training rows of one parameter value (all of them for a task without parameters)."""
    rows = cache.split["train"]
    return rows[cache.parameter_index[rows] == value] if len(cache.parameter_values) else rows


def _sample(cache: Cache, config: Config, rows: Tensor, length: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """`count` (row, start) pairs for windows of `length` frames: all rows in turn, random starts from train_from on."""
    draw = generator(seed, cache.task.name, "bases")
    first = config.task[cache.task.name].train_from
    starts = cache.num_frames - first - length + 1
    order = torch.randperm(len(rows), generator=draw)
    picked = rows[order[torch.arange(count) % len(rows)]]
    return picked, first + torch.randint(0, max(1, starts), (count,), generator=draw)


def _window(head: TaskHead, cache: Cache, rows: Tensor, starts: Tensor) -> tuple[Tensor, Known, Tensor]:
    """(u shown, what is known of its rows, u to predict) in normalised field units, on the head's device."""
    device = head.scale.device
    known = head.known(cache.parameters[rows])
    if head.task.is_steady:
        return (head.input_codec.decode(cache.inputs(rows, device)), known,
                head.codec.decode(cache.batch(rows, 0, 1, device)[:, 0]))
    u = head.codec.decode(cache.batch(rows, starts, head.history + 1, device))
    return u[:, :-1], known, u[:, -1]


@torch.no_grad()
def base_error(head: TaskHead, cache: Cache, context_frames: int) -> float:
    """Pooled nRMSE of the base alone over validation rollouts (over single calls for a steady task); inf if it blows up."""
    device = head.scale.device
    rows = spread(cache, "val", NUM_ROLLOUTS)
    known = head.known(cache.parameters[rows])
    if head.task.is_steady:
        u_pred = head.base(head.input_codec.decode(cache.inputs(rows, device)), known)[:, None]
        u_ref = head.codec.decode(cache.batch(rows, 0, 1, device))
    else:
        u = head.codec.decode(cache.batch(rows, 0, cache.num_frames, device))
        context, u_ref = u[:, :context_frames], u[:, context_frames:]
        u_pred = rollout(lambda w: head.base(w, known)[:, None], context, u_ref.shape[1], head.history)
    error = float(nrmse_pooled(u_pred, u_ref).mean())
    return error if math.isfinite(error) else math.inf


def spread(cache: Cache, split: str, count: int) -> Tensor:
    """`count` rows (<= count,) of a split, all if fewer, the same number of each parameter value as far as it goes."""
    rows = cache.split[split]
    values = cache.parameter_index[rows]
    groups = [rows[values == value] for value in values.unique()]
    turns = max(len(group) for group in groups)
    picked = [group[turn] for turn in range(turns) for group in groups if turn < len(group)]
    return torch.stack(picked[:count])


def candidates(cache: Cache, config: Config, seed: int, device: torch.device) -> Iterator[tuple[str, TaskHead]]:
    """Yield (name, head on `device` with a fitted base) for every base in task.TASK.base; heads are of width 1.

    The weights depend on `seed` and the cache alone, not on what was drawn before. Raises ValueError when a parameter value
    has no training window.
    """
    settings = config.task[cache.task.name]

    def head_with(kind: str, base: nn.Module | None, chosen: dict[str, Any]) -> TaskHead:
        full = {**base_settings(cache, config), **chosen}
        head = TaskHead(head_description(cache, config, kind, full), width=1)
        head.codec.load_state_dict(cache.tokenizer.state_dict())
        if cache.input_tokenizer is not None:
            head.input_codec.load_state_dict(cache.input_tokenizer.state_dict())
        if base is not None:
            head.base = base
        if kind == "elliptic":
            head.base.zero.copy_(head.codec.normalise(torch.zeros(head.codec.num_channels, *head.codec.space)).flatten(1)[:, 0])
        return head.to(device)

    for kind in settings.base:
        what = f"{cache.task.name}: {kind}"
        note(what)
        if kind == "propagator":
            probe = head_with("persistence", None, {})

            def windows(value: int, probe: TaskHead = probe) -> Iterator[tuple[Tensor, Tensor]]:
                rows = _training_rows(cache, value)
                length = settings.history + 1
                starts = cache.num_frames - settings.train_from - length + 1
                picked, first = _sample(cache, config, rows, length, min(MAX_WINDOWS, len(rows) * starts), seed)
                for i in range(0, len(picked), BATCH):
                    u, _, u_next = _window(probe, cache, picked[i:i + BATCH], first[i:i + BATCH])
                    yield u, u_next

            full = base_settings(cache, config)
            for chosen, base in fit_propagators(windows, full["num_values"], full["num_channels"], tuple(full["space"]),
                                                full["boundary"], settings.degree, settings.history):
                ridge = chosen.pop("ridge")
                yield f"propagator degree {chosen['degree']} history {chosen['history']} ridge {ridge:g}", head_with(
                    kind, base, chosen)
            continue
        torch.manual_seed(seed)
        head = head_with(kind, None, {})
        if kind in ("transport", "elliptic"):
            size = 16 if kind == "transport" else 8
            steps = config.operator.base_steps * 16 // size               # as many windows for either
            length = 1 if head.task.is_steady else head.history + 1
            rows, starts = _sample(cache, config, cache.split["train"], length, size * steps, seed)

            def draw(step: int, head: TaskHead = head, rows: Tensor = rows, starts: Tensor = starts, size: int = size) -> tuple:
                part = slice(step * size, (step + 1) * size)
                return _window(head, cache, rows[part], starts[part])

            if kind == "elliptic":
                head.base.calibrate(*draw(0))
            fit_by_gradient(head.base, draw, steps, _told(what, steps))
        yield kind, head


@torch.no_grad()
def residual_scale(head: TaskHead, cache: Cache, config: Config, seed: int) -> Tensor:
    """RMS over training windows of encode(u_next - base), per parameter value; the unit of the network's output."""
    length = 1 if head.task.is_steady else head.history + 1
    scales = []
    for value in range(len(head.scale)):
        rows, starts = _sample(cache, config, _training_rows(cache, value), length, 4 * BATCH, seed + 1)
        squares = []
        for i in range(0, len(rows), BATCH):
            u, known, u_next = _window(head, cache, rows[i:i + BATCH], starts[i:i + BATCH])
            squares.append(head.codec.encode(u_next - head.base(u, known)).square().mean())
        scales.append(torch.stack(squares).mean().sqrt())
    return torch.stack(scales).clamp_min(1e-7)   # float32 rounding of a normalised field: nothing below it can be learnt


def choose_base(cache: Cache, config: Config, seed: int, device: torch.device) -> tuple[TaskHead, dict[str, float]]:
    """The head whose base has the best validation rollouts, and every candidate's pooled nRMSE (inf: it blew up).

    Raises ValueError if all of them blow up.
    """
    scores: dict[str, float] = {}
    best, best_score = None, math.inf
    for name, head in candidates(cache, config, seed, device):
        scores[name] = base_error(head, cache, config.context(cache.task.name))
        if scores[name] < best_score:
            best, best_score = head, scores[name]
    if best is None:
        name = cache.task.name
        raise ValueError(f"no base of {name} survives its validation rollouts (tried: {', '.join(scores)}); expected one that "
                         f"stays finite. Add persistence to task.{name}.base, or look at the data with the doctor.")
    best.scale.copy_(residual_scale(best, cache, config, seed))
    return best, scores


def _told(what: str, num_steps: int) -> Iterator[int]:
    """The steps of a fit, each noted when it was taken."""
    for step in range(num_steps):
        yield step
        note(f"{what}, step {step + 1} of {num_steps}")


def fit_base(cache: Cache, config: Config, seed: int, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and weights of the chosen base of a task, for `fit_once`.

    Facts: description (of the head, for `Operator`), seconds, and validation_nrmse: candidate -> number, None for one that
    blew up.
    """
    started = time.perf_counter()
    head, scores = choose_base(cache, config, seed, device)
    facts = {"description": head.description, "seconds": time.perf_counter() - started,
             "validation_nrmse": {k: (v if math.isfinite(v) else None) for k, v in scores.items()}}
    return facts, fitted_part(head)


def fitted_part(head: TaskHead) -> dict[str, Tensor]:
    """Codec, base and scale; the rest is trained."""
    return {name: value for name, value in head.state_dict().items() if not name.startswith(("into.", "out."))}


def load_base(head: TaskHead, state: dict[str, Tensor]) -> None:
    """Fill codec, base and scale of a head with the weights of `fit_base`. Raises ValueError if they do not fit the head."""
    wanted = fitted_part(head)
    wrong = sorted(name for name in state.keys() | wanted.keys()
                   if name not in state or name not in wanted or state[name].shape != wanted[name].shape)
    if wrong:
        raise ValueError(f"the fitted base of {head.name} does not fit the model ({', '.join(wrong[:3])}); expected the base of "
                         f"this version and configuration. Delete the folder bases of the stage and train again.")
    head.load_state_dict(state, strict=False)
