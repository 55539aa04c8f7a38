"""AdamW with small states, and schedule-free AdamW, under layouts: one process's weights, and a resume with the same bits."""

import composition
import pytest
import torch
from composition_matrix import sections_of
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.train import Trainer

WIDE = {
    "model": {"name": "llama3_debug", "seq_len": 32, "args": {"num_layers": 4, "num_kv_heads": 4, "dim": 128}},
    "train": {"global_batch": 24},  # of 2, 3 and 4 ranks
}
SMOOTH = {"lr": 1e-3, "eps": 1e-3}  # an error of a gradient becomes one of the weight of at most that size
OPTIMIZERS = {
    "int8": {"optimizer": SMOOTH | {"states": "int8"}},
    "bf16": {"optimizer": SMOOTH | {"states": "bf16"}},
    "schedule_free": {
        "optimizer": SMOOTH | {"name": "schedule_free"},
        "schedule": {"name": "constant", "warmup_steps": 2},
    },
}
STATES = (
    "exp_avg", "exp_avg_sq", "exp_avg_bf16", "exp_avg_sq_bf16", "exp_avg_codes", "exp_avg_sq_codes", "exp_avg_magnitudes",
    "exp_avg_sq_magnitudes", "schedule_free_z",
)  # fmt: skip


def state_of(trainer):
    """This rank's boxes of the state."""
    found = {}
    for key in STATES:
        boxes = composition.boxes(trainer.model, lambda parameter, key=key: trainer.optimizer.state[parameter].get(key))
        sizes = composition.boxes(trainer.model, lambda parameter: parameter.detach()) if boxes else {}
        for name, (shape, offset, part) in boxes.items():
            block = sizes[name][2].shape[-1] // part.shape[-1] if name in trainer.model.cuts else 1
            place = (*shape[:-1], shape[-1] // block), (*offset[:-1], offset[-1] // block)
            found[f"{name}/{key}"] = *place, part.float()
    return found


def train(folder, name, sections, steps):
    """Train up to a step and save; this rank's boxes of the weights, and of the state that the run began and ended with."""
    with Trainer(parse_config(composition.tree(folder, name, sections))) as trainer:
        began = state_of(trainer) if trainer.step else {}
        trainer.fit(until=steps)
        trainer.save()
        return composition.boxes(trainer.model, lambda parameter: parameter.detach()), began, state_of(trainer)


def trained(folder, name, sections, ranks, steps):
    found = run_ranks(train, ranks, folder, name, sections, steps, timeout_s=240, init=ranks > 1)
    return [composition.assemble(parts) for parts in zip(*found, strict=True)]


def compare(folder, kind, names, ranks, elsewhere, elsewhere_ranks):
    sections = composition.joined(sections_of("dense", ()), WIDE, OPTIMIZERS[kind])
    layouts = [
        composition.joined(sections_of("dense", layout), WIDE, OPTIMIZERS[kind]) for layout in (names, elsewhere)
    ]
    run = "-".join([kind, *names]).replace(" ", "_")
    if (folder, kind) not in _references:
        _references[folder, kind] = [trained(folder, f"{kind}-single-{n}", sections, 1, n)[0] for n in (1, 4)]
    first, last = _references[folder, kind]
    weights, _, _ = trained(folder, run, layouts[0], ranks, 1)
    assert weights.keys() == first.keys()
    # the first update is made of means that no rounding has touched yet
    assert max(float((weights[name] - first[name]).abs().max()) for name in first) <= 1e-6
    weights, _, saved = trained(folder, run, layouts[0], ranks, 4)
    for name in last:
        errors = (weights[name] - last[name]).abs()
        if kind == "schedule_free":
            assert float(errors.max()) <= 1e-6, name
        else:  # a gradient that adds up otherwise can round a mean to the neighbouring value: 1/128 or 1/64 of it
            assert float((errors > 1e-6).float().mean()) <= 0.01, name
            assert float(errors.max()) <= 0.05 * 4 * 1e-3, name
    _, began, _ = trained(folder, run, layouts[1], elsewhere_ranks, 5)
    assert began.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(began[name], saved[name])] == []


_references = {}


@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
@pytest.mark.parametrize(
    ("kind", "names", "elsewhere"),
    [("int8", ("tp+sp",), ("fsdp",)), ("schedule_free", ("pp 1f1b",), ("fsdp",))],
    ids=str,
)
def test_small_states_are_those_of_one_process_on_two_ranks(folder, kind, names, elsewhere):
    compare(folder, kind, names, 2, elsewhere, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*random generators are reseeded")
@pytest.mark.parametrize("kind", [*OPTIMIZERS])
@pytest.mark.parametrize(
    ("names", "ranks", "elsewhere", "others"),
    [
        (("fsdp",), 3, ("tp",), 2),
        (("hsdp",), 4, (), 1),
        (("fsdp", "tp+sp"), 4, ("ddp",), 2),
        (("cp ring",), 2, ("fsdp", "tp"), 4),
        (("tp+sp", "pp zbv"), 4, ("fsdp",), 2),
    ],
    ids=str,
)
def test_small_states_are_those_of_one_process_everywhere(folder, kind, names, ranks, elsewhere, others):
    compare(folder, kind, names, ranks, elsewhere, others)
