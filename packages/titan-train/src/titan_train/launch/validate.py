"""What `titan-train check` and `titan-train run` refuse before the run's folder exists: one list.

The model is built on the meta device, which needs torch. The command line does not import torch, so this runs in a
process forked from the server that has.
"""

import contextlib
import tomllib
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from titan_train.config import Config, parse_config
from titan_train.config.published import RUN

if TYPE_CHECKING:
    from torch import nn

    from titan_train.parallel.layout.run import RunPlan


def check_start(config: Config, world_size: int) -> "RunPlan":
    """What `run` and `check` refuse before any rank starts: layout, trackers, the run's folder, this process's environment.

    Returns:
        The plan of the layout.

    Raises:
        ValueError: The run could not start; the message says why and what to do.
    """
    from titan_train.launch.rank.environment import check_environment
    from titan_train.launch.rank.info import count_gpus
    from titan_train.observe import check_trackers
    from titan_train.parallel.layout.run import plan_run
    from titan_train.run_folder import check_run_folder, run_folder
    from titan_train.train.best import check_measured

    check_environment(cuda=config.launch.device != "cpu" and count_gpus() > 0)
    plan = plan_run(config, world_size)
    if config.launch.elastic and config.launch.min_ranks > world_size:
        raise ValueError(
            f"launch.min_ranks={config.launch.min_ranks} is more than the {world_size} ranks of this run. The nearest valid "
            f"choice is {world_size}."
        )
    check_measured(config)
    check_trackers(config.metrics)
    check_run_folder(run_folder(config))
    return plan


def validate(config: Config, world_size: int) -> "nn.Module":
    """Build the model without memory and refuse what it cannot do on this many ranks.

    Returns:
        The whole model, on the meta device.

    Raises:
        ValueError: The model's arguments, the layout or the schedule cannot work.
    """
    from titan_train.models import build_model
    from titan_train.optim import plan_groups
    from titan_train.optim.schedule import check_schedule
    from titan_train.parallel.check import check_model
    from titan_train.parallel.layout.run import plan_run
    from titan_train.parallel.structure import freeze
    from titan_train.run_folder import newest_checkpoint, run_folder, with_kept_model
    from titan_train.task import load_task

    config = with_kept_model(config, run_folder(config))
    plan = plan_run(config, world_size)
    check_schedule(config.schedule, config.train.steps)
    task = load_task(config)
    model = build_model(config.model, vocab_size=task.vocab_size(config), device="meta")
    freeze(model, config.train.freeze)
    plan_groups(model, config.optimizer)
    check_model(config, plan.layout, plan.batch, model, task, vocab_size=task.vocab_size(config))
    if config.model.init and newest_checkpoint(run_folder(config)) is None:
        from titan_train.train.published_tokenizer import check_tokenizer
        from titan_train.train.warm_start import check_init, check_run_init

        check = check_run_init if config.model.init.startswith(RUN) else check_init
        check(config.model.init, model, config.model)
        check_tokenizer(config)
    return model


def validate_in_child(config_toml: str, world_size: int, sender: Connection) -> None:
    """Send the message of what is refused, or an empty one.

    Any other error is left to the ranks, which report it with its traceback.
    """
    problem = ""
    try:
        validate(parse_config(tomllib.loads(config_toml)), world_size)
    except ValueError as err:
        problem = str(err)
    except BaseException:
        problem = ""
    with contextlib.suppress(OSError):  # a command that was interrupted no longer listens
        sender.send(problem)
    sender.close()
