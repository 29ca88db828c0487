"""Every trained way to draw what the operator leaves, and rollouts and solutions drawn with it.

    corrector    the diffusion, 2 sampler_steps evaluations           (stage diffusion)
    student_1    its student in one evaluation                        (stage consistency)
    student_2    the same in two, fresh noise at mid_angle between    (stage consistency)
    rival        one evaluation of a network trained by scores        (stage rival)
    prior        the diffusion of a steady task                       (stage steady)

A finished stage's folder is enough: the conditional mean and scale are in all of them, sampler_steps and
mid_angle in their config.json.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups.common.files import DamagedError
from ups.common.stages import STAGES
from ups.common.transfer import send
from ups.data.tokenizer import Tokenizer
from ups.generative.conditions import FieldConditions, StateConditions
from ups.generative.corrector import Condition, Corrector, Start, load_corrector
from ups.generative.diffusion import sample
from ups.generative.observation import Observation
from ups.generative.student import sample_student
from ups.models.operator import Operator, padded
from ups.models.rollout import ensemble_rollout, in_blocks, member_noise
from ups.training.finished import stage_of_run

Predicted = tuple[Tensor, Tensor, Tensor, Start]  # of FieldConditions.predict

STATES = 512  # states in one call of a network
BLOCK, BLOCK_BYTES = 64, 2**28  # on a CPU; the most that a field of so many states takes
KEYS = ("noise", "second")  # of the random numbers of a draw

WAYS = {  # sampler -> (stage, evaluations of a student; 0: the probability flow of a diffusion)
    sampler: (stage.name, evaluations)
    for stage in STAGES.values()
    for sampler, evaluations in stage.samplers.items()
}


@dataclass(frozen=True)
class Sampler:
    """A network and how it draws: evaluations as in `WAYS`; num_steps (of corrector and prior): of the
    midpoint rule, 0: as it was trained for."""

    network: Corrector
    evaluations: int
    num_steps: int = 0

    def whitened(
        self, condition: Condition, noise: Tensor, second: Tensor | None = None, num_steps: int = 0
    ) -> Tensor:
        """r~ (batch, *tokens, dim) from noise of that shape, and a second where there are two evaluations.
        num_steps: in place of the sampler's."""
        velocity, facts = self.network.velocity(condition), self.network.description
        if self.network.heads[condition.name].by != "diffusion":
            return condition.begin(noise)
        if self.evaluations == 0:
            num_steps = num_steps or self.num_steps or facts["sampler_steps"]
            return sample(velocity, condition.begin(noise), num_steps)
        return sample_student(
            velocity, noise, facts.get("mid_angle", 0.0), second if self.evaluations == 2 else None
        )

    def residual(
        self,
        states: StateConditions,
        tokens: Tensor,
        facts: Tensor,
        noise: Tensor,
        second: Tensor,
        num_steps: int = 0,
        shown: Tensor | None = None,
        is_limited: bool = True,
    ) -> Tensor:
        """r (rows, *tokens, bundle * dim), latent units, from noise of that shape under raw conditions
        (cases, ...) as `StateConditions.predict` gives them, of rows / cases neighbouring rows each.

        shown: cases whose conditions the network is shown in place of its own; mean and scale stay those of
        the case. is_limited: within the head's `WaveLimits`.
        """
        head = self.network.heads[states.name]
        condition = head.condition(tokens, facts)
        known = (
            condition
            if shown is None
            else replace(condition, tokens=condition.tokens[shown], facts=condition.facts[shown])
        )
        every = torch.arange(len(tokens), device=noise.device).repeat_interleave(len(noise) // len(tokens))
        options = {"num_steps": num_steps} if num_steps else {}
        r = head.unwhiten(self.whitened(known.rows(every), noise, second, **options), condition.rows(every))
        if not is_limited:
            return r
        w_pred, w = (states.decode(part).flatten(1, 2) for part in (states.prediction(tokens)[every], r))
        w = head.limits(w_pred, w, max(1, self.evaluations), facts[every, -1] > 0)
        return states.encode(w.unflatten(1, (states.head.bundle, -1)))


def ways_of(stage: str, network: Corrector) -> dict[str, Sampler]:
    """Name -> a way to draw, of all that the network of a stage has."""
    return {name: Sampler(network, draw) for name, (of, draw) in WAYS.items() if of == stage}


def load_sampler(run_dir: Path, name: str, device: torch.device | str, operator: Operator) -> Sampler:
    """The way `name` (of WAYS) from its finished stage in the folder of a run, whose errors of `operator` it
    draws. Raises as `stage_of_run` and `load_corrector`."""
    stage, evaluations = WAYS[name]
    stage_of_run(run_dir, stage)
    network = load_corrector(run_dir / stage, device, operator)
    if not evaluations and "sampler_steps" not in network.description:
        raise DamagedError(
            f"{run_dir / stage} does not say in how many steps it draws; expected "
            f"sampler_steps in its config.json. Run make {stage}."
        )
    for task in (name for name, head in network.heads.items() if head.waves is not None):
        _require_fit(
            network.heads[task].description, StateConditions(operator, task).description, run_dir / stage
        )
    return Sampler(network, evaluations)


def _require_fit(head: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Raise DamagedError, by name, where a head is not made for the operator that it corrects."""
    for key, value in wanted.items():
        if head.get(key, value) != value:
            raise DamagedError(
                f"{folder} has {key} {head[key]!r:.80} of {head['name']}; expected "
                f"{value!r:.80}, as its operator has. Run make {folder.name}."
            )


@torch.no_grad()
def draw_rollout(
    states: StateConditions,
    residual: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    z: Tensor,
    parameters: Tensor,
    num_frames: int,
    num_members: int,
    noise_of: Callable[[int], tuple[Tensor, Tensor]],
    drawn_error: float = 0.0,
    forcing: Tensor | None = None,
) -> Tensor:
    """Members (batch, num_members, num_frames, *tokens, dim) that follow z (batch, time, *tokens, dim).

    residual(tokens, facts, noise, second) of rows (batch * num_members, ...), members of a trajectory being
    neighbours; noise_of(lead): two noises of such rows. drawn_error: of a state that was drawn, as
    `CorrectorHead.drawn_error`. forcing: as `Operator.rollout`; what it was before the last frame of z is not
    known, so that frames before the history are not used.
    """
    head = states.head
    if forcing is not None:
        z, forcing = z[:, -head.history :], padded(forcing, head.bundle).repeat_interleave(num_members, 0)
        forcing = torch.cat([forcing[:, :1], forcing], 1)  # begins a frame earlier, as `predict` takes it
    batch = head.parameter_batch(parameters.repeat_interleave(num_members, 0), forcing)
    z = torch.cat([z[:, :1], z], 1)  # where nothing is before the first frame: no change
    last: dict[str, Tensor] = {}  # the prediction that led to the state, where it holds one frame

    def step(window: Tensor, lead: int) -> Tensor:
        z_pred, tokens, facts = states.predict(
            window, batch.later(lead * head.bundle), drawn_error if lead else 0.0, **last
        )
        if head.bundle == 1:
            last["led"] = states.frames(z_pred)
        z_next = states.frames(z_pred + residual(tokens, facts, *noise_of(lead)))
        return z_next if head.task.user_facts is None else head.conserve_latents(z_next, window[:, -1])

    return ensemble_rollout(step, z, num_frames, 1 + head.history, num_members)


@torch.no_grad()
def draw_members(
    states: StateConditions,
    residual: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    z: Tensor,
    parameters: Tensor,
    num_frames: int,
    num_members: int,
    seed: int,
    names: Sequence[int | str],
    drawn_error: float = 0.0,
    forcing: Tensor | None = None,
) -> Tensor:
    """`draw_rollout` with the noise of `member_noise`: a member is a function of seed, of the name of its row
    and of its number, whatever the batch holds."""
    shape = (*z.shape[2:-1], states.description["dim"])

    def draw(index: Tensor) -> Tensor:
        row, member = index // num_members, index % num_members
        first, last = int(row[0]), int(row[-1]) + 1

        def noise_of(lead: int) -> tuple[Tensor, ...]:
            return tuple(
                send(
                    member_noise(shape, seed, names[first:last], lead, num_members, key)[row - first, member],
                    states.device,
                )
                for key in KEYS
            )

        return draw_rollout(
            states,
            residual,
            z[row],
            parameters[row],
            num_frames,
            1,
            noise_of,
            drawn_error,
            None if forcing is None else forcing[row],
        )

    drawn = in_blocks(draw, len(z) * num_members, block_size(states.head.codec, states.device))
    return drawn[:, 0].unflatten(0, (-1, num_members))


def block_size(codec: Tokenizer, device: torch.device) -> int:
    """States that go through the networks at once, a function of task and device alone."""
    most = BLOCK_BYTES // (4 * codec.num_channels * math.prod(codec.space))
    return max(1, min(BLOCK if device.type == "cpu" else STATES, most))


def sample_states(
    operator: Operator,
    sampler: Sampler,
    name: str,
    z: Tensor,
    parameters: Tensor,
    num_frames: int,
    num_members: int,
    seed: int = 0,
    names: Sequence[int | str] | None = None,
    forcing: Tensor | None = None,
) -> Tensor:
    """Members (batch, num_members, num_frames, *tokens, dim) of task `name` that follow z, (batch, history or
    more, *tokens, dim); parameters (batch, P) raw. names: of the rows (their numbers), as `draw_members`.
    forcing: as `Operator.rollout`."""
    states = StateConditions(operator, name)
    return draw_members(
        states,
        partial(sampler.residual, states),
        z,
        parameters,
        num_frames,
        num_members,
        seed,
        names or range(len(z)),
        sampler.network.heads[name].drawn_error,
        forcing,
    )


def two_noises(
    shape: tuple[int, ...], seed: int, rows: Tensor, lead: int, num_members: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Noise and second noise (rows * members, *shape), by `member_noise`."""
    return tuple(
        send(member_noise(shape, seed, rows.tolist(), lead, num_members, key).flatten(0, 1), device)
        for key in KEYS
    )


@torch.no_grad()
def draw_solutions(
    fields: FieldConditions,
    draw: Callable[[Condition, Tensor], Tensor],
    network: Corrector,
    predicted: Predicted,
    noise: Tensor,
) -> Tensor:
    """Draws of a solution (batch, M, C, *space), physical units, from noise (batch, M, *tokens, dim).

    predicted: of `FieldConditions.predict` with M draws a row; draw(conditions, noise): r~.
    """
    guess, tokens, facts, start = predicted
    head, parts = network.heads[fields.name], []
    conditions = head.condition(tokens, facts)
    which = torch.arange(len(guess), device=guess.device).repeat_interleave(noise.shape[1])
    for some, row, *own in zip(
        *(part.split(STATES) for part in (noise.flatten(0, 1), which, *start)), strict=True
    ):
        condition = head.begun(conditions.rows(row), Start(*own))
        parts.append(head.unwhiten(draw(condition, some), condition))
    return fields.solution(guess[:, None], torch.cat(parts).view_as(noise))


def predict_draws(
    fields: FieldConditions,
    observation: Observation,
    parameters: Tensor,
    seed: int,
    rows: Sequence[int],
    num_members: int,
) -> tuple[Predicted, Tensor]:
    """(`FieldConditions.predict` with as many draws a row, noise of these draws (batch, num_members, *tokens,
    dim)): functions of seed and row, by its number."""
    shape = (*fields.head.codec.tokens, fields.description["dim"])
    field, noise = (
        send(member_noise(size, seed, rows, 0, num_members, key), fields.device)
        for size, key in ((fields.noise_shape, "field"), (shape, "noise"))
    )
    return fields.predict(observation, parameters, field), noise


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
    """Solutions (batch, num_members, C, *space), physical units, of steady task `name` given what was seen of
    its coefficient, in normalised units (`ups.generative.observation.seen`)."""
    fields = FieldConditions(operator, name, sampler.network.heads[name].guess)
    predicted, noise = predict_draws(
        fields, observation, parameters, seed, range(len(observation.values)), num_members
    )
    return draw_solutions(fields, sampler.whitened, sampler.network, predicted, noise)
