"""A run of a text model continues prompts after each validation, and trains as if it had not."""

import dataclasses
import json
from pathlib import Path

import pytest
import titan_train.task as tasks
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.config.model import ModelConfig
from titan_train.inputs import prepare_inputs
from titan_train.launch.validate import validate
from titan_train.planner.memory.ranks import rehearse
from titan_train.tasks.text import TextTask
from titan_train.train import Trainer
from torch import nn


def configure(folder, name="run", model="llama3_debug", parallel=None, **validation):
    folder = Path(folder)
    return parse_config(
        {
            "run": {"dir": str(folder / "runs"), "name": name},
            "model": {"name": model, "seq_len": 32},
            "tokenizer": {"kind": "bytes"},
            "data": {
                "sources": [{"name": "text", "kind": "text", "paths": [str(folder / "*.txt")]}],
                "cache_dir": str(folder / "cache"),
                "validation_fraction": 0.1,
            },
            "train": {"steps": 4, "global_batch": 4},
            "validation": {"every": 2, "steps": 1} | validation,
            "checkpoint": {"every": 0},
            "parallel": parallel or {},
            "metrics": {"progress": "off", "report": False},
            "launch": {"device": "cpu", "timeout_s": 60.0},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    for part in range(30):
        text = "".join(f"def f{i % 9}(x{part}):\n    return x + {i}\n\n" for i in range(30))
        (folder / f"{part}.txt").write_text(text)
    prepare_inputs(configure(folder), quiet=True)
    return str(folder)


def train(folder, name, options):
    with Trainer(configure(folder, name, **options)) as trainer:
        trainer.fit()
        return trainer.losses


def samples_of(folder, name):
    files = sorted((Path(folder) / "runs" / name / "samples").glob("*.json"))
    return {found["step"]: found["texts"] for found in (json.loads(file.read_text()) for file in files)}


def test_prompts_are_continued_at_each_validation_and_training_is_not_disturbed(folder):
    prompts = {"prompts": ["def f", "class"], "sample_tokens": 7}
    assert train(folder, "with", prompts) == train(folder, "without", {"sample_tokens": 0})
    found = samples_of(folder, "with")
    assert list(found) == [2, 4]
    assert samples_of(folder, "without") == {}
    for texts in found.values():
        assert [text["prompt"] for text in texts] == ["def f", "class"]
        assert all(text["text"].startswith(text["prompt"]) for text in texts)
    assert len(found[4][0]["text"]) > len("def f")


@pytest.mark.parametrize("model", ["llama3_debug", "gpt_debug"])
def test_two_ranks_write_what_one_writes_and_long_prompts_are_cut(folder, model):
    options = {"model": model, "prompts": ["x" * 100, "def f"], "sample_tokens": 100}
    name = f"two-{model}"
    run_ranks(train, 2, folder, name, options)
    texts = samples_of(folder, name)[4]
    assert texts[0]["prompt"] == "x"  # of 32 positions, 31 are for the continuation
    assert 1 < len(texts[1]["text"]) <= 32


class Doubled(TextTask):
    """Text with a loss of its own."""

    def loss(self, config, vocab_size):
        plain = super().loss(config, vocab_size)
        return lambda logits, labels: 2 * plain(logits, labels)


def test_a_task_of_text_is_trained_on_its_own_loss_which_is_none_of_bits(folder):
    losses, bits = [], []
    for name, task in (("plain", None), ("doubled", Doubled())):
        with Trainer(configure(folder, name, sample_tokens=0), task=task) as trainer:
            trainer.fit(until=1)
            losses.append(trainer.losses[0])
            bits.append(trainer._measure_held_out()[0].bits_per_byte)
    assert losses[1] == pytest.approx(2 * losses[0], rel=1e-5)  # chunks add up in another order
    assert bits[0] > 0
    assert bits[1] is None


@pytest.fixture
def doubled(monkeypatch):
    monkeypatch.setitem(tasks._registered, "doubled", Doubled)


@pytest.mark.usefixtures("doubled")
def test_a_loss_that_needs_whole_logits_is_refused_before_ranks_start(folder):
    model = {"name": "llama3_debug", "seq_len": 32, "task": "doubled"}
    cut = dataclasses.replace(configure(folder, parallel={"tp": 2}), model=ModelConfig(**model))
    with pytest.raises(
        ValueError, match=r"^parallel.tp=2: Doubled has a loss of its own, and each rank has a part of the logits\. "
    ):
        validate(cut, 2)
    ahead = dataclasses.replace(configure(folder), model=ModelConfig(**model, args={"mtp_depth": 1}))
    with pytest.raises(ValueError, match=r"^model.args.mtp_depth: Doubled has a loss of its own"):
        validate(ahead, 1)


@pytest.mark.usefixtures("doubled")
def test_a_float8_head_goes_with_a_loss_that_it_does_not_compute(folder):
    config = configure(folder, "float8-head")
    float8 = dataclasses.replace(config.float8, recipe="rowwise", skip=("layers.0",), min_speedup=0.0)
    config = dataclasses.replace(config, float8=float8)
    with pytest.raises(ValueError, match=r"is float8, but train\.fused_loss=true"):
        validate(config, 1)
    model = dataclasses.replace(config.model, task="doubled")
    validate(dataclasses.replace(config, model=model), 1)


@pytest.mark.usefixtures("doubled")
def test_memory_of_a_loss_that_needs_whole_logits_is_counted_on_whole_logits(folder):
    config = configure(folder)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, task="doubled"))
    whole = dataclasses.replace(config, train=dataclasses.replace(config.train, fused_loss=False))
    assert rehearse(config, 1)[0].memory == rehearse(whole, 1)[0].memory


def train_on_whole_logits(folder, name, options):
    config = configure(folder, name, **options)
    with Trainer(dataclasses.replace(config, train=dataclasses.replace(config.train, fused_loss=False))) as trainer:
        trainer.fit()


def test_a_head_that_overlaps_its_gather_samples_what_one_rank_samples(folder):
    options = {"prompts": ["def f", "cl"], "sample_tokens": 20}
    train_on_whole_logits(folder, "whole-logits", options)
    run_ranks(train_on_whole_logits, 2, folder, "overlapped", options | {"parallel": {"tp": 2, "async_tp": True}})
    assert samples_of(folder, "overlapped") == samples_of(folder, "whole-logits")


def test_without_prompts_held_out_text_is_continued(folder):
    train(folder, "held_out", {"sample_tokens": 4})
    (first, second) = samples_of(folder, "held_out")[2]
    assert first["prompt"]
    assert first["prompt"] != second["prompt"]


# an odd prompt beside an even one: sequence parallelism over two ranks cuts neither it nor a single token
@pytest.mark.parametrize("model", ["llama3_debug", "gpt_debug"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_sample_what_one_rank_samples(folder, model, sequence_parallel):
    options = {"model": model, "prompts": ["def f", "cl"], "sample_tokens": 30, "steps": 1}
    alone = f"alone-{model}"
    if not samples_of(folder, alone):
        train(folder, alone, options)
    name = f"tp-{model}-{sequence_parallel}"
    parallel = {"tp": 2, "sequence_parallel": sequence_parallel}
    losses = run_ranks(train, 2, folder, name, options | {"parallel": parallel})
    assert samples_of(folder, name) == samples_of(folder, alone)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("parallel", [{"cp": 2}, {"pp": 2}])
def test_layouts_that_cut_the_forward_pass_are_not_sampled_and_say_so(folder, parallel):
    name = "cut-" + "".join(parallel)
    run_ranks(train, 2, folder, name, {"parallel": parallel, "prompts": ["def f"]})
    assert samples_of(folder, name) == {}
    config = configure(folder, name, parallel=parallel)
    with Trainer(configure(folder, "whole")) as trainer:
        assert trainer.task.why_no_samples(config, trainer.model.parts[0]).startswith(f"parallel.{name[4:]}=2 leaves")
        assert trainer.task.why_no_samples(trainer.config, trainer.model.parts[0]) is None
        assert "does not support the key-value cache" in trainer.task.why_no_samples(trainer.config, nn.Linear(1, 1))


@pytest.mark.parametrize(("key", "value"), [("sample_tokens", -1), ("prompts", [""])])
def test_values_that_cannot_work_are_refused(folder, key, value):
    with pytest.raises(ValueError, match=f"validation.{key}"):
        configure(folder, **{key: value})
