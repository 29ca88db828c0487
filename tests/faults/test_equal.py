"""Fifty steps are the same however they are shared out; `python -m pytest -s tests/faults/test_equal.py`
prints by how much not."""

import collections
import json

import pytest
from test_sharded import FSDP, PLAIN, STEPS, close, launch

WAYS = {  # name -> (processes, rows in a pass, how, further settings); the global batch is 8 rows
    "1 process, 2 passes": (1, 4, PLAIN, ()),
    "2 processes": (2, 8, PLAIN, ()),
    "2 processes, 4 passes": (2, 1, PLAIN, ()),
    "4 processes, 2 passes": (4, 1, PLAIN, ()),
    "2 processes, ddp.overlap, 4 passes": (2, 1, PLAIN, ("ddp.overlap=true",)),
    "2 processes, FSDP2, 2 passes": (2, 2, FSDP, ()),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, one pass."""
    outcome = launch(tmp_path_factory.mktemp("alone"), *STEPS, how=PLAIN, world=1)
    assert outcome.codes == [0], outcome.logs
    return outcome


@pytest.mark.parametrize("way", WAYS)
def test_fifty_steps_are_those_of_one_process_in_one_pass(alone, tmp_path, way):
    world, rows, how, settings = WAYS[way]
    outcome = launch(tmp_path, *STEPS, f"operator.train.micro_batch={rows}", *settings, how=how, world=world)
    assert outcome.codes == [0] * world, outcome.logs
    found, expected = (o.losses() for o in (outcome, alone))
    assert len(found) == 50 and expected[-1] < 0.5 * expected[0]
    largest = float(((found - expected) / expected).abs().max())
    print(f"{way}: largest relative difference of a loss {largest:.1e}")
    close(outcome, alone)
    # of all rows and weights, not of one rank's
    for key, most in (("train/gradient_norm", 1e-5), ("train/lr_factor", 0.0)):
        one, other = ([line[key] for line in o.lines() if key in line] for o in (outcome, alone))
        assert len(one) == 50 and one == pytest.approx(other, rel=most, abs=0.0), key
    assert every_epoch(tmp_path, world) == {epoch: [1] * 40 for epoch in range(10)}


def every_epoch(root, world):
    """Epoch -> how often each of the 40 trajectories was trained on, over all ranks; 5 steps are an epoch."""
    seen = collections.defaultdict(lambda: [0] * 40)
    for rank in range(world):
        for line in (root / f"rows{rank}.jsonl").read_text().splitlines():
            step, rows = json.loads(line)
            for row in rows:
                seen[step // 5][row] += 1
    return dict(seen)
