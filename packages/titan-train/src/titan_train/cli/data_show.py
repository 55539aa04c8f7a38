"""Show samples of a configuration as the model reads them: `titan-train data show CONFIG`.

Prepares the data as `run` would, and prints the first samples as text. What the model is not trained to predict (the other
turns of a chat, a document's first token, padding) is dim on a terminal, and in double brackets elsewhere.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from titan_train.cli.parser import CommandParser, integer

if TYPE_CHECKING:
    from rich.text import Text

    from titan_train.data.loader.batch import HostBatch
    from titan_train.inputs import Inputs

IGNORED = -100


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.usage = "titan-train data show CONFIG [--samples N] [--first N] [--section.key value ...]"
    parser.add_config()
    parser.add_argument("--samples", type=integer(1, 1000), default=2, metavar="N", help="samples to show (default 2)")
    parser.add_argument("--first", type=integer(0), default=0, metavar="N", help="number of the first (default 0)")
    arguments, settings = parser.parse_with_settings(words)
    config = parser.read_config(arguments.config, settings)

    from titan_train.inputs import open_inputs, prepare_inputs
    from titan_train.terminal import clean_console

    prepare_inputs(config)
    inputs = open_inputs(config)
    console = clean_console(highlight=False, soft_wrap=True)
    try:
        for number in range(arguments.first, arguments.first + arguments.samples):
            for line in shown(inputs, number, marks=not console.is_terminal):
                console.print(line)
    finally:
        inputs.train.close()
    return 0


def shown(inputs: "Inputs", number: int, *, marks: bool) -> "Iterator[Text]":
    """The lines that show one sample.

    Args:
        inputs: Tokenizer and data.
        number: The sample.
        marks: Whether what is not learned stands in double brackets, not only dim.
    """
    import numpy as np
    from rich.text import Text

    dataset = inputs.train
    batch = dataset.build_batch(np.array([number], dtype=np.int64), ignore_index=IGNORED, samples_consumed=number + 1)
    source = dataset.source_names[int(dataset.locate([number]).source[0])]
    learned = int((batch.labels[0] != IGNORED).sum())
    bounds = _bounds(batch)
    yield Text(
        f"sample {number} of {source!r}: {dataset.seq_len} tokens, {learned} labels ({learned / dataset.seq_len:.0%}), "
        f"{len(bounds) - 1} documents",
        style="bold",
    )
    for start, end in pairwise(bounds):
        yield _document(inputs, batch, start, end, marks)
    yield Text("")


def _document(inputs: "Inputs", batch: "HostBatch", start: int, end: int, marks: bool) -> "Text":
    from rich.text import Text

    # the label of token i is token i + 1: a document's first token is nobody's label
    is_label = [i > start and int(batch.labels[0, i - 1]) != IGNORED for i in range(start, end)]
    text = Text().append(f"-- tokens {start} to {end}\n", style="cyan")
    for learned, places in groupby(range(start, end), key=lambda i: is_label[i - start]):
        part = _text(inputs, [int(batch.tokens[0, i]) for i in places])
        text.append(part if learned or not marks else f"[[{part}]]", style="" if learned else "dim")
    last = int(batch.labels[0, end - 1])
    if last != IGNORED:  # the label behind the last input
        text.append(_text(inputs, [last]))
    return text


def _text(inputs: "Inputs", ids: list[int]) -> str:
    """Ids as text with the names of special tokens, and control characters visible; repeated padding once."""
    names = {number: name for name, number in inputs.tokenizer.special_ids.items()}
    parts: list[str] = []
    for special, run in groupby(ids, key=names.get):
        some = list(run)
        if special is None:
            joined = b"".join(inputs.tokenizer.token_bytes(i) for i in some).decode(errors="replace")
            parts.append("".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in joined))
        else:
            parts.append(special if len(some) < 4 else f"{special} x {len(some)}")
    return "".join(parts)


def _bounds(batch: "HostBatch") -> list[int]:
    if batch.cu_seqlens is None:
        return [0, batch.tokens.shape[1]]
    return sorted({int(bound) for bound in batch.cu_seqlens[0]})
