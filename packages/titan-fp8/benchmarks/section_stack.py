"""A stack of Llama-8B-shaped blocks end to end: tokens per second, memory, and the share of time spent in casts."""

import torch
import torch.nn.functional as F
from measure import Bench
from titan_fp8 import convert_to_float8
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

# Parts of the names of this package's cast kernels, and of the ops where those run on a CPU.
CAST_NAMES = ("cast_", "amax", "titan_fp8::cast")


class Block(nn.Module):
    """Attention and SwiGLU with norms; grouped-query heads of 128."""

    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        h = self.norm1(x)
        q = self.wq(h).view(batch, tokens, self.heads, -1).transpose(1, 2)
        k = self.wk(h).view(batch, tokens, self.kv_heads, -1).transpose(1, 2)
        v = self.wv(h).view(batch, tokens, self.kv_heads, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(attended.transpose(1, 2).reshape(x.shape))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def run(bench: Bench) -> dict:
    """bfloat16 and each recipe, eager: forward, backward and nothing else."""
    layers, batch, tokens = bench.size(8, 1), bench.size(2, 1), bench.size(8192, 128)
    dim, hidden = bench.size(4096, 256), bench.size(14336, 512)
    heads, kv_heads = bench.size(32, 2), bench.size(8, 1)
    result = {}
    for recipe in ("bf16", "tensorwise", "rowwise", "blockwise"):
        torch.manual_seed(0)
        with torch.device(bench.device):
            model = nn.Sequential(*(Block(dim, hidden, heads, kv_heads) for _ in range(layers))).bfloat16()
        if recipe != "bf16":
            convert_to_float8(model, recipe, tokens=batch * tokens, min_speedup=0 if bench.tiny else 1.0)
        x = bench.random(batch, tokens, dim)

        def step(model=model, x=x):
            model(x).square().mean().backward()
            model.zero_grad(set_to_none=True)

        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(bench.device)
        ms = bench.median_ms([step])
        peak = torch.cuda.max_memory_allocated(bench.device) / 2**30 if bench.device.type == "cuda" else 0.0
        result[recipe] = {
            "tokens_per_s": batch * tokens / ms * 1e3,
            "peak_mem_gib": peak,
            "share_in_casts": _share_in_casts(bench, step),
        }
        del model
    for row in result.values():
        row["speedup"] = row["tokens_per_s"] / result["bf16"]["tokens_per_s"]
    return result


def _share_in_casts(bench: Bench, step) -> float:
    on_gpu = bench.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    casts = total = 0.0
    for event in profiled.key_averages():
        time_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        total += time_us
        casts += time_us if any(name in event.key for name in CAST_NAMES) else 0.0
    return casts / total if total else 0.0
