"""Muon for hidden matrices and AdamW for the rest as one optimizer; the learning-rate schedule; the weight
average; the plain loop of what is fitted outside a stage.

Muon (Jordan et al. 2024): momentum, then the update is replaced by its nearest orthogonal matrix through five
Newton-Schulz iterations in bfloat16; its size is scaled by 0.2 sqrt(max(rows, columns)) to match AdamW's (Liu
et al. 2025, arXiv 2502.16982). One class for both, because two optimizers break Accelerate's FSDP2 saving. If
a parameter is sharded (ups/training/sharding.py), its moments and average are plain tensors of this rank's
shard, and Muon gathers its update.
"""

import contextlib
import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ups.common.device import computed
from ups.config.schema import OptimConfig
from ups.training.sharding import as_sharded, full_tensor, is_sharded, local_shard, shard_like

# quintic of Jordan et al.; torch.optim.Muon's defaults, as are the next two
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
NORM_EPS = 1e-7
ADAM_EPS = 1e-8
MOMENTS = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}  # kind of group -> state
ALIGN = 16  # elements between starts of gradients in the flat buffer: 64 bytes, a cache line
UPDATE_RMS = 0.2  # of AdamW in practice (Liu et al. 2025, section 2.2)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximate orthogonal factor of each matrix of a stack (..., rows, columns).

    Singular values end in about [0.5, 1.5]. Computed in bfloat16 if the device has such products. Bitwise
    equal to torch.optim.Muon matrix by matrix, in half the time (8 matrices of 96 x 192, one CPU core).
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(computed("bf16", matrices.device))
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=NORM_EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


class MuonAdamW(torch.optim.Optimizer):
    """AdamW for groups of kind "adamw", Muon for groups of kind "muon" (matrices or stacks of matrices).

    Group keys: kind, base_lr, lr, weight_decay, and momentum (muon) or betas and fused (adamw; torch's
    load_state_dict reads fused to place the step counts). Weight decay is decoupled. The state exists before
    the first step, so that memory cannot run out in the middle of one.
    """

    local: Callable[[Iterable[Tensor]], list[Tensor]] = list  # the shards of tensors that this rank holds
    # without torch's decorator, which imports torch._dynamo: as long as all else of torch
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            group.setdefault("base_lr", group["lr"])
        super().__init__(groups, {})
        self.call: Callable[..., Any] = operator.call  # or a `Captured`
        device = self.param_groups[0]["params"][0].device
        kind = torch.float64 if device.type == "cpu" else torch.float32  # of a rate, in torch's fused AdamW
        self.rates = [torch.zeros((), dtype=kind, device=device) for _ in self.param_groups]
        for group in self.param_groups:
            for parameter in group["params"]:
                shard, state = local_shard(parameter), self.state[parameter]
                if group["kind"] == "adamw":
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state |= {name: torch.zeros_like(shard) for name in MOMENTS[group["kind"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state. Raises ValueError if it belongs to other parameters, which torch accepts."""
        now = self.state_dict()
        saved, wanted = (
            {f"{number}.{name}": x for number, entry in state["state"].items() for name, x in entry.items()}
            for state in (state_dict, now)
        )
        require_alike(saved, wanted, "optimizer's state")
        then, groups = ([one["params"] for one in state["param_groups"]] for state in (state_dict, now))
        if then != groups:
            raise ValueError(
                "the saved optimizer has other groups of parameters; expected the same. Resume with the "
                "configuration that wrote it."
            )
        super().load_state_dict(state_dict)

    def step(self, only: str | None = None) -> None:
        """One update from the gradients, which must be finite.

        only: a task. Private weights of other tasks (`parameter.task`) stay unchanged: their gradient is
        zero, but stale moments would still move them, with Muon as much as a gradient.
        """
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            rate.fill_(group["lr"])
        self.call(self._step, only)

    @torch.no_grad()
    def _step(self, only: str | None) -> None:
        """`step` with the rates on the device, all that depends on the step, so a GPU replays it."""
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            is_muon, together = group["kind"] == "muon", {}
            for p in group["params"]:
                if p.grad is not None and (only is None or getattr(p, "task", only) == only):
                    together.setdefault((p.shape, p.device) if is_muon else None, []).append(p)
            for parameters in together.values():
                (self._step_muon if is_muon else self._step_adamw)(group, parameters, rate)

    def _step_muon(self, group: dict[str, Any], members: list[Tensor], rate: Tensor) -> None:
        """For parameters of one shape."""
        shards, gradients = self.local(members), self.local(p.grad for p in members)
        buffers = [self.state[p]["momentum_buffer"] for p in members]
        torch._foreach_lerp_(buffers, gradients, 1.0 - group["momentum"])
        updates = torch._foreach_lerp(gradients, buffers, group["momentum"])  # Nesterov
        directions, size = self._orthogonal(members, updates), math.sqrt(max(members[0].shape[-2:]))
        alpha: Tensor | float = -(rate * UPDATE_RMS * size)
        if rate.device.type != "cpu":  # torch reads alpha in main memory
            directions, alpha = torch._foreach_mul(directions, alpha), 1.0
        torch._foreach_mul_(shards, 1.0 - rate * group["weight_decay"])
        torch._foreach_add_(shards, directions, alpha=alpha)

    def _orthogonal(self, members: list[Tensor], updates: Sequence[Tensor]) -> Sequence[Tensor]:
        """The orthogonal factors of updates of parameters of one shape."""
        stacked, shape = torch.stack(list(updates)), members[0].shape
        directions = orthogonalize(stacked.reshape(-1, *shape[-2:])).to(members[0].dtype)
        return directions.reshape(len(members), *shape).unbind()

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor], rate: Tensor) -> None:
        names = (*MOMENTS["adamw"], "step")
        averages, squares, steps = ([self.state[p][name] for p in parameters] for name in names)
        adamw(
            self.local(parameters),
            self.local(p.grad for p in parameters),
            averages,
            squares,
            [],
            steps,
            foreach=not group["fused"],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=rate,
            weight_decay=group["weight_decay"],
            eps=ADAM_EPS,
            maximize=False,
        )


class ShardedMuonAdamW(MuonAdamW):
    """`MuonAdamW` of a model in shards. Muon gathers its updates, as it needs whole matrices: collectives."""

    @staticmethod
    def local(tensors: Iterable[Tensor]) -> list[Tensor]:
        return [local_shard(tensor) for tensor in tensors]

    def _orthogonal(self, members: list[Tensor], updates: Sequence[Tensor]) -> Sequence[Tensor]:
        whole = [*map(full_tensor, members, updates)]
        return [*map(shard_like, members, super()._orthogonal(members, whole))]


def scale_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to `factor` times its base."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(for Muon, for AdamW): the trainable parameters with and without `parameter.is_hidden_matrix`.

    A flagged parameter is a matrix or a stack (num, rows, columns). Raises ValueError for another shape.
    """
    muon, adamw = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_hidden = getattr(parameter, "is_hidden_matrix", False)
            if is_hidden and parameter.ndim not in (2, 3):
                raise ValueError(NOT_A_MATRIX.format(name=name, p=parameter, shape=tuple(parameter.shape)))
            (muon if is_hidden else adamw).append(parameter)
    return muon, adamw


NOT_A_MATRIX = (
    "parameter {name} of shape {shape} and type {p.dtype} is flagged is_hidden_matrix; expected a real "
    "matrix or stack of matrices. Remove the flag: AdamW takes the parameter then."
)


def build_optimizer(model: nn.Module, optim: OptimConfig) -> MuonAdamW:
    """The optimizer of `model`. Vectors and scalars (biases, gains) do not decay; the rate of a parameter is
    multiplied by its `lr_factor`, if it has one.
    """
    muon, adamw = split_parameters(model)
    if not muon and not adamw:
        raise ValueError(
            "the model has no parameter that requires a gradient; expected at least one. Check the model."
        )
    groups: dict[tuple, dict[str, Any]] = {}
    for parameter in muon:
        factor = getattr(parameter, "lr_factor", 1.0)
        settings = {
            "kind": "muon",
            "params": [],
            "lr": factor * optim.muon_lr,
            "momentum": optim.muon_momentum,
            "weight_decay": optim.muon_weight_decay,
        }
        groups.setdefault(("muon", factor), settings)["params"].append(parameter)
    for parameter in adamw:
        factor, decays = getattr(parameter, "lr_factor", 1.0), parameter.ndim >= 2
        settings = {
            "kind": "adamw",
            "params": [],
            "lr": factor * optim.adamw_lr,
            "betas": tuple(optim.adamw_betas),
            "fused": True,
            "weight_decay": optim.adamw_weight_decay if decays else 0.0,
        }
        groups.setdefault((factor, decays), settings)["params"].append(parameter)
    optimizer = ShardedMuonAdamW if is_sharded((muon + adamw)[0]) else MuonAdamW
    return optimizer(list(groups.values()))


def aligned(length: int) -> int:
    """Size in the flat buffer of a gradient with `length` numbers."""
    return -(-length // ALIGN) * ALIGN


def place_gradients(
    model: nn.Module, device: torch.device, num_counts: int, is_by_task: bool = False
) -> tuple[Tensor, dict[str | None, int]]:
    """(flat, ends): a flat float32 buffer of zeros, into which the gradients of `model` are views from now
    on; flat[:ends[task]] holds all gradients of a step of that task, None: of any step.

    The first `num_counts` numbers are free. is_by_task: the private weights of tasks (`parameter.task`) use
    the same place behind the shared ones, since a step has one task. Else, and with one task, ends is {None:
    all}. Raises ValueError for a parameter that is not float32.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: dict[str | None, list[Tensor]] = {None: []}  # task -> private weights; None: shared
    for parameter in parameters:
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"a parameter has type {parameter.dtype}; expected float32. Build the model in float32: bf16 "
                f"belongs to train.precision, and a complex number is stored as two."
            )
        groups.setdefault(getattr(parameter, "task", None), []).append(parameter)
    if not is_by_task or len(groups) <= 2:
        groups = {None: parameters}
    first, places, ends = aligned(num_counts), [], {}
    for task, members in groups.items():  # the shared ones come first
        lengths = [aligned(local_shard(p).numel()) for p in members]
        starts = [*itertools.accumulate(lengths, initial=first)]
        places += zip(members, starts[:-1], strict=True)
        first, ends[task] = starts[-1] if task is None else first, starts[-1]
    ends[None] = max(ends.values())
    flat = torch.zeros(ends[None], device=device)
    for parameter, start in places:
        shard = local_shard(parameter)
        gradient = flat[start : start + shard.numel()].view(shard.shape)
        parameter.grad = as_sharded(parameter, gradient)
    return flat, ends


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Factor on the base rates at `step` (0-based): linear warm-up, constant, linear to zero at
    total_steps."""
    warmup = (step + 1) / optim.warmup_steps if optim.warmup_steps > 0 else 1.0
    num_decay = optim.decay_fraction * total_steps
    decay = (total_steps - step) / num_decay if num_decay > 0 else 1.0
    return max(0.0, min(1.0, warmup, decay))


def require_alike(saved: dict[str, Any], wanted: dict[str, Tensor], what: str) -> None:
    """Raise ValueError unless both have the same names with tensors of the same shapes."""
    wrong = sorted(saved.keys() ^ wanted.keys())
    wrong += [
        name
        for name, value in wanted.items()
        if name in saved and getattr(saved[name], "shape", None) != value.shape
    ]
    if wrong:
        raise ValueError(
            f"the saved {what} does not fit the model at {wrong[0]}; expected the same "
            f"parameters. Resume with the configuration that wrote it."
        )


class EMA:
    """Exponential moving average of the trainable parameters, in float32.

    After update k (0-based): average <- d average + (1 - d) parameter, d = min(decay, (1 + k) / (10 + k)).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.num_updates = decay, 0
        self.parameters = {name: local_shard(p) for name, p in model.named_parameters() if p.requires_grad}
        self.averages = {
            name: p.detach().clone().to(torch.promote_types(p.dtype, torch.float32))
            for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        averages = list(self.averages.values())
        current = [p.to(a.dtype) for p, a in zip(self.parameters.values(), averages, strict=True)]
        torch._foreach_lerp_(averages, current, 1.0 - decay)
        self.num_updates += 1

    @contextlib.contextmanager
    def swap(self) -> Iterator[None]:
        """Inside, the model holds the averages; afterwards its own weights again, bit for bit."""
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.write(self.averages)
        try:
            yield
        finally:
            self.write(kept)

    @torch.no_grad()
    def write(self, values: dict[str, Tensor]) -> None:
        """Copy `values` into the model's parameters."""
        torch._foreach_copy_([*self.parameters.values()], [values[name] for name in self.parameters])

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the averages in main memory."""
        return {name: average.detach().to("cpu", copy=True) for name, average in self.averages.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates, "averages": self.averages}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved average. Raises ValueError if it belongs to another model."""
        require_alike(state["averages"], self.averages, "average")
        torch._foreach_copy_([*self.averages.values()], [state["averages"][name] for name in self.averages])
        self.num_updates = int(state["num_updates"])


def fit(
    module: nn.Module,
    loss_of: Callable[[int], Tensor],
    steps: Iterable[int],
    optimizer: torch.optim.Optimizer,
    rate: Callable[[int], float],
    clip_norm: float,
    ema: EMA | None = None,
) -> int | None:
    """Take a gradient step on the scalar loss_of(step) for each of `steps`. Returns the first step whose
    gradient is not finite, where it stops, else None.

    For fits of seconds to minutes in one process, which start over after an interruption. Stages use
    `Run.update`, which agrees with the other ranks and can resume. optimizer: groups have base_lr; rate(step)
    is the factor on it. clip_norm: largest norm of the whole gradient. ema: average to update.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    stopped = None
    for step in steps:
        gradients = torch.autograd.grad(loss_of(step), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if not math.isfinite(float(nn.utils.clip_grad_norm_(parameters, clip_norm))):
            stopped = step
            break
        scale_lr(optimizer, rate(step))
        optimizer.step()
        if ema is not None:
            ema.update()
    module.zero_grad()
    return stopped


def fit_averaged(
    module: nn.Module, loss_of: Callable[[int], Tensor], steps: int, optim: OptimConfig
) -> tuple[int | None, EMA]:
    """`fit` for `steps` steps with the optimizer and rates of a configuration, and the average of the
    weights; the module keeps the last ones."""
    ema = EMA(module, optim.ema_decay)
    rate = functools.partial(learning_rate, total_steps=steps, optim=optim)
    stopped = fit(module, loss_of, range(steps), build_optimizer(module, optim), rate, optim.clip_norm, ema)
    return stopped, ema
