"""Find out what kind of tokenizer a file or folder holds, and load it."""

from pathlib import Path

from titan_train.files import read_bytes
from titan_train.tokenizers.byte import ByteTokenizer
from titan_train.tokenizers.huggingface import TOKENIZER_JSON, HfTokenizer
from titan_train.tokenizers.protocol import MODEL_NAME, SAVED_NAME, Tokenizer, read_description
from titan_train.tokenizers.sentencepiece import SentencePieceTokenizer
from titan_train.tokenizers.tiktoken import TiktokenTokenizer, parse_ranks


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load what `Tokenizer.save` wrote, or a bare model file.

    Args:
        path: A folder with `titan_tokenizer.json`, `tokenizer.model` or `tokenizer.json` (the first of them is read), or a
            model file. A bare file of mergeable ranks is taken as Llama 3's; build `TiktokenTokenizer` yourself for
            another pattern.

    Raises:
        ValueError: If there is no tokenizer at ``path``, or its content does not match the fingerprint saved with it.
    """
    path = Path(path)
    if path.is_dir() and (path / SAVED_NAME).is_file():
        return _load_saved(path)
    model = path / MODEL_NAME if path.is_dir() else path
    if path.suffix == ".json" or (not model.is_file() and (path / TOKENIZER_JSON).is_file()):
        return HfTokenizer.from_folder(path)
    if not model.is_file():
        raise ValueError(
            f"{path} holds no tokenizer: expected {SAVED_NAME}, {MODEL_NAME} or {TOKENIZER_JSON} in a folder, or a model file. "
            "Train one with `titan-train data tokenizer`."
        )
    content = read_bytes(model)
    try:
        parse_ranks(content)
    except ValueError:
        return SentencePieceTokenizer(content)
    return TiktokenTokenizer(content)


def _load_saved(folder: Path) -> Tokenizer:
    saved = read_description(folder)
    kind = saved["kind"]
    tokenizer: Tokenizer
    if kind == "bytes":
        tokenizer = ByteTokenizer()
    elif kind == "hf":
        tokenizer = HfTokenizer.from_folder(folder)
    elif kind == "sentencepiece":
        tokenizer = SentencePieceTokenizer(_model(folder))
    elif kind == "tiktoken":
        tokenizer = TiktokenTokenizer(
            _model(folder),
            pattern=saved["pattern"],
            special_tokens=saved["special_tokens"],
            bos_token=saved["bos_token"],
            eos_token=saved["eos_token"],
        )
    else:
        raise ValueError(f"{folder / SAVED_NAME} names kind={kind!r}, not one of sentencepiece, tiktoken, hf, bytes.")
    if saved.get("fingerprint") != tokenizer.fingerprint:
        raise ValueError(
            f"the tokenizer in {folder} was changed after it was saved: fingerprint {tokenizer.fingerprint[:16]}, "
            f"saved as {str(saved.get('fingerprint'))[:16]}. Restore its files, or save it again."
        )
    return tokenizer


def _model(folder: Path) -> bytes:
    path = folder / MODEL_NAME
    if not path.is_file():
        raise ValueError(f"{folder} has {SAVED_NAME} but no {MODEL_NAME}. Copy the whole folder.")
    return read_bytes(path)
