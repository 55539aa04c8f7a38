"""The model card of an exported folder: the facts of the run, how to load the folder, and how it was compared."""

import contextlib
from collections.abc import Mapping, Sequence

from titan_train.export.gate import Check, as_table
from titan_train.generation import LoadedRun
from titan_train.models.family import Family

_WEIGHTS = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "float8": "float8 (e4m3 in blocks of 128 x 128) and bfloat16",
    "q8_0": "8 bits in blocks of 32",
}
_LOADING: Mapping[str, str] = {
    "hf": """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")""",
    "onnx": """import onnxruntime  # generate.py continues a text with it

session = onnxruntime.InferenceSession("PATH/model.onnx")""",
    "aoti": """from torch._inductor.package import load_package

prefill, decode = load_package("PATH/model.pt2", "prefill"), load_package("PATH/model.pt2", "decode")""",
    "gguf": """import xllamacpp  # or any program that uses llama.cpp

params = xllamacpp.CommonParams()
params.model.path = "PATH/model.gguf"
server = xllamacpp.Server(params)""",
    "dcp": """import torch.distributed.checkpoint as dcp

dcp.load({"model": model.state_dict()}, checkpoint_id="PATH")""",
}


def model_card(
    run: LoadedRun, family: Family | None, name: str, target: str, dtype: str, checks: Sequence[Check]
) -> str:
    """The text of ``README.md``."""
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    config = run.config
    architecture = type(run.model).__name__
    with contextlib.suppress(ValueError):  # no class of transformers computes it
        if family is not None:
            architecture = family.load_hf().config_of(run.model.args)["architectures"][0]
    sources = ", ".join(source.name for source in config.data.sources)
    tokens = config.train.ramp(config.model.seq_len).consumed_after(run.step) * config.model.seq_len
    return f"""---
{"library_name: transformers" if target == "hf" else "tags: [" + target + "]"}
pipeline_tag: text-generation
---

# {name}

Trained with titan-train.

| | |
| --- | --- |
| architecture | {architecture} ({config.model.name}) |
| parameters | {parameters:,} |
| weights | {_WEIGHTS[dtype]}, of step {run.step} |
| training | {tokens:,} tokens in sequences of {config.model.seq_len}, batches of {config.train.global_batch} |
| data | {sources} |
| tokenizer | {run.tokenizer.kind}, {run.tokenizer.vocab_size:,} ids |

```python
{_LOADING[target]}
```

This folder compared with the model of the run:

{as_table(checks)}
"""
