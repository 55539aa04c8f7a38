"""What `titan-train check` and `titan-train run` refuse before the run's folder exists: one list.

The model is built on the meta device, which needs torch. The command line of `run` does not import torch, so this runs in a
process forked from the server that has. `check` answers without torch where arguments decide (`decided_by_arguments`).
"""

import contextlib
import tomllib
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from titan_train.config import Config, parse_config
from titan_train.config.published import RUN
from titan_train.models.arguments import model_args
from titan_train.models.registry import find_model, names_shipped
from titan_train.models.shape import ModelShape
from titan_train.optim.schedule import check_schedule
from titan_train.task import load_task, task_name
from titan_train.trust import names_code

if TYPE_CHECKING:
    from torch import nn

    from titan_train.parallel.layout.run import RunPlan


def check_start(config: Config, world_size: int) -> "RunPlan":
    """What `run` and `check` refuse before any rank starts: layout, the run's folder, this process's environment.

    Trackers that cannot work are refused for a new run only: one that continues goes on without them.

    Returns:
        The plan of the layout.

    Raises:
        ValueError: The run could not start; the message says why and what to do.
    """
    from titan_train.launch.rank.environment import check_environment
    from titan_train.launch.rank.info import count_gpus
    from titan_train.observe import check_trackers
    from titan_train.parallel.layout.run import plan_run
    from titan_train.run_folder import check_run_folder, newest_checkpoint, run_folder
    from titan_train.train.best import check_measured

    check_environment(cuda=config.launch.device != "cpu" and count_gpus() > 0)
    plan = plan_run(config, world_size)
    if config.launch.elastic and config.launch.min_ranks > world_size:
        raise ValueError(
            f"launch.min_ranks={config.launch.min_ranks} is more than the {world_size} ranks of this run. The nearest valid "
            f"choice is {world_size}."
        )
    check_measured(config)
    check_run_folder(run_folder(config))
    if newest_checkpoint(run_folder(config)) is None:
        check_trackers(config.metrics)
    return plan


# sections that the module has a say in, beyond its arguments
_OF_THE_MODULE = ("parallel", "context", "pipeline", "activations", "float8", "compile", "kernels", "qk_clip", "mtp")


def decided_by_arguments(config: Config, plan: "RunPlan") -> bool:
    """Whether a model's arguments decide all that `validate` refuses, and its memory: then no module has to be built.

    So it is for a shipped decoder of text on one rank, in a run without checkpoints, as long as no setting names parts of it,
    cuts it or changes its layers.
    """
    from titan_train.run_folder import newest_checkpoint, run_folder

    default, optimizer = Config(), config.optimizer
    muon = (optimizer.muon.groups, optimizer.muon.splits, optimizer.muon.heads)
    named = (optimizer.lr_scales, optimizer.weight_decays, optimizer.frozen_steps, config.train.freeze, *muon)
    return (
        plan.mode == "none"
        and plan.layout.num_ranks == 1
        and names_shipped(config.model.name, "text")
        and task_name(config) == "text"
        and not any(named)
        and not config.model.init
        and not config.model.args.get("mtp_depth")
        and not config.checkpoint.start_from
        and newest_checkpoint(run_folder(config)) is None
        and config.model.parametrization == "standard"
        and not any(block.only_counted for block in _shipped_shape(config.model.name).blocks)
        and all(getattr(config, section) == getattr(default, section) for section in _OF_THE_MODULE)
    )


def _shipped_shape(name: str) -> ModelShape:
    family, arguments = find_model(name)
    return family.shape(arguments, name)


def validate_arguments(config: Config) -> ModelShape:
    """`validate` where `decided_by_arguments` holds.

    Returns:
        The shape of the model, with the tokenizer's vocabulary.

    Raises:
        ValueError: The model's arguments or the schedule cannot work.
    """
    check_schedule(config.schedule, config.train.steps)
    arguments = model_args(config.model, vocab_size=load_task(config).vocab_size(config))
    return find_model(config.model.name)[0].shape(arguments, config.model.name)


def validate(config: Config, world_size: int) -> "nn.Module":
    """Build the model without memory and refuse what it cannot do on this many ranks.

    Returns:
        The whole model, on the meta device.

    Raises:
        ValueError: The model's arguments, the layout or the schedule cannot work.
    """
    from titan_train.models import build_model, init_for
    from titan_train.optim import plan_groups
    from titan_train.parallel.check import check_model
    from titan_train.parallel.layout.run import plan_run
    from titan_train.parallel.structure import freeze, hold_weights
    from titan_train.run_folder import newest_checkpoint, run_folder, with_kept_model

    config = with_kept_model(config, run_folder(config))
    plan = plan_run(config, world_size)
    check_schedule(config.schedule, config.train.steps)
    task = load_task(config)
    model = build_model(config.model, vocab_size=task.vocab_size(config), device="meta")
    freeze(model, config.train.freeze)
    hold_weights(model, config.optimizer.weights)
    plan_groups(model, config.optimizer)
    check_model(config, plan.layout, plan.batch, model, task, vocab_size=task.vocab_size(config))
    if names_code(config.model.name):
        init_for(model)
    if config.optimizer.states == "int8" and plan.layout.spec.tp > 1:
        from titan_train.optim.compact_adamw import check_tensor_parallel_states  # imports torch's tensor parallelism

        check_tensor_parallel_states(config, model, plan.layout.spec.tp)
    newest = newest_checkpoint(run_folder(config))
    if newest is not None:
        _check_resume(config, newest, model)
    if config.model.init and newest is None:
        from titan_train.train.published_tokenizer import check_tokenizer
        from titan_train.train.warm_start import check_init, check_run_init

        check = check_run_init if config.model.init.startswith(RUN) else check_init
        check(config.model.init, model, config.model)
        check_tokenizer(config)
    if config.checkpoint.start_from and newest is None:
        from titan_train.train.branch import check_branch

        check_branch(config, model, task)
    return model


def _check_resume(config: Config, step: int, model: "nn.Module") -> None:
    """Refuse weights in another format than the newest checkpoint's; what is damaged there is the ranks' matter."""
    from titan_ckpt import CheckpointError
    from titan_ckpt.load.reader import StepReader

    from titan_train.optim.build import check_saved_weights
    from titan_train.run_folder import checkpoint_folders, run_folder

    folder = run_folder(config)
    with contextlib.suppress(CheckpointError, OSError):
        check_saved_weights(
            StepReader(checkpoint_folders(folder)[step]), model, f"the checkpoint of step {step} in {folder}"
        )


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
