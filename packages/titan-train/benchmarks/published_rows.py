"""Published measurements as (shape, machine, setup, measured) records, and the constants that are fitted to them.

`titan_train.planner.calibrate.defaults` ships what `fit_torch` finds, and the machines of `measured_machines`, as literals.
"""

import csv
import math
import statistics
import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from titan_train.models.shape import FeedForwardShape, ModelShape
from titan_train.planner.calibrate.defaults import MACHINES, other_spread
from titan_train.planner.calibrate.fit import MeasuredRow, fit_constants
from titan_train.planner.cost.constants import Constants, prior
from titan_train.planner.estimate import estimate
from titan_train.planner.hardware.machine import Machine, load_machine
from titan_train.planner.memory.peak import memory_peak
from titan_train.planner.setup import Dispatcher, Setup, Stack
from titan_train.planner.shapes import find_shape

TABLES = Path(__file__).with_name("published")
TORCH_FIT_ROWS = (0, 1, 2, 4)
"""Rows of published_throughput.csv: 8B over 8 GPUs in bf16, float8 and at 32k tokens; 128 GPUs without compile."""
TORCH_CONSTANTS = ("matmul", "matmul8", "attention", "pointwise")
SIMUMAX_FIT_ROWS = (98, 100, 101, 102, 105, 108)
SIMUMAX_CONSTANTS = ("matmul", "attention", "local", "expert_scale", "exchange", "pointwise")
_GRAPHS: dict[str, Stack] = {"routing": "te_graphs", "attention": "te_graphs", "full": "te_full"}
"""How much of a routed block is launched as CUDA graphs; where nothing is stated, the routing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRow(MeasuredRow):
    """One published measurement. Its speed is derived from published model FLOP/s where the source gives no tokens."""

    number: int
    collection: str
    """torchtitan, bridge, nemo, automodel, skills, maxtext, wan or simumax."""
    release: str
    """Software release, as far as the source states it."""
    memory_gib: float | None
    alternatives: tuple[Setup, ...] = ()
    """What the setup can be where the source leaves settings out; empty where it states all."""


def fit_torch(rows: list[PublishedRow]) -> dict[str, Constants]:
    """One fit for both torch stacks, whose pointwise factor applies to eager runs alone."""

    def of(stack: Stack, c: Constants) -> Constants:
        return replace(c, kernels=prior(stack).kernels, pointwise=c.pointwise if stack == "eager" else 1.0)

    def predict(row: MeasuredRow, c: Constants) -> float:
        return estimate(row.shape, row.machine, row.setup, of(row.setup.stack, c)).tokens_per_s

    start = replace(prior("compile"), pointwise=prior("eager").pointwise)
    fitted = fit_constants(rows, TORCH_CONSTANTS, start, pull=0.005, predict=predict)
    return {"eager": of("eager", fitted), "compile": of("compile", fitted)}


@cache
def simumax_set() -> Constants:
    """Six constants on six of SimuMax's rows, whose collectives do not overlap."""
    rows = [row for row in load_rows("measured_rows.csv") if row.number in SIMUMAX_FIT_ROWS]
    return fit_constants(rows, SIMUMAX_CONSTANTS, prior("te"), pull=0.02)


def by_prior(row: MeasuredRow) -> float:
    """Tokens per second of a row by its stack's prior."""
    return estimate(row.shape, row.machine, row.setup, prior(row.setup.stack)).tokens_per_s


def measured_machines(rows: list[PublishedRow]) -> frozenset[tuple[bool, str]]:
    """Machines that have rows, with whether the rows' models are routed."""
    return frozenset((row.shape.moe, row.machine.name) for row in rows)


def predict_other(row: PublishedRow, measured: frozenset[tuple[bool, str]] = MACHINES) -> tuple[float, float]:
    """Tokens per second of a row of another stack, and the deviation of the logarithm. Where settings are not known it is the
    mean over what they can be, and the deviation grows by theirs.
    """
    logs = [math.log(by_prior(replace(row, setup=setup))) for setup in row.alternatives or (row.setup,)]
    spread = other_spread(row.machine.name, routed=row.shape.moe, measured=measured)
    return math.exp(statistics.fmean(logs)), math.hypot(spread, statistics.pstdev(logs))


def load_rows(path: str) -> list[PublishedRow]:
    """Read one of the published tables by name, or any table by path.

    A row whose model or machine is unknown is left out, with a warning.
    """
    file = TABLES / path if (TABLES / path).is_file() else Path(path)
    rows: list[PublishedRow] = []
    for number, record in enumerate(csv.DictReader(file.read_text().splitlines())):
        try:
            row = parse_row(record, number)
        except ValueError as err:
            warnings.warn(f"row {number} of {path} is left out: {err}", stacklevel=2)
            continue
        if row is not None:
            rows.append(row)
    return rows


def parse_row(r: dict[str, str], number: int = 0) -> PublishedRow | None:
    """One row of either table; None where it states neither tokens nor FLOP/s."""
    source = r["source"]
    collection = _collection(source)
    shape = find_shape(r["model"])
    if r.get("layers"):
        shape = cut(shape, int(float(r["layers"])))
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
    return PublishedRow(
        source,
        shape,
        load_machine(r["gpu"]),
        setup,
        measured,
        number=number,
        collection=collection,
        release=r.get("container") or "",
        memory_gib=float(r["peak_mem_gib"]) if r["peak_mem_gib"] else None,
        alternatives=_alternatives(r, setup),
    )


def cut(shape: ModelShape, num_layers: int) -> ModelShape:
    """The same model with fewer blocks; of a model with leading dense blocks one is kept."""
    if num_layers >= shape.num_layers:
        return shape
    if len(shape.blocks) == 2 and isinstance(shape.blocks[0].ffn, FeedForwardShape) and shape.moe:
        first, rest = shape.blocks
        return replace(shape, blocks=(replace(first, count=1), replace(rest, count=num_layers - 1)))
    left, blocks = num_layers, []
    for b in shape.blocks:
        blocks.append(replace(b, count=min(b.count, left)))
        left -= blocks[-1].count
    return replace(shape, blocks=tuple(b for b in blocks if b.count))


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
