"""Other settings of the optimizer at a resume: parameters are frozen and thawed, tables of patterns come and go."""

import logging

import pytest
from tiny_run import tiny_run, write_text
from titan_testing import run_ranks
from titan_train.inputs import prepare_inputs
from titan_train.models import named_parameters
from titan_train.train import Trainer

WHOLE = {}
FROZEN = {"train": {"steps": 12, "global_batch": 8, "freeze": [r"layers\.0\."]}}
DECAYS = {"optimizer": {"lr": 1e-3, "weight_decays": {r"layers\.1\.": 0.02}, "frozen_steps": {"tok_embeddings": 4}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen")
    write_text(folder)
    prepare_inputs(tiny_run(folder), quiet=True)
    return folder


def run(folder, name, sections, until=None):
    """Losses; of each parameter how often it was updated, None if it is not trained; what checkpoints said."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("titan_ckpt").addHandler(handler)
    with Trainer(tiny_run(folder, name, **sections)) as trainer:
        first = trainer.step
        trainer.fit(until=until)
        if until:
            trainer.save()
        state = trainer.optimizer.state
        named = dict(pair for part in trainer.model.parts for pair in named_parameters(part))
        steps = {name: int(state[p].get("step", 0)) if p.requires_grad else None for name, p in named.items()}
        return first, steps, said


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("before", "after", "first_layer", "said"),
    [
        (FROZEN, WHOLE, 6, "has no optimizer state for"),
        (WHOLE, FROZEN, None, "that are not trained now; it is left out"),
        (DECAYS, WHOLE, 12, None),
        (WHOLE, DECAYS, 12, None),
    ],
    ids=["thawed", "frozen", "tables removed", "tables added"],
)
def test_a_resume_takes_the_optimizer_settings_of_its_configuration(ranks, before, after, first_layer, said, folder):
    name = f"{ranks}-{[WHOLE, FROZEN, DECAYS].index(before)}-{[WHOLE, FROZEN, DECAYS].index(after)}"
    run_ranks(run, ranks, folder, name, before, 6)
    first, steps, messages = run_ranks(run, ranks, folder, name, after)[0]
    assert first == 6
    assert steps["layers.0.attention.wq.weight"] == first_layer
    assert steps["layers.1.attention.wq.weight"] == 12
    assert steps["tok_embeddings.weight"] == (8 if before is DECAYS else 12)
    told = [message for message in messages if "optimizer state" in message]
    assert bool(told) == (said is not None)
    assert all(said in message for message in told)


def test_parameters_thaw_between_asynchronous_saves(folder):
    sections = DECAYS | {"checkpoint": {"every": 2, "async_save": True}}
    _, straight, _ = run_ranks(run, 2, folder, "straight", sections)[0]
    run_ranks(run, 2, folder, "thawing", sections, 3)
    first, steps, _ = run_ranks(run, 2, folder, "thawing", sections)[0]
    assert first == 3
    assert steps == straight
    assert steps["tok_embeddings.weight"] == 8
