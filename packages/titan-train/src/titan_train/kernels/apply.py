"""Put chosen kernels into a model, in place."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan_train.config import Config, KernelsConfig
from titan_train.files import read_toml
from titan_train.kernels import forms
from titan_train.kernels.registry import OPERATIONS, find_kernel, kernels_of, measured_choice
from titan_train.models.common.loss import TokenLoss, whole_vocabulary_loss
from titan_train.models.common.moe.experts import Experts
from titan_train.models.common.norm import RMSNorm
from titan_train.models.common.rope import rotate_pair
from titan_train.models.common.shared_input import GatedInput
from titan_train.models.flux.rope import rotate_neighbours

Chosen = Mapping[str, Callable[..., Any]]
"""From an operation to the function that is to compute it; operations left to the model are not in it."""


def choose_kernels(config: KernelsConfig, device: torch.device) -> Chosen:
    """What a configuration asks for.

    Args:
        config: The section ``[kernels]``.
        device: Where the model runs.

    Raises:
        ValueError: A kernel cannot run here, or the hardware file cannot be read.
    """
    measured: dict[str, Any] = {}
    if config.measured:
        path = Path(config.measured)
        if not path.is_file():
            raise ValueError(
                f"kernels.measured={config.measured!r}: there is no such file. Write it with titan-train doctor --bench FILE."
            )
        measured = read_toml(path)
    chosen: dict[str, Callable[..., Any]] = {}
    for operation in OPERATIONS:
        name, source = getattr(config, operation), f"kernels.{operation}"
        if name == "auto":
            name, source = measured_choice(measured, operation), f"{config.measured}: kernels.{operation}.chosen"
        if name is None:
            continue
        kernel = find_kernel(operation, name, device, source=source).load()
        chosen[operation] = _in_eager_mode(kernel, kernels_of(operation)[0].load())
        if (operation, name) == ("rope", "titan"):
            chosen["rope_neighbours"] = _in_eager_mode(forms.rope_neighbours_titan, forms.rope_neighbours_torch)
    return chosen


def check_kernels(config: Config, model: nn.Module, *, tp: int) -> None:
    """Refuse before any rank starts what `choose_kernels`, `check_taken` and `kernel_loss` refuse on a rank.

    What another machine has installed is not known here: that a kernel can run is checked for runs on the CPU only.

    Args:
        config: The run's.
        model: The whole model; it stays as it is.
        tp: Ranks that hold a part of the logits each.

    Raises:
        ValueError: Names the key.
    """
    if config.launch.device == "cpu":
        choose_kernels(config.kernels, torch.device("cpu"))
    named = [operation for operation in OPERATIONS if getattr(config.kernels, operation) != "auto"]
    counted = {name: sum(1 for _ in _takers(model, name)) for name in named if name != "cross_entropy"}
    if config.kernels.rope == "titan":
        counted["rope"] += sum(1 for _ in _takers(model, "rope_neighbours"))
    check_taken(counted, config.kernels, config.model.name)
    if "cross_entropy" in named and (tp > 1 or config.train.fused_loss or config.train.z_loss):
        raise _not_whole_logits(config)


def apply_kernels(model: nn.Module, chosen: Chosen) -> dict[str, int]:
    """Give every module of ``model`` that computes an operation its kernel.

    Args:
        model: Or a pipeline stage of it.
        chosen: From `choose_kernels`.

    Returns:
        How many modules took each; ``cross_entropy`` belongs to the loss, and is not counted.
    """
    taken = {name: 0 for name in chosen if name in OPERATIONS and name != "cross_entropy"}
    for name, kernel in chosen.items():
        for module, attribute in list(_takers(model, name)):
            vars(module)[attribute] = kernel
            taken["rope" if name == "rope_neighbours" else name] += 1
    return taken


def _takers(model: nn.Module, operation: str) -> Iterator[tuple[nn.Module, str]]:
    """Every module that computes ``operation``, and the attribute that a kernel for it goes to."""
    plain = {"rope": rotate_pair, "rope_neighbours": rotate_neighbours}
    for module in model.modules():
        if operation == "rms_norm" and isinstance(module, RMSNorm):
            yield module, "kernel"
        elif operation == "swiglu" and isinstance(module, GatedInput | Experts):
            yield module, "swiglu_kernel"
        elif operation in plain and getattr(module, "rotate", None) is plain[operation]:
            yield module, "rotate"


def kernel_loss(
    loss: TokenLoss, chosen: Chosen, config: Config, vocab_size: int | None, *, whole_vocabulary: bool
) -> TokenLoss:
    """The loss on whole logits, by the chosen kernel where there is one.

    Args:
        loss: The task's.
        chosen: From `choose_kernels`.
        config: The run's.
        vocab_size: The tokenizer's; None for a model without one.
        whole_vocabulary: No rank holds a part of the logits only.

    Raises:
        ValueError: It was asked for by name, and something else computes the loss.
    """
    if "cross_entropy" not in chosen:
        return loss
    train = config.train
    if vocab_size is not None and whole_vocabulary and not train.fused_loss and not train.z_loss:
        return whole_vocabulary_loss(vocab_size, cross_entropy=chosen["cross_entropy"])
    if config.kernels.cross_entropy != "auto":
        raise _not_whole_logits(config)
    return loss


def check_taken(taken: Mapping[str, int], config: KernelsConfig, model: str) -> None:
    """Refuse a kernel that was asked for by name and that no module of the whole model takes.

    Raises:
        ValueError: Names the key.
    """
    for operation, count in taken.items():
        if count == 0 and getattr(config, operation) != "auto":
            raise ValueError(
                f"kernels.{operation}={getattr(config, operation)!r}: {model} has no module that takes a kernel for it, so "
                "nothing would change. Leave it at 'auto'."
            )


def _not_whole_logits(config: Config) -> ValueError:
    return ValueError(
        f"kernels.cross_entropy={config.kernels.cross_entropy!r} computes the loss of a text model from whole logits: it "
        "needs train.fused_loss=false, train.z_loss=0 and parallel.tp=1. Leave it at 'auto'."
    )


def _in_eager_mode(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        return plain(*operands) if torch.compiler.is_compiling() else kernel(*operands)

    return run
