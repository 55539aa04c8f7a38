"""How much host time do clipping and AdamW's step take for many sharded parameters?

Question: a device waits while the host launches the end of a step. How much of that is layouts, which an update by elements does
not need?

Method: one gloo rank, ``--parameters`` small matrices as FSDP2 shards them (DTensor), so that the arithmetic is next to nothing.
Three contestants in rotated order, whose weights are compared after each turn: torch's ``clip_grad_norm_`` and fused
AdamW on the sharded parameters; ours, as `titan_train.train.step` does it; and the same kernels called on plain local tensors
held in lists, below which nothing that calls them can be. Processor time, medians with quartiles.

Output: a table, and one JSON object on the last line.

Limits: the host's share alone. On a GPU a launch costs some microseconds more, in each contestant alike.

Example: ``python packages/titan-train/benchmarks/update_time.py``
"""

import argparse
import json
import os
import platform
import statistics
import time

import torch
from titan_testing import preload, run_ranks
from titan_train.optim.update import can_update, update
from titan_train.parallel.gradients import Gradients, scale_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
MAX_NORM = 1.0


class Torch:
    """What a loop by hand does with FSDP2's parameters."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.optimizer = torch.optim.AdamW(parameters, **SETTINGS)

    def step(self):
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()


class Ours(Torch):
    """`titan_train.train.step`, from the finished gradients to the updated weights."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.gradients = Gradients([nn.ParameterList(parameters)])

    def step(self):
        local = self.gradients.local()
        norm = self.gradients.square_norm(local).sqrt()
        scale_gradients(local, torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0))
        if not can_update(self.optimizer, norm.device):
            self.optimizer.step()  # the first
            return
        update(self.optimizer, (~torch.isfinite(norm)).float())


class Kernels(Torch):
    """The kernels, and nothing else."""

    def step(self):
        if not self.optimizer.state:
            super().step()
            states = [self.optimizer.state[p] for p in self.parameters]
            self.lists = [[s[name].to_local() for s in states] for name in ("exp_avg", "exp_avg_sq")]
            self.steps = [s["step"] for s in states]
            self.weights = [p.detach().to_local() for p in self.parameters]
            return
        gradients = [p.grad._local_tensor for p in self.parameters]
        with torch.no_grad():
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2)))
            torch._foreach_mul_(gradients, torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0))
            torch._foreach_add_(self.steps, 1)
            torch._fused_adamw_(
                self.weights, gradients, *self.lists, [], self.steps, lr=SETTINGS["lr"], beta1=0.9, beta2=0.95,
                weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip


def run(options):
    """The rank: processor seconds of each contestant's steps."""
    mesh = init_device_mesh("cpu", (1,))

    def sharded(seed):
        generator = torch.Generator().manual_seed(seed)
        side = options.side
        return [
            distribute_tensor(torch.randn(side, side, generator=generator), mesh, [Shard(0)])
            for _ in range(options.parameters)
        ]

    contestants = [kind([nn.Parameter(x) for x in sharded(0)]) for kind in (Torch, Ours, Kernels)]
    seconds = [[] for _ in contestants]
    for turn in range(options.turns + 2):
        order = list(range(3))
        for i in order[turn % 3 :] + order[: turn % 3]:
            for parameter, gradient in zip(contestants[i].parameters, sharded(turn + 1), strict=True):
                parameter.grad = gradient
            start = time.process_time()
            contestants[i].step()
            seconds[i].append(time.process_time() - start)
        for other in contestants[1:]:
            for a, b in zip(contestants[0].parameters, other.parameters, strict=True):
                torch.testing.assert_close(a.to_local(), b.to_local(), rtol=1e-6, atol=1e-7)
    return [of_one[2:] for of_one in seconds]


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=291, help="8B's, or another number of matrices")
    parser.add_argument("--side", type=int, default=16, help="rows and columns of each")
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    preload("titan_train")
    (seconds,) = run_ranks(run, 1, options)
    rows = {}
    print(f"{'':24} {'ms':>6}  quartiles")
    for name, values in zip(("torch, sharded", "titan-train", "kernels alone"), seconds, strict=True):
        low, median, high = (1e3 * x for x in statistics.quantiles(values, n=4))
        rows[name] = {"ms": median, "quartiles": (low, high)}
        print(f"{name:24} {median:6.2f}  {low:.2f} to {high:.2f}")
    environment = {"torch": torch.__version__, "python": platform.python_version(), "load": os.getloadavg()[0]}
    print(json.dumps({"benchmark": "update_time", **vars(options), "rows": rows, **environment}))


if __name__ == "__main__":
    main()
