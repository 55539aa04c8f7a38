"""Both ways between this package and torch.distributed.pipelining: our schedules in its runtime, its schedules in ours.

torch keeps the parts needed private: ``_PipelineScheduleRuntime``, its CSV reader, and the orders of its schedules.
They are used here and nowhere else; checked on torch 2.11 and 2.15 by ``test_torch_schedules.py``.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_pipeline.analysis.verify import verify
from titan_pipeline.ir.csv import from_torch_csv, to_torch_csv
from titan_pipeline.ir.schedule import Schedule

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


def torch_runtime(
    schedule: Schedule, stages: "Sequence[PipelineStage]", *, loss_fn: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """Torch's schedule runtime, ready to ``step``, with one of our schedules in it.

    Args:
        schedule: Verified first: torch accepts orders that deadlock or mix up microbatches.
        stages: torch's stages of this rank, built for this number of stages.
        loss_fn: As torch wants it: ``loss_fn(output, target)``.
        options: More of torch's schedule arguments. ``scale_grads`` is off unless given: torch would divide all
            accumulated gradients by the number of microbatches.

    Raises:
        ValueError: If the stages are not those that the schedule puts on this rank.
        ScheduleError: If the schedule cannot run.
    """
    from torch.distributed.pipelining import schedules  # a second: it loads torch.compile

    verify(schedule)
    rank = stages[0].group_rank
    mine, given = schedule.stages_of(rank), tuple(sorted(s.stage_index for s in stages))
    if mine != given or stages[0].num_stages != schedule.num_stages:
        raise ValueError(
            f"rank {rank} has torch stages {given} of {stages[0].num_stages}, the schedule puts {mine} of "
            f"{schedule.num_stages} on it. Build those."
        )
    runtime: Any = schedules._PipelineScheduleRuntime(  # pyright: ignore[reportPrivateUsage]
        list(stages), schedule.num_microbatches, loss_fn=loss_fn, **{"scale_grads": False, **options}
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(to_torch_csv(schedule))
        runtime._load_csv(str(path))
    return runtime


def schedule_from_torch(schedule: Any, *, name: str | None = None) -> Schedule:
    """The order of one of torch's schedule objects, as our data.

    Args:
        schedule: An instance of a class of ``torch.distributed.pipelining.schedules``.
        name: By default its class's.

    Raises:
        ValueError: If the object has no order to read.
    """
    order = getattr(schedule, "pipeline_order", None)
    if not order and hasattr(schedule, "_get_pipeline_order"):
        order = schedule._get_pipeline_order()
    if not order:
        raise ValueError(f"{type(schedule).__name__} holds no order of actions. Give a schedule object of torch's.")
    text = "".join(",".join(str(a) for a in order[rank] if a is not None) + "\n" for rank in sorted(order))
    return from_torch_csv(text, name=name or type(schedule).__name__)
