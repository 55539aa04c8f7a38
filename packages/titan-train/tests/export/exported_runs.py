"""Small trained runs to export."""

import json
import zlib
from pathlib import Path

from titan_train.config import parse_config
from titan_train.inputs import prepare_inputs
from titan_train.train import Trainer


def trained(
    folder: Path,
    name: str,
    *,
    run: str = "",
    steps: int = 6,
    tokenizer: dict[str, object] | None = None,
    model: dict[str, object] | None = None,
    data: dict[str, object] | None = None,
    checkpoint: dict[str, object] | None = None,
    **args: object,
) -> Path:
    """The folder of a run of a few large steps, so that logits differ from those of the first weights; of none, if 0.

    Tests that ask for the same settings share one run: its folder's parent is named by all that is asked.
    """
    asked = json.dumps([name, run, steps, tokenizer, model, data, checkpoint, args], sort_keys=True)
    runs = folder / "runs" / f"{zlib.crc32(asked.encode()):08x}"
    tree = {
        "run": {"dir": str(runs), "name": run or name},
        "model": {"name": name, "seq_len": 64, "args": args, **(model or {})},
        "tokenizer": tokenizer or {"kind": "bytes"},
        "data": {
            "cache_dir": str(folder / "cache"),
            "sources": [{"name": "text", "kind": "text", "paths": [str(folder / "text.txt")]}],
            **(data or {}),
        },
        "train": {"steps": steps or 1, "global_batch": 4},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 0},
        "launch": {"device": "cpu"},
        "checkpoint": checkpoint or {},
        "metrics": {"progress": "off", "report": False},
    }
    config = parse_config(tree)
    run_dir = runs / (run or name)
    if not run_dir.exists():
        prepare_inputs(config, quiet=True)
        with Trainer(config) as trainer:
            trainer.fit() if steps else trainer.save()
    return run_dir
