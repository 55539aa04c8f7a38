"""Does the device compute what the CPU computes? Every path that has code of its own for CUDA, against a plain reference.

Question: models, attention with and without documents, experts, float8 linear layers and FSDP's float8 gather: how far
is the device from a reference on the CPU, and is that what its number format explains?

Method: same weights and inputs on both sides. A check has a bound that its arithmetic gives, said beside it; the error
is the norm of the difference over the norm of the reference, for values and for every gradient (the worst counts).

Output: a row per check, one JSON object on the last line; exit code 1 if any check is over its bound or raised.

    python benchmarks/gpu/correctness.py --device cuda
    python benchmarks/gpu/correctness.py --device cpu --tiny
"""

import argparse
import copy
import importlib.util
import itertools
import json
import logging.handlers
import os
import sys
import traceback
from collections.abc import Callable, Iterator

import titan_fp8
import torch
import torch.distributed as dist
from torch import Tensor, nn

BF16 = 2.0**-8  # one rounding to bfloat16
# Two results of one float8 product differ by the order of summation and by one rounding of each to bfloat16. Hopper's
# tensor cores keep about 14 bits while they add, so 2^-13 * sqrt(K / 128) more; 4 roundings bound both for K <= 16384.
FLOAT8 = 4 * BF16
FP32 = 1e-5  # a sum of a few thousand float32 terms in another order: sqrt(4096) * 2^-24, times 2 for two products


_SAID = logging.handlers.BufferingHandler(1000)
logging.getLogger("titan_fp8.first_call").addHandler(_SAID)


def _check_that_kernels_ran() -> None:
    """Raise if plain torch took the place of a kernel that is wrong on this device: what was compared was not the kernel."""
    said = [record.getMessage() for record in _SAID.buffer]
    _SAID.flush()
    if said:
        raise RuntimeError("; ".join(said))


def error(got: Tensor, want: Tensor, least: float = 1e-30) -> float:
    """Norm of the difference over the norm of the reference, or over ``least`` where that is larger, in float64."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return float((got - want).norm() / want.norm().clamp_min(least))


def float8_linear(device: torch.device, size: int, recipe: str) -> float:
    """A float8 layer on the device against the same layer's reference casts on the CPU."""
    torch.manual_seed(0)
    plain = titan_fp8.Float8Linear(size, 2 * size, bias=False, dtype=torch.bfloat16, recipe=recipe)
    moved = copy.deepcopy(plain).to(device)
    x, g = torch.randn(256, size).bfloat16(), torch.randn(256, 2 * size).bfloat16()
    found = []
    for layer, where in ((plain, torch.device("cpu")), (moved, device)):
        inputs = x.to(where).requires_grad_()
        out = layer(inputs)
        found.append((out, *torch.autograd.grad(out, (inputs, layer.weight), g.to(where))))
    return max(error(got, want) for want, got in zip(*found, strict=True))


def grouped_experts(device: torch.device, size: int, recipe: str) -> float:
    """Grouped float8 products on the device against the CPU's, with an empty group and uneven ones."""
    torch.manual_seed(0)
    x, w = torch.randn(384, size).bfloat16(), (torch.randn(4, size, 128) * size**-0.5).bfloat16()
    ends = torch.tensor([130, 130, 200, 384], dtype=torch.int32)
    g = torch.randn(384, 128).bfloat16()
    found = []
    for where in (torch.device("cpu"), device):
        a, b = x.to(where).requires_grad_(), w.to(where).requires_grad_()
        out = titan_fp8.grouped_mm(a, b, ends.to(where), recipe)
        found.append((out, *torch.autograd.grad(out, (a, b), g.to(where))))
    return max(error(got, want) for want, got in zip(*found, strict=True))


def few_rows(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Experts ``(E, rows, K, N)`` that get few rows each, of sizes that are no multiples of 128; and a linear of as many rows."""
    experts, rows, inner, outer = shape
    torch.manual_seed(0)
    x, w = torch.randn(rows, inner).to(dtype), (torch.randn(experts, outer, inner) * inner**-0.5).to(dtype)
    ends = torch.tensor(sorted([rows, *torch.randint(rows + 1, (experts - 1,)).tolist()]), dtype=torch.int32)
    g = torch.randn(rows, outer).to(dtype)
    found = []
    for where in (torch.device("cpu"), device):
        a, b = x.to(where).requires_grad_(), w.to(where).requires_grad_()
        out = titan_fp8.grouped_mm(a, b.transpose(-2, -1), ends.to(where))
        one = titan_fp8.linear(a, b[0])
        loss = (out * g.to(where)).sum() + (one * g.to(where)).sum()
        found.append((out, one, *torch.autograd.grad(loss, (a, b))))
    return max(error(got, want) for want, got in zip(*found, strict=True))


def attention(device: torch.device, seq_len: int, packed: bool, latent: bool, dtype: torch.dtype) -> float:
    """Attention of the models, grouped heads or narrow values, against float64 on the CPU."""
    from titan_train.models.common.attention import CausalAttention, SequenceContext
    from titan_train.models.common.packed import packed_boundaries

    torch.manual_seed(0)
    shapes = ((8, 96), (8, 96), (8, 64)) if latent else ((8, 64), (2, 64), (2, 64))
    q, k, v = (torch.randn(2, seq_len, *shape).to(dtype) for shape in shapes)
    cu = torch.tensor([[0, 5, seq_len // 2, seq_len], [0, seq_len - 1, seq_len, seq_len]], dtype=torch.int32)
    found = []
    for where, kind in ((torch.device("cpu"), torch.float64), (device, dtype)):
        boundaries = packed_boundaries(cu.to(where), seq_len) if packed else None
        context = SequenceContext(positions=torch.arange(seq_len, device=where), boundaries=boundaries)
        inputs = [x.to(where, kind).requires_grad_() for x in (q, k, v)]
        out = CausalAttention(8, shapes[1][0], shapes[0][1], value_dim=shapes[2][1])(*inputs, context)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    return max(error(got, want) for want, got in zip(*found, strict=True))


def head_loss(device: torch.device, vocab: int, dtype: torch.dtype) -> float:
    """The chunked cross-entropy of a head with its gradients, against float64 on the CPU."""
    from titan_train.parallel.head_loss import linear_cross_entropy_sum

    torch.manual_seed(0)
    hidden, weight = (torch.randn(2, 150, 64) * 0.3).to(dtype), torch.randn(vocab, 64).to(dtype)
    labels = torch.randint(0, vocab, (2, 150)).masked_fill(torch.rand(2, 150) < 0.2, -100)
    found = []
    for where, kind in ((torch.device("cpu"), torch.float64), (device, dtype)):
        inputs = [x.to(where, kind).requires_grad_() for x in (hidden, weight)]
        loss = linear_cross_entropy_sum(*inputs, labels.to(where), z_loss=1e-4, chunk_tokens=128)
        found.append((loss, *torch.autograd.grad(loss, inputs)))
    return max(error(got, want) for want, got in zip(*found, strict=True))


def model(device: torch.device, name: str) -> float:
    """Loss and every gradient of a shipped model in float32, on the device against the CPU."""
    from titan_train.config.model import ModelConfig
    from titan_train.models import build_model, init_for

    config = ModelConfig(name=name, seq_len=64)
    plain = build_model(config, vocab_size=256, device="cpu")
    init = init_for(plain)
    with torch.no_grad():
        for fqn, parameter in plain.named_parameters():
            init(fqn, parameter, torch.Generator().manual_seed(len(fqn)))
    moved = copy.deepcopy(plain).to(device)
    tokens = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(0))
    found: list[list[Tensor]] = []
    for module, where in ((plain, torch.device("cpu")), (moved, device)):
        batch = tokens.to(where)
        logits = module(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        found.append([loss, *(p.grad for p in module.parameters() if p.grad is not None)])
    # a bias of keys moves all scores of a query alike: its gradient is rounding alone
    least = 1e-3 * max(float(grad.norm()) for grad in found[0][1:])
    return max(error(got, want, least) for want, got in zip(*found, strict=True))


def fsdp_float8(device: torch.device, size: int) -> float:
    """A step whose weights FSDP2 gathers in float8, against the layer that casts the gathered weight."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)).bfloat16()
    x, g = torch.randn(128, size).bfloat16().to(device), torch.randn(128, size).bfloat16().to(device)
    found: list[list[Tensor]] = []
    for gathered in (False, True):
        module = copy.deepcopy(plain).to(device)
        titan_fp8.convert_to_float8(module, "blockwise", min_speedup=0)
        if gathered:
            titan_fp8.apply_float8_all_gather(module)
            fully_shard(module)
        out = module(x)
        out.backward(g)
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        found.append([out, *(grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads)])
    return max(error(got, want) for want, got in zip(*found, strict=True))


def checks(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], float], float, str]]:
    """Name, what computes the error, its bound, and where the bound comes from."""
    size = 128 if tiny else 1024
    for recipe in ("tensorwise", "rowwise", "rowwise_gw_hp", "blockwise"):
        yield f"float8 linear, {recipe}", lambda r=recipe: float8_linear(device, size, r), FLOAT8, "4 bf16 roundings"
    for recipe in ("blockwise", "rowwise"):
        yield f"float8 experts, {recipe}", lambda r=recipe: grouped_experts(device, size, r), FLOAT8, "4 bf16 roundings"
    for shape in (
        (8, 64, 64, 96),
        (8, 64, 96, 64),
        (4, 64, 128, 128),
        (8, 300, 512, 256),
        (16, 300, 128, 256),
        (3, 20, 16, 32),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            label = f"float8 experts of few rows, {'×'.join(map(str, shape))}, {str(dtype).removeprefix('torch.')}"
            yield label, lambda s=shape, d=dtype: few_rows(device, s, d), FLOAT8, "4 bf16 roundings"
    yield "FSDP2 float8 gather", lambda: fsdp_float8(device, size), FLOAT8, "4 bf16 roundings"
    if not importlib.util.find_spec("pydantic") or not importlib.util.find_spec("titan_train"):
        return
    kinds = {torch.bfloat16: ("bf16", 8 * BF16), torch.float32: ("float32", 20 * FP32)}
    for packed, latent, dtype in itertools.product((False, True), (False, True), kinds):
        label = f"attention, {'latent' if latent else 'grouped'}{', documents' if packed else ''}, {kinds[dtype][0]}"
        # scores, weights and the output are rounded once each, gradients twice
        compute = lambda p=packed, m=latent, d=dtype: attention(device, 64 if tiny else 1024, p, m, d)  # noqa: E731
        yield label, compute, kinds[dtype][1], "8 bf16 or 20 float32 roundings"
    for dtype, (name, bound) in kinds.items():
        # logits of order 4 are rounded to 4 units, the softmax and the products once each
        yield (
            f"head loss, {name}",
            lambda d=dtype: head_loss(device, 97 if tiny else 4096, d),
            bound,
            "logits of order 4",
        )
    from titan_train.models import list_models

    for name in [name for name in list_models() if name.endswith("_debug")]:
        # some layers of depth: each adds its own rounding, and the gradient passes them twice
        yield f"{name} in float32", lambda n=name: model(device, n), 20 * FP32, "20 float32 sums"


def main() -> None:
    """Run all checks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows, failed = {}, 0
    for name, compute, bound, why in checks(device, arguments.tiny):
        try:
            found = compute()
            _check_that_kernels_ran()
        except Exception as err:  # the next check may still tell something
            traceback.print_exc()
            rows[name] = {"error": f"{type(err).__name__}: {err}"[:300]}
        else:
            rows[name] = {"error": found, "bound": bound, "ok": found <= bound}
        failed += not rows[name].get("ok", False)
        shown = rows[name]["error"]
        print(
            f"{name:32} {shown if isinstance(shown, str) else f'{shown:.2e}'}  at most {bound:.1e} ({why})", flush=True
        )
    dist.destroy_process_group()
    print(json.dumps({"benchmark": "gpu_correctness", "device": arguments.device, "failed": failed, "checks": rows}))
    sys.exit(int(failed > 0))


if __name__ == "__main__":
    main()
