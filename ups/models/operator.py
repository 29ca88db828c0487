"""The operator: one network for all tasks, from latents of the last frames to latents of the next ones.

    z_next = restore( encode( base(decode z) ) + scale * network(z, base, condition) )

The base (ups/models/bases/) is cheap and selected per task. The shared network reads the history and the
base's prediction, and learns the residual of the base in units of `scale`, its RMS on training windows. A
learnt base is also trained on its own error. The network is used only for tasks on which it helps in
validation (`TaskHead.is_network_used`). Base and operator conserve what the equation conserves
(`TaskHead.keep`), and stay near the range of the training data (`TaskHead.bound`), so long rollouts stay
finite.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ups.common.device import autocast
from ups.common.place import make_target
from ups.common.torch_state import ONE_CALL, plain_torch, refuse_gradient
from ups.models.bases.base import ParameterBatch
from ups.models.facts import AGAIN, HeadFacts, data_facts, flat_facts
from ups.models.head import TaskHead
from ups.models.network import TaskNetwork
from ups.models.rollout import rollout
from ups.training.weights import load_stage
from ups_discovery.boundary import BOUNDARIES, PERIODIC, along

if TYPE_CHECKING:
    from ups.data.cache import Cache

MAX_PARAMETERS = 3  # the PDEBench task with the most: cfd2d and cfd3d (eta, zeta, M)
# of `flat_facts`
OF_FIELDS = ("grid", "fields", "input grid", "input fields", "forcing fields", "boundary", "domain", "dt")
# the operator with its network, its base alone, the one that samplers build on (`TaskHead.call_weight`), or
# with another weight of the network's output
Component = Literal["full", "base", "call"] | float


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
            nn.Linear(MAX_PARAMETERS + 1 + len(BOUNDARIES), self.width),
            nn.SiLU(),
            nn.Linear(self.width, self.width),
        )

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

    def use_solvers(self, solvers: Mapping[str, Callable[..., Any]]) -> "Operator":
        """Set the user's functions (task -> step) of the bases that call one. Raises ValueError for a task
        without its function.
        """
        bases = {head.name: head.base for head in self.heads.values() if head.base.is_user_solver}
        if missing := [name for name in bases if name not in solvers]:
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

    def predict(
        self, z: Tensor, task: str, parameters: ParameterBatch, component: Component = "full"
    ) -> tuple[Tensor, Tensor]:
        """The next frames (full, base), each (batch, bundle, *tokens, dim), from z (batch, history, *tokens,
        dim).

        For a steady task z is the coefficient (batch, 1, *tokens, dim_a). parameters: of
        `TaskHead.parameter_batch`. component "base": the base alone, returned twice. Raises ValueError for
        another task, token grid or number of frames than the trained one; the check reads shapes alone, so
        nothing waits for the device.
        """
        head = self._checked(z, task, parameters)
        weights = {"full": head.facts.network_weight, "base": 0.0, "call": head.call_weight}
        weight = weights.get(component, component)
        z_base = head.predict_base(z, parameters, not weight)
        if not weight:
            return z_base, z_base
        features = self._features(head, z, z_base, parameters)
        return self._corrected(head, z, z_base, parameters, features, weight), z_base

    def predict_with_features(
        self, z: Tensor, task: str, parameters: ParameterBatch
    ) -> tuple[Tensor, Tensor]:
        """The prediction of component "call", and the features of the backbone (batch, *tokens, width), also
        if the base serves alone.
        """
        head = self._checked(z, task, parameters)
        weight = head.call_weight
        z_base = head.predict_base(z, parameters, not weight)
        features = self._features(head, z, z_base, parameters)
        full = self._corrected(head, z, z_base, parameters, features, weight) if weight else z_base
        return full, features.float()

    def _checked(self, z: Tensor, task: str, parameters: ParameterBatch) -> TaskHead:
        """The head of the task. Raises ValueError if a shape does not fit it."""
        head = self.head(task)
        codec, (frames, *found) = head.input_codec, z.shape[1:]
        if frames != head.history:
            raise ValueError(
                f"{task} was given {frames} frames; expected its history of {head.history}. "
                f"Slice the context."
            )
        if found != [*codec.tokens, codec.dim] or parameters.index.shape[0] != z.shape[0]:
            raise ValueError(
                f"{task} was given {len(z)} latents of shape {tuple(found)} and {len(parameters.index)} "
                f"rows of parameters; expected {(*codec.tokens, codec.dim)} and a row for each: it was "
                f"trained on a grid of {codec.space} cells. Pass the field to ups.load(..).forecast(.., "
                "resample=True), or train on the other grid."
            )
        head.require_forcing(parameters)
        return head

    def _features(self, head: TaskHead, z: Tensor, z_base: Tensor, parameters: ParameterBatch) -> Tensor:
        """The features of the backbone. In training no gradient passes through its input from the base: one
        would cost no time, but give other weights than those of the published results.
        """
        history = z.movedim(1, -2).flatten(-2)
        base = z_base[:, 0].detach() if self.training else z_base[:, 0]
        with autocast(self.precision, z.device):
            x = head.into(torch.cat([history, base, *head.forcing_tokens(parameters)], -1))
            return self.backbone(x, self._condition(head, parameters.standard), head.task.boundary, head.name)

    def _corrected(
        self,
        head: TaskHead,
        z: Tensor,
        z_base: Tensor,
        parameters: ParameterBatch,
        features: Tensor,
        weight: float,
    ) -> Tensor:
        """The prediction of the base, corrected by `weight` times the network's output."""
        scale = head.scale[parameters.index].view(-1, *[1] * (z.ndim - 1))
        with autocast(self.precision, z.device):
            out = head.out(features)
        change = out.float().unflatten(-1, (head.bundle, -1)).movedim(-2, 1)
        return head.restore(z_base + weight * scale * change, z[:, -1])

    @plain_torch(keeps_gradient=True)
    def forward(self, z: Tensor, task: str, parameters: Tensor, forcing: Tensor | None = None) -> Tensor:
        """One call from raw parameters (batch, P) and normalised forcing: (batch, bundle, *tokens, dim), with
        its gradient by all three.
        """
        return self.predict(z, task, self.head(task).parameter_batch(parameters, forcing))[0]

    def rollout(
        self,
        z: Tensor,
        task: str,
        parameters: Tensor,
        num_frames: int,
        component: Component = "full",
        forcing: Tensor | None = None,
    ) -> Tensor:
        """The `num_frames` frames (batch, num_frames, *tokens, dim) after z (batch, history or more, *tokens,
        dim), of which the start is estimated where the data are noisy (assimilation.py).

        z of a steady task: the coefficient. parameters: raw, (batch, P). component "full": the operator as
        selected for the task; "base": its base alone. forcing: as in `ParameterBatch`, num_frames + 1 frames.
        Raises ValueError as `TaskHead.parameter_batch`, `predict` and `rollout`, and for a tensor that
        requires a gradient.
        """
        head = self.head(task)
        if torch.is_grad_enabled():
            refuse_gradient(f"a rollout of {task}", ONE_CALL, z, parameters, forcing)
        batch, calls = head.parameter_batch(parameters, padded(forcing, head.bundle)), itertools.count()

        def step(window: Tensor) -> Tensor:
            return self.predict(window, task, batch.later(next(calls) * head.bundle), component)[0]

        if head.start_frames:
            from ups.models.assimilation import with_estimated_start  # few tasks have noisy starts

            z = with_estimated_start(head, z, parameters)
        with torch.autocast(z.device.type, enabled=False):  # around those of all calls: weights are cast once
            return rollout(step, z, num_frames, head.history)

    def _condition(self, head: TaskHead, standard: Tensor) -> Tensor:
        facts = torch.zeros(standard.shape[0], MAX_PARAMETERS + 1 + len(BOUNDARIES), device=standard.device)
        facts[:, : standard.shape[1]] = standard
        facts[:, MAX_PARAMETERS] = head.log_dt
        for end in along(head.task.boundary, head.task.ndim):
            facts[:, MAX_PARAMETERS + 1 + BOUNDARIES.index(end)] += 1 / head.task.ndim
        return self.task_embedding[self.names.index(head.name)] + self.condition(facts)


def padded(forcing: Tensor | None, bundle: int) -> Tensor | None:
    """Forcing (batch, time, ...) with its last frame repeated: a call that predicts `bundle` frames may go
    beyond the last one.
    """
    if forcing is None or bundle == 1:
        return forcing
    return torch.cat([forcing, *[forcing[:, -1:]] * (bundle - 1)], 1)


def load_operator(
    directory: str | Path,
    device: torch.device | str = "cpu",
    solvers: Mapping[str, Callable[..., Any]] | None = None,
) -> Operator:
    """The trained operator of a stage directory (config.json, model.safetensors), in evaluation mode on
    `device`.

    solvers: task -> the user's function, for bases that call one.
    """
    operator = load_stage(
        directory, Operator, "operator stage", f"Run {make_target('operator')}.", "operator"
    )
    return operator.use_solvers(solvers or {}).to(device).eval()
