"""A small training loop for the tests: dropout, shuffled data, AdamW, a schedule. Everything a resume must carry.

Also what damages one of its files.
"""

import random
from pathlib import Path

import numpy as np
import torch
from titan_ckpt import TrainState
from torch import nn


def flip_last_byte(file: Path) -> None:
    """Change one bit of a file."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


class Net(nn.Module):
    """Uneven sizes on purpose; tied weights; a buffer; a 0-d parameter."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(18, 10)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 10)) for _ in range(2)])
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(10, 18, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids):
        self.calls.add_(1)
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return self.head(x)


class Data:
    """A position and a private generator's draws: a rank's data state that is not the same on all ranks."""

    def __init__(self, rank: int = 0) -> None:
        self.position, self.rank = 100 * rank, rank

    def next(self) -> torch.Tensor:
        self.position += 1
        generator = torch.Generator().manual_seed(self.position)
        return torch.randint(18, (4, 6), generator=generator)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def build(seed: int = 0, **kwargs) -> TrainState:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return finish(Net(**kwargs))


def finish(model: nn.Module, rank: int = 0) -> TrainState:
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.MultiStepLR(optim, [4, 9])
    return TrainState(model=model, optim=optim, sched=sched, data=Data(rank), extra={"tokens": 0})


def train(state: TrainState, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        ids = state.data.next()
        noise = random.random() + np.random.random()  # draws from every generator take part in the loss
        logits = state.model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) * (1 + 0.01 * noise)
        state.optim.zero_grad()
        loss.backward()
        state.optim.step()
        state.sched.step()
        state.extra["tokens"] += ids.numel()
        losses.append(loss.item())
    return losses


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def full_state(state: TrainState) -> dict[str, torch.Tensor]:
    """Weights and optimizer state as whole tensors, by name. Collective."""
    out = {f"model.{k}": full(v) for k, v in state.model.state_dict().items()}
    names = {id(p): n for n, p in state.model.named_parameters()}
    for param, values in state.optim.state.items():
        out |= {f"optim.{names[id(param)]}.{k}": full(v) for k, v in values.items()}
    return out
