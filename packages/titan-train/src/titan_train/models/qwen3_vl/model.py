"""Qwen3-VL as a plain module (arXiv:2511.21631): a Qwen3 decoder that is given features of images in place of tokens.

Positions have three axes (M-RoPE): text advances all of them, image tokens count rows and columns.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_train.models.common.hf_config import compare_settings
from titan_train.models.common.rope import rope_cos_sin, rope_frequencies
from titan_train.models.qwen3.model import Qwen3
from titan_train.models.qwen3_vl.hf import args_from_hf, settings_of
from titan_train.models.vision_language.decoder import SeesImages


class Qwen3VL(SeesImages, Qwen3):
    """A Qwen3 decoder, dense or with experts, with an encoder of images before it."""

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As `Decoder.rope`; of positions ``[B, S, 3]``, channel pairs take turns between time, row and column."""
        if positions.ndim == 2:
            return rope_cos_sin(positions, self.rope_dim, self.rope_theta)
        pairs = torch.arange(self.rope_dim // 2, device=positions.device)
        axis = torch.zeros_like(pairs)
        for number, count in ((1, self.args.rope_row_pairs), (2, self.args.rope_column_pairs)):
            axis = torch.where((pairs % 3 == number) & (pairs < 3 * count), number, axis)
        angles = positions.double()[..., axis] * rope_frequencies(
            self.rope_dim, self.rope_theta, device=positions.device
        )
        return angles.cos().float().unsqueeze(2), angles.sin().float().unsqueeze(2)

    def check_hf_config(self, config: Mapping[str, Any]) -> None:
        """Refuse weights whose ``config.json`` describes another model.

        Raises:
            ValueError: Names every setting that differs, or that this model does not have.
        """
        compare_settings(settings_of(args_from_hf(config)), settings_of(self.args), name=type(self).__name__)
