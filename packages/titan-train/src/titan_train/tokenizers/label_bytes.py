"""Bits per byte: a loss over text that does not depend on how the tokenizer cuts it.

The sum of the negative log-likelihoods of the labels that count, in bits, over the UTF-8 bytes that these same labels stand
for. A token that ends or pads a text is paid for and has no bytes.
"""

import math
from typing import TYPE_CHECKING

from titan_train.tokenizers.protocol import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


def bits_per_byte(nats: float, num_bytes: float) -> float | None:
    """Bits that each byte costs; None without a byte.

    Args:
        nats: Sum of the negative log-likelihoods.
        num_bytes: UTF-8 bytes of the text.
    """
    return nats / (math.log(2) * num_bytes) if num_bytes > 0 else None


class LabelBytes:
    """Counts the bytes that labels stand for, by a table of all tokens that is built at the first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table: Tensor | None = None

    def __call__(self, labels: "Tensor") -> "Tensor":
        """Bytes of all labels together, an int64 scalar on their device.

        Args:
            labels: Ids, int64, any shape. Negative ones do not count (masked), ids beyond the vocabulary have no bytes.
        """
        import torch  # tokenizers work without it

        size = self._tokenizer.vocab_size
        if self._table is None or self._table.device != labels.device:
            lengths = [len(self._tokenizer.token_bytes(token)) for token in range(size)]
            self._table = torch.tensor([*lengths, 0], device=labels.device)
        return self._table[labels.masked_fill(labels < 0, size).clamp(max=size)].sum()
