"""A run or an exported folder as something that scores and continues tokens."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_train.eval.ranks import Ranks
from titan_train.export.load import load_exported, refuse_options_of_runs, target_of, using
from titan_train.export.step_model import DESCRIPTION
from titan_train.export.tokenizer_json import folder_ids, ids_until, special_tokens
from titan_train.files import read_text
from titan_train.generation import LoadedRun, generate, load_run
from titan_train.models.hf.folder import stop_ids_of
from titan_train.models.traits import traits_of
from titan_train.tokenizers import HfTokenizer
from titan_train.tokenizers.chat_template import answer_stops
from titan_train.tokenizers.huggingface import ids_before_text


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalModel:
    """The operations of a model that evaluation needs."""

    name: str
    logits: Callable[[Tensor], Tensor]
    """``[B, S]`` int64 to ``[B, S, V]`` float32, on the device of the input or the CPU."""
    encode: Callable[[str], list[int]]
    """A text's ids, without tokens that begin or end it."""
    decode: Callable[[Sequence[int]], str]
    greedy: Callable[[Sequence[int], int], list[int]]
    """The most likely tokens after a prompt, at most so many, up to a token that ends a text or an answer."""
    prefix_id: int
    """Begins a text that has nothing before it: the beginning-of-text token, else the end-of-text token."""
    eos_id: int
    max_length: int
    """Tokens that the model is asked to read at once."""
    begin_ids: Sequence[int] = ()
    """What the tokenizer puts before a text where special tokens are asked for."""
    begin_name: str = ""
    """Begins a text that has them already."""
    end_words: Sequence[str] = ()
    """Words that end an answer, and are no tokens of their own."""
    device: torch.device | None = None
    """Where tokens go; None is the CPU."""

    def encode_begun(self, text: str) -> list[int]:
        """A text's ids behind `begin_ids`, once."""
        return [*self.begin_ids, *self.encode(text.removeprefix(self.begin_name))]


def load_eval_model(
    folder: Path,
    *,
    step: int | None = None,
    max_length: int | None = None,
    device: str | None = None,
    trust_code: bool = False,
    code: Sequence[str] = (),
    ranks: Ranks | None = None,
) -> EvalModel:
    """Load a run's folder or an exported one. Collective over ``ranks``.

    Args:
        folder: The folder.
        step: Which checkpoint of a run; None takes the newest.
        max_length: Tokens to read at once; None takes the length of the training sequences of a run, or what an exported
            folder says of its model.
        device: Where a run's model goes; None takes a GPU if there is one.
        trust_code: As in `load_run`, and in `load_exported`.
        code: As in `load_run`.
        ranks: All of them load the model, and take the same checkpoint, though the run may save another meanwhile.

    Raises:
        ValueError: It is neither, or cannot be loaded; ``step`` or ``code`` for an exported folder.
    """
    if target_of(folder) is not None:
        refuse_options_of_runs(folder, {"--step": step is not None, "--code": code})
        return _of_export(folder, max_length, trust_code)
    peers = ranks.group if ranks is not None else None
    run = load_run(folder, step=step, device=device, peers=peers, trust_code=trust_code, code=code)
    return eval_model_of(run, folder.resolve().name, max_length=max_length)


def eval_model_of(run: LoadedRun, name: str, *, max_length: int | None = None) -> EvalModel:
    """A loaded run.

    Raises:
        ValueError: ``max_length`` exceeds the positions that the model has learned.
    """
    tokenizer, model = run.tokenizer, run.model
    learned = traits_of(model).max_seq_len
    length = max_length or run.config.model.seq_len
    if learned is not None and length > learned:
        raise ValueError(f"max_length={length}, but the model has learned {learned} positions. Use at most {learned}.")

    stops, end_words = answer_stops(tokenizer, run.template)
    ends = [tokenizer.eos_id, *run.stop_ids, *stops]

    @torch.no_grad()
    def logits(tokens: Tensor) -> Tensor:
        return model(tokens).float()

    def greedy(prompt: Sequence[int], count: int) -> list[int]:
        return generate(model, [prompt], max_new_tokens=count, stop_ids=ends, vocab_size=tokenizer.vocab_size)[0]

    return EvalModel(
        name=f"{name}, step {run.step}",
        logits=logits,
        encode=lambda text: tokenizer.encode(text).tolist(),
        decode=tokenizer.decode,
        greedy=greedy,
        prefix_id=tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        max_length=length,
        begin_ids=run.begin_ids,
        begin_name=special_tokens(tokenizer).get("bos_token", "") if run.begin_ids else "",
        end_words=end_words,
        device=next(model.parameters()).device,
    )


def _of_export(folder: Path, max_length: int | None, trust_code: bool) -> EvalModel:
    with using(folder):
        ids = folder_ids(folder)
        if ids("a") is None:
            raise ValueError(
                f"{folder} has no tokenizer.json that can be read: install titan-train[hf], or evaluate the run."
            )
        tokenizer = HfTokenizer.from_folder(folder)
        exported = load_exported(folder, trust_code=trust_code)
        eos, begin = tokenizer.eos_id, ids_before_text(folder)
        ends = {eos, *stop_ids_of(folder)}
        length = max_length or _read_at_once(folder, tokenizer.config)

    def logits(tokens: Tensor) -> Tensor:
        with using(folder):
            found = exported.logits(tokens)
        assert found is not None
        return found

    def greedy(prompt: Sequence[int], count: int) -> list[int]:
        with using(folder):
            return ids_until(exported.greedy(prompt, count), ends)

    return EvalModel(
        name=str(folder),
        logits=logits,
        encode=lambda text: ids(text) or [],
        decode=lambda tokens: tokenizer.decode(token for token in tokens if token < tokenizer.vocab_size),
        greedy=greedy,
        prefix_id=eos if tokenizer.bos_id is None else tokenizer.bos_id,
        eos_id=eos,
        max_length=length,
        begin_ids=begin,
        begin_name=special_tokens(tokenizer).get("bos_token", "") if begin else "",
    )


def _read_at_once(folder: Path, tokenizer: Mapping[str, Any]) -> int:
    """The smaller of the lengths of the training and the model; the tokenizer's only if the folder has neither.

    Raises:
        ValueError: The folder has none of them, or only 1e30 as published tokenizers have it.
    """

    def content(name: str) -> dict[str, Any]:
        file = folder / name
        return json.loads(read_text(file)) if file.is_file() else {}

    config, written = content("config.json"), content(DESCRIPTION)
    config = config.get("text_config") or config
    named = [config.get("max_position_embeddings"), config.get("n_positions")]
    named += [written.get("seq_len"), written.get("max_positions")]
    for values in (named, [tokenizer.get("model_max_length")]):
        lengths = [int(value) for value in values if isinstance(value, int | float) and 0 < value < 2**31]
        if lengths:
            return min(lengths)
    raise ValueError(f"{folder} does not say how many tokens its model reads at once. Set --max-length.")
