"""Transports over process groups: the device's path, a peer that dies, and channels that are clean after a failure."""

import copy
import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("titan_testing")

import torch.distributed as dist  # noqa: E402
from titan_pipeline import FAMILIES, Schedule, build_schedule  # noqa: E402
from titan_pipeline.runtime import (  # noqa: E402
    DeviceTransport,
    Executor,
    GlooTransport,
    PipelineAborted,
    TorchStage,
    host_transport,
)
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

WIDTH = 6


@pytest.fixture(autouse=True)
def one_thread():
    """Ranks run with one thread; so does the reference, since a kernel may sum in another order on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build_layers(num_stages):
    torch.manual_seed(1)
    return [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)).double()
        for _ in range(num_stages)
    ]


def square_sum(output, target):
    return ((output - target) ** 2).sum()


def batch(m):
    """Every microbatch another number of rows."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1 + k % 3, WIDTH, generator=generator, dtype=torch.float64) for k in range(m)]


def reference(num_stages, m):
    layers = build_layers(num_stages)
    model, total = nn.Sequential(*copy.deepcopy(layers)), 0.0
    for x in batch(m):
        loss = square_sum(model(x), x)
        (loss / m).backward()
        total += loss.item() / m
    return total, [[p.grad for p in stage.parameters()] for stage in model]


def device_transport(schedule, device="cpu", replicas=1):
    mesh = init_device_mesh("cpu", (replicas, schedule.num_ranks), mesh_dim_names=("dp", "pp"))
    return DeviceTransport(mesh, "pp", schedule.placement, torch.device(device))


def run_schedules(texts, kind, device="cpu"):
    """Two steps and an evaluation of each schedule; returns losses and gradients."""
    results = []
    for text in texts:
        schedule = Schedule.from_text(text)
        if kind == "device":
            transport = device_transport(schedule, device)
        else:
            transport = GlooTransport()
        layers = build_layers(schedule.num_stages)
        mine = schedule.stages_of(transport.rank)
        stages = [TorchStage(layers[s].to(device), s, loss=square_sum) for s in mine]
        executor = Executor(schedule, stages, transport, deterministic=True)
        data = [x.to(device) for x in batch(schedule.num_microbatches)]
        for _ in range(2):
            for stage in stages:
                stage.module.zero_grad()
            loss = executor.step(data, data).loss
        results.append(
            (
                loss,
                executor.evaluate(data, data).loss,
                {s: [p.grad.cpu() for p in layers[s].parameters()] for s in mine},
            )
        )
    return results


def check(by_rank, schedules, exact=True):
    """Bits on the CPU, where the ranks call the kernels of the reference on its shapes. On a GPU float64 within rounding:
    sums of fewer than 100 terms of order one in another order, each rounded by at most 2^-53."""
    for k, schedule in enumerate(schedules):
        loss, grads = reference(schedule.num_stages, schedule.num_microbatches)
        for results in by_rank:
            got, evaluated, by_stage = results[k]
            assert got == evaluated == pytest.approx(loss, rel=1e-12)
            for stage, mine in by_stage.items():
                for g, e in zip(mine, grads[stage], strict=True):
                    torch.testing.assert_close(g, e, rtol=0, atol=0 if exact else 1e-12)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_device_transport_reproduces_one_process_for_every_family(ranks):
    """On the CPU its channels are gloo groups; the order of posts, headers and draining are the same code."""
    schedules = [build_schedule(name, ranks, 2 * ranks) for name in FAMILIES]
    check(testing.run_ranks(run_schedules, ranks, [s.to_text() for s in schedules], "device"), schedules)


@pytest.mark.multi_gpu
def test_the_device_transport_works_with_nccl():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    schedules = [build_schedule(name, 2, 4) for name in FAMILIES]
    by_rank = testing.run_ranks(_on_gpus, 2, [s.to_text() for s in schedules])
    check(by_rank, schedules, exact=False)


def _on_gpus(texts):
    torch.cuda.set_device(dist.get_rank())
    return run_schedules(texts, "device", f"cuda:{dist.get_rank()}")


def _two_pipelines(text):
    schedule = Schedule.from_text(text)
    transport = device_transport(schedule, replicas=2)
    layers = build_layers(schedule.num_stages)
    stages = [TorchStage(layers[s], s, loss=square_sum) for s in schedule.stages_of(transport.rank)]
    data = batch(schedule.num_microbatches)
    return Executor(schedule, stages, transport).step(data, data).loss


def test_two_pipelines_of_one_job_have_channels_of_their_own():
    schedule = build_schedule("zbv", 2, 4)
    loss, _ = reference(4, 4)
    for got in testing.run_ranks(_two_pipelines, 4, schedule.to_text()):
        assert got == pytest.approx(loss, rel=1e-12)


def _misfits():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="none of the mesh's axes"):
        DeviceTransport(mesh, "tp", (0, 1), cpu)
    with pytest.raises(ValueError, match="the placement uses 4"):
        DeviceTransport(mesh, "pp", (0, 1, 2, 3), cpu)
    with pytest.raises(ValueError, match="has 1 of 2 ranks"):
        DeviceTransport(mesh["dp"], "dp", (0,), cpu)
    with pytest.raises(ValueError, match="Give ranks of the pipeline, 0 to 1"):
        DeviceTransport(mesh, "pp", (0, 1), cpu, also_between=[(0, 2)])


def test_meshes_that_do_not_fit_are_refused():
    testing.run_ranks(_misfits, 2)


class Breaking(TorchStage):
    """Raises, or dies, in the forward of one microbatch."""

    at = None
    die = False

    def forward(self, microbatch, *args):
        if microbatch == self.at:
            if self.die:
                os.kill(os.getpid(), signal.SIGKILL)
            self.at = None
            raise ArithmeticError("the stage broke")
        return super().forward(microbatch, *args)


def _break(text, kind, culprit, die):
    schedule = Schedule.from_text(text)
    if kind == "device":
        transport = device_transport(schedule)
    else:
        transport = GlooTransport() if kind == "gloo" else host_transport()
    layers = build_layers(schedule.num_stages)
    stages = [Breaking(layers[s], s, loss=square_sum) for s in schedule.stages_of(transport.rank)]
    if transport.rank == culprit:
        stages[0].at, stages[0].die = 3, die
    executor = Executor(schedule, stages, transport, deterministic=True)
    data = batch(schedule.num_microbatches)
    dist.barrier()
    began = time.monotonic()
    try:
        executor.step(data, data)
        said = "nothing"
    except (PipelineAborted, ArithmeticError) as err:
        said = str(err)
    took = time.monotonic() - began
    if die:
        dist.destroy_process_group()  # nobody can meet the dead rank in a last barrier
        return took, said
    executor.reset()
    for stage in stages:
        stage.module.zero_grad()
    loss = executor.step(data, data).loss
    return took, said, loss, {s.index: [p.grad for p in s.module.parameters()] for s in stages}


@pytest.mark.parametrize(("name", "culprit"), [("zbv", 1), ("1f1b", 2), ("interleaved_zb", 0)])
def test_device_channels_are_clean_after_a_failure(name, culprit):
    schedule = build_schedule(name, 3, 6)
    loss, grads = reference(schedule.num_stages, 6)
    results = testing.run_ranks(_break, 3, schedule.to_text(), "device", culprit, False)
    for took, said, got, by_stage in results:
        assert took < 2
        assert "the stage broke" in said
        assert got == pytest.approx(loss, rel=1e-12)
        for stage, mine in by_stage.items():
            assert all(torch.equal(g, e) for g, e in zip(mine, grads[stage], strict=True))


@pytest.mark.parametrize(
    ("kind", "name", "culprit"),
    [(kind, *case) for kind in ("gloo", "device", "sockets") for case in (("1f1b", 2), ("zbv", 0))],
)
def test_a_killed_rank_is_named_by_all_others_in_under_two_seconds(kind, name, culprit):
    schedule = build_schedule(name, 4, 8)
    results = testing.run_ranks(_break, 4, schedule.to_text(), kind, culprit, True, allow_death=True)
    assert results[culprit] is None
    for rank, result in enumerate(results):
        if rank != culprit:
            took, said = result
            print(f"rank {rank} after {took:.3f} s: {said[:90]}")
            assert took < 2
            assert f"rank {culprit} failed" in said
