"""Stages of ``nn.TransformerEncoderLayer``, a Transformer that knows nothing of pipelines. Runs on the CPU."""

import torch
from titan_pipeline import build_schedule
from titan_pipeline.runtime import Executor, ThreadHub, TorchStage, split_layers
from torch import nn

blocks = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(4)]
layers = [nn.Embedding(50, 32), *blocks, nn.Linear(32, 50)]
tokens = torch.randint(50, (4, 2, 8)).unbind()
schedule = build_schedule("interleaved_zb", num_ranks=2, num_microbatches=4, num_chunks=2)
parts = split_layers(layers, schedule.num_stages)


def loss(logits, target):
    """Cross-entropy, summed over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


def train(transport):
    """One rank."""
    stages = [TorchStage(parts[s], s, loss=loss) for s in schedule.stages_of(transport.rank)]
    executor = Executor(schedule, stages, transport, count_tokens=lambda t: t.numel())
    return executor.step(tokens, tokens).loss


pipelined = ThreadHub(2).run(train)[0]
whole = sum(loss(nn.Sequential(*layers)(t), t) for t in tokens).item() / 64
print(f"pipelined {pipelined:.6f}, whole model {whole:.6f}")
