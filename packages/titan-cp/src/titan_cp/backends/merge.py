"""Joining the attention over two sets of keys, exactly.

Softmax over all keys is the partial outputs weighted by ``exp(lse_i - lse)``, ``lse = logaddexp`` of the parts. The
sigmoid form that most ring implementations use gives NaN when a part is empty (lse = -inf), and the older
``log(1 + exp(x))`` form overflows; here an empty part has weight 0, also when both are empty.
"""

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention over one more set of keys into a running result.

    Rows without keys are ``out = 0, lse = -inf``; merging them changes nothing.

    Args:
        out: Running output, shape ``[..., T, D]``, any float dtype.
        lse: Running log-sum-exp (natural logarithm) of the scaled scores, shape ``[..., T]``.
        block_out: The other part's output, same shape as ``out``, any float dtype.
        block_lse: The other part's log-sum-exp, same shape as ``lse``.

    Returns:
        The merged ``(out, lse)``: new tensors, float32 (float64 if an argument is); inputs unchanged.

    Raises:
        ValueError: If the shapes do not belong together. CUDA kernels return a padded or a 4-D log-sum-exp; slice it
            to ``[..., T]`` first.
    """
    if block_out.shape != out.shape or lse.shape != out.shape[:-1] or block_lse.shape != lse.shape:
        raise ValueError(
            f"merge got out {tuple(out.shape)}, lse {tuple(lse.shape)}, block_out {tuple(block_out.shape)}, block_lse "
            f"{tuple(block_lse.shape)}: each lse must be shaped as its output without the last dim. CPU flash returns "
            "that; slice the efficient kernel's padded lse and squeeze cuDNN's last dim."
        )
    wide = torch.float64 if torch.float64 in {t.dtype for t in (out, lse, block_out, block_lse)} else torch.float32
    out, lse = out.to(wide, copy=True), lse.to(wide, copy=True)
    merge_in_place(out, lse, block_out, block_lse)
    return out, lse


def merge_in_place(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """`merge` into ``out`` and ``lse``, which are float32 or float64 and may be views."""
    block_lse = block_lse.to(lse.dtype)
    merged = torch.logaddexp(lse, block_lse)
    # -inf - -inf is NaN: a row that has no keys on either side keeps weight 0.
    weight = torch.where(block_lse.isneginf(), 0.0, torch.exp(block_lse - merged))
    out.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(merged)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge one more key for each head into ``out`` and ``lse``, in place: of score ``sinks [H]``, and of value zero.

    Source: gpt-oss' attention sinks, a learned logit per head ("Efficient Streaming Language Models", arXiv 2309.17453).
    """
    merged = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    out.mul_(torch.exp(lse - merged).unsqueeze(-1))
    lse.copy_(merged)


def sink_gradients(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of ``sinks`` from these rows; ``out`` and ``lse`` are of the whole attention, sinks included."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
