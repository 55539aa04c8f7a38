"""LLM pretraining from one TOML file: models, data, parallelism, trainer, launchers, report.

The package is the app; its public face is the command `titan-train`. As a library:

    from titan_train.config import load_config
    from titan_train.train import Trainer
"""

from importlib.metadata import PackageNotFoundError as _NotInstalled
from importlib.metadata import version as _version

try:
    __version__ = _version("titan-train")
except _NotInstalled:  # the sources on the Python path, as a machine without an installer runs them
    __version__ = "0+source"
__all__ = ["__version__"]
