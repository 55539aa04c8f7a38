"""A kind of model of the user's own: its data, its loss and its validation through the public protocol."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import titan_train
import torch
from titan_train.config import parse_config
from titan_train.run_folder import run_folder
from titan_train.task import load_task
from torch import nn

WIDTH = 6


class Regression(nn.Module):
    """A linear map with a factor that the batch brings by name."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    def forward(self, x, *, factor):
        for layer in self.layers:
            x = layer(x) * factor
        return x


class TwoOutputs(Regression):
    def forward(self, x, *, factor):
        return super().forward(x, factor=factor)[:, None], x[:, None]


class Vectors(titan_train.BatchSource):
    """Sample n is drawn from (seed, n)."""

    def __init__(self, seed: int) -> None:
        self.seed, self.seq_len = seed, 1

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"vectors").hexdigest()

    def build_batch(self, samples, *, ignore_index, samples_consumed):
        rows = [np.random.default_rng([self.seed, int(n)]).standard_normal(WIDTH, dtype=np.float32) for n in samples]
        x = torch.from_numpy(np.stack(rows))
        return titan_train.TensorBatch(
            (x,), {"factor": torch.ones(()), "unknown": x}, 0.5 * x.flip(-1), samples_consumed
        )


class OpenVectors(titan_train.TaskInputs):
    vocab_size = None

    def __init__(self, seed: int) -> None:
        self.train, self.validation = Vectors(seed), Vectors(seed + 1)

    def keep(self, run_dir):
        (run_dir / "kept.txt").write_text("yes")


class RegressionTask(titan_train.Task):
    keywords = ("factor", "unknown")

    def open(self, config):
        return OpenVectors(config.run.seed)

    def loss(self, config, vocab_size):
        return lambda output, target: (output.float() - target).square().sum()

    def count(self, batch):
        return torch.tensor(batch.target.numel())


def configure(folder, **sections):
    base = {
        "run": {"dir": str(folder), "name": "own", "seed": 3},
        "model": {"name": "own_kind_of_model:Regression", "seq_len": 1},
        "train": {"steps": 12, "global_batch": 8, "max_grad_norm": 0.0},
        "optimizer": {"lr": 5e-2},
        "validation": {"every": 6, "steps": 1},
        "checkpoint": {"every": 0},
        "metrics": {"progress": "off", "report": False},
        "launch": {"device": "cpu"},
    }
    return parse_config({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


def train(folder, sections, until=None):
    with titan_train.Trainer(configure(folder, **sections), task=RegressionTask()) as trainer:
        trainer.fit(until=until)
        return trainer.losses, (trainer.run_dir / "kept.txt").exists()


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The model is named by a dotted path, so this file must be importable by it."""
    monkeypatch.setitem(sys.modules, "own_kind_of_model", sys.modules[RegressionTask.__module__])
    for model in (Regression, TwoOutputs):
        monkeypatch.setattr(model, "__module__", "own_kind_of_model")
    monkeypatch.setenv("TITAN_TRAIN_CODE", "own_kind_of_model")


def test_a_task_of_the_users_own_trains_validates_and_keeps_its_files(tmp_path):
    losses, kept = train(tmp_path, {})
    assert losses[-1] < 0.5 * losses[0]
    assert kept
    metrics = (tmp_path / "own" / "metrics.jsonl").read_text()
    assert metrics.count('"kind":"validation"') == 2


def test_its_loss_is_given_all_that_a_users_model_returns(tmp_path):
    class OfBoth(RegressionTask):
        def loss(self, config, vocab_size):
            return lambda outputs, target: (outputs[0] + outputs[1] - target[:, None]).square().sum()

    config = configure(tmp_path, model={"name": "own_kind_of_model:TwoOutputs"}, validation={"every": 0})
    with titan_train.Trainer(config, task=OfBoth()) as trainer:
        trainer.fit()
    assert trainer.losses[-1] < trainer.losses[0]


def test_it_is_told_the_folder_that_the_run_is_in(tmp_path):
    told = []

    class Told(RegressionTask):
        def prepare(self, config, *, quiet=False):
            told.append(run_folder(config))

        def open(self, config):
            told.append(run_folder(config))
            return super().open(config)

    elsewhere = tmp_path / "other" / "mine"
    for run_dir, folder in ((elsewhere, elsewhere), (None, tmp_path / "own")):
        with titan_train.Trainer(configure(tmp_path), run_dir, task=Told()) as trainer:
            assert told[-2:] == [folder, folder]
            assert run_folder(trainer.config) == folder


def test_it_resumes_with_the_same_losses(tmp_path):
    whole, _ = train(tmp_path / "a", {})
    first, _ = train(tmp_path / "b", {"checkpoint": {"every": 5}}, until=5)
    rest, _ = train(tmp_path / "b", {"checkpoint": {"every": 5}})
    assert first + rest == whole


def test_a_task_is_found_by_name_and_an_unknown_one_is_refused(tmp_path):
    made = []
    titan_train.register_task("regression", lambda: made.append(1) or RegressionTask())
    with pytest.raises(ValueError, match="'regression' is already registered"):
        titan_train.register_task("regression", RegressionTask)
    assert isinstance(load_task(configure(tmp_path, model={"task": "regression"})), RegressionTask)
    assert made == [1]
    assert type(load_task(parse_config({"model": {"name": "llama3_debug"}}))).__name__ == "TextTask"
    with pytest.raises(ValueError, match=r"model\.task='regresion' is not a known task\. Did you mean 'regression'"):
        load_task(configure(tmp_path, model={"task": "regresion"}))


def test_context_parallelism_is_refused_by_a_task_without_it(tmp_path):
    with pytest.raises(ValueError, match="RegressionTask does not say how its batches are cut"):
        RegressionTask().context(configure(tmp_path, parallel={"cp": 2}), None, None, None)


def test_the_task_of_text_prepares_data_without_torch() -> None:
    code = "import sys, titan_train.tasks.text; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
