"""An object store over the network: s3fs against moto's server on loopback, with real requests and real processes."""

import asyncio
import functools
import os
import signal
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from ckpt_layouts import assert_equal
from ckpt_loop import build, full_state, train
from titan_ckpt import Checkpointer, CheckpointError, TrainState
from titan_ckpt.cli import main
from titan_ckpt.steps import commit, leftovers, listing
from titan_ckpt.steps.claim import Process
from titan_ckpt.storage import files
from titan_ckpt.storage.paths import as_path
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

s3fs = pytest.importorskip("s3fs", reason="a test dependency")
moto_server = pytest.importorskip("moto.server", reason="a test dependency")

CHANGES = {"put_object", "upload_part", "create_multipart_upload", "complete_multipart_upload"}
CHANGES |= {"delete_object", "delete_objects"}
MIB = 1 << 20


def reach(port: int) -> None:
    """Have this process, and its children, find the server."""
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@pytest.fixture(scope="module")
def port():
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    kept = dict(os.environ)
    number = server._server.server_port
    reach(number)
    s3fs.S3FileSystem.clear_instance_cache()
    yield number
    s3fs.S3FileSystem.clear_instance_cache()
    os.environ.clear()
    os.environ.update(kept)
    server.stop()


@pytest.fixture
def bucket(port):
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}/run"


def state_of(fill: float, rows: int = 40) -> TrainState:
    model = nn.Linear(rows, 30)
    nn.init.constant_(model.weight, fill)
    return TrainState(model=model, rng=False, extra={"fill": fill})


def fill_of(root: str) -> tuple[int, float]:
    state = state_of(-1.0)
    step = Checkpointer(root).restore(state, verify="all")
    weight = state.model.weight.detach()
    assert bool((weight == weight[0, 0]).all())
    assert state.extra["fill"] == float(weight[0, 0])
    return step, float(weight[0, 0])


def objects(root: str) -> list[str]:
    fs = s3fs.S3FileSystem()
    fs.invalidate_cache()
    return sorted(path.partition("/run/")[2] for path in fs.find(root))


def folders(root: str) -> set[str]:
    return {name.partition("/")[0] for name in objects(root) if "/" in name}


def test_a_loop_saves_resumes_and_retains_in_s3(bucket, capsys):
    state = build()
    with Checkpointer(bucket, keep_last=2, compress="auto") as ck:
        for step in (1, 2, 3):
            train(state, 1)
            path = ck.save(step, state).path
    assert str(path).startswith(bucket)
    assert ck.steps() == [2, 3]
    want, losses = full_state(state), train(state, 2)
    got = build(seed=9)
    assert Checkpointer(bucket).restore(got, verify="all") == 3
    assert_equal(full_state(got), want)
    assert train(got, 2) == losses
    assert [name for name in objects(bucket) if "/" not in name] == ["commit-00000003.json"]
    assert not [name for name in objects(bucket) if "/." in name], "savers' notes are gone"
    assert main(["ls", bucket]) == 0
    assert main(["verify", bucket]) == 0
    assert "2 valid steps, 0 invalid" in capsys.readouterr().out


def save_sharded(port: int, url: str) -> list[int]:
    reach(port)
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, 3.0)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with Checkpointer(url, keep_last=1, async_=True) as ck:
        for step in (1, 2):
            ck.save(step, TrainState(model=model, rng=False))
    return ck.steps()


def test_asynchronous_saves_of_two_ranks_commit_in_s3(port, bucket):
    assert run_ranks(save_sharded, 2, port, bucket) == [[2], [2]]
    state = TrainState(model=nn.Linear(64, 64), rng=False)
    assert Checkpointer(bucket).restore(state) == 2
    assert bool((state.model.weight == 3.0).all())


def test_of_two_writers_that_commit_at_once_one_wins_and_the_other_is_told(bucket, monkeypatch):
    ours, theirs = Checkpointer(bucket), Checkpointer(bucket)
    ours.save(1, state_of(1.0))
    real = commit.take_turn

    def meanwhile(folder, serial):
        monkeypatch.setattr(commit, "take_turn", real)
        theirs.save(3, state_of(3.0))
        return real(folder, serial)

    monkeypatch.setattr(commit, "take_turn", meanwhile)
    with pytest.raises(
        CheckpointError, match=r"another writer committed step-00000003.* at the same time.* not committed"
    ):
        ours.save(2, state_of(2.0))
    assert Checkpointer(bucket).steps() == [1, 3]
    assert fill_of(bucket) == (3, 3.0)
    assert len(folders(bucket)) == 2, "the loser's files are gone"
    ours.save(4, state_of(4.0))
    assert Checkpointer(bucket).steps() == [1, 3, 4]


def test_many_writers_at_once_never_share_a_place_in_the_order(bucket):
    # Each has a folder of its own: what they compete for is the serial.
    root = as_path(bucket)
    Checkpointer(bucket).save(1, state_of(1.0))
    found = listing.open_steps(root, lambda path, err: None)[0]
    index, barrier = found.read_index(), threading.Barrier(6)

    def commit_one(step: int) -> int | None:
        folder, save_id = commit.begin_save(root, step, Process.of(os.getpid()))
        barrier.wait()
        try:
            commit.commit_save(
                folder, step=step, save_id=save_id, world_size=1, files=(), versions={}, metrics={},
                index=type(index)((), {"model": {}, "optim": {}, "extra": {}}, {}),
            )  # fmt: skip
        except FileExistsError as err:
            assert "another writer" in str(err)  # noqa: PT017 - in a thread
            return None
        return step

    with ThreadPoolExecutor(6) as pool:
        won = [step for step in pool.map(commit_one, range(2, 8)) if step]
    assert won
    steps = listing.open_steps(root, lambda path, err: None)
    serials = [manifest.serial for manifest in steps if manifest.step != 1]
    assert len(serials) == len(set(serials)) == len(won)


def test_a_turn_whose_writer_is_gone_holds_up_nobody(bucket):
    ck = Checkpointer(bucket)
    ck.save(1, state_of(1.0))
    root = as_path(bucket)
    commit.create_once(root / "commit-00000002.json", b'{"folder": "step-00000002.r0.0123456789abcdef", "began": 9e9}')
    ck.save(2, state_of(2.0))
    assert fill_of(bucket) == (2, 2.0)
    assert [name for name in objects(bucket) if "/" not in name and name != ".lock"] == ["commit-00000003.json"]
    commit.create_once(root / "commit-00000004.json", b"not JSON")
    ck.save(3, state_of(3.0))
    assert ck.steps() == [1, 2, 3]


def test_a_writer_that_looked_long_ago_does_not_take_a_turn_that_is_over(bucket):
    ck = Checkpointer(bucket, keep_last=1)
    for step in (1, 2, 3):
        ck.save(step, state_of(float(step)))
    folder, _ = commit.begin_save(as_path(bucket), 9, Process.of(os.getpid()))
    with pytest.raises(FileExistsError, match="another writer"):
        commit.take_turn(folder, 2)
    assert [name for name in objects(bucket) if "/" not in name and name != ".lock"] == ["commit-00000003.json"]


class Requests:
    """Counts the requests of a kind that are under way at the same time."""

    def __init__(self, monkeypatch, kind: str) -> None:
        self.now = self.most = self.total = 0
        real = s3fs.S3FileSystem._call_s3

        async def call(fs, method, *args, **kwargs):
            if method != kind:
                return await real(fs, method, *args, **kwargs)
            self.now, self.total = self.now + 1, self.total + 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.02)
            try:
                return await real(fs, method, *args, **kwargs)
            finally:
                self.now -= 1

        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)


def test_parts_of_a_file_are_sent_and_read_at_the_same_time(bucket, monkeypatch):
    rows = 8 * MIB // (4 * 30)
    state = state_of(5.0, rows)
    with torch.no_grad():
        state.model.weight.copy_(torch.arange(state.model.weight.numel()).view_as(state.model.weight))
    put = functools.partialmethod(s3fs.S3FileSystem._put_file, chunksize=5 * MIB)
    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", put)
    s3fs.S3FileSystem.clear_instance_cache()  # what is made now has it
    sent = Requests(monkeypatch, "upload_part")
    state.extra["big"] = torch.arange(3 * MIB)
    Checkpointer(bucket).save(1, state)
    assert sent.total >= 5, "24 MiB in parts of 5"
    assert sent.most >= 2
    monkeypatch.setattr(files, "_FETCH_BYTES", 4 * MIB)
    read = Requests(monkeypatch, "get_object")
    again = state_of(0.0, rows)
    again.extra["big"] = torch.zeros(3 * MIB, dtype=torch.int64)
    Checkpointer(bucket).restore(again)
    assert read.most >= 2
    assert bool((again.model.weight == state.model.weight).all())
    assert bool((again.extra["big"] == state.extra["big"]).all())


def save_and_die(port: int, url: str, at: int) -> int:
    """Save step 2 and be killed in place of change number ``at``; how many there are if it is not."""
    reach(port)
    made = 0
    real = s3fs.S3FileSystem._call_s3

    async def call(fs, method, *args, **kwargs):
        nonlocal made
        if method in CHANGES:
            if made == at:
                os.kill(os.getpid(), signal.SIGKILL)
            made += 1
        return await real(fs, method, *args, **kwargs)

    s3fs.S3FileSystem._call_s3 = call
    Checkpointer(url, keep_last=1).save(2, state_of(2.0))
    return made


def kill_at(port: int, root: str, stage: int) -> tuple[int, int | None]:
    """Kill a save of step 2 at a stage; the step that is there then, and the number of stages if none was killed."""
    with Checkpointer(root) as ck:
        ck.save(1, state_of(1.0))
    (changes,) = run_ranks(save_and_die, 1, port, root, stage, allow_death=True)
    step, fill = fill_of(root)
    assert step == fill
    leftovers.sweep(as_path(root))
    assert {name.partition(".")[0] for name in folders(root)} <= {"step-00000001", "step-00000002"}
    assert all((as_path(root) / name / "MANIFEST.json").exists() for name in folders(root))
    with Checkpointer(root, keep_last=1) as ck:
        ck.save(3, state_of(3.0))
    assert ck.steps() == [3]
    assert len(folders(root)) == 1
    return step, changes


@pytest.mark.parametrize(("stage", "left"), [(7, 1), (10, 2)], ids=["manifest", "retention"])
def test_a_killed_writer_leaves_a_whole_step_or_none_and_its_garbage_is_collected(port, bucket, stage, left):
    assert kill_at(port, bucket, stage) == (left, None)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_writer_killed_at_every_stage_leaves_a_whole_step_or_none(port, bucket):
    found, stages, changes = [], 0, None
    while changes is None:
        step, changes = kill_at(port, f"{bucket}{stages}/run", stages)
        found.append(step)
        stages += 1
    assert stages > 10
    assert found == sorted(found)
    assert set(found) == {1, 2}


def save_in_background(port: int, url: str, victim: str, delay_s: float) -> str:
    reach(port)
    ck = Checkpointer(url, async_=True)
    ck.save(1, state_of(1.0))
    ck.wait()
    job = ck.save(2, state_of(2.0))
    if victim == "trainer":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(delay_s, os.kill, (ck._saver.process.pid, signal.SIGKILL)).start()
    try:
        job.wait(60)
    except CheckpointError as err:
        return str(err)
    return "committed"


def test_a_step_accepted_by_a_saver_is_committed_though_the_trainer_is_killed(port, bucket):
    run_ranks(save_in_background, 1, port, bucket, "trainer", 0.0, allow_death=True)
    assert fill_of(bucket) == (2, 2.0)  # waits for the saver that lives on


@pytest.mark.parametrize("delay_s", [0.05])
def test_a_saver_killed_while_it_uploads_leaves_a_whole_step_or_none(port, bucket, delay_s):
    (end,) = run_ranks(save_in_background, 1, port, bucket, "saver", delay_s)
    step, fill = fill_of(bucket)
    assert step == fill
    assert step == 2 if end == "committed" else "ended while it wrote step 2" in end
    leftovers.sweep(as_path(bucket))
    assert len(folders(bucket)) == step


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("round", range(40))
def test_forty_kills_of_a_saver_at_random_moments_leave_a_whole_step_or_none(port, bucket, round):
    test_a_saver_killed_while_it_uploads_leaves_a_whole_step_or_none(
        port, bucket, float(np.random.default_rng(round).uniform(0, 0.4))
    )
