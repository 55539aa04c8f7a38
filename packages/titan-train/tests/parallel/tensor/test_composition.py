"""Tensor parallelism together with what surrounds it: pipeline stages, recomputation, split backwards, optimizers."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from titan_pipeline.runtime import WeightGradEngine
from titan_testing import run_ranks
from titan_train.config.model import ModelConfig
from titan_train.models import GPT, GPTArgs, Llama, LlamaArgs, build_model, init_for
from titan_train.parallel.tensor.apply import apply_tensor_parallel
from titan_train.parallel.tensor.async_linears import overlapped_modules
from titan_train.parallel.tensor.loss import vocab_parallel_cross_entropy_sum
from titan_train.parallel.tensor.styles import table_for
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

ARGS = LlamaArgs(dim=32, num_layers=2, num_heads=8, num_kv_heads=2, ffn_dim=48, vocab_size=96)
SEQ = 16
MODES = {
    "tp": {"sequence_parallel": False},
    "tp+sp": {"sequence_parallel": True},
    "async": {"sequence_parallel": True, "async_tp": True},
}
modes = pytest.mark.parametrize("mode", list(MODES))


def make(dtype: torch.dtype = torch.float64, **changes: object) -> Llama:
    torch.manual_seed(0)
    model = Llama(ARGS if not changes else LlamaArgs(**{**_fields(ARGS), **changes}))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype)


def _fields(args: LlamaArgs) -> dict:
    return {name: getattr(args, name) for name in args.__dataclass_fields__}


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, 96, (2, SEQ), generator=generator) for _ in range(2))  # type: ignore[return-value]


def whole_gradients(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    inputs, labels = tokens()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def finish(model: nn.Module, cuts: dict) -> None:
    for name, parameter in model.named_parameters():
        if name in cuts and cuts[name].partial_over is not None:
            dist.all_reduce(parameter.grad, group=cuts[name].partial_over)


def worst(model: nn.Module, cuts: dict, want: dict[str, Tensor]) -> float:
    errors = []
    for name, p in model.named_parameters():
        expected = cuts[name].of(want[name], p.shape) if name in cuts else want[name]
        errors.append(float((p.grad - expected).abs().max() / want[name].abs().max()))
    return max(errors)


def two_stages(mode: str) -> float:
    """Both halves of a pipeline on this rank, each cut by itself."""
    group = dist.group.WORLD
    model = make()
    loss, want = whole_gradients(copy.deepcopy(model).train())
    first, last = copy.deepcopy(model), copy.deepcopy(model)
    first.norm = first.lm_head = None
    last.tok_embeddings = None
    del first.layers["1"], last.layers["0"]
    cuts = {}
    for stage in (first, last):
        cuts |= apply_tensor_parallel(stage, group, table=table_for(model), replicate_kv=True, **MODES[mode])
    inputs, labels = tokens()
    hidden = first(inputs)
    assert hidden.shape == (2, SEQ // group.size() if MODES[mode]["sequence_parallel"] else SEQ, ARGS.dim)
    logits = last(hidden, positions=torch.arange(SEQ).unsqueeze(0))
    got = vocab_parallel_cross_entropy_sum(logits, labels, group, cuts["lm_head.weight"].offset[0])
    got.backward()
    for stage in (first, last):
        finish(stage, cuts)
    return max(abs(float(got.detach()) - loss), worst(first, cuts, want), worst(last, cuts, want))


@modes
def test_stages_of_a_pipeline_are_cut_one_by_one(mode):
    assert max(run_ranks(two_stages, 4, mode)) <= 1e-10  # float64; the loss is of order 100


def recomputed(mode: str) -> tuple[bool, int]:
    """Whether gradients with and without recomputation are the same bits, and how many parameters were compared."""
    group = dist.group.WORLD
    grads = []
    for again in (False, True):
        model = make()
        cuts = apply_tensor_parallel(model, group, table=table_for(model), replicate_kv=True, **MODES[mode])
        if again:
            for block in model.layers.values():
                block.forward = _checkpointed(block.forward)
        inputs, labels = tokens()
        loss = vocab_parallel_cross_entropy_sum(model(inputs), labels, group, cuts["lm_head.weight"].offset[0])
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    return all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0]), len(grads[0])


def _checkpointed(forward):
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def hooked() -> tuple[int, int]:
    """Linears whose forward hooks have run, and all of them."""
    model, seen = make(), set()
    apply_tensor_parallel(model, dist.group.WORLD, table=table_for(model), replicate_kv=True, **MODES["async"])
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        linear.register_forward_hook(lambda linear, args, out: seen.add(id(linear)))
    model(tokens()[0])
    return len(seen), len(linears)


def test_linears_that_overlap_their_transfers_run_their_forward_hooks():
    for seen, linears in run_ranks(hooked, 2):
        assert seen == linears > 0


@modes
def test_recomputation_repeats_the_collectives_and_gives_the_same_bits(mode):
    for same, count in run_ranks(recomputed, 4, mode):
        assert same
        assert count == 21


def split_backward(mode: str) -> tuple[float, int]:
    """Largest error of any gradient, and how many parameters waited for the weight pass."""
    group = dist.group.WORLD
    model = make()
    _, want = whole_gradients(copy.deepcopy(model))
    cuts = apply_tensor_parallel(model, group, table=table_for(model), replicate_kv=True, **MODES[mode])
    engine = WeightGradEngine(model)
    inputs, labels = tokens()
    with engine.recording():
        logits = model(inputs)
        loss = vocab_parallel_cross_entropy_sum(logits, labels, group, cuts["lm_head.weight"].offset[0])
    with engine.deferring() as queue:
        loss.backward()
    waiting = sum(p.grad is None for p in model.parameters())
    queue.run()
    finish(model, cuts)
    return worst(model, cuts, want), waiting


@modes
def test_weight_gradients_can_be_deferred(mode):
    for error, waiting in run_ranks(split_backward, 4, mode):
        assert error <= 1e-11
        # 7 linears in each of 2 blocks, embedding and head; asynchronous linears compute theirs at once
        assert waiting == (16 if mode != "async" else 1)


def train(steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Three AdamW steps: this rank's replicas of key-value heads, norms, and the norms' gradients."""
    group = dist.group.WORLD
    model = make(torch.float32)
    cuts = apply_tensor_parallel(model, group, table=table_for(model), sequence_parallel=True, replicate_kv=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs, labels = tokens()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = vocab_parallel_cross_entropy_sum(model(inputs), labels, group, cuts["lm_head.weight"].offset[0])
        (loss / labels.numel()).backward()
        finish(model, cuts)
        optimizer.step()
    named = dict(model.named_parameters())
    replicas = {name: p.detach() for name, p in named.items() if ".wk." in name or ".wv." in name}
    norms = {name: p.detach() for name, p in named.items() if "norm" in name}
    return replicas, norms, {name: named[name].grad for name in norms}


def test_replicas_and_norms_stay_equal_bit_by_bit_over_optimizer_steps():
    ranks = run_ranks(train, 4, 3)
    for rank, (replicas, norms, grads) in enumerate(ranks):
        twin = ranks[rank // 2 * 2][0]  # two ranks share a key-value head
        assert len(replicas) == 4
        assert all(torch.equal(replicas[name], twin[name]) for name in replicas)
        assert all(torch.equal(norms[name], ranks[0][1][name]) for name in norms)
        assert all(torch.equal(grads[name], ranks[0][2][name]) for name in grads)


def ties(family: str, device: str) -> list[bool]:
    group = dist.group.WORLD
    with torch.device(device):
        args = {"dim": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 97}
        if family == "llama":
            model = Llama(LlamaArgs(**args, num_kv_heads=4, ffn_dim=48, tied_embeddings=True))
        else:
            model = GPT(GPTArgs(**args, max_seq_len=SEQ))
    found = []
    for async_tp in (False, True):
        cut = copy.deepcopy(model)
        cuts = apply_tensor_parallel(cut, group, table=table_for(cut), sequence_parallel=True, async_tp=async_tp)
        found.append(cut.lm_head.weight is cut.tok_embeddings.weight)
        found.append(cuts["lm_head.weight"] == cuts["tok_embeddings.weight"])
        found.append(sum("lm_head" in name or "tok_" in name for name, _ in cut.named_parameters()) == 1)
        found.append(cut.lm_head.weight.device.type == device)
        found.append(cut.lm_head.out_features == cut.tok_embeddings.num_embeddings == cut.lm_head.weight.shape[0])
    return found


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_tied_embeddings_stay_tied(family, device):
    for found in run_ranks(ties, 2, family, device):
        assert all(found), found


def boxes(tp_kv: int) -> dict[str, tuple]:
    model = make(num_kv_heads=tp_kv)
    cuts = apply_tensor_parallel(
        model, dist.group.WORLD, table=table_for(model), sequence_parallel=True, replicate_kv=True
    )
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {name: (cut.global_shape, cut.offset, shapes[name], cut.pieces) for name, cut in cuts.items()}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_boxes_of_all_ranks_make_up_each_parameter(kv_heads):
    whole = {name: tuple(p.shape) for name, p in make(num_kv_heads=kv_heads).named_parameters()}
    ranks = run_ranks(boxes, 4, kv_heads)
    assert ranks[0].keys() == whole.keys()
    for name, shape in whole.items():
        held = torch.zeros(shape)
        for rank in ranks:
            global_shape, offset, local, pieces = rank[name]
            assert global_shape == shape
            held[tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))] += 1
        assert (held == 4 / pieces).all(), name


def overlapped() -> list[str]:
    model = make()
    apply_tensor_parallel(
        model, dist.group.WORLD, table=table_for(model), sequence_parallel=True, async_tp=True, replicate_kv=True
    )
    return overlapped_modules(model)


def test_every_region_and_the_head_are_overlapped():
    parts = ["attention.linears", "attention.wo", "feed_forward.linears", "feed_forward.w2"]
    expected = {f"layers.{i}.{part}" for i in range(2) for part in parts} | {"lm_head"}
    assert set(run_ranks(overlapped, 2)[0]) == expected


def async_against_plain(name: str) -> float:
    """Largest difference of any gradient between overlapped and plain products, as a share of the largest."""
    group = dist.group.WORLD
    grads = []
    for mode in ("tp+sp", "async"):
        torch.manual_seed(0)
        model = build_model(ModelConfig(name=name, seq_len=SEQ), vocab_size=96, device="cpu").double()
        init = init_for(model)
        for i, (fqn, parameter) in enumerate(model.named_parameters()):
            init(fqn, parameter.data, torch.Generator().manual_seed(i))
        for _, buffer in model.named_buffers():
            buffer.zero_()
        cuts = apply_tensor_parallel(model, group, table=table_for(model), replicate_kv=True, **MODES[mode])
        assert bool(overlapped_modules(model)) == (mode == "async")
        inputs, labels = tokens()
        loss = vocab_parallel_cross_entropy_sum(model(inputs), labels, group, cuts["lm_head.weight"].offset[0])
        loss.backward()
        grads.append({fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    largest = max(float(g.abs().max()) for g in grads[0].values())
    return max(float((grads[0][fqn] - grads[1][fqn]).abs().max()) for fqn in grads[0]) / largest


@pytest.mark.parametrize("name", ["qwen3_debug", "deepseek_debug"])
def test_asynchronous_products_fit_head_norms_and_latent_attention(name):
    assert max(run_ranks(async_against_plain, 2, name)) <= 1e-6  # float32 inside the routers


def under_fsdp(mode: str) -> float:
    """Largest error of any gradient: 2 data-parallel ranks, each of 2 tensor-parallel ones, sharded by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make()
    _, want = whole_gradients(copy.deepcopy(model))
    group = mesh.get_group("tp")
    cuts = apply_tensor_parallel(model, group, table=table_for(model), **MODES[mode])
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for unit in (*model.layers.values(), model):
        fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=True)
    inputs, labels = (row[mesh.get_local_rank("dp")].unsqueeze(0) for row in tokens())
    loss = vocab_parallel_cross_entropy_sum(model(inputs), labels, group, cuts["lm_head.weight"].offset[0])
    (loss * 2).backward()  # FSDP2 averages over the data-parallel ranks
    errors = []
    for name, p in model.named_parameters():
        if name in cuts and cuts[name].partial_over is not None:
            dist.all_reduce(p.grad.to_local(), group=cuts[name].partial_over)
        expected = cuts[name].of(want[name], shapes[name]) if name in cuts else want[name]
        errors.append(float((p.grad.full_tensor() - expected).abs().max() / want[name].abs().max()))
    return max(errors)


@modes
def test_cut_parameters_can_be_sharded_by_fsdp(mode):
    assert max(run_ranks(under_fsdp, 4, mode)) <= 1e-11  # float64
