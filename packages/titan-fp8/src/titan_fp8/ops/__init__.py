"""The package's custom ops: casts to float8 and products of float8 operands, functional, the same on every device.

Each is registered as ``torch.ops.titan_fp8.<name>`` with a fake implementation, so that ``torch.compile`` traces
through it. None mutates or aliases its inputs, and none has a gradient: layers define theirs around them.

Conventions:

- ``scale`` is a *decode* scale: ``x ≈ q * scale``. float32 (MX: e8m0), a power of two unless ``pow2=False``.
- Sizes are padded with zeros (scale 1) as the products need: to multiples of 16 (tensor and row scaling) or of 128
  (blocks and MX) in both dimensions. ``Mp, Kp`` below are padded sizes. Products return padded rows and columns too:
  cut ``y[:M, :N]``.
- ``qt`` is the transpose, scaled along its own rows, ready to be contracted over tokens.
- Products contract the last dimension of both operands: ``scaled_mm(a[M, K], b[N, K]) = a · bᵀ``.

  ==============  =====================================  =====================================
  product         a                                      b
  ==============  =====================================  =====================================
  forward         ``x.q [M, K]``                         ``w.q [N, K]``
  input gradient  ``grad.q [M, N]``                      ``w.qt [K, N]``
  weight gradient ``grad.qt [N, M]``                     ``x.qt [K, M]``
  ==============  =====================================  =====================================

- NaN and infinity become NaN; finite values saturate; ties go to even, subnormals too; a zero block has scale 1;
  non-finite values take no part in a block's scale.
- The last argument of every op, ``backend``, is ``"auto"`` or the name of one implementation; see `titan_fp8.backends`.

Each op is declared once, by a check of its operands and a function that allocates its results (`titan_fp8.ops.declare`).
"""

from titan_fp8.ops.casts import (
    amax,
    cast_block,
    cast_block_dual,
    cast_grouped,
    cast_mx,
    cast_mx_dual,
    cast_row,
    cast_row_dual,
    cast_tensor,
    cast_tensor_dual,
    cast_weight_block,
    cast_weight_rows,
    cast_weights_block,
    transpose_codes,
)
from titan_fp8.ops.fused import (
    gelu_cast_block,
    layernorm_cast_block,
    rmsnorm,
    rmsnorm_backward,
    rmsnorm_cast_block,
    swiglu,
    swiglu_backward,
    swiglu_backward_cast_block,
    swiglu_cast_block,
)
from titan_fp8.ops.products import grouped_scaled_mm, grouped_scaled_mm_wgrad, scaled_mm

__all__ = [
    "amax",
    "cast_block",
    "cast_block_dual",
    "cast_grouped",
    "cast_mx",
    "cast_mx_dual",
    "cast_row",
    "cast_row_dual",
    "cast_tensor",
    "cast_tensor_dual",
    "cast_weight_block",
    "cast_weight_rows",
    "cast_weights_block",
    "gelu_cast_block",
    "grouped_scaled_mm",
    "grouped_scaled_mm_wgrad",
    "layernorm_cast_block",
    "rmsnorm",
    "rmsnorm_backward",
    "rmsnorm_cast_block",
    "scaled_mm",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_cast_block",
    "swiglu_cast_block",
    "transpose_codes",
]
