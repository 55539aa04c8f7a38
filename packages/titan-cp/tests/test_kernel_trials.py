"""A kernel of another package is taken where it equals plain torch at its first call, values and gradients; otherwise torch runs.

No GPU: the kernels here are stubs with the signatures of fla-core 0.6.0, computed a token at a time.
"""

import logging
import re
import sys
import time
import types

import pytest
import torch
from titan_cp import backends, explain_state, linear_attention, local_linear_attention, plan
from titan_cp.backends import BACKENDS, Request, TrialKernel, choose_kernel, kernel_choices, select
from titan_cp.backends import trial as trial_module
from titan_cp.backends.cpu_flash import CpuFlash
from titan_cp.state import kernels
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

NAMES = {
    "gated_delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
    "mamba2": ("fla.ops.simple_gla", "chunk_simple_gla"),
    "gated_linear": ("fla.ops.gla", "chunk_gla"),
}


def recurrence(q, k, v, g, beta=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    """fla's functions, in torch: ``[B, T, H, D]``, packed rows as one row with ``cu_seqlens``."""
    assert q.dtype == k.dtype == v.dtype
    assert initial_state is None
    assert output_final_state
    assert cu_seqlens is None or (q.shape[0] == 1 and bool((cu_seqlens.diff() > 0).all()))
    out_dtype = v.dtype
    q, k, v, g = (x.float() for x in (q, k, v, g))
    groups = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(groups, dim=2) for x in (q, k))
    state, outputs, finals = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), [], []
    ends = set() if cu_seqlens is None else set(cu_seqlens[1:].tolist())
    for t in range(v.shape[1]):
        state = state * (g[:, t].unsqueeze(-1) if g.ndim == 4 else g[:, t, :, None, None]).exp()
        value = v[:, t]
        if beta is not None:
            value = beta[:, t, :, None].float() * (value - (k[:, t].unsqueeze(-2) @ state).squeeze(-2))
        state = state + k[:, t].unsqueeze(-1) * value.unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2) * scale)
        if t + 1 in ends:
            finals.append(state)
            state = torch.zeros_like(state)
    return torch.stack(outputs, 1).to(out_dtype), state if cu_seqlens is None else torch.cat(finals)


class Calls:
    """A stub of fla and how often it was called; ``wrong`` changes the result."""

    def __init__(self, wrong=lambda out, keywords: out):
        self.count, self.wrong = 0, wrong

    def __call__(self, **keywords):
        self.count += 1
        out, state = recurrence(**keywords)
        return self.wrong(out, keywords), state


@pytest.fixture
def installed(monkeypatch):
    """Put a stub in the place of every function of fla, as if a GPU were here."""

    def put(stub):
        for module, function in NAMES.values():
            found = types.ModuleType(module)
            setattr(found, function, stub)
            monkeypatch.setitem(sys.modules, module, found)
        monkeypatch.setattr(kernels, "_problem", lambda device, dtype: None)
        return stub

    backends.forget_choices()
    yield put
    backends.forget_choices()


def inputs(kind, tokens=80, dtype=torch.float32):
    make = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    key = torch.nn.functional.normalize(draw(2, 2, tokens, 6), dim=-1)
    decay = -draw(2, 4, tokens, *((6,) if kind in ("kda", "gated_linear") else ())).abs()
    beta = draw(2, 4, tokens).sigmoid() if kind in ("gated_delta", "kda") else None
    found = [draw(2, 2, tokens, 6), key, draw(2, 4, tokens, 5).to(dtype), decay, beta]
    return [None if x is None else x.requires_grad_() for x in found]


def documents(tokens):
    """Two rows, cut differently, by numbers and by boundaries that repeat."""
    numbers = torch.zeros(2, tokens, dtype=torch.int64)
    numbers[0, 3:] = 1
    numbers[1, tokens // 2 :] = 1
    return numbers, torch.tensor(
        [0, 3, tokens, tokens, tokens + tokens // 2, 2 * tokens, 2 * tokens], dtype=torch.int32
    )


def close(found, wanted):
    return all(torch.allclose(x, y, atol=1e-4) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", NAMES)
def test_an_equal_kernel_is_taken_and_gives_what_torch_gives(installed, kind, packed):
    stub = installed(Calls())
    given, (numbers, boundaries) = inputs(kind), documents(80)
    rows = {"documents": numbers, "boundaries": boundaries} if packed else {}
    plain = local_linear_attention(
        *given, documents=numbers if packed else None, boundaries=boundaries if not packed else None
    )
    assert stub.count == 0, "without both forms of the documents no kernel is tried"
    found = local_linear_attention(*given, **rows)
    assert stub.count == 2, "the trial and the call"
    assert found[0].shape == plain[0].shape
    wanted = [x for x in given if x is not None]
    grads = [torch.autograd.grad(x.square().sum(), wanted) for x, _ in (found, plain)]
    assert close([*found, *grads[0]], [*plain, *grads[1]])
    assert [choice.used.name for choice in kernel_choices()] == [f"fla's {NAMES[kind][1]}"]
    local_linear_attention(*given, **rows)
    assert stub.count == 3, "a case is tried once"


def test_a_plan_that_cuts_no_document_takes_the_kernel_and_one_that_does_says_why_not(installed):
    stub = installed(Calls())
    given = inputs("kda")
    whole = plan(cu_seqlens=[0, 3, 40, 80], size=1, rank=0, num_heads=4, method="ring", layout="contiguous")
    numbers = torch.tensor([0] * 3 + [1] * 37 + [2] * 40).expand(2, -1)
    assert close([linear_attention(*given, plan=whole)], [local_linear_attention(*given, documents=numbers)[0]])
    assert stub.count == 2
    assert "fla's chunk_kda, equal to torch at its first call" in explain_state(whole, "kda", num_heads=4)
    cut = plan(128, size=2, rank=0, num_heads=4, method="ring", layout="contiguous")
    assert "cuda: torch, in chunks: other packages' kernels take no pieces" in explain_state(cut, "kda", num_heads=4)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.01


def shifted(out, keywords):
    return out + torch.nn.functional.one_hot(torch.tensor(out.shape[1] - 1), out.shape[1])[None, :, None, None] * 0.1


def wrong_gradient(out, keywords):
    return _WrongGradient.apply(out)


def raising(out, keywords):
    raise RuntimeError("out of shared memory: Required 300000")


def cast_down(out, keywords):
    return out.to(torch.bfloat16).to(out.dtype)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (shifted, "the output differs from torch's by"),
        (wrong_gradient, "the gradient of"),
        (raising, "raised RuntimeError: out of shared memory"),
        (cast_down, r"\(limit 1.0e-04\)"),
        (lambda out, keywords: out * float("nan"), "differs from torch's by nan"),
        (lambda out, keywords: out[:, :-1], "raised"),
    ],
)
def test_a_kernel_that_differs_is_left_and_said_once(installed, wrong, words, caplog):
    stub = installed(Calls(wrong))
    given = inputs("gated_delta")
    with caplog.at_level(logging.WARNING, "titan_cp"):
        found = [local_linear_attention(*given)[0] for _ in range(3)]
    assert stub.count == 1, "the trial alone"
    assert len(caplog.records) == 1
    (choice,) = kernel_choices()
    assert choice.used.name == "torch"
    assert re.search(words, choice.reasons["fla's chunk_gated_delta_rule"])
    assert torch.equal(found[0], found[2])


def test_the_rounding_of_the_dtype_is_allowed(installed):
    installed(Calls())
    local_linear_attention(*inputs("gated_delta", dtype=torch.bfloat16))
    (choice,) = kernel_choices()
    assert choice.used.name == "fla's chunk_gated_delta_rule"


def test_without_a_gpu_or_the_package_the_reason_is_said():
    backends.forget_choices()
    local_linear_attention(*inputs("mamba2"))
    (choice,) = kernel_choices()
    assert str(choice).endswith("torch (fla's chunk_simple_gla passed over: needs CUDA tensors, got cpu)")
    text = explain_state(plan(64, size=1, rank=0, num_heads=4), "mamba2", num_heads=4)
    assert "cpu: torch, in chunks: fla's chunk_simple_gla needs CUDA tensors, got cpu" in text


@pytest.mark.parametrize("kind", NAMES)
def test_tensors_of_the_cpu_try_no_kernel_on_a_machine_with_the_package_and_a_gpu(kind, monkeypatch):
    """Triton takes their addresses for addresses on the GPU, and an illegal access there ends the process' CUDA context."""

    def never(**keywords):
        raise AssertionError("a kernel was called")

    for module, function in NAMES.values():
        found = types.ModuleType(module)
        setattr(found, function, never)
        monkeypatch.setitem(sys.modules, module, found)
    monkeypatch.setattr(kernels, "_installed", lambda package: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backends.forget_choices()
    given, (numbers, boundaries) = inputs(kind), documents(80)
    for rows in ({}, {"documents": numbers, "boundaries": boundaries}):
        out, _ = local_linear_attention(*given, **rows)
        out.sum().backward()
    for choice in kernel_choices():
        assert choice.used.name == "torch"
        assert choice.reasons[f"fla's {NAMES[kind][1]}"] == "passed over: needs CUDA tensors, got cpu"
    assert len(kernel_choices()) == 2
    (reason,) = (found.problem for found in kernels.candidates(kind, torch.device("cuda"), torch.bfloat16))
    assert reason is None, "there it would be tried"
    backends.forget_choices()


def test_short_rows_and_a_state_that_goes_on_try_nothing(installed):
    stub = installed(Calls())
    given = inputs("gated_delta")
    _, state = local_linear_attention(*(x[:, :, :60] for x in given))
    local_linear_attention(*given, state=state)
    assert stub.count == 0


def test_the_trial_is_unseen_by_activation_checkpointing_and_by_the_callers_generator(installed):
    """A trial within the first forward would be missing in the second: its saved tensors would not match."""
    stub = installed(Calls())
    given = inputs("gated_delta")

    def keep_products(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    out = checkpoint(
        lambda *x: local_linear_attention(*x)[0], *given, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(keep_products),
    )  # fmt: skip
    assert torch.equal(torch.rand(1), want)
    found = torch.autograd.grad(out.square().sum(), given)
    assert stub.count == 3, "trial, forward, forward again"
    plain = local_linear_attention(*given, documents=torch.zeros(2, 80, dtype=torch.int64))[0]
    assert close(found, torch.autograd.grad(plain.square().sum(), given))


def test_fake_tensors_try_nothing(installed):
    stub = installed(Calls())
    with FakeTensorMode() as mode:
        local_linear_attention(*(mode.from_tensor(x) for x in inputs("kda")))
        request = Request(torch.device("cpu"), torch.float32, 16, True, False)
        assert select("auto", request, torch.zeros(1)).name == "cpu_flash", "what a real call would try first"
    assert stub.count == 0
    assert kernel_choices() == []


class _WrongFlash(CpuFlash):
    name = "wrong_flash"

    def block_backward(self, saved, causal, bias, scale):
        grad_q, grad_k, grad_v = super().block_backward(saved, causal, bias, scale)
        return grad_q, grad_k * 1.001, grad_v


def test_auto_passes_over_an_attention_backend_whose_gradient_is_wrong(monkeypatch):
    backends.forget_choices()
    request = Request(torch.device("cpu"), torch.float32, 16, True, False)
    q = torch.zeros(1)
    assert select("auto", request, q).name == "cpu_flash"
    backends.forget_choices()
    monkeypatch.setitem(BACKENDS, "cpu_flash", _WrongFlash())
    assert select("auto", request, q).name == "naive"
    text = str(backends.explain("cpu", torch.float32, head_dim=16, packed=True))
    assert "the gradient of k differs from torch's by 1.0e-03 of its largest value" in text
    assert "naive        used" in text
    assert select("cpu_flash", request, q).name == "wrong_flash", "one that is named is used as it is"
    backends.forget_choices()


def test_the_first_equal_candidate_is_taken_and_the_rest_are_not_tried():
    backends.forget_choices()
    tried = []

    def trial(run):
        tried.append(run)
        return {"the output": torch.tensor([run])}

    listed = []

    def given():
        listed.append(1)
        return [
            TrialKernel("far", 2.0),
            TrialKernel("cannot", 0.0, "needs another device"),
            TrialKernel("near", 1.00001),
            TrialKernel("last", 1.0),
        ]

    for _ in range(2):
        chosen = choose_kernel(
            ("sum",), given, TrialKernel("torch", 1.0), trial, like=torch.zeros(1), dtype=torch.float32
        )
        assert chosen.name == "near"
    assert tried == [1.0, 2.0, 1.00001]
    assert listed == [1]  # later calls only look the case up
    (choice,) = kernel_choices()
    assert choice.reasons["last"] == "not tried"
    assert choice.reasons["cannot"] == "passed over: needs another device"
    backends.forget_choices()


def test_a_trial_that_takes_long_says_what_is_tried(monkeypatch, caplog):
    backends.forget_choices()
    monkeypatch.setattr(trial_module, "_LONG_S", 0.05)

    def trial(run):
        time.sleep(run)
        return {"the output": torch.ones(1)}

    given = [TrialKernel("slow", 0.5)]
    choose_kernel(("sum",), lambda: given, TrialKernel("torch", 0.2), trial, like=torch.zeros(1), dtype=torch.float32)
    backends.forget_choices()
    assert [r.message for r in caplog.records] == [
        "sum: still trying slow, which compiles and tunes itself at its first call here"
    ]


@pytest.mark.parametrize(
    ("capability", "triton", "installed", "faulty"),
    [
        ((9, 0), "3.6.0", "", ["gated_delta", "mamba2"]),
        ((9, 0), "3.4.0+git1", "", ["gated_delta", "mamba2"]),
        ((9, 0), "3.7.1", "", []),
        ((9, 0), "3.3.1", "", []),
        ((8, 0), "3.6.0", "", []),
        ((9, 0), "3.6.0", "tilelang", []),
    ],
)
def test_a_known_fault_of_fla_is_passed_over_without_a_trial(monkeypatch, capability, triton, installed, faulty):
    monkeypatch.setattr(kernels, "_installed", lambda package: package in ("fla", "triton", installed))
    monkeypatch.setattr("importlib.metadata.version", lambda package: triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = {kind: kernels.candidates(kind, torch.device("cuda"), torch.bfloat16)[0].problem for kind in NAMES}
    assert [kind for kind, problem in found.items() if problem] == faulty
    assert all("#640" in found[kind] for kind in faulty)
