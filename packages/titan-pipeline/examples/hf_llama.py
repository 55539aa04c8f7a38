"""Stages of a Llama of Hugging Face's ``transformers``, unchanged: its decoder layers, embedding and head in a chain.

``positions`` reaches every stage as a keyword, the rotary embedding is computed where it is used. Two ranks, here two
threads; on the CPU, with random weights. Needs ``pip install transformers``.
"""

import torch
from titan_pipeline import build_schedule
from titan_pipeline.runtime import Executor, ThreadHub, TorchStage, split_layers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
llama = LlamaForCausalLM(config)


class Stage(nn.Module):
    """Some of the layers, as Llama's own forward calls them."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.rotary = layers, llama.model.rotary_emb

    def forward(self, x, positions):
        """Tokens or hidden states in, hidden states or logits out."""
        for layer in self.layers:
            decoder = type(layer).__name__ == "LlamaDecoderLayer"
            x = layer(x, position_embeddings=self.rotary(x, positions)) if decoder else layer(x)
        return x


schedule = build_schedule("zb_h1", num_ranks=2, num_microbatches=4)
parts = split_layers([llama.model.embed_tokens, *llama.model.layers, llama.model.norm, llama.lm_head], 2)
tokens = torch.randint(64, (4, 2, 8)).unbind()
extras = [{"positions": torch.arange(8)[None]}] * 4


def loss(logits, target):
    """Next-token cross-entropy of one microbatch."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def train(transport):
    """One rank."""
    stages = [TorchStage(Stage(parts[s]), s, loss=loss) for s in schedule.stages_of(transport.rank)]
    return Executor(schedule, stages, transport).step(tokens, tokens, extras=extras).loss


pipelined = ThreadHub(2).run(train)[0]
with torch.no_grad():
    whole = sum(loss(llama(t).logits, t) for t in tokens).item() / 4
print(f"pipelined {pipelined:.6f}, whole model {whole:.6f}")
