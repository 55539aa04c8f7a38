"""A run's model as ONNX: one graph that continues sequences, with the names and the growing cache that Optimum gives a decoder.

    model.onnx       inputs input_ids [B, S], attention_mask [B, T + S], position_ids [B, S], and for each layer N
                     past_key_values.N.key, past_key_values.N.value [B, K, T, D]; outputs logits [B, S, V], present.N.key and
                     present.N.value [B, K, T + S, D]
    export.json      K, D, the number of layers, and the length that the model was trained on
    config.json      the model's arguments, as transformers has them, where its family has a form there
    generate.py      calls the graph, in a dozen lines

B, S and T are free; T is 0 at the beginning, and what came out is the next past. Rows of different lengths are padded on the
left, with 0 in the mask. Weights are float32 with the values of the export's dtype, because onnxruntime has no bfloat16
products on the CPU. Above 2 GB, which ONNX's format cannot hold in one file, they lie in ``model.onnx.data``.

A module of the user's own, which has no cache, becomes one graph from ``input_ids`` [B, S] to ``logits`` [B, S, V], with S at
most the length it was trained on; a text is continued by calling it with all tokens again.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_train.export.step_model import CacheShape, GrowingModel, SteppedModel, write_description
from titan_train.files import write_atomic
from titan_train.generation import supports_cache
from titan_train.lazy import require
from titan_train.models.traits import traits_of
from titan_train.terminal import first_line

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
ids = new = BEGIN + tokenizer.encode(sys.argv[1], add_special_tokens=False).ids
for _ in range(40):
    fed = {"input_ids": [new], "attention_mask": [[1] * len(ids)], "position_ids": [list(range(len(ids)))[-len(new):]]}
    logits, *present = session.run(None, {name: np.array(x, np.int64) for name, x in fed.items()} | past)
    past, new = dict(zip(past, present)), [int(logits[0, -1].argmax())]
    ids = ids + new
print(tokenizer.decode(ids))
'''
_EXAMPLE_WITHOUT_CACHE = '''\
"""Continue a text with model.onnx: python generate.py "Once upon a time". Needs numpy, onnxruntime and tokenizers."""

import json
import sys
from pathlib import Path
import numpy as np, onnxruntime, tokenizers

here = Path(__file__).parent
most = json.loads((here / "export.json").read_text())["max_positions"]
tokenizer = tokenizers.Tokenizer.from_file(str(here / "tokenizer.json"))
session = onnxruntime.InferenceSession(str(here / "model.onnx"), providers=["CPUExecutionProvider"])
ids = BEGIN + tokenizer.encode(sys.argv[1], add_special_tokens=False).ids
for _ in range(40):
    (logits,) = session.run(None, {"input_ids": np.array([ids[-most:]], np.int64)})
    ids.append(int(logits[0, -1].argmax()))
print(tokenizer.decode(ids))
'''
_LARGEST_FILE = 1_900_000_000


def write_onnx(folder: Path, model: nn.Module, *, step: int, seq_len: int, begin_ids: Sequence[int] = ()) -> None:
    """Write the graph into a new folder.

    Args:
        folder: The folder.
        model: Taken over.
        step: The checkpoint's.
        seq_len: The length that the model was trained on, which limits one without a cache.
        begin_ids: What documents of the run begin with, and so the text of ``generate.py``.

    Raises:
        ValueError: onnx or onnxscript is not installed, or the model cannot be traced.
    """
    for library in ("onnx", "onnxscript"):
        require(library, extra="onnx", purpose="--to onnx")
    if not supports_cache(model):
        _write_without_cache(folder, model.eval(), step=step, seq_len=seq_len)
        _write_example(folder, _EXAMPLE_WITHOUT_CACHE, begin_ids)
        return
    limit = traits_of(model).max_seq_len
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
    _save(folder, program, stepped, stepped.shape, max_positions=limit, seq_len=seq_len, step=step)
    _write_example(folder, _EXAMPLE, begin_ids)


def _write_example(folder: Path, example: str, begin_ids: Sequence[int]) -> None:
    begin = f"{list(begin_ids)} + " if begin_ids else ""
    write_atomic(folder / "generate.py", example.replace("BEGIN + ", begin))


def _write_without_cache(folder: Path, model: nn.Module, *, step: int, seq_len: int) -> None:
    most = traits_of(model).max_seq_len or seq_len
    batch, seq = torch.export.Dim("batch_size", min=1), torch.export.Dim("sequence_length", min=1, max=most)
    tokens = torch.zeros(2, max(1, min(3, most - 1)), dtype=torch.int64)
    try:
        with _quiet():
            program: Any = torch.onnx.export(
                model,
                (tokens,),
                dynamo=True,
                dynamic_shapes=({0: batch, 1: seq},),
                input_names=_INPUTS[:1],
                output_names=["logits"],
                verbose=False,
            )
    except Exception as err:  # the tracer's, on somebody else's code
        why = err.__cause__ or err
        raise ValueError(
            f"--to onnx: {type(model).__name__} has no key-value cache, and its forward cannot be traced as one graph for 1 to "
            f"{most} tokens ({type(why).__name__}: {first_line(why)[:300]}). Write it without steps that depend "
            "on values or on one length, or export it with --to dcp."
        ) from err
    _save(folder, program, model, CacheShape(0, 0, 0, 0), max_positions=most, seq_len=seq_len, step=step)


def _save(
    folder: Path,
    program: Any,
    model: nn.Module,
    shape: CacheShape,
    *,
    max_positions: int | None,
    seq_len: int,
    step: int,
) -> None:
    size = sum(p.numel() * 4 for p in model.parameters())
    folder.mkdir(parents=True)
    with _quiet():
        program.save(str(folder / _FILE), external_data=size > _LARGEST_FILE)
    opset = program.model.opset_imports.get("")
    write_description(folder, shape, max_positions=max_positions, seq_len=seq_len, step=step, opset=opset)


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
        wanted = _INPUTS if self.shape.layers else _INPUTS[:1]
        if self._names[: len(_INPUTS)] != wanted:
            raise ValueError(
                f"{folder / _FILE} has the inputs {', '.join(self._names[:3])}, not {', '.join(wanted)}: version 0.1 wrote it. "
                "Export the run again."
            )

    def begin(self, rows: int, length: int) -> list[Tensor]:
        return self.shape.empty(rows, 0)

    def step(self, tokens: Tensor, positions: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if not self.shape.layers:  # what there is to keep are the tokens themselves
            seen = torch.cat([*caches, tokens], 1)
            (logits,) = self._session.run(None, {_INPUTS[0]: seen.numpy()})
            return torch.from_numpy(logits)[:, -tokens.shape[1] :], [seen]
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
    """The exporter writes about torchvision, its own renaming, and graphs that it cannot trace; none concerns who exports."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
