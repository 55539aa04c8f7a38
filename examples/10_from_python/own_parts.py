"""Train with batches, a loss, an optimizer and a callback of your own; all else stays the configuration's."""

import torch
import torch.nn.functional as F
from titan_train import Observer, Trainer, load_config

config = load_config(
    "debug",
    train={"steps": 8, "global_batch": 4},
    **{"model.seq_len": 32, "run.name": "own-parts", "launch.device": "cpu", "metrics.progress": "off"},
)


def batches():
    """Pairs of tokens and next tokens, [B, S] each: here, bytes that count up."""
    while True:
        rows = (torch.arange(33) + torch.randint(200, (4, 1))) % 256
        yield rows[:, :-1], rows[:, 1:]


def loss(logits, labels):
    """The sum over labels: the trainer divides by their number, over all ranks."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)


class Watch(Observer):
    def on_step(self, info):
        print(f"step {info.step}: loss {info.result.loss:.3f}, {info.seconds:.2f} s")

    def on_checkpoint(self, step, seconds):
        print(f"saved step {step} in {seconds:.2f} s")


optimizer = torch.optim.RMSprop  # called with the parameter groups; the schedule scales their learning rates
with Trainer(config, data=batches(), loss=loss, optimizer=optimizer, callbacks=[Watch()]) as trainer:
    trainer.fit()
