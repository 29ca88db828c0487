"""Autoregressive rollouts of a one-call model, their frames without Python, and the noise of ensembles.

Half of the time of a frame of one start is spent between its kernels, which are small and many (68 to 4,500).
A graph of torch's calls the same kernels in the same order without Python: its results are the same bits, in
0.4 to 0.6 of the time (docs/lab/log.md).
"""

import copy
import hashlib
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import call

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ups.common.device import plain_torch
from ups.common.progress import beat, note
from ups.models.bases.base import ParameterBatch
from ups_discovery.seeds import generator

NUM_FIRST_CALLS = 100  # before a graph is made: it costs 50 to 230 times what it saves in a call
MOST_S = 10.0  # that these may take; longer steps have large kernels, or so many that a graph takes minutes
NUM_CHECKS = 3  # runs of a new graph that must return what the step did; torch optimizes it in the first two


def rollout(step: Callable[[Tensor, int], Tensor], context: Tensor, num_frames: int, history: int) -> Tensor:
    """The `num_frames` frames (batch, num_frames, ...) after `context` (batch, time, ...).

    step: maps the last `history` frames (batch, history, ...), and the number of frames that are done, to the
    next one or more (batch, frames, ...). If one call is enough (steady tasks), its output may have another
    shape. Raises ValueError if the context is shorter than the history, or num_frames is below 1.
    """
    if num_frames < 1:
        raise ValueError(
            f"a rollout of {num_frames} frames is not possible; expected at least 1. Lower "
            f"evaluate.context_frames or keep more frames."
        )
    if context.shape[1] < history:
        raise ValueError(
            f"the context has {context.shape[1]} frames; expected at least the history of "
            f"{history}. Raise evaluate.context_frames or lower task.TASK.history."
        )
    frames, done = [], 0
    window = context[:, -history:]
    while done < num_frames:
        beat()
        new = step(window, done)
        frames.append(new)
        done += new.shape[1]
        if done < num_frames:
            window = torch.cat([window, new], 1)[:, -history:]
    return torch.cat(frames, 1)


def in_segments(
    step: Callable[[Tensor, int], Tensor], num_frames: int, history: int
) -> Callable[[Tensor, int], Tensor]:
    """The steps of a `rollout` with a gradient, as many in a call as there are calls: of n steps the numbers
    of 2 sqrt(n) are kept at a time, as those inside of a call are computed again for the gradient.

    torch.func and derivatives in forward mode take the steps themselves, as torch cannot repeat theirs.
    """
    size = math.isqrt(num_frames)

    @plain_torch(keeps_gradient=True)  # it is called again in the caller's state
    def segment(window: Tensor, done: int) -> Tensor:
        count = min(size, num_frames - done)
        return rollout(lambda u, more: step(u, done + more), window, count, history)

    def again(window: Tensor, done: int) -> Tensor:
        return checkpoint(segment, window, done, use_reentrant=False, preserve_rng_state=False)

    is_repeatable = size > 1 and not torch._C._are_functorch_transforms_active()
    return again if is_repeatable else step


class Traces:
    """The graphs of an operator, by head, weight of the network, shapes and state of its tensors. There are
    none while it is trained, as its bounds and decisions may change then."""

    def __init__(self) -> None:
        self.calls: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0])  # number, processor seconds
        self.graphs: dict[tuple, Callable[..., Tensor] | None] = {}
        self.tensors: list[Tensor] = []  # of the operator; to list them takes as long as a frame

    def __reduce__(self) -> tuple:
        return Traces, ()  # a copy has none

    def steps(
        self, operator: nn.Module, head: nn.Module, parameters: ParameterBatch, component: str | float
    ) -> Callable[[Tensor, int], Tensor]:
        """The steps of a `rollout`: the first result of `Operator.step` for this head and component."""
        weight = head.facts.weight(component)
        names = tuple(name for name, value in vars(parameters).items() if value is not None)

        def plain(u: Tensor, num_done: int) -> Tensor:
            batch = parameters.later(num_done, 2)
            return operator.call(type(operator).step, operator, u, head.name, batch, weight)[0]

        is_captured = operator.call is not call or head.scale.device.type != "cpu"
        if operator.training or is_captured or head.base.is_user_solver:  # a user's function may do anything
            return plain

        # a graph holds what it has computed of tensors alone: their versions count changes in place
        self.tensors = self.tensors or [*operator.parameters(), *operator.buffers()]
        state = sum(one._version for one in self.tensors)

        def step(u: Tensor, num_done: int) -> Tensor:
            batch = parameters.later(num_done, 2)
            given = u, *(getattr(batch, name) for name in names)
            shapes = tuple((one.shape, one.dtype) for one in given)
            key = head, weight, operator.precision, state, names, shapes
            if (graph := self.graphs.get(key)) is not None:
                with torch.inference_mode():
                    return graph(*given)
            start = time.thread_time()
            u_next = operator.step(u, head.name, batch, component)[0]
            calls = self.calls[key]
            calls[:] = calls[0] + 1, calls[1] + time.thread_time() - start
            if calls[0] == NUM_FIRST_CALLS and calls[1] <= MOST_S:

                def first(operator: nn.Module, u: Tensor, *values: Tensor) -> Tensor:
                    batch = ParameterBatch(**dict(zip(names, values, strict=True)))
                    return operator.step(u, head.name, batch, component)[0]

                # other heads may hold functions of the user that cannot be copied
                others = {id(other): other for other in operator.heads.values() if other is not head}
                self.graphs[key] = traced(first, operator, others, given, u_next)
            return u_next

        return step


def traced(
    function: Callable[..., Tensor],
    model: nn.Module,
    shared: dict[int, nn.Module],
    arguments: tuple[Tensor, ...],
    expected: Tensor,
    is_same: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> Callable[..., Tensor] | None:
    """The graph of function(model, *arguments); None, and a note that says why, if a branch depends on
    numbers, or if it does not return what is expected. shared: parts of the model that are not copied, by
    id."""
    try:
        # copies with the same tensors, but without their gradient, as a graph holds constants
        tensors = {id(one): one.detach() for one in (*model.parameters(), *model.buffers())}
        fixed, numberless = (copy.deepcopy(model, tensors | shared) for _ in range(2))
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:  # where a branch on numbers is an error
            function(numberless, *map(fake.from_tensor, arguments))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of branches on shapes, and of future versions of torch
            graph = torch.jit.trace(lambda *given: function(fixed, *given), arguments, check_trace=False)
        for fold in ("peephole", "constant_propagation", "dce"):  # what depends on shapes alone
            getattr(torch._C, f"_jit_pass_{fold}")(graph.graph)
        is_right = all(is_same(graph(*arguments), expected) for _ in range(NUM_CHECKS))
    except Exception as error:  # torch's; the function itself has just run
        note(f"frames are computed step by step: {type(error).__name__}: {str(error).strip()[:200]}")
        return None
    return graph if is_right else None


def member_noise(
    shape: Sequence[int],
    seed: int,
    names: Sequence[int | str],
    lead: int,
    num_members: int,
    key: str = "noise",
) -> Tensor:
    """Standard normal noise (len(names), num_members, *shape), a function of (seed, key, name, lead) alone
    and not of the batch.

    Independent over names, members, leads and keys. names: of the trajectories, such as their row numbers.
    """
    return torch.stack(
        [torch.randn(num_members, *shape, generator=generator(seed, key, name, lead)) for name in names]
    )


def name_starts(rows: Sequence[int], u: Tensor) -> list[str]:
    """Names for `member_noise` of forecasts that start from u (batch, ...): row number and digest of the
    float32 state.

    A forecast that continues from its own last frame gets new noise; a repeated forecast gets the same noise.
    """
    states = u.detach().to("cpu", torch.float32) + 0.0  # turns -0.0 into 0.0
    states = torch.where(states.isnan(), 0.0, states).contiguous()  # masked cells
    return [
        f"{int(row)} {hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()}"
        for row, state in zip(rows, states, strict=True)
    ]


def in_blocks(function: Callable[[Tensor], Tensor], count: int, size: int) -> Tensor:
    """function(index) for the indices 0 .. count - 1, (count, ...), in blocks of exactly `size`; the last one
    is padded.

    Kernels round differently for different shapes, and in bfloat16 a last bit becomes 1e-3. In blocks of one
    shape, no row depends on the number of others.
    """
    blocks = [torch.arange(first, first + size).clamp_max(count - 1) for first in range(0, count, size)]
    return torch.cat([function(block) for block in blocks])[:count]
