"""The configuration: a frozen dataclass for every section, with names, types and bounds, and what follows
from the whole: folders, files, the stages and tasks of a run.

The numbers are in configs/default.yaml and, of a task, in its row (ups/tasks): a value that is in neither
does not exist.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ups.common.place import STAGES
from ups.config.model import (
    BASES,
    Bound,
    Folder,
    Members,
    ModelConfig,
    NotNegative,
    Positive,
    Rate,
    Resamples,
    Share,
    WholeShare,
)
from ups.tasks import Task, get_task, make_user_task
from ups.userdata.section import facts


@dataclass(frozen=True)
class RunConfig:
    name: str
    root: Annotated[str, Folder]
    seed: Annotated[int, NotNegative]


@dataclass(frozen=True)
class DataConfig:
    tasks: list[str]
    root: Annotated[str, Folder]
    source: Literal["generate", "published", "user"]
    url: str
    fetch: Literal["whole", "first"]
    seed: Annotated[int, NotNegative]
    chunk: Annotated[int, Positive]
    val_fraction: Annotated[float, Share]
    test_fraction: Annotated[float, Share]


@dataclass(frozen=True)
class CacheConfig:
    root: Annotated[str, Folder]
    place: Literal["auto", "mmap", "device"]
    device_fraction: Annotated[float, Share]
    chunk: Annotated[int, Positive]


@dataclass(frozen=True)
class TaskConfig:
    num_trajectories: Annotated[
        int, Bound(lambda value: value >= 3, "at least 3 (training, validation, test)", "Raise it.")
    ]
    resolution: Annotated[int, Positive]
    num_frames: Annotated[int, Positive]
    t_end: float
    parameters: list[float]
    space_stride: Annotated[int, Positive]
    time_stride: Annotated[int, Positive]
    first_frame: Annotated[int, NotNegative]
    patch: Annotated[int, Positive]
    dim: int
    energy: Annotated[
        float, Bound(lambda value: 0 < value <= 1, "a fraction in (0, 1]", "Use 1.0 to keep all.")
    ]
    train_from: Annotated[int, NotNegative]
    history: Annotated[int, Positive]
    base: list[Literal[*BASES]]
    solver: str
    degree: int
    reach: int
    reserve: Annotated[
        float,
        Bound(
            lambda value: 0 <= value < 1,
            "a fraction in [0, 1)",
            "Use 0.5, or 0 for a task that is not corrected.",
        ),
    ]

    def spec(self, name: str) -> Task:
        """The task of this section."""
        return get_task(name)

    def cells(self, ndim: int) -> tuple[int, ...]:
        """The cells of every axis, after striding."""
        return (-(-self.resolution // self.space_stride),) * ndim

    @property
    def num_files(self) -> int:
        """How many files of num_trajectories each there are: one per parameter value."""
        return max(1, len(self.parameters))


@dataclass(frozen=True)
class PlaceConfig:
    array: str
    axes: list[str]
    fields: list[str]


@dataclass(frozen=True)
class UserTaskConfig(TaskConfig):
    """The section of a user task; `ups.userdata.section.complete` fills the keys that are left out."""

    num_trajectories: Annotated[
        int,
        Bound(
            lambda value: value == 0 or value >= 3,
            "0 (all) or at least 3 (training, validation, test)",
            "Raise it.",
        ),
    ]
    resolution: list[int]
    parameters: dict[str, str]
    files: str
    layout: dict[str, PlaceConfig]
    inputs: list[str]
    forcing: list[str]
    boundary: str
    domain: dict[str, list[float]]
    coordinates: dict[str, str]
    dt: Annotated[float, Bound(lambda value: value >= 0, "0 or more")]
    times: str
    positive: list[str]
    conserved: list[str]
    bounded: list[str]
    symmetries: list[str]
    vector: list[str]
    hidden: bool
    offset: dict[str, float]
    flipped: list[str]
    repeated: list[str]
    units: dict[str, str]
    cut: Annotated[int, Bound(lambda value: value >= 0, "0 (none) or the frames of a window")]
    missing: list[str]
    skip_missing: bool
    split: Literal["auto", "index", "folder"]

    def spec(self, name: str) -> Task:
        return make_user_task(name, facts(self))

    def cells(self, ndim: int) -> tuple[int, ...]:
        return tuple(-(-size // self.space_stride) for size in self.resolution)

    @property
    def num_files(self) -> int:
        return 1  # they are read as one


@dataclass(frozen=True)
class OptimConfig:
    muon_lr: Annotated[float, Rate]
    muon_momentum: float
    muon_weight_decay: float
    adamw_lr: Annotated[float, Rate]
    adamw_betas: list[float]
    adamw_weight_decay: float
    warmup_steps: int
    decay_fraction: Annotated[float, WholeShare]
    clip_norm: Annotated[float, Positive]
    ema_decay: Annotated[float, Share]
    trunk_factor: Annotated[float, Bound(lambda value: value >= 0, "0 (frozen) or more", "Use 0.1.")]


@dataclass(frozen=True)
class TrainConfig:
    steps: Annotated[int, Positive]
    batch_size: Annotated[int, Positive]
    micro_batch: Annotated[int, Positive]
    precision: Literal["no", "bf16"]
    log_every: int
    validate_every: int
    validate_trajectories: Annotated[int, Positive]
    save_every: int
    keep: Annotated[
        int, Bound(lambda value: value >= 2, "at least 2 (the newest may be damaged)", "Raise it.")
    ]
    max_skips: Annotated[int, Positive]
    hang_s: Annotated[float, Positive]
    timeout_s: Annotated[float, Positive]


@dataclass(frozen=True)
class DdpConfig:
    overlap: bool


@dataclass(frozen=True)
class Passes:
    """Rows that pass a network per row of a batch, for a dry run's estimate.

    trained: forward and backward; evaluated: forward only; steps_before: gradient steps per task before the
    loop.
    """

    trained: float
    evaluated: float = 0.0
    steps_before: int = 0


@dataclass(frozen=True)
class NetworkConfig:
    init: str
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig


@dataclass(frozen=True)
class OperatorConfig(NetworkConfig):
    base_steps: int
    unroll_steps: Annotated[int, Positive]
    unroll_fraction: Annotated[float, Share]

    def passes(self, sampler_steps: int) -> Passes:
        return Passes(1 + self.unroll_fraction * (self.unroll_steps - 1))


@dataclass(frozen=True)
class SteadyConfig(NetworkConfig):
    noises: Annotated[int, Positive]
    scale_steps: Annotated[int, Positive]
    sampler_steps: Annotated[int, Positive]

    def passes(self, sampler_steps: int) -> Passes:
        return Passes(self.noises, 1, self.scale_steps)


@dataclass(frozen=True)
class DiffusionConfig(SteadyConfig):
    perturbed: Annotated[float, WholeShare]
    min_residual_ratio: Annotated[float, Positive]
    max_whitened_std: Annotated[float, Bound(lambda value: value > 1, "a number above 1", "Use 1.15.")]


@dataclass(frozen=True)
class ScoredConfig:
    init: str
    optim: OptimConfig
    train: TrainConfig
    members: Annotated[int, Members]


@dataclass(frozen=True)
class ScoringConfig(ScoredConfig):
    def passes(self, sampler_steps: int) -> Passes:
        return Passes(self.members, 1)


@dataclass(frozen=True)
class ConsistencyConfig(ScoredConfig):
    pool_batches: Annotated[
        int,
        Bound(lambda value: value > 0 and value % 4 == 0, "a multiple of 4: a quarter is replaced at a time"),
    ]
    mid_angle: Annotated[float, Bound(lambda value: 0 < value < 1.57, "an angle in (0, 1.57)", "Use 1.1.")]
    tune_fraction: Annotated[float, Share]

    def passes(self, sampler_steps: int) -> Passes:
        """A solved batch takes two evaluations per sampler step and serves four steps."""
        return Passes(1 + self.tune_fraction * self.members, 2 * sampler_steps / 4)


@dataclass(frozen=True)
class EvaluateConfig:
    weights: str
    split: Literal["test", "val"]
    tasks: list[str]
    context_frames: int
    batch_size: Annotated[int, Positive]
    max_trajectories: int
    num_bootstrap: Annotated[int, Resamples]
    stages: list[Literal[*STAGES]]
    quality: bool
    members: Annotated[int, Members]
    ensemble_trajectories: Annotated[int, Positive]
    ensemble_frames: Annotated[int, Positive]
    truth_members: Annotated[int, Positive]
    truth_fields: Annotated[int, Positive]
    min_initial_conditions: int


@dataclass(frozen=True)
class TrackerConfig:
    kind: Literal["none", "wandb", "tensorboard"]
    mode: Literal["online", "offline", "disabled"]
    project: str


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
    scoring: ScoringConfig
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
        """The network of a stage; consistency and scoring have that of diffusion."""
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
