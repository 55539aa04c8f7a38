"""Which model is trained: a shipped configuration, a folder of Hugging Face, or a user's own module by dotted path."""

import re
from dataclasses import dataclass, field

from titan_train.models.registry import list_models
from titan_train.nearest import did_you_mean

_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model, and the length of the sequences it is trained on."""

    name: str = "llama3_debug"
    """A shipped model, such as llama3_8b (`titan-train list` shows all); "hf:DIR", the decoder of transformers that the
    config.json of a Hugging Face folder describes; or "package.module:callable" that returns your own nn.Module: a class,
    or a function annotated to return one, of an installed package or a folder of --code."""

    args: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Changes to the shipped model's arguments, such as {num_layers = 4}, to fields of config.json ("hf:DIR"; a dot leads
    into an object: {"rope_parameters.rope_theta" = 1e6}), or the arguments of your own callable."""

    seq_len: int = 512
    """Tokens in one training sequence."""

    init: str = ""
    """Where the first weights come from: "hf:DIR" reads a Hugging Face folder of the same family, under any layout; empty
    draws them from the seed. A run that resumes takes its checkpoint's."""

    def __post_init__(self) -> None:
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
        if self.init and not (self.init.startswith("hf:") and self.init != "hf:"):
            raise ValueError(f"model.init={self.init!r} is not a source of weights. Write 'hf:DIR', or leave it empty.")
        if self.seq_len < 1:
            raise ValueError(f"model.seq_len={self.seq_len} must be at least 1 token; the nearest valid choice is 1.")
