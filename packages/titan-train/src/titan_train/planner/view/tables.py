"""Estimates and rankings as plain text, and why one setup beats another, term by term, in one sentence."""

from titan_train.planner.cost.step import TERMS
from titan_train.planner.estimate import StepEstimate
from titan_train.planner.search.search import Ranking, outside

_GIB = 2.0**30
_WORDS = {
    "products": "matrix products", "attention": "attention", "experts": "experts", "pointwise": "norms and gates",
    "head": "the loss head", "recompute": "recomputation", "tp": "exposed tensor-parallel transfers",
    "cp": "exposed context-parallel transfers", "ep": "exposed expert transfers", "dp": "exposed data-parallel transfers",
    "pp": "exposed pipeline transfers", "bubble": "the pipeline's bubble", "offload": "host copies",
    "optimizer": "the optimizer", "host": "host work",
}  # fmt: skip


def count_text(number: float) -> str:
    """A number of parameters in billions or, where it is small, in millions."""
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def estimate_text(e: StepEstimate) -> str:
    """Where the time and the memory of one setup go."""
    low, high = e.interval
    lines = [
        f"{e.shape.name}, {count_text(e.shape.parameters())} parameters, on {e.setup.world_size} x {e.machine.title}",
        f"setup    {e.setup.describe()}",
        f"speed    {e.tokens_per_s:,.0f} tokens/s/device (80 % interval {low:,.0f} to {high:,.0f}); step {e.time.total:.3f} s",
        (
            f"MFU      {e.mfu(causal=True):.1%} with causal attention by half, {e.mfu(causal=False):.1%} in full; "
            f"of {e.machine.peak / 1e12:,.{0 if e.machine.peak > 1e13 else 3}f} TFLOP/s bf16"
        ),
        (
            f"memory   {e.memory.allocated_gib:.1f} GiB allocated, {e.memory.reserved_gib:.1f} GiB reserved, "
            f"at {e.memory.instant}; {e.machine.memory_bytes / _GIB:.1f} GiB usable"
        ),
        "",
        "time of one step",
    ]
    for name, seconds in sorted(e.time.terms.items(), key=lambda t: -t[1]):
        if seconds > 1e-4 * e.time.total:
            lines.append(f"  {name:<12}{seconds:10.4f} s {seconds / e.time.total:6.1%}  {TERMS[name]}")
    lines += ["", "memory of the fullest device"]
    for name, size in sorted(e.memory.parts.items(), key=lambda p: -p[1]):
        lines.append(f"  {name:<20}{size / _GIB:9.2f} GiB")
    lines += notes_on([e])
    lines += ["", f"constants {e.constants.source}; machine: {e.machine.source}"]
    if e.measured:
        lines.append(f"operators {e.measured}")
    if outside(e):
        lines.append(f"outside the range of measured rows: {', '.join(outside(e))}")
    return "\n".join(lines)


def ranking_text(ranking: Ranking) -> str:
    """The best setups, and why each loses to the first."""
    request, best = ranking.request, ranking.best
    lines = [
        (
            f"{request.shape.name} on {request.gpus} x {request.machine.title}: {request.global_batch} sequences of "
            f"{request.seq_len:,} tokens a step"
        ),
        (
            f"{ranking.examined:,} layouts examined, {ranking.fitting:,} setups fit in {request.limit_bytes / _GIB:.1f} GiB; "
            f"{ranking.tie} within 2 % of the best (the simplest is first)"
        ),
        "MFU counts causal attention by half. GPU-hours are for 1 B tokens.",
        "",
        f"{'':>3} {'tokens/s/GPU':>12} {'80 % interval':>17} {'MFU':>6} {'GiB':>6} {'GPU-h':>7}  setup",
    ]
    for number, e in enumerate(best, 1):
        low, high = e.interval
        lines.append(
            f"{number:>3} {e.tokens_per_s:>12,.0f} {low:>8,.0f}-{high:<8,.0f} {e.mfu(causal=True):>6.1%} "
            f"{e.memory.allocated_gib:>6.1f} {1e9 / e.tokens_per_s / 3600:>7.0f}  {e.setup.describe()}"
        )
        if number > 1:
            lines.append(f"{'':>48}{why(best[0], e)}")
    lines += ["", "the best three of each kind"]
    for name, found in ranking.kinds.items():
        for number, e in enumerate(found):
            lines.append(
                f"  {'' if number else name:<24}{e.tokens_per_s:>8,.0f} {e.memory.allocated_gib:>6.1f}  {e.setup.describe()}"
                + (f": {why(best[0], e)}" if e is not best[0] and not number else "")
            )
    lines += _small_states(ranking)
    lines += notes_on(best)
    if best and outside(best[0]):
        lines += ["", f"The first lies outside the range of measured rows: {', '.join(outside(best[0]))}."]
    return "\n".join(lines)


def _small_states(ranking: Ranking) -> list[str]:
    """What optimizer states of fewer bytes buy, for a search that tried them."""
    small, best = ranking.request.states[1:], ranking.best[0]
    if not small:
        return []
    if best.setup.states != (first := ranking.request.states[0]):
        given = "float32" if first == "fp32" else first
        return [
            "",
            f"Nothing fits with AdamW's states in {given}; with optimizer.states = {best.setup.states!r} it does.",
        ]
    lines = [""]
    for states in small:
        found = ranking.kinds.get(f"optimizer states in {states}", ())
        if not found or found[0].time.total >= best.time.total:
            lines.append(
                f"optimizer.states = {states!r} buys no time here: no layout needs the room to recompute less."
            )
            continue
        share = 1 - found[0].time.total / best.time.total
        lines.append(
            f"optimizer.states = {states!r} buys {share:.1%} of the time: {found[0].setup.describe()}. It rounds AdamW's "
            "means: a run's numbers change."
        )
    return lines


def notes_on(estimates: list[StepEstimate]) -> list[str]:
    """What float8 means for the figures, where one of the setups uses it."""
    if not any(e.setup.float8 for e in estimates):
        return []
    return [
        "",
        "float8 changes the numbers of a run: compare its loss with bf16's over your first thousand steps.",
        "MFU is over the bf16 peak, which float8 products exceed.",
    ]


def comparison_text(a: StepEstimate, b: StepEstimate) -> str:
    """Two setups term by term."""
    lines = [
        f"A  {a.setup.describe()}",
        f"B  {b.setup.describe()}",
        "",
        f"{'seconds':<14}{'A':>10}{'B':>10}{'B - A':>10}",
    ]
    for name, more in differences(a, b):
        if max(a.time.terms[name], b.time.terms[name]) > 1e-4 * a.time.total:
            lines.append(
                f"{name:<14}{a.time.terms[name]:>10.4f}{b.time.terms[name]:>10.4f}{more:>+10.4f}  {TERMS[name]}"
            )
    lines.append(f"{'step':<14}{a.time.total:>10.4f}{b.time.total:>10.4f}{b.time.total - a.time.total:>+10.4f}")
    lines += ["", f"{'GiB':<22}{'A':>8}{'B':>8}"]
    for name in sorted(set(a.memory.parts) | set(b.memory.parts)):
        one, two = (e.memory.parts.get(name, 0.0) / _GIB for e in (a, b))
        lines.append(f"{name:<22}{one:>8.2f}{two:>8.2f}")
    lines.append(f"{'allocated':<22}{a.memory.allocated_gib:>8.2f}{b.memory.allocated_gib:>8.2f}")
    lines += ["", f"B {why(a, b)}."]
    return "\n".join(lines)


def differences(a: StepEstimate, b: StepEstimate) -> list[tuple[str, float]]:
    """Seconds that a step of ``b`` spends more than one of ``a``, of as many tokens, by term, largest first."""
    return sorted(((n, b.time.terms[n] - a.time.terms[n]) for n in TERMS), key=lambda pair: -abs(pair[1]))


def why(a: StepEstimate, b: StepEstimate) -> str:
    """One sentence: why ``b`` loses to ``a``, or what it is ahead in."""
    total = a.time.total
    share = b.time.total / total - 1
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
