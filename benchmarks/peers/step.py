"""A training step of a small Llama: what `titan-train run` takes by itself, beside the peers' best forms.

Method: every contestant has the same module, weights, batches (8 x 256 tokens), AdamW, clip at 1 and float32, in a process
of its own; the loss of the first step must be the same. ``titan``: the Trainer, one process with all cores, which is what
``launch.nproc = 0`` means on a CPU. ``loop``: the loop that nanoGPT has, eager, all cores; ``loop compiled``: the same under
torch.compile, nanoGPT's default (needs a compiler). ``loop ddp``: two ranks of one thread each. ``accelerate`` and
``fabric``: the same loop with what Accelerate and Lightning Fabric wrap around module, optimizer, backward and clipping.
``hf trainer``: the Trainer of transformers around the same module.

Limits: one small model on a CPU. Compilation takes up to a minute, before anything is timed. torchtitan 0.3.0 does not run
without a GPU, so it is no contestant.

    python benchmarks/peers/step.py
"""

import dataclasses
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import turns

CONTESTANTS = ("titan", "loop", "loop compiled", "loop ddp", "accelerate", "fabric", "hf trainer")
BATCH, LR = 8, 1e-3
MODEL = "{ dim = 192, num_layers = 4, num_heads = 4, num_kv_heads = 2, ffn_dim = 512 }"


def build(folder: str):
    """The trainer of the shipped quick start with this model and AdamW, without saving and validating, at one learning rate."""
    from titan_train.config import load_config
    from titan_train.inputs import prepare_inputs
    from titan_train.train import Trainer

    words = ["--launch.device", "cpu", "--run.dir", folder, "--metrics.progress", "off", "--optimizer.lr", str(LR)]
    words += [
        "--model.args",
        MODEL,
        "--model.seq-len",
        "256",
        "--train.global-batch",
        str(BATCH),
        "--optimizer.name",
        "adamw",
    ]
    config = load_config("quickstart", [*words, "--schedule.warmup-steps", "0", "--train.steps", "1000000"])
    config = dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(config.checkpoint, every=0),
        validation=dataclasses.replace(config.validation, every=0),
    )
    prepare_inputs(config)
    return config, Trainer(config)


def used() -> float:
    """Processor seconds of this process and of those that it has waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def requests() -> Iterator[int]:
    """Steps of each turn that is asked for."""
    for line in sys.stdin:
        yield int(line)


def answer(began: float, spent: float, loss: float) -> None:
    print("done", time.perf_counter() - began, used() - spent, loss, flush=True)


def serve(kind: str, rank: int, meeting: str) -> None:
    """One contestant, until its standard input ends."""
    with tempfile.TemporaryDirectory() as folder:
        config, trainer = build(folder)
        if kind == "titan":
            for steps in requests():
                began, spent = time.perf_counter(), used()
                trainer.fit(until=trainer.step + steps)
                answer(began, spent, trainer.losses[-1])
            trainer.abandon()
            return
        state = {name: tensor.clone() for name, tensor in trainer.model.parts[0].state_dict().items()}
        trainer.abandon()
        {"hf trainer": serve_hf}.get(kind, serve_loop)(config, state, kind, rank, meeting)


def module_of(config, state):
    """The plain module with the trainer's weights, and its batches."""
    import torch
    from titan_train.inputs import open_inputs
    from titan_train.models import build_model

    inputs = open_inputs(config)
    model = build_model(config.model, vocab_size=inputs.tokenizer.vocab_size, device="cpu")
    model.load_state_dict(state)

    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens, labels, positions, cu_seqlens):
            logits = self.model(tokens, positions=positions, cu_seqlens=cu_seqlens)
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    return WithLoss(), inputs


def loader_of(inputs, ranks: int, rank: int):
    from titan_train.data import DataLoader

    return DataLoader(
        inputs.train, global_batch=BATCH, dp_rank=rank, dp_size=ranks, microbatch=BATCH // ranks, prefetch=2
    )


def serve_loop(config, state, kind: str, rank: int, meeting: str) -> None:
    """A hand-written loop."""
    import torch
    import torch.distributed as dist

    ddp = kind == "loop ddp"
    other = None
    if ddp:
        if rank == 0:
            other = subprocess.Popen(
                [sys.executable, __file__, "--serve", kind, "1", meeting], stdin=subprocess.DEVNULL
            )
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=2)
    module, inputs = module_of(config, state)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run, optimizer, backward, clip = wrapped(kind, module, optimizer)
    batches = iter(loader_of(inputs, 1 + ddp, rank))

    def step() -> float:
        batch = next(batches)
        loss = run(batch.tokens, batch.labels, batch.positions, batch.cu_seqlens)
        backward(loss)
        clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    told = torch.zeros(1, dtype=torch.int64)
    figures = torch.zeros(2, dtype=torch.float64)
    asked = requests() if rank == 0 else iter(lambda: -1, None)
    for steps in asked:
        if ddp:
            told[0] = steps
            dist.broadcast(told, 0)
            steps = int(told)
        if steps == 0:
            break
        began, spent = time.perf_counter(), used()
        for _ in range(steps):
            loss = step()
        if ddp:
            figures[0], figures[1] = used() - spent, loss / 2
            dist.all_reduce(figures)
            if rank == 0:
                print("done", time.perf_counter() - began, float(figures[0]), float(figures[1]), flush=True)
        else:
            answer(began, spent, loss)
    if ddp and rank == 0:
        dist.broadcast(torch.zeros(1, dtype=torch.int64), 0)
        assert other is not None
        other.wait()


def wrapped(kind: str, module, optimizer):
    """Module and optimizer as the contestant has them, its backward, and its clipping at 1."""
    import torch

    if kind == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        run, optimizer = accelerator.prepare(module, optimizer)
        return run, optimizer, accelerator.backward, lambda: accelerator.clip_grad_norm_(run.parameters(), 1.0)
    if kind == "fabric":
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=1)
        run, optimizer = fabric.setup(module, optimizer)
        return run, optimizer, fabric.backward, lambda: fabric.clip_gradients(run, optimizer, max_norm=1.0)
    run = torch.nn.parallel.DistributedDataParallel(module) if kind == "loop ddp" else module
    if kind == "loop compiled":
        run = torch.compile(run)
    return run, optimizer, torch.Tensor.backward, lambda: torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def serve_hf(config, state, kind: str, rank: int, meeting: str) -> None:
    """Trainer of transformers, which waits after each turn's last step."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    module, inputs = module_of(config, state)

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, tokens, labels, positions, cu_seqlens):
            loss = self.inner(tokens, labels, positions, cu_seqlens)
            return {"loss": loss}

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            for batch in loader_of(inputs, 1, 0):
                yield {
                    "tokens": batch.tokens, "labels": batch.labels, "positions": batch.positions,
                    "cu_seqlens": batch.cu_seqlens,
                }  # fmt: skip

    asked = requests()

    class Turns(TrainerCallback):
        left = 0

        def on_step_begin(self, args, trainer_state, control, **_):
            if self.left == 0:
                self.left = next(asked, 0)
                control.should_training_stop = self.left == 0
                self.began, self.spent = time.perf_counter(), used()

        def on_step_end(self, args, trainer_state, control, **_):
            self.left -= 1
            if self.left == 0:
                control.should_log = True

        def on_log(self, args, trainer_state, control, logs=None, **_):
            if "loss" in (logs or {}):
                answer(self.began, self.spent, logs["loss"])

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=10**6, per_device_train_batch_size=1, learning_rate=LR, lr_scheduler_type="constant",
            adam_beta2=0.95, weight_decay=0.1, max_grad_norm=1.0, report_to=[], save_strategy="no", logging_steps=10**6,
            use_cpu=True, disable_tqdm=True, remove_unused_columns=False, dataloader_num_workers=0, optim="adamw_torch_fused",
        )  # fmt: skip
        Trainer(
            Wrapped(), arguments, train_dataset=Batches(), data_collator=lambda rows: rows[0], callbacks=[Turns()]
        ).train()


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    turns.with_peers("transformers", "accelerate", "lightning")
    made = turns.parser(__doc__ or "", rounds=12)
    made.add_argument("--steps", type=int, default=4, help="optimizer steps a turn")
    made.add_argument("--only", nargs="*", default=[], choices=CONTESTANTS, help="these beside titan")
    options = made.parse_args()
    turns.wait_until_idle(options)
    # Compiling costs a minute; what it leaves in the load has to go first.
    cores = str(len(os.sched_getaffinity(0)))
    chosen = [one for one in CONTESTANTS if not options.only or one in ("titan", *options.only)]
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        print("no compiler: 'loop compiled' is left out")
        chosen = [one for one in chosen if one != "loop compiled"]
    with tempfile.TemporaryDirectory() as meeting:
        served = {
            one: turns.Served(
                [sys.executable, __file__, "--serve", one, "0", meeting],
                {"OMP_NUM_THREADS": cores, "PYTHONWARNINGS": "ignore"},
            )
            for one in chosen
        }
        first: dict[str, float] = {}
        for one, contestant in served.items():
            contestant.turn(1)
            first[one] = contestant.loss
            contestant.turn(3)
        far = {one: loss for one, loss in first.items() if abs(loss - first["titan"]) > 1e-3}
        if far:
            raise SystemExit(f"the first losses differ, so there is nothing to compare: {first}")
        print(f"first loss {first['titan']:.4f} in all")
        contestants = {one: (lambda c=c: c.turn(options.steps)) for one, c in served.items()}
        turns.compare("peers_step", contestants, options, {"first_loss": first})
        for contestant in served.values():
            contestant.close()


if __name__ == "__main__":
    main()
