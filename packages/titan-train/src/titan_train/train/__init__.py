"""The training loop, and what it needs each step.

- `trainer`: `Trainer` composes a run from a `Config`: inputs, model, optimizer, checkpoints, records.
- `step`: one optimizer step. `graphs`: its forward and backward as a CUDA graph. `rerun`: a suspect step once more.
- `validate`: the loss on held-out data. `whole_model`: what the task samples then, with the model as one module.
- `measure`: where the time of steps goes. `profile`: traces of some. `inspect_step`: the activations of one.
- `process`: the rank's device, seeds and garbage collection. `step_random`: the random numbers of each step.
- `reduce_scope`: what this rank contributes to sums over all ranks. `rank_state`: what it saves beside tensors of the model.
- `warm_start`: start from published weights. `published_tokenizer`: with their tokenizer.
- `monitor`: what the trainer reports to its launcher. `signals`: requests to stop or to save.
"""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.train.trainer import Trainer

__all__ = ["Trainer"]

__getattr__ = first_use(__name__)
