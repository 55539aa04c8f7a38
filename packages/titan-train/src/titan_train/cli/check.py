"""Validate a configuration without training: layout, parameters, memory and communication.

Nothing is allocated and no rank is started (the model is built on the meta device), so a 405B configuration is
checked on a laptop in seconds: `titan-train check llama3_405b --launch.nnodes 64 --launch.nproc 8`.
"""

import argparse
from collections.abc import Sequence

from titan_train.config import Config, load_config
from titan_train.launch.ranks import count_gpus
from titan_train.layout import BatchPlan, build_layout, plan_batch, resolve_mode

_MEMORY = {
    "params": "sharded parameters, float32",
    "grads": "sharded gradients",
    "optimizer": "optimizer state",
    "gathered": "parameters gathered at one time, at most",
    "activations": "saved for backward by one micro-batch",
    "peak": "most at any time of a step",
}


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.usage = "titan-train check CONFIG [--section.key value ...]"
    parser.add_argument("config", metavar="CONFIG", help="TOML file, or name of a shipped configuration")
    arguments, _ = parser.parse_known_args(words[:1])
    config = load_config(arguments.config, words[1:])
    world_size = config.launch.nnodes * (config.launch.nproc or count_gpus() or 1)
    layout = build_layout(config, world_size)
    mode = resolve_mode(config.parallel, layout, dtype=config.train.dtype)
    batch = plan_batch(config, layout)
    print(layout.explain())
    print()
    print(_batch_line(config, batch))

    import titan_fsdp as fsdp
    import torch

    from titan_train.inputs import vocab_size_without_training
    from titan_train.models import build_model, count_parameters, flops_per_token
    from titan_train.train.build import fsdp_policy
    from titan_train.train.loss import cross_entropy_sum

    model = build_model(config.model, vocab_size=vocab_size_without_training(config), device="meta")
    print(f"model    {config.model.name}: {count_parameters(model):,} parameters")
    flops = flops_per_token(model, config.model.seq_len)
    print(
        f"compute  {flops / 1e9:,.3f} GFLOP a token, "
        f"{flops * config.train.global_batch * config.model.seq_len / 1e12:,.1f} TFLOP a step"
    )
    if mode != "none":
        sizes = {"shard": layout.spec.dp_shard, "replicate": layout.spec.dp_replicate}
        plan = fsdp.plan(model, sizes, fsdp_policy(config, mode))
        tokens = torch.zeros(batch.microbatch, config.model.seq_len, dtype=torch.int64, device="meta")
        estimate = plan.estimate(
            model,
            (tokens,),
            loss=lambda logits: cross_entropy_sum(logits, torch.zeros_like(logits[..., 0], dtype=torch.int64)),
            microbatches=batch.accumulation,
            keep=config.parallel.accumulate,
        )
        print(f"\n{plan.explain()}\n\nmemory of one rank, GiB:")
        for name in ("params", "grads", "optimizer", "gathered", "activations", "peak"):
            print(f"  {name:<12}{getattr(estimate, name) / 2**30:10.2f}  {_MEMORY[name]}")
    print("\nthe configuration is valid")
    return 0


def _batch_line(config: Config, batch: BatchPlan) -> str:
    tokens = batch.global_batch * config.model.seq_len
    return (
        f"batch    {batch.global_batch} sequences x {config.model.seq_len} = {tokens:,} tokens a step: "
        f"{batch.dp_size} data-parallel ranks x {batch.accumulation} micro-batches x {batch.microbatch}; "
        f"{tokens * config.train.steps:,} tokens in {config.train.steps} steps"
    )
