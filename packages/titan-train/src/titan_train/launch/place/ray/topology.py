"""Which nodes are close to each other, by Ray's node labels. Pure: labels in, choices and an order out.

``launch.ray.topology`` names labels from the outermost to the innermost, such as ``rack, nvlink_domain``; each node has its
own values (``ray start --labels rack=r3,nvlink_domain=d12``). A job is placed in the smallest domain that holds all of it,
then in the fewest domains; its nodes are numbered along the domains, so that the innermost axes of the mesh cross the
fewest borders.
"""

import ipaddress
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Labels = Mapping[str, str]
_MISSING = ""  # nodes without the label come first


def selectors(
    topology: Sequence[str], nodes: Collection[Labels], count: int, held: Collection[Labels] = ()
) -> list[dict[str, str]]:
    """What to ask Ray for, tightest first: label selectors for all nodes of a job. The last one takes any node.

    Args:
        topology: Label names, outermost first.
        nodes: Labels of every node that could hold a part of the job, if it is free.
        count: Nodes that the job needs.
        held: Labels of the nodes that it has: their domains come first.

    Returns:
        At most four selectors per label: the domains that hold the whole job, the innermost and smallest first; then the
        fewest domains that hold it together.
    """
    whole: list[dict[str, str]] = []
    several: list[dict[str, str]] = []
    for label in reversed(topology):
        sizes = Counter(labels[label] for labels in nodes if label in labels)
        near = {labels[label] for labels in held if label in labels}
        if near and sum(sizes[name] for name in near) >= count:
            whole.append({label: _one_of(near)})
        smallest = sorted((size, name) for name, size in sizes.items() if size >= count)
        whole += [{label: name} for _, name in smallest[:3]]
        if not smallest and sum(sizes.values()) >= count:
            several = [{label: _one_of(_fewest(sizes, count))}]  # the outermost label's stay
    return [*whole, *several, {}]


def order(topology: Sequence[str], labels: Labels, address: str, node_id: str) -> Any:
    """The key that nodes are sorted by: their domains from the outermost to the innermost, then their address."""
    return [labels.get(label, _MISSING) for label in topology], ipaddress.ip_address(address).packed, node_id


def _one_of(names: Collection[str]) -> str:
    return f"in({','.join(sorted(names))})"


def _fewest(sizes: Mapping[str, int], count: int) -> list[str]:
    chosen: list[str] = []
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if count <= 0:
            break
        chosen.append(name)
        count -= size
    return chosen
