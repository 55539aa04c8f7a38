"""What crosses from stage to stage: any structure, any number of tensors, any data type; and metrics beside the loss."""

import collections
import copy
import functools
import os
import re
import typing
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
testing = pytest.importorskip("titan_testing")

from boundary_types import State  # noqa: E402
from titan_pipeline import Schedule, build_schedule  # noqa: E402
from titan_pipeline.runtime import (  # noqa: E402
    Executor,
    GlooTransport,
    PipelineAborted,
    ThreadHub,
    TorchStage,
    host_transport,
    register_structure,
)
from titan_pipeline.runtime.transport.messages import decode_header, encode_header, specs_of, with_structure  # noqa: E402
from titan_pipeline.runtime.transport.plain import decode, encode  # noqa: E402
from titan_pipeline.runtime.transport.tree import TensorTree  # noqa: E402
from torch import nn  # noqa: E402

# float64; the loss is divided before or after the sum: fewer than 64 terms of order one, rounded by 2^-53 each
BOUND = 64 * 2.0**-53


class Layer(nn.Module):
    """Takes and returns a structure of the kind that ``kind`` names."""

    def __init__(self, kind, first):
        super().__init__()
        self.kind, self.first = kind, first
        self.inner = nn.Linear(4, 4)

    def forward(self, *args):
        hidden, mask = self.take(args)
        return self.give(hidden + torch.tanh(self.inner(hidden)) * mask, mask)

    def take(self, args):
        if self.first:
            (x,) = args
            return x, (x[:, :1] > 0).double().detach()
        if self.kind == "dict":
            assert args[0]["nothing"] is None
            assert not args[0]["parts"][1].requires_grad
            return args[0]["parts"]
        if self.kind == "dataclass":
            assert args[0].names == ("a", 3)
            return args[0].hidden, args[0].mask.to(torch.float64)
        if self.kind == "many":
            return sum(args[:12]) / 12, args[12]
        z, mask = args
        return z.real, mask.to(torch.float64)

    def give(self, hidden, mask):
        if self.kind == "dict":
            return {"parts": [hidden, mask], "nothing": None, "count": 2}
        if self.kind == "dataclass":
            return State(hidden, mask.to(torch.float8_e4m3fn), ("a", 3))
        if self.kind == "many":
            return (*[hidden * 1] * 12, mask)
        return torch.complex(hidden, torch.zeros_like(hidden)), mask.bool()


class Last(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        out = self.layer(*args)
        out = out["parts"][0] if isinstance(out, dict) else out.hidden if isinstance(out, State) else out[0]
        return out.real if out.is_complex() else out


def build(kind, num_stages):
    torch.manual_seed(0)
    layers = [Layer(kind, s == 0).double() for s in range(num_stages)]
    return [*layers[:-1], Last(layers[-1])]


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator, dtype=torch.float64) for _ in range(4)]


def loss_and_metrics(output, target):
    loss = nn.functional.mse_loss(output, target)
    return loss, {"largest": (output - target).abs().max(), "rows": len(output)}


def train(transport, schedule, modules):
    stages = [TorchStage(modules[s], s, loss=loss_and_metrics) for s in schedule.stages_of(transport.rank)]
    executor = Executor(schedule, stages, transport)
    batch = data()
    result = executor.step(batch, batch)
    evaluated = executor.evaluate(batch, batch)
    outputs = executor.infer(batch)
    assert result.loss == pytest.approx(evaluated.loss, rel=1e-12)
    return result, outputs, {s.index: [p.grad for p in s.module.parameters()] for s in stages}


def _gloo(text, kinds):
    schedule = Schedule.from_text(text)
    returned = []
    for kind in kinds:
        result, outputs, grads = train(host_transport(), schedule, build(kind, schedule.num_stages))
        returned.append((result.loss, [m["rows"] for m in result.metrics], outputs, grads))
    return returned


def reference(kind, num_stages):
    modules, outputs = build(kind, num_stages), []
    for x in data():
        value = (x,)
        for m in modules:
            value = m(*value) if isinstance(value, tuple) else m(value)
        (nn.functional.mse_loss(value, x) / 4).backward()
        outputs.append(value.detach())
    return outputs, [[p.grad for p in m.parameters()] for m in modules]


KINDS = ["dict", "dataclass", "many", "complex"]


def check(grads, expected):
    for s, got in grads.items():
        for g, e in zip(got, expected[s], strict=True):
            torch.testing.assert_close(g, e, rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_structure_crosses_between_threads(kind, name):
    schedule = build_schedule(name, 2, 4)
    outputs, expected = reference(kind, schedule.num_stages)
    modules = build(kind, schedule.num_stages)
    results = ThreadHub(2).run(lambda t: train(t, schedule, modules))
    last = schedule.placement[-1]
    for rank, (result, got, grads) in enumerate(results):
        check(grads, expected)
        assert len(result.metrics) == (4 if rank == last else 0)
        for g, e in zip(got, outputs, strict=False):
            torch.testing.assert_close(g, e, rtol=0, atol=BOUND)
    assert all(m["rows"] == 2 and not m["largest"].requires_grad for m in results[last][0].metrics)


def test_any_structure_crosses_between_processes():
    schedule = build_schedule("zbv", 2, 4)
    for rank, returned in enumerate(testing.run_ranks(_gloo, 2, schedule.to_text(), KINDS)):
        for kind, (_, rows, _, grads) in zip(KINDS, returned, strict=True):
            check(grads, reference(kind, schedule.num_stages)[1])
            assert rows == ([2] * 4 if rank == schedule.placement[-1] else [])


def test_an_auxiliary_loss_needs_a_tensor_to_join():
    module = Layer("dict", True).double()
    stage = TorchStage(module, 0, aux_loss=lambda m: m.inner.weight.sum(), loss=lambda o, t: o["parts"][0].sum())
    executor = Executor(build_schedule("gpipe", 1, 4), [stage])
    with pytest.raises(ValueError, match="returns a dict: no tensor that can have a gradient, and no tuple with one"):
        executor.step(copy.deepcopy(data()), data())


class Pair(typing.NamedTuple):
    left: object
    right: object


class Executes:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _refused(transport, odd):
    schedule = build_schedule("1f1b", 2, 2)

    class Odd(nn.Linear):
        def forward(self, x):
            x = x if isinstance(x, torch.Tensor) else x["x"]
            return {"x": super().forward(x), "odd": [odd]} if transport.rank == 0 else super().forward(x)

    stage = TorchStage(Odd(4, 4).double(), transport.rank, loss=nn.functional.mse_loss)
    executor = Executor(schedule, [stage], transport)
    try:
        executor.step(data()[:2], data()[:2])
    except (ValueError, PipelineAborted) as err:
        return str(err)
    return "nothing"


def _refused_gloo(folder):
    return _refused(host_transport(), Executes(f"{folder}/made"))


def test_nothing_that_a_rank_sends_runs_on_the_rank_that_receives_it(tmp_path):
    said = testing.run_ranks(_refused_gloo, 2, str(tmp_path))
    assert not (tmp_path / "made").exists()
    assert all(
        re.search(r"the result\['odd'\]\[0\] is a \S*\.Executes, which cannot be sent", text) for text in said
    ), said


class Beside(nn.Linear):
    """Hands over something beside its result: another thing in each step."""

    def __init__(self, beside):
        super().__init__(4, 4)
        self.beside = list(beside)

    def forward(self, x):
        if isinstance(x, dict):
            return super().forward(x["x"])
        return {"x": super().forward(x), "beside": self.beside.pop(0)}


def _refused_then_sent(kind):
    transport = host_transport() if kind == "sockets" else GlooTransport()
    numbers = torch.ones(3, dtype=torch.complex64)
    module = Beside([{1, 2}, numbers.conj(), numbers]).double()
    stage = TorchStage(module, transport.rank, loss=nn.functional.mse_loss)
    executor = Executor(build_schedule("1f1b", 2, 1), [stage], transport, hang_timeout_s=5)
    said = []
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError)) as err:
            executor.step(data()[:1], data()[:1])
        said.append(str(err.value))
        executor.reset()
    return said, executor.step(data()[:1], data()[:1]).loss


@pytest.mark.parametrize("kind", ["sockets", "gloo"])
def test_the_only_message_of_a_step_that_cannot_be_sent_is_an_error_on_both_ranks(kind):
    """Nobody waits for it, and the channel stays clean."""
    returned = testing.run_ranks(_refused_then_sent, 2, kind)
    for (structure, conjugate), loss in returned:
        assert "is a builtins.set, which cannot be sent" in structure
        assert "conj" in conjugate
        assert loss == returned[0][1] > 0


@pytest.mark.parametrize(
    "odd", [Pair(1, 2), {1, 2}, 3j, typing.OrderedDict, functools.partial(int)], ids=lambda o: type(o).__name__
)
def test_a_structure_that_cannot_be_sent_is_refused_in_words_between_threads_too(odd):
    for said in ThreadHub(2).run(lambda t: _refused(t, odd)):
        assert "which cannot be sent to another rank. Return tensors, None, bool, int" in said
        assert "register_structure" in said


def test_plain_values_and_registered_classes_arrive_as_they_were_sent():
    value = {
        "a": (None, True, -(2**80), 1e300, float("inf"), "\u00e9\n", b"\x00\xff"),
        3: [torch.Size([2, 3]), collections.OrderedDict(x=1), torch.bfloat16, torch.device("cuda", 1)],
        (1, "k"): State(torch.ones(2), None, ("a", 3)),
    }
    sent = TensorTree.pack(value, lambda t: True)
    first, *rest = encode_header((0, 1, 2), *specs_of(sent))
    key, specs, structure = decode_header(torch.cat([first.view(torch.int64), *rest]))
    got, _ = with_structure(tuple(sent), structure).unpack(lambda t, wanted: t if wanted else None)
    assert key == (0, 1, 2)
    assert len(specs) == 1
    assert torch.equal(got[1, "k"].hidden, torch.ones(2))
    assert got[1, "k"].names == ("a", 3)
    del got[1, "k"], value[1, "k"]
    assert got == value
    assert [type(x) for x in got[3][:2]] == [torch.Size, collections.OrderedDict]


@pytest.mark.parametrize(
    "structure", [b"[]", b"x", b"[[1,2,3],[]]", b'[["os.system","echo"],[]]', b'[["dtype","load"],[]]', b"[" * 9999]
)
def test_a_structure_that_no_rank_wrote_is_an_error(structure):
    with pytest.raises(ValueError):  # noqa: PT011 - in the words of json or in ours
        TensorTree.received([], structure)


def test_no_source_file_unpickles():
    root = Path(__file__).parents[1] / "src"
    words = ("pickle.load", "Unpickler", "_object(", "_object_list(", "import pickle", "marshal")
    found = [f"{path.name}: {word}" for path in root.rglob("*.py") for word in words if word in path.read_text()]
    assert not found


class Named(dict):
    """A dict that is made from something else."""

    def __init__(self, name):
        super().__init__()
        self.name = name


class Attributes(dict):
    """A dict whose items are attributes."""

    def __init__(self):
        super().__init__()
        self.__dict__ = self


@pytest.mark.parametrize("metrics", [collections.defaultdict(list), Named("rows"), collections.Counter(), Attributes()])
def test_metrics_may_be_any_kind_of_dict(metrics):
    def loss(output, target):
        metrics["sums"] = [output.sum()]
        return output.sum(), metrics

    executor = Executor(build_schedule("gpipe", 1, 1), [TorchStage(nn.Linear(4, 4), 0, loss=loss)])
    (got,) = executor.step([torch.ones(2, 4)], [0]).metrics
    assert type(got) is type(metrics)
    if isinstance(metrics, Attributes):
        assert vars(got) is got
    else:
        assert vars(got) == vars(metrics) if hasattr(metrics, "__dict__") else got.default_factory is list
    assert metrics["sums"][0].requires_grad
    assert not got["sums"][0].requires_grad


@pytest.mark.parametrize("kind", [collections.defaultdict, Named, collections.Counter, Attributes])
def test_any_kind_of_dict_crosses_between_ranks_once_its_class_is_registered(kind):
    register_structure(kind)
    given = Named("rows") if kind is Named else kind()
    given["rows"] = 3
    got, flags = decode(encode(given, [True]))
    assert (type(got), dict(got), flags) == (kind, {"rows": 3}, [True])
    assert kind is not Attributes or vars(got) is got
