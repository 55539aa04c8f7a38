"""A program's own batches, loss and optimizer: the numbers of a plain loop, an exact resume, and what is refused."""

import contextlib
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_run import tiny_run, write_text
from titan_testing import run_ranks
from titan_train import Observer, Trainer, load_run
from titan_train.config import SpikesConfig, load_config
from titan_train.config.ramp import BatchRamp
from titan_train.data import IteratedBatches
from titan_train.inputs import GivenInputs, open_inputs, prepare_inputs
from titan_train.launch.validate import decided_by_arguments, validate
from titan_train.models import build_model
from titan_train.observe import run_info
from titan_train.observe.run_info import versions
from titan_train.optim.spikes import Spikes
from titan_train.parallel.layout.run import plan_run
from titan_train.run_folder import run_folder, stage, staged_folder
from titan_train.task import load_task
from titan_train.tasks.diffusion.sampling import write_png
from titan_train.tasks.vision.task import VisionTask
from titan_train.train import process
from titan_train.train.best import BestValidation
from titan_train.train.checkpoints import RankState
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, ROWS, LENGTH = 4, 4, 32


def config(folder, name, **sections):
    train = {"steps": STEPS, "global_batch": ROWS} | sections.pop("train", {})
    return tiny_run(folder, name, train=train, **sections)


def batches():
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 256, (ROWS, LENGTH + 1), generator=draw) for _ in range(3)]
    return [(x[:, :-1], x[:, 1:]) for x in ids]


def smoothed(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", label_smoothing=0.1)


def adagrad(groups):
    return torch.optim.Adagrad(groups, lr=1e-3)


def fit(*args, until=None, **options):
    with Trainer(*args, **options) as trainer:
        trainer.fit(until=until)
        if trainer.step < STEPS:
            trainer.save()
    return trainer


def test_batches_loss_and_optimizer_of_a_program_train_as_a_plain_loop_does(tmp_path):
    """Two batches of the list come twice: it begins again at its end."""

    class Start(Observer):
        def on_start(self, run):
            super().on_start(run)
            self.weights = {n: p.detach().clone() for n, p in run.model.parts[0].named_parameters()}

    start = Start()
    given = config(tmp_path, "given", schedule={"name": "constant", "warmup_steps": 0}, train={"max_grad_norm": 0.0})
    trainer = fit(given, data=batches(), loss=smoothed, optimizer=adagrad, callbacks=[start])

    model = build_model(given.model, vocab_size=trainer.model.parts[0].tok_embeddings.weight.shape[0], device="cpu")
    model.load_state_dict(start.weights)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.Adagrad(
        [{"params": decayed, "weight_decay": given.optimizer.weight_decay}, {"params": plain}], lr=1e-3
    )
    losses = []
    for tokens, labels in [*batches(), batches()[0]]:
        optimizer.zero_grad()
        loss = smoothed(model(tokens), labels) / labels.numel()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert trainer.losses == pytest.approx(losses, rel=1e-6)  # float32 sums in another order
    for name, parameter in trainer.model.parts[0].named_parameters():
        torch.testing.assert_close(parameter, dict(model.named_parameters())[name], rtol=0, atol=1e-6)
    assert load_run(trainer.run_dir).complete("a", max_new_tokens=2)  # the tokenizer is kept in the folder


def test_the_vocabulary_of_given_rows_with_images_has_their_tokens(tmp_path):
    shapes = load_config("vlm_shapes", ["--data.cache-dir", str(tmp_path)])
    task = VisionTask()
    given = GivenInputs(shapes, task, [], None)
    assert given.vocab_size == task.vocab_size(shapes) > given.tokenizer.vocab_size


def test_a_resume_takes_up_the_batches_where_it_stopped(tmp_path):
    whole = fit(config(tmp_path, "whole"), data=batches(), optimizer=adagrad)
    fit(config(tmp_path, "parts"), data=batches(), optimizer=adagrad, until=2)
    rest = fit(config(tmp_path, "parts"), data=iter([*batches(), batches()[0]]), optimizer=adagrad)
    assert rest.losses == whole.losses[2:]


@pytest.mark.parametrize("stop", [2, 5])  # in the first pass over the rows and in the second
def test_a_resume_goes_on_in_the_order_that_a_torch_loader_shuffled(tmp_path, stop):
    tokens, labels = (torch.cat(parts) for parts in zip(*batches(), strict=True))

    def part(name, until):
        loader = DataLoader(
            range(len(tokens)), ROWS, shuffle=True, collate_fn=lambda rows: (tokens[rows], labels[rows])
        )
        with Trainer(config(tmp_path, name, train={"steps": 6}), data=loader) as trainer:
            trainer.fit(until=until)
            trainer.save()
        return trainer.losses

    assert part("parts", stop) + part("parts", 6) == part("whole", 6)


def test_every_validation_draws_the_same_order_from_a_torch_loader_on_every_rank():
    tokens, labels = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    loader = DataLoader(range(len(tokens)), ROWS, shuffle=True, collate_fn=lambda rows: (tokens[rows], labels[rows]))

    def first(seed, steps):
        torch.manual_seed(seed)  # as a step left the generator of this rank
        given = IteratedBatches(
            loader, ramp=BatchRamp((ROWS,)), dp_size=1, rows=ROWS, seq_len=LENGTH, fixed=False, vocab_size=None,
            device=torch.device("cpu"), steps=steps, seed=7,
        )  # fmt: skip
        return next(given).tokens

    assert torch.equal(first(1, steps=1), first(2, steps=1))
    assert not torch.equal(first(1, steps=None), first(2, steps=None))  # training: each start of a run sets it


class Slowing(torch.optim.SGD):
    """Keeps the number of its steps in the groups, as optimizers of schedule-free kinds do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] /= group["k"]
        return super().step(closure)


def test_a_resume_keeps_what_an_optimizer_counts_in_its_groups_and_takes_the_weight_decay_of_the_configuration(
    tmp_path,
):
    whole = fit(config(tmp_path, "whole"), data=batches(), optimizer=Slowing)
    fit(config(tmp_path, "parts"), data=batches(), optimizer=Slowing, until=2)
    rest = fit(config(tmp_path, "parts"), data=batches(), optimizer=Slowing)
    for group, other in zip(rest.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
        assert group["k"] == STEPS
        assert all(torch.equal(a, b) for a, b in zip(group["params"], other["params"], strict=True))
    decayed = {"lr": 1e-3, "weight_decay": 0.25}
    again = fit(config(tmp_path, "parts", optimizer=decayed), data=batches(), optimizer=Slowing)
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.25


class Counting:
    """An iterable with a state of its own: after its end it begins anew. The number of the pass is the tens of its tokens."""

    def __init__(self, first, length=3):
        self.given, self.place, self.epoch = [(torch.full((ROWS, 8), first + i),) * 2 for i in range(length)], 0, 0

    def __iter__(self):
        while self.place < len(self.given):
            self.place += 1
            tokens, labels = self.given[self.place - 1]
            yield tokens + 10 * self.epoch, labels
        self.place = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def iterated(batches, global_batch=ROWS, dp_rank=0, dp_size=1, vocab_size=None, steps=None):
    return IteratedBatches(
        batches, ramp=BatchRamp((global_batch,)), dp_size=dp_size, dp_rank=dp_rank, rows=ROWS, seq_len=8, fixed=True,
        vocab_size=vocab_size, device=torch.device("cpu"), steps=steps,
    )  # fmt: skip


def test_documents_of_a_packing_collator_are_kept_apart():
    """As `DataCollatorWithFlattening` gives them: positions begin at 0 in each document, and there is no mask."""
    tokens = torch.arange(8).expand(ROWS, -1)
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]).expand(ROWS, -1)
    packed = {"input_ids": tokens, "position_ids": places}
    loader = iterated([packed, packed | {"attention_mask": torch.ones_like(tokens)}])
    batch = next(loader)
    assert batch.cu_seqlens[:, :3].tolist() == [[0, 5, 8]] * ROWS
    assert batch.max_seqlen == 5
    assert batch.labels[0].tolist() == [1, 2, 3, 4, -100, 6, 7, -100]
    assert batch.padding is None
    assert next(loader).cu_seqlens is None  # with a mask a row is one document, as in transformers


def test_what_the_mask_of_a_collator_leaves_out_is_padding():
    mask = (torch.arange(8) < torch.tensor([[8], [5], [1], [0]])).long()
    batch = next(iterated([{"input_ids": torch.ones_like(mask), "attention_mask": mask}]))
    assert torch.equal(batch.padding, mask == 0)


def numbers(loader, count):
    return [int(next(loader).tokens[0, 0]) for _ in range(count)]


@pytest.mark.parametrize("taken", [1, 2, 3, 4, 6])
def test_an_iterable_with_a_state_continues_where_it_was_saved_its_end_too(taken):
    expected = numbers(iterated(Counting(0)), 9)
    assert expected == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    first = iterated(Counting(0))
    assert numbers(first, taken) == expected[:taken]
    rest = iterated(Counting(0))
    rest.load_state_dict(first.state_dict())
    assert numbers(rest, 9 - taken) == expected[taken:]
    with pytest.raises(RuntimeError, match="ended after 0 samples"):
        next(iterated([]))


def test_a_state_of_an_earlier_release_has_no_pass():
    first = iterated(Counting(0))
    numbers(first, 4)
    state = first.state_dict()
    del state["iterable_pass"]
    rest = iterated(Counting(0))
    rest.load_state_dict(state)
    assert numbers(rest, 3) == [1, 2, 10]


def test_a_distributed_sampler_draws_each_pass_anew_and_a_resume_finds_the_pass():
    ids = torch.arange(4 * ROWS)
    sampler = DistributedSampler(ids, num_replicas=1, rank=0, shuffle=True)
    loader = DataLoader(
        ids, ROWS, sampler=sampler, collate_fn=lambda rows: (torch.stack(rows)[:, None].repeat(1, 8),) * 2
    )
    whole = iterated(loader)
    passes = [[next(whole).tokens[:, 0].tolist() for _ in range(4)] for _ in range(2)]
    assert passes[0] != passes[1]
    first = iterated(loader)
    numbers(first, 6)
    rest = iterated(loader)
    rest.load_state_dict(first.state_dict())
    assert [next(rest).tokens[:, 0].tolist() for _ in range(2)] == passes[1][2:]


def test_a_smaller_last_batch_is_refused_where_it_will_be_taken():
    loader = DataLoader(torch.arange(3 * ROWS + 1), ROWS)
    iterated(loader, steps=3)  # a validation that ends before it
    for refused in (lambda: iterated(loader, steps=4), lambda: iterated(loader).check_steps(4)):
        with pytest.raises(
            ValueError, match=r"of 13 samples with batch_size=4: the last batch of a pass has 1.*drop_last"
        ):
            refused()
    iterated(DataLoader(torch.arange(3 * ROWS + 1), ROWS, drop_last=True), steps=4)
    whole, rest = Counting(0, 1).given[0], (torch.zeros(1, 8, dtype=torch.int64),) * 2
    given = iterated([whole, rest])
    next(given)
    with pytest.raises(ValueError, match=r"gave tokens of \[1, 8\].*drop_last=True"):
        next(given)
    resumed = iterated(DataLoader(torch.arange(3 * ROWS + 1), ROWS))
    resumed.load_state_dict({"iterated_samples": 2 * ROWS})
    resumed.check_steps(1)
    with pytest.raises(ValueError, match="drop_last=True"):
        resumed.check_steps(2)


def test_a_run_refuses_a_smaller_last_batch_at_its_start_if_it_comes_so_far(tmp_path):
    rows = TensorDataset(*(torch.cat(part)[:-1] for part in zip(*batches(), strict=True)))
    loader = DataLoader(rows, ROWS)
    assert len(fit(config(tmp_path, "short", train={"steps": 2}), data=loader, until=2).losses) == 2
    for name, data in (("data", loader), ("validation_data", batches())):
        with pytest.raises(ValueError, match=f"{name} is a DataLoader of 11 samples"):
            Trainer(config(tmp_path, name, validation={"every": 4, "steps": 3}), data=data, validation_data=loader)


def test_a_collator_that_packs_samples_into_a_row_takes_any_number_of_them(tmp_path):
    """As `DataCollatorWithFlattening` does: three samples make one row."""

    def flatten(samples):
        ids = torch.cat(samples)[None]
        return {
            "input_ids": ids,
            "labels": ids,
            "position_ids": torch.cat([torch.arange(len(x)) for x in samples])[None],
        }

    loader = DataLoader([torch.arange(10)] * 7, 3, collate_fn=flatten)
    settings = config(tmp_path, "flat", train={"global_batch": 1}, validation={"every": 2, "steps": 3})
    assert len(fit(settings, data=loader, validation_data=loader).losses) == STEPS


@pytest.mark.parametrize("kind", ["token", "label"])
@pytest.mark.parametrize("wrong", [-1, 256])
def test_ids_outside_the_vocabulary_are_refused_but_for_labels_that_are_not_learned(kind, wrong):
    good = torch.tensor([[0, 255, 3, -100]]).repeat(ROWS, 2)
    pair = {"token": good.relu(), "label": good.clone()}
    assert torch.equal(next(iterated([tuple(pair.values())], vocab_size=256)).labels, good)
    pair[kind][1, 2] = wrong
    with pytest.raises(ValueError, match=f"gave the {kind} {wrong}, but the tokenizer has the ids 0 to 255.* -100"):
        next(iterated([tuple(pair.values())], vocab_size=256))


def test_another_global_batch_drops_what_was_taken_and_no_more():
    plain = [batch for start in range(0, 20, 5) for batch in Counting(start, 5).given]
    first = iterated(plain)
    assert numbers(first, 3) == [0, 1, 2]
    rest = iterated(plain, global_batch=2 * ROWS)
    rest.load_state_dict(first.state_dict())
    assert numbers(rest, 3) == [3, 4, 5]
    assert rest.state_dict()["iterated_samples"] == 3 * ROWS + 2 * ROWS


def test_the_state_of_an_iterable_is_that_of_a_data_parallel_rank():
    saved = [iterated(Counting(10 * rank), 2 * ROWS, rank, 2) for rank in (0, 1)]
    for loader in saved:
        numbers(loader, 2)
    other = iterated(Counting(0))
    state = RankState(other, False, [], Spikes(SpikesConfig()), BestValidation(0))
    assert state.place == (0, 1)
    with pytest.raises(
        ValueError, match=r"saved by data-parallel rank 0 of 2, and this is rank 0 of 1.*allow_data_change"
    ):
        state.reshard([loader.state_dict() for loader in saved])
    RankState(other, True, [], Spikes(SpikesConfig()), BestValidation(0)).reshard([s.state_dict() for s in saved])
    assert numbers(other, 1) == [11]  # four microbatches were dropped, a pass and one more


def test_collated_rows_of_a_torch_loader_are_pairs_of_the_same_tokens(tmp_path):
    """As transformers' collators give them: labels not shifted, padding masked on the right."""
    rows = torch.cat([tokens for tokens, _ in batches()])
    mask = torch.ones_like(rows)
    mask[:, 20:] = 0

    def collate(numbers):
        return {"input_ids": rows[numbers], "attention_mask": mask[numbers]}

    labels = torch.cat([rows[:, 1:].masked_fill(mask[:, 1:] == 0, -100), torch.full((len(rows), 1), -100)], 1)
    pairs = list(zip(rows.split(ROWS), labels.split(ROWS), strict=True))
    loader = DataLoader(range(len(rows)), batch_size=ROWS, collate_fn=collate)
    options = {"validation": {"every": 2, "steps": 2}}
    first = fit(config(tmp_path, "loader", **options), data=loader, validation_data=loader)
    second = fit(config(tmp_path, "pairs", **options), data=pairs, validation_data=pairs)
    assert first.losses == second.losses


def on_two_ranks(folder):
    rank, losses = torch.distributed.get_rank(), []
    for parallel in ({"dp_shard": 2}, {"pp": 2}):
        mine = batches()
        if "pp" not in parallel:
            mine = [(x[2 * rank :][:2], y[2 * rank :][:2]) for x, y in mine]
        settings = config(folder, f"{min(parallel)}", parallel=parallel, train={"microbatch": len(mine[0][0])})
        losses.append(fit(settings, data=mine, loss=smoothed).losses)
    return losses


def test_each_rank_gives_its_own_part_of_the_batches(tmp_path):
    alone = fit(config(tmp_path, "alone"), data=batches(), loss=smoothed).losses
    for of_rank in run_ranks(on_two_ranks, 2, tmp_path):
        for losses in of_rank:
            assert losses == pytest.approx(alone, rel=1e-5)  # float32 sums over ranks


def test_numbered_samples_of_a_program_are_read_as_the_configurations_own(tmp_path):
    write_text(tmp_path)
    own = config(tmp_path, "own")
    prepare_inputs(own, quiet=True)
    assert fit(own).losses == fit(config(tmp_path, "given"), data=open_inputs(own).train).losses


def on_machine(folder, write, **sections):
    """The refusal of this rank, whose machine holds what ``write`` puts into a folder."""
    rank = torch.distributed.get_rank()
    mine = folder / f"machine-{rank}"
    mine.mkdir(parents=True)
    write(mine, rank)
    with contextlib.chdir(mine):
        settings = config("", "run", parallel={"dp_shard": 2}, **sections)
        load_task(settings).prepare(settings, quiet=True)
        with pytest.raises(ValueError, match="fingerprints") as caught:
            Trainer(settings)
    return str(caught.value)


def other_text(mine, rank):
    write_text(mine)
    if rank:
        (mine / "text.txt").write_text("other text " * 200)


def fewer_images(mine, rank):
    """One image of the second machine is cut short: its line is left out there."""
    lines = [{"image": f"{number}.png", "prompt": "What?", "answer": f"{number}"} for number in range(8)]
    for line in lines:
        write_png(mine / line["image"], np.zeros((64, 64, 3), np.uint8))
    if rank:
        (mine / "5.png").write_bytes(b"")
    (mine / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def on_machines_with_other_data(folder):
    stream = {"name": "web", "kind": "text", "paths": ["."], "stream": True, "stream_window": 4}
    images = {"source": "jsonl", "paths": ["lines.jsonl"], "held_out": 2, "max_image_tokens": 16}
    return [
        on_machine(folder / "text", other_text),
        on_machine(folder / "stream", other_text, data={"sources": [stream]}),
        on_machine(folder / "images", fewer_images, model={"name": "qwen3_vl_debug", "seq_len": 64}, vision=images),
    ]


def test_ranks_whose_machines_hold_other_data_are_refused_alike(tmp_path):
    first, second = run_ranks(on_machines_with_other_data, 2, tmp_path)
    assert first == second
    for said, what in zip(first, ("data", "stream 'web'", "data"), strict=True):
        assert said.startswith(f"the {what} of rank 1 of 2 is not that of rank 0")
        assert "the same files at the same paths" in said


def with_other_versions(folder):
    if torch.distributed.get_rank():
        process.versions = lambda: versions() | {"titan-cp": "0.0"}
    with pytest.raises(ValueError, match="install the same version") as caught:
        Trainer(config(folder, "run", parallel={"dp_shard": 2}))
    return str(caught.value)


def test_ranks_whose_machines_have_other_versions_are_refused_alike(tmp_path):
    first, second = run_ranks(with_other_versions, 2, tmp_path)
    assert first == second
    assert first.startswith(f"titan-cp is 0.0 on rank 1 and {versions()['titan-cp']} on rank 0")


def test_a_build_of_torch_with_another_label_is_the_same_version(monkeypatch):
    monkeypatch.setattr(
        run_info.importlib.metadata, "version", lambda name: "2.11.0+cu128" if name == "torch" else "1+a"
    )
    found = versions()
    assert (found["torch"], found["titan-train"]) == ("2.11.0", "1+a")


REFUSED = {
    "no iterable": ({"data": 5}, {}, "data is int, which gives no batches"),
    "validation alone": ({"validation_data": []}, {}, "validation_data was given without data"),
    "a generator to validate on": (
        {"data": batches(), "validation_data": iter(batches())}, {"validation": {"every": 1}}, "used up after one"
    ),
    "other rows": ({"data": [(torch.zeros(2, 8, dtype=torch.long),) * 2]}, {}, r"gave tokens of \[2, 8\]"),
    "an id too large": ({"data": [(torch.full((ROWS, LENGTH), 900),) * 2]}, {}, "gave the token 900"),
    "no pair": ({"data": [torch.zeros(4, 33)]}, {}, "gave Tensor, not a batch of text"),
    "another key": ({"data": [{"input_ids": torch.zeros(4, 32), "pixels": 0}]}, {}, "has 'pixels'"),
    "an empty list": ({"data": []}, {}, "data ended after 0 samples"),
    "an optimizer": ({"data": batches(), "optimizer": torch.optim.SGD([torch.zeros(1)])}, {}, "Pass a function"),
    "other parameters": (
        {"data": batches(), "optimizer": lambda groups: torch.optim.SGD([torch.zeros(1)])}, {}, "as they are"
    ),
    "a trained tokenizer": ({"data": batches()}, {"tokenizer": {"kind": "sentencepiece", "train": True}}, "would be trained"),
    "a best validation of none": (
        {"data": batches()}, {"validation": {"every": 1}, "checkpoint": {"keep_best": True}}, "Give the Trainer validation_data"
    ),
    "z-loss": ({"loss": smoothed}, {"train": {"z_loss": 1e-4}}, "train.z_loss does not go with a loss of yours"),
    "tensor parallelism": ({"loss": smoothed}, {"parallel": {"tp": 2}}, "parallel.tp does not go"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_words(case, tmp_path):
    options, sections, words = REFUSED[case]
    with pytest.raises((ValueError, RuntimeError), match=words):
        fit(config(tmp_path, "refused", **sections), **options)


def test_a_resume_with_another_batch_is_refused_at_its_start_by_what_was_consumed(tmp_path):
    (tmp_path / "text.txt").write_text("x" * 40 * 32)  # 40 samples

    def settings(global_batch, steps):
        source = {"name": "text", "kind": "text", "paths": [str(tmp_path / "text.txt")], "max_epochs": 1}
        train, data = {"steps": steps, "global_batch": global_batch}, {"sources": [source]}
        return tiny_run(tmp_path, data=data, train=train, schedule={"warmup_steps": 1}, checkpoint={"every": 1})

    with Trainer(settings(16, 2)) as trainer:
        trainer.fit()
    with pytest.raises(ValueError, match="max_epochs=1"):
        Trainer(settings(4, 5))  # 32 and three times 4
    with Trainer(settings(4, 4)) as trainer:
        trainer.fit()
    assert trainer.step == 4


def test_a_validation_without_a_label_has_no_loss(tmp_path):
    silent = [(tokens, torch.full_like(labels, -100)) for tokens, labels in batches()]
    sections = {"validation": {"every": 1, "steps": 1, "sample_tokens": 0}}
    with Trainer(config(tmp_path, "silent", **sections), data=batches(), validation_data=silent) as trainer:
        assert math.isnan(trainer._measure_held_out()[0].loss)


def test_rows_that_sequence_parallelism_cannot_share_are_refused_by_their_length():
    rows = [(torch.zeros(ROWS, length, dtype=torch.int64),) * 2 for length in (6, 7)]
    loader = IteratedBatches(
        rows, ramp=BatchRamp((ROWS,)), dp_size=1, rows=ROWS, seq_len=8, fixed=False, vocab_size=None,
        device=torch.device("cpu"), multiple_of=2,
    )  # fmt: skip
    assert next(loader).tokens.shape == (ROWS, 6)
    with pytest.raises(ValueError, match="rows of 7 tokens"):
        next(loader)


def rows_of_two_lengths(folder):
    ids = torch.zeros(ROWS // 2, (20, 24)[torch.distributed.get_rank()], dtype=torch.int64)
    settings = config(folder, "lengths", parallel={"dp_shard": 2}, train={"steps": 2})
    with Trainer(settings, data=[(ids, ids)]) as trainer:
        trainer.fit()
    return trainer.run_dir


def test_tokens_are_those_of_rows_that_are_shorter_than_configured(tmp_path):
    run_dir = run_ranks(rows_of_two_lengths, 2, tmp_path)[0]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["tokens"] for line in steps] == [ROWS // 2 * (20 + 24)] * 2


def short_rows(folder):
    ids = [torch.randint(0, 256, (ROWS, length)) for length in (LENGTH, 30, 31)]
    with Trainer(config(folder, "short", parallel={"tp": 2}), data=[(x, x) for x in ids]) as trainer:
        trainer.fit()


def test_a_run_under_sequence_parallelism_takes_rows_of_even_lengths_only(tmp_path):
    with pytest.raises(Exception, match="ValueError: data gave rows of 31 tokens"):
        run_ranks(short_rows, 2, tmp_path)


HOLD = """
import sys, time
from pathlib import Path
from titan_train.run_folder import Lease
Lease(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_program_does_not_touch_the_folder_of_a_run_under_way_and_holds_its_own(tmp_path):
    given = config(tmp_path, "alone")
    trainer = fit(given, data=batches(), until=2)
    before = {file: file.read_bytes() for file in trainer.run_dir.iterdir() if file.is_file()}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, trainer.run_dir], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"is in use: process {holder.pid} on host "):
            Trainer(given, data=batches())
        assert {file: file.read_bytes() for file in before} == before
    finally:
        holder.kill()
        holder.communicate()
    with Trainer(given, data=batches()) as trainer:
        assert (trainer.run_dir / "lease.json").exists()
        refused = subprocess.run([sys.executable, "-c", HOLD, trainer.run_dir], capture_output=True, text=True)
        assert f"is in use: process {os.getpid()} on host " in refused.stderr
        with Trainer(given, data=batches()) as again:  # of the same process
            assert again.step == 2
    assert not (trainer.run_dir / "lease.json").exists()


def test_a_program_takes_nothing_that_a_command_staged_and_left(tmp_path):
    given = config(tmp_path, "staged")
    fit(given, data=batches(), until=2)
    stage(config(tmp_path, "staged", model={"name": "gpt_debug"}), tmp_path / "runs" / "staged")
    with Trainer(given, data=batches()) as trainer:
        assert trainer.step == 2
    assert load_config(str(trainer.run_dir / "config.toml")).model.name == "llama3_debug"
    assert not staged_folder(trainer.run_dir).exists()


def test_the_configuration_in_a_folder_of_a_programs_choice_names_that_folder(tmp_path):
    trainer = Trainer(config(tmp_path, "named"), tmp_path / "elsewhere" / "chosen", data=batches())
    trainer.close()
    assert run_folder(load_config(str(trainer.run_dir / "config.toml"))) == tmp_path / "elsewhere" / "chosen"


def test_arguments_do_not_decide_whether_a_run_can_go_on(tmp_path):
    """Which `check` would call valid, and `run` refuse."""
    narrow = config(tmp_path, "weights", train={"dtype": "bf16"}, optimizer={"weights": "bf16"})
    fit(narrow, data=batches(), until=2)
    wide = config(tmp_path, "weights")
    assert decided_by_arguments(config(tmp_path, "new"), plan_run(wide, 1))
    assert not decided_by_arguments(wide, plan_run(wide, 1))
    with pytest.raises(ValueError, match=r"optimizer\.weights='fp32'"):
        validate(wide, 1)
