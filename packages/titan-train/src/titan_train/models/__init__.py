"""Models: the registered families, and what makes any `torch.nn.Module` a model of a run.

A model is a plain module whose ``forward(tokens)`` returns logits. It may also accept ``positions`` and ``cu_seqlens``
(packed documents) and ``padding``, and may define ``init_weights(fqn, tensor, generator)``; no base class is needed.

- `registry`, `family`: which families there are, and what a family consists of. Importing them does not import torch.
- ``llama/``, ``gpt/``, ``qwen3/``, ``qwen3_next/``, ``deepseek/``, ``flux/``: one folder per family.
- ``vision_language/``: an encoder of images before a decoder of any family; Qwen3-VL is one.
- ``common/``: the blocks that families share, mixture of experts among them.
- `build`, `initialize`, `call`, `flops`: build a model, fill its weights, call it on a batch, count its FLOPs.

Names are imported on first use, so that ``import titan_train.models`` is light.
"""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_fsdp import clean_fqn, named_parameters, unwrap

    from titan_train.models.build import build_model
    from titan_train.models.call import TokenBatch, accepted_inputs, call_model
    from titan_train.models.common.args import MoEArgs
    from titan_train.models.common.attention import CausalAttention, SequenceContext
    from titan_train.models.common.moe.layer import MoE
    from titan_train.models.deepseek.args import DeepSeekArgs
    from titan_train.models.deepseek.model import DeepSeek
    from titan_train.models.family import Family
    from titan_train.models.flops import count_active_parameters, count_parameters, flops_per_token
    from titan_train.models.gpt.args import GPTArgs
    from titan_train.models.gpt.model import GPT
    from titan_train.models.initialize import InitFn, init_for
    from titan_train.models.llama.args import LlamaArgs
    from titan_train.models.llama.model import Llama
    from titan_train.models.qwen3.args import Qwen3Args
    from titan_train.models.qwen3.model import Qwen3
    from titan_train.models.qwen3_next.args import Qwen3NextArgs
    from titan_train.models.qwen3_next.model import Qwen3Next
    from titan_train.models.registry import families, list_models, register_family

__all__ = [
    "GPT",
    "CausalAttention",
    "DeepSeek",
    "DeepSeekArgs",
    "Family",
    "GPTArgs",
    "InitFn",
    "Llama",
    "LlamaArgs",
    "MoE",
    "MoEArgs",
    "Qwen3",
    "Qwen3Args",
    "Qwen3Next",
    "Qwen3NextArgs",
    "SequenceContext",
    "TokenBatch",
    "accepted_inputs",
    "build_model",
    "call_model",
    "clean_fqn",
    "count_active_parameters",
    "count_parameters",
    "families",
    "flops_per_token",
    "init_for",
    "list_models",
    "named_parameters",
    "register_family",
    "unwrap",
]

__getattr__ = first_use(__name__)
