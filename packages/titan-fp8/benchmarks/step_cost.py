"""What keeping casts costs a training step, against another version of the package.

Question: does a step with declared lifetimes (`ConstantWeights`) take longer than one of another version?
Method: two processes, one per source folder, train the same small model; they take turns, one step each, in an order that
alternates, so that both meet the same load. A step is 4 microbatches and an AdamW update; its CPU seconds are compared in
pairs. A third process of this version declares nothing. Output: a table, then one JSON object. Limits: a CPU, where casts
are the reference's and much slower than kernels, so that a cast too many shows more than it would on a GPU.

    OMP_NUM_THREADS=1 python packages/titan-fp8/benchmarks/step_cost.py --before /path/to/old/packages/titan-fp8/src
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
WORKER = """
import contextlib, sys, time, torch, titan_fp8
torch.manual_seed(0)
layers = [m for _ in range(3) for m in (torch.nn.Linear(256, 256, bias=False), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers).bfloat16()
titan_fp8.convert_to_float8(model, "blockwise", min_speedup=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
declares = sys.argv[1] == "declares" and hasattr(titan_fp8, "ConstantWeights")
constant = titan_fp8.ConstantWeights(model) if declares else contextlib.nullcontext()
x = torch.randn(256, 256, dtype=torch.bfloat16)
print("ready", flush=True)
for line in sys.stdin:
    start = time.process_time()
    with constant:
        for _ in range(4):
            model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(time.process_time() - start, flush=True)
"""


def worker(source: Path, mode: str) -> subprocess.Popen[str]:
    """A process that makes one step per line it reads."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-W", "ignore", "-c", WORKER, mode]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def step(process: subprocess.Popen[str]) -> float:
    """CPU seconds of one step."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the src folder of the version to compare with")
    parser.add_argument("--pairs", type=int, default=60, help="steps of each process that count")
    options = parser.parse_args()
    workers = {
        "before": worker(options.before, "declares"),
        "declared": worker(SOURCE, "declares"),
        "undeclared": worker(SOURCE, "nothing"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for index in range(options.pairs + 5):
        for name in list(workers) if index % 2 else reversed(list(workers)):
            taken = step(workers[name])
            if index >= 5:
                seconds[name].append(taken)
    for process in workers.values():
        process.communicate()
    ratios = {name: [a / b for a, b in zip(seconds[name], seconds["before"], strict=True)] for name in workers}
    record = {
        name: {
            "median_ms": round(1e3 * statistics.median(seconds[name]), 2),
            "ratio_to_before": [round(q, 3) for q in statistics.quantiles(ratios[name], n=4)],
        }
        for name in workers
    }
    for name, row in record.items():
        print(f"{name:12} {row['median_ms']:8.2f} ms  ratio to before (quartiles) {row['ratio_to_before']}")
    print(json.dumps({"pairs": options.pairs, "steps": record}))


if __name__ == "__main__":
    main()
