"""The training loop, and what it needs each step.

- `trainer`: `Trainer` builds a run from a `Config`: inputs, model, optimizer, checkpoints, observers.
- `loop`: the algorithm. `step`: one optimizer step. `validate`: the loss on held-out data.
- `given`: what a program gives in place of the configuration's own: batches, loss, optimizer.
- `observer`: what may watch a run. `run_log`, `measure`, `profile`, `observers`: what does.
- `checkpoints`: what a run saves, and how it resumes. `warm_start`, `published_tokenizer`: start from published weights.
- `process`: the rank's device, seeds and signals. `step_random`: the random numbers of each step.
- `reduce_scope`: what this rank contributes to sums over all ranks.
- `graphs`: forward and backward as a CUDA graph. `rerun`: a suspect step once more. `whole_model`: samples under any layout.
"""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.train.observer import Observer, StepInfo
    from titan_train.train.trainer import Trainer

__all__ = ["Observer", "StepInfo", "Trainer"]

__getattr__ = first_use(__name__)
