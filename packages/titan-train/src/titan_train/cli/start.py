"""What `titan-train run` refuses before any rank starts, and `titan-train check` with it: one list."""

from titan_train.config import Config
from titan_train.launch.rank.environment import check_environment
from titan_train.launch.rank.info import count_gpus
from titan_train.observe import check_trackers
from titan_train.parallel.layout.run import RunPlan, plan_run
from titan_train.run_folder import check_run_folder, run_folder


def check_start(config: Config, world_size: int) -> RunPlan:
    """Validate the layout, the trackers, the run's folder and this process's environment.

    Returns:
        The plan of the layout.

    Raises:
        ValueError: The run could not start; the message says why and what to do.
    """
    check_environment(cuda=config.launch.device != "cpu" and count_gpus() > 0)
    plan = plan_run(config, world_size)
    if config.launch.elastic and config.launch.min_ranks > world_size:
        raise ValueError(
            f"launch.min_ranks={config.launch.min_ranks} is more than the {world_size} ranks of this run. The nearest valid "
            f"choice is {world_size}."
        )
    check_trackers(config.metrics)
    check_run_folder(run_folder(config))
    return plan
