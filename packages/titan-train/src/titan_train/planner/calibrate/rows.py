"""Published measurements as (shape, machine, setup, measured) records."""

import csv
import warnings
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from titan_train.models.shape import ModelShape
from titan_train.planner.hardware.machine import Machine, load_machine
from titan_train.planner.memory.peak import memory_peak
from titan_train.planner.setup import Dispatcher, Setup, Stack
from titan_train.planner.shapes import find_shape

_GRAPHS: dict[str, Stack] = {"routing": "te_graphs", "attention": "te_graphs", "full": "te_full"}
"""How much of a routed block is launched as CUDA graphs; where nothing is stated, the routing."""

TABLES = ("published_throughput.csv", "measured_rows.csv")


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One published measurement."""

    number: int
    source: str
    collection: str
    """torchtitan, bridge, nemo, automodel, skills, maxtext, wan or simumax."""
    release: str
    """Software release, as far as the source states it."""
    shape: ModelShape
    machine: Machine
    setup: Setup
    tokens_per_s: float
    """Per device; derived from published model FLOP/s where the source gives no tokens."""
    memory_gib: float | None
    step_s: float | None
    alternatives: tuple[Setup, ...] = ()
    """What the setup can be where the source leaves settings out; empty where it states all."""


def load_rows(path: str | None = None) -> list[MeasuredRow]:
    """Read a shipped table by name, any table by path, or both shipped ones.

    A row whose model or machine is unknown is left out, with a warning.
    """
    if path is None:
        return [row for table in TABLES for row in load_rows(table)]
    text = (
        resources.files("titan_train.planner.data").joinpath(path).read_text()
        if path in TABLES
        else Path(path).read_text()
    )
    rows: list[MeasuredRow] = []
    for number, record in enumerate(csv.DictReader(text.splitlines())):
        try:
            row = parse_row(record, number)
        except ValueError as err:
            warnings.warn(f"row {number} of {path} is left out: {err}", stacklevel=2)
            continue
        if row is not None:
            rows.append(row)
    return rows


def parse_row(r: dict[str, str], number: int = 0) -> MeasuredRow | None:
    """One row of either table; None where it states neither tokens nor FLOP/s."""
    source = r["source"]
    collection = _collection(source)
    shape = find_shape(r["model"])
    if r.get("layers"):
        shape = shape.cut(int(float(r["layers"])))
    convention = r.get("flops_convention") or ""
    shape = replace(shape, mtp=int(r.get("mtp") or 0))
    setup = _setup(r, collection)
    if setup.global_batch < setup.dp:
        raise ValueError(
            f"a batch of {setup.global_batch} leaves some of {setup.dp} data-parallel ranks without a sequence"
        )
    machine = load_machine("h100_a3" if collection == "maxtext" else r["gpu"])
    # Automodel's page names recomputation where it is used; the other pages leave it out
    if not r["activation_checkpointing"] and collection != "automodel":
        setup = least_recompute(shape, machine, setup)
    measured = float(r["tokens_per_s_per_gpu"] or 0)
    if not measured:
        if not r.get("model_tflops_per_gpu"):
            return None
        causal = not (
            convention.startswith(("MaxText", "non-causal")) or (collection == "nemo" and convention == "unknown")
        )
        measured = float(r["model_tflops_per_gpu"]) * 1e12 / shape.flops_per_token(setup.seq_len, causal=causal)
    return MeasuredRow(
        number,
        source,
        collection,
        r.get("container") or "",
        shape,
        load_machine(r["gpu"]),
        setup,
        measured,
        float(r["peak_mem_gib"]) if r["peak_mem_gib"] else None,
        float(r["step_time_s"]) if r.get("step_time_s") else None,
        _alternatives(r, setup),
    )


def _alternatives(r: dict[str, str], setup: Setup) -> tuple[Setup, ...]:
    """A routed block inside CUDA graphs or not, a fused dispatcher or a plain one, where the source does not say."""
    if setup.ep == 1 or not setup.te:
        return ()
    stacks = (setup.stack,) if r.get("graphs") or r["compile"] != "TE+graphs" else ("te", "te_graphs")
    dispatchers = (setup.dispatcher,) if r.get("dispatcher") else ("alltoall", "hybridep")
    return tuple(replace(setup, stack=stack, dispatcher=sent) for stack in stacks for sent in dispatchers)


def least_recompute(shape: ModelShape, machine: Machine, setup: Setup) -> Setup:
    """Where a source does not state what is recomputed: the least that fits."""
    levels: list[tuple[Any, tuple[str, ...]]] = [("none", ())]
    if setup.te:
        levels += [("none", ("layernorm", "moe_act")), ("none", ("layernorm", "moe_act", "mla_up_proj", "mlp"))]
    else:
        levels += [("selective", ())]
    for recompute, modules in [*levels, ("full", ())]:
        setup = replace(setup, recompute=recompute, recompute_modules=modules)
        if memory_peak(shape, setup).allocated < machine.memory_bytes:
            break
    return setup


def _collection(source: str) -> str:
    for word, name in (
        ("SimuMax", "simumax"),
        ("models/wan", "wan"),
        ("skills/", "skills"),
        ("Megatron-Bridge", "bridge"),
        ("Automodel", "automodel"),
        ("NeMo docs", "nemo"),
        ("MaxText", "maxtext"),
    ):
        if word in source:
            return name
    return "torchtitan"


def _stack(text: str, collection: str, task: str) -> Stack:
    if collection == "torchtitan":
        return "compile" if text == "1" else "eager"
    if collection == "skills" and not text:
        return "te"
    if collection == "automodel" and (text == "1" or task == "lora"):
        return "compile"
    return {"TE+graphs": "te_graphs", "TE": "te", "XLA": "xla"}.get(
        text, "te" if collection == "automodel" else "compile"
    )  # type: ignore[return-value]


def _setup(r: dict[str, str], collection: str) -> Setup:
    def number(name: str, default: int = 1) -> int:
        return int(float(r.get(name) or default))

    dp = number("dp_shard") * number("dp_replicate")
    local = number("local_batch", 0)
    global_batch = number("global_batch", 0) or (local or 4) * dp
    megatron = collection in ("bridge", "nemo", "skills", "simumax", "wan")
    if collection == "torchtitan":
        micro = (number("local_batch") // 8 or 1) if number("pp") > 1 else number("local_batch")
    else:
        micro = number("micro_batch", 4 if collection == "maxtext" else 1)
    precision = {"fp8": "tensorwise", "": "bf16"}.get(r["float8"], r["float8"])
    recompute, modules, share = _recompute(r["activation_checkpointing"])
    if collection == "automodel" and r.get("task") == "lora" and not r["activation_checkpointing"]:
        recompute = "full"  # as its fine-tuning benchmarks do
    offload = r.get("offload") or ""
    layers = next((int(w) for w in offload.split() if w.isdigit()), 0) if "activations" in offload else 0
    kind = r.get("dp_kind") or "fsdp"
    stack = _stack(r["compile"], collection, r.get("task") or "")
    if stack == "te_graphs" and number("ep") > 1:
        stack = _GRAPHS.get(r.get("graphs") or "routing", "te")
    dispatcher = _dispatcher(r, collection)
    return Setup(
        seq_len=number("seq_len"),
        global_batch=global_batch,
        microbatch=micro,
        dp_replicate=number("dp_replicate"),
        dp_shard=number("dp_shard"),
        tp=number("tp"),
        cp=number("cp"),
        pp=number("pp"),
        ep=number("ep"),
        schedule=r["schedule"] or "1f1b",
        stages_per_rank=number("vp") if number("vp") > 1 else (2 if "interleaved" in r["schedule"] else 1),
        recompute=recompute,
        recompute_modules=modules,
        recompute_share=share,
        early_stop=collection == "automodel",  # torchtitan turns it off
        precision=precision,  # type: ignore[arg-type]
        min_speedup=0.0,
        sharding="zero1" if kind == "zero1" else "fsdp",
        stack=stack,
        async_tp=r["async_tp"] == "1",
        dispatcher=dispatcher,
        ep_overlap=_ep_overlap(r),
        cp_method="ulysses" if "Ulysses" in (r.get("note") or "") else "ring",
        loss="fused"
        if megatron
        else "eager"
        if collection == "torchtitan" and "2025" not in r["source"]
        else "compiled",
        task="lora" if r.get("task") == "lora" else "pretrain",
        weight_bytes=2.0 if r.get("task") == "lora" else 4.0,  # frozen ones are held in bf16 there
        equal_stages=megatron,
        imbalance=1.0,  # most of these benchmarks route tokens evenly
        overlap=collection != "simumax",
        bf16_share=number("bf16_blocks", 0) / find_shape(r["model"]).num_layers,
        receive_ahead=collection in ("torchtitan", "automodel"),  # torch.distributed.pipelining
        offload_activations=layers / 80,
        grad_bytes=2 if collection in ("bridge", "skills", "nemo") else 4,
    )


def _dispatcher(r: dict[str, str], collection: str) -> Dispatcher:
    """As stated; TransformerEngine's recipes choose a fused one where their page leaves it out."""
    text = (r.get("dispatcher") or "").lower()
    if "deepep" in text:
        return "deepep"
    return "hybridep" if "hybrid" in text or (not text and collection == "bridge") else "alltoall"


def _ep_overlap(r: dict[str, str]) -> bool:
    text = (r.get("dispatcher") or "").lower()
    return r.get("ep_overlap") == "1" or ("ep overlap" in text and "no ep overlap" not in text)


def _recompute(text: str) -> tuple[Any, tuple[str, ...], float]:
    if text.startswith("full on"):
        words = text.split()
        return "full", (), int(words[2]) / int(words[4])
    if text.startswith("selective:"):
        known = ("core_attn", "mlp", "moe_act", "moe", "layernorm", "mla_up_proj")
        return "none", tuple(k for k in known if k in text.replace(",", " ").replace("(", " ").split()), 1.0
    return (text or "none"), (), 1.0
