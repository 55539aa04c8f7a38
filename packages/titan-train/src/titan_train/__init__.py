"""LLM pretraining from one TOML file: models, data, parallelism, trainer, launchers, report.

The command is `titan-train`. The same parts serve as a library::

    from titan_train import Trainer, load_config, load_run

    with Trainer(load_config("debug")) as trainer:
        trainer.fit()
    print(load_run(trainer.run_dir).complete("def main("))

Everything is imported when it is first used: `import titan_train` loads neither torch nor numpy.
"""

from typing import TYPE_CHECKING, Any

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.config import Config, load_config
    from titan_train.data import BatchSource, TensorBatch
    from titan_train.data.loader.source import TaskBatch
    from titan_train.generation import LoadedRun, Sampling, generate, load_run
    from titan_train.models import Family, build_model, register_family
    from titan_train.task import Task, TaskInputs, register_task
    from titan_train.train import Trainer
    from titan_train.train.observer import Observer, StepInfo
    from titan_train.trust import use_code

    __version__: str

__all__ = [
    "BatchSource",
    "Config",
    "Family",
    "LoadedRun",
    "Observer",
    "Sampling",
    "StepInfo",
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
_named = first_use(__name__)


def __getattr__(name: str) -> Any:
    if name != "__version__":
        return _named(name)
    globals()[name] = _installed_version()
    return globals()[name]


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("titan-train")
    except PackageNotFoundError:  # the sources on the Python path, as a machine without an installer runs them
        return "0+source"


def __dir__() -> list[str]:
    return sorted(__all__)
