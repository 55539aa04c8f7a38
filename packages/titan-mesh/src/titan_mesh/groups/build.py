"""The door to torch: `build` imports it, nothing before does."""

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_mesh.groups.mesh import Mesh
    from titan_mesh.layout.layout import Layout


def build(
    layout: "Layout",
    device_type: str = "cpu",
    *,
    timeout: timedelta | None = None,
    backend: str | Mapping[str, str] | None = None,
    pg_options: Mapping[str, Any] | None = None,
    agree_within: timedelta = timedelta(seconds=8),
) -> "Mesh":
    """Make the process groups of ``layout`` and the `torch.distributed.DeviceMesh` objects over them.

    Collective: every rank calls it with the same arguments. Ranks first compare their layouts through the default
    group's store, so that ranks with different specs all get an error instead of a hang. On CUDA, select the device
    before (``torch.cuda.set_device``).

    If ``torch.distributed`` is not initialised, this does it: from the launcher's environment (``RANK``,
    ``WORLD_SIZE``, …), where processes may start at different times and wait ``timeout`` for each other (None: torch's,
    10 or 30 minutes), or, without one, for a world of a single process. `Mesh.close` then undoes it.

    Args:
        layout: Degrees laid over exactly the ranks of the default group.
        device_type: ``"cpu"``, ``"cuda"``, …: the device type of the meshes.
        timeout: Time limit of a collective, for every group. None: the default group's.
        backend: Backend of the new groups: one for all, or by axis or flatten name (``{"pp": "gloo"}``). None: the
            default group's.
        pg_options: Backend options by axis or flatten name, such as ``ProcessGroupNCCL.Options``. Their timeout is
            replaced by ``timeout``.
        agree_within: How long ranks of the default group wait for each other before they compare layouts.

    Raises:
        ValueError: An argument names no axis of the layout; ranks were given different layouts; or the layout has
            fewer or more ranks than the world. The last two on every rank.
        RuntimeError: A rank did not arrive within ``agree_within``.
    """
    from titan_mesh.groups.mesh import build_mesh

    return build_mesh(layout, device_type, timeout, backend, pg_options, agree_within)
