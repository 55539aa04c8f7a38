"""A plain ``nn.Sequential`` CNN under a zero-bubble V schedule: two ranks, here two threads. Runs on the CPU."""

import torch
from titan_pipeline import build_schedule
from titan_pipeline.runtime import Executor, ThreadHub, TorchStage, split_layers
from torch import nn

cnn = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
images, labels = torch.randn(8, 2, 3, 8, 8).unbind(), torch.randint(4, (8, 2)).unbind()
schedule = build_schedule("zbv", num_ranks=2, num_microbatches=8)
parts = split_layers(cnn, schedule.num_stages)


def train(transport):
    """One rank."""
    stages = [TorchStage(parts[s], s, loss=nn.functional.cross_entropy) for s in schedule.stages_of(transport.rank)]
    optimizer = torch.optim.SGD([p for s in stages for p in s.module.parameters()], lr=0.1)
    executor = Executor(schedule, stages, transport)
    losses = []
    for _ in range(10):
        losses.append(executor.step(images, labels).loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


losses = ThreadHub(2).run(train)[0]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
