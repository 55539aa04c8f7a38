"""The images that validations sample are those of one process under every layout."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import composition
import pytest
import torch
import torch.distributed as dist
from composition import joined
from test_diffusion import EVEN, TINY, filled
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.config.parallel import ParallelConfig
from titan_train.models.flux.model import Flux
from titan_train.task import TaskInputs
from titan_train.tasks.diffusion import task as diffusion
from titan_train.train import Trainer
from titan_train.train.whole_model import sample

# 3 images and as many without their caption: 6 rows, which no number of microbatches below divides
SAMPLED = joined(
    TINY,
    EVEN,
    {
        "diffusion": {**EVEN["diffusion"], "sample_images": 3, "sample_steps": 3, "sample_scale": 2.0},
        "validation": {"every": 1, "steps": 1},
        "train": {"steps": 2, "global_batch": 8},
    },
)
TP = {"tp": 2, "sequence_parallel": False}
LAYOUTS = {
    "fsdp2": (2, {}),
    "tp2": (2, {"parallel": TP}),
    "cp2 allgather": (2, {"parallel": {"cp": 2}, "context": {"method": "allgather"}}),
    "cp2 ulysses": (2, {"parallel": {"cp": 2}, "context": {"method": "ulysses"}}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "pp2 zbv": (2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}}),
    "hsdp2x2": (4, {"parallel": {"dp_replicate": 2, "mode": "hsdp"}}),
    "fsdp2 x tp2": (4, {"parallel": TP}),
    "fsdp2 x cp2": (4, {"parallel": {"cp": 2}}),
    "fsdp2 x pp2": (4, {"parallel": {"pp": 2}}),
    "tp2 x cp2": (4, {"parallel": {"cp": 2, **TP}}),
    "tp2 x pp2": (4, {"parallel": {"pp": 2, **TP}}),
    "cp2 x pp2": (4, {"parallel": {"pp": 2, "cp": 2}}),
    "compiled cp2 x pp2": (4, {"parallel": {"pp": 2, "cp": 2}, "compile": {"enabled": True, "backend": "aot_eager"}}),
}
FAST = ("cp2 allgather", "pp2")


def sampled(folder, name, sections):
    """Train two steps; returns the losses, and the latents that this rank was given after each."""
    found = []
    sample = diffusion.sample_latents

    def kept(*args, **kwargs):
        found.append(sample(*args, **kwargs))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flux, "init_weights", filled)
        patch.setattr(diffusion, "sample_latents", kept)
        with Trainer(parse_config(composition.tree(folder, name, sections))) as trainer:
            trainer.fit()
            return trainer.losses, found


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return run_ranks(sampled, 1, folder, "one", SAMPLED, timeout_s=170)[0], Path(folder)


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_samples_under_a_layout_are_those_of_one_process(name, single, tmp_path):
    (losses, alone), folder = single
    assert len(alone) == 2
    assert alone[0].abs().mean() > 0.1
    assert (alone[0] - alone[1]).abs().max() > 1e-3  # training changes them
    ranks, sections = LAYOUTS[name]
    for found, latents in run_ranks(sampled, ranks, tmp_path, "many", joined(SAMPLED, sections), timeout_s=170):
        assert found == pytest.approx(losses, abs=2e-5)  # sampling in between changes nothing
        # float32 sums in another order, through 3 steps of 4 blocks; the second after a step of AdamW, which amplifies it
        assert (latents[0] - alone[0]).abs().max() <= 3e-4
        assert (latents[1] - alone[1]).abs().max() <= 3e-4
    described = [json.loads((f / "samples" / "step_00000002.json").read_text())
                 for f in (folder / "runs" / "one", tmp_path / "runs" / "many")]  # fmt: skip
    assert described[0] == described[1]
    assert (tmp_path / "runs" / "many" / "samples" / "step_00000002.png").is_file()
    assert torch.isfinite(alone[1]).all()


def left(_):
    """When this rank finished its part of a sample, and when it went on."""
    finished = []

    class Inputs(TaskInputs):
        def sample(self, model, run_dir, step):
            time.sleep(0.5 if dist.get_rank() == 0 else 0.0)  # it decodes and writes
            finished.append(time.monotonic())

    model = SimpleNamespace(parts=[torch.nn.Linear(1, 1)], context=None)
    sample(Inputs(), model, None, ParallelConfig(), Path(), 1)
    return finished[0], time.monotonic()


def test_no_rank_goes_on_to_the_next_step_before_the_one_that_writes_samples(tmp_path):
    (written, _), (_, other) = run_ranks(left, 2, tmp_path)
    assert other >= written
