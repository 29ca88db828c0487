"""Figures of single steps and of exact posteriors: right samples have the values of an exact law, and each
fake is far from them."""

import functools
from types import SimpleNamespace

import pytest
import torch

from ups.evaluation import one_step as steps
from ups.evaluation.ensemble import SampledWindows
from ups.evaluation.steady import moments_against, split_distances, summarise_exact
from ups.metrics.intervals import Resamples
from ups.results import Entry

pytestmark = pytest.mark.faults  # tests/test_gates.py refuses the same fakes of a stage
COUNT, MEMBERS, TOKENS, DIM = 320, 10, 4, 4


def drawn(kind: str, key: int, shuffle: bool = False, members: int = MEMBERS) -> torch.Tensor:
    """(COUNT, members, TOKENS, DIM): r = c + s (k + 0.1 e), k = -1 or 1 for all of a case, c and the scale s
    known per case.

    gaussian: the right mean and spread by a head that gets them from its own conditions, whatever the network
    is shown."""
    known = torch.randn(COUNT, 1, TOKENS, DIM, generator=torch.Generator().manual_seed(1))
    scale = 0.2 + torch.rand(COUNT, 1, 1, 1, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(key)
    shape = (COUNT, members, TOKENS, DIM)
    noise = torch.randn(shape, generator=generator)
    whole = torch.randn(*shape[:2], 1, 1, generator=generator).sign().expand(shape)
    mean = known.roll(1, 0) if shuffle and kind != "gaussian" else known
    return {
        "right": mean + scale * (whole + 0.1 * noise),
        "gaussian": mean + scale * noise,
        "mean": mean.expand(shape),
        "nan": torch.where(noise > 3, torch.nan, noise),
        "dead": mean + 0.3 * scale * (whole + 0.1 * noise),
        "marginal": 1.3 * noise,
        "nothing": torch.zeros(shape),
    }[kind]


def assess(entry: Entry, kinds: dict[str, str], truth: torch.Tensor, num_exact: int = 0) -> Entry:
    """The entry with what ups.evaluation.one_step makes of single steps that draw as `kinds` says; exact
    draws are right ones."""
    keys = dict.fromkeys(kinds, 5) | {"scoring": 6}  # students from the same noise as their teacher

    def one_step(ensembles, count, num_members, names, is_shuffled=False, num_exact=0):
        draws = {
            name: drawn(kinds[name], keys[name], is_shuffled)[:count, : 1 if name == "operator" else None]
            for name in names
        }
        places = torch.arange(count)
        law, exact = (
            source.decode(drawn("right", key, members=num)[:count]) if num_exact else None
            for key, num in ((98, num_exact), (97, num_members))
        )
        return SampledWindows(
            draws, truth[:count], source.decode(truth[:count]), places, (places % 8) ** 2 // 3, law, exact
        )

    cache = SimpleNamespace(trajectory=torch.arange(COUNT) // 2, split={"test": torch.arange(COUNT)})
    data = SimpleNamespace(cache=cache, split="test", task=SimpleNamespace(boundary="periodic"))
    source = SimpleNamespace(decode=lambda r: r.flatten(-2)[..., None, None, :])
    ensembles = SimpleNamespace(
        residuals=source,
        truth=data,
        seed=0,
        names=list(kinds),
        head=SimpleNamespace(marginal_std=torch.ones(DIM)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "one_step", one_step)
        steps.assess_one_step(entry, ensembles, COUNT, MEMBERS, 100, num_exact)
    return entry


KINDS = {
    "operator": "nothing",
    "dressed": "marginal",
    "dressed_conditional": "gaussian",
    **dict.fromkeys(("corrector", "student_1", "student_2", "scoring"), "right"),
}


@functools.cache
def forecast(**fakes: str) -> Entry:
    """An entry of single steps that draw as `fakes` says."""
    return assess(Entry("t", "ensembles"), {**KINDS, **fakes}, drawn("right", 99, members=1)[:, 0])


def test_a_known_law_replaces_the_data_in_the_spread_of_every_start():
    """Refuses a spread that is right by what the data happen to hold: here they are of twice the law."""
    truth = 2 * drawn("right", 99, members=1)[:, 0]
    by_law, by_data = (assess(Entry("t", "ensembles"), KINDS, truth, num) for num in (64, 0))
    law, data = (found.number("corrector", "ssr", "one step") for found in (by_law, by_data))
    assert 0.9 < law < 1.1 and data < 0.7
    assert by_law.cases("start ") == by_data.cases("start ") != []
    for case in by_law.cases("start "):
        assert 0.9 < by_law.number("corrector", "ssr", case) < 1.1
        assert by_data.number("corrector", "ssr", case) < 0.75
        covered = [found.value("corrector", "coverage_90", case) for found in (by_law, by_data)]
        assert covered[0] == covered[1]


# (model, figure, low, high): what right samples have and the fakes below do not
SPREAD = ("corrector", "ssr", 0.9, 1.1)
OUTLIERS = ("corrector", "outlier_fraction", 0.75, 1.25)
RANKS = ("corrector", "rank_ratio", 0.5, 2.0)


def holds(entry: Entry, model: str, figure: str, low: float | None, high: float | None) -> bool:
    value = entry.value(model, figure, "one step")["value"]
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


@pytest.mark.parametrize(
    ("fakes", "figures"),
    [
        ({"corrector": "mean"}, [SPREAD, OUTLIERS]),
        ({"corrector": "nan"}, [SPREAD, RANKS]),
    ],
)
def test_right_samples_have_the_figures_of_the_law_and_a_fake_has_not(fakes, figures):
    for figure in figures:
        assert holds(forecast(), *figure), figure
        assert not holds(forecast(**fakes), *figure), figure


def test_the_spread_is_right_from_every_frame_and_the_mean_has_none():
    for case in forecast().cases("start "):
        assert 0.9 < forecast().number("corrector", "ssr", case) < 1.1
        assert forecast(corrector="mean").number("corrector", "ssr", case) == 0


# ---- the steady prior beside the exact posterior


@functools.cache
def exact_entry(kind: str, spread: float = 0.003) -> dict:
    """summarise_exact of 40 fields: u = exp(m + spread x), x two patterns of N(0, 1); kind: draws of that
    law, or a fake."""
    fields, draws, cells = 40, 48, 64
    generator = torch.Generator().manual_seed(3)
    patterns = torch.linalg.qr(torch.randn(cells, 2, generator=generator, dtype=torch.float64))[0].T
    patterns = cells**0.5 * torch.tensor([[1.0], [0.5]]) * patterns
    rows, splits = [], []
    for field in range(fields):
        mean = torch.randn(cells, generator=generator, dtype=torch.float64)

        def right(count: int) -> torch.Tensor:
            return torch.randn(count, 2, generator=generator, dtype=torch.float64) @ patterns

        exact, size = (mean + spread * right(2 * draws)).exp(), patterns.square().sum(0).sqrt()
        white = torch.randn(draws, cells, generator=generator, dtype=torch.float64)
        x = {
            "right": right(draws),
            "guess": torch.zeros(draws, cells),
            "dressed": size * white,
            "pooled": 30 * size * white,
            "small": 0.6 * right(draws),
            "leading": right(draws) @ patterns[1:].T @ patterns[1:] / cells / 0.25,
        }[kind]
        rows.append(moments_against((mean + spread * x).exp(), exact))
        splits.append(split_distances(exact, draws, field))
    return summarise_exact(rows, torch.stack(splits).mean(0), Resamples(100, 0))


def misses(kind: str) -> set[str]:
    """The figures of `kind` outside what is right."""
    found, guess = exact_entry(kind), exact_entry("dressed")["distance"]["value"]
    bounds = {
        "distance": (-1.0, found["floor"] + 0.05 * guess),
        "log_trace": (0.9, 1.1),
        "leading": (0.9, 1.1),
    }
    return {name for name, (low, high) in bounds.items() if not low <= found[name]["value"] <= high}


def test_a_correct_prior_is_within_the_floor_of_chance():
    found = exact_entry("right")
    assert not misses("right")
    assert found["distance"]["low"] <= found["distance"]["value"] < found["floor"] < 0.1


@pytest.mark.parametrize(
    ("fake", "figures"),
    [
        ("guess", {"distance", "log_trace"}),
        ("pooled", {"distance", "log_trace"}),
        ("dressed", {"distance", "leading"}),
        ("small", {"log_trace"}),
        ("leading", {"leading"}),
    ],
)
def test_a_fake_prior_is_refused_where_little_is_uncertain(fake, figures):
    assert figures <= misses(fake), misses(fake)
