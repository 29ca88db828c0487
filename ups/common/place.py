"""Where this runs and what runs there: the clone, the trained stages of a run, one row each, the commands
that make them, the system. Code that treats all stages alike reads the table.

A new stage takes a row here, a section in ups/config/schema.py and configs/default.yaml, a script
train_STAGE.py and its line in the Makefile.
"""

import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]  # the clone; of an installed wheel the folder of all packages
HUB = "hf://"  # marks a name on a model hub: a folder that is missing never causes a request


@dataclass(frozen=True)
class Stage:
    """One trained stage.

    parents: stages whose weights it reads; tasks: the tasks that it trains on; those other than "all" need
    reserved trajectories. network: configuration section with its `model`. samplers: name -> network
    evaluations per sample; None: the sampler integrates the probability flow in `sampler_steps` steps; 0: in
    closed form. title, call: of the model card.
    """

    name: str
    parents: tuple[str, ...]
    tasks: Literal["all", "transient", "steady"]
    network: str
    title: str
    call: str
    samplers: dict[str, int | None] = field(default_factory=dict)

    @property
    def trained_samplers(self) -> list[str]:
        """The samplers that evaluate the network of the stage."""
        return [name for name, evaluations in self.samplers.items() if evaluations != 0]


STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            name="operator",
            parents=(),
            tasks="all",
            network="operator",
            title="the operator, which forecasts",
            call="forecast(task, u0, parameters, num_frames)",
        ),
        Stage(
            name="diffusion",
            parents=("operator",),
            tasks="transient",
            network="diffusion",
            title="the corrector, which samples its errors",
            call='sample(task, u0, num_frames=10, members=16, by="teacher")',
            samplers={"waves": 0, "corrector": None},
        ),
        Stage(
            name="consistency",
            parents=("operator", "diffusion"),
            tasks="transient",
            network="diffusion",
            title="the student, which samples them in one evaluation",
            call="sample(task, u0, num_frames=10, members=16)",
            samplers={"student_1": 1, "student_2": 2},
        ),
        Stage(
            name="scoring",
            parents=("operator", "diffusion"),
            tasks="transient",
            network="diffusion",
            title="the network trained by scores, which samples them in one evaluation",
            call='sample(task, u0, num_frames=10, members=16, by="scoring")',
            samplers={"scoring": 1},
        ),
        Stage(
            name="steady",
            parents=("operator",),
            tasks="steady",
            network="steady",
            title="the prior of steady solutions",
            call="prior(task, a_observed, mask)",
            samplers={"prior": None},
        ),
    )
}
TRANSIENT = tuple(name for name, stage in STAGES.items() if stage.tasks == "transient")


# ---------------------------------------------------------------- commands and the system


def make_command() -> list[str]:
    """The words that run make with the clone's Makefile from the working folder.

    Raises FileNotFoundError if pip installed the package without a clone.
    """
    makefile, here = ROOT / "Makefile", Path("Makefile")
    if not makefile.is_file():
        raise FileNotFoundError(
            f"{Path(__file__).parents[1]} is installed without a clone of UPS; expected one, as training and "
            "reports run there. Clone the repository, run make venv in it, and use .venv/bin/ups."
        )
    return ["make"] if here.is_file() and here.samefile(makefile) else ["make", "-f", str(makefile)]


def make_target(target: str) -> str:
    """How a message names a target of make, such as "operator RUN=small": as a command that runs in the
    working folder."""
    try:
        return f"{shlex.join(make_command())} {target}"
    except FileNotFoundError:
        return f"make {target} (in a clone of UPS)"


def script(name: str) -> str:
    """How a message names a script of the clone, with its path from the working folder."""
    return f"python {os.path.relpath(ROOT / name)}"


def require_posix(what: str) -> None:
    """Raise OSError on Windows. what: the subject of the message, such as "training"."""
    if sys.platform == "win32":
        raise OSError(
            f"{what} needs Linux or macOS, and this is Windows; expected POSIX locks and signals. "
            "Use WSL or another machine. ups.load(...) and its forecasts work here."
        )
