"""How much of the transfers the asynchronous products hide, on a clock of its own: the same on a busy machine.

Time is counted, not measured: a matrix product takes its floating-point operations, a message a fixed time on its link,
which carries one message at a time, and waiting moves the clock to the message's end. One rank is enough, since all do
the same; ``benchmarks/async_tp.py`` measures real ranks.
"""

from types import SimpleNamespace

import pytest
import torch
from titan_train.parallel.tensor import async_matmul
from titan_train.parallel.tensor.async_matmul import all_gather_matmul, matmul_reduce_scatter
from torch.utils._python_dispatch import TorchDispatchMode

RANKS, PART, INPUTS, OUTPUTS = 4, 8, 16, 32
PRODUCT = 2 * PART * INPUTS * OUTPUTS
"""Time of one part's product."""


class Clock(TorchDispatchMode):
    """Virtual time: products and messages."""

    def __init__(self, message: float, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = self.exposed = self.on_the_wire = 0.0
        self._message = message
        self._free: dict[int, float] = {}
        monkeypatch.setattr(async_matmul, "_exchange", self._exchange)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            a, b = args[:2]
            self.now += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        elif func is torch.ops.aten.addmm_.default:
            a, b = args[1:3]
            self.now += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))

    def _exchange(self, send, receive, *, to, source, group):
        receive.zero_()
        ends = max(self.now, self._free.get(to % RANKS, 0.0)) + self._message
        self._free[to % RANKS] = ends
        self.on_the_wire += self._message
        return [SimpleNamespace(wait=lambda: self._wait(ends))]

    def _wait(self, ends: float) -> None:
        self.exposed += max(0.0, ends - self.now)
        self.now = max(self.now, ends)


def hidden_share(message: float, monkeypatch: pytest.MonkeyPatch, weights: int) -> float:
    group = SimpleNamespace(size=lambda: RANKS, rank=lambda: 1)
    part = torch.randn(PART, INPUTS, requires_grad=True)
    up = [torch.randn(OUTPUTS, INPUTS, requires_grad=True) for _ in range(weights)]
    down = torch.randn(INPUTS, OUTPUTS, requires_grad=True)
    with Clock(message, monkeypatch) as clock:
        hidden = sum(all_gather_matmul(part, up, group))
        out = matmul_reduce_scatter(hidden, down, group)
        out.backward(torch.randn_like(out))
    # one ring a product forward, one each backward, and the gather of the input for the weights' gradients
    assert clock.on_the_wire == pytest.approx(5 * (RANKS - 1) * message)
    return 1 - clock.exposed / clock.on_the_wire


@pytest.mark.parametrize("weights", [1, 3])
@pytest.mark.parametrize("share", [0.1, 0.8, 1.0])
def test_messages_no_longer_than_a_product_are_hidden(share, weights, monkeypatch):
    assert hidden_share(share * PRODUCT, monkeypatch, weights) == pytest.approx(1.0)


def test_of_messages_twice_as_long_as_a_product_half_is_hidden(monkeypatch):
    share = hidden_share(2 * PRODUCT, monkeypatch, 1)
    assert 0.5 <= share < 0.75  # the weight gradients' products hide a little more


def test_waiting_at_once_hides_nothing(monkeypatch):
    plain = Clock._exchange

    def serial(self, *args, **kwargs):
        for work in plain(self, *args, **kwargs):
            work.wait()
        return []

    monkeypatch.setattr(Clock, "_exchange", serial)
    assert hidden_share(0.8 * PRODUCT, monkeypatch, 1) == pytest.approx(0.0)
