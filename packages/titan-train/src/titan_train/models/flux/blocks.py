"""Double and single blocks. Text comes first wherever both streams are one sequence; attention is never causal.

``vec`` is what a sample is conditioned on besides its text tokens: time, pooled text, guidance. Each block turns it into a
shift, a scale and a gate for every branch, so a branch is ``x + gate * f((1 + scale) * norm(x) + shift)``.

Shapes: B samples, T text tokens, I image tokens, S = T + I, H heads, D channels of a head, d = H * D.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_train.models.common.norm import RMSNorm
from titan_train.models.common.shared_input import GeluInput, ModulatedNorm, SharedInput
from titan_train.models.flux.args import FluxArgs
from titan_train.models.flux.rope import rotate_neighbours

_EPS = 1e-6


class TokenPlaces:
    """Where the tokens of a batch stand: the same for every block.

    Neither a tuple nor a dataclass on purpose: FSDP2 casts the floating-point tensors in those, and the angles are float32.
    """

    __slots__ = ("cos", "plan", "sin")

    def __init__(self, cos: Tensor, sin: Tensor, plan: Any) -> None:
        """Angles ``[1 or B, S, D / 2]``; ``plan`` is of context parallelism, None without it."""
        self.cos = cos
        self.sin = sin
        self.plan = plan


class FullAttention(nn.Module):
    """Scaled dot-product attention in which every token sees every other."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        """Record the shape, which context parallelism reads; there are no parameters."""
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, plan: Any = None) -> Tensor:
        """Queries, keys and values are ``[B, S, H, D]``, and so is the result."""
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


class Modulation(nn.Module):
    """Shifts, scales and gates from ``vec``."""

    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(dim, parts * dim)

    def forward(self, vec: Tensor) -> Sequence[Tensor]:
        """``parts`` tensors ``[B, 1, d]``."""
        return self.linear(F.silu(vec)).unsqueeze(1).chunk(self.parts, dim=-1)


class FluxMLP(nn.Module):
    """Feed-forward of four times the width, with the tanh form of GELU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.linears, self.gelu = SharedInput(), GeluInput()

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, d]``."""
        (h,) = self.linears(x, self.up)
        return self.gelu(h, self.down)


class StreamProjections(nn.Module):
    """Queries, keys and values of one stream, and the projection back."""

    def __init__(self, args: FluxArgs) -> None:
        super().__init__()
        dim = args.dim
        self.num_heads = args.num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.q_norm, self.k_norm = (RMSNorm(args.head_dim, eps=_EPS) for _ in range(2))
        self.linears = SharedInput()

    def heads(self, x: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised queries and keys, and values, ``[B, S, H, D]``, of what `SharedInput` takes."""
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in self.linears(x, self.q, self.k, self.v))
        return self.q_norm(q), self.k_norm(k), v


class StreamAttention(nn.Module):
    """Text and image, each with weights of its own, attend to both."""

    rotate = staticmethod(rotate_neighbours)

    def __init__(self, args: FluxArgs) -> None:
        super().__init__()
        self.text, self.image = StreamProjections(args), StreamProjections(args)
        self.inner = FullAttention(args.num_heads, args.head_dim)

    def forward(self, x: Tensor | tuple[Any, Any], text_tokens: int, places: TokenPlaces) -> Tensor:
        """``[B, S, d]`` from text and image, concatenated; the image begins at token T.

        ``x`` may also be two inputs of norms, of text and of image, which the projections apply.
        """
        text, image = (x[:, :text_tokens], x[:, text_tokens:]) if isinstance(x, Tensor) else x
        q, k, v = (torch.cat(pair, dim=1) for pair in zip(self.text.heads(text), self.image.heads(image), strict=True))
        q, k = self.rotate(q, k, places.cos, places.sin)
        out = self.inner(q, k, v, places.plan).flatten(-2)
        return torch.cat((self.text.out(out[:, :text_tokens]), self.image.out(out[:, text_tokens:])), dim=1)


class DoubleBlock(nn.Module):
    """Text and image with weights of their own; they meet in attention."""

    norm_readers = (
        ("attention_norm", "attention.text"),
        ("attention_norm", "attention.image"),
        ("mlp_norm", "text_mlp"),
        ("mlp_norm", "image_mlp"),
    )
    """Norms, and the modules that alone read them."""

    def __init__(self, args: FluxArgs) -> None:
        super().__init__()
        self.text_modulation, self.image_modulation = Modulation(args.dim, 6), Modulation(args.dim, 6)
        self.attention = StreamAttention(args)
        self.text_mlp, self.image_mlp = FluxMLP(args.dim), FluxMLP(args.dim)
        self.attention_norm, self.mlp_norm = ModulatedNorm(_EPS), ModulatedNorm(_EPS)

    def forward(self, image: Tensor, text: Tensor, vec: Tensor, places: TokenPlaces) -> tuple[Tensor, Tensor]:
        """Image ``[B, I, d]`` and text ``[B, T, d]`` after the block."""
        text_parts, image_parts = self.text_modulation(vec), self.image_modulation(vec)
        length = text.shape[1]
        norm = self.attention_norm
        inputs: tuple[Any, Any] = norm(text, *text_parts[:2]), norm(image, *image_parts[:2])
        # as one sequence, so that what splits or gathers the attention's input finds a tensor
        joined = torch.cat(inputs, dim=1) if isinstance(inputs[0], Tensor) else inputs
        attended = self.attention(joined, length, places)
        text = text + text_parts[2] * attended[:, :length]
        image = image + image_parts[2] * attended[:, length:]
        text = text + text_parts[5] * self.text_mlp(self.mlp_norm(text, *text_parts[3:5]))
        image = image + image_parts[5] * self.image_mlp(self.mlp_norm(image, *image_parts[3:5]))
        return image, text

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward; a token goes through one of the two streams, and modulation is once per sample."""
        streams = (self.attention, self.text_mlp, self.image_mlp)
        return 3.0 * sum(p.numel() for module in streams for p in module.parameters()) + _attention_flops(self, seq_len)


class Mixer(nn.Module):
    """Attention and feed-forward of a single block, side by side on the same input, added by their last projections.

    Published checkpoints hold ``out`` and ``down`` as one matrix; apart, tensor parallelism can cut each by its own columns.
    """

    rotate = staticmethod(rotate_neighbours)

    def __init__(self, args: FluxArgs) -> None:
        super().__init__()
        dim = args.dim
        self.num_heads = args.num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.q_norm, self.k_norm = (RMSNorm(args.head_dim, eps=_EPS) for _ in range(2))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim, bias=False)
        self.inner = FullAttention(args.num_heads, args.head_dim)
        self.linears, self.gelu = SharedInput(), GeluInput()

    def forward(self, x: Tensor, places: TokenPlaces) -> Tensor:
        """``[B, S, d]``."""
        *heads, h = self.linears(x, self.q, self.k, self.v, self.up)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in heads)
        q, k = self.rotate(self.q_norm(q), self.k_norm(k), places.cos, places.sin)
        attended = self.out(self.inner(q, k, v, places.plan).flatten(-2))
        return attended + self.gelu(h, self.down)


class SingleBlock(nn.Module):
    """Text and image as one sequence."""

    norm_readers = (("norm", "mixer"),)
    """The norm, and the module that alone reads it."""

    def __init__(self, args: FluxArgs) -> None:
        super().__init__()
        self.modulation = Modulation(args.dim, 3)
        self.mixer = Mixer(args)
        self.norm = ModulatedNorm(_EPS)

    def forward(self, x: Tensor, vec: Tensor, places: TokenPlaces) -> Tensor:
        """``[B, S, d]``."""
        shift, scale, gate = self.modulation(vec)
        return x + gate * self.mixer(self.norm(x, shift, scale), places)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward; modulation is once per sample."""
        return 6.0 * sum(p.numel() for p in self.mixer.parameters()) + _attention_flops(self, seq_len)


def _attention_flops(block: nn.Module, seq_len: int) -> float:
    inners = [module for module in block.modules() if isinstance(module, FullAttention)]
    return sum(12.0 * inner.num_heads * inner.head_dim * seq_len for inner in inners)
