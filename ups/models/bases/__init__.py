"""Base predictors: what is cheap, and exact where the equation allows it, in front of the network that learns
the rest.

All act on normalised fields. Which one a task gets is decided by rollouts on validation trajectories
(ups/models/base_selection.py) and stored with the model; fields may have one each (per_field.py). A new one
is a file with a `Base`, its row here and its row in ups/config/checks.py."""

from ups.models.bases.base import Base, Mean, Persistence
from ups.models.bases.elliptic import Elliptic
from ups.models.bases.equation import Equation
from ups.models.bases.flow import Flow
from ups.models.bases.linear import Linear
from ups.models.bases.propagator import Propagator
from ups.models.bases.solver import Solver
from ups.models.bases.transport import Transport

_ALL = (Persistence, Mean, Propagator, Transport, Flow, Equation, Elliptic, Linear, Solver)
BASES: dict[str, type[Base]] = {base.kind: base for base in _ALL}
