"""What a configuration says: one frozen dataclass per section, names and types; the numbers are in default.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ups.tasks import get_task


@dataclass(frozen=True)
class RunConfig:
    name: str
    root: str
    seed: int


@dataclass(frozen=True)
class DataConfig:
    tasks: list[str]
    root: str
    source: Literal["generate", "published", "own"]
    url: str
    seed: int
    chunk: int
    val_fraction: float
    test_fraction: float


@dataclass(frozen=True)
class CacheConfig:
    root: str
    dtype: Literal["float32", "float16"]
    place: Literal["auto", "mmap", "device"]
    device_fraction: float
    chunk: int


@dataclass(frozen=True)
class TaskConfig:
    num_trajectories: int
    resolution: int
    num_frames: int
    t_end: float
    parameters: list[float]
    space_stride: int
    time_stride: int
    first_frame: int
    patch: int
    dim: int
    energy: float
    train_from: int
    history: int
    bundle: int
    base: list[Literal["persistence", "propagator", "transport", "elliptic"]]
    degree: int
    reach: int
    reserve: float


@dataclass(frozen=True)
class SamplingConfig:
    strategy: Literal["proportional", "balanced", "temperature", "curriculum"]
    temperature: float


@dataclass(frozen=True)
class ModelConfig:
    width: int
    depth: int
    modes: int
    kernel_size: int
    mlp_ratio: float


@dataclass(frozen=True)
class OptimConfig:
    muon_lr: float
    muon_momentum: float
    muon_weight_decay: float
    adamw_lr: float
    adamw_betas: list[float]
    adamw_weight_decay: float
    warmup_steps: int
    decay_fraction: float
    clip_norm: float
    ema_decay: float


@dataclass(frozen=True)
class TrainConfig:
    steps: int
    batch_size: int
    micro_batch: int
    precision: Literal["no", "bf16"]
    compile: bool
    log_every: int
    validate_every: int
    validate_trajectories: int
    save_every: int
    keep: int
    patience: int
    max_skips: int
    hang_s: float
    timeout_s: float


@dataclass(frozen=True)
class DdpConfig:
    overlap: bool


@dataclass(frozen=True)
class OperatorConfig:
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
    base_steps: int
    field_weight: float
    unroll_steps: int
    unroll_fraction: float


@dataclass(frozen=True)
class DiffusionConfig:
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
    noises: int
    scale_steps: int
    sampler_steps: int
    min_residual_ratio: float
    max_whitened_std: float


@dataclass(frozen=True)
class ConsistencyConfig:
    optim: OptimConfig
    train: TrainConfig
    pool_batches: int
    mid_angle: float
    members: int
    tune_fraction: float


@dataclass(frozen=True)
class RivalConfig:
    optim: OptimConfig
    train: TrainConfig
    members: int


@dataclass(frozen=True)
class SteadyConfig:
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
    noises: int
    scale_steps: int
    sampler_steps: int


@dataclass(frozen=True)
class EvaluateConfig:
    split: Literal["test", "val"]
    tasks: list[str]
    context_frames: int
    batch_size: int
    max_trajectories: int
    num_bootstrap: int
    legacy: bool
    stages: list[Literal["operator", "diffusion", "consistency", "rival", "steady"]]
    max_ratio_to_persistence: float
    max_ratio_to_base: float
    max_nrmse: dict[str, float]
    members: int
    ensemble_trajectories: int
    ensemble_frames: int
    truth_members: int
    truth_fields: int
    conserve: bool
    max_crps_ratio: float
    max_student_ratio: float
    spread_skill: list[float]
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
    task: dict[str, TaskConfig]
    sampling: SamplingConfig
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
        """Where the report goes: looks at validation data stay apart from the one at the test split."""
        return self.run_dir / ("report" if self.evaluate.split == "test" else "report-val")

    @property
    def evaluated(self) -> list[str]:
        """The tasks of a report."""
        return self.evaluate.tasks or self.data.tasks

    @property
    def asked(self) -> dict[str, list[str]]:
        """Stage -> tasks of a report that it is asked for, of the stages that evaluate.stages names."""
        transient, steady = (self.corrected(is_steady, self.evaluated) for is_steady in (False, True))
        wanted = {"operator": self.evaluated, **dict.fromkeys(("diffusion", "consistency", "rival"), transient), "steady": steady}
        return {stage: wanted[stage] for stage in wanted if stage in self.evaluate.stages and wanted[stage]}

    def cache_path(self, task: str) -> Path:
        return Path(self.cache.root) / f"{task}.h5"

    def data_dir(self, task: str) -> Path:
        return Path(self.data.root) / (get_task(task).of or task)

    def context(self, task: str) -> int:
        """Frames given to a model before its first prediction."""
        entry = get_task(task)
        return 0 if entry.is_steady else self.task[task].history if entry.hides else self.evaluate.context_frames

    def corrected(self, is_steady: bool, names: list[str] | None = None) -> list[str]:
        """The tasks (of `names`, else all) whose operator errors are learnt: those with reserved trajectories."""
        return [name for name in names or self.data.tasks
                if self.task[name].reserve > 0 and get_task(name).is_steady == is_steady]
