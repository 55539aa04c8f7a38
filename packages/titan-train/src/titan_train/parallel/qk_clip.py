"""QK-clip: keep attention logits below a threshold by shrinking the query and key weights of the heads that exceed it.

Muon and high learning rates let the logits of a few heads grow until attention is one-hot and the loss spikes. After each step,
a head whose largest logit S of that step exceeds the threshold t gets its queries and keys multiplied by roots of t / S, so that
the same tokens would give t (MuonClip, Kimi K2, arXiv:2507.20534). Nothing else of the step changes.

With gamma = min(1, t / S) of a query head, and for a key head the smallest of its query heads:

    grouped heads     keys * sqrt(gamma of the key head)     queries * gamma / sqrt(gamma of the key head)
    latent heads      channels without positions: queries and keys * sqrt(gamma); rotated queries * gamma; the rotated key, which
                      all heads share, stays

The largest logits come from the layers' own queries and keys, block by block, masked like attention; fused kernels do not return
them. Ranks that hold the same heads and other tokens share them by one all-reduce, and all ranks the largest of each layer, which
the host reads with the loss. Factors stay on the device, so there is no further host sync; one of 1 leaves every bit.

Cost: the products of queries and keys once more, without gradient and not again in recomputation. Fused kernels keep logits on
the chip; these go through memory, and that is most of the cost. In bf16 it is 4 bytes for each query and key before it in its
row, twice that in packed rows, where all are masked, and twice that again under context parallelism, which computes later keys
too. On a GPU logits are in the activations' dtype: bf16 rounds S by at most 1 part in 256. On a CPU they are in float32.

Shapes: B batch, S queries, T keys, H query heads and K key heads of this rank, D head width, L layers of the model.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from titan_fsdp import clean_fqn, unwrap
from torch import Tensor, nn

from titan_train.models.common.recomputed import not_kept

_BLOCK_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
"""Logits of one block: on a GPU enough for products of large matrices."""
_LAYER = re.compile(r"^(layers|mtp)\.(\d+)\.")


class QKClip:
    """Measures the logits of every layer on this rank, and shrinks the weights of heads beyond a threshold."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        threshold: float,
        *,
        num_layers: int,
        device: torch.device,
        tokens: dist.ProcessGroup | None = None,
        context: dist.ProcessGroup | None = None,
        every_rank: bool = False,
    ) -> None:
        """Watch the attention of the model.

        Args:
            parts: The model, or this rank's pipeline stages.
            threshold: t.
            num_layers: L.
            device: Where it computes.
            tokens: The ranks that hold the same heads and see other tokens, this one among them; None for no other.
            context: The ranks that hold other tokens of the same rows, under context parallelism.
            every_rank: There are other ranks.
        """
        self._threshold, self._num_layers = threshold, num_layers
        self._device, self._every_rank = device, every_rank
        self._tokens, self._context = tokens, context
        self._layers = dict(attention_layers(parts))
        self._largest: dict[int, Tensor] = {}
        for number, module in self._layers.items():
            module.get_submodule("inner_attention").register_forward_pre_hook(partial(self._measure, number))

    @torch.no_grad()
    def _measure(self, number: int, _inner: nn.Module, args: tuple[Any, ...]) -> None:
        """A hook before the attention of a layer, whose arguments are queries, keys, values and the context."""
        in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
        if in_backward or not self._layers[number].training:  # a block that is recomputed was measured in forward
            return
        q, k, _, context = args
        with not_kept():  # inside a block that is recomputed
            found = largest_logits(q, k, context, self._context)
        before = self._largest.get(number)
        self._largest[number] = found if before is None else torch.maximum(before, found)

    @torch.no_grad()
    def share(self) -> Tensor:
        """Let ranks agree on each head's largest logit of the step. Collective over all ranks.

        Returns:
            The largest logit of each layer of the whole model, ``[L]`` float32 on the device.
        """
        if self._tokens is not None and self._largest:
            order = sorted(self._largest)
            flat = torch.cat([self._largest[number] for number in order])
            dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self._tokens)
            parts = flat.split([self._largest[number].numel() for number in order])
            self._largest = dict(zip(order, parts, strict=True))
        layers = torch.full((self._num_layers,), -torch.inf, device=self._device)
        for number, largest in self._largest.items():
            layers[number] = largest.max()
        if self._every_rank:
            dist.all_reduce(layers, op=dist.ReduceOp.MAX)
        return layers

    @torch.no_grad()
    def clip(self) -> None:
        """Shrink the weights of heads whose logits exceeded the threshold in this step; after `share`, without waiting."""
        for number, largest in self._largest.items():
            gamma = (self._threshold / largest).where(largest > self._threshold, torch.ones_like(largest))
            shrink(self._layers[number], gamma)
        self.forget()

    def forget(self) -> None:
        """Drop what this step measured."""
        self._largest = {}


def attention_layers(parts: Sequence[nn.Module]) -> Iterator[tuple[int, nn.Module]]:
    """The attention of each layer on this rank, by the layer's number.

    Raises:
        ValueError: A layer's attention is not one whose weights can be clipped by head.
    """
    found = False
    for part in parts:
        for name, module in unwrap(part).named_modules():
            number = layer_of(clean_fqn(name), getattr(unwrap(part), "num_layers", 0))
            if number is None or not hasattr(module, "inner_attention"):
                continue
            if getattr(module, "k_norm", None) is not None:
                raise ValueError(
                    "qk_clip.threshold: this model normalizes queries and keys by head, so that their weights do not bound the "
                    "logits, and they are bounded already. Set qk_clip.threshold=0."
                )
            if not {"wk", "wkv_b"} & {child for child, _ in module.named_children()}:
                continue  # named as in transformers
            found = True
            yield number, module
    if not found:
        raise ValueError(
            f"qk_clip.threshold: {type(unwrap(parts[0])).__name__} has no attention whose queries and keys are known by head. "
            "It serves Llama, GPT and DeepSeek of titan-train. Set qk_clip.threshold=0."
        )


def layer_of(name: str, num_layers: int) -> int | None:
    """The number of a parameter's or a module's layer; modules for tokens further ahead follow the model's layers."""
    match = _LAYER.match(name)
    return None if match is None else int(match[2]) + (num_layers if match[1] == "mtp" else 0)


def check_qk_clip(model: nn.Module, *, compiled: bool, replicate_kv: bool) -> None:
    """Refuse what QK-clip cannot serve, before any rank starts.

    Args:
        model: The whole model.
        compiled: Blocks are compiled.
        replicate_kv: Several tensor-parallel ranks may hold one key head.

    Raises:
        ValueError: Names it.
    """
    dict(attention_layers([model]))
    if compiled:
        raise ValueError(
            "qk_clip.threshold with compile.enabled: logits are measured in Python, between compiled operations. Set "
            "compile.enabled=false or qk_clip.threshold=0."
        )
    if replicate_kv:
        raise ValueError(
            "qk_clip.threshold with parallel.replicate_kv: ranks that share a key head have other query heads, and would shrink "
            "it differently. Lower parallel.tp to the number of key heads and set parallel.replicate_kv=false."
        )


def largest_logits(q: Tensor, k: Tensor, context: Any, group: dist.ProcessGroup | None = None) -> Tensor:
    """The largest ``q k / sqrt(D)`` of each query head over the pairs that attention sees.

    Args:
        q: ``[B, S, H, D]``.
        k: ``[B, T, K, D]``, of the same tokens.
        context: The rows' `titan_train.models.SequenceContext`.
        group: Under context parallelism, the ranks that hold the other tokens of the rows. Collective over them.

    Returns:
        ``[H]`` float32.
    """
    rows, packed = k.shape[0], context.cu_seqlens is not None
    if group is not None:
        whole = context.attention_plan.plan
        k = whole.unshard(k, group=group)
        positions = whole.unshard(context.positions.expand(rows, -1), group=group)
        order = torch.arange(positions.shape[1], device=q.device).expand(rows, -1)
        documents = (positions == 0).cumsum(-1)
        q_order, q_documents = whole.shard(order), whole.shard(documents)
    else:
        order = torch.arange(k.shape[1], device=q.device).expand(rows, -1)
        documents = (context.positions == 0).cumsum(-1).expand(rows, -1) if packed else torch.zeros_like(order)
        q_order, q_documents = order, documents
    heads, keys = q.shape[2], k.shape[2]
    dtype = q.dtype if q.is_cuda else torch.float32
    grouped, k = q.unflatten(2, (keys, heads // keys)).to(dtype), k.to(dtype)
    block_bytes = _BLOCK_BYTES["cuda" if q.is_cuda else "cpu"]
    step = max(1, block_bytes // (dtype.itemsize * rows * heads * k.shape[1]))
    largest = torch.full((heads,), -torch.inf, device=q.device)
    for start in range(0, q.shape[1], step):
        at = slice(start, start + step)
        # whole rows are in order: no query of the block sees a key behind it, and all see those before it, of one document
        end = None if group is not None else start + step
        first = 0 if group is not None or packed else start
        to = slice(first, end)
        seen = (q_order[:, at, None] >= order[:, None, to]) & (q_documents[:, at, None] == documents[:, None, to])
        scores = torch.einsum("bskgd,btkd->bkgst", grouped[:, at], k[:, :end])
        scores[..., first:].masked_fill_(~seen[:, None, None], -torch.inf)
        largest = torch.maximum(largest, scores.amax((0, 3, 4)).flatten())
        del scores  # before the next block is made
    return largest / q.shape[-1] ** 0.5


def shrink(attention: nn.Module, gamma: Tensor) -> None:
    """Multiply the rows of the query and key weights of each head, in place; biases too.

    Args:
        attention: With this rank's heads.
        gamma: ``[H]``, of each query head.
    """
    modules: Mapping[str, Any] = dict(attention.named_children())
    if "wkv_b" in modules:
        nope, rope, value = attention.nope_dim, attention.rope_dim, attention.v_dim
        root, one = gamma.sqrt(), torch.ones_like(gamma)
        _scale_rows(modules.get("wq_b", modules.get("wq")), _spread((root, nope), (gamma, rope)))
        _scale_rows(modules["wkv_b"], _spread((root, nope), (one, value)))
        return
    width: Any = attention.head_dim
    keys = modules["wk"].weight.shape[0] // width
    of_keys = gamma.view(keys, -1).amin(1).sqrt()
    _scale_rows(modules["wq"], _spread((gamma / of_keys.repeat_interleave(len(gamma) // keys), width)))
    _scale_rows(modules["wk"], _spread((of_keys, width)))


def _spread(*factors: tuple[Tensor, Any]) -> Tensor:
    """From factors of heads, each for so many of its channels, to one for each row."""
    return torch.cat([factor.unsqueeze(1).expand(-1, width) for factor, width in factors], dim=1).flatten()


def _scale_rows(linear: Any, factors: Tensor) -> None:
    from torch.distributed.tensor import (
        DTensor,
        Replicate,
        Shard,
    )  # here: `check` imports this module, and shards nothing

    for parameter, scale in ((linear.weight, factors.unsqueeze(1)), (linear.bias, factors)):
        if parameter is None or parameter.grad is None:  # frozen, or by ``optimizer.frozen_steps`` in this step
            continue
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            alike = DTensor.from_local(scale, mesh, [Replicate()] * mesh.ndim, run_check=False)
            cut = [Shard(0) if placement.is_shard(0) else Replicate() for placement in parameter.placements]
            local = parameter.to_local()  # in host memory under parallel.offload
            local.mul_(alike.redistribute(mesh, cut).to_local().to(local.device))
        else:
            parameter.mul_(scale)
