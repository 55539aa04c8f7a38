"""`titan_ckpt.integrations`: a run that is stopped and resumed goes on as one that was not, bitwise."""

import itertools
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from titan_ckpt import Checkpointer, TrainState
from titan_testing import run_ranks
from torch import nn


class Net(nn.Module):
    """A model as transformers' Trainer wants it, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x, labels=None):
        out = self.layers(x)[..., 0]
        return {"loss": (out - labels).square().mean(), "out": out}


def rows(count: int = 24) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(4, generator=draw), "labels": torch.randn((), generator=draw)} for _ in range(count)]


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def train_hf(root: Path, steps: int, resume: str | None = None) -> list[torch.Tensor]:
    import transformers
    from titan_ckpt.integrations.transformers import TitanTrainer

    args = transformers.TrainingArguments(
        output_dir=str(root), max_steps=10, per_device_train_batch_size=4, save_steps=4, save_total_limit=3,
        logging_strategy="no", report_to=[], use_cpu=True, seed=1, learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop |= state.global_step >= steps

    net = model()
    trainer = TitanTrainer(net, args, train_dataset=rows(), callbacks=[Stop()])
    trainer.train(resume_from_checkpoint=resume)
    return weights(net)


def test_a_transformers_trainer_resumes_bitwise(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = train_hf(tmp_path / "straight", 10)
        train_hf(tmp_path / "stopped", 8)  # the save at step 8, in the middle of the second epoch
        assert Checkpointer(tmp_path / "stopped" / "steps").steps() == [4, 8]
        got = train_hf(tmp_path / "stopped", 10, str(tmp_path / "stopped" / "checkpoint-8"))
        elsewhere = train_hf(tmp_path / "other", 10, str(tmp_path / "stopped" / "checkpoint-8"))
    assert_same(got, want)
    assert_same(elsewhere, want)
    assert not list((tmp_path / "stopped").rglob("*.pt")), "nothing of the Trainer's own"


@pytest.mark.filterwarnings("ignore")
def test_a_transformers_trainer_that_shall_load_the_best_model_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from titan_ckpt.integrations.transformers import TitanTrainer

    def trainer(net: Net, **options: Any) -> Any:
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=2, report_to=[],
            logging_strategy="no", use_cpu=True, disable_tqdm=True, **options,
        )  # fmt: skip
        return TitanTrainer(net, args, train_dataset=rows(), eval_dataset=rows())

    with pytest.raises(ValueError, match="load_best_model_at_end=False and metric_for_best_model='loss'") as refusal:
        trainer(model(), load_best_model_at_end=True)

    net = model()
    instead = trainer(net, load_best_model_at_end=False, metric_for_best_model="loss")
    instead.train()
    names = {"Checkpointer": Checkpointer, "TrainState": TrainState, "model": net, "trainer": instead}
    call = re.search(r"Checkpointer\(.*best_global_step\)", str(refusal.value))
    assert call is not None
    assert eval(call[0], names) in (2, 4)


@pytest.mark.filterwarnings("ignore")
def test_what_looks_for_files_of_transformers_own_is_refused_by_name(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    with pytest.raises(ValueError, match=r"push_to_hub=False; after training call trainer.save_model"):
        hf_trainer(tmp_path, 2, push_to_hub=True)
    with pytest.raises(ValueError, match=r"hyperparameter_search .* output_dir of its own"):
        hf_trainer(tmp_path, 2).hyperparameter_search(n_trials=2)
    with pytest.raises(ValueError, match=r"push_to_hub would upload .*save_model"):
        hf_trainer(tmp_path, 2).push_to_hub()


def test_a_transformers_trainer_saves_and_resumes_the_state_of_callbacks(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from titan_ckpt.integrations.transformers import TitanTrainer
    from transformers.trainer_callback import ExportableState

    class Count(transformers.TrainerCallback, ExportableState):
        steps = 0

        def on_step_end(self, *_, **__):
            self.steps += 1

        def state(self):
            return {"args": {}, "attributes": {"steps": self.steps}}

    def train(until: int, resume: str | None) -> list[int]:
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=until, per_device_train_batch_size=4, save_steps=2, report_to=[],
            logging_strategy="no", use_cpu=True, disable_tqdm=True, restore_callback_states_from_checkpoint=True,
        )  # fmt: skip
        trainer = TitanTrainer(model(), args, train_dataset=rows(), callbacks=[Count()])
        trainer.train(resume_from_checkpoint=resume)
        return [callback.steps for callback in trainer.callback_handler.callbacks if isinstance(callback, Count)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train(4, None) == [4]
        saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["stateful_callbacks"]
        assert saved["Count"]["attributes"] == {"steps": 2}
        assert "TrainerControl" in saved
        assert train(6, str(tmp_path / "checkpoint-4")) == [6]


def train_accelerate(root: Path, steps: int, seed: int = 0, shuffle: bool = True) -> list[torch.Tensor]:
    """As the module's docstring says; six batches are a pass."""
    import accelerate
    from titan_ckpt.integrations.accelerate import AccelerateCheckpoint

    seedable = accelerate.DataLoaderConfiguration(use_seedable_sampler=shuffle)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=seedable)
    net = model()
    torch.manual_seed(seed)
    optim = torch.optim.AdamW(net.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.StepLR(optim, 3, 0.5)
    # a generator of its own: beginning to read draws from it, not from dropout's
    loader = torch.utils.data.DataLoader(rows(), batch_size=4, shuffle=shuffle, generator=torch.Generator())
    net, optim, sched, loader = accelerator.prepare(net, optim, sched, loader)
    checkpoint = AccelerateCheckpoint(accelerator, root, keep_last=2)
    step, counts = checkpoint.restore(), checkpoint.counts
    for epoch in itertools.count(counts.get("epoch", 0)):
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, counts["batches"]):
            accelerator.backward(net(**batch)["loss"])
            optim.step()
            sched.step()
            optim.zero_grad()
            step, counts["batches"] = step + 1, counts["batches"] + 1
            checkpoint.save(step)
            if step == steps:
                checkpoint.checkpointer.close()
                return weights(net)
        counts.update(epoch=epoch + 1, batches=0)
    raise AssertionError


@pytest.mark.parametrize(("shuffle", "stop"), [(False, 3), (True, 3), (True, 6), (True, 8)])  # 6: a pass ends there
def test_an_accelerate_loop_resumes_bitwise(tmp_path, shuffle, stop):
    pytest.importorskip("accelerate", reason="a test dependency")
    want = train_accelerate(tmp_path / "straight", 10, shuffle=shuffle)
    train_accelerate(tmp_path / "stopped", stop, shuffle=shuffle)
    assert_same(train_accelerate(tmp_path / "stopped", 10, seed=1, shuffle=shuffle), want)
    assert Checkpointer(tmp_path / "stopped").steps() == [9, 10]


def prepared_loader(root: Path, seed: int, seedable: bool = True) -> tuple[Any, Any]:
    """A loader that shuffles, of six batches, and what saves it."""
    import accelerate
    from titan_ckpt.integrations.accelerate import AccelerateCheckpoint

    torch.manual_seed(seed)
    options = accelerate.DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=options)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(24), batch_size=4, shuffle=True))
    return loader, AccelerateCheckpoint(accelerator, root)


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("taken", [0, 1, 6])
def test_a_loader_of_accelerate_is_restored_in_its_pass_and_after_the_last_batch_in_the_next(tmp_path, passes, taken):
    pytest.importorskip("accelerate", reason="a test dependency")
    loader, checkpoint = prepared_loader(tmp_path, 1)
    for _ in range(passes):
        list(loader)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    checkpoint.save(1)
    other, restored = prepared_loader(tmp_path, 2)
    assert restored.restore() == 1
    assert other.iteration == passes + (taken == 6)
    loader.set_epoch(other.iteration)
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in loader]


def test_loaders_of_accelerate_whose_order_cannot_be_found_again_are_refused(tmp_path):
    pytest.importorskip("accelerate", reason="a test dependency")
    _, checkpoint = prepared_loader(tmp_path, 1, seedable=False)
    for refused in (checkpoint.restore, lambda: checkpoint.save(1)):
        with pytest.raises(ValueError, match=r"shuffles by a RandomSampler.*use_seedable_sampler=True"):
            refused()
    _, checkpoint = prepared_loader(tmp_path, 1)
    checkpoint.save(1)
    checkpoint.accelerator.prepare(torch.utils.data.DataLoader(torch.arange(4)))
    with pytest.raises(ValueError, match=r"passes of 1 data loaders, and the accelerator has 2.*last, .*strict=False"):
        checkpoint.restore()


def test_loaders_of_accelerate_that_are_new_begin_anew_where_that_is_asked_for(tmp_path):
    pytest.importorskip("accelerate", reason="a test dependency")
    loader, checkpoint = prepared_loader(tmp_path / "a", 1)
    list(loader)
    checkpoint.save(1)
    other, checkpoint = prepared_loader(tmp_path / "a", 2)
    new = checkpoint.accelerator.prepare(torch.utils.data.DataLoader(torch.arange(4)))
    assert checkpoint.restore(strict=False) == 1
    assert (other.iteration, new.iteration) == (1, 0)
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in loader]

    _, checkpoint, _ = accelerated(tmp_path / "b", 5)
    checkpoint.save(1)
    accelerator, checkpoint, (_, _, position) = accelerated(tmp_path / "b", 0)
    accelerator._dataloaders.append(StatefulLoader())
    with pytest.raises(ValueError, match=r"positions of 1 stateful data loaders, .* has 2\. .*strict=False"):
        checkpoint.restore()
    assert checkpoint.restore(strict=False) == 1
    assert (position.value, accelerator._dataloaders[1].value) == (5, 0)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_stateful_loader_that_keeps_what_its_order_was_drawn_from_may_shuffle(tmp_path, keeps):
    pytest.importorskip("accelerate", reason="a test dependency")

    class Order(torch.utils.data.RandomSampler):  # as torchdata's
        def __iter__(self):
            return Count() if keeps else super().__iter__()

    class Batches(torch.utils.data.BatchSampler):
        def __iter__(self):
            return Count()

    loader, checkpoint = prepared_loader(tmp_path, 1)
    checkpoint.accelerator._dataloaders[:] = [StatefulLoader(Batches(Order(range(4)), 2, False), 5)]
    if not keeps:
        with pytest.raises(ValueError, match="shuffles by a Order"):
            checkpoint.save(1)
        return
    checkpoint.save(1)
    (loader,) = checkpoint.accelerator._dataloaders
    loader.value = 0
    assert checkpoint.restore() == 1
    assert loader.value == 5


def hf_trainer(root: Path, steps: int, **options: Any) -> Any:
    import transformers
    from titan_ckpt.integrations.transformers import TitanTrainer

    args = transformers.TrainingArguments(
        output_dir=str(root), max_steps=steps, per_device_train_batch_size=4, save_steps=2, report_to=[],
        logging_strategy="no", use_cpu=True, disable_tqdm=True, max_grad_norm=0.0, **options,
    )  # fmt: skip
    return TitanTrainer(model(), args, train_dataset=rows())


@pytest.mark.filterwarnings("ignore")
def test_a_transformers_trainer_resumes_the_gradient_scaler_and_the_count_of_operations(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    for steps in (2, 3):
        trainer = hf_trainer(tmp_path, steps)
        trainer.accelerator.scaler = torch.amp.GradScaler(
            "cpu", init_scale=8.0 if steps == 2 else 1.0, growth_interval=2
        )
        trainer.floating_point_ops = lambda _: 10
        trainer.train(resume_from_checkpoint=steps > 2)
        assert trainer.accelerator.scaler.get_scale() == 16
        assert trainer.state.total_flos == 10 * steps
    assert trainer.accelerator.scaler.state_dict()["_growth_tracker"] == 1
    assert json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["total_flos"] == 20


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lost", ["counters", "step"])
def test_a_transformers_trainer_that_was_killed_while_it_saved_resumes(tmp_path, monkeypatch, lost):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    owner, name = (transformers.TrainerState, "save_to_json") if lost == "counters" else (Checkpointer, "save")
    whole = getattr(owner, name)

    def killed(self: Any, *args: Any, **options: Any) -> Any:
        if trainer.state.global_step == 4:
            raise KeyboardInterrupt
        return whole(self, *args, **options)

    trainer = hf_trainer(tmp_path, 6, save_total_limit=1)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert Checkpointer(tmp_path / "steps").steps() == [2]
    trainer = hf_trainer(tmp_path, 4, save_total_limit=1)
    last = transformers.trainer_utils.get_last_checkpoint(str(tmp_path))  # as many scripts ask
    trainer.train(resume_from_checkpoint=last if lost == "step" else True)
    assert Checkpointer(tmp_path / "steps").steps() == [trainer.state.global_step] == [4]


@pytest.mark.filterwarnings("ignore")
def test_a_transformers_trainer_without_a_finished_step_cannot_resume(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match="has no finished step"):
        hf_trainer(tmp_path, 4).train(resume_from_checkpoint=True)


class Count:
    """Something with a state: registered with Accelerate, a scaler, or a data loader."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise StopIteration


class StatefulLoader(Count):
    """A data loader of torchdata, as far as it matters here."""

    use_stateful_dataloader = True

    def __init__(self, batch_sampler: Any = None, value: Any = 0) -> None:
        super().__init__(value)
        self.batch_sampler = batch_sampler


def accelerated(root: Path, value: int) -> tuple[Any, Any, list[Count]]:
    """An accelerator with two models of equal names, and with everything else that has a state; all of it is ``value``."""
    import accelerate
    from titan_ckpt.integrations.accelerate import AccelerateCheckpoint

    accelerator: Any = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    for _ in range(2):
        net = nn.Linear(2, 2)
        nn.init.constant_(net.weight, value)
        accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=value))
    registered, scaler, loader = Count(value), Count(value), StatefulLoader(value=value)
    accelerator.register_for_checkpointing(registered)
    accelerator.scaler, accelerator.step = scaler, value
    accelerator._dataloaders.append(loader)
    return accelerator, AccelerateCheckpoint(accelerator, root), [registered, scaler, loader]


def test_all_that_accelerate_saves_is_restored(tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate", reason="a test dependency")
    _, checkpoint, _ = accelerated(tmp_path, 5)
    checkpoint.counts["tokens"] = 7
    checkpoint.save(1)
    accelerator, other, parts = accelerated(tmp_path, 0)
    assert other.restore() == 1
    assert [accelerator.step, *(part.value for part in parts)] == [5] * 4
    assert other.counts == {"batches": 0, "tokens": 7}
    assert [group["lr"] for optim in accelerator._optimizers for group in optim.param_groups] == [5, 5]
    assert all((net.weight == 5).all() for net in accelerator._models)
    assert checkpoint.checkpointer.steps() == [1]

    accelerator.register_for_checkpointing(Count())
    with pytest.raises(ValueError, match=r"registered 1"):
        other.restore()
    accelerator._custom_objects.clear()
    with pytest.raises(ValueError, match=r"register_for_checkpointing"):
        other.restore()
    accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="register_save_state_pre_hook"):
        other.save(2)
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", accelerate.DistributedType.DEEPSPEED)
    with pytest.raises(ValueError, match="DEEPSPEED"):
        other.save(2)


@pytest.mark.parametrize("way", ["load_state_dict", "reshard"])
def test_stateful_loaders_of_accelerate_are_refused_on_another_number_of_processes(tmp_path, monkeypatch, way):
    accelerate = pytest.importorskip("accelerate", reason="a test dependency")
    with monkeypatch.context() as patch:
        patch.setattr(accelerate.Accelerator, "num_processes", 4)
        _, checkpoint, _ = accelerated(tmp_path, 5)
        checkpoint.save(1)
        position = checkpoint._state().data.state_dict()
    accelerator, other, (_, _, loader) = accelerated(tmp_path, 0)
    with pytest.raises(ValueError, match=r"4 processes, .* of 1\. .*use_stateful_dataloader=False"):
        other.restore() if way == "load_state_dict" else other._state().data.reshard([position] * 4)
    assert loader.value == 0
    loader.use_stateful_dataloader = False  # as the message says
    assert other.restore() == 1
    assert accelerator.step == 5


def test_an_accelerator_resumes_with_accumulation_or_a_scaler_that_were_not_saved(tmp_path):
    pytest.importorskip("accelerate", reason="a test dependency")
    accelerator, checkpoint, _ = accelerated(tmp_path, 5)
    accelerator.scaler, accelerator.gradient_accumulation_steps = None, 1
    checkpoint.save(1)
    accelerator, other, parts = accelerated(tmp_path, 0)
    assert other.restore() == 1
    assert [accelerator.step, *(part.value for part in parts)] == [0, 5, 0, 5]
    other.save(2)
    accelerator.scaler, accelerator.gradient_accumulation_steps = None, 1  # and the other way round
    assert other.restore() == 2
    assert other.counts == {"batches": 0}


def train_lightning(root: Path, epochs: int, resume: str | None = None) -> list[torch.Tensor]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from titan_ckpt.integrations.lightning import TitanIO

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model().eval()  # Lightning keeps no random generators: no dropout

        def training_step(self, batch, _):
            return self.net.eval()(**batch)["loss"]

        def configure_optimizers(self):
            optim = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {"optimizer": optim, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)}

    saver = ModelCheckpoint(dirpath=root, save_top_k=-1, filename="{epoch}")
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, callbacks=[saver], plugins=[TitanIO()],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=root,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=4), ckpt_path=resume)
    assert trainer.global_step == 6 * epochs
    return weights(module)


def test_a_lightning_trainer_resumes_bitwise(tmp_path):
    pytest.importorskip("lightning", reason="a test dependency")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = train_lightning(tmp_path / "straight", 3)
        train_lightning(tmp_path / "stopped", 2)
        resume = tmp_path / "stopped" / "epoch=1.ckpt"
        assert Checkpointer(resume).steps() == [0]
        assert_same(train_lightning(tmp_path / "stopped", 3, str(resume)), want)


def test_lightning_deletes_a_checkpoint_in_a_store(tmp_path):
    pytest.importorskip("lightning", reason="a test dependency")
    pytest.importorskip("fsspec", reason="the extra titan-ckpt[fsspec]")
    from titan_ckpt.integrations.lightning import TitanIO

    for place in ("memory://lightning/a.ckpt", str(tmp_path / "a.ckpt"), tmp_path / "b.ckpt"):
        TitanIO().save_checkpoint({"epoch": 1}, place)
        assert Checkpointer(place).steps() == [0]
        TitanIO().remove_checkpoint(place)
        assert Checkpointer(place).steps() == []


def groups_of(adapter: str, root: str) -> list[int]:
    """How many process groups there are after each of three saves."""
    dist.get_backend_config = lambda *_: "cuda:nccl"  # as where the default group has no gloo
    if adapter == "transformers":
        from titan_ckpt.integrations.transformers import TitanTrainer

        trainer: Any = TitanTrainer.__new__(TitanTrainer)
        trainer.args = SimpleNamespace(output_dir=root, save_total_limit=None)
    else:
        from titan_ckpt.integrations.lightning import TitanIO
    counts = []
    for step in range(3):
        if adapter == "transformers":
            trainer._checkpointer().save(step, TrainState(rng=False))
        else:
            TitanIO().save_checkpoint({"step": step}, f"{root}/{step}.ckpt")
            assert TitanIO().load_checkpoint(f"{root}/{step}.ckpt") == {"step": step}
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


@pytest.mark.parametrize("adapter", ["transformers", "lightning"])
def test_process_groups_do_not_grow_in_number_with_the_saves(tmp_path, adapter):
    for package in (adapter, "accelerate"):
        pytest.importorskip(package, reason="a test dependency")
    ((first, *later),) = run_ranks(groups_of, 1, adapter, str(tmp_path), timeout_s=120)
    assert later == [first, first]
