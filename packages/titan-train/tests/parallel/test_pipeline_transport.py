"""Stages exchange tensors from device to device, by channels of the device's backend; here the CPU's, which is gloo."""

import dataclasses
from unittest.mock import MagicMock

import composition
import pytest
import torch
from composition_matrix import MODELS
from titan_pipeline import build_schedule
from titan_pipeline.runtime import DeviceTransport, SocketTransport, TiedWeight
from titan_testing import run_ranks
from titan_train.config import PipelineConfig
from titan_train.parallel import apply as build
from titan_train.parallel import pipeline
from titan_train.parallel.layout.run import plan_schedule

PP_FSDP = MODELS["dense"] | {"parallel": {"pp": 2, "dp_shard": 2}}
STEPS = 2


def train(folder, schedule, name):
    """Losses and gradient norms with the transport of that name, and the kind that was made."""
    make, made = getattr(pipeline, name), []
    build.make_transport = lambda *args: made.append(make(*args)) or made[-1]
    losses, norms, _, gradients = composition.run(
        folder, f"{name}-{schedule}", PP_FSDP | {"pipeline": {"schedule": schedule}}, steps=STEPS
    )
    return losses, norms, gradients, type(made[0])


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_channels_between_devices_carry_the_same_bits(folder, schedule):
    plain = run_ranks(train, 4, folder, schedule, "make_transport", timeout_s=90)
    device = run_ranks(train, 4, folder, schedule, "device_transport", timeout_s=90)
    for (losses, norms, gradients, kind), (got_losses, got_norms, got_gradients, got_kind) in zip(
        plain, device, strict=True
    ):
        assert (kind, got_kind) == (SocketTransport, DeviceTransport)
        assert len(losses) == STEPS
        assert got_losses == losses
        assert got_norms == norms
        assert got_gradients.keys() == gradients.keys()
        assert all(torch.equal(got_gradients[name][2], gradients[name][2]) for name in gradients)


def test_a_file_out_of_order_is_refused_where_one_process_order_is_asked_for(tmp_path):
    text = build_schedule("gpipe", 2, 2).to_text()
    for stage in (0, 1):
        text = text.replace(f"{stage}B0 {stage}B1", f"{stage}B1 {stage}B0")
    (tmp_path / "s.txt").write_text(text)
    config = PipelineConfig(schedule=str(tmp_path / "s.txt"))
    assert plan_schedule(config, pp=2, microbatches=2).num_ranks == 2
    with pytest.raises(ValueError, match=r"rank 0, position 3 \(0B0\).*deterministic=False"):
        plan_schedule(dataclasses.replace(config, deterministic=True), pp=2, microbatches=2)


def test_the_device_decides():
    schedule, mesh = plan_schedule(build.Config().pipeline, pp=2, microbatches=2), object()
    seen = []
    device = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "device_transport", lambda *args: seen.append(args))
        pipeline.make_transport(schedule, mesh, device, 60.0)
    assert seen == [(schedule, mesh, device, 60.0, ())]


@pytest.mark.parametrize(("placement", "name"), [(range(4), "1f1b"), ((0, 1, 2, 3, 3, 2, 1, 0), "zbv")])
def test_ranks_that_share_an_embedding_have_a_channel_for_its_gradients(placement, name):
    schedule = build_schedule(name, 4, 4)
    tied, seen = [TiedWeight({0: "embed.weight", len(placement) - 1: "head.weight"})], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "DeviceTransport", lambda *args, also_between, **options: seen.append(also_between))
        pipeline.device_transport(schedule, MagicMock(), torch.device("cuda"), 60.0, tied)
    assert schedule.placement == tuple(placement)
    assert [(0, placement[-1]) in between for between in seen] == [True]
