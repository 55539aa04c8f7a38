"""A run's model as ONNX: one graph that continues sequences, with the key-value cache as inputs and outputs.

    model.onnx     inputs input_ids [B, S], position_ids [B, S], past.N.key and past.N.value [B, K, T, D];
                   outputs logits [B, S, V], present.N.key, present.N.value
    export.json    K, D and the number of layers

B, S and T are free. Begin with zeros as the past of T positions; give what came out as the next past. Weights are float32
with the values of the export's dtype, because onnxruntime has no bfloat16 products on the CPU. Above 2 GB, which ONNX's
format cannot hold in one file, they lie in ``model.onnx.data``.
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

from titan_train.export.step_model import StepModel, SteppedModel, cache_names, write_description
from titan_train.lazy import require
from titan_train.models.traits import traits_of

_FILE = "model.onnx"
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
    stepped = StepModel(model).eval()
    layers = stepped.shape.layers
    batch, seq, cache = (torch.export.Dim(name, min=1) for name in ("batch", "seq", "cache"))
    tokens, positions, caches = example(stepped, seq_len=3)
    with _quiet():
        program: Any = torch.onnx.export(
            stepped,
            (tokens, positions, caches),
            dynamo=True,
            dynamic_shapes=({0: batch, 1: seq}, {0: batch, 1: seq}, [{0: batch, 2: cache}] * len(caches)),
            input_names=["input_ids", "position_ids", *cache_names(layers, "past")],
            output_names=["logits", *cache_names(layers, "present")],
            verbose=False,
        )
        folder.mkdir(parents=True)
        program.save(str(folder / _FILE), external_data=size > _LARGEST_FILE)
    write_description(folder, stepped.shape, max_positions=limit, step=step, opset=program.model.opset_imports.get(""))


def example(stepped: StepModel, *, seq_len: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Inputs to trace with: two rows, since a batch of one would be taken for a constant."""
    tokens = torch.zeros(2, seq_len, dtype=torch.int64)
    positions = torch.arange(seq_len).expand(2, -1).contiguous()
    return tokens, positions, stepped.shape.empty(2, 16)


class OnnxModel(SteppedModel):
    """An exported folder, run by onnxruntime on the CPU."""

    def __init__(self, folder: Path) -> None:
        """Load it.

        Raises:
            ValueError: onnxruntime is not installed.
        """
        super().__init__(folder)
        onnxruntime = require("onnxruntime", extra="onnx", purpose="running an ONNX export")
        self._session: Any = onnxruntime.InferenceSession(str(folder / _FILE), providers=["CPUExecutionProvider"])
        self._names = [entry.name for entry in self._session.get_inputs()]

    def step(self, tokens: Tensor, positions: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        given = dict(zip(self._names, (x.numpy() for x in (tokens, positions, *caches)), strict=True))
        logits, *present = (torch.from_numpy(x) for x in self._session.run(None, given))
        return logits, present


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
