"""From the configuration to datasets: prepare once, then open on every rank.

In a run of many ranks, one rank of each machine (or one in all, on a shared disk) calls `build_tokenizer` and
`prepare`; after a barrier every rank calls `build_tokenizer` and `open_datasets`, which find the work done. Nothing in
here communicates.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from titan_train.config import DataConfig, SourceConfig
from titan_train.config.data import TEXT_KINDS, Verify
from titan_train.data.loader.packed import PackedDataset
from titan_train.data.loader.rows import StreamedRows
from titan_train.data.prepared import content_key
from titan_train.data.progress import ProgressCallback
from titan_train.data.shards.manifest import MANIFEST_NAME, DataManifest, read_manifest
from titan_train.data.shards.megatron import MegatronTokens
from titan_train.data.shards.prepare import (
    TRAIN,
    VALIDATION,
    prepare_source,
    source_folder,
)
from titan_train.data.shards.token_source import ShardedTokens, TokenSource
from titan_train.data.sources.chat import conversations_for
from titan_train.data.sources.documents import glob_matches, is_glob, list_files
from titan_train.data.stream.token_stream import TokenStream
from titan_train.data.tokenizer import cache_of
from titan_train.tokenizers import ChatTemplate, Tokenizer

_logger = logging.getLogger(__name__)
_VALIDATION_SEED = 0


def check_sources(config: DataConfig) -> None:
    """Refuse sources without files.

    Raises:
        ValueError: A path does not exist, or holds no file of its source's kind.
    """
    for source in (*config.sources, *config.validation_sources):
        if source.kind in TEXT_KINDS:
            list_files(source)


def prepare(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    cache_dir: str | Path | None = None,
    progress: ProgressCallback | None = None,
    verify: Verify | None = None,
    template: ChatTemplate | None = None,
) -> list[Path]:
    """Tokenize every text source that is not in the cache yet, and open every source that holds tokens.

    Args:
        config: The sources.
        tokenizer: What text is encoded with, and what token sources must have been made with.
        cache_dir: Where shards go; None takes the configured place.
        progress: Called with the progress.
        verify: How much of the token sources is read; None takes ``config.verify``.
        template: Writes conversations, see `build_chat_template`; needed if a source has chats.

    Returns:
        The folder of each prepared text source, training sources first.

    Raises:
        ValueError: If a path does not exist, or a token source is not whole, damaged or of another tokenizer;
            `MalformedInputError` for malformed documents.
    """
    cache = cache_of(config, cache_dir)
    sources = [*config.sources, *config.validation_sources]
    for source in sources:
        if source.stream:
            list_files(source)  # a path that does not exist is an error now, not when training begins
            conversations_for(source, tokenizer, template)
        if source.kind not in TEXT_KINDS:
            checked = replace(config, verify=verify or config.verify)
            opened = _open_source(source, checked, tokenizer, cache, template)
            if not any(part.num_tokens for part in opened if part is not None):
                raise ValueError(f"source {source.name!r} holds no tokens: {', '.join(source.paths)}. Name another.")
    whole = [source for source in sources if source.kind in TEXT_KINDS and not source.stream]
    folders = [prepare_source(source, config, tokenizer, cache, progress, template) for source in whole]
    for source, folder in zip(whole, folders, strict=True):
        manifest = read_manifest(folder)
        if not any(manifest.num_tokens(split) for split in manifest.splits):
            raise ValueError(f"source {source.name!r} holds no text: {', '.join(source.paths)}. Name files with text.")
    return folders


def open_datasets(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    seed: int,
    cache_dir: str | Path | None = None,
    template: ChatTemplate | None = None,
) -> tuple[PackedDataset, PackedDataset | None]:
    """Memory-map what `prepare` made, with the same arguments.

    Returns:
        The training set, and the held-out set, in an order that ``seed`` does not change: None if nothing is held out, or
        less than one sample of each source.

    Raises:
        ValueError: If a source is not prepared, damaged, of another tokenizer, or shorter than one sample.
    """
    cache = cache_of(config, cache_dir)
    pad_id = tokenizer.eos_id if tokenizer.pad_id is None else tokenizer.pad_id
    train: dict[str, TokenSource | StreamedRows] = {}
    held_out: dict[str, TokenSource] = {}
    for source in config.sources:
        if source.stream:
            train[source.name] = TokenStream(
                source, config, tokenizer, cache, seq_len=seq_len, seed=seed, template=template, pad_id=pad_id
            )
            continue
        train[source.name], part = _open_source(source, config, tokenizer, cache, template)
        if part is not None:
            held_out[source.name] = part
    for source in config.validation_sources:
        held_out[source.name], _ = _open_source(source, config, tokenizer, cache, template)
    weights = {source.name: source.weight for source in (*config.sources, *config.validation_sources)}
    opened: dict[str, TokenSource | StreamedRows] = {**held_out, **train}
    whole = {
        source.name
        for source in (*config.sources, *config.validation_sources)
        if source.packs_whole or (source.packing == "auto" and _holds_chats(opened[source.name]))
    }
    least = {name: 2 if name in whole else seq_len + 1 for name in held_out}
    enough = {name: source for name, source in held_out.items() if source.num_tokens >= least[name]}
    own = {source.name for source in config.validation_sources}
    made = {source.name for source in config.sources if source.kind == "tokens"}
    for name in held_out.keys() - enough.keys():
        remedy = "Raise data.validation_fraction"
        if name in own:
            remedy = "Name more text"
        elif name in made:
            remedy = "Prepare its text again with a larger data.validation_fraction, or name data.validation_sources"
        if config.validation_fraction > 0 or name in own:
            _logger.warning(
                "held-out part of source %r: %d tokens (< %d per sample); skipping it. %s.",
                name,
                held_out[name].num_tokens,
                least[name],
                remedy,
            )

    def packed(
        sources: Mapping[str, TokenSource | StreamedRows],
        shares: dict[str, float],
        limits: dict[str, int],
        *,
        seed: int,
    ) -> PackedDataset:
        return PackedDataset(
            sources,
            seq_len=seq_len,
            seed=seed,
            weights=shares,
            tokenizer=tokenizer.fingerprint,
            document_mask=config.document_mask,
            mask_boundary_labels=config.mask_document_boundary_labels,
            max_epochs=limits,
            whole=whole,
            pad_id=pad_id,
        )

    limits = {source.name: source.max_epochs for source in config.sources}
    training = packed(train, {name: weights[name] for name in train}, limits, seed=seed)
    # the same windows whatever the run's seed: a validation of some steps is then comparable between runs
    validation = packed(enough, {name: weights[name] for name in enough}, {}, seed=_VALIDATION_SEED) if enough else None
    return training, validation


def build_datasets(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    seed: int,
    cache_dir: str | Path | None = None,
    progress: ProgressCallback | None = None,
    template: ChatTemplate | None = None,
) -> tuple[PackedDataset, PackedDataset | None]:
    """`prepare`, then `open_datasets`: all a single process needs."""
    prepare(config, tokenizer, cache_dir=cache_dir, progress=progress, template=template)
    return open_datasets(config, tokenizer, seq_len=seq_len, seed=seed, cache_dir=cache_dir, template=template)


def _open_source(
    source: SourceConfig, config: DataConfig, tokenizer: Tokenizer, cache: Path, template: ChatTemplate | None
) -> tuple[TokenSource, TokenSource | None]:
    """The part of a source to train on, and the held-out part if its kind has one."""
    if source.kind == "megatron":
        return _open_megatron(source, tokenizer, config.verify), None
    if source.kind == "tokens":
        folders = _token_folders(source)
    else:
        folders = [source_folder(source, config, tokenizer, cache, template)]
    manifests = [_checked_manifest(folder, tokenizer) for folder in folders]
    begins = tokenizer.bos_id if config.add_bos else None
    unlike = [f for f, m in zip(folders, manifests, strict=True) if not m.label_mask and m.bos_id != begins]
    if unlike:  # the setting is in the key of what is prepared here
        _logger.warning(
            "data.add_bos=%s, but the documents in %s begin %s the beginning-of-document token, as they were prepared.",
            str(config.add_bos).lower(), unlike[0], "without" if config.add_bos else "with",
        )  # fmt: skip

    def opened(split: str) -> ShardedTokens:
        pairs = [(f, info) for f, m in zip(folders, manifests, strict=True) for info in m.splits.get(split, ())]
        return ShardedTokens(
            [folder for folder, _ in pairs],
            [info for _, info in pairs],
            tokenizer_fingerprint=tokenizer.fingerprint,
            fingerprint=content_key([split, [manifest.fingerprint for manifest in manifests]]),
            verify=config.verify,
            vocab_size=tokenizer.vocab_size * (2 if manifests[0].label_mask else 1),
            not_learned_from=tokenizer.vocab_size if manifests[0].label_mask else None,
        )

    if len({manifest.label_mask for manifest in manifests}) > 1:
        raise ValueError(
            f"data.sources[{source.name!r}].paths holds folders of chats and of text: only some have labels of their own. "
            "Make each kind a source of its own."
        )
    return opened(TRAIN), opened(VALIDATION)


def _token_folders(source: SourceConfig) -> list[Path]:
    """The folders of tokens that a source names.

    Raises:
        ValueError: A glob matches none, or ``exclude`` leaves none.
    """
    folders: list[Path] = []
    for given in source.paths:
        path = Path(given).expanduser()
        if path.exists() or not is_glob(path):
            folders.append(path)
            continue
        matched = [folder for folder in glob_matches(path) if (folder / MANIFEST_NAME).is_file()]
        if not matched:
            raise ValueError(
                f"data.sources[{source.name!r}].paths: {given!r} matches no folder with a {MANIFEST_NAME}, as `titan-train data "
                "prepare` writes it. Correct the path."
            )
        folders += matched
    names = [(folder, folder.as_posix()) for folder in folders]
    kept = [f for f, name in names if not any(fnmatch(name, p) or fnmatch(f.name, p) for p in source.exclude)]
    if not kept:
        raise ValueError(
            f"data.sources[{source.name!r}].exclude={list(source.exclude)} leaves none of {len(folders)} folders. Name at least "
            "one."
        )
    return kept


def _holds_chats(source: TokenSource | StreamedRows) -> bool:
    """Whether these are conversations that were prepared ahead: no setting of a source of tokens says so."""
    return isinstance(source, ShardedTokens) and source.not_learned_from is not None


def _checked_manifest(folder: Path, tokenizer: Tokenizer) -> DataManifest:
    manifest = read_manifest(folder)
    if manifest.tokenizer != tokenizer.fingerprint:
        raise ValueError(
            f"{folder} was prepared with tokenizer {manifest.tokenizer[:16]} ({manifest.vocab_size} ids), but the "
            f"run uses {tokenizer.fingerprint[:16]} ({tokenizer.vocab_size} ids). Use that tokenizer, or prepare the "
            "text again."
        )
    return manifest


def _open_megatron(source: SourceConfig, tokenizer: Tokenizer, verify: Verify) -> TokenSource:
    if len(source.paths) != 1:
        raise ValueError(
            f"data.sources[{source.name!r}].paths names {len(source.paths)} Megatron datasets, but a source is one data set. "
            "Make each a source of its own, with a weight."
        )
    return MegatronTokens(Path(source.paths[0]).expanduser(), tokenizer.vocab_size, verify)
