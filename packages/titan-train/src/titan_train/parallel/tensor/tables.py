"""The table of each shipped family; a new family adds its own here."""

from torch import nn

from titan_train.models.deepseek import DeepSeek
from titan_train.models.deepseek.parallel import DEEPSEEK_TENSOR_STYLES
from titan_train.models.gpt import GPT
from titan_train.models.gpt.parallel import GPT_TENSOR_STYLES
from titan_train.models.llama import Llama
from titan_train.models.llama.parallel import LLAMA_TENSOR_STYLES
from titan_train.models.qwen3 import Qwen3
from titan_train.models.qwen3.parallel import QWEN3_TENSOR_STYLES
from titan_train.parallel.tensor.styles import Table

_TABLES: dict[type[nn.Module], Table] = {
    Llama: LLAMA_TENSOR_STYLES,
    GPT: GPT_TENSOR_STYLES,
    Qwen3: QWEN3_TENSOR_STYLES,
    DeepSeek: DEEPSEEK_TENSOR_STYLES,
}


def table_for(model: nn.Module) -> Table:
    """The shipped table of the model's family; empty for a user's own model, which ``parallel.tp_plan`` describes."""
    return _TABLES.get(type(model), {})
