"""grouped_mm is the loop of linears, for any groups, without waiting for the device."""

from typing import Any

import pytest
import titan_fp8
import torch
from torch.utils._python_dispatch import TorchDispatchMode

K, N = 72, 56
GROUPS = {
    "aligned": [128, 256, 128],
    "unaligned": [1, 77, 130],
    "skewed": [300, 1, 3],
    "empty": [0, 64, 0, 5, 0],
    "all_empty": [0, 0],
}


def draw(counts: list[int], extra: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = sum(counts) + extra
    x = torch.randn(rows, K, generator=generator, dtype=torch.bfloat16)
    w = torch.randn(len(counts), K, N, generator=generator, dtype=torch.bfloat16) * 0.1
    g = torch.randn(rows, N, generator=generator, dtype=torch.bfloat16)
    return x, w, torch.tensor(counts).cumsum(0, dtype=torch.int32), g


def loop(x: torch.Tensor, w: torch.Tensor, counts: list[int], recipe: str) -> torch.Tensor:
    outs, start = [], 0
    for expert, count in enumerate(counts):
        rows = x[start : start + count]
        outs.append(titan_fp8.linear(rows, w[expert].t(), None, recipe) if count else rows @ w[expert])
        start += count
    return torch.cat(outs)


def run(fn: Any, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = fn(x, w)
    y.backward(g)
    return [y.detach(), x.grad, w.grad]


def loop_in_float64(x: torch.Tensor, w: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.cat([rows @ w[expert] for expert, rows in enumerate(x.split(counts))])


def two_orders_of_one_sum(value: torch.Tensor, magnitude: torch.Tensor, length: int) -> torch.Tensor:
    """How far two bfloat16 results of the same products may be apart, whatever order a processor adds them in.

    A float32 sum of n products is within n * 2^-24 of the exact one, relative to the sum of magnitudes (Higham, Accuracy
    and Stability, section 3.1). Rounding a value to 4 significant bits makes each magnitude at most (1 + 2^-4)^2 larger,
    and padding makes n at most 128 longer. One rounding to bfloat16 follows: two neighbouring sums may round to
    neighbouring values, 2^-7 of the value apart.
    """
    return 2 * (length + 128) * 2**-24 * (1 + 2**-4) ** 2 * magnitude + 2**-7 * value.double().abs()


@pytest.mark.parametrize("groups", list(GROUPS))
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "rowwise_gw_hp", "mxfp8"])
def test_grouped_mm_equals_the_loop_of_linears(recipe: str, groups: str) -> None:
    counts = GROUPS[groups]
    x, w, offs, g = draw(counts)
    got = run(lambda x, w: titan_fp8.grouped_mm(x, w, offs, recipe), x, w, g)
    want = run(lambda x, w: loop(x, w, counts, recipe), x, w, g)
    magnitudes = run(lambda x, w: loop_in_float64(x, w, counts), x.double().abs(), w.double().abs(), g.double().abs())
    for a, b, magnitude, length in zip(got, want, magnitudes, (K, N, max(counts)), strict=True):
        assert a.shape == b.shape
        assert ((a - b).abs().double() <= two_orders_of_one_sum(b, magnitude, length)).all()


def test_tensorwise_scales_all_experts_alike() -> None:
    x, w, offs, g = draw(GROUPS["unaligned"])
    got = run(lambda x, w: titan_fp8.grouped_mm(x, w, offs, "tensorwise"), x, w, g)
    want = run(lambda x, w: torch.nn.functional.grouped_mm(x, w, offs=offs), x, w, g)
    for a, b in zip(got, want, strict=True):
        error = (a.double() - b.double()).square().sum() / b.double().square().sum()
        assert error < 10**-2.2  # e4m3 and e5m2 operands: 24 dB for normal data, as for one linear layer


def test_weights_stored_transposed_give_the_same_bits() -> None:
    x, w, offs, g = draw(GROUPS["unaligned"])
    for recipe in ("blockwise", "rowwise"):
        stored = w.mT.contiguous().requires_grad_()
        y = titan_fp8.grouped_mm(x, stored.mT, offs, recipe)
        y.backward(g)
        want = run(lambda x, w, recipe=recipe: titan_fp8.grouped_mm(x, w, offs, recipe), x, w, g)
        assert torch.equal(y.detach(), want[0])
        assert torch.equal(stored.grad.mT, want[2])


def test_rows_beyond_the_last_group_are_zero_both_ways() -> None:
    x, w, offs, g = draw([5, 9], extra=7)
    x[14:] = float("nan")
    y, dx, dw = run(lambda x, w: titan_fp8.grouped_mm(x, w, offs), x, w, g)
    short = run(lambda x, w: titan_fp8.grouped_mm(x, w, offs), x[:14], w, g[:14])
    assert torch.equal(y[14:], torch.zeros_like(y[14:]))
    assert torch.equal(dx[14:], torch.zeros_like(dx[14:]))
    assert torch.equal(y[:14], short[0])  # the same products of the same shapes
    # The weight gradient reads its operands with another stride, so a processor may add in another order.
    magnitude = x[:14].double().abs().split([5, 9]), g[:14].double().abs().split([5, 9])
    magnitude = torch.stack([a.t() @ b for a, b in zip(*magnitude, strict=True)])
    assert ((dw - short[2]).abs().double() <= two_orders_of_one_sum(short[2], magnitude, 9)).all()


@pytest.mark.parametrize("recipe", list(titan_fp8.RECIPES))
def test_rows_of_no_expert_may_hold_anything(recipe: str) -> None:
    x, w, offs, g = draw([5, 9], extra=6)
    full_x, full_g = x.clone(), g.clone()
    full_x[14:] = 1e30
    full_g[14:] = -1e30
    want = run(lambda x, w: titan_fp8.grouped_mm(x, w, offs, recipe), x, w, g)
    got = run(lambda x, w: titan_fp8.grouped_mm(x, w, offs, recipe), full_x, w, full_g)
    assert all(torch.equal(a[:14], b[:14]) for a, b in zip(got, want, strict=True))


def test_weight_gradients_in_high_precision_take_transposed_rows() -> None:
    x, w, offs, g = (t.float() if t.is_floating_point() else t for t in draw([5, 8]))
    for columns in (K, 64):  # with padding, and without
        rows, weight = x[:, :columns].contiguous(), w[:, :columns].contiguous()
        want = run(lambda x, w: titan_fp8.grouped_mm(x, w, offs, "rowwise_gw_hp"), rows, weight, g)
        stored, leaf = rows.t().contiguous().requires_grad_(), weight.clone().requires_grad_()
        y = titan_fp8.grouped_mm(stored.t(), leaf, offs, "rowwise_gw_hp")
        y.backward(g.t().contiguous().t())
        assert torch.equal(y, want[0])
        assert torch.equal(stored.grad.t(), want[1])
        assert torch.allclose(leaf.grad, want[2], atol=1e-5)


class NoHostReads(TorchDispatchMode):
    """Fails on any operation that hands a value of a tensor to Python, or has a shape that depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")
        name = func._schema.name.split("::")[1]
        assert not any(name.startswith(f) for f in forbidden), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", list(titan_fp8.RECIPES))
def test_offsets_are_never_read_on_the_host(recipe: str) -> None:
    x, w, offs, g = draw(GROUPS["unaligned"])
    with NoHostReads():
        run(lambda x, w: titan_fp8.grouped_mm(x, w, offs, recipe), x, w, g)
    with torch.device("meta"):  # a meta tensor has no values: reading one would raise
        y = titan_fp8.grouped_mm(x.to("meta").requires_grad_(), w.to("meta").requires_grad_(), offs.to("meta"), recipe)
        y.sum().backward()
    assert y.shape == (208, N)


def test_grouped_mm_compiles_whole_and_gives_the_same_bits() -> None:
    x, w, offs, g = draw(GROUPS["unaligned"])
    compiled = torch.compile(titan_fp8.grouped_mm, fullgraph=True, backend="aot_eager")
    got = run(lambda x, w: compiled(x, w, offs, "blockwise"), x, w, g)
    want = run(lambda x, w: titan_fp8.grouped_mm(x, w, offs, "blockwise"), x, w, g)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("recipe", list(titan_fp8.RECIPES))
def test_saved_tensors_may_come_back_in_another_memory_order(recipe: str) -> None:
    def packed_row_by_row(saved: torch.Tensor) -> torch.Tensor:  # as save_on_cpu(pin_memory=True) does
        return torch.empty(saved.size(), dtype=saved.dtype).copy_(saved)

    x, w, offs, g = draw(GROUPS["unaligned"])

    def offloaded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(packed_row_by_row, torch.clone):
            return titan_fp8.grouped_mm(x, w, offs, recipe)

    want = run(lambda x, w: titan_fp8.grouped_mm(x, w, offs, recipe), x, w, g)
    assert all(map(torch.equal, run(offloaded, x, w, g), want))


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise_gw_hp"])
def test_a_deferred_weight_gradient_is_the_same_gradient(recipe: str) -> None:
    x, w, offs, g = draw(GROUPS["unaligned"])
    want = run(lambda x, w: titan_fp8.grouped_mm(x, w, offs, recipe), x, w, g)
    stored = torch.nn.Parameter(w.mT.contiguous())
    notes: list[Any] = []
    x = x.clone().requires_grad_()
    y = titan_fp8.grouped_mm_deferred(
        1 * x,  # as the layer before makes it: with a graph
        stored.mT,
        offs,
        recipe,
        anchor=torch.zeros((), requires_grad=True),
        parameter=stored,
        defer=lambda *note: notes.append(note),
        to_parameter=lambda dw: dw.mT,
    )
    y.backward(g)
    assert stored.grad is None
    ((parameter, compute, *given),) = notes
    assert parameter is stored
    assert torch.equal(y.detach(), want[0])
    assert torch.equal(x.grad, want[1])
    gradient = compute(*given)
    assert not gradient.requires_grad
    assert torch.equal(gradient.mT, want[2])


def test_experts_that_call_a_method_or_a_module_take_float8() -> None:
    x, w, offs, _ = draw(GROUPS["aligned"])

    class Experts:
        def _grouped_mm(self, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.grouped_mm(A, B_t, offs=offs)

    class Float8Experts(titan_fp8.Float8GroupedExpertsMixin, Experts):
        recipe = "rowwise"

    want = titan_fp8.grouped_mm(x, w, offs, "rowwise")
    assert torch.equal(Float8Experts()._grouped_mm(x, w, offs), want)
    assert torch.equal(titan_fp8.Float8GroupedMM("rowwise")(x, w, offs=offs), want)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, w, offs, _ = draw(GROUPS["aligned"])
    with pytest.raises(ValueError, match=r"pass w\.mT"):
        titan_fp8.grouped_mm(x, w.mT, offs)
    with pytest.raises(ValueError, match=r"int32 \[3\]"):
        titan_fp8.grouped_mm(x, w, offs.long())
