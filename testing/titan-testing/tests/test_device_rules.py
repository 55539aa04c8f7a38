"""The instrument finds each kind of broken rule, in milliseconds, and lets right programs pass with right values."""

import itertools
import threading
import time

import torch
import torch.distributed as dist
from titan_testing.device_rules import host_syncs, on_device, run_on_devices


def exchange(first, second):
    """Two ranks: what rank 0 and rank 1 do, on a pair that has connected in both directions."""

    def body():
        rank = dist.get_rank()
        mine, theirs = on_device(torch.full((4,), float(rank))), torch.empty(4, device="cuda")
        both = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return (first, second)[rank](mine, theirs)

    return run_on_devices(body, 2)


def post(op, tensor):
    return dist.batch_isend_irecv([dist.P2POp(op, tensor, 1 - dist.get_rank())])


def test_values_flow_and_a_batch_of_both_directions_passes():
    outcome = exchange(lambda mine, theirs: (theirs + 1).tolist(), lambda mine, theirs: (theirs + 1).tolist())
    assert outcome.check().results == [[2.0] * 4, [1.0] * 4]


def test_two_ranks_that_both_send_first_are_reported_as_a_circle_in_milliseconds():
    def both(mine, theirs):
        sent = post(dist.isend, mine)
        sent[0].wait()
        mine.sum().item()
        post(dist.irecv, theirs)

    began = time.perf_counter()
    outcome = exchange(both, both)
    assert time.perf_counter() - began < 2
    assert outcome.hang is not None
    assert outcome.hang.cycle == (0, 1)
    assert "send to rank 1 of 16 bytes, which the other side has not posted" in outcome.hang.waits[0][0]
    assert "test_device_rules.py" in outcome.hang.waits[0][0]


def test_an_order_in_which_one_rank_sends_first_passes():
    def sender(mine, theirs):
        post(dist.isend, mine)[0].wait()
        post(dist.irecv, theirs)[0].wait()
        return theirs.sum().item()

    def receiver(mine, theirs):
        post(dist.irecv, theirs)[0].wait()
        post(dist.isend, mine)[0].wait()
        return theirs.sum().item()

    assert exchange(sender, receiver).check().results == [4.0, 0.0]


def test_a_device_sync_waits_for_a_send_where_a_stream_sync_does_not():
    def receiver(mine, theirs):
        dist.barrier()
        post(dist.irecv, theirs)[0].wait()

    def sender(mine, theirs, whole):
        work = post(dist.isend, mine)
        torch.cuda.synchronize() if whole else torch.cuda.current_stream().synchronize()
        dist.barrier()
        work[0].wait()

    assert exchange(lambda m, t: sender(m, t, False), receiver).check().hang is None
    hang = exchange(lambda m, t: sender(m, t, True), receiver).hang
    assert hang is not None
    assert hang.cycle == (0, 1)
    assert "a device sync for the send" in hang.waits[0][0]


def first_use(all_come):
    rank = dist.get_rank()
    group = dist.new_group([0, 1, 2])
    if all_come:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    if rank < 2:
        x = torch.ones(2, device="cuda")
        dist.batch_isend_irecv([dist.P2POp(dist.isend if rank == 0 else dist.irecv, x, 1 - rank, group=group)])
    dist.barrier()


def test_a_groups_first_use_waits_for_ranks_that_have_nothing_to_send():
    hang = run_on_devices(first_use, 3, False).hang
    assert hang is not None
    assert 2 in hang.cycle
    assert any("first use" in reason for reason in hang.waits[0])
    run_on_devices(first_use, 3, True).check()


def groups_in_another_order():
    order = [[0, 1], [1, 0, 2]] if dist.get_rank() else [[1, 0, 2], [0, 1]]
    for ranks in order:
        dist.new_group(ranks)


def test_groups_must_be_made_in_one_order_on_all_ranks():
    outcome = run_on_devices(groups_in_another_order, 3)
    assert any("one order on all ranks" in str(error) for error in outcome.errors.values())


def copies_beside(record, wait):
    x = torch.ones(1000, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if record:
        x.record_stream(side)
    if wait:
        torch.cuda.current_stream().wait_stream(side)
    del x
    torch.ones(1000, device="cuda").add_(1)
    torch.cuda.synchronize()
    return y.sum().item()


def test_memory_freed_while_another_stream_may_use_it_is_found():
    findings = run_on_devices(copies_beside, 1, False, False).findings
    assert len(findings) == 1
    assert "4000 bytes of the compute stream of rank 0 were freed while mul on side stream" in findings[0]
    for record, wait in ((True, False), (False, True)):
        assert run_on_devices(copies_beside, 1, record, wait).check().results == [2000.0]


def reads_beside(ordered):
    x = torch.zeros(8, device="cuda").add_(1)
    side = torch.cuda.Stream()
    if ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    side.synchronize()
    return y.sum().item()


def test_streams_that_touch_the_same_memory_unordered_are_found():
    assert "are not ordered" in run_on_devices(reads_beside, 1, False).findings[0]
    assert run_on_devices(reads_beside, 1, True).check().results == [16.0]


def thread_on_the_first_device(careful):
    device = torch.device("cuda", dist.get_rank())
    stream = torch.cuda.Stream(device)

    def body():
        if careful:
            torch.cuda.set_device(device)
        with torch.cuda.stream(stream):
            torch.ones(2, device=device)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


def test_a_thread_that_uses_another_devices_stream_opens_a_context_on_the_first():
    assert "rank 1 opened a context on device 0" in run_on_devices(thread_on_the_first_device, 2, False).findings[0]
    run_on_devices(thread_on_the_first_device, 2, True).check()


def counted_waits():
    x, counts = on_device(torch.ones(2)), [host_syncs()]
    for act in (lambda: x + 1, lambda: x.sum().item(), lambda: x.tolist(), lambda: torch.tensor([1.0], device="cuda")):
        act()
        counts.append(host_syncs())
    torch.tensor([1.0]).pin_memory().to("cuda", non_blocking=True)
    counts.append(host_syncs())
    return [after - before for before, after in itertools.pairwise(counts)]


def test_values_read_and_pageable_copies_count_as_waits_of_the_host():
    assert run_on_devices(counted_waits, 1).check().results == [[0, 1, 1, 1, 0]]


def polls(sends):
    x = torch.ones(2, device="cuda")
    if dist.get_rank() == 0 or sends:
        work = dist.batch_isend_irecv([dist.P2POp((dist.isend, dist.irecv)[dist.get_rank()], x, 1 - dist.get_rank())])[
            0
        ]
        while not work.is_completed():
            time.sleep(0.001)


def test_a_rank_that_polls_for_what_never_comes_hangs_too():
    run_on_devices(polls, 2, True).check()
    assert run_on_devices(polls_after_connecting, 2).hang is not None


def polls_after_connecting():
    polls(True)
    polls(False)
    dist.barrier()


def leaves_a_thread_behind():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return threading.Event().wait(600)


def test_a_wait_with_a_limit_ends_when_nothing_else_can_and_threads_end_with_the_job():
    began, before = time.perf_counter(), threading.active_count()
    assert run_on_devices(leaves_a_thread_behind, 2).check().results == [False, False]
    assert time.perf_counter() - began < 2
    assert threading.active_count() == before
    assert torch.distributed.get_rank is dist.get_rank
    assert not torch.distributed.is_initialized()
