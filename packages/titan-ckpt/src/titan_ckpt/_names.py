"""Key maps: the names of a model's tensors here and in Hugging Face checkpoints of its family.

A map is a list of pairs of templates in which ``{i}`` is a layer's and ``{j}`` an expert's number. The names on this
side are those of Meta's Llama code and of torchtitan (``layers.0.attention.wq.weight``). Only names are mapped:
rotary halves must be laid out as Hugging Face has them (first half, second half; DeepSeek interleaved).
"""

import re
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KeyMap:
    """A family's names, one to one."""

    family: str
    pairs: tuple[tuple[str, str], ...]
    """(name here, name there) templates."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of names there that no model here holds (precomputed frequencies, say)."""
    _cache: dict[str, re.Pattern[str]] = field(default_factory=dict[str, re.Pattern[str]], repr=False, compare=False)

    def to_hf(self, name: str) -> str:
        """The Hugging Face name of a tensor.

        Raises:
            ValueError: If the family has no such tensor.
        """
        return self._translate(name, 0)

    def from_hf(self, name: str) -> str | None:
        """The name here of a Hugging Face tensor; None if it is to be ignored.

        Raises:
            ValueError: If the family has no such tensor.
        """
        if any(re.fullmatch(pattern, name) for pattern in self.ignored):
            return None
        return self._translate(name, 1)

    def _translate(self, name: str, side: int) -> str:
        for pair in self.pairs:
            match = self._pattern(pair[side]).fullmatch(name)
            if match:
                return pair[1 - side].format(**match.groupdict())
        where = ("here", "of Hugging Face")[side]
        raise ValueError(f"{name!r} is no name {where} in the {self.family} family. Pass the key map of its family.")

    def _pattern(self, template: str) -> re.Pattern[str]:
        if template not in self._cache:
            text = re.escape(template)
            for letter in "ij":
                text = text.replace(rf"\{{{letter}\}}", rf"(?P<{letter}>\d+)", 1)
            self._cache[template] = re.compile(text)
        return self._cache[template]


_ROTARY = (r".*rotary_emb\.inv_freq",)

_COMMON = (
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
    ("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    ("layers.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
)

_ATTENTION = tuple(
    (f"layers.{{i}}.attention.w{x}.{kind}", f"model.layers.{{i}}.self_attn.{x}_proj.{kind}")
    for x in "qkvo"
    for kind in ("weight", "bias")
)

_DENSE = tuple(
    (f"layers.{{i}}.feed_forward.{ours}.weight", f"model.layers.{{i}}.mlp.{theirs}_proj.weight")
    for ours, theirs in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
)

_EXPERTS = (
    *(
        (f"layers.{{i}}.moe.experts.{{j}}.{ours}.weight", f"model.layers.{{i}}.mlp.experts.{{j}}.{theirs}_proj.weight")
        for ours, theirs in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    ),
    ("layers.{i}.moe.router.weight", "model.layers.{i}.mlp.gate.weight"),
)

_HEAD_NORMS = tuple(
    (f"layers.{{i}}.attention.{x}_norm.weight", f"model.layers.{{i}}.self_attn.{x}_norm.weight") for x in "qk"
)

_LATENT_ATTENTION = tuple(
    (f"layers.{{i}}.attention.{name}.weight", f"model.layers.{{i}}.self_attn.{theirs}.weight")
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
        (
            f"layers.{{i}}.moe.shared_experts.{ours}.weight",
            f"model.layers.{{i}}.mlp.shared_experts.{theirs}_proj.weight",
        )
        for ours, theirs in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    ),
    ("layers.{i}.moe.expert_bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"),
)

LLAMA = KeyMap("llama", (*_COMMON, *_ATTENTION, *_DENSE), _ROTARY)
"""Llama 1 to 3.3 and what shares their layout (Mistral, for one)."""

QWEN3 = KeyMap("qwen3", (*_COMMON, *_ATTENTION, *_HEAD_NORMS, *_DENSE, *_EXPERTS), _ROTARY)
"""Qwen 3, dense and mixture of experts (one tensor an expert)."""

DEEPSEEK = KeyMap("deepseek", (*_COMMON, *_LATENT_ATTENTION, *_DENSE, *_EXPERTS, *_SHARED_EXPERTS), _ROTARY)
"""DeepSeek V2 and V3, unquantized, without the extra prediction layer."""

KEY_MAPS = {key_map.family: key_map for key_map in (LLAMA, QWEN3, DEEPSEEK)}
