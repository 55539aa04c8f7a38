"""When float8 pays: the time of a layer's three products against the time of the casts around them.

Products grow with ``M·K·N``, casts with ``M·K + K·N + M·N``: a layer below some size is slower in float8 than in
bfloat16, however good the kernels are. The model here is that and no more: three products at the machine's measured
rate, each cast at the bytes its fused kernel moves, and a fixed cost for every launch.

In eager mode the host launches one kernel after the other. Where that takes longer than the kernels run, the layer takes the
host's time: a float8 layer has more to launch, so small layers lose there too. A compiled layer's launches are the graph's.

It predicts a ratio good enough to leave out layers that would lose; it does not replace a benchmark.
"""

from dataclasses import dataclass

from titan_fp8.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one device sustains."""

    name: str
    """For reports."""
    bf16_tflops: float
    """Large bfloat16 products on random data, TFLOP/s."""
    fp8_tflops: float
    """Large float8 products whose operands have one scale each, TFLOP/s."""
    bandwidth_tb_s: float
    """A large copy, bytes read plus bytes written, TB/s."""
    launch_us: float = 4.0
    """What one more kernel costs the device, microseconds."""
    host_linear_us: float = 53.0
    """Host time of ``nn.Linear``'s forward and backward in eager mode, its products' launches included, microseconds."""
    host_float8_us: float = 128.0
    """The same of a float8 layer whose weight's cast is kept, without launching casts."""
    host_launch_us: float = 16.0
    """Host time of launching a cast's kernel."""


H200 = Hardware("H200", bf16_tflops=790.0, fp8_tflops=1450.0, bandwidth_tb_s=4.3 * 0.92)
"""Measured on one H200 (92 % of a copy's rate for casts); float8 a little below cuBLASLt's 1,490 in large products; host times
measured on one CPU core with the kernels replaced by allocations (``benchmarks/host_time.py``, ``benchmarks/launch_time.py``)."""

# Of the rate with one scale for a tensor, in the products of Llama 3 8B's layers with 16,384 tokens on an H200 (cuBLASLt of
# CUDA 13.0). `mxfp8` is unmeasured: Hopper has no such products.
_RATES = {"tensorwise": 1.0, "rowwise": 0.88, "rowwise_gw_hp": 0.88, "blockwise": 0.79, "mxfp8": 1.0}

# Bytes moved for one bfloat16 element of (x, w, g) by the fused casts, and casts' kernel launches for the three.
_CAST_BYTES: dict[str, tuple[tuple[float, float, float], int]] = {
    "tensorwise": ((6.0, 6.0, 6.0), 6),  # amax reads 2; the cast reads 2 and writes rows and columns
    "rowwise": ((6.0, 6.0, 6.0), 6),  # rows and column amax 3; columns 3
    "rowwise_gw_hp": ((3.0, 6.0, 3.0), 4),
    "blockwise": ((4.06, 4.0, 4.06), 3),  # one read gives both layouts; a scale for each 128
    "mxfp8": ((4.06, 4.06, 4.06), 3),
}


def predict_speedup(m: int, k: int, n: int, recipe: Recipe, hardware: Hardware = H200, *, eager: bool = True) -> float:
    """How many times faster than bfloat16 a linear layer's forward and backward is expected to be.

    Args:
        m: Rows of the input: tokens in a microbatch on one device.
        k: Input features.
        n: Output features.
        recipe: What is cast, and which products are float8.
        hardware: The device, and the host's times.
        eager: The host launches each kernel; False for layers in a compiled or captured graph.

    Returns:
        Time in bfloat16 over time in float8; below 1 float8 loses. 0 for an empty layer.
    """
    if min(m, k, n) == 0:
        return 0.0
    kind = _kind(recipe)
    (x_bytes, w_bytes, g_bytes), casts = _CAST_BYTES[kind]
    product_flops = 2.0 * m * k * n
    bf16_s = 3 * product_flops / (hardware.bf16_tflops * 1e12)
    in_float8 = 3 if recipe.wgrad == "fp8" else 2
    fp8_s = in_float8 * product_flops / (_RATES[kind] * hardware.fp8_tflops * 1e12)
    fp8_s += (3 - in_float8) * product_flops / (hardware.bf16_tflops * 1e12)
    fp8_s += (x_bytes * m * k + w_bytes * n * k + g_bytes * m * n) / (hardware.bandwidth_tb_s * 1e12)
    fp8_s += casts * hardware.launch_us * 1e-6
    # Products of few rows are bound by reading their operands, which float8 halves; a floor for both sides.
    traffic_s = (m * k + n * k + m * n) * 3 * 2.0 / (hardware.bandwidth_tb_s * 1e12)
    host_bf16_s = hardware.host_linear_us * 1e-6 if eager else 0.0
    host_fp8_s = (hardware.host_float8_us + casts * hardware.host_launch_us) * 1e-6 if eager else 0.0
    return max(bf16_s, traffic_s, host_bf16_s) / max(fp8_s, traffic_s / 2, host_fp8_s)


def _kind(recipe: Recipe) -> str:
    if recipe.x.gran == "row":
        return "rowwise" if recipe.wgrad == "fp8" else "rowwise_gw_hp"
    return {"tensor": "tensorwise", "block1x128": "blockwise", "mx32": "mxfp8"}[recipe.x.gran]
