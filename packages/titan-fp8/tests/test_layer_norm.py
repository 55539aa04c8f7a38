"""LayerNorm and GELU, alone and in one pass with the cast: the unfused layers' bits, and float64's values."""

import pytest
import titan_fp8
import torch
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
    seeds = [torch.linspace(-1, 1, out.numel()).view(out.shape).bfloat16().to(out.dtype) for out in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, seeds)]


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(2, 64, 128), (3, 7, 80)], ids=str)
@pytest.mark.parametrize("modulated", [False, True])
def test_norm_and_cast_in_one_pass_gives_the_bits_of_the_two(
    recipe: str, shape: tuple[int, ...], modulated: bool
) -> None:
    vector = (shape[0], 1, shape[2]) if modulated else shape[-1:]
    x, gain, shift, *weights = leaves = _leaves(shape, vector, vector, (96, shape[-1]), (48, shape[-1]))
    fused = _run(titan_fp8.layer_norm_linears(x, gain, shift, EPS, weights, recipe=recipe), leaves)
    apart = _run(titan_fp8.linears(titan_fp8.layer_norm(x, gain, shift, EPS), weights, recipe=recipe), leaves)
    assert _equal(fused, apart)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(2, 64, 128), (3, 7, 80)], ids=str)
def test_gelu_and_cast_in_one_pass_gives_the_bits_of_the_two(recipe: str, shape: tuple[int, ...]) -> None:
    x, w, bias = leaves = _leaves(shape, (96, shape[-1]), (96,))
    fused = _run((titan_fp8.gelu_linear(x, w, bias, recipe),), leaves)
    assert _equal(fused, _run((titan_fp8.linear(titan_fp8.gelu(x), w, bias, recipe),), leaves))


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_blockwise_layers_never_make_the_normalized_input_or_the_activation() -> None:
    x, gain, w = _leaves((64, 128), (128,), (256, 128))
    with torch.no_grad(), _Ops() as seen:
        titan_fp8.layer_norm_linears(x, gain, gain, EPS, [w])
        titan_fp8.gelu_linear(x, w)
    assert {"titan_fp8::layernorm_cast_block", "titan_fp8::gelu_cast_block"} <= set(seen.names)
    assert not {"titan_fp8::cast_block", "titan_fp8::cast_block_dual", "aten::native_layer_norm", "aten::gelu"} & set(
        seen.names
    )


def test_only_wanted_gradients_are_computed() -> None:
    x, gain, w = _leaves((64, 128), (128,), (256, 128))
    x.requires_grad_(False)
    gain.requires_grad_(False)
    (y,) = titan_fp8.layer_norm_linears(x, gain, gain, EPS, [w])
    titan_fp8.gelu_linear(y, torch.ones(16, 256, dtype=torch.bfloat16)).sum().backward()
    assert x.grad is None
    assert gain.grad is None
    assert w.grad is not None


@pytest.mark.parametrize("modulated", [False, True])
# A float32 sum of n terms is within n * 2^-24 of their magnitudes' sum; bfloat16 results are then rounded once, 2^-9.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 300 * 2.0**-24), (torch.bfloat16, 2.0**-8)], ids=str)
def test_norm_and_gelu_and_their_gradients_are_those_of_float64(
    dtype: torch.dtype, bound: float, modulated: bool
) -> None:
    vector = (5, 1, 147) if modulated else (147,)
    x, gain, shift, h = leaves = _leaves((5, 33, 147), vector, vector, (5, 33, 147), dtype=dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got = _run((titan_fp8.layer_norm(x, gain, shift, EPS),), leaves[:3]) + _run((titan_fp8.gelu(h),), leaves[3:])
    want = _run((F.layer_norm(exact[0], (147,), eps=EPS) * exact[1] + exact[2],), exact[:3])
    want += _run((F.gelu(exact[3], approximate="tanh"),), exact[3:])
    for ours, theirs in zip(got, want, strict=True):
        # of the largest value: a sum over rows has terms of either sign
        assert (ours.double() - theirs).abs().max() <= bound * theirs.abs().max()


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_compiled_layers_give_the_same_bits(recipe: str) -> None:
    leaves = _leaves((64, 128), (128,), (128, 128), (96, 128))

    def block(x: Tensor, gain: Tensor, w: Tensor, w2: Tensor) -> Tensor:
        (h,) = titan_fp8.layer_norm_linears(x, gain, gain, EPS, [w], recipe=recipe)
        return titan_fp8.gelu_linear(h, w2, recipe=recipe)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert _equal(_run((compiled(*leaves),), leaves), _run((block(*leaves),), leaves))


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.parametrize("modulated", [False, True])
def test_a_second_derivative_is_refused_rather_than_wrong(modulated: bool, recipe: str) -> None:
    vector = (2, 1, 128) if modulated else (128,)
    x, gain, w = _leaves((2, 5, 128), vector, (64, 128), dtype=torch.float32)
    for y in (
        titan_fp8.layer_norm(x, gain, gain, EPS),
        *titan_fp8.layer_norm_linears(x, gain, gain, EPS, [w], recipe=recipe),
    ):
        (grad,) = torch.autograd.grad(y.square().sum(), gain, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(grad.square().sum() + x.sum(), x)
        (grad,) = torch.autograd.grad(y.sum(), gain, create_graph=True)  # y's gradient depends on nothing
        with pytest.raises(RuntimeError, match="differentiable once"):
            (grad.square().sum() + x.sum()).backward()


def test_a_second_derivative_of_a_rotation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from titan_fp8.kernels.triton import rotation

    monkeypatch.setattr(rotation, "_launch", lambda x, *_, **__: (2 * x).detach())
    x = torch.randn(1, 3, 2, 4, requires_grad=True)
    angle = torch.zeros(1, 3, 1, 2)
    (grad,) = torch.autograd.grad(titan_fp8.rotate(x, angle, angle).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(grad.square().sum() + x.sum(), x)


def test_compiled_layer_norm_is_one_graph_with_the_same_bits() -> None:
    leaves = _leaves((2, 5, 128), (2, 1, 128), (2, 1, 128))
    compiled = torch.compile(titan_fp8.layer_norm, fullgraph=True, backend="aot_eager")
    assert _equal(_run((compiled(*leaves, EPS),), leaves), _run((titan_fp8.layer_norm(*leaves, EPS),), leaves))


@pytest.mark.parametrize("modulated", [False, True])
def test_every_line_of_the_gpu_path_runs_on_fake_tensors(modulated: bool) -> None:
    from titan_fp8.layers.layer_norm import _layer_norm_backward
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, grad = (torch.empty(12, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        gain = torch.empty(3 if modulated else 1, 128, dtype=torch.float32, device="cuda")
        mean, rstd = (torch.empty(12, device="cuda") for _ in range(2))
        dx, dgain, dshift = _layer_norm_backward(grad, x, gain, mean, rstd)
        assert (dx.shape, dx.dtype, dgain.shape, dgain.dtype) == (x.shape, x.dtype, gain.shape, gain.dtype)
        assert dshift.shape == gain.shape


def test_operands_that_do_not_fit_are_refused() -> None:
    x, gain, w = _leaves((2, 4, 128), (64,), (256, 128))
    for call in (titan_fp8.layer_norm_linears, lambda *a: titan_fp8.layer_norm(*a[:4])):
        with pytest.raises(
            ValueError, match=r"gain has shape \(64,\); expected \(128,\) or, one per sample, \(2, 1, 128\)"
        ):
            call(x, gain, gain, EPS, [w])
    good = torch.ones(128)
    with pytest.raises(ValueError, match=r"shift has shape \(4, 1, 128\)"):
        titan_fp8.layer_norm(x, good, torch.ones(4, 1, 128), EPS)
