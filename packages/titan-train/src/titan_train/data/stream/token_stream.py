"""One source of text as samples, tokenized while they are read."""

import contextlib
import threading
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from titan_train.config import DataConfig, SourceConfig
from titan_train.data.loader.rows import CutRows, Row, TokenRows, WholeRows
from titan_train.data.order.permutation import permute
from titan_train.data.prepared import content_key
from titan_train.data.sources.chat import conversations_for, template_key
from titan_train.data.stream.blocks import StreamBlocks
from titan_train.data.stream.reader import cursor_from_json
from titan_train.tokenizers import ChatTemplate, Tokenizer

_FORMAT = 1


class TokenStream:
    """Samples of a stream, by number.

    Sample ``i`` lies in block ``i // window``; its place there is drawn by a permutation of the block.

    Args:
        source: A source of text with ``stream``.
        config: Options of all sources.
        tokenizer: Makes the tokens.
        cache_dir: The blocks go into a folder below it.
        seq_len: Inputs of a sample.
        seed: Of the permutations.
        template: Writes conversations; needed for a source of chats.
        pad_id: Fills what whole documents leave of a sample.

    Raises:
        ValueError: There is no template for a source of chats.
    """

    def __init__(
        self,
        source: SourceConfig,
        config: DataConfig,
        tokenizer: Tokenizer,
        cache_dir: Path,
        *,
        seq_len: int,
        seed: int,
        template: ChatTemplate | None = None,
        pad_id: int = 0,
    ) -> None:
        chats = conversations_for(source, tokenizer, template)
        self._whole, self._pad_id = source.packs_whole, pad_id
        self._name, self._seed = source.name, seed
        self._window, self._seq_len = source.stream_window, seq_len
        self.fingerprint = _fingerprint(source, config, tokenizer, template)
        key = content_key([self.fingerprint, seq_len, list(source.paths)])[:16]
        folder = cache_dir / f"{source.name}-stream-{key}"
        self._blocks = StreamBlocks(source, config, tokenizer, folder, seq_len=seq_len, chats=chats)
        self._open = lru_cache(maxsize=4)(self._rows)
        self._ahead: threading.Thread | None = None
        self._required = 0  # the last block of the step before

    @property
    def num_rows(self) -> int | None:
        """Not known: the stream is read as it comes."""
        return None

    def read(self, row: int) -> Row:
        number, place = divmod(row, self._window)
        rows = self._block(number)
        places = np.array([place], dtype=np.int64)
        return rows.read(int(permute(places, self._window, self._seed, f"stream {self._name}", number)[0]))

    def require(self, samples: int) -> None:
        """Make the blocks of the first ``samples`` samples that are not made yet: what fails, fails on every rank alike.

        Raises:
            ValueError: As `StreamBlocks.open`.
        """
        if samples:
            number = (samples - 1) // self._window
            if number > self._required:
                self._blocks.step_blocks = number - self._required + 1
                self._required = number
            self._block(number)

    def files_hash(self) -> str:
        """Hash (hex) of the names and sizes of all its files."""
        return self._blocks.files_hash()

    def state(self, samples: int) -> list[Any] | None:
        """Where the block of the next sample begins, as JSON: its number, its cursor (None in the first block), the files of the
        last block that was read, and the fingerprint; None before the first sample.
        """
        number, cursor = self._blocks.cursor(samples // self._window)
        files = self._blocks.files((samples - 1) // self._window) if samples else []
        place = None if cursor is None else asdict(cursor)
        return [number, place, files, self.fingerprint] if place or files else None

    def load_state(self, state: Any) -> None:
        """Continue from what `state` gave.

        Raises:
            ValueError: If it is not a state, or the files are not those that were read.
        """
        if state is None:
            return
        if not (isinstance(state, list) and len(held := cast("list[Any]", state)) in (2, 4)):
            raise ValueError(f"the saved state of stream {self._name!r} is {state!r}, not a block and a place.")
        unsaved: list[Any] = [[], self.fingerprint]  # by earlier releases
        number, place, files, made_by = [*held, *unsaved][:4]
        self._required = int(number)
        cursor = None if place is None else cursor_from_json(place)
        if cursor is not None and made_by != self.fingerprint:
            cursor = replace(cursor, skip=0)  # it counts other tokens: the document begins anew
        self._blocks.give(int(number), cursor, files)
        self._open.cache_clear()

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.join()
        self._blocks.close()

    def _rows(self, number: int) -> TokenRows:
        block = self._blocks.open(number)
        return WholeRows(block, self._seq_len, self._pad_id) if self._whole else CutRows(block, self._seq_len)

    def _block(self, number: int) -> TokenRows:
        block = self._open(number)
        busy = self._ahead is not None and self._ahead.is_alive()
        if not busy and self._blocks.stands_at(number + 1):
            self._ahead = threading.Thread(
                target=self._make_ahead, args=(number + 1,), name="titan-data-stream", daemon=True
            )
            self._ahead.start()
        return block

    def _make_ahead(self, number: int) -> None:
        with contextlib.suppress(Exception):  # raised again where the block is read
            self._open(number)


def _fingerprint(source: SourceConfig, config: DataConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> str:
    content: dict[str, Any] = {
        "format": _FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "kind": source.kind,
        "text_key": source.text_key,
        "max_document_bytes": source.max_document_bytes,
        "window": source.stream_window,
        "add_bos": config.add_bos,
        "on_error": config.on_error,
        "exclude": list(source.exclude),
    }
    if source.packs_whole:
        content["packing"] = "whole"
    return content_key(content | template_key(source, template))
