"""The private torch names this package uses, on the versions it was checked on."""

import inspect

import torch
from titan_fsdp import torch_private
from titan_fsdp.torch_private import original_class, split_factor
from titan_fsdp.training import verify
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.placement_types import Shard, _StridedShard
from torch.nn.parallel import DistributedDataParallel


def test_private_names_are_as_on_torch_2_11_and_2_15() -> None:
    assert {"mesh", "mp_policy", "offload_policy", "ignored_params"} <= set(inspect.signature(replicate).parameters)
    assert torch_private.replicate_engine() is replicate
    assert split_factor(_StridedShard(0, split_factor=2)) == 2
    assert split_factor(Shard(0)) == 1
    for name in verify._OPERATORS:
        namespace, _, operator = name.partition("::")
        assert hasattr(getattr(torch.ops, namespace), operator), name
    assert original_class(torch.nn.Linear(1, 1)) is torch.nn.Linear
    assert hasattr(DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model")
    for method in ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms", "set_custom_reduce_scatter"):
        assert hasattr(FSDPModule, method), method
