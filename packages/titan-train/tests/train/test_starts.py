"""Other runs as starting points: a branch, weights alone, the best checkpoint, a step to go back to."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from titan_testing import run_ranks
from titan_train.cli import main
from titan_train.config import dump_config, load_config, parse_config
from titan_train.inputs import prepare_inputs
from titan_train.models import build_model
from titan_train.observe import ValidationRecord, read_run_info
from titan_train.observe.run_info import settings_spans, stopped_early
from titan_train.report import build_report, compare_runs
from titan_train.run_folder import checkpoint_folders, find_start, resolve_starts
from titan_train.tasks.text import TextTask
from titan_train.train import Trainer
from titan_train.train.best import BestValidation, check_measured
from titan_train.train.branch import check_branch

SAME_SHAPES = {
    "name": "llama3_small",
    "args": {"dim": 64, "num_layers": 2, "num_heads": 4, "ffn_dim": 192, "tied_embeddings": False},
}
"""Another shipped model whose tensors are those of llama3_debug; its rotary base is another."""


def configure(folder, name, **sections):
    folder = Path(folder)
    tree = {
        "run": {"dir": str(folder / "runs"), "name": name, "seed": 7},
        "model": {"name": "llama3_debug", "seq_len": 16, "args": {"rope_theta": 20_000.0}},
        "tokenizer": {"kind": "bytes"},
        "data": {
            "sources": [{"name": "corpus", "kind": "text", "paths": [str(folder / "*.txt")]}],
            "cache_dir": str(folder / "cache"),
            "validation_fraction": 0.3,
        },
        "train": {"steps": 8, "global_batch": 4},
        "schedule": {"warmup_steps": 2, "decay_steps": 2},
        "validation": {"every": 2, "steps": 1, "sample_tokens": 0},
        "checkpoint": {"every": 4, "keep_last": 0},
        "metrics": {"progress": "off", "report": False},
        "launch": {"device": "cpu", "nproc": 2, "timeout_s": 60.0},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return parse_config(tree)


def train(config, until=None):
    """First step, losses, and the weights before the first of them."""
    with Trainer(config) as trainer:
        first = trainer.step
        weights = [parameter.detach().clone() for part in trainer.model.parts for parameter in part.parameters()]
        trainer.fit(until=until)
        return first, trainer.losses, weights, trainer.finished


def branch_on_ranks(folder, name):
    return train(configure(folder, name, checkpoint={"start_from": f"{folder}/runs/parent@4"}))[:2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a corpus and the run ``parent``, of 8 steps, saved at 4 and 8."""
    folder = tmp_path_factory.mktemp("starts")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text("".join(f"line {i} of {i * number}\n" for i in range(30)))
    prepare_inputs(configure(folder, "parent"), quiet=True)
    losses = train(configure(folder, "parent"))[1]
    return folder, losses


def test_a_branch_continues_its_parent_in_another_folder_on_any_layout(folder):
    folder, losses = folder
    parent = folder / "runs" / "parent"
    before = {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()}
    config = configure(folder, "branch", checkpoint={"start_from": f"{parent}@4"})
    assert train(config, until=6)[:2] == (4, losses[4:6])
    assert read_run_info(folder / "runs/branch")["parent"] == {"run": str(parent), "step": 4}
    first, split = run_ranks(branch_on_ranks, 2, folder, "split")[0]
    assert (first, split) == (4, pytest.approx(losses[4:], abs=2e-5))  # sums of two ranks, float32

    train(config)  # nothing is saved yet, so it branches again; then it has a checkpoint of its own
    assert train(config)[0] == 8
    assert read_run_info(folder / "runs/branch")["parent"] == {"run": str(parent), "step": 4}
    assert {path: path.read_bytes() for path in parent.rglob("*") if path.is_file()} == before
    page = build_report(folder / "runs/branch").read_text()
    assert f"branched from {parent}@4" in page
    assert re.search(
        r'"name": ?"parent, parent", ?"role": ?"parent", ?"x": ?\[1, 2, 3, 4, 5, 6, 7, 8\]', page.replace("&#34;", '"')
    )
    assert "Branched from" in compare_runs([parent, folder / "runs/branch"], folder / "page.html")

    for start, name, words in (
        ("parent@5", "new", "has no checkpoint of step 5; it has 4, 8"),
        ("nowhere", "new", "is not a run's folder"),
        ("parent@best", "new", ""),
        ("parent", "parent", "would have no effect: .* began by itself"),
        ("parent@8", "branch", "branched from .*parent@4"),
    ):
        config = configure(folder, name, checkpoint={"start_from": f"{folder}/runs/{start}"})
        if words:
            with pytest.raises(ValueError, match=words):
                resolve_starts(config)
        else:  # the losses of both are on record
            assert resolve_starts(config).checkpoint.start_from == f"{parent}@8"


def begun_in_own(folder, start, init):
    """Where a rank began whose own command found step 4 (rank 0) or step 8, and counted a decay from there."""
    found = (4, 8)[dist.get_rank()]
    sections = {"train": {"steps": found + 2}, "schedule": {"warmup_steps": 2, "decay_steps": found // 4}}
    sections |= {
        "checkpoint": {"start_from": start and f"{start}@{found}"},
        "model": {"init": init and f"{init}@{found}"},
    }
    try:
        with Trainer(configure(folder, "same", **sections)) as trainer:
            config = trainer.config
            return config.checkpoint.start_from or config.model.init, config.train.steps, config.schedule.decay_steps
    except ValueError as err:
        return str(err)


def test_ranks_whose_commands_found_different_steps_of_the_other_run_begin_where_rank_0_does(folder):
    folder, _ = folder
    parent = f"{folder}/runs/parent"
    assert run_ranks(begun_in_own, 2, folder, parent, "") == [(f"{parent}@4", 6, 1)] * 2
    assert run_ranks(begun_in_own, 2, folder, "", f"run:{parent}") == [(f"run:{parent}@4", 6, 1)] * 2
    for error in run_ranks(begun_in_own, 2, folder, f"{folder}/nowhere", ""):
        assert "nowhere is not a run's folder" in error


def test_check_refuses_a_branch_that_its_parent_does_not_fit_in_the_words_of_run(folder, tmp_path, capsys):
    folder, _ = folder
    (tmp_path / "other.txt").write_text("another corpus\n" * 400)
    other = {"sources": [{"name": "corpus", "kind": "text", "paths": [str(tmp_path / "other.txt")]}]}
    prepare_inputs(configure(folder, "other", data=other), quiet=True)
    unprepared = {"cache_dir": str(tmp_path / "empty")}
    deeper = {"args": {"rope_theta": 20_000.0, "num_layers": 3}}
    file = tmp_path / "misfit.toml"
    for sections, said in (
        ({"model": deeper}, "parent@4' holds another model, llama3_debug: "),
        ({"model": {"args": {"ffn_dim": 64}}}, "parent@4' holds a model of other sizes: "),
        (
            {"model": {"args": {"rope_theta": 3e4}}},
            "rope_theta=30000.0 should be 20000.0. The weights would give other",
        ),
        ({"model": SAME_SHAPES}, "rope_theta=10000.0 should be 20000.0. The weights would give other"),
        ({"model": {"args": {"rope_theta": 20_000.0, "norm_eps": 1e-5}}}, ""),  # the default, written
        ({"optimizer": {"name": "sgd"}}, "holds the state of 'adamw', which 'sgd' cannot use"),
        ({"run": {"seed": 8}}, "seed was 7 when the state was saved and is 8 now"),
        ({"model": {"seq_len": 8}}, "seq_len was 16 when the state was saved and is 8 now"),
        ({"data": other}, "fingerprint was "),
        ({"data": other, "checkpoint": {"allow_data_change": True}}, ""),
        ({"data": unprepared}, ""),
        ({}, ""),
    ):
        file.write_text(dump_config(configure(folder, "misfit", **sections)))
        words = [str(file), "--from", f"{folder}/runs/parent@4", "--launch.nproc", "1"]
        assert main(["check", *words]) == (2 if said else 0)
        err = capsys.readouterr().err
        assert said in err
        if "sgd" in said:
            assert main(["run", *words]) == 2
            assert capsys.readouterr().err == err
    assert not (folder / "runs/misfit").exists()
    assert not (tmp_path / "empty").exists()


def test_the_data_of_a_branch_is_not_opened_where_that_would_prepare_it(folder, tmp_path):
    class Opened(TextTask):
        def open(self, config):
            raise AssertionError

    folder, _ = folder
    config = configure(folder, "unopened", checkpoint={"start_from": f"{folder}/runs/parent@4"})
    whole = build_model(config.model, vocab_size=259)
    with pytest.raises(AssertionError):
        check_branch(config, whole, Opened())
    untrained = {"kind": "sentencepiece", "vocab_size": 300}
    kept = folder / "runs" / "parent" / "tokenizer"
    kept.rename(tmp_path / "away")
    check_branch(replace(config, tokenizer=configure(folder, "u", tokenizer=untrained).tokenizer), whole, Opened())
    (tmp_path / "away").rename(kept)


def test_weights_of_another_run_start_a_run_of_its_own(folder, tmp_path):
    folder, _ = folder
    parent = folder / "runs" / "parent"
    _, _, weights, _ = train(configure(folder, "look", checkpoint={"start_from": f"{parent}@4"}), until=4)
    file = tmp_path / "fresh.toml"
    file.write_text(f'[model]\ninit = "run:{parent}@4"\nseq_len = 16\n')
    taken = load_config(str(file))
    assert (taken.model.name, taken.model.args, taken.tokenizer.kind) == (
        "llama3_debug",
        {"rope_theta": 20_000.0},
        "bytes",
    )
    first, losses, fresh, _ = train(configure(folder, "fresh", model={"init": f"run:{parent}@4"}), until=1)
    assert (first, len(losses)) == (0, 1)
    assert all(torch.equal(a, b) for a, b in zip(fresh, weights, strict=True))

    for args, words in (
        ({"args": {}}, "rope_theta=500000.0 should be 20000.0"),
        ({"args": {"rope_theta": 20_000.0, "dim": 32}}, "has shape .* there and .* here"),
        ({"args": {"rope_theta": 20_000.0, "num_layers": 1}}, "are unexpected"),
        (SAME_SHAPES, "rope_theta=10000.0 should be 20000.0.*name them in model.init_changes"),
    ):
        with pytest.raises(ValueError, match=words):
            train(configure(folder, "refused", model={"init": f"run:{parent}", **args}), until=1)
    written = {"args": {"rope_theta": 20_000.0, "norm_eps": 1e-5}}  # the default
    assert train(configure(folder, "written", model={"init": f"run:{parent}@4", **written}), until=1)[0] == 0


def test_the_best_validation_is_kept_and_patience_ends_a_run(folder):
    folder, _ = folder
    rising = {
        "optimizer": {"lr": 5.0},
        "train": {"steps": 40, "global_batch": 4},
        "validation": {"every": 2, "steps": 1, "patience": 2},
    }
    config = configure(folder, "early", **rising, checkpoint={"every": 1, "keep_last": 1, "keep_best": True})
    _, losses, _, finished = train(config)
    run_dir = folder / "runs/early"
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    held_out = {e["step"]: e["loss"] for e in events if e["kind"] == "validation"}
    best = min(held_out, key=lambda step: held_out[step])
    assert finished
    assert len(losses) == best + 4 < 40  # two validations without a better one
    assert sorted(checkpoint_folders(run_dir)) == [best, best + 4]
    assert find_start(f"{run_dir}@best", "x") == (run_dir, best)
    assert [e["best_step"] for e in events if e.get("event") == "early_stopped"] == [best]
    assert train(config)[1] == []  # it is over
    info = read_run_info(run_dir)
    del info["early_stop"]
    (run_dir / "run.json").write_text(json.dumps(info))
    for _ in range(2):  # lost after the checkpoint, before that was on record: put there once
        assert train(config)[1] == []
        assert stopped_early(run_dir, 2) == best + 4
    assert (run_dir / "metrics.jsonl").read_text().count('"early_stopped"') == 2
    more = configure(folder, "early", **rising | {"validation": {"every": 2, "steps": 1, "patience": 3}})
    assert len(train(more, until=best + 6)[1]) == 2

    nan = BestValidation(1)
    assert not nan.take(ValidationRecord(step=1, loss=math.nan, bits_per_byte=None, tokens=1))
    assert nan.exhausted
    for sections, words in (
        ({"checkpoint": {"keep_best": True}, "validation": {"every": 0}}, "validation.every=0"),
        ({"validation": {"every": 2, "patience": 1}, "data": {"validation_fraction": 0.0}}, "nothing is held out"),
    ):
        with pytest.raises(ValueError, match=words):
            Trainer(configure(folder, "unmeasured", **sections))
    source = {"name": "a", "kind": "text", "paths": ["a.txt"]}
    for stream, words in ((False, "Set data.validation_fraction or name data"), (True, "Name data.validation_sources")):
        sections = {"data": {"sources": [source | {"stream": stream}]}, "checkpoint": {"keep_best": True}}
        with pytest.raises(ValueError, match=words):
            check_measured(configure(folder, "unmeasured", **sections, validation={"every": 2}), held_out=False)
    for name, words in (("qwen3_vl_debug", "Set vision.held_out;"), ("flux_tiny", "add shards validation-")):
        of_images = {"model": {"name": name, "args": {}}, "checkpoint": {"keep_best": True}}
        with pytest.raises(ValueError, match=words):
            check_measured(configure(folder, "unmeasured", **of_images), held_out=False)


def test_a_run_goes_back_to_a_named_step_and_a_branch_decays_from_there(folder, tmp_path, monkeypatch, capsys):
    folder, _ = folder
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "c.toml"
    config = configure(folder, "back", launch={"nproc": 1, "device": "cpu"})
    file.write_text(dump_config(config))
    run_dir = folder / "runs/back"
    train(config)
    assert main(["run", str(file), "--resume-step", "5"]) == 2
    assert "has no checkpoint of this step; it has 4, 8" in capsys.readouterr().err
    assert main(["run", str(file), "--resume-step", "4", "--train.steps", "6"]) == 0
    assert sorted(checkpoint_folders(run_dir)) == [4, 6]
    assert sorted(path.name for path in (run_dir / "set_aside").glob("*/*")) == ["metrics.jsonl", "step-00000008"]
    assert [after for after, _ in settings_spans(read_run_info(run_dir))] == [0, 4]

    words = ["--run.name", "decayed", "--from", f"{run_dir}@4", "--decay"]
    assert main(["run", str(file), *words, "50%", "--train.steps", "6"]) == 0
    rates = [
        json.loads(line)["lr"]
        for line in (folder / "runs/decayed/metrics.jsonl").read_text().splitlines()
        if '"lr"' in line
    ]
    peak = config.optimizer.lr
    schedule_free = ["--optimizer.name", "schedule_free", "--schedule.name", "constant"]
    assert rates == pytest.approx([peak, peak * (1 - math.sqrt(0.5))])  # step 5 is the peak's last, step 7 would be 0
    for decay, start, said in (
        ("50%", [], "Name where it begins"),
        ("1", ["--from", f"{run_dir}@4", "--train.steps", "5"], "lies in its decay. Name a step from 2 to 3"),
        ("8", ["--from", f"{run_dir}@3"], "has no checkpoint of step 3"),
        ("2", ["--from", f"{run_dir}@4", *schedule_free], "--decay with optimizer.name='schedule_free'"),
        ("110%", ["--from", f"{run_dir}@4"], "must be a share of the steps so far"),
    ):
        assert main(["run", str(file), "--run.name", "other", *start, "--decay", decay]) == 2
        assert said in capsys.readouterr().err
    assert main(["run", str(file), "--run.name", "other", "--from", f"{run_dir}@6", "--train.steps", "6"]) == 2
    assert "no step is left to make" in capsys.readouterr().err
