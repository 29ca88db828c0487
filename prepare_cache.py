"""Cache: fit the tokenizer of each task on its training split and encode all trajectories.

    z = B^T P (log u or u - mean) / std        patch-POD codec, ups/data/tokenizer.py

Reads: the configuration and DATA_ROOT/TASK/FILE. Writes: CACHE_ROOT/TASK.h5, complete or not at all. A cache
that fits the current settings and data is kept. Prints per task the tokenizer, size and fingerprint.

    python prepare_cache.py              prints "built" or "up to date" per task
    python prepare_cache.py --dry-run    sizes, dims, disk; writes nothing
    python prepare_cache.py --verify     every checksum; exits 1 on damage
"""

import time
from functools import partial

from ups.commands.dry_run import duration, free_bytes
from ups.common.files import when_free
from ups.config.command import CONFIG_OPTIONS, read_command, run_script
from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.build_cache import build_cache, is_up_to_date, plan
from ups.data.cache import Cache, open_cache
from ups.data.counts import print_refusals

BYTES_PER_S = 60e6  # of latents built: two passes over the data on one core


def describe(cache: Cache) -> str:
    """Tokenizer, size and fingerprint of a cache, as lines of text."""
    lines = [
        f"  {cache.num_rows} rows x {cache.num_frames} frames, {cache.num_bytes / 2**20:.1f} MiB of "
        f"latents, fingerprint {cache.fingerprint[:12]}"
    ]
    codecs = [("state", cache.tokenizer), ("input", cache.input_tokenizer)]
    for name, codec in codecs[: 1 + cache.task.is_steady]:
        lines.append(f"  {name}: {codec.extra_repr()}, kept energy {codec.kept_energy:.8f}")
    return "\n".join(lines)


def prepare(config: Config, task: str, is_rebuilt: bool) -> None:
    """Build the cache of a task unless it is up to date."""
    is_current, reason = is_up_to_date(config, task)
    if is_current and not is_rebuilt:
        print(f"{config.cache_path(task)}: up to date ({reason})")
        return
    start = time.perf_counter()
    cache = Cache(build_cache(config, task), config.task[task], verify="quick")
    print(f"{cache.path}: built in {time.perf_counter() - start:.1f} s\n{describe(cache)}")


def main(arguments: list[str] | None = None) -> int:
    # ------------------------------------------------------------------------------------------------- config
    args = read_command(
        __doc__,
        CONFIG_OPTIONS
        | {
            "--dry-run": {"action": "store_true", "help": "list rows, latent shapes and disk; write nothing"},
            "--verify": {
                "action": "store_true",
                "help": "compare every checksum; write nothing; exit 1 on damage",
            },
            "--rebuild": {"action": "store_true", "help": "build even where a cache is up to date"},
        },
        arguments,
    )
    config = load_config(args.config, args.overrides)

    # ------------------------------------------------------------------------------------------------ dry run
    if args.dry_run:
        missing = 0
        print(f"cache: to {config.cache.root}, latents as frames x tokens x dim")
        for task in config.data.tasks:
            expected, (is_current, reason) = plan(config, task), is_up_to_date(config, task)
            missing += 0 if is_current and not args.rebuild else expected["bytes"]
            shapes = ", ".join(
                f"{name} {' x '.join(map(str, shape[1:]))}" for name, shape in expected["shapes"].items()
            )
            state = (
                "up to date"
                if is_current
                else f"stale: {reason}"
                if config.cache_path(task).exists()
                else "to build"
            )
            print(
                f"  {task}: {expected['rows']} rows, {shapes}, at most {expected['bytes'] / 2**20:.1f} "
                f"MiB, {state}"
            )
        print(
            f"  at most {missing / 2**20:,.0f} MiB to write in about {duration(missing / BYTES_PER_S)}; "
            f"{free_bytes(config.cache.root) / 2**20:,.0f} MiB free"
        )
        return print_refusals(config, config.data.tasks)

    # ------------------------------------------------------------------------------------------------- verify
    if args.verify:
        is_damaged = False
        for task in config.data.tasks:
            try:
                cache = open_cache(config, task, verify="full")
                print(f"{cache.path}: verified\n{describe(cache)}")
            except (ValueError, FileNotFoundError) as error:
                is_damaged = True
                print(error)
        return int(is_damaged)

    # --------------------------------------------------------------------------------------------------- loop
    for task in config.data.tasks:
        when_free(partial(prepare, config, task, args.rebuild))
    return 0


if __name__ == "__main__":
    run_script(main, "prepare_cache.py")
