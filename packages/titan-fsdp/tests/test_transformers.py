"""Models that are not ours: Hugging Face's transformers, built on meta. Skipped where transformers is missing."""

from typing import Any

import pytest
import torch
from titan_fsdp import Policy, materialize, plan

models = pytest.importorskip("hf_models", reason="transformers is not installed").MODELS


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return models[name]()


@pytest.mark.parametrize("with_init", [False, True], ids=["own-methods", "init"])
@pytest.mark.parametrize("name", models)
def test_buffers_of_a_model_built_on_meta_equal_those_of_one_built_on_the_cpu(name: str, with_init: bool) -> None:
    def init(fqn: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        assert fqn in parameters, f"{fqn} is a buffer"
        tensor.normal_(0.0, 0.02, generator=generator)

    want, model = models[name](), on_meta(name)
    parameters = {name for name, _ in model.named_parameters()}
    materialize(model, "cpu", init if with_init else None)
    for buffer, values in want.named_buffers():
        # The same kernels on the same shapes: the bits agree.
        assert torch.equal(model.get_buffer(buffer), values), buffer


@pytest.mark.parametrize("name", models)
def test_weights_follow_the_models_own_init(name: str) -> None:
    want, model = models[name](), on_meta(name)
    materialize(model, "cpu", None)
    for fqn, parameter in model.named_parameters():
        reference = want.get_parameter(fqn)
        if not reference.requires_grad or bool((reference == reference.flatten()[0]).all()):
            assert torch.equal(parameter, reference), f"{fqn} is a constant or a fixed table"
        elif reference.numel() >= 256:
            # The standard deviation of n draws has a relative error of 1/sqrt(2n): 4.4 % at 256. Six of those, both.
            assert parameter.std().item() == pytest.approx(reference.std().item(), rel=0.38), fqn
        if fqn.endswith("embed_tokens.weight") and (reference[0] == 0).all():
            assert (parameter[0] == 0).all(), "the padding row stays zero"


def test_a_llama_built_on_meta_computes_what_one_built_on_the_cpu_computes() -> None:
    want, model = models["llama"]().eval(), on_meta("llama").eval()
    materialize(model, "cpu", None, seed=1)
    want.load_state_dict(model.state_dict())
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, want(tokens).logits)


def test_materialize_after_wrapping_gives_the_same_buffers() -> None:
    want = models["llama"]()
    model = plan(on_meta("llama"), {"shard": 1}, Policy()).apply(on_meta("llama"))
    materialize(model, "cpu", None)
    assert torch.equal(model.model.rotary_emb.inv_freq, want.model.rotary_emb.inv_freq)
