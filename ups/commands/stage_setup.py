"""The steps that every training script begins with: load the inputs, start the run, load initial weights."""

import os

import numpy as np

from ups.commands.dry_run import print_training_plan
from ups.commands.stages import parents_of
from ups.common.place import make_target
from ups.config.command import parse_arguments
from ups.config.schema import Config
from ups.data.build_cache import is_of_data
from ups.data.cache import Cache, open_cache, place
from ups.data.counts import Counts, check_counts, count_rows, print_refusals
from ups.models.network import TaskNetwork
from ups.models.warm import copy_weights
from ups.training.run import Run


def load_inputs(documentation: str, stage: str) -> tuple[Config, dict[str, Cache]]:
    """Return the configuration of the command line and the open cache of every task of `stage`.

    With --dry-run, print the plan and exit; the exit status is 1 if training would be refused.
    Raises ValueError if no task has trajectories for the stage, if a task has too few, or if its data files
    changed since its cache was built.
    """
    config, is_dry_run = parse_arguments(documentation)
    if is_dry_run:
        print_training_plan(config, stage)
        raise SystemExit(print_refusals(config, config.served(stage)))
    names = config.served(stage)
    if not names:
        raise ValueError(
            f"no task for stage {stage} has reserved trajectories; expected task.TASK.reserve "
            "above 0 for at least one of data.tasks. Set it and train the operator again."
        )
    caches = {name: open_cache(config, name) for name in names}
    for cache in caches.values():
        is_current, reason = is_of_data(config, cache)
        if not is_current:
            raise ValueError(f"{reason}; expected the same. Run `{make_target('cache')}`, then train again.")
    require_counts(config, caches)
    return config, caches


def require_counts(config: Config, caches: dict[str, Cache]) -> None:
    """Raise ValueError if a task has too few trajectories or frames to train.

    If it has too few for the gates of the report, the first process prints a warning.
    """
    for name, cache in caches.items():
        for finding in check_counts(config, name, cache_counts(config, cache)):
            text = f"{name}: {finding.what}. To do: {finding.do}."
            if finding.severity == "error":
                raise ValueError(text)
            if os.environ.get("RANK", "0") == "0":
                print(f"WARNING {text}", flush=True)


def cache_counts(config: Config, cache: Cache) -> Counts:
    """Return `count_data` of an open cache. The data files are not needed."""
    rows = {split: index.numpy() for split, index in cache.split.items()}
    rows["train"] = np.concatenate([rows["train"], rows.pop("reserved")])
    return count_rows(
        config,
        cache.task.name,
        rows,
        cache.trajectory.numpy(),
        cache.parameter_index.numpy(),
        len(cache.parameter_values),
        cache.num_frames,
    )


def start_run(config: Config, stage: str, caches: dict[str, Cache]) -> Run:
    """Return the new or resumed run of `stage`, with the latents on a GPU if they fit; exit with status 0 if
    the stage is finished."""
    section = getattr(config, stage)
    run = Run.start(config, stage, section.train, section.optim, parents_of(config, stage, caches))
    if run.is_finished:
        run.print(f"{run.directory} is finished and up to date: nothing to do")
        raise SystemExit(0)
    placed = place(caches.values(), run.device, config.cache.place, config.cache.device_fraction)
    run.print(f"{run.ranks.world} process(es) on {run.device}, latents: {placed}")
    return run


def warm_start(run: Run, network: TaskNetwork, config: Config) -> TaskNetwork:
    """Return `network`, with the weights of the stage in `STAGE.init` if set. All ranks must call it."""
    if (folder := config.init_dir(run.stage)) is not None:
        run.print(
            run.agreed(lambda: copy_weights(network, folder, run.optim.trunk_factor), f"taking over {folder}")
        )
    return network
