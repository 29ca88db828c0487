"""The trained stages of a run, one row each. Code that treats all stages alike reads this table.

A new stage takes a row here, a section in ups/config/schema.py and configs/default.yaml, a script
train_STAGE.py and its line in the Makefile.
"""

from dataclasses import dataclass, field
from typing import Literal


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
