"""AdamW without a decay of the learning rate: Schedule-Free learning (arXiv:2405.15682), the authors' form of it.

Three sequences: AdamW's steps go into z; x is a weighted mean of all z, and the result; gradients are taken at y, between
both. The weight of a step is its squared learning rate, so that steps of the warm-up count less. Training has y in the weights::

    y = (1 - beta1) z + beta1 x
    z <- z - lr (g / (sqrt(v) + eps) + decay y)
    x <- (1 - c) x + c z        c = lr^2 / (sum of lr^2)

x is not kept, as y and z give it. So the state is z and v, 8 bytes an element as AdamW's, and the beta1 that y has: if a resume
changes it, x and z stay and y moves. Validation, export and generation take x, by the means that a moving average of weights
has (`titan_train.optim.average`). A step is elementwise, so that nothing depends on the layout.

Limits: no fused kernel. The paper wants a larger rate than AdamW's and a ``beta1`` of 0.9 to 0.98, a warm-up, and no decay.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from titan_train.optim.average import SHARE, Z
from titan_train.optim.update import closure_loss, plain_tensor


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """Schedule-Free AdamW.

    Args:
        param_groups: Each with ``lr`` and ``weight_decay``.
        betas: The share of x in y, and the decay of the squared gradient's mean.
        eps: Added to that mean's root.
    """

    def __init__(
        self, param_groups: Iterable[dict[str, Any]], *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
    ) -> None:
        """State is made at a parameter's first step."""
        super().__init__(list(param_groups), {"lr": 1e-3, "weight_decay": 0.0, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        loss = closure_loss(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if Z not in state:
            state["step"] = torch.zeros(())
            state["squared_rates"] = torch.zeros((), dtype=torch.float64)
            state[Z] = parameter.detach().clone()
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state[SHARE] = torch.full((), group["betas"][0], dtype=torch.float64)
        beta1, beta2 = group["betas"]
        rate = group["lr"]
        state["step"] += 1
        state["squared_rates"] += rate**2
        whole = float(state["squared_rates"])
        share = rate**2 / whole if whole else 0.0
        y, gradient = plain_tensor(parameter), plain_tensor(parameter.grad)
        z, square = plain_tensor(state[Z]), plain_tensor(state["exp_avg_sq"])
        if (before := float(state[SHARE])) != beta1:  # y of x and z with the new share
            y.lerp_(z, 1 - beta1 / before)
            state[SHARE].fill_(beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = square.sqrt().div_(math.sqrt(1 - beta2 ** int(state["step"]))).add_(group["eps"])
        update = gradient / root
        update.add_(y, alpha=group["weight_decay"])
        y.lerp_(z, share)  # x moves towards the old z by c, and both towards the new one
        y.add_(update, alpha=rate * (beta1 * (1 - share) - 1))
        z.sub_(update, alpha=rate)
