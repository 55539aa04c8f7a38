"""Channels between devices: connected before they are needed, filled ahead of need, and no home for what has left."""

import time
import weakref
from collections import Counter, deque
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("titan_testing")

import torch.distributed as dist  # noqa: E402
from titan_pipeline import Costs, build_schedule  # noqa: E402
from titan_pipeline.runtime import (  # noqa: E402
    DeviceTransport,
    Executor,
    GlooTransport,
    PipelineAborted,
    TiedWeight,
    TorchStage,
    solve_on_rank0,
)
from titan_pipeline.runtime.transport import device  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402


def make(schedule, **options):
    mesh = init_device_mesh("cpu", (1, schedule.num_ranks), mesh_dim_names=("dp", "pp"))
    return DeviceTransport(mesh, "pp", schedule.placement, torch.device("cpu"), **options)


def run_step(schedule, transport, module=lambda: nn.Linear(3, 3)):
    stages = [TorchStage(module(), s, loss=nn.functional.mse_loss) for s in schedule.stages_of(transport.rank)]
    executor = Executor(schedule, stages, transport, hang_timeout_s=None)
    data = [torch.ones(2, 3)] * schedule.num_microbatches
    return executor, lambda: executor.step(data, data).loss


def _first_use_blocks(name):
    """As NCCL: the first message of a channel holds up the host until the other rank posts one on it too."""
    plain, used = dist.batch_isend_irecv, set()

    def exchange(ops):
        if ops[0].group not in used:
            used.add(ops[0].group)
            dist.barrier(ops[0].group)
        return plain(ops)

    dist.batch_isend_irecv = exchange
    schedule = build_schedule(name, 3, 6)
    _, step = run_step(schedule, make(schedule))
    connected = len(used)
    return step(), connected, len(used)


@pytest.mark.parametrize(("name", "channels"), [("interleaved_zb", [4, 4, 4]), ("dualpipe_v", [2, 4, 2])])
def test_channels_connect_when_they_are_made_and_not_where_they_are_first_needed(name, channels):
    results = testing.run_ranks(_first_use_blocks, 3, name, timeout_s=60)
    assert [connected for _, connected, _ in results] == [used for _, _, used in results] == channels


def _alone(timeout_s, comes):
    """Rank 1 does not come to connect, or comes and sends nothing."""
    new_group, connect, began = dist.new_group, DeviceTransport._connect, []
    store = dist.distributed_c10d._get_default_store()

    def wait(*_):
        with suppress(RuntimeError):
            store.wait(["named"], timedelta(seconds=20 * timeout_s))
        return []

    def timed(*args):
        began.append(time.monotonic())
        connect(*args)

    # the ranks may come to where the channels are made further apart than that limit
    dist.new_group = lambda ranks, *, timeout, **options: new_group(ranks, **options)
    DeviceTransport._connect = timed
    if dist.get_rank() == 1:
        setattr(DeviceTransport, "_exchange" if comes else "_connect", wait)
    elif not comes:
        DeviceTransport._exchange = wait  # as NCCL, which waits for the other rank without a limit
    try:
        make(build_schedule("1f1b", 2, 2), timeout_s=timeout_s)
    except RuntimeError as err:
        took = time.monotonic() - began[-1]
        store.set("named", "")
        return str(err), took
    return None, 0.0


@pytest.mark.parametrize("comes", [False, True])
def test_a_rank_that_does_not_connect_is_named_within_the_time_limit(comes):
    (said, took), _ = testing.run_ranks(_alone, 2, 1.0, comes, timeout_s=30)
    assert "rank 0 of the pipeline could not connect to rank 1 within 1 s" in said
    assert "NCCL_DEBUG=INFO" in said
    assert took < 12


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="torch without NCCL")
def test_a_receive_that_waits_on_a_gpu_leaves_it_to_the_computation(monkeypatch):
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append(options))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    limit = timedelta(seconds=77)
    for backend in ("nccl", "gloo"):
        device._make_channels([[0, 1]], device._neighbours((0, 1)), backend, limit)
    nccl, gloo = made[:2], made[2:]
    assert [(o["pg_options"].config.max_ctas, o["pg_options"]._timeout) for o in nccl] == [(4, limit)] * 2
    assert nccl[0]["pg_options"] is not nccl[1]["pg_options"], "torch writes the group's name into it"
    assert [o["pg_options"] for o in gloo] == [None] * 2


def _count_groups(rank):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=2048, store=FakeStore())
    mesh = init_device_mesh("cpu", (128, 16), mesh_dim_names=("dp", "pp"))
    made, barriers, plain = [], [], dist.new_group

    def new_group(ranks, **options):
        made.append((rank in ranks, options["timeout"].total_seconds()))
        return plain(ranks, **options)

    dist.new_group = new_group
    dist.distributed_c10d._store_based_barrier = lambda *args: barriers.append(args)
    dist.get_backend = lambda group: "cpu:gloo,cuda:nccl"
    began = time.monotonic()
    schedule = build_schedule("interleaved_1f1b", 16, 16)
    DeviceTransport(mesh, "pp", schedule.placement, torch.device("cpu"), backend="fake", timeout_s=77.0)
    took = time.monotonic() - began
    dist.destroy_process_group()
    return sum(mine for mine, _ in made), len(made), {limit for _, limit in made}, len(barriers), took


@pytest.mark.parametrize("rank", [0, 700, 2047])
def test_of_2048_ranks_each_joins_four_channels_and_waits_in_no_barrier_of_all(rank):
    ((joined, made, limits, barriers, took),) = testing.run_ranks(_count_groups, 1, rank, init=False)
    assert joined == 4
    assert made == 128 * 2 * 16
    assert limits == {77.0}
    assert barriers == 0
    assert took < 10


class Work:
    """Of a send that has left, or has not."""

    def __init__(self, left):
        self.left, self.waited = left, False

    def is_completed(self):
        return self.left()

    def wait(self):
        assert self.left(), "the host would wait"
        self.waited = True


def test_what_has_left_a_device_is_freed_and_what_has_not_is_kept(monkeypatch):
    left, works = [0], []

    def exchange(ops):
        number = len(works)
        works.append(Work(lambda: number < left[0]))
        return works[-1:]

    monkeypatch.setattr(dist, "P2POp", lambda way, tensor, group, group_peer: tensor)
    monkeypatch.setattr(dist, "batch_isend_irecv", exchange)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(DeviceTransport, "_post", lambda self, tensor, target: None)
    transport = object.__new__(DeviceTransport)
    transport._device = torch.device("cpu")
    transport.rank, transport._channels, transport._tells = 0, {(0, 1): None}, True
    transport._sent, transport._leaving, transport._left, transport._layouts = (), deque(), Counter(), {}
    alive = []
    for n in range(64):
        left[0] = max(0, n - 2)  # two are always on their way
        hidden = torch.empty(1024)
        alive.append(weakref.ref(hidden.untyped_storage()))
        transport.send(1, (0, 1, n), (hidden,))
        del hidden
        assert len(transport._leaving) == sum(storage() is not None for storage in alive) == min(n + 1, 3)
    assert all(work.waited for work in works[:61])


def _send_many(count):
    transport = GlooTransport()
    keys = [(0, 1, n) for n in range(count)]
    transport.begin({0: keys} if transport.rank else {}, {} if transport.rank else {1: count})
    most = 0
    for key in keys:
        if transport.rank:
            got = transport.receive(0, key)
            assert got[0][0] == key[2]
        else:
            transport.send(1, key, (torch.full((2**18,), float(key[2])),))
            time.sleep(0.005)
            most = max(most, sum(tensor.nbytes for _, tensor in transport._sent))
    assert transport.close_step(None, ()) == (None, [[], []])
    return most


def test_what_has_left_a_host_is_freed_before_the_step_ends():
    most, _ = testing.run_ranks(_send_many, 2, 64)
    assert (
        most <= 32 * 2**20
    )  # of 64 MiB, however many microbatches: 16 may be on their way, and some while a thread wakes


def _late(limit_s):
    """Rank 0 sends late, and later comes to where the ranks meet."""

    def limited(exchange):
        def call(*args, **options):
            work = exchange(*args, **options)
            return SimpleNamespace(wait=lambda limit=timedelta(seconds=limit_s): work.wait(limit))

        return call

    group = dist.new_group()  # with a limit that short, it fails where the ranks come to it further apart
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), group)  # of collectives
    dist.isend, dist.irecv = limited(dist.isend), limited(dist.irecv)
    transport = GlooTransport(group)
    transport.begin({0: [(0, 1, 0)]} if transport.rank else {}, {} if transport.rank else {1: 1})
    got = None
    if transport.rank:
        got = transport.receive(0, (0, 1, 0))
    else:
        time.sleep(1.5 * limit_s)
        transport.send(1, (0, 1, 0), (torch.ones(1),))
        time.sleep(1.5 * limit_s)
    return got, transport.close_step(None, ())


def test_a_rank_that_compiles_for_longer_than_the_time_limit_of_a_collective_is_waited_for():
    (_, first), (got, second) = testing.run_ranks(_late, 2, 1.0)
    assert torch.equal(got[0], torch.ones(1))
    assert first == second == (None, [[], []])


def _log_posts():
    events, plain = [], dist.batch_isend_irecv

    def exchange(ops):
        events.extend("post" for op in ops if op.op is dist.irecv)
        return plain(ops)

    class Slow(nn.Linear):
        def forward(self, x):
            events.append("forward")
            time.sleep(0.05)  # the next header arrives meanwhile
            return super().forward(x)

    schedule = build_schedule("gpipe", 2, 6)
    transport = make(schedule)
    dist.batch_isend_irecv = exchange
    _, step = run_step(schedule, transport, lambda: Slow(3, 3) if transport.rank else nn.Linear(3, 3))
    step()
    return events


def test_the_receive_of_what_comes_next_is_posted_before_this_action_and_two_ahead_at_most():
    _, events = testing.run_ranks(_log_posts, 2)
    forwards = [i for i, event in enumerate(events) if event == "forward"]
    ahead = [events[:i].count("post") - n - 1 for n, i in enumerate(forwards)]
    assert len(forwards) == 6
    assert max(ahead) <= 2
    assert min(ahead[1:-1]) >= 1, events


def _late_neighbour():
    """Rank 1 waits for rank 0, which sends only when rank 1 has posted the receive of what rank 2 sent."""
    transport = make(build_schedule("1f1b", 3, 3))
    store, rank = dist.distributed_c10d._get_default_store(), transport.rank
    keys = {0: (0, 1, 0), 2: (1, 1, 0)}
    if rank == 1:
        plain = transport._exchange

        def exchange(way, pair, tensors):
            works = plain(way, pair, tensors)
            store.set(f"posted from {pair[0]}", "")
            return works

        transport._exchange = exchange
        transport.begin({source: [key] for source, key in keys.items()}, {})
        got = [transport.receive(source, key)[0].item() for source, key in keys.items()]
    else:
        transport.begin({}, {1: 1})
        if rank == 0:
            store.wait(["posted from 2"], timedelta(seconds=10))
        transport.send(1, keys[rank], (torch.full((1,), float(rank)),))
        got = []
    return got, transport.close_step(None, ())


def test_while_a_rank_waits_for_one_neighbour_it_posts_receives_for_the_other():
    """What waits for the device in that neighbour (a kernel's compilation) waits for its sends, too."""
    results = testing.run_ranks(_late_neighbour, 3)
    assert [got for got, _ in results] == [[], [0.0, 2.0], []]
    assert all(closed == (None, [[], [], []]) for _, closed in results)


def _no_memory():
    schedule = build_schedule("1f1b", 3, 6)
    transport = make(schedule)
    executor, step = run_step(schedule, transport)
    plain, calls, kept = torch.empty_like, [], []
    executor.stages[transport.rank].module.register_forward_hook(lambda m, args, out: kept.append(weakref.ref(args[0])))

    def empty_like(tensor, **options):
        calls.append(tensor)
        if transport.rank == 1 and len(calls) >= 3 and any(activation() is not None for activation in kept):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", empty_like)
        with pytest.raises(PipelineAborted if transport.rank != 1 else torch.OutOfMemoryError) as caught:
            step()
    executor.reset()
    return str(caught.value), step()


def test_a_rank_without_memory_for_a_message_says_so_and_blames_no_neighbour():
    results = testing.run_ranks(_no_memory, 3)
    for rank, (said, loss) in enumerate(results):
        assert loss > 0, "the channels are clean again"
        assert said == "CUDA out of memory" if rank == 1 else "rank 1 failed at action" in said


def _between_ends(also_between):
    """A schedule goes from rank 0 to all, and the gradients of a tied weight between the first and the last."""
    schedule = build_schedule("1f1b", 3, 4)
    transport = make(schedule, also_between=also_between)
    by_host, plain = [], transport._post

    def post(tensor, target):
        by_host.append(tensor.dtype is torch.float32)
        plain(tensor, target)

    transport._post = post
    solved = solve_on_rank0(transport, Costs.uniform(3), 4, time_limit=0.1)
    torch.manual_seed(0)
    middle, layer = nn.Linear(3, 3), nn.Linear(3, 3)
    tied = [TiedWeight({0: name, 2: name}) for name in ("weight", "bias")]
    stage = TorchStage(middle if transport.rank == 1 else layer, transport.rank, loss=nn.functional.mse_loss)
    data = [torch.full((2, 3), float(k)) for k in range(4)]
    Executor(solved, [stage], transport, tied=tied, hang_timeout_s=None).step(data, data)
    grads = [p.grad.clone() for p in stage.module.parameters()]
    stage.module.zero_grad()
    for x in data:
        (nn.functional.mse_loss(layer(middle(layer(x))), x) / 4).backward()
    return grads, [p.grad for p in stage.module.parameters()], solved.digest, sum(by_host)


@pytest.mark.parametrize(("also_between", "by_host"), [((), [2, 0, 2]), (((0, 2), (2, 2)), [0, 0, 0])])
def test_messages_between_ranks_that_are_no_neighbours_arrive_too(also_between, by_host):
    """The gradients of a weight and a bias, through host memory or by a channel."""
    results = testing.run_ranks(_between_ends, 3, also_between)
    assert len({digest for _, _, digest, _ in results}) == 1
    for grads, expected, _, _ in results:
        torch.testing.assert_close(grads, expected)
    assert [floats for _, _, _, floats in results] == by_host
