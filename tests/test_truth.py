"""ups/evaluation/truth.py: operator and ensembles are scored against the data, not against what the codec
keeps of them."""

from types import SimpleNamespace

import pytest
import torch
from test_base_selection import base_alone

from ups.data.pdebench import open_data
from ups.data.sources import data_files
from ups.evaluation.ensemble import one_step
from ups.evaluation.forecast import assess_forecasts
from ups.generative.residuals import TransientResiduals
from ups.metrics.ensembles import score_ensemble, summarise_ensemble
from ups.metrics.intervals import Resamples

CPU, TASK = torch.device("cpu"), "burgers1d"


@pytest.fixture(scope="module", params=[0, 1], ids=["whole", "truncated"])
def world(request, tmp_path_factory):
    """(configuration, truth, operator) of a codec that keeps everything, and of one that keeps one number per
    patch."""
    more = f"task.{TASK}.dim={request.param} task.{TASK}.reserve=0.5 evaluate.num_bootstrap=20"
    return base_alone(tmp_path_factory.mktemp("truth"), TASK, *more.split())


def test_the_truth_is_the_content_of_the_data_file(world):
    config, truth, _ = world
    paths, settings = data_files(config, TASK), config.task[TASK]
    strides = {key: getattr(settings, key) for key in ("space_stride", "time_stride", "first_frame")}
    for row, u in zip(truth.rows.tolist(), truth.future(truth.rows), strict=True):
        i = int(truth.cache.trajectory[row])
        stored = open_data(paths[int(truth.cache.parameter_index[row])], TASK, **strides)
        stored = torch.from_numpy(stored.read(i, i + 1)[0])
        assert torch.equal(u, stored[truth.context :])
    starts = torch.arange(len(truth.rows))
    windows = truth.frames(truth.rows, starts, 2)
    assert torch.equal(windows[1, 0], truth.frames(truth.rows[1:2], 1, 1)[0, 0])


def test_a_perfect_latent_has_the_error_of_its_codec(world):
    """In a single step and in the codec's own row of the report alike: the error that both see is one and the
    same."""
    config, truth, operator = world
    source, codec = TransientResiduals(operator, truth.cache), operator.head(TASK).codec

    def knows_the_latents(name, tokens, facts, noise, second, shown):
        return torch.zeros_like(noise)

    shape = (*truth.cache.batch(truth.rows[:1], 0, 1).shape[2:-1], source.description["dim"])
    ensembles = SimpleNamespace(
        residuals=source,
        truth=truth,
        seed=0,
        device=CPU,
        residual=knows_the_latents,
        noise=lambda keys, lead, count: [torch.zeros(len(keys) * count, *shape)] * 2,
    )
    windows = one_step(ensembles, 16, 1, ["perfect"])
    members = codec.decode(windows.truth[:, None, None])  # what was scored as the truth once
    row = summarise_ensemble(score_ensemble(members, windows.u_ref), Resamples(20, 0))
    entry, _ = assess_forecasts(operator, truth, config.evaluate, 0)
    floor = entry.number("codec_floor", "nrmse")
    if codec.dim < codec.width:
        assert row["crps"]["value"] > 1e-3 and floor > 1e-3
    else:
        assert row["crps"]["value"] < 1e-5 and floor < 1e-5
