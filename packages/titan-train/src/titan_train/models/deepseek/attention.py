"""Multi-head latent attention (arXiv:2405.04434, section 2.1).

Keys and values of all heads are made from one narrow latent a token, so that a cache would hold only that; queries may be
made from a latent too. As a latent cannot be rotated, each head has channels without positions, and next to them a few
rotated ones; the rotated key is one for all heads. Rotated channels are paired with their neighbours, as in published
DeepSeek weights: here they are sorted into halves first, in queries and keys alike, which changes no score.

Value heads are narrower than key heads, in context parallelism and in the key-value cache too. Only the CPU's kernel is
given a copy padded with zeros.

YaRN stretches rotary positions to a longer context (arXiv:2309.00071). Frequencies that turn often within the original context
keep their resolution; slow ones are divided by the stretch; between them the blend is linear in the channel's number (not, as
Llama 3.1 has it, in the wavelength). Attention scores are sharpened by a temperature, which grows with the logarithm of the
stretch.

Shapes: B batch, S sequence, d width, H heads.
"""

import math

import torch
from torch import Tensor, nn

from titan_train.models.common.attention import CausalAttention, SequenceContext
from titan_train.models.common.norm import RMSNorm
from titan_train.models.common.rope import rope_frequencies, rotate_pair
from titan_train.models.common.shared_input import SharedInput
from titan_train.models.deepseek.args import DeepSeekArgs

LATENT_EPS = 1e-6
"""Added to the mean square of a latent in its norm: published models take this whatever ``rms_norm_eps`` says."""


class LatentAttention(nn.Module):
    """Attention whose keys and values come from a latent."""

    rotate = staticmethod(rotate_pair)

    def __init__(self, args: DeepSeekArgs) -> None:
        """Build the projections."""
        super().__init__()
        self.nope_dim, self.rope_dim, self.v_dim = args.qk_nope_head_dim, args.qk_rope_head_dim, args.v_head_dim
        self.num_heads = args.num_heads
        self.kv_rank = args.kv_lora_rank
        self.score_scale = yarn_score_scale(args)
        queries = args.num_heads * args.qk_head_dim
        if args.q_lora_rank == 0:
            self.wq = nn.Linear(args.dim, queries, bias=False)
        else:
            self.wq_a = nn.Linear(args.dim, args.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(args.q_lora_rank, eps=LATENT_EPS)
            self.wq_b = nn.Linear(args.q_lora_rank, queries, bias=False)
        self.has_q_latent = args.q_lora_rank > 0
        self.wkv_a = nn.Linear(args.dim, args.kv_lora_rank + args.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(args.kv_lora_rank, eps=LATENT_EPS)
        self.wkv_b = nn.Linear(args.kv_lora_rank, args.num_heads * (self.nope_dim + self.v_dim), bias=False)
        self.wo = nn.Linear(args.num_heads * self.v_dim, args.dim, bias=False)
        self.linears = SharedInput()
        self.inner_attention = CausalAttention(
            args.num_heads, args.num_heads, args.qk_head_dim, value_dim=args.v_head_dim
        )

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        assert context.rope is not None
        if self.has_q_latent:
            q_latent, kv_latent = self.linears(x, self.wq_a, self.wkv_a)
            q = self.wq_b(self.q_norm(q_latent))
        else:
            q, kv_latent = self.linears(x, self.wq, self.wkv_a)
        latent, key_rope = kv_latent.split([self.kv_rank, self.rope_dim], dim=-1)

        # -1 heads: a module whose projections were cut over ranks holds only its own
        q = q.unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        q_rope, k_rope = self.rotate(_halves(q_rope), _halves(key_rope.unsqueeze(-2)), *context.rope)
        q = torch.cat((q_nope, q_rope), dim=-1) * self.score_scale
        k_nope, v = (
            self.wkv_b(self.kv_norm(latent))
            .unflatten(-1, (-1, self.nope_dim + self.v_dim))
            .split([self.nope_dim, self.v_dim], dim=-1)
        )
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
        return self.wo(self.inner_attention(q, k, v, context).flatten(-2))


def _halves(x: Tensor) -> Tensor:
    """Channels 0, 2, 4, … and then 1, 3, 5, …: neighbours that form a pair become first and second half."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def yarn_frequencies(args: DeepSeekArgs, device: torch.device | None = None) -> Tensor:
    """Angle per position of every rotated channel pair, ``[qk_rope_head_dim / 2]`` float64, in radians per token."""
    frequencies = rope_frequencies(args.qk_rope_head_dim, args.rope_theta, device=device)
    if args.rope_factor == 1.0:
        return frequencies
    first = max(math.floor(_pair_that_turns(args, args.rope_beta_fast)), 0)
    last = min(math.ceil(_pair_that_turns(args, args.rope_beta_slow)), args.qk_rope_head_dim - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float64, device=device)
    stretched = ((pairs - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return frequencies * (1.0 - stretched) + frequencies / args.rope_factor * stretched


def yarn_score_scale(args: DeepSeekArgs) -> float:
    """What attention scores are multiplied by, besides one over the root of the head width."""
    return (0.1 * args.rope_mscale * math.log(args.rope_factor) + 1.0) ** 2


def _pair_that_turns(args: DeepSeekArgs, turns: float) -> float:
    """The number, with a fraction, of the channel pair that turns this often over the original context."""
    wavelength = args.rope_original_seq_len / (turns * 2 * math.pi)
    return args.qk_rope_head_dim * math.log(wavelength) / (2 * math.log(args.rope_theta))
