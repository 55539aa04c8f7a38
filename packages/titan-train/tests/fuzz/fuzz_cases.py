"""From a seed to a composition: a model, its data and training, and one to three layouts that must agree with one process.

A case is drawn piece by piece from one random generator. What the checks before a run refuse is drawn again, so a case
that comes out is one that a user may start. All layouts of a case run one after the other in the same processes; or, where the
case is one of a resume, each continues the run of the one before, on its own number of ranks.
"""

import functools
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
from dropping import TABLE as DROPPING_TABLE
from fuzz_corpus import UNPLANNED, resolve
from titan_train.config import parse_config
from titan_train.models import build_model
from titan_train.optim import plan_groups
from titan_train.parallel.check import check_model
from titan_train.parallel.layout.run import plan_run

STEPS = 3
FAMILIES = ("llama", "llama", "gpt", "qwen3", "qwen3_moe", "deepseek", "deepseek", "hf", "unplanned", "dropping")
HAS_TRANSFORMERS = find_spec("transformers") is not None
PLANNED = (
    "llama", "qwen2", "qwen3", "gemma3_text", "phi3", "olmo2", "gpt_neox", "granite", "stablelm", "starcoder2", "cohere", "glm",
    "nemotron", "gemma2",
)  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe_v")
BYTES = 257  # entries of the byte tokenizer

refused: Counter[str] = Counter()
"""Why drawn layouts were refused, by the first words: to see that they are refused for a reason."""


@dataclass
class Case:
    """One composition and what it is compared with."""

    seed: int
    ranks: int
    common: dict
    """Sections that the model and its training have in every layout and in one process."""
    layouts: list[dict]
    """Sections of each layout."""
    launcher: str = "group"
    """group: in a process group of the test's; local: by the command; torchrun: the command as its worker."""
    moe: bool = False
    resume: tuple[int, ...] = ()
    """Ranks of each layout, where each continues the run of the one before; empty: all train from the start."""
    dropout: bool = False
    """Every layout is compared with plain data parallelism of as many data-parallel ranks, which draw the same masks."""
    tags: set[str] = field(default_factory=set)

    def describe(self) -> str:
        ranks = " then ".join(map(str, self.resume)) or self.ranks
        lines = [f"seed {self.seed}: {ranks} ranks, launcher {self.launcher}", f"  {self.common}"]
        return "\n".join([*lines, *(f"  layout {i}: {layout}" for i, layout in enumerate(self.layouts))])


@functools.cache  # the checks of a family of transformers try a tiny model of it
def draw(seed: int) -> Case:
    """The case of a seed; the same on every machine and with every torch, but for families of an absent transformers."""
    return _case(random.Random(seed), seed)


def _case(rng: random.Random, seed: int) -> Case:
    family = rng.choice(FAMILIES)
    ranks = rng.choice((1, 2, 2, 2, 3, 4, 4, 4, 6))
    launcher = {7: "local", 13: "torchrun"}.get(seed % 20, "group")
    if launcher != "group" and family == "dropping":  # a module of the tests', which a command does not know
        family = "llama"
    if family in ("hf", "unplanned") and not HAS_TRANSFORMERS:
        family = "llama"
    hybrid = random.Random(f"hybrid {seed}")  # of its own: other seeds stay as they are drawn
    if hybrid.random() < 0.1:
        family = hybrid.choice(("hybrid", "hybrid_moe"))
    moe = family in ("qwen3_moe", "deepseek", "hybrid_moe")
    thirds = ranks % 3 == 0
    common = {
        "model": _model(rng, family, thirds),
        "train": {"steps": STEPS, "global_batch": 12 if thirds else 8, "max_grad_norm": rng.choice((0.0, 0.5))},
        "optimizer": _optimizer(rng),
        "schedule": {"name": "constant", "warmup_steps": 0},
        "data": {"document_mask": rng.random() < 0.7, "mask_document_boundary_labels": rng.random() < 0.7},
        "validation": {"every": STEPS, "steps": rng.choice((1, 2))},
        "run": {"seed": seed},
    }
    if family == "dropping":
        common["data"]["document_mask"] = False  # the model takes tokens alone
    if not _allowed(common, {"parallel": {}, "train": {"microbatch": 1}, "activations": {}}, 1):
        return _case(rng, seed)  # a family that no layout can train like this, such as one whose packed documents leak
    recipe, common = _recipe(random.Random(f"recipe {seed}"), common, launcher)
    ahead, common = _ahead(random.Random(f"ahead {seed}"), common, family)
    common["optimizer"] |= _tables(rng, common)
    count = 1 if launcher != "group" or family == "dropping" else rng.choice((1, 1, 1, 2, 2, 3))
    resume = count > 1 and rng.random() < 0.6
    case = Case(seed, ranks, common, [], launcher, moe, dropout=family == "dropping")
    while len(case.layouts) < count:
        here = ranks if not resume or not case.resume else rng.choice((1, ranks, ranks, 3 if thirds else 2))
        both = common["model"]["args"].get("tied_embeddings") and here % 4 == 0 and rng.random() < 0.5
        layout = _layout(rng, here, moe, {"pp": 2, "tp": 2} if both else {})
        if family == "dropping":
            _drop_alike(layout)
        if resume:
            layout.pop("float8", None)  # one reference for all
        if _allowed(common, layout, here):
            case.layouts.append(layout)
            case.resume += (here,) if resume else ()
    case.tags = {tag for layout in case.layouts for tag in _tags(common, layout, ranks)}
    case.tags |= {family, launcher} | ({"several trainers"} if count > 1 and not resume else set())
    case.tags |= {"resume"} if resume else set()
    case.tags |= recipe | ahead
    case.tags |= {table for table in ("lr_scales", "weight_decays", "frozen_steps") if table in common["optimizer"]}
    return case


def sections(*parts: dict) -> dict:
    """Configurations laid over each other."""
    merged: dict = {}
    for part in parts:
        for name, values in part.items():
            merged[name] = merged.get(name, {}) | values
    return merged


def _model(rng: random.Random, family: str, thirds: bool) -> dict:
    """``thirds``: in sizes that three ranks can share, where four would otherwise."""
    if family in ("hf", "unplanned"):
        name = f"hf:@{rng.choice(PLANNED if family == 'hf' else UNPLANNED)}"  # a folder that `resolve` makes
        return {"name": name, "init": name, "seq_len": 24 if thirds else 16, "args": {}}
    if family == "dropping":
        return {"name": "dropping:Dropping", "seq_len": 24 if thirds else 16, "args": {"rate": rng.choice((0.1, 0.3))}}
    layers = rng.choice((2, 3, 4, 4))
    heads, dim, ffn, experts = (6, 48, 48, 6) if thirds else (4, 32, 48, 8)
    args: dict = {"num_layers": layers, "tied_embeddings": rng.random() < 0.5, "num_heads": heads, "dim": dim}
    if rng.random() < 0.5:
        args["vocab_size"] = BYTES + rng.choice((3, 6, 7, 31))  # most vocabularies divide by nothing
    if family == "llama":
        args |= {"num_kv_heads": rng.choice((2, 3, 6) if thirds else (1, 2, 4)), "ffn_dim": ffn}
    elif family == "gpt":
        args |= {"max_seq_len": 64}
    elif family == "qwen3":
        args |= {"num_kv_heads": rng.choice((3, 6) if thirds else (2, 4)), "ffn_dim": ffn, "head_dim": 8}
    elif family in ("hybrid", "hybrid_moe"):  # layers with a state; attention in every other one, the last or none
        args |= {"num_kv_heads": rng.choice((3, 6) if thirds else (2, 4)), "head_dim": 8, "rope_dim": 4}
        args |= {
            "attention_every": rng.choice((layers + 1, 2, layers)),
            "delta_heads": heads,
            "delta_key_heads": heads // 2,
        }
        args |= {"delta_key_dim": 8, "delta_value_dim": 8, "delta_taps": rng.choice((2, 4)), "ffn_dim": ffn}
        args |= {"num_experts": experts, "expert_ffn_dim": 24 if thirds else 16} if family == "hybrid_moe" else {}
    elif family == "qwen3_moe":
        args |= {"num_kv_heads": 3 if thirds else 2, "head_dim": 8, "num_experts": experts}
        args |= {"expert_ffn_dim": 24 if thirds else 16, "balance_loss": rng.choice((0.0, 0.01))}
        args |= {"experts_per_token": rng.choice((1, 2, 3))}
    else:
        v2 = rng.random() < 0.4
        args |= {"ffn_dim": ffn, "expert_ffn_dim": 24 if thirds else 16, "num_dense_layers": rng.choice((0, 1))}
        args |= {"num_experts": 6, "num_groups": 3, "top_groups": 2} if thirds else {}
        args |= {"q_lora_rank": rng.choice((0, 16)), "num_shared_experts": rng.choice((0, 1, 2))}
        args |= {"balance_loss": rng.choice((0.0, 0.01)), "z_loss": rng.choice((0.0, 0.001))}
        if v2:
            args |= {"scores": "softmax", "normalize_weights": False, "bias_rate": 0.0, "group_score": "max"}
    named = {"llama": "llama3_debug", "hybrid": "qwen3_next_debug", "hybrid_moe": "qwen3_next_moe_debug"}
    name = named.get(family, f"{family}_debug")
    routed = family in ("qwen3_moe", "deepseek", "hybrid_moe")  # fewer choices, fewer close ones
    seq_len = 16 if routed else rng.choice((16, 32))
    return {"name": name, "seq_len": seq_len * 3 // 2 if thirds else seq_len, "args": args}


def _optimizer(rng: random.Random) -> dict:
    # Adam's step in a gradient is as steep as lr / eps: with equal ones an error of a gradient becomes one of the
    # weight of the same size, and not a matter of luck where the second moment is nearly zero
    decay = rng.choice((0.0, 0.1))
    if rng.random() < 0.7:
        return {"name": "adamw", "lr": 1e-2, "eps": 1e-2, "weight_decay": decay}
    return {"name": "sgd", "lr": 0.1, "weight_decay": decay}


def _recipe(rng: random.Random, common: dict, launcher: str) -> tuple[set[str], dict]:
    """Names of what is laid over a case, from a generator of its own, and the sections with it; never what the model refuses."""
    ramp = {"ramp_from": common["train"]["global_batch"] // 2, "ramp_tokens": 2 * 8 * common["model"]["seq_len"]}
    # five steps raise the smallest singular values 485 times, and with them what rounding makes of a gradient: of the gates of a
    # state, whose rows are 1e-6 of the others for a head that soon forgets, nothing else is left (NorMuon makes rows as large)
    table = {"groups": {r"\.wba\.": "adamw"}} if "delta_heads" in common["model"]["args"] else {}
    muons = {"muon": {}, "polar express": {"coefficients": "polar_express"}, "normuon": {"normuon": True}}
    muon = {"name": "muon", "lr": 1e-3, "eps": 1e-2}
    pieces: dict[str, dict] = {
        **{name: {"optimizer": muon | {"muon": {"dtype": "fp32"} | more | table}} for name, more in muons.items()},
        "schedule_free": {"optimizer": {"name": "schedule_free", "lr": 1e-2, "eps": 1e-2}},
        "qk_clip": {"qk_clip": {"threshold": rng.choice((0.05, 0.5))}},
        "ema": {"average": {"ema_decay": 0.5, "use": "ema"}},
        "ramp": {"train": ramp},
        "mup": {"model": {"parametrization": "mup", "base_dim": 16}},
    }
    taken = {rng.choice(("muon", "polar express", "normuon", "schedule_free"))} if rng.random() < 0.5 else set()
    taken |= {name for name in ("qk_clip", "ema", "ramp", "mup") if rng.random() < 0.2}
    if launcher != "group":
        taken &= {"muon", "polar express", "normuon"}  # averages are what the comparison would read from the checkpoint
    found: set[str] = set()
    for name in [name for name in pieces if name in taken]:
        trial = sections(common, pieces[name])
        if name == "mup" and trial["optimizer"]["name"] == "sgd":
            continue  # refused once the optimizer is built
        if _allowed(trial, {"parallel": {}, "train": {"microbatch": 1}, "activations": {}}, 1):
            found, common = found | {name}, trial
    return found, common


def _ahead(rng: random.Random, common: dict, family: str) -> tuple[set[str], dict]:
    """Modules that predict tokens further ahead over a case, from a generator of its own; other pieces stay as they are drawn."""
    often = {"llama": 0.3, "qwen3": 0.3, "deepseek": 0.3, "hf": 0.5, "hybrid": 0.5, "hybrid_moe": 0.5}
    if rng.random() >= often.get(family, 0.0):
        return set(), common
    model = {"args": common["model"]["args"] | {"mtp_depth": rng.choice((1, 1, 2))}}
    model |= {"init": ""} if family == "hf" else {}  # the folder holds no modules
    trial = sections(common, {"model": model, "mtp": {"late_from": rng.choice((0.5, 1.0))}})
    taken = _allowed(trial, {"parallel": {}, "train": {"microbatch": 1}, "activations": {}}, 1)
    return ({"mtp", f"mtp {family.removesuffix('_moe')}"}, trial) if taken else (set(), common)


def _tables(rng: random.Random, common: dict) -> dict:
    """Tables of the optimizer by name, of either name of the embedding and the head where they are one weight."""
    tables: dict = {}
    values = {"lr_scales": (0.0, 0.3), "weight_decays": (0.0, 0.5), "frozen_steps": (1, 2)}
    while rng.random() < 0.45:
        table = rng.choice([*values])
        pattern = rng.choice(
            ("embed|words", "head|unembed", "embed|words", "head|unembed", "norm", r"\.0\.", r"\.1\..*weight")
        )
        trial = tables | {table: tables.get(table, {}) | {pattern: rng.choice(values[table])}}
        if _fits(common, trial):
            tables = trial
    return tables


def _fits(common: dict, tables: dict) -> bool:
    """Whether the tables name parameters of the model, and none of a tied weight's two names with another value."""
    config = parse_config(resolve(sections({"tokenizer": {"kind": "bytes"}}, common, {"optimizer": tables})))
    with torch.device("meta"):
        model = build_model(config.model, vocab_size=BYTES)
    try:
        plan_groups(model, config.optimizer)
    except ValueError:
        return False
    return True


def _drop_alike(layout: dict) -> None:
    """Keep of a layout what leaves dropout's masks as they are: no cut of tokens or layers."""
    parallel = layout["parallel"]
    for axis in ("pp", "cp", "ep"):
        parallel.pop(axis, None)
    for section in ("pipeline", "context", "float8"):
        layout.pop(section, None)
    layout["train"]["microbatch"] = 1
    layout["activations"] = {"checkpoint": "full" if layout["activations"]["checkpoint"] != "none" else "none"}
    if parallel.get("tp", 1) > 1:
        parallel |= {"sequence_parallel": False, "async_tp": False, "tp_plan": DROPPING_TABLE}


def _layout(rng: random.Random, ranks: int, moe: bool, degrees: dict) -> dict:
    """``degrees``: those that are not drawn."""
    left = ranks // math.prod(degrees.values())
    for axis in rng.sample(("pp", "tp", "cp", "dp_replicate"), 4):
        if axis not in degrees:
            degrees[axis] = rng.choice([d for d in (1, 2, 2, 3, 4) if left % d == 0])
            left //= degrees[axis]
    if moe and rng.random() < 0.7:
        room = left * degrees["cp"] * degrees["tp"]
        degrees["ep"] = rng.choice([d for d in (room, room, 2, 1) if room % d == 0])
    parallel = {axis: degree for axis, degree in degrees.items() if degree > 1}
    if degrees["dp_replicate"] > 1 and left == 1 and degrees["cp"] == 1 and rng.random() < 0.5:
        parallel["mode"] = "ddp"
    elif ranks == 1:
        parallel["mode"] = rng.choice(("auto", "fsdp", "ddp"))
    if parallel.get("mode") != "ddp":
        parallel["reshard"] = rng.choice(("default", "always", "never"))
    if degrees["tp"] > 1:
        parallel["sequence_parallel"] = moe or rng.random() < 0.6
        parallel["async_tp"] = parallel["sequence_parallel"] and rng.random() < 0.3
        parallel["replicate_kv"] = rng.random() < 0.5
    layout: dict = {"parallel": parallel, "train": {"microbatch": rng.choice((0, 1, 1, 2))}}
    if degrees["pp"] > 1:
        layout["pipeline"] = {"schedule": rng.choice(SCHEDULES)}
        if rng.random() < 0.3:
            layout["pipeline"]["stages_per_rank"] = rng.choice((1, 2))
    else:
        parallel["accumulate"] = rng.choice(("sharded", "sharded", "unsharded", "zero1", "hsdp-ar"))
    if degrees["cp"] > 1:
        layout["context"] = {"method": rng.choice(("auto", "ring", "allgather", "ulysses", "usp"))}
        layout["context"]["layout"] = rng.choice(("auto", "documents", "contiguous", "zigzag", "per_document"))
    checkpoint = rng.choice(("none", "full", "every", "pattern", "selective", "selective"))
    layout["activations"] = {"checkpoint": checkpoint}
    if checkpoint == "pattern":
        layout["activations"]["patterns"] = ["layers.*.attention"]
    if rng.random() < 0.12:
        layout["float8"] = {"recipe": rng.choice(("tensorwise", "rowwise", "blockwise")), "min_speedup": 0.0}
    return layout


def _allowed(common: dict, layout: dict, ranks: int) -> bool:
    """Whether the checks before a run let it start."""
    try:
        config = parse_config(resolve(sections({"tokenizer": {"kind": "bytes"}}, common, layout)))
        plan = plan_run(config, ranks)
        with torch.device("meta"):
            model = build_model(config.model, vocab_size=BYTES)
        check_model(config, plan.layout, plan.batch, model)
    except ValueError as err:
        refused[" ".join(str(err).split()[:6])] += 1
        return False
    return True


def _tags(common: dict, layout: dict, ranks: int) -> set[str]:
    """What a layout covers, for the test that all of it is covered."""
    parallel = layout["parallel"]
    tags = {f"{axis} > 1" for axis in ("pp", "tp", "cp", "ep", "dp_replicate") if parallel.get(axis, 1) > 1}
    tied = common["model"]["args"].get("tied_embeddings")
    tags |= {f"{ranks} ranks"} | (set() if tied is None else {"tied" if tied else "untied"})
    if tied and parallel.get("tp", 1) > 1 and parallel.get("pp", 1) > 1:
        tags.add("tied x tp x pp")
    tags |= {layout["activations"]["checkpoint"], parallel.get("accumulate", "sharded")}
    tags |= {layout[name][key] for name, key in (("pipeline", "schedule"), ("context", "method")) if name in layout}
    tags |= {"float8"} if "float8" in layout else set()
    tags |= {"packed" if common["data"]["document_mask"] else "unpacked"}
    if ranks > 1 and parallel.get("ep") == ranks // parallel.get("pp", 1):
        tags.add("ep over all ranks")
    if ranks > 1 and all(parallel.get(axis, 1) == 1 for axis in ("dp_replicate", "cp")):
        used = parallel.get("pp", 1) * parallel.get("tp", 1)
        tags |= {"one-rank fsdp mesh"} if used == ranks else set()
    return tags
