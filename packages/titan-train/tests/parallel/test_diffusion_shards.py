"""Runs on shards whose files hold different numbers of samples, under layouts."""

import composition
import numpy as np
import pytest
import torch
from composition import joined
from composition_check import assert_as_one_process, assert_continues
from test_diffusion import EVEN, TINY, filled, run
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.models.flux.model import Flux
from titan_train.task import load_task
from titan_train.tasks.diffusion.shards.features import SampleSizes
from titan_train.tasks.diffusion.shards.shard import write_folder_shard, write_tar_shard, write_tensors
from titan_train.train import Trainer

SIZES = SampleSizes(grid=4, channels=48, text_tokens=4, text_dim=64, pooled_dim=32)
COUNTS = {"train": (7, 1, 5), "validation": (5, 1, 3)}
"""Samples of each file; the second is a tar file."""
TP = {"tp": 2, "sequence_parallel": False}
LAYOUTS = {
    "cp2": (2, {"parallel": {"cp": 2}}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "fsdp2": (2, {}),
    "fsdp2 x cp2": (4, {"parallel": {"cp": 2}}),
    "tp2 x pp2": (4, {"parallel": {"pp": 2, **TP}}),
    "hsdp2x2": (4, {"parallel": {"dp_replicate": 2, "mode": "hsdp"}}),
}
FAST = ("cp2",)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """With a variance: a latent is drawn when it is read."""
    folder = tmp_path_factory.mktemp("shards")
    draw = np.random.default_rng(0)
    for part, counts in COUNTS.items():
        for number, count in enumerate(counts):
            samples = [
                {name: draw.standard_normal(shape).astype(np.float16) for name, shape in SIZES.shapes().items()}
                for _ in range(count)
            ]
            save, suffix = (write_tar_shard, "tar") if number == 1 else (write_folder_shard, "safetensors")
            save(folder / f"{part}-{number:05}.{suffix}", samples, ["a caption"] * count)
    empty = {name: np.full(SIZES.shapes()[name], 0.5, np.float16) for name in ("text", "pooled")}
    write_tensors(folder / "empty.safetensors", empty)
    source = {"source": "shards", "path": str(folder), "latent_scale": 0.7, "latent_shift": 0.1}
    return joined(TINY, EVEN, {"diffusion": {**EVEN["diffusion"], **source}, "validation": {"every": 0, "steps": 2}})


@pytest.fixture(scope="module")
def single(shards, tmp_path_factory):
    return run_ranks(run, 1, tmp_path_factory.mktemp("one"), "one", shards, timeout_s=170)[0]


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_shards_under_a_layout_give_the_losses_and_gradients_of_one_process(name, shards, single, tmp_path):
    ranks, layout = LAYOUTS[name]
    results = run_ranks(run, ranks, tmp_path, "many", joined(shards, layout), timeout_s=170)
    assert_as_one_process(results, single)
    for *_, held_out, _ in results:
        assert held_out[1] == pytest.approx(single[2][1], abs=2e-5)


def validated(folder, sections):
    """The validation of a fresh model, as the trainer reports it, and the error of each of its samples."""
    config = parse_config(composition.tree(folder, "r", sections))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flux, "init_weights", filled)
        seen = composition.Seen()
        with Trainer(config, callbacks=[seen]) as trainer:
            trainer._validate()
            errors = []
            if trainer.mesh is None or trainer.mesh.layout.num_ranks == 1:
                source = load_task(config).open(config).validation
                for number in range(config.validation.steps * config.train.global_batch):
                    batch = source.build_batch(np.array([number]), ignore_index=-100, samples_consumed=0)
                    with torch.no_grad():
                        velocity = trainer.model.parts[0](*batch.inputs, **batch.keywords)
                    errors.append(float((velocity - batch.target.velocity).double().square().mean()))
            return (seen.validations[0].loss, seen.validations[0].tokens), errors


def test_validation_over_files_of_different_sizes_neither_hangs_nor_weighs_files_or_ranks(shards, tmp_path):
    """Every rank takes as many samples, by number over all files; a mean of ranks' means of their files is another number."""
    (found,) = run_ranks(validated, 1, tmp_path / "one", shards, timeout_s=170)
    (loss, count), errors = found
    assert count == 16 * 16 * 48  # 16 samples: the 9 held-out ones, then again from the first
    assert loss == pytest.approx(np.mean(errors), rel=1e-6)
    for other, _ in run_ranks(validated, 2, tmp_path / "two", shards, timeout_s=170):
        assert other[0] == pytest.approx(loss, rel=1e-6)
        assert other[1] == count
    # what ranks with a file of their own would report: five samples on one, one on the other, and a mean of the two means
    naive = np.mean([np.mean(errors[:5]), errors[5]])
    assert abs(naive - np.mean(errors[:6])) > 1e-3 * loss


@pytest.mark.slow
def test_a_run_continues_in_the_middle_of_a_file_on_another_layout_and_bitwise_on_its_own(shards, tmp_path):
    """After one step 8 of 13 samples are taken: the epoch and each file are begun."""
    assert_continues(
        tmp_path, shards, joined(shards, {"parallel": {"cp": 2}}), joined(shards, {"parallel": {"pp": 2, **TP}}), 1
    )
