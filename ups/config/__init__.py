"""The configuration: its sections (schema), how files are read (reading) and become sections (convert, load),
what is refused (checks), and the command line (command)."""

from ups.common.place import ROOT
from ups.common.stages import STAGES
from ups.config.command import (
    CONFIG_OPTIONS,
    DEFAULT_OVERLAY,
    DRY_RUN,
    SHOW_CONFIG,
    parse_arguments,
    read_command,
    run_script,
    show,
)
from ups.config.load import load_config, to_dict
from ups.config.reading import DEFAULT, read_default, read_yaml
from ups.config.schema import Config
from ups.config.sections import (
    DiffusionConfig,
    EvaluateConfig,
    ModelConfig,
    OperatorConfig,
    OptimConfig,
    SteadyConfig,
    TaskConfig,
    TrackerConfig,
    TrainConfig,
    UserTaskConfig,
)

__all__ = [
    "CONFIG_OPTIONS",
    "DEFAULT",
    "DEFAULT_OVERLAY",
    "DRY_RUN",
    "ROOT",
    "SHOW_CONFIG",
    "STAGES",
    "Config",
    "DiffusionConfig",
    "EvaluateConfig",
    "ModelConfig",
    "OperatorConfig",
    "OptimConfig",
    "UserTaskConfig",
    "SteadyConfig",
    "TaskConfig",
    "TrackerConfig",
    "TrainConfig",
    "load_config",
    "parse_arguments",
    "read_command",
    "read_default",
    "read_yaml",
    "run_script",
    "show",
    "to_dict",
]
