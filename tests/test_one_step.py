"""Figures of single steps and of exact posteriors: right samples have the values of an exact law, and each
fake is far from them."""

import functools
from types import SimpleNamespace

import pytest
import torch

from ups.evaluation import one_step as steps
from ups.evaluation.ensemble import SampledWindows
from ups.evaluation.steady import moments_against, summarise_exact
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
        law = source.decode(drawn("right", 98, members=num_exact)[:count]) if num_exact else None
        return SampledWindows(
            draws, truth[:count], source.decode(truth[:count]), places, (places % 8) ** 2 // 3, law
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


def test_a_known_law_replaces_the_data_in_the_spread():
    """Refuses a spread that is right by what the data happen to hold: here they are of twice the law."""
    truth = 2 * drawn("right", 99, members=1)[:, 0]
    by_law, by_data = (assess(Entry("t", "ensembles"), KINDS, truth, num) for num in (64, 0))
    law, data = (found.number("corrector", "ssr", "one step") for found in (by_law, by_data))
    assert 0.9 < law < 1.1 and data < 0.7


@pytest.mark.parametrize("fake", ["mean", "nan"])
def test_right_samples_have_the_spread_of_the_law_and_a_fake_has_not(fake):
    right, wrong = (
        found.number("corrector", "ssr", "one step") for found in (forecast(), forecast(corrector=fake))
    )
    assert 0.9 < right < 1.1 and (wrong is None or wrong < 0.9)


# ---- the steady prior beside the exact posterior


@functools.cache
def exact_entry(kind: str, spread: float = 0.003) -> dict:
    """summarise_exact of 40 fields: u = exp(m + spread x), x two patterns of N(0, 1); kind: draws of that
    law, or a fake."""
    fields, draws, cells = 40, 48, 64
    generator = torch.Generator().manual_seed(3)
    patterns = torch.linalg.qr(torch.randn(cells, 2, generator=generator, dtype=torch.float64))[0].T
    patterns = cells**0.5 * torch.tensor([[1.0], [0.5]]) * patterns
    rows = []
    for _ in range(fields):
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
        }[kind]
        rows.append(moments_against((mean + spread * x).exp(), exact))
    return summarise_exact(rows, Resamples(100, 0))


def misses(kind: str) -> set[str]:
    """The figures of `kind` outside what is right."""
    found, guess = exact_entry(kind), exact_entry("dressed")["distance"]["value"]
    bounds = {
        "distance": (-1.0, 0.05 * guess),
        "log_trace": (0.9, 1.1),
    }
    return {name for name, (low, high) in bounds.items() if not low <= found[name]["value"] <= high}


def test_a_correct_prior_has_the_exact_law():
    assert not misses("right")


@pytest.mark.parametrize(
    ("fake", "figures"),
    [
        ("guess", {"distance", "log_trace"}),
        ("pooled", {"distance", "log_trace"}),
        ("dressed", {"distance"}),
        ("small", {"log_trace"}),
    ],
)
def test_a_fake_prior_is_refused_where_little_is_uncertain(fake, figures):
    assert figures <= misses(fake), misses(fake)
