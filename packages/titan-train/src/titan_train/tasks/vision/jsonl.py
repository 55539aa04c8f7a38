"""JSONL files with images beside them, or in tar shards.

Preparing reads the header of every image, in threads. An image that cannot be read or is too large is quarantined: its line is
left out, and named with the reason in ``quarantine.jsonl``. What is left becomes an index, with the grid of every image, so
that the length of every document is known before training.

Runs on the same files share the index. An image that was repaired, or replaced by one of another size, gives a new one when the
next run begins; runs that began before, and their branches, go on with theirs, which is kept under a name of what it holds.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from titan_train.config import Config
from titan_train.data import cache_folder
from titan_train.data.prepared import PreparedFolder, content_key
from titan_train.data.sources.malformed import BadDocument
from titan_train.files import read_text, write_atomic
from titan_train.models.vision_language.args import EncoderArgs
from titan_train.run_folder import continued_folder
from titan_train.tasks.image_files import BrokenImage, read_json_lines
from titan_train.tasks.vision.images import (
    FloatArray,
    Pixels,
    changed_at,
    fit_grid,
    image_size,
    read_image,
    thumbnail,
    to_patches,
)
from titan_train.tasks.vision.rows import Grid
from titan_train.tokenizers import Tokenizer

_THUMBNAIL = 96  # pixels
_INDEX = "index.jsonl"
_FIELDS = {"prompt", "answer", "image"}
_INDEX_NAME = "vision_index.txt"  # in a run's folder: the index that it began with


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    """File and number."""
    prompt: str
    answer: str
    images: list[str]
    grids: list[Grid]
    sizes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Height and width of each image; empty in indexes of earlier versions."""


def prepare_index(config: Config, args: EncoderArgs, *, again: bool = False) -> Path:
    """Read the files and index their usable lines, unless that is done; the index's file.

    With ``again``, it is done anew for a new run if an image in quarantine can be read by now, or one in the index was replaced.

    Raises:
        ValueError: A file or a line is not what it should be, or nothing is usable.
    """
    files = list_lines(config.vision.paths)
    folder = PreparedFolder(index_folder(config, args, files), _INDEX, str)

    began = _began_with(config)
    for kept in folder.path.glob("index-*.jsonl"):
        if kept.stem == began:
            return kept

    again = again and began is None

    def done() -> bool:
        if not folder.state_path.is_file():
            return False
        return not (again and (_repaired(config, args, files, folder) or _replaced(config, folder.state_path)))

    if not done():
        with folder.one_process():
            if not done():  # another process may have done it meanwhile
                if folder.state_path.is_file():  # killed from here on, it is done anew
                    folder.state_path.rename(folder.path / f"{index_name(read_text(folder.state_path))}.jsonl")
                write_atomic(folder.state_path, "".join(_index(config, args, files, folder)), sync=True)
    return folder.state_path


def is_indexed(config: Config, args: EncoderArgs) -> bool:
    """Whether `prepare_index` has been here."""
    return (index_folder(config, args, list_lines(config.vision.paths)) / _INDEX).is_file()


def token_counts(content: str, folder: Path, tokenizer: Tokenizer, *, keep: bool = False) -> list[int]:
    """Tokens of prompt and answer of each line of an index.

    Args:
        content: The index.
        folder: Where it lies.
        tokenizer: Of the texts.
        keep: Write them beside the index, so that no rank counts them again.
    """
    kept = folder / f"tokens-{content_key([index_name(content), tokenizer.fingerprint])[:16]}.json"
    if kept.is_file():
        return json.loads(read_text(kept))
    lines = map(_from_index, content.splitlines())
    counts = [len(tokenizer.encode(line.prompt)) + len(tokenizer.encode(line.answer)) for line in lines]
    if keep:
        write_atomic(kept, json.dumps(counts), sync=True)
    return counts


def index_name(content: str) -> str:
    """The name of an index, by what it holds."""
    return f"index-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def keep_index_name(run_dir: Path, name: str) -> None:
    """Keep in the run's folder which index it began with."""
    write_atomic(run_dir / _INDEX_NAME, f"{name}\n")


def _began_with(config: Config) -> str | None:
    """The name of the index whose samples the run goes on with, its own or its parent's.

    None: it begins with whatever can be read now. Empty: its index is not on record.
    """
    run_dir = continued_folder(config)
    if run_dir is None:
        return None
    file = run_dir / _INDEX_NAME
    return read_text(file, errors="replace").strip() if file.is_file() else ""


def _repaired(config: Config, args: EncoderArgs, files: Sequence[Path], folder: PreparedFolder[str]) -> bool:
    """Whether the images of a line in quarantine can be read by now."""
    quarantine = folder.path / "quarantine.jsonl"
    kept = read_json_lines(quarantine) if quarantine.is_file() else ()
    left_out = {(bad.get("file"), bad.get("line")) for _, _, bad in kept if isinstance(bad, dict)}
    tried = (line for file in files if left_out for line in _lines(file) if (str(line[0]), line[1]) in left_out)

    def repaired(line: tuple[Path, int, int, dict[str, Any]]) -> bool:
        with contextlib.suppress(OSError):  # its disk does not answer: it stays in quarantine
            return isinstance(_measure(line, config, args), Line)
        return False

    return any(map(repaired, tried))


def _replaced(config: Config, index: Path) -> bool:
    """Whether an image has another size than the index says."""
    since, most = index.stat().st_mtime_ns, config.vision.max_pixels

    def replaced(text: str) -> bool:
        line = _from_index(text)
        with contextlib.suppress(BrokenImage):  # said when it is read
            return any(
                changed_at(path) >= since and image_size(path, most=most) != size
                for path, size in zip(line.images, line.sizes, strict=False)
            )
        return False

    with ThreadPoolExecutor(config.vision.threads) as pool:
        return any(pool.map(replaced, read_text(index).splitlines()))


def _index(config: Config, args: EncoderArgs, files: Sequence[Path], folder: PreparedFolder[str]) -> list[str]:
    """The lines of the index; the others go into quarantine."""
    bad = folder.bad_documents(
        "vision.paths", replace(config.data, on_error="quarantine", max_bad_fraction=1.0, max_bad=0)
    )
    bad.resume(0, {}, 0)
    raw = [line for file in files for line in _lines(file)]
    with ThreadPoolExecutor(config.vision.threads) as pool:
        found = list(pool.map(lambda line: _measure(line, config, args), raw))
    for item in found:
        if isinstance(item, BadDocument):
            bad.add(item)
    lines = [line for line in found if isinstance(line, Line)]
    if len(lines) <= config.vision.held_out:
        raise ValueError(
            f"vision.paths={list(config.vision.paths)} have {len(lines)} usable lines and {bad.counts.total()} in quarantine"
            f"{f' ({bad.first[0]})' if bad.first else ''}, of which vision.held_out={config.vision.held_out} are held out: "
            "nothing is left to train on. Add data, or lower vision.held_out."
        )
    return [json.dumps(asdict(line)) + "\n" for line in lines]


def index_folder(config: Config, args: EncoderArgs, files: Sequence[Path]) -> Path:
    """Where the index of these files is, by their content and by what decides the size of an image."""
    vision = config.vision
    content = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    bounds = [vision.min_image_tokens, vision.max_image_tokens, vision.max_pixels, args.patch, args.merge]
    key = content_key([content, [str(file) for file in files], bounds])
    return cache_folder(config.data) / f"vision-{key[:16]}"


class IndexedLines:
    """The usable lines of an index, or some of them."""

    def __init__(self, content: Sequence[str], counts: Sequence[int], args: EncoderArgs, *, max_pixels: int) -> None:
        """Take these lines, with the `token_counts` of each."""
        self._counts = counts
        self._lines = [_from_index(line) for line in content]
        self._args, self._max_pixels = args, max_pixels
        self.fingerprint = hashlib.sha256("\n".join(content).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._lines)

    def grids(self, item: int) -> list[Grid]:
        return self._lines[item].grids

    def texts(self, item: int) -> tuple[str, str]:
        return self._lines[item].prompt, self._lines[item].answer

    def count_tokens(self, item: int, tokenizer: Tokenizer) -> int:
        return self._counts[item]

    def name(self, item: int) -> str:
        return self._lines[item].name

    def patches(self, item: int) -> list[FloatArray]:
        line = self._lines[item]
        sizes = line.sizes or [None] * len(line.images)
        return [
            to_patches(read_image(path, grid, self._args, most=self._max_pixels, size=size), self._args)
            for path, grid, size in zip(line.images, line.grids, sizes, strict=True)
        ]

    def thumbnail(self, item: int) -> Pixels:
        """The first image ``[96, 96, 3]``; white where there is none, or where it is broken."""
        with contextlib.suppress(BrokenImage, IndexError):
            return thumbnail(self._lines[item].images[0], _THUMBNAIL, most=self._max_pixels)
        return np.full((_THUMBNAIL, _THUMBNAIL, 3), 255, dtype=np.uint8)


def list_lines(patterns: Sequence[str]) -> list[Path]:
    """The files of JSON lines that ``vision.paths`` names.

    Raises:
        ValueError: A pattern matches none.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        matched = sorted(path.parent.glob(path.name))
        if not matched:
            raise ValueError(f"vision.paths: {pattern!r} matches no file. Correct the path.")
        files += matched
    return files


def _lines(file: Path) -> Iterator[tuple[Path, int, int, dict[str, Any]]]:
    """File, number, first byte and value of each line."""
    for number, byte, value in read_json_lines(file):
        problem = str(value) if isinstance(value, ValueError) else _problem(value)
        if problem or not isinstance(value, dict):
            raise ValueError(
                f'{file}:{number}: {problem}. Correct the line: {{"image": "a.png", "prompt": "…", "answer": "…"}}.'
            )
        yield file, number, byte, value


def _problem(value: Any) -> str:
    if not isinstance(value, dict):
        return "not an object"
    record: dict[str, Any] = value
    if unknown := sorted(record.keys() - _FIELDS):
        return f"unknown field {unknown[0]!r}"
    for name in ("prompt", "answer"):
        text = record.get(name)
        if not isinstance(text, str) or not text:
            return f"{name!r} is not a text"
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            return f"{name!r} holds half of a character (a lone surrogate)"
    images = record.get("image", [])
    names: list[Any] = images if isinstance(images, list) else [images]
    return (
        "" if all(isinstance(name, str) and name for name in names) else "'image' is neither a path nor a list of paths"
    )


def _measure(line: tuple[Path, int, int, dict[str, Any]], config: Config, args: EncoderArgs) -> Line | BadDocument:
    """The line with the grids of its images, or why it is quarantined."""
    file, number, byte, value = line
    image = value.get("image", [])
    images = [str(file.parent / name) for name in (image if isinstance(image, list) else [image])]
    vision = config.vision
    try:
        sizes = [image_size(path, most=vision.max_pixels) for path in images]
        grids = [
            fit_grid(height, width, args, least=vision.min_image_tokens, most=vision.max_image_tokens)
            for height, width in sizes
        ]
    except BrokenImage as err:
        return BadDocument(str(file), number, byte, "bad_image", str(err), b"")
    return Line(f"{file}:{number}", value["prompt"], value["answer"], images, grids, sizes)


def _from_index(text: str) -> Line:
    value = json.loads(text)
    pairs = {name: [(int(a), int(b)) for a, b in value.get(name, ())] for name in ("grids", "sizes")}
    return Line(**value | pairs)
