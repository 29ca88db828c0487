"""Check whether training can run on this machine: one line per check, with a next step for every failure.

    python -m ups.commands.machine_check --config configs/small.yaml [--topology accelerate_configs/2gpu.yaml]
    [section.key=value ..]

The exit status is 1 if a check failed.
"""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import yaml

from ups.common.place import ROOT
from ups.config.command import CONFIG_OPTIONS, read_command, run_script
from ups.config.load import load_config
from ups.config.schema import Config

MIN_FILES = 1024  # open files per process: every rank holds sockets to its peers, loader workers and caches
SHARED_BYTES = 64 * 2**20  # /dev/shm per GPU for NCCL's buffers; docker's default is this for all together
DISK_BYTES = 2**30  # of a disk, at least: checkpoints of two steps, a report
VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "MASTER_", "OMP_NUM_THREADS")
RANKS_S = 40.0  # limit for two ranks to connect and reduce; 20 are too few where four processes share a core
COMMAND_S = 5.0  # limit for nvidia-smi


class Failed(Exception):
    """What is wrong, and the next step."""


# ---------------------------------------------------------------- checks: what is found, in words, or Failed


def open_files() -> str:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= soft < MIN_FILES:
        fix = f"ulimit -n {MIN_FILES} (in docker: --ulimit nofile={MIN_FILES}; for good: limits.conf)"
        raise Failed(f"limit {soft} per process; expected at least {MIN_FILES}", fix)
    return f"limit {soft} per process"


def variables(environment: Mapping[str, str] = os.environ) -> str:
    """The variables that change how ranks meet: the usual cause of a start that hangs."""
    found = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(VARIABLES)]
    return ", ".join(found) or "none of NCCL, gloo or CUDA is set"


def shared_memory(num_gpus: int, folder: str = "/dev/shm") -> str:
    """Only NCCL uses it; latents are mapped from their files."""
    if not Path(folder).is_dir():
        return f"there is no {folder}; only NCCL would use it"
    free, needed = shutil.disk_usage(folder).free, num_gpus * SHARED_BYTES
    text = f"{free / 2**20:.0f} MiB free at {folder}"
    if num_gpus > 1 and free < needed:
        fix = f"docker run --shm-size=1g (or --ipc=host), or delete files in {folder}"
        raise Failed(f"{text}; NCCL between {num_gpus} GPUs may need {needed >> 20}", fix)
    return text


def disk(section: str, root: str) -> str:
    """The `root` of a section of the configuration. What is made there needs more; a start reserves that."""
    path, move = Path(root).absolute(), f"set {section}.root to a folder with room"
    folder = next(one for one in (path, *path.parents) if one.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise Failed(f"{folder} cannot be written", f"chmod it, or {move}")
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free at {folder} (make dry-run says how much is needed)"
    if free < DISK_BYTES:
        raise Failed(text, f"free some, or {move}")
    return text


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


def gpus(num_needed: int) -> str:
    """num_needed: GPUs of the topology on this machine."""
    listed = listed_gpus()
    import torch
    import torch.distributed as dist

    cuda, num = torch.version.cuda, torch.cuda.device_count()
    text = f"torch {torch.__version__} for {f'CUDA {cuda}' if cuda else 'CPUs'} sees {num or 'none'}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    if not dist.is_gloo_available() or (num and not dist.is_nccl_available()):
        raise Failed(f"{text}, without gloo or NCCL", "install the torch of requirements.txt from PyPI")
    if listed < 0:
        raise Failed(
            f"nvidia-smi does not answer within {COMMAND_S:.0f} s", "reboot, or look for Xid in dmesg"
        )
    if listed > 0 and num == 0 and visible is None:
        fix = f"install a driver for CUDA {cuda} or later" if cuda else "install torch from PyPI"
        raise Failed(f"nvidia-smi lists {listed}, and {text}", fix)
    if num < num_needed:
        fix = "use TOPOLOGY=cpu2 here, or a file of accelerate_configs/ with as many as there are"
        raise Failed(f"the topology needs {num_needed}, and {text}{limit}", fix)
    return text


def two_ranks(backend: str) -> str:
    """Start two processes that connect and reduce as training does."""
    docs = "see 'From a hang to its cause' in docs/distributed.md"
    code = f"from ups.commands.machine_check import reduce_on_two_ranks as run; run({backend!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            timeout=RANKS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        fix = f"unset the variables of {backend} (line variables), or try again on an idle machine; {docs}"
        raise Failed(f"2 ranks did not meet and reduce within {RANKS_S:.0f} s", fix) from None
    if done.returncode:
        last = next(filter(str.strip, reversed(done.stdout.split("\n"))), "no output")
        raise Failed(f"2 ranks: {last:.200}", docs)
    return "2 ranks reduce"


def reduce_on_two_ranks(backend: str) -> None:
    """Fork two ranks that sum a tensor. They are forked so that torch is imported once."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True)

    def rank(index: int) -> None:
        device = torch.device("cuda", index) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(device)
        peer, limit = dist.TCPStore("127.0.0.1", store.port), timedelta(seconds=RANKS_S)
        dist.init_process_group(backend, timeout=limit, rank=index, world_size=2, store=peer)
        numbers = torch.ones(2**20, device=device)
        dist.all_reduce(numbers)
        if not bool((numbers == 2).all()):
            raise RuntimeError("an all-reduce gave a wrong sum")
        dist.destroy_process_group()

    torch.multiprocessing.start_processes(rank, nprocs=2, start_method="fork")


# ---------------------------------------------------------------- all checks


def checks(config: Config, topology: Mapping) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield (name, check), the cheapest first."""
    needs_gpu = topology.get("distributed_type", "NO") != "NO" and "gpu_ids" not in topology
    num_needed = topology.get("num_processes", 1) // topology.get("num_machines", 1) if needs_gpu else 0
    listed = listed_gpus()
    yield "open files", open_files
    yield "variables", variables
    yield "shared memory", partial(shared_memory, max(0, listed))
    for section in ("data", "cache", "run"):
        yield f"disk {section}", partial(disk, section, getattr(config, section).root)
    yield "gloo", partial(two_ranks, "gloo")
    yield "gpus", partial(gpus, num_needed)
    if listed > 1:
        yield "nccl", partial(two_ranks, "nccl")


def run_checks(config: Config, topology: Mapping) -> int:
    """Print one line per check; return the exit status."""
    num = num_failed = 0
    for name, check in checks(config, topology):
        try:
            level, text = "OK", check()
        except Failed as error:
            level, text = "failed", "{}. Next: {}".format(*error.args)
        except Exception as error:  # a check that breaks is a failure, and the others still have to run
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            level, text = "failed", f"the check broke ({cause}). Next: fix that"
        print(f"{level:<6} {name:<13} {text}", flush=True)
        num, num_failed = num + 1, num_failed + (level == "failed")
    print(f"machine: {f'{num_failed} of {num} checks failed' if num_failed else 'OK'}", flush=True)
    return int(num_failed > 0)


def main() -> int:
    topology_option = {"--topology": {"help": "the file of accelerate_configs/ for training"}}
    args = read_command(__doc__, CONFIG_OPTIONS | topology_option)
    topology = yaml.safe_load(Path(args.topology).read_text(encoding="utf-8")) if args.topology else {}
    return run_checks(load_config(args.config, args.overrides), topology)


if __name__ == "__main__":
    run_script(main, "ups.commands.machine_check")
