"""A run's model as a Hugging Face folder that loads without code of ours.

    config.json              in the spellings of transformers 4 and 5
    generation_config.json   ids that begin and end a text, and an answer of a chat
    model*.safetensors       in files of 5 GB with an index, streamed from the checkpoint: never the whole model in memory
    tokenizer.json, ...      where the tokenizer can be expressed; else only tokenizer.model
    preprocessor_config.json of a vision-language model: how images become patches

As float8, matrices of the layers are stored in e4m3 with one float32 scale for each block of 128 x 128, as DeepSeek-V3 is
published: ``NAME.weight`` beside ``NAME.weight_scale_inv``, announced by ``quantization_config`` (`float8`).
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from titan_ckpt import export_hf
from torch import nn

from titan_train.export.float8 import float8_config, float8_names
from titan_train.export.step_model import DESCRIPTION
from titan_train.export.tokenizer_json import special_tokens, tokenizer_json
from titan_train.files import write_atomic
from titan_train.generation import LoadedRun
from titan_train.models.family import Family
from titan_train.models.hf.folder import GENERATION, PREFIX, read_published
from titan_train.models.vision_language.args import EncoderArgs
from titan_train.tasks.vision.processor import processor_files
from titan_train.tokenizers import ChatTemplate, HfTokenizer, SentencePieceTokenizer, Tokenizer
from titan_train.tokenizers.chat_template import answer_stops
from titan_train.tokenizers.huggingface import TEMPLATE_NAME, TOKENIZER_CONFIG, ids_before_text, read_json

ExportDtype = Literal["fp32", "bf16", "fp16", "float8"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}
"""What tensors are stored as; with float8, those that have no scales."""
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float8": "bfloat16"}
_BY_FILE = {"tokenizer_class": "PreTrainedTokenizerFast"}
"""Ids are those of ``tokenizer.json``. Of other classes (LlamaTokenizer), transformers 5 makes its own around the vocabulary."""
_FAST = {"model_input_names": ["input_ids", "attention_mask"]}
"""What decoders take. transformers 4 would add ``token_type_ids``, which `generate` refuses."""
_logger = logging.getLogger(__name__)


def write_hf(
    folder: Path,
    run: LoadedRun,
    family: Family,
    step: Path,
    *,
    dtype: ExportDtype,
    max_shard_bytes: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the folder; ``step`` is the checkpoint's, and the model's values are not looked at.

    Ranks of ``group`` share the weight files between them; the first writes the rest.
    """
    args: Any = run.model.args
    names = family.load_hf().names(args)
    if args.tied_embeddings if hasattr(args, "tied_embeddings") else _is_tied(run.model):
        names = names.leaving_out(r"lm_head\.weight")  # transformers ties it again
    config = hf_config(run, family, dtype)
    export_hf(
        step,
        folder,
        names=names,
        dtype=DTYPES[dtype],
        max_shard_bytes=max_shard_bytes,
        config=config,
        float8=float8_names(run.model, family) if dtype == "float8" else (),
        group=group,
    )
    if group is not None and group.rank() > 0:
        return
    write_json(folder / GENERATION, generation_config(run))
    if _published_length(run) > run.config.model.seq_len:
        write_json(folder / DESCRIPTION, {"seq_len": run.config.model.seq_len})  # of the training, for `eval`
    write_tokenizer_files(folder, run.tokenizer, run.config.model.seq_len, run.template, add_bos=bool(run.begin_ids))
    if isinstance(args, EncoderArgs):
        for name, content in processor_files(run.tokenizer, args, run.config.vision).items():
            write_json(folder / name, content)


def hf_config(run: LoadedRun, family: Family, dtype: ExportDtype) -> dict[str, Any]:
    """The content of ``config.json``."""
    args: Any = run.model.args
    config = family.load_hf().config_of(args)
    text = config["text_config"] if isinstance(args, EncoderArgs) else config
    scaling = text.get("rope_scaling") or {}
    stretched = int(scaling.get("original_max_position_embeddings", 0) * scaling.get("factor", 1))
    if "n_positions" not in text and "max_position_embeddings" not in text:
        text["max_position_embeddings"] = max(run.config.model.seq_len, stretched, _published_length(run))
    if dtype == "float8":
        config["quantization_config"] = float8_config(run.model, family)
    several = isinstance(config.get("eos_token_id"), list)  # not every class of transformers takes a list
    # two spellings each: transformers 4 reads the second
    return config | {
        "dtype": DTYPE_NAMES[dtype],
        "torch_dtype": DTYPE_NAMES[dtype],
        "use_cache": True,
        **_token_ids(run.tokenizer, run.stop_ids if several else ()),
    }


def _published_length(run: LoadedRun) -> int:
    """The positions of the folder that the weights came from; 0 where there is none, or it is gone."""
    init = run.config.model.init
    if not init.startswith(PREFIX):
        return 0
    try:
        published = read_published(init, key="model.init")
    except ValueError:
        return 0
    found = (published.get("text_config") or published).get("max_position_embeddings")
    return found if isinstance(found, int) else 0


def generation_config(run: LoadedRun) -> dict[str, Any]:
    """The content of ``generation_config.json``."""
    ids = _token_ids(run.tokenizer, [*run.stop_ids, *answer_stops(run.tokenizer, run.template)[0]])
    return ids if isinstance(ids["eos_token_id"], list) else {"_from_model_config": True, **ids}


def _is_tied(model: nn.Module) -> bool:
    head = getattr(getattr(model, "lm_head", None), "weight", None)
    return head is not None and head is getattr(getattr(model, "tok_embeddings", None), "weight", None)


def _token_ids(tokenizer: Tokenizer, stop_ids: Sequence[int] = ()) -> dict[str, Any]:
    ends = [*dict.fromkeys([tokenizer.eos_id, *stop_ids])]
    eos = ends if len(ends) > 1 else ends[0]
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos, "pad_token_id": tokenizer.pad_id}


def write_tokenizer_files(
    folder: Path, tokenizer: Tokenizer, seq_len: int, template: ChatTemplate | None = None, *, add_bos: bool = False
) -> None:
    """Write the tokenizer into a folder, as ``tokenizer.json`` if it can be, with its chat template.

    ``add_bos`` makes the library begin a text with the beginning-of-text token; a published file says that itself.
    """
    if template is not None:
        write_atomic(folder / TEMPLATE_NAME, template.source)
    if isinstance(tokenizer, HfTokenizer):
        tokenizer.save(folder)  # the files that it came from
        write_json(folder / TOKENIZER_CONFIG, _FAST | read_json(folder / TOKENIZER_CONFIG) | _BY_FILE)
        begins, began = ids_before_text(folder), [tokenizer.bos_id] if add_bos else []
        if begins != began:
            _logger.warning(
                "the exported tokenizer begins texts with the ids %s, and documents of the run began with %s (data.add_bos): "
                "encode texts without special tokens, and begin them as the run did", begins, began,
            )  # fmt: skip
        return
    text = tokenizer_json(tokenizer, add_bos=add_bos)
    if text is None:
        _logger.warning(
            "the %s tokenizer cannot be written as tokenizer.json; its own files are exported", tokenizer.kind
        )
        tokenizer.save(folder)
        write_json(folder / TOKENIZER_CONFIG, {"add_bos_token": add_bos, **special_tokens(tokenizer)})
        return
    write_atomic(folder / "tokenizer.json", text)
    write_json(
        folder / TOKENIZER_CONFIG,
        {
            **_BY_FILE,
            **_FAST,
            "model_max_length": seq_len,
            "clean_up_tokenization_spaces": False,
            **special_tokens(tokenizer),
        },
    )
    if isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer.save(folder)  # for tools that read tokenizer.model


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file."""
    write_atomic(path, json.dumps(content, indent=2) + "\n")
