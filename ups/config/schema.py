"""The configuration as a whole, and what follows from it: folders, files, the stages and tasks of a run."""

from dataclasses import dataclass
from pathlib import Path

from ups.common.stages import STAGES
from ups.config.sections import (
    CacheConfig,
    ConsistencyConfig,
    DataConfig,
    DdpConfig,
    DiffusionConfig,
    EvaluateConfig,
    ModelConfig,
    OperatorConfig,
    RivalConfig,
    RunConfig,
    SteadyConfig,
    TaskConfig,
    TrackerConfig,
    UserTaskConfig,
)
from ups.tasks import Task, get_task


@dataclass(frozen=True)
class Config:
    run: RunConfig
    data: DataConfig
    cache: CacheConfig
    task: dict[str, TaskConfig | UserTaskConfig]
    ddp: DdpConfig
    operator: OperatorConfig
    diffusion: DiffusionConfig
    consistency: ConsistencyConfig
    rival: RivalConfig
    steady: SteadyConfig
    evaluate: EvaluateConfig
    tracker: TrackerConfig

    @property
    def run_dir(self) -> Path:
        """Folder that holds every stage of this run."""
        return Path(self.run.root) / self.run.name

    @property
    def report_dir(self) -> Path:
        """The folder of the report; reports on validation data have one of their own."""
        return self.run_dir / ("report" if self.evaluate.split == "test" else "report-val")

    @property
    def evaluated(self) -> list[str]:
        """The tasks of a report."""
        return self.evaluate.tasks or self.data.tasks

    @property
    def reported_stages(self) -> dict[str, list[str]]:
        """Stage -> its tasks in the report, for the stages in evaluate.stages; with weights from another run
        the operator alone."""
        wanted = {
            stage: self.served(stage, self.evaluated)
            for stage in STAGES
            if stage == "operator" or not self.evaluate.weights
        }
        return {stage: wanted[stage] for stage in wanted if stage in self.evaluate.stages and wanted[stage]}

    @property
    def trained(self) -> list[str]:
        """The stages of this run that the report needs, in the order of training."""
        return [] if self.evaluate.weights else list(self.reported_stages)

    @property
    def operator_dir(self) -> Path:
        """The folder of the operator in the report: of this run, or of evaluate.weights."""
        folder = Path(self.evaluate.weights) if self.evaluate.weights else self.run_dir
        inside = folder / "operator"
        return inside if inside.is_dir() or not self.evaluate.weights else folder

    def init_dir(self, stage: str) -> Path | None:
        """The folder of the stage whose weights `stage` starts from: its init, or the stage in that run; None
        without init."""
        section = getattr(self, stage)
        inside = Path(section.init) / stage
        return (inside if inside.is_dir() else Path(section.init)) if section.init else None

    def model_of(self, stage: str) -> ModelConfig:
        """The network of a stage; student and rival have that of the corrector."""
        return getattr(self, STAGES[stage].network).model

    def spec(self, name: str) -> Task:
        """The task called `name`: built in, or declared by its section. Raises ValueError for neither."""
        return self.task[name].spec(name) if name in self.task else get_task(name)

    def has_user_files(self, name: str) -> bool:
        """Whether the files of a task are the user's."""
        return self.data.source == "user" or isinstance(self.task[name], UserTaskConfig)

    def cache_path(self, task: str) -> Path:
        return Path(self.cache.root) / f"{task}.h5"

    def data_dir(self, task: str) -> Path:
        return Path(self.data.root) / (get_task(task).files_of or task)

    def num_first(self, task: str) -> int:
        """How many trajectories of a published file are fetched; 0 for all."""
        spec, num = get_task(task), self.task[task].num_trajectories
        is_first = self.data.source == "published" and self.data.fetch == "first" and not spec.is_grouped
        return num if is_first and num < spec.num_trajectories else 0

    def data_path(self, task: str, parameter: float | None) -> Path:
        """The file of a task for one value of its parameter; its name tells if it is the first part of a
        file."""
        path = self.data_dir(task) / get_task(task).file_for(parameter)
        num = self.num_first(task)
        return path.with_name(f"{path.stem}.first{num}{path.suffix}") if num else path

    def context(self, task: str) -> int:
        """The number of input frames before the first prediction."""
        entry = self.spec(task)
        return (
            0
            if entry.is_steady
            else self.task[task].history
            if entry.hides or entry.user_facts
            else self.evaluate.context_frames
        )

    def served(self, stage: str, names: list[str] | None = None) -> list[str]:
        """The tasks (of `names`, else all) that a stage trains on: the operator all, the others, which learn
        its errors, those with reserved trajectories."""
        tasks = STAGES[stage].tasks
        return [
            name
            for name in names or self.data.tasks
            if tasks == "all"
            or (self.task[name].reserve > 0 and self.spec(name).is_steady == (tasks == "steady"))
        ]
