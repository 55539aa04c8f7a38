"""Parameters that several stages share, such as an embedding tied to the output layer.

Stages on different ranks hold copies. At the end of a step the copies' gradients are summed, in the order of the
stages, by the rank of the first, and the sum goes back to all: equal copies with equal gradients stay equal under any
optimizer that treats them alike. Stages on one rank may hold one `torch.nn.Parameter` under two names, as a model that
was cut in place does at both ends of a V. Autograd has then summed its gradient already, so it counts once: ties on a
rank are found by identity. Gradients of earlier steps, which every copy holds in full, count once as well: before a step all
copies but the first set theirs to zero. Frozen copies get no gradient; all are frozen or none.

Data-parallel gradients are summed after their reduction; of FSDP's, each rank sums the shard it holds, so the copies
must be sharded alike.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from titan_pipeline.runtime.transport.base import Transport
from titan_pipeline.runtime.transport.messages import Key

_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What DistributedDataParallel, compilation and recomputation add to the names of what they wrap."""


@dataclass(frozen=True, slots=True)
class TiedWeight:
    """One parameter of the model that several stages hold.

    Give every rank the same list: ``Executor(…, tied=[TiedWeight({0: "wte.weight", 3: "lm_head.weight"})])``. Each
    stage may hold a copy, and stages on one rank may hold the same parameter object. `find_tied_weights` makes the list
    from the stages of a model that was built whole.
    """

    names: Mapping[int, str]
    """Stage → name of the parameter in that stage's module, wrapped or not."""

    def __post_init__(self) -> None:
        if len(self.names) < 2:
            raise ValueError(f"names={dict(self.names)}: a tied weight has at least two stages. Name each of them.")


def find_tied_weights(modules: Sequence[nn.Module]) -> list[TiedWeight]:
    """The parameters that several stages of a model hold as one object.

    Call it before parameters are copied, moved or wrapped, which ends the identity; the names hold for wrapped modules too.

    Args:
        modules: All stages of the model, in order.
    """
    names: dict[int, dict[int, str]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), {})[stage] = name
    return [TiedWeight(found) for found in names.values() if len(found) > 1]


def check_ties(tied: Sequence[TiedWeight], stages: Mapping[int, Any], num_stages: int) -> None:
    """Raise ValueError if a tied weight names what does not exist, or what cannot be reduced once."""
    for weight in tied:
        outside = [s for s in weight.names if not 0 <= s < num_stages]
        if outside:
            raise ValueError(
                f"the tied weight {dict(weight.names)} names stages {outside}, but the schedule has stages 0 to "
                f"{num_stages - 1}. Use the stage numbers of this schedule."
            )
        _check_frozen(
            weight, {s: tied_parameter(weight, s, stages[s].module).requires_grad for s in weight.names if s in stages}
        )
    _check_wrapped(stages)


def tied_parameter(weight: TiedWeight, stage: int, module: nn.Module) -> Tensor:
    """The parameter that a tied weight names in a stage, under the name of before or after the module was wrapped.

    Raises:
        ValueError: If there is none, or several have the name but for the wrappers' parts of it.
    """
    name = weight.names[stage]
    with suppress(AttributeError):
        return module.get_parameter(name)
    named = module.named_parameters(remove_duplicate=False)
    found = {id(p): p for n, p in named if _without_wrappers(n) == _without_wrappers(name)}
    if len(found) != 1:
        raise ValueError(
            f"stage {stage} has {'no' if not found else 'more than one'} parameter {name!r}, which a tied weight names. Give "
            "the name as in module.named_parameters()."
        )
    return next(iter(found.values()))


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _check_frozen(weight: TiedWeight, trained: Mapping[int, bool]) -> None:
    """Raise if some of these stages' copies are frozen and others are not."""
    frozen = [s for s in sorted(trained) if not trained[s]]
    if 0 < len(frozen) < len(trained):
        others = [s for s in sorted(trained) if trained[s]]
        raise ValueError(
            f"the copies of the tied weight {dict(weight.names)} in stages {frozen} are frozen, those of stages {others} are "
            "not: they would not stay equal. Call requires_grad_ with the same value on all of them."
        )


def _check_wrapped(stages: Mapping[int, Any]) -> None:
    """DistributedDataParallel would average a parameter of two stages twice."""
    wrapped = {s: stages[s].module for s in sorted(stages) if _is_ddp(stages[s])}
    owner: dict[int, int] = {}
    for stage, module in wrapped.items():
        for name, parameter in module.named_parameters():
            first = owner.setdefault(id(parameter), stage)
            if first != stage:
                raise ValueError(
                    f"stages {first} and {stage} are wrapped by DistributedDataParallel and share the parameter "
                    f"{name!r}: both would reduce its gradient. Give each stage a copy, and declare a TiedWeight."
                )


def _is_ddp(stage: Any) -> bool:
    return isinstance(getattr(stage, "module", None), DistributedDataParallel)


def keep_one(tied: Sequence[TiedWeight], stages: Mapping[int, Any]) -> None:
    """Before a training step: let the first copy alone carry the gradient of the steps before."""
    for weight in tied:
        first, *others = sorted(weight.names)
        held = {s: tied_parameter(weight, s, stages[s].module) for s in weight.names if s in stages}
        for s in others:
            if s in held and held[s] is not held.get(first):
                parameter = held[s]
                if parameter.requires_grad and parameter.grad is not None:
                    parameter.grad.zero_()


def reduce_tied(
    tied: Sequence[TiedWeight],
    stages: Mapping[int, Any],
    placement: Sequence[int],
    transport: Transport,
    receive: Callable[[int, Key], Any],
) -> None:
    """Give every copy the sum of all copies' gradients.

    A stage that shares its parameter with an earlier one of its rank, or whose parameter is frozen, sends and receives None:
    the number of messages depends on the placement alone, which all ranks know. ``receive`` is the step's.

    Raises:
        ValueError: If some copies are frozen and others are not.
    """
    for index, weight in enumerate(tied):
        first, *others = sorted(weight.names)
        home = placement[first]
        grads = _distinct_gradients(weight, stages)
        for s in others:
            if s in grads and placement[s] != home:
                transport.send(home, (2, s, index), (grads[s],))
        if first in stages:
            _sum_at_home(weight, grads, placement, index, transport, receive)
        for s in others:
            if s in grads and placement[s] != home:
                (total,), mine = receive(home, (3, s, index)), grads[s]
                if total is not None and mine is not None:
                    mine.copy_(total)


def _sum_at_home(
    weight: TiedWeight,
    grads: Mapping[int, Tensor | None],
    placement: Sequence[int],
    index: int,
    transport: Transport,
    receive: Callable[[int, Key], Any],
) -> None:
    """On the rank of the first stage: add the gradients in the order of the stages, and hand the sum back."""
    stages = sorted(weight.names)
    home = placement[stages[0]]
    parts: dict[int, Tensor | None] = {
        s: grads[s] if placement[s] == home else receive(placement[s], (2, s, index))[0] for s in stages
    }
    first_of_rank = {placement[s]: s for s in reversed(stages)}
    _check_frozen(weight, {s: parts[s] is not None for s in first_of_rank.values()})
    total: Tensor | None = None
    for grad in parts.values():
        if grad is not None:
            total = grad.clone() if total is None else total.add_(grad.to(total.device))
    for s, grad in parts.items():
        if placement[s] != home:
            transport.send(placement[s], (3, s, index), (None if total is None or grad is None else total.clone(),))
        elif total is not None and grad is not None:
            grad.copy_(total)


def tied_messages(
    tied: Sequence[TiedWeight], placement: Sequence[int], rank: int
) -> tuple[dict[int, list[Key]], list[int]]:
    """What `reduce_tied` receives on a rank, by source in order, and the targets of what it sends."""
    expected: dict[int, list[Key]] = {}
    sends: list[int] = []
    for index, weight in enumerate(tied):
        owner, *others = sorted(weight.names)
        for s in others:
            here, there = placement[s], placement[owner]
            if here == there:
                continue
            if rank == there:
                expected.setdefault(here, []).append((2, s, index))
                sends.append(here)
            elif rank == here:
                expected.setdefault(there, []).append((3, s, index))
                sends.append(there)
    return expected, sends


def _distinct_gradients(weight: TiedWeight, stages: Mapping[int, Any]) -> dict[int, Tensor | None]:
    """The gradient of each stage held here; None where the parameter is frozen, or an earlier stage holds the same one.

    Zeros stand for a gradient that was never computed; a sharded gradient is its local part.
    """
    grads: dict[int, Tensor | None] = {}
    seen: set[int] = set()
    for s in sorted(weight.names):
        if s not in stages:
            continue
        parameter = tied_parameter(weight, s, stages[s].module)
        if id(parameter) in seen or not parameter.requires_grad:
            grads[s] = None
            continue
        seen.add(id(parameter))
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        grads[s] = grad.to_local() if isinstance(grad, DTensor) else grad
    return grads
