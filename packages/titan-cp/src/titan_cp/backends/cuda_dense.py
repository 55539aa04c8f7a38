"""torch's dense CUDA attention kernels: flash, cuDNN and memory-efficient.

Private operators, because ``scaled_dot_product_attention`` returns no log-sum-exp. One call a tile. Each kernel has its
own shape for the log-sum-exp: flash ``[B, H, T]``; cuDNN ``[B, H, T, 1]``; efficient ``[B, H, T]`` with ``T`` rounded
up to 32. Flash and cuDNN take no mask, so no window; efficient takes an additive one. Signatures and shapes are checked
without a GPU (fake tensors), values by the tests marked ``gpu``.
"""

import torch
from torch import Tensor

from titan_cp.backends.backend import DenseBackend, Request, Saved


def why_not_cuda(request: Request, dtypes: tuple[torch.dtype, ...], max_head_dim: int) -> str | None:
    """What a CUDA kernel lacks: the device, the dtype, or the head dim."""
    if request.device.type != "cuda":
        return f"needs CUDA tensors, got {request.device.type}"
    if request.dtype not in dtypes:
        return f"needs one of {', '.join(str(d).removeprefix('torch.') for d in dtypes)}, got {request.dtype}"
    if request.head_dim % 8 or request.head_dim > max_head_dim:
        return f"needs a head_dim that is a multiple of 8 up to {max_head_dim}, got {request.head_dim}"
    return None


def prefers_cudnn(device: torch.device) -> bool:
    """Whether cuDNN comes before FlashAttention 2: on Hopper and Blackwell (9.0, 10.0), from cuDNN 9.18 on, as in torch.

    The rule of ``torch.nn.attention.varlen`` (2.15), unless ``torch.backends.cuda.enable_cudnn_sdp(False)`` was called.
    """
    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    version = torch.backends.cudnn.version()
    return version is not None and version >= 91800 and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))


def no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset for kernels that ask for them even without dropout."""
    return torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)


class _CudaDense(DenseBackend):
    def why_not(self, request: Request) -> str | None:
        """Needs a half-precision dtype on CUDA, and no window."""
        if request.window:
            return "has no sliding window"
        return why_not_cuda(request, (torch.bfloat16, torch.float16), 256)


class CudaFlash(_CudaDense):
    """FlashAttention, one call a tile."""

    name = "cuda_flash"
    summary = "FlashAttention, one call a tile"

    def why_not_first(self, request: Request) -> str | None:
        """Where cuDNN has kernels of the GPU's own generation, this FlashAttention 2 has none."""
        if CudaCudnn().why_not(request) is None and prefers_cudnn(request.device):
            return "cuDNN's kernels are made for this GPU, FlashAttention 2's for the one before"
        return None

    def block_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of one block."""
        assert bias is None
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def block_backward(
        self, saved: Saved, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of one block."""
        assert bias is None
        q, k = saved.q, saved.k
        seed, offset = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *saved[:5], saved.lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset,
            scale=scale,
        )  # fmt: skip


class CudaCudnn(_CudaDense):
    """cuDNN's fused attention, one call a tile."""

    name = "cudnn"
    summary = "cuDNN's fused attention, one call a tile"

    def why_not(self, request: Request) -> str | None:
        """As flash, up to 128 channels per head."""
        return super().why_not(request) or why_not_cuda(request, (torch.bfloat16, torch.float16), 128)

    def block_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of one block."""
        assert bias is None
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.squeeze(-1)

    def block_backward(
        self, saved: Saved, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of one block."""
        assert bias is None
        q, k = saved.q, saved.k
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *saved[:5], saved.lse.contiguous().unsqueeze(-1), *no_dropout(q.device), None, None, None,
            q.shape[2], k.shape[2], 0.0, causal, scale=scale,
        )  # fmt: skip


class CudaEfficient(_CudaDense):
    """Memory-efficient attention (CUTLASS), one call a tile: float32 too, windows by a mask, and older GPUs."""

    name = "efficient"
    summary = "memory-efficient attention, one call a tile"

    def why_not(self, request: Request) -> str | None:
        """Needs CUDA."""
        return why_not_cuda(request, (torch.float32, torch.bfloat16, torch.float16), 512)

    def block_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of one block."""
        # This kernel wants as many KV heads as query heads.
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, _aligned(bias, q), True, 0.0, causal, scale=scale
        )
        return out, lse[:, :, : q.shape[2]]

    def block_backward(
        self, saved: Saved, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of one block."""
        grad_out, q, k, v, out, lse = saved
        groups = q.shape[1] // k.shape[1]
        wide_k, wide_v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        # Rows past the end have lse = inf in the kernel's own output: their probabilities are 0.
        padded = torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=float("inf"))
        grad_q, grad_k, grad_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, wide_k, wide_v, _aligned(bias, q), tokens_first(out), padded, *no_dropout(q.device), 0.0,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        # Sum the repeated heads' gradients in float32: bfloat16 would round once for each of them.
        grad_k, grad_v = (t.float().unflatten(1, (k.shape[1], groups)).sum(2) for t in (grad_k, grad_v))
        return grad_q, grad_k, grad_v


def tokens_first(out: Tensor) -> Tensor:
    """The same output ``[B, H, T, D]``, with the heads of a token side by side in memory.

    The half-precision kernels of the efficient backward compute ``sum(grad_out * out)`` themselves, and take the output's
    rows to be ``H * D`` apart, whatever its strides say (``o_strideM`` of CUTLASS' ``kernel_backward.h``, in torch from 2.0 to
    2.15). In another layout gradients of queries and keys are wrong, without an error.
    """
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _aligned(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """``[Tq, Tk]`` as the efficient kernel takes it: ``[B, H, Tq, Tk]``, with rows a multiple of 16 values apart."""
    if bias is None:
        return None
    rows, columns = bias.shape
    room = bias.new_zeros(rows, columns + -columns % 16)
    room[:, :columns] = bias
    return room[:, :columns].expand(q.shape[0], q.shape[1], rows, columns)
