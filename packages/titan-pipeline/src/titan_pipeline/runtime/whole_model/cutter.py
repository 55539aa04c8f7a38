"""Cut a whole model into the stages of a schedule.

Problem: a pipeline wants stages, people have models. A model's forward is code: embeddings, masks, positions, a loop over
layers, a head, for encoder-decoders two of everything. Rewriting it by hand for each stage is where errors come from.

Idea: keep the code, take away the parameters. Each stage gets a copy of the module tree that holds only the parameters
its part uses, and runs the model's own forward, see `titan_pipeline.runtime.whole_model.place`. Cuts lie at the calls of
layers. One run of the whole model on an example shows which module is called when; each stage is then tried on the
example alone, which shows what it needs from the others; and the chain of all stages must return what the whole model
returned, or the model is refused.

Where layers are used again and again (ALBERT's only one), cuts lie between their calls, and the stages share their weights.

Cost: every stage repeats the cheap part of the forward (masks, positions), and a shape per module in front of it. A module
that looks at numbers (``if mask.all()``, a length) is repeated for every microbatch up to the last of them, on shapes alone.
Limits: a layer that is named in ``starts`` or ``layers`` is called exactly once per forward; what the example does not
exercise is not checked; results that a model collects by hooks from all layers (router logits, hidden states) are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from titan_pipeline.analysis.balance import balanced_cut
from titan_pipeline.families import build_schedule
from titan_pipeline.ir.schedule import Schedule
from titan_pipeline.runtime.stage.tied import TiedWeight
from titan_pipeline.runtime.stage.torch_stage import TorchStage
from titan_pipeline.runtime.whole_model.absent import Absent, Base, TensorSpec
from titan_pipeline.runtime.whole_model.place import (
    ModelSite,
    PartRecorder,
    StagePlace,
    StageRoot,
    input_leaves,
    place_at,
)
from titan_pipeline.runtime.whole_model.trace import (
    CallId,
    ModelTrace,
    ModuleCall,
    copied,
    has_only_plain_leaves,
    list_items,
    take_tensors,
    trace_model,
    with_numbers,
)


@dataclass(frozen=True)
class ModelSplit:
    """A model as stages."""

    schedule: Schedule
    """What the stages were cut for."""
    modules: tuple[nn.Module, ...]
    """One per stage. Parameters are the model's own, under the model's names; all stages together have all of them."""
    layers: tuple[str, ...]
    """First layer of each stage but the first."""
    shares: tuple[float, ...]
    """The share of each stage in the FLOPs of the example."""
    tied: tuple[TiedWeight, ...]
    """Parameters that several stages use."""

    def stages(self, rank: int, *, loss: Callable[[Any, Any], Any] | None = None, **options: Any) -> list[TorchStage]:
        """The stages of a rank, for `Executor` with ``tied=split.tied``.

        Args:
            rank: In the pipeline.
            loss: ``loss(output, target)``, where ``output`` is what the whole model returns.
            options: More arguments of `TorchStage`.
        """
        last = len(self.modules) - 1
        return [
            TorchStage(self.modules[s], s, loss=loss if s == last else None, **options)
            for s in self.schedule.stages_of(rank)
        ]

    def __str__(self) -> str:
        starts = ("the inputs", *self.layers)
        rows: list[str] = []
        for s, (module, start, share) in enumerate(zip(self.modules, starts, self.shares, strict=True)):
            size = sum(p.numel() for p in module.parameters())
            rows.append(
                f"stage {s} on rank {self.schedule.placement[s]}: from {start}, {size:,} parameters, {share:.0%} of the FLOPs"
            )
        return "\n".join([*rows, *(f"tied: {dict(t.names)}" for t in self.tied)])


def split(
    model: nn.Module,
    schedule: str | Schedule,
    num_ranks: int | None = None,
    *,
    num_microbatches: int | None = None,
    num_chunks: int | None = None,
    example: Any = None,
    layers: Sequence[str] | None = None,
    starts: Sequence[str] | None = None,
    costs: Sequence[float] | None = None,
) -> ModelSplit:
    """Cut a whole model into stages; its forward stays as it is.

    ``split(model, "zbv", 4).stages(rank, loss=…)`` is what an executor needs. Layers, head, embeddings and ties are found
    by running the model once on a small example. Hugging Face models bring their own example.

    Microbatches are what the model's forward takes: a tensor, a tuple of arguments, or a dict of keyword arguments. The
    last stage returns what the model returns.

    Args:
        model: On one device, not wrapped and not compiled. Its parameters are shared with the stages, not copied. On the
            meta device it is tried with stand-in numbers, and the stages are on the meta device too: each rank calls
            ``to_empty`` on its own and loads them.
        schedule: A family's name, or a schedule.
        num_ranks: Ranks of the pipeline; needed with a name.
        num_microbatches: Of the schedule that is built; 4 per rank by default. The cut does not depend on it.
        num_chunks: Stages per rank, for families that take any number.
        example: A small input: a tensor, a tuple of arguments or a dict of keyword arguments. Give it with every argument
            that a step will give.
        layers: Where a stage may start: names of layers, or of lists of layers. By default the items of the model's
            outermost lists.
        starts: Instead of balancing: name of the first layer of each stage but the first.
        costs: Of each layer in ``layers``, in the order of their calls; by default the FLOPs of the example, from a
            layer's call to the next one's.

    Raises:
        ValueError: The model cannot be cut there, or its parts do not return what the whole returns.
    """
    made = _schedule(schedule, num_ranks, num_microbatches, num_chunks)
    _check_model(model)
    tried = with_numbers(model)
    args, kwargs = _as_call(example if example is not None else _own_example(tried))
    trace = trace_model(tried, args, kwargs)
    cuts, shares = _cuts(tried, trace, made.num_stages, layers, starts, costs)
    modules = _Parts(tried, trace, cuts, args, kwargs).build()
    _check_whole(modules, trace, args, kwargs)
    if tried is not model:
        take_tensors(modules, model)
    tied = _ties(model, modules, made.placement)
    names = (name if trace.counts[name] == 1 else f"{name} (call {number})" for name, number in cuts)
    return ModelSplit(made, tuple(modules), tuple(names), shares, tuple(tied))


class _Parts:
    """The stage modules while they are made."""

    def __init__(
        self, model: nn.Module, trace: ModelTrace, cuts: list[CallId], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._model = model
        self._trace = trace
        self._cuts: list[CallId | None] = [None, *cuts, None]
        times = [trace.calls[c].begin for c in cuts]
        self._begins = [-1.0, *times]
        self._ends = [*times, float("inf")]
        self._args, self._kwargs = args, kwargs
        self._tensors: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }

    def build(self) -> list[nn.Module]:
        """Try the stages from the last to the first: each one's needs are what those before it pass on."""
        count = len(self._cuts) - 1
        modules: list[nn.Module] = [nn.Module()] * count
        exit_paths: list[Any] = []
        passed_on: list[Base] = []
        used: set[str] = set()
        for s in reversed(range(count)):
            place = StagePlace(s, self._cuts[s], self._cuts[s + 1], self._trace)
            place.exit_paths, place.passed_on = exit_paths, passed_on
            modules[s] = self._module(s, place, passed_on)
            recorder = self._try(modules[s], place)
            tensors = [str(b[1]) for b in recorder.asked if b[0] in ("param", "buffer")]
            for name in tensors:
                _register(modules[s], name, self._tensors[name])
            used |= {name for name, _ in modules[s].named_parameters(remove_duplicate=False)}
            if s == 0:
                self._keep_unused(modules[0], used)
            place.entry_paths = exit_paths = recorder.entry_paths
            passed_on = [b for b in recorder.asked if b[0] not in ("param", "buffer")]
        return modules

    def _keep_unused(self, first: nn.Module, used: set[str]) -> None:
        """Parameters that the example did not use stay on stage 0, so that no state is lost."""
        for name, _ in self._model.named_parameters(remove_duplicate=False):
            if name not in used:
                _register(first, name, self._tensors[name])

    def _module(self, s: int, place: StagePlace, passed_on: list[Base]) -> nn.Module:
        made = copied(self._model)
        modules = dict(made.named_modules())
        stand_ins = self._stand_ins(s)
        inside = {n for site in stand_ins for n in _subtree(modules[site], site)}
        for name, module in modules.items():
            if self._owned(name, s):
                continue
            for kind, tensors in (("param", module._parameters), ("buffer", module._buffers)):
                if kind == "param" or name in inside:
                    _hide(module, name, kind, tensors, place)
        place.stand_ins = frozenset(stand_ins)
        ends = [c[0] for c in (place.entry, place.exit) if c]
        sites = {*stand_ins, *ends, *(str(b[1]) for b in passed_on if b[0] == "call")}
        for name in sites:
            place_at(modules[name], ModelSite, place, name)
        place_at(made, StageRoot, place, "")
        return made

    def _stand_ins(self, s: int) -> list[str]:
        """Modules that stage s does not run before its first layer: the outermost ones with parameters."""
        cut = self._cuts[s]
        if cut is None:
            return []
        entry = self._trace.calls[cut]
        entered = {*entry.stack, entry.id}
        named = dict(self._model.named_modules())
        found: set[str] = set()
        for call in sorted(self._trace.calls.values(), key=lambda c: c.begin):
            if call.begin >= entry.begin or call.id in entered:
                continue
            if any(outer[0] in found for outer in call.stack):
                continue
            name = call.id[0]
            if any(hooked.startswith(f"{name}.") for hooked in self._trace.hooked):
                continue
            if any(True for _ in named[name].parameters()) and has_only_plain_leaves(call.output):
                found.add(name)
        return list(found)

    def _owned(self, name: str, s: int) -> bool:
        """Whether stage s runs the module: one of its calls, or of the nearest module around it that is called."""
        while name and not self._trace.counts[name]:
            name = name.rpartition(".")[0]
        return any(self._within(call, s) for call in self._trace.of(name))

    def _within(self, call: ModuleCall, s: int) -> bool:
        return self._begins[s] <= call.begin and call.end < self._ends[s]

    def _try(self, module: nn.Module, place: StagePlace) -> PartRecorder:
        """Run a stage on the example, with everything that it asks for."""
        recorder = place.recorder = PartRecorder(
            self._trace, self._tensors, dict(input_leaves(self._args, self._kwargs))
        )
        modes = {m: m.training for m in module.modules()}
        module.eval()
        try:
            with torch.no_grad():
                place.try_part(module, self._args, self._kwargs)
        finally:
            place.recorder = None
            for m, training in modes.items():
                m.training = training
        return recorder


def _subtree(module: nn.Module, name: str) -> set[str]:
    return {f"{name}.{n}" if n else name for n, _ in module.named_modules()}


def _hide(module: nn.Module, name: str, kind: str, tensors: dict[str, Any], place: StagePlace) -> None:
    """Put an absent tensor in the place of each parameter, out of sight of ``parameters()`` and ``state_dict()``."""
    for key, tensor in list(tensors.items()):
        if tensor is not None:
            del tensors[key]
            full = f"{name}.{key}" if name else key
            module.__dict__[key] = Absent(TensorSpec.of(tensor), place, (kind, full))


def _register(module: nn.Module, name: str, tensor: Tensor) -> None:
    """The opposite of `_hide`."""
    owner, _, key = name.rpartition(".")
    holder = module.get_submodule(owner)
    if key in holder.__dict__:
        del holder.__dict__[key]
        (holder._parameters if isinstance(tensor, nn.Parameter) else holder._buffers)[key] = cast(Any, tensor)


def _schedule(
    schedule: str | Schedule, num_ranks: int | None, num_microbatches: int | None, num_chunks: int | None
) -> Schedule:
    if isinstance(schedule, Schedule):
        if num_ranks not in (None, schedule.num_ranks):
            raise ValueError(f"num_ranks={num_ranks}, but the schedule is for {schedule.num_ranks}. Leave it out.")
        return schedule
    if num_ranks is None:
        raise ValueError(f"split(model, {schedule!r}) needs num_ranks: the ranks of the pipeline.")
    return build_schedule(schedule, num_ranks, num_microbatches or 4 * num_ranks, num_chunks=num_chunks)


def _check_model(model: nn.Module) -> None:
    if hasattr(model, "_orig_mod"):
        raise ValueError("the model is compiled. Split it first, then compile the blocks of each stage.")
    if "forward" in model.__dict__:
        raise ValueError("the model's forward was replaced on the object. Split it before another library wraps it.")


def _as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(cast(Mapping[str, Any], example))
    return (cast(tuple[Any, ...], example) if isinstance(example, tuple) else (example,)), {}


def _own_example(model: nn.Module) -> dict[str, Any]:
    """An example for a model of Hugging Face's transformers, from its configuration."""
    config: Any = getattr(model, "config", None)
    name = str(getattr(model, "main_input_name", ""))
    if config is None or not name:
        raise ValueError(
            f"{type(model).__name__} brings no example of its input. Give split(example=...): a tensor, a tuple of arguments "
            "or a dict of keyword arguments, small, with every argument that a step will give."
        )
    parameter = next(model.parameters())
    if name == "input_ids":
        ids = torch.arange(2 * 8, device=parameter.device).view(2, 8) % min(config.get_text_config().vocab_size, 16)
        found = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            found["decoder_input_ids"] = ids
        return found
    if name == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else size
        shape = (2, getattr(config, "num_channels", 3), height, width)
        return {name: torch.linspace(-1, 1, 2 * shape[1] * height * width).view(shape).to(parameter)}
    raise ValueError(
        f"split knows no example for {type(model).__name__}, whose input is {name!r}. Give split(example={{{name!r}: ...}})."
    )


def _cuts(
    model: nn.Module,
    trace: ModelTrace,
    num_stages: int,
    layers: Sequence[str] | None,
    starts: Sequence[str] | None,
    costs: Sequence[float] | None,
) -> tuple[list[CallId], tuple[float, ...]]:
    """Calls at which stages start, and each stage's share of the FLOPs."""
    if starts is not None:
        if len(starts) != num_stages - 1:
            raise ValueError(f"{len(starts)} starts make {len(starts) + 1} stages, the schedule has {num_stages}.")
        chosen = [_only_call(trace, name) for name in starts]
        if sorted(chosen, key=lambda c: c.begin) != chosen:
            raise ValueError(f"starts={list(starts)} are not in the order in which the forward calls them.")
    else:
        candidates = _candidates(model, trace, layers, num_stages)
        weights = costs if costs is not None else _costs(model, trace, candidates)
        if len(weights) != len(candidates):
            raise ValueError(f"{len(weights)} costs for {len(candidates)} layers. Give one per layer.")
        chosen = [candidates[part.start] for part in balanced_cut(weights, num_stages)][1:]
    marks = [0.0, *(c.flops_before for c in chosen), trace.flops]
    shares = tuple((b - a) / (trace.flops or 1.0) for a, b in pairwise(marks))
    return [c.id for c in chosen], shares


def _costs(model: nn.Module, trace: ModelTrace, candidates: list[ModuleCall]) -> list[float]:
    """FLOPs from each layer's call to the next one's; parameters where they could not be counted."""
    if not trace.flops:
        return [1.0 + sum(p.numel() for p in model.get_submodule(c.id[0]).parameters()) for c in candidates]
    flops = [c.flops_before for c in candidates[1:]]
    return [1 + b - a for a, b in zip([0.0, *flops], [*flops, trace.flops], strict=True)]


def _candidates(model: nn.Module, trace: ModelTrace, layers: Sequence[str] | None, num_stages: int) -> list[ModuleCall]:
    if layers is not None:
        modules = dict(model.named_modules())
        unknown = [n for n in layers if n not in modules]
        if unknown:
            raise ValueError(f"layers={unknown} are not modules of the model.")
        lists = nn.ModuleList | nn.Sequential
        names = [
            f"{n}.{child}" if isinstance(modules[n], lists) else n
            for n in layers
            for child in (dict(modules[n].named_children()) if isinstance(modules[n], lists) else [""])
        ]
        found = [_only_call(trace, n) for n in names]
    else:
        found = [call for n in list_items(model) if trace.counts[n] == 1 for call in trace.of(n)]
        if len(found) < num_stages:  # no list, or a short one: the model's own children
            found = [call for n, _ in model.named_children() if trace.counts[n] == 1 for call in trace.of(n)]
        if len(found) < num_stages:  # layers that are used again and again: the stages share them, as tied weights
            found = [call for n in list_items(model) for call in trace.of(n)]
        if len(found) < num_stages:
            found = max((trace.of(n) for n, m in model.named_modules() if list(m.parameters())), key=len, default=found)
    if len(found) < num_stages:
        raise ValueError(
            f"{num_stages} stages need as many layers; found {[c.id[0] for c in found]}. Use fewer stages, or name "
            "more places with layers=[...]."
        )
    return sorted(found, key=lambda c: c.begin)


def _only_call(trace: ModelTrace, name: str) -> ModuleCall:
    if trace.counts[name] != 1:
        raise ValueError(
            f"a stage cannot start at {name!r}: the forward calls it {trace.counts[name]} times, not once. Name a module "
            "that every forward calls exactly once."
        )
    return trace.calls[name, 0]


def _check_whole(modules: list[nn.Module], trace: ModelTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The chain of stages must return what the model returned."""
    state: tuple[Any, ...] = (dict(kwargs),) if kwargs else args
    modes = [{m: m.training for m in module.modules()} for module in modules]
    try:
        with torch.no_grad():
            for module in modules:
                state = (module.eval()(*state),)
    finally:
        for per_module in modes:
            for m, training in per_module.items():
                m.training = training
    got, form = tree_flatten(state[0])
    want, wanted_form = tree_flatten(trace.output)
    same = form == wanted_form and all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True) if isinstance(a, Tensor) else a == b
        for a, b in zip(got, want, strict=True)
    )
    if not same:
        raise ValueError(
            "the stages do not return what the whole model returns on the example. Models that collect results of all "
            "layers beside their output (router logits, hidden states, attentions) cannot be cut: turn that off in the "
            "model's configuration, or write the stages by hand."
        )


def _ties(model: nn.Module, modules: list[nn.Module], placement: Sequence[int]) -> list[TiedWeight]:
    """Parameters that several stages hold; each rank but the first stage's gets a copy of its own.

    Ranks that are threads would otherwise add to one gradient.
    """
    names: dict[int, dict[int, list[str]]] = {id(p): {} for p in model.parameters()}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names[id(parameter)].setdefault(stage, []).append(name)
    tied = [found for found in names.values() if len(found) > 1]
    for found in tied:
        home = placement[min(found)]
        copies: dict[int, nn.Parameter] = {}
        for stage, own in found.items():
            if placement[stage] != home:
                before = modules[stage].get_parameter(own[0])
                made = copies.setdefault(placement[stage], nn.Parameter(before.detach().clone(), before.requires_grad))
                for name in own:
                    holder, _, key = name.rpartition(".")
                    modules[stage].get_submodule(holder)._parameters[key] = made
    return [TiedWeight({stage: own[0] for stage, own in found.items()}) for found in tied]
