"""What the machine doctor asks of torch, its GPUs and two ranks, and a check's verdict."""

import os
import statistics
import subprocess
import sys
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

RANKS_S = 20.0  # for two ranks to meet and reduce
COMMAND_S = 5.0  # for nvidia-smi, and for a connection to W&B
REDUCED = 2**20  # float32 numbers in the timed all-reduce, 4 MiB
HERE = "torch is here"  # a line of `meet`


@dataclass(frozen=True)
class Verdict:
    """level: ok, note or ill; do: the next step, of an ill one."""

    level: str
    name: str
    what: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.name:<12} {self.what}" + (f". Next: {self.do}" if self.do else "")


def first(*rows: tuple) -> Verdict:
    """The verdict of the first row (whether it applies, level, name, what, do) that applies."""
    return next(Verdict(*row) for applies, *row in rows if applies)


def listed_gpus() -> int:
    """How many GPUs nvidia-smi lists; -1 if it does not answer."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except FileNotFoundError:
        return 0
    except subprocess.TimeoutExpired:
        return -1
    return done.stdout.count("GPU ") if done.returncode == 0 else 0


def check_gpus(asked: int, is_gpu_asked: bool) -> Iterator[Verdict]:
    """torch, its backends, and every GPU by a small product. asked: processes of the topology on this
    machine."""
    listed = listed_gpus()
    import torch
    import torch.distributed as dist

    cuda = torch.version.cuda
    built = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    yield Verdict("ok", "torch", f"{torch.__version__}, {built}")
    num, hidden = torch.cuda.device_count() if cuda else 0, os.environ.get("CUDA_VISIBLE_DEVICES")
    yield first(
        (
            listed > 0 and num == 0 and hidden is None,
            "ill",
            "gpus",
            f"nvidia-smi lists {listed}, torch sees none",
            f"install a driver for CUDA {cuda} or later (nvidia-smi shows what it supports)"
            if cuda
            else "install torch with CUDA (pip install torch==2.13.0)",
        ),
        (
            listed < 0,
            "ill",
            "gpus",
            f"nvidia-smi does not answer within {COMMAND_S:.0f} s",
            "reboot, or look for Xid in dmesg",
        ),
        (
            is_gpu_asked and num < asked,
            "ill",
            "gpus",
            f"the topology asks for {asked}, torch sees {num}"
            f"{f' (CUDA_VISIBLE_DEVICES={hidden})' if hidden is not None else ''}",
            "use TOPOLOGY=cpu2 here, or a file of accelerate_configs/ with as many as there are",
        ),
        (num == 0, "note", "gpus", "none; training uses the CPU"),
        (True, "ok", "gpus", f"torch sees {num}"),
    )
    for index in range(num):
        yield check_gpu(index)
    if num > 1:
        pairs = [(i, j) for i in range(num) for j in range(num) if i != j]
        cut = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        what = f"{len(pairs) - len(cut)} of {len(pairs)} pairs of GPUs"
        yield first(
            (
                cut,
                "note",
                "peer access",
                f"{what}; not {' to '.join(map(str, (cut or pairs)[0]))}: "
                "NCCL goes through host memory there, which is slower but right",
            ),
            (True, "ok", "peer access", what),
        )
    has_nccl = num and dist.is_available() and dist.is_nccl_available()
    nccl = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} on GPUs, " if has_nccl else ""
    yield first(
        (
            not dist.is_available() or not dist.is_gloo_available(),
            "ill",
            "backend",
            "this torch has no gloo",
            "install torch==2.13.0 from PyPI",
        ),
        (
            num and not has_nccl,
            "ill",
            "backend",
            "GPUs, but this torch has no NCCL",
            "install torch==2.13.0 from PyPI",
        ),
        (True, "ok", "backend", f"{nccl}gloo on the CPU"),
    )


def check_gpu(index: int) -> Verdict:
    import torch

    name = f"gpu {index}"
    try:
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        ones = torch.ones(256, 256, device=f"cuda:{index}", dtype=torch.bfloat16)
        is_right = float((ones @ ones).float().mean()) == 256.0
    except RuntimeError as error:
        return Verdict(
            "ill",
            name,
            " ".join(str(error).split())[:200],
            "end what uses it (nvidia-smi), or look for Xid in dmesg",
        )
    what = f"{properties.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return first(
        (
            not is_right,
            "ill",
            name,
            f"{what}; a product of ones is wrong",
            "take it out of use: CUDA_VISIBLE_DEVICES",
        ),
        (free < total / 2, "note", name, f"{what}; something else uses it"),
        (True, "ok", name, what),
    )


class Ranks:
    """Two ranks that meet, reduce and wait for each other, as training does; started at once, judged by
    `verdict`."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from ups.commands.devices import meet; meet()", backend],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
        )

    def verdict(self) -> Verdict:
        see = "see 'From a hang to its cause' in docs/distributed.md"
        try:
            lines = self.process.communicate(timeout=RANKS_S)[0].split("\n")
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            return first(
                (
                    HERE.encode() in (error.output or b""),
                    "ill",
                    self.backend,
                    f"2 ranks did not reduce within {RANKS_S:.0f} s",
                    f"unset what steers {self.backend} (line variables); {see}",
                ),
                (
                    True,
                    "ill",
                    self.backend,
                    f"no process imported torch within {RANKS_S:.0f} s",
                    "try again when the machine is less busy, or put the environment on a local disk",
                ),
            )
        what = f"2 ranks: {next(filter(str.strip, reversed(lines)), 'no word'):.200}"
        return first(
            (self.process.returncode, "ill", self.backend, what, see), (True, "ok", self.backend, what)
        )


def meet() -> None:
    """What the process of `Ranks` does: it forks two ranks, so that torch is imported once."""
    import torch
    import torch.distributed as dist

    print(HERE, flush=True)
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
            numbers[0].item()  # which waits for a GPU

        of_reduce, of_barrier = (
            statistics.fmean(timeit.repeat(action, number=1, repeat=6)[1:])
            for action in (reduce, dist.barrier)
        )  # the first warms up
        if not bool((numbers == 2.0**6).all()):  # six sums over two ranks
            raise RuntimeError("an all-reduce gave a wrong sum")
        print(
            f"all-reduce of {4 * REDUCED >> 20} MiB {of_reduce * 1e3:.1f} ms, "
            f"barrier {of_barrier * 1e3:.2f} ms",
            flush=True,
        )
        dist.destroy_process_group()

    torch.multiprocessing.start_processes(rank, nprocs=2, start_method="fork")
