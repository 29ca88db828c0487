"""Identify an equation in films with white noise by its weak form (weak_form.py).

Resampled windows select the terms (resampling.py). The equation is doubted if other sets of as many terms
leave no more of the time derivative than it does, by the noise's standard errors of the difference, or if it
leaves too much."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ups_discovery.certainty import OTHERS, UNCLEAR, Certainty, concluded, sizes, too_small
from ups_discovery.differences import refined
from ups_discovery.integrator import Integrator, Model
from ups_discovery.least_squares import solve
from ups_discovery.resampling import residual_of, selected, standard_errors, without_uncertain
from ups_discovery.terms import Term
from ups_discovery.weak_form import MIN_HALF_WIDTH, WeakForm, plain_term

MAX_VALUES = 2**25  # of all terms in the films
# Of a term's value from zero, by the noise. The terms are the best of many: of 40 that are zero the largest
# one is as far in 2 % of the cases. The scatter of blocks may be too small by a factor of 7 here.
MIN_NOISE_ERRORS = 3.5
MAX_RIVALS = 6  # sets of terms that an equation is compared with, of both kinds: those that leave least
# Standard errors by which sets of at most as many terms have to leave more, and larger ones are better.
MIN_LOSS_ERRORS, MIN_GAIN_ERRORS = 2.0, 1.5
CLEAR = 8.0  # the same by the scatter of blocks, whose errors may be half as large
MAX_RESIDUAL, MAX_UNCERTAIN = 0.01, 0.2  # of the square of the time derivative: beyond chance, and possible
# Standard errors of what is left beyond chance, by the scatter of blocks, which is too small.
MIN_ERRORS_LEFT = 4.0
STUDENT = 2.2  # 95 %, of more blocks than those of certainty.py, whose neighbours are not independent
MAX_DISAGREEMENT = 2.0  # standard errors


@dataclass(frozen=True)
class WeakModel:
    """An equation by the weak form, with the standard errors (unknowns,) of its values by the scatter of
    blocks of windows, and by the noise alone, which windows that overlap share.

    form: of these places in the library. equations: of `form`. rivals: for every channel the other sets of
    terms that samples of windows prefer, by their places in `form`."""

    model: Model
    errors: Tensor
    noise_errors: Tensor
    form: WeakForm
    equations: Tensor
    places: list[int]
    rivals: list[list[list[int]]]

    @classmethod
    def of(
        cls,
        films: Tensor,
        sigma: Tensor,
        library: list[Term],
        places: list[int],
        settings: dict,
    ) -> "WeakModel | None":
        """By some of the terms; None if they explain nothing."""
        form = WeakForm(films, sigma, [library[place] for place in places], settings)
        equations, tiers = form.equations(), form.tiers()
        unknowns, values, errors, rivals = [], [], [], []
        for channel, blocks in enumerate(equations.unbind(1)):
            terms, others = selected(blocks, tiers, channel)
            if terms:
                errors_of = functools.partial(form.noise_errors, channel)
                *left_out, last = without_uncertain(blocks, terms, MIN_NOISE_ERRORS, errors_of)
                terms, found, by_noise = last
                others = [*others, *(some for some, *_ in left_out)]
                unknowns += [(channel, places[term]) for term in terms]
                values.append(found)
                errors.append(torch.stack([standard_errors(blocks, terms, found), by_noise]))
            rivals.append([some for some in others if {*some} != {*terms}])
        if not unknowns:
            return None
        model = Model(unknowns, torch.cat(values))
        return cls(model, *torch.cat(errors, 1), form, equations, places, rivals)

    def terms(self, model: Model, channel: int) -> tuple[list[int], Tensor]:
        """The terms of a channel, by their places in `form`, and their values."""
        rows = [row for row, (other, _) in enumerate(model.unknowns) if other == channel]
        return [self.places.index(model.unknowns[row][1]) for row in rows], model.values[rows]

    @functools.cached_property
    def has_rivals(self) -> bool:
        """Whether other sets of at most as many terms explain as much, or larger ones more, as far as the
        noise lets one tell."""
        for channel, blocks in enumerate(self.equations.unbind(1)):
            (terms, values), total = self.terms(self.model, channel), blocks.sum(0)
            rivals = self.rivals[channel]
            if not terms or not rivals:
                continue
            weight = torch.zeros(1 + len(rivals), len(total), dtype=values.dtype)
            for row, some in zip(weight, [terms, *rivals], strict=True):
                row[[*some, -1]] = torch.cat([-solve(total, some), row.new_ones(1)])
            losses = torch.einsum("si,bij,sj->sb", weight, blocks, weight) / total[-1, -1]
            more, weight = losses[1:] - losses[:1], weight[1:]
            scatter, more = more.std(1) * len(blocks) ** 0.5, more.sum(1)
            is_larger = torch.tensor([len(some) > len(terms) for some in rivals])
            is_close = torch.where(is_larger, more < -MAX_RESIDUAL, more < CLEAR * scatter)
            limit = torch.where(is_larger, -MIN_GAIN_ERRORS, MIN_LOSS_ERRORS)
            order = more.argsort()
            for of_kind in (is_larger, ~is_larger):
                close = order[(of_kind & is_close)[order]][:MAX_RIVALS]
                if not len(close):
                    continue
                every = sorted({*terms, *(term for place in close.tolist() for term in rivals[place])})
                mine = torch.zeros(len(total), dtype=values.dtype)
                mine[terms] = values
                form = self.form.of_terms(every)
                errors = form.loss_errors(channel, mine[every], -weight[close][:, every]) / total[-1, -1]
                if bool((more[close] < limit[close] * errors).any()):
                    return True
        return False

    def doubt(self, model: Model) -> str:
        """Why the terms of a model may not be stated: other terms explain as much, or what these leave of the
        time derivative is more than the noise allows, or might be."""
        for channel, blocks in enumerate(self.equations.unbind(1)):
            terms, values = self.terms(model, channel)
            if terms:
                residual, error = residual_of(blocks, terms, values)
                if residual - MIN_ERRORS_LEFT * error > MAX_RESIDUAL or residual + 2 * error > MAX_UNCERTAIN:
                    return UNCLEAR
        return OTHERS if self.has_rivals else ""


def weak_model(
    films: Tensor,
    sigma: Tensor,
    library: list[Term],
    settings: dict,
    is_enough: Callable[[WeakModel], bool] = lambda _: True,
) -> WeakModel | None:
    """The equation of films (rows, time, C, *space) with noise sigma (C,); None if no terms explain
    anything, or the films are too short.

    Plain terms are tried first, and all terms if these leave too much, or are not enough: derivatives of high
    order mimic products that are missing (shallow water), and then short waves grow."""
    if films.shape[1] < 2 * MIN_HALF_WIDTH + 1:
        return None
    films = films[: max(1, MAX_VALUES // (films[0, :, 0].numel() * len(library)))]
    every, ndim = list(range(len(library))), len(settings["space"])
    plain = [place for place in every if plain_term(library[place], settings["positive"], ndim)]
    found = WeakModel.of(films, sigma, library, plain, settings)
    is_clear = found is not None and found.doubt(found.model) != UNCLEAR
    if is_clear and is_enough(found):
        return found
    other = WeakModel.of(films, sigma, library, every, settings)
    return other if other and (not is_clear or is_enough(other)) else found


@dataclass(frozen=True)
class NoisyFilms:
    """The equation of films with noise: by the weak form, and then the integrator, fitted to denoised
    films."""

    one: Integrator
    weak: WeakModel

    @classmethod
    def of(cls, one: Integrator, least_noise: float) -> "tuple[NoisyFilms, Model] | None":
        """The route and its equation, or None if that is no better than persistence. least_noise: of
        `FilmWindows`."""

        def start_of(weak: WeakModel) -> Model | None:
            # errors of the stencils are less than much noise, and more than little
            return one.with_converged_steps(replace(weak.model, is_finer=least_noise > 0))

        def is_useful(model: Model | None) -> bool:
            return model is not None and one.error(model, one.windows.held_out) < one.persistence_error

        films, noise = one.windows.films, one.windows.noise
        weak = weak_model(films, noise, one.library, one.settings, lambda weak: is_useful(start_of(weak)))
        start = weak and start_of(weak)
        if start is None:
            return None
        model = one.with_converged_steps(refined(one, start)) or start
        # denoised films have lost what the weak form still sees: if both disagree it is right
        if bool(((model.values - start.values).abs() > MAX_DISAGREEMENT * weak.errors).any()):
            model = start
        # what happens in a window may be less than what its noise leaves there
        return (cls(one, weak), model) if weak.doubt(model) != UNCLEAR or is_useful(model) else None

    def certainty(self, model: Model) -> Certainty:
        """Intervals by Student's t times the standard error of the weak form, plus what the fit of the
        integrator changed. The standard error is the larger one of two: by the scatter of blocks of windows,
        which overlap in single films and so vary too little, and by the noise alone."""
        weak, s = self.weak, self.one.windows.shooting[:, 0]
        width = STUDENT * torch.maximum(weak.errors, weak.noise_errors)
        width = width + (model.values - weak.model.values).abs()
        is_uncertain = model.values.abs() <= width
        is_small = too_small(sizes(self.one, model, s), is_uncertain)
        others = weak.model.values
        return concluded(self.one, model, s, width, others, is_uncertain, is_small, weak.doubt(model))
