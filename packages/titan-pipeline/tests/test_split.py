"""Cuts are optimal, stages keep their names, and a plain CNN trains through them."""

import copy
import itertools
import random

import pytest
from titan_pipeline import balanced_cut, build_schedule


def test_the_cut_is_optimal_against_all_cuts():
    rng = random.Random(0)
    for _ in range(100):
        n = rng.randrange(1, 9)
        k = rng.randrange(1, n + 1)
        costs = [rng.choice((0, 1, 2, 5, 9)) for _ in range(n)]
        cut = balanced_cut(costs, k)
        assert [i for part in cut for i in part] == list(range(n))
        assert all(len(part) for part in cut)
        best = min(
            max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *inner, n)))
            for inner in itertools.combinations(range(1, n), k - 1)
        )
        assert max(sum(costs[i] for i in part) for part in cut) == best


def test_impossible_cuts_say_what_would_work():
    with pytest.raises(ValueError, match="use 1 to 2 stages"):
        balanced_cut([1, 1], 3)
    with pytest.raises(ValueError, match="negative"):
        balanced_cut([1, -1], 1)


def test_a_plain_cnn_trains_through_stages_like_in_one_process():
    torch = pytest.importorskip("torch")
    from titan_pipeline.runtime import Executor, ThreadHub, TorchStage, split_layers
    from torch import nn

    torch.manual_seed(0)
    cnn = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.Linear(16, 4)
    ).double()
    images = [torch.randn(2, 3, 8, 8, dtype=torch.float64) for _ in range(8)]
    labels = [torch.randint(4, (2,)) for _ in range(8)]
    alone = copy.deepcopy(cnn)
    for x, y in zip(images, labels, strict=True):
        (nn.functional.cross_entropy(alone(x), y) / 8).backward()
    modules = split_layers(cnn, 4)
    assert [name for m in modules for name, _ in m.named_children()] == [name for name, _ in cnn.named_children()]
    schedule = build_schedule("zbv", 2, 8)

    def work(transport):
        mine = schedule.stages_of(transport.rank)
        stages = [TorchStage(modules[s], s, loss=nn.functional.cross_entropy if s == 3 else None) for s in mine]
        return Executor(schedule, stages, transport).step(images, labels).loss

    losses = ThreadHub(2).run(work)
    assert losses[0] == losses[1]
    for a, b in zip(cnn.parameters(), alone.parameters(), strict=True):
        # float64: the loss is scaled after the sum here and before it there, at most 8 x 36 terms rounded by 2^-53
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-13)


def test_named_cuts_are_checked():
    torch = pytest.importorskip("torch")
    from titan_pipeline.runtime import split_layers

    layers = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(4)))
    assert [len(s) for s in split_layers(layers, 2, starts=["3"])] == [3, 1]
    for starts, message in ((["9"], "are not layers"), (["3", "1"], "not in the order"), ([], "make 1 stages")):
        with pytest.raises(ValueError, match=message):
            split_layers(layers, 3 if len(starts) == 2 else 2, starts=starts)
    with pytest.raises(ValueError, match="one per layer"):
        split_layers(layers, 2, costs=[1])
