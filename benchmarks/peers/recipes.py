"""What the contestants of `quality.py` are: the quick start, nanoGPT's loop and the Trainer of transformers, each with a model.

nanoGPT's model and loop are written here as its ``model.py`` and ``train.py`` have them: LayerNorm without a bias, GELU, learned
positions, tied embeddings, weights of 0.02 (smaller before the residual), decay on matrices alone, cosine to a tenth of the rate,
random windows of one stream. The Trainer of transformers trains its own ``GPT2LMHeadModel`` or ``LlamaForCausalLM`` on chunks of
the same stream. Each contestant sees positions and documents as its own code does: only ours knows where a document ends.
"""

import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from titan_train import Trainer
from titan_train.data import DataLoader
from titan_train.inputs import open_inputs, prepare_inputs
from titan_train.models import build_model
from titan_train.models.common.attention import document_positions
from titan_train.tokenizers import bits_per_byte
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from quickstart_sweep import configure

HELD_OUT = 100_000
WINDOW = 256
WARM_UP = 0.05
"""Share of the steps over which every contestant's rate rises: 20 of the quick start's 400, 100 of nanoGPT's 2000 on a CPU."""

Logits = Callable[[Any], Tensor]
"""From a held-out batch to the logits of its labels, (rows, seq_len, vocab)."""


@dataclass(frozen=True)
class Recipe:
    """A contestant's settings."""

    peer: str
    settings: Mapping[str, Any]

    @property
    def cost(self) -> str:
        """What a step's time depends on: all but rates."""
        free = (
            "lr",
            "beta2",
            "schedule",
            "weight_decay",
            "--optimizer.lr",
            "--schedule.name",
            "--schedule.decay-steps",
        )
        return f"{self.peer} " + " ".join(f"{k}={v}" for k, v in sorted(self.settings.items()) if k not in free)


@dataclass(frozen=True)
class Trained:
    """What a training leaves."""

    cpu_s: float
    """Processor time of the steps after the first ``skip``."""
    tokens: int
    """Of one step."""
    parameters: int
    logits: Logits


class Corpus:
    """The quick start's tokens: one stream to train on, and held-out windows of `WINDOW` labels; who was trained on shorter ones
    reads them in blocks of its own length.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.config = configure(["--model.seq-len", str(WINDOW)], Path(folder), 1, HELD_OUT)
        prepare_inputs(self.config, quiet=True)
        inputs = open_inputs(self.config)
        assert inputs.validation is not None
        (source,) = inputs.train._sources
        self.stream = torch.from_numpy(source.window(0, source.num_tokens).astype("int64"))
        self.vocab_size, self._label_bytes = inputs.vocab_size, inputs.label_bytes
        steps, batch = self.config.validation.steps, self.config.train.global_batch
        self.held_out = list(
            DataLoader(inputs.validation, global_batch=batch, microbatch=batch, steps=steps, prefetch=0)
        )

    @torch.no_grad()
    def score(self, logits: Logits) -> dict[str, float]:
        """Bits per byte of the held-out labels, and what they were taken from."""
        nats, count, size = 0.0, 0, 0
        for batch in self.held_out:
            nats += F.cross_entropy(
                logits(batch).flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
            ).item()
            count += int((batch.labels >= 0).sum())
            size += int(self._label_bytes(batch.labels))
        return {
            "bits_per_byte": bits_per_byte(nats, size) or math.nan, "loss": nats / count,
            "scored_tokens": count, "scored_bytes": size,
        }  # fmt: skip


def train(recipe: Recipe, corpus: Corpus, steps: int, seed: int, skip: int = 0) -> Trained:
    """Train for so many steps with the whole schedule inside."""
    torch.manual_seed(seed)
    return {"titan": _titan, "nanogpt": _nanogpt, "hf": _hf}[recipe.peer](
        dict(recipe.settings), corpus, steps, seed, skip
    )


def _titan(settings: dict[str, Any], corpus: Corpus, steps: int, seed: int, skip: int) -> Trained:
    """The shipped quick start, with words of its command line changed."""
    words = [word for pair in settings.items() for word in pair]
    with tempfile.TemporaryDirectory() as folder:
        config = configure([*words, "--run.seed", str(seed)], Path(folder), steps, HELD_OUT)
        config = dataclasses.replace(
            config,
            validation=dataclasses.replace(config.validation, every=0),
            schedule=dataclasses.replace(config.schedule, warmup_steps=max(1, round(WARM_UP * steps))),
        )
        with Trainer(config) as trainer:
            if skip:
                trainer.fit(until=skip)
            began = time.process_time()
            trainer.fit()
            spent = time.process_time() - began
            if trainer.step < steps:
                raise SystemExit(f"stopped at step {trainer.step} of {steps}: nothing is recorded")
            state = {name: tensor.clone() for name, tensor in trainer.model.parts[0].state_dict().items()}
            parameters = trainer.model.report.num_parameters
    model = build_model(config.model, vocab_size=corpus.vocab_size, device="cpu").eval()
    model.load_state_dict(state)
    block = config.model.seq_len

    def logits(batch: Any) -> Tensor:
        if block == WINDOW:
            return model(batch.tokens, positions=batch.positions, cu_seqlens=batch.cu_seqlens)
        cu_seqlens = _documents(batch.positions.reshape(-1, block))
        positions = document_positions(cu_seqlens, block)
        return _in_blocks(lambda tokens: model(tokens, positions=positions, cu_seqlens=cu_seqlens), batch.tokens, block)

    return Trained(spent, config.train.global_batch * block, parameters, logits)


def _documents(positions: Tensor) -> Tensor:
    """Where the documents of rows begin, which may have begun before the row; positions are counted within documents."""
    starts = [[0, *(i for i in row.nonzero().flatten().tolist() if i), len(row)] for row in positions == 0]
    most = max(map(len, starts))
    return torch.tensor([row + [row[-1]] * (most - len(row)) for row in starts], dtype=torch.int32)


class Block(nn.Module):
    """nanoGPT's block."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.c_attn, self.attn_c_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.c_fc, self.mlp_c_proj = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, dim = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, dim // self.heads).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(dim, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        x = x + self.drop(self.attn_c_proj(y.transpose(1, 2).contiguous().view(rows, length, dim)))
        return x + self.drop(self.mlp_c_proj(F.gelu(self.c_fc(self.ln_2(x)))))


class Gpt(nn.Module):
    """nanoGPT's model."""

    def __init__(self, vocab: int, block: int, layers: int, heads: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(block, dim)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([Block(dim, heads, dropout) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(dim, bias=False)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                std = 0.02 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def _nanogpt(settings: dict[str, Any], corpus: Corpus, steps: int, seed: int, skip: int) -> Trained:
    """The loop of nanoGPT's loop."""
    lr, beta2, block, rows = (settings.pop(name) for name in ("lr", "beta2", "block", "batch"))
    model = Gpt(corpus.vocab_size, block, **settings)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2))
    rising = max(1, round(WARM_UP * steps))
    began = time.process_time()
    for step in range(steps):
        if step == skip:
            began = time.process_time()
        if step < rising:
            rate = lr * (step + 1) / (rising + 1)
        else:
            fall = 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
            rate = lr / 10 + fall * (lr - lr / 10)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(corpus.stream) - block, (rows,)).tolist()
        tokens = torch.stack([corpus.stream[i : i + block] for i in starts])
        labels = torch.stack([corpus.stream[i + 1 : i + 1 + block] for i in starts])
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    spent = time.process_time() - began
    model.eval()
    return Trained(spent, rows * block, _size(model), lambda b: _in_blocks(model, b.tokens, block))


def _hf(settings: dict[str, Any], corpus: Corpus, steps: int, seed: int, skip: int) -> Trained:
    """The Trainer of transformers; a schedule of None leaves all of its own defaults."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers import Trainer as HfTrainer

    length, rows, dim, layers = (settings[name] for name in ("block", "batch", "dim", "layers"))
    if settings["model"] == "gpt2":
        drop = {} if settings["dropout"] is None else dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=corpus.vocab_size, n_positions=length, n_embd=dim, n_layer=layers, n_head=4, bos_token_id=None,
                eos_token_id=None, **drop,
            )
        )  # fmt: skip
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=corpus.vocab_size, hidden_size=dim, intermediate_size=512, num_hidden_layers=layers,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=length, tie_word_embeddings=True,
                bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
    chosen: dict[str, Any] = {}
    if settings["schedule"] is not None:
        chosen = {
            "learning_rate": settings["lr"], "lr_scheduler_type": settings["schedule"], "weight_decay": settings["weight_decay"],
            "warmup_steps": max(1, round(WARM_UP * steps)),
        }  # fmt: skip
    chunks = corpus.stream[: len(corpus.stream) // length * length].view(-1, length)
    mark = 0.0

    class Mark(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            nonlocal mark
            if state.global_step == skip:
                mark = time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=rows, seed=seed, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, **chosen,
        )  # fmt: skip
        trainer = HfTrainer(
            model, arguments, train_dataset=[{"input_ids": c, "labels": c} for c in chunks], callbacks=[Mark()]
        )
        trainer.train()
        spent = time.process_time() - mark
    model.eval()
    return Trained(
        spent, rows * length, _size(model), lambda b: _in_blocks(lambda t: model(t).logits, b.tokens, length)
    )


def _in_blocks(model: Callable[[Tensor], Tensor], tokens: Tensor, block: int) -> Tensor:
    """Logits of tokens, read in blocks of the length that the model was trained on."""
    found = model(tokens.reshape(-1, block))
    return found.reshape(*tokens.shape, -1)


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
