"""What a kind of model brings to a run: its data, how its loss is computed, what validation reports, what it samples.

The trainer knows optimizer steps, parallelism, checkpoints and records; it does not know text. A `Task` is the rest:

    batch  --model-->  output  --loss-->  a sum     divided by     count(batch), summed over all ranks

so that the loss of a step is the same under any layout. Text, the task of every decoder, is `titan_train.tasks.text`. A
family names its task in ``Family.task``; ``model.task`` names another one: of an installed package, by an entry point,

    [project.entry-points."titan_train.tasks"]
    audio = "my_package.audio:AudioTask"

or one that `register_task` made known to this process.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from titan_train.config import Config
from titan_train.data.loader.source import BatchSource, TaskBatch
from titan_train.models.registry import find_model
from titan_train.values import did_you_mean

if TYPE_CHECKING:
    import torch
    from titan_mesh import Mesh
    from torch import Tensor, nn

ENTRY_POINT_GROUP = "titan_train.tasks"

_SHIPPED = {
    "text": "titan_train.tasks.text:TextTask",
    "diffusion": "titan_train.tasks.diffusion.task:DiffusionTask",
    "vision": "titan_train.tasks.vision.task:VisionTask",
}
_registered: dict[str, Callable[[], "Task"]] = {}


class ContextCut(Protocol):
    """Context parallelism of one kind of model: what each rank of a group computes on."""

    def apply(self, model: "nn.Module", /) -> None:
        """Replace the attention of a model, or of a pipeline stage, by one that reaches the tokens of other ranks."""
        ...

    def cut(self, batch: Any, /) -> TaskBatch:
        """The part of a batch that this rank computes on; the batch is the same on all ranks of the group."""
        ...


@runtime_checkable
class WholeCut(Protocol):
    """What a `ContextCut` also has if its model can be sampled: inputs without a target are cut, outputs joined."""

    def cut_inputs(
        self, inputs: "Sequence[Tensor]", keywords: "Mapping[str, Any]", /
    ) -> "tuple[tuple[Tensor, ...], dict[str, Any]]":
        """The part of a model's arguments that this rank computes on."""
        ...

    def join(self, output: "Tensor", /) -> "Tensor":
        """The whole output on every rank of the group, from each rank's part. Collective."""
        ...


class LossParts(NamedTuple):
    """The loss of validation by parts of the data, such as the times of diffusion."""

    names: tuple[str, ...]
    """Of the parts."""
    sums: "Callable[[Tensor, Any], Tensor]"
    """From a model's output and a batch's ``target`` to ``[parts, 2]``: each part's sum of the loss, and its count."""


class TaskInputs(Protocol):
    """The open data of one run on one rank; inherit from it to take the defaults."""

    vocab_size: int | None = None
    """Tokens of the vocabulary; None for a model without one."""
    train: BatchSource
    """What is trained on."""
    validation: BatchSource | None = None
    """What is validated on; None if nothing is held out."""
    samples_by_forward: bool = False
    """`sample` only calls the model, with whole tensors: it then also works under pipeline and context parallelism."""

    def keep(self, run_dir: Path) -> None:
        """Write to the run's folder what a later use of the run needs beside weights. On rank 0."""

    def text_bytes(self, batch: Any) -> "Tensor | None":
        """UTF-8 bytes of the text that the labels of one batch stand for, for bits per byte. An int64 scalar on its device.

        None: the loss is not one of text.
        """
        return None

    def sample(self, model: "nn.Module", run_dir: Path, step: int) -> str | None:
        """Write samples of the model to the run's folder, after a validation.

        Every rank calls it with its wrapped model in evaluation mode and without gradients, so that the forward passes of
        sharded models meet; rank 0 writes. Under pipeline or context parallelism it is called only if `samples_by_forward`
        holds (and the task's cut is a `WholeCut`), with a module that takes whole arguments and returns the whole output.

        Returns:
            A sample as text, to show in the terminal; None if there is none.
        """


class Task(Protocol):
    """What a kind of model brings; inherit from it to take the defaults. It holds no state of a run."""

    keywords: Sequence[str] = ()
    """Names in `TaskBatch.keywords` that models of this kind may take."""

    shares_documents: bool = False
    """Rows of data-parallel ranks can be laid end to end and their documents shared: `context.dynamic`."""

    def prepare(self, config: Config, *, quiet: bool = False) -> None:
        """Make what has to be made once, before ranks start: a cache, shards. Must do nothing if it is there.

        Raises:
            ValueError: The data cannot be used; the message says what and where.
        """

    def check_inputs(self, config: Config) -> None:
        """Refuse with a ValueError what `prepare` would refuse at once, such as a path that does not exist. Writes nothing."""

    def vocab_size(self, config: Config) -> int | None:
        """The vocabulary as far as it is known before `prepare`; None where it is not, or where there is none."""
        return None

    def check(self, config: Config, model: "nn.Module") -> None:
        """Refuse with a ValueError what this kind of model cannot do, before any rank starts."""

    def is_prepared(self, config: Config) -> bool:
        """Whether `open` only reads: what `prepare` makes is there. Else `check` of a branch leaves its data to the ranks."""
        return True

    def open(self, config: Config) -> TaskInputs:
        """Open what `prepare` made. Nothing in here communicates."""
        ...

    def loss(self, config: Config, vocab_size: int | None) -> "Callable[[Tensor, Any], Tensor]":
        """From a model's output and a batch's ``target`` to the sum of the loss, a scalar.

        The cross-entropy of `titan_train.models.common.loss.whole_vocabulary_loss` may be computed in the head instead, see
        ``train.fused_loss``; any other loss is computed from the whole output.
        """
        ...

    def loss_parts(self, config: Config) -> LossParts | None:
        """The parts of the loss that validation reports beside the mean; None for none."""
        return None

    def count(self, batch: Any) -> "Tensor":
        """What the sum is divided by, of one batch: labels, or elements. An int64 scalar on the batch's device."""
        ...

    def example(
        self, config: Config, part: "nn.Module", rows: int
    ) -> "tuple[tuple[Tensor, ...], dict[str, Tensor]] | None":
        """What a model or a pipeline stage is called with for a microbatch of ``rows`` samples; values do not matter.

        `titan-train check` measures activations with it. None: tokens, or hidden states of a text model.
        """
        return None

    def why_no_samples(self, config: Config, model: "nn.Module") -> str | None:
        """Reason phrase for the log if `TaskInputs.sample` cannot sample what the configuration asks for; None if it can.

        Args:
            config: The run's configuration.
            model: This rank's model, or its first part.
        """
        return None

    def context(self, config: Config, mesh: "Mesh", model: "nn.Module", dtype: "torch.dtype") -> ContextCut:
        """Context parallelism over the ranks ``cp`` of a mesh.

        Raises:
            ValueError: This kind of model has none.
        """
        raise ValueError(
            f"parallel.cp={config.parallel.cp}: {type(self).__name__} does not say how its batches are cut. Set parallel.cp=1, "
            "or define its method context."
        )


def register_task(name: str, make: Callable[[], Task]) -> None:
    """Make a task known to this process as ``model.task``; runs with several ranks start others: use an entry point there.

    Raises:
        ValueError: The name is taken.
    """
    if name in _known():
        raise ValueError(f"a task named {name!r} is already registered. Give yours another name.")
    _registered[name] = make


def task_name(config: Config) -> str:
    """``model.task``, else the one that the model's family names, else text."""
    own = ":" in config.model.name or config.model.name.startswith("hf:")
    return config.model.task or ("text" if own else find_model(config.model.name)[0].task)


def load_task(config: Config) -> Task:
    """The task of a run, see `task_name`.

    Raises:
        ValueError: There is no such task, or it cannot be loaded.
    """
    name = task_name(config)
    known = _known()
    if name not in known:
        raise ValueError(
            f"model.task={name!r} is not a known task. {did_you_mean(name, known)}Known are {', '.join(known)}; others come "
            f"from entry points of the group {ENTRY_POINT_GROUP!r}."
        )
    make = known[name]
    if not isinstance(make, str):
        return make()
    module, _, attribute = make.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as err:
        raise ValueError(f"model.task={name!r} could not be loaded from {make!r}: {err}") from err


def _known() -> dict[str, str | Callable[[], Task]]:
    return {**_installed(), **_registered, **_SHIPPED}


@cache
def _installed() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)}
