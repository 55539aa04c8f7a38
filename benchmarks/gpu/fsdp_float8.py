"""The float8 path of FSDP2 on one rank: the shard's cast, the transpose of gathered bytes, and whole steps.

Question: with weights gathered in float8, what do a forward and backward of 8B-shaped linear layers cost beside
bfloat16 gathers, and how much of it is the transpose of the gathered codes?

Method: one rank (NCCL or gloo), so nothing travels: what is measured is everything around the transfer. Whole calls,
host time included, and the host's own share.

Output: a row per case; one JSON object on the last line.

    python benchmarks/gpu/fsdp_float8.py --device cuda
    python benchmarks/gpu/fsdp_float8.py --device cpu --tiny
"""

import argparse
import json

import titan_fp8
import torch
import torch.distributed as dist
from timing import host_ms, median_ms
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def layers(dim: int, hidden: int, device: torch.device) -> nn.Sequential:
    """The linear layers of two feed-forwards."""
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in ((dim, hidden), (hidden, dim)) * 2))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dim, hidden, tokens = (128, 256, 64) if arguments.tiny else (4096, 14336, 8192)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = {}
    codes = torch.randint(0, 255, (hidden, dim), device=device, dtype=torch.uint8)
    ms = median_ms(lambda: codes.t().contiguous(), device)
    rows["transpose of one weight's bytes by torch"] = {"ms": ms, "tb_per_s": 2 * codes.numel() / ms / 1e9}
    x = torch.randn(tokens, dim, device=device, dtype=torch.bfloat16)
    for name, recipe, gathered in (
        ("bf16 gather, bf16 products", None, False),
        ("bf16 gather, blockwise products", "blockwise", False),
        ("float8 gather, blockwise products", "blockwise", True),
        ("float8 gather, tensorwise products", "tensorwise", True),
    ):
        model = layers(dim, hidden, device)
        if recipe:
            titan_fp8.convert_to_float8(model, recipe, min_speedup=0)
        if gathered:
            titan_fp8.apply_float8_all_gather(model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)

        def step(model=model):
            model(x).square().mean().backward()
            model.zero_grad(set_to_none=True)

        rows[name] = {"ms": median_ms(step, device, repeats=5, inner=2), "host_ms": host_ms(step, device, 4)}
        del model
    for name, row in rows.items():
        print(f"{name:42} " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    dist.destroy_process_group()
    print(json.dumps({"benchmark": "gpu_fsdp_float8", "device": str(device), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
