"""The Llama-3 family: the module and its shipped configurations."""

from titan_train.models.llama.configs import LLAMA_CONFIGS, LlamaArgs
from titan_train.models.llama.model import Llama

__all__ = ["LLAMA_CONFIGS", "Llama", "LlamaArgs"]
