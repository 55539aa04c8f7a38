"""Low-rank adapters (LoRA, arXiv:2106.09685) of the peft library beside frozen weights: built, filled, merged, written.

A linear ``W`` becomes ``W + (alpha / rank) B A``. Only A and B are trained; B starts at zero, so that the model starts as it
was. Checkpoints hold the frozen weights as well, so that a run is complete in its folder.
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titan_train.models.traits import traits_of
from titan_train.values import did_you_mean

_NAME = "default"
BASE = ".base_layer."
"""In the name of a frozen weight that has an adapter."""


def add_adapters(model: Any, *, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Put adapters beside linears of ``model``, in place, and freeze everything else.

    Args:
        model: Of `titan_train.models.hf.build`.
        rank: Rows of A and columns of B.
        alpha: The scale is ``alpha / rank``.
        targets: Last names of linears; empty takes every linear of the repeated layers.

    Raises:
        ValueError: peft is missing, or no linear has such a name.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as err:
        raise ValueError(f"model.lora_rank={rank} needs the peft library. Install titan-train[hf].") from err
    inside: list[nn.Module] = model.repeated_layers()
    linears = sorted(
        {name.rpartition(".")[2] for layer in inside for name, m in layer.named_modules() if _is_linear(m)}
    )
    for target in targets:
        if target not in linears:
            raise ValueError(
                f"model.lora_targets: no linear of the layers is named {target!r}. {did_you_mean(target, linears)}They are "
                f"{', '.join(linears)}."
            )
    config = LoraConfig(r=rank, lora_alpha=cast(int, alpha), target_modules=list(targets or linears), lora_dropout=0.0)
    inject_adapter_in_model(config, model, adapter_name=_NAME)
    model.lora = config
    for name, layer in [(name, m) for name, m in model.named_modules() if hasattr(m, "lora_A")]:
        holder = model.get_submodule(name.rpartition(".")[0])
        counts = [
            (counter, attribute)
            for counter in (holder, *holder.children())
            for attribute in ("num_heads", "num_kv_heads")
            if isinstance(getattr(counter, attribute, None), int)
        ]
        counts += traits_of(holder).head_counts
        layer.head_counts = layer.lora_B.head_counts = counts  # for tensor parallelism, as those of `SplitLinear`


def _is_linear(module: nn.Module) -> bool:
    """Whether it computes what `nn.Linear` does: that of grouped inputs (DeepSeek-V4) is one by its class only."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def fill_adapter(fqn: str, tensor: Tensor, generator: torch.Generator) -> bool:
    """Fill a parameter of an adapter with its initial value; False for any other parameter."""
    if ".lora_B." in fqn:
        tensor.zero_()
        return True
    if ".lora_A." in fqn:
        nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        return True
    return False


def merge_adapters(model: nn.Module) -> nn.Module:
    """A copy of a whole model, on this process, with every adapter added to its weight and then removed."""
    from peft.tuners.lora import LoraLayer

    merged = copy.deepcopy(model)
    adapted: dict[str, Any] = {name: m for name, m in merged.named_modules() if isinstance(m, LoraLayer)}
    for name, layer in adapted.items():
        layer.merge()
        merged.set_submodule(name, layer.get_base_layer())
    merged.lora = cast("Any", None)
    return merged


def merged_step(merged: nn.Module, root: Path, group: ProcessGroup | None = None) -> Path:
    """Write what `merge_adapters` gives as a checkpoint in ``root``, and return the checkpoint's folder.

    ``group`` is of this rank alone, where torch.distributed is in use.
    """
    from titan_ckpt import Checkpointer, TrainState

    with Checkpointer(root, group=group) as checkpointer:
        checkpointer.save(0, TrainState(model=merged, rng=False))
    return root / "step-00000000"


def save_adapter(model: Any, folder: Path, *, base: str) -> None:
    """Write the adapters as peft reads them: ``adapter_model.safetensors`` and ``adapter_config.json``.

    Args:
        model: With adapters and their weights, whole on this process.
        folder: Made if it is missing.
        base: Name or path of the model that they belong to.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state: Mapping[str, Tensor] = model.state_dict()
    adapters = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": value.detach().contiguous().cpu()
        for name, value in state.items()
        if ".lora_" in name
    }
    save_file(adapters, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": model.lora.r,
        "lora_alpha": model.lora.lora_alpha, "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "fan_in_fan_out": False, "target_modules": sorted(model.lora.target_modules),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
