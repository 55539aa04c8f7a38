"""Why one setup beats another, term by term, in one sentence."""

from titan_train.planner.cost.step import TERMS
from titan_train.planner.estimate import StepEstimate

_WORDS = {
    "products": "matrix products", "attention": "attention", "experts": "experts", "pointwise": "norms and gates",
    "head": "the loss head", "recompute": "recomputation", "tp": "exposed tensor-parallel transfers",
    "cp": "exposed context-parallel transfers", "ep": "exposed expert transfers", "dp": "exposed data-parallel transfers",
    "pp": "exposed pipeline transfers", "bubble": "the pipeline's bubble", "offload": "host copies",
    "optimizer": "the optimizer", "host": "host work",
}  # fmt: skip


def differences(a: StepEstimate, b: StepEstimate) -> list[tuple[str, float]]:
    """Seconds per token batch that ``b`` spends more than ``a``, by term, largest first."""
    tokens = [e.setup.global_batch * e.setup.seq_len for e in (a, b)]
    found = [(name, b.time.terms[name] * tokens[0] / tokens[1] - a.time.terms[name]) for name in TERMS]
    return sorted(found, key=lambda pair: -abs(pair[1]))


def why(a: StepEstimate, b: StepEstimate) -> str:
    """One sentence: why ``b`` loses to ``a``, or what it is ahead in."""
    total = a.time.total
    share = (b.time.total * a.setup.global_batch / b.setup.global_batch) / total - 1
    if abs(share) < 0.002:
        return f"as fast; {_memory(a, b)}"
    parts = [(name, seconds) for name, seconds in differences(a, b) if abs(seconds) > 0.002 * total]
    worse = [f"{seconds / total:+.1%} on {_WORDS[name]}" for name, seconds in parts if seconds > 0][:2]
    better = [f"{seconds / total:+.1%} on {_WORDS[name]}" for name, seconds in parts if seconds < 0][:1]
    lead = f"takes {abs(share):.1%} {'more' if share > 0 else 'less'} time"
    first, second = (worse, better) if share > 0 else (better, worse[:1])
    sentence = f"{lead}: {' and '.join(first) or 'many small terms'}"
    if second:
        sentence += f", against {second[0]}"
    if share < 0:
        sentence += "; ranked lower because it is a tie within 2 % with more axes, or lies outside the measured range"
    return sentence


def _memory(a: StepEstimate, b: StepEstimate) -> str:
    more = b.memory.allocated_gib - a.memory.allocated_gib
    return f"{abs(more):.1f} GiB {'more' if more > 0 else 'less'} memory"
