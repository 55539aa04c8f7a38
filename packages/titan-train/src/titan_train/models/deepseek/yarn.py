"""YaRN: stretch rotary positions to a longer context (arXiv:2309.00071), as DeepSeek applies it.

Frequencies that turn often within the original context keep their resolution; slow ones are divided by the stretch;
between them the blend is linear in the channel's number (not, as Llama 3.1 has it, in the wavelength). The attention
scores are sharpened by a temperature, which grows with the logarithm of the stretch.
"""

import math

import torch
from torch import Tensor

from titan_train.models.common.rope import rope_frequencies
from titan_train.models.deepseek.args import DeepSeekArgs


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
