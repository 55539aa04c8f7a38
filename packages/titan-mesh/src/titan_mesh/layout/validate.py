"""Does this layout fit the model, the batch and the machines? Every finding names the field, its value and the fix."""

import math
from dataclasses import dataclass
from typing import Literal

from titan_mesh.layout.ranks import RankLayout
from titan_mesh.layout.spec import check_count
from titan_mesh.nearest import either, nearest_divisors


@dataclass(frozen=True)
class Issue:
    """One thing that does not fit."""

    level: Literal["error", "warning"]
    """``"error"``: cannot run. ``"warning"``: runs, but slowly or unevenly."""
    field: str
    """The argument or axis at fault."""
    value: int
    """What was given for it."""
    message: str
    """Why it does not fit."""
    fix: str
    """What to change, with the nearest valid numbers."""

    def __str__(self) -> str:
        return f"{self.level}: {self.field}={self.value} {self.message} {self.fix}"


def find_issues(
    layout: RankLayout,
    *,
    heads: int | None,
    kv_heads: int | None,
    hidden: int | None,
    vocab: int | None,
    seq_len: int | None,
    layers: int | None,
    experts: int | None,
    batch: int | None,
    microbatches: int | None,
    sequence_parallel: bool,
) -> list[Issue]:
    """The issues of `Layout.validate`, in the order of its arguments, then those of the topology."""
    spec = layout.spec
    given = {"heads": heads, "kv_heads": kv_heads, "hidden": hidden, "vocab": vocab, "seq_len": seq_len}
    given |= {"layers": layers, "experts": experts, "batch": batch, "microbatches": microbatches}
    for name, value in given.items():
        if value is not None:
            check_count(name, value)

    issues = [
        _degree_must_divide("tp", spec.tp, name, value, whole)
        for name, value, whole in (
            ("heads", heads, "an attention head"),
            ("kv_heads", kv_heads, "a key-value head"),
            ("hidden", hidden, "a feed-forward column"),
            ("vocab", vocab, "a vocabulary row"),
        )
    ]
    issues += [
        _sequence(layout, seq_len, sequence_parallel),
        _stages(spec.pp, layers),
        _degree_must_divide("ep", spec.ep, "experts", experts, "an expert"),
        _degree_must_divide("etp", spec.etp, "hidden", hidden, "an expert's column"),
        *_batch(layout, batch, microbatches),
        *_links(layout),
    ]
    return [issue for issue in issues if issue is not None]


def _degree_must_divide(axis: str, degree: int, name: str, value: int | None, whole: str) -> Issue | None:
    if value is None or value % degree == 0:
        return None
    valid = either(f"{axis}={d}" for d in nearest_divisors(degree, value))
    multiple = degree * -(-value // degree)
    return Issue(
        "error",
        name,
        value,
        f"is not a multiple of {axis}={degree}: a rank would hold part of {whole}.",
        f"Use {valid}, or {name}={multiple}.",
    )


def _sequence(layout: RankLayout, seq_len: int | None, sequence_parallel: bool) -> Issue | None:
    spec = layout.spec
    # Two chunks a rank: the balanced (head and tail) cut of a causal sequence.
    parts = (2 * spec.cp if spec.cp > 1 else 1) * (spec.tp if sequence_parallel else 1)
    if seq_len is None or seq_len % parts == 0:
        return None
    factors = ([f"2 * cp={spec.cp}"] if spec.cp > 1 else []) + (
        [f"tp={spec.tp}"] if sequence_parallel and spec.tp > 1 else []
    )
    below, above = seq_len // parts * parts, -(-seq_len // parts) * parts
    valid = either(f"seq_len={n}" for n in sorted({below, above} - {0}, key=lambda n: abs(n - seq_len)))
    return Issue(
        "error",
        "seq_len",
        seq_len,
        f"is not a multiple of {' * '.join(factors)} = {parts}: ranks would get parts of different length.",
        f"Use {valid}, or pad to {above}.",
    )


def _stages(pp: int, layers: int | None) -> Issue | None:
    if layers is None or layers % pp == 0:
        return None
    if layers < pp:
        return Issue(
            "error",
            "layers",
            layers,
            f"is less than pp={pp}: a stage would hold no layer.",
            f"Use pp={layers} or less.",
        )
    valid = either(f"pp={d}" for d in nearest_divisors(pp, layers))
    return Issue(
        "warning",
        "layers",
        layers,
        f"is not a multiple of pp={pp}: stages hold {layers // pp} or {layers // pp + 1} layers, and the others "
        "wait for the longest.",
        f"{valid} would be even; or give the first and last stage fewer layers, which also hold embedding and head.",
    )


def _batch(layout: RankLayout, batch: int | None, microbatches: int | None) -> list[Issue | None]:
    dp, pp = layout.size("dp"), layout.spec.pp
    found: list[Issue | None] = []
    parts = dp * (microbatches or 1)
    if batch is not None and batch % parts:
        what = f"dp={dp}" + (f" * microbatches={microbatches}" if microbatches else "")
        near = sorted({batch // parts * parts, -(-batch // parts) * parts} - {0}, key=lambda n: abs(n - batch))
        found.append(
            Issue(
                "error",
                "batch",
                batch,
                f"is not a multiple of {what} = {parts}: ranks would run different numbers of sequences.",
                f"Use {either(f'batch={n}' for n in near)}.",
            )
        )
    if microbatches is not None and microbatches < pp:
        idle = (pp - 1) / (microbatches + pp - 1)
        found.append(
            Issue(
                "warning",
                "microbatches",
                microbatches,
                f"is less than pp={pp}: stages idle {idle:.0%} of a 1F1B step.",
                f"Use microbatches={4 * pp} for an idle share of {(pp - 1) / (5 * pp - 1):.0%}.",
            )
        )
    return found


def _links(layout: RankLayout) -> list[Issue | None]:
    """Axes that communicate inside every layer must stay on NVLink."""
    topology = layout.topology
    found: list[Issue | None] = []
    for name, why in (
        ("tp", "an all-reduce or all-gather twice a layer"),
        ("ep", "an all-to-all twice a layer"),
        ("etp", "an all-reduce twice a layer"),
    ):
        if name not in layout.names or layout.size(name) == 1:
            continue
        groups = layout.groups(name)
        slow = sum(topology.link(group) in ("node", "network") for group in groups)
        if slow:
            size = layout.size(name)
            fits = math.gcd(size, topology.domain)
            inner = "dp_shard, cp and tp" if name in ("ep", "etp") else name
            fix = f"Use {name}={fits}" if fits < size else f"Put {inner} innermost in the order"
            found.append(
                Issue(
                    "warning",
                    name,
                    size,
                    f"leaves the NVLink domain of {topology.domain} ranks in {slow} of {len(groups)} groups, and runs "
                    f"{why}.",
                    f"{fix}; or give Topology the real nvlink_domain.",
                )
            )
    if layout.num_ranks > topology.gpus_per_node and layout.num_ranks % topology.gpus_per_node:
        found.append(
            Issue(
                "warning",
                "world_size",
                layout.num_ranks,
                f"does not fill its {topology.nodes(layout.num_ranks)} nodes of "
                f"gpus_per_node={topology.gpus_per_node}.",
                f"Use world_size={layout.num_ranks // topology.gpus_per_node * topology.gpus_per_node}, or the real "
                "gpus_per_node.",
            )
        )
    return found
