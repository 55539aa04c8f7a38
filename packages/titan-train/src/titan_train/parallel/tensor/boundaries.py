"""Hooks that communicate where a module's input must be whole, or its output be summed.

They are plain module hooks on the modules that the table names, so the model's code stays as its author wrote it,
linears stay `nn.Linear` with plain weights (float8 and deferred weight gradients can take them over), activation
checkpointing repeats the collectives in the same order on every rank, and `torch.compile` traces through them.

Hidden states are ``[..., S, d]``: the sequence is the last dimension but one.
"""

import copy
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_train.parallel.tensor.collectives import gather_parts, scatter_sum, share, sum_partials


def make_input_whole(module: nn.Module, group: dist.ProcessGroup, *, sequence_parallel: bool) -> None:
    """Before the module runs, make its first argument (or ``hidden_states``) the whole sequence on every rank."""

    def before(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        if args and isinstance(args[0], Tensor):
            return (enter(args[0], group, sequence_parallel=sequence_parallel), *args[1:]), keywords
        if not args and isinstance(keywords.get("hidden_states"), Tensor):
            whole = enter(keywords["hidden_states"], group, sequence_parallel=sequence_parallel)
            return args, {**keywords, "hidden_states": whole}
        raise ValueError(
            f"a tensor-parallel {type(module).__name__} must be given its hidden states as first positional argument."
        )

    module.register_forward_pre_hook(before, with_kwargs=True)


def sum_output(module: nn.Module, group: dist.ProcessGroup, *, sequence_parallel: bool) -> None:
    """After the module has run, sum its output over the ranks; each keeps its own tokens, or all.

    Attention of transformers returns its output with None for the attention weights, and sparse attention with the numbers of
    the keys that it chose, which every rank has whole.
    """

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple) and isinstance(output[0], Tensor) and not any(map(_is_partial, output[1:])):
            return leave(output[0], group, sequence_parallel=sequence_parallel), *output[1:]
        if not isinstance(output, Tensor):
            raise ValueError(
                f"a tensor-parallel {type(module).__name__} must return one tensor, not a {type(output).__name__}."
            )
        return leave(output, group, sequence_parallel=sequence_parallel)

    module.register_forward_hook(after)


def keep_own_tokens(module: nn.Module, group: dist.ProcessGroup) -> None:
    """After a module has computed all tokens on every rank, each keeps its own."""
    size, rank = group.size(), group.rank()

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        length = output.shape[-2] // size
        return output.narrow(-2, rank * length, length)

    module.register_forward_hook(after)


def look_up_own_rows(
    module: nn.Module, group: dist.ProcessGroup, *, first_row: int, num_rows: int, sequence_parallel: bool
) -> None:
    """Make an embedding that holds some rows give zero for the others', and sum its output over the ranks."""
    rows = _OwnRows(first_row, num_rows)
    module.register_forward_pre_hook(rows.before)
    module.register_forward_hook(rows.after)
    sum_output(module, group, sequence_parallel=sequence_parallel)


def look_up_own_tokens(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Make a module look up only the tokens that this rank keeps, of ids ``[..., S]``."""
    size, rank = group.size(), group.rank()

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_floating_point():
            return value
        length = value.shape[-1] // size
        return value.narrow(-1, rank * length, length)

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(own(value) for value in args)

    module.register_forward_pre_hook(before)


def norm_over_ranks(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Make an RMSNorm whose channels are cut over the ranks take its mean square over all of them."""

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        own = wide.square().mean(-1, keepdim=True) / group.size()
        # every rank's output depends on every rank's channels: the gradient is summed as well
        mean = share(sum_partials(own, group), group)
        return (cast(Tensor, module.weight) * (wide * torch.rsqrt(mean + _epsilon(module, wide)))).to(x.dtype)

    module.forward = MethodType(forward, module)  # a deep copy binds it to the copy


@torch.no_grad()
def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module computes what `norm_over_ranks` does; True where that cannot be tried."""
    try:
        tried: Any = copy.deepcopy(module).to_empty(device="cpu").float()
        width = tried.weight.shape[0]
        for parameter in tried.parameters():
            parameter.copy_(torch.linspace(0.5, 1.5, width, device="cpu"))
        x = torch.linspace(-1e-3, 2e-3, width, device="cpu")  # small, so that the epsilon shows
        found = tried(x)
    except Exception:  # the user's own code; a run says what is wrong with it
        return True
    want = tried.weight * (x * torch.rsqrt(x.square().mean() + _epsilon(tried, x)))
    return isinstance(found, Tensor) and found.shape == want.shape and torch.allclose(found, want, rtol=1e-3)


def _epsilon(norm: nn.Module, wide: Tensor) -> float:
    """What an RMSNorm adds to the mean square; without a number, what torch takes for the dtype that it computes in."""
    values = [getattr(norm, name, None) for name in ("variance_epsilon", "eps")]
    return next((float(value) for value in values if value is not None), torch.finfo(wide.dtype).eps)


def enter(x: Tensor, group: dist.ProcessGroup, *, sequence_parallel: bool) -> Tensor:
    """Into a region: ``[..., S / n, d]`` (or ``[..., S, d]`` on all) to ``[..., S, d]``."""
    return gather_parts(x, x.ndim - 2, group) if sequence_parallel else share(x, group)


def leave(x: Tensor, group: dist.ProcessGroup, *, sequence_parallel: bool) -> Tensor:
    """Out of a region: summands ``[..., S, d]`` to the sum, ``[..., S / n, d]`` (or ``[..., S, d]`` on all)."""
    return scatter_sum(x, x.ndim - 2, group) if sequence_parallel else sum_partials(x, group)


def _is_partial(value: Any) -> bool:
    return value is not None and not (isinstance(value, Tensor) and not value.is_floating_point())


class _OwnRows:
    """The two hooks of one embedding, and the mask that the second needs from the first."""

    def __init__(self, first_row: int, num_rows: int) -> None:
        self._first_row = first_row
        self._num_rows = num_rows
        self._elsewhere: Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids: Tensor = args[0] - self._first_row
        self._elsewhere = (ids < 0) | (ids >= self._num_rows)
        return ids.masked_fill(self._elsewhere, 0), *args[1:]

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        assert self._elsewhere is not None
        mask, self._elsewhere = self._elsewhere.unsqueeze(-1), None
        return output.masked_fill(mask, 0.0)
