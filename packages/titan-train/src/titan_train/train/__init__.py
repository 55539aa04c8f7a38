"""The training loop, and everything it needs built in order.

`Trainer` composes a run from a `Config`; the other modules each hold one concept: the layout of the ranks, the
inputs, the model under its parallelism, one optimizer step, validation, signals.
"""

from titan_train.train.trainer import Trainer

__all__ = ["Trainer"]
