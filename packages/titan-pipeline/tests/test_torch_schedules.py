"""torch's own schedules, imported: they verify here, run here, and are the orders that our generators make."""

import copy

import pytest

torch = pytest.importorskip("torch")
schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

from titan_pipeline import build_schedule, from_torch_csv, to_torch_csv, verify  # noqa: E402
from titan_pipeline.runtime import Executor, ThreadHub, TorchStage  # noqa: E402
from torch import nn  # noqa: E402

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
    layers = [nn.Linear(3, 3) for _ in range(4)]
    model = nn.Sequential(*copy.deepcopy(layers))
    data = [torch.randn(2, 3) for _ in range(m)]
    for x in data:
        (nn.functional.mse_loss(model(x), x) / m).backward()

    def work(transport):
        mine = schedule.stages_of(transport.rank)
        stages = [TorchStage(layers[s], s, loss=nn.functional.mse_loss if s == 3 else None) for s in mine]
        Executor(schedule, stages, transport).step(data, data)

    ThreadHub(ranks).run(work)
    for a, b in zip(nn.Sequential(*layers).parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


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
