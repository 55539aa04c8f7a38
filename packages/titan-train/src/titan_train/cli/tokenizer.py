"""Train a SentencePiece tokenizer: `titan-train tokenizer train --out DIR [FILE ...]`.

Reads text files, .jsonl, .jsonl.gz and .jsonl.zst; without files, the source text of Python's standard library. Judges
the result on held-out documents: bytes per token, round trip.
"""

import argparse
from collections.abc import Sequence


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("action", choices=["train"], help="what to do")
    parser.add_argument("files", metavar="FILE", nargs="*", help="text or JSON lines; folders and globs too")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder for the tokenizer; tokenizer.path can name it"
    )
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="pieces (default 8192)")
    parser.add_argument("--model-type", choices=["bpe", "unigram"], default="bpe", help="default bpe")
    parser.add_argument("--text-key", default="text", help="key of the document in a JSON line (default text)")
    parser.add_argument(
        "--max-mb", type=float, default=32.0, metavar="MB", help="text to train on, at most (default 32)"
    )
    arguments = parser.parse_intermixed_args(words)  # files may stand after options

    from titan_train.config import SourceConfig
    from titan_train.data import train_tokenizer_command

    if arguments.files:
        lines = [file for file in arguments.files if ".jsonl" in file]
        texts = [file for file in arguments.files if ".jsonl" not in file]
        sources: list[SourceConfig] = []
        if lines:
            sources.append(SourceConfig(name="lines", kind="jsonl", paths=tuple(lines), text_key=arguments.text_key))
        if texts:
            sources.append(SourceConfig(name="texts", kind="text", paths=tuple(texts)))
    else:
        sources = [SourceConfig(name="stdlib", kind="stdlib")]
    train_tokenizer_command(
        sources,
        output_dir=arguments.out,
        vocab_size=arguments.vocab_size,
        model_type=arguments.model_type,
        max_bytes=int(arguments.max_mb * 1e6),
    )
    return 0
