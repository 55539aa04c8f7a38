"""Callers' own observers: when each method is called, on which ranks, and what an exception does."""

import contextlib

import pytest
import torch.distributed as dist
from tiny_run import tiny_run, write_text
from titan_testing import run_ranks
from titan_train.inputs import prepare_inputs
from titan_train.train import Trainer
from titan_train.train.observer import Observer


class Diary(Observer):
    def __init__(self, fails_at=None):
        self.seen, self.fails_at = [], fails_at

    def on_start(self, run):
        super().on_start(run)
        self.seen.append(("start", run.step))

    @contextlib.contextmanager
    def running(self):
        self.seen.append("fit")
        yield
        self.seen.append("fitted")

    @contextlib.contextmanager
    def phase(self, name, step):
        self.seen.append((name, step))
        yield

    def on_step_start(self, step):
        self.seen.append(("begins", step))

    def on_batch(self, step, batches):
        self.seen.append(("batch", step, len(batches)))

    def on_step(self, info):
        if info.step == self.fails_at:
            raise RuntimeError("enough")
        assert self.run.step == info.step
        assert 0 <= info.data_wait_s <= info.seconds
        self.seen.append(("made", info.step, info.result.loss))

    def on_validation(self, record, sample):
        self.seen.append(("validated", record.step))

    def on_checkpoint(self, step, seconds):
        self.seen.append(("saved", step))

    def on_end(self):
        self.seen.append("end")


def watched(folder, name, **sections):
    diary = Diary()
    with Trainer(
        tiny_run(folder, f"{name}-{dist.get_rank()}", **sections), folder / name, callbacks=[diary]
    ) as trainer:
        trainer.fit()
    return diary.seen, trainer.losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observers")
    write_text(folder)
    prepare_inputs(tiny_run(folder, **validated(folder)), quiet=True)
    return folder


def validated(folder):
    held_out = {"name": "same", "kind": "text", "paths": [str(folder / "text.txt")]}
    return {
        "train": {"steps": 2, "global_batch": 8, "microbatch": 2},
        "validation": {"every": 2, "steps": 1},
        "data": {"validation_sources": [held_out]},
        "checkpoint": {"every": 1},
    }


def test_a_callback_is_told_what_happens_on_every_rank_in_order(folder):
    sections = validated(folder)
    for seen, losses in run_ranks(watched, 2, folder, "run", **sections):
        assert seen == [
            ("start", 0), "fit",
            ("begins", 1), ("data", 1), ("batch", 1, 2), ("made", 1, losses[0]), ("checkpoint", 1), ("saved", 1),
            ("begins", 2), ("data", 2), ("batch", 2, 2), ("made", 2, losses[1]), ("validation", 2), ("validated", 2),
            ("checkpoint", 2), ("saved", 2),
            "fitted", ("checkpoint", 2), "end",  # a save in the background is waited for
        ]  # fmt: skip


def test_a_callback_that_raises_ends_the_run_and_is_still_closed(folder):
    diary = Diary(fails_at=2)
    with pytest.raises(RuntimeError, match="enough"), Trainer(tiny_run(folder, "raises"), callbacks=[diary]) as trainer:
        trainer.fit()
    assert trainer.step == 2
    assert diary.seen[-1] == "end"
