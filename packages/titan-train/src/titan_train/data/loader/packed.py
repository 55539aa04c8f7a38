"""Samples of a fixed length from sources of any length, each found from its number alone.

Every source is cut into windows of ``seq_len + 1`` tokens: ``seq_len`` inputs and their next tokens (`rows` says how).
Global sample ``g`` goes through three pure steps that do not depend on the number of ranks:

    g  --mixture-->  (source, index i)  --epoch = i // windows, Feistel-->  window  --memory map-->  tokens

so a run's whole position in the data is one integer, the number of samples consumed.

Where documents meet inside a window is known from the index, so attention can be kept inside documents and positions
restarted.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_train.data.loader.batch import HostBatch, row_boundaries
from titan_train.data.loader.rows import CutRows, Row, StreamedRows, TokenRows, WholeRows
from titan_train.data.loader.source import BatchSource
from titan_train.data.order.mixture import Mixture
from titan_train.data.order.permutation import IndexArray, permute
from titan_train.data.shards.token_source import TokenSource

# Samples of a source that are located together, 64 KiB of numbers.
_CHUNK = 4096
_ENDLESS = 2**62


@dataclass(frozen=True, slots=True)
class SampleLocation:
    """Where samples lie; every field is an array with one entry per sample."""

    source: npt.NDArray[np.intp]
    """Number of the source, in `PackedDataset.source_names`."""
    epoch: IndexArray
    """How many times the source was read through before."""
    window: IndexArray
    """Number of the window within the source."""


class PackedDataset(BatchSource):
    """Samples of ``seq_len`` tokens from weighted sources, as a pure function of the sample number.

    Args:
        sources: Token sources and streams by name.
        seq_len: Tokens of a sample.
        seed: Seed of every order.
        weights: Share of each source; None takes its share of the tokens (a stream has none: give weights).
        tokenizer: Fingerprint of the tokenizer, for the check on resume.
        document_mask: Whether batches carry document boundaries and restart positions.
        mask_boundary_labels: Whether a document's last token has no label (it would be another document's first).
        max_epochs: Passes allowed over each source, by name; a source without an entry has no limit.
        whole: Names of sources whose windows hold whole documents.
        pad_id: Fills the rest of such a window.

    Raises:
        ValueError: If a source is shorter than one sample, or names, weights and limits do not agree.
    """

    def __init__(
        self,
        sources: Mapping[str, TokenSource | StreamedRows],
        *,
        seq_len: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        tokenizer: str = "",
        document_mask: bool = True,
        mask_boundary_labels: bool = True,
        max_epochs: Mapping[str, int] | None = None,
        whole: Collection[str] = (),
        pad_id: int = 0,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len} must be at least 1.")
        self._streams = {name: source for name, source in sources.items() if isinstance(source, StreamedRows)}
        known = {name: source for name, source in sources.items() if not isinstance(source, StreamedRows)}
        for name, source in known.items():
            if source.num_tokens < (2 if name in whole else seq_len + 1):
                raise ValueError(
                    f"source {name!r} has {source.num_tokens} tokens, but one sample of seq_len={seq_len} needs "
                    f"{seq_len + 1}. Use seq_len={max(1, source.num_tokens - 1)} or less, or a longer source."
                )
        given = dict(weights) if weights is not None else {n: float(s.num_tokens) for n, s in known.items()}
        if set(given) != set(sources):
            raise ValueError(
                f"the weights name {sorted(given)}, but the sources are {sorted(sources)}. Give each source one weight."
            )
        self.source_names = tuple(sources)
        self.seq_len = seq_len
        self.seed = seed
        self.tokenizer = tokenizer
        self.document_mask = document_mask
        self.mask_boundary_labels = mask_boundary_labels
        self.weights = given
        self._sources = tuple(sources.values())
        self._whole = sorted(set(whole) & set(sources))

        def rows_of(name: str, source: TokenSource | StreamedRows) -> TokenRows:
            if isinstance(source, StreamedRows):
                return source
            return WholeRows(source, seq_len, pad_id) if name in whole else CutRows(source, seq_len)

        self._rows = [rows_of(name, source) for name, source in sources.items()]
        # A stream has no end: all its samples are of pass 0, in the order of their numbers.
        self._windows = [_ENDLESS if rows.num_rows is None else rows.num_rows for rows in self._rows]
        self._mixture = Mixture(self.source_names, [given[name] for name in self.source_names], seed)
        self._max_epochs = dict(max_epochs or {})
        self._places = np.arange(seq_len, dtype=np.int64)
        self._chunk = lru_cache(maxsize=4 * len(self._sources))(self._make_chunk)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sources but streams, each counted once."""
        return sum(source.num_tokens for source in self._sources if not isinstance(source, StreamedRows))

    @property
    def num_windows(self) -> int:
        """Windows of all sources but streams: samples in one pass if the weights are the sources' sizes."""
        return sum(rows.num_rows or 0 for rows in self._rows)

    @property
    def fingerprint(self) -> str:
        """Hash (hex) of the tokens, the mixture and the masking: what resume compares besides seed and seq_len."""
        content: dict[str, Any] = {
            "sources": {
                n: [s.fingerprint, self.weights[n]] for n, s in zip(self.source_names, self._sources, strict=True)
            },
            "order": list(self.source_names) if len(self.source_names) > 1 else [],
            "document_mask": self.document_mask,
            "mask_boundary_labels": self.mask_boundary_labels,
        }
        if self._whole:
            content["whole"] = self._whole
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each source but streams was read after ``samples`` samples: 1.5 is one and a half times."""
        consumed = self._mixture.consumed(samples).tolist()
        pairs = zip(self.source_names, consumed, self._windows, strict=True)
        return {n: used / total for n, used, total in pairs if n not in self._streams}

    def check_samples(self, samples: int) -> None:
        """Check before a run that ``samples`` samples stay within every source's allowed passes.

        Raises:
            ValueError: If a source would be read more often than its `max_epochs`.
        """
        for number, used in enumerate(self._mixture.consumed(samples).tolist()):
            if used:
                self._check_epochs(number, (used - 1) // self._windows[number])

    def require(self, samples: int) -> None:
        """Have the streams ready for the first ``samples`` samples: what fails, fails on every rank alike.

        Raises:
            ValueError: If a stream cannot give them.
        """
        if self._streams:
            for name, used in zip(self.source_names, self._mixture.consumed(samples).tolist(), strict=True):
                if name in self._streams:
                    self._streams[name].require(used)

    def stream_states(self, samples: int) -> dict[str, Any]:
        """Where each stream stands after ``samples`` samples, as JSON."""
        consumed = dict(zip(self.source_names, self._mixture.consumed(samples).tolist(), strict=True))
        return {name: stream.state(consumed[name]) for name, stream in self._streams.items()}

    def load_stream_states(self, states: Mapping[str, Any]) -> None:
        """Continue the streams from what `stream_states` gave; one without a state begins at its start.

        Raises:
            ValueError: If the files are not those that were read.
        """
        for name, stream in self._streams.items():
            stream.load_state(states.get(name))

    def streamed_files(self) -> dict[str, str]:
        """Hash (hex) of the names and sizes of each stream's files."""
        return {name: stream.files_hash() for name, stream in self._streams.items()}

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def locate(self, samples: npt.ArrayLike) -> SampleLocation:
        """Source, epoch and window of each global sample number.

        Raises:
            ValueError: If a sample number is negative, or asks for more passes over a source than are allowed.
        """
        source, local = self._mixture.locate(_sample_numbers(samples))
        epoch, window = np.empty_like(local), np.empty_like(local)
        for number in np.unique(source).tolist():
            mine = np.flatnonzero(source == number)
            chunks = local[mine] // _CHUNK
            for chunk in np.unique(chunks).tolist():
                chosen = mine[chunks == chunk]
                epochs, windows = self._chunk(number, chunk)
                place = local[chosen] - chunk * _CHUNK
                epoch[chosen], window[chosen] = epochs[place], windows[place]
            self._check_epochs(number, int(epoch[mine].max()))
        return SampleLocation(source, epoch, window)

    def _make_chunk(self, number: int, chunk: int) -> tuple[IndexArray, IndexArray]:
        """Epoch and window of a run of one source's samples: a few samples cost as much to permute as thousands."""
        local = np.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK, dtype=np.int64)
        if self.source_names[number] in self._streams:
            return np.zeros_like(local), local
        total = self._windows[number]
        epoch, rest = np.divmod(local, total)
        window = np.empty_like(local)
        for pass_number in np.unique(epoch).tolist():
            chosen = epoch == pass_number
            window[chosen] = permute(rest[chosen], total, self.seed, self.source_names[number], pass_number)
        return epoch, window

    def build_batch(self, samples: npt.NDArray[np.int64], *, ignore_index: int, samples_consumed: int) -> HostBatch:
        size, length = samples.size, self.seq_len
        rows = self.rows(samples)
        starts = [row.document_starts for row in rows]
        tokens, labels, positions = (np.empty((size, length), dtype=np.int64) for _ in range(3))
        for number, row in enumerate(rows):
            tokens[number] = row.tokens[:-1]
            labels[number] = row.tokens[1:]
            if row.learned is not None:
                labels[number, ~row.learned[1:]] = ignore_index
        if self.mask_boundary_labels:
            last = [start + (number * length - 1) for number, start in enumerate(starts)]
            labels.reshape(-1)[np.concatenate(last)] = ignore_index
        padding = None
        if self._whole:  # of full rows too: a compiled block sees batches of one kind
            real = [length if row.num_real is None else row.num_real for row in rows]
            padding = self._places >= np.array(real)[:, None]
        if not self.document_mask:
            positions[:] = self._places
            return HostBatch(tokens, labels, positions, None, length, samples_consumed, padding)
        flat, longest = positions.reshape(-1), 0
        for number, start in enumerate(starts):
            first = number * length
            for place in (*start.tolist(), length):  # slices cost less than an index
                end = number * length + place
                flat[first:end] = self._places[: end - first]
                longest, first = max(longest, end - first), end
        return HostBatch(tokens, labels, positions, row_boundaries(starts, length), longest, samples_consumed, padding)

    def rows(self, samples: npt.ArrayLike) -> list[Row]:
        source, local = self._mixture.locate(_sample_numbers(samples))
        rows: list[Row] = []
        # A microbatch is few samples: to look each up takes less time than `locate`, which is for many.
        for number, index in zip(source.tolist(), local.tolist(), strict=True):
            chunk, place = divmod(index, _CHUNK)
            epochs, windows = self._chunk(number, chunk)
            self._check_epochs(number, int(epochs[place]))
            rows.append(self._rows[number].read(int(windows[place])))
        return rows

    def tokens(self, samples: npt.ArrayLike, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Tokens of samples, inputs and labels in one.

        Args:
            samples: Global sample numbers ``[N]``.
            out: Array ``[N, seq_len + 1]`` of any integer type to fill; None makes one of int64.

        Returns:
            ``[N, seq_len + 1]``: columns ``:-1`` are the inputs, ``1:`` the next tokens.
        """
        rows = self.rows(samples)
        if out is None:
            out = np.empty((len(rows), self.seq_len + 1), dtype=np.int64)
        for number, row in enumerate(rows):
            out[number] = row.tokens
        return out

    def document_starts(self, samples: npt.ArrayLike) -> list[npt.NDArray[np.int64]]:
        """Where documents begin inside each sample: places in ``[1, seq_len]``, rising.

        A start at ``seq_len`` lies just behind the inputs: the last label belongs to another document.
        """
        return [row.document_starts for row in self.rows(samples)]

    def _check_epochs(self, number: int, epoch: int) -> None:
        name = self.source_names[number]
        limit = self._max_epochs.get(name, 0)
        if limit and epoch >= limit:
            raise ValueError(
                f"source {name!r} has been read {limit} times, the limit set by data.sources[{name!r}].max_epochs={limit}, but "
                "the run needs more. Train fewer steps, lower its weight, or raise max_epochs (0: no limit)."
            )


def _sample_numbers(samples: npt.ArrayLike) -> IndexArray:
    numbers = np.atleast_1d(np.asarray(samples, dtype=np.int64))
    if numbers.size and int(numbers.min()) < 0:
        raise ValueError(f"sample {int(numbers.min())} does not exist: samples are numbered from 0.")
    return numbers
