"""Films whose equations are known: those of Weak SINDy, made by solvers of ours, and four sets of user data.

Equations, domains, starts and sizes of the single films are those of Messenger and Bortz (2021,
doi 10.1016/j.jcp.2021.110525, arXiv 2007.02848), which E-WSINDy uses, too. Solvers: the exact solution of
inviscid Burgers, else Fourier series in space and classical Runge-Kutta steps after Lawson (1967), in which
linear terms act by their exponential.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

NUM_TRAJECTORIES, NUM_MODES, SEED = 100, 4, 0  # of the four sets: trajectories, waves per start, seed
NOISES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)  # standard deviations over RMS
SPIRAL = {  # the terms of u and v, from A^2 = u^2 + v^2: (1 - A^2) u + A^2 v and (1 - A^2) v - A^2 u
    "u": {"u_xx": 0.1, "u_yy": 0.1, "u": 1, "u^3": -1, "u v^2": -1, "u^2 v": 1, "v^3": 1},
    "v": {"v_xx": 0.1, "v_yy": 0.1, "v": 1, "u^2 v": -1, "v^3": -1, "u^3": -1, "u v^2": -1},
}


@dataclass(frozen=True)
class Film:
    """make: returns (trajectory, time, channel, *space). domain: from the wall before the first cell to the
    wall behind the last, the same along each axis. equation: field -> term -> coefficient, with terms such as
    "u^2 v", "u u_x" or "1". published: noise and relative l2 error of E-WSINDy.
    """

    make: Callable[[], np.ndarray]
    equation: Mapping[str, Mapping[str, float]]
    domain: tuple[float, float]
    dt: float
    boundary: str = "periodic"
    published: tuple[float, float] | None = None

    @property
    def fields(self) -> list[str]:
        return list(self.equation)


def noisy(u: np.ndarray, noise: float, draw: int) -> np.ndarray:
    """Return u (trajectory, time, channel, *space) with white noise of standard deviation noise * RMS of each
    channel; the same draw has the same pattern at every level.
    """
    others = (0, 1, *range(3, u.ndim))
    size = np.sqrt(np.square(u).mean(others, keepdims=True))
    return u + noise * size * np.random.default_rng([SEED, draw]).standard_normal(u.shape)


# ---- solvers -----------------------------------------------------------------------------------------------


def waves(length: float, num: int, ndim: int = 1, is_real: bool = True) -> list[np.ndarray]:
    """Return the wave numbers of every axis, in radians per length, as arrays that broadcast."""
    whole, half = (
        2 * np.pi * frequencies(num, length / num) for frequencies in (np.fft.fftfreq, np.fft.rfftfreq)
    )
    return np.meshgrid(*[whole] * (ndim - 1), half if is_real else whole, indexing="ij")


def solved(
    start: np.ndarray,
    rate: np.ndarray,
    slope: Callable[[np.ndarray, np.ndarray], np.ndarray],
    dt: float,
    num_frames: int,
    num_steps: int,
) -> np.ndarray:
    """Return frames (n, time, channel, *space) of d/dt u_hat = rate u_hat + slope(u, u_hat), where u_hat are
    the modes of u.

    start: (n, channel, *space), real or complex. rate, slope: of the modes of the real or complex transform.
    num_steps: Runge-Kutta steps per frame.
    """
    space = range(2, start.ndim)
    shape = start.shape[2:]
    forward = np.fft.fftn if np.iscomplexobj(start) else np.fft.rfftn
    backward = np.fft.ifftn if np.iscomplexobj(start) else np.fft.irfftn

    def inverse(u_hat: np.ndarray) -> np.ndarray:
        return backward(u_hat, shape, space)

    def modes(u_hat: np.ndarray) -> np.ndarray:
        return slope(inverse(u_hat), u_hat)

    u_hat, step, frames = forward(start, axes=space), dt / num_steps, [start]
    half = np.exp(step / 2 * rate)
    for _ in range(num_frames - 1):
        for _ in range(num_steps):
            a = modes(u_hat)
            moved = half * u_hat
            b = modes(moved + step / 2 * half * a)
            c = modes(moved + step / 2 * b)
            d = modes(half * (moved + step * c))
            u_hat = half * (moved + step / 6 * (half * a + 2 * b + 2 * c)) + step / 6 * d
        frames.append(inverse(u_hat))
    return np.stack(frames, 1)


def advected(k: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return the slope of -u u_x, in modes."""
    return lambda u, u_hat: -0.5j * k * np.fft.rfft(u * u)


def random_starts(num: int, ndim: int = 1, is_walled: bool = False) -> np.ndarray:
    """Return random Fourier series (NUM_TRAJECTORIES, 1, *space) of maximum 1; cosines at walls."""
    random, numbers = np.random.default_rng(SEED), np.arange(NUM_MODES + 1)[:, None]
    angle = np.pi * (np.arange(num) + 0.5) / num * numbers * (1 if is_walled else 2)
    basis = np.cos(angle) if is_walled else np.concatenate([np.cos(angle), np.sin(angle[1:])])
    u = random.standard_normal((NUM_TRAJECTORIES, *[len(basis)] * ndim))
    for _ in range(ndim):
        u = np.moveaxis(u, 1, -1) @ basis
    u = u - u.reshape(len(u), -1).mean(1).reshape(-1, *[1] * ndim)
    return (u / np.abs(u).reshape(len(u), -1).max(1).reshape(-1, *[1] * ndim))[:, None]


# ---- films -------------------------------------------------------------------------------------------------


def inviscid_burgers(amplitude: float = 1000.0, rate: float = 0.5) -> np.ndarray:
    """Return the exact solution: a ramp that becomes a shock at t = 1 / rate."""
    x, t = np.linspace(-4000, 4000, 256), np.linspace(0, 4, 256)[:, None]
    shock = np.maximum(x / amplitude + 1 / rate, 2 * x / amplitude + 1 / rate)
    is_ramp = (amplitude * (t - 1 / rate) < x) & (x <= 0)
    ramp = -rate * x / np.where(is_ramp, 1 - rate * t, 1.0)
    return np.where(t >= shock, amplitude, np.where(is_ramp, ramp, 0.0))[None, :, None]


def solitons(x: np.ndarray, *speeds_and_places: tuple[float, float]) -> np.ndarray:
    """Return the sum of 3 a^2 / cosh^2(a (x - place) / 2), solitons of u_t = -u u_x - u_xxx of speed a^2."""
    return sum(3 * a * a / np.cosh(0.5 * a * (x - place)) ** 2 for a, place in speeds_and_places)


def kdv(num_steps: int = 16) -> np.ndarray:
    x, [k] = -np.pi + 2 * np.pi * np.arange(400) / 400, waves(2 * np.pi, 400)
    start = solitons(x, (25.0, -2.0), (16.0, -1.0))[None, None]
    return solved(start, 1j * k**3, advected(k), 0.006 / 600, 601, num_steps)


def kuramoto_sivashinsky(num_steps: int = 64) -> np.ndarray:
    x, [k] = 32 * np.pi * np.arange(256) / 256, waves(32 * np.pi, 256)
    start = (np.cos(x / 16) * (1 + np.sin(x / 16)))[None, None]
    return solved(start, k**2 - k**4, advected(k), 0.5, 301, num_steps)


def schroedinger(num_steps: int = 8, half_length: float = 5.0, num: int = 256) -> np.ndarray:
    """Return u and v of q = u + i v: q_t = -i (q_xx / 2 + |q|^2 q)."""
    x = -half_length + 2 * half_length * np.arange(num) / num
    [k] = waves(2 * half_length, num, is_real=False)
    start = (2 / np.cosh(x))[None, None].astype(complex)
    q = solved(
        start, 0.5j * k**2, lambda q, q_hat: -1j * np.fft.fft(np.abs(q) ** 2 * q), np.pi / 250, 251, num_steps
    )
    return np.concatenate([q.real, q.imag], 2)


def spiral(num_steps: int = 1, num_frames: int = 201, num: int = 256) -> np.ndarray:
    x = -10 + 20 * np.arange(num) / num
    x, y = np.meshgrid(x, x, indexing="ij")
    radius, angle = np.hypot(x, y), np.arctan2(y, x)
    start = np.tanh(radius) * np.stack([np.cos(angle - radius), np.sin(angle - radius)])
    square = sum(k**2 for k in waves(20.0, num, 2))

    def slope(u: np.ndarray, _: np.ndarray) -> np.ndarray:
        (u, v), size = (u[:, 0], u[:, 1]), np.square(u).sum(1)
        return np.fft.rfft2(np.stack([(1 - size) * u + size * v, (1 - size) * v - size * u], 1))

    return solved(start[None], -0.1 * square, slope, 0.05, num_frames, num_steps)


# ---- sets of user data -------------------------------------------------------------------------------------


def burgers(num_steps: int = 4) -> np.ndarray:
    [k] = waves(2 * np.pi, 128)
    return solved(random_starts(128), -0.1 * k**2, advected(k), 0.05, 41, num_steps)


def ks(num_steps: int = 32) -> np.ndarray:
    [k] = waves(22.0, 64)
    grown = solved(random_starts(64), k**2 - k**4, advected(k), 20.0, 2, 40 * num_steps)[:, -1]
    return solved(grown, k**2 - k**4, advected(k), 0.5, 41, num_steps)


def fisher(num_steps: int = 4) -> np.ndarray:
    """Return u_t = 0.01 u_xx + u - u^2 between walls without flux; solved with its mirror image."""
    [k] = waves(2.0, 128)
    start = 0.5 + 0.4 * random_starts(64, is_walled=True)
    start = np.concatenate([start, start[..., ::-1]], -1)
    u = solved(start, 1 - 0.01 * k**2, lambda u, _: -np.fft.rfft(u * u), 0.05, 41, num_steps)
    return u[..., :64]


def advection_diffusion() -> np.ndarray:
    """Return u_t = -u_x - 0.5 u_y + 0.05 (u_xx + u_yy); exact, because no term is nonlinear."""
    kx, ky = waves(2 * np.pi, 48, 2)
    rate = -1j * (kx + 0.5 * ky) - 0.05 * (kx**2 + ky**2)
    return solved(random_starts(48, 2), rate, lambda _, u_hat: 0 * u_hat, 0.1, 21, 1)


EDGE = 4000 * 256 / 255  # the outermost points of inviscid Burgers are half a cell from the walls
KS = {"u": {"u u_x": -1.0, "u_xx": -1.0, "u_xxxx": -1.0}}
NLS = {
    "u": {"v_xx": 0.5, "u^2 v": 1.0, "v^3": 1.0},
    "v": {"u_xx": -0.5, "u v^2": -1.0, "u^3": -1.0},
}
ADVECTION = {"u": {"u_x": -1.0, "u_y": -0.5, "u_xx": 0.05, "u_yy": 0.05}}
PI = np.pi
SHOCK, KDV = {"u": {"u u_x": -1.0}}, {"u": {"u u_x": -1.0, "u_xxx": -1.0}}
FISHER = {"u": {"u_xx": 0.01, "u": 1.0, "u^2": -1.0}}
FILMS = {
    "inviscid_burgers": Film(inviscid_burgers, SHOCK, (-EDGE, EDGE), 4 / 255, "outflow", (1.0, 0.025)),
    "kdv": Film(kdv, KDV, (-PI, PI), 1e-5, published=(1.0, 0.04)),
    "ks": Film(kuramoto_sivashinsky, KS, (0.0, 32 * PI), 0.5, published=(1.0, 0.247)),
    "nls": Film(schroedinger, NLS, (-5.0, 5.0), PI / 250, published=(0.5, 0.113)),
    "spiral": Film(spiral, SPIRAL, (-10.0, 10.0), 0.05, published=(0.2, 0.071)),
    "burgers_set": Film(burgers, {"u": {"u u_x": -1.0, "u_xx": 0.1}}, (0.0, 2 * PI), 0.05),
    "ks_set": Film(ks, KS, (0.0, 22.0), 0.5),
    "fisher_set": Film(fisher, FISHER, (0.0, 1.0), 0.05, "no_flux"),
    "advection_set": Film(advection_diffusion, ADVECTION, (0.0, 2 * PI), 0.1),
}
