"""Which model is trained: a shipped configuration, or a user's own module by dotted path."""

import re
from dataclasses import dataclass, field

from titan_train.nearest import did_you_mean

# The names that `titan_train.models.list_models` returns. They are repeated here because a configuration is checked
# without importing torch; a test holds the two together.
SHIPPED_MODELS: tuple[str, ...] = (
    "llama3_debug",
    "llama3_small",
    "llama3_1b",
    "llama3_3b",
    "llama3_8b",
    "llama3_70b",
    "llama3_405b",
    "gpt_debug",
    "gpt3_175b",
    "qwen3_debug",
    "qwen3_moe_debug",
    "qwen3_0.6b",
    "qwen3_1.7b",
    "qwen3_4b",
    "qwen3_8b",
    "qwen3_14b",
    "qwen3_32b",
    "qwen3_30b_a3b",
    "qwen3_235b_a22b",
    "deepseek_debug",
    "deepseek_v2_lite",
    "deepseek_v3",
)

_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model, and the length of the sequences it is trained on."""

    name: str = "llama3_debug"
    """A shipped model, such as llama3_8b (`titan-train list` shows all), or "package.module:callable" that returns
    your own nn.Module."""

    args: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Changes to the shipped model's arguments, such as {num_layers = 4}, or the arguments of your own callable."""

    seq_len: int = 512
    """Tokens in one training sequence."""

    def __post_init__(self) -> None:
        if ":" in self.name:
            if _DOTTED_PATH.fullmatch(self.name) is None:
                raise ValueError(
                    f"model.name={self.name!r} is not a dotted path: write the module, one colon, and the callable in "
                    "it, such as 'my_package.my_model:build'."
                )
        elif self.name not in SHIPPED_MODELS:
            raise ValueError(
                f"model.name={self.name!r} is not a shipped model. {did_you_mean(self.name, SHIPPED_MODELS)}Shipped are "
                f"{', '.join(SHIPPED_MODELS)}; your own module is named 'package.module:callable'."
            )
        if self.seq_len < 1:
            raise ValueError(f"model.seq_len={self.seq_len} must be at least 1 token; the nearest valid choice is 1.")
