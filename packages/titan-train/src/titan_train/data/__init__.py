"""Text to training batches.

The batch of a step is a pure function of the configuration, the seed and the number of samples consumed. Each rank
only chooses which part of it to read.

- `sources/`: text files to documents to tokens.
- `shards/`: tokens on disk, written once and memory-mapped.
- `stream/`: tokens of text that is tokenized while a run trains on it.
- `order/`: the order of samples, without state.
- `loader/`: samples, batches and the data loader of one rank.
- `build`: from the configuration to data sets. `tokenizer`: the tokenizer that it names. `prepared`: a folder that is
  prepared once. `progress`: the progress bar.

Only `DataLoader` imports torch, when it is constructed.
"""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.data.build import build_datasets, check_sources, open_datasets, prepare
    from titan_train.data.loader.batch import Batch
    from titan_train.data.loader.data_loader import DataLoader
    from titan_train.data.loader.iterated import IteratedBatches
    from titan_train.data.loader.packed import PackedDataset, SampleLocation
    from titan_train.data.loader.source import BatchSource, HostMicrobatch, TensorBatch
    from titan_train.data.progress import PrepareProgress, ProgressCallback, show_progress
    from titan_train.data.shards.megatron import MegatronTokens
    from titan_train.data.shards.token_source import ShardedTokens, TokenSource
    from titan_train.data.sources.malformed import BadDocument, MalformedInputError
    from titan_train.data.stream.reader import stream_windows
    from titan_train.data.tokenizer import build_chat_template, build_tokenizer, cache_folder

__all__ = [
    "BadDocument",
    "Batch",
    "BatchSource",
    "DataLoader",
    "HostMicrobatch",
    "IteratedBatches",
    "MalformedInputError",
    "MegatronTokens",
    "PackedDataset",
    "PrepareProgress",
    "ProgressCallback",
    "SampleLocation",
    "ShardedTokens",
    "TensorBatch",
    "TokenSource",
    "build_chat_template",
    "build_datasets",
    "build_tokenizer",
    "cache_folder",
    "check_sources",
    "open_datasets",
    "prepare",
    "show_progress",
    "stream_windows",
]

__getattr__ = first_use(__name__)
