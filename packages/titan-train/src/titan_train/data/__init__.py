"""Text to training batches: token shards, a global order without state, packing, and the loader of one rank.

The batch of a step is a pure function of the configuration, the seed and the number of samples consumed; ranks only
choose which part of it they take. torch is imported by `DataLoader` alone, when one is made.
"""

from titan_train.data._batch import Batch
from titan_train.data._build import build_datasets, build_tokenizer, cache_folder, open_datasets, prepare
from titan_train.data._commands import PreparedSource, TokenizerReport, prepare_command, train_tokenizer_command
from titan_train.data._loader import DataLoader
from titan_train.data._malformed import BadDocument, MalformedInputError
from titan_train.data._megatron import MegatronTokens
from titan_train.data._packed import PackedDataset, SampleLocation
from titan_train.data._progress import Progress, ProgressCallback, show_progress
from titan_train.data._stream import stream_windows
from titan_train.data._token_source import ShardedTokens, TokenSource

__all__ = [
    "BadDocument",
    "Batch",
    "DataLoader",
    "MalformedInputError",
    "MegatronTokens",
    "PackedDataset",
    "PreparedSource",
    "Progress",
    "ProgressCallback",
    "SampleLocation",
    "ShardedTokens",
    "TokenSource",
    "TokenizerReport",
    "build_datasets",
    "build_tokenizer",
    "cache_folder",
    "open_datasets",
    "prepare",
    "prepare_command",
    "show_progress",
    "stream_windows",
    "train_tokenizer_command",
]
