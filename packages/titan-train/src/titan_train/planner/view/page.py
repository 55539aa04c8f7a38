"""One static page, without a server, in which a person moves sliders and sees time, memory, schedule and rank grid change.

The page holds the shapes, machines and constants as JSON, and the model as a script (`model.js`) that follows the Python
one; a test compares the two on many setups. It covers the torch stacks.
"""

import dataclasses
import json
from importlib import resources
from typing import Any

from titan_train.models.shape import ExpertsShape, FeedForwardShape, ModelShape
from titan_train.planner.calibrate.defaults import constants_for
from titan_train.planner.cost.constants import Constants
from titan_train.planner.hardware.machine import Machine, list_machines, load_machine
from titan_train.planner.memory.kept import kept_token_bytes
from titan_train.planner.memory.peak import working_set
from titan_train.planner.setup import ON_A_V, Setup
from titan_train.planner.shapes import find_shape
from titan_train.trust.published import content_policy

MODELS = (
    "llama3_1b", "llama3_3b", "llama3_8b", "llama3_70b", "llama3_405b", "qwen3_8b", "qwen3_32b", "qwen3_30b_a3b",
    "qwen3_235b_a22b", "deepseek_v2_lite", "deepseek_v3", "flux_dev",
)  # fmt: skip


def page(preset: Setup | None = None, model: str | ModelShape = "llama3_8b", machine: str | Machine = "h100") -> str:
    """The page's HTML; ``preset`` is where its sliders stand at first. A measured machine stands beside the shipped ones."""
    here = load_machine(machine) if isinstance(machine, str) else machine
    shape = find_shape(model) if isinstance(model, str) else model
    name = model if isinstance(model, str) else model.name
    data = {
        "shapes": {known: shape_data(find_shape(known)) for known in MODELS} | {name: shape_data(shape)},
        "machines": {known: machine_data(load_machine(known)) for known in list_machines()}
        | {here.name: machine_data(here)},
        "preset": {"model": name, "machine": here.name, **(_preset(preset) if preset else {})},
    }
    folder = resources.files("titan_train.planner.view")
    script, html = (folder.joinpath(name).read_text() for name in ("model.js", "page.html"))
    text = json.dumps(data).replace("<", "\\u003c")
    before, tag, rest = html.partition("<script>")
    body, end, after = rest.partition("</script>")
    body = body.replace("/*MODEL*/", script).replace("/*DATA*/", f"const DATA = {text};")
    return before.replace("/*POLICY*/", content_policy(body)) + tag + body + end + after


def _preset(setup: Setup) -> dict[str, Any]:
    names = ("seq_len", "global_batch", "microbatch", "recompute", "precision", "stages_per_rank", *setup.degrees())
    known = {"gpus": setup.world_size, "schedule": setup.schedule if setup.schedule in ("zb_h1", *ON_A_V) else "1f1b"}
    return {name: getattr(setup, name) for name in names} | known


def shape_data(shape: ModelShape) -> dict[str, Any]:
    """A shape, with what the page's memory model needs of it."""
    base = Setup(seq_len=1, global_batch=1)
    blocks: list[dict[str, Any]] = []
    for b in shape.blocks:
        attention = b.attention
        if attention is None:
            raise ValueError(f"{shape.name} has blocks without attention, which the page does not draw.")
        block: dict[str, Any] = {"count": b.count, "norms": b.norms}
        block["attention"] = dataclasses.asdict(attention) | {"v_dim": attention.v_dim}
        if isinstance(b.ffn, ExpertsShape):
            block["experts"] = dataclasses.asdict(b.ffn) | {"matrices": b.ffn.matrices}
        elif isinstance(b.ffn, FeedForwardShape):
            block |= {"hidden": b.ffn.hidden, "matrices": b.ffn.matrices}
        blocks.append(block)
    dense, experts = shape.totals
    # what a stage's share of the blocks follows from: FLOPs of the blocks, and of attention for each token that is seen
    scores = [
        (b.count * 6.0 * b.attention.heads * (b.attention.head_dim + b.attention.v_dim), 2 * b.attention.window)
        for b in shape.blocks
        if b.attention is not None
    ]
    flops = dataclasses.replace(shape, vocab=0).flops_per_token(1, causal=False) - sum(each for each, _ in scores)
    setups = {
        name + (" ep" if ep > 1 else ""): dataclasses.replace(base, recompute=name, ep=ep)  # type: ignore[arg-type]
        for name in ("none", "selective", "full")
        for ep in (1, 2)
    }
    return {
        "dim": shape.dim,
        "vocab": shape.vocab,
        "tied": shape.tied,
        "layers": shape.num_layers,
        "routed": sum(b.count for b in shape.blocks if isinstance(b.ffn, ExpertsShape)),
        "moe": shape.moe,
        "parameters": shape.parameters(),
        "head": shape.head_parameters,
        "flops": flops,
        "scores": scores,
        "dense": dense,
        "experts": experts,
        "sizes": [[d, e] for _, d, e in shape.block_sizes],
        "kept": {name: kept_token_bytes(shape, setup) for name, setup in setups.items()},
        "working": {name: working_set(shape, setup) for name, setup in setups.items()},
        "blocks": blocks,
    }


def machine_data(machine: Machine) -> dict[str, Any]:
    """A machine, with the constants of compiled torch runs on it."""
    setup = Setup(seq_len=1, global_batch=1)
    constants: dict[str, Constants] = {
        name: constants_for(machine, setup, routed=routed) for name, routed in (("dense", False), ("routed", True))
    }
    return {
        "title": machine.title,
        "peak": machine.peak,
        "bf16": machine.bf16,
        "fp8": machine.fp8,
        "memory": machine.memory_bytes,
        "bandwidth": machine.bandwidth,
        "domain": machine.domain,
        "local_bytes": machine.local.bytes_per_s,
        "local_latency": machine.local.latency_s,
        "network_bytes": machine.network.bytes_per_s,
        "network_latency": machine.network.latency_s,
        "constants": {name: dataclasses.asdict(c) for name, c in constants.items()},
    }
