"""Gradient compression: bfloat16 on the wire, float32 in the sum.

A plain bfloat16 reduce-scatter rounds after every addition, so its error grows with the ranks. Here each rank rounds
its contribution once, an all-to-all brings every shard's contributions to their owner (the same bytes a
reduce-scatter moves), and the owner sums them in float32. Cost: a receive buffer of the input's size in bfloat16.

The fp16/bf16 hooks of DistributedDataParallel are torch's; here they only get the divide factor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from titan_fsdp.planning.policy import Policy
from titan_fsdp.wrapping.powersgd import PowerSGD


class Bf16ReduceScatter:
    """FSDP2's reduce-scatter (``set_custom_reduce_scatter``), sent in bfloat16 and summed in float32."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP2 to fill."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's shard of the sum (or mean) of ``input_tensor`` over ``group`` to ``output_tensor``.

        Args:
            output_tensor: Shape ``[n]``, float32.
            input_tensor: Shape ``[ranks · n]``, float32.
            group: The shard group.
            op: ``SUM`` or ``AVG``.
            async_op: FSDP2 orders streams itself and always passes False.
        """
        ranks = group.size()
        send = input_tensor.to(torch.bfloat16)
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=group)
        torch.sum(received.view(ranks, -1), dim=0, dtype=output_tensor.dtype, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(ranks)


def register_ddp_hook(model: DistributedDataParallel, policy: Policy, group: dist.ProcessGroup) -> None:
    """Register the policy's communication hook, and make its mean the policy's ``grad_divide``."""
    ranks = group.size()
    state: Any = group
    if policy.comm.ddp_hook == "powersgd":
        state = PowerSGD(model, group, rank=policy.comm.powersgd_rank, start_step=policy.comm.powersgd_start_step)
        model.gradient_compression = state
    hooks: dict[str | None, Callable[[Any, Any], Any]] = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "powersgd": PowerSGD.reduce,
    }
    hook = hooks[policy.comm.ddp_hook]
    scale = (
        1.0 if policy.grad_divide == "mean" else ranks / (1.0 if policy.grad_divide == "sum" else policy.grad_divide)
    )

    # torch checks that a hook's bucket is annotated with exactly this class.
    def scaled(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        def multiply(future: Any) -> Tensor:
            value = future.value()
            return (value[0] if isinstance(value, list) else value).mul_(scale)

        return hook(state, bucket).then(multiply)

    model.register_comm_hook(state, hook if scale == 1.0 else scaled)
