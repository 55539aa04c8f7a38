"""PowerSGD: error feedback survives a resume, and never outlives a step that was not finite."""

import json
import logging
import math

import pytest
import titan_fsdp as fsdp
import torch
from tiny_run import tiny_run, write_text
from titan_testing import run_ranks
from titan_train.inputs import prepare_inputs
from titan_train.models import build_model
from titan_train.parallel.check import check_model
from titan_train.parallel.layout.run import plan_run
from titan_train.train import Trainer

POWERSGD = {"mode": "ddp", "compress": "powersgd"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compression")
    write_text(folder)
    prepare_inputs(tiny_run(folder), quiet=True)
    return folder


def train(folder, name, until=None, save=False, parallel=None, nan_at=None):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("titan_train.train.checkpoints").addHandler(handler)
    config = tiny_run(folder, name, parallel=parallel or POWERSGD)
    with Trainer(config) as trainer:
        if nan_at is not None:
            trainer.fit(until=nan_at - 1)
            weight = next(trainer.model.parts[0].parameters())
            handle = weight.register_hook(lambda grad: torch.full_like(grad, math.nan))
            trainer.fit(until=nan_at)
            handle.remove()
        trainer.fit(until=until)
        if save:
            trainer.save()
        hooks = [fsdp.gradient_compression(part) for part in trainer.model.parts]
        errors = [
            float(one["error"].abs().max())
            for hook in hooks
            if hook
            for one in hook.state_dict()["parameters"].values()
        ]
        return trainer.losses, errors, said


def test_a_resume_continues_bitwise_with_the_errors_that_were_not_sent(folder):
    straight, errors, _ = run_ranks(train, 2, folder, "straight")[0]
    assert len(errors) > 3
    assert max(errors) > 0
    before, _, _ = run_ranks(train, 2, folder, "stopped", until=6, save=True)[0]
    after, _, said = run_ranks(train, 2, folder, "stopped")[0]
    assert before + after == straight
    assert said == []


@pytest.mark.parametrize(("ranks", "parallel"), [(4, POWERSGD), (2, {"tp": 2}), (2, {"mode": "ddp"})])
def test_a_resume_on_another_layout_says_that_error_feedback_starts_again(ranks, parallel, folder):
    name = f"other-{ranks}-{parallel.get('tp', 1)}-{parallel.get('compress')}"
    run_ranks(train, 2, folder, name, until=6, save=True)
    for losses, errors, said in run_ranks(train, ranks, folder, name, parallel=parallel):
        assert len(losses) == 6
        assert math.isfinite(losses[-1])
        assert bool(errors) == (parallel is POWERSGD)
        assert len(said) == 1
        assert "error feedback starts again" in said[0]


def test_a_step_that_is_not_finite_leaves_no_error_behind(folder):
    losses, errors, _ = run_ranks(train, 2, folder, "not-finite", nan_at=6)[0]
    lines = map(json.loads, (folder / "runs" / "not-finite" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line.get("event") == "nonfinite"] == [6]
    assert all(map(math.isfinite, losses[6:]))
    assert all(map(math.isfinite, errors))


def test_steps_that_are_computed_again_are_refused_with_it(folder):
    config = tiny_run(folder, "again", parallel=POWERSGD, train={"rerun_above": 2.0})
    plan = plan_run(config, 2)
    with pytest.raises(ValueError, match=r"train\.rerun_above=2\.0 and parallel\.compress='powersgd'"):
        check_model(config, plan.layout, plan.batch, build_model(config.model, vocab_size=259, device="meta"))
