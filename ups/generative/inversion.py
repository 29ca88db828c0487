"""The coefficient of a steady task given noisy values or block means of it, and values of the solution.

    y = h(v) + noise * eta,   v ~ N(mean, C), the normalised coefficient (`LinearPosterior`)

h takes block means of the coefficient in physical units, and cells of the operator's solution. With its
tangent J at the most probable v_0 the posterior N(v_0, P) is Gaussian. Samples of it, by Matheron's rule:

    v = z + C J^T (J C J^T + noise^2 I)^-1 (y_0 - J z - noise * eta),   z ~ N(mean, C),
    y_0 = y - h(v_0) + J v_0

v_0 is found by Gauss-Newton steps (Tarantola 2005, section 3.4). If h is linear these samples are exact. Else
each is fitted to h itself (randomized maximum likelihood, Oliver et al. 1996) and starts a Markov chain that
proposes v_0 + sqrt(1 - b^2) (v - v_0) + b (v' - v_0), with v' a sample of N(v_0, P). That keeps N(v_0, P), so
a proposal is accepted with the ratio of exact to linear likelihood (Rudolf and Sprungk 2018, "On a
generalization of the preconditioned Crank-Nicolson Metropolis algorithm").
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ups.data.tokenizer import Tokenizer
from ups.generative.cell_posterior import CellPosterior
from ups.generative.conditions import num_states
from ups.generative.linear_posterior import LinearPosterior
from ups.generative.observation import BLOCKS, NOISY_STD, Measured, Observation, block_average, observe_all
from ups.generative.sampling import Sampler, sample_solutions
from ups.models.operator import Operator
from ups.models.rollout import member_noise

NEWTON_STEPS, CONVERGED = 20, 1e-3  # Gauss-Newton steps, and the largest change of a cell after the last one
HALVES = [0.5**power for power in range(8)]  # of a step, of which the largest that fits better is taken
FIT_STEPS = 4  # of each member, with the tangent at v_0
IGNORED = 1e6  # times the noise: a value with so much is not used
# b of a chain's proposals, and times the noise in their N(v_0, P): wide ones find what the tangent excludes
PROPOSALS = ((1.0, 1.0), (1.0, 4.0), (0.5, 16.0), (0.2, 2.0), (0.05, 1.0)) * 8
FEW = 0.1  # of the proposals are accepted: with fewer the chain has not forgotten its start


def sample_coefficients(
    linear: LinearPosterior,
    h: Callable[[Tensor], Tensor],
    y: Tensor,
    noise: Tensor,
    white: Tensor,
    eta: Tensor,
    rng: torch.Generator,
    is_linear: bool,
) -> tuple[Tensor, float]:
    """(samples (M, C, *space) of v given y (k,), fraction of accepted proposals).

    h: of v (batch, C, *space), (batch, k), differentiable. noise (k,): standard deviations; where it is 0, h
    is linear. white (S, M, *shape), eta (S, M, k): standard normal, for the first sample and all proposals; S
    is 1 if h is linear.
    """
    shape, variance = linear.shape, linear.variance.double()
    basis, mean, rest = linear.basis.double(), linear.mean.double(), linear.residual_variance.double()

    def call(some: Tensor) -> Tensor:
        """h of v (batch, cells), float64."""
        blocks = some.view(-1, *shape).float().split(num_states(some.device))
        return torch.cat([h(block) for block in blocks]).double()

    def tangent(v: Tensor) -> tuple[Tensor, Tensor]:
        """(h(v), J (k, cells)), by one call of h for a block of rows of J."""
        rows = [torch.empty(0, len(mean)).to(mean)]
        for index in torch.arange(len(y), device=v.device).split(num_states(v.device)) if len(y) else ():
            with torch.enable_grad():
                same = v.view(1, *shape).float().expand(len(index), *shape).clone().requires_grad_()
                one = h(same).gather(1, index[:, None]).sum()
            rows.append(torch.autograd.grad(one, same)[0].flatten(1).double())
        return call(v[None])[0], torch.cat(rows)

    def solver(j: Tensor, noise: Tensor) -> Callable[[Tensor], Tensor]:
        """C J^T K^-1 of misfits (.., k)."""
        cross = (j @ basis * variance) @ basis.mT + rest * j
        factor = torch.linalg.cholesky(cross @ j.mT + torch.diag(noise.square()))
        return lambda misfit: torch.cholesky_solve(misfit.mT, factor).mT @ cross

    def misfit(v: Tensor, value: Tensor) -> float:
        """Minus twice the logarithm of the posterior density of v with h(v) = value."""
        off = v - mean
        along = off @ basis
        prior = (off.square().sum() - (along.square() * variance / (variance + rest)).sum()) / rest
        return float(torch.where(noise > 0, ((y - value) / noise).square(), 0.0).sum() + prior)

    v, known = mean, torch.where(noise > 0, IGNORED * noise, noise)  # exact values first, which then stay
    value, j = tangent(v)
    v = mean + solver(j, known)((y - value)[None])[0]
    for _ in range(0 if is_linear else NEWTON_STEPS):
        value, j = tangent(v)
        change = mean + solver(j, noise)((y - value + j @ (v - mean))[None])[0] - v
        worst = misfit(v, value)
        sizes = [
            size for size in HALVES if misfit(v + size * change, call((v + size * change)[None])[0]) < worst
        ]
        v = v + max(sizes, default=0.0) * change
        if not sizes or change.abs().max() < CONVERGED:
            break
    value, j = tangent(v)
    target = y - value + j @ v

    def prior_samples(number: int) -> Tensor:
        return mean + linear._sample_prior(white[number].flatten(1)).double()

    def square(misfit: Tensor, noise: Tensor) -> Tensor:
        return torch.where(noise > 0, (misfit / noise).square(), 0.0).sum(1)

    gain, z, perturbed = solver(j, noise), prior_samples(0), y - noise * eta[0]
    samples = z + gain(perturbed - y + target - z @ j.mT)
    if is_linear:
        return samples.view(-1, *shape), 1.0
    values = call(samples)
    for _ in range(FIT_STEPS):  # to fit the perturbed values with h itself
        closer = z + gain(perturbed - values + (samples - z) @ j.mT)
        closer_values = call(closer)
        is_closer = (square(perturbed - closer_values, noise) < square(perturbed - values, noise))[:, None]
        samples, values = (
            torch.where(is_closer, *pair) for pair in ((closer, samples), (closer_values, values))
        )

    gains = {wide: solver(j, wide * noise) for wide in {wide for _, wide in PROPOSALS}}
    num_accepted = 0.0
    for number, (size, wide) in enumerate(PROPOSALS, 1):
        z, gain = prior_samples(number), gains[wide]
        centre = mean + gain((target - j @ mean)[None])
        fresh = z + gain(target - z @ j.mT - wide * noise * eta[number])
        proposed = centre + math.sqrt(1 - size**2) * (samples - centre) + size * (fresh - centre)
        proposed_values = call(proposed)
        gained = [
            square(target - some @ j.mT, wide * noise) - square(y - value, noise)
            for some, value in ((samples, values), (proposed, proposed_values))
        ]
        uniform = torch.rand(len(samples), generator=rng, dtype=torch.float64).to(samples.device)
        is_accepted = (uniform.log() < 0.5 * (gained[1] - gained[0]))[:, None]  # not of NaN
        samples = torch.where(is_accepted, proposed, samples)
        values = torch.where(is_accepted, proposed_values, values)
        num_accepted += float(is_accepted.double().mean())
    return samples.view(-1, *shape), num_accepted / len(PROPOSALS)


@torch.no_grad()
def sample_measured(
    operator: Operator,
    sampler: Sampler,
    name: str,
    measured: Measured,
    solution: Measured | None,
    parameters: Tensor,
    num_members: int,
    seed: int,
) -> Tensor:
    """Solutions (batch, num_members, C, *space), physical units relative to the task's offsets, of steady
    task `name` given measurements of its coefficient and solution (None: of none). Raises ValueError for
    what the learnt posterior of a two-valued coefficient was not trained on."""
    head, posterior = operator.head(name), sampler.network.heads[name].guess
    codec = head.input_codec
    if isinstance(posterior, CellPosterior):
        observation = _as_trained(name, codec, measured, solution)
        return sample_solutions(operator, sampler, name, observation, parameters, num_members, seed)
    if measured.block > 1 and codec.positive and bool((measured.noise[measured.mask] == 0).any()):
        raise ValueError(
            f"{name} was given block means of {codec.fields[0]} without noise; expected a standard deviation "
            "above 0, as samples of its logarithm cannot fit them exactly. Pass noise."
        )
    is_linear, draws = solution is None and not codec.positive, []
    for row in range(len(measured.values)):
        h, y, noise = _measurement(operator, name, measured, solution, parameters[row : row + 1], row)
        num_steps = 1 if is_linear else 1 + len(PROPOSALS)
        white, eta = (
            torch.cat([member_noise(size, seed, [row], step, num_members, key) for step in range(num_steps)])
            for size, key in ((posterior.shape, "field"), ((len(y),), "measured"))
        )
        rng = torch.Generator().manual_seed(seed % 2**63 + row)
        v, accepted = sample_coefficients(
            posterior, h, y, noise, white.to(y.device), eta.to(y), rng, is_linear
        )
        if accepted < FEW:
            warnings.warn(
                f"{name}: {accepted:.0%} of the proposals of row {row} were accepted, so that its samples "
                "are those of a linearised measurement. Pass a larger noise or fewer values.",
                stacklevel=4,
            )
        draws.append(v.float())
    v = torch.cat(draws)
    every = parameters.repeat_interleave(num_members, 0)
    return sample_solutions(operator, sampler, name, observe_all(v), every, 1, seed).view(
        len(measured.values), num_members, head.codec.num_channels, *head.codec.space
    )


def _measurement(
    operator: Operator, name: str, measured: Measured, solution: Measured | None, parameters: Tensor, row: int
) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """(h, y, noise) of one row; cells without noise as normalised values, so that h is linear there."""
    head = operator.head(name)
    codec = head.input_codec
    cells, y, noise = measured.row(row)
    is_exact = (noise == 0) & (measured.block == 1)
    known = torch.zeros_like(measured.mask[row]).flatten()
    known[cells[is_exact]] = True
    middle = codec.denormalise(torch.zeros_like(measured.values[row]).float())
    w = codec.normalise(torch.where(known.view_as(middle), measured.values[row].to(middle), middle))
    y = torch.where(is_exact, w.flatten()[cells].double(), y)
    at = cells[:0]
    if solution is not None:
        at, *of_solution = solution.row(row)
        y, noise = (torch.cat(pair) for pair in zip((y, noise), of_solution, strict=True))

    def h(v: Tensor) -> Tensor:
        a = block_average(codec.denormalise(v), measured.block).flatten(1)[:, cells]
        values = torch.where(is_exact, v.flatten(1)[:, cells], a)
        if not len(at):
            return values
        batch = head.parameter_batch(parameters.expand(len(v), -1))
        u = operator.step(codec.projected(v)[:, None], name, batch)[0][:, 0]
        return torch.cat([values, head.codec.denormalise(u).flatten(1)[:, at]], 1)

    return h, y, noise


def _as_trained(name: str, codec: Tokenizer, measured: Measured, solution: Measured | None) -> Observation:
    """The observation of a two-valued coefficient, as its posterior was trained on it."""
    noise = measured.noise.flatten(1) / float(codec.std)
    is_noisy = measured.block == 1 and bool(((noise >= NOISY_STD[0]) & (noise <= NOISY_STD[1])).all())
    is_mean = measured.block in BLOCKS and not bool(noise.any())
    is_same = bool((noise == noise[:, :1]).all() & measured.mask.all())
    if solution is not None or codec.positive or not (is_same and (is_noisy or is_mean)):
        low, high = (float(codec.std) * size for size in NOISY_STD)
        raise ValueError(
            f"{name} has a coefficient of two values, whose posterior is learnt; expected exact values of "
            f"some cells, exact means of all blocks of {', '.join(map(str, BLOCKS))} cells per axis, or one "
            f"noise of {low:.3g} to {high:.3g} in all cells, and no u. Pass one of these."
        )
    observation = observe_all(codec.normalise(measured.values.float()))
    facts = torch.stack([noise[:, 0] * 0 + 1, noise[:, 0], noise[:, 0] * 0 + math.log2(measured.block)], 1)
    return replace(observation, facts=facts.float())
