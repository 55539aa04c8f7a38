"""GPT-2 checkpoints of Hugging Face: what their ``config.json`` means here."""

from collections.abc import Mapping
from typing import Any

from titan_train.models.common.hf_config import HFConfig
from titan_train.models.gpt.args import GPTArgs

_DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop")  # none here: they change training, not the logits
_OTHER_HEADS = (
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "n_ctx",
)  # fmt: skip


def args_from_hf(config: Mapping[str, Any]) -> GPTArgs:
    """The arguments of the model that ``config.json`` describes.

    Raises:
        ValueError: It describes what `GPT` cannot do; the message names every such field.
    """
    read = HFConfig(config, kinds=("gpt2",))
    read.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    read.only("scale_attn_weights", True)
    read.only("scale_attn_by_inverse_layer_idx", False)
    read.only("add_cross_attention", False)
    read.take("reorder_and_upcast_attn", *_DROPOUT, *_OTHER_HEADS)
    dim = read.need("n_embd", "hidden_size")
    fields = {
        "dim": dim,
        "num_layers": read.need("n_layer", "num_hidden_layers"),
        "num_heads": read.need("n_head", "num_attention_heads"),
        "vocab_size": read.need("vocab_size"),
        "max_seq_len": read.need("n_positions", "max_position_embeddings"),
        "ffn_dim": read.take("n_inner", default=4 * dim),
        "norm_eps": read.take("layer_norm_epsilon", default=1e-5),
        "tied_embeddings": read.take("tie_word_embeddings", default=True),
    }
    read.finish()
    return GPTArgs(**fields)


def settings_of(args: GPTArgs) -> dict[str, Any]:
    """What decides the logits, in one spelling."""
    settings = {name: getattr(args, name) for name in args.__dataclass_fields__}
    return settings | {"ffn_dim": args.ffn_dim or 4 * args.dim}
