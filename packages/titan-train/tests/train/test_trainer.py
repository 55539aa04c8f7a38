"""The trainer's promises about numerics: layouts agree, resume is exact, bad steps change nothing."""

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
import torch
from titan_ckpt import Checkpointer
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.inputs import open_inputs, prepare_inputs
from titan_train.parallel.structure import blocks_of, wrap_forward
from titan_train.run_folder import checkpoint_folders
from titan_train.train import Trainer

GOLDEN = Path(__file__).parent / "golden_losses.json"


def corpus(folder):
    """Real-looking text that depends on nothing but this function, so that its losses can be kept in a file."""
    lines = []
    for i in range(1200):
        lines.append(f"def add_{i % 7}(x, y):\n    return x + {i * i % 97} * y\n")
        if i % 5 == 0:
            lines.append(f"# the value of {i} squared is {i * i}\n\n")
    file = Path(folder) / "corpus.txt"
    file.write_text("".join(lines))
    return file


def configure(folder, **sections):
    """A tiny model on the corpus in ``folder``; ``sections`` override tables of the configuration."""
    folder = Path(folder)
    tree = {
        "run": {"dir": str(folder / "runs"), "name": "run", "seed": 7},
        "model": {"name": "llama3_debug", "seq_len": 32},
        "tokenizer": {"kind": "bytes"},
        "data": {
            "sources": [{"name": "corpus", "kind": "text", "paths": [str(folder / "corpus.txt")]}],
            "cache_dir": str(folder / "cache"),
            "validation_fraction": 0.0,
        },
        "train": {"steps": 20, "global_batch": 8},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup_steps": 2},
        "checkpoint": {"every": 0},
        "metrics": {"progress": "off"},
        "launch": {"device": "cpu", "timeout_s": 60.0},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return parse_config(tree)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder whose corpus is tokenized once for all tests; each test makes runs of its own names."""
    folder = tmp_path_factory.mktemp("trainer")
    corpus(folder)
    prepare_inputs(configure(folder), quiet=True)
    return str(folder)


def train(folder, name, sections, until=None, save=False):
    """Run on one rank (of however many there are) and return its losses and the samples consumed."""
    config = configure(folder, **({"run": {"dir": str(Path(folder) / "runs"), "name": name, "seed": 7}} | sections))
    with Trainer(config) as trainer:
        first = trainer.step
        trainer.fit(until=until)
        if save:
            trainer.save()
        return first, trainer.losses


def close(got, want, atol):
    assert len(got) == len(want)
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= atol


LAYOUTS = {
    "fsdp on 2": (2, {}),
    "fsdp on 4": (4, {}),
    "fsdp on 4, never resharded": (4, {"reshard": "never"}),
    "fsdp on 4, resharded to 2": (4, {"reshard": 2}),
    "hsdp on 4": (4, {"dp_replicate": 2}),
    "ddp on 2": (2, {"mode": "ddp"}),
    "ddp on 4": (4, {"mode": "ddp"}),
    "fsdp on 1": (1, {"mode": "fsdp"}),
}


@pytest.fixture(scope="module")
def single(folder):
    """The losses of one process, which every layout must give."""
    return train(folder, "single", {})[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_losses_of_one_process(layout, folder, single):
    ranks, parallel = LAYOUTS[layout]
    results = run_ranks(train, ranks, folder, layout.replace(" ", "-"), {"parallel": parallel})
    for _, losses in results:
        assert losses == results[0][1]
    # float32 sums in another order, through 20 updates of AdamW, which divides by small second moments
    close(results[0][1], single, atol=2e-4)


@pytest.mark.parametrize("accumulate", ["sharded", "unsharded", "zero1"])
def test_micro_batches_give_the_loss_of_one_batch(accumulate, folder, single):
    sections = {"train": {"steps": 20, "global_batch": 8, "microbatch": 2}, "parallel": {"accumulate": accumulate}}
    (_, losses), _ = run_ranks(train, 2, folder, f"micro-{accumulate}", sections)
    close(losses, single, atol=2e-4)


def test_ten_steps_a_stop_and_ten_more_are_bitwise_twenty(folder):
    _, straight = run_ranks(train, 2, folder, "straight", {})[0]
    _, before = run_ranks(train, 2, folder, "resumed", {}, until=10, save=True)[0]
    first, after = run_ranks(train, 2, folder, "resumed", {})[0]
    assert first == 10
    assert before + after == straight


def test_asynchronous_saves_resume_bitwise_too(folder):
    background = {"checkpoint": {"every": 3, "async_save": True, "keep_last": 2}}
    _, straight = run_ranks(train, 2, folder, "straight-sync", {})[0]
    _, before = run_ranks(train, 2, folder, "background", background, until=10, save=True)[0]
    first, after = run_ranks(train, 2, folder, "background", background)[0]
    assert first == 10
    assert before + after == straight


def test_resume_on_twice_the_ranks_continues_the_same_order_and_loss(folder, single):
    _, before = run_ranks(train, 2, folder, "resized", {}, until=10, save=True)[0]
    first, after = run_ranks(train, 4, folder, "resized", {})[0]
    assert first == 10
    close(before + after, single, atol=2e-4)


def samples_of(folder, dp_size, first_step, last_step):
    """The token windows that all ranks together see, in order."""
    from titan_train.data import DataLoader

    config = configure(folder)
    inputs = open_inputs(config)
    steps = []
    loaders = [
        DataLoader(inputs.train, global_batch=8, dp_rank=r, dp_size=dp_size, microbatch=8 // dp_size, prefetch=0)
        for r in range(dp_size)
    ]
    iterators = [iter(loader) for loader in loaders]
    for step in range(last_step):
        batch = torch.cat([next(iterator).tokens for iterator in iterators])
        if step >= first_step:
            steps.append(batch)
    return torch.cat(steps)


def test_no_document_is_lost_or_repeated_when_the_ranks_change(folder):
    straight = samples_of(folder, 1, 0, 20)
    resized = torch.cat([samples_of(folder, 2, 0, 10), samples_of(folder, 4, 10, 20)])
    assert torch.equal(straight, resized)


def test_the_losses_are_those_kept_in_the_golden_file(single):
    golden = json.loads(GOLDEN.read_text())
    # another CPU sums in another order; a change of the model, the data order or the optimizer is far larger
    close(single, golden["losses"], atol=golden["atol"])


def poisoned(folder, name, sections, bad_steps):
    """Train with a loss that is NaN in ``bad_steps``."""
    config = configure(folder, **({"run": {"dir": str(Path(folder) / "runs"), "name": name, "seed": 7}} | sections))
    seen = []
    with Trainer(config) as trainer:

        def poison(_module, _inputs, output):
            return output * float("nan") if trainer.step in bad_steps else output

        trainer.model.parts[0].register_forward_hook(poison)
        for step in range(config.train.steps):
            before = [p.detach().clone() for p in trainer.model.parts[0].parameters()]
            trainer.fit(until=step + 1)
            same = all(
                torch.equal(a, b.detach()) for a, b in zip(before, trainer.model.parts[0].parameters(), strict=True)
            )
            seen.append(same)
    return seen


def test_a_step_that_is_not_finite_changes_nothing_and_training_goes_on(folder):
    sections = {"train": {"steps": 5, "global_batch": 8}}
    for unchanged in run_ranks(poisoned, 2, folder, "poisoned", sections, {1, 3}):
        assert unchanged == [False, True, False, True, False]


def test_too_many_such_steps_in_a_row_stop_the_run(folder):
    sections = {"train": {"steps": 5, "global_batch": 8, "nonfinite_limit": 2}}
    with pytest.raises(RuntimeError, match="not finite for 2 steps in a row"):
        poisoned(folder, "diverged", sections, {1, 2})


def test_a_changed_data_order_is_refused_on_resume(folder):
    train(folder, "changed", {}, until=2, save=True)
    config = configure(folder, run={"dir": str(Path(folder) / "runs"), "name": "changed", "seed": 8})
    with pytest.raises(ValueError, match="seed"):
        Trainer(config)


def test_a_resumed_run_has_the_optimizer_settings_of_its_configuration(folder):
    train(folder, "settings", {"optimizer": {"lr": 1e-3, "weight_decay": 0.1}}, until=2, save=True)
    run = {"dir": str(Path(folder) / "runs"), "name": "settings", "seed": 7}
    asked = {"lr": 5e-4, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
    with Trainer(configure(folder, run=run, optimizer=asked)) as trainer:
        assert trainer.step == 2
        decayed, undecayed = trainer.optimizer.param_groups
        assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.3, 0.0)
        for group in (decayed, undecayed):
            assert (group["lr"], group["betas"], group["eps"]) == (5e-4, (0.8, 0.9), 1e-6)
            assert all("exp_avg" in trainer.optimizer.state[p] for p in group["params"])
    with pytest.raises(ValueError, match="holds the state of 'adamw', which 'sgd' cannot use"):
        Trainer(configure(folder, run=run, optimizer={"name": "sgd"}))


def test_a_damaged_checkpoint_is_passed_over_and_the_log_says_so(folder):
    run_ranks(train, 2, folder, "damaged", {"checkpoint": {"every": 5}}, until=10)
    run_dir = Path(folder) / "runs" / "damaged"
    files = sorted((run_dir / "checkpoints" / "step-00000010").glob("model-r00001*"))
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
    first, _ = run_ranks(train, 2, folder, "damaged", {}, until=12)[0]
    assert first == 5
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (passed,) = [event for event in events if event.get("event") == "checkpoint_passed_over"]
    assert passed["passed_step"] == 10
    assert files[0].name in passed["reason"]


def test_a_resume_leaves_it_to_one_rank_which_checkpoint_is_the_newest(folder, monkeypatch):
    train(folder, "newest", {}, until=1, save=True)
    asked = []
    monkeypatch.setattr(Checkpointer, "latest", lambda self: asked.append(self))
    assert train(folder, "newest", {}, until=1)[0] == 1
    assert asked == [], "every rank would look at every file of the step"


def test_resume_never_refuses_a_folder_with_a_checkpoint(folder):
    train(folder, "never", {}, until=1, save=True)
    with pytest.raises(ValueError, match="resume='never'"):
        train(folder, "never", {"checkpoint": {"every": 0, "resume": "never"}})


def test_metrics_hold_one_line_a_step_and_resume_counts_none_twice(folder):
    train(folder, "metrics", {"train": {"steps": 6, "global_batch": 8}}, until=4)  # not saved: starts again
    train(folder, "metrics", {"train": {"steps": 6, "global_batch": 8}})
    file = Path(folder) / "runs" / "metrics" / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [r["step"] for r in records if "grad_norm" in r and "loss" in r and "lr" in r]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_metrics_have_the_scheduled_rate_and_expert_biases_stay_while_their_router_is_frozen(folder):
    """Of the first group, whose own rate is 0 until it is trained."""
    rates, biases = [], []
    for name, frozen in (("scheduled", {}), ("scheduled-waiting", {"": 2})):
        config = configure(
            folder, run={"name": name}, model={"name": "deepseek_debug"}, optimizer={"frozen_steps": frozen}
        )
        with Trainer(config) as trainer:
            trainer.fit(until=2)
            biases.append(any(bool(buffer.any()) for buffer in trainer.model.parts[0].buffers()))
        records = map(json.loads, (Path(folder) / "runs" / name / "metrics.jsonl").read_text().splitlines())
        rates.append([r["lr"] for r in records if "grad_norm" in r and "loss" in r])
    assert rates[0] == rates[1]
    assert 0 < rates[0][0] < rates[0][1]
    assert biases == [True, False]


def test_validation_gives_the_same_loss_on_any_number_of_ranks(folder):
    def validated(name):
        file = Path(folder) / "runs" / name / "metrics.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        return [r["loss"] for r in records if "bits_per_byte" in r]

    data = dataclasses.asdict(configure(folder).data) | {
        "validation_sources": [{"name": "held-out", "kind": "text", "paths": [str(Path(folder) / "corpus.txt")]}]
    }
    data = json.loads(json.dumps(data))
    sections = {"train": {"steps": 2, "global_batch": 8}, "validation": {"every": 1, "steps": 3}, "data": data}
    prepare_inputs(configure(folder, **sections), quiet=True)
    train(folder, "validated-1", sections)
    run_ranks(train, 2, folder, "validated-2", sections)
    assert len(validated("validated-1")) == 2
    close(validated("validated-2"), validated("validated-1"), atol=1e-5)


if __name__ == "__main__":  # writes the golden file; run it only when a change of the losses is meant
    with tempfile.TemporaryDirectory() as name:
        corpus(name)
        prepare_inputs(configure(name), quiet=True)
        losses = train(name, "golden", {})[1]
        GOLDEN.write_text(json.dumps({"atol": 1e-3, "losses": losses}, indent=1) + "\n")


def test_mixed_precision_on_one_rank_makes_no_collective(folder, caplog):
    config = configure(
        folder,
        run={"dir": str(Path(folder) / "runs"), "name": "alone", "seed": 7},
        train={"dtype": "bf16", "steps": 3, "global_batch": 8, "microbatch": 4},
    )
    with caplog.at_level("INFO", logger="titan_train.train.run_log"), Trainer(config) as trainer:
        trainer.fit(until=1)
        with torch.profiler.profile(acc_events=True) as seen:
            trainer.fit()
        assert {p.dtype for part in trainer.model.parts for p in part.parameters()} == {torch.float32}
    assert [event.key for event in seen.key_averages() if event.key.startswith(("c10d::", "gloo:"))] == []
    said = [record.message for record in caplog.records if "parallel.mode" in record.message]
    assert len(said) == 1
    assert "is 'fsdp': for mixed precision (bf16 compute, float32 master weights); on one rank it makes no" in said[0]


@pytest.mark.parametrize("name", ["llama3_debug", "qwen3_vl_debug", "flux_tiny"])
def test_mixed_precision_leaves_rotary_angles_in_float32(name, folder):
    config = configure(
        folder,
        run={"dir": str(Path(folder) / "runs"), "name": name},
        model={"name": name, "seq_len": 64} | ({"seq_len": 13, "args": {"in_channels": 48}} if "flux" in name else {}),
        diffusion={"grid": 3, "text_tokens": 4},
        vision={"items": 20, "held_out": 2},
        train={"dtype": "bf16", "steps": 1, "global_batch": 2},
        schedule={"warmup_steps": 0},
        validation={"every": 0},
    )
    prepare_inputs(config, quiet=True)
    seen = []

    def record(forward, x, *rest):
        if rest:  # others are projectors of images
            places = rest[-1]
            angles = (places.cos, places.sin) if "flux" in name else places.rope
            seen.append((x.dtype, *(table.dtype for table in angles)))
        return forward(x, *rest)

    with Trainer(config) as trainer:
        blocks = [block for part in trainer.model.parts for block in blocks_of(part)]
        for block in blocks:
            wrap_forward(block, record)  # below FSDP's hooks
        trainer.fit()
    assert len(seen) >= 2
    assert set(seen) == {(torch.bfloat16, torch.float32, torch.float32)}


def test_keep_last_0_keeps_all_checkpoints_whatever_else_is_to_be_kept(folder):
    sections = {"train": {"steps": 4}, "checkpoint": {"every": 1, "keep_last": 0, "keep_every": 3}}
    with Trainer(configure(folder, **sections, run={"dir": f"{folder}/runs", "name": "keeps-all"})) as trainer:
        trainer.fit()
        assert list(checkpoint_folders(trainer.run_dir)) == [1, 2, 3, 4]
