"""A step makes the host wait for the device once."""

import pytest
import torch
from titan_train.config import parse_config
from titan_train.data import Batch
from titan_train.observe.timing import StepTimer
from titan_train.parallel.apply import build_parallel_model
from titan_train.plan.run import plan_run
from titan_train.train.reduce_scope import ReduceScope
from titan_train.train.step import OptimizerStep
from torch.utils._python_dispatch import TorchDispatchMode

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class Reads(TorchDispatchMode):
    """Counts what would wait on a GPU: each value that Python reads off a tensor, and shapes that depend on values."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama3_debug", "qwen3_moe_debug", "deepseek_debug"])
def test_a_step_reads_values_off_the_device_once_at_its_end(name):
    config = parse_config(
        {
            "model": {"name": name, "seq_len": 16},
            "tokenizer": {"kind": "bytes"},
            "train": {"global_batch": 4, "microbatch": 2},
        }
    )
    plan = plan_run(config, 1)
    device = torch.device("cpu")
    model = build_parallel_model(
        config, layout=plan.layout, mode="none", mesh=None, schedule=None, vocab_size=256, device=device
    )
    step = OptimizerStep(
        model,
        torch.optim.AdamW(model.parts[0].parameters(), fused=True),
        max_grad_norm=1.0,
        accumulate="unsharded",
        scope=ReduceScope.of(None, sequence_parallel=False),
        device=device,
        timer=StepTimer(),
    )
    tokens = torch.arange(32).view(2, 16)
    batch = Batch(tokens, tokens + 1, torch.arange(16).expand(2, -1), None, 16, 0)
    lists = []
    plain = torch.Tensor.tolist

    def counted(tensor):
        lists.append(tuple(tensor.shape))
        return plain(tensor)

    torch.Tensor.tolist = counted  # one transfer, whatever it reads
    try:
        with Reads() as reads:
            result = step([batch, batch], (False, True))
    finally:
        torch.Tensor.tolist = plain
    # loss, norm, this rank's part of the loss, labels and two requests; of each layer of experts their load and three losses
    assert lists == [(6 + sum(experts + 3 for experts in model.experts.values()),)]
    assert reads.found == []
    assert result.num_labels == 64
    assert result.requests == (False, True)
    assert bool(result.routing) == bool(model.experts)
