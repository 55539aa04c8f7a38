"""Parallel degrees: data, sequence, weights, layers, experts."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from titan_train.values import Count, Range, check_values

_MOST_RANKS = 2**18
_Degree = Annotated[int, Range(1, note="1 is off")]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How ranks share the work and communicate."""

    mode: Literal["auto", "fsdp", "hsdp", "ddp"] = "auto"
    """auto follows the degrees: dp_replicate > 1 and dp_shard > 1 is hsdp, dp_shard = 1 is ddp, else fsdp."""

    dp_replicate: Annotated[int, Range(1, also=-1, note="-1 takes the remaining ranks")] = 1
    """Ranks that hold copies of the same shard; -1 takes the ranks that dp_shard leaves."""

    dp_shard: Annotated[int, Range(1, also=-1, note="-1 takes the remaining ranks")] = -1
    """Ranks that shard parameters, gradients and optimizer state; -1 takes all remaining ranks."""

    pp: _Degree = 1
    """Pipeline ranks; see [pipeline]."""

    cp: _Degree = 1
    """Ranks that share each sequence; see [context]. They also shard the parameters."""

    tp: _Degree = 1
    """Ranks that share each weight matrix."""

    ep: _Degree = 1
    """Ranks that share the experts of a layer. EP reuses the dp_shard x cp x tp ranks; it adds none."""

    sequence_parallel: bool = True
    """With tp > 1: shard the sequence over the same ranks outside attention and feed-forward."""

    replicate_kv: bool = False
    """With tp above the number of key-value heads: replicate the heads instead of refusing."""

    async_tp: bool = False
    """Overlap the transfers of tensor parallelism with its matrix products (needs sequence_parallel)."""

    tp_plan: dict[str, str] = field(default_factory=dict)
    """Tensor-parallel styles of your own module, by pattern of module name, such as {"blocks.*.attn.q" =
    "colwise"}. Shipped models define their own."""

    reshard: Literal["default", "always", "never"] | Annotated[int, Range(1)] = "default"
    """Free the gathered parameters after forward: default (all but the last unit), always, never, or an int: keep
    them sharded over that many ranks. With pp > 1 what is gathered stays until the end of the step, but for always."""

    reshard_overrides: dict[str, Literal["always", "never"] | int] = field(default_factory=dict)
    """Exceptions to reshard by pattern of module name, such as {"layers.0" = "never"}; the first that matches counts."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are reduced."""

    keep_fp32: tuple[str, ...] = ()
    """Patterns of modules that compute in float32 though train.dtype is bf16, such as "*norm*". With one holder of a tied
    weight all others are kept too."""

    offload: Literal["none", "cpu", "cpu-nopin"] = "none"
    """Keep parameters, gradients and optimizer state in host memory (fsdp and hsdp)."""

    compress: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """Compress the reduction of float32 gradients (reduce_dtype is "fp32"): bf16 in any mode, in ddp mode fp16 and powersgd as
    well. In ddp mode train.dtype must be "fp32"."""

    reduce_scatter_group: Literal["shared", "own"] = "shared"
    """own: reduce-scatters run beside all-gathers in backward, in a communicator of their own (fsdp, hsdp; torch 2.15)."""

    reduce_scatter_buffers: Count = 1
    """Inputs of reduce-scatters in flight; more hide transfers that take longer than backward (fsdp, hsdp; torch 2.15)."""

    symmetric_memory: bool = False
    """Gather parameters into NCCL's symmetric memory, which leaves more SMs to the model (fsdp and hsdp on CUDA)."""

    accumulate: Literal["sharded", "unsharded", "zero1", "hsdp-ar"] = "sharded"
    """State between micro-batches: sharded gradients (least memory), unsharded gradients (least communication),
    also unsharded parameters (zero1), or hsdp with one all-reduce after the last micro-batch (hsdp-ar)."""

    @property
    def num_ranks(self) -> int:
        """Ranks that the given degrees need; one that is -1 counts 1."""
        degrees = (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)
        return math.prod(max(1, degree) for degree in degrees)

    def __post_init__(self) -> None:
        check_values("parallel", self)
        if self.num_ranks > _MOST_RANKS:
            raise ValueError(
                f"the parallel degrees need {self.num_ranks:.4g} ranks (pp={self.pp}, dp_replicate={self.dp_replicate}, "
                f"dp_shard={self.dp_shard}, cp={self.cp}, tp={self.tp}); at most {_MOST_RANKS:,} can be laid out. Lower one."
            )
        if self.async_tp and not self.sequence_parallel:
            raise ValueError(
                "parallel.async_tp=true overlaps the gathers of sequence parallelism, and parallel.sequence_parallel=false "
                "has none. Set sequence_parallel=true."
            )
        if self.dp_replicate == -1 and self.dp_shard == -1:
            raise ValueError(
                "parallel.dp_replicate=-1 and parallel.dp_shard=-1: only one of them can take the remaining ranks. Set one to 1."
            )
        if self.compress in ("fp16", "powersgd") and self.mode in ("fsdp", "hsdp"):
            raise ValueError(
                f"parallel.compress={self.compress!r} works in mode 'ddp' only, not {self.mode!r}; the nearest choice is 'bf16'."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextConfig:
    """Context parallelism (parallel.cp > 1): how attention reaches tokens that other ranks hold."""

    method: Literal["auto", "ring", "allgather", "ulysses", "usp"] = "auto"
    """auto takes the method that sends the fewest bytes, for each micro-batch of packed documents."""

    layout: Literal["auto", "contiguous", "zigzag", "per_document", "documents", "block"] = "auto"
    """Which tokens each rank holds; auto takes the balanced layout that sends least."""

    ulysses_degree: Annotated[int, Range(0, note="0 chooses")] = 0
    """Ranks that share the heads under usp; 0 takes the degree that sends the fewest bytes."""

    dynamic: bool = False
    """Share the documents of each micro-batch among all ranks of data and context parallelism, each over as many as its length
    asks for: long ones over many, short ones on one."""

    @property
    def axis(self) -> str:
        """The mesh axis of the ranks that compute on the same rows."""
        return "loss" if self.dynamic else "cp"

    def __post_init__(self) -> None:
        check_values("context", self)
        for name, value, fits in (("method", self.method, "ring"), ("layout", self.layout, "documents")):
            if self.dynamic and value not in ("auto", fits):
                raise ValueError(
                    f"context.dynamic=true and context.{name}={value!r}: every document has ranks of its own, which "
                    f"exchange keys by the ring's transfers in the layout 'documents'. Leave context.{name} at 'auto'."
                )
        if self.ulysses_degree and self.method != "usp":
            raise ValueError(
                f"context.ulysses_degree={self.ulysses_degree} applies to method 'usp' only, not "
                f"{self.method!r}. Set method = 'usp', or leave it at 0."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Pipeline parallelism (parallel.pp > 1): the schedule, and where the model is cut."""

    schedule: str = "1f1b"
    """A family of titan-pipeline (gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_h2, zbv, …: `titan-pipeline gen --help`), or
    the path of a schedule's JSON file."""

    stages_per_rank: Annotated[int, Range(0, note="0 takes the minimum of the family")] = 0
    """Model chunks per rank; 0 takes the minimum of the family (1, or 2 for interleaved and V-shaped schedules)."""

    cuts: tuple[Annotated[int, Range(0)], ...] = ()
    """First layer of each stage after the first, such as [2, 4, 6]; empty balances the stages by FLOPs, including
    embedding and head."""

    deterministic: bool = False
    """Require single-process gradient accumulation order (bitwise reproducible)."""

    def __post_init__(self) -> None:
        check_values("pipeline", self)
        if list(self.cuts) != sorted(set(self.cuts)):
            raise ValueError(
                f"pipeline.cuts={list(self.cuts)} must be layer numbers in rising order, such as [2, 4, 6]."
            )
