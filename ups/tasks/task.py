"""The description of a task: facts about its fields, equation and files.

Its solver has the same name in `ups_solvers`; what a user may choose (resolution, number of trajectories,
parameter values) is in the configuration.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Place:
    """An array of a file: its name (* for the groups of trajectories), a word for each stored axis
    (trajectory, time, channel, component, single, or an axis of space), and its fields."""

    array: str
    axes: tuple[str, ...]
    fields: tuple[str, ...]

    @property
    def is_steady(self) -> bool:
        return "time" not in self.axes


@dataclass(frozen=True)
class Finding:
    """One result of a check of a data file.

    severity: error (do not train on the file), warning (look at it), caution (sound, with a limit or a cost)
    or info. what: the problem. do: the next step; empty if `what` names it. where: the trajectories or the
    section of the configuration; empty for the whole file.
    """

    severity: str
    what: str
    do: str = ""
    where: str = ""

    def __str__(self) -> str:
        where, advice = f" [{self.where}]" * bool(self.where), f" To do: {self.do}." * bool(self.do)
        return f"{self.what}{where}.{advice}"


def in_unit(name: str, unit: str | None) -> str:
    """A quantity as figures and tables name it: T (K)."""
    return f"{name} ({unit})" if unit else name


@dataclass(frozen=True, kw_only=True)
class Task:
    """One family of trajectories. Arrays u are (n, time, channel, *space)."""

    # ---- channels
    name: str  # key in configurations, folders and files
    fields: tuple[str, ...]  # physical fields, in our order; of a steady task the solution alone
    inputs: tuple[str, ...] = ()  # coefficients a(x) of a steady task; empty for a time-dependent one
    forcing: tuple[str, ...] = ()  # known in advance, such as heating or a control: an input of models
    series: tuple[str, ...] = ()  # the forcing that is one number per frame, equal in every cell
    still: tuple[str, ...] = ()  # the last of `fields`, constant in time: not predicted and not scored
    positive: tuple[str, ...] = ()  # channels that are normalised in log-space
    # components along `axes` of one vector after the other; the rest are scalars
    vector: tuple[str, ...] = ()

    # ---- domain and parameters
    ndim: int  # number of space axes
    axes: tuple[str, ...] = ()  # names of the space axes in storage order; x, y, z by default
    # (low, high) of all axes, or of each
    domain: tuple[float, float] | tuple[tuple[float, float], ...] = (0.0, 1.0)
    boundary: str  # as in ups_discovery/boundary.py
    # 1D: values of each field at both ends, if fixed and not zero
    walls: tuple[tuple[float, float], ...] = ()
    parameters: tuple[str, ...] = ()  # numbers of a whole file, as its HDF5 attributes spell them
    constants: tuple[tuple[str, float], ...] = ()  # equation constants that all files of the task share
    hides: bool = False  # parameters are hidden and models see `history` frames only: the future is uncertain
    # why the future is uncertain although models get the whole state; "" if it is not
    why_uncertain: str = ""
    # its solver samples exactly the future of a state or, of a steady task, solutions given observations
    has_known_law: bool = False

    # ---- equation
    # in the names of fields, inputs, parameters and constants; lap is the Laplacian
    equation: str = ""
    # channels whose mean over space is constant; of a gas, words for its conserved densities
    conserved: tuple[str, ...] = ()
    is_gas: bool = False  # the fields are density, pressure and velocity of an ideal gas
    bounded: tuple[str, ...] = ()  # fields that in the data stay within the range of the start
    is_shifted: bool = True  # shifts along periodic axes map solutions to solutions
    fixed_axes: tuple[str, ...] = ()  # except along these, along which the equation varies
    is_symmetric: bool = False  # so do mirror images and, on a cube, exchanged axes
    # trajectories start on the invariant measure: long rollouts have its statistics
    is_stationary: bool = False

    # ---- files
    arrays: tuple[Place, ...]  # arrays of a file; of a family's, in the order of `inputs` then `fields`
    has_own_times: bool = False  # the array t holds the times of each trajectory
    filename: str  # published name, with the first parameter as {}
    respell: tuple[str, str] = ("", "")  # (old, new) text where PDEBench writes the number unlike Python
    t_end: float = 1.0  # of one published file, in model time
    num_frames: int = 101
    resolution: int = 128
    num_trajectories: int = 10000
    files_of: str = ""  # a variant: the task whose files it reads
    user_facts: Mapping[str, Any] | None = field(default=None, hash=False)  # `make_user_task`

    # ---- settings
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)  # task.NAME, where not the plainest

    def __post_init__(self) -> None:
        if not self.axes:
            object.__setattr__(self, "axes", ("x", "y", "z")[: self.ndim])

    @cached_property
    def is_steady(self) -> bool:
        return bool(self.inputs)

    @property
    def is_driven(self) -> bool:
        """Whether noise or a known forcing drives it, so that fields that vanish are excited anew."""
        return bool(self.why_uncertain or self.forcing)

    @property
    def description(self) -> dict[str, Any]:
        """What a file says of the task; `ups.tasks.described_task` is the inverse."""
        return {"name": self.name} | ({"own": dict(self.user_facts)} if self.user_facts is not None else {})

    @cached_property
    def moving(self) -> tuple[str, ...]:
        """The predicted fields, which are the first ones."""
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

    @cached_property
    def offsets(self) -> Mapping[str, float]:
        """Field -> constant that is subtracted from it, for fields whose mean dominates their variation.

        Only files and the public interface have absolute values."""
        return (self.user_facts or {}).get("offset", {})

    def counted(self, u: Any, names: Sequence[str]) -> Any:
        """Values (..., C, *space) of the fields `names` minus their offsets, float64; u itself if there are
        none."""
        return self.absolute(u, names, -1.0)

    def absolute(self, u: Any, names: Sequence[str], sign: float = 1.0) -> Any:
        """The inverse of `counted`."""
        if not any(name in self.offsets for name in names):
            return u
        u = u.double() if hasattr(u, "double") else u.astype("f8")  # torch, NumPy
        u = u + 0.0  # a copy
        for channel, name in enumerate(names):
            u[(..., channel, *[slice(None)] * self.ndim)] += sign * self.offsets.get(name, 0.0)
        return u

    @property
    def measure(self) -> str:
        """The scale of relative errors, in words."""
        names = ", ".join(map(self.as_counted, self.moving))
        return f"RMS of {names}" if {*self.moving} & {*self.offsets} else "RMS of the truth"

    def as_counted(self, name: str) -> str:
        """A field as figures name it, such as u - 101325 if its offset is 101325."""
        offset = self.offsets.get(name, 0.0)
        return f"{name} {'-' if offset > 0 else '+'} {abs(offset):.12g}" if offset else name

    @property
    def units(self) -> Mapping[str, str]:
        """Field, axis or "time" -> its unit; without those that have none."""
        return (self.user_facts or {}).get("units", {})

    def with_unit(self, name: str) -> str:
        """A field, an axis or "time" as figures name it: T (K)."""
        return in_unit("lead time" if name == "time" else self.as_counted(name), self.units.get(name))

    def predicted(self, u: Any) -> Any:
        """The predicted ones of the fields u (..., C, *space)."""
        return u.narrow(-1 - self.ndim, 0, len(self.moving))

    @property
    def channels(self) -> tuple[str, ...]:
        """Channels of a stored trajectory: the coefficient of a steady task, the fields, the forcing."""
        return self.inputs + self.fields + self.forcing

    @property
    def settings(self) -> dict[str, Any]:
        """The default section task.NAME of a configuration: the numbers of the published files, `defaults`,
        and the plainest value of every other key."""
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
            "degree": 0 if self.is_steady else 3,
            "reach": 0,
            "reserve": 0.0,
            "base": ["elliptic"] if self.is_steady else ["persistence", "propagator"],
            **self.defaults,
        }

    @property
    def published(self) -> dict[str, tuple[int, str]]:
        """File name -> (DaRUS id, MD5)."""
        from ups.tasks.published import PUBLISHED  # what downloads needs it, and no forecast

        return {} if self.user_facts is not None else PUBLISHED.get(self.files_of or self.name, {})

    @property
    def is_grouped(self) -> bool:
        """Whether files hold a group for each trajectory; else published ones store trajectories one after
        the other, so that the first ones can be downloaded alone."""
        return any("*" in place.array for place in self.arrays)

    def hidden(self, **defaults: Any) -> "Task":
        """The variant that reads the same files and hides the parameter. defaults: settings that differ."""
        return replace(
            self,
            name=f"{self.name}_hidden",
            hides=True,
            files_of=self.name,
            has_known_law=False,
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
        """The published file name for one value of the first parameter. Raises ValueError for a missing or
        needless value."""
        if (parameter is None) != (not self.parameters):
            expected = (
                f"a value of {self.parameters[0]}" if self.parameters else "None (the task has no parameter)"
            )
            raise ValueError(
                f"{self.name} got parameter {parameter!r}; expected {expected}. "
                f"Correct task.{self.name}.parameters."
            )
        name = self.filename if parameter is None else self.filename.format(float(parameter))
        return name.replace(*self.respell) if self.respell[0] else name

    def parameter_in(self, name: str) -> float | None:
        """The first parameter according to a file's name; None if the name has none."""
        match = re.match(re.escape(self.filename.split("{")[0]) + r"([0-9]+\.?[0-9]*(?:e-?[0-9]+)?)", name)
        return float(match[1]) if match and self.parameters and self.filename else None

    def attributes(self, parameter: float | None) -> dict[str, float]:
        """Equation parameters and constants of one file, under the names of its HDF5 attributes."""
        constants = dict(self.constants)
        return {**{name: float(parameter) for name in self.parameters if name not in constants}, **constants}


# ---------------------------------------------------------------- tasks that a user declares

# They are made from facts, plain values that configurations and weights carry.


MOST_LETTERS = 64  # bytes, of a name: that of a file has 255, with what is put before and behind it
# attributes of torch's ModuleDict, which takes no module of such a name
TORCH = re.compile(
    "_.*|(get|named|register|set|requires|share|to|zero)_.*|T_destination|add_module|apply"
    "|bfloat16|buffers|call_super_init|children|clear|compile|[cimx]pu|cuda|double"
    "|dump_patches|eval|extra_repr|float|forward|half|items|keys|load_state_dict|modules|mtia"
    "|parameters|pop|state_dict|to|train|training|type|update|values"
)


def require_name(name: str) -> None:
    """Raise ValueError unless `name` can name a task: files, weights and keys of a configuration are named
    after it."""
    is_short = isinstance(name, str) and len(name.encode()) <= MOST_LETTERS
    if not is_short or not name.isidentifier() or TORCH.fullmatch(name):
        raise ValueError(
            f"{name!r:.80} cannot name a task; expected at most {MOST_LETTERS} letters, digits and _, and no "
            "name of a method of torch's modules, because files and weights are named after the task. "
            "Write another name under task and in data.tasks."
        )


def make_user_task(name: str, facts: Mapping[str, Any]) -> Task:
    """The task that `facts` declare (plain values, JSON-able). Raises ValueError for an unsuitable name.

    Keys: arrays (of `Place`), axes, boundary, domain (a pair per axis), inputs; parameters (name -> place of
    its value); positive, conserved, bounded, vector (fields); symmetries ("shift", "shift_x", "mirror");
    hidden; and, if there are any, offset (`Task.offsets`), units (`Task.units`) and forcing (fields that are
    known in advance).
    """
    require_name(name)
    if not all(isinstance(unit, str) for unit in facts.get("units", {}).values()):
        raise ValueError(f"{name} has units {facts['units']!r:.80}; expected text. Take another copy of it.")
    places = tuple(
        Place(entry["array"], tuple(entry["axes"]), tuple(entry["fields"])) for entry in facts["arrays"]
    )
    inputs = tuple(facts["inputs"])
    forcing = tuple(field for place in places for field in place.fields if field in facts.get("forcing", ()))
    is_steady = all(place.is_steady for place in places)
    fields = tuple(field for place in places for field in place.fields if field not in inputs + forcing)
    series = tuple(
        field
        for place in places
        for field in place.fields
        if field in forcing and not {*place.axes} & {*facts["axes"]}
    )
    still = () if is_steady else tuple(field for place in places if place.is_steady for field in place.fields)
    moving = tuple(field for field in fields if field not in still)
    return Task(
        name=name,
        fields=moving + still,
        inputs=inputs,
        still=still,
        forcing=forcing,
        series=series,
        ndim=len(facts["axes"]),
        axes=tuple(facts["axes"]),
        boundary=facts["boundary"],
        domain=tuple((float(low), float(high)) for low, high in facts["domain"]),
        arrays=places,
        filename="",
        parameters=tuple(facts["parameters"]),
        positive=tuple(facts["positive"]),
        conserved=tuple(facts["conserved"]),
        bounded=tuple(facts["bounded"]),
        hides=facts["hidden"],
        is_shifted=any(word.startswith("shift") for word in facts["symmetries"]),
        fixed_axes=tuple(
            axis for axis in facts["axes"] if not {"shift", f"shift_{axis}"} & {*facts["symmetries"]}
        ),
        is_symmetric="mirror" in facts["symmetries"],
        vector=tuple(facts["vector"]),
        user_facts=dict(facts),
    )
