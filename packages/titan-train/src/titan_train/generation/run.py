"""Load a finished run into one process."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from titan_ckpt import Checkpointer, LocalShard, TrainState
from titan_ckpt.steps.listing import open_steps
from torch import nn

from titan_train.config import Config
from titan_train.generation.text import LoadedRun
from titan_train.inputs import load_saved_tokenizer
from titan_train.models import build_model
from titan_train.models.arguments import model_args
from titan_train.models.vision_language.args import EncoderArgs
from titan_train.optim.average import restore_averaged
from titan_train.run_folder import checkpoint_folders, kept_stop_ids, read_config
from titan_train.task import load_task, task_name
from titan_train.tokenizers import Tokenizer
from titan_train.trust import admit_run_code

log = logging.getLogger(__name__)


def load_run(
    run_dir: str | Path,
    *,
    step: int | None = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    peers: dist.ProcessGroup | None = None,
    trust_code: bool = False,
    code: Sequence[str] = (),
) -> LoadedRun:
    """Load a run's model and tokenizer into this process.

    Args:
        run_dir: The run's folder.
        step: Which checkpoint; None takes the newest that is intact.
        device: Where the weights go; None takes a GPU if there is one. "meta" reads no weights.
        group: Ranks that share every weight matrix (tensor parallelism), for models larger than one device. All of them
            call this and generate with the same arguments. None: this process holds the model, and waits for no other.
        peers: Ranks that each hold the model, without ``group``, and take the same checkpoint; all of them call this.
        trust_code: Run the model code that the folder names, though this account has not run it with that very code. Read
            the code first: a run's folder can name any.
        code: Folders to import that code from, beside what is installed.

    Raises:
        ValueError: The folder is not a run's, has no such checkpoint, or names code that is not trusted.
    """
    run_dir = Path(run_dir)
    config = _config_of_trained(run_dir)
    admit_run_code(run_dir, config.model.name, trust=trust_code, paths=code)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, template = load_saved_tokenizer(run_dir, config)
    # Of a run of prepared tokens, nothing asked whether the tokenizer has such a token.
    begin = (tokenizer.bos_id,) if config.data.add_bos and tokenizer.bos_id is not None else ()
    stops = kept_stop_ids(run_dir)
    built_on = device if group is None else "meta"
    vocab_size = _vocab_size(config, tokenizer)
    model = build_model(config.model, vocab_size=vocab_size, device=built_on).requires_grad_(False)
    shards: dict[str, LocalShard] = {}
    if group is not None:
        from titan_train.generation.tensor import cut_for_generation  # float8 and all of tensor parallelism

        parallel = config.parallel
        shards = cut_for_generation(
            model, group, device=device, plan=parallel.tp_plan, replicate_kv=parallel.replicate_kv
        )
    if torch.device(device).type == "meta":
        return LoadedRun(config, model.eval(), tokenizer, saved_step(run_dir, step), template, stops, begin)
    ranks = group or peers or one_rank()
    with Checkpointer(run_dir / "checkpoints", group=ranks) as checkpointer:
        state = TrainState(model=model, rng=False, shards=shards)
        found = restore_averaged(checkpointer, state, config, step, ranks)
    return LoadedRun(config, model.eval(), tokenizer, found, template, stops, begin)


def _vocab_size(config: Config, tokenizer: Tokenizer) -> int | None:
    """What sizes the embedding and the head: other tasks have tokens beside those of text."""
    if task_name(config) == "text":
        return tokenizer.vocab_size
    if task_name(config) == "vision":
        args: Any = model_args(config.model, vocab_size=None)
        if isinstance(args, EncoderArgs):
            return args.vocabulary(tokenizer.vocab_size)
    return load_task(config).vocab_size(config)


def load_model(
    run_dir: str | Path, *, step: int | None = None, device: torch.device | str = "cpu"
) -> tuple[Config, nn.Module, int]:
    """Load the model of a run of any task without a vocabulary, such as diffusion.

    Args:
        run_dir: The run's folder.
        step: Which checkpoint; None takes the newest that is intact.
        device: Where the weights go; "meta" reads no weights.

    Returns:
        The run's configuration, the model in evaluation mode, and the checkpoint's step.

    Raises:
        ValueError: The folder is not a run's, has no such checkpoint, or names code that is not trusted.
    """
    run_dir = Path(run_dir)
    config = _config_of_trained(run_dir)
    admit_run_code(run_dir, config.model.name, trust=False, paths=())
    model = build_model(config.model, vocab_size=None, device=device).requires_grad_(False).eval()
    if torch.device(device).type == "meta":
        return config, model, saved_step(run_dir, step)
    with Checkpointer(run_dir / "checkpoints") as checkpointer:
        found = restore_averaged(checkpointer, TrainState(model=model, rng=False), config, step)
    return config, model, found


def one_rank() -> dist.ProcessGroup | None:
    """A group of this rank alone, so that nothing waits for others; None without torch.distributed. Not collective."""
    if not dist.is_initialized():
        return None
    made = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def saved_step(run_dir: Path, step: int | None) -> int:
    """The step of a finished checkpoint: ``step``, or that of the newest whose manifest is intact.

    While a run goes on, the newest changes.

    Raises:
        ValueError: There is no such checkpoint.
    """
    saved = _finished(run_dir)
    if step is None:
        valid = open_steps(run_dir / "checkpoints", partial(log.warning, "skipped %s: %s"), most=1)
        return valid[-1].step if valid else next(reversed(saved))  # to read it tells what is damaged
    if step not in saved:
        raise ValueError(f"{run_dir} has no checkpoint of step {step}; it has {sorted(saved)[-8:]}. Name one of these.")
    return step


def _config_of_trained(run_dir: Path) -> Config:
    config = read_config(run_dir)
    _finished(run_dir)
    return config


def _finished(run_dir: Path) -> dict[int, Path]:
    saved = checkpoint_folders(run_dir)
    if not saved:
        raise ValueError(
            f"{run_dir} has no finished checkpoint yet: let `titan-train run` reach one, or set checkpoint.every."
        )
    return saved
