"""Host time of a linear layer's forward and backward in eager mode.

Question: can the host launch the kernels of a float8 layer faster than a GPU runs them, or does a step wait for Python?
Method: every kernel is replaced by an allocation of its results, so that what remains is dispatch, autograd and checks. CPU
seconds of this process, the fastest of 15 rounds of 200 calls, so that other work on the machine counts least; `nn.Linear`
of 16 x 16 stands for its own host time.
Output: a table, then one JSON object. Limits: launching a Triton kernel, or calling cuBLASLt, is not included.

    OMP_NUM_THREADS=1 python packages/titan-fp8/benchmarks/host_time.py
"""

import json
import platform
import time
from collections.abc import Callable
from typing import Any

import titan_fp8
import torch
from titan_fp8 import products
from titan_fp8.ops import declare
from titan_fp8.reference.results import empty_block_dual, empty_weight_block
from torch import Tensor, nn


def stub(op: str, *_: Any) -> Callable[..., Any]:
    """Allocates what the op returns."""
    empty = torch.empty

    def tensorwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return empty(x.shape, dtype=dtype), empty(x.shape[::-1], dtype=dtype), empty(())

    return {
        "scaled_mm": lambda a, sa, b, sb, *rest: empty(a.shape[0], b.shape[0], dtype=rest[2]),
        "cast_block": lambda x, dtype, pow2: empty_block_dual(x, dtype, False)[:2],
        "cast_block_dual": lambda x, dtype, pow2: empty_block_dual(x, dtype),
        "cast_weight_rows": lambda w, dtype, pow2: empty_weight_block(w, dtype, dual=False)[:2],
        "cast_weight_block": lambda w, dtype, pow2: empty_weight_block(w, dtype),
        "cast_tensor": lambda x, dtype, pow2, amax: tensorwise(x, dtype)[::2],
        "cast_tensor_dual": lambda x, dtype, pow2, amax: tensorwise(x, dtype),
    }[op]


def microseconds(fn: Callable[[], Any], calls: int = 200) -> float:
    """The CPU time of one call in the fastest round."""
    for _ in range(20):
        fn()
    rounds: list[float] = []
    for _ in range(15):
        start = time.process_time()
        for _ in range(calls):
            fn()
        rounds.append((time.process_time() - start) / calls * 1e6)
    return min(rounds)


def forward_and_backward(layer: nn.Linear, x: Tensor, g: Tensor) -> Callable[[], Any]:
    """One call of a layer and its gradients."""
    return lambda: torch.autograd.grad(layer(x), (x, layer.weight), g)


def main() -> None:
    """Measure, print."""
    size = 128
    x, g = torch.randn(size, size).bfloat16().requires_grad_(), torch.randn(size, size).bfloat16()
    small = torch.randn(16, 16, requires_grad=True)
    found = {"nn.Linear": microseconds(forward_and_backward(nn.Linear(16, 16, bias=False), small, torch.randn(16, 16)))}
    for module in (declare, products):
        module.implementation = stub
    for recipe in ("blockwise", "tensorwise"):
        layer = titan_fp8.Float8Linear(size, size, bias=False, dtype=torch.bfloat16, recipe=recipe)
        found[f"{recipe}, weight cast twice"] = microseconds(forward_and_backward(layer, x, g))
        with titan_fp8.ConstantWeights(layer):
            found[f"{recipe}, weight cast kept"] = microseconds(forward_and_backward(layer, x, g))
    for name, value in found.items():
        print(f"{name:30} {value:6.0f} us")
    print(json.dumps({"torch": torch.__version__, "machine": platform.processor(), "host_us": found}))


if __name__ == "__main__":
    main()
