"""Finite volumes for a viscous ideal gas in any number of dimensions, many trajectories at once:

    density_t + ∇·(density V) = 0
    (density Vi)_t + ∇·(density Vi V) + ∂i pressure = sum over a of ∂a stress(a, i)
    energy_t + ∇·((energy + pressure) V) = sum over a and i of ∂a (Vi stress(a, i))
    stress(a, i) = density (eta + (zeta + eta/3 if a = i else 0)) ∂a Vi
    pressure = (GAMMA - 1) (energy - density V^2 / 2)

The stress is PDEBench's: eta and zeta are kinematic viscosities (the stress grows with the density), of the
tensor's terms only those with the derivative of Vi along the face's normal are there (left out are eta ∂i Va
and (zeta - 2 eta/3) ∂b Vb for b other than a), and heat is not conducted. What the stress takes from the
motion it gives to the gas as heat.

Density, pressure and velocity are carried to the faces with the monotonised central limiter (van Leer 1977),
the flux is that of HLLC (Toro 2009, section 10.4) with PDEBench's bounds of the waves' speeds, time is Heun's
(SSP) method. Stresses act by turns before and after the flow (Strang 1968), by an explicit method with as
many stages as the step needs (RKL2: Meyer, Balsara and Aslam 2012). Second order where the flow is smooth. A
step that would leave a density or pressure that is not positive is done again without slopes next to such
cells.

A trajectory takes its own time steps and only operations that round alike wherever a number lies in memory
are used (no sum over an axis, no fused multiply-add), so it does not depend on which others are computed with
it. Operations are the same for all axes and both directions: mirror images stay so to the last bit, and so do
fields with two axes exchanged.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ups.lazy import Tensor, torch

GAMMA = 5 / 3
MOST_RESTORED = 0.5   # a pressure that is wrong by more is no matter of rounding the energy off
CFL = 0.4   # of the sum over the axes; HLLC without slopes keeps densities positive up to 0.5
MAX_HALVINGS = 12   # of a step with stresses: it is then shorter than that of the explicit method
DENSITY, PRESSURE, VELOCITY = 0, 1, 2   # channels; of a state they are density, energy and momentum


@dataclass(frozen=True)
class Gas:
    """What a flow obeys. eta, zeta: viscosities; width: of a cell."""

    eta: float
    zeta: float
    width: float
    is_periodic: bool


def conserved(fields: Tensor) -> Tensor:
    """(density, energy, momentum) of (density, pressure, velocity), (n, channel, *space)."""
    density, pressure, velocity = fields[:, :1], fields[:, 1:2], fields[:, 2:]
    return torch.cat([density, pressure / (GAMMA - 1) + 0.5 * density * _square(velocity),
                      density * velocity], 1)


def primitive(state: Tensor) -> Tensor:
    """(density, pressure, velocity) of (density, energy, momentum), (n, channel, *space)."""
    density, velocity = state[:, :1], state[:, 2:] / state[:, :1]
    pressure = (GAMMA - 1) * (state[:, 1:2] - 0.5 * density * _square(velocity))
    return torch.cat([density, pressure, velocity], 1)


def densities(fields: Tensor) -> Tensor:
    """`conserved` of (n, T, channel, *space)."""
    return conserved(fields.flatten(0, 1)).unflatten(0, fields.shape[:2])


def restore(fields: Tensor, start: Tensor) -> Tensor:
    """What to add to the logarithms of density and pressure and to the velocity of (n, T, channel, *space),
    so that mass, energy and momentum of a closed domain are those of start (n, 1, channel, *space): (n, T,
    channel). Where too little energy is left for that much pressure, it is MOST_RESTORED of what it was.
    """
    space = tuple(range(3, fields.ndim))
    every = (...,) + (None,) * len(space)
    mass, energy, momentum = densities(start).mean(space).split([1, 1, fields.shape[2] - 2], 2)
    density, pressure, velocity = fields[:, :, :1], fields[:, :, 1:2], fields[:, :, 2:]
    thinner = mass / density.mean(space)
    density = density * thinner[every]
    faster = (momentum - (density * velocity).mean(space)) / mass
    motion = 0.5 * (density * (velocity + faster[every]).square()).sum(2, keepdim=True).mean(space)
    hotter = (GAMMA - 1) * (energy - motion) / pressure.mean(space)
    return torch.cat([thinner.log(), hotter.clamp(MOST_RESTORED, 1 / MOST_RESTORED).log(), faster], 2)


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
        turn = 0
        while len(rows := left.nonzero()[:, 0]):
            some, ahead = state[rows], left[rows]
            num_steps = torch.ceil(ahead * (_rate_of_waves(some) / (CFL * gas.width)))
            step = (ahead / num_steps).reshape(-1, *[1] * (state.ndim - 1))
            for act in (_flow, _rub)[::-1 if turn % 2 else 1]:
                some = act(some, step, gas)
            state[rows] = some
            left[rows] = torch.where(num_steps > 1, ahead - step.flatten(), 0.0)
            turn += 1
        yield state


def _rate_of_waves(state: Tensor) -> Tensor:
    """The fastest wave along each axis, summed over the axes, (n,)."""
    fields = primitive(state)
    sound = (GAMMA * fields[:, PRESSURE] / fields[:, DENSITY]).sqrt()
    return sum((velocity.abs() + sound).flatten(1).amax(1) for velocity in fields[:, VELOCITY:].unbind(1))


def _walled(values: Tensor, num: int, is_periodic: bool) -> Tensor:
    """values with `num` cells more at either end of the last axis: those of the other end, or copies of the
    last."""
    if is_periodic:
        return torch.cat([values[..., -num:], values, values[..., :num]], -1)
    return torch.cat([*[values[..., :1]] * num, values, *[values[..., -1:]] * num], -1)


# ------------------------------------------------------------------------------------------------------ flow


def _flow(state: Tensor, step: Tensor, gas: Gas) -> Tensor:
    """The state one step later, without viscosity."""
    ahead = _forward(state, step, gas)
    return 0.5 * (state + _forward(ahead, step, gas))


def _forward(state: Tensor, step: Tensor, gas: Gas) -> Tensor:
    """An Euler step, with slopes where that leaves densities and pressures positive."""
    flat = None
    while True:
        ahead = state - step * _outflow(state, gas, flat)
        wrong = ~_is_gas(ahead)
        if not bool(wrong.any()):
            return ahead
        wrong = wrong if flat is None else flat | wrong
        for axis in range(2, state.ndim):
            padded = _walled(wrong.movedim(axis, -1), 1, gas.is_periodic)
            wrong = (padded[..., :-2] | padded[..., 1:-1] | padded[..., 2:]).movedim(-1, axis)
        assert flat is None or not torch.equal(wrong, flat), "a flow without slopes lost its positivity"
        flat = wrong


def _outflow(state: Tensor, gas: Gas, flat: Tensor | None) -> Tensor:
    """What leaves each cell per time and volume, (n, channel, *space). flat: cells without slopes, (n, 1,
    *space)."""
    fields, total = primitive(state), None
    for axis in range(fields.ndim - 2):
        padded = _walled(fields.movedim(2 + axis, -1), 2, gas.is_periodic)
        step = padded.diff(dim=-1)
        before, after = step[..., :-1], step[..., 1:]
        rise = torch.minimum(before, after).clamp_min_(0)
        fall = torch.maximum(before, after).clamp_max_(0)
        half = torch.clamp((before + after).mul_(0.25), fall, rise)   # of the slope
        if flat is not None:
            half.masked_fill_(_walled(flat.movedim(2 + axis, -1), 1, gas.is_periodic), 0.0)
        flux = _flux(padded[..., 1:-2] + half[..., :-1], padded[..., 2:-1] - half[..., 1:], VELOCITY + axis)
        change = flux.diff(dim=-1).movedim(-1, 2 + axis)
        total = change if total is None else total + change
    return total / gas.width


def _flux(left: Tensor, right: Tensor, normal: int) -> Tensor:
    """HLLC's flux of (density, energy, momentum) through faces: that of the state a face lies in, which is
    left, right, or what the waves leave on either side of the contact between them.

    left, right: (density, pressure, velocity) on either side; normal: channel of the velocity across.
    """
    (d_left, p_left, u_left), (d_right, p_right, u_right) = (
        (side[:, DENSITY], side[:, PRESSURE], side[:, normal]) for side in (left, right))
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


def _rub(state: Tensor, step: Tensor, gas: Gas, depth: int = 0) -> Tensor:
    """The state after the stresses have acted for a step; in halves where the pressure would be lost."""
    after = _stages(state, step, gas)
    wrong = ~_is_gas(after).flatten(1).all(1)
    if bool(wrong.any()):
        assert depth < MAX_HALVINGS, "a stress took the pressure away"
        some, half = state[wrong], 0.5 * step[wrong]
        for _ in range(2):
            some = _rub(some, half, gas, depth + 1)
        after[wrong] = some
    return after


def _stages(state: Tensor, step: Tensor, gas: Gas) -> Tensor:
    """The state after a step of RKL2, whose s stages allow (s^2 + s - 2) / 4 times the step of the explicit
    method."""
    num_axes, density, start = state.ndim - 2, state[:, :1], state[:, 1:]
    faces, ratios = [], []
    for axis in range(2, state.ndim):
        padded = _walled(density.movedim(axis, -1), 1, gas.is_periodic)
        faces.append(0.5 * (padded[..., :-1] + padded[..., 1:]))
        ratios.append(((faces[-1][..., :-1] + faces[-1][..., 1:]) / padded[..., 1:-1]).flatten(1).amax(1))
    strongest = 4 / 3 * gas.eta + gas.zeta + (num_axes - 1) * gas.eta
    most = torch.stack(ratios).amax(0) * (2 * strongest / gas.width**2)   # of the eigenvalues (Gershgorin)
    stages = torch.ceil((9 + 8 * most * step.flatten()).sqrt() / 4 - 0.75).clamp_min(1) * 2 + 1   # odd
    stages = stages.reshape(step.shape)
    per_stage = 4 * step / (stages * stages + stages - 2)

    first = _stress(start, density, faces, gas)
    before, now = torch.zeros_like(start), per_stage * first / 3   # of the change
    for stage in range(2, int(stages.max()) + 1):
        share, last, older = (_share(stage - back) for back in range(3))
        mu, nu = (2 * stage - 1) / stage * share / last, -(stage - 1) / stage * share / older
        rate = _stress(start + now, density, faces, gas) - (1 - last) * first
        after = mu * now + nu * before + per_stage * (mu * rate)
        before, now = now, torch.where(stage <= stages, after, now)
    return torch.cat([density, start + now], 1)


def _share(stage: int) -> float:
    """b of RKL2."""
    return (stage * stage + stage - 2) / (2 * stage * (stage + 1)) if stage > 1 else 1 / 3


def _stress(moved: Tensor, density: Tensor, faces: list[Tensor], gas: Gas) -> Tensor:
    """What the stresses add to (energy, momentum) per time, (n, channel - 1, *space). faces: the density at
    the faces across each axis."""
    velocity, total = moved[:, 1:] / density, None
    for axis, face in enumerate(faces):
        padded = _walled(velocity.movedim(2 + axis, -1), 1, gas.is_periodic)
        stress = face * (gas.eta / gas.width) * padded.diff(dim=-1)
        stress[:, axis] *= 1 + (gas.zeta + gas.eta / 3) / gas.eta
        work = sum((stress * (0.5 * (padded[..., :-1] + padded[..., 1:]))).split(1, 1))
        change = torch.cat([work, stress], 1).diff(dim=-1).movedim(-1, 2 + axis)
        total = change if total is None else total + change
    return total / gas.width
