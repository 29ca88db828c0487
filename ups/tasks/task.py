"""What is known of a task: its fields, equation, files, solver and checks. A task is a constant of nature
here: what a user may choose (resolution, number of trajectories, parameter values) is in the
configuration."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Array:
    """One array of a task's files. channels: how many it holds; vector: they are a trailing axis; steady: no
    time axis."""

    key: str
    channels: int = 1
    vector: bool = False
    steady: bool = False

    def axes(self, space: tuple[str, ...]) -> tuple[str, ...]:
        """Axes of one trajectory whose space axes are `space`, such as ("time", "x")."""
        return (() if self.steady else ("time",)) + space + (("channel",) if self.vector else ())


@dataclass(frozen=True)
class Finding:
    """What a check says about a data file. severity: error (do not train on it), warning (look at it),
    caution (sound, with a limit or a cost that is to be known) or info.

    where: file, and trajectories if any. do: the next step; empty where `what` ends with it.
    """

    severity: str
    what: str
    where: str
    do: str


def in_unit(name: str, unit: str | None) -> str:
    """A quantity as figures and tables name it: T (K)."""
    return f"{name} ({unit})" if unit else name


@dataclass(frozen=True)
class Task:
    """One family of trajectories.

    name: key used in configs, folders and files. fields: physical channels in our order; for steady tasks the
    unknown only (`inputs` holds the coefficient). inputs: coefficient fields a(x) of a steady task, empty for
    a time-dependent one. ndim: space dimensions. boundary: as in ups/common/boundary.py. walls: of each field
    in 1D its values at both ends, where these are known and not zero. domain: every axis runs over it; or one
    such pair per axis. axes: names of the stored space axes in storage order. parameters: names of the
    file-level parameters, as the HDF5 attribute spells them; `filename` is the
        published file's name as a function of the first. constants: equation constants that all files of the
        task share.
    respell: (old, new) text in the file name where PDEBench departs from Python's way of writing the number.
    positive: channels normalised in log-space. still: fields of a time-dependent task that do not change,
    such as a coefficient: the last ones. They are given, in no prediction another, and not scored.
    forcing: channels beside the fields that vary in time and are known in advance, such as heating or a
    control: models are given them and never predict them. series: those of them that are one number a frame,
    the same in every cell.
    hides: the parameters are withheld from every model, which is shown `history` frames and no more (more
        frames would reveal them): the next state is then truly uncertain. of: the task whose files a variant
        of it reads.
    unknown: why what follows the whole state that models are shown is uncertain all the same, in words; ""
    where it is not.
    is_stationary: trajectories start on the invariant measure, so that long rollouts have its statistics.
    equation: what is solved, in the names of fields, inputs, parameters and constants; lap is the Laplacian.
    conserved: what the equation keeps: channels whose mean over space stays, or words for what `densities`
    gives, whose means stay. densities: u (n, T, C, *space) -> (n, T, K, *space). restore: u and its start
    (n, 1, C, *space) -> what to add to each channel, to the logarithm of a positive one, so that they stay,
    (n, T, C). bounded: fields of which no value leaves the range of the initial state.
    is_shifted: along periodic axes a shifted solution is a solution, but for those of fixed_axes, along which
    the equation itself varies. is_symmetric: mirror images and, on a cube, exchanged axes of solutions are
    solutions. vector: the fields that are the
    components of a vector along `axes` and turn with them, of one vector after the other; the others are
    scalars.
    layout: "arrays" (one array per channel, trajectories on axis 0), "groups" (one HDF5 group per trajectory)
    or "own": declared by the user, and own then holds the facts it is made from (ups/tasks/user_task.py).
    arrays: what a file holds, in the order of `inputs` then `fields`. has_own_times: the frames' times are
        those of every trajectory, in the array t.
    t_end, num_frames, resolution, num_trajectories: of one published file (time in model units).
    published: file name -> (DaRUS id, MD5) from PDEBench's download table (data set doi:10.18419/darus-2986).
    further: the same of the family's files that no setting names, test problems and further parts; they are
        fetched by name (prepare_data.py --file).
    withdrawn: file name -> first digits of the MD5 of a withdrawn first edition, which may still circulate.
    defaults: settings (configuration section task.NAME) that suit the task where they are not the plainest.
    simulate: the reference solver, float64 inside, or None:
        simulate(indices, *, seed, resolution, num_frames, parameter, t_end) -> (n, num_frames, channel,
        *space) float32 at t = linspace(0, t_end, num_frames). Trajectory i depends on (seed, i) and on
        nothing else, so that any cutting of a data set into chunks gives the same bits. A steady task gives
        one frame that holds input and answer.
    edition: of `simulate`: higher where it computes other numbers than before; files name it.
    step: the same scheme from a state that is given, or None where the stored fields are not the whole state:
        step(u, *, parameter, dt) -> u (n, channel, *space) a time dt later, on any grid, physical units.
    checks: (data, scan) -> findings that only this task has, for the data doctor: what a reader says of a
        file whose numbers are finite, and what one pass over it gave (ups/data/doctor.py).
    posterior: (observation, num, seed, parameter) -> `num` exact samples (a, u) given a linear observation of
    log a, or None.
    draw: (u, num, *, seed, rows, num_frames, parameter, dt) -> `num` exact futures (n, num, num_frames,
        channel, *space), float32, of each state u (n, channel, *space), at dt, 2 dt, ..; draw j of a state is
        a function of (seed, its number in `rows`, j). None where the state says what follows, or where nobody
        knows what does.
    """

    name: str
    fields: tuple[str, ...]
    ndim: int
    boundary: str
    layout: str
    arrays: tuple[Array, ...]
    filename: str
    parameters: tuple[str, ...] = ()
    constants: tuple[tuple[str, float], ...] = ()
    respell: tuple[str, str] = ("", "")
    inputs: tuple[str, ...] = ()
    positive: tuple[str, ...] = ()
    still: tuple[str, ...] = ()
    forcing: tuple[str, ...] = ()
    series: tuple[str, ...] = ()
    walls: tuple[tuple[float, float], ...] = ()
    domain: tuple[float, float] | tuple[tuple[float, float], ...] = (0.0, 1.0)
    axes: tuple[str, ...] = ()
    t_end: float = 1.0
    num_frames: int = 101
    resolution: int = 128
    num_trajectories: int = 10000
    hides: bool = False
    of: str = ""
    unknown: str = ""
    is_stationary: bool = False
    equation: str = ""
    conserved: tuple[str, ...] = ()
    densities: Callable[[Any], Any] | None = None
    restore: Callable[[Any, Any], Any] | None = None
    bounded: tuple[str, ...] = ()
    is_shifted: bool = True
    fixed_axes: tuple[str, ...] = ()
    is_symmetric: bool = False
    vector: tuple[str, ...] = ()
    has_own_times: bool = False
    published: Mapping[str, tuple[int, str]] = field(default_factory=dict, hash=False)
    further: Mapping[str, tuple[int, str]] = field(default_factory=dict, hash=False)
    withdrawn: Mapping[str, str] = field(default_factory=dict, hash=False)
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    simulate: Callable[..., Any] | None = None
    edition: int = 1
    step: Callable[..., Any] | None = None
    checks: tuple[Callable[[Any, Any], Iterable[Finding]], ...] = ()
    posterior: Callable[..., Any] | None = None
    draw: Callable[..., Any] | None = None
    own: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if not self.axes:
            object.__setattr__(self, "axes", ("x", "y", "z")[: self.ndim])

    @property
    def is_steady(self) -> bool:
        return bool(self.inputs)

    @property
    def description(self) -> dict[str, Any]:
        """What names the task in a file: `ups.tasks.described_task` gives it back."""
        return {"name": self.name} | ({"own": dict(self.own)} if self.own is not None else {})

    @property
    def moving(self) -> tuple[str, ...]:
        """The fields that are predicted: the first ones."""
        return self.fields[: len(self.fields) - len(self.still)]

    @property
    def vectors(self) -> tuple[tuple[str, ...], ...]:
        """The components of each vector among the fields."""
        return self.vectors_of(self.fields)

    def vectors_of(self, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The components of each vector among `names`."""
        return tuple(
            vector for vector in zip(*[iter(self.vector)] * self.ndim, strict=True) if {*vector} <= {*names}
        )

    @property
    def offsets(self) -> Mapping[str, float]:
        """Field -> the number it is counted from, of those whose mean dominates their variation: everywhere
        but in files and at the public interface their values are relative to it."""
        return (self.own or {}).get("offset", {})

    def counted(self, u: Any, names: Sequence[str]) -> Any:
        """Physical values (..., C, *space) of the fields `names` counted from their offsets, float64; as they
        are where there are none."""
        return self._moved(u, names, -1.0)

    def absolute(self, u: Any, names: Sequence[str]) -> Any:
        """The inverse of `counted`."""
        return self._moved(u, names, 1.0)

    def _moved(self, u: Any, names: Sequence[str], sign: float) -> Any:
        if not any(name in self.offsets for name in names):
            return u
        u = u.double() if hasattr(u, "double") else u.astype("f8")  # torch, NumPy
        u = u + 0.0  # a copy
        for channel, name in enumerate(names):
            u[(..., channel, *[slice(None)] * self.ndim)] += sign * self.offsets.get(name, 0.0)
        return u

    @property
    def measure(self) -> str:
        """What relative errors are relative to."""
        shown = ", ".join(map(self.as_counted, self.moving))
        return f"RMS of {shown}" if {*self.moving} & {*self.offsets} else "RMS of the truth"

    def as_counted(self, name: str) -> str:
        """A field as figures name it: u - 101325 where it is counted from 101325."""
        offset = self.offsets.get(name, 0.0)
        return f"{name} {'-' if offset > 0 else '+'} {abs(offset):.12g}" if offset else name

    @property
    def units(self) -> Mapping[str, str]:
        """Field, axis or "time" -> its unit, of those that have one."""
        return (self.own or {}).get("units", {})

    def with_unit(self, name: str) -> str:
        """A field, an axis or "time" as figures name it: T (K)."""
        shown = "lead time" if name == "time" else self.as_counted(name)
        return in_unit(shown, self.units.get(name))

    def predicted(self, u: Any) -> Any:
        """Of fields (..., C, *space) those that are predicted: what is given is not scored."""
        return u.narrow(-1 - self.ndim, 0, len(self.moving))

    @property
    def channels(self) -> tuple[str, ...]:
        """Channels of a stored trajectory: the coefficient of a steady task, the fields, the forcing."""
        return self.inputs + self.fields + self.forcing

    @property
    def settings(self) -> dict[str, Any]:
        """Section task.NAME of a configuration that says nothing of the task: the published files' numbers,
        `defaults` and the plainest of what is left."""
        values = [value for value in map(self.parameter_in, self.published) if value is not None]
        return {
            **{key: getattr(self, key) for key in ("num_trajectories", "resolution", "num_frames", "t_end")},
            "parameters": values,
            "space_stride": 1,
            "time_stride": 1,
            "first_frame": 0,
            "train_from": 0,
            "patch": 4,
            "solver": "",
            "dim": 0,
            "energy": 1.0,
            "history": 1,
            "bundle": 1,
            "degree": 0 if self.is_steady else 3,
            "reach": 0,
            "reserve": 0.0,
            "base": ["elliptic"] if self.is_steady else ["persistence", "propagator"],
            **self.defaults,
        }

    @property
    def remedy(self) -> str:
        """What to do about data that do not solve the equation."""
        if self.own is not None:
            return f"mend task.{self.name} or the files"
        if self.simulate:
            return "set data.source=generate, which solves the stated equation, or train on it for what it is"
        return (
            f"train on it for what it is, or write data of your own (data.source=user): {self.name} has "
            "no solver here"
        )

    @property
    def is_contiguous(self) -> bool:
        """Whether the published files hold their trajectories one after the other, so that a server can give
        the first ones alone."""
        return self.layout == "arrays"

    def hidden(self, **defaults: Any) -> "Task":
        """The variant that reads the same files with the parameter withheld; defaults: where its settings
        differ."""
        return replace(
            self,
            name=f"{self.name}_hidden",
            hides=True,
            of=self.name,
            draw=None,
            defaults={**self.defaults, "history": 1, "reserve": 0.5, **defaults},
        )

    @property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """(low, high) of every axis."""
        return self.domain if isinstance(self.domain[0], tuple) else (self.domain,) * self.ndim

    def centres(self, num_cells: int, axis: str) -> list[float]:
        """Centres of `num_cells` equal cells along an axis of the domain."""
        low, high = self.spans[self.axes.index(axis)]
        return [low + (cell + 0.5) * (high - low) / num_cells for cell in range(num_cells)]

    def file_for(self, parameter: float | None) -> str:
        """Published file name for one value of the first parameter (formatted as PDEBench writes it)."""
        if (parameter is None) != (not self.parameters):
            expected = (
                f"a value of {self.parameters[0]}" if self.parameters else "None (the task has no parameter)"
            )
            raise ValueError(
                f"{self.name} was given parameter {parameter!r}; expected {expected}. "
                f"Mend task.{self.name}.parameters."
            )
        name = self.filename if parameter is None else self.filename.format(float(parameter))
        return name.replace(*self.respell) if self.respell[0] else name

    def parameter_in(self, name: str) -> float | None:
        """The first parameter as a file's name tells it, or None."""
        match = re.match(re.escape(self.filename.split("{")[0]) + r"([0-9]+\.?[0-9]*(?:e-?[0-9]+)?)", name)
        return float(match[1]) if match and self.parameters and self.filename else None

    def attributes(self, parameter: float | None) -> dict[str, float]:
        """Equation parameters and constants of one file, by the name its HDF5 attributes have."""
        constants = dict(self.constants)
        return {**{name: float(parameter) for name in self.parameters if name not in constants}, **constants}
