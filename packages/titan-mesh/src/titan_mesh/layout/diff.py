"""What changes for each rank between two layouts: what a restart with other degrees has to move."""

from collections.abc import Mapping
from dataclasses import dataclass

from titan_mesh.layout.ranks import RankLayout


@dataclass(frozen=True)
class LayoutDiff:
    """Ranks that change, by name. Falsy when nothing does."""

    regrouped: Mapping[str, tuple[int, ...]]
    """For each axis and flatten, the ranks whose group has other members; ranks in one world only count as changed."""
    moved: Mapping[str, tuple[int, ...]]
    """For each axis and flatten, ranks of both worlds whose index changed: another stage or shard is theirs."""
    num_ranks: int
    """Ranks in the larger world."""

    def __bool__(self) -> bool:
        return any(self.regrouped.values()) or any(self.moved.values())

    def __str__(self) -> str:
        if not self:
            return "no rank changes its groups or its place"
        lines = [f"{'axis':<14}{'regrouped':>10}{'moved':>8}  of {self.num_ranks} ranks"]
        for name, ranks in self.regrouped.items():
            if ranks or self.moved[name]:
                lines.append(f"{name:<14}{len(ranks):>10}{len(self.moved[name]):>8}")
        return "\n".join(lines)


def compare(before: RankLayout, after: RankLayout) -> LayoutDiff:
    """Compare two layouts name by name; a name only one of them has counts as groups of one in the other."""
    names = list(dict.fromkeys((*before.names, *after.names)))
    worlds = range(max(before.num_ranks, after.num_ranks))
    regrouped: dict[str, tuple[int, ...]] = {}
    moved: dict[str, tuple[int, ...]] = {}
    for name in names:
        old, new = _company(before, name), _company(after, name)
        regrouped[name] = tuple(rank for rank in worlds if old.get(rank) != new.get(rank))
        moved[name] = tuple(
            rank for rank in regrouped[name] if rank in old and rank in new and _index(old, rank) != _index(new, rank)
        )
    return LayoutDiff(regrouped, moved, len(worlds))


def _company(layout: RankLayout, name: str) -> dict[int, tuple[int, ...]]:
    if name not in layout.names:
        return {rank: (rank,) for rank in range(layout.num_ranks)}
    return {rank: group for group in layout.groups(name) for rank in group}


def _index(company: Mapping[int, tuple[int, ...]], rank: int) -> int:
    return company[rank].index(rank)
