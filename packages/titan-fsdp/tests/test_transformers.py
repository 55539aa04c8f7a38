"""Models that are not ours: Hugging Face's transformers, built on meta. Skipped where transformers is missing."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from titan_fsdp import Policy, materialize, named_parameters, plan
from titan_fsdp.names import tied_groups
from titan_testing import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

hf_models = pytest.importorskip("hf_models", reason="transformers is not installed")
models, transformers = hf_models.MODELS, hf_models.transformers


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


DECODERS = {
    "t5": ("T5ForConditionalGeneration", "T5Config", {"num_layers": 12}, [
        *(f"encoder.block.{i}" for i in range(12)), *(f"decoder.block.{i}" for i in range(12)), "root"]),
    "bart": ("BartForConditionalGeneration", "BartConfig", {}, [
        "model.encoder.embed_positions", *(f"model.encoder.layers.{i}" for i in range(12)),
        *(f"model.decoder.layers.{i}" for i in range(12)), "root"]),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {"encoder_layers": 8, "decoder_layers": 8}, [
        "model.encoder.embed_positions", *(f"model.encoder.layers.{i}" for i in range(8)),
        *(f"model.decoder.layers.{i}" for i in range(8)), "root"]),
    "vit": ("ViTForImageClassification", "ViTConfig", {}, [
        *(f"vit.layers.{i}" for i in range(12)), "vit.layernorm+classifier", "root"]),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_hidden_layers": 8}, [
        "model.embed_tokens", *(f"model.layers.{i}" for i in range(8)), "model.norm+lm_head", "root"]),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}, [
        "transformer.wpe", *(f"transformer.h.{i}" for i in range(12)), "root"]),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_hidden_layers": 8}, [
        "model.embed_tokens", *(f"model.layers.{i}" for i in range(8)), "model.norm+lm_head", "root"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
def test_auto_units_are_the_blocks_of_every_tower(name: str) -> None:
    model_class, config_class, options, want = DECODERS[name]
    with torch.device("meta"):
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    units = plan(model, {"shard": 8}).units
    assert [unit.name for unit in units] == want
    total = sum(p.numel() for p in model.parameters())
    tied = {id(p): p.numel() for names in tied_groups(model) for p in [model.get_parameter(names[0])]}
    # The root holds what is tied, a few positions and norms; no other unit holds a fifth.
    assert all(unit.numel * 5 <= total for unit in units[:-1])
    assert units[-1].numel - sum(tied.values()) < 0.02 * total


def gradients_of_t5(ranks: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = models["t5"]()
    model = plan(model, {"shard": ranks}).apply(model, init_device_mesh("cpu", (ranks,)) if ranks > 1 else None)
    materialize(model, "cpu", None, seed=4)
    model.eval()  # no dropout
    tokens = torch.arange(4 * 6).view(4, 6) % 50
    rows = 4 // ranks
    mine = tokens[dist.get_rank() * rows :][:rows] if ranks > 1 else tokens
    model(input_ids=mine, decoder_input_ids=mine, labels=mine.flip(1)).loss.backward()
    return {
        n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for n, p in named_parameters(model)
        if p.grad is not None
    }


def test_a_t5_sharded_by_auto_units_has_the_gradients_of_one_process() -> None:
    want = gradients_of_t5(1)
    for got in run_ranks(gradients_of_t5, 2, 2):
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            # float32 sums over 24 tokens in another order: each gradient is off by at most 24 roundings of its size.
            assert (got[name] - gradient).abs().max() <= 24 * 2**-24 * gradient.abs().max() + 1e-9, name
