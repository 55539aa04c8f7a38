"""A weight that asks FSDP2 to gather it in float8: what each rank sends is its shard's codes, half the bytes of bfloat16.

Each rank casts its own shard; all must use the scales that the whole weight would have, so that the gathered weight is
bit-equal to the whole weight's cast. A scale needs the largest magnitude of its block:

- 128x128 blocks within one shard (a shard has a multiple of 128 rows, all shards alike) need nothing: the scales
  travel in the same all-gather.
- One scale per weight, and blocks that span shards (uneven shards too), need the largest over ranks.
  `titan_fp8.ConstantWeights` finds it for all such weights in one all-reduce when it is entered. Outside of it a weight
  does so by itself, in an all-reduce of its own, each time it is gathered.

Those magnitudes, and the codes that were sent, are kept only while a `ShardCache` is open, that is, while someone has
declared that the weight does not change. A change that can be seen then raises an error at the next gather. Below
DTensor, where optimizers write to shards, version counters stand still, so in-place operations are counted here too.

Gathered codes are bytes (``torch.uint8``), which every backend can send.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from titan_fp8 import ops
from titan_fp8.ops.declare import run_op
from titan_fp8.recipe import Scaling
from titan_fp8.reference import encode_decode_scales, finite_amax, round_up
from titan_fp8.weights.cache import changed_message, checksum
from titan_fp8.weights.gathered import GatheredWeight

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_aten = torch.ops.aten
# What FSDP2 does to a parameter to cut, pad, move and re-make its shard. All else sees a plain tensor.
_VIEWS = (
    _aten.detach.default,
    _aten.alias.default,
    _aten.slice.Tensor,
    _aten.view.default,
    _aten.as_strided.default,
    _aten.split.Tensor,
)
_COPIES = (
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.clone.default,
)


class _Changes:
    """Counts in-place operations; one for all views of the same memory."""

    def __init__(self) -> None:
        self.count = 0


class ShardCache:
    """What is kept of one weight's shard while the weight is declared constant. Copies and pickles as a closed one.

    It belongs to the layer, not to the tensor: FSDP2 re-makes padded shards before the first forward, on some ranks only,
    and ranks must agree on whether a collective is needed.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.amax: Tensor | None = None
        self.sent: tuple[tuple[Tensor, ...], Tensor | None] | None = None
        self._name = "weight"
        self._seen: tuple[_Changes, int, int] | None = None
        self._checksum: int | None = None

    def open(self, shard: "ShardedWeight", *, name: str = "weight", check: bool = False) -> None:
        """Keep codes and magnitudes until `close`: the weight does not change, on any rank.

        Args:
            shard: This rank's.
            name: The weight's name, for errors.
            check: Compare a checksum at every gather.
        """
        self.close()
        self._name, self._seen = name, shard.state()
        self._checksum = checksum(shard.tensor) if check else None
        self.is_open = True

    def close(self) -> None:
        """Forget what was kept; keep nothing from now on."""
        self.is_open = False
        self.amax = self.sent = self._seen = None

    def refuse_changes(self, shard: "ShardedWeight") -> None:
        """Raise an error if the shard has changed, as far as can be seen.

        Raises:
            RuntimeError: If it has.
        """
        if not self.is_open or self._seen is None:
            return
        now = shard.state()
        replaced = now[0] is not self._seen[0]
        changed = (self.sent is not None) if replaced else now != self._seen
        if changed or (self._checksum is not None and self._checksum != checksum(shard.tensor)):
            raise RuntimeError(changed_message(self._name))
        self._seen = now

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardCache, ()


class ShardedWeight(torch.Tensor):
    """A weight, or the shard of one, in high precision, that FSDP2 gathers in float8.

    Args:
        tensor: The values, any shape while FSDP2 cuts them up, ``[n, K]`` when it gathers.
        scaling: One scale per tensor, or 128x128 blocks.
    """

    tensor: Tensor
    scaling: Scaling

    @staticmethod
    def __new__(
        cls: type[torch.Tensor], tensor: Tensor, scaling: Scaling, changes: _Changes | None = None
    ) -> "ShardedWeight":
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    def __init__(self, tensor: Tensor, scaling: Scaling, changes: _Changes | None = None) -> None:
        self.tensor = tensor
        self.scaling = scaling
        self._changes = _Changes() if changes is None else changes

    def __reduce_ex__(self, proto: Any) -> Any:
        # A clone in an optimizer's state is a tensor like others, and loads with ``weights_only=True``.
        return super().__reduce_ex__(proto) if isinstance(self, nn.Parameter) else self.tensor.__reduce_ex__(proto)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["tensor"], self.scaling

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> "ShardedWeight":
        return ShardedWeight(inner["tensor"], meta)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and isinstance(args[0], ShardedWeight) else None
        plain_args, plain_kwargs = tree_map_only(ShardedWeight, lambda w: w.tensor, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            written = _written(func, args, kwargs or {})
            for weight in written:
                weight._changes.count += 1
            return first if any(weight is first for weight in written) else out
        if first is not None and (func in _VIEWS or func in _COPIES):
            changes = first._changes if func in _VIEWS else None
            return tree_map_only(Tensor, lambda t: ShardedWeight(t, first.scaling, changes), out)
        return out

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"ShardedWeight({self.tensor!r}, {self.scaling.gran})"

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """FSDP2's hook: what to send. Codes ``[ceil(N / ranks), K]`` as bytes, and scales where blocks do not span ranks."""
        shape = (outer_size[0], outer_size[1])
        cache: ShardCache = getattr(module, "shard_cache", None) or ShardCache()
        # With offload FSDP2 makes a copy on the device for each gather; what must stay constant is the shard in host memory.
        home = getattr(getattr(module, "weight", None), "_local_tensor", None)
        cache.refuse_changes(home if isinstance(home, ShardedWeight) else self)
        sent = cache.sent
        if sent is None:
            sent = self._cast_shard(shape, mesh.size(), mesh.get_local_rank(), mesh.get_group(), cache)
        if cache.is_open:
            cache.sent = sent
        inputs, scale = sent
        return inputs, (outer_size[0], scale)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """FSDP2's hook: the gathered weight from what arrived; with ``out``, the one it made before is refreshed."""
        num_rows, known_scale = metadata
        codes = all_gather_outputs[0][:num_rows]  # the last shard may have been padded
        scale = all_gather_outputs[1] if known_scale is None else known_scale
        if out is not None:
            assert isinstance(out, GatheredWeight)
            # Codes (and scales that were gathered) are views of FSDP2's buffers, which it has filled again.
            out.forget_transpose()
            if known_scale is not None:
                out.scale = scale
            return None
        return GatheredWeight(codes, scale, self.scaling, param_dtype), all_gather_outputs

    def needs_amax(self, shape: tuple[int, int], num_ranks: int) -> bool:
        """Whether the scales of the whole weight depend on other ranks' shards."""
        return num_ranks > 1 and (self.scaling.gran == "tensor" or not aligned(shape[0], num_ranks))

    def local_amax(self, shape: tuple[int, int], num_ranks: int, rank: int) -> Tensor:
        """The largest magnitudes in this shard, float32: ``[]``, or for each block of the whole weight."""
        if self.scaling.gran == "tensor":
            return run_op(ops.amax, self.tensor)
        framed, first_block, _ = self._framed(shape[0], num_ranks, rank)
        blocks = self.tensor.new_zeros(-(-shape[0] // 128), -(-shape[1] // 128), dtype=torch.float32)
        if framed.shape[0]:
            tiles = F.pad(framed, (0, -framed.shape[1] % 128)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            own = finite_amax(tiles, (1, 3))
            blocks[first_block : first_block + own.shape[0]] = own
        return blocks

    def state(self) -> tuple[_Changes, int, int]:
        """Differs after a change that can be seen."""
        return self._changes, self._changes.count, self.tensor._version

    def _cast_shard(
        self, shape: tuple[int, int], num_ranks: int, rank: int, group: dist.ProcessGroup, cache: ShardCache
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        amax = cache.amax
        if amax is None and self.needs_amax(shape, num_ranks):
            amax = self.local_amax(shape, num_ranks, rank)
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        rows, dtype, pow2 = self.tensor.shape[0], self.scaling.dtype, self.scaling.pow2
        scale: Tensor | None = None
        extra: tuple[Tensor, ...] = ()
        if self.scaling.gran == "tensor":
            data, scale = run_op(ops.cast_tensor, self.tensor, dtype, pow2, amax)
        elif amax is None:
            data, block_scale = run_op(ops.cast_weight_rows, self.tensor, dtype, pow2)
            block_scale = block_scale[:, : -(-shape[1] // 128)].contiguous()
            # alone, the scales need no all-gather, and their shape may differ from the shard's
            extra, scale = ((block_scale,), None) if num_ranks > 1 else ((), block_scale)
        else:
            framed, _, offset = self._framed(shape[0], num_ranks, rank, amax)
            data = run_op(ops.cast_weight_rows, framed, dtype, pow2)[0][offset:]
            scale = encode_decode_scales(amax, dtype, pow2)[1]
        codes = data.view(torch.uint8)[:rows, : shape[1]]
        missing = -(-shape[0] // num_ranks) - rows
        return ((F.pad(codes, (0, 0, 0, missing)) if missing else codes.contiguous()), *extra), scale

    def _framed(self, num_rows: int, num_ranks: int, rank: int, amax: Tensor | None = None) -> tuple[Tensor, int, int]:
        """The shard padded with zero rows to whole blocks of the whole weight, the first block, and the padding before.

        With ``amax``, one padding value in each block that spans ranks is that block's largest magnitude: the cast
        then finds the scale of the whole block. Such a block always has a row of padding.
        """
        per_rank = -(-num_rows // num_ranks)
        start = min(rank * per_rank, num_rows)
        rows, columns = self.tensor.shape
        first_block, offset = start // 128, start % 128
        after = round_up(offset + rows, 128) - offset - rows
        framed = F.pad(self.tensor, (0, 0, offset, after))
        if amax is None or rows == 0:
            return framed, first_block, offset
        last_block = first_block + framed.shape[0] // 128 - 1
        marks = torch.arange(0, columns, 128, device=framed.device)
        if offset:
            framed[0, marks] = amax[first_block].to(framed.dtype)
        if after:
            framed[-1, marks] = amax[last_block].to(framed.dtype)
        return framed, first_block, offset


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ShardedWeight]:
    """The weights that an operation writes to; what it only reads stays as it was."""
    given: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return [weight for weight in tree_leaves(given) if isinstance(weight, ShardedWeight)]


def aligned(num_rows: int, num_ranks: int) -> bool:
    """Whether FSDP2 cuts a weight of so many rows into equal shards of whole 128x128 blocks (or not at all)."""
    return num_ranks == 1 or num_rows % (128 * num_ranks) == 0


def is_dtensor(value: Any) -> "TypeGuard[DTensor]":
    """Whether ``value`` is a DTensor, without importing its module, which takes most of a second of CPU."""
    module = sys.modules.get("torch.distributed.tensor")  # where it was never imported there is none
    return module is not None and isinstance(value, module.DTensor)
