"""The library of terms that an equation is sought among."""

import itertools
from collections.abc import Iterator, Sequence

from ups_discovery.terms import INVERSE, WAVE, Term

MOST_TERMS = 400  # of a library
MOST_WAVES = 4  # wave numbers along an axis


def library(
    num_channels: int,
    positive: Sequence[int],
    ndim: int,
    vorticity: Sequence[int] = (),
    driven: Sequence[int] = (),
) -> list[Term]:
    """The candidate terms, simple ones first, at most MOST_TERMS: reactions of up to three fields,
    derivatives up to the second times up to two fields, products of two first derivatives, and the third and
    fourth derivatives.

    Derivatives of a positive channel are those of its logarithm; it appears with powers 1 and -1 and in
    ratios. vorticity: channels in two dimensions that may be the vorticity of a flow, which then advects
    every field (by its stream function). driven: axes along which standing waves may force the fields.
    """
    channels = range(num_channels)

    def power(*of: tuple[int, int]) -> tuple[int, ...]:
        return tuple(sum(exponent for other, exponent in of if other == channel) for channel in channels)

    one = [power((c, e)) for c in channels for e in ((1, -1) if c in positive else (1,))]
    ratios = [power((a, 1), (b, -1)) for a, b in itertools.permutations(positive, 2)]
    free = [c for c in channels if c not in positive]
    several = [
        [power(*((c, 1) for c in chosen)) for chosen in itertools.combinations_with_replacement(free, degree)]
        for degree in (2, 3)
    ]
    first = [(((c, (a,)),)) for c in channels for a in range(ndim)]
    pure = [((c, (a,) * 2),) for c in channels for a in range(ndim)]
    mixed = [((c, pair),) for c in channels for pair in itertools.combinations(range(ndim), 2)]
    pairs = [tuple(sorted(a + b)) for a, b in itertools.combinations_with_replacement(first, 2)]
    higher = [((c, (a,) * order),) for c in channels for a in range(ndim) for order in (3, 4)]
    # one of each wave and its opposite
    standing = [
        numbers
        for numbers in itertools.product(
            *(range(-MOST_WAVES, MOST_WAVES + 1) if a in driven else (0,) for a in range(ndim))
        )
        if numbers > (0,) * ndim
    ]

    def tiers() -> Iterator[list[Term]]:
        plain = [power(), *one, *ratios]
        yield [(p, ()) for p in (power(), *one, *several[0], *several[1])]
        yield list(itertools.product(plain, first))
        yield list(itertools.product([power()], [*pure, *higher]))
        yield list(itertools.product([power(), *ratios], pairs))
        yield list(itertools.product([*one, *ratios], pure))
        yield list(itertools.product(plain, mixed))
        yield list(itertools.product(several[0], first))
        yield [
            (power(), tuple(sorted([(a, (INVERSE, along)), (c, (1 - along,))])))
            for a in vorticity
            for c in channels
            for along in range(2)
        ]
        yield [(power(), ((WAVE, (*numbers, part)),)) for numbers in standing for part in range(2)]

    terms: list[Term] = []
    for tier in tiers():
        if len(terms) + len(tier) <= MOST_TERMS:
            terms += tier
    return terms
