"""A run's model as ONNX: one graph that continues sequences, with the names and the growing cache that Optimum gives a decoder.

    model.onnx       inputs input_ids [B, S], attention_mask [B, T + S], position_ids [B, S], and for each layer N
                     past_key_values.N.key, past_key_values.N.value [B, K, T, D]; outputs logits [B, S, V], present.N.key and
                     present.N.value [B, K, T + S, D]
    export.json      K, D and the number of layers
    config.json      the model's arguments, as transformers has them, where its family has a form there
    generate.py      calls the graph, in a dozen lines

B, S and T are free; T is 0 at the beginning, and what came out is the next past. Rows of different lengths are padded on the
left, with 0 in the mask. Weights are float32 with the values of the export's dtype, because onnxruntime has no bfloat16
products on the CPU. Above 2 GB, which ONNX's format cannot hold in one file, they lie in ``model.onnx.data``.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_train.export.step_model import GrowingModel, SteppedModel, write_description
from titan_train.files import write_atomic
from titan_train.lazy import require
from titan_train.models.traits import traits_of

_FILE = "model.onnx"
_INPUTS = ["input_ids", "attention_mask", "position_ids"]
_EXAMPLE = '''\
"""Continue a text with model.onnx: python generate.py "Once upon a time". Needs numpy, onnxruntime and tokenizers."""

import sys
from pathlib import Path
import numpy as np, onnxruntime, tokenizers

here = Path(__file__).parent
tokenizer = tokenizers.Tokenizer.from_file(str(here / "tokenizer.json"))
session = onnxruntime.InferenceSession(str(here / "model.onnx"), providers=["CPUExecutionProvider"])
past = {x.name: np.zeros((1, x.shape[1], 0, x.shape[3]), np.float32) for x in session.get_inputs()[3:]}
ids = new = tokenizer.encode(sys.argv[1], add_special_tokens=False).ids
for _ in range(40):
    fed = {"input_ids": [new], "attention_mask": [[1] * len(ids)], "position_ids": [list(range(len(ids)))[-len(new):]]}
    logits, *present = session.run(None, {name: np.array(x, np.int64) for name, x in fed.items()} | past)
    past, new = dict(zip(past, present)), [int(logits[0, -1].argmax())]
    ids = ids + new
print(tokenizer.decode(ids))
'''
_LARGEST_FILE = 1_900_000_000


def write_onnx(folder: Path, model: nn.Module, *, step: int) -> None:
    """Write the graph into a new folder. ``model`` is taken over.

    Raises:
        ValueError: onnx or onnxscript is not installed, or the model cannot be traced.
    """
    for library in ("onnx", "onnxscript"):
        require(library, extra="onnx", purpose="--to onnx")
    limit = traits_of(model).max_seq_len
    size = sum(p.numel() * 4 for p in model.parameters())
    stepped = GrowingModel(model).eval()
    caches = stepped.shape.empty(2, 16)  # two rows, since a batch of one would be taken for a constant
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    positions = torch.arange(16, 19).expand(2, -1).contiguous()
    batch, seq, past = (
        torch.export.Dim(name, min=1) for name in ("batch_size", "sequence_length", "past_sequence_length")
    )
    of_tokens, of_mask = {0: batch, 1: seq}, {0: batch, 1: torch.export.Dim.DYNAMIC}  # their sum
    with _quiet():
        program: Any = torch.onnx.export(
            stepped,
            (tokens, torch.ones(2, 19, dtype=torch.int64), positions, caches),
            dynamo=True,
            dynamic_shapes=(of_tokens, of_mask, of_tokens, [{0: batch, 2: past}] * len(caches)),
            input_names=[*_INPUTS, *_cache_names(stepped.shape.layers, "past_key_values")],
            output_names=["logits", *_cache_names(stepped.shape.layers, "present")],
            verbose=False,
        )
        program.model.graph.inputs[1].shape[1] = "total_sequence_length"
        folder.mkdir(parents=True)
        program.save(str(folder / _FILE), external_data=size > _LARGEST_FILE)
    opset = program.model.opset_imports.get("")
    write_description(folder, stepped.shape, max_positions=limit, step=step, opset=opset)
    write_atomic(folder / "generate.py", _EXAMPLE)


class OnnxModel(SteppedModel):
    """An exported folder, run by onnxruntime on the CPU."""

    def __init__(self, folder: Path) -> None:
        """Load it.

        Raises:
            ValueError: onnxruntime is not installed, or the graph has other inputs.
        """
        super().__init__(folder)
        onnxruntime = require("onnxruntime", extra="onnx", purpose="running an ONNX export")
        self._session: Any = onnxruntime.InferenceSession(str(folder / _FILE), providers=["CPUExecutionProvider"])
        self._names = [entry.name for entry in self._session.get_inputs()]
        if self._names[:3] != _INPUTS:
            raise ValueError(
                f"{folder / _FILE} has the inputs {', '.join(self._names[:3])}, not {', '.join(_INPUTS)}: version 0.1 wrote it. "
                "Export the run again."
            )

    def begin(self, rows: int, length: int) -> list[Tensor]:
        return self.shape.empty(rows, 0)

    def step(self, tokens: Tensor, positions: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        mask = torch.ones(tokens.shape[0], caches[0].shape[2] + tokens.shape[1], dtype=torch.int64)
        given = (tokens, mask, positions, *caches)
        named = dict(zip(self._names, (x.contiguous().numpy() for x in given), strict=True))
        logits, *present = (torch.from_numpy(x) for x in self._session.run(None, named))
        return logits, present


def _cache_names(layers: int, prefix: str) -> list[str]:
    """``PREFIX.0.key``, ``PREFIX.0.value``, ``PREFIX.1.key``, ..."""
    return [f"{prefix}.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """The exporter writes about torchvision and its own renaming; neither concerns who exports."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
