"""Checks that a process group is the one the plan was made for."""

import torch.distributed as dist


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
