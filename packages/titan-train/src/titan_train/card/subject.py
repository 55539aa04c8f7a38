"""What a card is of: a decoder that transformers has a class for, and a small one of the same kind in a folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from titan_train.models.build import SkipRandomFill
from titan_train.models.hf.cut import VOCABULARY as CUT_VOCABULARY
from titan_train.models.hf.cut import cuts, layers_that_show_all
from titan_train.models.hf.decoder import HFModel
from titan_train.models.hf.device import keep_kernels_on_gpus
from titan_train.models.hf.folder import PREFIX, read_published
from titan_train.models.registry import find_model

VOCABULARY = 264
"""Of the small model: bytes and a few tokens of the tokenizer."""
_MOST = 60_000_000
"""Parameters of a small model; one with more takes too long to train a dozen times."""
_SEQ_LEN = 64


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that a card is of."""

    name: str
    """As the user names it: ``hf:DIR``, or a shipped model."""
    published: Mapping[str, Any]
    """Its ``config.json``."""

    @property
    def kind(self) -> str:
        """The family's name in transformers."""
        return str(self.published.get("model_type"))


@dataclass(frozen=True, slots=True)
class Small:
    """A small model of the subject's kind, with random weights, as transformers writes it."""

    folder: Path
    layers: int
    parameters: int


def read_subject(name: str) -> Subject:
    """Find what ``hf:DIR`` or the name of a shipped model describes.

    Raises:
        ValueError: There is no such folder or model, or transformers has no decoder class for it.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if name.startswith(PREFIX):
        published: Mapping[str, Any] = read_published(name, key="MODEL")
    else:
        family, args = find_model(name)
        published = cast("Mapping[str, Any]", family.load_hf().config_of(args))
    kind = published.get("model_type")
    if kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"{name}: the installed transformers has no decoder of the kind {kind!r} to compare with. A card is of a language "
            "model; `titan-train doctor` shows the version of transformers."
        )
    return Subject(name, published)


def write_small(subject: Subject, folder: Path) -> Small:
    """Write a small model of the same kind by transformers' own code, with weights that hide nothing.

    Raises:
        ValueError: No cut of the configuration runs in transformers.
    """
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[subject.kind]
    # not so far from the initial weights that rounding of a family's own code is what is seen; layers for four stages
    found = cut_small(kind.from_dict(dict(subject.published)), folder, least_layers=4, spread=0.3)
    if isinstance(found, str):
        raise ValueError(f"{subject.name}: {subject.kind}: {found}.")
    return found


def cut_small(whole_config: Any, folder: Path, *, least_layers: int, spread: float) -> Small | str:
    """Write the first cut of a configuration that runs, or say why none does.

    Args:
        whole_config: Of transformers.
        folder: To write.
        least_layers: Of the small model, where the whole has as many.
        spread: What is added to each weight, for unit inputs; a tenth of it to each bias and norm.

    Raises:
        Exception: transformers cannot build the whole model.
    """
    from transformers import AutoModelForCausalLM

    kind = type(whole_config)
    with torch.device("meta"), SkipRandomFill():
        whole: Any = AutoModelForCausalLM.from_config(whole_config, dtype=torch.float32)
    keep_kernels_on_gpus(whole)  # and the small ones: they share its module's code
    layers = HFModel.repeated_layers(whole)
    number = max(least_layers, layers_that_show_all(layers))
    reason = ""
    for cut in cuts(whole_config.to_dict(), depth=len(layers), layers=number):
        try:
            config = kind.from_dict(_with_bytes(cut))
            with torch.device("meta"), SkipRandomFill():
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if size > _MOST:  # counted first: real weights of an uncut blt take 13 GB
                reason = reason or "not small"
                continue
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                model: Any = AutoModelForCausalLM.from_config(kind.from_dict(cut), dtype=torch.float32)
            _stir(model, spread)
            model.eval()(torch.arange(24)[None] + 3, use_cache=False).logits.sum().backward()
            model.zero_grad()
            model.save_pretrained(folder)
        except Exception as err:  # a family's own code may raise anything: these widths do not fit
            reason = f"no small one runs in transformers: {type(err).__name__}"
            continue
        return Small(folder, len(HFModel.repeated_layers(model)), size)
    return reason


def _with_bytes(config: dict[str, Any]) -> dict[str, Any]:
    """Room for bytes, as it is read again from JSON; and nothing random, which two programs draw differently."""
    for key, value in config.items():
        if isinstance(value, dict):
            _with_bytes(cast("dict[str, Any]", value))
        elif not isinstance(cast("Any", key), str):  # labels by number
            continue
        elif "vocab_size" in key and value == CUT_VOCABULARY:
            config[key] = VOCABULARY
        elif isinstance(value, float) and any(word in key for word in ("drop", "jitter")):
            config[key] = 0.0
    return config


@torch.no_grad()
def _stir(model: torch.nn.Module, spread: float) -> None:
    """Biases that are not zero, norms that are not one."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        scale = spread * (0.1 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5)
        parameter += torch.randn(parameter.shape, generator=generator) * scale


def settings(small: Small, work: Path, *, masked: bool) -> str:
    """The configuration that every run of a card starts from, as TOML."""
    return f"""[run]
dir = {json.dumps(str(work / "runs"))}
seed = 7

[model]
init = {json.dumps(f"{PREFIX}{small.folder}")}
seq_len = {_SEQ_LEN}

[tokenizer]
kind = "bytes"

[data]
cache_dir = {json.dumps(str(work / "cache"))}
document_mask = {json.dumps(masked)}

[[data.sources]]
name = "stdlib"
kind = "stdlib"
exclude = ["[b-z]*"]

[train]
steps = 6
global_batch = 4
microbatch = 1

[optimizer]
lr = 1e-4

[schedule]
name = "constant"
warmup_steps = 0

[validation]
every = 0

[checkpoint]
every = 3
async_save = false

[metrics]
progress = "off"
report = false

[launch]
device = "cpu"
max_restarts = 0
"""
