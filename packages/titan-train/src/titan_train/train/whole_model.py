"""Samples during training, and the whole model as one module for them where a layout cuts layers or tokens apart.

Under data and tensor parallelism a rank's module takes and returns whole tensors as it is. A pipeline stage or a context rank
does not: here inputs are cut as batches are, the stages run forward, and every rank gets the whole output.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from titan_mesh import Mesh
from torch import Tensor, nn

from titan_train.config.parallel import ParallelConfig
from titan_train.models import accepted_inputs
from titan_train.models.call import evaluating
from titan_train.parallel.model import ParallelModel
from titan_train.parallel.pipeline import Pipeline
from titan_train.task import TaskInputs, WholeCut

_MOST_DIMS = 8


def can_be_whole(model: ParallelModel) -> bool:
    """Whether outputs of this rank's part can be put together again."""
    return model.context is None or isinstance(model.context, WholeCut)


class WholeModel(nn.Module):
    """Called with whole tensors, returns the whole output on every rank; without gradients.

    Every rank of a pipeline or context group calls it with the same arguments, all of their first dimension the batch, or 1 for
    what is the same for every row.
    """

    def __init__(self, model: ParallelModel, mesh: Mesh) -> None:
        super().__init__()
        self.parts = nn.ModuleList(model.parts)
        self._model = model
        self._mesh = mesh

    @torch.no_grad()
    def forward(self, *inputs: Tensor, **keywords: Any) -> Tensor:
        """The output of the model, float32 under a pipeline."""
        model = self._model
        cut = cast("WholeCut | None", model.context)
        if cut is not None:
            inputs, keywords = cut.cut_inputs(inputs, keywords)
        if model.pipeline is not None:
            output = _through_stages(model.pipeline, inputs, keywords, self._mesh.group("pp"), model.task.keywords)
        else:
            (module,) = model.parts
            taken = accepted_inputs(module, model.task.keywords)
            output = module(*inputs, **{name: value for name, value in keywords.items() if name in taken})
        return output if cut is None else cut.join(output)


def _through_stages(
    pipeline: Pipeline,
    inputs: Sequence[Tensor],
    keywords: Mapping[str, Any],
    group: dist.ProcessGroup,
    names: Sequence[str],
) -> Tensor:
    """The output of the last stage on every rank of the pipeline, float32."""
    executor = pipeline.executor
    schedule = executor.schedule
    rows, count = len(inputs[0]), schedule.num_microbatches
    each = -(-rows // count)
    batches = [_rows(inputs, rows, first, each) for first in range(0, each * count, each)]
    kept = [name for name in names if keywords.get(name) is not None]
    extras = [
        {
            **dict.fromkeys((*names, "labels")),  # without labels a head that computes the loss gives logits
            **dict(zip(kept, _rows([keywords[name] for name in kept], rows, first, each), strict=True)),
        }
        for first in range(0, each * count, each)
    ]
    found = executor.infer([tensors if len(tensors) != 1 else tensors[0] for tensors in batches], extras=extras)
    device = inputs[0].device
    whole = torch.cat(found)[:rows].float().contiguous() if found else None
    last = schedule.placement[-1]
    shape = torch.zeros(_MOST_DIMS, dtype=torch.int64, device=device)
    if whole is not None:
        shape[: whole.ndim] = torch.tensor(whole.shape, device=device)
    dist.broadcast(shape, group=group, group_src=last)
    if whole is None:
        whole = torch.empty([size for size in shape.tolist() if size], device=device)
    dist.broadcast(whole, group=group, group_src=last)
    return whole


def _rows(tensors: Sequence[Any], rows: int, first: int, each: int) -> tuple[Tensor, ...]:
    """``each`` rows from ``first``; behind the end the last one again, so that microbatches have one size. Plans stay."""
    places = torch.arange(first, first + each).clamp(max=rows - 1)
    return tuple(x[places.to(x.device)] if isinstance(x, Tensor) and len(x) == rows else x for x in tensors)


@torch.no_grad()
def sample(
    inputs: TaskInputs, model: ParallelModel, mesh: Mesh | None, parallel: ParallelConfig, run_dir: Path, step: int
) -> str | None:
    """Let the task sample, where every rank can run the whole model forward. Collective: no rank goes on before the one that
    writes, as the others would wait in the next step, whose time-out is short.

    Returns:
        What the task says to the person who watches; None if nothing was sampled.
    """
    if mesh is not None and (parallel.pp > 1 or parallel.cp > 1):
        if not inputs.samples_by_forward or not can_be_whole(model):
            return None
        module = WholeModel(model, mesh)
    else:
        (module,) = model.parts
    with (
        evaluating([module]),
        # samples have other shapes than training: compiled blocks would be compiled again for each
        torch.compiler.set_stance("force_eager"),
        _whole_logits(module, model, mesh, parallel),
    ):
        text = inputs.sample(module, run_dir, step)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    return text


def _whole_logits(
    module: nn.Module, model: ParallelModel, mesh: Mesh | None, parallel: ParallelConfig
) -> contextlib.AbstractContextManager[None]:
    """Where tensor parallelism cuts the vocabulary, a block in which the model gives all of it."""
    if mesh is None or parallel.tp == 1 or isinstance(module, WholeModel):
        return contextlib.nullcontext()
    from titan_train.generation.tensor import whole_logits

    return whole_logits(module, mesh.group("tp"), cuts=model.cuts, plan=parallel.tp_plan)
