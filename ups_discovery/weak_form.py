"""Both sides of an equation, multiplied by test functions of compact support and summed (weak form).

The test functions depend on time and every axis. Where a term is the derivative of a power of a field, the
derivative moves to the test function by parts (Messenger and Bortz 2021, arXiv 2007.02848): noise is averaged
and never differenced, and nothing is assumed at walls, where test functions vanish. Other terms are evaluated
on denoised films. The spectra of the data decide the width of the test functions: these pass the waves that
rise above the noise.

The part of the noise is removed from the normal equations, exactly in the mean for terms whose derivatives
all move to the test function. For other terms noise of the same size is added with both signs, and what it
adds is subtracted (SIMEX: Cook and Stefanski 1994, doi 10.1080/01621459.1994.10476871)."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.polynomial import Polynomial
from torch import Tensor

from ups_discovery.boundary import PERIODIC, along
from ups_discovery.denoise import LOUD, Film
from ups_discovery.progress import beat
from ups_discovery.seeds import generator
from ups_discovery.spectral import apply_axes
from ups_discovery.terms import INVERSE, WAVE, Term, Terms

EXPONENT = 8  # of the test function (1 - x^2)^8
WIDTH = 3.0  # standard deviations of its spectrum at the largest wave number that rises above the noise
MOST_OF_AXIS = 0.2  # of an axis, the largest half width, as wider ones leave too few independent windows
MIN_HALF_WIDTH = 5  # cells or frames, so that sums are integrals
MIN_LOUD = 0.1  # of the modes along the other axes, relative to the wave number with most: fewer are chance
MAX_BYTES = 2**26  # of the terms evaluated at once
NUM_NOISE = 2  # samples of added noise, each with both signs
NUM_BLOCKS = 24  # of windows that are resampled together
LOW_DEGREE, LOW_ORDER = 2, 2  # of the terms that are tried first


def compact_functions(n: int, half_width: int, order: int, is_periodic: bool) -> Tensor:
    """Rows (tests, n): derivatives of this order of test functions, with the sign of so many integrations by
    parts."""
    phi = Polynomial([1, 0, -1]) ** EXPONENT
    x = np.arange(-half_width, half_width + 1) / half_width
    values = (-1) ** order * (phi.deriv(order) if order else phi)(x) / half_width**order
    values = torch.from_numpy(values / phi(x).sum())
    stride = max(1, half_width // 3)
    centres = torch.arange(0, n, stride) if is_periodic else torch.arange(half_width, n - half_width, stride)
    rows = torch.zeros(len(centres), n, dtype=torch.float64)
    for row, centre in zip(rows, centres.tolist(), strict=True):
        row[torch.arange(centre - half_width, centre + half_width + 1) % n] = values
    return rows


class PlainTerm(NamedTuple):
    """factor times a product of powers of the channels, tested by the derivatives of these orders of the test
    function, in time and along every axis."""

    orders: tuple[int, ...]
    powers: tuple[int, ...]
    factor: float = 1.0


def plain_term(term: Term, positive: list[int], ndim: int) -> PlainTerm | None:
    """A term whose derivatives all move to the test function; None for other terms, and for those of fields
    that are stored as logarithms."""
    powers, factors = term
    if min(powers) < 0 or any(powers[channel] for channel in positive):
        return None
    if not factors:
        return PlainTerm((0,) * (1 + ndim), tuple(powers))
    if len(factors) != 1 or factors[0][0] == WAVE or INVERSE in factors[0][1]:
        return None
    [(channel, axes)] = factors
    power = powers[channel] + 1
    if sum(powers) >= power or channel in positive or (power > 1 and len(axes) > 1):
        return None
    orders = (0, *(axes.count(axis) for axis in range(ndim)))
    return PlainTerm(orders, tuple(power * (c == channel) for c in range(len(powers))), 1 / power)


def power_without_noise(s: Tensor, powers: Sequence[int], sigma: Tensor) -> Tensor:
    """The product of powers of the channels of s (time, C, *space) without the bias by noise: for each power
    n sigma^n He_n(s / sigma), with Hermite's polynomials."""
    found = []
    for channel, power in enumerate(powers):
        before, now = 1.0, s[:, channel]
        for n in range(1, power):
            before, now = now, s[:, channel] * now - n * sigma[channel] ** 2 * before
        found += [now] * bool(power)
    return math.prod(found[1:], start=found[0]) if found else torch.ones_like(s[:, 0])


@dataclass
class WeakForm:
    """Normal equations of the weak form. films (rows, time, C, *space); sigma (C,): of their noise."""

    films: Tensor
    sigma: Tensor
    library: list[Term]
    settings: dict

    def __post_init__(self) -> None:
        settings, space = self.settings, tuple(self.settings["space"])
        num_frames, ends = self.films.shape[1], along(settings["boundary"], len(space))
        self.film = Film(num_frames, space, settings["boundary"])
        self.sizes = (num_frames, *space)
        self.is_periodic = [False, *(end == PERIODIC for end in ends)]
        self.half_widths = self.support(self.films, self.sigma)
        plain = [plain_term(term, settings["positive"], len(space)) for term in self.library]
        is_wide = [width >= MIN_HALF_WIDTH for width in self.half_widths]
        self.plain = {
            place: one
            for place, one in enumerate(plain)
            if one and all(is_wide[axis] for axis, order in enumerate(one.orders) if order)
        }
        num_channels = self.films.shape[2]
        self.targets = [
            PlainTerm((1, *[0] * len(space)), tuple(int(c == channel) for c in range(num_channels)))
            for channel in range(num_channels)
        ]
        self.others = [place for place in range(len(self.library)) if place not in self.plain]
        self.terms = Terms(
            [self.library[place] for place in self.others],
            settings["positive"],
            space,
            settings["lengths"],
            settings["boundary"],
            settings["cell"],
        )
        self.matrices: dict[tuple[int, int], Tensor] = {}

    def support(self, s: Tensor, sigma: Tensor) -> list[int]:
        """Half the support of the test function along time and every axis, in frames and cells."""
        power = self.film.power(self.film.modes(s)) / sigma.square().clamp_min(1e-30).view(
            -1, *[1] * (s.ndim - 3)
        )
        found = []
        for axis, size in enumerate((s.shape[1], *s.shape[3:])):
            place = axis + (axis > 0)
            others = [other for other in range(power.ndim) if other != place]
            count = (power > LOUD).double().sum(others)
            quiet = (count <= MIN_LOUD * count.max()).nonzero().flatten()  # the first one ends the spectrum
            wave = float(quiet.min() if len(quiet) else min(len(count), size // 2 + 1)) - 1
            wave = max(1.0, wave) * math.pi * (1 + self.is_periodic[axis]) / size
            width = round(WIDTH * math.sqrt(2 * EXPONENT + 3) / wave)
            most = max(MIN_HALF_WIDTH, round(MOST_OF_AXIS * size))
            found.append(min(max(MIN_HALF_WIDTH, width), most, (size - 1) // 2))
        return found

    def matrix(self, axis: int, order: int) -> Tensor:
        """The test functions along time (0) or an axis; single cells along one with few."""
        if (axis, order) not in self.matrices:
            n, width = self.sizes[axis], self.half_widths[axis]
            self.matrices[axis, order] = (
                compact_functions(n, width, order, self.is_periodic[axis])
                if width >= MIN_HALF_WIDTH
                else torch.eye(n, dtype=torch.float64)
            )
        return self.matrices[axis, order]

    def tested(self, one: PlainTerm, power: Tensor) -> Tensor:
        """The products (tests,) of all test functions and a plain term, whose power has these values (time,
        *space)."""
        matrices = [self.matrix(axis, order) for axis, order in enumerate(one.orders)]
        return one.factor * apply_axes(power, matrices).flatten()

    def columns(self, s: Tensor, smooth: Tensor, sigma: Tensor) -> Tensor:
        """All terms and, last, the time derivatives of the channels (terms + C, tests) of a film s (time, C,
        *space); smooth: denoised."""
        values = functools.cache(lambda powers: power_without_noise(s, powers, sigma))
        found = {place: self.tested(one, values(one.powers)) for place, one in self.plain.items()}
        each = max(1, MAX_BYTES // (8 * max(1, len(self.others)) * smooth[0, 0].numel()))
        in_time, *in_space = (self.matrix(axis, 0) for axis in range(len(self.sizes)))
        parts = [
            apply_axes(self.terms(part).unflatten(-1, s.shape[2:]), in_space)
            for part in (smooth.split(each) if self.others else ())
        ]
        others = torch.cat(parts).flatten(2).movedim(0, 1) if parts else ()  # terms, time, tests in space
        found |= {place: (in_time @ one).flatten() for place, one in zip(self.others, others, strict=True)}
        derivatives = [self.tested(one, values(one.powers)) for one in self.targets]
        return torch.stack([*[found[place] for place in range(len(self.library))], *derivatives])

    def noise_of_plain(self, s: Tensor) -> Tensor:
        """What noise adds to the products of plain terms and time derivatives of a film s (blocks, plain + C,
        plain + C): that of one value to the product of two powers, summed over values. Exact in the mean,
        because the Hermite polynomials are so."""
        every = [*self.plain.values(), *self.targets]
        found = s.new_zeros(math.prod(self.parts()), len(every), len(every))
        pairs: dict[tuple, list[tuple[int, int]]] = {}
        for i, one in enumerate(every):
            for j, other in enumerate(every[: i + 1]):
                if any(a and b for a, b in zip(one.powers, other.powers, strict=True)):
                    pairs.setdefault(tuple(sorted((one.powers, other.powers))), []).append((i, j))
        values = functools.cache(lambda powers: power_without_noise(s, powers, self.sigma))
        for (first, second), places in pairs.items():
            both = tuple(a + b for a, b in zip(first, second, strict=True))
            noise = values(first) * values(second) - power_without_noise(s, both, self.sigma)
            done: dict[tuple, Tensor] = {}
            for i, j in places:
                orders = tuple(
                    tuple(sorted(pair)) for pair in zip(every[i].orders, every[j].orders, strict=True)
                )
                if orders[:1] not in done:
                    done[orders[:1]] = torch.tensordot(self.in_parts(0, *orders[0]), noise, 1)
                if orders not in done:
                    matrices = [self.in_parts(axis, *pair) for axis, pair in enumerate(orders[1:], 1)]
                    done[orders] = apply_axes(done[orders[:1]], matrices).flatten()
                found[:, i, j] = found[:, j, i] = every[i].factor * every[j].factor * done[orders]
        return found

    def parts(self) -> list[int]:
        """The numbers of parts of time and every axis, whose products are the blocks of a film."""
        counts = [len(self.matrix(axis, 0)) for axis in range(len(self.sizes))]
        each = [1] * len(counts)
        while math.prod(each) * len(self.films) < NUM_BLOCKS:
            longest = max(range(len(counts)), key=lambda axis: counts[axis] / each[axis])
            if each[longest] == counts[longest]:
                break
            each[longest] += 1
        return each

    def part(self, axis: int) -> Tensor:
        """The part (tests,) of every test function along time (0) or an axis."""
        count = len(self.matrix(axis, 0))
        return torch.arange(count) * self.parts()[axis] // count

    def block(self) -> Tensor:
        """The block (tests,) of every test function of a film, 0 to blocks - 1."""
        number = torch.zeros(1, dtype=torch.long)
        for axis, num in enumerate(self.parts()):
            number = (number[:, None] * num + self.part(axis)).flatten()
        return number

    def in_parts(self, axis: int, order: int, other: int) -> Tensor:
        """Products (parts, cells) of test functions' derivatives of two orders, summed over each part."""
        products = self.matrix(axis, order) * self.matrix(axis, other)
        return products.new_zeros(self.parts()[axis], products.shape[1]).index_add(
            0, self.part(axis), products
        )

    def products(self, films: Tensor, sigma: Tensor) -> Tensor:
        """The products (blocks, terms + C, terms + C) of all terms and time derivatives of films with noise
        sigma."""
        smooth, block, found = self.film.denoised(films, sigma), self.block(), []
        for s, smooth_s in zip(films, smooth, strict=True):
            beat()
            columns = self.columns(s, smooth_s, sigma)
            parts = (columns[:, block == one] for one in range(int(block.max()) + 1))
            found += [x @ x.mT for x in parts]
        return torch.stack(found)

    def of_terms(self, places: list[int]) -> "WeakForm":
        """The same with these terms alone."""
        library = [self.library[place] for place in places]
        return WeakForm(self.films, self.sigma, library, self.settings)

    def tiers(self) -> list[list[int]]:
        """The plain terms of low degree and order, and all terms."""
        low = [
            place
            for place, one in self.plain.items()
            if sum(one.powers) <= LOW_DEGREE and sum(one.orders) <= LOW_ORDER
        ]
        return [low, list(range(len(self.library)))]

    def equations(self) -> Tensor:
        """Normal equations (blocks, C, terms + 1, terms + 1) without what the noise adds to them."""
        plain, rng = self.products(self.films, self.sigma), generator(0, "weak")
        total, sigma = plain.clone(), self.sigma.view(-1, *[1] * (self.films.ndim - 3))
        for _ in range(NUM_NOISE if self.others else 0):
            noise = sigma * torch.randn(self.films.shape, generator=rng, dtype=self.films.dtype)
            for sign in (1, -1):
                louder = self.products(self.films + sign * noise, math.sqrt(2) * self.sigma)
                total -= (louder - plain) / (2 * NUM_NOISE)
        num, targets = len(self.library), range(len(self.targets))
        exact = torch.tensor([*self.plain, *(num + c for c in targets)])
        noise = torch.cat([self.noise_of_plain(s) for s in self.films])
        total[:, exact[:, None], exact] = plain[:, exact[:, None], exact] - noise
        of_channels = [torch.tensor([*range(num), num + c]) for c in targets]
        return torch.stack([total[:, places[:, None], places] for places in of_channels], 1)

    def errors_by_noise(self, numbers: Callable[[Tensor], Tensor]) -> Tensor:
        """Standard errors of sums over films of `numbers`, functions of their columns, by the noise in the
        films: sigma times the length of their gradient by all values of the films (delta method; by
        Poincaré's inequality not too small in the mean). The filter of other terms than plain ones, and the
        noise's part, are held: they change it by 0.1 %."""
        gain, squares = self.film.gain(self.films, self.sigma), []
        for s in self.films:
            beat()
            s = s.clone().requires_grad_()
            with torch.enable_grad():
                found = numbers(self.columns(s, self.film.filtered(s[None], gain)[0], self.sigma))
            gradients = [torch.autograd.grad(one, s, retain_graph=True)[0] for one in found]
            squares.append(
                torch.stack([one.square().transpose(0, 1).flatten(1).sum(1) for one in gradients])
                @ self.sigma.square()
            )
        return torch.stack(squares).sum(0).sqrt()

    def missed(self, channel: int, values: Tensor) -> Tensor:
        """Weights (..., terms + C) of the columns whose sum is what values (..., terms) leave of a channel's
        time derivative."""
        of_targets = torch.eye(len(self.targets), dtype=values.dtype)[channel]
        return torch.cat([-values, of_targets.expand(*values.shape[:-1], -1)], -1)

    def noise_errors(self, channel: int, places: list[int], values: Tensor) -> Tensor:
        """Standard errors of the values of some terms, fitted to a channel, by the noise."""
        form, num, missed = self.of_terms(places), len(places), self.missed(channel, values)
        inverse = torch.linalg.pinv(form.equations()[:, channel].sum(0)[:num, :num], hermitian=True)
        return form.errors_by_noise(lambda x: inverse @ (x[:num] @ (missed @ x)))

    def loss_errors(self, channel: int, values: Tensor, others: Tensor) -> Tensor:
        """Standard errors (sets,) by the noise of how much more other values (sets, terms) leave than
        values."""
        missed, by_others = self.missed(channel, values), self.missed(channel, others)
        return self.errors_by_noise(lambda x: (by_others @ x).square().sum(1) - (missed @ x).square().sum())
