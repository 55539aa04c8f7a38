"""Model FLOPs per token, forward and backward, by either convention for attention.

6 N for the parameters that are multiplied (no input embedding) and, per layer, 6 * seq * (key width + value width) * heads
for attention; half of it if causal attention is counted causally. Recomputation never counts.
"""

from titan_train.planner.model.shape import ModelShape


def flops_per_token(shape: ModelShape, seq_len: int, *, causal: bool) -> float:
    """FLOPs of one token."""
    matrices = shape.active_parameters() - (0 if shape.tied else shape.head_parameters) - shape.positions * shape.dim
    attention = 0.0
    for b in shape.blocks:
        if b.attention is not None:
            a = b.attention
            matrices -= b.count * (b.norms * shape.dim)
            seen = min(seq_len, 2 * a.window) if a.window else seq_len
            half = 0.5 if causal and a.causal else 1.0
            attention += b.count * 6.0 * half * seen * a.heads * (a.head_dim + a.v_dim)
            matrices -= b.count * b.modulation * (1 - 1 / max(1, seq_len))
    return 6.0 * matrices + attention
