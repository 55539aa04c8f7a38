"""Which combinations of parallelisms the matrix runs, and what each setting means in the configuration."""

import itertools
import math
from dataclasses import dataclass

DENSE = {"model": {"name": "llama3_debug", "seq_len": 32, "args": {"num_layers": 4, "num_kv_heads": 4}}}
MOE = {
    "model": {"name": "deepseek_debug", "seq_len": 32, "args": {"num_layers": 4}},
    "train": {"steps": 10, "global_batch": 8, "microbatch": 1, "max_grad_norm": 0.5},
}
# layers with a state, one of attention, experts with a gated shared one
HYBRID = {"model": {"name": "qwen3_next_moe_debug", "seq_len": 32}, "train": MOE["train"]}
MODELS = {"dense": DENSE, "moe": MOE, "hybrid": HYBRID}
WITH_EXPERTS = ("moe", "hybrid")
TIED = {"model": DENSE["model"] | {"args": DENSE["model"]["args"] | {"tied_embeddings": True}}}


@dataclass(frozen=True)
class Setting:
    """One thing a user can turn on."""

    sections: dict
    ranks: int = 1
    """Ranks that it takes for itself."""
    axis: str = ""
    """Two settings of one axis are alternatives, not a combination."""


SETTINGS = {
    "fsdp": Setting({}, 2, "data"),
    "hsdp": Setting({"parallel": {"dp_replicate": 2, "mode": "hsdp"}}, 4, "data"),
    "ddp": Setting({"parallel": {"mode": "ddp"}}, 2, "data"),
    "tp": Setting({"parallel": {"tp": 2, "sequence_parallel": False}}, 2, "tensor"),
    "tp+sp": Setting({"parallel": {"tp": 2}}, 2, "tensor"),
    "async tp": Setting({"parallel": {"tp": 2, "async_tp": True}}, 2, "tensor"),
    "cp ring": Setting({"parallel": {"cp": 2}, "context": {"method": "ring"}}, 2, "context"),
    "cp ulysses": Setting({"parallel": {"cp": 2}, "context": {"method": "ulysses"}}, 2, "context"),
    "pp 1f1b": Setting({"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}, 2, "pipeline"),
    "pp zbv": Setting({"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}}, 2, "pipeline"),
    "pp zb_h2": Setting({"parallel": {"pp": 2}, "pipeline": {"schedule": "zb_h2"}}, 2, "pipeline"),
    "ep": Setting({"parallel": {"ep": 2}}, 1, "expert"),
    "float8": Setting({"float8": {"recipe": "blockwise", "min_speedup": 0.0}}, 1, "precision"),
    "checkpointing": Setting({"activations": {"checkpoint": "selective"}}, 1, "activations"),
    "tiles": Setting({"activations": {"mlp_tiles": 4}}, 1, "activations"),
    "compile": Setting({"compile": {"enabled": True, "backend": "aot_eager"}}, 1, "compile"),
    "recomputing": Setting({"activations": {"checkpoint": "full"}}, 1, "activations"),
}

REFUSED = {
    frozenset({"ddp", "ep"}): "would cross dp_replicate",
    frozenset({"tp", "ep"}): "no sequence parallelism",
}
"""Combinations that must not start, and a few words of the reason."""

MORE = [
    ("fsdp", "tp+sp", "pp zbv", "checkpointing"),
    ("fsdp", "tp+sp", "cp ring", "checkpointing"),
    ("fsdp", "tp+sp", "pp zb_h2", "float8"),
    ("fsdp", "cp ring", "pp zbv", "float8"),
    ("fsdp", "tp+sp", "ep", "checkpointing"),
    ("fsdp", "pp zbv", "ep", "tp+sp"),
    ("fsdp", "cp ring", "ep", "pp 1f1b"),
    # blocks that are compiled in pieces, each with its recomputation
    ("fsdp", "cp ring", "compile", "checkpointing"),
    ("cp ring", "pp zbv", "compile", "checkpointing"),
    ("cp ulysses", "pp zbv", "compile", "recomputing"),
    ("fsdp", "ep", "compile", "checkpointing"),
    ("ep", "pp zbv", "compile", "recomputing"),
]
"""Combinations that people run, beside those that cover all pairs."""

ALL_FIVE = {
    "parallel": {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 4},
    "pipeline": {"schedule": "zbv"},
}
"""PP x FSDP x CP x TP x EP on 16 ranks."""

# compared in the default run: one or two of every kind, few ranks
FAST = [
    ("dense", ("tp+sp", "pp zbv")),
    ("dense", ("fsdp", "cp ring")),
    ("dense", ("cp ulysses", "pp zb_h2")),
    ("dense", ("tp", "ddp")),
    ("dense", ("async tp", "checkpointing")),
    ("dense", ("float8", "pp 1f1b")),
    ("dense", ("compile", "tp+sp")),
    ("dense", ("tp+sp", "tiles")),
    ("dense", ("tp+sp", "tiles", "float8")),  # which gathers by itself
    ("dense", ("pp zbv", "compile")),
    ("moe", ("ep", "pp zbv")),
    ("moe", ("ep", "tp+sp")),
    ("hybrid", ("fsdp", "cp ring")),
    ("hybrid", ("tp+sp", "pp zbv")),
]


def combinations():
    """Every (model, settings) of the matrix: each pair of settings is in one, with as many others as fit beside it."""
    for model in MODELS:
        covering = [*_covering(model)]
        yield from ((model, names) for names in covering)
        for names in MORE:
            known = any(set(names) <= set(row) for row in covering)
            if not known and (model == "hybrid" or ("ep" in names) == (model == "moe")):
                yield model, names


def sampled():
    """Fewer of them: each pair of settings stands in one of any model, and each setting in one of each model; all that must not
    start. Those that cost least for what they show.
    """
    rows = [*combinations()]
    facts = {row: _facts(*row) for row in rows}
    missing = set().union(*facts.values())
    chosen = [row for row in rows if refusal_of(row[1])]
    while missing:
        best = max(rows, key=lambda row: len(facts[row] & missing) / _cost(*row))
        missing -= facts[best]
        chosen.append(best)
    return chosen


def _cost(model, names):
    """Processor time, about: ranks, by how much a rank traces."""
    return ranks_of(names) * {"dense": 1, "moe": 2, "hybrid": 3}[model] * (2 if "compile" in names else 1)


def _facts(model, names):
    """What a combination shows: pairs, those without float8 by those without it; and what works with the model."""
    if refusal_of(names):
        return frozenset()
    pairs = {frozenset(pair) for pair in itertools.combinations(names, 2)}
    shown = {pair for pair in pairs if "float8" in pair} if "float8" in names else pairs
    return frozenset(shown | {(model, name) for name in names})


def _covering(model):
    """Combinations on at most 8 ranks that hold all pairs, chosen greedily; those that must not start, by themselves.

    A pair without float8 is in one without float8, whose tolerance would hide an error.
    """
    axes = {}
    for name, setting in SETTINGS.items():
        if model in WITH_EXPERTS or name != "ep":
            axes.setdefault(setting.axis, [None]).append(name)
    refused = [pair for pair in map(frozenset, REFUSED) if model in WITH_EXPERTS]
    rows = []
    for chosen in itertools.product(*axes.values()):
        names = tuple(name for name in chosen if name is not None)
        ranks = math.prod(SETTINGS[name].ranks for name in names)
        if ranks <= 8 and not any(pair <= set(names) for pair in refused):
            rows.append((names, ranks, {frozenset(pair) for pair in itertools.combinations(names, 2)}))
    for float8 in (False, True):
        some = [row for row in rows if ("float8" in row[0]) == float8]
        missing = {pair for _, _, pairs in some for pair in pairs if not float8 or "float8" in pair}
        while missing:
            names, _, pairs = max(some, key=lambda row: (len(row[2] & missing), -row[1], -len(row[0])))
            missing -= pairs
            yield names
    yield from (tuple(name for name in SETTINGS if name in pair) for pair in refused)


def sections_of(model, names):
    """The configuration of a combination, over that of its model."""
    merged = {section: dict(values) for section, values in MODELS[model].items()}
    for name in names:
        for section, values in SETTINGS[name].sections.items():
            merged[section] = merged.get(section, {}) | values
    return merged


def ranks_of(names):
    """Ranks of a combination: 8 from three settings on or with hsdp, otherwise 4."""
    product = math.prod(SETTINGS[name].ranks for name in names)
    return 8 if product > 4 or len(names) > 2 else 4


def refusal_of(names):
    """Words of the reason why the combination must not start; None where it must work."""
    return next((reason for pair, reason in REFUSED.items() if pair <= set(names)), None)
