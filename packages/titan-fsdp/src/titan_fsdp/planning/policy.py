"""What the user decides: which modules form a unit, when parameters are gathered, in which dtypes, over what.

Every class here is a frozen value that validates itself when it is built, without torch.distributed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

Reshard = Literal["default", "always", "never"] | bool | int
"""When a unit's gathered parameters are freed after forward; see `Policy.reshard`."""

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecision:
    """The dtype of parameters in compute, of gradients in reduction, and of the output. Always explicit.

    Leaving the reduction dtype to torch changes the loss curve between versions: up to 2.13 it followed the parameter
    dtype, from 2.15 the gradient's.
    """

    param: Literal["bf16", "fp32"] = "fp32"
    """Dtype of the gathered parameters and of the floating-point inputs of every unit."""
    reduce: Literal["bf16", "fp32"] = "fp32"
    """Dtype in which gradients are summed over ranks."""
    output: Literal["bf16", "fp32"] | None = None
    """Dtype the model's output is cast to; None leaves it as computed."""
    keep_fp32: Sequence[str] = ()
    """FQN patterns of modules (with all that they hold) or parameters computed in float32; costs one more gather in each unit.
    A container, which has no forward, stands for the modules in it. What goes on to modules around is cast to ``param``, but for
    scalars (a loss) and the results of modules with an attribute ``keeps_output_dtype = True``."""

    def __post_init__(self) -> None:
        _one_of("mp.param", self.param, tuple(_DTYPES))
        _one_of("mp.reduce", self.reduce, tuple(_DTYPES))
        _one_of("mp.output", self.output, (None, *_DTYPES))
        _patterns("mp.keep_fp32", self.keep_fp32)

    @property
    def param_dtype(self) -> torch.dtype:
        """``param`` as a torch dtype."""
        return _DTYPES[self.param]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """``reduce`` as a torch dtype."""
        return _DTYPES[self.reduce]

    @property
    def output_dtype(self) -> torch.dtype | None:
        """``output`` as a torch dtype."""
        return None if self.output is None else _DTYPES[self.output]


@dataclass(frozen=True, slots=True)
class Unit:
    """Modules whose parameters are gathered in one all-gather and reduced in one reduce-scatter.

    Args:
        match: A module class or an FQN pattern (``"layers.*"``): every match is its own unit. A list of FQN patterns:
            all matches together are one unit (``["norm", "lm_head"]``, or tied embeddings).
        reshard: Overrides `Policy.reshard` for this unit.
        mesh: Name of another mesh, given as ``meshes={name: …}`` to `plan`, for example the experts' one.
        shard_dim: Tensor dimension to shard; ``"auto"`` takes the first that divides evenly when dimension 0 is
            shorter than the number of shards.
    """

    match: type[nn.Module] | str | Sequence[str]
    reshard: Reshard | None = None
    mesh: str | None = None
    shard_dim: int | Literal["auto"] = 0

    def __post_init__(self) -> None:
        if self.reshard is not None:
            _check_reshard("Unit.reshard", self.reshard)
        if not isinstance(self.match, (str, type)):
            _patterns("Unit.match", self.match)
            if not self.match:
                raise ValueError("Unit.match is an empty list: it names no module. Give FQNs, a pattern or a class.")
        if isinstance(self.match, type) and not issubclass(self.match, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"Unit.match={self.match.__name__} is not a torch.nn.Module subclass, so no module can match."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefetch:
    """How many units ahead are gathered explicitly, on top of torch's own overlap."""

    forward: int = 1
    """Units gathered ahead in forward; 0 leaves it to torch."""
    backward: int = 1
    """Units gathered ahead in backward; 0 leaves it to torch."""
    order: Literal["registered", "recorded"] = "registered"
    """Order of units: as registered in the module, or as recorded in the first forward."""

    def __post_init__(self) -> None:
        for name, value in (("forward", self.forward), ("backward", self.backward)):
            if value < 0:
                raise ValueError(f"prefetch.{name}={value} is negative. It counts units gathered ahead: 0, 1, 2, …")
        _one_of("prefetch.order", self.order, ("registered", "recorded"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Comm:
    """How parameters and gradients travel."""

    reduce_scatter: Literal["native", "bf16"] = "native"
    """``bf16`` sends gradients in bfloat16 but sums them in float32: half the bytes, one rounding."""
    ddp_hook: Literal["fp16", "bf16", "powersgd"] | None = None
    """Gradient compression in ``ddp`` mode; uses torch's DistributedDataParallel and its communication hooks."""
    powersgd_rank: int = 1
    """Rank of PowerSGD's low-rank approximation."""
    powersgd_start_step: int = 2
    """Steps of plain all-reduce before PowerSGD compresses; at least 2."""
    reduce_scatter_group: Literal["shared", "own"] = "shared"
    """``own`` gives reduce-scatters a process group beside the all-gathers', so that both are on the wire at one time in
    backward; one group runs them one after the other. Costs a NCCL communicator. Needs torch ≥ 2.15."""
    reduce_scatter_buffers: int = 1
    """Inputs of reduce-scatters in flight. With 1, backward waits for a unit's transfer before it copies the next one's
    gradients; more hide transfers that take longer than the computation beside them. Above 1 needs torch ≥ 2.15."""
    symmetric_memory: bool = False
    """Gather into NCCL's symmetric memory: copy engines or symmetric kernels instead of SMs. CUDA only."""

    def __post_init__(self) -> None:
        _one_of("comm.reduce_scatter", self.reduce_scatter, ("native", "bf16"))
        _one_of("comm.reduce_scatter_group", self.reduce_scatter_group, ("shared", "own"))
        if self.reduce_scatter_buffers < 1:
            raise ValueError(
                f"comm.reduce_scatter_buffers={self.reduce_scatter_buffers}: a reduce-scatter needs an input. Use 1 or more."
            )
        if self.symmetric_memory and (self.reduce_scatter == "bf16" or self.reduce_scatter_buffers > 1):
            raise ValueError(
                f"comm.symmetric_memory=True with comm.reduce_scatter={self.reduce_scatter!r} and "
                f"comm.reduce_scatter_buffers={self.reduce_scatter_buffers}: torch takes symmetric memory with its own "
                "reduce-scatter and one buffer only. Use 'native' and 1, or symmetric_memory=False."
            )
        _one_of("comm.ddp_hook", self.ddp_hook, (None, "fp16", "bf16", "powersgd"))
        if self.powersgd_rank < 1:
            raise ValueError(f"comm.powersgd_rank={self.powersgd_rank} is not a matrix rank. Use 1 or more.")
        if self.powersgd_start_step < 2:
            raise ValueError(
                f"comm.powersgd_start_step={self.powersgd_start_step}: PowerSGD with error feedback must "
                "begin after DistributedDataParallel has rebuilt its buckets. Use 2 or more."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How a model is wrapped. A value: the same policy serves any model, any number of ranks."""

    units: Literal["auto"] | Sequence[Unit | type[nn.Module] | str] = "auto"
    """``"auto"`` finds the repeated blocks, embeddings and head; or units, classes and FQN patterns, to
    which ``"auto"`` adds those: ``["auto", Unit("layers.*.experts", mesh="experts")]``; a module that is named and found is
    the named unit's."""
    reshard: Reshard = "default"
    """``default``: free after forward except in the last unit, the root, and under pipeline parallelism; ``always``;
    ``never``; or a number of ranks (a divisor of the shard group) that keep a copy between forward and backward: all of them is
    ``always``, 1 is ``never``, and a unit on a mesh of its own whose shards it does not divide is freed."""
    reshard_overrides: Mapping[str, Reshard] = field(default_factory=dict[str, Reshard])
    """FQN pattern of a unit (``root`` names the root) to its own reshard value."""
    mp: MixedPrecision = field(default_factory=MixedPrecision)
    """Dtypes of parameters, reduction and output."""
    offload: Literal["cpu", "cpu-nopin"] | None = None
    """Keep sharded parameters, gradients and optimizer state in host memory, pinned or not."""
    mode: Literal["fsdp", "hsdp", "ddp"] = "fsdp"
    """``fsdp`` shards over a 1-D mesh, ``hsdp`` over the second axis of a 2-D mesh, ``ddp`` replicates."""
    prefetch: Prefetch | Literal["recorded"] | None = None
    """Explicit prefetch; None leaves overlap to torch; ``"recorded"`` is one unit ahead in recorded order."""
    grad_divide: Literal["mean", "sum"] | float = "mean"
    """Gradients are summed over ranks, then divided by the number of ranks, by nothing, or by this number."""
    comm: Comm = field(default_factory=Comm)
    """Gradient compression."""
    pp: bool = False
    """The model is a pipeline stage: ``default`` then keeps parameters gathered between microbatches."""
    ignore: Sequence[str] = ()
    """FQN patterns of parameters left alone: not sharded, not moved, gradients not reduced. Any name of a tied one counts."""
    unused_parameters: bool = False
    """Some ranks may skip parameters inside a unit in a step; call `drop_unreached` before the optimizer's step. Needs
    torch ≥ 2.13, except in ddp mode with ``comm.ddp_hook``."""

    def __post_init__(self) -> None:
        if isinstance(self.units, str):
            _one_of("units", self.units, ("auto",))
        _check_reshard("reshard", self.reshard)
        for pattern, value in self.reshard_overrides.items():
            _check_reshard(f"reshard_overrides[{pattern!r}]", value)
        _one_of("offload", self.offload, (None, "cpu", "cpu-nopin"))
        _one_of("mode", self.mode, ("fsdp", "hsdp", "ddp"))
        _patterns("ignore", self.ignore)
        if isinstance(self.prefetch, str):
            _one_of("prefetch", self.prefetch, ("recorded",))
        if isinstance(self.grad_divide, str):
            _one_of("grad_divide", self.grad_divide, ("mean", "sum"))
        elif not self.grad_divide > 0:
            raise ValueError(f"grad_divide={self.grad_divide} must be positive, 'mean' or 'sum'.")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.comm.ddp_hook is not None:
            if self.mode != "ddp":
                raise ValueError(
                    f"comm.ddp_hook={self.comm.ddp_hook!r} with mode={self.mode!r}: hooks are for ddp. "
                    "Use mode='ddp', or comm.reduce_scatter='bf16'."
                )
            if self.mp.param != "fp32" or self.mp.reduce != "fp32" or self.mp.keep_fp32 or self.mp.output is not None:
                raise ValueError(
                    "comm.ddp_hook compresses float32 gradients of a float32 model, but mp asks for other dtypes. "
                    "Use mp=MixedPrecision() with torch.autocast, or mp.reduce='bf16' without the hook."
                )
            if self.offload is not None:
                raise ValueError(
                    "offload with comm.ddp_hook: DistributedDataParallel cannot offload. Drop one of them."
                )
        if self.mode == "ddp" and self.comm.reduce_scatter != "native":
            raise ValueError(
                f"comm.reduce_scatter={self.comm.reduce_scatter!r} in ddp mode, which has no reduce-scatter. "
                "Use comm.ddp_hook or mp.reduce='bf16'."
            )
        plain = Comm()
        for name in ("reduce_scatter_group", "reduce_scatter_buffers", "symmetric_memory"):
            value = getattr(self.comm, name)
            if self.mode == "ddp" and value != getattr(plain, name):
                raise ValueError(
                    f"comm.{name}={value!r} in ddp mode, which neither gathers nor scatters. Leave it out, or use 'fsdp'."
                )
        if self.comm.reduce_scatter == "bf16" and self.mp.reduce != "fp32":
            raise ValueError(
                "comm.reduce_scatter='bf16' compresses float32 gradients on the way, but mp.reduce='bf16' makes "
                "them bfloat16. Use mp.reduce='fp32' with it."
            )


def _check_reshard(name: str, value: object) -> None:
    if isinstance(value, bool) or value in ("default", "always", "never"):
        return
    if isinstance(value, int) and value > 0:
        return
    raise ValueError(
        f"{name}={value!r}: use 'default', 'always', 'never', or a positive number of ranks to reshard to."
    )


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}.")


def _patterns(name: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{name}={value!r} must be a list of FQN patterns such as ['*.norm*'].")
