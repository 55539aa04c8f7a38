"""What the executor asks of a stage."""

from collections.abc import Mapping
from typing import Any, Protocol


class Stage(Protocol):
    """What a host framework implements to run under the executor. Tensors are opaque to it, transports aside."""

    index: int
    """Position in the model, from 0."""

    def configure(self, splits_backward: bool) -> None:
        """Called when a schedule is set: whether this stage's backwards will come in two halves."""
        ...

    def begin(self, training: bool, aux_weight: float) -> None:
        """A step starts. ``aux_weight`` is what an auxiliary loss of one microbatch weighs in the step's loss."""
        ...

    def forward(
        self, microbatch: int, inputs: tuple[Any, ...], target: Any, extra: Mapping[str, Any], training: bool
    ) -> tuple[Any, ...]:
        """Run forward and keep what a backward needs. ``extra`` holds the microbatch's keyword tensors (positions,
        document ids). ``target`` is given on the last stage only: return the loss, summed over tokens, as the only
        output. ``target=None`` there means inference: return the outputs.
        """
        ...

    def backward(self, microbatch: int, grads: tuple[Any, ...], defer: bool) -> tuple[Any, ...]:
        """Gradients of the inputs, given those of the outputs (on the last stage: the weight of the loss, a float or a
        float64 scalar tensor). With ``defer`` the weight gradients wait for `backward_weight`.
        """
        ...

    def backward_weight(self, microbatch: int) -> None:
        """The deferred weight gradients of one microbatch."""
        ...

    def finish(self, training: bool) -> Any:
        """The stage's last action of the step has run. In training its gradients are complete (but for those of tied
        weights, summed after it): the place to reduce them over data-parallel ranks. Returns the sum of the stage's
        auxiliary losses, or None.
        """
        ...

    def clear(self) -> None:
        """Drop everything kept for microbatches, after a step that failed."""
        ...
