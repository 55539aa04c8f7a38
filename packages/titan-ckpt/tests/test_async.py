import dataclasses
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ckpt_loop import build, full_state, train
from titan_ckpt import Checkpointer, CheckpointError, TrainState
from titan_ckpt.background.arena import Arena, staging_point
from titan_ckpt.format.names import Entry
from titan_ckpt.steps import commit
from titan_ckpt.steps.claim import Process
from titan_testing import run_ranks
from titan_testing.contexts import fake_contexts
from torch import nn


def assert_bitwise(got, want):
    assert got.keys() == want.keys()
    assert not [name for name in want if not torch.equal(got[name], want[name])]


@pytest.mark.parametrize("overlap", [False, True], ids=["staged-at-once", "overlapped"])
def test_asynchronous_saves_hold_the_state_at_the_call_not_later(tmp_path, overlap):
    with Checkpointer(tmp_path, async_=True, overlap=overlap, keep_last=2) as ck:
        state = build()
        want = {}
        for step in range(1, 5):
            train(state, 1)
            want[step] = full_state(state)
            job = ck.save(step, state)
            with ck.guard():
                assert job.staged
            with torch.no_grad():
                for param in state.model.parameters():
                    param.add_(1.0)  # after the call, while the saver writes
        assert job.wait(30) == tmp_path / "step-00000004"
    assert Checkpointer(tmp_path).steps() == [3, 4]
    got = build(seed=9)
    Checkpointer(tmp_path).restore(got)
    assert_bitwise(full_state(got), want[4])


def test_a_saver_learns_of_every_change_of_the_states_structure(tmp_path):
    states = [
        TrainState(model=nn.Linear(3, 5), rng=False),
        TrainState(model=nn.Linear(3, 5), rng=False),  # the same structure: nothing new is sent
        TrainState(model=nn.Linear(40, 50), rng=False, extra={"table": torch.ones(3000)}),
        TrainState(model=nn.Linear(4, 5), rng=False),  # fits into the arena there is
        TrainState(model=nn.Linear(40, 50, dtype=torch.bfloat16), rng=False),
    ]
    with Checkpointer(tmp_path, async_=True) as ck:
        for step, state in enumerate(states):
            ck.save(step, state)
        ck.wait()
        for step, state in enumerate(states):
            want = full_state(TrainState(model=state.model, optim=torch.optim.SGD(state.model.parameters())))
            with torch.no_grad():
                for param in state.model.parameters():
                    param.fill_(9)
            ck.restore(state, step)
            got = full_state(TrainState(model=state.model, optim=torch.optim.SGD(state.model.parameters())))
            assert_bitwise(got, want)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_checkpointer_dropped_without_close_ends_its_saver_and_frees_the_arena(tmp_path):
    ck = Checkpointer(tmp_path, async_=True)
    ck.save(1, TrainState(model=nn.Linear(64, 64), rng=False)).wait(30)
    saver, arena = ck._saver.process, ck._saver._arena.fd
    del ck
    gc.collect()
    deadline = time.monotonic() + 20
    while saver.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not saver.alive
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(arena)


def test_a_busy_saver_makes_the_next_save_wait_or_skip(tmp_path):
    state = TrainState(model=nn.Linear(64, 64), rng=False)
    with Checkpointer(tmp_path / "skip", async_=True, on_busy="skip") as ck:
        first = ck.save(1, state)
        saver = ck._saver.process.pid
        os.kill(saver, signal.SIGSTOP)
        try:
            if not first.done:
                second = ck.save(2, state)
                assert second.skipped
                with pytest.raises(CheckpointError, match="still in flight"):
                    second.wait(1)
        finally:
            os.kill(saver, signal.SIGCONT)
        first.wait(30)
        assert not ck.save(3, state).skipped
    assert ck.steps() == [1, 3]


def test_a_failed_background_save_is_raised_by_the_next_call_and_the_one_after_works(tmp_path):
    state = TrainState(model=nn.Linear(64, 64), rng=False)
    ck = Checkpointer(tmp_path, async_=True)
    ck.save(1, state).wait(30)
    job = ck.save(2, state)
    os.kill(ck._saver.process.pid, signal.SIGKILL)
    while not job.done:
        time.sleep(0.01)
    ck._saver._child.wait()  # a killed process may live on for a moment
    if job.error is not None:  # it may have been faster than the signal
        assert ck.last_error is not None
        with pytest.raises(CheckpointError, match="ended while it wrote step 2"):
            ck.save(3, state)
    assert 1 in ck.steps()
    ck.save(4, state).wait(30)
    ck.close()
    assert ck.latest() == 4


def test_the_saver_process_does_not_import_torch_and_stays_small(tmp_path):
    ck = Checkpointer(tmp_path, async_=True)
    ck.save(1, TrainState(model=nn.Linear(8, 8), rng=False)).wait(30)
    pid = ck._saver.process.pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(fields["RssAnon"].split()[0]) < 40_000  # KiB; measured 12 to 15 MB
    ck.close()


TRAINER = """
import os, signal, sys, torch
from titan_ckpt import Checkpointer, TrainState
model = torch.nn.Linear(1024, 1024)
torch.nn.init.constant_(model.weight, 5.0)
ck = Checkpointer(sys.argv[1], async_=True, overlap=sys.argv[2] == "overlapped")
job = ck.save(1, TrainState(model=model, rng=False))
with ck.guard():
    assert job.staged
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["staged-at-once", "overlapped"])
def test_an_accepted_step_is_committed_though_the_trainer_is_killed_at_once(tmp_path, how):
    done = subprocess.run([sys.executable, "-c", TRAINER, str(tmp_path), how], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    model = nn.Linear(1024, 1024)
    ck = Checkpointer(tmp_path)  # waits for the saver that lives on
    assert ck.restore(TrainState(model=model, rng=False)) == 1
    assert bool((model.weight == 5.0).all())


def save_async(root: str) -> list[int]:
    state = TrainState(model=nn.Linear(16, 16), rng=False)
    with Checkpointer(root, async_=True, keep_last=2) as ck:
        for step in (1, 2, 3):
            ck.save(step, state)
    return ck.steps()


def test_savers_of_several_ranks_meet_in_the_folder(tmp_path):
    assert run_ranks(save_async, 2, str(tmp_path)) == [[2, 3], [2, 3]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    assert not list((tmp_path / "step-00000003").glob(".*"))


def lose_a_saver(root: str) -> str:
    state = TrainState(model=nn.Linear(16, 16), extra={"rank": 0})
    ck = Checkpointer(root, async_=True)
    ck.save(1, state)
    ck.wait()
    if torch.distributed.get_rank() == 1:
        os.kill(ck._saver.process.pid, signal.SIGSTOP)
    ck.save(2, state)
    if torch.distributed.get_rank() == 1:
        os.kill(ck._saver.process.pid, signal.SIGKILL)
    try:
        ck.wait(30)
    except CheckpointError as err:
        return str(err)
    return ""


def test_a_lost_saver_fails_the_step_on_every_rank_and_leaves_the_one_before(tmp_path):
    errors = run_ranks(lose_a_saver, 2, str(tmp_path))
    assert re.search("rank 1 failed: .* saver process", errors[0])
    assert "ended while it wrote step 2" in errors[1]
    assert Checkpointer(tmp_path).steps() == [1]


def fail_to_stage(root: str, victim: int, overlap: bool) -> list[str]:
    state, errors = TrainState(model=nn.Linear(16, 16), rng=False), []
    ck = Checkpointer(root, async_=True, overlap=overlap)
    ck.save(1, state)
    ck.wait()
    real = ck._saver.stage
    for step, error in ((2, OSError(12, "Cannot allocate memory")), (3, RuntimeError("CUDA error: out of memory"))):
        if torch.distributed.get_rank() == victim:
            ck._saver.stage = _raising(error)
        ck.save(step, state)
        with ck.guard():  # the state may change: nothing more is copied
            ck._saver.stage = real
        try:
            ck.wait(30)
        except CheckpointError as err:
            errors.append(str(err))
    ck.save(4, state)
    ck.close()
    return errors


def _raising(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize("overlap", [False, True], ids=["staged-at-once", "overlapped"])
@pytest.mark.parametrize("victim", [0, 1])
def test_staging_that_fails_on_one_rank_fails_the_step_on_every_rank_at_once(tmp_path, victim, overlap):
    errors = run_ranks(fail_to_stage, 2, str(tmp_path), victim, overlap, timeout_s=50)
    assert "Cannot allocate memory" in errors[victim][0]
    assert "CUDA error: out of memory" in errors[victim][1]
    assert len(errors[1 - victim]) == 2
    assert "was not committed" in errors[1 - victim][0]
    assert Checkpointer(tmp_path).steps() == [1, 4]
    assert len(list(tmp_path.iterdir())) == 2


class Counting(nn.Module):
    """Its buffers change with every forward; so does a tensor that belongs to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.linear = nn.Linear(64, 64)
        self.frozen = nn.Parameter(torch.zeros(64), requires_grad=False)
        self.seen = torch.zeros(64)

    def forward(self, x):
        self.frozen.add_(1)
        self.seen.add_(1)
        return self.linear(self.norm(x))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_forward_changes_is_that_of_the_call_though_parameters_are_copied_later(tmp_path, monkeypatch, device):
    model = Counting().to(device)
    model.seen = model.seen.to(device)
    state = TrainState(model=model, rng=False, extra={"seen": model.seen})
    go = threading.Event()
    with Checkpointer(tmp_path, async_=True, overlap=True) as ck:
        ck.prepare(state)
        real = ck._saver.stage
        ck._saver.stage = lambda *args: (go.wait(30), real(*args))
        x = torch.randn(4, 64, device=device)
        for step in (1, 2):
            go.clear()
            model(x)
            want = {name: value.detach().clone() for name, value in model.state_dict().items()}
            ck.save(step, state)
            model(x)  # before the copies of the parameters begin
            go.set()
            with ck.guard(), torch.no_grad():
                model.linear.weight.add_(1.0)
            got = TrainState(model=Counting(), rng=False, extra={"seen": torch.zeros(64)})
            ck.wait()
            assert Checkpointer(tmp_path).restore(got) == step
            assert_bitwise(got.model.state_dict(), {name: value.cpu() for name, value in want.items()})
            assert got.extra["seen"].unique().tolist() == [2.0 * step - 1]


def time_out(root: str) -> list[str]:
    """Rank 1's saver stands still after its part is on disk."""
    ck = Checkpointer(root, async_=True)
    state = TrainState(model=nn.Linear(16, 16), rng=False)
    ck.save(1, state)
    ck.wait()
    victim, saver, told = torch.distributed.get_rank() == 1, ck._saver.process.pid, []
    if victim:
        os.kill(saver, signal.SIGSTOP)
    try:
        ck.save(2, state)
        for _ in range(2):  # the save is still in flight
            try:
                ck.wait(0.3)
            except TimeoutError as err:
                told.append(str(err))
    finally:
        if victim:
            os.kill(saver, signal.SIGCONT)
    ck.wait(30)
    ck.close(30)
    return told


def test_a_wait_that_takes_too_long_on_one_rank_is_every_ranks_timeout_and_the_save_goes_on(tmp_path):
    for told in run_ranks(time_out, 2, str(tmp_path), timeout_s=50):
        assert len(told) == 2
        assert "continues in the background" in told[0]
    assert Checkpointer(tmp_path).steps() == [1, 2]


@pytest.mark.parametrize("overlap", [False, True], ids=["staged-at-once", "overlapped"])
def test_closing_takes_no_longer_than_it_may_and_the_saver_finishes(tmp_path, overlap):
    ck = Checkpointer(tmp_path, async_=True, overlap=overlap)
    state = TrainState(model=nn.Linear(16, 16), rng=False)
    ck.save(1, state).wait(30)
    saver = ck._saver.process
    os.kill(saver.pid, signal.SIGSTOP)
    try:
        job = ck.save(2, state)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            ck.close(0.5)
        assert time.monotonic() - began < 5
    finally:
        os.kill(saver.pid, signal.SIGCONT)
    assert job.wait(30) == tmp_path / "step-00000002"
    deadline = time.monotonic() + 20
    while saver.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not saver.alive


def save_with_step(root: str, step: object) -> str:
    ck = Checkpointer(root, async_=True)
    try:
        ck.save(step, TrainState(model=nn.Linear(4, 4), rng=False))
        ck.close()
    except TypeError as err:
        return str(err)
    return str(ck.steps())


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3), 3], ids=["numpy", "tensor", "int"])
def test_a_step_is_any_whole_number(tmp_path, step):
    assert run_ranks(save_with_step, 2, str(tmp_path), step, timeout_s=40) == ["[3]", "[3]"]


@pytest.mark.parametrize("step", [3.0, "3", None], ids=["float", "text", "none"])
def test_a_step_that_is_no_whole_number_is_refused_by_every_rank(tmp_path, step):
    for told in run_ranks(save_with_step, 2, str(tmp_path), step, timeout_s=40):
        assert f"step={step!r} is not a whole number" in told
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_steps_to_keep_that_is_no_whole_number_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"keep_last=2.0 is not a whole number but float"):
        Checkpointer(tmp_path, keep_last=2.0)
    with pytest.raises(TypeError, match=r"keep_every='x' is not a whole number"):
        Checkpointer(tmp_path, keep_every="x")
    assert Checkpointer(tmp_path, keep_last=np.int64(2)).retention.last == 2


def test_a_reader_changes_nothing_on_disk_and_the_first_save_removes_leftovers(tmp_path):
    reader = Checkpointer(tmp_path / "none", async_=True)
    assert (reader.steps(), reader.latest(), reader.restore(build())) == ([], None, 0)
    assert list(tmp_path.iterdir()) == []
    dead = dataclasses.replace(Process.of(os.getpid()), pid=2**30)
    left, _ = commit.begin_save(tmp_path, 1, dead)
    ck = Checkpointer(tmp_path, async_=True)
    assert (ck.steps(), ck.latest(), ck.restore(build())) == ([], None, 0)
    assert left.exists()
    with ck:
        ck.save(1, build())
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_an_arena_that_grows_is_a_new_file_and_holds_what_was_staged():
    arena = Arena()
    entries = [Entry("a", "F32", (3, 4)), Entry("b", "BF16", (5,)), Entry("c", "I64", ())]
    tensors = [torch.arange(12.0).view(4, 3).t(), torch.ones(5, dtype=torch.bfloat16), torch.tensor(7)]
    assert arena.reserve(256)
    assert not arena.reserve(100)
    arena.stage(arena.targets([(0, 48), (64, 10), (128, 8)], entries), tensors, staging_point(tensors))
    assert torch.equal(arena.memory[:48].view(torch.float32).view(3, 4), tensors[0])
    assert torch.equal(arena.memory[64:74].view(torch.bfloat16), tensors[1])
    assert not arena.pinned, "only CUDA tensors need it"
    first = os.fstat(arena.fd).st_ino
    assert arena.reserve(512)
    assert os.fstat(arena.fd).st_ino != first
    arena.close()


class OnDevice3:
    """A tensor of cuda:3 as far as staging asks."""

    is_cuda, device = True, torch.device("cuda", 3)

    def copy_(self, view, non_blocking=False): ...


@pytest.fixture
def runtime(monkeypatch):
    """CUDA's runtime: what was called, in whose device, and the error that a thread's next kernel would raise."""
    contexts = fake_contexts(monkeypatch)
    runtime = SimpleNamespace(contexts=contexts, calls=[], refuses=0, pending=0)

    def register(*_):
        runtime.calls.append(("register", contexts.current()))
        runtime.pending = runtime.refuses
        return runtime.refuses

    def ones(*_, device):
        pending, runtime.pending = runtime.pending, 0
        if pending:
            raise torch.AcceleratorError("CUDA error: out of memory")

    cudart = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=lambda *_: runtime.calls.append(("unregister", contexts.current())),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "ones", ones)
    return runtime


def test_staging_in_a_thread_opens_no_context_on_device_0(runtime):
    runtime.contexts.opened = {3}  # the rank's own
    arena = Arena()
    arena.reserve(64)

    def carry():
        arena.stage([OnDevice3()], [OnDevice3()])
        arena.close()  # as the thread that grows the arena does

    thread = threading.Thread(target=carry)
    thread.start()
    thread.join()
    assert runtime.contexts.opened == {3}
    assert runtime.calls == [("register", 3), ("unregister", 3)]


def test_pages_that_cannot_be_locked_leave_no_error_for_the_next_kernel(runtime, caplog):
    runtime.refuses = 2
    arena = Arena()
    arena.reserve(64)
    arena.lock_pages([torch.device("cuda", 3)])
    assert not arena.pinned
    assert runtime.pending == 0
    assert "staging is slower" in caplog.text
    arena.close()


def arena_file(ck: Checkpointer) -> int:
    """Which memory file this rank stages in; 0 if it writes nothing, as of small tensors that every rank holds."""
    arena = ck._saver._arena
    return os.fstat(arena.fd).st_ino if arena.fd >= 0 else 0


def save_prepared(root: str, grow: bool) -> tuple[int, int, bool]:
    """The arena's file after preparing and after two saves, and whether the last step came back bitwise."""
    state = build()
    train(state, 1)
    with Checkpointer(root, async_=True) as ck:
        ck.prepare(state)
        ck.prepare(state)
        ck._saver._await_prepared()
        prepared = arena_file(ck)
        if grow:
            state.extra["table"] = torch.ones(100_000)
        ck.save(1, state)
        train(state, 1)
        ck.save(2, state).wait(30)
        saved = arena_file(ck)
    got = build(seed=9)
    if grow:
        got.extra["table"] = torch.zeros(100_000)
    Checkpointer(root).restore(got, 2)
    want = full_state(state)
    return prepared, saved, all(torch.equal(full_state(got)[name], want[name]) for name in want)


def test_the_first_save_finds_the_memory_that_was_prepared(tmp_path):
    told = run_ranks(save_prepared, 2, str(tmp_path), False)
    for prepared, saved, equal in told:
        assert equal
        assert prepared == saved
    assert any(prepared for prepared, _, _ in told)


def test_a_state_that_grew_after_it_was_prepared_is_saved_whole(tmp_path):
    prepared, saved, equal = save_prepared(str(tmp_path), True)
    assert equal
    assert prepared != saved


def test_preparing_is_nothing_for_synchronous_saves_and_refuses_what_saving_refuses(tmp_path):
    state = TrainState(model=nn.Linear(2, 2), rng=False)
    ck = Checkpointer(tmp_path / "sync")
    ck.prepare(state)
    assert ck._saver is None
    with Checkpointer(tmp_path / "async", async_=True) as behind, pytest.raises(TypeError, match="extra"):
        behind.prepare(TrainState(model=nn.Linear(2, 2), rng=False, extra={"handle": object()}))
    assert behind.steps() == []


def test_memory_that_cannot_be_prepared_is_the_first_saves_error(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, async_=True) as ck:
        state = TrainState(model=nn.Linear(2, 2), rng=False)
        ck.prepare(state)
        ck._saver._await_prepared()
        state = TrainState(model=nn.Linear(200, 200), rng=False)
        monkeypatch.setattr(os, "memfd_create", _no_memory)
        ck.prepare(state)
        ck._saver._await_prepared()
        ck.save(1, state)
        with pytest.raises(CheckpointError, match="Cannot allocate memory"):
            ck.wait()
        monkeypatch.undo()
        ck.save(2, state)
    assert Checkpointer(tmp_path).steps() == [2]


def _no_memory(*_):
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True], ids=["staged-at-once", "overlapped"])
def test_cuda_tensors_are_staged_through_pinned_memory_behind_queued_kernels(tmp_path, overlap):
    model = nn.Linear(2048, 2048, device="cuda")
    with Checkpointer(tmp_path, async_=True, overlap=overlap) as ck:
        for step in (1, 2):
            with torch.no_grad():
                torch.cuda._sleep(50_000_000)  # the save is called while this is still running
                model.weight.fill_(step)
            ck.save(step, TrainState(model=model, rng=False))
            with ck.guard(), torch.no_grad():
                model.weight.fill_(-1.0)
        ck.wait()
        assert ck._saver._arena.pinned
    for step in (1, 2):
        ck = Checkpointer(tmp_path)
        got = nn.Linear(2048, 2048)
        ck.restore(TrainState(model=got, rng=False), step)
        assert bool((got.weight == step).all())
