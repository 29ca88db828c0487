"""Data: generate or download every file of the configured tasks, in PDEBench's layout.

Reads: the configuration. Writes: DATA_ROOT/TASK/FILE (PDEBench's names), a file per task and parameter value.
    data.source=generate   solved by ups_solvers; trajectory i of a task depends on (data.seed, i) alone
    data.source=published  downloaded from data.url; the MD5 is checked, unless data.fetch=first reads a part
    data.source=user       your files: checked, never written
Large files are solved by one single-threaded process per core, compressible flow by a GPU if there is one;
the number of processes does not change the results. A killed run continues, a finished file is kept, and a
file made with other settings is never overwritten.

    python prepare_data.py            one line per file: "generated", "up to date"
    python prepare_data.py --dry-run  files, sizes and disk, writes nothing
    python prepare_data.py --doctor   examines the files, status 1 if one fails
    python prepare_data.py --file 'KH_*'   downloads published files by name
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from tqdm import tqdm

from ups.common.files import when_free
from ups.config.command import CONFIG_OPTIONS, SHOW_CONFIG, read_command, run_script, show
from ups.config.load import load_config
from ups.data.counts import print_refusals
from ups.data.doctor import examine_configured, report
from ups.data.download import fetch, is_verified, published_file, published_files
from ups.data.first import fetch_first, holds_first
from ups.data.generate import generation_settings, num_cores, num_done, write_data
from ups.data.pdebench import data_bytes
from ups.data.sources import data_files, list_user_files, open_user
from ups.tasks import get_task
from ups.userdata.describe import describe_file


@contextmanager
def progress(name: str, num: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of `num` trajectories; it yields a function that sets how many are done."""
    with tqdm(total=num, desc=name, unit="trajectory") as bar:
        yield lambda done: bar.update(done - bar.n)


def main(arguments: list[str] | None = None) -> int:
    # ------------------------------------------------------------------------------------------------- config
    args = read_command(
        __doc__,
        CONFIG_OPTIONS
        | SHOW_CONFIG
        | {
            "--dry-run": {"action": "store_true", "help": "list files, sizes and disk; write nothing"},
            "--doctor": {"action": "store_true", "help": "examine the files; exit 1 on errors and warnings"},
            "--describe": {"metavar": "FILE", "help": "print the section that declares a file of yours"},
            "--file": {
                "help": "download the published files of this name or pattern, also test problems and "
                "parts that no setting names; with --dry-run: list them"
            },
            "--md5": {"action": "store_true", "help": "with --doctor: compare the MD5 of large files too"},
            "--workers": {
                "type": int,
                "default": num_cores(),
                "help": "processes that solve (default: one per core)",
            },
        },
        arguments,
    )
    if args.workers < 1:
        raise ValueError(f"--workers is {args.workers}; expected at least 1. Leave it out for one per core.")
    if args.describe:
        print(describe_file(args.describe, *args.overrides))
        return 0
    config = load_config(args.config, args.overrides)
    if args.show_config:
        show(config)
        return 0
    is_published = config.data.source == "published"

    # ------------------------------------------------------------------------------------------ files by name
    if args.file:
        for task, name, number, md5 in published_files(args.file):
            path = config.data_dir(task) / name
            if not args.dry_run:
                when_free(partial(fetch, f"{config.data.url}/{number}", path, md5))
            print(f"{path}: {f'{config.data.url}/{number}, MD5 {md5}' if args.dry_run else 'MD5 OK'}")
        return 0

    # -------------------------------------------------------------------------------------------------- files
    # rows of (task, parameter, path, bytes, source). source: generation settings, or (id, MD5, number of
    # first trajectories or 0 for the whole file). Files that several tasks share occur once.
    declared = {
        name: partial(open_user, config, name, strided=False)
        for name in config.data.tasks
        if config.spec(name).user_facts is not None
    }
    distinct = {
        (get_task(name).files_of or name, parameter): name
        for name in config.data.tasks
        if name not in declared
        for parameter in sorted(config.task[name].parameters) or [None]
    }
    files = []
    for (task, parameter), name in distinct.items():
        wanted = config.task[name]
        sizes, num_first = get_task(task) if is_published else wanted, config.num_first(name)
        num_bytes = data_bytes(task, num_first or sizes.num_trajectories, sizes.num_frames, sizes.resolution)
        source = (
            (*published_file(task, parameter)[1:], num_first)
            if is_published
            else generation_settings(
                task,
                seed=config.data.seed,
                parameter=parameter,
                num_trajectories=wanted.num_trajectories,
                resolution=wanted.resolution,
                num_frames=wanted.num_frames,
                t_end=wanted.t_end,
            )
        )
        path = config.data_path(name, parameter)
        files.append((task, parameter, path, num_bytes, source))

    # ------------------------------------------------------------------------------------------------- doctor
    if args.doctor:
        has_failed = False
        paths = [(task, path) for task, _, path, *_ in files]
        for name in declared:
            first, *others = data_files(config, name)
            paths.append((name, first.parent if others else first))
        for path, findings in examine_configured(config, paths, declared, hash_all=args.md5):
            print(report(path, findings))
            has_failed |= any(finding.severity in ("error", "warning") for finding in findings)
        return int(has_failed)

    # ------------------------------------------------------------------------------------------------ dry run
    if args.dry_run:
        from ups.commands.dry_run import print_data_plan

        list_user_files(config, list(declared))
        if files:
            print_data_plan(config, files, args.workers)
        return print_refusals(config, config.data.tasks)

    # --------------------------------------------------------------------------------------------- user files
    user_tasks = [name for name in config.data.tasks if config.has_user_files(name)]
    list_user_files(config, user_tasks)
    if len(user_tasks) == len(config.data.tasks):
        return 0

    # ----------------------------------------------------------------------------------------------- download
    for task, _, path, _, source in files if is_published else ():
        number, md5, num = source
        url = f"{config.data.url}/{number}"
        if num:
            state = "up to date" if holds_first(path, task, num, md5) else f"the first {num} trajectories"
            with progress(path.name, num) as on_progress:
                when_free(partial(fetch_first, url, path, task, num, md5, on_progress=on_progress))
            print(f"{path}: {state}; no MD5 to compare them with")
        else:
            state = "up to date" if is_verified(path, md5) else "MD5 OK"
            when_free(partial(fetch, url, path, md5))
            print(f"{path}: {state}")
    if is_published:
        return 0

    # -------------------------------------------------------------------------------------------------- solve
    from ups_solvers.processes import solver_pool  # imports torch

    missing = [source["num_trajectories"] for *_, path, _, source in files if not path.exists()]
    with solver_pool(max(missing, default=0), args.workers) as solver:
        for task, _, path, _, source in files:
            if path.exists() and num_done(path, source):
                print(f"{path}: up to date")
                continue
            make = partial(write_data, path, task, partial(solver, task), source, chunk=config.data.chunk)
            with progress(path.name, source["num_trajectories"]) as on_progress:
                when_free(partial(make, on_progress=on_progress))
            print(f"{path}: generated", flush=True)
    return 0


if __name__ == "__main__":
    run_script(main, "prepare_data.py")
