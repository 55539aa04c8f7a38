"""Averages in validation, generation and export; and a run that goes back after a spike."""

import contextlib
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import tiny_run, write_text
from titan_ckpt import DamageError
from titan_train import Trainer, load_run
from titan_train.config import dump_config
from titan_train.export.run import export_run
from titan_train.observe.records import ValidationRecord
from titan_train.optim.average import Z, averaged_weight, has_ema
from titan_train.run_folder import Lease, checkpoint_folders, contents, find_start, stage_rewind, staged_folder
from titan_train.train.best import BestValidation
from titan_train.train.observer import Observer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averages")
    write_text(folder)
    return folder


class Validations(Observer):
    def __init__(self):
        self.losses = {}

    def on_validation(self, record, sample):
        self.losses[record.step] = record.loss


def configured(folder, name, **sections):
    held_out = {"name": "held-out", "kind": "text", "paths": [str(folder / "text.txt")]}
    return tiny_run(folder, name, data={"validation_sources": [held_out]}, **sections)


def weights_of(run_dir, step=None):
    return {name: p.clone() for name, p in load_run(run_dir, step=step, device="cpu").model.named_parameters()}


def validate_with(folder, name, weights):
    """The validation loss of these weights, by a run that trains nothing."""
    sections = {"validation": {"every": 1, "steps": 2, "sample_tokens": 0}, "train": {"steps": 2, "global_batch": 4}}
    with Trainer(configured(folder, name, **sections)) as trainer, torch.no_grad():
        for key, parameter in trainer.model.parts[0].named_parameters():
            parameter.copy_(weights[key])
        return trainer._measure_held_out()[0].loss


@pytest.mark.parametrize("kind", ["ema", "schedule_free"])
def test_validation_generation_and_export_take_the_average_that_one_setting_names(folder, kind):
    seen = Validations()
    sections = {"optimizer": {"lr": 1e-2}, "average": {"ema_decay": 0.6, "use": "ema"}}
    if kind == "schedule_free":
        sections = {"optimizer": {"lr": 1e-2, "name": kind}, "schedule": {"name": "constant", "warmup_steps": 2}}
    config = configured(
        folder, kind, train={"steps": 6, "global_batch": 4}, checkpoint={"every": 2},
        validation={"every": 6, "steps": 2, "sample_tokens": 0}, **sections,
    )  # fmt: skip
    with Trainer(config, callbacks=[seen]) as trainer:
        trainer.fit()
        plain = {name: p.detach().clone() for name, p in trainer.model.parts[0].named_parameters()}
        state, run_dir = trainer.optimizer.state, trainer.run_dir
        averages = {
            name: state[p]["ema"].clone() if kind == "ema" else averaged_weight(p.detach(), state[p][Z], 0.9)
            for name, p in trainer.model.parts[0].named_parameters()
        }
    loaded = weights_of(run_dir)
    assert all(torch.equal(loaded[name], averages[name]) for name in averages)
    assert not any(torch.equal(loaded[name], plain[name]) for name in averages)
    assert seen.losses[6] == pytest.approx(validate_with(folder, f"{kind}-check", averages), abs=1e-7)
    assert seen.losses[6] != pytest.approx(validate_with(folder, f"{kind}-plain", plain), abs=1e-5)

    export_run(run_dir, folder / f"{kind}-hf", dtype="fp32")  # its gate compares with the run's model
    exported = load_file(folder / f"{kind}-hf" / "model.safetensors")
    torch.testing.assert_close(exported["model.embed_tokens.weight"], averages["tok_embeddings.weight"])


def test_the_average_of_a_run_of_bf16_weights_is_loaded_into_float32(folder):
    config = configured(
        folder, "bf16", train={"steps": 2, "global_batch": 4, "dtype": "bf16"}, optimizer={"weights": "bf16"},
        average={"ema_decay": 0.6, "use": "ema"},
    )  # fmt: skip
    with Trainer(config) as trainer:
        trainer.fit()
        state, run_dir = trainer.optimizer.state, trainer.run_dir
        averages = {n: state[p]["ema"].full_tensor() for n, p in trainer.model.parts[0].named_parameters()}
    loaded = weights_of(run_dir)
    assert all(torch.equal(loaded[name], averages[name].float()) for name in averages)


def test_the_mean_over_the_newest_checkpoints_is_what_is_loaded_and_validated(folder):
    seen = Validations()
    sections = {
        "train": {"steps": 6, "global_batch": 4},
        "checkpoint": {"every": 2, "keep_last": 0},
        "validation": {"every": 2, "steps": 2, "sample_tokens": 0},
    }
    with Trainer(configured(folder, "plain", **sections)) as trainer:
        trainer.fit()
        plain = trainer.run_dir
    average = {"use": "checkpoints", "checkpoints": 2}
    with Trainer(configured(folder, "mean", average=average, **sections), callbacks=[seen]) as trainer:
        trainer.fit()
        averaged = trainer.run_dir
    each = [weights_of(plain, step) for step in (2, 4, 6)]
    for step, parts in ((2, each[:1]), (4, each[:2]), (6, each[1:])):
        mean = {name: torch.stack([part[name] for part in parts]).mean(0) for name in each[0]}
        found = weights_of(averaged, step)
        for name, value in mean.items():
            torch.testing.assert_close(found[name], value, atol=1e-7, rtol=0)
        # training itself does not see the mean
        assert seen.losses[step] == pytest.approx(validate_with(folder, f"check-{step}", mean), abs=1e-6)


class Spike(Observer):
    """Makes the gradients of the steps on some samples far too large."""

    def __init__(self):
        self.steps, self.phases = [], []

    @contextlib.contextmanager
    def phase(self, name, step):
        self.phases.append((name, step))
        self.inside = name, step
        yield
        self.inside = None

    def on_rewind(self, step):
        assert self.inside == ("checkpoint", step)

    def on_batch(self, step, batches):
        self.steps.append((step, batches[-1].samples_consumed))
        self.poisoned = batches[-1].samples_consumed in (28, 32)
        with torch.no_grad():
            self.run.model.parts[0].lm_head.weight.mul_(1e3 if self.poisoned else 1.0)

    def on_step(self, info):
        assert info.result.spike == self.poisoned
        if self.poisoned:
            with torch.no_grad():
                self.run.model.parts[0].lm_head.weight.mul_(1e-3)


def spiking(folder, name, freeze=(), **sections):
    return configured(
        folder, name, train={"steps": 9, "global_batch": 4, "freeze": list(freeze)}, checkpoint={"every": 2, "keep_last": 0},
        spikes={"sigma": 20.0, "window": 3, "most": 2, "rewind": 1}, **sections,
    )  # fmt: skip


def test_after_many_spikes_a_run_goes_back_and_on_with_later_data(folder):
    spike = Spike()
    with Trainer(spiking(folder, "spikes"), callbacks=[spike]) as trainer:
        trainer.fit()
        run_dir = trainer.run_dir
    # steps 7 and 8 are left out; back to step 4, the newest that is one older than step 6, and on after sample 32
    assert spike.steps == [(n, 4 * n) for n in range(1, 9)] + [(n, 32 + 4 * (n - 4)) for n in range(5, 10)]
    # a launcher allows as much time for it as for a save
    assert spike.phases[spike.phases.index(("data", 8)) + 1] == ("checkpoint", 8)
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 10))
    (event,) = [line for line in lines if line.get("event") == "rewound"]
    assert (event["step"], event["spikes_from"], event["spikes_to"]) == (4, 7, 8)


def test_a_run_with_frozen_float8_weights_goes_back_too(folder):
    spike = Spike()
    config = spiking(folder, "frozen", [r"layers\.0\."], float8={"recipe": "blockwise", "min_speedup": 0.0})
    with Trainer(config, callbacks=[spike]) as trainer:
        trainer.fit()
    assert [step for step, _ in spike.steps] == [*range(1, 9), *range(5, 10)]


def test_a_run_that_went_back_and_was_lost_continues_after_the_spike(folder):
    class Lost(Spike):
        back = False

        def on_rewind(self, step):
            self.back = True

        def on_step_start(self, step):
            if self.back:
                raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"), Trainer(spiking(folder, "lost"), callbacks=[Lost()]) as trainer:
        trainer.fit()
    with Trainer(spiking(folder, "lost")) as trainer:
        assert trainer.step == 4  # not 6, the newest before the spike
        assert trainer._loader.samples_consumed == 32
        assert (trainer._spikes.rewinds, trainer._spikes.worst) == (1, 8)  # the next return there is the second
    with Trainer(spiking(folder, "lost", optimizer={"lr": 1e-4})) as trainer:
        assert trainer._spikes.rewinds == 0  # the error's remedy: another try


def test_a_run_that_goes_back_beyond_a_change_of_settings_says_from_where_they_hold(folder):
    for until, lr in ((6, 1e-3), (9, 9e-4)):
        with Trainer(spiking(folder, "changed", optimizer={"lr": lr}), callbacks=[Spike()]) as trainer:
            trainer.fit(until=until)
    lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("event") in ("settings_changed", "rewound")] == [4, 4]
    settings = json.loads((trainer.run_dir / "run.json").read_text())["settings"]
    assert [(span["after_step"], span["values"]["optimizer.lr"]) for span in settings] == [(0, 1e-3), (4, 9e-4)]


def test_a_run_that_was_lost_before_it_saved_where_it_went_back_to_keeps_its_record(folder):
    class Lost(Spike):
        def phase(self, name, step):
            if (name, step, len(self.steps)) == ("checkpoint", 4, 8):
                raise RuntimeError("lost")
            return super().phase(name, step)

    config = spiking(folder, "unsaved")
    with pytest.raises(RuntimeError, match="lost"), Trainer(config, callbacks=[Lost()]) as trainer:
        trainer.fit()
    with Trainer(config) as trainer:
        assert trainer.step == 6
        trainer.fit()
        lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 10))


def test_a_run_goes_back_past_a_damaged_checkpoint(folder):
    class Damage(Spike):
        def on_checkpoint(self, step, seconds):
            if len(self.steps) == step == 4:  # not when it is made again
                (file,) = (self.run.run_dir / "checkpoints" / "step-00000004").glob("model-*.safetensors")
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(data)

    with Trainer(spiking(folder, "gone"), callbacks=[Damage()]) as trainer:
        trainer.fit()
        lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("event") == "rewound"] == [2]


def test_a_run_does_not_go_back_where_its_data_would_not_last(folder):
    (folder / "one_pass.txt").write_text(
        (folder / "text.txt").read_text()[:1169]
    )  # 36 samples of 32: nine steps, and not ten
    config = spiking(folder, "one-pass")
    source = replace(config.data.sources[0], paths=(str(folder / "one_pass.txt"),), max_epochs=1)
    config = replace(config, data=replace(config.data, sources=(source,)))
    spike = Spike()
    with Trainer(config, callbacks=[spike]) as trainer:
        trainer.fit(until=8)
        trainer.save()
        lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in spike.steps] == [*range(1, 9)]
    assert [line["step"] for line in lines if line.get("event") == "spikes_accepted"] == [8]
    with Trainer(config) as trainer:
        trainer.fit()
        assert trainer.finished


def test_after_going_back_the_best_checkpoint_is_one_that_stays(folder, monkeypatch):
    losses = iter([3.0, 2.5, 1.0, 2.9, 2.8, 2.7])  # of steps 2, 4, 6, and 6, 8, 9
    config = spiking(folder, "best", validation={"every": 2})
    config = replace(config, checkpoint=replace(config.checkpoint, keep_best=True))
    with Trainer(config, callbacks=[Spike()]) as trainer:
        validated = partial(ValidationRecord, bits_per_byte=None, tokens=1)
        monkeypatch.setattr(
            trainer, "_measure_held_out", lambda: (validated(step=trainer.step, loss=next(losses)), None)
        )
        trainer.fit()
        best = trainer._best
    assert (best.step, best.loss) == (4, 2.5)
    assert find_start(f"{trainer.run_dir}@best", "here") == (trainer.run_dir, 4)
    assert (trainer.run_dir / "set_aside" / "001-after-4" / "step-00000006").is_dir()


def test_after_going_back_patience_begins_anew(folder, monkeypatch):
    losses = iter([1.0, 2.0, 2.0, 2.0, 2.0, 2.0])  # of steps 2, 4, 6, and 6, 8, 9
    config = spiking(folder, "patience", validation={"every": 2, "patience": 4})
    with Trainer(config, callbacks=[Spike()]) as trainer:
        validated = partial(ValidationRecord, bits_per_byte=None, tokens=1)
        monkeypatch.setattr(
            trainer, "_measure_held_out", lambda: (validated(step=trainer.step, loss=next(losses)), None)
        )
        trainer.fit()
        assert (trainer.step, trainer._best.step, trainer._best.exhausted) == (9, 2, False)


def test_after_a_resume_at_an_older_step_the_best_checkpoint_is_one_that_is_there(folder, monkeypatch):
    losses = {1: 2.5, 2: 2.6, 3: 2.7, 4: 2.0, 5: 2.8}
    config = configured(
        folder, "older", train={"steps": 5, "global_batch": 4}, validation={"every": 1},
        checkpoint={"every": 1, "keep_last": 2, "keep_every": 2, "keep_best": True},
    )  # fmt: skip
    with Trainer(config) as trainer:
        validated = partial(ValidationRecord, bits_per_byte=None, tokens=1)
        monkeypatch.setattr(
            trainer,
            "_measure_held_out",
            lambda: (validated(step=trainer.step, loss=losses[trainer.step]), None),
        )
        trainer.fit()
    assert [*checkpoint_folders(trainer.run_dir)] == [2, 4, 5]  # 1 was the best until 4 was saved
    with Trainer(config) as trainer:
        assert (trainer._best.step, trainer._best.loss) == (4, 2.0)
    stage_rewind(staged_folder(trainer.run_dir), 2)
    with Lease(trainer.run_dir), Trainer(config) as trainer:  # as a command's worker
        assert (trainer.step, trainer._best.step, trainer._best.loss) == (2, 2, 2.6)


def test_a_loss_that_was_measured_otherwise_is_not_compared_with(folder, monkeypatch, caplog):
    losses = {2: 1.0, 4: 1.5, 6: 3.0, 8: 2.0, 9: 2.5}

    def run(until, **validation):
        config = configured(
            folder, "measured", train={"steps": 9, "global_batch": 4}, validation={"every": 2, "patience": 4} | validation,
            checkpoint={"every": 1, "keep_last": 1, "keep_best": True},
        )  # fmt: skip
        with Trainer(config) as trainer:
            found = trainer._best.loss
            validated = partial(ValidationRecord, bits_per_byte=None, tokens=1)
            monkeypatch.setattr(
                trainer,
                "_measure_held_out",
                lambda: (validated(step=trainer.step, loss=losses[trainer.step]), None),
            )
            trainer.fit(until=until)
        return found, [*checkpoint_folders(trainer.run_dir)], find_start(f"{trainer.run_dir}@best", "here")[1]

    assert run(4, steps=2) == (math.inf, [2, 4], 2)
    assert run(5, steps=2) == (1.0, [2, 5], 2)
    assert "measured otherwise" not in caplog.text
    assert run(8, steps=3) == (math.inf, [8], 8)
    assert "was measured otherwise (sequences)" in caplog.text
    assert run(9, steps=3) == (2.0, [8, 9], 8)


def test_a_loss_of_an_older_version_stays_the_best(monkeypatch):
    best = BestValidation(0, {"sequences": 8})
    best.load_state_dict({"loss": 2.0, "step": 4, "waited": 1})
    assert (best.loss, best.step) == (2.0, 4)
    steps_of_older_version = {4: {"validation_loss": 2.0}, 6: {"validation_loss": 3.0}}
    monkeypatch.setattr(contents, "_metrics", lambda path: steps_of_older_version[int(path.name)])
    saved = {step: Path(str(step)) for step in steps_of_older_version}
    assert contents.best_metric(saved, best.measured) == "validation_loss"
    assert contents.best_saved(saved) == (2.0, 4)


def test_parameters_that_thaw_are_no_spike(folder):
    config = configured(
        folder, "thaw", train={"steps": 8, "global_batch": 4}, spikes={"sigma": 8.0, "window": 5, "most": 2},
        optimizer={"lr": 1e-3, "frozen_steps": {r"^(?!norm\.)": 5}},  # one vector is trained first
    )  # fmt: skip
    with Trainer(config) as trainer:
        trainer.fit()
        lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert not [line for line in lines if line["kind"] == "step" and line["skipped"]]


@pytest.mark.parametrize("changes", ["freeze", "global_batch", "seq_len"])
def test_norms_of_other_parameters_or_another_batch_are_not_what_is_usual(folder, changes):
    def configuration(**values):
        train = {"steps": 4, "global_batch": 4, "freeze": [r"^tok_"]}
        return configured(
            folder, f"norms-{changes}", spikes={"sigma": 8.0, "window": 3}, checkpoint={"allow_data_change": True},
            model={"seq_len": values.pop("seq_len", 32)}, train=train | values,
        )  # fmt: skip

    with Trainer(configuration()) as trainer:
        trainer.fit(until=3)
        trainer.save()
    with Trainer(configuration()) as trainer:
        assert trainer._spikes.limit < math.inf
    with Trainer(configuration(**{changes: {"freeze": [], "global_batch": 2, "seq_len": 16}[changes]})) as trainer:
        assert (trainer.step, trainer._spikes.limit) == (3, math.inf)


def test_an_average_that_is_not_there_is_no_other_weights(folder):
    with Trainer(configured(folder, "none", train={"steps": 2, "global_batch": 4})) as trainer:
        trainer.fit()
    average = {"ema_decay": 0.5, "use": "ema"}
    (trainer.run_dir / "config.toml").write_text(dump_config(configured(folder, "none", average=average)))
    with pytest.raises(ValueError, match="step 2 has no moving average"):
        load_run(trainer.run_dir, device="cpu")


def test_an_average_that_is_switched_off_is_dropped(folder):
    for steps, average in ((2, {"ema_decay": 0.5}), (4, {})):
        config = configured(folder, "off", train={"steps": steps, "global_batch": 4}, average=average)
        with Trainer(config) as trainer:
            trainer.fit()
            assert has_ema(trainer.optimizer) == bool(average)


def test_a_validation_leaves_every_module_in_its_mode(folder):
    sections = {"train": {"steps": 2, "global_batch": 4}, "validation": {"every": 1, "steps": 1}}
    with Trainer(configured(folder, "modes", **sections)) as trainer:
        part = trainer.model.parts[0]
        part.layers["0"].eval()
        modes = [module.training for module in part.modules()]
        trainer.fit()  # the loss, and samples
        assert [module.training for module in part.modules()] == modes


def test_a_damaged_checkpoint_is_left_out_of_the_mean_and_the_run_goes_on(folder, caplog):
    sections = {
        "train": {"steps": 6, "global_batch": 4},
        "checkpoint": {"every": 2, "keep_last": 0},
        "validation": {"every": 2, "steps": 1, "sample_tokens": 0},
        "average": {"use": "checkpoints", "checkpoints": 3},
    }
    with Trainer(configured(folder, "damaged", **sections)) as trainer:
        trainer.fit(until=5)
        trainer.save()  # as on SIGTERM
    file = next((trainer.run_dir / "checkpoints" / "step-00000005").glob("model-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with Trainer(configured(folder, "damaged", **sections)) as trainer:
        assert trainer.step == 4
        trainer.fit()
        assert trainer.step == 6
    assert "step 5 is left out of the mean over checkpoints" in caplog.text
    mean = weights_of(trainer.run_dir)
    for name, weight in trainer.model.parts[0].named_parameters():
        assert not torch.equal(mean[name], weight)


@pytest.mark.parametrize(
    ("damaged", "average"),
    [
        ("MANIFEST.json", {}),
        ("model-*.safetensors", {"use": "checkpoints", "checkpoints": 2}),
        ("optim/*.safetensors", {"use": "ema", "ema_decay": 0.5}),
    ],
)
def test_the_newest_checkpoint_that_is_intact_is_loaded(folder, damaged, average):
    sections = {"train": {"steps": 3, "global_batch": 4}, "checkpoint": {"every": 1}, "average": average}
    with Trainer(configured(folder, f"newest-{damaged[:5]}", **sections)) as trainer:
        trainer.fit()
    file = next((trainer.run_dir / "checkpoints" / "step-00000003").glob(damaged))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert load_run(trainer.run_dir, device="cpu").step == 2
    assert load_run(trainer.run_dir, device="meta").step == (2 if damaged == "MANIFEST.json" else 3)  # reads no weights
    with pytest.raises(DamageError):
        load_run(trainer.run_dir, device="cpu", step=3)
