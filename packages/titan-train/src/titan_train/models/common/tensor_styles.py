"""How a family describes tensor parallelism: a table from module names to styles. Plain data, without torch.

The first pattern that matches a module decides. ``*`` stands for one segment of a name, ``**`` for any number of them::

    {
        "tok_embeddings": "embedding",
        "layers.*.attention": "region",
        "layers.*.attention.wq": "heads",
        "layers.*.attention.w[kv]": "kv_heads",
        "layers.*.attention.wo": "rowwise",
        "layers.*.*_norm": "replicated",
        ...
    }

The table must cover every parameter of the model. Under sequence parallelism, an uncovered parameter would silently get
1/n of its gradient, so it is refused. `titan_train.parallel.tensor` reads the table.
"""

from collections.abc import Mapping
from typing import Literal

Style = Literal[
    "embedding", "positions", "region", "colwise", "heads", "kv_heads", "groups", "heads_norm", "kv_heads_norm", "rowwise",
    "replicated", "whole", "head",
]  # fmt: skip
"""How a module takes part in tensor parallelism. Weights are ``[out, in]``, as in `torch.nn.Linear`.

- ``embedding``: an `nn.Embedding` cut by rows (the vocabulary); its output is summed over the ranks.
- ``positions``: a module that is whole on every rank and looks up ids ``[..., S]`` (an `nn.Embedding` of positions, a router by
  tokens, experts that are told of padding); under sequence parallelism each looks up its own tokens.
- ``region``: a module (attention, feed-forward) whose first argument is made whole on every rank, and whose output is a
  partial sum that is summed over the ranks. It holds the cut linears.
- ``colwise``: a linear cut by rows of its weight and bias: each rank computes some of the outputs.
- ``heads``, ``kv_heads``: colwise in whole attention heads (so are a module's numbers for each head, and the taps of a
  depthwise convolution); the module that holds it, or a module beside it, counts
  them in its attributes ``num_heads`` and ``num_kv_heads``, which become this rank's numbers.
- ``groups``: a linear of several groups of inputs, each to outputs of its own; cut by rows in whole groups, which its attribute
  ``n_groups`` counts.
- ``heads_norm``, ``kv_heads_norm``: an RMSNorm over all heads at once, between such a linear and attention, cut in the same
  way: the mean square is taken over the ranks.
- ``rowwise``: a linear cut by columns of its weight: each rank's output is a summand. Its bias is with the first rank.
- ``replicated``: whole on every rank, with all that it holds: norms, routers, projections to a shared latent.
- ``whole``: the same for a layer that mixes tokens and is not cut: under sequence parallelism each rank computes all tokens and
  keeps its own.
- ``head``: the linear to the vocabulary, cut by rows; its input is made whole, its output stays cut (the loss sums).

A linear outside of every region makes its input whole, or sums its output, by itself.
"""

StyleTable = Mapping[str, Style]
"""Pattern of module names to style; the first that matches decides."""

DECODER_STYLES: StyleTable = {
    "tok_embeddings": "embedding",
    "pos_embeddings": "positions",
    "layers.*.attention_norm": "replicated",
    "layers.*.attention": "region",
    "layers.*.attention.wq": "heads",
    "layers.*.attention.w[kv]": "kv_heads",
    # whole on every rank, which has only some of the heads: their gradients are summed
    "layers.*.attention.[qk]_norm": "replicated",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "replicated",
    "layers.*.feed_forward": "region",
    "layers.*.feed_forward.w[13]": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    # no region: under sequence parallelism each rank routes its own tokens, to whole experts
    "layers.*.moe": "positions",
    "layers.*.moe.router": "replicated",
    "layers.*.moe.experts": "replicated",
    "layers.*.moe.shared_experts": "region",
    "layers.*.moe.shared_experts.w[13]": "colwise",
    "layers.*.moe.shared_experts.w2": "rowwise",
    "norm": "replicated",
    "lm_head": "head",
}
"""The table of a `titan_train.models.common.decoder.Decoder` of the shared blocks."""


def with_mtp(table: StyleTable) -> StyleTable:
    """The table of a decoder that may have modules for tokens further ahead: their blocks are cut as its layers are."""
    blocks: StyleTable = {
        f"mtp.*.block.{pattern.removeprefix('layers.*.')}": style
        for pattern, style in table.items()
        if pattern.startswith("layers.*.")
    }
    own: StyleTable = {
        "mtp_embeddings": "embedding",
        "mtp.*.*_norm": "replicated",
        "mtp.*.proj": "replicated",
        "mtp.*.norm": "replicated",
    }
    return {**table, **blocks, **own}
