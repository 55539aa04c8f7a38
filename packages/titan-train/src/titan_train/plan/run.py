"""All that the configuration and the number of ranks decide about a run."""

from dataclasses import dataclass

from titan_mesh import Layout
from titan_pipeline import Schedule

from titan_train.config import Config
from titan_train.plan.batch import BatchPlan, plan_batch
from titan_train.plan.layout import Mode, build_layout, resolve_mode
from titan_train.plan.schedule import plan_pipeline


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything about a run that its configuration and the number of ranks decide."""

    layout: Layout
    mode: Mode
    batch: BatchPlan
    schedule: Schedule | None
    """The pipeline's; None without one."""


def plan_run(config: Config, world_size: int, *, device: str = "") -> RunPlan:
    """Decide all of it, and with that check it, before any rank starts.

    Args:
        config: The run's configuration.
        world_size: Ranks.
        device: As for `build_layout`.

    Raises:
        ValueError: As `build_layout`, `resolve_mode`, `plan_batch` and `plan_pipeline`.
    """
    layout = build_layout(config, world_size, device=device)
    mode = resolve_mode(config.parallel, layout, dtype=config.train.dtype)
    batch = plan_batch(config, layout)
    return RunPlan(layout, mode, batch, plan_pipeline(config, layout, batch))
