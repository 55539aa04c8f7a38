"""A source as one long run of tokens, readable anywhere: what packing asks of it, and shards that provide it."""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from titan_train.config.data import Verify
from titan_train.data.order.permutation import permute
from titan_train.data.shards.format import ShardInfo, TokenShard

# Random blocks that verify="sample" reads of a source, and of one shard at most: every rank reads them at every start.
_SAMPLED_BLOCKS, _SAMPLED_OF_SHARD = 64, 8


class TokenSource(Protocol):
    """Documents joined into one run of tokens, each ending with the end-of-sequence token."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens and document ends (hex)."""
        ...

    def window(self, start: int, n: int) -> npt.NDArray[Any]:
        """Tokens ``start`` to ``start + n``; an unsigned integer array, possibly a read-only view of the file."""
        ...

    def document_starts(self, start: int, n: int) -> npt.NDArray[np.int64]:
        """Where documents begin in ``[start + 1, start + n)``, relative to ``start``, rising."""
        ...


@runtime_checkable
class DocumentEnds(Protocol):
    """A source that knows where all its documents end, and which of its tokens are learned."""

    @property
    def not_learned_from(self) -> int | None:
        """Stored ids of tokens that are not labels have this number added; None if all tokens are labels."""
        ...

    def document_ends(self) -> npt.NDArray[np.int64]:
        """Token offset behind each document, rising; the last is the number of tokens."""
        ...


class ShardedTokens:
    """Memory-mapped shards in a row.

    Args:
        folders: Folder of each shard.
        infos: What the manifest says of each shard.
        tokenizer_fingerprint: Hex; the shards must carry it.
        fingerprint: Hash of the content, from the manifests.
        verify: header, sample or full, see `DataConfig.verify`.
        vocab_size: Ids must be below it; compared in the blocks that ``verify`` reads.
        not_learned_from: See `DocumentEnds`.
        keep: Whether the shards stay mapped, see `FileMap`.

    Raises:
        ValueError: If a shard is missing, cut or damaged as far as ``verify`` looks. Headers and sizes are always compared.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        infos: Sequence[ShardInfo],
        *,
        tokenizer_fingerprint: str,
        fingerprint: str,
        verify: Verify = "sample",
        vocab_size: int = 2**32,
        not_learned_from: int | None = None,
        keep: bool = False,
    ) -> None:
        pairs = [(folder, info) for folder, info in zip(folders, infos, strict=True) if info.tokens]
        self._shards = [TokenShard(folder, info, tokenizer_fingerprint, keep=keep) for folder, info in pairs]
        self._starts = np.cumsum([0, *(info.tokens for _, info in pairs)]).tolist()
        self.num_tokens: int = self._starts[-1]
        self.fingerprint = fingerprint
        self.not_learned_from = not_learned_from
        count = len(pairs)
        for number, shard in enumerate(self._shards):  # the sampled blocks are spread evenly
            sampled = (number + 1) * _SAMPLED_BLOCKS // count - number * _SAMPLED_BLOCKS // count
            verify_shard(shard, verify, vocab_size, sampled=min(sampled, _SAMPLED_OF_SHARD))

    def window(self, start: int, n: int) -> npt.NDArray[Any]:
        number = bisect_right(self._starts, start) - 1
        offset = start - self._starts[number]
        tokens = self._shards[number].tokens[offset : offset + n]
        if tokens.size == n:
            return tokens
        parts = [tokens]
        missing = n - tokens.size
        while missing:  # the window runs on into the next shard
            number += 1
            parts.append(self._shards[number].tokens[:missing])
            missing -= parts[-1].size
        return np.concatenate(parts)

    def document_ends(self) -> npt.NDArray[np.int64]:
        ends = [
            shard.document_ends.astype(np.int64) + start
            for shard, start in zip(self._shards, self._starts, strict=False)
        ]
        return np.concatenate(ends) if ends else np.empty(0, dtype=np.int64)

    def document_starts(self, start: int, n: int) -> npt.NDArray[np.int64]:
        number = bisect_right(self._starts, start) - 1
        found: list[npt.NDArray[np.int64]] = []
        while number < len(self._shards) and self._starts[number] < start + n:
            # An end is the next document's start; the last end of a shard is the first start of the next.
            first, last = start + 1 - self._starts[number], start + n - self._starts[number]
            ends = self._shards[number].document_ends
            low, high = ends.searchsorted(np.array([max(first, 0), last], dtype=np.uint64)).tolist()
            inside = ends[low:high].astype(np.int64)
            inside += self._starts[number] - start
            found.append(inside)
            number += 1
        return found[0] if len(found) == 1 else np.concatenate(found)


def verify_shard(shard: TokenShard, verify: Verify, vocab_size: int = 2**32, sampled: int = _SAMPLED_OF_SHARD) -> None:
    """Check a shard's content against its checksums.

    Args:
        shard: The shard.
        verify: header (nothing more), sample or full.
        vocab_size: Ids must be below it.
        sampled: Random blocks that a sample reads.

    Raises:
        ValueError: Naming the shard and the block that differs.
    """
    if verify == "header" or not shard.num_blocks or (verify == "sample" and not sampled):
        return
    blocks = np.arange(shard.num_blocks, dtype=np.int64)
    if verify == "sample":
        # the same blocks every time: a check that fails once must fail again
        blocks = permute(blocks[:sampled], shard.num_blocks, "verify", shard.path.name)
    else:
        shard.check_index()
    shard.check_documents(every=verify == "full")
    for block in blocks.tolist():
        shard.check_block(block, vocab_size)
