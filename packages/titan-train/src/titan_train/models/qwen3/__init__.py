"""The Qwen3 family: the module and its shipped configurations, dense and mixture of experts."""

from titan_train.models.qwen3.configs import QWEN3_CONFIGS, Qwen3Args
from titan_train.models.qwen3.model import Qwen3

__all__ = ["QWEN3_CONFIGS", "Qwen3", "Qwen3Args"]
