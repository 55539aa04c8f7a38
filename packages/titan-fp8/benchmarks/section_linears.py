"""Linear layers, forward and backward, eager, against bfloat16 and torchao; and the bytes they keep for backward."""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import Bench
from titan_fp8 import convert_to_float8, linear

# in features, out features
LLAMA_8B = {"8B wq, wo": (4096, 4096), "8B wk, wv": (4096, 1024), "8B w1, w3": (4096, 14336), "8B w2": (14336, 4096)}
LLAMA_70B = {
    "70B wq, wo": (8192, 8192),
    "70B wk, wv": (8192, 1024),
    "70B w1, w3": (8192, 28672),
    "70B w2": (28672, 8192),
}
RECIPES = ("tensorwise", "rowwise", "rowwise_gw_hp", "blockwise")


SHAPES = {"8b": LLAMA_8B, "70b": LLAMA_70B, "all": LLAMA_8B | LLAMA_70B}


def run(bench: Bench, which: str = "all") -> dict:
    """Milliseconds of each variant, and how many times as fast as bfloat16, at 16384 tokens.

    ``ms`` and ``speedup`` are of eager calls in a row, host time included; ``kernels_ms`` leaves the host out and
    ``host_us`` is its share. Compiled variants of torchao take the compiler's time too, so only for the first shape.
    """
    shapes = {"tiny": (256, 384)} if bench.tiny else SHAPES[which]
    tokens = bench.size(16384, 256)
    result = {}
    for name, (inputs, outputs) in shapes.items():
        x = bench.random(tokens, inputs, requires_grad=True)
        w = (bench.random(outputs, inputs, seed=1) * inputs**-0.5).requires_grad_()
        g = bench.random(tokens, outputs, seed=2)
        variants = {"bf16": F.linear} | {recipe: lambda x, w, r=recipe: linear(x, w, recipe=r) for recipe in RECIPES}
        row: dict[str, dict] = {}
        for label, forward in {**variants, **_torchao(bench, w, compiled=not result)}.items():
            step = _step(forward, x, w, g)
            ms = bench.eager_ms(step)
            times = {"ms": ms, "kernels_ms": bench.median_ms([step]), "host_us": bench.host_us(step)}
            speedup = row["bf16"]["ms"] / ms if row else 1.0
            row[label] = {**times, "speedup": speedup, "saved_bytes": saved_bytes(forward, x, w)}
            print(f"{name} {label}: {ms:.3f} ms, {speedup:.2f} times bf16", flush=True)  # for a run that is ended early
        for recipe in RECIPES:  # would the automatic filter have converted this layer?
            with torch.device("meta"):
                model = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16))
            row[recipe]["filter_converts"] = bool(convert_to_float8(model, recipe, tokens=tokens).converted)
        result[name] = row
    return result


def saved_bytes(forward: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> int:
    """Bytes kept for backward beyond the parameter, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != w.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(x, w)
    del output
    return sum(kept.values())


def _step(
    forward: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, g: torch.Tensor
) -> Callable[[], object]:
    return lambda: torch.autograd.grad(forward(x, w), (x, w), g)


def _torchao(bench: Bench, w: torch.Tensor, compiled: bool) -> dict[str, Callable[..., torch.Tensor]]:
    """Torchao's linear of two recipes, eager and perhaps compiled, where torchao is installed."""
    if importlib.util.find_spec("torchao") is None or bench.device.type != "cuda":
        return {}
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    variants: dict[str, Callable[..., torch.Tensor]] = {}
    for recipe in ("tensorwise", "rowwise"):
        with torch.device("meta"):
            plain = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
        plain.weight = torch.nn.Parameter(w.detach())
        layer = convert_to_float8_training(plain, config=Float8LinearConfig.from_recipe_name(recipe))

        def eager(x, weight, layer=layer):
            return torch.func.functional_call(layer, {"weight": weight}, (x,))

        variants[f"torchao {recipe}, eager"] = eager
        if compiled:
            variants[f"torchao {recipe}, compiled"] = torch.compile(eager)
    return variants
