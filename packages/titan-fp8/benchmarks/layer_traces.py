"""How many kernels, saved bytes and decibels does one linear layer cost, beside torchao's?

Method: a dispatch trace of one forward and backward (views and metadata left out; a custom op counts once, and is one
or two launches on a GPU), the bytes autograd keeps (parameters left out), and the signal over quantisation noise of
output, input gradient and weight gradient against float64, on normal data. Counts and decibels do not depend on the
machine, so this runs on a CPU. torchao's rows appear where it is installed; its layers run in eager mode.

Output: one row a recipe; the last line is one JSON object.

    python packages/titan-fp8/benchmarks/layer_traces.py
"""

import importlib.metadata
import importlib.util
import json
import math
import platform
import subprocess
from collections.abc import Callable
from typing import Any

import titan_fp8
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, IN_FEATURES, OUT_FEATURES = 512, 1024, 768
NOT_KERNELS = ("aten::_unsafe_view", "aten::detach", "aten::empty", "aten::empty_like", "aten::reshape")


class Trace(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name not in NOT_KERNELS:
            self.kernels += 1
        return func(*args, **(kwargs or {}))


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False, dtype=torch.bfloat16)


def measure(module: nn.Module) -> dict[str, float]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, IN_FEATURES, generator=draw).bfloat16()
    g = torch.randn(ROWS, OUT_FEATURES, generator=draw).bfloat16()
    saved = 0

    def pack(t: Tensor) -> Tensor:
        nonlocal saved
        is_weight = isinstance(t, nn.Parameter) or sorted(t.shape) == sorted((OUT_FEATURES, IN_FEATURES))
        saved += 0 if is_weight else t.nbytes
        return t

    inputs = x.clone().requires_grad_()
    module(inputs).backward(g)  # once to fill caches
    inputs.grad = module.weight.grad = None
    with Trace() as trace, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(inputs)
        y.backward(g)
    found = [y.detach(), inputs.grad, module.weight.grad]
    x64, w64 = x.double().requires_grad_(), module.weight.detach().double().requires_grad_()
    want = nn.functional.linear(x64, w64)
    want.backward(g.double())
    decibels = [sqnr(a, b) for a, b in zip(found, (want.detach(), x64.grad, w64.grad), strict=True)]
    return {
        "kernels": trace.kernels,
        "saved_over_bf16": saved / (2 * ROWS * IN_FEATURES),
        **dict(zip(("y_db", "dx_db", "dw_db"), decibels, strict=True)),
    }


def sqnr(got: Tensor, want: Tensor) -> float:
    noise = (got.double() - want.double()).square().sum().item()
    return 10 * math.log10(want.double().square().sum().item() / noise)


def main() -> None:
    builders: dict[str, Callable[[], nn.Module]] = {"bfloat16": layer}
    for name in titan_fp8.RECIPES:
        builders[f"titan-fp8 {name}"] = lambda name=name: titan_fp8.Float8Linear.from_linear(layer(), name)
    if importlib.util.find_spec("torchao") is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
            config = Float8LinearConfig.from_recipe_name(name)
            builders[f"torchao {name}"] = lambda config=config: convert_to_float8_training(layer(), config=config)
    rows = {name: measure(build()) for name, build in builders.items()}
    print(f"{'layer':28} {'kernels':>8} {'saved':>7} {'y':>7} {'dx':>7} {'dw':>7}   (saved: of bfloat16's; dB)")
    for name, r in rows.items():
        numbers = f"{r['kernels']:8d} {r['saved_over_bf16']:7.2f} {r['y_db']:7.2f} {r['dx_db']:7.2f} {r['dw_db']:7.2f}"
        print(f"{name:28} {numbers}")
    versions = {"torch": torch.__version__}
    if importlib.util.find_spec("torchao") is not None:
        versions["torchao"] = importlib.metadata.version("torchao")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    config = {"rows": ROWS, "in_features": IN_FEATURES, "out_features": OUT_FEATURES}
    print(
        json.dumps(
            {
                "benchmark": "fp8_layer_traces",
                "device": f"cpu {platform.machine()}",
                "versions": versions,
                "commit": commit.stdout.strip(),
                "config": config,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
