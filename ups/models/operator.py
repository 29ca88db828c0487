"""The operator: latents of the past to latents of the next frames, for every task in one network.

    z_next = encode( base(decode z) ) + scale * network(z, base, condition)

The base (ups/models/bases/__init__.py) is cheap and chosen per task; the network is shared, sees the history and the base's answer and
learns what the base leaves, in units of `scale`, the base's own residual on training windows. A base with weights is also
trained on its own error, so that it never hides behind the network, and the network serves only the tasks where it helps
on validation (`network_weight`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ups.boundary import DIRICHLET, NO_FLUX, OUTFLOW, PERIODIC
from ups.config import ModelConfig
from ups.data.cache import Cache
from ups.data.tokenizer import Tokenizer
from ups.models.backbone import Backbone
from ups.models.bases import make_base
from ups.models.rollout import rollout
from ups.tasks import get_task
from ups.training.checkpoint import load_stage

BOUNDARIES = (PERIODIC, NO_FLUX, DIRICHLET, OUTFLOW)
Part = Literal["full", "base"]   # of the operator: network and base, or the base alone
BASE_LR = 0.2        # of the rate: how fast a learnt base moves while the network learns what it leaves; at 1 it wanders
FLOOR = 1e-4         # of the field's spread; an error this small is left alone: float32 rollouts end an order below it
MAX_PARAMETERS = 3   # the PDEBench task with the most: cfd2d and cfd3d (eta, zeta, M)
AGAIN = "Train the operator again on these data: make remove STAGE=operator, then make operator."


class TaskHead(nn.Module):
    """What one task adds to the shared network: codec, base predictor, input and output map, scales.

    description (JSON-able; ups/models/choose.py makes it): all that the tensors do not hold. name; history, bundle (frames);
    what it is trained on, as `describe_data` says; base: {kind, settings}. Raises ValueError where that is
    missing or not the task's.
    """

    def __init__(self, description: dict[str, Any], width: int):
        super().__init__()
        self.name = description["name"]
        self.task = get_task(self.name)
        known = {"boundary": self.task.boundary, "domain": list(self.task.domain)}
        if wrong := [key for key in (*known, "dt", "parameters") if key not in description
                     or description[key] != known.get(key, description[key])]:
            raise ValueError(f"the weights of {self.name} say {description.get(wrong[0], 'nothing')} of the "
                             f"{wrong[0]} they were trained on; expected "
                             f"{known.get(wrong[0], 'what this version records')}. {AGAIN}")
        self.history, self.bundle = description["history"], description["bundle"]
        self.description = description
        self.log_dt = math.log(description["dt"]) if description["dt"] > 0 else 0.0
        self.codec = _empty_tokenizer(description["codec"])
        self.coefficient_codec = _empty_tokenizer(description["input_codec"]) if description["input_codec"] else None
        self.base = make_base(description["base"]["kind"], description["base"]["settings"])
        for parameter in self.base.parameters():
            parameter.lr_factor = BASE_LR
        values = description["parameter_values"]
        self.register_buffer("parameter_values", torch.tensor(values or [1.0], dtype=torch.float64))
        logs = self.parameter_values.log()
        spread = logs.std(correction=0) if len(values) > 1 else torch.ones((), dtype=torch.float64)
        self.register_buffer("log_mean", logs.mean())
        self.register_buffer("log_std", spread)
        self.register_buffer("scale", torch.ones(len(self.parameter_values)))
        self.register_buffer("network_weight", torch.ones(()))
        self.into = nn.Linear(self.history * self.input_codec.dim + self.codec.dim, width)
        self.out = nn.Linear(width, self.bundle * self.codec.dim)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    @property
    def input_codec(self) -> Tokenizer:
        """The codec of what the operator is shown: the coefficient's for a steady task, else the state's."""
        return self.coefficient_codec if self.coefficient_codec is not None else self.codec

    def standardise(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, P) raw values to standardised logarithms (batch, P) and the index of the nearest known value (batch,).

        Raises ValueError for another number of parameters than the task shows, or a value the base cannot
        serve: a propagator knows the fitted values only.
        """
        names = list(self.description["parameters"])
        if parameters.ndim != 2 or parameters.shape[1] != len(names):
            raise ValueError(f"{self.name} was given parameters of shape {tuple(parameters.shape)}; expected "
                             f"(batch, {len(names)}): {', '.join(names) or 'none'}. Give these, in order.")
        if parameters.shape[1] == 0:
            return parameters.float(), torch.zeros(parameters.shape[0], dtype=torch.long, device=parameters.device)
        logs = parameters.double().log()
        distance = (logs[:, :1] - self.parameter_values.log()).abs()
        nearest = distance.min(1)
        if self.description["base"]["kind"] == "propagator" and not bool((nearest.values <= 1e-6).all()):   # NaN as well
            bad = float(parameters[int(nearest.values.argmax()), 0])
            raise ValueError(f"{self.name} was asked for the parameter value {bad:g}; expected one of "
                             f"{self.parameter_values.tolist()}, for which its propagator was fitted. Add the value to "
                             f"task.{self.name}.parameters and train, or choose another base.")
        return ((logs - self.log_mean) / self.log_std).float(), nearest.indices

    def predict_base(self, z: Tensor, parameters: Tensor, index: Tensor) -> Tensor:
        """The base's next `bundle` frames as latents (batch, bundle, *tokens, dim)."""
        u = self.input_codec.decode(z)
        frames = []
        for _ in range(self.bundle):
            frames.append(self.base(u, parameters, index))
            u = torch.cat([u[:, 1:], frames[-1][:, None]], 1) if not self.task.is_steady else u
        return self.codec.encode(torch.stack(frames, 1))


class Operator(nn.Module):
    """All tasks in one network. Built from a description, whose tensors a state_dict fills; `load_operator` does both.

    description (JSON-able): model (ModelConfig's keys), precision ("no" or "bf16", inside the trunk), tasks (see `TaskHead`).
    Raises ValueError for a periodic token grid that the local mixing would wrap around more than once.
    """

    def __init__(self, description: dict[str, Any]):
        super().__init__()
        model = ModelConfig(**description["model"])
        self.description = description
        self.precision = description["precision"]
        self.names = [task["name"] for task in description["tasks"]]
        self.heads = nn.ModuleDict({task["name"]: TaskHead(task, model.width) for task in description["tasks"]})
        for head in self.heads.values():
            if head.task.boundary == PERIODIC and min(head.codec.tokens) < model.kernel_size // 2:
                raise ValueError(f"{head.name} has {min(head.codec.tokens)} tokens along an axis; expected at least half of "
                                 f"operator.model.kernel_size = {model.kernel_size}. Lower it, or task.{head.name}.patch.")
        self.backbone = Backbone(model)
        self.task_embedding = nn.Parameter(torch.randn(len(self.names), model.width) * 0.02)
        self.condition = nn.Sequential(nn.Linear(MAX_PARAMETERS + 1 + len(BOUNDARIES), model.width), nn.SiLU(),
                                       nn.Linear(model.width, model.width))

    def head(self, task: str) -> TaskHead:
        """The head of a task. Raises ValueError for one that it was not trained on."""
        if task not in self.heads:
            raise ValueError(f"this operator does not know {task!r:.80}; expected one of the tasks it was "
                             f"trained on: {', '.join(self.names)}. Add it to data.tasks and train.")
        return self.heads[task]

    def serve(self, cache: Cache) -> TaskHead:
        """The head of a cache's task. Raises ValueError, by name, where it was trained on other data."""
        head = self.head(cache.task.name)
        now, then = flat_facts(describe_data(cache)), flat_facts(head.description)
        wrong = [(f"the {fact} {now[fact]}", then[fact]) for fact in now if now[fact] != then[fact]]
        for here, there in ((cache.tokenizer, head.codec), (cache.input_tokenizer, head.coefficient_codec)):
            if here is not None and not wrong and not all(
                    torch.equal(a.cpu(), b.cpu()) for a, b in zip(here.buffers(), there.buffers(), strict=True)
            ):
                wrong = [("another codec", "the codec of its cache")]
        if wrong:
            raise ValueError(f"{cache.path} holds {head.name} with {wrong[0][0]}; expected {wrong[0][1]}, as "
                             f"the operator was trained. Give the cache it was trained on. {AGAIN}")
        return head

    def predict(self, z: Tensor, task: str, parameters: Tensor, part: Part = "full") -> tuple[Tensor, Tensor]:
        """z (batch, history, *tokens, dim), raw parameters (batch, P) to (full, base), each (batch, bundle, *tokens, dim).

        For a steady task z is the coefficient (batch, 1, *tokens, dim_a). Raises ValueError for a task, token
        grid, number of frames or of parameters that is not the trained one (by shapes alone, so that nothing
        waits for the device), or a parameter value the base was not fitted for.
        """
        head = self.head(task)
        codec, (frames, *found) = head.input_codec, z.shape[1:]
        if frames != head.history:
            raise ValueError(f"{task} was given {frames} frames; expected its history of {head.history}. "
                             f"Slice the context.")
        if found != [*codec.tokens, codec.dim] or len(parameters) != len(z):
            raise ValueError(f"{task} was given {len(z)} latents of shape {tuple(found)} and {len(parameters)} rows "
                             f"of parameters; expected {(*codec.tokens, codec.dim)} and as many rows: it was trained "
                             f"on a grid of {codec.space} cells. Give the field to "
                             f"ups.load(..).forecast(.., resample=True), or train on the other grid.")
        standard, index = head.standardise(parameters)
        z_base = head.predict_base(z, standard, index)
        if part == "base" or not torch.is_grad_enabled() and not head.network_weight:
            return z_base, z_base                                # asked for, or chosen: the network does not help
        scale = head.scale[index].view(-1, *[1] * (z.ndim - 1))
        history = z.movedim(1, -2).flatten(-2)
        with torch.autocast(z.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16"):
            x = head.into(torch.cat([history, z_base[:, 0].detach()], -1))
            out = head.out(self.backbone(x, self._condition(task, standard), head.task.boundary))
        change = out.float().unflatten(-1, (head.bundle, -1)).movedim(-2, 1)
        return z_base + head.network_weight * scale * change, z_base

    def forward(self, z: Tensor, task: str, parameters: Tensor) -> Tensor:
        """The prediction used everywhere but in training: (batch, bundle, *tokens, dim)."""
        return self.predict(z, task, parameters)[0]

    def rollout(self, z: Tensor, task: str, parameters: Tensor, num_frames: int, part: Part = "full") -> Tensor:
        """The `num_frames` frames (batch, num_frames, *tokens, dim) that follow z (batch, history or more, *tokens, dim).

        part "full": the operator as it serves the task; "base": its base alone. z of a steady task: the coefficient.
        Raises ValueError as `predict` and `ups.models.rollout.rollout`.
        """
        def step(window: Tensor) -> Tensor:
            return self.predict(window, task, parameters, part)[0]

        return rollout(step, z, num_frames, self.head(task).history)

    def physical(self, task: str, z: Tensor) -> Tensor:
        """Latents (..., *tokens, dim) of the state to the field (..., C, *space), physical units."""
        codec = self.head(task).codec
        return codec.denormalise(codec.decode(z))

    def _condition(self, task: str, standard: Tensor) -> Tensor:
        head = self.heads[task]
        facts = torch.zeros(standard.shape[0], MAX_PARAMETERS + 1 + len(BOUNDARIES), device=standard.device)
        facts[:, : standard.shape[1]] = standard
        facts[:, MAX_PARAMETERS] = head.log_dt
        facts[:, MAX_PARAMETERS + 1 + BOUNDARIES.index(head.task.boundary)] = 1.0
        return self.task_embedding[self.names.index(task)] + self.condition(facts)


def _empty_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """A codec of the right shape whose tensors a state_dict fills."""
    shape = meta["shape"]
    tensors = {name: torch.zeros(size) for name, size in shape.items()}
    return Tokenizer.from_state(tensors, {k: v for k, v in meta.items() if k != "shape"})


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The facts and tensor shapes of a codec, JSON-able: an operator is built from these and filled by a state_dict."""
    return {**tokenizer.meta(), "shape": {name: list(value.shape) for name, value in tokenizer.state_dict().items()}}


def describe_data(cache: Cache) -> dict[str, Any]:
    """What a task's weights are trained on, and hold for alone, JSON-able.

    codec and input_codec (None unless steady), with grid, fields and patch; boundary; domain of every axis;
    dt between frames (0 if steady); parameters: name -> smallest and largest value, empty where the task hides
    or has none; parameter_values of the first.
    """
    shown = cache.parameters.unbind(1)   # none where they are hidden
    steady = cache.input_tokenizer is not None
    return {"codec": describe_tokenizer(cache.tokenizer),
            "input_codec": describe_tokenizer(cache.input_tokenizer) if steady else None,
            "boundary": cache.task.boundary, "domain": list(cache.task.domain), "dt": cache.dt,
            "parameters": {name: [float(column.min()), float(column.max())]
                           for name, column in zip(cache.task.parameters, shown, strict=False)},
            "parameter_values": [float(v) for v in cache.parameter_values]}


def flat_facts(description: dict[str, Any]) -> dict[str, Any]:
    """`describe_data` by the names a message uses."""
    names = {"space": "grid", "fields": "fields", "positive": "logarithms", "patch": "patch", "shape": "size"}
    codecs = {"": description["codec"], "input ": description["input_codec"] or {}}
    facts = {prefix + name: codec.get(key) for prefix, codec in codecs.items() for key, name in names.items()}
    others = ("boundary", "domain", "dt", "parameters", "parameter_values")
    return facts | {key: description[key] for key in others}


def relative_error(z_pred: Tensor, z_ref: Tensor, z_base: Tensor, scale: Tensor) -> Tensor:
    """Mean over samples of |z_pred - z_ref| / sqrt((|z_ref - z_base|^2 + scale^2) / 2), RMS over tokens and dim.

    scale (batch,). In units of what the base leaves: about 1 means that nothing was learnt. The scale keeps samples that
    the base already solves from dominating, FLOOR those that it solves to rounding. Latents are orthonormal coordinates,
    so this is the error of the normalised field (Parseval).
    """
    axes = tuple(range(1, z_ref.ndim))
    error = (z_pred - z_ref).square().mean(axes) + FLOOR**2
    residual = (z_ref - z_base.detach()).square().mean(axes)
    return (2 * error / (residual + scale**2 + 2 * FLOOR**2)).sqrt().mean()


def relative_field_error(z_pred: Tensor, z_ref: Tensor) -> Tensor:
    """Mean over samples of |z_pred - z_ref| / |z_ref|; both (batch, time, *tokens, dim)."""
    axes = tuple(range(1, z_ref.ndim))
    return ((z_pred - z_ref).square().mean(axes) / z_ref.square().mean(axes).clamp_min(1e-8)).add(1e-12).sqrt().mean()


def operator_loss(operator: Operator, task: str, z: Tensor, z_ref: Tensor, parameters: Tensor,
                  field_weight: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a window: z (batch, history, ...) shown, z_ref (batch, unroll * bundle, ...) to predict, call after call.

    The sum of the network's relative error, the learnt base's own and field_weight times that of the field, averaged over
    the calls; gradients flow through the rollout. Returns it with the detached errors of network and base.
    """
    head = operator.heads[task]
    _, index = head.standardise(parameters)
    scale = head.scale[index]
    loss, network, base = 0.0, 0.0, 0.0
    calls = z_ref.shape[1] // head.bundle
    for call in range(calls):
        target = z_ref[:, call * head.bundle : (call + 1) * head.bundle]
        full, z_base = operator.predict(z, task, parameters)
        network_error = relative_error(full, target, z_base, scale)
        base_error = relative_error(z_base, target, z_base, scale)
        loss = loss + network_error + (base_error if is_learnt(head.base) else 0.0)
        if field_weight:
            loss = loss + field_weight * relative_field_error(full, target)
        network, base = network + network_error.detach(), base + base_error.detach()
        if call + 1 < calls:
            z = torch.cat([z, full], 1)[:, -head.history :]
    return loss / calls, {"network": network / calls, "base": base / calls}


def symmetries(task: str) -> bool:
    """Whether mirror images and axis swaps of a solution are solutions: scalar fields on a square without transport."""
    entry = get_task(task)
    return entry.ndim >= 2 and entry.boundary in (NO_FLUX, DIRICHLET) and not any(f.startswith("V") for f in entry.fields)


def augment(operator: Operator, task: str, parts: Sequence[tuple[Tensor, Tokenizer]], generator: torch.Generator) -> list[Tensor]:
    """The same random symmetry of the equation applied to several latents: a shift if periodic, else one of the cube's.

    parts: (latents (batch, time, *tokens, dim), their codec). One symmetry per call; exact for a full-rank codec.
    """
    entry = get_task(task)
    axes = list(range(-entry.ndim, 0))
    out = []
    if entry.boundary == PERIODIC:
        shifts = [int(torch.randint(0, n, (), generator=generator)) for n in parts[0][1].space]
        for z, codec in parts:
            out.append(codec.encode(torch.roll(codec.decode(z), shifts, axes)))
        return out
    if not symmetries(task):
        return [z for z, _ in parts]
    flips = [axis for axis in axes if bool(torch.randint(0, 2, (), generator=generator))]
    order = torch.randperm(entry.ndim, generator=generator).tolist()
    for z, codec in parts:
        u = codec.decode(z).flip(flips) if flips else codec.decode(z)
        lead = list(range(u.ndim - entry.ndim))
        out.append(codec.encode(u.permute(lead + [len(lead) + axis for axis in order])))
    return out


def load_operator(directory: str | Path, device: torch.device | str = "cpu") -> Operator:
    """The finished operator of a stage directory (config.json, model.safetensors), in evaluation mode on `device`."""
    return load_stage(directory, Operator, "operator stage", "Run make operator.").to(device).eval()


def is_learnt(base: nn.Module) -> bool:
    """Whether a base has weights that gradient steps train (transport, elliptic) rather than a closed form."""
    return any(True for _ in base.parameters())

