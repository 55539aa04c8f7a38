"""Split backwards of six models, paired with an unsplit backward and with torch's own split.

For each model: the share of weight-gradient FLOPs that waits for W, and the CPU time of both halves together over that
of a plain backward of the same module. Repeats alternate, the median of the pairs counts.

Run: python bench_split.py [--repeats 9] [--json results.json]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from titan_pipeline.runtime import TorchStage
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.flop_counter import FlopCounterMode


class Chain(nn.Module):
    """Layers one after the other, the first tensor of each result handed on."""

    def __init__(self, layers: list[nn.Module], **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = layer(x, **self.options)
            x = x[0] if isinstance(x, tuple) else x
        return x


class WhisperStem(nn.Module):
    """The two convolutions in front of Whisper's encoder layers."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.conv1, self.conv2 = encoder.conv1, encoder.conv2

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Features ``[batch, mels, time]`` to hidden states."""
        gelu = nn.functional.gelu
        return gelu(self.conv2(gelu(self.conv1(x)))).permute(0, 2, 1)


def initialized(layers: list[nn.Module]) -> list[nn.Module]:
    """Layers whose own constructors leave some parameters as they find them."""
    for parameter in (p for layer in layers for p in layer.parameters()):
        nn.init.normal_(parameter, std=0.05)
    return layers


def gpt2(width: int, tokens: int, depth: int) -> tuple[nn.Module, Tensor]:
    """Blocks of GPT-2: its Conv1D layers hold their weights transposed."""
    from transformers.models.gpt2 import modeling_gpt2 as m

    config = m.GPT2Config(n_embd=width, n_head=4, resid_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa")
    return Chain([m.GPT2Block(config, layer_idx=i) for i in range(depth)]), torch.randn(2, tokens, width)


def cnn(width: int, tokens: int, depth: int) -> tuple[nn.Module, Tensor]:
    """Convolutions with batch norms, as the README's."""
    layers: list[nn.Module] = []
    for _ in range(2 * depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    side = max(4, int(tokens**0.5))
    return nn.Sequential(*layers), torch.randn(2, width, side, side)


def vit(width: int, tokens: int, depth: int) -> tuple[nn.Module, Tensor]:
    """A patch embedding and encoder layers of ViT."""
    from transformers.models.vit import modeling_vit as m

    side = 8 * max(2, int(tokens**0.5))
    config = m.ViTConfig(
        hidden_size=width, num_attention_heads=4, num_hidden_layers=depth, intermediate_size=4 * width, image_size=side,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = m.ViTModel(config, add_pooling_layer=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.vit(x).last_hidden_state

    return Encoder(), torch.randn(2, 3, side, side)


def whisper(width: int, tokens: int, depth: int) -> tuple[nn.Module, Tensor]:
    """The convolutions and encoder layers of Whisper."""
    from transformers.models.whisper import modeling_whisper as m

    config = m.WhisperConfig(
        d_model=width, encoder_layers=depth, encoder_attention_heads=4, encoder_ffn_dim=4 * width, num_mel_bins=16,
        max_source_positions=tokens, dropout=0.0, decoder_layers=1, decoder_attention_heads=4,
    )  # fmt: skip
    encoder = m.WhisperEncoder(config)
    return Chain([WhisperStem(encoder), *encoder.layers], attention_mask=None), torch.randn(2, 16, 2 * tokens)


def mixtral(width: int, tokens: int, depth: int) -> tuple[nn.Module, Tensor]:
    """Mixtral's sparse expert blocks: expert weights in one tensor each."""
    from transformers.models.mixtral import modeling_mixtral as m

    config = m.MixtralConfig(
        hidden_size=width, intermediate_size=2 * width, num_local_experts=4, num_experts_per_tok=2, num_attention_heads=4,
        num_key_value_heads=4, num_hidden_layers=depth,
    )  # fmt: skip
    config._experts_implementation = "eager"
    layers = [m.MixtralDecoderLayer(config, layer_idx=i) for i in range(depth)]
    rotary = m.MixtralRotaryEmbedding(config)
    x = torch.randn(2, tokens, width)
    return Chain(initialized(layers), position_embeddings=rotary(x, torch.arange(tokens)[None])), x


def mamba(width: int, tokens: int, depth: int) -> tuple[nn.Module, Tensor]:
    """Mamba blocks, on their path in plain torch."""
    from transformers.models.mamba import modeling_mamba as m

    config = m.MambaConfig(hidden_size=width, state_size=8, num_hidden_layers=depth, use_mambapy=False)
    return Chain(initialized([m.MambaBlock(config, layer_idx=i) for i in range(depth)])), torch.randn(2, tokens, width)


MODELS: dict[str, Callable[[int, int, int], tuple[nn.Module, Tensor]]] = {
    "GPT-2": gpt2, "CNN": cnn, "ViT": vit, "Whisper": whisper, "Mixtral": mixtral, "Mamba": mamba,
}  # fmt: skip
SIZES = {
    "GPT-2": (256, 256, 3), "CNN": (96, 784, 3), "ViT": (256, 196, 3), "Whisper": (256, 256, 3), "Mixtral": (128, 256, 2),
    "Mamba": (128, 32, 2),
}  # fmt: skip


def flops_of(work: Callable[[], Any]) -> float:
    """FLOPs of the products and convolutions that ``work`` runs."""
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def deferred_share(module: nn.Module, x: Tensor) -> float:
    """Share of the weight-gradient FLOPs that runs in W. The rest of I is the backward of the same module, frozen."""
    grad = torch.randn_like(module(x))
    frozen = x.clone().requires_grad_()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    out = module(frozen)
    inputs_only = flops_of(lambda: out.backward(grad))
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    stage = TorchStage(module, 1)
    stage.configure(True)
    stage.forward(0, (x,), None, {}, True)
    first = flops_of(lambda: stage.backward(0, (grad,), True))
    second = flops_of(lambda: stage.backward_weight(0))
    stage.configure(False)
    module.zero_grad()
    return second / (second + first - inputs_only)


def backward_time(module: nn.Module, x: Tensor, grad: Tensor, how: str) -> float:
    """CPU seconds, which a busy machine does not stretch, of one backward: plain, split (ours) or torch (its split)."""
    module.zero_grad()
    stage = TorchStage(module, 1)
    stage.configure(how == "split")
    if how == "torch":
        inner = x.clone().requires_grad_()
        out = module(inner)
        began = time.process_time()
        _, groups = stage_backward_input([out], [grad], [inner], module.parameters())
        stage_backward_weight(module.parameters(), groups)
        return time.process_time() - began
    stage.forward(0, (x,), None, {}, True)
    began = time.process_time()
    stage.backward(0, (grad,), how == "split")
    if how == "split":
        stage.backward_weight(0)
    took = time.process_time() - began
    stage.configure(False)
    return took


def measure(name: str, repeats: int) -> dict[str, float]:
    """One row of the table."""
    torch.manual_seed(0)
    module, x = MODELS[name](*SIZES[name])
    grad = torch.randn_like(module(x))
    share = deferred_share(module, x)
    rows: list[tuple[float, float, float]] = []
    for _ in range(repeats):
        plain, split, theirs = (backward_time(module, x, grad, how) for how in ("plain", "split", "torch"))
        rows.append((plain, split, theirs))
    rows = rows[1:]
    return {
        "deferred_share": share,
        "plain_ms": 1e3 * statistics.median(r[0] for r in rows),
        "split_ratio": statistics.median(r[1] / r[0] for r in rows),
        "torch_ratio": statistics.median(r[2] / r[0] for r in rows),
    }


def main() -> None:
    """Measure all models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for name in args.models:
        results[name] = measure(name, args.repeats)
        print(name, {k: round(v, 4) for k, v in results[name].items()}, flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
