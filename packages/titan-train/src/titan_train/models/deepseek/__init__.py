"""The DeepSeek V2 and V3 family: latent attention, many small experts; the module and its shipped configurations."""

from titan_train.models.deepseek.configs import DEEPSEEK_CONFIGS, DeepSeekArgs
from titan_train.models.deepseek.model import DeepSeek

__all__ = ["DEEPSEEK_CONFIGS", "DeepSeek", "DeepSeekArgs"]
