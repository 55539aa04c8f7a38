"""Prove an exported folder: load it with transformers, and compare it with the model of the run.

Both compute in float32 on the CPU, from the same stored weights. They order their sums differently, so logits agree to
float32's rounding, not to the bit. A wrong rotary base, epsilon, tie or transposition changes them by more than a tenth of
their size; the bound of 1e-4 of the largest logit lies between, four orders of magnitude above one rounding (6e-8).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_train.generation import generate
from titan_train.tokenizers import Tokenizer

_RELATIVE = 1e-4
_NEW_TOKENS = 64
# A difference in one of these shows a pre-tokenizer, normalizer or byte fallback that was translated wrongly.
HARD_TEXTS = (
    " a", "  a  ", "\n\n\n", "a\n b\tc", "naïve café", "日本語テスト", "🙂🙃👩‍👩‍👧", "e\u0301", "\r\n", "0123456789 3.14",
    "don't I'LL", "\x00\x01", "ﬁ½", "    def f():\n\t\treturn {}", "مرحبا", " " * 50, "\u00a0x",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the parity table."""

    name: str
    measured: str
    required: str
    passed: bool


def check_folder(folder: Path, model: nn.Module, tokenizer: Tokenizer, *, seq_len: int) -> list[Check]:
    """Compare a folder with the run's model and tokenizer.

    Args:
        folder: The exported folder.
        model: The run's model with the stored weights, float32, on the CPU.
        tokenizer: The run's.
        seq_len: The longest prompt.

    Raises:
        ValueError: transformers is not installed.
    """
    transformers = _transformers()
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = _prompts(tokenizer.vocab_size, min(seq_len, 64))
    checks = _compare_logits(model, exported, rows)
    checks.append(_compare_greedy(model, exported, [row[:16].tolist() for row in rows], seq_len=seq_len))
    if (folder / "tokenizer.json").is_file():
        checks.append(_compare_ids(transformers.AutoTokenizer.from_pretrained(folder), tokenizer))
    return checks


def as_table(checks: Sequence[Check]) -> str:
    """The checks as a Markdown table."""
    lines = ["| check | measured | required | |", "| --- | --- | --- | --- |"]
    lines += [f"| {c.name} | {c.measured} | {c.required} | {'passed' if c.passed else 'FAILED'} |" for c in checks]
    return "\n".join(lines)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as err:
        raise ValueError(
            "the export is proven with transformers, which is not installed. Install titan-train[hf], or pass --no-gate to "
            "write the folder without the proof."
        ) from err
    return transformers


def _prompts(vocab_size: int, length: int) -> Tensor:
    return torch.randint(vocab_size, (3, length), generator=torch.Generator().manual_seed(0))


def _compare_logits(model: nn.Module, exported: Any, rows: Tensor) -> list[Check]:
    with torch.no_grad():
        ours, theirs = model(rows).float(), exported(rows).logits.float()
    bound = _RELATIVE * float(ours.abs().max())
    difference = float((ours - theirs).abs().max())
    first = ours.argmax(-1)
    gap = ours.gather(-1, first[..., None]) - ours.gather(-1, theirs.argmax(-1)[..., None])
    agree = float((gap <= 2 * bound).float().mean())  # where two logits are that close, either may come first
    return [
        Check("largest difference of a logit", f"{difference:.1e}", f"at most {bound:.1e}", difference <= bound),
        Check("same most likely token", f"{agree:.2%}", "100%", agree == 1.0),
    ]


def _compare_greedy(model: nn.Module, exported: Any, prompts: list[list[int]], *, seq_len: int) -> Check:
    count = max(1, min(_NEW_TOKENS, seq_len - len(prompts[0])))
    ours = generate(model, prompts, max_new_tokens=count)
    theirs = [
        exported.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]  # fmt: skip
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return Check(f"{count} greedy tokens", f"{same} of {len(prompts)} prompts equal", "all", same == len(prompts))


def _compare_ids(exported: Any, tokenizer: Tokenizer) -> Check:
    differing = [
        text
        for text in HARD_TEXTS
        if exported(text, add_special_tokens=False)["input_ids"] != tokenizer.encode(text).tolist()
    ]
    measured = f"{len(HARD_TEXTS) - len(differing)} of {len(HARD_TEXTS)} texts equal"
    return Check("token ids", measured + (f", not {differing[0]!r}" if differing else ""), "all", not differing)
