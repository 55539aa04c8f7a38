"""A Hugging Face folder as transformers reads it."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_train.export.gate import followed


class HfModel:
    """An exported folder, loaded with transformers in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        """Load it.

        Raises:
            ValueError: transformers is not installed.
        """
        self._load(folder)

    def _load(self, folder: Path, **how: Any) -> None:
        transformers = _transformers()
        # a folder's own Python code is refused, not asked about, and weights in a pickle are not read
        safe = {"trust_remote_code": False, "local_files_only": True}
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, **safe, **how
        )
        self._model: Any = loaded.eval() if how else loaded.eval().float()
        self._tokenizer: Any = None
        if (folder / "tokenizer.json").is_file():
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **safe)

    def logits(self, tokens: Tensor) -> Tensor:
        """``[B, S]`` to ``[B, S, V]``."""
        with torch.no_grad():
            return self._model(tokens).logits.float()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely tokens after a prompt, by transformers' own ``generate``."""
        return self._model.generate(
            torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip

    def ids(self, text: str) -> list[int] | None:
        """The ids of a text."""
        return None if self._tokenizer is None else self._tokenizer(text, add_special_tokens=False)["input_ids"]


class StreamedHfModel(HfModel):
    """The same with every matrix read from the folder when it is used: memory for one layer, at the cost of reading."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        """Load it; weights whose layout transformers changes go to ``scratch``, in float32.

        Raises:
            ValueError: transformers or accelerate is not installed.
        """
        if importlib.util.find_spec("accelerate") is None:
            raise ValueError(
                "an export on several ranks is compared layer by layer with the accelerate library, which is not installed. "
                "Install titan-train[hf], or pass --no-gate to write the folder without the proof."
            )
        self._load(folder, device_map={"": "disk"}, offload_folder=str(scratch))

    def follow(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The most likely token at each place of the texts, by one forward."""
        return self.logits(followed(prompts, texts))[:, len(prompts[0]) - 1 :].argmax(-1).tolist()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as err:
        raise ValueError(
            "the export is proven with transformers, which is not installed. Install titan-train[hf], or pass --no-gate to "
            "write the folder without the proof."
        ) from err
    return transformers
