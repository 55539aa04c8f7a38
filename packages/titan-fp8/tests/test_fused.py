"""RMSNorm and SwiGLU, alone and in one pass with the cast: the unfused layers' bits, and float64's values."""

import pytest
import titan_fp8
import torch
from titan_fp8 import WeightCache
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

RECIPES = ("blockwise", "tensorwise", "rowwise_gw_hp", "mxfp8")
EPS = 1e-5


def _leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def _run(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients."""
    seeds = [torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype) for out in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, seeds)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(2, 64, 128), (3, 7, 80)], ids=str)
def test_norm_and_cast_in_one_pass_gives_the_bits_of_the_two(recipe: str, shape: tuple[int, ...]) -> None:
    x, gain, *weights = leaves = _leaves(shape, shape[-1:], (96, shape[-1]), (48, shape[-1]))
    fused = _run(titan_fp8.norm_linears(x, gain, EPS, weights, recipe=recipe), leaves)
    apart = _run(titan_fp8.linears(titan_fp8.rms_norm(x, gain, EPS), weights, recipe=recipe), leaves)
    assert all(torch.equal(left, right) for left, right in zip(fused, apart, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(2, 64, 128), (3, 7, 80)], ids=str)
def test_swiglu_and_cast_in_one_pass_gives_the_bits_of_the_two(recipe: str, shape: tuple[int, ...]) -> None:
    gate, up, w, bias = leaves = _leaves(shape, shape, (96, shape[-1]), (96,))
    fused = _run((titan_fp8.swiglu_linear(gate, up, w, bias, recipe),), leaves)
    apart = _run((titan_fp8.linear(titan_fp8.swiglu(gate, up), w, bias, recipe),), leaves)
    assert all(torch.equal(left, right) for left, right in zip(fused, apart, strict=True))


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_blockwise_layers_never_make_the_normalized_input_or_the_product() -> None:
    x, gain, w = _leaves((64, 128), (128,), (256, 128))
    with torch.no_grad(), _Ops() as seen:
        titan_fp8.norm_linears(x, gain, EPS, [w])
        titan_fp8.swiglu_linear(x, x, w)
    assert {"titan_fp8::rmsnorm_cast_block", "titan_fp8::swiglu_cast_block"} <= set(seen.names)
    assert not {"titan_fp8::rmsnorm", "titan_fp8::swiglu", "titan_fp8::cast_block", "titan_fp8::cast_block_dual"} & set(
        seen.names
    )


def test_kept_casts_of_weights_are_used() -> None:
    x, gain, w = leaves = _leaves((64, 128), (128,), (256, 128))
    cache = WeightCache()
    with cache, _Ops() as seen:
        first = _run(titan_fp8.norm_linears(x, gain, EPS, [w], caches=[cache]), leaves)
        second = _run(titan_fp8.norm_linears(x, gain, EPS, [w], caches=[cache]), leaves)
    assert seen.names.count("titan_fp8::cast_weight_block") == 1
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


def test_only_wanted_gradients_are_computed() -> None:
    x, gain, w = _leaves((64, 128), (128,), (256, 128))
    gain.requires_grad_(False)
    w.requires_grad_(False)
    (y,) = titan_fp8.norm_linears(x, gain, EPS, [w])
    y.sum().backward()
    assert x.grad is not None
    assert gain.grad is None
    assert w.grad is None


# A float32 sum of n terms is within n * 2^-24 of their magnitudes' sum; bfloat16 results are then rounded once, 2^-9.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 300 * 2.0**-24), (torch.bfloat16, 2.0**-8)], ids=str)
def test_norm_and_swiglu_and_their_gradients_are_those_of_float64(dtype: torch.dtype, bound: float) -> None:
    x, gain, gate, up = leaves = _leaves((5, 33, 147), (147,), (5, 33, 147), (5, 33, 147), dtype=dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got = _run((titan_fp8.rms_norm(x, gain, EPS),), leaves[:2]) + _run((titan_fp8.swiglu(gate, up),), leaves[2:])
    want = _run((F.rms_norm(exact[0], (147,), exact[1], EPS),), exact[:2])
    want += _run((F.silu(exact[2]) * exact[3],), exact[2:])
    for ours, theirs in zip(got, want, strict=True):
        # of the largest value: a sum over rows has terms of either sign
        assert (ours.double() - theirs).abs().max() <= bound * theirs.abs().max()


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_compiled_layers_give_the_same_bits(recipe: str) -> None:
    leaves = _leaves((64, 128), (128,), (128, 128), (96, 128))

    def block(x: Tensor, gain: Tensor, w: Tensor, w2: Tensor) -> Tensor:
        (h,) = titan_fp8.norm_linears(x, gain, EPS, [w], recipe=recipe)
        return titan_fp8.swiglu_linear(h, h, w2, recipe=recipe)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got, want = _run((compiled(*leaves),), leaves), _run((block(*leaves),), leaves)
    assert all(torch.equal(left, right) for left, right in zip(got, want, strict=True))


def test_operands_that_do_not_fit_are_refused() -> None:
    x, gain, w = _leaves((4, 128), (64,), (256, 128))
    with pytest.raises(ValueError, match=r"weight has shape \(64,\), expected \(128,\)"):
        titan_fp8.norm_linears(x, gain, EPS, [w])
    with pytest.raises(ValueError, match="multiplied element by element"):
        titan_fp8.swiglu_linear(x, x.float(), w)
