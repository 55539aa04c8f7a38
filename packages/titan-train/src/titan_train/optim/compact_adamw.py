"""AdamW whose two running means take 2 or 4 bytes an element instead of 8, and weights 2 instead of 4, by plain torch operations.

Each step reads the means, and weights in bfloat16, of a stretch of rows as float32, makes AdamW's update from them, and writes
them back in their format (`titan_train.optim.compact_states`). The update is made before they are rounded. A stretch bounds the
memory of this to some 16 MiB for each float32 copy. Nothing depends on how the parameter is cut, so that a checkpoint continues
on any layout with the same bits of state.

A bfloat16 weight moves by its update on average: most updates are below half a unit in its last place, 1/512 of it, and rounding
to nearest would lose all of these. So no float32 copy of the weights is needed (arXiv:2010.06192).

Limits: no fused kernel. Its cost in time is unmeasured on a GPU.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from titan_ckpt import LocalShard
from titan_ckpt.state.sharding import Chunk, local_part
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_train.config import Config
from titan_train.optim.compact_states import block_length, check_columns, decode, encode, random_bits, stochastic_bf16
from titan_train.optim.update import closure_loss, decay_towards, plain_tensor
from titan_train.parallel.gradients import local_tensor
from titan_train.parallel.tensor.styles import merge_tables, style_of, table_for

States = Literal["fp32", "bf16", "int8"]
_STRETCH = 1 << 22
"""Elements that are float32 at a time, about."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What this rank holds of a parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole."""
    boxes: tuple[tuple[Chunk, tuple[int, ...]], ...]
    """Boxes of the whole, and where each begins in the local tensor."""
    block: int
    """Elements of a block of int8 means; 0 where they are in another format."""


class CompactAdamW(torch.optim.Optimizer):
    """AdamW with small states, or small weights.

    Args:
        param_groups: Each with ``lr``, ``weight_decay`` and named parameters; bfloat16 ones are rounded at random.
        states: The format of the running means.
        names: Of each parameter, by what it is called on every rank; the random bits of its rounding depend on it.
        shards: Where parameters that tensor or expert parallelism cut are in the whole ones, by the groups' names.
        betas: Decays of the two means.
        eps: Added to the root of the second.
        cautious: Decay only what the update moves towards zero.

    Raises:
        ValueError: A cut goes through a block of int8 means.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        *,
        states: States,
        names: Mapping[str, str],
        shards: Mapping[str, LocalShard],
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        cautious: bool = False,
    ) -> None:
        """All state is made here, zero."""
        defaults = {"lr": 1e-3, "weight_decay": 0.0, "betas": betas, "eps": eps, "cautious": cautious}
        super().__init__(list(param_groups), defaults)
        self._states = states
        self._held: dict[nn.Parameter, _Held] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                part = local_part(parameter.detach(), name, shards.get(name))
                block = block_length(part.shape) if states == "int8" else 0
                held = _Held(names.get(name, name), part.shape, part.boxes, block)
                _check_blocks(held)
                self._held[parameter] = held
                self.state[parameter] = self._new_state(parameter, held)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        loss = closure_loss(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def first_state(self, parameter: nn.Parameter) -> str:
        """The name of a parameter's state that tells its format."""
        block = self._held[parameter].block
        return "exp_avg_codes" if block else "exp_avg_bf16" if self._states == "bf16" else "exp_avg"

    def _new_state(self, parameter: nn.Parameter, held: _Held) -> dict[str, Tensor]:
        state = {"step": torch.zeros(())}
        for mean in ("exp_avg", "exp_avg_sq"):
            if held.block:
                state[f"{mean}_codes"] = _zeros(parameter, torch.uint8)
                state[f"{mean}_magnitudes"] = _zeros(parameter, torch.float32, held.block)
            elif self._states == "bf16":
                state[f"{mean}_bf16"] = _zeros(parameter, torch.bfloat16)
            else:
                state[mean] = _zeros(parameter, torch.float32)
        return state

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        held, state = self._held[parameter], self.state[parameter]
        state["step"] += 1
        weight, gradient = plain_tensor(parameter), plain_tensor(parameter.grad)
        means = {key: plain_tensor(value) for key, value in state.items() if key != "step"}
        for box, start in held.boxes:
            rows = max(1, _STRETCH * box.sizes[0] // max(1, box.numel)) if box.sizes else 1
            for first in range(0, box.sizes[0] if box.sizes else 1, rows):
                self._update_rows(
                    weight, gradient, means, int(state["step"]), held, _stretch(box, start, first, rows), group
                )

    def _update_rows(
        self,
        weight: Tensor,
        gradient: Tensor,
        means: Mapping[str, Tensor],
        step: int,
        held: _Held,
        stretch: tuple[Chunk, tuple[slice, ...]],
        group: Mapping[str, Any],
    ) -> None:
        box, at = stretch
        beta1, beta2 = group["betas"]
        at_blocks = (*at[:-1], slice(at[-1].start // held.block, at[-1].stop // held.block)) if held.block else at
        bits: Tensor | None = None
        if self._states == "bf16":
            bits = random_bits(held.name, step, box, held.shape, weight.device)

        def read(mean: str) -> Tensor:
            if held.block:
                codes, magnitudes = means[f"{mean}_codes"][at], means[f"{mean}_magnitudes"][at_blocks]
                return decode(codes, magnitudes, signed=mean == "exp_avg")
            return means[mean if bits is None else f"{mean}_bf16"][at].float()

        def write(mean: str, values: Tensor, bits: Tensor | None) -> None:
            if held.block:
                codes, magnitudes = means[f"{mean}_codes"][at], means[f"{mean}_magnitudes"][at_blocks]
                encode(values, codes, magnitudes, signed=mean == "exp_avg")
            elif bits is not None:
                means[f"{mean}_bf16"][at].copy_(stochastic_bf16(values, bits))
            else:
                means[mean][at].copy_(values)

        held_part, grad = weight[at], gradient[at].float()
        part = held_part.float() if held_part.dtype == torch.bfloat16 else held_part
        mean = read("exp_avg").lerp_(grad, 1 - beta1)
        square = read("exp_avg_sq").mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["cautious"]:
            decay_towards(part, mean, group["lr"] * group["weight_decay"])
        else:
            part.mul_(1 - group["lr"] * group["weight_decay"])
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        part.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step))
        if part is not held_part:
            bits_of_weight = random_bits(f"{held.name}/weight", step, box, held.shape, weight.device)
            held_part.copy_(stochastic_bf16(part, bits_of_weight))
        write("exp_avg", mean, bits)
        write("exp_avg_sq", square, None if bits is None else bits >> 16)


def _stretch(box: Chunk, start: tuple[int, ...], first: int, rows: int) -> tuple[Chunk, tuple[slice, ...]]:
    """Rows of a box, and where they are in the local tensor."""
    if not box.sizes:  # a scalar
        return box, ()
    length = min(rows, box.sizes[0] - first)
    chunk = Chunk((box.offsets[0] + first, *box.offsets[1:]), (length, *box.sizes[1:]))
    at = (start[0] + first, *start[1:])
    return chunk, tuple(slice(begin, begin + size) for begin, size in zip(at, chunk.sizes, strict=True))


def check_tensor_parallel_states(config: Config, whole: nn.Module, tp: int) -> None:
    """Refuse before any rank starts what `CompactAdamW` with int8 means would refuse of linears that ``tp`` ranks cut by columns.

    Raises:
        ValueError: A cut goes through a block of int8 means.
    """
    table = merge_tables(whole, table_for(whole), config.parallel.tp_plan)
    for name, module in whole.named_modules():
        weight = getattr(module, "weight", None)
        if style_of(name, table) != "rowwise" or not isinstance(weight, Tensor) or not weight.requires_grad:
            continue
        row, block = weight.shape[-1], block_length(weight.shape)
        if block:
            check_columns(f"{name}.weight", row, row // tp, row // tp, block)


def _check_blocks(held: _Held) -> None:
    for box, _ in held.boxes if held.block else ():
        check_columns(held.name, held.shape[-1], box.offsets[-1], box.sizes[-1], held.block)


def _zeros(parameter: nn.Parameter, dtype: torch.dtype, block: int = 1) -> Tensor:
    """Zeros in the layout of a parameter; with one for each ``block`` elements of a row."""
    held = local_tensor(parameter.detach())

    def shape(sizes: torch.Size) -> torch.Size:
        return torch.Size((*sizes[:-1], sizes[-1] // block)) if block > 1 else sizes

    local = torch.zeros(shape(held.shape), dtype=dtype, device=held.device)
    if not isinstance(parameter, DTensor):
        return local
    size = shape(parameter.shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=size, stride=stride
    )
