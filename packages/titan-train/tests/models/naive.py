"""A model against a reference written from the definitions: float64, weights away from their start, every gradient."""

from collections.abc import Callable
from typing import Any

import torch
from titan_train.models import init_for
from torch import Tensor


def shaken(model: Any) -> Any:
    """The model in float64, away from the initial values, where logits are near zero and norm weights all one."""
    init = init_for(model)
    for i, (fqn, parameter) in enumerate(model.named_parameters()):
        init(fqn, parameter.data, torch.Generator().manual_seed(i))
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 + i))
        parameter.data.add_(noise, alpha=0.1)
    return model.double()


def assert_matches(model: Any, naive: Callable[[dict[str, Tensor], Any, Tensor], Tensor], atol: float) -> None:
    """Logits of two rows of nine tokens within ``atol``, and every gradient within it of the tensor's largest."""
    vocab_size = model.args.vocab_size
    tokens = torch.randint(vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    probe = torch.randn(2, 9, vocab_size, generator=torch.Generator().manual_seed(2)).double()
    got = model(tokens)
    (got * probe).sum().backward()

    weights = {fqn: p.detach().clone().requires_grad_() for fqn, p in model.named_parameters()}
    want = naive(weights, model.args, tokens)
    (want * probe).sum().backward()
    assert float((got - want).detach().abs().max()) < atol
    for fqn, parameter in model.named_parameters():
        gradient = weights[fqn].grad
        assert parameter.grad is not None
        assert gradient is not None
        assert float((parameter.grad - gradient).abs().max()) < atol * max(1.0, float(gradient.abs().max())), fqn
