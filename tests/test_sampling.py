"""ups/data/schedule.py: the schedule is a pure function of (seed, step), fair, and the same for any number of
processes."""

from collections import Counter

import pytest
import torch

from ups.data.schedule import Schedule
from ups_discovery.seeds import generator

WINDOWS = {"a": (10, 3), "b": (40, 7), "c": (90, 1)}


def make(batch_size=4, seed=3):
    return Schedule(WINDOWS, batch_size, seed)


def test_a_batch_depends_on_seed_and_step_alone():
    forward, jump = make(), make()
    expected = [forward.batch(step) for step in range(60)]
    for step in (59, 7, 30):
        batch = jump.batch(step)
        assert batch.task == expected[step].task
        assert torch.equal(batch.rows, expected[step].rows)
        assert torch.equal(batch.starts, expected[step].starts)
    other = make(seed=4)
    assert any(not torch.equal(other.batch(step).rows, expected[step].rows) for step in range(10))


def test_every_trajectory_comes_exactly_once_per_epoch_across_batch_borders():
    schedule = make(batch_size=7)  # 7 does not divide 10, 40 or 90
    rows = {task: [] for task in WINDOWS}
    for step in range(600):
        batch = schedule.batch(step)
        assert len(batch) == 7 and batch.starts.min() >= 0 and batch.starts.max() < WINDOWS[batch.task][1]
        rows[batch.task] += batch.rows.tolist()
    epochs = {}
    for task, (num_rows, _) in WINDOWS.items():
        epochs[task] = [
            rows[task][i : i + num_rows] for i in range(0, len(rows[task]) - num_rows + 1, num_rows)
        ]
        assert len(epochs[task]) >= 10
        assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs[task])
    assert epochs["a"][0] != epochs["a"][1]


def test_a_batch_larger_than_the_task_wraps_into_the_next_epoch():
    batch = Schedule({"a": (3, 2)}, batch_size=8, seed=0).batch(0)
    assert Counter(batch.rows.tolist()) in ({0: 3, 1: 3, 2: 2}, {0: 3, 1: 2, 2: 3}, {0: 2, 1: 3, 2: 3})


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shards_are_disjoint_and_cover_the_global_batch(world):
    batch = make(batch_size=8).batch(5)
    shards = [batch.shard(rank, world) for rank in range(world)]
    assert torch.equal(torch.cat([shard.rows for shard in shards]), batch.rows)
    assert torch.equal(torch.cat([shard.starts for shard in shards]), batch.starts)


def test_every_task_comes_once_per_round_in_changing_order():
    schedule = make()
    rounds = [tuple(schedule.batch(3 * k + i).task for i in range(3)) for k in range(30)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds) and len(set(rounds)) > 3


def test_a_task_without_trajectories_is_refused():
    with pytest.raises(ValueError, match="task a has 0 training trajectories with 3 windows each; expected"):
        Schedule({"a": (0, 3)}, batch_size=4, seed=0)


def test_generator_streams_of_neighbouring_keys_are_unrelated():
    draws = torch.stack(
        [
            torch.randn(2000, generator=generator(0, "noise", step, rank))
            for step in range(4)
            for rank in range(4)
        ]
    )
    correlation = torch.corrcoef(draws) - torch.eye(16)
    assert correlation.abs().max() < 0.1  # 120 pairs; standard deviation 0.022
    assert torch.equal(draws[5], torch.randn(2000, generator=generator(0, "noise", 1, 1)))
    assert generator(1, 23).initial_seed() != generator(12, 3).initial_seed()
