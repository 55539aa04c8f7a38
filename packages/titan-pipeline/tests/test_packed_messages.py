"""From the second step on a message of known shapes is one send; other shapes and failures get through all the same."""

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("titan_testing")

from titan_pipeline import build_schedule  # noqa: E402
from titan_pipeline.runtime import Executor, GlooTransport, PipelineAborted, TorchStage  # noqa: E402
from titan_pipeline.runtime.transport.messages import specs_of  # noqa: E402
from titan_pipeline.runtime.transport.packed import layout_of  # noqa: E402
from torch import nn  # noqa: E402

RANKS, MICROBATCHES = 3, 4


class Layer(nn.Module):
    def __init__(self, fails=()):
        super().__init__()
        self.linear, self.calls, self.fails = nn.Linear(3, 3).double(), 0, fails

    def forward(self, x):
        self.calls += 1
        if self.calls in self.fails:
            raise ArithmeticError("the stage broke")
        return torch.tanh(self.linear(x))


def build(fails=()):
    torch.manual_seed(0)
    return [Layer(fails if s == 1 else ()) for s in range(RANKS)]


def batch(rows):
    return [torch.full((rows, 3), 0.1 * n, dtype=torch.float64) for n in range(MICROBATCHES)]


def reference(rows):
    model, total = nn.Sequential(*build()), 0.0
    for x in batch(rows):
        loss = nn.functional.mse_loss(model(x), x) / MICROBATCHES
        loss.backward()
        total += loss.item()
    return total, [layer.linear.weight.grad for layer in model]


def _steps(rows, fail_in):
    """Sends of each step, its loss or error, and this rank's gradient."""
    transport = GlooTransport()
    sends, plain = [0], transport._post

    def post(tensor, target):
        sends[0] += 1
        plain(tensor, target)

    transport._post = post
    layer = build([fail_in * MICROBATCHES + 2] if fail_in is not None else ())[transport.rank]
    stage = TorchStage(layer, transport.rank, loss=nn.functional.mse_loss)
    executor = Executor(build_schedule("1f1b", RANKS, MICROBATCHES), [stage], transport)
    results = []
    for count in rows:
        sends[0] = 0
        layer.zero_grad()
        try:
            said = executor.step(batch(count), batch(count)).loss
        except (ArithmeticError, PipelineAborted) as err:
            said = str(err)
            executor.reset()
        results.append((sends[0], said, layer.linear.weight.grad))
    return results


def test_messages_of_known_shapes_are_one_send_each_and_others_two():
    rows = [2, 2, 2, 5, 5, 1]
    by_rank = testing.run_ranks(_steps, RANKS, rows, None)
    for rank, results in enumerate(by_rank):
        messages = MICROBATCHES * (1 if rank in (0, RANKS - 1) else 2)
        assert [sends for sends, _, _ in results] == [messages * n for n in (2, 1, 1, 2, 1, 2)]
        for count, (_, loss, grad) in zip(rows, results, strict=True):
            expected, grads = reference(count)
            assert loss == pytest.approx(expected, rel=1e-12)
            assert torch.equal(grad, grads[rank])


@pytest.mark.parametrize("fail_in", [0, 1, 2])
def test_the_news_of_a_failure_arrives_where_a_message_of_known_shape_was_expected(fail_in):
    rows = [200, 200, 200, 200, 200]
    by_rank = testing.run_ranks(_steps, RANKS, rows, fail_in)
    expected, grads = reference(200)
    for rank, results in enumerate(by_rank):
        for step, (_, said, grad) in enumerate(results):
            if step == fail_in:
                assert "the stage broke" in said
            else:
                assert said == pytest.approx(expected, rel=1e-12)
                assert torch.equal(grad, grads[rank])


def test_tensors_of_every_kind_come_back_from_a_packed_message_and_large_ones_are_not_packed():
    payload = (
        torch.arange(3.0), None, torch.tensor(True), torch.empty(0, 4), torch.ones(2, 5, dtype=torch.complex128).t(),
        torch.arange(5).to(torch.float8_e4m3fn),
    )  # fmt: skip
    layout = layout_of((1, 2, 3), *specs_of(payload))
    for sent, got in zip(payload, layout.unpack(layout.pack(payload), (1, 2, 3)), strict=True):
        assert (sent is None) == (got is None)
        if sent is not None:
            assert (sent.dtype, sent.shape) == (got.dtype, got.shape)
            assert torch.equal(sent.to(torch.complex64), got.to(torch.complex64))
    with pytest.raises(RuntimeError, match=r"expected message \(1, 2, 4\), got \(1, 2, 3\)"):
        layout.unpack(layout.pack(payload), (1, 2, 4))
    assert layout_of((0, 0, 0), *specs_of((torch.empty(2**20, dtype=torch.uint8),))) is None
