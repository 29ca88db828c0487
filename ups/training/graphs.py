"""CUDA graphs: the processor launches all that a function computes at once, not kernel by kernel.

Launching the thousand kernels of a small network's update takes longer than they run. A graph is recorded
once for each shape of the arguments, by torch's recipe (torch.cuda.graphs): the first calls run as usual, on
the stream of the recording, so that everything that is made once is there; arguments are copied into tensors
that stay where they are, as do weights, gradients and moments. A function that cannot be recorded, because it
waits for the device or memory is short, runs as usual, and one line says why.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

NUM_FIRST_CALLS = 3  # before the recording, as in torch's examples
MOST_OF_FREE_MEMORY = 0.5  # that a function may use and be recorded, because a graph keeps its memory


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

    Function and arguments that are not tensors are hashable, and select the graph together with the shapes
    and strides: results depend on these in the last bits, and a symmetry may transpose fields. The function
    computes from its arguments and from tensors that stay where they are. It copies nothing from main memory
    and looks at no value. The next call may overwrite what a call returns. say: prints a line.
    """

    def __init__(self, machine: "CudaGraphs", say: Callable[[str], object]) -> None:
        self.machine, self.say = machine, say
        self.recorded: dict[tuple, Recorded] = {}

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        key = function, *((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in arguments)
        if key not in self.recorded:
            fixed = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
            compute, tensors = partial(function, *fixed), [x for x in fixed if isinstance(x, Tensor)]
            self.recorded[key] = Recorded(tensors, compute, partial(self.machine.call, compute))
        one = self.recorded[key]
        for kept, given in zip(one.arguments, (x for x in arguments if isinstance(x, Tensor)), strict=True):
            kept.copy_(given)
        if one.num_calls == NUM_FIRST_CALLS:
            self._record(one)
        one.num_calls += 1
        return one.run()

    def _record(self, one: Recorded) -> None:
        try:
            one.run, one.is_replayed = self.machine.record(one.compute), True
        except Exception as error:  # torch's and CUDA's; the call raises those of the function
            why = str(error).strip().split("\n")[0][:200]
            what = f"no CUDA graph of {one.compute.func.__name__}, which runs as without one"
            self.say(f"{what}: {type(error).__name__}: {why}")


class CudaGraphs:
    """Records and replays on one GPU. All graphs take turns in the same memory."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.memory = torch.cuda.graph_pool_handle()

    def call(self, compute: Callable[[], Any]) -> Any:
        """Callable[[], Any] on the stream of the recordings: autograd and cuBLAS keep things by stream."""
        before = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream):
            result = compute()
        before.wait_stream(self.stream)
        return result

    def record(self, compute: Callable[[], Any]) -> Callable[[], Any]:
        """A function that replays `compute` and returns its result, in the same tensors each time. Raises
        MemoryError if the memory may be needed elsewhere, and what torch raises."""
        self._require_memory()
        graph = torch.cuda.CUDAGraph()
        try:
            # the outer one restores the caller's stream also where the recording fails. thread_local: NCCL's
            # thread may look at its events meanwhile
            with (
                torch.cuda.stream(self.stream),
                torch.cuda.graph(graph, self.memory, self.stream, capture_error_mode="thread_local"),
            ):
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
