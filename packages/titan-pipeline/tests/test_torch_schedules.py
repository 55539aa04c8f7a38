"""torch's own schedules, imported: they verify here, run here, and are the orders that our generators make."""

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")
schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

testing = pytest.importorskip("titan_testing")

from titan_pipeline import Costs, Schedule, build_schedule, from_torch_csv, solve, to_torch_csv, verify  # noqa: E402
from titan_pipeline.runtime import (  # noqa: E402
    Executor,
    GlooTransport,
    ThreadHub,
    TorchStage,
    schedule_from_torch,
    torch_runtime,
)
from torch import nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402

# Everything runs in float64. The loss is scaled before or after the sum: at most 16 x 8 terms of order one, each rounded
# by at most 2^-53.
FLOAT64 = 128 * 2.0**-53

PAIRS = {
    "LoopedBFS": None,  # torch runs its backwards last microbatch first
    "Interleaved1F1B": "interleaved_1f1b",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipe_v",
}


def torch_csv(name, ranks, microbatches, chunks):
    """The compute rows of a torch schedule, as its own CSV text."""
    ops = visualizer.get_schedule_ops(name, ranks, microbatches, chunks)
    return "".join(",".join(str(a) for a in row if a is not None) + "\n" for row in ops)


@pytest.mark.parametrize("name", PAIRS)
def test_torch_schedules_verify_and_train_here(name):
    ranks, m = 2, 8
    schedule = from_torch_csv(torch_csv(name, ranks, m, 2), name=name)
    verify(schedule)
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3).double() for _ in range(4)]
    model = nn.Sequential(*copy.deepcopy(layers))
    data = [torch.randn(2, 3, dtype=torch.float64) for _ in range(m)]
    for x in data:
        (nn.functional.mse_loss(model(x), x) / m).backward()

    def work(transport):
        mine = schedule.stages_of(transport.rank)
        stages = [TorchStage(layers[s], s, loss=nn.functional.mse_loss if s == 3 else None) for s in mine]
        Executor(schedule, stages, transport).step(data, data)

    ThreadHub(ranks).run(work)
    for a, b in zip(nn.Sequential(*layers).parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=FLOAT64)


@pytest.mark.parametrize(("name", "ours"), [(a, b) for a, b in PAIRS.items() if b])
def test_our_generators_make_the_orders_of_torch(name, ours):
    for ranks, m in ((2, 4), (4, 8), (4, 16)):
        theirs = from_torch_csv(torch_csv(name, ranks, m, 2))
        assert theirs.digest == build_schedule(ours, ranks, m).digest


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zbv", "v_half", "dualpipe_v", "interleaved_zb"])
def test_torch_parses_our_csv_to_the_same_actions(name):
    schedule = build_schedule(name, 2, 8)
    for row, program in zip(to_torch_csv(schedule).splitlines(), schedule.ranks, strict=True):
        parsed = [schedules._Action.from_str(cell) for cell in row.split(",")]
        flat = [s for a in parsed for s in (a.sub_actions or (a,))]
        assert [str(a) for a in flat] == [str(a) for a in program]


def model(num_stages):
    torch.manual_seed(6)
    return [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double() for _ in range(num_stages)]


def mean_square(output, target):
    return nn.functional.mse_loss(output, target) / 8


def torch_stages(schedule, layers, rank):
    made = []
    for s in schedule.stages_of(rank):
        x, y = (torch.randn(2, 4, dtype=torch.float64, requires_grad=g) for g in (s > 0, True))
        cpu = torch.device("cpu")
        made.append(PipelineStage(layers[s], s, schedule.num_stages, cpu, input_args=(x,), output_args=(y,)))
    return made


def _under_torch(text):
    """One of our schedules in torch's runtime."""
    schedule = Schedule.from_text(text)
    rank = torch.distributed.get_rank()
    layers = model(schedule.num_stages)
    runtime = torch_runtime(schedule, torch_stages(schedule, layers, rank), loss_fn=mean_square)
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    first, last = schedule.placement[0] == rank, schedule.placement[-1] == rank
    runtime.step(*((data,) if first else ()), target=data if last else None)
    return {s: [p.grad for p in layers[s].parameters()] for s in schedule.stages_of(rank)}


def _under_ours(name):
    """One of torch's schedule objects, run here."""
    layers = model(4)
    rank = torch.distributed.get_rank()
    shape = build_schedule("zbv" if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else "looped_bfs", 2, 8)
    stages = torch_stages(shape, layers, rank)
    theirs = getattr(schedules, name)(stages, 8, loss_fn=mean_square)
    schedule = schedule_from_torch(theirs)
    verify(schedule)
    mine = [TorchStage(layers[s], s, loss=nn.functional.mse_loss) for s in schedule.stages_of(rank)]
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64).chunk(8)
    Executor(schedule, mine, GlooTransport()).step(data, data)
    return {s: [p.grad for p in layers[s].parameters()] for s in schedule.stages_of(rank)}


def check_against_autograd(returned, num_stages):
    layers = model(num_stages)
    for x in torch.randn(16, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64).chunk(8):
        mean_square(nn.Sequential(*layers)(x), x).backward()
    seen = set()
    for grads in returned:
        for s, got in grads.items():
            seen.add(s)
            for g, p in zip(got, layers[s].parameters(), strict=True):
                torch.testing.assert_close(g, p.grad, rtol=0, atol=FLOAT64)
    assert seen == set(range(num_stages))


@pytest.mark.parametrize("name", ["zb_h1", "interleaved_zb", "zbv", "v_half", "solved"])
def test_our_schedules_train_in_the_runtime_of_torch(name):
    if name == "solved":
        schedule = solve(
            Costs.uniform(4, num_chunks=2, latency=0.02), 8, placement="v", mem_limit=2, max_tries=200
        ).schedule
    else:
        schedule = build_schedule(name, 2, 8)
    folds = any(a == b for a, b in itertools.pairwise(schedule.placement))
    if folds and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 opens its connections by sending to its own rank at the turn of a V; gloo refuses")
    check_against_autograd(testing.run_ranks(_under_torch, 2, schedule.to_text()), schedule.num_stages)


@pytest.mark.parametrize(
    "name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
)
def test_schedule_objects_of_torch_train_here(name):
    check_against_autograd(testing.run_ranks(_under_ours, 2, name), 4)


def test_stages_of_another_placement_are_refused():
    class Stage:
        group_rank, stage_index, num_stages = 0, 1, 2

    with pytest.raises(ValueError, match="puts \\(0,\\) of 2 on it"):
        torch_runtime(build_schedule("zb_h1", 2, 4), [Stage()])
    with pytest.raises(ValueError, match="no order of actions"):
        schedule_from_torch(object())
