"""Checks of torch, the GPUs and communication between two processes, for machine_check.py."""

import os
import statistics
import subprocess
import sys
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

RANKS_S = 20.0  # limit for two ranks to connect and reduce
COMMAND_S = 5.0  # limit for nvidia-smi
REDUCED = 2**20  # float32 numbers in the timed all-reduce, 4 MiB
IMPORTED = "torch is imported"  # printed by `reduce_on_two_ranks`
TORCH = "install torch==2.13.0 from PyPI"


@dataclass(frozen=True)
class CheckResult:
    """level: OK, note or failed; fix: the next step after a failure."""

    level: str
    name: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:<6} {self.name:<12} {self.text}" + (f". Next: {self.fix}" if self.fix else "")


def ok(name: str, text: str) -> CheckResult:
    return CheckResult("OK", name, text)


def note(name: str, text: str) -> CheckResult:
    return CheckResult("note", name, text)


def failed(name: str, text: str, fix: str) -> CheckResult:
    return CheckResult("failed", name, text, fix)


def listed_gpus() -> int:
    """Return the number of GPUs that nvidia-smi lists; -1 if it hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except OSError:  # there is none, or it cannot be run
        return 0
    except subprocess.TimeoutExpired:
        return -1
    return done.stdout.count("GPU ") if done.returncode == 0 else 0


def check_gpus(num_needed: int, needs_gpu: bool) -> Iterator[CheckResult]:
    """Check torch, its backends and every GPU. num_needed: processes of the topology on this machine."""
    listed = listed_gpus()
    import torch
    import torch.distributed as dist

    cuda = torch.version.cuda
    yield ok("torch", f"{torch.__version__}, {f'built for CUDA {cuda}' if cuda else 'built without CUDA'}")
    num = torch.cuda.device_count() if cuda else 0
    yield check_num_gpus(num, listed, num_needed if needs_gpu else 0)
    for index in range(num):
        yield check_gpu(index)
    has_nccl = num and dist.is_available() and dist.is_nccl_available()
    if not dist.is_available() or not dist.is_gloo_available():
        yield failed("backend", "this torch has no gloo", TORCH)
    elif num and not has_nccl:
        yield failed("backend", "GPUs, but this torch has no NCCL", TORCH)
    else:
        nccl = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} on GPUs, " if has_nccl else ""
        yield ok("backend", f"{nccl}gloo on the CPU")


def check_num_gpus(num: int, listed: int, num_needed: int) -> CheckResult:
    """num: GPUs that torch finds; listed: by nvidia-smi; num_needed: 0 if the topology uses none."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed > 0 and num == 0 and visible is None:
        cuda = torch.version.cuda
        driver = f"install a driver for CUDA {cuda} or later (nvidia-smi shows what it supports)"
        return failed("gpus", f"nvidia-smi lists {listed}, torch sees none", driver if cuda else TORCH)
    if listed < 0:
        return failed(
            "gpus",
            f"nvidia-smi does not answer within {COMMAND_S:.0f} s",
            "reboot, or look for Xid in dmesg",
        )
    if num < num_needed:
        limit = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        return failed(
            "gpus",
            f"the topology needs {num_needed}, torch sees {num}{limit}",
            "use TOPOLOGY=cpu2 here, or a file of accelerate_configs/ with as many as there are",
        )
    return ok("gpus", f"torch sees {num}") if num else note("gpus", "none; training uses the CPU")


def check_gpu(index: int) -> CheckResult:
    """Check memory and a matrix product on one GPU."""
    import torch

    name = f"gpu {index}"
    try:
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        ones = torch.ones(256, 256, device=f"cuda:{index}", dtype=torch.bfloat16)
        is_product_right = float((ones @ ones).float().mean()) == 256.0
    except RuntimeError as error:
        return failed(
            name,
            " ".join(str(error).split())[:200],
            "end what uses it (nvidia-smi), or look for Xid in dmesg",
        )
    text = f"{properties.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if not is_product_right:
        return failed(name, f"{text}; a product of ones is wrong", "exclude it by CUDA_VISIBLE_DEVICES")
    return note(name, f"{text}; something else uses it") if free < total / 2 else ok(name, text)


class TwoRanks:
    """Two processes that connect and reduce as training does. Started at once; `result` waits for them."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        code = "from ups.commands.devices import reduce_on_two_ranks as run; run()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, backend],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
        )

    def result(self) -> CheckResult:
        docs = "see 'From a hang to its cause' in docs/distributed.md"
        try:
            lines = self.process.communicate(timeout=RANKS_S)[0].split("\n")
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            if IMPORTED.encode() in (error.output or b""):
                return failed(
                    self.backend,
                    f"2 ranks did not reduce within {RANKS_S:.0f} s",
                    f"unset the variables of {self.backend} (line variables); {docs}",
                )
            return failed(
                self.backend,
                f"no process imported torch within {RANKS_S:.0f} s",
                "try again when the machine is less busy, or put the environment on a local disk",
            )
        text = f"2 ranks: {next(filter(str.strip, reversed(lines)), 'no output'):.200}"
        return failed(self.backend, text, docs) if self.process.returncode else ok(self.backend, text)


def reduce_on_two_ranks() -> None:
    """Fork two ranks that time an all-reduce and a barrier. Run by `TwoRanks` with the backend as argument.

    They are forked so that torch is imported once.
    """
    import torch
    import torch.distributed as dist

    print(IMPORTED, flush=True)
    backend, store = sys.argv[1], dist.TCPStore("127.0.0.1", 0, is_master=True)

    def rank(index: int) -> None:
        device = torch.device("cuda", index) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            timeout=timedelta(seconds=RANKS_S),
            rank=index,
            world_size=2,
            store=dist.TCPStore("127.0.0.1", store.port),
        )
        numbers = torch.ones(REDUCED, device=device)

        def reduce() -> None:
            dist.all_reduce(numbers)
            numbers[0].item()  # waits for a GPU

        reduce_s, barrier_s = (
            statistics.fmean(timeit.repeat(action, number=1, repeat=6)[1:])  # the first call warms up
            for action in (reduce, dist.barrier)
        )
        if not bool((numbers == 2.0**6).all()):  # six sums over two ranks
            raise RuntimeError("an all-reduce gave a wrong sum")
        print(
            f"all-reduce of {4 * REDUCED >> 20} MiB {reduce_s * 1e3:.1f} ms, "
            f"barrier {barrier_s * 1e3:.2f} ms",
            flush=True,
        )
        dist.destroy_process_group()

    torch.multiprocessing.start_processes(rank, nprocs=2, start_method="fork")
