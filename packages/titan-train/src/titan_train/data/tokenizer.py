"""The tokenizer and the chat template of a configuration: loaded, or trained once and kept in the cache."""

from pathlib import Path

from titan_train.config import DataConfig, TokenizerConfig
from titan_train.config.data import TEXT_KINDS
from titan_train.data.prepared import content_key, one_process
from titan_train.data.progress import ProgressCallback
from titan_train.data.sources.document import held_out_fraction
from titan_train.data.sources.documents import list_files
from titan_train.data.sources.texts import training_texts
from titan_train.files import download_hint, local_path, read_bytes, read_text
from titan_train.tokenizers import (
    ByteTokenizer,
    ChatTemplate,
    HfTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    load_tokenizer,
    train_sentencepiece,
)
from titan_train.tokenizers.chat_template import BUILT_IN
from titan_train.tokenizers.protocol import MODEL_NAME, SAVED_NAME


def cache_folder(config: DataConfig) -> Path:
    """Where shards and trained tokenizers go: `config.cache_dir`, or ~/.cache/titan-train."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else Path.home() / ".cache" / "titan-train"


def cache_of(config: DataConfig, cache_dir: str | Path | None) -> Path:
    """``cache_dir`` if it is given, else the configured place."""
    return cache_folder(config) if cache_dir is None else Path(cache_dir)


def build_tokenizer(
    config: TokenizerConfig,
    data: DataConfig,
    *,
    cache_dir: str | Path | None = None,
    progress: ProgressCallback | None = None,
) -> Tokenizer:
    """Load the configured tokenizer, or train it on the training text (once; kept in the cache).

    Raises:
        ValueError: If the file is not of the configured kind, or the text cannot give the vocabulary.
    """
    if config.kind == "bytes":
        return ByteTokenizer()
    if config.path:
        return _load(config)
    folder = _trained_folder(config, data, cache_of(data, cache_dir))
    saved = folder / SAVED_NAME
    if not saved.is_file():
        with one_process(folder):
            if not saved.is_file():  # another process may have trained it meanwhile
                texts = training_texts(data.sources, data, max_bytes=config.train_max_bytes, progress=progress)
                return train_sentencepiece(texts, config.vocab_size, folder, model_type=config.model_type)
    return load_tokenizer(folder)


def is_trained(config: TokenizerConfig, data: DataConfig) -> bool:
    """Whether the cache has the tokenizer that is trained on the data's text."""
    return (_trained_folder(config, data, cache_folder(data)) / SAVED_NAME).is_file()


def build_chat_template(config: TokenizerConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that writes conversations for a tokenizer; None if neither it nor the configuration has one.

    Raises:
        ValueError: If the configured file does not exist, or is not a template.
    """
    given = config.chat_template
    if given in BUILT_IN or not given:
        return ChatTemplate.of(tokenizer, BUILT_IN.get(given, ""))
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(
            f"tokenizer.chat_template={given!r} is neither a file nor one of {', '.join(BUILT_IN)}. Name a Jinja file."
        )
    try:
        return ChatTemplate.of(tokenizer, read_text(path))
    except ValueError as err:
        raise ValueError(f"{path}: {err}") from err


def _load(config: TokenizerConfig) -> Tokenizer:
    path = local_path(config.path)
    if hint := download_hint(config.path) if not path.exists() else "":
        raise ValueError(f"tokenizer.path={config.path!r}: there is no folder {path}.{hint}")
    ranks = path / MODEL_NAME if path.is_dir() and not (path / SAVED_NAME).is_file() else path
    if config.kind == "tiktoken" and ranks.is_file():
        return TiktokenTokenizer(
            read_bytes(ranks),
            pattern=config.pattern,
            special_tokens=config.special_tokens,
            bos_token=config.bos_token,
            eos_token=config.eos_token,
        )
    if config.kind == "hf":
        return HfTokenizer.from_folder(path, bos_token=config.bos_token, eos_token=config.eos_token)
    tokenizer = load_tokenizer(path)
    if tokenizer.kind != config.kind:
        raise ValueError(
            f"tokenizer.kind={config.kind!r}, but {path} contains a {tokenizer.kind} tokenizer. "
            f'Use kind="{tokenizer.kind}", or another path.'
        )
    if config.kind == "tiktoken":
        _check_saved(config, tokenizer, path)
    return tokenizer


def _check_saved(config: TokenizerConfig, tokenizer: Tokenizer, path: Path) -> None:
    """Refuse names of special tokens that are not those of a tokenizer that a run saved: labels would be others than asked."""
    special = tokenizer.special_ids
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    for field, number in ids.items():
        if (asked := getattr(config, field)) and special.get(asked) != number:
            raise ValueError(
                f"tokenizer.{field}={asked!r}, but the tokenizer that a run saved in {path} has another. Remove the setting, or "
                "name the file of ranks."
            )
    if missing := [name for name in config.special_tokens if name not in special]:
        raise ValueError(
            f"tokenizer.special_tokens has {missing[0]!r}, which the tokenizer that a run saved in {path} lacks. Remove the "
            "setting, or name the file of ranks."
        )


def _trained_folder(config: TokenizerConfig, data: DataConfig, cache: Path) -> Path:
    sources = [source for source in data.sources if source.kind in TEXT_KINDS]
    content = {
        "vocab_size": config.vocab_size,
        "model_type": config.model_type,
        "train_max_bytes": config.train_max_bytes,
        "held_out": [held_out_fraction(source, data) for source in sources],
        "files": [
            [source.kind, source.messages_key or source.text_key, [file.stamp() for file in list_files(source)]]
            for source in sources
        ],
    }
    return cache / f"tokenizer-{config.model_type}-{config.vocab_size}-{content_key(content)[:16]}"
