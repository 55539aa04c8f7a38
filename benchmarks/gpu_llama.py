"""Llama-3.1-8B-shaped training on one GPU: bfloat16 and float8, compiled and not, beside a hand-written loop.

Question: tokens/s, MFU and peak memory of titan-train's model under its own build, and those of the loop a person would
write with torch's `fully_shard` on one device (and torchao's float8, where torchao is installed), same shapes, same
optimizer, same random tokens, in one process, in turn.

Method: blocks of the 8B shape (width 4096, 32 heads, 8 key-value heads, 14336), as many as ``--layers``, so that
parameters, gradients and AdamW's moments in float32 fit one device beside the activations. Each variant warms up, then
``--steps`` steps are timed with CUDA events; the order of variants is repeated ``--rounds`` times and medians are taken.
MFU counts model FLOPs only, against the bf16 rate that the same call measures on random 8192-cubed products. The share
spent in casts is the CUDA time of titan-fp8's cast kernels in a profile of one step.

Output: a row of a table and one JSON object with all rows so far, after each variant. ``--check`` runs the whole script on the
CPU with tiny shapes.

    python benchmarks/gpu_llama.py --layers 12 --seq-len 8192
"""

import argparse
import gc
import importlib.util
import json
import statistics
import time
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.nn.functional as F
from titan_mesh import build
from titan_train.config import parse_config
from titan_train.data import TensorBatch
from titan_train.models import Llama, LlamaArgs, flops_per_token, init_for
from titan_train.parallel.apply import build_parallel_model
from titan_train.parallel.layout.degrees import build_layout, resolve_mode


class Titan:
    """titan-train's build of the model, stepped without its data path."""

    def __init__(self, shape, float8, compiled, device):
        config = parse_config(
            {
                "model": {"name": "llama3_8b", "seq_len": shape.seq_len, "args": shape.args},
                "train": {"dtype": "bf16", "global_batch": shape.batch},
                "float8": {"recipe": float8 or "none", "min_speedup": 1.0},
                "compile": {"enabled": compiled},
                "activations": {"checkpoint": shape.checkpoint},
                "launch": {"device": device.type},
            }
        )
        layout = build_layout(config, 1)
        mode = resolve_mode(config.parallel, layout, dtype="bf16")
        mesh = build(layout, device_type=device.type)
        self.parallel = build_parallel_model(
            config, layout=layout, mode=mode, mesh=mesh, schedule=None, vocab_size=shape.vocab, device=device
        )
        (self.model,) = self.parallel.parts
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, tokens, labels):
        loss = self.parallel.loss_sum(TensorBatch((tokens,), {}, labels, 0)) / labels.numel()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class HandWritten:
    """torch's own pieces: fully_shard with mixed precision, per-block compile, torchao's float8 linears."""

    def __init__(self, shape, float8, compiled, device):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.model = Llama(shape.llama()).to(device)
        init = init_for(self.model)
        for name, parameter in self.model.named_parameters():
            init(name, parameter.data, torch.Generator(device).manual_seed(0))
        if float8:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name(float8)
            convert_to_float8_training(self.model, config=config, module_filter_fn=lambda _, fqn: "lm_head" not in fqn)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.layers.values():
            if compiled:
                block.compile(fullgraph=True)
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, tokens, labels):
        F.cross_entropy(self.model(tokens).flatten(0, 1).float(), labels.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Shape:
    """What is trained."""

    def __init__(self, arguments):
        self.vocab = 512 if arguments.check else 128_256
        self.batch = arguments.batch
        self.seq_len = 64 if arguments.check else arguments.seq_len
        self.checkpoint = arguments.checkpoint
        self.args = {"num_layers": arguments.layers}
        if arguments.check:
            self.args |= {"dim": 128, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 256, "num_layers": 2}

    def llama(self):
        fields = {"dim": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336, "rope_factor": 8.0} | self.args
        return LlamaArgs(vocab_size=self.vocab, **fields)


def timed(device, work):
    """Seconds of ``work`` on the device."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def matmul_rate(device, n):
    """FLOP/s of an n-cubed bf16 product on random data, median of ten after three."""
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = [timed(device, lambda: a @ b) for _ in range(13)]
    return 2 * n**3 / statistics.median(times[3:])


def cast_share(variant, tokens, labels, rows=0):
    """CUDA time of casts over all CUDA time, in one step; prints the ``rows`` longest kernels."""
    with torch.profiler.profile() as profile:
        variant.step(tokens, labels)
    total = casts = 0.0
    kernels: dict[str, list[float]] = {}
    for event in profile.events():
        # kernels and copies alone: an operator's or an annotation's device time is that of its kernels once more
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        time_us = event.self_device_time_total
        total += time_us
        casts += time_us * any(word in event.name.lower() for word in ("cast", "amax"))
        kernels.setdefault(event.name, []).append(time_us)
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:rows]:
        print(f"    {sum(times) / 1e3:8.2f} ms  {len(times):4} of  {name[:100]}")
    if rows:
        print(f"    {total / 1e3:8.2f} ms of all kernels")
    return casts / total if total else 0.0


def measure(variant, found, steps, tokens, labels, rows=0):
    """Warm a variant up and add its seconds a step, its peak memory and its casts to ``found``."""
    device = tokens.device
    for _ in range(2):
        variant.step(tokens, labels)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        found["s"].append(timed(device, lambda: variant.step(tokens, labels)))
    if device.type == "cuda":
        found["gib"] = torch.cuda.max_memory_allocated() / 2**30
    found["casts"] = cast_share(variant, tokens, labels, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="blocks of the 8B shape")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--checkpoint", default="none", help="activation checkpointing of titan-train's variants")
    parser.add_argument("--build", choices=["eager", "compiled", "both"], default="both")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="these rows, by the whole name")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="show each variant's N longest kernels")
    parser.add_argument("--check", action="store_true", help="run everything on the CPU, tiny")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.check else "cuda")
    shape = Shape(arguments)
    store = dist.HashStore()
    dist.init_process_group("gloo" if arguments.check else "nccl", store=store, rank=0, world_size=1)
    ceiling = matmul_rate(device, 256 if arguments.check else 8192)
    flops = flops_per_token(Llama(shape.llama()).to("meta"), shape.seq_len)
    count = shape.batch * shape.seq_len
    tokens, labels = (torch.randint(shape.vocab, (shape.batch, shape.seq_len), device=device) for _ in range(2))

    variants = {"titan bf16": (Titan, None, False), "hand-written bf16": (HandWritten, None, False)}
    variants |= {"titan blockwise": (Titan, "blockwise", False), "titan tensorwise": (Titan, "tensorwise", False)}
    has_torchao = importlib.util.find_spec("torchao") is not None
    if has_torchao:
        variants |= {"torchao tensorwise": (HandWritten, "tensorwise", False)}
    if not arguments.check:  # inductor needs a minute per variant
        compiled = {f"{name}, compiled": (kind, recipe, True) for name, (kind, recipe, _) in variants.items()}
        variants = {"eager": variants, "compiled": compiled, "both": variants | compiled}[arguments.build]
    if arguments.only:
        variants = {name: variants[name] for name in arguments.only}
    print(
        f"bf16 ceiling {ceiling / 1e12:.1f} TFLOP/s; {shape.llama()}; torchao {'yes' if has_torchao else 'not installed'}"
    )
    print(f"{'variant':<32}{'tokens/s':>10}{'spread':>16}{'MFU':>8}{'peak GiB':>10}{'casts':>8}", flush=True)
    found = {name: {"s": [], "gib": 0.0, "casts": 0.0} for name in variants}
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    rows = {}
    for _ in range(arguments.rounds):
        for name, (kind, recipe, compiled) in variants.items():
            measured = found[name]
            measure(kind(shape, recipe, compiled, device), measured, arguments.steps, tokens, labels, arguments.kernels)
            seconds = statistics.median(measured["s"])
            rows[name] = {
                "tokens_per_s": count / seconds,
                "mfu": flops * count / seconds / ceiling,
                "peak_gib": measured["gib"],
                "cast_share": measured["casts"],
            }
            spread = f"{count / max(measured['s']):,.0f}-{count / min(measured['s']):,.0f}"
            print(
                f"{name:<32}{rows[name]['tokens_per_s']:>10,.0f}{spread:>16}{rows[name]['mfu']:>8.1%}"
                f"{measured['gib']:>10.1f}{measured['casts']:>8.1%}"
            )
            # after each variant: a run that is ended early keeps what it measured
            record = {"benchmark": "gpu_llama", "device": device_name, "torch": version("torch"), "variants": rows}
            print(json.dumps(record), flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
