"""The machine doctor: whether training can run here, one line per check, and what to do about every failure.

    python -m ups.commands.machine_check --config configs/small.yaml [--topology accelerate_configs/2gpu.yaml]
    [section.key=value ..]

Levels: ok; note (nothing to do); ill (with the next step). Exit status 1 if any check is ill. The checks run
in a process of their own, in the order of their cost, and whatever one of them does the whole ends within
LIMIT_S: a broken driver can block `import torch`, and a dead file server any look at a disk.
"""

import argparse
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import yaml

from ups.commands.devices import COMMAND_S, Ranks, Verdict, check_gpus, first, listed_gpus
from ups.config import CONFIG_OPTIONS, Config, load_config, read_command, run_script

LIMIT_S = 55.0  # for everything; the caller was promised a minute
# open files per process: every rank holds sockets to its peers, loader workers and caches
MIN_FILES = 1024
# of /dev/shm per GPU: NCCL's buffers between two of them; docker's default is this for all together
SHARED_BYTES = 64 * 2**20
RUN_BYTES = 2**30  # a run's folder: checkpoints of two steps, report
VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "MASTER_", "OMP_NUM_THREADS")
BEGIN = "\x01"  # starts a line that names the check which begins


def check_python() -> Verdict:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Verdict(
        "ok",
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}, {cores} cores",
    )


def check_interfaces(environment: dict[str, str], present: list[str]) -> Iterator[Verdict]:
    """Variables that steer communication. One that names a network interface which is not there hangs every
    start."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        asked = environment.get(name, "")
        is_exact = asked.startswith("=") or name.startswith("GLOO")
        missing = [
            part
            for part in asked.lstrip("=").split(",")
            if part and not any(there == part if is_exact else there.startswith(part) for there in present)
        ]
        if missing and not asked.startswith("^"):
            yield Verdict(
                "ill",
                "network",
                f"{name} is {asked!r}, but there is no interface {missing[0]} (there are: "
                f"{', '.join(sorted(present))})",
                f"unset {name}, or name one that is there; see docs/distributed.md",
            )
    found = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(VARIABLES)]
    yield Verdict("note", "variables", ", ".join(found) if found else "none set that steers communication")


def check_limits() -> Verdict:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return first(
        (
            0 <= soft < MIN_FILES,
            "ill",
            "open files",
            f"limit {soft} per process; expected at least {MIN_FILES}",
            f"docker run --ulimit nofile={MIN_FILES}, or limits.conf"
            if 0 <= hard < MIN_FILES
            else f"ulimit -n {MIN_FILES}",
        ),
        (True, "ok", "open files", f"limit {soft} per process"),
    )


def check_shared_memory(num_gpus: int, folder: str = "/dev/shm") -> Verdict:
    """Only NCCL uses it: latents are mapped from their files."""
    if not Path(folder).is_dir():
        return Verdict("note", "shared memory", f"there is no {folder}; only NCCL would use it")
    size = shutil.disk_usage(folder)
    what = f"{size.total / 2**20:.0f} MiB at {folder}, {size.free / 2**20:.0f} MiB free"
    return first(
        (
            num_gpus > 1 and size.free < num_gpus * SHARED_BYTES,
            "ill",
            "shared memory",
            f"{what}; NCCL between {num_gpus} GPUs may need {num_gpus * SHARED_BYTES >> 20}",
            "docker run --shm-size=1g (or --ipc=host), or delete what lies there",
        ),
        (True, "ok", "shared memory", what),
    )


def check_disk(name: str, root: Path, needed: int) -> Verdict:
    """Whether `needed` bytes can be written below `root`."""
    root = root.absolute()
    folder = next(path for path in (root, *root.parents) if path.exists())
    key, state, disk = f"set {name}.root to a folder with room", os.statvfs(folder), f"disk {name}"
    free = state.f_bavail * state.f_frsize
    what = f"{free / 2**30:.1f} GiB free at {folder}, about {needed / 2**30:.2f} to be written"
    return first(
        (
            not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK),
            "ill",
            disk,
            f"{folder} cannot be written",
            f"chmod it, or {key}",
        ),
        (needed > free, "ill", disk, what, f"free some, or {key}"),
        (
            state.f_files and not state.f_favail,
            "ill",
            disk,
            f"no file fits on {folder}: its inodes are used up",
            f"delete files, or {key}",
        ),
        (True, "ok", disk, what),
    )


def check_tracker(config: Config) -> Verdict:
    """W&B's mode and, online, credentials and server. Without them training runs all the same."""
    tracker, name = config.tracker, "tracker"
    if tracker.kind != "wandb" or tracker.mode != "online":
        what = f"wandb, {tracker.mode}" if tracker.kind == "wandb" else tracker.kind
        return Verdict("ok", name, f"{what}; metrics.jsonl is always written")
    import wandb

    try:
        if not wandb.login(prompt=False, verify=False):
            return Verdict(
                "ill",
                name,
                "wandb online, but there are no credentials",
                "run `wandb login`, or set WANDB_API_KEY or tracker.mode=offline",
            )
    except Exception as error:  # a malformed key; wandb has no common class of errors for it
        return Verdict(
            "ill",
            name,
            f"wandb online, but the credentials are refused ({error})",
            "run `wandb login --relogin`, or set tracker.mode=offline",
        )
    url = wandb.setup().settings.base_url
    host, _, port = url.split("//")[-1].split("/")[0].partition(":")
    try:
        socket.create_connection(
            (host, int(port or (443 if url.startswith("https") else 80))), COMMAND_S
        ).close()
    except OSError as error:
        return Verdict(
            "ill",
            name,
            f"wandb online, but {url} cannot be reached ({error})",
            "mend the network or its proxy, or set tracker.mode=offline and `wandb sync` later",
        )
    return Verdict("ok", name, f"wandb online, credentials found, {url} answers")


def check_cache(config: Config, task: str) -> tuple[Verdict, int]:
    """State of a cache, and the bytes that building it would write."""
    from ups.data.build_cache import is_up_to_date, plan

    is_current, reason = is_up_to_date(config, task)
    if is_current:
        return Verdict("ok", "cache", f"{task}: {reason}"), 0
    state = "stale" if config.cache_path(task).exists() else "missing"
    first = (
        "; `make cache` builds it"
        if state == "missing"
        else f" and will be built anew: {reason.split('; expected')[0]}"
    )
    return Verdict("note", "cache", f"{task}: {state}{first}"), plan(config, task)["bytes"]


def missing_data(config: Config) -> int:
    """Bytes of the configured data files that are not there."""
    from ups.data.pdebench import data_bytes

    sizes = {
        config.data_path(name, value): data_bytes(
            name, entry.num_trajectories, entry.num_frames, entry.resolution
        )
        for name, entry in config.task.items()
        if name in config.data.tasks and not config.has_user_files(name)
        for value in entry.parameters or [None]
    }
    return sum(size for path, size in sizes.items() if not path.exists())


def checks(config: Config, topology: dict) -> Iterator[tuple[str, Callable[[], Iterable[Verdict]]]]:
    """(name, check) in the order of their cost."""
    asked = topology.get("num_processes", 1) // topology.get("num_machines", 1)
    is_gpu_asked = topology.get("distributed_type", "NO") != "NO" and "gpu_ids" not in topology
    found: list[tuple[Verdict, int]] = []  # of the caches

    def caches() -> list[Verdict]:
        found.extend(check_cache(config, task) for task in config.data.tasks)
        return [verdict for verdict, _ in found]

    ranks = Ranks("gloo")  # imports torch meanwhile
    yield "python", lambda: [check_python(), check_limits()]
    yield "network", lambda: check_interfaces(dict(os.environ), [name for _, name in socket.if_nameindex()])
    yield "shared memory", lambda: [check_shared_memory(max(0, listed_gpus()))]
    yield "cache", caches
    yield (
        "disk",
        lambda: [
            check_disk("data", Path(config.data.root), missing_data(config)),
            check_disk("cache", Path(config.cache.root), sum(size for _, size in found)),
            check_disk("run", Path(config.run.root), RUN_BYTES),
        ],
    )
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
    process = subprocess.Popen(
        [sys.executable, "-m", "ups.commands.machine_check", "--work", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    running = ["the start of python"]

    def read() -> None:
        for line in process.stdout:
            if line.startswith(BEGIN):
                running.append(line[1:].strip())
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
            Verdict(
                "ill",
                running[-1],
                f"this check did not end within the {limit_s:g} s of all",
                "look at what it touches: a driver (dmesg), a file server (df), the network",
            )
        )
        print("machine: not all checks ended", flush=True)
        return 1
    finally:
        if process.poll() is None:  # not waited for: what hangs in the kernel cannot be killed
            os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    args = read_command(
        __doc__,
        CONFIG_OPTIONS
        | {
            "--topology": {"help": "a file of accelerate_configs/ that training is to use"},
            "--limit": {"type": float, "default": LIMIT_S, "help": "seconds for everything"},
            "--work": {"action": "store_true", "help": argparse.SUPPRESS},
        },
    )
    if not args.work:
        return supervise(sys.argv[1:], args.limit)
    topology = yaml.safe_load(Path(args.topology).read_text(encoding="utf-8")) if args.topology else {}
    return work(load_config(args.config, args.overrides), topology)


if __name__ == "__main__":
    run_script(main, "ups.commands.machine_check")
