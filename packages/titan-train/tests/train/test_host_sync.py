"""A step makes the host wait for the device once, behind its update."""

import pytest
import torch
from tiny_run import tiny_run, write_text
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.data import Batch
from titan_train.inputs import prepare_inputs
from titan_train.models import named_parameters
from titan_train.observe.timing import StepTimer
from titan_train.parallel.apply import build_parallel_model
from titan_train.parallel.layout.run import plan_run
from titan_train.train import Trainer
from titan_train.train.reduce_scope import ReduceScope
from titan_train.train.step import OptimizerStep
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


UPDATE = torch.ops.aten._fused_adamw_.default


class Waits:
    """Counts what would wait on a GPU: each value that Python reads off a tensor, shapes that depend on values, and what is
    copied to the device from pages that are not locked; and the updates between them.
    """

    def __init__(self, monkeypatch):
        self.found, self.lists = [], []
        read, make = torch.Tensor.tolist, torch.tensor

        def counted(tensor):
            self.found.append("tolist")  # one transfer, whatever it reads
            self.lists.append(tuple(tensor.shape))
            return read(tensor)

        def made(*args, device=None, **kwargs):
            if device is not None:
                self.found.append("copied to the device")
            return make(*args, device=device, **kwargs)

        monkeypatch.setattr(torch.Tensor, "tolist", counted)
        monkeypatch.setattr(torch, "tensor", made)

    def within(self):
        found = self.found

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func in READS:
                    found.append(str(func))
                if func is UPDATE:
                    found.append("update")
                return func(*args, **(kwargs or {}))

        return Mode()


@pytest.mark.parametrize("name", ["llama3_debug", "qwen3_moe_debug", "deepseek_debug"])
def test_a_step_reads_values_off_the_device_once_after_its_update(name, monkeypatch):
    step, model, _ = made(name)
    batch = rows(model)
    step([batch, batch])  # the first makes the optimizer's state
    waits = Waits(monkeypatch)
    with waits.within():
        result = step([batch, batch], (False, True))
    assert waits.found == ["update", "tolist"]
    # loss, norm, own part of the loss, labels, lacking tokens, two requests; of each layer of experts load and three losses
    assert waits.lists == [(7 + sum(experts + 3 for experts in model.experts.values()),)]
    assert result.num_labels == 64
    assert result.requests == (False, True)
    assert bool(result.routing) == bool(model.experts)


def test_a_step_that_measures_its_layers_reads_once_too(monkeypatch):
    step, model, _ = made()
    batch = rows(model)
    step([batch, batch], layer_norms=True)  # the number of layers is agreed on once
    waits = Waits(monkeypatch)
    with waits.within():
        result = step([batch, batch], layer_norms=True)
    assert waits.found == ["update", "tolist"]
    assert list(result.layer_norms) == ["layers.0", "layers.1", "other"]
    squares = sum(norm**2 for norm in result.layer_norms.values())
    assert squares == pytest.approx(result.grad_norm**2, rel=1e-5)  # float32 sums in another order


def made(name="llama3_debug", **optimizer):
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
    torch.manual_seed(0)
    # in one group, which is one kernel
    options = {"fused": True} | optimizer
    adamw = torch.optim.AdamW(model.parts[0].parameters(), **options)
    step = OptimizerStep(
        model,
        adamw,
        max_grad_norm=1.0,
        accumulate="unsharded",
        scope=ReduceScope.of(None, sequence_parallel=False),
        device=device,
        timer=StepTimer(),
    )
    return step, model, adamw


def rows(model):
    tokens = torch.arange(32).view(2, 16)
    return Batch(tokens, tokens + 1, torch.arange(16).expand(2, -1), None, 16, 0)


def state_of(model, optimizer):
    """Weights, means and counts of steps."""
    parameters = list(model.parts[0].parameters())
    return [t.clone() for p in parameters for t in (p.detach(), *optimizer.state[p].values())]


@pytest.mark.parametrize("fused", [True, False])
def test_an_update_launched_before_the_read_changes_nothing_if_the_step_is_not_finite(fused):
    step, model, adamw = made(fused=fused)
    batch = rows(model)
    step([batch, batch])
    before = state_of(model, adamw)
    weight = next(model.parts[0].parameters())
    hook = weight.register_hook(lambda grad: torch.full_like(grad, torch.nan))
    assert step([batch, batch]).skipped
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(state_of(model, adamw), before, strict=True))
    assert not step([batch, batch]).skipped
    assert int(adamw.state[weight]["step"]) == 2


def trained(folder, early, mode):
    """Six steps on this rank's shard; ``early`` False waits before each update, as for other optimizers."""
    from titan_train.train import step as module

    with pytest.MonkeyPatch.context() as patch:
        if not early:
            patch.setattr(module, "can_update", lambda *_: False)
        with Trainer(tiny_run(folder, f"{mode}-{early}", parallel={"mode": mode}, train={"steps": 6})) as trainer:
            updates = []
            whole = trainer.optimizer.step
            trainer.optimizer.step = lambda: updates.append(1) or whole()
            trainer.fit()
            named = [pair for part in trainer.model.parts for pair in named_parameters(part)]
            kept = [(p, *trainer.optimizer.state[p].values()) for _, p in named]
            assert all(type(value) is type(p) for p, _, *values in kept for value in values)
            local = [x.to_local() if isinstance(x, DTensor) else x for values in kept for x in values]
            return [x.detach().tolist() for x in local], trainer.losses, len(updates)


@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
def test_updates_of_shards_have_the_bits_of_the_optimizers_own(mode, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write_text(folder)
    prepare_inputs(tiny_run(folder), quiet=True)
    for early, late in zip(
        run_ranks(trained, 2, folder, True, mode), run_ranks(trained, 2, folder, False, mode), strict=True
    ):
        assert early[:2] == late[:2]
        assert (early[2], late[2]) == (1, 6)
