"""Check whether training can run on this machine: one line per check, with a fix for every failure.

    python -m ups.commands.machine_check --config configs/small.yaml [--topology accelerate_configs/2gpu.yaml]
    [section.key=value ..]

Levels are OK, note and failed. The exit status is 1 if a check failed. The checks run in a process of their
own and are ended after LIMIT_S, because a broken driver can block `import torch` and a dead file server any
access to a disk.
"""

import argparse
import os
import platform
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import yaml

from ups.config.command import CONFIG_OPTIONS, read_command, run_script
from ups.config.load import load_config
from ups.config.schema import Config

LIMIT_S = 55.0  # for all checks together: less than a minute
MIN_FILES = 1024  # open files per process: every rank holds sockets to its peers, loader workers and caches
SHARED_BYTES = 64 * 2**20  # /dev/shm per GPU for NCCL's buffers; docker's default is this for all together
RUN_BYTES = 2**30  # a run's folder: checkpoints of two steps, report
VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "MASTER_", "OMP_NUM_THREADS")
BEGIN = "\x01"  # starts a line with the name of the next check
RANKS_S = 40.0  # limit for two ranks to connect and reduce; 20 are too few where four processes share a core
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


# ---------------------------------------------------------------- the machine, its disks and the tracker


def check_python() -> CheckResult:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine = f"{platform.system()} {platform.machine()}, {cores} cores"
    return ok("python", f"{platform.python_version()} on {machine}")


def check_interfaces(environment: Mapping[str, str], interfaces: list[str]) -> Iterator[CheckResult]:
    """Check the variables of NCCL and gloo: a network interface that does not exist hangs every start."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        is_exact = value.startswith("=") or variable.startswith("GLOO")
        missing = [
            name
            for name in value.lstrip("=").split(",")
            if name and not any(found == name if is_exact else found.startswith(name) for found in interfaces)
        ]
        if missing and not value.startswith("^"):
            yield failed(
                "network",
                f"{variable} is {value!r}, but there is no interface {missing[0]} (there are: "
                f"{', '.join(sorted(interfaces))})",
                f"unset {variable}, or name an existing one; see docs/distributed.md",
            )
    found = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(VARIABLES)]
    yield note("variables", ", ".join(found) if found else "no variable of NCCL, gloo or CUDA is set")


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
        return note("shared memory", f"there is no {folder}; only NCCL would use it")
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


def check_tracker(config: Config) -> CheckResult:
    """Check W&B's credentials if it is online. Training runs without them too."""
    tracker, name = config.tracker, "tracker"
    if tracker.kind != "wandb" or tracker.mode != "online":
        kind = f"wandb, {tracker.mode}" if tracker.kind == "wandb" else tracker.kind
        return ok(name, f"{kind}; metrics.jsonl is always written")
    import wandb

    try:
        has_credentials = wandb.login(prompt=False, verify=False)
    except Exception as error:  # a malformed key; wandb has no common class of errors for it
        return failed(
            name,
            f"wandb online, but the credentials are refused ({error})",
            "run `wandb login --relogin`, or set tracker.mode=offline",
        )
    if not has_credentials:
        return failed(
            name,
            "wandb online, but there are no credentials",
            "run `wandb login`, or set WANDB_API_KEY or tracker.mode=offline",
        )
    return ok(name, "wandb online, credentials found")


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


# ---------------------------------------------------------------- torch, GPUs, communication of two processes


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
            "gpus", f"nvidia-smi does not answer within {COMMAND_S:.0f} s", "reboot, or look for Xid in dmesg"
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
        code = "from ups.commands.machine_check import reduce_on_two_ranks as run; run()"
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


# ---------------------------------------------------------------- all checks


def checks(config: Config, topology: Mapping) -> Iterator[tuple[str, Callable[[], Iterable[CheckResult]]]]:
    """Yield (name, check), the cheapest first."""
    num_needed = topology.get("num_processes", 1) // topology.get("num_machines", 1)
    needs_gpu = topology.get("distributed_type", "NO") != "NO" and "gpu_ids" not in topology
    interfaces = [name for _, name in socket.if_nameindex()]
    data, cache, run = (Path(section.root) for section in (config.data, config.cache, config.run))
    ranks = TwoRanks("gloo")  # imports torch while the other checks run
    yield "python", lambda: [check_python(), check_limits()]
    yield "network", lambda: check_interfaces(os.environ, interfaces)
    yield "shared memory", lambda: [check_shared_memory(max(0, listed_gpus()))]
    yield "disk data", lambda: [check_disk("data", data, missing_data(config))]
    yield "disk cache", lambda: [check_disk("cache", cache, missing_caches(config))]
    yield "disk run", lambda: [check_disk("run", run, RUN_BYTES)]
    yield "tracker", lambda: [check_tracker(config)]
    yield "gloo", lambda: [ranks.result()]
    yield "gpus", lambda: check_gpus(num_needed, needs_gpu)
    if listed_gpus() > 1:
        yield "nccl", lambda: [TwoRanks("nccl").result()]


def run_checks(config: Config, topology: Mapping) -> int:
    """Print one line per result; return the exit status."""
    num = num_failed = 0
    for name, check in checks(config, topology):
        print(f"{BEGIN}{name}", flush=True)
        try:
            results = list(check())
        except Exception as error:  # a check that breaks is a failure, and the others still have to run
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            results = [failed(name, f"the check broke ({cause})", "fix that first")]
        print(*results, sep="\n", flush=True)
        num, num_failed = num + len(results), num_failed + sum(one.level == "failed" for one in results)
    print(f"machine: {f'{num_failed} of {num} checks failed' if num_failed else 'OK'}", flush=True)
    return int(num_failed > 0)


def supervise(arguments: list[str], limit_s: float) -> int:
    """Run the checks in another process, for at most `limit_s`; return the exit status."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ups.commands.machine_check", "--work", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    running = "the start of python"

    def read() -> None:
        nonlocal running
        for line in process.stdout:
            if line.startswith(BEGIN):
                running = line[1:].strip()
            else:
                print(line, end="", flush=True)
        process.wait()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        reader.join(limit_s)
        if not reader.is_alive():
            return process.returncode
        print(
            failed(
                running,
                f"this check did not end within {limit_s:g} s",
                "look at what it uses: a driver (dmesg), a file server (df), the network",
            )
        )
        print("machine: not all checks ended", flush=True)
        return 1
    finally:
        if process.poll() is None:  # not waited for: a process that hangs in the kernel cannot be killed
            os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    args = read_command(
        __doc__,
        CONFIG_OPTIONS
        | {
            "--topology": {"help": "the file of accelerate_configs/ for training"},
            "--limit": {"type": float, "default": LIMIT_S, "help": "seconds for all checks"},
            "--work": {"action": "store_true", "help": argparse.SUPPRESS},
        },
    )
    if not args.work:
        return supervise(sys.argv[1:], args.limit)
    topology = yaml.safe_load(Path(args.topology).read_text(encoding="utf-8")) if args.topology else {}
    return run_checks(load_config(args.config, args.overrides), topology)


if __name__ == "__main__":
    run_script(main, "ups.commands.machine_check")
