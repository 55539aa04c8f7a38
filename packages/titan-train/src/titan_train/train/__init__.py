"""The training loop, and what it needs each step.

- `trainer`: `Trainer` composes a run from a `Config`: inputs, model, optimizer, checkpoints, records.
- `step`: one optimizer step. `validate`: the loss on held-out text.
- `reduce_scope`: what this rank contributes to sums over all ranks.
- `warm_start`: start from published weights.
- `monitor`: what the trainer reports to its launcher. `signals`: requests to stop or to save.
"""

from titan_train.train.trainer import Trainer

__all__ = ["Trainer"]
