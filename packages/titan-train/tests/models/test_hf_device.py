"""Kernels of other packages get no tensor of the CPU, whichever packages transformers found when it was imported.

No package and no GPU is needed: functions that raise stand in their places, bound by transformers' own decorator.
"""

import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import hf_folders

KINDS = [
    "qwen3_next",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("kimi_linear", "granitemoehybrid", "mamba2", "lfm2")),
]


class Kernel:
    """A function of a package, and each of its modules: calls raise."""

    def __getattr__(self, name: str) -> "Kernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        raise RuntimeError("a kernel was called")


class _Package(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel()


@pytest.fixture
def with_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Bind the functions of a module of transformers as if fla-core, mamba-ssm and causal-conv1d had been there."""
    from titan_train.models.hf.state import _forward_of
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    def bind(kind: str) -> tuple[types.ModuleType, list[str]]:
        home = {"qwen3_5_text": "qwen3_5"}.get(kind, kind)
        # without the packages: what a module binds when it is first imported stays for all tests after this one
        module = importlib.import_module(f"transformers.models.{home}.modeling_{home}")
        bound: list[str] = []
        with pytest.MonkeyPatch.context() as packages:
            for package in ("fla", "mamba_ssm", "causal_conv1d"):
                packages.setitem(sys.modules, package, _Package(package))
            for name, function in list(vars(module).items()):
                kept = inspect.getclosurevars(function).nonlocals if isinstance(function, types.FunctionType) else {}
                if "is_new_implementation" in kept:
                    decorate = use_kernel_func_from_hub_with_fallback(kept["func_name"], kept["package"])
                    monkeypatch.setattr(module, name, decorate(inspect.unwrap(function)))
                    bound.append(name)
        assert bound, "transformers binds these functions in another way"
        return module, bound

    _forward_of.cache_clear()
    yield bind
    _forward_of.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_and_a_step_on_the_cpu_call_no_kernel_of_another_package(
    kind: str, tmp_path: Path, with_packages: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from titan_train.models.hf.probe import probe

    module, bound = with_packages(kind)
    for name in bound:
        with pytest.raises(RuntimeError, match="a kernel was called"):
            getattr(module, name)(torch.zeros(1, 4, 4))
    folder = hf_folders.make(tmp_path / kind, kind)
    with torch.device("meta"):
        model: Any = build_model(ModelConfig(name=f"hf:{folder}", seq_len=32), vocab_size=96)
    planned = kind not in ("mamba2", "lfm2")
    probe(model, f"hf:{folder}", packed=planned, staged=planned, drawn=True)  # forward and backward, on the CPU
    assert "could not be tried" not in caplog.text


def test_tensors_on_a_gpu_go_to_the_kernels_as_before(tmp_path: Path, with_packages: Any) -> None:
    module, _ = with_packages("qwen3_next")
    build_model(ModelConfig(name=f"hf:{hf_folders.make(tmp_path / 'q', 'qwen3_next')}", seq_len=32), vocab_size=96)
    out = module.causal_conv1d_fn(torch.randn(1, 3, 5), torch.randn(3, 2), activation="silu", unknown=1)
    assert out.shape == (1, 3, 5)
    with FakeTensorMode(), pytest.raises(RuntimeError, match="a kernel was called"):
        module.causal_conv1d_fn(torch.empty(1, 3, 5, device="cuda"), torch.empty(3, 2, device="cuda"))
    with pytest.raises(ValueError, match="cannot keep packed documents apart on the CPU"):
        module.causal_conv1d_fn(torch.randn(1, 3, 5), torch.randn(3, 2), seq_idx=torch.zeros(1, 5))
