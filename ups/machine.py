"""The machine doctor: whether training can run here, one line per check, and what to do about every failure.

    python -m ups.machine --config configs/small.yaml [--topology accelerate_configs/2gpu.yaml]
    [section.key=value ..]

Levels: ok; note (nothing to do); ill (with the next step). Exit status 1 if any check is ill. The checks run
in a process of their own, in the order of their cost, and whatever one of them does the whole ends within
LIMIT_S: a broken driver can block `import torch`, and a dead file server any look at a disk.
"""

from __future__ import annotations

import argparse
import os
import platform
import queue
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from ups.config import Config, load_config

LIMIT_S = 55.0           # for everything; the caller was promised a minute
RANKS_S = 20.0           # for two ranks to meet and reduce
COMMAND_S = 5.0          # for nvidia-smi, and for a connection to W&B
# open files per process: every rank holds sockets to its peers, loader workers and caches
MIN_FILES = 1024
# of /dev/shm per GPU: NCCL's buffers between two of them; docker's default is this for all together
SHARED_BYTES = 64 * 2**20
RUN_BYTES = 2**30        # a run's folder: checkpoints of two steps, report
REDUCED = 2**20          # float32 numbers in the timed all-reduce, 4 MiB
VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "MASTER_", "OMP_NUM_THREADS")
BEGIN = "\x01"           # starts a line that names the check which begins


@dataclass(frozen=True)
class Verdict:
    """level: ok, note or ill; do: the next step, of an ill one."""

    level: str
    name: str
    what: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.name:<12} {self.what}" + (f". Next: {self.do}" if self.do else "")


def check_python() -> Verdict:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Verdict("ok", "python", f"{platform.python_version()} on {platform.system()} "
                                   f"{platform.machine()}, {cores} cores")


def check_port() -> Verdict:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Verdict("ok", "port", f"a free one is given on request (now {probe.getsockname()[1]})")
    except OSError as error:
        return Verdict("ill", "port", f"none can be bound on 127.0.0.1 ({error})",
                       "bring up the loopback interface (ip link set lo up), or allow sockets in the "
                       "container")


def check_interfaces(environment: dict[str, str], present: Iterable[str]) -> Iterator[Verdict]:
    """Variables that steer communication. One that names a network interface which is not there hangs every
    start."""
    present = sorted(present)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        asked = environment.get(name, "")
        is_exact = asked.startswith("=") or name.startswith("GLOO")
        names = [part for part in asked.lstrip("=").split(",") if part]
        missing = [part for part in names
                   if not any(there == part if is_exact else there.startswith(part) for there in present)]
        if missing and not asked.startswith("^"):
            yield Verdict("ill", "network",
                          f"{name} is {asked!r}, but there is no interface {missing[0]} (there are: "
                          f"{', '.join(present)})",
                          f"unset {name}, or name one that is there; see docs/distributed.md")
    found = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(VARIABLES)]
    yield Verdict("note", "variables", ", ".join(found) if found else "none set that steers communication")


def check_limits() -> Verdict:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < MIN_FILES:
        do = (f"ulimit -n {MIN_FILES}" if not 0 <= hard < MIN_FILES else "docker run --ulimit "
                                                                         f"nofile={MIN_FILES}, or "
                                                                         "limits.conf")
        return Verdict("ill", "open files", f"limit {soft} per process; expected at least {MIN_FILES}", do)
    return Verdict("ok", "open files", f"limit {soft} per process")


def check_shared_memory(num_gpus: int, folder: str = "/dev/shm") -> Verdict:
    """Only NCCL uses it: latents are mapped from their files."""
    if not Path(folder).is_dir():
        return Verdict("note", "shared memory", f"there is no {folder}; only NCCL would use it")
    size = shutil.disk_usage(folder)
    what = f"{size.total / 2**20:.0f} MiB at {folder}, {size.free / 2**20:.0f} MiB free"
    if num_gpus > 1 and size.free < num_gpus * SHARED_BYTES:
        return Verdict("ill", "shared memory",
                       f"{what}; NCCL between {num_gpus} GPUs may need {num_gpus * SHARED_BYTES >> 20}",
                       "docker run --shm-size=1g (or --ipc=host), or delete what lies there")
    return Verdict("ok", "shared memory", what)


def check_disk(name: str, root: Path, needed: int) -> Verdict:
    """Whether `needed` bytes can be written below `root`."""
    root = root.absolute()
    folder = next(path for path in (root, *root.parents) if path.exists())
    key = f"set {name}.root to a folder with room"
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return Verdict("ill", f"disk {name}", f"{folder} cannot be written", f"chmod it, or {key}")
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    what = f"{free / 2**30:.1f} GiB free at {folder}, about {needed / 2**30:.2f} to be written"
    if needed > free:
        return Verdict("ill", f"disk {name}", what, f"free some, or {key}")
    if state.f_files and not state.f_favail:
        return Verdict("ill", f"disk {name}", f"no file fits on {folder}: its inodes are used up",
                       f"delete files, or {key}")
    return Verdict("ok", f"disk {name}", what)


def check_tracker(config: Config) -> Verdict:
    """W&B's mode and, online, credentials and server. Without them training runs all the same."""
    tracker, name = config.tracker, "tracker"
    if tracker.kind != "wandb" or tracker.mode != "online":
        what = f"wandb, {tracker.mode}" if tracker.kind == "wandb" else tracker.kind
        return Verdict("ok", name, f"{what}; metrics.jsonl is always written")
    import wandb

    try:
        if not wandb.login(prompt=False, verify=False):
            return Verdict("ill", name, "wandb online, but there are no credentials",
                           "run `wandb login`, or set WANDB_API_KEY or tracker.mode=offline")
    except Exception as error:  # a malformed key; wandb has no common class of errors for it
        return Verdict("ill", name, f"wandb online, but the credentials are refused ({error})",
                       "run `wandb login --relogin`, or set tracker.mode=offline")
    url = wandb.setup().settings.base_url
    host, _, port = url.split("//")[-1].split("/")[0].partition(":")
    try:
        socket.create_connection((host, int(port or (443 if url.startswith("https") else 80))),
                                 COMMAND_S).close()
    except OSError as error:
        return Verdict("ill", name, f"wandb online, but {url} cannot be reached ({error})",
                       "mend the network or its proxy, or set tracker.mode=offline and `wandb sync` later")
    return Verdict("ok", name, f"wandb online, credentials found, {url} answers")


def check_gpus(asked: int, is_gpu_asked: bool) -> Iterator[Verdict]:
    """torch, its backends, and every GPU by a small product. asked: processes of the topology on this
    machine."""
    listed = listed_gpus()
    import torch
    import torch.distributed as dist

    cuda = torch.version.cuda
    yield Verdict("ok", "torch", f"{torch.__version__}, " + (f"built for CUDA {cuda}" if cuda else "built "
                                                                                                   "without "
                                                                                                   "CUDA"))
    num, hidden = torch.cuda.device_count() if cuda else 0, os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed > 0 and num == 0 and hidden is None:
        yield Verdict("ill", "gpus", f"nvidia-smi lists {listed}, torch sees none",
                      "install torch with CUDA (pip install torch==2.13.0)" if cuda is None
                      else f"install a driver for CUDA {cuda} or later (nvidia-smi shows what it supports)")
    elif listed < 0:
        yield Verdict("ill", "gpus", f"nvidia-smi does not answer within {COMMAND_S:.0f} s",
                      "reboot, or look for Xid in dmesg")
    elif is_gpu_asked and num < asked:
        yield Verdict("ill", "gpus", f"the topology asks for {asked}, torch sees {num}"
                      f"{f' (CUDA_VISIBLE_DEVICES={hidden})' if hidden is not None else ''}",
                      "use TOPOLOGY=cpu2 here, or a file of accelerate_configs/ with as many as there are")
    elif num == 0:
        yield Verdict("note", "gpus", "none; training uses the CPU")
    for index in range(num):
        yield check_gpu(index)
    if num > 1:
        pairs = [(i, j) for i in range(num) for j in range(num) if i != j]
        cut = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        yield Verdict("note" if cut else "ok", "peer access",
                      f"{len(pairs) - len(cut)} of {len(pairs)} pairs of GPUs" + (
f"; not {cut[0][0]} to {cut[0][1]}: NCCL goes through host memory there, which is slower but right" if cut
else ""))
    if not dist.is_available() or not dist.is_gloo_available():
        yield Verdict("ill", "backend", "this torch has no gloo", "install torch==2.13.0 from PyPI")
    elif num and not dist.is_nccl_available():
        yield Verdict("ill", "backend", "GPUs, but this torch has no NCCL", "install torch==2.13.0 from PyPI")
    else:
        nccl = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} on GPUs, " if num else ""
        yield Verdict("ok", "backend", f"{nccl}gloo on the CPU")


def check_gpu(index: int) -> Verdict:
    import torch

    name = f"gpu {index}"
    try:
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        ones = torch.ones(256, 256, device=f"cuda:{index}", dtype=torch.bfloat16)
        is_right = float((ones @ ones).float().mean()) == 256.0
    except RuntimeError as error:
        return Verdict("ill", name, " ".join(str(error).split())[:200],
                       "end what uses it (nvidia-smi), or look for Xid in dmesg")
    what = f"{properties.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if not is_right:
        return Verdict("ill", name, f"{what}; a product of ones is wrong",
                       "take it out of use: CUDA_VISIBLE_DEVICES")
    return (Verdict("note", name, f"{what}; something else uses it") if free < total / 2
            else Verdict("ok", name, what))


class Ranks:
    """Two ranks that meet, reduce and wait for each other, as training does; started at once, judged by
    `verdict`."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        command = [sys.executable, "-c", "from ups.machine import rank; rank()", backend]
        self.processes = [subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "RANK": str(index), "WORLD_SIZE": "2", "LOCAL_RANK": str(index),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}) for index in range(2)]

    def verdict(self) -> Verdict:
        texts, limit, see = ([], time.monotonic() + RANKS_S,
                             "see 'From a hang to its cause' in docs/distributed.md")
        try:
            for process in self.processes:
                texts.append(process.communicate(timeout=max(0.1, limit - time.monotonic()))[0].strip())
        except subprocess.TimeoutExpired:
            for process in self.processes:
                process.kill()
            texts = [process.communicate()[0] for process in self.processes]
            if not all("torch is here" in text for text in texts):
                return Verdict("ill", self.backend,
                               f"two processes could not import torch within {RANKS_S:.0f} s",
                               "try again when the machine is less busy, or put the environment on a local "
                               "disk")
            return Verdict("ill", self.backend, f"2 ranks did not reduce within {RANKS_S:.0f} s",
                           f"unset what steers {self.backend} (line variables); {see}")
        failed = next((text for process, text in zip(self.processes, texts, strict=True)
                       if process.returncode), None)
        if failed is not None:
            return Verdict("ill", self.backend, f"2 ranks: {(failed.splitlines() or ['no word'])[-1][:200]}",
                           see)
        return Verdict("ok", self.backend, f"2 ranks: {texts[0].splitlines()[-1]}")


def rank() -> None:
    """What a rank of `Ranks` does."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    print("torch is here", flush=True)
    backend, index = sys.argv[1], int(os.environ["RANK"])
    device = torch.device("cuda", index) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=RANKS_S))
    numbers = torch.ones(REDUCED, device=device)

    def seconds(action: Callable[[], object], repeats: int = 5) -> float:
        action()
        started = time.perf_counter()
        for _ in range(repeats):
            action()
        if backend == "nccl":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / repeats

    reduce = seconds(lambda: dist.all_reduce(numbers))
    wait = seconds(dist.barrier)
    if not bool((numbers == 2.0**6).all()):  # six sums over two ranks
        sys.exit("an all-reduce gave a wrong sum")
    print(f"all-reduce of {4 * REDUCED >> 20} MiB {reduce * 1e3:.1f} ms, barrier {wait * 1e3:.2f} ms",
          flush=True)
    dist.destroy_process_group()


def check_cache(config: Config, task: str) -> tuple[Verdict, int]:
    """State of a cache, and the bytes that building it would write."""
    from ups.data.build_cache import is_up_to_date, plan

    is_current, reason = is_up_to_date(config, task)
    if is_current:
        return Verdict("ok", "cache", f"{task}: {reason}"), 0
    state = "stale" if config.cache_path(task).exists() else "missing"
    first = ("; `make cache` builds it" if state == "missing" else " and will be built anew: "
                                                                   f"{reason.split('; expected')[0]}")
    return Verdict("note", "cache", f"{task}: {state}{first}"), plan(config, task)["bytes"]


def missing_data(config: Config) -> int:
    """Bytes of the configured data files that are not there."""
    from ups.data.pdebench import data_bytes
    from ups.tasks import get_task

    sizes = {}
    for name in config.data.tasks:
        entry = config.task[name]
        for value in entry.parameters or [None]:
            path = config.data_dir(name) / get_task(name).file_for(value)
            sizes[path] = (0 if path.exists()
                           else data_bytes(name, entry.num_trajectories, entry.num_frames, entry.resolution))
    return sum(sizes.values())


def listed_gpus() -> int:
    """How many GPUs nvidia-smi lists; -1 if it does not answer."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=COMMAND_S,
                              check=False)
    except FileNotFoundError:
        return 0
    except subprocess.TimeoutExpired:
        return -1
    return done.stdout.count("GPU ") if done.returncode == 0 else 0


def checks(config: Config, topology: dict) -> Iterator[tuple[str, Callable[[], Iterable[Verdict]]]]:
    """(name, check) in the order of their cost."""
    asked = topology.get("num_processes", 1) // topology.get("num_machines", 1)
    is_gpu_asked, written = topology.get("distributed_type", "NO") != "NO" and "gpu_ids" not in topology, []

    def caches() -> Iterator[Verdict]:
        for task in config.data.tasks:
            verdict, needed = check_cache(config, task)
            written.append(needed)
            yield verdict

    def disks() -> Iterator[Verdict]:
        yield check_disk("data", Path(config.data.root), missing_data(config))
        yield check_disk("cache", Path(config.cache.root), sum(written))
        yield check_disk("run", Path(config.run.root), RUN_BYTES)

    ranks = Ranks("gloo")  # imports torch meanwhile
    yield "python", lambda: [check_python(), check_port(), check_limits()]
    yield "network", lambda: check_interfaces(dict(os.environ), [name for _, name in socket.if_nameindex()])
    yield "shared memory", lambda: [check_shared_memory(max(0, listed_gpus()))]
    yield "cache", caches
    yield "disk", disks
    yield "tracker", lambda: [check_tracker(config)]
    yield "gloo", lambda: [ranks.verdict()]
    yield "gpus", lambda: check_gpus(asked, is_gpu_asked)
    if listed_gpus() > 1:
        yield "nccl", lambda: [Ranks("nccl").verdict()]


def work(config: Config, topology: dict) -> int:
    """Print one line per verdict; the exit status."""
    num = num_ill = 0
    for name, check in checks(config, topology):
        print(f"{BEGIN}{name}", flush=True)
        try:
            verdicts = list(check())
        except Exception as error:  # a check that breaks is a finding, and the others still have to run
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            verdicts = [Verdict("ill", name, f"the check failed ({cause})", "mend that first")]
        print(*verdicts, sep="\n", flush=True)
        num, num_ill = num + len(verdicts), num_ill + sum(verdict.level == "ill" for verdict in verdicts)
    print(f"machine: {f'{num_ill} of {num} checks failed' if num_ill else 'sound'}", flush=True)
    return int(num_ill > 0)


def supervise(arguments: list[str], limit_s: float) -> int:
    """Run the checks in a process of their own and give up on them after `limit_s`; the exit status."""
    process = subprocess.Popen([sys.executable, "-m", "ups.machine", "--work", *arguments],
                               stdout=subprocess.PIPE, text=True, start_new_session=True)
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put("")  # the end

    threading.Thread(target=read, daemon=True).start()
    limit, running = time.monotonic() + limit_s, "the start of python"
    try:
        while line := lines.get(timeout=max(0.01, limit - time.monotonic())):
            if line.startswith(BEGIN):
                running = line[1:].strip()
            else:
                print(line, end="", flush=True)
        return process.wait(timeout=max(0.01, limit - time.monotonic()))
    except (queue.Empty, subprocess.TimeoutExpired):
        do = "look at what it touches: a driver (dmesg), a file server (df), the network"
        print(Verdict("ill", running, f"this check did not end within the {limit_s:g} s of all", do))
        print("machine: not all checks ended", flush=True)
        return 1
    finally:
        if process.poll() is None:  # not waited for: what hangs in the kernel cannot be killed
            os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="YAML overlay of configs/default.yaml")
    parser.add_argument("--topology", help="a file of accelerate_configs/ that training is to use")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()
    if not args.work:
        return supervise(sys.argv[1:], args.limit)
    try:
        config = load_config(args.config, args.overrides)
        topology = yaml.safe_load(Path(args.topology).read_text(encoding="utf-8")) if args.topology else {}
    except (ValueError, OSError) as error:
        print(f"ups.machine: {error}", file=sys.stderr)
        return 1
    return work(config, topology)


if __name__ == "__main__":
    sys.exit(main())
