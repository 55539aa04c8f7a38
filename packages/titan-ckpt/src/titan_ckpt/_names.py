"""Key maps: how a model's tensors are named and cut here and in Hugging Face checkpoints of its family.

A map is a list of pairs of name templates in which ``{i}`` is a layer's and ``{j}`` an expert's number. Names on this
side are those of Meta's Llama code and of torchtitan (``layers.0.attention.wq.weight``). A pair may also say that
experts are stacked here and apart there, that a tensor is part of a packed one there, or that rotary channels have
another order. Plain rules without torch; `titan_ckpt._translate` applies them.
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


_ROTARY_TABLES = (r".*rotary_emb\.inv_freq",)

# Meta's and torchtitan's rotary tables, and torchtitan's counter of tokens an expert.
_ONLY_HERE = (r"(?:.*\.)?(?:freqs_cis|rope_cache)", r".*\.moe\.tokens_per_expert")

_COMMON = (
    Pair("tok_embeddings.weight", "model.embed_tokens.weight"),
    Pair("norm.weight", "model.norm.weight"),
    Pair("lm_head.weight", "lm_head.weight"),
    Pair("output.weight", "lm_head.weight"),  # the head's name in Meta's code and torchtitan's models
    Pair("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    Pair("layers.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
)

_ATTENTION = tuple(
    Pair(f"layers.{{i}}.attention.w{x}.{kind}", f"model.layers.{{i}}.self_attn.{x}_proj.{kind}", rotary=x in "qk")
    for x in "qkvo"
    for kind in ("weight", "bias")
)

_PROJECTIONS = (("w1", "gate"), ("w2", "down"), ("w3", "up"))

_DENSE = tuple(
    Pair(f"layers.{{i}}.feed_forward.{ours}.weight", f"model.layers.{{i}}.mlp.{theirs}_proj.weight")
    for ours, theirs in _PROJECTIONS
)

_THEIR_EXPERTS = "model.layers.{i}.mlp.experts"

_EXPERTS = (
    # Stacked here: w1, w3 [E, F, D] and w2 [E, D, F].
    *(Pair(f"layers.{{i}}.moe.experts.{w}", f"{_THEIR_EXPERTS}.{{j}}.{x}_proj.weight") for w, x in _PROJECTIONS),
    Pair("layers.{i}.moe.experts.w1", f"{_THEIR_EXPERTS}.gate_up_proj", part=(0, 2, 1)),
    Pair("layers.{i}.moe.experts.w3", f"{_THEIR_EXPERTS}.gate_up_proj", part=(1, 2, 1)),
    Pair("layers.{i}.moe.experts.w2", f"{_THEIR_EXPERTS}.down_proj"),
    # One module an expert here.
    *(
        Pair(f"layers.{{i}}.moe.experts.{{j}}.{w}.weight", f"{_THEIR_EXPERTS}.{{j}}.{x}_proj.weight")
        for w, x in _PROJECTIONS
    ),
    Pair("layers.{i}.moe.router.gate.weight", "model.layers.{i}.mlp.gate.weight"),
)

_HEAD_NORMS = tuple(
    Pair(f"layers.{{i}}.attention.{x}_norm.weight", f"model.layers.{{i}}.self_attn.{x}_norm.weight", rotary=True)
    for x in "qk"
)

_LATENT_ATTENTION = tuple(
    Pair(f"layers.{{i}}.attention.{name}.weight", f"model.layers.{{i}}.self_attn.{theirs}.weight")
    for name, theirs in (
        ("wq", "q_proj"),
        ("wq_a", "q_a_proj"),
        ("q_norm", "q_a_layernorm"),
        ("wq_b", "q_b_proj"),
        ("wkv_a", "kv_a_proj_with_mqa"),
        ("kv_norm", "kv_a_layernorm"),
        ("wkv_b", "kv_b_proj"),
        ("wo", "o_proj"),
    )
)

_SHARED_EXPERTS = (
    *(
        Pair(
            f"layers.{{i}}.moe.shared_experts.{ours}.weight",
            f"model.layers.{{i}}.mlp.shared_experts.{theirs}_proj.weight",
        )
        for ours, theirs in _PROJECTIONS
    ),
    Pair("layers.{i}.moe.expert_bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"),
)

LLAMA = KeyMap("llama", (*_COMMON, *_ATTENTION, *_DENSE), _ROTARY_TABLES, _ONLY_HERE)
"""Llama 1 to 3.3 and what shares their layout (Mistral, for one)."""

QWEN3 = KeyMap("qwen3", (*_COMMON, *_ATTENTION, *_HEAD_NORMS, *_DENSE, *_EXPERTS), _ROTARY_TABLES, _ONLY_HERE)
"""Qwen 3, dense and mixture of experts."""

DEEPSEEK = KeyMap(
    "deepseek", (*_COMMON, *_LATENT_ATTENTION, *_DENSE, *_EXPERTS, *_SHARED_EXPERTS), _ROTARY_TABLES, _ONLY_HERE
)
"""DeepSeek V2 and V3, float8 weights with block scales too. V3's extra prediction layer is left out with
``DEEPSEEK.ignoring(r"model\\.layers\\.61\\..*")``."""

KEY_MAPS = {key_map.family: key_map for key_map in (LLAMA, QWEN3, DEEPSEEK)}
