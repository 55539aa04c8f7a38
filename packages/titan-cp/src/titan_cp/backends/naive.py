"""The whole score matrix, in plain torch operations: any device, any dtype, any tile. The twin of every kernel."""

import torch
from torch import Tensor

from titan_cp.backends.backend import DenseBackend, Request, Saved
from titan_cp.planning.costs import accumulator_dtype, no_autocast


class Naive(DenseBackend):
    """Scores, softmax and its derivative written out. O(Tq · Tk) memory."""

    name = "naive"
    summary = "plain torch operations, O(S²/N²) memory"
    narrow_values = True
    one_key_apart = False  # it is what the others are compared with, so it takes no way around its scores

    def why_not(self, request: Request) -> str | None:
        """Serves everything."""
        del request

    def block_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of one block."""
        with no_autocast(q.device):
            scores = self._scores(q, k, causal, bias, scale)
            lse = torch.logsumexp(scores, dim=-1)
            # A row without keys has lse = -inf; exp(-inf - 0) makes its probabilities 0 rather than NaN.
            p = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
            out = p @ v.to(p.dtype).unsqueeze(2)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def block_backward(
        self, saved: Saved, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of one block."""
        with no_autocast(saved.q.device):
            return self._gradients(saved, causal, bias, scale)

    def _gradients(
        self, saved: Saved, causal: bool, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        _, q, k, v, _, lse = saved
        scores = self._scores(q, k, causal, bias, scale)
        wide, groups = scores.dtype, scores.shape[1:3]
        grad_out, out, q_grouped = (t.to(wide).unflatten(1, groups) for t in (saved.grad_out, saved.out, q))
        lse = lse.to(wide).unflatten(1, groups)
        p = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
        grad_p = grad_out @ v.to(wide).unsqueeze(2).transpose(-1, -2)
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad_scores = p * (grad_p - delta) * scale
        grad_q = (grad_scores @ k.to(wide).unsqueeze(2)).flatten(1, 2)
        grad_k = (grad_scores.transpose(-1, -2) @ q_grouped).sum(2)
        grad_v = (p.transpose(-1, -2) @ grad_out).sum(2)
        return grad_q, grad_k, grad_v

    def _scores(self, q: Tensor, k: Tensor, causal: bool, bias: Tensor | None, scale: float) -> Tensor:
        """Masked, scaled scores, shape ``[B, Hk, Hq/Hk, Tq, Tk]``."""
        wide = accumulator_dtype(q.dtype)
        grouped = q.to(wide).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
        scores = grouped @ k.to(wide).unsqueeze(2).transpose(-1, -2) * scale
        if causal:
            square = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(square.triu(1), float("-inf"))
        return scores if bias is None else scores + bias.to(wide)
