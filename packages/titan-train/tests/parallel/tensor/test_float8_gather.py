"""Regions of float8 linears send float8, and compute the bits of casting after the gather."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import titan_fp8
import torch
import torch.distributed as dist
from titan_pipeline.runtime import WeightGradEngine
from titan_testing import run_ranks
from titan_train.config import ActivationsConfig, Config, Float8Config, load_config
from titan_train.inputs import prepare_inputs
from titan_train.models import Llama, LlamaArgs
from titan_train.parallel.activations.recompute import apply_activation_checkpointing
from titan_train.parallel.float8 import convert_to_float8, share_scales
from titan_train.parallel.tensor.apply import apply_tensor_parallel
from titan_train.parallel.tensor.async_linears import overlapped_modules
from titan_train.parallel.tensor.float8_linears import float8_gathering_modules
from titan_train.parallel.tensor.loss import vocab_parallel_cross_entropy_sum
from titan_train.parallel.tensor.styles import table_for
from titan_train.train.trainer import Trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

ARGS = LlamaArgs(dim=128, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=64)
GATHERING = ["layers.0.attention.linears", "layers.0.feed_forward.linears"]


class GatheredBytes(TorchDispatchMode):
    """Counts what all-gathers receive, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather" in func._schema.name:
            self.total += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


class KeptBytes(saved_tensors_hooks):
    """Counts what forward keeps for backward, once for each storage, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                self._sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    @property
    def total(self) -> int:
        return sum(self._sizes.values())


def cut_model(recipe: str, *, float8_gather: bool, args: LlamaArgs = ARGS, async_tp: bool = False) -> tuple[Llama, Any]:
    torch.manual_seed(0)
    model = Llama(args).bfloat16()
    convert_to_float8(model, Float8Config(recipe=recipe, min_speedup=0.0), tokens=256, fuse_norms=False)
    group = dist.group.WORLD
    cuts = apply_tensor_parallel(
        model, group, table=table_for(model), sequence_parallel=True, replicate_kv=True,
        float8_gather=float8_gather, async_tp=async_tp,
    )  # fmt: skip
    share_scales(model, group)
    return model, cuts


def loss_of(model: nn.Module, cuts: Any, seq: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, 64, (2, seq), generator=generator) for _ in range(2))
    offset = cuts["lm_head.weight"].offset[0]
    return vocab_parallel_cross_entropy_sum(model(tokens), labels, dist.group.WORLD, offset)


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    assert len(got) == len(want)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))


def compared(recipe: str, seq: int) -> tuple[list[str], float, Any]:
    """What gathers in float8, the largest error against casting after the gather, and what that moved and kept."""
    results, measured = [], []
    for gathers in (False, True):
        model, cuts = cut_model(recipe, float8_gather=gathers)
        kept = KeptBytes(model)
        with GatheredBytes() as forward, kept:
            loss = loss_of(model, cuts, seq)
        with GatheredBytes() as backward:
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        measured.append((forward.total, forward.total + backward.total, kept.total))
    return float8_gathering_modules(model), worst(results[1], results[0]), measured


@pytest.mark.parametrize("ranks", [2, 4])
def test_blocks_gathered_in_float8_give_the_bits_of_casting_what_was_gathered(ranks):
    tokens = 2 * 128 * ranks
    head = tokens * ARGS.dim * 2  # stays in bfloat16, and gathers its input once
    for gathering, error, (plain, float8) in run_ranks(compared, ranks, "blockwise", 128 * ranks, timeout_s=60):
        assert gathering == GATHERING
        assert error == 0.0
        assert float8[0] - head <= 0.52 * (plain[0] - head)  # forward: a byte a value, and a float32 scale for 128
        assert float8[1] <= 1.02 * plain[1]  # with backward, where the codes are gathered again
        others = len(GATHERING) * tokens * ARGS.dim * (ranks - 1) // ranks
        assert plain[2] - float8[2] >= others  # kept: the codes of this rank's tokens alone


def test_one_scale_a_tensor_gives_nearly_the_same():
    for gathering, error, _ in run_ranks(compared, 2, "tensorwise", 32):
        assert gathering == GATHERING
        assert error <= 2**-3  # half a step of e5m2's two bits of mantissa, where a rank's own scale differs


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_gw_hp", "mxfp8"])
def test_scales_that_span_the_ranks_tokens_are_gathered_in_high_precision(recipe):
    for gathering, error, (plain, float8) in run_ranks(compared, 2, recipe, 32):
        assert gathering == []
        assert error == 0.0
        assert plain == float8


def test_tokens_that_a_block_would_share_with_another_rank_are_gathered_in_high_precision():
    for gathering, error, (plain, float8) in run_ranks(compared, 2, "blockwise", 64):
        assert gathering == GATHERING
        assert error == 0.0
        assert plain == float8


def gated_config() -> Config:
    return load_config(
        "debug",
        model={"name": "qwen3_next_moe_debug", "seq_len": 32},
        float8={"recipe": "blockwise", "min_speedup": 0.0},
        parallel={"tp": 2},
        launch={"nproc": 2, "device": "cpu"},
        train={"steps": 2, "global_batch": 2},
    )


def gated() -> list[str]:
    with tempfile.TemporaryDirectory() as folder, Trainer(gated_config(), Path(folder)) as trainer:
        trainer.fit()
        return float8_gathering_modules(trainer.model.parts[0])


def test_a_region_whose_gate_reads_the_input_gathers_it_in_high_precision():
    prepare_inputs(gated_config(), quiet=True)
    for gathering in run_ranks(gated, 2, timeout_s=90):
        assert any("attention" in name for name in gathering)
        assert not any("shared_experts" in name for name in gathering)


def compile_each(model: nn.Module) -> None:
    for block in model.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)


def composed(how: str) -> tuple[list[str], float]:
    """What gathers in float8 together with ``how``, and the largest error against neither; compiled code against compiled."""
    model, cuts = cut_model("blockwise", float8_gather=False)
    if how == "compile":
        compile_each(model)
    loss = loss_of(model, cuts, 256)
    loss.backward()
    want = [loss.detach(), *(p.grad for p in model.parameters())]
    model, cuts = cut_model("blockwise", float8_gather=True, async_tp=how == "async")
    blocks = list(model.layers.values())
    if how in ("full", "selective"):
        apply_activation_checkpointing(model, blocks, ActivationsConfig(checkpoint=how))
    if how == "compile":
        compile_each(model)
    if how == "split backward":
        engine = WeightGradEngine(model)
        with engine.recording():
            loss = loss_of(model, cuts, 256)
        with engine.deferring() as queue:
            loss.backward()
        queue.run()
    else:
        loss = loss_of(model, cuts, 256)
        loss.backward()
    assert (overlapped_modules(model) == ["lm_head"]) == (how == "async")
    return float8_gathering_modules(model), worst([loss.detach(), *(p.grad for p in model.parameters())], want)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "how", ["full", "selective", "split backward", "async", pytest.param("compile", marks=pytest.mark.slow)]
)
def test_it_composes_with(how):
    # the ring of the head sums in another order, and gradients that differ in bfloat16's last bit round to other codes
    tolerance = 2**-4 if how == "async" else 0.0
    for gathering, error in run_ranks(composed, 2, how, timeout_s=350 if how == "compile" else 90):
        assert gathering == GATHERING
        assert error <= tolerance


def recorded_by_rank_0(recipe: str, gathers: bool) -> tuple[int, int]:
    """The float8 layers, and those that statistics which rank 0 alone takes say all about."""
    model, cuts = cut_model(recipe, float8_gather=gathers)
    want = loss_of(model, cuts, 256).item()
    with titan_fp8.record_stats(model) if dist.get_rank() == 0 else contextlib.nullcontext({}) as found:
        loss = loss_of(model, cuts, 256)
        loss.backward()
    assert loss.item() == want
    layers = sum(isinstance(module, titan_fp8.Float8Linear) for module in model.modules())
    return layers, sum(entry.keys() == {"input", "weight", "grad"} for entry in found.values())


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_statistics_of_one_rank_tell_of_every_layer_and_change_nothing(recipe, gathers):
    layers, recorded = run_ranks(recorded_by_rank_0, 2, recipe, gathers, timeout_s=60)[0]
    assert recorded == layers == 7 * ARGS.num_layers
