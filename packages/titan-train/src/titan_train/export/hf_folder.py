"""Write a run's model as a Hugging Face folder that loads without code of ours.

    config.json              in the spellings of transformers 4 and 5
    generation_config.json   ids that begin and end a text
    model*.safetensors       in files of 5 GB with an index, streamed from the checkpoint: never the whole model in memory
    tokenizer.json, ...      where the tokenizer can be expressed; else only tokenizer.model
    parity.json, README.md   how the folder was compared with the run's model, and the facts of the run

The folder is written under a temporary name and appears when it is complete and every check has passed.
"""

import json
import logging
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from titan_ckpt import export_hf
from torch import nn

from titan_train.export.gate import Check, as_table, check_folder
from titan_train.export.tokenizer_json import special_tokens, tokenizer_json
from titan_train.files import write_atomic
from titan_train.generation import LoadedRun, load_run
from titan_train.models.family import Family
from titan_train.models.registry import family_of
from titan_train.run_folder import checkpoint_folders
from titan_train.tokenizers import SentencePieceTokenizer, Tokenizer

ExportDtype = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_logger = logging.getLogger(__name__)


def export_run(
    run_dir: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: ExportDtype = "bf16",
    max_shard_bytes: int = 5_000_000_000,
    gate: bool = True,
    trust_code: bool = False,
    code: Sequence[str] = (),
) -> list[Check]:
    """Export a run's model to a new folder.

    Args:
        run_dir: The run's folder.
        out: The folder to make; must not exist.
        step: Which checkpoint; None takes the newest.
        dtype: Of the weights. Routing biases stay float32.
        max_shard_bytes: Start another file before one passes this size.
        gate: Load the folder with transformers and compare it with the run's model.
        trust_code: As in `load_run`.
        code: As in `load_run`.

    Returns:
        The checks, all passed; empty without ``gate``.

    Raises:
        ValueError: ``out`` exists, the model's family cannot be written, transformers is missing, or a check failed.
            Nothing is left at ``out`` then.
    """
    run_dir, out = Path(run_dir), Path(out)
    if out.exists():
        raise ValueError(f"{out} exists. Export to a new folder, so that no stale file stays in it.")
    run = load_run(run_dir, step=step, device="cpu", trust_code=trust_code, code=code)
    family = family_of(run.model)
    if family is None:
        raise ValueError(
            f"model.name={run.config.model.name!r} belongs to no registered family, so its names on Hugging Face are unknown. "
            "Register a family with a key map (see the guide on adding a model family)."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.parent / f".{out.name}.part-{secrets.token_hex(4)}"
    try:
        _write(staged, run, family, checkpoint_folders(run_dir)[run.step], dtype=dtype, max_shard_bytes=max_shard_bytes)
        checks = _prove(staged, run, dtype) if gate else []
        card = _model_card(run, family, run_dir.name, dtype, checks)
        write_atomic(staged / "README.md", card)
        staged.rename(out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return checks


def _write(
    folder: Path, run: LoadedRun, family: Family, step: Path, *, dtype: ExportDtype, max_shard_bytes: int
) -> None:
    names = family.load_hf().key_map
    args: Any = run.model.args
    if args.tied_embeddings if hasattr(args, "tied_embeddings") else _is_tied(run.model):
        names = names.leaving_out(r"lm_head\.weight")  # transformers ties it again
    config = hf_config(run, family, dtype)
    export_hf(step, folder, names=names, dtype=_DTYPES[dtype], max_shard_bytes=max_shard_bytes, config=config)
    ids = _token_ids(run.tokenizer)
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    _write_tokenizer(folder, run.tokenizer, run.config.model.seq_len)


def hf_config(run: LoadedRun, family: Family, dtype: ExportDtype) -> dict[str, Any]:
    """The content of ``config.json``."""
    args: Any = run.model.args
    config = family.load_hf().config_of(args)
    scaling = config.get("rope_scaling") or {}
    stretched = int(scaling.get("original_max_position_embeddings", 0) * scaling.get("factor", 1))
    if "n_positions" not in config:
        config["max_position_embeddings"] = max(run.config.model.seq_len, stretched)
    # two spellings each: transformers 4 reads the second
    return config | {
        "dtype": _NAMES[dtype],
        "torch_dtype": _NAMES[dtype],
        "use_cache": True,
        **_token_ids(run.tokenizer),
    }


def _is_tied(model: nn.Module) -> bool:
    head = getattr(getattr(model, "lm_head", None), "weight", None)
    return head is not None and head is getattr(getattr(model, "tok_embeddings", None), "weight", None)


def _token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, seq_len: int) -> None:
    text = tokenizer_json(tokenizer)
    if text is None:
        _logger.warning(
            "the %s tokenizer cannot be written as tokenizer.json; its own files are exported", tokenizer.kind
        )
        tokenizer.save(folder)
        return
    write_atomic(folder / "tokenizer.json", text)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": seq_len,
            "clean_up_tokenization_spaces": False,
            **special_tokens(tokenizer),
        },
    )
    if isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer.save(folder)  # for tools that read tokenizer.model


def _prove(folder: Path, run: LoadedRun, dtype: ExportDtype) -> list[Check]:
    """Run the checks on what was stored, write their table, and refuse if one failed."""
    for parameter in run.model.parameters():
        parameter.data = parameter.data.to(_DTYPES[dtype]).float()
    checks = check_folder(folder, run.model.float(), run.tokenizer, seq_len=run.config.model.seq_len)
    _write_json(folder / "parity.json", {"step": run.step, "checks": [asdict(check) for check in checks]})
    failed = [check for check in checks if not check.passed]
    if failed:
        rows = "; ".join(f"{check.name}: {check.measured}, required {check.required}" for check in failed)
        raise ValueError(
            f"the exported folder does not compute what the run's model computes ({rows}), so it was not written. "
            "Please report this; --no-gate writes the folder all the same."
        )
    return checks


def _model_card(run: LoadedRun, family: Family, name: str, dtype: ExportDtype, checks: list[Check]) -> str:
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    config = run.config
    sources = ", ".join(source.name for source in config.data.sources)
    tokens = run.step * config.train.global_batch * config.model.seq_len
    proof = as_table(checks) if checks else "Not compared with transformers (exported with --no-gate)."
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

Trained with titan-train.

| | |
| --- | --- |
| architecture | {family.load_hf().config_of(run.model.args)["architectures"][0]} ({config.model.name}) |
| parameters | {parameters:,} |
| weights | {_NAMES[dtype]}, of step {run.step} |
| training | {tokens:,} tokens in sequences of {config.model.seq_len}, batches of {config.train.global_batch} |
| data | {sources} |
| tokenizer | {run.tokenizer.kind}, {run.tokenizer.vocab_size:,} ids |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

This folder compared with the model of the run:

{proof}
"""


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(content, indent=2) + "\n")
