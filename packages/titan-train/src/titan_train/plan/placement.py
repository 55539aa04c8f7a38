"""Which groups of ranks would be cut by a node's border, when each node holds the same number of consecutive ranks."""

from titan_mesh import Layout


def check_placement(layout: Layout, per_node: int) -> list[str]:
    """Hold the groups that exchange activations in every layer to one node.

    Ranks are numbered along the nodes and the mesh's innermost axis is tp, then cp: their groups are neighbours, and
    stay on a node if the node holds whole ones. Other axes exchange less and may cross.

    Args:
        layout: The degrees over all ranks.
        per_node: Ranks on each node.

    Returns:
        One line for each axis that crosses nodes though it would better not.

    Raises:
        ValueError: A tensor-parallel group would cross.
    """
    if _crossing(layout, "tp", per_node):
        tp = layout.size("tp")
        near = [n for n in (per_node // tp * tp, (per_node // tp + 1) * tp) if n]
        raise ValueError(
            f"parallel.tp={tp} ranks exchange in every layer and must share a node, but launch.nproc={per_node} ranks of a "
            f"node are not whole groups of {tp}. Use launch.nproc={near[0]}, or a tp that divides {per_node}."
        )
    crossing = _crossing(layout, "cp", per_node)
    if not crossing:
        return []
    return [f"parallel.cp={layout.size('cp')} ranks share sequences across nodes, such as ranks {crossing[0]}: slower"]


def _crossing(layout: Layout, axis: str, per_node: int) -> list[tuple[int, ...]]:
    return [group for group in layout.groups(axis) if len({rank // per_node for rank in group}) > 1]
