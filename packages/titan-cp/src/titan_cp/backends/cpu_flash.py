"""torch's flash attention for CPU, with its log-sum-exp and a backward that takes one from outside.

Private operators (``aten::_scaled_dot_product_flash_attention_for_cpu`` and its backward), because the public function
returns no log-sum-exp. Checked on torch 2.11 and 2.15 by ``tests/test_backends.py``. Traps: the mask must be additive
and of the queries' dtype; ``is_causal`` is aligned to the top left, so only square blocks use it; a fully masked row
comes back with log-sum-exp 0, which `split_tiles` never asks for.
"""

import torch
from torch import Tensor

from titan_cp.backends.backend import DenseBackend, Request, Saved


class CpuFlash(DenseBackend):
    """Flash attention on the CPU."""

    name = "cpu_flash"
    summary = "torch's CPU flash attention"

    def why_not(self, request: Request) -> str | None:
        """Needs the CPU and a float dtype."""
        if request.device.type != "cpu":
            return f"needs CPU tensors, got {request.device.type}"
        if request.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"needs a float dtype, got {request.dtype}"
        return None

    def block_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of one block."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )

    def block_backward(
        self, saved: Saved, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of one block."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *saved, 0.0, causal, attn_mask=bias, scale=scale
        )
