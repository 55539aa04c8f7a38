"""Write a commented configuration to begin with. It runs as it stands; its comments say what to change.

pretrain   a small model from nothing, on text
continue   published weights on more text
sft        conversations; only what the assistant wrote is learned
lora       the same with adapters beside frozen weights
diffusion  images with captions

`titan-train init sft` writes sft.toml; `titan-train init sft --model hf:ORG/NAME --data 'chats/*.jsonl'` fills both in.
"""

import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from titan_train.cli.parser import CommandParser
from titan_train.files import download_hint

_SHIPPED = {"pretrain": "quickstart", "continue": "continue", "sft": "sft", "lora": "lora", "diffusion": "flux_shapes"}
_RATES = {"continue": "1e-5", "sft": "1e-5", "lora": "2e-4"}
"""Usual peak rates for published weights."""
_KINDS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("kind", choices=tuple(_SHIPPED), help="what to begin with")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file to write (default: KIND.toml)")
    weights = "of continue, sft and lora: where the weights come from; its tokenizer is taken too"
    parser.add_argument("--model", metavar="hf:ORG/NAME|hf:DIR|run:DIR", help=weights)
    text = "of continue, sft and lora: your files; hf:datasets/ORG/NAME is a data set of the hub"
    parser.add_argument("--data", metavar="GLOB", help=text)
    arguments = parser.parse_args(words)
    out: Path = arguments.out or Path(f"{arguments.kind}.toml")
    content = starting_point(arguments.kind, model=arguments.model, data=arguments.data)
    if out.exists():
        raise ValueError(f"{out} exists. Name another file with --out.")
    out.write_text(content, encoding="utf-8")
    fetched = " --download" if any(download_hint(given or "") for given in (arguments.model, arguments.data)) else ""
    print(f"wrote {out}")
    print(f"next: titan-train check {out}{fetched}")
    print(f"      titan-train run {out}{fetched}")
    return 0


def starting_point(kind: str, *, model: str | None = None, data: str | None = None) -> str:
    """The text of a configuration.

    Args:
        kind: A key of the list above.
        model: ``hf:ORG/NAME``, ``hf:DIR`` or ``run:DIR``; None leaves the model that only serves to try.
        data: Files, a folder, a glob or ``hf:datasets/ORG/NAME``; None leaves what is shipped.

    Raises:
        ValueError: The kind takes neither, or the model is not of this form.
    """
    file = resources.files("titan_train") / "configs" / f"{_SHIPPED[kind]}.toml"
    text = file.read_text(encoding="utf-8")
    if (model or data) and kind in ("pretrain", "diffusion"):
        option = "--model" if model else "--data"
        raise ValueError(
            f"{option} is for continue, sft and lora: edit the file that `titan-train init {kind}` writes."
        )
    if model is not None:
        forms = ("hf:",) if kind == "lora" else ("hf:", "run:")
        if not model.startswith(forms) or model in forms:
            more = "" if kind == "lora" else ", or run:DIR for a run of yours"
            raise ValueError(f"--model {model!r} must be hf:ORG/NAME, hf:DIR for a folder{more}.")
        weights = f"init = {json.dumps(model)}\n"
        named = f"name = {json.dumps(model)}\n" if kind == "lora" else ""
        text = _changed(r'^name = "[^\n]*\n# init = [^\n]*\n', named + weights, text)
        text = _changed(r"^\[tokenizer\].*?\n\n", "", text)
        text = _changed(r"^lr = [^\n]*", f"lr = {_RATES[kind]}", text)
        text = _changed(r"\n\[launch\].*", "", text)
    if data is not None:
        read = f'kind = "{_kind(data, kind)}"\npaths = [{json.dumps(data)}]\n'
        text = _changed(r'^kind = "(jsonl|stdlib)"[^\n]*\n(# )?paths = [^\n]*\n', read, text)
        text = re.sub(r"^exclude = [^\n]*the try[^\n]*\n", "", text, flags=re.M)
    return text


def _changed(pattern: str, new: str, text: str) -> str:
    changed, count = re.subn(pattern, lambda _: new, text, count=1, flags=re.M | re.S)
    assert count == 1, pattern
    return changed


def _kind(data: str, kind: str) -> str:
    """The kind of source that a name suggests."""
    found = next((source for ending, source in _KINDS.items() if ending in Path(data).name.lower()), None)
    return found or ("parquet" if data.startswith("hf:") else "text" if kind == "continue" else "jsonl")
