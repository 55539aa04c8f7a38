"""Float8 weights that do not train are cast once in a run, others once per step."""

import pytest
import titan_fp8
from tiny_run import tiny_run, write_text
from titan_train import Trainer
from torch.utils._python_dispatch import TorchDispatchMode


class WeightCasts(TorchDispatchMode):
    """Counts casts of weights."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "cast_weight" in func._schema.name
        return func(*args, **(kwargs or {}))


def test_frozen_weights_keep_their_casts_over_the_steps_of_a_run(tmp_path):
    write_text(tmp_path)
    config = tiny_run(
        tmp_path, train={"steps": 3, "global_batch": 2, "microbatch": 1},
        float8={"recipe": "blockwise", "min_speedup": 0.0},
    )  # fmt: skip
    with Trainer(config) as trainer:
        first, *others = trainer.model.parts[0].layers.values()
        first.requires_grad_(False)
        frozen, *trained = (
            sum(isinstance(m, titan_fp8.Float8Linear) for m in layer.modules()) for layer in (first, *others)
        )
        with WeightCasts() as casts:
            trainer.fit()
    assert frozen > 0
    assert casts.count == frozen + 3 * sum(trained)


@pytest.mark.parametrize("average", [{"ema_decay": 0.5, "use": "ema"}, {"use": "checkpoints", "checkpoints": 2}])
def test_validations_with_averaged_weights_leave_frozen_weights_usable(tmp_path, average):
    write_text(tmp_path)
    held_out = {"name": "same", "kind": "text", "paths": [str(tmp_path / "text.txt")]}
    config = tiny_run(
        tmp_path, train={"steps": 3, "global_batch": 2, "freeze": [r"layers\.0\."]}, average=average,
        float8={"recipe": "blockwise", "min_speedup": 0.0}, data={"validation_sources": [held_out]},
        validation={"every": 1, "steps": 1, "sample_tokens": 0}, checkpoint={"every": 1, "keep_last": 0},
    )  # fmt: skip
    with Trainer(config) as trainer:
        trainer.fit()
    assert len(trainer.losses) == 3
