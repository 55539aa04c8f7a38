"""Where batches come from: samples by number, and the microbatch that some of them make.

A `BatchSource` is all that a kind of training data has to bring: `DataLoader` adds the order over ranks, the thread that
works ahead, the copy to the device and the position that a checkpoint keeps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor


class HostMicrobatch(Protocol):
    """A microbatch in host memory, on its way to a device."""

    @property
    def samples_consumed(self) -> int:
        """Global samples consumed once the step that this microbatch completes is done."""
        ...

    def tensors(self) -> "Sequence[Tensor | None]":
        """Its tensors, in host memory."""
        ...

    def on_device(self, tensors: "Sequence[Tensor | None]") -> Any:
        """The microbatch that is trained on, made of these copies of `tensors`, in the same order."""
        ...


class TaskBatch(Protocol):
    """A microbatch on its device; `titan_train.data.TensorBatch` is one."""

    @property
    def inputs(self) -> "tuple[Tensor, ...]":
        """Positional arguments of the model; under pipeline parallelism, of its first stage."""
        ...

    @property
    def keywords(self) -> "Mapping[str, Any]":
        """Arguments by name; the model is given those that its ``forward`` accepts."""
        ...

    @property
    def target(self) -> Any:
        """What the loss compares the output with."""
        ...

    @property
    def samples_consumed(self) -> int:
        """Global samples consumed once the step that this microbatch completes is done."""
        ...


class BatchSource(Protocol):
    """Training samples, each a pure function of its number; inherit from it to take the defaults.

    What a sample is must depend on nothing but the source's settings, ``seed`` and the sample's number: never on the rank or
    on what was read before. A run then sees the same data under any layout, and after any resume.
    """

    seed: int
    """Of the order and of all draws."""
    seq_len: int
    """Tokens of a sample."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer; compared on resume."""

    @property
    def fingerprint(self) -> str:
        """Hash of the data and of every setting that changes samples; compared on resume."""
        ...

    def build_batch(
        self, samples: npt.NDArray[np.int64], *, ignore_index: int, samples_consumed: int
    ) -> HostMicrobatch:
        """The microbatch of these samples.

        Args:
            samples: Global sample numbers ``[B]``, from 0.
            ignore_index: Label of what is not to be learned.
            samples_consumed: Passed on.
        """
        ...

    def check_samples(self, samples: int) -> None:
        """Refuse a run of ``samples`` samples with a ValueError, if the data cannot give as many."""

    def require(self, samples: int) -> None:
        """Have the first ``samples`` samples ready, as far as that takes waiting."""

    def stream_states(self, samples: int) -> dict[str, Any]:
        """What must be saved beside the number of consumed samples, as JSON; nothing for data with random access."""
        return {}

    def load_stream_states(self, states: Mapping[str, Any]) -> None:
        """Continue from what `stream_states` returned."""

    def close(self) -> None:
        """Stop what runs in the background."""


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """One microbatch of any kind, on the host or on a device: what the model is called with, and what it should return.

    A model's ``forward`` is called as ``forward(*inputs, **keywords)``, with those keywords that it accepts.
    """

    inputs: "tuple[Tensor, ...]"
    """Positional arguments; under pipeline parallelism, of the first stage."""
    keywords: "Mapping[str, Tensor]"
    """Arguments by name, which every pipeline stage may take."""
    target: Any
    """What the loss compares the output with: a tensor, or a NamedTuple of tensors."""
    samples_consumed: int
    """Global samples consumed once the step that this microbatch completes is done."""

    def tensors(self) -> "tuple[Tensor, ...]":
        target = self.target if isinstance(self.target, tuple) else (self.target,)
        return (*self.inputs, *self.keywords.values(), *cast("tuple[Tensor, ...]", target))

    def on_device(self, tensors: "Sequence[Tensor | None]") -> Self:
        moved: Any = iter(tensors)
        inputs = tuple(next(moved) for _ in self.inputs)
        keywords = {name: next(moved) for name in self.keywords}
        target = type(self.target)(*moved) if isinstance(self.target, tuple) else next(moved)
        return replace(self, inputs=inputs, keywords=keywords, target=target)
