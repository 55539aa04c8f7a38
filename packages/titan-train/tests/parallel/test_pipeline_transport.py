"""Stages exchange tensors from device to device, by channels of the device's backend; here the CPU's, which is gloo."""

import composition
import pytest
import torch
from composition_matrix import MODELS
from titan_pipeline.runtime import DeviceTransport, SocketTransport
from titan_testing import run_ranks
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


def test_the_device_decides():
    schedule, mesh = plan_schedule(build.Config().pipeline, pp=2, microbatches=2), object()
    seen = []
    device = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "device_transport", lambda *args: seen.append(args))
        pipeline.make_transport(schedule, mesh, device, 60.0)
    assert seen == [(schedule, mesh, device, 60.0)]
