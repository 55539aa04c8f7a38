"""Models: the shipped families, and what makes any `torch.nn.Module` a model of a run.

A model is a plain module whose ``forward(tokens)`` returns logits. It may also accept ``positions`` and ``cu_seqlens``
(packed documents), and may define ``init_weights(fqn, tensor, generator)``; no base class is needed.
"""

from titan_fsdp import clean_fqn, named_parameters, unwrap

from titan_train.models.attention import CausalAttention, SequenceContext
from titan_train.models.build import build_model, list_models
from titan_train.models.call import TokenBatch, accepted_inputs, call_model
from titan_train.models.deepseek import DeepSeek, DeepSeekArgs
from titan_train.models.flops import count_active_parameters, count_parameters, flops_per_token
from titan_train.models.gpt import GPT, GPTArgs
from titan_train.models.initialize import InitFn, init_for
from titan_train.models.llama import Llama, LlamaArgs
from titan_train.models.moe import MoE, MoEArgs
from titan_train.models.qwen3 import Qwen3, Qwen3Args

__all__ = [
    "GPT",
    "CausalAttention",
    "DeepSeek",
    "DeepSeekArgs",
    "GPTArgs",
    "InitFn",
    "Llama",
    "LlamaArgs",
    "MoE",
    "MoEArgs",
    "Qwen3",
    "Qwen3Args",
    "SequenceContext",
    "TokenBatch",
    "accepted_inputs",
    "build_model",
    "call_model",
    "clean_fqn",
    "count_active_parameters",
    "count_parameters",
    "flops_per_token",
    "init_for",
    "list_models",
    "named_parameters",
    "unwrap",
]
