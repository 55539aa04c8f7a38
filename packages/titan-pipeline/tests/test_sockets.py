"""Sockets between ranks of one machine: what a message costs, what does not fit, and who gets gloo instead."""

import socket
import threading

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("titan_testing")

import torch.distributed as dist  # noqa: E402
from titan_pipeline import build_schedule  # noqa: E402
from titan_pipeline.runtime import Executor, GlooTransport, SocketTransport, TorchStage, host_transport  # noqa: E402
from titan_pipeline.runtime.transport import connect, outbox, sockets  # noqa: E402
from torch import nn  # noqa: E402

MICROBATCHES = 6


class Counted:
    """Calls of the system that a transport makes: writes, waits, copies in user memory, threads."""

    def __init__(self, transport):
        self.writes, self.waits, self.copies = 0, 0, 0
        write, ready, memory = outbox._write, transport._ready, sockets.as_bytes

        def count_write(to, parts):
            self.writes += 1
            return write(to, parts)

        def count_ready(poll, timeout):
            self.waits += timeout is None
            return ready(poll, timeout)

        def count_copy(tensor):
            got = memory(tensor)
            self.copies += got.data_ptr() != tensor.data_ptr()
            return got

        outbox._write, transport._ready, sockets.as_bytes = count_write, count_ready, count_copy
        self.transport = transport

    def take(self):
        threads = sum(box._thread is not None for box in self.transport._outboxes.values())
        counts = self.writes, self.waits, self.copies, threads
        self.writes = self.waits = self.copies = 0
        return counts


def _counts(names):
    found = {}
    for name in names:
        schedule = build_schedule(name, 2, MICROBATCHES)
        transport = host_transport()
        stages = [
            TorchStage(nn.Linear(3, 3), s, loss=nn.functional.mse_loss) for s in schedule.stages_of(transport.rank)
        ]
        executor = Executor(schedule, stages, transport)
        data = [torch.ones(2, 3)] * MICROBATCHES
        counted = Counted(transport)
        steps = []
        for _ in range(3):
            executor.step(data, data)
            steps.append(counted.take())
        program = executor._program
        found[name] = sum(program.sends.values()), sum(map(len, program.expected.values())), steps
    return found


def test_a_message_is_one_write_at_most_one_wait_no_copy_and_no_thread():
    for by_name in testing.run_ranks(_counts, 2, ["1f1b", "interleaved_1f1b", "dualpipe_v"]):
        for name, (sends, receives, steps) in by_name.items():
            for writes, waits, copies, threads in steps:
                assert writes == sends + 1, name  # and one where the ranks meet
                assert waits <= 2 * receives + 2, name  # a frame may come in two parts; the meeting is one
                assert (copies, threads) == (0, 0), name


def _large():
    """Both ranks send 3 MiB at once, more than the buffer of the kernel, then read it; small ones stay in order."""
    transport = host_transport()
    other = 1 - transport.rank
    keys = [(0, stage, n) for stage in (0, 1) for n in range(6)]
    mine, theirs = keys[6 * other : 6 * other + 6], keys[6 * transport.rank : 6 * transport.rank + 6]
    sums = []
    for _ in range(2):
        transport.begin({other: theirs}, {other: 6})
        for n, key in enumerate(mine):
            transport.send(other, key, (torch.full((2**18 if n % 2 == 0 else 3,), n + transport.rank + 1.0), None))
        sums.append([float(transport.receive(other, key)[0].mean()) for key in theirs])
        assert transport.close_step(None, [1.0 + transport.rank]) == (None, [[1.0], [2.0]])
    return type(transport).__name__, sums


def test_messages_larger_than_the_kernels_buffer_cross_without_waiting_for_each_other():
    results = testing.run_ranks(_large, 2)
    for rank, (kind, sums) in enumerate(results):
        assert kind == SocketTransport.__name__
        assert sums == [[n + (1 - rank) + 1.0 for n in range(6)]] * 2


def _kinds():
    kinds = [type(host_transport()).__name__]
    machine, listener = connect._machine, connect._listener
    if dist.get_rank() == 1:
        connect._machine = lambda: "another"
    kinds.append(type(host_transport()).__name__)
    connect._machine = machine
    if dist.get_rank() == 1:
        connect._listener = lambda path, backlog: None
    kinds.append(type(host_transport()).__name__)
    connect._listener = listener
    if dist.get_rank() == 1:
        connect._called = lambda path, rank: (_ for _ in ()).throw(FileNotFoundError(path))
    return [*kinds, type(host_transport()).__name__]


def test_ranks_of_several_machines_or_without_common_files_get_gloo():
    for kinds in testing.run_ranks(_kinds, 2):
        assert kinds == ["SocketTransport", "GlooTransport", "GlooTransport", "GlooTransport"]


def _tensors():
    """Types, sizes and structures that a plain view would get wrong."""
    transport = host_transport()
    payload = (
        torch.arange(3.0), None, torch.tensor(True), torch.empty(0, 4), torch.ones(2, 5, dtype=torch.complex128).t(),
        torch.arange(5).to(torch.float8_e4m3fn),
    )  # fmt: skip
    keys = [(0, 1, n) for n in range(2)]
    transport.begin({0: keys} if transport.rank else {}, {} if transport.rank else {1: 2})
    for key in keys:
        if transport.rank == 0:
            transport.send(1, key, payload)
            continue
        for sent, got in zip(payload, transport.receive(0, key), strict=True):
            assert (sent is None) == (got is None)
            if sent is not None:
                assert (sent.dtype, sent.shape) == (got.dtype, got.shape)
                assert torch.equal(sent.to(torch.complex64), got.to(torch.complex64))
    transport.close_step(None, ())


def test_tensors_of_every_kind_cross_a_socket():
    testing.run_ranks(_tensors, 2)


def _many():
    """A message of as many tensors as a stage may return, then one of another shape."""
    transport, keys = host_transport(), [(0, 1, 0), (0, 1, 1)]
    transport.begin({0: keys} if transport.rank else {}, {} if transport.rank else {1: 2})
    got = []
    for key, count in zip(keys, (700, 2), strict=True):
        if transport.rank == 0:
            transport.send(1, key, tuple(torch.full((2,), float(n)) for n in range(count)))
        else:
            got.append([t.tolist() for t in transport.receive(0, key)])
    assert transport.close_step(None, ())[0] is None
    return got


def test_messages_of_more_pieces_than_one_write_takes_cross_a_socket():
    assert testing.run_ranks(_many, 2)[1] == [[[float(n)] * 2 for n in range(count)] for count in (700, 2)]


def test_one_rank_alone_needs_no_socket():
    (kind,) = testing.run_ranks(_alone, 1)
    assert kind == GlooTransport.__name__


def _alone():
    return type(host_transport()).__name__


def test_what_a_full_socket_has_not_taken_is_sent_before_it_is_closed():
    """Rank 0's last answer may wait behind a piece of data, and rank 0 ends right after it."""
    here, there = socket.socketpair()
    here.setblocking(False)
    box = outbox.Outbox(here)
    box.put([bytes(2**22)], None)
    box.put([b"the answer"], None)
    got = bytearray()

    def read():
        while part := there.recv(2**16):
            got.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    box.close()
    reader.join()
    there.close()
    assert len(got) == 2**22 + 10
    assert got.endswith(b"the answer")
