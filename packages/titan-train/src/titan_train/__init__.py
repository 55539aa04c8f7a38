"""LLM pretraining from one TOML file: models, data, parallelism, trainer, launchers, report.

The command is `titan-train`. The same parts serve as a library::

    from titan_train import Trainer, load_config, load_run

    with Trainer(load_config("debug")) as trainer:
        trainer.fit()
    print(load_run(trainer.run_dir).complete("def main("))

Everything is imported when it is first used: `import titan_train` loads neither torch nor numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_train.config import Config, load_config
    from titan_train.data import BatchSource, TensorBatch
    from titan_train.generation import LoadedRun, Sampling, generate, load_run
    from titan_train.models import Family, build_model, register_family
    from titan_train.task import Task, TaskBatch, TaskInputs, register_task
    from titan_train.train import Trainer
    from titan_train.trust import use_code

    __version__: str

_HOMES = {
    "BatchSource": "titan_train.data",
    "Config": "titan_train.config",
    "Family": "titan_train.models",
    "LoadedRun": "titan_train.generation",
    "Sampling": "titan_train.generation",
    "Task": "titan_train.task",
    "TaskBatch": "titan_train.task",
    "TaskInputs": "titan_train.task",
    "TensorBatch": "titan_train.data",
    "Trainer": "titan_train.train",
    "build_model": "titan_train.models",
    "generate": "titan_train.generation",
    "load_config": "titan_train.config",
    "load_run": "titan_train.generation",
    "register_family": "titan_train.models",
    "register_task": "titan_train.task",
    "use_code": "titan_train.trust",
}

__all__ = [
    "BatchSource",
    "Config",
    "Family",
    "LoadedRun",
    "Sampling",
    "Task",
    "TaskBatch",
    "TaskInputs",
    "TensorBatch",
    "Trainer",
    "__version__",
    "build_model",
    "generate",
    "load_config",
    "load_run",
    "register_family",
    "register_task",
    "use_code",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _installed_version()
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("titan-train")
    except PackageNotFoundError:  # the sources on the Python path, as a machine without an installer runs them
        return "0+source"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
