"""torch.compile of each repeated block, in place: compile time does not grow with depth, and FSDP's hooks stay eager.

Also what stands in the way of a step as one CUDA graph (`titan_train.train.graphs`).
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from titan_mesh import Layout
from torch import fx, nn
from torch._functorch import config as functorch_config

from titan_train.config import ActivationsConfig, CompileConfig, Config, ParallelConfig
from titan_train.models.common.delta import has_states
from titan_train.models.common.moe.routed import expert_stacks
from titan_train.models.registry import is_shipped
from titan_train.models.traits import traits_of
from titan_train.parallel.activations.recompute import keep_costly, recomputed_modules
from titan_train.task import task_name
from titan_train.values import did_you_mean

_SPLIT_BACKENDS = ("inductor", "aot_eager")  # those of `titan_pipeline.runtime.split_backend`
_VERSIONS = 64  # torch compiles the blocks of all models of a process as versions of one function, 8 of them by default


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


def check_recorded(config: Config) -> None:
    """Refuse to look into float8 layers of compiled blocks.

    Raises:
        ValueError: The three settings are on together.
    """
    every = config.metrics.activations_every
    if config.compile.enabled and every and config.float8.recipe != "none":
        raise ValueError(
            f"metrics.activations_every={every} with float8.recipe={config.float8.recipe!r} and compile.enabled=true: what "
            "float8 layers lose is judged on the host, which compiled blocks cannot wait for. Set metrics.activations_every=0, "
            "or compile.enabled=false."
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
            any(True for _ in expert_stacks(model)),
            f"model.name={config.model.name!r}",
            "the shapes of experts' products depend on routing",
        ),
        (
            getattr(model, "has_state", False) is True and config.data.document_mask,
            f"model.name={config.model.name!r} with data.document_mask",
            "the host reads where documents end, for layers with a state",
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


def has_whole_graphs(part: nn.Module, parallel: ParallelConfig) -> bool:
    """Whether each block of ``part`` is known to be one graph: a model of ours, or of a planned family of transformers.

    A block of anybody else's may hold what torch does not capture, such as an `nn.GRU`. States are carried outside of a graph,
    and FSDP gathers what ``keep_fp32`` names between graphs.
    """
    known = is_shipped(part) or traits_of(part).plan is not None
    return known and not has_states(part) and not parallel.keep_fp32


def compile_blocks(
    blocks: Sequence[nn.Module],
    config: CompileConfig,
    activations: ActivationsConfig,
    *,
    whole_graph: bool,
    split_backward: bool = False,
    inductor_options: Mapping[str, Any] | None = None,
) -> None:
    """Compile every block, with the recomputation that is applied inside it, before or after this call.

    Args:
        blocks: The model's repeated blocks.
        config: Backend and mode.
        activations: For the memory budget, which is torch.compile's to keep.
        whole_graph: Fail where a block cannot be captured as one graph, rather than splitting it.
        split_backward: Compile each backward as two halves, for a pipeline schedule that runs weight gradients later. A
            backend whose backward cannot be reached keeps it whole; the pipeline reports that as not deferred.
        inductor_options: Settings for these graphs, on top of the mode's.
    """
    options = _options(config, activations, split_backward=split_backward, inductor_options=inductor_options)
    for block in blocks:
        block.compile(**options, fullgraph=whole_graph)


def compile_pieces(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    config: CompileConfig,
    activations: ActivationsConfig,
    *,
    split_backward: bool = False,
    inductor_options: Mapping[str, Any] | None = None,
) -> ActivationsConfig:
    """Compile blocks that cannot be captured as one graph, in pieces; before activation checkpointing is applied.

    Such are blocks with communication that torch does not trace (context parallelism's exchange, the ring of asynchronous
    tensor parallelism) or that depends on the data (expert parallelism's routing), and perhaps a user's own. Compiled from
    outside, a region that is recomputed and cannot be captured runs in Python as a whole, without a word. So it is compiled
    from inside: a block that is recomputed runs its compiled pieces twice, and the selective policy is applied to each piece,
    by the compiler. What stands between the pieces keeps what it needs, which is what the policy would keep: attention and
    exchanges.

    Args:
        model: The part of the model that holds the blocks, for ``activations.patterns``.
        blocks: Its repeated blocks.
        config: Backend and mode.
        activations: What is recomputed.
        split_backward: As in `compile_blocks`.
        inductor_options: As in `compile_blocks`.

    Returns:
        What is left to be applied of ``activations``.
    """
    options = _options(config, activations, split_backward=split_backward, inductor_options=inductor_options)
    if activations.checkpoint == "selective":
        options = {"backend": _recompute_each_piece(options, activations.matmul_every)}
        activations = replace(activations, checkpoint="none")
    recomputed = recomputed_modules(model, list(blocks), activations)
    for module in recomputed:
        module.forward = _compiled_from_python(module.forward, options)
    for block in blocks:
        if block not in recomputed:
            block.compile(**options)
    return activations


def _compiled_from_python(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """``function``, compiled where Python calls it; inside a graph that is being captured it is a part like any other."""
    compiled = torch.compile(function, **options)

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (function if torch.compiler.is_compiling() else compiled)(*args, **kwargs)

    setattr(forward, "compiled_by", options["backend"])  # noqa: B010, for `titan_pipeline.runtime.split_backend`
    return forward


def _recompute_each_piece(options: Mapping[str, Any], matmul_every: int) -> Callable[..., Any]:
    """A backend that compiles each graph as ``options`` say, as a region of its own that keeps costly results."""
    backend, context_fn = options["backend"], functools.partial(keep_costly, matmul_every)

    def compile_piece(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        _make_region(graph, context_fn)
        if not isinstance(backend, str):
            return backend(graph, inputs)
        if backend == "inductor":
            patches = {**_mode_options(options.get("mode", "default")), **options.get("options", {})}
            return cast("Callable[..., Any]", torch._inductor.compile(graph, inputs, options=patches))
        from torch._dynamo import lookup_backend  # as above

        return lookup_backend(backend)(graph, inputs)

    if not isinstance(backend, str):
        vars(compile_piece).update(vars(backend))  # what titan-pipeline knows its backend by
    return compile_piece


def _make_region(graph: fx.GraphModule, context_fn: Callable[[], Any]) -> None:
    """Put all of a graph into one call of the operator that torch.compile turns ``torch.utils.checkpoint`` into; in place."""
    inner = fx.Graph()
    inner.output(inner.graph_copy(graph.graph, {}))
    body = fx.GraphModule(graph, inner)
    body.meta["_checkpoint_context_fn"] = context_fn
    outer = graph.graph
    given = outer.find_nodes(op="placeholder")
    (output,) = outer.find_nodes(op="output")
    results = len(output.args[0])
    for node in reversed(outer.nodes):
        if node.op != "placeholder":
            outer.erase_node(node)
    graph.add_module("region", body)
    region = outer.call_function(
        torch.ops.higher_order.tag_activation_checkpoint, (outer.get_attr("region"), *given), {"use_reentrant": False}
    )
    outer.output(tuple(outer.call_function(operator.getitem, (region, number)) for number in range(results)))
    graph.recompile()


def _options(
    config: CompileConfig,
    activations: ActivationsConfig,
    *,
    split_backward: bool,
    inductor_options: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Arguments of torch.compile."""
    budget = activations.budget if activations.checkpoint == "budget" else 1.0  # torch's own
    functorch_config.activation_memory_budget = budget  # read when a block is compiled
    dynamo = torch._dynamo.config  # imported when it is read
    dynamo.recompile_limit = max(dynamo.recompile_limit, _VERSIONS)
    inductor = dict(inductor_options or {})
    if inductor:  # torch.compile takes a mode or options, and a mode is a name for some
        inductor = {**_mode_options(config.mode), **inductor}
    options: dict[str, Any] = {"backend": config.backend}
    if split_backward and config.backend in _SPLIT_BACKENDS:
        from titan_pipeline.runtime import split_backend  # takes a while, and `check` reads this module

        options["backend"] = split_backend(config.backend, options=inductor or _mode_options(config.mode))
    elif inductor:
        options["options"] = inductor
    elif config.mode != "default":
        options["mode"] = config.mode
    return options


def _mode_options(mode: str) -> dict[str, Any]:
    return {} if mode == "default" else torch._inductor.list_mode_options(mode)
