"""Combinations that cannot work, each with the reason that the user is given before any rank starts.

The documentation prints this list, and a test holds that every entry is refused: by the configuration itself, by the
layout, or by the model under that layout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_train.config import parse_config
from titan_train.models import build_model
from titan_train.parallel.check import check_model
from titan_train.parallel.layout.run import plan_run


@dataclass(frozen=True, slots=True)
class Refusal:
    """One combination that is refused."""

    what: str
    """Its name, for people."""
    settings: Mapping[str, Mapping[str, Any]]
    """The configuration's tables that ask for it."""
    ranks: int = 8
    """On how many ranks."""
    base: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """What it is asked of; by default a tiny Llama."""


_MOE = {"model": {"name": "deepseek_debug", "seq_len": 64}}
_LLAMA = {"model": {"name": "llama3_debug", "seq_len": 64}}

REFUSALS = (
    Refusal("DDP with expert parallelism", {"parallel": {"mode": "ddp", "ep": 2}}, base=_MOE),
    Refusal(
        "expert parallelism with tensor parallelism, without sequence parallelism",
        {"parallel": {"tp": 2, "ep": 2, "sequence_parallel": False}},
        base=_MOE,
    ),
    Refusal("expert parallelism of a model without experts", {"parallel": {"ep": 2}}),
    Refusal("more expert-parallel ranks than divide the experts", {"parallel": {"ep": 8, "tp": 2}},
            base={"model": {"name": "deepseek_debug", "seq_len": 64, "args": {"num_experts": 12}}}),
    Refusal("more tensor-parallel ranks than key-value heads", {"parallel": {"tp": 4}}),
    Refusal("tensor-parallel ranks that do not divide the query heads", {"parallel": {"tp": 8, "replicate_kv": True}}),
    Refusal("a sequence that sequence parallelism cannot cut", {"parallel": {"tp": 2}, "model": {"seq_len": 63}}),
    Refusal("asynchronous tensor parallelism without sequence parallelism",
            {"parallel": {"tp": 2, "async_tp": True, "sequence_parallel": False}}),
    Refusal("a sequence that context parallelism cannot cut", {"parallel": {"cp": 4}, "model": {"seq_len": 62}}),
    Refusal("context parallelism of packed rows, several a micro-batch, with a balance loss",
            {"parallel": {"cp": 2}, "train": {"microbatch": 2, "global_batch": 8}}, base=_MOE),
    Refusal("documents shared by all ranks, without context parallelism", {"context": {"dynamic": True}}),
    Refusal("documents shared by all ranks, by another method than the ring",
            {"context": {"dynamic": True, "method": "ulysses"}, "parallel": {"cp": 2}}),
    Refusal("documents shared by all ranks, without the mask that keeps them apart",
            {"context": {"dynamic": True}, "parallel": {"cp": 2}, "data": {"document_mask": False}}),
    Refusal("documents shared by all ranks, with a balance loss", {"context": {"dynamic": True}, "parallel": {"cp": 2}},
            base=_MOE),
    Refusal("documents shared by all ranks, with suspect steps computed again",
            {"context": {"dynamic": True}, "parallel": {"cp": 2}, "train": {"rerun_above": 2.0}}),
    Refusal("documents shared by all ranks, of rows with images", {"context": {"dynamic": True}, "parallel": {"cp": 2}},
            base={"model": {"name": "qwen3_vl_debug", "seq_len": 64}}),
    Refusal("more pipeline stages than layers", {"parallel": {"pp": 4}, "train": {"global_batch": 16}}),
    Refusal("a pipeline schedule with too few micro-batches",
            {"parallel": {"pp": 2}, "pipeline": {"schedule": "dualpipe_v"}, "train": {"global_batch": 4}},
            base={"model": {"name": "llama3_debug", "seq_len": 64, "args": {"num_layers": 4}}}),
    Refusal("a pipeline that keeps sharded gradients between micro-batches its own way",
            {"parallel": {"pp": 2, "accumulate": "zero1"}, "train": {"global_batch": 16}}),
    Refusal("DDP that offloads parameters", {"parallel": {"mode": "ddp", "offload": "cpu"}}),
    Refusal("a compressed reduction that only DDP has", {"parallel": {"compress": "powersgd"}}),
    Refusal("DDP that compresses gradients of a bf16 model",
            {"parallel": {"mode": "ddp", "compress": "bf16"}, "train": {"dtype": "bf16"}}),
    Refusal("a compressed reduction of bf16 gradients", {"parallel": {"compress": "bf16", "reduce_dtype": "bf16"}}),
    Refusal("steps computed again with PowerSGD",
            {"parallel": {"mode": "ddp", "compress": "powersgd"}, "train": {"rerun_above": 2.0}}),
    Refusal("HSDP on ranks that do not make two degrees", {"parallel": {"mode": "hsdp"}}, ranks=2),
    Refusal("a CUDA graph of several ranks", {"compile": {"cudagraphs": True}}, ranks=2),
    Refusal("a CUDA graph on the CPU", {"compile": {"cudagraphs": True}, "launch": {"device": "cpu"}}, ranks=1),
    Refusal("a CUDA graph of recomputed blocks",
            {"compile": {"cudagraphs": True}, "activations": {"checkpoint": "full"}}, ranks=1),
    Refusal("a CUDA graph of experts", {"compile": {"cudagraphs": True}}, ranks=1, base=_MOE),
    Refusal("what float8 layers of compiled blocks lose, recorded",
            {"metrics": {"activations_every": 10}, "float8": {"recipe": "blockwise"}, "compile": {"enabled": True}}, ranks=1),
    Refusal("offloaded activations of compiled blocks", {"activations": {"offload": True}, "compile": {"enabled": True}}),
    Refusal("a memory budget without compilation", {"activations": {"checkpoint": "budget"}}),
    Refusal("a float8 head that computes the loss",
            {"float8": {"recipe": "blockwise", "min_speedup": 0.0, "skip": ["layers.0"]}, "parallel": {"pp": 2}}),
    Refusal("float8 all-gather of scales that span ranks", {"float8": {"recipe": "rowwise", "all_gather": "on"}}),
    Refusal("float8 all-gather of weights that stay sharded over some ranks",
            {"float8": {"recipe": "blockwise", "all_gather": "on"}, "parallel": {"reshard": 2}}),
    Refusal("float8 tokens gathered with scales that span ranks",
            {"parallel": {"tp": 2}, "float8": {"recipe": "mxfp8", "tp_gather": "on"}}),
)  # fmt: skip


def reason(refusal: Refusal) -> str:
    """The sentence a user gets.

    Raises:
        AssertionError: Nothing refuses the combination.
    """
    try:
        check(refusal)
    except ValueError as err:
        lines = str(err).splitlines()
        return lines[-1].strip() if lines[0].endswith("problem") else str(err)
    raise AssertionError(f"nothing refuses {refusal.what}")


def check(refusal: Refusal) -> None:
    """What `titan-train check` does with the combination.

    Raises:
        ValueError: It is refused, as it should be.
    """
    tree: dict[str, dict[str, Any]] = {"train": {"global_batch": 8}}
    for sections in (refusal.base or _LLAMA, refusal.settings):
        for section, values in sections.items():
            tree[section] = tree.get(section, {}) | dict(values)
    config = parse_config(tree)
    plan = plan_run(config, refusal.ranks)
    check_model(config, plan.layout, plan.batch, build_model(config.model, vocab_size=None, device="meta"))


def table() -> Iterator[tuple[str, str]]:
    """Every refused combination and its reason."""
    for refusal in REFUSALS:
        yield refusal.what, reason(refusal)
