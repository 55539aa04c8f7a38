"""A run's model as an AOTInductor package: compiled ahead of time, run from Python or C++ without the model's code.

    model.pt2      two entries: "prefill" for two tokens and more, "decode" for one
    export.json    how the caches look, and the length that the model was trained on

Both entries take tokens ``[B, S]``, positions ``[B, S]`` and the caches of every layer (keys, values, keys, ...), and return
the logits and the caches. B, S and T are free. A package is built for one kind of processor and one version of torch, and
holds the weights once for each entry. It does not check positions: `SteppedModel` does.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_train.export.step_model import StepModel, SteppedModel, write_description
from titan_train.models.traits import traits_of

_FILE = "model.pt2"


def write_aoti(folder: Path, model: nn.Module, *, step: int, seq_len: int) -> None:
    """Compile the package into a new folder. It runs where ``model`` is.

    Args:
        folder: The folder.
        model: Taken over.
        step: The checkpoint's.
        seq_len: The length that the model was trained on.

    Raises:
        ValueError: There is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        raise ValueError(
            f"--to aoti compiles the model with a C++ compiler, and {compiler} was not found. Install g++, or name a "
            "compiler in CXX."
        )
    from torch._inductor.package.package import package_aoti

    limit = traits_of(model).max_seq_len
    stepped = StepModel(model).eval()
    folder.mkdir(parents=True)
    files = {"prefill": _compile(stepped, 3), "decode": _compile(stepped, 1)}
    package_aoti(str(folder / _FILE), files)
    write_description(folder, stepped.shape, max_positions=limit, seq_len=seq_len, step=step, torch=torch.__version__)


def _compile(stepped: StepModel, seq_len: int) -> Any:
    program, inputs = exported_step(stepped, seq_len)
    return torch._inductor.aot_compile(program.module(), inputs, options={"aot_inductor.package": True})  # type: ignore[arg-type]


def exported_step(stepped: StepModel, seq_len: int) -> tuple[torch.export.ExportedProgram, tuple[Any, ...]]:
    """The graph of a step of several tokens, or of one, for any B, S and T; and the inputs that it was made with."""
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    seq = torch.export.Dim("seq", min=2, max=1 << 24)
    length = torch.export.Dim("cache", min=2, max=1 << 24)
    positions = torch.arange(seq_len).expand(2, -1).contiguous()
    # two rows, since a batch of one would be taken for a constant
    inputs = (torch.zeros(2, seq_len, dtype=torch.int64), positions, stepped.shape.empty(2, 16))
    of_tokens = {0: batch, 1: seq} if seq_len > 1 else {0: batch}
    shapes = (of_tokens, of_tokens, [{0: batch, 2: length}] * len(inputs[2]))
    return torch.export.export(stepped, inputs, dynamic_shapes=shapes, strict=False), inputs


class AotiModel(SteppedModel):
    """A package, run from Python."""

    def __init__(self, folder: Path) -> None:
        """Load both entries. Loading runs the package's machine code: load only what you trust."""
        super().__init__(folder)
        from torch._inductor.package.package import load_package

        self._prefill, self._decode = (load_package(str(folder / _FILE), name) for name in ("prefill", "decode"))

    def step(self, tokens: Tensor, positions: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        entry = self._decode if tokens.shape[1] == 1 else self._prefill
        logits, present = entry(tokens, positions, caches)
        return logits, present
