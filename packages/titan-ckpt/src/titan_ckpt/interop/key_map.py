"""Key maps: names and layouts of a family's tensors in native models and in Hugging Face checkpoints. No torch.

A key map is a list of pairs of name templates, in which ``{i}`` is the number of a layer and ``{j}`` the number of an
expert. A pair may also say that experts are stacked in the native model and separate in the checkpoint, that a tensor is
one part of a packed tensor, or that rotary channels have another order. `titan_ckpt.interop.translate` applies a map.

Any package can build a map, and offer it to the command line (``titan-ckpt export-hf --names NAME``) with an entry point
of the group ``titan_ckpt.key_maps``. A map can also be a JSON file. transformers' own conversion mappings are not used: they
convert whole tensors in memory, and transformers would be required.
"""

import importlib.metadata
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

ENTRY_POINTS = "titan_ckpt.key_maps"
"""Group of the entry points that name key maps: ``llama = "package.module:LLAMA"``."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor's native and Hugging Face names, and how its values differ, if they do."""

    native: str
    """Template of the native name."""
    hf: str
    """Template of the Hugging Face name. With ``{j}`` where ``native`` has none, Hugging Face tensor ``j`` is item ``j`` of
    the native stack."""
    part: tuple[int, int, int] | None = None
    """``(index, count, dim)``: the native tensor is part ``index`` of ``count`` equal parts of the Hugging Face tensor along
    ``dim``."""
    rows: tuple[int, int] | None = None
    """``(start, size)``: where ``part`` lies along its dimension, for parts that are not equal."""
    rotary: bool = False
    """Whether rows are channels that a rotation pairs, head after head."""
    head_dim: int | None = None
    """Width of a head, where rotary channels are neighbors in the native model and halves in the checkpoint."""
    transposed: bool = False
    """Whether the Hugging Face tensor is a matrix ``[in, out]`` (the Conv1D of GPT-2) and the native one ``[out, in]``;
    or a stack of such matrices. A ``part`` is one of the Hugging Face tensor as it is stored."""

    @property
    def stacked(self) -> bool:
        """Whether experts are stacked in the native model and separate in the checkpoint."""
        return "{j}" in self.hf and "{j}" not in self.native


@dataclass(frozen=True, slots=True)
class KeyMap:
    """The names of a family. If several pairs fit a name, the model's names decide; without a model, the first pair."""

    family: str
    """Name of the family, for messages."""
    pairs: tuple[Pair, ...]
    """Every tensor of the family."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of Hugging Face names that no native model holds, such as precomputed frequencies."""
    left_out: tuple[str, ...] = ()
    """Regular expressions of native names that no checkpoint holds. They are neither exported nor expected on import."""
    copies: tuple[tuple[str, str], ...] = ()
    """Hugging Face names of tensors that a checkpoint stores once more, each with the name of the other, such as an embedding
    that two modules share. They are exported, and on import must be equal."""
    _cache: dict[str, re.Pattern[str]] = field(default_factory=dict[str, re.Pattern[str]], repr=False, compare=False)

    def to_hf(self, name: str) -> str:
        """The Hugging Face name of a native tensor. For stacked experts it contains ``{j}`` for the expert's number.

        Raises:
            ValueError: If the family has no such tensor.
        """
        pair, letters = self.match_native(name)
        return pair.hf.format(**{"j": "{j}", **letters})

    def from_hf(self, name: str) -> str | None:
        """The native name of a Hugging Face tensor (the first, if several fit); None if it is ignored.

        Raises:
            ValueError: If the family has no such tensor.
        """
        found = self.match_hf(name)
        return found[0][0].native.format(**found[0][1]) if found else None

    def interleaved(self, head_dim: int) -> "KeyMap":
        """The map for a model that pairs neighboring rotary channels, as Llama of Meta and torchtitan does.

        Rows of query and key projections are then reordered on export and import.

        Args:
            head_dim: Width of an attention head; even.

        Raises:
            ValueError: If the family rotates only part of a head, or ``head_dim`` is odd.
        """
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is not an even width. Give the width of one attention head.")
        if not any(pair.rotary for pair in self.pairs):
            raise ValueError(
                f"the {self.family} family has the same order of rotary channels in both formats. Use the map as it is."
            )
        pairs = tuple(replace(pair, head_dim=head_dim) if pair.rotary else pair for pair in self.pairs)
        return replace(self, pairs=pairs)

    def packed(self) -> "KeyMap":
        """The map that exports gate and up projections of stacked experts as one tensor (``experts.gate_up_proj``).

        By default each expert becomes a tensor of its own, as such models are published. Both forms are imported.
        """
        first = [pair for pair in self.pairs if ".experts." in pair.hf and "{j}" not in pair.hf]
        return replace(self, pairs=(*first, *(pair for pair in self.pairs if pair not in first)))

    def ignoring(self, *patterns: str) -> "KeyMap":
        """The map that also ignores Hugging Face names which one of these regular expressions matches as a whole."""
        return replace(self, ignored=(*self.ignored, *patterns))

    def leaving_out(self, *patterns: str) -> "KeyMap":
        """The map that also leaves out native names which one of these regular expressions matches as a whole.

        Use it for buffers that Hugging Face does not have. They are neither exported nor expected on import.
        """
        return replace(self, left_out=(*self.left_out, *patterns))

    def leaves_out(self, name: str) -> bool:
        """Whether a native tensor is neither exported nor expected on import."""
        return any(re.fullmatch(pattern, name) for pattern in self.left_out)

    def maps(self, name: str) -> bool:
        """Whether a Hugging Face name is that of a tensor of the family."""
        return any(True for _ in self._matches(name, "hf"))

    def ignores(self, name: str) -> bool:
        """Whether a Hugging Face tensor is not imported."""
        return any(name == copy for copy, _ in self.copies) or any(re.fullmatch(p, name) for p in self.ignored)

    def match_native(self, name: str) -> tuple[Pair, dict[str, str]]:
        """The pair of a native name, with the numbers in the name.

        Raises:
            ValueError: If the family has no such tensor.
        """
        for pair, letters in self._matches(name, "native"):
            return pair, letters
        raise ValueError(
            f"unknown {self.family} parameter {name!r}. Pass the key map of the model's family, or leave the parameter out "
            "with names.leaving_out(...)."
        )

    def match_hf(self, name: str) -> list[tuple[Pair, dict[str, str]]]:
        """Every pair of a Hugging Face name, with the numbers in the name; empty if it is ignored.

        Raises:
            ValueError: If the family has no such tensor.
        """
        if self.ignores(name):
            return []
        found = list(self._matches(name, "hf"))
        if not found:
            raise ValueError(
                f"unknown {self.family} tensor {name!r} in the Hugging Face folder. Pass the key map of the model's family, "
                "or ignore the tensor with names.ignoring(...)."
            )
        return found

    def to_json(self) -> str:
        """The map as JSON text, for `load_key_map`."""
        pairs = [{key: value for key, value in asdict(pair).items() if value} for pair in self.pairs]
        value = {
            "family": self.family,
            "pairs": pairs,
            "ignored": self.ignored,
            "left_out": self.left_out,
            "copies": self.copies,
        }
        return json.dumps(value, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> "KeyMap":
        """Undo `to_json`.

        Raises:
            ValueError: If the text is not a key map.
        """
        try:
            value: dict[str, Any] = json.loads(text)
            pairs = tuple(_pair(pair) for pair in value["pairs"])
            ignored, left_out = tuple(value.get("ignored", ())), tuple(value.get("left_out", ()))
            copies = tuple((str(copy), str(other)) for copy, other in value.get("copies", ()))
            return cls(str(value["family"]), pairs, ignored, left_out, copies)
        except (ValueError, TypeError, KeyError, AttributeError) as err:
            raise ValueError(f"not a key map: {type(err).__name__}: {err}. Write it with KeyMap.to_json().") from err

    def _matches(self, name: str, side: Literal["native", "hf"]) -> Iterator[tuple[Pair, dict[str, str]]]:
        for pair in self.pairs:
            match = self._pattern(pair.native if side == "native" else pair.hf).fullmatch(name)
            if match:
                yield pair, match.groupdict()

    def _pattern(self, template: str) -> re.Pattern[str]:
        if template not in self._cache:
            text = re.escape(template)
            for letter in "ij":
                text = text.replace(rf"\{{{letter}\}}", rf"(?P<{letter}>\d+)", 1)
            self._cache[template] = re.compile(text)
        return self._cache[template]


def load_key_map(name: str) -> KeyMap:
    """A key map by its entry point's name, or from a JSON file.

    Raises:
        ValueError: If there is no such entry point or file, or it is not a key map.
    """
    if name.endswith(".json"):
        try:
            return KeyMap.from_json(Path(name).read_bytes())
        except (OSError, ValueError) as err:
            raise ValueError(f"cannot read the key map {name}: {err}") from err
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise ValueError(
            f"unknown key map {name!r}; installed are {sorted(found)}. Install the package that has it (titan-train has those "
            "of its model families), or give a JSON file."
        )
    key_map = found[name].load()
    if not isinstance(key_map, KeyMap):
        raise ValueError(f"the entry point {name!r} of {ENTRY_POINTS} is a {type(key_map).__name__}, not a KeyMap.")
    return key_map


def _pair(value: dict[str, Any]) -> Pair:
    tuples: dict[str, Any] = {key: tuple(value[key]) for key in ("part", "rows") if key in value}
    return Pair(**{**value, **tuples})
