"""How fast does text become training windows, beside Hugging Face datasets + tokenizers at identical ids?

Question. Tokens per second from zstandard JSON lines to int64 windows of `seq_len + 1`: titan-train on the fly,
titan-train into shards, and Hugging Face `datasets` streaming + `tokenizers`. What reads tokens that are stored already is
compared in `benchmarks/peers/windows.py`.

Method. The corpus is the source text of the Python standard library. One byte-level BPE vocabulary is trained with
`tokenizers` and its merges are run by both sides; before anything is timed, every document's ids are compared, and
after each timed run the windows are. The paths take turns, one run each per round, so that a noisy machine disturbs
all alike; the median of the rounds is reported, by wall clock and by processor time (all threads together). The
Hugging Face side is written the way its documentation shows, batched, with a list as buffer; its faster form counts.

Output. A table, and as last line one JSON object. `--write FOLDER` also writes `data_pipeline_<hardware>_<yyyymm>.md`
and `.json` there.

Limits. Warm page cache; Python code as text; one machine. Compare ratios, not absolute numbers, between machines.

Example (the two libraries are for this comparison only, so the package does not depend on them):

    uv run --with datasets --with tokenizers python packages/titan-train/benchmarks/data_pipeline.py
"""

import argparse
import base64
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from titan_train.config import DataConfig, SourceConfig
from titan_train.data import build_datasets, prepare, stream_windows
from titan_train.data.sources.document import Document
from titan_train.data.sources.documents import list_files, read_documents
from titan_train.data.sources.files import FileReader
from titan_train.tokenizers import TiktokenTokenizer
from titan_train.tokenizers.tiktoken import PATTERNS

EOS = "<|end_of_text|>"
NUM_FILES = 4


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # set before `datasets` is imported: nothing of this leaves the machine or stays on it
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(work / "hf"),
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        }
        texts = standard_library()
        files = write_corpus(texts, work)
        theirs, ours = tokenizers_of(texts, args.vocab_size)
        compare_ids(theirs, ours, texts)
        result = measure(args, work, files, theirs, ours)
    result |= environment(args, texts)
    print(as_table(result))
    if args.write:
        write_results(Path(args.write), result)
    print(json.dumps(result))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each path")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--vocab-size", type=int, default=32000, help="pieces of the shared vocabulary")
    parser.add_argument("--write", default="", metavar="FOLDER", help="also write the result files there")
    return parser.parse_args()


def standard_library() -> list[str]:
    source = SourceConfig(name="stdlib", kind="stdlib")
    items = (item for file in list_files(source) for item in read_documents(file, source, FileReader(file.path)))
    return [item.text for item in items if isinstance(item, Document)]


def write_corpus(texts: list[str], folder: Path) -> list[Path]:
    """The corpus as zstandard JSON lines, in a few files."""
    paths = [folder / f"stdlib-{number}.jsonl.zst" for number in range(NUM_FILES)]
    for number, path in enumerate(paths):
        part = texts[number * len(texts) // NUM_FILES : (number + 1) * len(texts) // NUM_FILES]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        path.write_bytes(zstandard.ZstdCompressor(level=3).compress(lines.encode()))
    return paths


def tokenizers_of(texts: list[str], vocab_size: int) -> tuple[Any, TiktokenTokenizer]:
    """One vocabulary, as a `tokenizers.Tokenizer` and as a titan tokenizer."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    theirs = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERNS["llama3"]), "isolated")
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator(texts, trainer)
    # ByteLevel shows bytes as printable characters: those that print keep their code, the others follow from 256.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {chr(byte): byte for byte in plain}
    shown |= {chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in plain)}
    ranks = sorted((rank, bytes(shown[character] for character in token)) for token, rank in theirs.get_vocab().items())
    content = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in ranks)
    return theirs, TiktokenTokenizer(content, special_tokens=(EOS,))


def compare_ids(theirs: Any, ours: TiktokenTokenizer, texts: list[str]) -> None:
    for text in texts:
        if theirs.encode(text).ids != ours.encode(text).tolist():
            raise SystemExit("the two sides give different ids: there is nothing to compare")


def hugging_face_windows(files: list[Path], tokenizer: Any, eos: int, seq_len: int, batched: bool) -> Iterator[Any]:
    """`datasets` streaming + `tokenizers`, packed through a list as usual."""
    from datasets import load_dataset

    stream = load_dataset("json", data_files=[str(path) for path in files], split="train", streaming=True)
    if batched:

        def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            return {"ids": [encoding.ids for encoding in tokenizer.encode_batch_fast(batch["text"])]}

        stream = stream.map(encode, batched=True, batch_size=64, remove_columns=["text"])
        documents = (row["ids"] for row in stream)
    else:
        documents = (tokenizer.encode(row["text"]).ids for row in stream)
    buffer: list[int] = []
    for ids in documents:
        buffer += ids
        buffer.append(eos)
        while len(buffer) > seq_len:
            yield np.array(buffer[: seq_len + 1], dtype=np.int64)
            buffer = buffer[seq_len:]


def measure(
    args: argparse.Namespace, work: Path, files: list[Path], theirs: Any, ours: TiktokenTokenizer
) -> dict[str, Any]:
    source = SourceConfig(name="stdlib", kind="jsonl", paths=tuple(str(path) for path in files))
    seq_len, cores = args.seq_len, os.cpu_count() or 1
    reference: list[np.ndarray] = []

    def windows_of(make: Callable[[], Iterator[Any]]) -> Callable[[], int]:
        def run() -> int:
            found = list(make())
            if not reference:
                reference.extend(found)
            if len(found) != len(reference) or not all(map(np.array_equal, found, reference)):
                raise SystemExit("the windows of two paths differ: there is nothing to compare")
            return len(found) * seq_len

        return run

    def on_the_fly(threads: int) -> Callable[[], Iterator[Any]]:
        return lambda: stream_windows(source, DataConfig(num_threads=threads), ours, seq_len=seq_len)

    def hugging_face(batched: bool) -> Callable[[], Iterator[Any]]:
        return lambda: hugging_face_windows(files, theirs, ours.eos_id, seq_len, batched)

    config = DataConfig(sources=(source,), validation_fraction=0.0)
    round_number = iter(range(10**6))

    def into_shards() -> int:
        cache = work / f"shards-{next(round_number)}"
        prepare(config, ours, cache_dir=cache)
        return build_datasets(config, ours, seq_len=seq_len, seed=0, cache_dir=cache)[0].num_tokens

    paths: dict[str, Callable[[], int]] = {
        "hugging_face_one_by_one": windows_of(hugging_face(batched=False)),
        "hugging_face_batched": windows_of(hugging_face(batched=True)),
        "on_the_fly_1_thread": windows_of(on_the_fly(1)),
        "on_the_fly_all_cores": windows_of(on_the_fly(cores)),
        "text_into_shards": into_shards,
    }
    wall: dict[str, list[float]] = {name: [] for name in paths}
    processor: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(args.rounds + 1):
        for name, run in paths.items():
            started, used = time.perf_counter(), time.process_time()
            tokens = run()
            wall_s, processor_s = time.perf_counter() - started, time.process_time() - used
            if number:  # the first round warms caches and imports
                wall[name].append(tokens / wall_s)
                processor[name].append(tokens / processor_s)
    return summary(wall, processor)


def summary(wall: dict[str, list[float]], processor: dict[str, list[float]]) -> dict[str, Any]:
    def best_ratio(rates: dict[str, list[float]], path: str) -> float:
        """Median over the rounds of the ratio within the round, to the faster of the two Hugging Face forms."""
        rounds = zip(rates[path], rates["hugging_face_one_by_one"], rates["hugging_face_batched"], strict=True)
        return statistics.median(mine / max(one, batched) for mine, one, batched in rounds)

    compared = ("on_the_fly_1_thread", "on_the_fly_all_cores", "text_into_shards")
    return {
        "tokens_per_s": {name: statistics.median(rates) for name, rates in wall.items()},
        "tokens_per_s_min_max": {name: [min(rates), max(rates)] for name, rates in wall.items()},
        "tokens_per_processor_s": {name: statistics.median(rates) for name, rates in processor.items()},
        "ratio_to_hugging_face": {name: best_ratio(wall, name) for name in compared},
        "ratio_to_hugging_face_by_processor_time": {name: best_ratio(processor, name) for name in compared},
    }


def environment(args: argparse.Namespace, texts: list[str]) -> dict[str, Any]:
    packages = ("torch", "numpy", "tiktoken", "zstandard", "datasets", "tokenizers")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "benchmark": "data_pipeline",
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "load_average_1_min": round(os.getloadavg()[0], 1),
        "config": {"rounds": args.rounds, "seq_len": args.seq_len, "vocab_size": args.vocab_size},
        "corpus": {"documents": len(texts), "megabytes": round(sum(len(text.encode()) for text in texts) / 1e6, 1)},
        "command": "uv run --with datasets --with tokenizers python packages/titan-train/benchmarks/data_pipeline.py "
        + " ".join(sys.argv[1:]),
    }


def as_table(result: dict[str, Any]) -> str:
    lines = [
        "| path | M tokens/s | min - max | M tokens per processor second | x Hugging Face | by processor time |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, rate in result["tokens_per_s"].items():
        low, high = result["tokens_per_s_min_max"][name]
        ratios = [result[key].get(name) for key in ("ratio_to_hugging_face", "ratio_to_hugging_face_by_processor_time")]
        shown = " | ".join("" if ratio is None else f"{ratio:.1f}" for ratio in ratios)
        per_processor = result["tokens_per_processor_s"][name] / 1e6
        spread = f"{low / 1e6:.2f} - {high / 1e6:.2f}"
        lines.append(f"| {name.replace('_', ' ')} | {rate / 1e6:.2f} | {spread} | {per_processor:.2f} | {shown} |")
    return "\n".join(lines)


def load_note(result: dict[str, Any]) -> str:
    """What the reader must know if other programs had the machine too."""
    load, cores = result["load_average_1_min"], os.cpu_count() or 1
    if load < 2 * cores:
        return ""
    return (
        f"\nOther programs shared the machine (load average {load} on {cores} cores): wall-clock rates are those of a\n"
        "starved process. Tokens per processor second are what one core does, and the ratios compare paths that\n"
        "suffered alike.\n"
    )


def write_results(folder: Path, result: dict[str, Any]) -> None:
    name = f"data_pipeline_cpu{os.cpu_count()}_{result['date'][:7].replace('-', '')}"
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    corpus, config = result["corpus"], result["config"]
    text = f"""# Data pipeline beside Hugging Face datasets + tokenizers

{result["date"]}, commit {result["commit"]}, {result["device"]} (load average {result["load_average_1_min"]}).
Python {result["python"]}, {versions}.

Corpus: the Python standard library, {corpus["documents"]} documents, {corpus["megabytes"]} MB, as zstandard JSON lines.
Both sides give identical ids and identical windows of {config["seq_len"] + 1} tokens, checked in every run.
Vocabulary {config["vocab_size"]}; median of {config["rounds"]} rounds in which the paths take turns.
Ratios are taken within each round, to the faster of the two Hugging Face forms; processor time counts all threads.
{load_note(result)}
{as_table(result)}

Command: `{result["command"].strip()}`
"""
    (folder / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
