"""Which model is trained: a shipped configuration, a folder of Hugging Face, or a user's own module by dotted path."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from titan_train.models.registry import list_models
from titan_train.values import Count, Range, check_values, did_you_mean

_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model, and the length of the sequences it is trained on."""

    name: str = "llama3_debug"
    """A shipped model, such as llama3_8b (`titan-train list` shows all); "hf:DIR", the decoder of transformers that the
    config.json of a Hugging Face folder describes; or "package.module:callable" that returns your own nn.Module: a class,
    or a function annotated to return one, of a folder or an installed package that --code names."""

    args: dict[str, int | float | bool | str | tuple[int | float | bool | str, ...]] = field(default_factory=dict)
    """Changes to the shipped model's arguments, such as {num_layers = 4}, to fields of config.json ("hf:DIR"; a dot leads
    into an object: {"rope_parameters.rope_theta" = 1e6}), or the arguments of your own callable. Values are numbers,
    strings, booleans, or lists of these."""

    parametrization: Literal["standard", "mup"] = "standard"
    """mup scales initial weights and learning rates by width and depth, so that settings found on a small model serve a large
    one; standard does not. For adamw, muon and the shipped decoders of text."""

    base_dim: Annotated[int, Range(0, note="with mup, the dim of the small model")] = 0
    """With parametrization = "mup": dim of the model that optimizer.lr was found on. All widths grow with dim, heads by
    number."""

    base_layers: Annotated[int, Range(0, note="0 does not scale by depth")] = 0
    """With parametrization = "mup": its layers, so that each layer adds a share of its output; 0 does not scale by depth."""

    task: str = ""
    """What the model is trained on: "text", or a task of an installed package; empty takes what the model's family says."""

    seq_len: Count = 512
    """Tokens in one training sequence."""

    init: str = ""
    """Where the first weights come from: "hf:DIR" reads a Hugging Face folder of the same family, under any layout. Its
    config.json sets every argument that you do not set, and its tokenizer is used unless you name one. "run:DIR", "run:DIR@STEP"
    and "run:DIR@best" take the weights of another run in the same way, and none of its optimizer and data position. Empty draws
    weights from the seed. A run that resumes takes its checkpoint's."""

    init_changes: tuple[str, ...] = ()
    """Arguments that may differ from those of model.init's folder, such as ["rope_theta"] for longer sequences, or
    ["vocab_size"] for new tokens, whose rows then start as the mean of the old ones; ["tokenizer"] allows other token
    ids than the folder's."""

    lora_rank: Annotated[int, Range(0, note="0 trains the weights")] = 0
    """With "hf:DIR": train adapters of this rank (LoRA, by peft) beside frozen weights; 0 trains the weights."""

    lora_alpha: Annotated[float, Range(above=0)] = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""

    lora_targets: tuple[str, ...] = ()
    """Last names of the linears that get adapters, such as ["q_proj", "v_proj"]; empty takes all linears of the layers."""

    def __post_init__(self) -> None:
        check_values("model", self)
        if self.name.startswith("hf:"):
            if self.name == "hf:":
                raise ValueError(
                    "model.name='hf:' names no folder. Write 'hf:DIR', with the folder of a published model."
                )
        elif ":" in self.name:
            if _DOTTED_PATH.fullmatch(self.name) is None:
                raise ValueError(
                    f"model.name={self.name!r} is not a dotted path: write the module, one colon, and the callable in "
                    "it, such as 'my_package.my_model:build'."
                )
        elif self.name not in (known := list_models()):
            raise ValueError(
                f"model.name={self.name!r} is not a known model. {did_you_mean(self.name, known)}Known models are "
                f"{', '.join(known)}. Name your own module as 'package.module:callable'."
            )
        if self.init and not (self.init.startswith(("hf:", "run:")) and self.init not in ("hf:", "run:")):
            raise ValueError(
                f"model.init={self.init!r} is not a source of weights. Write 'hf:DIR' or 'run:DIR@STEP', or leave it empty."
            )
        if (self.parametrization == "mup") != bool(self.base_dim) or (self.base_layers and not self.base_dim):
            raise ValueError(
                f"model.parametrization={self.parametrization!r}, model.base_dim={self.base_dim} and "
                f"model.base_layers={self.base_layers}: 'mup' needs base_dim, the width that optimizer.lr was found on, and "
                "nothing else takes it. Set parametrization='mup' and base_dim, or neither."
            )
        if self.parametrization == "mup" and (self.init or ":" in self.name):
            raise ValueError(
                f"model.parametrization='mup' says how a shipped decoder's weights start, and model.name={self.name!r} with "
                f"model.init={self.init!r} has its own. Set parametrization='standard'."
            )
        if self.init_changes and not self.init:
            raise ValueError(
                f"model.init_changes={list(self.init_changes)} says what may differ from model.init, which is empty. Set "
                "model.init, or leave it out."
            )
        if self.lora_rank and not self.name.startswith("hf:"):
            raise ValueError(
                f"model.lora_rank={self.lora_rank} needs a model of transformers, and model.name is {self.name!r}. Write "
                "model.name='hf:DIR', or set model.lora_rank=0."
            )
