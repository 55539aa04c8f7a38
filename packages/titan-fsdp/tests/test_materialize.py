"""Weights that depend on the seed and the name, and on nothing else."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_for_tests import TinyLM, fill
from titan_fsdp import Comm, Policy, Unit, full_state_dict, materialize, named_parameters, plan
from titan_testing import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh


def wrapped_weights(tied: bool, use_init: bool) -> list[dict[str, Tensor]]:
    """Full weights in every mode, materialized before and after wrapping."""
    world = dist.get_world_size()
    init = fill if use_init else None
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s")) if world > 1 else None
    results: list[dict[str, Tensor]] = []
    policies = [Policy(), Policy(mode="ddp"), Policy(units=[Unit("layers.*", shard_dim="auto")])]
    if grid is not None:
        policies.append(Policy(mode="hsdp"))
    for policy in policies:
        for before in (False, True):
            with torch.device("meta"):
                model: Any = TinyLM(tied=tied)
            if before:
                materialize(model, "cpu", init, seed=3)
            mesh = grid if policy.mode == "hsdp" else line
            model = plan(model, mesh, policy).apply(model)
            if not before:
                materialize(model, "cpu", init, seed=3)
            assert (model.head.weight is model.embed.weight) == tied
            results.append(full_state_dict(model, rank0=False))
    with torch.device("meta"):
        model = TinyLM(tied=tied)
    policy = Policy(mode="ddp", comm=Comm(ddp_hook="bf16"))
    decided = plan(model, line, policy)
    results.append(full_state_dict(decided.apply(materialize(model, "cpu", init, seed=3)), rank0=False))
    return results


@pytest.mark.parametrize("use_init", [True, False], ids=["init", "reset_parameters"])
def test_weights_are_bitwise_the_same_for_any_ranks_mode_and_order(use_init: bool) -> None:
    with torch.device("meta"):
        model = TinyLM(tied=True)
    want = full_state_dict(materialize(model, "cpu", fill if use_init else None, seed=3))
    for ranks in (1, 2, 4):
        for states in run_ranks(wrapped_weights, ranks, True, use_init):
            for state in states:
                assert state.keys() == want.keys()
                for name, tensor in want.items():
                    assert torch.equal(state[name], tensor), f"{ranks} ranks: {name}"


def test_the_seed_and_the_name_decide() -> None:
    a, b = (dict(named_parameters(materialize(TinyLM(), "cpu", None, seed=s))) for s in (0, 1))
    assert not torch.equal(a["layers.0.up.weight"], b["layers.0.up.weight"])
    assert not torch.equal(a["layers.0.up.weight"], a["layers.1.up.weight"])


def test_wrappers_do_not_change_weights() -> None:
    with torch.device("meta"):
        model: Any = TinyLM()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    wrapped = dict(named_parameters(materialize(model, "cpu", fill)))
    plain = dict(named_parameters(materialize(TinyLM(), "cpu", fill)))
    assert wrapped.keys() == plain.keys()
    assert all(torch.equal(wrapped[n], plain[n]) for n in plain)


def test_the_global_random_state_is_untouched() -> None:
    before = torch.get_rng_state()
    model = TinyLM()
    after = torch.get_rng_state()
    materialize(model, "cpu", None)
    materialize(model, "cpu", fill)
    assert not torch.equal(before, after)
    assert torch.equal(torch.get_rng_state(), after)


class Rotary(nn.Module):
    def __init__(self, with_reset: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(2))
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.register_buffer("steps", torch.ones(1))
        if with_reset:
            self.reset_parameters = self._reset

    def _reset(self) -> None:
        nn.init.ones_(self.scale)
        self.table = torch.arange(3.0)


def test_buffers_on_meta_are_filled_and_real_ones_keep_their_values() -> None:
    with torch.device("meta"):
        model = Rotary(False)
    model.steps = torch.full((1,), 5.0)

    def init(name: str, tensor: Tensor, _: torch.Generator) -> None:
        tensor.fill_(2.0 if name == "table" else 1.0)

    materialize(model, "cpu", init)
    assert model.table.tolist() == [2.0] * 3
    assert model.steps.tolist() == [5.0]


def test_a_module_without_reset_parameters_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Rotary(False))
    with pytest.raises(ValueError, match=r"module '0' \(Rotary\) has .*'scale'.* no reset_parameters"):
        materialize(model, "cpu", None)


def test_materializing_on_meta_is_refused() -> None:
    with pytest.raises(ValueError, match="would allocate nothing"):
        materialize(TinyLM(), "meta", fill)
