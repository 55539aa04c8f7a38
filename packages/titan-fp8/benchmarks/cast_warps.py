"""Every cast with 4, 8 and 16 warps a program, on one GPU: which number is fastest?

Question: how many warps should a program of each cast have? Registers, spills and programs on a multiprocessor, which a
compiler tells without a GPU, did not answer it: casts of weights with the fewest registers ran at a third of the copy bandwidth.

Method: bytes that the cast must move over the median time of its kernels, beside a copy's in the same call; power-of-two and
exact scales. Where a cast takes two passes, both passes' bytes count.

Output: a line per cast: TB/s as it is and by warps. Limits: one shape at a time, and bfloat16.

    python packages/titan-fp8/benchmarks/cast_warps.py --rows 16384 --columns 4096
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from measure import Bench
from titan_fp8.kernels.triton import block, fused, grouped_cast, layer_norm, mx, row, tensor, weights

MODULES = (block, fused, grouped_cast, layer_norm, mx, row, tensor, weights)
WARPS = (4, 8, 16)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9, help="timed calls; their median counts")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the number of warps matters on a GPU alone.")
    bench = Bench(torch.device("cuda", torch.cuda.current_device()), arguments.repeats, tiny=False)
    x, gate, up = (bench.random(arguments.rows, arguments.columns, seed=seed) for seed in range(3))
    copy = torch.empty_like(x)
    print(f"{'copy':36} {_rate(bench, lambda: copy.copy_(x), 4 * x.numel())}")
    for name, (elements, run) in casts(x, gate, up).items():
        rates = [f"now {_rate(bench, run, elements * x.numel())}"]
        for warps in WARPS:
            rates.append(f"{warps}: {_rate(bench, lambda w=warps, r=run: _with(w, r), elements * x.numel())}")
        print(f"{name:36} {'  '.join(rates)}", flush=True)


def casts(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> dict[str, tuple[int, Callable[[], object]]]:
    """By name: bytes an element that the cast moves, and the cast."""
    code, rows = torch.float8_e4m3fn, x.shape[0]
    gain, shift = x[0].contiguous(), x[1].contiguous()
    one = torch.ones((), device=x.device)
    offs = torch.tensor([rows // 4, rows // 2, rows // 2 + 100, rows], dtype=torch.int32, device=x.device)
    named: dict[str, tuple[int, Callable[[], object]]] = {}
    for pow2 in (True, False):
        named |= {
            f"{name}, {'power of two' if pow2 else 'exact'}": cast
            for name, cast in {
                "block": (3, lambda p=pow2: block.cast_block(x, code, p)),
                "block, dual": (4, lambda p=pow2: block.cast_block_dual(x, code, p)),
                "row": (3, lambda p=pow2: row.cast_row(x, code, p)),
                "row, dual": (6, lambda p=pow2: tensor.cast_row_dual(x, code, p)),
                "tensor, dual, amax known": (4, lambda p=pow2: tensor.cast_tensor_dual(x, code, p, one)),
                "weight": (4, lambda p=pow2: weights.cast_weight_block(x, code, p)),
                "weight, rows": (3, lambda p=pow2: weights.cast_weight_rows(x, code, p)),
                "two weights, one launch": (8, lambda p=pow2: weights.cast_weights_block([x, gate], code, p)),
                "grouped": (4, lambda p=pow2: grouped_cast.cast_grouped(x, offs, code, p, "block1x128")),
                "grouped, row": (6, lambda p=pow2: grouped_cast.cast_grouped(x, offs, code, p, "row")),
                "rmsnorm": (6, lambda p=pow2: fused.rmsnorm_cast_block(x, gain, 1e-5, code, p)),
                "layernorm": (
                    6,
                    lambda p=pow2: layer_norm.layernorm_cast_block(x, gain[None], shift[None], 1e-5, code, p),
                ),
                "gelu": (4, lambda p=pow2: layer_norm.gelu_cast_block(x, code, p)),
                "swiglu": (6, lambda p=pow2: fused.swiglu_cast_block(gate, up, code, p)),
                "swiglu, backward": (10, lambda p=pow2: fused.swiglu_backward_cast_block(x, gate, up, code, p)),
            }.items()
        }
    return named | {"mx, dual": (4, lambda: mx.cast_mx_dual(x, code)), "amax": (2, lambda: tensor.amax(x))}


def _rate(bench: Bench, run: Callable[[], object], moved: int) -> str:
    return f"{moved / bench.median_ms([run]) / 1e9:.2f}"


def _with(warps: int, run: Callable[[], object]) -> object:
    """``run`` with this many warps in each launch."""
    launch = block.launch

    def instead(*arguments: Any, num_warps: int, **constants: Any) -> None:
        launch(*arguments, num_warps=warps, **constants)

    try:
        for module in MODULES:
            module.launch = instead
        return run()
    finally:
        for module in MODULES:
            module.launch = launch


if __name__ == "__main__":
    main()
