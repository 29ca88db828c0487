"""The data doctor's checks of single families: faults of published files, and data of another equation."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ups.common.place import make_target
from ups.data.generate import solver_of
from ups.tasks import TASKS, Finding

NUM_SAMPLED = 8  # trajectories, equally spaced in the file, of checks that cost more than reading
MAX_MASS_CHANGE = 1e-2  # relative
UNSTEADY = 0.05  # relative distance from the steady solution; PDEBench's wall alone makes 0.02
DIVERGENT = 0.3  # divergence over gradient of stored fields; ours have 0.13, and 0.6 with exchanged axes
MIN_MEAN_CHANGE = 1e-3  # over the RMS; a reaction moves the mean by more
REMEDY = "set data.source=generate, which solves the stated equation, or train on it for what it is"
FROZEN = 0.5  # published files stay equal to 4 digits for 90 % of their frames (PDEBench issue 94)


def moves_at_beta(data: Any, scan: Any) -> Iterator[Finding]:
    """Fields that move at twice beta, as in the withdrawn first edition."""
    if "x" not in data.coordinates or data.num_frames < 2 or data.space[0] < 2:
        return
    right, double = (_transport_error(data, factor * data.parameter) for factor in (1.0, 2.0))
    if double < 0.5 * right:
        yield Finding(
            "error",
            f"the field moves at twice beta (relative error {double:.2g}, at beta "
            f"{right:.2g}): the withdrawn first edition (PDEBench issue 46)",
            f"delete it and run `{make_target('data')}`",
        )


def _transport_error(data: Any, speed: float) -> float:
    """Median relative error of u(t, x) = u(0, x - speed t) over the first trajectories, by a shift in Fourier
    space. t is the frame with the shift nearest to half the domain, as a wrong speed shows least after whole
    periods.
    """
    x, times = data.coordinates["x"], data.coordinates["t"] - data.coordinates["t"][0]
    length = len(x) * (x[1] - x[0])
    frame = int(np.argmin(np.abs((data.parameter * times) % length - length / 2)))
    u = data.read(0, min(8, data.num_trajectories))[:, :, 0].astype(np.float64)
    waves = 2j * np.pi * np.fft.rfftfreq(len(x), d=length / len(x))
    moved = np.fft.irfft(np.fft.rfft(u[:, 0]) * np.exp(-waves * speed * times[frame]), n=len(x))
    scale = np.linalg.norm(u[:, 0] - u[:, 0].mean(-1, keepdims=True), axis=-1) + np.finfo(np.float64).tiny
    return float(np.median(np.linalg.norm(u[:, frame] - moved, axis=-1) / scale))


def starts_at_zero(data: Any, scan: Any) -> Iterator[Finding]:
    """Files on (-1, 1), as the withdrawn first edition."""
    if "x" in data.coordinates and data.coordinates["x"][0] < 0:
        yield Finding(
            "error",
            "x starts below zero: the withdrawn first edition of Burgers, with a wrong "
            "flux (PDEBench issue 51)",
            f"delete it and run `{make_target('data')}`",
        )


def is_a_gas(data: Any, scan: Any) -> Iterator[Finding]:
    """Densities or pressures that are not positive, and mass that a closed domain does not keep, in a few
    trajectories."""
    rows, u = data.stratified_rows(NUM_SAMPLED)
    space = tuple(range(2, u.ndim - 1))
    if (u[:, :, :2] <= 0).any():
        wrong = rows[(u[:, :, :2] <= 0).reshape(len(u), -1).any(1)].tolist()
        yield Finding("error", "a density or pressure is not positive", REMEDY, where=f"trajectories {wrong}")
    mass = u[:, :, 0].mean(space, dtype=np.float64)
    moved = float(np.median(np.abs(mass / mass[:, :1] - 1).max(1)))
    if data.task.conserved and moved > MAX_MASS_CHANGE:
        yield Finding(
            "error",
            f"the mass moves by {moved:.2g} of itself, and {data.task.name} conserves it: another boundary",
            "name the right task in data.tasks",
        )


def is_solution(data: Any, scan: Any) -> Iterator[Finding]:
    """Solutions u that do not solve -div(a grad u) = beta."""
    import torch

    _, u = data.stratified_rows(NUM_SAMPLED)
    a, u_stored = torch.from_numpy(u[:, 0]).double().unbind(1)
    if not bool((a > 0).all()):
        yield Finding(
            "error",
            f"the coefficient falls to {float(a.min()):g}; expected it positive",
            "write a, not its logarithm, to the array nu",
        )
        return
    u_steady = solver_of(data.task).integrate(a[:, None], parameter=data.parameter)[:, 0, 0]
    error = ((u_stored - u_steady).flatten(1).norm(dim=1) / u_steady.flatten(1).norm(dim=1)).max()
    if error > UNSTEADY:
        yield Finding(
            "warning",
            f"u is up to {float(error):.2g} (relative) from the solution of -div(a grad u) = beta: not yet "
            "steady, as published files are (a relaxation stopped at t = 1.75), or of another equation",
            REMEDY,
        )


def is_incompressible(data: Any, scan: Any) -> Iterator[Finding]:
    """Velocities with a divergence, in the interior and after the first frame."""
    if min(data.space) < 8:
        return
    u = data.read(0, 1)[0, data.num_frames // 2, :2].astype(np.float64)
    gradients = [[np.gradient(u[a], axis=axis)[2:-2, 2:-2] for axis in (0, 1)] for a in (0, 1)]
    ratio = np.linalg.norm(gradients[0][0] + gradients[1][1]) / max(np.linalg.norm(gradients), 1e-300)
    if ratio > DIVERGENT:
        yield Finding(
            "error",
            f"the velocity has a divergence of {ratio:.2g} of its gradient, and the flow "
            "is incompressible: its components or axes are exchanged, or it is another",
            "write velocity as (trajectory, time, x, y, component), Vx first",
        )


def reacts(data: Any, scan: Any) -> Iterator[Finding]:
    """Fields without a reaction: constant in time or with a constant mean, as in the published files."""
    if scan.frozen_fraction > FROZEN:
        yield Finding(
            "warning",
            f"{scan.frozen_fraction:.0%} of the frames equal the one before: the reaction "
            "is missing, as in the published files (PDEBench issue 94)",
            REMEDY,
        )
    if scan.mean_changes and (median := float(np.median(scan.mean_changes))) < MIN_MEAN_CHANGE:
        yield Finding(
            "warning",
            f"the mean of a trajectory stays (it moves by {median:.1g} of its RMS), and a reaction moves "
            "it: as in the published files (PDEBench issue 94), or another equation, such as burgers1d",
            f"name the right task in data.tasks; if it is the right one, {REMEDY}",
        )


OF_FAMILY = {
    "advection1d": moves_at_beta,
    "burgers1d": starts_at_zero,
    "darcy2d": is_solution,
    "darcy2d_grf": is_solution,
    "ns_incom2d": is_incompressible,
    "reacdiff1d": reacts,
    "reacdiff1d_rho2": reacts,
    "reacdiff1d_rho5": reacts,
    "reacdiff1d_rho10": reacts,
    **{name: is_a_gas for name, task in TASKS.items() if task.is_gas},
}


def check_family(data: Any, scan: Any) -> Iterator[Finding]:
    """The check of the task's family, if it has one."""
    if check := OF_FAMILY.get(data.task.files_of or data.task.name):
        yield from check(data, scan)
