"""Weights of a published model belong to the ids of its tokenizer: another tokenizer is refused, by what differs first."""

from pathlib import Path

from titan_train.config import Config
from titan_train.config.published import RUN, TOKENIZER, published_tokenizer, split_start
from titan_train.data import build_tokenizer
from titan_train.models.hf.folder import folder_of
from titan_train.task import task_name
from titan_train.tokenizers import HfTokenizer, Tokenizer, load_tokenizer

_TEXTS = ("Hello, world!", "def f(x):\n    return x ** 2", "  two  spaces\t1234567890", "Grüße, 你好, привет 👋🏽")
"""Words, code, spaces and digits, other scripts: what vocabularies cut in different ways."""

_WITH_TOKENS = ("text", "vision")
"""Tasks whose ids are the configured tokenizer's."""


def check_tokenizer(config: Config, tokenizer: Tokenizer | None = None) -> None:
    """Compare the run's ids with those of the folder that its weights come from.

    Args:
        config: The run's.
        tokenizer: The run's; None loads it, if it can be loaded before it is trained.

    Raises:
        ValueError: The size of the vocabulary, a special token, or the ids of a text differ; or the folder's tokenizer is of a
            kind that is not read here, and the run would train another.
    """
    init, given = config.model.init, config.tokenizer
    folder = folder_of(init)
    if init.startswith(RUN):
        _check_run(config, split_start(init)[0] / TOKENIZER, tokenizer)
        return
    if not init or TOKENIZER in config.model.init_changes:
        return
    published = published_tokenizer(folder)
    if not published and given.trains_here and task_name(config) in _WITH_TOKENS:
        raise ValueError(
            f"model.init={init!r}: {folder} has no tokenizer that is read here, and the run would train a vocabulary of its own: "
            "the weights know nothing of its ids. Convert the model's tokenizer to a tokenizer.json (transformers writes one), "
            f"and name it in tokenizer.path; or, to train new embeddings, write model.init_changes=[{TOKENIZER!r}]."
        )
    if not published or (given.kind, given.path) == (published["kind"], published["path"]):
        return
    if tokenizer is None and given.trains_here:
        raise ValueError(_refusal(config, "the run trains a vocabulary of its own"))
    own = build_tokenizer(given, config.data) if tokenizer is None else tokenizer
    if published["kind"] == "hf":
        bos, eos = (given.bos_token, given.eos_token) if given.kind == "hf" else ("", "")
        theirs: Tokenizer = HfTokenizer.from_folder(folder, bos_token=bos, eos_token=eos)
    else:
        theirs = load_tokenizer(published["path"])
    found = difference(own, theirs, larger="vocab_size" in config.model.init_changes)
    if found:
        raise ValueError(_refusal(config, found))


def _check_run(config: Config, saved: Path, tokenizer: Tokenizer | None) -> None:
    """The same for another run, whose folder keeps its tokenizer. One that is still to be trained is compared by the ranks."""
    given = config.tokenizer
    later = tokenizer is None and given.trains_here
    if later or not saved.is_dir() or TOKENIZER in config.model.init_changes:
        return
    own = build_tokenizer(given, config.data) if tokenizer is None else tokenizer
    if found := difference(own, load_tokenizer(saved)):
        raise ValueError(_refusal(config, found))


def difference(own: Tokenizer, theirs: Tokenizer, *, larger: bool = False) -> str:
    """In words, the first thing in which ``own`` differs from ``theirs``; empty if nothing was found.

    Args:
        own: The run's.
        theirs: The published model's.
        larger: ``own`` may have more ids.
    """
    if own.fingerprint == theirs.fingerprint:
        return ""
    if own.vocab_size < theirs.vocab_size or (own.vocab_size > theirs.vocab_size and not larger):
        return f"{own.vocab_size} ids here and {theirs.vocab_size} there"
    for name, number in theirs.special_ids.items():
        if own.special_ids.get(name, number) != number:
            return f"the special token {name!r} is {own.special_ids.get(name)} here and {number} there"
    # another choice of the tokens that begin and end a text, such as a chat model's, leaves ids what they are
    shared = {number for name, number in theirs.special_ids.items() if own.special_ids.get(name) == number}
    for name in ("bos_id", "eos_id"):
        ours, others = getattr(own, name), getattr(theirs, name)
        if ours != others and not {ours, others} <= shared:
            return f"{name} is {ours} here and {others} there"
    for text in _TEXTS:
        mine, other = own.encode(text).tolist(), theirs.encode(text).tolist()
        if mine != other:
            return f"{text!r} is {mine[:8]} here and {other[:8]} there"
    return ""


def _refusal(config: Config, found: str) -> str:
    return (
        f"model.init={config.model.init!r} and the tokenizer of the run do not belong together: {found}. The embeddings are "
        "those of the folder's ids. Leave tokenizer.kind and tokenizer.path out, which takes the folder's tokenizer; or, to "
        f"train new embeddings, write model.init_changes=[{TOKENIZER!r}]."
    )
