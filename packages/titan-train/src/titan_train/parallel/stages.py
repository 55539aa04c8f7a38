"""Cut a model into pipeline stages: which layers each one holds, and the part of the model that holds them.

A model can be cut if it names its repeated blocks in an ``nn.ModuleDict`` called ``layers``, keyed by number, and its
``forward`` takes hidden states where its embedding is None, and returns them where its head is None. Parts before the
layers are ``tok_embeddings`` and ``pos_embeddings``, parts after them ``norm`` and ``lm_head``; a model of your own may
name others in ``first_stage_parts`` and ``last_stage_parts``. Or it has a method ``take_stage(layers, first=, last=)`` of its
own, and names what holds its repeated blocks in ``pipeline_layers``, as models of transformers do here.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from titan_fsdp import named_parameters
from titan_mesh import Layout, Mesh
from titan_pipeline import Schedule, balanced_cut
from torch import nn

from titan_train.config import Config, PipelineConfig
from titan_train.models import flops_per_token
from titan_train.models.call import take_whole_output
from titan_train.models.traits import traits_of
from titan_train.parallel.layout.batch import BatchPlan
from titan_train.parallel.layout.run import plan_pipeline
from titan_train.parallel.tied import parameter_names

if TYPE_CHECKING:
    from titan_pipeline.runtime import TiedWeight


def plan_layers(
    config: PipelineConfig, costs: Sequence[float], ends: tuple[float, float], num_stages: int
) -> list[range]:
    """Which layers each stage holds.

    Args:
        config: With cuts, or without for a balanced one.
        costs: Of each layer, in any unit.
        ends: Cost of what precedes the first layer (embedding) and follows the last (norm and head).
        num_stages: Stages of the schedule.

    Raises:
        ValueError: Fewer layers than stages, or cuts that do not make ``num_stages``.
    """
    layers = len(costs)
    if layers < num_stages:
        raise ValueError(
            f"{layers} layers cannot fill {num_stages} pipeline stages with one each. Lower parallel.pp or "
            "pipeline.stages_per_rank, or deepen the model."
        )
    if config.cuts:
        if len(config.cuts) != num_stages - 1 or config.cuts[0] < 1 or config.cuts[-1] >= layers:
            raise ValueError(
                f"pipeline.cuts={list(config.cuts)} must be {num_stages - 1} layer numbers between 1 and {layers - 1}: the "
                f"schedule has {num_stages} stages."
            )
        bounds = [0, *config.cuts, layers]
        return [range(a, b) for a, b in pairwise(bounds)]
    loaded = list(costs)
    loaded[0] += ends[0]
    loaded[-1] += ends[1]
    return balanced_cut(loaded, num_stages)


def stage_layers(config: Config, whole: nn.Module, schedule: Schedule) -> list[range]:
    """The layers of each pipeline stage, balanced by FLOPs unless the configuration cuts by hand.

    The first stage has at least the layers that only it can feed; the others are then balanced among themselves.
    """
    check_can_be_cut(whole)
    blocks = layers_of(whole)
    costs = [flops_per_token(block, config.model.seq_len) for block in blocks]
    traits = traits_of(whole)
    encoder = traits.encoder_flops_per_token
    before = 0.0 if encoder is None else encoder(config.model.seq_len)
    once = dict(zip(blocks, costs, strict=True))  # as the whole counts a block that is several layers
    head = flops_per_token(whole, config.model.seq_len) - sum(once.values()) - before
    stages = plan_layers(config.pipeline, costs, (before, max(0.0, head)), schedule.num_stages)
    least = traits.first_stage_layers
    if len(stages[0]) < least and not config.pipeline.cuts and 1 < schedule.num_stages <= len(costs) - least + 1:
        rest = plan_layers(config.pipeline, costs[least:], (0.0, max(0.0, head)), schedule.num_stages - 1)
        stages = [range(least), *(range(part.start + least, part.stop + least) for part in rest)]
    if len(stages[0]) < least:
        raise ValueError(
            f"pipeline stage 0 would hold {len(stages[0])} of the first {least} layers, into which {type(whole).__name__} feeds "
            "what only that stage has (features of images). Set pipeline.cuts, lower parallel.pp or "
            "pipeline.stages_per_rank, or deepen the model."
        )
    return stages


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks in order: those in ``layers``, or in what its ``pipeline_layers`` names, one or several."""
    named = traits_of(model).pipeline_layers
    containers = (named,) if isinstance(named, str) else named
    # a block under two names is two layers; `children` would give it once
    found = [block for name in containers for block in model.get_submodule(name)._modules.values()]
    return [block for block in found if block is not None]


def check_can_be_cut(model: nn.Module) -> None:
    """Refuse a model that does not follow this module's protocol.

    Raises:
        ValueError: It has no ``layers``, keyed by number, or no part of its first or last stage alone, and no ``take_stage``.
    """
    traits = traits_of(model)
    if traits.take_stage is not None:
        return
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleDict) or not all(key.isdecimal() for key in layers):
        raise ValueError(
            f"parallel.pp: {type(model).__name__} cannot be cut into stages: it needs an nn.ModuleDict called layers with "
            "keys '0', '1', …, and a forward that takes hidden states where its embedding is None (see the guide on your "
            "own model)."
        )
    for attribute, parts in (
        ("first_stage_parts", traits.first_stage_parts),
        ("last_stage_parts", traits.last_stage_parts),
    ):
        if not any(isinstance(getattr(model, name, None), nn.Module) for name in parts):
            raise ValueError(
                f"parallel.pp: {type(model).__name__} has no module {' or '.join(parts)}, so all stages would hold both its "
                f"embedding and its head. Name yours in an attribute {attribute} of the model, such as ('embed',) or ('head',)."
            )


def take_stage(whole: nn.Module, layers: range, *, first: bool, last: bool) -> nn.Module:
    """A copy of what one stage holds of a whole model; parameter names stay as they are, the rest is None."""
    stage = _cut_stage(whole, layers, first=first, last=last)
    if not last:  # what it hands on may be several tensors
        take_whole_output(stage)
    return stage


def _cut_stage(whole: nn.Module, layers: range, *, first: bool, last: bool) -> nn.Module:
    traits = traits_of(whole)
    if traits.take_stage is not None:
        return traits.take_stage(layers, first=first, last=last)
    gone = [*(() if first else traits.first_stage_parts), *(() if last else traits.last_stage_parts)]
    stage = copy.copy(whole)
    kept = nn.ModuleDict({str(number): cast(nn.ModuleDict, whole.layers)[str(number)] for number in layers})
    stage._modules = {name: None if name in gone else part for name, part in whole._modules.items()} | {"layers": kept}
    return copy.deepcopy(stage)  # parts that other stages hold are not copied


def takes_tokens(stage: nn.Module) -> bool:
    """Whether a stage, or a whole model, takes tokens; the others take hidden states."""
    traits = traits_of(stage)
    if traits.holds_embedding is not None:
        return traits.holds_embedding
    parts = [getattr(stage, name) for name in traits.first_stage_parts if hasattr(stage, name)]
    return not parts or any(part is not None for part in parts)


def take_parts(config: Config, whole: nn.Module, schedule: Schedule | None, mesh: Mesh | None) -> list[nn.Module]:
    """Copies of what this rank holds: the model, or its stages in the order of ``schedule.stages_of(rank)``."""
    if schedule is None or mesh is None:
        return [copy.deepcopy(whole)]
    layers = stage_layers(config, whole, schedule)
    last = schedule.num_stages - 1
    return [
        take_stage(whole, layers[stage], first=stage == 0, last=stage == last)
        for stage in schedule.stages_of(mesh.rank_in("pp"))
    ]


def tied_over_stages(config: Config, whole: nn.Module, schedule: Schedule) -> "list[TiedWeight]":
    """The trained parameters that several pipeline stages hold a copy of, by the clean name in each of these stages."""
    from titan_pipeline.runtime import TiedWeight  # imports what shards, which a check does not need

    last = schedule.num_stages - 1
    held = [
        parameter_names(take_stage(whole, layers, first=stage == 0, last=stage == last))
        for stage, layers in enumerate(stage_layers(config, whole, schedule))
    ]
    trained = {name for name, parameter in named_parameters(whole, duplicates=True) if parameter.requires_grad}
    found: list[TiedWeight] = []
    for names in dict.fromkeys(parameter_names(whole).values()):
        stages = {stage: name for stage, here in enumerate(held) for name in reversed(names) if name in here}
        if len(stages) > 1 and names[0] in trained:
            found.append(TiedWeight(stages))
    return found


def check_stages(config: Config, layout: Layout, batch: BatchPlan, model: nn.Module) -> None:
    """Refuse a pipeline that cannot be cut, or with a stage that trains nothing: no gradient would pass through it.

    Raises:
        ValueError: As `stage_layers` and `plan_pipeline`; or names the stage.
    """
    schedule = plan_pipeline(config, layout, batch)
    if schedule is None:
        return
    blocks = layers_of(model)
    for number, layers in enumerate(stage_layers(config, model, schedule)):
        if not any(p.requires_grad for layer in layers for p in blocks[layer].parameters()):
            raise ValueError(
                f"train.freeze={list(config.train.freeze)} leaves nothing to train in the layers {layers.start} to "
                f"{layers.stop - 1} of pipeline stage {number}. Train part of them, move pipeline.cuts, or set parallel.pp=1."
            )
