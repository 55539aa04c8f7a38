"""torch.compile of each repeated block, in place: compile time does not grow with depth, and FSDP's hooks stay eager.

Also what stands in the way of a step as one CUDA graph (`titan_train.train.graphs`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from titan_mesh import Layout
from torch import nn
from torch._functorch import config as functorch_config

from titan_train.config import ActivationsConfig, CompileConfig, Config
from titan_train.models.common.moe.balance import moe_layers
from titan_train.task import task_name
from titan_train.values import did_you_mean

_SPLIT_BACKENDS = ("inductor", "aot_eager")  # those of `titan_pipeline.runtime.split_backend`


def check_backend(backend: str) -> None:
    """Refuse a backend that torch.compile does not know.

    Raises:
        ValueError: It is neither torch's own nor an entry point of an installed package.
    """
    if backend == "inductor":  # the others are found by importing what compiles, which takes seconds
        return
    from torch._dynamo import list_backends

    known = list_backends(exclude_tags=())
    if backend not in known:
        usual = [name for name in ("inductor", "aot_eager", "eager", "cudagraphs") if name in known]
        raise ValueError(
            f"compile.backend={backend!r}: torch.compile has no such backend. {did_you_mean(backend, known)}The usual ones are "
            f"{', '.join(usual)}; a package adds one by an entry point of the group torch_dynamo_backends."
        )


def check_cudagraphs(config: Config, layout: Layout, model: nn.Module) -> None:
    """Refuse ``compile.cudagraphs`` where the step could not be captured, or its replay would leave something out.

    Args:
        config: The run's configuration.
        layout: The degrees.
        model: The whole model.

    Raises:
        ValueError: Names what stands in the way.
    """
    if not config.compile.cudagraphs:
        return
    activations = config.activations
    obstacles = (
        (layout.num_ranks > 1, f"{layout.num_ranks} ranks", "the collectives of several ranks are not captured"),
        (config.launch.device == "cpu", "launch.device='cpu'", "only CUDA devices have graphs"),
        (
            config.parallel.offload != "none",
            f"parallel.offload={config.parallel.offload!r}",
            "the host waits for copies",
        ),
        (activations.offload, "activations.offload=true", "the host waits for copies"),
        (
            activations.checkpoint not in ("none", "budget"),
            f"activations.checkpoint={activations.checkpoint!r}",
            "recomputation reads the random state, which a capture forbids (checkpoint='budget' does not)",
        ),
        (activations.mlp_tiles > 1, f"activations.mlp_tiles={activations.mlp_tiles}", "tiles are recomputed"),
        (
            any(moe_layers(model)),
            f"model.name={config.model.name!r}",
            "the shapes of experts' products depend on routing",
        ),
        (task_name(config) != "text", f"the task {task_name(config)!r}", "its batches vary in more than values"),
        (config.metrics.activations_every > 0, "metrics.activations_every", "a graph has no activations to look at"),
        (config.kernels.cross_entropy == "liger", "kernels.cross_entropy='liger'", "it waits for the device"),
    )
    for there, what, why in obstacles:
        if there:
            raise ValueError(
                f"compile.cudagraphs=true and {what}: {why}. Set compile.cudagraphs=false, or change the latter."
            )


def compile_blocks(
    blocks: Sequence[nn.Module],
    config: CompileConfig,
    activations: ActivationsConfig,
    *,
    whole_graph: bool,
    split_backward: bool = False,
    inductor_options: Mapping[str, Any] | None = None,
) -> None:
    """Compile every block.

    Args:
        blocks: The model's repeated blocks.
        config: Backend and mode.
        activations: For the memory budget, which is torch.compile's to keep.
        whole_graph: Fail where a block cannot be captured as one graph, rather than splitting it. Blocks with
            communication that torch does not trace (context parallelism's exchange, the ring of asynchronous tensor
            parallelism) or that depends on the data (expert parallelism's routing) cannot.
        split_backward: Compile each backward as two halves, for a pipeline schedule that runs weight gradients later. A
            backend whose backward cannot be reached keeps it whole; the pipeline reports that as not deferred.
        inductor_options: Settings for these graphs, on top of the mode's.
    """
    if activations.checkpoint == "budget":
        functorch_config.activation_memory_budget = activations.budget  # read when a block is compiled
    inductor = dict(inductor_options or {})
    if inductor:  # torch.compile takes a mode or options, and a mode is a name for some
        inductor = {**_mode_options(config.mode), **inductor}
    options: dict[str, Any] = {"backend": config.backend, "fullgraph": whole_graph}
    if split_backward and config.backend in _SPLIT_BACKENDS:
        from titan_pipeline.runtime import split_backend  # takes a while, and `check` reads this module

        options["backend"] = split_backend(config.backend, options=inductor or _mode_options(config.mode))
    elif inductor:
        options["options"] = inductor
    elif config.mode != "default":
        options["mode"] = config.mode
    for block in blocks:
        block.compile(**options)


def _mode_options(mode: str) -> dict[str, Any]:
    return {} if mode == "default" else torch._inductor.list_mode_options(mode)
