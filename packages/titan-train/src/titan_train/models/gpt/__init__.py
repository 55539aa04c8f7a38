"""The GPT-3 family: the module and its shipped configurations."""

from titan_train.models.gpt.configs import GPT_CONFIGS, GPTArgs
from titan_train.models.gpt.model import GPT

__all__ = ["GPT", "GPT_CONFIGS", "GPTArgs"]
