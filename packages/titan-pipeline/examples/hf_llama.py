"""Stages of a Llama of Hugging Face's ``transformers``: `split` cuts it, its own forward stays unchanged.

Two ranks, here two threads; on the CPU, with random weights. Needs ``pip install transformers``.
"""

import torch
from titan_pipeline.runtime import Executor, ThreadHub, split
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
llama = LlamaForCausalLM(config)
parts = split(llama, "zbv", 2, num_microbatches=4)
print(parts)
tokens = torch.randint(64, (4, 2, 8)).unbind()


def loss(output, target):
    """Next-token cross-entropy of one microbatch; ``output`` is what the whole model returns."""
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def train(transport):
    """One rank."""
    stages = parts.stages(transport.rank, loss=loss)
    return Executor(parts.schedule, stages, transport, tied=parts.tied).step(tokens, tokens).loss


pipelined = ThreadHub(2).run(train)[0]
with torch.no_grad():
    whole = sum(loss(llama(t), t) for t in tokens).item() / 4
print(f"pipelined {pipelined:.6f}, whole model {whole:.6f}")
