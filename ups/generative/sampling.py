"""Samplers of the operator's residual, and ensembles of rollouts and solutions made with them.

    waves        Gaussian waves in closed form, no evaluation         (stage diffusion)
    corrector    the diffusion, 2 sampler_steps evaluations           (stage diffusion)
    student_1    its student in one evaluation                        (stage consistency)
    student_2    its student in two, with fresh noise at mid_angle    (stage consistency)
    scoring      one evaluation of a network trained by scores        (stage scoring)
    prior        the diffusion of a steady task                       (stage steady)

The folder of a finished stage is enough: it has the conditional mean and scale, and its config.json has
sampler_steps and mid_angle.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups.common.device import has_gradient, send
from ups.common.files import DamagedError
from ups.common.place import STAGES, make_target
from ups.data.tokenizer import Tokenizer
from ups.generative.conditions import FieldConditions, StateConditions, num_states
from ups.generative.corrector import Condition, Corrector, Start, load_corrector
from ups.generative.diffusion import sample
from ups.generative.observation import Observation
from ups.generative.student import sample_student
from ups.models.assimilation import perturbed
from ups.models.operator import Operator
from ups.models.rollout import in_blocks, in_segments, member_noise, rollout
from ups.training.artifact import stage_of_run

FieldPrediction = tuple[Tensor, Tensor, Tensor, Start]  # of FieldConditions.predict

CALL_BYTES = 2**28  # largest size of the fields of one call
KEYS = ("noise", "second")  # of the random numbers of a sample

# name -> (stage, evaluations; None: those of the probability flow of a diffusion)
SAMPLERS = {
    sampler: (stage.name, evaluations)
    for stage in STAGES.values()
    for sampler, evaluations in stage.samplers.items()
}


@dataclass(frozen=True)
class Sampler:
    """A network and the way to sample with it. evaluations: as in `SAMPLERS`; num_steps: of the midpoint rule
    of a diffusion, 0: as in training."""

    network: Corrector
    evaluations: int | None = None
    num_steps: int = 0

    def whitened(self, condition: Condition, noise: Tensor, second: Tensor | None = None) -> Tensor:
        """r~ (batch, *tokens, dim) from noise of that shape. second: noise of the second evaluation."""
        network = self.network
        if network.heads[condition.name].method != "diffusion":
            return condition.initial_state(noise)
        velocity = network.velocity(condition)
        if self.evaluations is None:
            return sample(velocity, condition.initial_state(noise), self.num_steps or network.sampler_steps)
        return sample_student(velocity, noise, network.mid_angle, second if self.evaluations == 2 else None)

    def residual(
        self,
        states: StateConditions,
        tokens: Tensor,
        facts: Tensor,
        noise: Tensor,
        second: Tensor,
        shuffle: Tensor | None = None,
        is_limited: bool = True,
    ) -> Tensor:
        """r (rows, *tokens, dim), latent units, from noise of that shape.

        tokens, facts: raw conditions (cases, ...) of `StateConditions.predict`, each for rows / cases
        neighbouring rows. shuffle (cases,): the network gets the conditions of these cases; mean and scale
        stay those of the case itself. is_limited: apply the head's `WaveLimits`.
        """
        head = self.network.heads[states.name]
        case: Tensor | slice = slice(None)  # one row each, as in rollouts: views in place of copies
        if len(noise) > len(tokens):
            case = torch.arange(len(tokens), device=noise.device).repeat_interleave(len(noise) // len(tokens))
        if self.evaluations == 0:
            condition = head.gaussian_condition(tokens, facts).rows(case)
            white = head.waves.sample_gaussian(noise)
        else:
            every = head.condition(tokens, facts)
            condition = network_condition = every.rows(case)
            if shuffle is not None:
                other = every.rows(shuffle[case])
                network_condition = replace(condition, tokens=other.tokens, facts=other.facts)
            white = self.whitened(network_condition, noise, second)
        r = head.unwhiten(white, condition)
        if not is_limited:
            return r
        w_pred, w = (states.decode(z).flatten(1, 2) for z in (states.prediction(tokens)[case], r))
        w = head.limits(w_pred, w, self.evaluations, facts[case, -1] > 0)
        return states.encode(w[:, None])


def samplers_of(stage: str, network: Corrector) -> dict[str, Sampler]:
    """Name -> sampler, for every sampler of a stage's network."""
    return {
        name: Sampler(network, evaluations) for name, (of, evaluations) in SAMPLERS.items() if of == stage
    }


def load_sampler(run_dir: Path, name: str, device: torch.device | str, operator: Operator) -> Sampler:
    """The sampler `name` (of SAMPLERS) from its finished stage in the folder of a run; it samples the
    residuals of `operator`. Raises as `stage_of_run` and `load_corrector`."""
    stage, evaluations = SAMPLERS[name]
    stage_of_run(run_dir, stage)
    network = load_corrector(run_dir / stage, device, operator)
    if evaluations is None and network.sampler_steps is None:
        raise DamagedError(
            f"config.json in {run_dir / stage} has no sampler_steps; expected the number of steps of the "
            f"sampler. Run {make_target(stage)}."
        )
    for task in (task for task, head in network.heads.items() if head.waves is not None):
        wanted = StateConditions(operator, task).description
        _require_fit(network.heads[task].facts.described(), wanted, run_dir / stage)
    return Sampler(network, evaluations)


def _require_fit(head: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Raise DamagedError, naming the key, if a head was made for another operator."""
    for key, value in wanted.items():
        if head.get(key, value) != value:
            raise DamagedError(
                f"{folder} has {key} {head[key]!r:.80} of {head['name']}; expected "
                f"{value!r:.80}, as its operator has. Run {make_target(folder.name)}."
            )


# ---- ensembles of rollouts


@dataclass(frozen=True)
class Starts:
    """What an ensemble starts from: z (batch, history or more, *tokens, dim), parameters (batch, P), raw, and
    a forcing as of `Operator.rollout`. names: of the rows, e.g. their numbers; a member depends on the seed,
    the name of its row and its number alone, not on the rest of the batch."""

    z: Tensor
    parameters: Tensor
    names: Sequence[int | str] = ()
    forcing: Tensor | None = None

    def rows(self, index: Tensor) -> "Starts":
        """The unnamed rows `index`, which may repeat."""
        forcing = None if self.forcing is None else self.forcing[index]
        return Starts(self.z[index], self.parameters[index], forcing=forcing)


def sample_rollout(
    states: StateConditions,
    residual: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    starts: Starts,
    num_frames: int,
    noise_of: Callable[[int], tuple[Tensor, Tensor]],
    sample_error: float = 0.0,
    first: int = 0,
) -> Tensor:
    """One member (batch, num_frames, *tokens, dim) for each row. From a sample outside the range of the data
    a base may run away, so predictions are clipped to that range; samples are not.

    residual(tokens, facts, noise, second): of all rows; noise_of(lead): their two noises in call `lead`.
    sample_error: of a sampled state, as `CorrectorHead.sample_error`. The forcing starts at the last frame of
    z: frames before the history are not used. first: frames of the same rollout that z already ends with.
    """
    head, z, forcing = states.head, starts.z, starts.forcing
    is_tracked = has_gradient(z, starts.parameters, forcing)
    if forcing is not None:
        z = z if first else z[:, -head.history :]
        forcing = torch.cat([forcing[:, :1], forcing], 1)  # `predict` takes it from one frame earlier
    batch = head.parameter_batch(starts.parameters, forcing)
    z = torch.cat([z[:, :1], z], 1)  # without an earlier frame the change is zero
    low, high = head.range_of_data(z[:, : z.shape[1] - first])
    predicted: dict[int, Tensor] = {}  # number of a frame -> its prediction, which the next call needs again

    def step(window: Tensor, num_done: int) -> Tensor:
        """The next frame: its prediction, clipped, plus a sampled residual."""
        is_observed = first + num_done == 0  # the state that the call starts from
        error, known = 0.0 if is_observed else sample_error, batch.later(first + num_done)
        z_pred, tokens, facts = states.predict(window, known, error, predicted.get(num_done))
        w = states.decode(z_pred)
        z_pred = z_pred + states.encode(torch.clamp(w, low, high) - w)
        predicted[num_done + 1] = states.frame(z_pred)
        z_next = states.frame(z_pred + residual(tokens, facts, *noise_of(num_done)))
        return head.keep_latents(z_next, window[:, -1])

    steps = in_segments(step, num_frames, 1 + head.history) if is_tracked else step
    with torch.set_grad_enabled(is_tracked and torch.is_grad_enabled()):
        return rollout(steps, z, num_frames, 1 + head.history)


def sample_members(
    states: StateConditions,
    residual: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    starts: Starts,
    num_frames: int,
    num_members: int,
    seed: int,
    sample_error: float = 0.0,
    size: int = 0,
) -> Tensor:
    """Members (batch, num_members, num_frames, *tokens, dim), by `sample_rollout` with `member_noise`. size:
    states in a call, 0: `block_size`, with which no member depends on the number of others."""
    shape = starts.z.shape[2:]

    def sample_block(index: Tensor) -> Tensor:
        row, member = index // num_members, index % num_members
        names = starts.names[int(row[0]) : int(row[-1]) + 1]

        def noise_of(lead: int) -> tuple[Tensor, ...]:
            return two_noises(shape, seed, names, lead, num_members, (row - row[0], member), states.device)

        return sample_rollout(states, residual, starts.rows(row), num_frames, noise_of, sample_error)

    size = size or block_size(states.head.codec, states.device)
    return in_blocks(sample_block, len(starts.z) * num_members, size).unflatten(0, (-1, num_members))


def two_noises(
    shape: Sequence[int],
    seed: int,
    names: Sequence[int | str],
    lead: int,
    num_members: int,
    place: Any,
    device: torch.device,
) -> tuple[Tensor, ...]:
    """The two noises of a call, `member_noise` of KEYS at `place`, an index of (rows, members, *shape)."""
    noises = (member_noise(shape, seed, names, lead, num_members, key) for key in KEYS)
    return tuple(send(noise[place], device) for noise in noises)


def block_size(codec: Tokenizer, device: torch.device) -> int:
    """States in one call of the networks; depends on task and device alone."""
    most = CALL_BYTES // (4 * codec.num_channels * math.prod(codec.space))
    return max(1, min(num_states(device), most))


def sample_states(
    operator: Operator,
    sampler: Sampler | None,
    name: str,
    starts: Starts,
    num_frames: int,
    num_members: int,
    seed: int = 0,
) -> Tensor:
    """Members (batch, num_members, num_frames, *tokens, dim) of task `name`. sampler: None for
    `sample_starts`."""
    if sampler is None:
        return sample_starts(operator, name, starts, num_frames, num_members, seed)
    states, error = StateConditions(operator, name), sampler.network.heads[name].sample_error
    residual = partial(sampler.network.call, Sampler.residual, sampler, states)
    return sample_members(states, residual, starts, num_frames, num_members, seed, error)


def sample_starts(
    operator: Operator, name: str, starts: Starts, num_frames: int, num_members: int, seed: int
) -> Tensor:
    """As `sample_states`, of a task without noise in its dynamics: members differ in the noise of measurement
    of the frames that their start is estimated from, and no residual is sampled."""
    head = operator.head(name)
    z = starts.z[:, -max(head.history, head.start_frames) :]

    def sample_block(index: Tensor) -> Tensor:
        row = index // num_members
        some = slice(int(row[0]), int(row[-1]) + 1)
        w = perturbed(head, head.codec.decode(z[some]), seed, starts.names[some], num_members)
        frames = head.codec.encode(w[row - row[0], index % num_members])
        return operator.rollout(frames, name, starts.parameters[row], num_frames)

    size = block_size(head.codec, z.device)
    return in_blocks(sample_block, len(z) * num_members, size).unflatten(0, (-1, num_members))


# ---- samples of steady solutions


def predict_with_noise(
    fields: FieldConditions,
    observation: Observation,
    parameters: Tensor,
    seed: int,
    rows: Sequence[int],
    num_members: int,
) -> tuple[FieldPrediction, Tensor]:
    """(`FieldConditions.predict` with num_members starts per row, noise (batch, num_members, *tokens, dim)).
    Both depend on the seed and the numbers `rows` alone."""
    shape = (*fields.head.codec.tokens, fields.description["dim"])
    field, noise = (
        send(member_noise(size, seed, rows, 0, num_members, key), fields.device)
        for size, key in ((fields.noise_shape, "field"), (shape, "noise"))
    )
    return fields.predict(observation, parameters, field), noise


@torch.no_grad()
def sample_fields(
    fields: FieldConditions,
    whitened: Callable[[Condition, Tensor], Tensor],
    network: Corrector,
    prediction: FieldPrediction,
    noise: Tensor,
) -> Tensor:
    """Samples of a solution (batch, M, C, *space), physical units, from noise (batch, M, *tokens, dim).

    prediction: of `FieldConditions.predict` with M starts per row; whitened(condition, noise): r~.
    """
    log_u, tokens, facts, start = prediction
    head, parts = network.heads[fields.name], []
    conditions = head.condition(tokens, facts)
    row = torch.arange(len(log_u), device=log_u.device).repeat_interleave(noise.shape[1])
    size = num_states(noise.device)
    blocks = zip(*(part.split(size) for part in (noise.flatten(0, 1), row, *start)), strict=True)
    for block_noise, block_row, *block_start in blocks:
        condition = head.with_start(conditions.rows(block_row), Start(*block_start))
        parts.append(head.unwhiten(whitened(condition, block_noise), condition))
    return fields.solution(log_u[:, None], torch.cat(parts).view_as(noise))


@torch.no_grad()
def sample_solutions(
    operator: Operator,
    sampler: Sampler,
    name: str,
    observation: Observation,
    parameters: Tensor,
    num_members: int,
    seed: int = 0,
) -> Tensor:
    """Solutions (batch, num_members, C, *space), physical units, of steady task `name` given an observation
    of its coefficient in normalised units (`ups.generative.observation.observe_cells`)."""
    fields = FieldConditions(operator, name, sampler.network.heads[name].guess)
    prediction, noise = predict_with_noise(
        fields, observation, parameters, seed, range(len(observation.values)), num_members
    )
    return sample_fields(fields, sampler.whitened, sampler.network, prediction, noise)
