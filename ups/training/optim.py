"""Muon for hidden matrices and AdamW for the rest as one optimizer; the learning-rate schedule; the weight
average; the plain loop of what is fitted outside a stage.

Muon (Jordan et al. 2024): momentum, then the update is replaced by its nearest orthogonal matrix through five
Newton-Schulz iterations in bfloat16; its size is scaled by 0.2 sqrt(max(rows, columns)) to match AdamW's (Liu
et al. 2025, arXiv 2502.16982). One class for both, because two optimizers break Accelerate's FSDP2 saving. Of
a parameter that is shared out over the ranks (ups/training/strategies.py), moments and averages are this
rank's part, as plain tensors; only Muon gathers, its updates.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ups.common.precision import computed
from ups.config import OptimConfig
from ups.training.strategies import like, local, part, whole

# quintic of Jordan et al.; torch.optim.Muon's defaults, as are the next two
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
NORM_EPS = 1e-7
ADAM_EPS = 1e-8
MOMENTS = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}  # of the state, by kind
ALIGN = 16  # elements between starts of gradients in the flat buffer: 64 bytes, a cache line
UPDATE_RMS = 0.2  # of AdamW in practice (Liu et al. 2025, section 2.2)


def orthogonalize(matrices: Tensor) -> Tensor:
    """The orthogonal factor of each matrix of a stack (..., rows, columns), approximately, in bfloat16 where
    the device has such products.

    Singular values end in about [0.5, 1.5]. A stack is bitwise what torch.optim.Muon gives matrix by matrix,
    in half the time at 8 matrices of 96 x 192 on one CPU core.
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
    load_state_dict reads fused to place the step counts). Weight decay is decoupled. State is allocated by
    `allocate`, before the first step, so that a step does not meet a full device half-way.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            group.setdefault("base_lr", group["lr"])
        super().__init__(groups, {})

    @torch.no_grad()
    def allocate(self) -> None:
        """Create every state tensor that does not exist yet."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not (state := self.state[parameter]):
                    if group["kind"] == "adamw":
                        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    state |= {name: torch.zeros_like(local(parameter)) for name in MOMENTS[group["kind"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state.

        Raises ValueError if it belongs to other parameters; torch would take it.
        """
        self.allocate()
        (saved, flat), (groups, wanted) = (
            (
                [group["params"] for group in state["param_groups"]],
                {
                    f"{index}.{name}": value
                    for index, entry in state["state"].items()
                    for name, value in entry.items()
                },
            )
            for state in (state_dict, self.state_dict())
        )
        require_alike(flat, wanted, "optimizer's state")
        if saved != groups:
            raise ValueError(
                "the saved optimizer has other groups of parameters; expected the same. Resume "
                "with the configuration that wrote it."
            )
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: None = None, only: str | None = None) -> None:
        """One update from the gradients. They must be finite: a NaN would stay in the weights.

        only: a task; what is another task's own (`parameter.task`) stays as it is. Its gradient is zero then,
        and its moments, stale, would move it all the same: Muon by as much as a gradient.
        """
        assert closure is None
        self.allocate()
        for group in self.param_groups:
            parameters = [
                p
                for p in group["params"]
                if p.grad is not None and (only is None or getattr(p, "task", only) == only)
            ]
            if group["kind"] == "muon":
                self._step_muon(group, parameters)
            elif parameters:
                self._step_adamw(group, parameters)

    def _step_muon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        by_shape: dict[tuple, list[Tensor]] = {}
        for parameter in parameters:
            by_shape.setdefault((parameter.shape, parameter.device), []).append(parameter)
        for (shape, _), members in by_shape.items():
            own, gradients = [local(p) for p in members], [local(p.grad) for p in members]
            buffers = [self.state[p]["momentum_buffer"] for p in members]
            torch._foreach_lerp_(buffers, gradients, 1.0 - group["momentum"])
            updates = torch._foreach_lerp(gradients, buffers, group["momentum"])  # Nesterov
            stacked = torch.stack([whole(p, update) for p, update in zip(members, updates, strict=True)])
            directions = orthogonalize(stacked.reshape(-1, *shape[-2:])).to(members[0].dtype)
            directions = directions.reshape(len(members), *shape)
            directions = [part(p, direction) for p, direction in zip(members, directions, strict=True)]
            torch._foreach_mul_(own, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(own, directions, alpha=-group["lr"] * UPDATE_RMS * math.sqrt(max(shape[-2:])))

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        adamw(
            [local(p) for p in parameters],
            [local(p.grad) for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=not group["fused"],
            fused=group["fused"],
            has_complex=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=ADAM_EPS,
            maximize=False,
        )


def scale_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to `factor` times its base."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(for Muon, for AdamW): a parameter goes to Muon iff the model's builder set `parameter.is_hidden_matrix
    = True`.

    A flagged parameter is a matrix or a stack of matrices (num, rows, columns). Raises ValueError for any
    other flagged.
    """
    muon, rest = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_hidden = getattr(parameter, "is_hidden_matrix", False)
        if is_hidden and parameter.ndim not in (2, 3):
            raise ValueError(
                f"parameter {name} of shape {tuple(parameter.shape)} and type {parameter.dtype} is flagged "
                f"is_hidden_matrix; expected a real matrix or stack of matrices. Remove the flag: AdamW "
                f"takes the parameter then."
            )
        (muon if is_hidden else rest).append(parameter)
    return muon, rest


def build_optimizer(model: nn.Module, optim: OptimConfig) -> MuonAdamW:
    """The optimizer of `model`; vectors and scalars (biases, gains) do not decay.

    A parameter whose builder set `parameter.lr_factor` learns at that multiple of the rate.
    """
    muon, rest = split_parameters(model)
    if not muon and not rest:
        raise ValueError(
            "the model has no parameter that requires a gradient; expected at least one. Check the model."
        )
    groups: dict[tuple, dict[str, Any]] = {}
    for parameter in muon:
        factor = getattr(parameter, "lr_factor", 1.0)
        group = groups.setdefault(
            ("muon", factor),
            {
                "kind": "muon",
                "params": [],
                "lr": factor * optim.muon_lr,
                "momentum": optim.muon_momentum,
                "weight_decay": optim.muon_weight_decay,
            },
        )
        group["params"].append(parameter)
    for parameter in rest:
        factor, decays = getattr(parameter, "lr_factor", 1.0), parameter.ndim >= 2
        group = groups.setdefault(
            (factor, decays),
            {
                "kind": "adamw",
                "params": [],
                "lr": factor * optim.adamw_lr,
                "betas": tuple(optim.adamw_betas),
                "fused": True,
                "weight_decay": optim.adamw_weight_decay if decays else 0.0,
            },
        )
        group["params"].append(parameter)
    return MuonAdamW(list(groups.values()))


def aligned(length: int) -> int:
    """Numbers of the flat buffer that `length` of them take."""
    return -(-length // ALIGN) * ALIGN


def place_gradients(
    model: nn.Module, device: torch.device, num_counts: int, is_by_task: bool = False
) -> tuple[Tensor, dict[str | None, int]]:
    """One flat float32 buffer of zeros whose views the gradients of `model` are from now on, and up to where
    a step needs it; its first `num_counts` are free.

    is_by_task: where there are several tasks, what is one's own (`parameter.task`) has its gradients where
    another's has, behind those of what is shared, for a step has those of one task alone: {task: up to where
    they go, None: all}. Else {None: all}. Raises ValueError for a parameter that is not float32.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: dict[str | None, list[Tensor]] = {None: []}  # by task; None: shared
    for parameter in parameters:
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"a parameter has type {parameter.dtype}; expected float32. Build the model in "
                f"float32: bf16 belongs to train.precision, and a complex number is two."
            )
        groups.setdefault(getattr(parameter, "task", None), []).append(parameter)
    if not is_by_task or len(groups) <= 2:
        groups = {None: parameters}
    first, places, ends = aligned(num_counts), [], {}
    for task, members in groups.items():  # what is shared comes first
        lengths = [aligned(local(p).numel()) for p in members]
        starts = [*itertools.accumulate(lengths, initial=first)]
        places += zip(members, starts[:-1], strict=True)
        first, ends[task] = starts[-1] if task is None else first, starts[-1]
    ends[None] = max(ends.values())
    flat = torch.zeros(ends[None], device=device)
    for parameter, start in places:
        piece = flat[start : start + local(parameter).numel()].view(local(parameter).shape)
        parameter.grad = like(parameter, piece)
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
        self.parameters = {name: local(p) for name, p in model.named_parameters() if p.requires_grad}
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
        """Take over a saved average. Raises ValueError if it belongs to another model."""
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
    """Take a gradient step on the scalar loss_of(step) for each of `steps`; None when all were taken.

    For what is fitted in one process, in seconds to minutes, and again when it was interrupted. A stage's
    steps go through `Run.update` instead, which agrees with the other ranks and can resume.

    optimizer: its groups have base_lr, and a step's learning rate is rate(step) times that. Gradients are
    clipped to `clip_norm` in all; `ema` follows the weights. Stops before the first step whose gradient is
    not finite and returns it.
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
