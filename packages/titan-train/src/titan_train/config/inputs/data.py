"""What text a run reads, and how tokens become samples.

Only values live here: reading, tokenizing and packing are in `titan_train.tokenizers` and `titan_train.data`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from titan_train.config.inputs.source import SourceConfig
from titan_train.values import Count, Range, check_values

OnError = Literal["raise", "skip", "quarantine"]
Verify = Literal["header", "sample", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The corpora of a run, and how they are cut into samples."""

    sources: tuple[SourceConfig, ...] = field(default_factory=lambda: (SourceConfig(name="stdlib", kind="stdlib"),))
    """What to train on: `[[data.sources]]` tables with a name, a kind and paths."""

    validation_sources: tuple[SourceConfig, ...] = ()
    """Held-out corpora of their own, in addition to `validation_fraction` of each training source."""

    validation_fraction: Annotated[float, Range(0, below=1, note="0 holds out nothing, 0.1 is much")] = 0.01
    """Share of each text source's documents held out, by a hash of the text: a copy never lands on both sides."""

    cache_dir: str = ""
    """Where token shards and trained tokenizers are kept; empty means ~/.cache/titan-train."""

    on_error: OnError = "raise"
    """What a malformed line does: raise (stop, naming it), skip (count it), quarantine (count it and keep a copy)."""

    max_bad_fraction: Annotated[float, Range(0, 1)] = 1e-3
    """With skip or quarantine: largest share of a source's documents that may be malformed."""

    max_bad: Annotated[int, Range(0, note="0 limits the share only")] = 0
    """With skip or quarantine: largest number of malformed documents per source; 0 limits the share only."""

    add_bos: bool = False
    """Begin every document with the tokenizer's begin-of-sequence token."""

    document_mask: bool = True
    """Keep attention inside documents: batches carry `cu_seqlens`, and positions restart at each document."""

    mask_document_boundary_labels: bool = True
    """Do not train the last token of a document to predict the first of the unrelated one after it."""

    shard_tokens: Count = 2**28
    """Tokens of one cache file; an interrupted preparation repeats at most this much."""

    num_threads: Annotated[int, Range(0, note="0 uses every core")] = 0
    """Threads that tokenize; 0 uses every core."""

    prefetch: Annotated[int, Range(0, note="0 prepares each batch on demand")] = 3
    """Micro-batches that a background thread prepares ahead; 0 prepares each on demand."""

    verify: Verify = "sample"
    """Check of the cache when it is opened: header only, sample (8 random blocks a file), or full (1.6 GB/s)."""

    def __post_init__(self) -> None:
        check_values("data", self)
        if not self.sources:
            raise ValueError(
                'data.sources is empty: there is nothing to train on. The smallest is {name="a", kind="stdlib"}.'
            )
        names = [source.name for source in (*self.sources, *self.validation_sources)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"data.sources and data.validation_sources hold the name {twice[0]!r} twice: a source's order is drawn "
                f"from its name. Rename one, for example to {twice[0] + '-2'!r}."
            )
        for source in self.validation_sources:
            if source.stream:
                raise ValueError(
                    f"data.validation_sources[{source.name!r}].stream=true: a validation loss needs a fixed text. "
                    "Remove stream, and give it the files to validate on."
                )
