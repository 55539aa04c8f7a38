"""From a seed to a composition: a model, its data and training, and one to three layouts that must agree with one process.

A case is drawn piece by piece from one random generator. What the checks before a run refuse is drawn again, so a case
that comes out is one that a user may start. All layouts of a case run one after the other in the same processes.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import torch
from titan_train.config import parse_config
from titan_train.models import build_model
from titan_train.parallel.check import check_model
from titan_train.plan.run import plan_run

STEPS, BATCH = 3, 8
FAMILIES = ("llama", "gpt", "qwen3", "qwen3_moe", "deepseek", "deepseek")
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
    """group: in a process group of the test's; local or torchrun: by the command."""
    moe: bool = False
    tags: set[str] = field(default_factory=set)

    def describe(self) -> str:
        lines = [f"seed {self.seed}: {self.ranks} ranks, launcher {self.launcher}", f"  {self.common}"]
        return "\n".join([*lines, *(f"  layout {i}: {layout}" for i, layout in enumerate(self.layouts))])


def draw(seed: int) -> Case:
    """The case of a seed; the same on every machine and with every torch."""
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    ranks = rng.choice((1, 2, 2, 2, 4, 4, 4))
    launcher = {7: "local", 13: "torchrun"}.get(seed % 20, "group")
    moe = family in ("qwen3_moe", "deepseek")
    common = {
        "model": _model(rng, family),
        "train": {"steps": STEPS, "global_batch": BATCH, "max_grad_norm": rng.choice((0.0, 0.5))},
        "optimizer": _optimizer(rng),
        "schedule": {"name": "constant", "warmup_steps": 0},
        "data": {"document_mask": rng.random() < 0.7, "mask_document_boundary_labels": rng.random() < 0.7},
        "run": {"seed": seed},
    }
    count = 1 if launcher != "group" else rng.choice((1, 1, 1, 2, 2, 3))
    case = Case(seed, ranks, common, [], launcher, moe)
    while len(case.layouts) < count:
        layout = _layout(rng, ranks, moe)
        if _allowed(common, layout, ranks):
            case.layouts.append(layout)
    case.tags = {tag for layout in case.layouts for tag in _tags(common, layout, ranks)}
    case.tags |= {family, launcher} | ({"several trainers"} if count > 1 else set())
    return case


def sections(*parts: dict) -> dict:
    """Configurations laid over each other."""
    merged: dict = {}
    for part in parts:
        for name, values in part.items():
            merged[name] = merged.get(name, {}) | values
    return merged


def _model(rng: random.Random, family: str) -> dict:
    layers = rng.choice((2, 3, 4, 4))
    args: dict = {"num_layers": layers, "tied_embeddings": rng.random() < 0.4}
    if rng.random() < 0.5:
        args["vocab_size"] = BYTES + rng.choice((3, 6, 7, 31))  # most vocabularies divide by nothing
    if family == "llama":
        args |= {"num_kv_heads": rng.choice((1, 2, 4)), "dim": 32, "ffn_dim": 48}
    elif family == "gpt":
        args |= {"dim": 32, "max_seq_len": 64}
    elif family == "qwen3":
        args |= {"num_kv_heads": rng.choice((2, 4)), "num_heads": 4, "dim": 32, "ffn_dim": 48, "head_dim": 8}
    elif family == "qwen3_moe":
        args |= {"num_kv_heads": 2, "num_heads": 4, "dim": 32, "head_dim": 8, "expert_ffn_dim": 16, "num_experts": 8}
        args |= {"experts_per_token": rng.choice((1, 2, 3)), "balance_loss": rng.choice((0.0, 0.01))}
    else:
        v2 = rng.random() < 0.4
        args |= {"dim": 32, "num_heads": 4, "ffn_dim": 48, "expert_ffn_dim": 16, "num_dense_layers": rng.choice((0, 1))}
        args |= {"q_lora_rank": rng.choice((0, 16)), "num_shared_experts": rng.choice((0, 1, 2))}
        args |= {"balance_loss": rng.choice((0.0, 0.01)), "z_loss": rng.choice((0.0, 0.001))}
        if v2:
            args |= {"scores": "softmax", "normalize_weights": False, "bias_rate": 0.0, "group_score": "max"}
    name = {"llama": "llama3_debug", "gpt": "gpt_debug", "qwen3": "qwen3_debug"}.get(family, f"{family}_debug")
    seq_len = 16 if family in ("qwen3_moe", "deepseek") else rng.choice((16, 32))  # fewer choices, fewer close ones
    return {"name": name, "seq_len": seq_len, "args": args}


def _optimizer(rng: random.Random) -> dict:
    # Adam's step in a gradient is as steep as lr / eps: with equal ones an error of a gradient becomes one of the
    # weight of the same size, and not a matter of luck where the second moment is nearly zero
    decay = rng.choice((0.0, 0.1))
    if rng.random() < 0.7:
        return {"name": "adamw", "lr": 1e-2, "eps": 1e-2, "weight_decay": decay}
    return {"name": "sgd", "lr": 0.1, "weight_decay": decay}


def _layout(rng: random.Random, ranks: int, moe: bool) -> dict:
    left = ranks
    degrees: dict = {}
    for axis in rng.sample(("pp", "tp", "cp", "dp_replicate"), 4):
        degrees[axis] = rng.choice([d for d in (1, 2, 2, 4) if left % d == 0])
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
        config = parse_config(sections({"tokenizer": {"kind": "bytes"}}, common, layout))
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
    tags |= {"tied" if common["model"]["args"]["tied_embeddings"] else "untied", f"{ranks} ranks"}
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
