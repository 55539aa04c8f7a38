"""Train a model of transformers under a layout; its losses, norms, validation loss, first gradients and final weights."""

import tempfile
from pathlib import Path

import composition
import pytest
import torch
from hf_folders import make
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.train import Trainer

STEPS = 4


def in_thirds(groups, name, timeout=900):
    """Slow cases of ``layout, kinds``: every third kind of each layout, and the others with the mark ``full``. Neighbouring
    layouts take other kinds, so that each kind is under a third of the layouts.
    """
    for number, (layout, kinds) in enumerate(groups.items()):
        third = kinds[number % 3 :: 3]
        others = [kind for kind in kinds if kind not in third]
        for which, some, marks in (("every third", third, []), ("the other", others, [pytest.mark.full])):
            if some:
                yield pytest.param(
                    layout, some, id=f"{which} {name}, {layout}",
                    marks=[pytest.mark.slow, pytest.mark.timeout(timeout), *marks],
                )  # fmt: skip


def publish(folder, kind, **changes):
    """A folder that transformers wrote; made once."""
    target = Path(folder) / "published" / kind
    return str(target if target.exists() else make(target, kind, vocab_size=264, **changes))


def sections(source, layout, *, init=True):
    """A configuration that trains the folder's model."""
    merged = {
        "model": {"name": f"hf:{source}", "seq_len": 32, "init": f"hf:{source}" if init else "", "args": {}},
        "train": {"steps": STEPS, "global_batch": 8, "max_grad_norm": 0.5, "microbatch": 2},
        "validation": {"every": STEPS, "steps": 1},
        # where a gradient is zero but for rounding (the bias of keys), AdamW would make a whole step of its sign
        "optimizer": {"name": "sgd", "lr": 0.1},
    }
    for section, values in layout.items():
        merged[section] = merged.get(section, {}) | values
    return merged


def run(folder, name, tree):
    """What one rank saw of a run."""
    torch._dynamo.reset()  # blocks of all families are called by one function, which is compiled a few times at most
    config = parse_config(composition.tree(folder, name, tree))
    seen = composition.Seen()
    with tempfile.TemporaryDirectory() as scratch, Trainer(config, Path(scratch) / "run", callbacks=[seen]) as trainer:
        gradients = {}
        update = trainer.optimizer.step

        def capture_then_update(*args, **kwargs):
            if not gradients:
                gradients.update(composition.boxes(trainer.model))
            return update(*args, **kwargs)

        trainer.optimizer.step = capture_then_update
        validation = []
        trainer.fit()
        from titan_train.train.validate import validation_loss

        with trainer._make_loader(trainer._inputs.validation, steps=1) as loader:
            accumulation = trainer.batch_plan.accumulation
            found = validation_loss(
                trainer.model, loader, accumulation=accumulation, scope=trainer._scope, device=trainer.device
            )
            validation.append(found.loss)
        weights = composition.boxes(trainer.model, of=lambda parameter: parameter.detach())
        return trainer.losses, seen.norms, validation, gradients, weights


def run_each(folder, name, trees):
    """The runs of one layout, one after the other on the same ranks."""
    return [run(folder, f"{name}{i}", tree) for i, tree in enumerate(trees)]


def references(folder):
    """Gives what one process computes of configurations by key, each run once and those that are new together."""
    known = {}

    def results_of(trees):
        missing = [key for key in trees if key not in known]
        if missing:
            asked = [trees[key] for key in missing]
            (results,) = run_ranks(run_each, 1, folder, "single", asked, init=False, timeout_s=60 + 60 * len(asked))
            known.update(zip(missing, results, strict=True))
        return [known[key] for key in trees]

    return results_of


def final_weights(results):
    """The whole weights after the last step, from all ranks."""
    return composition.assemble([weights for *_, weights in results])


def errors(single, results):
    """As `composition_check.compare`, and the largest difference of any final weight."""
    from composition_check import compare

    for *_, gradients, weights in results:  # a pipeline has a copy of a tied matrix under its other name
        for boxes, reference in ((gradients, single[3]), (weights, single[4])):
            for name in boxes.keys() & {"lm_head.weight", "mtp_embeddings.weight"} - reference.keys():
                del boxes[name]
    found = compare(single[:4], [result[:4] for result in results])
    want, got = final_weights([single]), final_weights(results)
    assert want.keys() == got.keys()
    return found, max(float((want[name] - got[name]).abs().max()) for name in want)
