"""What runs is what was proven: stored bytes equal the verified peak."""

import weakref

import pytest

torch = pytest.importorskip("torch")

from titan_pipeline import FAMILIES, Costs, build_schedule, verify  # noqa: E402
from titan_pipeline.runtime import Executor, ThreadHub, TorchStage  # noqa: E402
from titan_pipeline.runtime.weight_grad.rules import LinearHook  # noqa: E402
from torch import nn  # noqa: E402


@pytest.fixture(autouse=True)
def hooks(monkeypatch):
    """The live hooks of linear layers: what they hold belongs to the forward that is waiting for its backward."""
    alive = weakref.WeakSet()
    plain = LinearHook.__init__

    def noting(self, *args):
        plain(self, *args)
        alive.add(self)

    monkeypatch.setattr(LinearHook, "__init__", noting)
    CountingStage.hooks = alive


class CountingStage(TorchStage):
    """Counts the bytes of every distinct storage that saved tensors and deferred weight gradients keep alive."""

    ledger = None
    hooks = ()

    def _saved(self):
        sizes = {}
        weights = {p.untyped_storage().data_ptr() for p in self.module.parameters()}

        def note(tensor):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in weights:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

        for inputs, edges, _ in self._kept.values():
            stack, seen = [e.node for e in edges], set()
            for x in inputs:
                note(x)
            while stack:
                node = stack.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                stack += [n for n, _ in node.next_functions]
                for saved in getattr(node, "saved_tensors", ()):
                    note(saved)
                for name in dir(node):
                    if name.startswith("_saved_"):
                        note(getattr(node, name))
        for hook in list(self.hooks):
            if hook.engine is self._engine:
                note(hook.x)
        for queue in self._queues.values():
            for _, _, given in queue.notes:
                for thing in given:
                    note(thing)
        return sizes

    def forward(self, *args):
        out = super().forward(*args)
        self.ledger(self)
        return out

    def backward(self, *args):
        out = super().backward(*args)
        self.ledger(self)
        return out

    def backward_weight(self, *args):
        super().backward_weight(*args)
        self.ledger(self)


class Layer(nn.Module):
    """One stage with sizes of its own, so that no two stages weigh the same.

    It does not save its own output: at the turn of a V, where the next stage is on the same rank and keeps that tensor
    as its input, the two would share it and the rank would hold less than the sum that is verified.
    """

    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def stage_for(index, last, ledger):
    torch.manual_seed(index)
    stage = CountingStage(Layer(8 + index), index, loss=(lambda o, t: ((o - t) ** 2).sum()) if last else None)
    stage.ledger = ledger
    return stage


def bytes_of_one_microbatch(num_stages, split):
    """Activation and weight-context bytes of each stage, from one microbatch alone."""
    activation, context = [], []
    for s in range(num_stages):
        seen = []
        stage = stage_for(s, s == num_stages - 1, lambda st, seen=seen: seen.append(sum(st._saved().values())))
        stage.configure(split)
        x = torch.randn(3, 6)
        last = s == num_stages - 1
        stage.begin(True, 1.0)
        stage.forward(0, (x,), x if last else None, {}, True)
        stage.backward(0, (1.0,) if last else (torch.ones(3, 6),), split)
        activation.append(seen[0])
        context.append(seen[1])
    return activation, context


@pytest.mark.parametrize("name", FAMILIES)
def test_stored_bytes_equal_the_verified_peak_on_every_rank(name):
    ranks, m = 3, 6
    schedule = build_schedule(name, ranks, m)
    split = {a.stage for program in schedule.ranks for a in program if a.kind.value == "I"}
    rows = {deferred: bytes_of_one_microbatch(schedule.num_stages, deferred) for deferred in (False, True)}
    n = schedule.num_stages
    zero = (0.0,) * n
    costs = Costs(
        forward=zero, input_grad=zero, weight_grad=zero,
        activation=tuple(float(rows[s in split][0][s]) for s in range(n)),
        weight_context=tuple(float(rows[s in split][1][s]) for s in range(n)),
    )  # fmt: skip
    proof = verify(schedule, costs=costs)
    x = [torch.randn(3, 6) for _ in range(m)]

    def work(transport):
        peak = [0]
        stages = []

        def ledger(_):
            held = {}
            for stage in stages:
                held.update(stage._saved())
            peak[0] = max(peak[0], sum(held.values()))

        stages += [stage_for(s, s == n - 1, ledger) for s in schedule.stages_of(transport.rank)]
        Executor(schedule, stages, transport).step(x, x)
        return peak[0]

    assert ThreadHub(ranks).run(work) == [int(p) for p in proof.peak]
