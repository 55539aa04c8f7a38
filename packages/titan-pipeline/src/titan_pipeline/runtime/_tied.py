"""Parameters that several stages share, such as an embedding tied to the output layer.

Each stage holds its own copy. At the end of a step the copies' gradients are summed, in the order of the stages, by the
rank of the first, and the sum goes back to all: equal copies with equal gradients stay equal under any optimizer that
treats them alike. Data-parallel gradients are summed after their reduction; of FSDP's, each rank sums the shard it
holds, so the copies must be sharded alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_pipeline.runtime._messages import Failure, Key, PipelineAborted
from titan_pipeline.runtime._transport import Transport


@dataclass(frozen=True, slots=True)
class TiedWeight:
    """One parameter under several names."""

    names: Mapping[int, str]
    """Stage → name of the parameter in that stage's module."""

    def __post_init__(self) -> None:
        if len(self.names) < 2:
            raise ValueError(f"names={dict(self.names)}: a tied weight lives on at least two stages.")


def reduce_tied(
    tied: Sequence[TiedWeight], stages: Mapping[int, Any], placement: Sequence[int], transport: Transport
) -> None:
    """Give every copy the sum of all copies' gradients."""
    for index, weight in enumerate(tied):
        order = sorted(weight.names)
        owner = order[0]
        for s in order[1:]:
            if s in stages and placement[s] != placement[owner]:
                transport.send(placement[owner], (2, s, index), (_gradient(stages[s], weight.names[s]),))
        if owner in stages:
            total = _gradient(stages[owner], weight.names[owner]).clone()
            for s in order[1:]:
                local = placement[s] == placement[owner]
                total += (
                    _gradient(stages[s], weight.names[s])
                    if local
                    else _receive(transport, placement[s], (2, s, index)).to(total.device)
                )
            for s in order:
                if placement[s] == placement[owner]:
                    _gradient(stages[s], weight.names[s]).copy_(total)
                else:
                    transport.send(placement[s], (3, s, index), (total.clone(),))
        for s in order[1:]:
            if s in stages and placement[s] != placement[owner]:
                _gradient(stages[s], weight.names[s]).copy_(_receive(transport, placement[owner], (3, s, index)))


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


def _gradient(stage: Any, name: str) -> Tensor:
    """The gradient this rank holds, zeros if there was none; a sharded one is its local part."""
    parameter = cast(Tensor, stage.module.get_parameter(name))
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _receive(transport: Transport, source: int, key: Key) -> Tensor:
    got = transport.receive(source, key)
    if isinstance(got, Failure):
        raise PipelineAborted(got)
    assert got[0] is not None
    return got[0]
