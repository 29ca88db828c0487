"""CUDA graphs: the processor launches all that a function computes at once, not kernel by kernel.

Launching the thousand kernels of a small network's update takes longer than they run. A graph is recorded
once for each shape of the arguments, by torch's recipe (torch.cuda.graphs): the first calls run as usual, on
the stream of the recording, so that everything that is made once is there; arguments are copied into tensors
that stay where they are, as do weights, gradients and moments. A function that cannot be recorded, because it
waits for the device or memory is short, runs as usual, and one line says why.

Updates call a `Captured` (ups/training/update.py); networks are evaluated by `TaskNetwork.call`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ups.common.device import has_gradient

NUM_FIRST_CALLS = 3  # before the recording, as in torch's examples
MOST_OF_FREE_MEMORY = 0.5  # that a function may use and be recorded, because a graph keeps its memory
MOST_RECORDED = 256  # then the oldest is forgotten: forecasts may have any number of rows
THREAD = threading.local()  # is_recording: whether this thread is


@dataclass
class Recorded:
    """A function with its arguments: `compute` calls it, `run` does that or replays it."""

    arguments: list[Tensor]
    compute: Callable[[], Any]
    run: Callable[[], Any]
    num_calls: int = 0
    is_replayed: bool = False


class Captured:
    """Calls functions of tensors: captured(function, *arguments).

    The tensors of the arguments may be in tuples and in dataclasses that torch knows (`register_dataclass`).
    The rest and the function are hashable, and select the graph together with shapes and strides: results
    depend on these in the last bits, and a symmetry may transpose fields. The function computes from its
    arguments and from tensors that stay where they are. It copies nothing from main memory and looks at no
    value. The next call may overwrite what a call returns. say: prints a line.
    """

    def __init__(self, machine: "CudaGraphs", say: Callable[[str], object]) -> None:
        self.machine, self.say = machine, say
        self.recorded: dict[tuple, Recorded] = {}

    def __reduce__(self) -> tuple:  # copies and other processes record anew
        return Captured, (self.machine, self.say)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        leaves, tree = tree_flatten(arguments)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        key = (
            function,
            tree,
            *((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in leaves),
        )
        with self.machine.turn():
            if key not in self.recorded:
                fixed = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
                compute = partial(function, *tree_unflatten(fixed, tree))
                if len(self.recorded) == MOST_RECORDED:
                    del self.recorded[next(iter(self.recorded))]
                fixed = [x for x in fixed if isinstance(x, Tensor)]
                self.recorded[key] = Recorded(fixed, compute, compute)
            one = self.recorded[key]
            for kept, given in zip(one.arguments, tensors, strict=True):
                kept.copy_(given)
            if one.num_calls == NUM_FIRST_CALLS:
                self._record(one)
            one.num_calls += 1
            return one.run()

    def evaluate(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A call whose result stays; with a gradient the function itself is called."""
        if self.machine.is_watched() or has_gradient(arguments):
            return function(*arguments)
        with torch.no_grad(), self.machine.turn():
            return tree_map_only(Tensor, torch.clone, self(function, *arguments))

    def _record(self, one: Recorded) -> None:
        torch.clear_autocast_cache()  # the graph casts weights itself: those that were cast before may go
        THREAD.is_recording = True
        try:
            one.run, one.is_replayed = self.machine.record(one.compute), True
        except Exception as error:  # torch's and CUDA's; the call raises those of the function
            why = str(error).strip().split("\n")[0][:200]
            what = f"no CUDA graph of {one.compute.func.__name__}, which runs as without one"
            self.say(f"{what}: {type(error).__name__}: {why}")
        THREAD.is_recording = False
        torch.clear_autocast_cache()


def refuse_recording(why: str) -> None:
    """Raise RuntimeError in a recording: the function runs as usual then."""
    if getattr(THREAD, "is_recording", False):
        raise RuntimeError(why)


class CudaGraphs:
    """Records and replays on one GPU. All graphs, also of other threads, take turns in the same memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.memory, self.lock = torch.cuda.graph_pool_handle(), threading.RLock()

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Those of a device, which Accelerate gives without its number to a process alone."""
        return cls._of(torch.cuda.current_device() if device.index is None else device.index)

    @classmethod
    @cache
    def _of(cls, number: int) -> Self:
        return cls(torch.device("cuda", number))

    def __reduce__(self) -> tuple:
        return CudaGraphs.of, (self.device,)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, all runs on the stream of the recordings: autograd and cuBLAS keep things by stream."""
        before = torch.cuda.current_stream(self.device)
        with self.lock:
            self.stream.wait_stream(before)
            with torch.cuda.stream(self.stream):
                yield
            before.wait_stream(self.stream)

    def is_watched(self) -> bool:
        """Whether something counts the kernels of this thread, of which a replay shows none."""
        return torch._C._len_torch_dispatch_stack() > 0

    def record(self, compute: Callable[[], Any]) -> Callable[[], Any]:
        """A function that replays `compute` and returns its result, in the same tensors each time. Raises
        MemoryError if the memory may be needed elsewhere, and what torch raises."""
        self._require_memory()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: NCCL's thread may look at its events meanwhile
            with torch.cuda.graph(graph, self.memory, self.stream, capture_error_mode="thread_local"):
                result = compute()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # before 2.12 torch forgets it, and asserts later
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.memory)
            raise

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    def _require_memory(self) -> None:
        torch.cuda.empty_cache()
        used = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        limit = total * torch.cuda.get_per_process_memory_fraction(self.device)
        free = min(free, limit - torch.cuda.memory_reserved(self.device))
        if used > MOST_OF_FREE_MEMORY * free:
            raise MemoryError(f"it may use {used / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free")
