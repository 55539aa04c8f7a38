"""The optimizer: AdamW's formula, the fused kernel, sharded parameters."""

import pytest
import torch
from titan_testing import run_ranks
from titan_train.config.optimizer import OptimizerConfig
from titan_train.optim import build_optimizer
from torch import nn
from torch.distributed.fsdp import fully_shard


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_adamw_follows_the_paper() -> None:
    model = make()
    config = OptimizerConfig(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3, lr_scales={r"^0\.": 0.5})
    optimizer = build_optimizer(model, config)
    want = {fqn: p.detach().double().clone() for fqn, p in model.named_parameters()}
    moments = {fqn: (torch.zeros_like(value), torch.zeros_like(value)) for fqn, value in want.items()}
    for step in range(1, 4):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        for fqn, p in model.named_parameters():
            assert p.grad is not None
            grad = p.grad.double()
            m, v = moments[fqn]
            m.mul_(0.8).add_(0.2 * grad)
            v.mul_(0.9).add_(0.1 * grad * grad)
            lr = 1e-2 * (0.5 if fqn.startswith("0.") else 1.0)
            decay = 0.3 if p.ndim == 2 else 0.0
            update = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-6)
            want[fqn] = want[fqn] * (1 - lr * decay) - lr * update
        optimizer.step()
        optimizer.zero_grad()
    for fqn, p in model.named_parameters():
        # float32 updates of weights of order one
        assert float((p.detach().double() - want[fqn]).abs().max()) < 1e-6, fqn


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_fused_kernel_is_taken_on_cpu_and_agrees(name: str) -> None:
    fused_model, plain_model = make(), make()
    fused = build_optimizer(fused_model, OptimizerConfig(name=name, lr=1e-2))  # type: ignore[arg-type]
    plain = build_optimizer(plain_model, OptimizerConfig(name=name, lr=1e-2, fused="never"))  # type: ignore[arg-type]
    assert fused.defaults["fused"] is True
    assert not plain.defaults["fused"]
    train(fused_model, fused)
    train(plain_model, plain)
    for a, b in zip(fused_model.parameters(), plain_model.parameters(), strict=True):
        assert float((a - b).detach().abs().max()) < 1e-6  # another order of operations in float32


def test_fused_sgd_takes_parameters_that_begin_beside_others_with_momentum() -> None:
    models = [make(), make()]
    for model, fused in zip(models, ("auto", "never"), strict=True):
        optimizer = build_optimizer(model, OptimizerConfig(name="sgd", lr=1e-2, fused=fused))
        for begun in (model[2], model, model):
            optimizer.zero_grad()
            for parameter in begun.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_meta_parameters_get_the_default_kernel() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert build_optimizer(model, OptimizerConfig()).defaults["fused"] is None


def test_groups_carry_names() -> None:
    optimizer = build_optimizer(make(), OptimizerConfig())
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == ["0.bias", "0.weight", "1.bias", "1.weight", "2.bias", "2.weight"]


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        build_optimizer(make().requires_grad_(False), OptimizerConfig())


def _sharded_training(name: str, ignore_norm: bool) -> dict[str, torch.Tensor]:
    model = make()
    ignored = set(model[1].parameters()) if ignore_norm else set()
    fully_shard(model, ignored_params=ignored)
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-2))  # type: ignore[arg-type]
    assert optimizer.defaults["fused"] is (True if name == "adamw" else None)
    train(model, optimizer)
    full = {}
    for fqn, p in model.named_parameters():
        value = p.detach()
        full[fqn] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


@pytest.mark.parametrize("ignore_norm", [False, True], ids=["all-sharded", "sharded-and-plain"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizers_step_dtensors(name: str, ignore_norm: bool) -> None:
    """AdamW's fused kernel takes DTensors, but not together with plain tensors in one group; SGD's takes none."""
    model = make()
    train(model, build_optimizer(model, OptimizerConfig(name=name, lr=1e-2)))  # type: ignore[arg-type]
    for rank in run_ranks(_sharded_training, 2, name, ignore_norm):
        for fqn, p in model.named_parameters():
            assert float((rank[fqn] - p.detach()).abs().max()) < 1e-6, fqn
