"""Question: does a model wrapped by plan.apply step slower than one wrapped by hand with fully_shard?

Method: on each gloo rank, two copies of one model with the same weights, one wrapped by eight lines of fully_shard,
one by ``plan(...).apply(...)`` with the same grouping. Steps (forward, backward) are timed in pairs, the order within
a pair alternating, so that drift of the machine hits both. The figures are the medians over pairs of apply / hand, in
wall time and in CPU time of the rank's process (which other work on the machine disturbs less), with 95 % intervals
from 10,000 bootstrap samples of the pairs. Both copies' gradients are compared first, bit for bit.

Output: one JSON object on the last line; ``--out PREFIX`` also writes PREFIX.json and PREFIX.md.
Limits: CPU and gloo; says nothing about overlap on GPUs. A busy machine widens the interval.

Example: python packages/titan-fsdp/benchmarks/apply_overhead.py --ranks 2 --pairs 60
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from titan_fsdp import CollectiveCounter, Policy, materialize, plan
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    """A residual MLP block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Shape ``[B, dim]`` in and out."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, dim: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[B]`` to logits ``[B, vocab]``."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def by_hand(model: Any, mesh: Any) -> Any:
    """What a user writes without this package, with the same groups."""
    fully_shard(model.embed, mesh=mesh, reshard_after_forward=True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model.head, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank: compare gradients, then time pairs; rank 0 writes the times."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(Path(folder, "store")), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,))
    models: list[Any] = []
    for wrap in (lambda m: by_hand(m, mesh), lambda m: plan(m, mesh, Policy()).apply(m)):
        models.append(materialize(wrap(Model(options.dim, options.layers, options.vocab)), "cpu", None))
    tokens = torch.randint(options.vocab, (options.tokens,), generator=torch.Generator().manual_seed(rank))

    def step(model: Any) -> tuple[float, float]:
        model.zero_grad()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        return time.perf_counter() - wall, time.process_time() - cpu

    for _ in range(3):
        for model in models:
            step(model)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a.grad.full_tensor(), b.grad.full_tensor()) for a, b in pairs), "gradients differ"
    counts: list[str] = []
    for model in models:
        with CollectiveCounter() as counter:
            step(model)
        counts.append(str(counter.total))
    times: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for i in range(options.pairs):
        first = i % 2
        taken = {index: step(models[index]) for index in (first, 1 - first)}
        times.append((taken[0], taken[1]))
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps({"times": times, "same_collectives": counts[0] == counts[1]}))
    dist.barrier()
    dist.destroy_process_group()


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return medians[250], medians[9_749]


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("ranks", 2), ("pairs", 60), ("dim", 256), ("layers", 6), ("vocab", 1024), ("tokens", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", help="write PREFIX.json and PREFIX.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(options, folder), nprocs=options.ranks)
        measured = json.loads(Path(folder, "times.json").read_text())
    figures: dict[str, dict[str, Any]] = {}
    for i, clock in enumerate(("wall", "cpu")):
        hand, applied = ([pair[which][i] for pair in measured["times"]] for which in (0, 1))
        ratios = [b / a for a, b in zip(hand, applied, strict=True)]
        figures[clock] = {
            "ratio_median": round(statistics.median(ratios), 4),
            "ratio_interval_95": [round(x, 4) for x in interval(ratios)],
            "hand_step_ms_median": round(1e3 * statistics.median(hand), 2),
            "apply_step_ms_median": round(1e3 * statistics.median(applied), 2),
        }
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "benchmark": "fsdp_apply_overhead",
        **figures,
        "same_collectives": measured["same_collectives"],
        "config": {k: v for k, v in vars(options).items() if k != "out"},
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"cpu, {os.cpu_count()} cores, {platform.machine()}",
        "cores": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 1),
        "commit": commit.stdout.strip(),
    }
    if options.out:
        Path(f"{options.out}.json").write_text(json.dumps(result, indent=2) + "\n")
        Path(f"{options.out}.md").write_text(_markdown(result))
    print(json.dumps(result))


def _markdown(result: dict[str, Any]) -> str:
    config = result["config"]
    rows = [
        f"| {clock} | {f['hand_step_ms_median']} ms | {f['apply_step_ms_median']} ms | **{f['ratio_median']}** | "
        f"{f['ratio_interval_95'][0]} – {f['ratio_interval_95'][1]} |"
        for clock, f in (("wall", result["wall"]), ("CPU of the rank", result["cpu"]))
    ]
    table = "\n".join(rows)
    return f"""# Step time of plan.apply over hand-written fully_shard

{config["ranks"]} gloo ranks on {result["device"]}, torch {result["torch"]}, one thread a rank;
{config["layers"]} blocks of width {config["dim"]}, {config["tokens"]} tokens a rank; {config["pairs"]} pairs of steps
(forward and backward), order alternating.

| clock | by hand, median | plan.apply, median | ratio of pairs, median | 95 % interval |
|---|---|---|---|---|
{table}

Gradients of the two are bitwise equal; both issue the same collectives: {result["same_collectives"]}.
Load average of the machine at the end: {result["load_average_1min"]} on {result["cores"]} cores. Above the number of
cores, other work was running, which inflates wall times and widens their interval. Commit {result["commit"]}.

Run again: `python packages/titan-fsdp/benchmarks/apply_overhead.py --ranks {config["ranks"]} --pairs {config["pairs"]}
--dim {config["dim"]} --layers {config["layers"]}`
"""


if __name__ == "__main__":
    main()
