"""Layers with a state of transformers' families: packed documents are the documents alone, values and every gradient."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import titan_fsdp as fsdp
import torch
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, init_for

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import hf_folders

BOUNDS = [[0, 1, 2, 9, 10, 24], [0, 23, 24, 24, 24, 24]]  # documents of one token, at both ends too
KINDS = [
    "kimi_linear",
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in ("qwen3_next", "qwen3_5_text", "granitemoehybrid", "nemotron_h")
    ),
]


def gradients(model: Any, rows: list[tuple[Any, Any]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of all rows one after the other, and gradients of a sum over their tokens."""
    model.zero_grad()
    logits = torch.cat([model(ids, cu_seqlens=bounds).flatten(0, 1) for ids, bounds in rows])
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_the_documents_alone(kind: str, tmp_path: Path) -> None:
    folder = hf_folders.make(tmp_path / kind, kind)
    model: Any = build_model(ModelConfig(name=f"hf:{folder}", seq_len=32), vocab_size=96)
    fsdp.materialize(model, "cpu", init_for(model), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    ids = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(5))
    documents = [
        (row[None, a:b], None) for row, ends in zip(ids, BOUNDS, strict=True) for a, b in pairwise(ends) if a < b
    ]
    got, got_gradients = gradients(model, [(ids, torch.tensor(BOUNDS, dtype=torch.int32))])
    want, want_gradients = gradients(model, documents)
    # float32: the state is a sum over a document, in chunks of other lengths
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert got_gradients.keys() == want_gradients.keys()
    largest = max(float(g.abs().max()) for g in want_gradients.values())
    for name, gradient in want_gradients.items():
        off = float((got_gradients[name] - gradient).abs().max())
        assert off <= 2e-5 * max(float(gradient.abs().max()), 0.01 * largest), name


def test_what_a_layer_computes_is_its_own_code_and_nothing_of_transformers_is_changed() -> None:
    from titan_train.models.hf.state import has_state
    from transformers.models.qwen3_next import modeling_qwen3_next as own

    assert has_state(own.Qwen3NextGatedDeltaNet.__new__(own.Qwen3NextGatedDeltaNet))
    assert not has_state(own.Qwen3NextAttention.__new__(own.Qwen3NextAttention))
    assert own.causal_conv1d_fn.__module__.startswith("transformers.")
