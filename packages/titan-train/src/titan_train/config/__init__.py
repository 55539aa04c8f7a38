"""Configuration of a run: TOML with `extends`, strict validation, command line over file over defaults."""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.config.compute import ActivationsConfig, CompileConfig, Float8Config, KernelsConfig
    from titan_train.config.data import DataConfig, SourceConfig
    from titan_train.config.diffusion import DiffusionConfig
    from titan_train.config.errors import ConfigError
    from titan_train.config.launch import LaunchConfig
    from titan_train.config.load import dump_config, list_configs, load_config, parse_config
    from titan_train.config.metrics import MetricsConfig
    from titan_train.config.model import ModelConfig
    from titan_train.config.optimizer import OptimizerConfig, ScheduleConfig
    from titan_train.config.parallel import ContextConfig, ParallelConfig, PipelineConfig
    from titan_train.config.recipe import AverageConfig, QKClipConfig, SpikesConfig
    from titan_train.config.schema import (
        CheckpointConfig,
        Config,
        RunConfig,
        TrainConfig,
        ValidationConfig,
    )
    from titan_train.config.tokenizer import TokenizerConfig
    from titan_train.config.vision import VisionConfig

__all__ = [
    "ActivationsConfig",
    "AverageConfig",
    "CheckpointConfig",
    "CompileConfig",
    "Config",
    "ConfigError",
    "ContextConfig",
    "DataConfig",
    "DiffusionConfig",
    "Float8Config",
    "KernelsConfig",
    "LaunchConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PipelineConfig",
    "QKClipConfig",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "SpikesConfig",
    "TokenizerConfig",
    "TrainConfig",
    "ValidationConfig",
    "VisionConfig",
    "dump_config",
    "list_configs",
    "load_config",
    "parse_config",
]

__getattr__ = first_use(__name__)
