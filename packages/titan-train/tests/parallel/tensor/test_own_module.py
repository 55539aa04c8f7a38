"""A user's own module cut by patterns of names, with and without regions."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from titan_fsdp import materialize
from titan_testing import run_ranks
from titan_train.parallel.tensor.apply import apply_tensor_parallel, compute_buffers
from titan_train.parallel.tensor.boundaries import norm_over_ranks
from titan_train.parallel.tensor.checks import check_between, check_tensor_parallel
from titan_train.parallel.tensor.plan import plan_tensor_parallel
from titan_train.parallel.tensor.styles import merge_tables
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.ln_2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.down(F.relu(self.up(self.ln_2(x))))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.num_kv_heads = heads // 2
        self.q = nn.Linear(dim, dim)
        self.kv = nn.ModuleList([nn.Linear(dim, dim // 2) for _ in range(2)])
        self.out = nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.ones(dim // heads))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1)) * self.scale
        k, v = (w(x).unflatten(-1, (self.num_kv_heads, -1)) for w in self.kv)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2)
        )


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 16, padding_idx=30)
        self.wpe = nn.Embedding(8, 16)
        self.blocks = nn.ModuleList([Block(16, 4) for _ in range(2)])
        self.head = nn.Linear(16, 50, bias=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Scaled(nn.Module):
    """Attention that keeps what it divides by in a buffer, and an order of its own."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.width, self.num_heads = width, num_heads
        self.qkv, self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(3)), nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor((width // num_heads) ** -0.5), persistent=False)
        self.again = torch.tensor((width // num_heads) ** -0.5)
        self.register_buffer("order", torch.randperm(64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w in self.qkv)
        return self.out(((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(-2))


def test_buffers_are_those_of_the_whole_model() -> None:
    with torch.device("meta"):
        whole = nn.Sequential(Scaled(16, 4))
    cut = copy.deepcopy(whole)
    compute_buffers(cut, 3, torch.device("cpu"))
    cut[0].num_heads = 2  # as tensor parallelism over two ranks leaves it
    for model in (whole, cut):
        materialize(model, "cpu", init=lambda _fqn, tensor, _generator: tensor.zero_(), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(whole.buffers(), cut.buffers(), strict=True))
    assert float(cut[0].scale) == float(cut[0].again) == 0.5


# "kv" is a list, so nothing beside its members counts heads: cut in plain rows, which are whole heads at tp = 2
PLAN = {
    "wte": "embedding",
    "wpe": "positions",
    "blocks.*.ln_?": "replicated",
    "blocks.*.attn": "region",
    "blocks.*.attn.q": "heads",
    "blocks.*.attn.kv.*": "colwise",
    "blocks.*.attn.out": "rowwise",
    "blocks.*.attn.scale": "replicated",
    "**.up": "colwise",
    "**.down": "rowwise",
    "head": "head",
}
WITHOUT_REGIONS = {pattern: style for pattern, style in PLAN.items() if style != "region" and "scale" not in pattern}
# what is left is whole on every rank; a wide pattern also matches the names of parameters
WITH_THE_REST = {pattern: style for pattern, style in PLAN.items() if style != "replicated"} | {"**": "replicated"}


def errors(plan: dict[str, str], sequence_parallel: bool, async_tp: bool) -> float:
    torch.manual_seed(0)
    whole = Own().double()
    if "region" not in plan.values():
        for block in whole.blocks:
            del block.attn.scale
            block.attn.scale = 1.0
    tokens = torch.randint(0, 50, (2, 8))
    tokens[0, :2] = 30
    model = copy.deepcopy(whole)
    table = merge_tables(model, {}, plan)
    check_tensor_parallel(model, 2, table=table, seq_len_local=8, sequence_parallel=sequence_parallel)
    group = dist.group.WORLD
    cuts = apply_tensor_parallel(model, group, table=table, sequence_parallel=sequence_parallel, async_tp=async_tp)
    want, got = whole(tokens), model(tokens)
    seed = torch.randn(want.shape, dtype=want.dtype)
    start = cuts["head.weight"].offset[0]
    own = slice(start, start + got.shape[-1])
    worst = [float((got - want[..., own]).detach().abs().max())]
    want.backward(seed)
    got.backward(seed[..., own])
    grads = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in model.named_parameters():
        if name in cuts and cuts[name].partial_over is not None:
            dist.all_reduce(p.grad, group=cuts[name].partial_over)
        expected = cuts[name].of(grads[name], p.shape) if name in cuts else grads[name]
        worst.append(float((p.grad - expected).abs().max()))
    return max(worst)


@pytest.mark.parametrize("mode", ["tp", "tp+sp", "async"])
@pytest.mark.parametrize("plan", [PLAN, WITHOUT_REGIONS, WITH_THE_REST], ids=["regions", "no regions", "the rest"])
def test_a_users_module_matches_one_process(plan, mode):
    for error in run_ranks(errors, 2, plan, mode != "tp", mode == "async"):
        assert error <= 1e-12  # float64: order of summation


def test_what_is_read_between_cut_linears_outside_of_regions_is_refused_without_sequence_parallelism():
    """Each rank had a part of its gradient, and took it for the whole."""
    with torch.device("meta"):
        model = Own()
    between = {pattern: style for pattern, style in PLAN.items() if style != "region"}
    with pytest.raises(ValueError, match=r"'blocks\.0\.attn\.scale' is whole .* before 'blocks\.0\.attn\.out'"):
        check_between(model, merge_tables(model, {}, between), 8)
    check_between(model, merge_tables(model, {}, PLAN), 8)
    for block in model.blocks:
        del block.attn.scale
        block.attn.scale = 1.0
    check_between(model, merge_tables(model, {}, WITHOUT_REGIONS), 8)
    for block in model.blocks:  # a norm that is cut as what it reads
        block.attn.q = nn.Sequential(OrderedDict(linear=block.attn.q, norm=nn.RMSNorm(16, device="meta")))
    rest = {pattern: style for pattern, style in WITHOUT_REGIONS.items() if pattern != "blocks.*.attn.q"}
    cut = rest | {"blocks.*.attn.q.linear": "colwise", "blocks.*.attn.q.norm": "heads_norm"}
    check_between(model, merge_tables(model, {}, cut), 8)
    with pytest.raises(ValueError, match=r"'blocks\.0\.attn\.q\.norm\.weight' is whole"):
        check_between(model, merge_tables(model, {}, cut | {"blocks.*.attn.q.norm": "replicated"}), 8)


class Centred(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1.0 + self.weight, self.eps)


class Fixed(nn.Module):
    """Keeps its epsilon to itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("norm", [nn.LayerNorm, Centred, Fixed])
def test_a_norm_over_all_heads_that_is_no_rms_norm_is_refused(norm):
    with torch.device("meta"):
        model = Own()
        for block in model.blocks:
            block.attn.norm, block.attn.right = norm(16), nn.RMSNorm(16)
    right = PLAN | {"blocks.*.attn.right": "heads_norm", "**.norm": "replicated"}
    options = {"seq_len_local": 8, "sequence_parallel": True}
    check_tensor_parallel(model, 2, table=merge_tables(model, {}, right), **options)
    wrong = PLAN | {"blocks.*.attn.norm": "heads_norm", "**.right": "replicated"}
    with pytest.raises(ValueError, match=r"heads_norm for blocks\.0\.attn\.norm, a .* which it is not"):
        check_tensor_parallel(model, 2, table=merge_tables(model, {}, wrong), **options)


def norm_without_epsilon(dtype: torch.dtype) -> float:
    whole, x = nn.RMSNorm(8).to(dtype), torch.linspace(-1e-6, 2e-6, 8, dtype=dtype)
    half = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    part = nn.RMSNorm(4).to(dtype)
    norm_over_ranks(part, dist.group.WORLD)
    return float((part(x[half]) - whole(x)[half]).detach().abs().max())


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-14), (torch.bfloat16, 1e-4)])
def test_a_norm_over_ranks_takes_torchs_epsilon_where_it_has_none(dtype, most):
    assert all(error < most for error in run_ranks(norm_without_epsilon, 2, dtype))


def test_a_pattern_for_the_rest_leaves_cut_parameters_alone():
    table = merge_tables(Own(), {}, WITH_THE_REST)
    plan = plan_tensor_parallel(Own(), 2, table=table, sequence_parallel=True, replicate_kv=False)
    cut = (".up.weight", ".down.weight", ".attn.q.weight", "head.weight", "wte.weight")
    assert not [name for name in plan.partial if name.endswith(cut)]
    assert "blocks.0.attn.scale" in plan.partial


def test_an_embedding_that_looks_up_all_tokens_is_refused_under_sequence_parallelism():
    table = {"**.up": "colwise", "**.down": "rowwise", "**": "replicated"}
    options = {"table": merge_tables(Own(), {}, table), "seq_len_local": 8}
    check_tensor_parallel(Own(), 2, sequence_parallel=False, **options)
    with pytest.raises(ValueError, match="replicated for wte, an embedding"):
        check_tensor_parallel(Own(), 2, sequence_parallel=True, **options)


def cut_tied(second: str) -> str:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    table = {"a": "colwise", "b": second}
    try:
        apply_tensor_parallel(model, dist.group.WORLD, table=table, sequence_parallel=False)
    except ValueError as error:
        return str(error)
    return "" if model["a"].weight is model["b"].weight else "untied"


def test_tied_parameters_that_would_be_cut_differently_are_refused():
    assert all("a.weight by rows, b.weight by columns" in message for message in run_ranks(cut_tied, 2, "rowwise"))
    assert all("are one tied parameter" in message for message in run_ranks(cut_tied, 2, "replicated"))
    assert run_ranks(cut_tied, 2, "colwise") == ["", ""]


def misuse() -> list[str]:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return self.down(self.up(x)), 0

    model = nn.ModuleDict({"ffn": Keyword()})
    table = {"ffn": "region", "ffn.up": "colwise", "ffn.down": "rowwise"}
    apply_tensor_parallel(model, dist.group.WORLD, table=table, sequence_parallel=False)
    messages = []
    for call in (lambda: model["ffn"](x=torch.ones(2, 4)), lambda: model["ffn"](torch.ones(2, 4))):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_region_called_otherwise_says_so():
    for first, second in run_ranks(misuse, 2):
        assert "first positional argument" in first
        assert "must return one tensor, not a tuple" in second
