"""Members of a forecast given measurements of the state, by an ensemble Kalman smoother.

    y = h(state) + noise * eta          values of some cells in some frames, noise above 0

After a frame with measurements every member, with all of its frames so far, moves by

    x_j + sum_i x'_i W_ij,   W = Y' (Y'^T Y' + (N - 1) I)^-1 (y / noise + eta - Y)^T,   Y = h(x) / noise

with ' the deviation from the mean of N members (Evensen 2003, doi 10.1007/s10236-003-0036-9). Earlier frames
move by the same weights, which makes it a smoother (Evensen and van Leeuwen 2000). If the dynamics and h are
linear and all noise is Gaussian it is the Kalman smoother in the limit of many members; so at least
`ENSEMBLE` are computed, whatever number is returned.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ups.generative.conditions import StateConditions
from ups.generative.observation import Measured
from ups.generative.sampling import Sampler, Starts, block_size, sample_rollout, sample_starts, two_noises
from ups.models.operator import Operator
from ups.models.rollout import in_blocks, member_noise

# with 24 measured numbers the error is then 1.005 times the exact one (tests/test_filtering.py)
ENSEMBLE = 512
MOST_INDEPENDENT = 0.1  # measured numbers over members: with more, the spread is too small


def weights(predicted: Tensor, values: Tensor, noise: Tensor, eta: Tensor) -> tuple[Tensor, float]:
    """(W (N, N), number of independent measured numbers) of predicted values Y (N, k), values and noise (k,)
    and standard normal eta (N, k)."""
    num, scaled = len(predicted), predicted / noise
    deviation = scaled - scaled.mean(0)
    gram = deviation.mT @ deviation
    factor = torch.linalg.cholesky(gram + (num - 1) * torch.eye(len(noise)).to(gram))
    towards = torch.cholesky_solve((values / noise + eta - scaled).mT, factor)
    return deviation @ towards, float(torch.cholesky_solve(gram, factor).trace())


def smoothed(
    segment: Callable[[Tensor | None, int], Tensor],
    predicted: Callable[[Tensor, int], Tensor],
    measured: Mapping[int, tuple[Tensor, Tensor]],
    eta: Callable[[int, int], Tensor],
    num_frames: int,
) -> tuple[Tensor, float]:
    """(frames (N, num_frames, ...) of N members given all measurements, the most independent numbers of a
    frame).

    segment: the next frames (N, frames, ...) after those so far (None: after the start), up to the frame of
    this number. predicted: h of states (N, ...) in the frame of this number, (N, k), float64. measured:
    number of a frame, from 1 on -> (values, noise), each (k,). eta: standard normal (N, k) of number and k.
    """
    frames, most = None, 0.0
    for number in sorted({*measured, num_frames}):
        new = segment(frames, number)
        frames = new if frames is None else torch.cat([frames, new], 1)
        if number in measured:
            values, noise = measured[number]
            y = predicted(frames[:, -1], number)
            w, independent = weights(y, values, noise, eta(number, len(values)).to(y))
            change = w.mT @ (frames - frames.mean(0)).flatten(1).to(w)
            frames, most = frames + change.view_as(frames).to(frames), max(most, independent)
    return frames, most


@torch.no_grad()
def sample_filtered(
    operator: Operator,
    sampler: Sampler | None,
    name: str,
    starts: Starts,
    num_frames: int,
    num_members: int,
    seed: int,
    frames: Sequence[int],
    measured: Measured,
) -> Tensor:
    """`ups.generative.sampling.sample_states` given measurements (batch, len(frames), C, *space) of `frames`,
    of which the first after the start is 1. Warns if there are too few members for them."""
    draws, num = [], max(num_members, ENSEMBLE)
    for row, name_of_row in enumerate(starts.names):
        of_frame = {frame: measured.row((row, place)) for place, frame in enumerate(frames)}
        one = replace(starts.rows(torch.full((num,), row)), names=[name_of_row])
        z, independent = _sample_row(operator, sampler, name, one, num_frames, seed, of_frame)
        draws.append(z[:num_members])
        if independent > MOST_INDEPENDENT * num:
            warnings.warn(
                f"{name}: a frame of row {row} has {independent:.0f} independent measured numbers; expected "
                f"at most {MOST_INDEPENDENT * num:.0f} for {num} members, as the spread is too small with "
                "more. Pass more members, fewer values or more noise.",
                stacklevel=4,
            )
    return torch.stack(draws)


def _sample_row(
    operator: Operator,
    sampler: Sampler | None,
    name: str,
    one: Starts,
    num_frames: int,
    seed: int,
    of_frame: Mapping[int, tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, float]:
    """`smoothed` latents of members that start from the same row `one`, with its only name. of_frame: cells,
    values and noise by frame."""
    head, num = operator.head(name), len(one.z)
    states, size = StateConditions(operator, name), block_size(head.codec, one.z.device)

    def segment(done: Tensor | None, number: int) -> Tensor:
        if sampler is None and done is None:
            each = Starts(one.z[:1], one.parameters[:1], one.names)
            return sample_starts(operator, name, each, number, num, seed)[0]
        z, first = (one.z, 0) if done is None else (torch.cat([one.z, done], 1), done.shape[1])
        if sampler is None:
            return operator.rollout(z[:, -head.history :], name, one.parameters, number - first)
        residual = partial(sampler.network.call, Sampler.residual, sampler, states)
        error = sampler.network.heads[name].sample_error

        def block(index: Tensor) -> Tensor:
            def noise_of(lead: int) -> tuple[Tensor, ...]:
                shape, place = z.shape[2:], (0, index)
                return two_noises(shape, seed, one.names, first + lead, num, place, states.device)

            rows = replace(one, z=z).rows(index)
            return sample_rollout(states, residual, rows, number - first, noise_of, error, first)

        return in_blocks(block, num, size)

    def predicted(z: Tensor, number: int) -> Tensor:
        return head.physical(z).flatten(1)[:, of_frame[number][0]].double()

    def eta(number: int, count: int) -> Tensor:
        return member_noise((count,), seed, one.names, number, num, "measured")[0].double()

    measured = {number: (values, noise) for number, (_, values, noise) in of_frame.items()}
    return smoothed(segment, predicted, measured, eta, num_frames)
