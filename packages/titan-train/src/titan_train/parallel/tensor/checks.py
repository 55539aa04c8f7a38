"""Whether tensor parallelism fits a model: asked before any rank starts."""

from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titan_train.models.call import copy_to_try
from titan_train.models.common.tensor_styles import StyleTable
from titan_train.parallel.tensor.boundaries import is_rms_norm
from titan_train.parallel.tensor.plan import plan_tensor_parallel
from titan_train.parallel.tensor.styles import style_of

ASYNC_WITHOUT_SEQUENCE_PARALLEL = (
    "asynchronous tensor parallelism over tp={tp} ranks overlaps the gather and scatter of sequence parallelism, which is "
    "off, so there is nothing to overlap. Turn sequence parallelism on."
)


def check_tensor_parallel(
    model: nn.Module,
    tp: int,
    *,
    table: StyleTable,
    seq_len_local: int,
    sequence_parallel: bool,
    replicate_kv: bool = False,
    async_tp: bool = False,
) -> None:
    """Refuse what cannot work; nothing is changed and no process group is needed.

    Args:
        model: The whole model, on the meta device.
        tp: Ranks.
        table: Of the model's family, or a user's own.
        seq_len_local: Tokens of a row that a tensor-parallel group holds: the sequence over context-parallel ranks.
        sequence_parallel: Tokens outside of regions are split over the ranks.
        replicate_kv: Ranks may share a key-value head where there are more ranks than heads.
        async_tp: Transfers overlapped with the matrix products.

    Raises:
        ValueError: One sentence on what does not fit, with both numbers, and one on what would.
    """
    if tp == 1:
        return
    plan = plan_tensor_parallel(model, tp, table=table, sequence_parallel=sequence_parallel, replicate_kv=replicate_kv)
    for entry in plan.modules:
        if entry.style in ("heads_norm", "kv_heads_norm") and not is_rms_norm(entry.module):
            raise ValueError(
                f"the table says {entry.style} for {entry.fqn}, a {type(entry.module).__name__}: over ranks it would be computed "
                "as an RMSNorm, weight * x / sqrt(mean(x²) + eps), which it is not. Use an RMSNorm with an attribute eps, or "
                "'replicated' for all of the attention."
            )
    if sequence_parallel and seq_len_local % tp:
        near = max(1, round(seq_len_local / tp)) * tp
        raise ValueError(
            f"tp={tp} with sequence parallelism does not divide the {seq_len_local} tokens of a row (after context "
            f"parallelism): ranks would hold different numbers of tokens. The nearest valid length is {near} tokens; or turn "
            "sequence parallelism off."
        )
    if async_tp and not sequence_parallel:
        raise ValueError(ASYNC_WITHOUT_SEQUENCE_PARALLEL.format(tp=tp))


class _Dropped(TorchFunctionMode):
    """Keeps what every dropout with a rate above 0 gives, also where it is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = kwargs or {}
        result = func(*args, **given)
        if func is nn.functional.dropout and given.get("p") and given.get("training"):
            self.found.append(result)
        return result


def check_dropout(model: nn.Module, table: StyleTable, seq_len: int) -> None:
    """Refuse a user's region that returns what a dropout gives, under sequence parallelism: its ranks draw other masks, for
    summands of the same tokens. A forward on the meta device tells; where that fails, nothing is known.
    """
    dropped, model = _Dropped(), copy_to_try(model)
    regions: list[str] = []

    def look(name: str) -> Any:
        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if any(first is other for other in dropped.found):
                regions.append(name)

        return after

    with ExitStack() as hooks, suppress(Exception), torch.no_grad(), dropped:
        for name, module in model.named_modules():
            if style_of(name, table) == "region":
                hooks.enter_context(module.register_forward_hook(look(name)))
        model(torch.zeros(1, seq_len, dtype=torch.int64, device="meta"))
    if regions:
        raise ValueError(
            f"parallel.sequence_parallel=true: the module {regions[0]!r} of style 'region' ends in a dropout, and ranks draw "
            "other masks for their summands of the same tokens. Set sequence_parallel=false, apply the dropout outside of the "
            "region, or style the module's linears 'colwise' and 'rowwise' without 'region'."
        )


def check_between(model: nn.Module, table: StyleTable, seq_len: int) -> None:
    """Refuse, without sequence parallelism, a whole parameter that a user's module reads between linears that are cut outside of
    a region: each rank has a part of its gradient, which only regions sum. A forward on the meta device tells; where that fails,
    nothing is known.
    """
    model = copy_to_try(model)
    styles = {name: style_of(name, table) for name, _ in model.named_modules() if name}
    regions = tuple(f"{name}." for name, style in styles.items() if style == "region")
    inputs: dict[str, Tensor] = {}

    def begin(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_().clone()  # what is read before is of no concern

    def end(name: str) -> Any:
        def before(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs[name] = args[0]

        return before

    with suppress(Exception):
        for name, module in model.named_modules():
            if styles.get(name) in ("colwise", "heads", "kv_heads") and not name.startswith(regions):
                module.register_forward_hook(begin)
            elif styles.get(name) == "rowwise" and not name.startswith(regions):
                module.register_forward_pre_hook(end(name))
        model(torch.zeros(1, seq_len, dtype=torch.int64, device="meta"))
    cut = [f"{name}." for name, style in styles.items() if style in ("heads_norm", "kv_heads_norm")]
    whole = [(name, p) for name, p in model.named_parameters() if not name.startswith(tuple(cut))]
    names = {id(parameter): name for name, parameter in whole}
    for rowwise, given in inputs.items():
        read = [names[id(leaf)] for leaf in _leaves_of(given) if id(leaf) in names]
        if read:
            raise ValueError(
                f"parallel.sequence_parallel=false: {read[0]!r} is whole on every rank and is read between linears that are cut, "
                f"before {rowwise!r} (rowwise): a rank would have a part of its gradient, and no region is there to sum it. Give "
                "the module around them the style 'region', or set parallel.sequence_parallel=true."
            )


def _leaves_of(tensor: Tensor) -> list[Tensor]:
    """The tensors without history that a tensor was computed from and whose gradients autograd keeps."""
    todo, seen, leaves = [tensor.grad_fn], set[Any](), list[Tensor]()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        todo += [following for following, _ in node.next_functions]
    return leaves
