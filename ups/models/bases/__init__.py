"""Base predictors: what is cheap, and exact where the equation allows it, in front of the network that learns the rest.

All act on normalised fields. A call takes u (batch, history, C, *space) and what is known of its rows (`Known`), and gives the
next frame (batch, C, *space). Which one a task gets is decided by
rollouts on validation trajectories (`choose_base`) and stored with the model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ups.boundary import DIRICHLET, PERIODIC
from ups.models.known import Known
from ups.spectral import FieldTransform, apply_axes, cosine, fourier_pairs, sine
from ups.training.fit import fit


def monomials(num_channels: int, degree: int) -> list[tuple[int, ...]]:
    """Channel tuples of all monomials of degree 1 .. `degree`, in order of degree."""
    return [term for d in range(1, degree + 1) for term in itertools.combinations_with_replacement(range(num_channels), d)]


def dictionary(u: Tensor, degree: int) -> Tensor:
    """Monomials of one frame: (..., C, *space) with C at axis 1 to (batch, terms, *space)."""
    channels, terms = u.unbind(1), {}
    for term in monomials(len(channels), degree):   # each from one of a lower degree by one product
        terms[term] = channels[term[-1]] * terms[term[:-1]] if len(term) > 1 else channels[term[0]]
    return torch.stack(list(terms.values()), 1)


class Persistence(nn.Module):
    """The last frame again."""

    history, knows_fitted_only = 1, False

    def __init__(self, **_: Any):
        super().__init__()

    def forward(self, u: Tensor, known: Known) -> Tensor:
        return u[:, -1]


class Propagator(nn.Module):
    """u_next = u + W(k) [phi(u), phi(u_-1), ...] in the spectral basis of the boundary, phi all monomials up to `degree`.

    Every spectral mode k has its own small matrix W(k), fitted by ridge regression in closed form: dynamic mode
    decomposition for degree 1 (Schmid 2010), nonlinear vector autoregression in spectral space beyond it (Gauthier et al.
    2021, doi 10.1038/s41467-021-25801-2). It contains exact transport and diffusion, and multistep integrators of
    polynomial reactions; products across frames are left out because they did not pay, and so is a constant (on reaction-
    diffusion it took 40 % off the error with one frame of history and 0.3 % with four). One W per parameter value.

    weight_real, weight_imag: (values, modes, terms, C), terms newest frame first. Zero until fitted, which is persistence.
    """

    knows_fitted_only = True

    def __init__(self, num_values: int, num_channels: int, space: tuple[int, ...], boundary: str, degree: int, history: int,
                 **_: Any):
        super().__init__()
        self.degree, self.history = degree, history
        self.transform = FieldTransform(space, boundary)
        terms = len(monomials(num_channels, degree)) * history
        shape = (num_values, self.transform.modes, terms, num_channels)
        self.register_buffer("weight_real", torch.zeros(shape))
        if self.transform.is_periodic:
            self.register_buffer("weight_imag", torch.zeros(shape))

    def features(self, u: Tensor) -> Tensor:
        """(batch, history, C, *space) to spectral features (batch, terms, modes), newest frame first."""
        frames = [dictionary(u[:, -1 - lag], self.degree) for lag in range(self.history)]
        return self.transform.forward(torch.cat(frames, 1))

    def forward(self, u: Tensor, known: Known) -> Tensor:
        with torch.autocast(u.device.type, enabled=False):
            phi = self.features(u.float()).permute(2, 0, 1)                        # modes, batch, terms
            weight = torch.complex(self.weight_real, self.weight_imag) if self.transform.is_periodic else self.weight_real
            change = torch.zeros(*phi.shape[:2], weight.shape[-1], dtype=phi.dtype, device=phi.device)
            for value, rows in known.groups:                                       # one batched product per parameter value
                change = change.index_copy(1, rows, phi[:, rows] @ weight[value])
            return u[:, -1].float() + self.transform.inverse(change.permute(1, 2, 0))


def fit_propagators(windows: Callable[[int], Iterator[tuple[Tensor, Tensor]]], num_values: int, num_channels: int,
                    space: tuple[int, ...], boundary: str, degree: int, history: int) -> Iterator[tuple[dict, Propagator]]:
    """Yield (settings, fitted propagator) for every degree, history and ridge worth trying, from one pass over the data.

    windows(value): batches (u (n, history, C, *space), u_next (n, C, *space)) of one parameter value. The normal equations
    of the largest dictionary contain those of all smaller ones, so each candidate costs one small solve per mode:
    (Phi^H Phi + ridge n I) W = Phi^H (u_next - u), in float64. Raises ValueError for a value without a window.
    """
    largest = Propagator(num_values, num_channels, space, boundary, degree, history)
    normal, moment, count = [], [], []
    for value in range(num_values):
        a = b = 0.0
        n = 0
        for u, u_next in windows(value):
            phi = largest.features(u).permute(2, 0, 1)
            target = largest.transform.forward(u_next - u[:, -1]).permute(2, 0, 1)
            wide = torch.complex128 if phi.is_complex() else torch.float64
            phi, target = phi.to(wide), target.to(wide)
            a, b, n = a + phi.mH @ phi, b + phi.mH @ target, n + phi.shape[1]
        if n == 0:
            raise ValueError(f"no training window for parameter value number {value}; expected at least one. Check the split.")
        normal.append(a), moment.append(b), count.append(n)
    per_frame = len(monomials(num_channels, degree))
    for deg in sorted({1, degree}):
        for lags in sorted({1, 2, history} & set(range(1, history + 1))):
            keep = torch.tensor([lag * per_frame + i for lag in range(lags) for i in range(len(monomials(num_channels, deg)))])
            for ridge in (1e-6, 1e-8, 1e-10):
                fitted = Propagator(num_values, num_channels, space, boundary, deg, lags)
                for value in range(num_values):
                    a = normal[value][:, keep][:, :, keep]
                    eye = torch.eye(len(keep), dtype=a.dtype, device=a.device) * (ridge * count[value])
                    weight = torch.linalg.solve(a + eye, moment[value][:, keep])
                    fitted.weight_real[value] = weight.real.float()
                    if fitted.transform.is_periodic:
                        fitted.weight_imag[value] = weight.imag.float()
                yield {"degree": deg, "history": lags, "ridge": ridge}, fitted


class Transport(nn.Module):
    """u_next(x) = sum_k softmax_k( S(x + k) - S(x) + drift k - k^2 / (2 width^2) ) u(x + k), axis by axis, |k| <= reach.

    S is the running sum along the axis of a rate that a short stencil reads off the field. A positive kernel of unit mass:
    it moves and mixes values, and never leaves their range. A constant rate gives transport and diffusion; a rate
    proportional to u gives the heat-kernel average weighted by exp(-int u / 2 nu), which is the Cole-Hopf solution of
    Burgers' equation (Hopf 1950, Cole 1951), so that shocks form without a shock ever being represented. Rate, drift and
    width depend on the parameters through affine functions of their logarithms. The head is ours.
    """

    history, knows_fitted_only = 1, False
    TAPS = 5
    LEARNING_RATE = 1e-2   # Adam, 600 steps on Burgers nu 0.01: 4e-4; 3e-2 gives 7e-3
    RATE_SCALE = 10.0   # so that a unit step of the optimizer moves the potential as much as the width

    def __init__(self, num_parameters: int, num_channels: int, space: tuple[int, ...], boundary: str, reach: int, **_: Any):
        super().__init__()
        self.ndim, self.reach, self.is_periodic = len(space), reach, boundary == PERIODIC
        self.stencil = nn.Parameter(torch.zeros(self.ndim, num_channels, self.TAPS))
        self.log_amplitude = nn.Parameter(torch.zeros(self.ndim, num_parameters))
        self.drift = nn.Parameter(torch.zeros(self.ndim, 1 + num_parameters))
        width = torch.zeros(self.ndim, 1 + num_parameters)
        width[:, 0] = math.log(reach / 8)
        self.log_width = nn.Parameter(width)

    def _pad(self, u: Tensor, cells: int) -> Tensor:
        """Extend the last axis of (batch, channel, n) by the boundary condition (even mirror unless periodic)."""
        if self.is_periodic:
            return torch.cat([u[..., -cells:], u, u[..., :cells]], -1)
        return torch.cat([u[..., :cells].flip(-1), u, u[..., -cells:].flip(-1)], -1)

    def _along_last(self, u: Tensor, parameters: Tensor, axis: int) -> Tensor:
        """One pass along the last axis: u (batch, C, n), parameters (batch, P)."""
        n, reach, side = u.shape[-1], self.reach, self.TAPS // 2
        rate = F.conv1d(self._pad(u, side), self.stencil[axis][None])[:, 0] * self.RATE_SCALE / reach
        rate = rate * torch.exp(parameters @ self.log_amplitude[axis])[:, None]
        rate = self._pad(rate[:, None], reach)[:, 0]
        potential = rate.cumsum(-1) - rate / 2
        k = torch.arange(-reach, reach + 1, device=u.device, dtype=u.dtype)
        drift = self.drift[axis, 0] + parameters @ self.drift[axis, 1:]
        width = torch.exp(self.log_width[axis, 0] + parameters @ self.log_width[axis, 1:])
        bias = drift[:, None] * k - 0.5 * (k / width[:, None]) ** 2
        logits = potential.unfold(-1, 2 * reach + 1, 1) - potential[:, reach:reach + n, None] + bias[:, None]
        kernel = logits.softmax(-1)                                                # batch, n, 2 reach + 1
        return torch.einsum("bnk,bcnk->bcn", kernel, self._pad(u, reach).unfold(-1, 2 * reach + 1, 1))

    def forward(self, u: Tensor, known: Known) -> Tensor:
        with torch.autocast(u.device.type, enabled=False):
            u, parameters = u[:, -1].float(), known.standard.float()
            for axis in range(self.ndim):
                moved = torch.movedim(u, 2 + axis, 1)                              # lines of the other axes join the batch
                lines = moved.flatten(3) if self.ndim > 1 else moved[..., None]
                lines = lines.permute(0, 3, 2, 1).flatten(0, 1)                    # (batch * lines, C, n)
                repeats = lines.shape[0] // u.shape[0]
                out = self._along_last(lines, parameters.repeat_interleave(repeats, 0), axis)
                out = out.unflatten(0, (u.shape[0], repeats)).permute(0, 3, 2, 1)  # batch, n, C, lines
                u = torch.movedim(out.reshape(moved.shape), 1, 2 + axis)
            return u


class Elliptic(nn.Module):
    """Steady state of a learnt diffusion: -div(A grad u) + A0 u = f with A, A0 >= 0 and f read off the coefficient a(x).

    A lives on cell faces and is a small network of the two cells beside the face (or of the cell and the wall); A0 and f
    are one of the cell. The operator is symmetric and positive by construction, so a few conjugate-gradient steps,
    preconditioned by the constant-coefficient inverse in the boundary's own basis (Concus and Golub 1973), solve it and
    carry the gradient. A thousand weights or so: it cannot memorise its training set. The construction is ours.

    Input: normalised a as u (batch, 1, C_in, *space); output normalised u (batch, C, *space). zero: the normalised value
    of u = 0, which a Dirichlet wall holds.
    """

    history, knows_fitted_only = 1, False
    # Of conjugate gradients, twice as many where no gradient is kept. Validation error of fits with 8, 16 and 24: contrast 10
    # (darcy2d) 3.7e-3, 1.9e-3; log-normal (darcy2d_grf) 9.1e-2, 2.4e-2, 5e-3; 16 in training and 32 after it: 4.5e-3.
    ITERATIONS = 16
    HIDDEN = 16
    LEARNING_RATE = 4e-2   # Adam, 400 steps on Darcy: 1.8e-2, 1.2e-2, 7.8e-3, 2.9e-3 for 5e-3, 1e-2, 2e-2, 4e-2

    def __init__(self, num_parameters: int, num_channels: int, num_inputs: int, space: tuple[int, ...], boundary: str, **_: Any):
        super().__init__()
        self.ndim, self.num_channels, self.boundary = len(space), num_channels, boundary
        hidden = self.HIDDEN
        self.face = nn.Sequential(nn.Linear(2 * num_inputs + 2, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(),
                                  nn.Linear(hidden, num_channels))
        self.cell = nn.Sequential(nn.Linear(num_inputs, hidden), nn.GELU(), nn.Linear(hidden, 2 * num_channels))
        self.log_source = nn.Parameter(torch.zeros(num_parameters))
        self.register_buffer("zero", torch.zeros(num_channels))
        self.register_buffer("gain", torch.ones(num_channels))
        h2 = [float(n) ** 2 for n in space]
        self.mean_square = sum(h2) / len(h2)
        offsets = []
        for axis, n in enumerate(space):
            k = torch.arange(n, dtype=torch.float64)
            if boundary == PERIODIC:
                pairs = fourier_pairs(n, n // 2 + 1).flatten(0, 1)
                rows = pairs.norm(dim=-1) > 0.5               # the sines of wave numbers 0 and n/2 are zero
                matrix, wave = pairs[rows], torch.arange(n // 2 + 1, dtype=torch.float64).repeat(2)[rows] * 2
            else:
                matrix, wave = (sine(n), k + 1) if boundary == DIRICHLET else (cosine(n), k)
            self.register_buffer(f"basis{axis}", matrix.float(), persistent=False)
            eigenvalues = (2 - 2 * torch.cos(math.pi * wave / n)) * (h2[axis] / self.mean_square)
            offsets.append(eigenvalues.view(*[-1 if i == axis else 1 for i in range(len(space))]))
        total = sum(offsets)
        self.register_buffer("inverse", (1 / total.clamp_min(float(total[total > 0].min()) / 4)).float(), persistent=False)
        self.scales = [value / self.mean_square for value in h2]

    def _precondition(self, r: Tensor) -> Tensor:
        matrices = [getattr(self, f"basis{axis}") for axis in range(self.ndim)]
        return apply_axes(apply_axes(r, matrices) * self.inverse, [m.mT for m in matrices])

    def _neighbours(self, x: Tensor, axis: int, outside: float | None) -> tuple[Tensor, Tensor]:
        """Cells left and right of every face of an axis; beyond a wall -x (Dirichlet), x itself, or `outside`."""
        first, last = x.narrow(axis, 0, 1), x.narrow(axis, x.shape[axis] - 1, 1)
        if self.boundary == PERIODIC:
            before, after = last, first
        elif outside is not None:
            before, after = torch.full_like(first, outside), torch.full_like(last, outside)
        else:
            sign = -1.0 if self.boundary == DIRICHLET else 1.0
            before, after = sign * first, sign * last
        return torch.cat([before, x], axis), torch.cat([x, after], axis)

    def forward(self, u: Tensor, known: Known) -> Tensor:
        with torch.autocast(u.device.type, enabled=False):
            a = u[:, 0].float().movedim(1, -1)                                     # batch, *space, C_in
            marked = torch.cat([a, torch.ones_like(a[..., :1])], -1)
            faces = []
            for axis in range(1, self.ndim + 1):
                left, right = self._neighbours(marked, axis, 0.0)
                value = self.face(torch.cat([left, right], -1)) + self.face(torch.cat([right, left], -1))
                faces.append(value.exp().movedim(-1, 1) * self.scales[axis - 1])
            source, reaction = self.cell(a).movedim(-1, 1).chunk(2, 1)
            scale = torch.exp(known.standard.float() @ self.log_source).view(-1, *[1] * (self.ndim + 1))
            source = (1 + source) * scale * self.gain.view(-1, *[1] * self.ndim) / self.inverse.shape[0] ** 2
            reaction = F.softplus(reaction - 8) / self.inverse.shape[0] ** 2       # starts near zero

            def operator(x: Tensor) -> Tensor:
                y = reaction * x
                for axis in range(self.ndim):
                    left, right = self._neighbours(x, axis + 2, None)
                    flux = (right - left) * faces[axis]
                    y = y - flux.diff(dim=axis + 2)
                return y

            return self._solve(operator, source) + self.zero.view(-1, *[1] * self.ndim)

    @torch.no_grad()
    def calibrate(self, u: Tensor, known: Known, u_ref: Tensor) -> None:
        """Set the source's gain by least squares, so that training starts at the right size (the solve is linear in it)."""
        zero = self.zero.view(-1, *[1] * self.ndim)
        x, y = self(u, known) - zero, u_ref - zero
        axes = (0, *range(2, x.ndim))
        self.gain.mul_((x * y).sum(axes) / x.square().sum(axes).clamp_min(1e-12))

    def _solve(self, operator: Callable[[Tensor], Tensor], source: Tensor) -> Tensor:
        """Preconditioned conjugate gradients, a fixed number of steps (Hestenes and Stiefel 1952)."""
        count = self.ITERATIONS if torch.is_grad_enabled() else 2 * self.ITERATIONS
        axes = tuple(range(2, source.ndim))

        def dot(x: Tensor, y: Tensor) -> Tensor:
            return (x * y).sum(axes, keepdim=True)

        tiny = torch.finfo(source.dtype).tiny ** 0.5
        x, r = torch.zeros_like(source), source
        p = z = self._precondition(r)
        rz = dot(r, z)
        for step in range(count):
            q = operator(p)
            alpha = rz / (dot(p, q) + tiny)
            x = x + alpha * p
            if step + 1 < count:
                r = r - alpha * q
                z = self._precondition(r)
                rz, before = dot(r, z), rz
                p = z + rz / (before + tiny) * p
        return x


BASES: dict[str, type[nn.Module]] = {"persistence": Persistence, "propagator": Propagator,
                                     "transport": Transport, "elliptic": Elliptic}


def make_base(kind: str, settings: dict[str, Any]) -> nn.Module:
    """The base predictor `kind` for the geometry and hyper-parameters in `settings`, not yet fitted."""
    return BASES[kind](**settings)


def fit_by_gradient(base: nn.Module, draw: Callable[[int], tuple[Tensor, Known, Tensor]], num_steps: int,
                    steps: Iterable[int] | None = None) -> None:
    """Fit a transport or elliptic base on one-call relative errors with Adam.

    draw(step): (u, known, u_next). Linear warm-up and decay; the loss is relative to the change (to the field for a steady
    task, whose input is not a frame). steps: range(num_steps), perhaps by way of something that tells of them.
    """
    def loss_of(step: int) -> Tensor:
        u, known, u_next = draw(step)
        axes = tuple(range(1, u_next.ndim))
        against = u_next if isinstance(base, Elliptic) else u_next - u[:, -1]
        error = (base(u, known) - u_next).square().mean(axes)
        return (error / against.square().mean(axes).clamp_min(1e-8)).add(1e-12).sqrt().mean()

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 20) * min(1.0, 2 * (1 - step / num_steps))

    optimizer = torch.optim.Adam([{"params": list(base.parameters()), "base_lr": base.LEARNING_RATE}])
    fit(base, loss_of, range(num_steps) if steps is None else steps, optimizer, rate, clip_norm=1.0)
