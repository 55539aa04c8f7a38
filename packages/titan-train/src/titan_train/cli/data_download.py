"""Load a model, a tokenizer or a data set from the Hugging Face hub: `titan-train data download hf:ORG/NAME --out DIR`.

Loads only what training reads: weights as safetensors (never pickles), configuration, tokenizer and chat template; of a
data set (`hf:datasets/ORG/NAME`) its Parquet, Arrow, JSON lines and text files. An interrupted download continues. Every
file is compared with its hash. The environment variable HF_ENDPOINT names another server, HF_TOKEN an account (extra `hf`).
"""

from collections.abc import Sequence
from pathlib import Path

from titan_train.cli.parser import CommandParser


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument(
        "repository", metavar="hf:REPO", help="hf:ORG/NAME of a model, hf:datasets/ORG/NAME of a data set"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    parser.add_argument(
        "--revision", default=None, metavar="REV", help="branch, tag or commit (default: the main branch)"
    )
    parser.add_argument(
        "--only",
        choices=["weights", "tokenizer", "config"],
        default=None,
        help="of a model, this part only (default: all)",
    )
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="further files of a model, or the only files of a data set, such as 'data/train-*'; may be repeated",
    )
    arguments = parser.parse_args(words)
    if not arguments.repository.startswith("hf:"):
        raise ValueError(f"{arguments.repository!r} is not a repository. Write hf:{arguments.repository}.")

    from titan_train.hub import download

    loaded = download(
        arguments.repository,
        arguments.out,
        revision=arguments.revision,
        parts=("weights", "tokenizer", "config") if arguments.only is None else (arguments.only,),
        include=arguments.include,
        tell=print,
    )
    for file in loaded.files:
        print(f"  {file.name}  {file.size:,} bytes  sha256 {file.sha256[:16]}")
    print(f"{loaded.folder}: {len(loaded.files)} files, {loaded.size / 1e6:,.1f} MB, every hash compared")
    return 0
