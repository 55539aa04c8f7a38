"""A folder to serve: a run, or what a run was exported to, or a model of the Hugging Face hub.

An exported model computes with the library of its format: transformers, onnxruntime, AOTInductor. Each row of a request is
continued by itself, with caches of its own, so that no row is padded.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_train.config import parse_config
from titan_train.config.published import published_tokenizer
from titan_train.export.hf_model import HfModel
from titan_train.export.load import load_exported, refuse_options_of_runs, target_of, using
from titan_train.export.step_model import SteppedModel
from titan_train.files import read_text
from titan_train.generation import LoadedRun, load_run
from titan_train.models.hf.folder import stop_ids_of
from titan_train.tokenizers import ChatTemplate, HfTokenizer, load_tokenizer
from titan_train.tokenizers.huggingface import TEMPLATE_NAME, adds_bos, ids_before_text
from titan_train.tokenizers.protocol import SAVED_NAME

_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length")

Caches = Any
Step = Callable[[Tensor, Tensor, Caches], tuple[Tensor, Caches]]
"""New tokens ``[1, S]``, their positions ``[1, S]`` and the caches to logits ``[1, S, V]`` and the caches; None: it has none."""


def load_served(
    folder: Path, *, step: int | None = None, trust_code: bool = False, code: Sequence[str] = ()
) -> LoadedRun:
    """Load the model and the tokenizer of a folder.

    Args:
        folder: A run's, or one that ``titan-train export`` or ``data download`` made.
        step: Checkpoint of a run; None takes the newest.
        trust_code: As in `titan_train.generation.load_run`, and for an AOTInductor package.
        code: As in `titan_train.generation.load_run`.

    Raises:
        ValueError: It cannot be loaded, or is of a format that is not served.
    """
    target = target_of(folder)
    if target is None:
        return load_run(folder, step=step, trust_code=trust_code, code=code)
    if target == "gguf":
        raise ValueError(
            f"{folder} is for llama.cpp, whose own llama-server serves it. Name the run, or an export --to hf."
        )
    refuse_options_of_runs(folder, {"--step": step is not None, "--code": code})
    exported = load_exported(folder, trust_code=trust_code)
    found = published_tokenizer(folder)
    if not found:
        raise ValueError(f"{folder} has no tokenizer that can be read. Copy tokenizer.json into it.")
    with using(folder):
        stop_ids = stop_ids_of(folder)
        ours = found["kind"] != "hf" or (folder / SAVED_NAME).is_file()
        tokenizer = load_tokenizer(found["path"]) if ours else HfTokenizer.from_folder(folder)
        bos = tokenizer.bos_id if adds_bos(folder) else None
        begin = tuple(ids_before_text(folder)) if bos is None else (bos,)
        model = _of_transformers(exported) if isinstance(exported, HfModel) else _of_steps(exported)
        file = folder / TEMPLATE_NAME
        template = ChatTemplate.of(tokenizer, read_text(file) if file.is_file() else "")
    written: dict[str, Any] = getattr(exported, "description", {})
    length = written.get("seq_len") or model.max_seq_len or 2048
    config = parse_config({"run": {"name": folder.resolve().name}, "model": {"seq_len": length}})
    return LoadedRun(config, model.eval(), tokenizer, written.get("step", 0), template, stop_ids, begin)


class ServedModel(nn.Module):
    """Stands where a run's model does; `titan_train.generation.stream` asks it for a decoder."""

    def __init__(
        self,
        step: Step,
        begin: Callable[[int], Caches],
        *,
        max_seq_len: int | None,
        device: torch.device,
        rope_limits: Sequence[int] = (),
    ) -> None:
        """Take the model as functions.

        Args:
            step: Continues one row.
            begin: Caches for a row of at most so many positions.
            max_seq_len: The most positions; None for no limit.
            device: Where tokens go.
            rope_limits: Lengths above which all positions of a row are rotated otherwise (LongRoPE).
        """
        super().__init__()
        self.rope_limits = tuple(rope_limits)
        self.max_seq_len = max_seq_len
        self._step, self._begin = step, begin
        self._place = nn.Parameter(torch.empty(0, device=device), requires_grad=False)

    def new_decoder(self) -> Callable[[nn.Module, Tensor, Tensor, int], Tensor]:
        """From tokens ``[B, T]``, the length of each row, and the number of the step to next logits ``[B, V]``."""
        caches: list[Caches] = []

        def next_logits(_model: nn.Module, tokens: Tensor, lengths: Tensor, step: int) -> Tensor:
            if step == 0:
                caches[:] = [None] * len(tokens)
            found: list[Tensor] = []
            for row, length in enumerate(lengths.tolist()):
                first = length - 1
                if caches[row] is None or first in self.rope_limits:
                    caches[row], first = self._begin(tokens.shape[1]), 0
                positions = torch.arange(first, length, device=tokens.device)[None]
                logits, caches[row] = self._step(tokens[row : row + 1, first:length], positions, caches[row])
                found.append(logits[:, -1].to(tokens.device))
            return torch.cat(found)

        return next_logits


def _of_steps(exported: Any) -> ServedModel:
    assert isinstance(exported, SteppedModel)
    return ServedModel(
        lambda tokens, positions, caches: exported.step(tokens.contiguous(), positions.contiguous(), caches),
        lambda length: exported.begin(1, length),
        max_seq_len=exported.description["max_positions"],
        device=torch.device("cpu"),
    )


def _of_transformers(exported: HfModel) -> ServedModel:
    from titan_train.models.hf.cache import NAMES  # imports transformers
    from titan_train.models.hf.configuration import short_ropes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = exported.module.to(device)

    taken = inspect.signature(model.forward).parameters
    name = next((name for name in NAMES if name in taken), "past_key_values")

    def step(tokens: Tensor, positions: Tensor, caches: Caches) -> tuple[Tensor, Caches]:
        out = model(input_ids=tokens, use_cache=True, **{name: caches})
        return out.logits.float(), getattr(out, name, None)

    config = model.config.get_text_config()
    limit = next((int(found) for name in _POSITIONS if (found := getattr(config, name, None))), None)
    if limit is not None and exported.positions is not None:
        limit = min(limit, exported.positions)  # RoBERTa's number counts two rows that no token takes
    limits = tuple(short_ropes(config))
    return ServedModel(step, lambda length: None, max_seq_len=limit, device=device, rope_limits=limits)
