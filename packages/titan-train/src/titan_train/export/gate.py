"""Prove an exported artefact: load it as its users will, and compare it with the model of the run.

Every target is loaded by the library that reads it (transformers, onnxruntime, AOTInductor's loader, llama.cpp, torch's
DCP) and answers three questions: the logits of a batch, the tokens after a prompt, the ids of a text. The run's model
computes in float32 on the CPU, with its weights rounded as the artefact stores them. Both order their sums differently, so
logits agree to float32's rounding, not to the bit. A wrong rotary base, epsilon, tie or transposition changes them by more
than a tenth of their size; the bound of 1e-4 of the largest logit lies between, four orders of magnitude above one rounding
(6e-8). Greedy texts may part only where two logits of the run's model are closer than twice that bound.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from titan_train.files import write_atomic
from titan_train.generation import generate
from titan_train.models import CausalAttention
from titan_train.tokenizers import Tokenizer

RELATIVE = 1e-4
"""Largest difference of a logit, relative to the largest logit."""
WITHOUT_PROOF = "pass --no-gate to write the folder without the proof"
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


class Exported(Protocol):
    """A loaded artefact."""

    def logits(self, tokens: Tensor) -> Tensor | None:
        """``[B, S]`` int64 to ``[B, S, V]`` float32; None if its library does not give logits."""
        ...

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The ``count`` most likely tokens after a prompt, one after the other."""
        ...

    def ids(self, text: str) -> list[int] | None:
        """The ids of a text; None if the artefact carries no tokenizer that its library reads."""
        ...


def check_positions(needed: int, limit: int | None) -> None:
    """Refuse more positions than a model has learned.

    Raises:
        ValueError: It has fewer.
    """
    if limit is not None and needed > limit:
        raise ValueError(f"{needed} positions are needed, but the model has learned {limit}. Shorten the text.")


class Follows(Protocol):
    """An artefact that is too slow to continue prompts token by token."""

    def follow(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The most likely token at each place of the texts, given what is before it; prompts are of one length."""
        ...


@dataclass(frozen=True, slots=True)
class Reference:
    """What the run's model answers, so that it need not be in memory beside an artefact."""

    rows: Tensor
    """``[3, S]`` int64."""
    logits: Tensor
    """Of the rows, ``[3, S, V]`` float32."""
    prompts: list[list[int]]
    texts: list[list[int]]
    """The greedy tokens after each prompt."""
    of_texts: Tensor
    """The logits that chose each of them, ``[3, 64, V]`` float32."""
    layers: int


@torch.no_grad()
def compute_reference(model: nn.Module, vocab_size: int, *, seq_len: int) -> Reference:
    """Ask the run's model.

    Args:
        model: With the stored weights, float32, on the CPU; may be cut over ranks, which then all call this.
        vocab_size: Of the tokenizer.
        seq_len: The longest prompt.
    """
    rows = _prompts(vocab_size, min(seq_len, 64))
    prompts: list[list[int]] = [row[:16].tolist() for row in rows]
    count = max(1, min(_NEW_TOKENS, seq_len - len(prompts[0])))
    texts = generate(model, prompts, max_new_tokens=count)
    of_texts = model(followed(prompts, texts)).float()[:, len(prompts[0]) - 1 :].clone()
    layers = sum(isinstance(module, CausalAttention) for module in model.modules())
    return Reference(rows, model(rows).float(), prompts, texts, of_texts, layers)


def followed(prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Tensor:
    """Prompts of one length and their texts without the last token, ``[B, S]``."""
    return torch.tensor([[*prompt, *text[:-1]] for prompt, text in zip(prompts, texts, strict=True)])


def check_artefact(
    exported: Exported, reference: Reference, tokenizer: Tokenizer, *, rounding: float = 0.0
) -> list[Check]:
    """Compare an artefact with the run's model and tokenizer.

    Args:
        exported: The loaded artefact.
        reference: The answers of the run's model with the stored weights.
        tokenizer: The run's.
        rounding: Unit roundoff to which the library that continues prompts rounds the inputs of its products; 0 is
            float32. A layer has eight such products, and their errors add in quadrature, so logits then differ by up to
            this times the root of eight times the layers, relative to the largest.
    """
    largest = float(reference.logits.abs().max())
    bound = RELATIVE * largest
    theirs = exported.logits(reference.rows)
    checks = [] if theirs is None else _compare_logits(reference.logits, theirs, bound)
    bound = max(bound, rounding * (8 * reference.layers) ** 0.5 * largest)
    checks.append(_compare_greedy(reference, exported, bound=bound))
    checks += _compare_ids(exported, tokenizer)
    return checks


def require_passed(checks: Sequence[Check], folder: Path, *, target: str, step: int) -> None:
    """Write the checks into the folder, and refuse it if one failed.

    Raises:
        ValueError: Names the checks that failed.
    """
    content = {"step": step, "target": target, "checks": [asdict(check) for check in checks]}
    write_atomic(folder / "parity.json", json.dumps(content, indent=2) + "\n")
    failed = [check for check in checks if not check.passed]
    if failed:
        rows = "; ".join(f"{check.name}: {check.measured}, required {check.required}" for check in failed)
        raise ValueError(
            f"--to {target}: the exported folder does not compute what the run's model computes ({rows}), so it was not written. "
            "Please report this; use --no-gate to write it anyway."
        )


def as_table(checks: Sequence[Check]) -> str:
    """The checks as a Markdown table."""
    if not checks:
        return "Not compared (exported with --no-gate)."
    lines = ["| check | measured | required | |", "| --- | --- | --- | --- |"]
    lines += [f"| {c.name} | {c.measured} | {c.required} | {'passed' if c.passed else 'FAILED'} |" for c in checks]
    return "\n".join(lines)


def _prompts(vocab_size: int, length: int) -> Tensor:
    return torch.randint(vocab_size, (3, length), generator=torch.Generator().manual_seed(0))


def _compare_logits(ours: Tensor, theirs: Tensor, bound: float) -> list[Check]:
    difference = float((ours - theirs).abs().max())
    first = ours.argmax(-1)
    gap = ours.gather(-1, first[..., None]) - ours.gather(-1, theirs.argmax(-1)[..., None])
    agree = float((gap <= 2 * bound).float().mean())  # where two logits are that close, either may come first
    return [
        Check("largest difference of a logit", f"{difference:.1e}", f"at most {bound:.1e}", difference <= bound),
        Check("same most likely token", f"{agree:.2%}", "100%", agree == 1.0),
    ]


def _compare_greedy(reference: Reference, exported: Exported, *, bound: float) -> Check:
    prompts, texts = reference.prompts, reference.texts
    if hasattr(exported, "follow"):
        # equal at every place, given our tokens before it: its own greedy text is ours, by induction
        theirs = cast(Follows, exported).follow(prompts, texts)
    else:
        theirs = [exported.greedy(prompt, len(texts[0])) for prompt in prompts]
    gaps = [_gap(*case) for case in zip(texts, theirs, reference.of_texts, strict=True)]
    same = sum(gap is None for gap in gaps)
    parted = [gap for gap in gaps if gap is not None]
    measured = f"{same} of {len(prompts)} prompts equal"
    if parted:
        measured += f", logits {max(parted):.1e} apart where the others part"
    passed = all(gap <= 2 * bound for gap in parted)
    return Check(
        f"{len(texts[0])} greedy tokens", measured, f"equal, or parting at logits within {2 * bound:.1e}", passed
    )


def _gap(ours: list[int], theirs: list[int], logits: Tensor) -> float | None:
    """How far the run's model holds the two tokens apart at which the texts part; None if they do not."""
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    at = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    if at >= len(theirs):
        return float("inf")  # ended early
    return float(logits[at, ours[at]] - logits[at, theirs[at]])


def _compare_ids(exported: Exported, tokenizer: Tokenizer) -> list[Check]:
    found = {text: exported.ids(text) for text in HARD_TEXTS}
    if any(ids is None for ids in found.values()):
        return []
    differing = [text for text, ids in found.items() if ids != tokenizer.encode(text).tolist()]
    measured = f"{len(HARD_TEXTS) - len(differing)} of {len(HARD_TEXTS)} texts equal"
    return [Check("token ids", measured + (f", not {differing[0]!r}" if differing else ""), "all", not differing)]
