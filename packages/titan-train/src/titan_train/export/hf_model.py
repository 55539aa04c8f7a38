"""A Hugging Face folder as transformers reads it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from titan_ckpt.interop.safetensors_folder import SafetensorsReader
from titan_ckpt.state.dtypes import DTYPES
from torch import Tensor

from titan_train.export.gate import WITHOUT_PROOF, check_positions, followed
from titan_train.lazy import require
from titan_train.models.hf.device import keep_kernels_on_gpus
from titan_train.models.hf.folder import PREFIX, read_published
from titan_train.trust.published import refuse_code_in

_DEQUANTIZED = ("fp8", "mxfp8", "mxfp4", "compressed-tensors")
"""Values of ``quant_method`` whose weights transformers can read as plain numbers."""


class HfModel:
    """An exported folder, loaded with transformers in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        """Load it.

        Raises:
            ValueError: transformers is not installed, or the folder does not hold the model of its ``config.json``, whole.
        """
        self._load(folder)

    def _load(self, folder: Path, **how: Any) -> None:
        transformers = _transformers()
        from titan_train.models.hf.decoder import learned_positions  # imports transformers

        files = SafetensorsReader(folder)
        # a folder's own Python code is refused, not asked about, and weights in a pickle are not read
        refuse_code_in(folder, known=transformers.CONFIG_MAPPING)
        safe = {"trust_remote_code": False, "local_files_only": True}
        config = transformers.AutoConfig.from_pretrained(folder, **safe)
        _dequantize(folder, config)
        seeing = hasattr(config, "vision_config")
        kind: Any = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
        # transformers would draw what is missing at random, and only warn
        loaded, report = kind.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **safe, **how,
        )  # fmt: skip
        keep_kernels_on_gpus(loaded)
        # the folder's own may change logits (a penalty of repetition), which `greedy` is to be without
        loaded.generation_config = transformers.GenerationConfig()
        _check_complete(folder, report)
        _check_dtypes(folder, files, loaded)
        self.module: Any = loaded.eval() if how else loaded.eval().float()
        self.positions = None if seeing else learned_positions(loaded)  # those of patches are others
        self._tokenizer: Any = None
        if (folder / "tokenizer.json").is_file():
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **safe)

    def logits(self, tokens: Tensor) -> Tensor:
        check_positions(tokens.shape[1], self.positions)
        with torch.no_grad():
            return self.module(tokens).logits.float()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely tokens after a prompt, by transformers' own ``generate``."""
        check_positions(len(prompt) + count - 1, self.positions)  # the last token is not read
        return self.module.generate(
            torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip

    def ids(self, text: str) -> list[int] | None:
        return None if self._tokenizer is None else self._tokenizer(text, add_special_tokens=False)["input_ids"]


class StreamedHfModel(HfModel):
    """The same with every matrix read from the folder when it is used: memory for one layer, at the cost of reading."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        """Load it; weights whose layout transformers changes go to ``scratch``, in float32.

        Raises:
            ValueError: transformers or accelerate is not installed.
        """
        require("accelerate", extra="hf", purpose="the comparison on several ranks", otherwise=WITHOUT_PROOF)
        self._load(folder, device_map={"": "disk"}, offload_folder=str(scratch))

    def follow(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[list[int]]:
        return self.logits(followed(prompts, texts))[:, len(prompts[0]) - 1 :].argmax(-1).tolist()


def _dequantize(folder: Path, config: Any) -> None:
    """Have quantized weights read as plain numbers on every machine.

    Where there is a GPU, transformers keeps them as they are, even for a model on the CPU, and computes with kernels that the
    library `kernels` fetches from a hub.
    """
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if not isinstance(found, dict):
            continue
        quantization = cast("dict[str, Any]", found)
        if quantization.get("quant_method") not in _DEQUANTIZED:
            raise ValueError(
                f"{folder}: its weights are quantized by {quantization.get('quant_method')!r} (quantization_config of "
                "config.json), which is not read here. Take the folder that it was made from, or convert it to bfloat16 with the "
                "tool that wrote it."
            )
        quantization["dequantize"] = True


def _check_complete(folder: Path, report: Mapping[str, Any]) -> None:
    """Refuse a folder whose tensors are not those of the model, by what transformers reports of loading it."""
    missing = sorted(report["missing_keys"])
    unexpected = [name for name in sorted(report["unexpected_keys"]) if not _is_ahead(folder, name)]
    other = [
        f"{name} has shape {list(have)}, not {list(want)}" for name, have, want in sorted(report["mismatched_keys"])
    ]
    problems = [f"{len(missing)} tensors are missing {missing[:4]}"] if missing else []
    problems += [f"{len(unexpected)} tensors are unexpected {unexpected[:4]}"] if unexpected else []
    problems += [*other[:4], *(["..."] if len(other) > 4 else [])]
    if problems:
        raise ValueError(
            f"{folder} does not hold the model of its config.json: {'; '.join(problems)}. Its answers would be those of "
            "another model. Export or fetch the complete folder again."
        )


def _is_ahead(folder: Path, name: str) -> bool:
    """Whether a tensor is of a module for a token further ahead that ``config.json`` announces; transformers has none."""
    published = read_published(f"{PREFIX}{folder}")
    layers, further = published.get("num_hidden_layers") or 0, published.get("num_nextn_predict_layers") or 0
    number = re.match(r"(?:.*\.)?layers\.(\d+)\.", name)
    return number is not None and layers <= int(number[1]) < layers + further


def _check_dtypes(folder: Path, files: SafetensorsReader, model: Any) -> None:
    """Refuse numbers that mean something only with scales, where ``config.json`` does not announce any."""
    if "quantization_config" in read_published(f"{PREFIX}{folder}"):
        return
    weights = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    for name, view in files.views().items():
        plain = view.dtype in DTYPES and DTYPES[view.dtype].is_floating_point and DTYPES[view.dtype].itemsize > 1
        if not plain and (name in weights or name.endswith(".weight")):
            raise ValueError(
                f"{folder}: {name} is {view.dtype}, and config.json has no quantization_config that says what it means. Export "
                "or fetch the complete folder again."
            )


def _transformers() -> Any:
    return require("transformers", extra="hf", purpose="the comparison", otherwise=WITHOUT_PROOF)
