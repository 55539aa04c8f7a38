"""What does the trainer cost over a hand-written loop on the same model?

Question: tokens/s of `titan_train.train.Trainer` divided by tokens/s of a minimal PyTorch loop, same model, same
batches from the same token shards, same optimizer, float32, one CPU process.

Method: both are built in one process and take turns, a few steps each, in alternating order; each turn pair gives one
ratio. The trainer does all it does in a run (loader thread, token-normalised loss, clipping, scheduler, non-finite
guard, metrics file) except saving. The loop does forward, backward, clip, step, and reads its loss every step.

Output: the median ratio and its quartiles. The last line is one JSON object.

Limits: a small model on a CPU shows the trainer's fixed cost per step larger than a real job would. A shared machine is
noisy: the turns are paired for that.

    python benchmarks/train_throughput.py --pairs 30
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from titan_train.config import load_config
from titan_train.data import DataLoader
from titan_train.inputs import open_inputs, prepare_inputs
from titan_train.models import build_model, init_for
from titan_train.train import Trainer


class HandWritten:
    """The loop that a person would write for one process."""

    def __init__(self, config, inputs):
        self.model = build_model(config.model, vocab_size=inputs.tokenizer.vocab_size, device="cpu")
        init = init_for(self.model)
        for name, parameter in self.model.named_parameters():
            init(name, parameter.data, torch.Generator().manual_seed(0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        loader = DataLoader(
            inputs.train, global_batch=config.train.global_batch, dp_rank=0, dp_size=1,
            microbatch=config.train.global_batch, prefetch=config.data.prefetch,
        )  # fmt: skip
        self.batches = iter(loader)

    def train(self, steps):
        for _ in range(steps):
            batch = next(self.batches)
            logits = self.model(batch.tokens, positions=batch.positions, cu_seqlens=batch.cu_seqlens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="turns of each")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps a turn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = load_config("quickstart", ["--launch.device", "cpu", "--run.dir", folder, "--metrics.progress", "off"])
        config = dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, steps=10**6, global_batch=8),
            checkpoint=dataclasses.replace(config.checkpoint, every=0),
            validation=dataclasses.replace(config.validation, every=0),
        )
        prepare_inputs(config)
        trainer = Trainer(config)
        loop = HandWritten(config, open_inputs(config))

        def time_trainer():
            started = time.perf_counter()
            trainer.fit(until=trainer.step + arguments.steps)
            return time.perf_counter() - started

        def time_loop():
            started = time.perf_counter()
            loop.train(arguments.steps)
            return time.perf_counter() - started

        time_trainer(), time_loop()  # warm up
        ours, theirs = [], []
        for i in range(arguments.pairs):
            first, second = (time_trainer, time_loop) if i % 2 == 0 else (time_loop, time_trainer)
            a, b = first(), second()
            t, h = (a, b) if i % 2 == 0 else (b, a)
            ours.append(t)
            theirs.append(h)
        trainer.close()
    tokens = arguments.steps * config.train.global_batch * config.model.seq_len
    ratios = [h / t for t, h in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"trainer      {tokens / statistics.median(ours):10,.0f} tokens/s")
    print(f"hand-written {tokens / statistics.median(theirs):10,.0f} tokens/s")
    print(f"ratio        {middle:.3f} (quartiles {low:.3f} and {high:.3f}, {arguments.pairs} pairs)")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    print(
        json.dumps(
            {
                "benchmark": Path(__file__).stem,
                "ratio_median": round(middle, 4),
                "ratio_quartiles": [round(low, 4), round(high, 4)],
                "trainer_tokens_per_s": round(tokens / statistics.median(ours)),
                "hand_written_tokens_per_s": round(tokens / statistics.median(theirs)),
                "pairs": arguments.pairs,
                "steps_per_turn": arguments.steps,
                "model": config.model.name,
                "seq_len": config.model.seq_len,
                "global_batch": config.train.global_batch,
                "device": "cpu, one thread",
                "versions": {name: version(name) for name in ("titan-train", "torch")},
                "commit": commit,
            }
        )
    )


if __name__ == "__main__":
    main()
