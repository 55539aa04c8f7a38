"""Call any model on a batch, handing it only what its forward accepts; and what it drops by chance in training."""

import contextlib
import copy
import functools
import inspect
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from titan_fsdp import unwrap
from titan_fsdp.loaded import compute_device
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage] # the base of all of torch's

_OPTIONAL = ("positions", "cu_seqlens", "attention_plan", "padding")


class TokenBatch(Protocol):
    """What a model is called on; `titan_train.data.Batch` is one. It may also have an ``attention_plan`` and ``padding``."""

    @property
    def tokens(self) -> Tensor:
        """``[B, S]`` int64."""
        ...

    @property
    def positions(self) -> Tensor | None:
        """Position of each token in its document, ``[B, S]`` int64."""
        ...

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Cumulative document lengths, ``[B, N + 1]`` int32, padded by repeating S."""
        ...


def call_model(model: nn.Module, batch: TokenBatch, *, labels: Tensor | None = None) -> Tensor:
    """Logits of a batch, from a shipped model or a user's own.

    Positions, document boundaries and padding are passed if the batch has them and the model's ``forward`` accepts them; a
    forward that takes only tokens attends across packed documents.

    Args:
        model: The model, with any wrappers around it (DDP, FSDP2, torch.compile, activation checkpointing).
        batch: The tokens, and where documents lie.
        labels: Passed to the ``forward`` of a model whose head computes the loss.

    Returns:
        ``[B, S, V]``; with labels, what the model returns for them.
    """
    accepted = accepted_inputs(model)
    passed = {name: value for name in accepted if (value := getattr(batch, name, None)) is not None}
    if labels is not None:
        passed["labels"] = labels
    return model(batch.tokens, **passed)


def take_logits(model: nn.Module) -> nn.Module:
    """Have a user's module return its logits alone, whatever its ``forward`` returns them in.

    Taken: a tuple or list with the logits before or after a loss, a dict with "logits", an object with ``.logits``. Some forwards
    compute all positions only when they are given targets (nanoGPT); they are given zeros, and the loss is left unread.

    Returns:
        The same module.
    """
    hooks = [model.register_forward_hook(_keep_logits)]
    parameters = inspect.signature(model.forward).parameters
    given = [name for name in ("targets", "labels") if name in parameters and parameters[name].default is None]
    if given and _last_position_only(model):
        hooks.append(model.register_forward_pre_hook(functools.partial(_give_targets, given[0]), with_kwargs=True))
    cast(Any, model).hooks_of_logits = hooks
    return model


def take_whole_output(model: nn.Module) -> None:
    """Undo `take_logits`, for a task whose loss is given all that a user's ``forward`` returns."""
    for hook in getattr(model, "hooks_of_logits", ()):
        hook.remove()


def _keep_logits(_module: nn.Module, _args: Any, output: Any) -> Any:
    if isinstance(output, Mapping):
        return cast("Mapping[str, Any]", output).get("logits", output)
    if isinstance(output, tuple | list) and not hasattr(output, "logits"):
        tensors = [item for item in cast("Sequence[Any]", output) if isinstance(item, Tensor)]
        return next((tensor for tensor in tensors if tensor.ndim == 3), cast("Any", output))
    return getattr(output, "logits", output)


def computes_on(model: nn.Module) -> torch.device:
    """Where inputs of a model belong: with its parameters, or on the device that FSDP brings offloaded ones to."""
    return compute_device(next(model.parameters()))


@contextlib.contextmanager
def evaluating(parts: Iterable[nn.Module]) -> Generator[None]:
    """Inside, in evaluation mode; afterwards, every module is in the mode it was in."""
    was_training = [[(module, module.training) for module in part.modules()] for part in parts]
    for modes in was_training:
        modes[0][0].eval()
    try:
        yield
    finally:
        for modes in was_training:
            modes[0][0].train(modes[0][1])
            for module, training in modes:
                module.training = training


def copy_to_try(model: nn.Module) -> nn.Module:
    """A copy with the same parameters, for a trial forward: what modules keep from their first call stays out of the model."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _last_position_only(model: nn.Module) -> bool:
    """Whether two tokens give one row of logits; False where that cannot be tried."""
    here = next(model.parameters(), torch.empty(0)).device
    try:
        with torch.no_grad():
            logits = copy_to_try(model)(torch.zeros(1, 2, dtype=torch.int64, device=here))
    except Exception:  # the user's own code; a run says what is wrong with it
        return False
    return isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[1] == 1


def _give_targets(name: str, _module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    if len(args) != 1:
        return args, keywords
    # zeros: a rank may hold part of the vocabulary, and a pipeline stage is given hidden states
    return args, {name: torch.zeros(args[0].shape[:2], dtype=torch.int64, device=args[0].device), **keywords}


def accepted_inputs(model: nn.Module, names: Sequence[str] = _OPTIONAL) -> frozenset[str]:
    """Which of ``names`` the model's ``forward`` takes; costs some 20 microseconds."""
    parameters = inspect.signature(unwrap(model).forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return frozenset(names)
    return frozenset(name for name in names if name in parameters)


def active_dropout(parts: Iterable[nn.Module]) -> dict[str, int]:
    """Rates of dropout above 0, and how many modules have each, such as ``{"attn_dropout=0.1": 12}``.

    Counts torch's dropout layers, and numbers between 0 and 1 with "drop" in their name that a module keeps for
    ``F.dropout`` or its attention, as the models of transformers do.
    """
    found: Counter[str] = Counter()
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, _DropoutNd):
                if module.p > 0:
                    found[f"{name.rpartition('.')[2]}={module.p:g}"] += 1
                continue
            rates = ((key, value) for key, value in vars(module).items() if isinstance(value, float) and 0 < value <= 1)
            found.update(f"{key}={value:g}" for key, value in rates if "drop" in key.lower())
    return dict(found)
