"""What a sample of a shard holds, and how samples are read by number.

- ``latent``: ``[C, H, W]``, what the autoencoder returned: its mean, or a sample.
- ``logvar``: as large, the log of the variance about that mean; a sample is then drawn when it is read. Optional.
- ``text``: ``[T, text_dim]``, features of each text token. ``pooled``: ``[pooled_dim]``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FIELDS = ("latent", "logvar", "text", "pooled")
_OPTIONAL = ("logvar",)

Sample = Mapping[str, npt.NDArray[np.float32]]
"""Field to array."""


class ShardFile(Protocol):
    """The samples of one file."""

    path: Path
    count: int
    shapes: Mapping[str, tuple[int, ...]]
    """Of one sample, by field."""
    content: str
    """Hash of the header or of the table of contents."""

    def read(self, number: int) -> Sample:
        """The arrays of a sample.

        Raises:
            ValueError: The file is damaged there.
        """
        ...

    def name_of(self, number: int) -> str:
        """How messages call a sample."""
        ...

    def captions(self, numbers: Sequence[int]) -> list[str]:
        """The captions of samples; what `name_of` says where there is none."""
        ...


def check_fields(where: str, found: Mapping[str, Any]) -> None:
    missing = [name for name in FIELDS if name not in found and name not in _OPTIONAL]
    if missing:
        raise ValueError(
            f"{where} lacks {', '.join(missing)}: a sample has latent, text and pooled, and may have logvar. Encode it with all "
            "of them."
        )
