"""A run's weights as a checkpoint of torch's distributed checkpointing (DCP), for torchtitan and other trainers.

Names are the model's own, below ``model``. Tensors are read from the run's checkpoint as they are written, one at a time.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from titan_ckpt.interop.hf import ROUTING_BIASES
from titan_ckpt.interop.views import StoredView, whole_box
from titan_ckpt.load.reader import StepReader
from titan_ckpt.state.dtypes import DTYPES
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from titan_train.export.tokenizer_json import folder_ids
from titan_train.generation import generate

_ENTRY = "model"


def write_dcp(folder: Path, step: Path, *, dtype: torch.dtype) -> None:
    """Write the weights of a checkpoint's folder into a new folder, floating-point ones as ``dtype``.

    The biases of experts stay float32.
    """
    views = {name: _TypedView(StepReader(step), name, dtype) for name in StepReader(step).index.tensors["model"]}
    state = {name: torch.empty(view.shape, dtype=view.dtype, device="meta") for name, view in views.items()}
    folder.mkdir(parents=True)
    # one file for each tensor: torch's writer keeps what goes into one file in memory
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save({_ENTRY: state}, storage_writer=writer, planner=_Planner(views), no_dist=True)


def load_dcp(folder: Path, model: nn.Module) -> None:
    """Fill a model from the folder with torch's own reader. Tied weights come from their first name."""
    saved = model.state_dict().keys()  # without buffers that are computed again
    held = [*model.named_parameters(), *model.named_buffers()]
    tensors = {name: tensor.data for name, tensor in held if name in saved}
    load({_ENTRY: tensors}, storage_reader=FileSystemReader(folder), no_dist=True)


class DcpModel:
    """An exported folder, loaded with torch's own reader."""

    def __init__(self, folder: Path, like: nn.Module) -> None:
        """Load it into ``like``, whose values are lost."""
        self._model = like
        for tensor in self._model.state_dict().values():
            tensor.zero_()
        load_dcp(folder, self._model)
        self._ids = folder_ids(folder)

    def ids(self, text: str) -> list[int] | None:
        return self._ids(text)

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return self._model(tokens).float()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        return generate(self._model, [prompt], max_new_tokens=count)[0]


class _TypedView:
    def __init__(self, reader: StepReader, name: str, dtype: torch.dtype) -> None:
        self._view = StoredView(reader, reader.index.tensors["model"][name])
        saved = DTYPES[self._view.dtype]
        self.shape = self._view.shape
        self.dtype = dtype if saved.is_floating_point and not name.endswith(ROUTING_BIASES) else saved

    def read(self) -> Tensor:
        box = whole_box(self.shape)
        values = torch.empty(self.shape, dtype=self.dtype)
        damages = self._view.check(box)
        if damages:
            raise ValueError(f"the run's checkpoint is damaged: {damages[0]}. Export another --step.")
        self._view.fill(box, values)
        return values


class _Planner(DefaultSavePlanner):
    """Plans with shapes, and reads a tensor when it is written."""

    def __init__(self, views: dict[str, _TypedView]) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._views = views

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._views[write_item.index.fqn.removeprefix(f"{_ENTRY}.")].read()
