"""LLM pretraining from one TOML file: models, data, parallelism, trainer, launchers, report.

The package is the app; its public face is the command `titan-train`. As a library:

    from titan_train.config import load_config
    from titan_train.train import Trainer
"""

from importlib.metadata import version as _version

__version__ = _version("titan-train")
__all__ = ["__version__"]
