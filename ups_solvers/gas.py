"""Conservative finite differences for a viscous ideal gas in any number of dimensions, many trajectories at
once.

Equations:

    density_t + ∇·(density V) = 0
    (density Vi)_t + ∇·(density Vi V) + ∂i pressure = sum over a of ∂a stress(a, i)
    energy_t + ∇·((energy + pressure) V) = sum over a and i of ∂a (Vi stress(a, i))
    stress(a, i) = density (eta + (zeta + eta/3 if a = i else 0)) ∂a Vi
    pressure = (GAMMA - 1) (energy - density V^2 / 2)

The stress is PDEBench's. eta and zeta are kinematic viscosities: the stress grows with the density. Only the
terms with the derivative of Vi along the normal of the face are kept (without eta ∂i Va, and without (zeta -
2 eta/3) ∂b Vb for b other than a). There is no heat conduction; dissipated energy heats the gas.

Scheme: values at cell centres, whose sums are conserved. Density, pressure and velocity are reconstructed at
the faces from five points (fifth order) within the monotonicity-preserving bounds of Suresh and Huynh (1997).
The flux is HLLC (Toro 2009, section 10.4) with PDEBench's bounds of the wave speeds, corrected by the fluxes
through neighbouring faces to a fourth-order derivative (Jiang, Shu and Zhang 2013; without a limiter, which
cost accuracy and did not help at shocks). Time: the third-order SSP method of four stages (Spiteri and Ruuth
2002). The stresses, by fourth-order differences, act between two half steps of the flow (Strang 1968), by
RKL2 with as many stages as stability needs (Meyer, Balsara and Aslam 2012). Next to a cell that would lose
its positive density or pressure the fluxes are of first order. A step that still fails is repeated in halves,
with first-order flow and second-order stress.

Every trajectory has time steps of its own. All operations round alike wherever a number is in memory (no sum
over an axis, no fused multiply-add), so a trajectory does not depend on the others in its batch. They are the
same for all axes and both directions, so mirror images and fields with exchanged axes stay so bitwise.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

GAMMA = 5 / 3
CFL = 0.8  # of the sum over the axes; each of the four stages takes half a step
MAX_HALVINGS = 12  # of a step: it is then shorter than that of an explicit method for the stresses
DENSITY, PRESSURE, VELOCITY = 0, 1, 2  # channels; of a state they are density, energy and momentum


@dataclass(frozen=True)
class Gas:
    """Parameters of a flow. eta, zeta: viscosities; width: of a cell."""

    eta: float
    zeta: float
    width: float
    is_periodic: bool


def conserved(fields: Tensor) -> Tensor:
    """(density, energy, momentum) of (density, pressure, velocity), (n, channel, *space)."""
    density, pressure, velocity = fields[:, :1], fields[:, 1:2], fields[:, 2:]
    return torch.cat(
        [density, pressure / (GAMMA - 1) + 0.5 * density * _square(velocity), density * velocity], 1
    )


def primitive(state: Tensor) -> Tensor:
    """(density, pressure, velocity) of (density, energy, momentum), (n, channel, *space)."""
    density, velocity = state[:, :1], state[:, 2:] / state[:, :1]
    pressure = (GAMMA - 1) * (state[:, 1:2] - 0.5 * density * _square(velocity))
    return torch.cat([density, pressure, velocity], 1)


def _square(velocity: Tensor) -> Tensor:
    """V^2, (n, 1, *space)."""
    return sum(part * part for part in velocity.split(1, 1))


def _is_gas(state: Tensor) -> Tensor:
    """Where density and pressure are positive, (n, 1, *space)."""
    return (state[:, :1] > 0) & (2 * state[:, :1] * state[:, 1:2] > _square(state[:, 2:]))


def evolve(state: Tensor, gas: Gas, *, dt: float, num_frames: int) -> Iterator[Tensor]:
    """States at t = 0, dt, 2 dt, ..: num_frames of (n, channel, *space), float64.

    state: (density, energy, momentum), density and pressure positive. dt: between frames, cut into steps.
    """
    yield state
    for _ in range(1, num_frames):
        state, left = state.clone(), state.new_full((len(state),), dt)
        while len(rows := left.nonzero()[:, 0]):
            some, ahead = state[rows], left[rows]
            num_turns = torch.ceil(ahead * (_rate_of_waves(some) / (2 * CFL * gas.width)))
            turn = ahead / num_turns
            step = (0.5 * turn).reshape(-1, *[1] * (state.ndim - 1))
            for act, length in ((_flow, step), (_viscous_step, 2 * step), (_flow, step)):
                some = _safely(act, some, length, gas)
            state[rows] = some
            left[rows] = torch.where(num_turns > 1, ahead - turn, 0.0)
        yield state


def _safely(act: Callable[..., Tensor], state: Tensor, step: Tensor, gas: Gas, depth: int = 0) -> Tensor:
    """The state after a step of `act`. Trajectories that lose their positive density or pressure repeat it in
    halves and in plain form."""
    after = act(state, step, gas, depth > 0)
    wrong = ~_is_gas(after).flatten(1).all(1)
    if bool(wrong.any()):
        assert depth < MAX_HALVINGS, "a density or pressure was lost"
        some, half = state[wrong], 0.5 * step[wrong]
        for _ in range(2):
            some = _safely(act, some, half, gas, depth + 1)
        after[wrong] = some
    return after


def _rate_of_waves(state: Tensor) -> Tensor:
    """The largest sum over the axes of the fastest wave speeds, (n,)."""
    fields = primitive(state)
    sound = (GAMMA * fields[:, PRESSURE] / fields[:, DENSITY]).sqrt()
    return sum(velocity.abs() + sound for velocity in fields[:, VELOCITY:].unbind(1)).flatten(1).amax(1)


def _along(values: Tensor, axis: int, num: int, gas: Gas) -> Tensor:
    """values (n, channel, *space) as (cell along the axis, channel, n, *others) with `num` ghost cells at
    either end: periodic, or copies of the last cell."""
    values = values.movedim((2 + axis, 1), (0, 1))
    first, last = (
        (values[-num:], values[:num])
        if gas.is_periodic
        else (values[i : i + 1 or None].expand(num, *values.shape[1:]) for i in (0, -1))
    )
    return torch.cat([first, values, last])


def _back(values: Tensor, axis: int) -> Tensor:
    """(cell along the axis, channel, n, *others) as (n, channel, *space)."""
    return values.movedim((0, 1), (2 + axis, 1))


# ------------------------------------------------------------------------------------------------------ flow


def _flow(state: Tensor, step: Tensor, gas: Gas, is_plain: bool) -> Tensor:
    """The state one step later, without viscosity; is_plain: by first-order fluxes."""
    half, ahead = 0.5 * step, state
    for _ in range(3):
        ahead = _forward(ahead, half, gas, is_plain)
    return _forward(state + (ahead - state) / 3, half, gas, is_plain)


def _forward(state: Tensor, step: Tensor, gas: Gas, is_plain: bool) -> Tensor:
    """An Euler step, with first-order fluxes next to cells that would lose their positive density or
    pressure."""
    flat = torch.ones_like(state[:, :1], dtype=torch.bool) if is_plain else None
    ahead = state - step * _outflow(state, gas, flat)
    while not bool((is_gas := _is_gas(ahead)).all()):
        flat = torch.zeros_like(is_gas) if flat is None else flat
        near = flat | ~is_gas
        for axis in range(state.ndim - 2):
            padded = _along(near, axis, 1, gas)
            near = _back(padded[:-2] | padded[1:-1] | padded[2:], axis)
        rows = (~is_gas.flatten(1).all(1) & (near != flat).flatten(1).any(1)).nonzero()[:, 0]
        if not len(rows):
            break
        flat[rows] = near[rows]
        ahead[rows] = state[rows] - step[rows] * _outflow(state[rows], gas, flat[rows])
    return ahead


def _outflow(state: Tensor, gas: Gas, flat: Tensor | None) -> Tensor:
    """The outflow of each cell per time and volume, (n, channel, *space). flat: (n, 1, *space), cells whose
    faces get a first-order flux."""
    fields, total = primitive(state), None
    for axis in range(fields.ndim - 2):
        padded = _along(fields, axis, 4, gas)
        left, right = _sides(padded)
        is_low = (torch.minimum(left[:, :2], right[:, :2]) <= 0).any(1, keepdim=True)
        if flat is not None:
            beyond = _along(flat, axis, 2, gas)
            is_low |= beyond[:-1] | beyond[1:]
        if is_some_low := bool(is_low.any()):
            left, right = torch.where(is_low, padded[2:-3], left), torch.where(is_low, padded[3:-2], right)
        flux = _flux(left, right, VELOCITY + axis)
        bend = flux.diff(n=2, dim=0).div_(24)
        if is_some_low:
            bend.masked_fill_(is_low[1:-1], 0.0)
        change = _back((flux[1:-1] - bend).diff(dim=0), axis)
        total = change if total is None else total + change
    return total / gas.width


def _sides(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values on either side of the faces. For n cells on the first axis: at the n - 5 faces from that between
    cells 2 and 3 on. Five-point reconstruction within bounds that keep monotone data monotone and do not clip
    smooth extrema (Suresh and Huynh 1997, section 2, with alpha = beta = 4)."""
    slope = values.diff(dim=0)
    bend = slope.diff(dim=0)
    skew = bend.diff(n=2, dim=0).mul_(3 / 128)
    more, less = torch.maximum(bend[:-1], bend[1:]), torch.minimum(bend[:-1], bend[1:])
    curve = (
        torch.minimum(less, (4 * less).sub_(more))
        .clamp_min_(0)
        .add_(torch.maximum(more, (4 * more).sub_(less)).clamp_max_(0))
    )  # at faces, the least around
    before, after = values[2:-3], values[3:-2]
    middle = (before + after).mul_(0.5)
    bent = middle - curve[1:-1].mul(0.5)
    least = torch.minimum(torch.minimum(before, after), bent)
    most = torch.maximum(torch.maximum(before, after), bent)
    middle.sub_((bend[1:-2] + bend[2:-1]).mul_(0.0625))

    curve, sides = curve.mul_(4 / 3), []
    for cell, own, behind, rise in (
        (before, slice(-1), slice(-2), slope[1:-3]),
        (after, slice(1, None), slice(2, None), -slope[3:-1]),
    ):
        large, steep = (0.5 * rise).add_(curve[behind]), 4 * rise
        low = torch.minimum(large, steep).clamp_max_(0).add_(cell)
        high = torch.maximum(large, steep).clamp_min_(0).add_(cell)
        sides.append((middle + skew[own]).clamp_(torch.maximum(least, low), torch.minimum(most, high)))
    return sides[0], sides[1]


def _flux(left: Tensor, right: Tensor, normal: int) -> Tensor:
    """HLLC flux of (density, energy, momentum) through faces: the flux of the left or right state, or of the
    star state on one side of the contact.

    left, right: (density, pressure, velocity) on either side; normal: channel of the velocity across.
    """
    (d_left, p_left, u_left), (d_right, p_right, u_right) = (
        (side[:, DENSITY], side[:, PRESSURE], side[:, normal]) for side in (left, right)
    )
    sound = (GAMMA * torch.maximum(p_left / d_left, p_right / d_right)).sqrt()
    slow, fast = torch.minimum(u_left, u_right) - sound, torch.maximum(u_left, u_right) + sound
    swept_left, swept_right = d_left * (slow - u_left), d_right * (fast - u_right)
    push = (p_right - p_left) + (swept_left * u_left - swept_right * u_right)
    contact = push / (swept_left - swept_right)

    is_left = contact >= 0
    upwind = torch.where(is_left[:, None], left, right)
    swept, bound = torch.where(is_left, swept_left, swept_right), torch.where(is_left, slow, fast)
    is_between = (slow < 0) & (fast > 0)
    density, pressure, u = upwind[:, DENSITY], upwind[:, PRESSURE], upwind[:, normal]
    jump = torch.where(is_between, contact - u, 0.0)
    specific = pressure / density / (GAMMA - 1) + 0.5 * _square(upwind[:, VELOCITY:])[:, 0]
    specific = specific + jump * (contact + pressure / swept)
    pressure = pressure + swept * jump
    u = torch.where(is_between, contact, u)
    mass = torch.where(is_between, swept / (bound - contact), density) * u

    flux = torch.empty_like(upwind)
    flux[:, DENSITY] = mass
    flux[:, PRESSURE] = mass * specific + pressure * u
    flux[:, VELOCITY:] = mass[:, None] * upwind[:, VELOCITY:]
    flux[:, normal] = mass * u + pressure
    return flux


# -------------------------------------------------------------------------------------------------- viscosity


def _viscous_step(state: Tensor, step: Tensor, gas: Gas, is_plain: bool) -> Tensor:
    """The state after a step of the stresses by RKL2, whose s stages allow (s^2 + s - 2) / 4 times the step
    of the explicit method; is_plain: by second-order differences."""
    num_axes, density, start = state.ndim - 2, state[:, :1], state[:, 1:]
    faces, ratios = [], []
    for axis in range(num_axes):
        padded = _along(density, axis, 3, gas)
        face = torch.maximum(_at_faces(padded, is_plain)[0], 0.5 * torch.minimum(padded[1:-2], padded[2:-1]))
        around = 27 * (face[1:-2] + face[2:-1]) + (face[:-3] + face[3:])
        ratios.append(_back(around / padded[3:-3], axis).flatten(1).amax(1))
        faces.append(face * (gas.eta / gas.width))
    strongest = (4 / 3 * gas.eta + gas.zeta + (num_axes - 1) * gas.eta) / gas.width**2
    bound = torch.stack(ratios).amax(0) * (strongest * 7 / 72)  # of the eigenvalues (Gershgorin)
    rate = bound * step.flatten()
    odd = torch.ceil((9 + 8 * rate).sqrt() / 4 - 0.75).clamp_min(1) * 2 + 1
    stages = torch.where(rate < 1, 2.0, odd).reshape(step.shape)
    per_stage = 4 * step / (stages * stages + stages - 2)

    first = _stress(start, density, faces, gas, is_plain)
    before, now = torch.zeros_like(start), per_stage * first / 3  # of the change
    for stage in range(2, int(stages.max()) + 1):
        b, last, older = (_rkl2_b(stage - back) for back in range(3))
        mu, nu = (2 * stage - 1) / stage * b / last, -(stage - 1) / stage * b / older
        rate = _stress(start + now, density, faces, gas, is_plain) - (1 - last) * first
        after = mu * now + nu * before + per_stage * (mu * rate)
        before, now = now, torch.where(stage <= stages, after, now)
    return torch.cat([density, start + now], 1)


def _rkl2_b(stage: int) -> float:
    """The coefficient b of RKL2."""
    return (stage * stage + stage - 2) / (2 * stage * (stage + 1)) if stage > 1 else 1 / 3


def _at_faces(values: Tensor, is_plain: bool) -> tuple[Tensor, Tensor]:
    """Values and differences at faces, of fourth order or, if plain, second. For n cells on the first axis:
    at the n - 3 faces from that between cells 1 and 2 on."""
    step, middle = values.diff(dim=0), 0.5 * (values[1:-2] + values[2:-1])
    if is_plain:
        return middle, step[1:-1]
    bend = step.diff(dim=0)
    return middle - (bend[:-1] + bend[1:]) / 16, step[1:-1] - bend.diff(dim=0) / 24


def _stress(moved: Tensor, density: Tensor, faces: list[Tensor], gas: Gas, is_plain: bool) -> Tensor:
    """The rate of change of (energy, momentum) by the stresses, (n, channel - 1, *space). faces: density
    times eta over the width at the faces across each axis."""
    velocity, total = moved[:, 1:] / density, None
    for axis, face in enumerate(faces):
        middle, step = _at_faces(_along(velocity, axis, 3, gas), is_plain)
        stress = face * step
        stress[:, axis] *= 1 + (gas.zeta + gas.eta / 3) / gas.eta
        flux = torch.cat([sum((stress * middle).split(1, 1)), stress], 1)
        flux = flux[1:-1] if is_plain else flux[1:-1] - flux.diff(n=2, dim=0) / 24
        change = _back(flux.diff(dim=0), axis)
        total = change if total is None else total + change
    return total / gas.width
