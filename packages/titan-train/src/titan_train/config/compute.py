"""What trades speed against memory inside one rank: recomputation, precision, compilation."""

from dataclasses import dataclass
from typing import Annotated, Literal

from titan_train.values import Count, Range, check_values


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationsConfig:
    """Which activations forward saves for backward, and where."""

    checkpoint: Literal["none", "full", "every", "pattern", "selective", "budget"] = "none"
    """Recompute in backward: nothing (none), every block (full), each k-th block (every), the modules that match
    patterns (pattern), all but matrix products and attention (selective), or what torch.compile chooses within a
    memory budget (budget)."""

    every: Count = 2
    """With checkpoint = "every": recompute each k-th block."""

    patterns: tuple[str, ...] = ()
    """With checkpoint = "pattern": names of modules to recompute, such as "layers.*.feed_forward"."""

    matmul_every: Annotated[
        int, Range(2, also=0, note="0 keeps all; for all to be recomputed use checkpoint = 'full'")
    ] = 2
    """With checkpoint = "selective": recompute each k-th matrix product of a block; 0 keeps them all."""

    budget: Annotated[float, Range(0, 1)] = 0.5
    """With checkpoint = "budget": share of the activations to keep, 0 to 1 (needs compile.enabled)."""

    mlp_tiles: Count = 1
    """Run feed-forwards in this many parts of the sequence and recompute them in backward; 1 runs them whole."""

    offload: bool = False
    """Move saved activations to host memory until backward needs them (CUDA only)."""

    def __post_init__(self) -> None:
        check_values("activations", self)
        if self.checkpoint == "pattern" and not self.patterns:
            raise ValueError(
                "activations.checkpoint='pattern' needs activations.patterns, such as ['layers.*.feed_forward']."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8Config:
    """Matrix products in float8, by titan-fp8."""

    recipe: Literal["none", "tensorwise", "rowwise", "rowwise_gw_hp", "blockwise", "mxfp8"] = "none"
    """Scaling recipe; blockwise is recommended on Hopper."""

    skip: tuple[str, ...] = ()
    """Patterns of modules that stay in higher precision; empty excludes the head and routers; of FLUX ends and modulation."""

    min_speedup: Annotated[float, Range(0, note="0 converts every supported layer")] = 1.0
    """Convert only layers whose expected GPU speed-up is at least this; 0 converts every supported layer."""

    all_gather: Literal["auto", "on", "off"] = "auto"
    """Gather sharded weights in float8; auto does so if the recipe and parallel.reshard support it."""

    tp_gather: Literal["auto", "on", "off"] = "auto"
    """Gather the tokens of sequence parallelism in float8 (recipes blockwise and tensorwise); auto does where every bit
    of the result stays the same (blockwise) and no pipeline schedule splits backward."""

    def __post_init__(self) -> None:
        check_values("float8", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """torch.compile of each repeated block."""

    enabled: bool = False
    """Compile; the first step takes longer."""

    backend: str = "inductor"
    """A backend of torch.compile; "aot_eager" checks the graphs without generating code."""

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """inductor's mode."""

    cudagraphs: bool = False
    """Replay forward and backward of a step as one CUDA graph: the host launches it once, not each kernel. On one CUDA rank
    and for dense models of fixed shapes; independent of enabled."""

    def __post_init__(self) -> None:
        check_values("compile", self)
        if not self.backend.replace("_", "").isalnum():
            raise ValueError(
                f"compile.backend={self.backend!r} is not the name of a backend. Use 'inductor' (generates code), 'aot_eager' "
                "or 'eager' (check the graphs)."
            )
        if self.mode != "default" and self.backend != "inductor":
            raise ValueError(
                f"compile.mode={self.mode!r} is a mode of inductor, and compile.backend={self.backend!r} has none. Leave the "
                "mode out, or use backend 'inductor'."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelsConfig:
    """Which kernel computes an elementwise operation in eager mode; auto is the model's own, or what measured says."""

    rms_norm: Literal["auto", "torch", "titan", "liger"] = "auto"
    """RMSNorm of the shipped families."""

    swiglu: Literal["auto", "torch", "titan", "liger"] = "auto"
    """SwiGLU before a linear that is not float8."""

    rope: Literal["auto", "torch", "titan", "liger"] = "auto"
    """Rotary positions. liger rotates halves of a head, not the neighbouring channels of FLUX."""

    cross_entropy: Literal["auto", "torch", "liger"] = "auto"
    """Loss on whole logits: with train.fused_loss=false, and without z-loss and tensor parallelism."""

    measured: str = ""
    """A file that titan-train doctor --bench wrote: where this section says auto, its fastest kernels are used."""
