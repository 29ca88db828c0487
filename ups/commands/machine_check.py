"""Check whether training can run on this machine: one line per check, with a fix for every failure.

    python -m ups.commands.machine_check --config configs/small.yaml [--topology accelerate_configs/2gpu.yaml]
    [section.key=value ..]

Levels are OK, note and failed. The exit status is 1 if a check failed.
"""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import yaml

from ups.config.command import CONFIG_OPTIONS, read_command, run_script
from ups.config.load import load_config
from ups.config.schema import Config

MIN_FILES = 1024  # open files per process: every rank holds sockets to its peers, loader workers and caches
SHARED_BYTES = 64 * 2**20  # /dev/shm per GPU for NCCL's buffers; docker's default is this for all together
RUN_BYTES = 2**30  # a run's folder: checkpoints of two steps, report
VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "MASTER_", "OMP_NUM_THREADS")
RANKS_S = 40.0  # limit for two ranks to connect and reduce; 20 are too few where four processes share a core
COMMAND_S = 5.0  # limit for nvidia-smi
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


def failed(name: str, text: str, fix: str) -> CheckResult:
    return CheckResult("failed", name, text, fix)


def check_variables(environment: Mapping[str, str]) -> CheckResult:
    """List the variables that change how ranks meet: the usual cause of a start that hangs."""
    found = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(VARIABLES)]
    return CheckResult("note", "variables", ", ".join(found) or "none of NCCL, gloo or CUDA is set")


def check_limits() -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not 0 <= soft < MIN_FILES:
        return ok("open files", f"limit {soft} per process")
    docker = f"docker run --ulimit nofile={MIN_FILES}, or limits.conf"
    return failed(
        "open files",
        f"limit {soft} per process; expected at least {MIN_FILES}",
        docker if 0 <= hard < MIN_FILES else f"ulimit -n {MIN_FILES}",
    )


def check_shared_memory(num_gpus: int, folder: str = "/dev/shm") -> CheckResult:
    """Only NCCL uses shared memory; latents are mapped from their files."""
    if not Path(folder).is_dir():
        return CheckResult("note", "shared memory", f"there is no {folder}; only NCCL would use it")
    size, needed = shutil.disk_usage(folder), num_gpus * SHARED_BYTES
    text = f"{size.total / 2**20:.0f} MiB at {folder}, {size.free / 2**20:.0f} MiB free"
    if num_gpus > 1 and size.free < needed:
        return failed(
            "shared memory",
            f"{text}; NCCL between {num_gpus} GPUs may need {needed >> 20}",
            f"docker run --shm-size=1g (or --ipc=host), or delete files in {folder}",
        )
    return ok("shared memory", text)


def check_disk(section: str, root: Path, needed: int) -> CheckResult:
    """Check that `needed` bytes can be written below the `root` of a configuration section."""
    root, name = root.absolute(), f"disk {section}"
    folder = next(path for path in (root, *root.parents) if path.exists())
    state, move = os.statvfs(folder), f"set {section}.root to a folder with room"
    free = state.f_bavail * state.f_frsize
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return failed(name, f"{folder} cannot be written", f"chmod it, or {move}")
    text = f"{free / 2**30:.1f} GiB free at {folder}, about {needed / 2**30:.2f} to be written"
    if needed > free:
        return failed(name, text, f"free some, or {move}")
    if state.f_files and not state.f_favail:
        return failed(name, f"{folder} has no inodes left for new files", f"delete files, or {move}")
    return ok(name, text)


def missing_data(config: Config) -> int:
    """Return the bytes of the configured data files that do not exist yet."""
    from ups.data.pdebench import data_bytes

    return sum(
        data_bytes(name, entry.num_trajectories, entry.num_frames, entry.resolution)
        for name, entry in config.task.items()
        if name in config.data.tasks and not config.has_user_files(name)
        for value in entry.parameters or [None]
        if not config.data_path(name, value).exists()
    )


def missing_caches(config: Config) -> int:
    """Return the bytes of the configured caches that are missing or stale."""
    from ups.data.build_cache import is_up_to_date, plan

    return sum(
        plan(config, task)["bytes"] for task in config.data.tasks if not is_up_to_date(config, task)[0]
    )


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
    """Check torch, its backends and the number of GPUs. num_needed: those of the topology on this machine."""
    listed = listed_gpus()
    import torch
    import torch.distributed as dist

    cuda, num = torch.version.cuda, torch.cuda.device_count()
    build = f"{torch.__version__}, {f'built for CUDA {cuda}' if cuda else 'built without CUDA'}"
    if not dist.is_gloo_available() or (num and not dist.is_nccl_available()):
        yield failed("torch", f"{build}, without {'NCCL' if dist.is_gloo_available() else 'gloo'}", TORCH)
    else:
        yield ok("torch", build)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed < 0:
        fix = "reboot, or look for Xid in dmesg"
        yield failed("gpus", f"nvidia-smi does not answer within {COMMAND_S:.0f} s", fix)
    elif listed > 0 and num == 0 and visible is None:
        driver = f"install a driver for CUDA {cuda} or later (nvidia-smi shows what it supports)"
        yield failed("gpus", f"nvidia-smi lists {listed}, torch sees none", driver if cuda else TORCH)
    elif needs_gpu and num < num_needed:
        limit = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        fix = "use TOPOLOGY=cpu2 here, or a file of accelerate_configs/ with as many as there are"
        yield failed("gpus", f"the topology needs {num_needed}, torch sees {num}{limit}", fix)
    else:
        yield ok("gpus", f"torch sees {num}" if num else "none; training uses the CPU")


def check_two_ranks(backend: str) -> CheckResult:
    """Start two processes that connect and reduce as training does."""
    docs = "see 'From a hang to its cause' in docs/distributed.md"
    code = f"from ups.commands.machine_check import reduce_on_two_ranks as run; run({backend!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
            timeout=RANKS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        fix = f"unset the variables of {backend} (line variables), or try again on an idle machine; {docs}"
        return failed(backend, f"2 ranks did not meet and reduce within {RANKS_S:.0f} s", fix)
    last = next(filter(str.strip, reversed(done.stdout.split("\n"))), "no output")
    return (
        failed(backend, f"2 ranks: {last:.200}", docs) if done.returncode else ok(backend, "2 ranks reduce")
    )


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


def checks(config: Config, topology: Mapping) -> Iterator[tuple[str, Callable[[], Iterable[CheckResult]]]]:
    """Yield (name, check), the cheapest first."""
    num_needed = topology.get("num_processes", 1) // topology.get("num_machines", 1)
    needs_gpu = topology.get("distributed_type", "NO") != "NO" and "gpu_ids" not in topology
    data, cache, run = (Path(section.root) for section in (config.data, config.cache, config.run))
    yield "open files", lambda: [check_limits()]
    yield "variables", lambda: [check_variables(os.environ)]
    yield "shared memory", lambda: [check_shared_memory(max(0, listed_gpus()))]
    yield "disk data", lambda: [check_disk("data", data, missing_data(config))]
    yield "disk cache", lambda: [check_disk("cache", cache, missing_caches(config))]
    yield "disk run", lambda: [check_disk("run", run, RUN_BYTES)]
    yield "gloo", lambda: [check_two_ranks("gloo")]
    yield "gpus", lambda: check_gpus(num_needed, needs_gpu)
    if listed_gpus() > 1:
        yield "nccl", lambda: [check_two_ranks("nccl")]


def run_checks(config: Config, topology: Mapping) -> int:
    """Print one line per result; return the exit status."""
    num = num_failed = 0
    for name, check in checks(config, topology):
        try:
            results = list(check())
        except Exception as error:  # a check that breaks is a failure, and the others still have to run
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            results = [failed(name, f"the check broke ({cause})", "fix that first")]
        print(*results, sep="\n", flush=True)
        num, num_failed = num + len(results), num_failed + sum(one.level == "failed" for one in results)
    print(f"machine: {f'{num_failed} of {num} checks failed' if num_failed else 'OK'}", flush=True)
    return int(num_failed > 0)


def main() -> int:
    topology_option = {"--topology": {"help": "the file of accelerate_configs/ for training"}}
    args = read_command(__doc__, CONFIG_OPTIONS | topology_option)
    topology = yaml.safe_load(Path(args.topology).read_text(encoding="utf-8")) if args.topology else {}
    return run_checks(load_config(args.config, args.overrides), topology)


if __name__ == "__main__":
    run_script(main, "ups.commands.machine_check")
