"""Which documents are held out for validation: a hash of the text decides, so copies land on the same side."""

import hashlib

from titan_train.config import DataConfig, SourceConfig


def is_held_out(utf8: bytes, fraction: float) -> bool:
    """Whether a document belongs to the held-out share, by a hash of its text alone."""
    if fraction <= 0:
        return False
    return int.from_bytes(hashlib.blake2b(utf8, digest_size=8).digest(), "big") < fraction * 2**64


def held_out_fraction(source: SourceConfig, config: DataConfig) -> float:
    """Share of a source held out: none of a source that is a validation source itself."""
    return 0.0 if source in config.validation_sources else config.validation_fraction
