"""The operator: one network for all tasks, from the last frames to the next ones, as normalised fields.

    u_base = constrained( base(u) )
    u_next = constrained( u_base + decode( scale * network(encode u, encode u_base, condition) ) )

The base (ups/models/bases/) is cheap and selected per task. The shared network reads the history and the
base's prediction, and learns the residual of the base in units of `scale`, its RMS on training windows. The
base stays as it was fitted. The network is used only for tasks on which it helps in validation
(`TaskHead.is_network_used`). Base and operator conserve what the equation conserves and stay near the range
of the training data, so long rollouts stay finite (ups/models/constraints.py). The codec is the first and the
last layer of the network: nothing else reads latents.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ups.common.device import autocast, has_gradient, plain_torch, refuse_gradient
from ups.common.place import make_target
from ups.models.bases.base import Base, ParameterBatch
from ups.models.facts import AGAIN, HeadFacts, data_facts, flat_facts
from ups.models.head import CONDITION_SIZE, TaskHead
from ups.models.network import TaskNetwork
from ups.models.rollout import Traces, in_segments, rollout
from ups.training.weights import load_stage
from ups_discovery.boundary import PERIODIC, along

if TYPE_CHECKING:
    from ups.data.cache import Cache

# of `flat_facts`
OF_FIELDS = ("grid", "fields", "input grid", "input fields", "forcing fields", "boundary", "domain", "dt")
Component = Literal["full", "base"] | float  # of `HeadFacts.weight`


class Operator(TaskNetwork):
    """All tasks in one network.

    description: see `TaskNetwork` and `TaskHead`. `load_operator` loads a trained one. Raises ValueError for
    a periodic token grid that the local mixing would wrap around more than once.
    """

    def __init__(self, description: dict[str, Any]):
        super().__init__(description, lambda task, model: TaskHead(HeadFacts.read(task), model.width))
        for head in self.heads.values():
            ends = along(head.task.boundary, head.task.ndim)
            for n, end in zip(head.codec.tokens, ends, strict=True):
                if end == PERIODIC and n < self.backbone.fewest_tokens:
                    raise ValueError(
                        f"{head.name} has {n} tokens along a periodic axis; expected at least "
                        f"{self.backbone.fewest_tokens} (half of operator.model.kernel_size). Lower it, or "
                        f"task.{head.name}.patch."
                    )
        self.condition = nn.Sequential(
            nn.Linear(CONDITION_SIZE, self.width), nn.SiLU(), nn.Linear(self.width, self.width)
        )
        self.traces = Traces()

    def head(self, task: str) -> TaskHead:
        """The head of a task. Raises ValueError for a task that the operator was not trained on."""
        if task not in self.names:
            raise ValueError(
                f"this operator does not know {task!r:.80}; expected one of the tasks it was "
                f"trained on: {', '.join(self.names)}. Add it to data.tasks and train."
            )
        return self.heads[task]

    @property
    def description(self) -> dict[str, Any]:
        return self.described()

    def described(self, decided: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """What config.json stores. decided: task -> facts that replace those of its head."""
        facts = [replace(head.facts, **(decided or {}).get(name, {})) for name, head in self.heads.items()]
        return self._description | {"tasks": [one.described() for one in facts]}

    def use_solvers(self, solvers: Mapping[str, Callable[..., Any]] | Callable[..., Any]) -> "Operator":
        """Set the user's functions (task -> step, or one step for all) of the bases that call one. Raises
        ValueError for a task without its function.
        """
        bases = {head.name: head.base for head in self.heads.values() if head.base.is_user_solver}
        solvers = solvers if isinstance(solvers, Mapping) else dict.fromkeys(bases, solvers)
        if missing := [name for name in bases if not callable(solvers.get(name))]:
            from ups.models.bases.solver import PASS

            raise ValueError(
                f"the base of {missing[0]} is a solver of the user's, "
                f"{bases[missing[0]].solver!r:.80}; {PASS}"
            )
        for name, base in bases.items():
            base.use(solvers[name])
        return self

    def head_for(self, cache: "Cache", any_codec: bool = False) -> TaskHead:
        """The head of a cache's task. Raises ValueError if it was trained on other data.

        any_codec: allow a codec other than the cache's, for forecasts of fields instead of its latents.
        """
        head = self.head(cache.task.name)
        now, then = flat_facts(data_facts(cache)), flat_facts(vars(head.facts))
        wrong = [
            (f"the {fact} {now[fact]}", then[fact])
            for fact in now
            if now[fact] != then[fact] and (fact in OF_FIELDS or not any_codec)
        ]
        for here, there in (
            (cache.tokenizer, head.codec),
            (cache.input_tokenizer, head.coefficient_codec),
            (cache.forcing_tokenizer, head.forcing_codec),
        ):
            if here is not None and not (wrong or any_codec) and not here.is_same(there):
                wrong = [("another codec", "the codec of its cache")]
        if wrong:
            raise ValueError(
                f"{cache.path} holds {head.name} with {wrong[0][0]}; expected {wrong[0][1]}, as "
                f"the operator was trained. Give the cache it was trained on. {AGAIN}"
            )
        return head

    def step(
        self, u: Tensor, task: str, parameters: ParameterBatch, component: Component = "full"
    ) -> tuple[Tensor, Tensor]:
        """The next frame (full, base), each (batch, 1, C, *space), from u (batch, history, C_in, *space);
        normalised fields.

        For a steady task u is the coefficient (batch, 1, C_in, *space). parameters: of
        `TaskHead.parameter_batch`. component "base": the base alone, returned twice. Raises ValueError for
        another task, grid or number of frames than the trained one; the check reads shapes alone, so nothing
        waits for the device.
        """
        head = self.head(task)
        head.require_shape("fields", u, parameters)
        weight = head.facts.weight(component)
        u_base = head.codec.projected(head.base_frames(u, parameters, 1))
        if not weight:
            return u_base, u_base
        return self.corrected(head, u, u_base, parameters, weight)[0], u_base

    def predict(
        self, z: Tensor, task: str, parameters: ParameterBatch, component: Component = "full"
    ) -> tuple[Tensor, Tensor]:
        """`step` from latents z (batch, history, *tokens, dim) to latents (batch, 1, *tokens, dim)."""
        head = self.head(task)
        head.require_shape("latents", z, parameters)
        full, base = self.step(head.input_codec.decode(z), task, parameters, component)
        z_base = head.codec.encode(base)
        return z_base if full is base else head.codec.encode(full), z_base

    def predict_with_features(
        self, z: Tensor, task: str, parameters: ParameterBatch
    ) -> tuple[Tensor, Tensor]:
        """The prediction in latents, and the features of the backbone (batch, *tokens, width), also if the
        base serves alone.
        """
        head = self.head(task)
        head.require_shape("latents", z, parameters)
        u, weight = head.input_codec.decode(z), head.facts.network_weight
        u_base = head.codec.projected(head.base_frames(u, parameters, 1))
        full, features = self.corrected(head, u, u_base, parameters, weight)
        return head.codec.encode(full), features.float()

    def corrected(
        self, head: TaskHead, u: Tensor, u_base: Tensor, parameters: ParameterBatch, weight: float
    ) -> tuple[Tensor, Tensor]:
        """(the base's prediction corrected by `weight` times the network's output, the backbone's features).

        In training no gradient passes through the network's input from the base: one would cost no time, but
        give other weights than those of the published results.
        """
        base = u_base.detach() if self.training else u_base
        series = [head.input_codec.encode(u), head.codec.encode(base)]
        if head.forcing_codec is not None:  # in the last input frame and the predicted one
            series.append(head.forcing_codec.encode(parameters.forcing[:, :2]))
        tokens = torch.cat([z.movedim(1, -2).flatten(-2) for z in series], -1)
        standard = parameters.standard
        fixed = head.fixed_condition[standard.shape[1] :]
        with autocast(self.precision, u.device):
            condition = self.condition(torch.cat([standard, fixed.expand(standard.shape[0], -1)], 1))
            condition = self.task_embedding[self.names.index(head.name)] + condition
            features = self.backbone(head.into(tokens), condition, head.name)
            if not weight:
                return u_base, features
            out = head.out(features)
        change = out.float().unsqueeze(-2).movedim(-2, 1)  # the layout by which torch rounds
        scale = weight * head.scale[parameters.index].view(-1, *[1] * (change.ndim - 1))
        u_next = u_base + head.codec.decode(scale * change)
        is_trained = self.training and torch.is_grad_enabled()  # windows hardly reach the bounds of waves
        if head.wave_bounds is not None and not is_trained:
            u_next = head.wave_bounds(u_next, u_base)
        return head.codec.projected(head.constrained(u_next, u[:, -1])), features

    @plain_torch(keeps_gradient=True)
    def forward(self, z: Tensor, task: str, parameters: Tensor, forcing: Tensor | None = None) -> Tensor:
        """One call from raw parameters (batch, P) and normalised forcing: (batch, 1, *tokens, dim), with its
        gradient by all three.
        """
        return self.predict(z, task, self.head(task).parameter_batch(parameters, forcing))[0]

    def forecast(
        self,
        u: Tensor,
        task: str,
        parameters: Tensor,
        num_frames: int,
        component: Component = "full",
        forcing: Tensor | None = None,
    ) -> Tensor:
        """The `num_frames` frames (batch, num_frames, C, *space) after u (batch, history or more, C_in,
        *space), normalised fields; the start is estimated where the data are noisy (assimilation.py).

        u of a steady task: the coefficient. parameters: raw, (batch, P). component "full": the operator as
        selected for the task; "base": its base alone. forcing: as in `ParameterBatch`, num_frames + 1 frames.
        The graph of a gradient is kept if one of these has a gradient. Raises ValueError as
        `TaskHead.parameter_batch`, `step` and `rollout`, and for a gradient of an estimated start.
        """
        head = self.head(task)
        batch = head.parameter_batch(parameters, forcing)
        batch = head.base.settled(head.input_codec.bridged(u), batch)
        is_tracked = has_gradient(u, parameters, forcing)
        if head.start_frames:
            from ups.models.assimilation import with_estimated_start  # few tasks have noisy starts

            if is_tracked and u.shape[1] > head.history:
                why = (
                    f"its start is estimated from {u.shape[1]} frames (with a gradient, pass {head.history})"
                )
                refuse_gradient(task, why, u, parameters)
            u = with_estimated_start(head, u, parameters)

        def step(w: Tensor, num_done: int) -> Tensor:
            return self.step(w, task, batch.later(num_done, 2), component)[0]

        if is_tracked:
            steps = in_segments(step, num_frames, head.history)
        else:
            steps = self.traces.steps(self, head, batch, component)
        # around the autocasts of all calls: weights are cast once
        is_recorded = is_tracked and torch.is_grad_enabled()
        with torch.set_grad_enabled(is_recorded), torch.autocast(u.device.type, enabled=False):
            return rollout(steps, u, num_frames, head.history)

    def with_base(self, task: str, base: Base) -> "Operator":
        """The operator with another base of a task, and without bounds on the state."""
        head, other = self.head(task), copy.copy(self)
        changed = head.with_facts()
        changed.base = base.unbounded()
        changed.constraints, changed.wave_bounds = changed.invariants, None
        other._modules = self._modules | {"heads": nn.ModuleDict({**self.heads, task: changed})}
        other.traces = Traces()
        return other

    def rollout(self, z: Tensor, task: str, *arguments: Any, **options: Any) -> Tensor:
        """`forecast` from latents z (batch, history or more, *tokens, dim) to latents (batch, num_frames,
        *tokens, dim)."""
        head = self.head(task)
        return head.codec.encode(self.forecast(head.input_codec.decode(z), task, *arguments, **options))


def load_operator(
    directory: str | Path,
    device: torch.device | str = "cpu",
    solvers: Mapping[str, Callable[..., Any]] | Callable[..., Any] | None = None,
) -> Operator:
    """The trained operator of a stage directory (config.json, model.safetensors), in evaluation mode on
    `device`.

    solvers: task -> the user's function, for bases that call one.
    """
    operator = load_stage(
        directory, Operator, "operator stage", f"Run {make_target('operator')}.", "operator"
    )
    return operator.use_solvers(solvers or {}).served_on(device)
