"""Models are handed what their forward accepts, through any wrapper."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from titan_testing import run_ranks
from titan_train.config.model import ModelConfig
from titan_train.models import accepted_inputs, build_model, call_model, clean_fqn, init_for, named_parameters, unwrap
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Batch:
    tokens: Tensor
    positions: Tensor | None = None
    cu_seqlens: Tensor | None = None


class TokensOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)


class Anything(TokensOnly):
    def forward(self, tokens: Tensor, **kwargs: Tensor) -> Tensor:
        return self.embed(tokens) * len(kwargs)


def batch() -> Batch:
    return Batch(
        torch.zeros(1, 4, dtype=torch.int64),
        positions=torch.tensor([[0, 1, 0, 1]]),
        cu_seqlens=torch.tensor([[0, 2, 4]], dtype=torch.int32),
    )


def tiny_llama() -> nn.Module:
    model = build_model(ModelConfig(args={"num_layers": 1}), vocab_size=10, device="cpu")
    init = init_for(model)
    for i, (fqn, parameter) in enumerate(model.named_parameters()):
        init(fqn, parameter.data, torch.Generator().manual_seed(i))
    return model


def test_a_forward_gets_only_what_it_accepts() -> None:
    assert accepted_inputs(TokensOnly()) == set()
    assert call_model(TokensOnly(), batch()).shape == (1, 4, 4)
    assert accepted_inputs(Anything()) == {"positions", "cu_seqlens", "attention_plan", "padding"}
    model = Anything()
    assert torch.equal(call_model(model, batch()), 2 * model.embed(batch().tokens))
    assert torch.equal(call_model(model, Batch(batch().tokens)), 0 * model.embed(batch().tokens))


def test_documents_reach_a_shipped_model() -> None:
    model = tiny_llama()
    packed = batch()
    want = model(packed.tokens, positions=packed.positions, cu_seqlens=packed.cu_seqlens)
    assert torch.equal(call_model(model, packed), want)
    assert not torch.equal(want, model(packed.tokens))


@pytest.mark.parametrize("wrap", ["compile", "checkpoint", "compiled-checkpoint"])
def test_wrappers_are_seen_through(wrap: str) -> None:
    model = tiny_llama()
    names = [fqn for fqn, _ in model.named_parameters()]
    wrapped: nn.Module = model
    if "checkpoint" in wrap:
        model.layers["0"] = checkpoint_wrapper(model.layers["0"])  # type: ignore[operator, index]
        wrapped = checkpoint_wrapper(model)
    if "compile" in wrap:
        wrapped = torch.compile(wrapped, backend="eager")  # type: ignore[assignment]
    assert unwrap(wrapped) is model
    assert accepted_inputs(wrapped) == {"positions", "cu_seqlens", "attention_plan", "padding"}
    assert [fqn for fqn, _ in named_parameters(wrapped)] == names
    assert [clean_fqn(fqn) for fqn, _ in wrapped.named_parameters()] == names


def _under_fsdp_and_ddp() -> list[tuple[bool, list[str]]]:
    plain = tiny_llama()
    want = call_model(plain, batch())
    sharded = tiny_llama()
    fully_shard(sharded)
    replicated = DistributedDataParallel(tiny_llama())
    found = []
    for model in (sharded, replicated):
        equal = bool((call_model(model, batch()) - want).abs().max() <= 1e-6)
        found.append((equal, [fqn for fqn, _ in named_parameters(model)]))
    dist.barrier()
    return found


def test_call_sees_through_fsdp_and_ddp() -> None:
    names = [fqn for fqn, _ in tiny_llama().named_parameters()]
    for rank in run_ranks(_under_fsdp_and_ddp, 2):
        assert rank == [(True, names), (True, names)]
