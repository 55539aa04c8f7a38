"""The process groups that a plan runs on: their ranks' first meeting, and the check that they are the plan's."""

import torch
import torch.distributed as dist


def connect(*groups: dist.ProcessGroup | None, device: torch.device | str) -> None:
    """Let the ranks of each group meet once. Call it on every rank before the first attention, groups in one order.

    NCCL makes a group's communicator at its first use, and waits there for all ranks. With packed documents some ranks may
    have nothing to exchange: they would not come, and the others would wait for them in a later collective, for ever.

    Args:
        groups: ``group``, or USP's ``ring_group`` and ``ulysses_group``; None is skipped.
        device: Where the attention runs.
    """
    for group in groups:
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def check_group(group: dist.ProcessGroup | None, size: int, rank: int, name: str) -> None:
    """Refuse a group of another size, or one in which this rank has another number.

    Raises:
        ValueError: Before any collective; the same on every rank if the group is wrong on every rank.
    """
    if group is None:
        if size > 1:
            raise ValueError(
                f"{name} is missing, and the plan is for {size} ranks. Pass the context-parallel process group, e.g. "
                "mesh['cp'].get_group()."
            )
        return
    if group.size() != size or group.rank() != rank:
        raise ValueError(
            f"{name} has {group.size()} ranks and this process is number {group.rank()} in it, but the plan is for "
            f"rank {rank} of {size}. Make the plan with size=group.size(), rank=group.rank() (under USP: "
            "those of the whole context-parallel group, whose consecutive ranks form a Ulysses group)."
        )
