"""One linear that is really several, taken apart, so that each can be cut over ranks: Phi's ``qkv_proj``.

The parts are `nn.Linear`, so everything that works on linears (float8, tensor parallelism) works on them. Files keep the
one tensor: `titan_train.models.hf.names` says which rows of it a part is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class SplitLinear(nn.Module):
    """Linears of one input whose outputs are put one after the other."""

    def __init__(self, whole: nn.Linear, widths: Mapping[str, int], *, num_heads: int, num_kv_heads: int) -> None:
        """Take ``whole`` apart.

        Args:
            whole: The linear, on meta.
            widths: Name of each part to its outputs, in order.
            num_heads: Query heads, for tensor parallelism.
            num_kv_heads: Key-value heads.
        """
        super().__init__()
        if sum(widths.values()) != whole.out_features:
            raise ValueError(f"parts of {dict(widths)} outputs do not make up a linear of {whole.out_features}.")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_counts: list[tuple[Any, str]] = []
        """(object, attribute): what else counts heads, and is to count a rank's own under tensor parallelism."""
        for name, width in widths.items():
            self.add_module(name, nn.Linear(whole.in_features, width, bias=getattr(whole, "bias", None) is not None))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d]`` to ``[..., sum of widths]``."""
        return torch.cat([part(x) for part in self.children()], dim=-1)
