"""FlexAttention masks under context parallelism.

Ulysses: the local attention sees the whole sequence in order, so a mask needs no change; hand ``flex_attention`` to
``attn_fn``. All-gather: the keys are whole, the queries are this rank's, so a mask must be told which tokens they are.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from titan_cp.planning.plan import AttentionPlan

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's mask: ``(batch, head, query index, key index)`` to a boolean."""


def localize_mask(mask_mod: MaskMod, plan: AttentionPlan, device: torch.device | str = "cpu") -> MaskMod:
    """A FlexAttention mask written for the whole sequence, for this rank's queries and the whole sequence's keys.

    Use with ``allgather_attention(attn_fn=…)`` and ``create_block_mask(…, Q_LEN=plan.local_len, KV_LEN=plan.pad_to)``.

    Args:
        mask_mod: The mask in terms of places in the whole (padded) sequence.
        plan: A plan with ``method="allgather"``.
        device: Where the mask is evaluated.

    Returns:
        The same mask with the query index counting this rank's tokens.
    """
    index = plan.global_index(device)

    def local_mask(batch: Tensor, head: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return mask_mod(batch, head, index[q_index], kv_index)

    return local_mask
