"""Initial weights: their statistics, their names, and a user's own module."""

import math

import pytest
import torch
from titan_fsdp import materialize
from titan_train.config.model import ModelConfig
from titan_train.models import MoE, MoEArgs, build_model, init_for
from titan_train.models.common.blocks import SwiGLU
from torch import Tensor, nn


def fill(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Fill every parameter of a meta model, each from its own generator, as a materializer does."""
    init = init_for(model)
    filled = {}
    for i, (fqn, parameter) in enumerate(model.named_parameters()):
        filled[fqn] = torch.full(parameter.shape, float("nan"))
        init(fqn, filled[fqn], torch.Generator().manual_seed(seed + i))
    return filled


@pytest.mark.parametrize("name", ["llama3_debug", "gpt_debug", "qwen3_moe_debug", "qwen3_next_debug", "deepseek_debug"])
def test_every_parameter_is_filled_from_its_generator_alone(name: str) -> None:
    model = build_model(ModelConfig(name=name), vocab_size=300)
    first = fill(model)
    torch.manual_seed(123)  # the global generator has no say
    again, other = fill(model), fill(model, seed=1000)
    for fqn, value in first.items():
        assert value.isfinite().all(), fqn
        assert torch.equal(value, again[fqn]), fqn
        constant = "norm" in fqn or fqn.endswith("bias")
        assert torch.equal(value, other[fqn]) == constant, fqn


@pytest.mark.parametrize("name", ["llama3_small", "gpt_debug", "qwen3_moe_debug", "deepseek_debug"])
def test_matrices_have_the_stated_deviation_and_residual_outputs_shrink_with_depth(name: str) -> None:
    config = ModelConfig(name=name, args={"num_layers": 4, "dim": 192})
    for fqn, value in fill(build_model(config, vocab_size=300)).items():
        owner, leaf = fqn.split(".")[-2:]
        if fqn.endswith("bias"):
            assert torch.equal(value, torch.zeros_like(value)), fqn
        elif owner.endswith("norm"):
            assert torch.equal(value, torch.ones_like(value)), fqn
        else:
            want = 0.02 / math.sqrt(2 * 4) if owner in ("wo", "w2") or leaf == "w2" else 0.02
            # the deviation of n normal numbers is off by 1 / sqrt(2 n) relative; five of those
            assert float(value.std()) == pytest.approx(want, rel=5 / math.sqrt(2 * value.numel())), fqn
            assert abs(float(value.mean())) < 5 * want / math.sqrt(value.numel()), fqn


def test_expert_biases_on_the_meta_device_start_at_zero() -> None:
    model = build_model(ModelConfig(name="deepseek_debug"), vocab_size=300)
    materialize(model, "cpu", init_for(model))
    assert [name for name, _ in model.named_buffers()] == ["layers.1.moe.expert_bias", "layers.2.moe.expert_bias"]
    for _, bias in model.named_buffers():
        assert torch.equal(bias, torch.zeros(8))


def test_initial_loss_is_that_of_guessing() -> None:
    model = build_model(ModelConfig(), vocab_size=300, device="cpu")
    model.load_state_dict(fill(model))
    tokens = torch.randint(300, (4, 65), generator=torch.Generator().manual_seed(0))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(300), abs=0.1)


class OwnModel(nn.Module):
    """A user's model of torch's own layers, without a word about initial weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.mixer = nn.MultiheadAttention(16, 2)
        self.head = nn.Linear(16, 50)


def test_own_module_gets_torchs_initialisation_of_each_layer() -> None:
    with torch.device("meta"):
        model = OwnModel()
    state = torch.random.get_rng_state()
    filled = fill(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(value.isfinite().all() for value in filled.values())
    assert float(filled["embed.weight"].std()) == pytest.approx(1.0, rel=0.1)  # nn.Embedding: standard normal
    assert torch.equal(filled["norm.weight"], torch.ones(16))
    assert torch.equal(filled["norm.bias"], torch.zeros(16))
    assert float(filled["head.weight"].abs().max()) <= 1 / math.sqrt(16)  # nn.Linear: uniform
    assert float(filled["head.bias"].abs().max()) > 0
    assert torch.equal(filled["head.weight"], fill(model)["head.weight"])


def test_own_init_weights_is_used_and_sees_clean_names() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def init_weights(self, fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
            del generator
            tensor.fill_({"layer.weight": 2.0, "layer.bias": 3.0}[fqn])

    init = init_for(Own())
    tensor = torch.empty(3, 3)
    init("_orig_mod.layer._checkpoint_wrapped_module.weight", tensor, torch.Generator())
    assert torch.equal(tensor, torch.full((3, 3), 2.0))


def test_a_parameter_that_init_weights_leaves_as_it_was_is_named() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.steps = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)

        def init_weights(self, fqn: str, tensor: Tensor, generator: torch.Generator, std: float = 0.02) -> None:
            if fqn.endswith("weight"):
                tensor.normal_(std=std, generator=generator)

    with torch.device("meta"):
        model = Own()
    init = init_for(model)
    for filled in ("layer.weight", "steps"):  # a number that is no float cannot be told from one that was there
        init(filled, torch.zeros_like(model.get_parameter(filled), device="cpu"), torch.Generator())
    with pytest.raises(
        ValueError,
        match=r"Own\.init_weights leaves elements of 'layer.bias' as they were.*init_parameter.*still needs a module's",
    ):
        materialize(model, "cpu", init)


def test_a_parameter_that_nobody_can_fill_is_named() -> None:
    class Own(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(size))

    with pytest.raises(ValueError, match=r"Own does not say how.*'scale'.*init_weights\(fqn, tensor, generator\)"):
        init_for(Own(3))


def test_a_mixture_of_experts_in_an_own_model_is_filled() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            args = MoEArgs(dim=16, num_experts=4, experts_per_token=2, expert_ffn_dim=32, num_shared_experts=1)
            self.moe = MoE(args, SwiGLU(16, 32))
            self.head = nn.Linear(16, 50)

    with torch.device("meta"):
        model = Own()
    filled = fill(model)
    assert all(value.isfinite().all() for value in filled.values())
    for name in ("moe.experts.w1", "moe.experts.w2", "moe.experts.w3", "moe.router.gate.weight"):
        # the deviation of n normal numbers is off by 1 / sqrt(2 n) relative; five of those
        assert float(filled[name].std()) == pytest.approx(0.02, rel=5 / math.sqrt(2 * filled[name].numel())), name


def test_a_model_whose_init_weights_takes_no_arguments_is_filled_by_its_other_methods() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def init_weights(self) -> None:
            raise AssertionError("fills the whole model at once")

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 2.0)

    tensor = torch.empty(3, 3)
    init_for(Own())("layer.weight", tensor, torch.Generator())
    assert torch.equal(tensor, torch.full((3, 3), 2.0))


def test_a_reset_that_leaves_part_of_a_parameter_unset_is_named() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.scale[1:])

    init = init_for(Own())
    with pytest.raises(ValueError, match="leaves elements of 'scale' unset"):
        init("scale", torch.empty(3), torch.Generator())
