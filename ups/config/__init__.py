"""The configuration: what it may say (schema), how it is read (load), what no configuration may say
(checks)."""

from ups.config.load import (
    CONFIG_OPTIONS,
    DEFAULT,
    DEFAULT_OVERLAY,
    DRY_RUN,
    SHOW_CONFIG,
    load_config,
    parse_arguments,
    read_command,
    read_yaml,
    run_script,
    show,
    to_dict,
)
from ups.config.schema import (
    ROOT,
    STAGES,
    Config,
    DiffusionConfig,
    EvaluateConfig,
    ModelConfig,
    OperatorConfig,
    OptimConfig,
    OwnTaskConfig,
    SamplingConfig,
    SteadyConfig,
    TaskConfig,
    TrackerConfig,
    TrainConfig,
)

__all__ = [
    "CONFIG_OPTIONS", "DEFAULT", "DEFAULT_OVERLAY", "DRY_RUN", "ROOT", "SHOW_CONFIG", "STAGES", "Config",
    "DiffusionConfig", "EvaluateConfig",
    "ModelConfig", "OperatorConfig", "OptimConfig", "OwnTaskConfig", "SamplingConfig", "SteadyConfig",
    "TaskConfig",
    "TrackerConfig", "TrainConfig", "load_config", "parse_arguments", "read_command", "read_yaml",
    "run_script", "show", "to_dict",
]
