"""Run the trainer under any layout and collect what must not depend on it: losses and whole gradients."""

import tempfile
from pathlib import Path

import torch
from titan_train.config import parse_config
from titan_train.inputs import prepare_inputs
from titan_train.models import named_parameters
from titan_train.train import Trainer
from titan_train.train.observer import Observer


def tree(folder, name, sections):
    """A tiny model on a made-up corpus; ``sections`` override tables of the configuration."""
    folder = Path(folder)
    base = {
        "run": {"dir": str(folder / "runs"), "name": name, "seed": 7},
        "model": {"name": "llama3_debug", "seq_len": 32, "args": {"num_layers": 4, "num_kv_heads": 4}},
        "tokenizer": {"kind": "bytes"},
        "data": {
            "sources": [{"name": "corpus", "kind": "text", "paths": [str(folder / "texts" / "*.txt")]}],
            "cache_dir": str(folder / "cache"),
            "validation_fraction": 0.1,
        },
        "train": {"steps": 10, "global_batch": 8, "max_grad_norm": 0.5},
        # two tokens: each is a forward of the whole model, and that it works under a layout shows in the first
        "validation": {"every": 10, "steps": 1, "sample_tokens": 2},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup_steps": 2},
        "checkpoint": {"every": 0, "async_save": False},
        "metrics": {"progress": "off", "report": False},
        "launch": {"device": "cpu", "timeout_s": 90.0},
    }
    for section, values in sections.items():
        base[section] = base.get(section, {}) | values
    return base


def joined(*sections):
    """Tables of the configuration, those of later ones over those before."""
    merged = {}
    for part in sections:
        for name, values in part.items():
            merged[name] = merged.get(name, {}) | values
    return merged


def prepare(folder):
    """Write and tokenize the corpus once: many short documents, some held out."""
    texts = Path(folder) / "texts"
    texts.mkdir()
    for i in range(160):
        lines = [f"def add_{(i + j) % 7}(x, y):\n    return x + {i * j % 97} * y\n" for j in range(4 + i % 5)]
        (texts / f"{i:03}.txt").write_text("".join(lines))
    prepare_inputs(parse_config(tree(folder, "prepare", {})), quiet=True)


class Seen(Observer):
    """Keeps the gradient norm of each step, and the validations."""

    def __init__(self):
        self.norms, self.validations = [], []

    def on_step(self, info):
        self.norms.append(info.result.grad_norm)

    def on_validation(self, record, sample):
        self.validations.append(record)


def run(folder, name, sections, steps=10):
    """Train; returns losses, validation loss, gradient norm of the first step and this rank's boxes of its gradients."""
    config = parse_config(tree(folder, name, sections))
    seen = Seen()
    with tempfile.TemporaryDirectory() as scratch, Trainer(config, Path(scratch) / "run", callbacks=[seen]) as trainer:
        captured = {}
        update = trainer.optimizer.step

        def capture_then_update(*args, **kwargs):
            if not captured:
                captured.update(boxes(trainer.model))
            return update(*args, **kwargs)

        trainer.optimizer.step = capture_then_update
        validation = []
        trainer.fit(until=steps)
        if steps == config.train.steps:
            from titan_train.train.validate import validation_loss

            with trainer._make_loader(trainer._inputs.validation, steps=1) as loader:
                found = validation_loss(
                    trainer.model,
                    loader,
                    accumulation=trainer.batch_plan.accumulation,
                    scope=trainer._scope,
                    device=trainer.device,
                )
                validation += [found.loss, found.parts]
        return trainer.losses, seen.norms, validation, captured


def boxes(model, of=lambda parameter: parameter.grad):
    """Name to (shape of the whole, offset, local part) of each gradient, or what ``of`` takes; FSDP's shards gathered."""
    found = {}
    for part in model.parts:
        for name, parameter in named_parameters(part):
            value = of(parameter)
            if value is None:
                continue
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            cut = model.cuts.get(name)
            shape, offset = (tuple(whole.shape), (0,) * whole.ndim) if cut is None else (cut.global_shape, cut.offset)
            found[name] = (shape, offset, whole.clone())
    return found


def assemble(ranks):
    """The whole gradients from the boxes of all ranks; replicas must agree to the last bits of float32."""
    whole, filled = {}, {}
    for captured in ranks:
        for name, (shape, offset, part) in captured.items():
            target = whole.setdefault(name, torch.zeros(shape))
            seen = filled.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            where = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            again = seen[where]
            if again.any():
                assert (target[where][again] - part[again]).abs().max() <= 1e-6, name
            target[where] = part
            seen[where] = True
    for name, seen in filled.items():
        assert seen.all(), f"{name}: no rank has all of it"
    return whole


def continue_run(folder, name, sections, until):
    """Continue the run of that name up to step ``until`` and save; returns the step it began at, and the losses since."""
    config = parse_config(tree(folder, name, sections))
    with Trainer(config) as trainer:
        first = trainer.step
        trainer.fit(until=until)
        trainer.save()
        return first, trainer.losses
