"""Compiled regions whose weight gradients wait.

Problem: the backward of a compiled region is one piece of code for all gradients.

Idea: it is made from one graph of operations, so it can be compiled as two. The first half holds what the activations'
gradients need, and what the backward changes beside them, such as a buffer that counts; the second holds what only the
parameters' gradients need. What the second takes from the first is kept between them. Nothing is computed twice. Outside of
a split backward the two run one after the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config

from titan_pipeline.runtime.weight_grad.functions import WEIGHT_PASS

_Compiled = Callable[[list[Any]], Sequence[Any]]

_MARK = "titan_pipeline_splits"
"""Attribute of a backend that `split_backend` made."""


def split_backend(
    backend: str = "inductor", *, options: Mapping[str, Any] | None = None
) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """A backend for ``torch.compile`` whose backward has two halves, for schedules that split the backward.

    ``torch.compile(block, backend=split_backend())``, or ``block.compile(backend=split_backend())``. Values and gradients are
    those of the backend. In stages that do not split, and outside of stages, it behaves like the backend.

    Args:
        backend: ``"inductor"``, or ``"aot_eager"``, which generates no code, for tests.
        options: Inductor's settings, as in ``torch.compile(options=...)``, which takes none beside such a backend; those of a
            mode are ``torch._inductor.list_mode_options(mode)``.

    Raises:
        ValueError: The backend is another one.
    """
    if backend not in ("inductor", "aot_eager"):
        raise ValueError(f"split_backend({backend!r}): its backward cannot be reached. Use 'inductor' or 'aot_eager'.")

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        weights = {i for i, x in enumerate(inputs) if isinstance(x, nn.Parameter) and x.requires_grad}
        # Donated buffers are overwritten by the first half, and what the cache keeps is one piece.
        with cast(Any, functorch_config).patch(donated_buffer=False, enable_autograd_cache=False):
            if backend == "inductor":
                return _inductor(graph, inputs, weights, options)
            return _aot_eager(graph, inputs, weights)

    setattr(compile_graph, _MARK, True)
    return compile_graph


def asks_what_is_wanted(compiled: nn.Module) -> bool:
    """Whether a compiled module's backend comes from `split_backend`. False also where torch does not show its backend."""
    if (backend := compiled_forward(compiled)) is not None:
        return hasattr(backend, _MARK)
    if hasattr(compiled, "dynamo_ctx"):  # torch.compile(module)
        seen: Any = getattr(compiled.dynamo_ctx, "callback", None)
    else:  # module.compile()
        call: Any = getattr(compiled, "_compiled_call_impl", None)
        cells: Sequence[Any] = getattr(call, "__closure__", None) or ()
        names: Sequence[str] = call.__code__.co_freevars if cells else ()
        seen = next((c.cell_contents for n, c in zip(names, cells, strict=True) if n == "callback"), None)
    while seen is not None and not hasattr(seen, _MARK):  # wrapper by wrapper, down to the user's backend
        seen = getattr(seen, "compiler_fn", None) or getattr(seen, "_torchdynamo_orig_backend", None)
    return seen is not None


def compiled_forward(module: nn.Module) -> Any:
    """The backend of a module whose ``forward`` alone is compiled, below its hooks or inside a recomputed region.

    Such a function, in the place of the class's own, says so by an attribute ``compiled_by``, as its wrappers do.
    """
    return getattr(module.__dict__.get("forward"), "compiled_by", None)


def _inductor(
    graph: fx.GraphModule, inputs: list[Any], weights: set[int], options: Mapping[str, Any] | None
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(part: fx.GraphModule, given: Sequence[Any], **options: Any) -> Any:
        if not options.get("is_backward"):
            return compile_fx_inner(part, given, **options)

        def half(gm: fx.GraphModule, examples: list[Any]) -> _Compiled:
            if len(examples) != len(given):  # not the inputs that the options speak of
                options["static_input_idxs"] = ()
            return cast(_Compiled, compile_fx_inner(gm, examples, **options))

        return _two_halves(part, weights, len(inputs), half)

    patches = dict(options) if options else None
    return cast(Callable[..., Any], compile_fx(graph, inputs, inner_compile=cast(Any, inner), config_patches=patches))


def _aot_eager(graph: fx.GraphModule, inputs: list[Any], weights: set[int]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def half(gm: fx.GraphModule, examples: list[Any]) -> _Compiled:
        return cast(_Compiled, make_boxed_func(gm))

    def backward(part: fx.GraphModule, given: Sequence[Any]) -> Any:
        return _two_halves(part, weights, len(inputs), half)

    return aot_autograd(fw_compiler=lambda part, given: make_boxed_func(part), bw_compiler=backward)(graph, inputs)


def _two_halves(
    whole: fx.GraphModule, weights: set[int], num_inputs: int, compile_half: Callable[..., _Compiled]
) -> _Compiled:
    """Compile a backward graph, whose results are the gradients of the inputs, as two."""
    (output,) = whole.graph.find_nodes(op="output")
    results: list[Any] = list(output.args[0])
    given = whole.graph.find_nodes(op="placeholder")
    late = [i for i in sorted(weights) if i < len(results) and isinstance(results[i], fx.Node)]
    early = [i for i in range(len(results)) if i not in late and isinstance(results[i], fx.Node)]
    if len(results) != num_inputs or not late:
        return compile_half(whole, [n.meta.get("val") for n in given])
    effects = [n for n in whole.graph.nodes if n.op == "call_function" and n.is_impure(False)]
    first = _needed([*(results[i] for i in early), *effects])
    second = {n for n in _needed(results[i] for i in late) - first if n.op not in ("placeholder", "get_attr")}
    taken = [
        n for n in whole.graph.nodes
        if n not in second and n.op not in ("get_attr", "output")
        and (any(user in second for user in n.users) or any(results[i] is n for i in late))
    ]  # fmt: skip
    if any(changed in taken for effect in effects for changed in _changed(effect)):
        return compile_half(
            whole, [n.meta.get("val") for n in given]
        )  # the second half would read what the first changed
    kept = [n for n in taken if n.op != "placeholder"]
    ours = _part(whole, given, [*(results[i] for i in early), *kept], first)
    theirs = _part(whole, taken, [results[i] for i in late], second)
    run_first = compile_half(ours, [n.meta.get("val") for n in given])
    run_second = compile_half(theirs, [n.meta.get("val") for n in taken])
    places = {n: k for k, n in enumerate(given)}

    def run(args: list[Any]) -> Sequence[Any]:
        values = {n: args[places[n]] for n in taken if n in places}
        made = run_first(args)
        values.update(zip(kept, made[len(early) :], strict=True))
        grads: list[Any] = [None] * len(results)
        for i, grad in zip(early, made, strict=False):
            grads[i] = grad
        node: Any = torch._C._current_autograd_node()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        wanted = getattr(node, "needs_input_grad", ())

        def weight_pass() -> Sequence[Any]:
            for i, grad in zip(late, run_second([values[n] for n in taken]), strict=True):
                grads[i] = grad
            values.clear()
            return grads

        if len(wanted) == len(results) and not any(wanted[i] for i in late):
            setattr(node, WEIGHT_PASS, weight_pass)
            return [*grads]
        return weight_pass()

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _needed(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _changed(effect: fx.Node) -> Iterable[Any]:
    """The arguments that an operation writes to; all of them where it does not say."""
    schema = getattr(effect.target, "_schema", None)
    if schema is None or effect.kwargs:
        return effect.all_input_nodes
    return [a for a, given in zip(effect.args, schema.arguments, strict=False) if given.is_write]


def _part(whole: fx.GraphModule, given: list[fx.Node], results: list[fx.Node], nodes: set[fx.Node]) -> fx.GraphModule:
    """The graph of some nodes."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in given:
        known[node] = graph.placeholder(node.name)
        known[node].meta = dict(node.meta)
    for node in whole.graph.nodes:
        if node not in known and (node in nodes or node.op == "get_attr"):
            known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[r] for r in results))
    graph.eliminate_dead_code()
    return fx.GraphModule(whole, graph)
