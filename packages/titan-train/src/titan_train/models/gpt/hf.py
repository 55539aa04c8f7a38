"""GPT-2 checkpoints of Hugging Face: their ``config.json`` and their key map.

Their linears are ``Conv1D`` modules whose matrices are ``[in, out]``; queries, keys and values are one matrix.
"""

from collections.abc import Mapping
from typing import Any

from titan_ckpt import KeyMap, Pair

from titan_train.models.common.hf import HFConfig, HuggingFace
from titan_train.models.gpt.args import GPTArgs

_DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop")  # none here: they change training, not the logits
_OTHER_HEADS = (
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "n_ctx", "predict_special_tokens", "n_special", "output_past", "_num_labels",
)  # fmt: skip

_KINDS = ("gpt2",)


def args_from_hf(config: Mapping[str, Any]) -> GPTArgs:
    """The arguments of the model that ``config.json`` describes.

    Raises:
        ValueError: It describes what `GPT` cannot do; the message names every such field.
    """
    read = HFConfig(config, kinds=_KINDS)
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


def config_of(args: GPTArgs) -> dict[str, Any]:
    """The fields of ``config.json`` that describe the model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": args.vocab_size,
        "n_embd": args.dim,
        "n_layer": args.num_layers,
        "n_head": args.num_heads,
        "n_positions": args.max_seq_len,
        "n_inner": args.ffn_dim or 4 * args.dim,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": args.norm_eps,
        "scale_attn_weights": True,
        "tie_word_embeddings": args.tied_embeddings,
        # transformers has dropout by default in training
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _pairs(prefix: str) -> tuple[Pair, ...]:
    block = f"{prefix}h.{{i}}"
    pairs = [
        Pair("tok_embeddings.weight", f"{prefix}wte.weight"),
        Pair("pos_embeddings.weight", f"{prefix}wpe.weight"),
        *(Pair(f"norm.{kind}", f"{prefix}ln_f.{kind}") for kind in ("weight", "bias")),
    ]
    for kind in ("weight", "bias"):
        matrix = kind == "weight"
        pairs += [
            Pair(f"layers.{{i}}.attention_norm.{kind}", f"{block}.ln_1.{kind}"),
            Pair(f"layers.{{i}}.ffn_norm.{kind}", f"{block}.ln_2.{kind}"),
            Pair(f"layers.{{i}}.attention.wo.{kind}", f"{block}.attn.c_proj.{kind}", transposed=matrix),
            Pair(f"layers.{{i}}.feed_forward.w1.{kind}", f"{block}.mlp.c_fc.{kind}", transposed=matrix),
            Pair(f"layers.{{i}}.feed_forward.w2.{kind}", f"{block}.mlp.c_proj.{kind}", transposed=matrix),
        ]
        pairs += [
            Pair(
                f"layers.{{i}}.attention.w{x}.{kind}", f"{block}.attn.c_attn.{kind}",
                part=(number, 3, int(matrix)), transposed=matrix,
            )
            for number, x in enumerate("qkv")
        ]  # fmt: skip
    return tuple(pairs)


GPT_HF = HuggingFace(
    # the files of OpenAI's GPT-2 have no prefix; what transformers writes has one, and so has our export
    key_map=KeyMap(
        "gpt",
        (*_pairs("transformer."), *_pairs(""), Pair("lm_head.weight", "lm_head.weight")),
        (r"(?:transformer\.)?h\.\d+\.attn\.(?:bias|masked_bias)",),  # masks in old files
    ),
    config_of=config_of,
    args_from=args_from_hf,
    kinds=_KINDS,
    settings_of=settings_of,
)
