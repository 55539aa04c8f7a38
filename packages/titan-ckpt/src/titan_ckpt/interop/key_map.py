"""Key maps: how a model's tensors are named and cut here and in Hugging Face checkpoints of its family.

A map is a list of pairs of name templates in which ``{i}`` is a layer's and ``{j}`` an expert's number. Names on this
side are those of Meta's Llama code and of torchtitan (``layers.0.attention.wq.weight``). A pair may also say that
experts are stacked here and apart there, that a tensor is part of a packed one there, or that rotary channels have
another order. Plain rules without torch; `titan_ckpt.interop.translate` applies them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor's name here and there, and how its numbers differ, if they do."""

    ours: str
    """Template of the name here."""
    theirs: str
    """Template of the name there. With ``{j}`` where ``ours`` has none, tensor ``j`` there is ``[j]`` of the stack
    here."""
    part: tuple[int, int, int] | None = None
    """``(index, count, dim)``: this tensor is part ``index`` of ``count`` equal parts along ``dim`` of the one there."""
    rotary: bool = False
    """Whether rows are channels that a rotation pairs, head after head."""
    head_dim: int | None = None
    """Set where rotary channels are neighbours here and halves there: the width of a head."""

    @property
    def stacked(self) -> bool:
        """Whether experts are stacked here and apart there."""
        return "{j}" in self.theirs and "{j}" not in self.ours


@dataclass(frozen=True, slots=True)
class KeyMap:
    """A family's names. Where several pairs fit a name, the model decides if there is one, else the first pair."""

    family: str
    pairs: tuple[Pair, ...]
    ignored: tuple[str, ...] = ()
    """Regular expressions of names there that no model here holds (precomputed frequencies, say)."""
    left_out: tuple[str, ...] = ()
    """Regular expressions of names here that no checkpoint there holds: not exported, not looked for on import."""
    _cache: dict[str, re.Pattern[str]] = field(default_factory=dict[str, re.Pattern[str]], repr=False, compare=False)

    def to_hf(self, name: str) -> str:
        """The Hugging Face name of a tensor; of a stack of experts, with ``{j}`` for the expert's number.

        Raises:
            ValueError: If the family has no such tensor.
        """
        pair, letters = self.match_ours(name)
        return pair.theirs.format(**{"j": "{j}", **letters})

    def from_hf(self, name: str) -> str | None:
        """The name here of a Hugging Face tensor (the first, if several fit); None if it is to be ignored.

        Raises:
            ValueError: If the family has no such tensor.
        """
        found = self.match_theirs(name)
        return found[0][0].ours.format(**found[0][1]) if found else None

    def interleaved(self, head_dim: int) -> "KeyMap":
        """The map for a model that pairs neighbouring rotary channels, as Meta's and torchtitan's Llama do.

        Rows of query and key projections are then put in the other order on the way.

        Args:
            head_dim: Width of an attention head; even.

        Raises:
            ValueError: If the family rotates only part of a head, or ``head_dim`` is odd.
        """
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim={head_dim} cannot be halved. Give the width of one attention head.")
        if not any(pair.rotary for pair in self.pairs):
            raise ValueError(f"{self.family} has one order of rotary channels on both sides; use the map as it is.")
        pairs = tuple(replace(pair, head_dim=head_dim) if pair.rotary else pair for pair in self.pairs)
        return replace(self, pairs=pairs)

    def packed(self) -> "KeyMap":
        """The map, exporting gate and up projections of stacked experts as one tensor (``experts.gate_up_proj``).

        Without it they are exported one tensor an expert, as such models are published. Both forms are imported.
        """
        first = [pair for pair in self.pairs if ".experts." in pair.theirs and "{j}" not in pair.theirs]
        return replace(self, pairs=(*first, *(pair for pair in self.pairs if pair not in first)))

    def ignoring(self, *patterns: str) -> "KeyMap":
        """The map, also leaving out names there that match one of these regular expressions as a whole."""
        return replace(self, ignored=(*self.ignored, *patterns))

    def leaving_out(self, *patterns: str) -> "KeyMap":
        """The map, also leaving out names here that match one of these regular expressions as a whole.

        For buffers that the model computes or counts and Hugging Face has not: they are neither exported nor missed on
        import.
        """
        return replace(self, left_out=(*self.left_out, *patterns))

    def leaves_out(self, name: str) -> bool:
        """Whether a tensor here is neither exported nor looked for on import."""
        return any(re.fullmatch(pattern, name) for pattern in self.left_out)

    def maps(self, name: str) -> bool:
        """Whether a name there is that of a tensor of the family."""
        return any(True for _ in self._matches(name, "theirs"))

    def ignores(self, name: str) -> bool:
        """Whether a tensor there is not to be imported."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def match_ours(self, name: str) -> tuple[Pair, dict[str, str]]:
        """The pair of a name here, with the numbers in it.

        Raises:
            ValueError: If the family has no such tensor.
        """
        for pair, letters in self._matches(name, "ours"):
            return pair, letters
        raise ValueError(
            f"{name!r} is no name here in the {self.family} family. Pass the key map of its family, or leave the name "
            "out with names.leaving_out(...)."
        )

    def match_theirs(self, name: str) -> list[tuple[Pair, dict[str, str]]]:
        """Every pair of a name there, with the numbers in it; none if it is to be ignored.

        Raises:
            ValueError: If the family has no such tensor.
        """
        if self.ignores(name):
            return []
        found = list(self._matches(name, "theirs"))
        if not found:
            raise ValueError(
                f"{name!r} is no name of Hugging Face in the {self.family} family. Pass the key map of its family, or "
                "leave the name out with names.ignoring(...)."
            )
        return found

    def _matches(self, name: str, side: str) -> Iterator[tuple[Pair, dict[str, str]]]:
        for pair in self.pairs:
            match = self._pattern(getattr(pair, side)).fullmatch(name)
            if match:
                yield pair, match.groupdict()

    def _pattern(self, template: str) -> re.Pattern[str]:
        if template not in self._cache:
            text = re.escape(template)
            for letter in "ij":
                text = text.replace(rf"\{{{letter}\}}", rf"(?P<{letter}>\d+)", 1)
            self._cache[template] = re.compile(text)
        return self._cache[template]
