"""Float8 layers after LayerNorm and GELU: one pass with the cast, and one cast for linears of one input."""

import types

import pytest
import titan_fp8
import torch
from float8_casts import Casts
from titan_train.config import Float8Config
from titan_train.models import GPT
from titan_train.models.common.shared_input import GeluInput, ModulatedNorm, SharedInput
from titan_train.models.flux.args import FluxArgs
from titan_train.models.flux.model import Flux
from titan_train.models.flux.rope import TIME_FEATURES
from titan_train.models.gpt.args import GPTArgs
from titan_train.models.vision_language.args import EncoderArgs
from titan_train.models.vision_language.encoder import VisionEncoder, patch_places
from titan_train.parallel.float8 import CastingLayerNorm, CastingModulatedNorm, convert_to_float8

BLOCKS = 2


def gpt():
    return GPT(GPTArgs(dim=64, num_layers=BLOCKS, num_heads=4, vocab_size=64, max_seq_len=64))


def flux():
    args = FluxArgs(
        dim=64, num_heads=2, num_layers=BLOCKS, num_single_layers=BLOCKS, text_dim=32, pooled_dim=16,
        rope_index_dim=8, rope_row_dim=12, rope_column_dim=12,
    )  # fmt: skip
    return Flux(args)


def vision():
    args = EncoderArgs(
        vision_dim=64, vision_layers=BLOCKS, vision_heads=4, vision_ffn_dim=176, patch=2, frames=1, position_side=8,
        deepstack_layers=(0,),
    )  # fmt: skip
    model = VisionEncoder(args, 48)
    model.patch_embedding.reset_parameters()
    return model


def make(family, dtype, *, fuse=True, recipe="blockwise"):
    torch.manual_seed(0)
    model = family().to(dtype)
    with torch.no_grad():  # a fresh FLUX is an identity
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape).to(dtype))
    convert_to_float8(model, Float8Config(recipe=recipe, min_speedup=0.0), tokens=64, fuse_norms=fuse)
    return model


def loss_of(model):
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, GPT):
        return model(torch.randint(64, (2, 32), generator=generator)).float().square().mean()
    dtype = next(model.parameters()).dtype
    if isinstance(model, VisionEncoder):  # 52 patches: no whole block of rows
        patches, bounds = patch_places([(4, 4), (6, 6)], 2)
        pixels = torch.randn(bounds[-1], 12, generator=generator).to(dtype)
        return torch.stack([out.float().square().mean() for out in model(pixels, patches, bounds)]).sum()
    shapes = {"image": (2, 16, 64), "text": (2, 8, 32), "pooled": (2, 16), "time": (2, TIME_FEATURES)}
    given = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    positions = torch.stack([torch.arange(24)] * 3, dim=-1)[None]
    image, text = given.pop("image"), given.pop("text")
    return model(image, text, positions=positions, **given).float().square().mean()


def take_apart(model):
    """Norms and GELU as passes of their own, with the same roundings."""
    for name, module in list(model.named_modules()):
        if isinstance(module, GeluInput):
            plain = GeluInput()
            plain.forward = lambda x, linear: linear(titan_fp8.gelu(x))
            model.set_submodule(name, plain)
        elif type(module) is ModulatedNorm:
            module.forward = types.MethodType(
                lambda self, x, shift, scale: titan_fp8.layer_norm(x, 1 + scale, shift, self.eps), module
            )
        elif type(module) is torch.nn.LayerNorm and name.startswith(("layers.", "blocks.")):
            module.forward = types.MethodType(
                lambda self, x: titan_fp8.layer_norm(x, self.weight, self.bias, self.eps), module
            )


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [gpt, flux, vision])
def test_casting_in_the_pass_gives_the_bits_of_norm_and_gelu_and_then_the_cast(family, dtype, recipe):
    found = []
    for fuse in (True, False):
        model = make(family, dtype, fuse=fuse, recipe=recipe)
        if not fuse:
            take_apart(model)
        loss = loss_of(model)
        loss.backward()
        found.append({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}})
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[1])


def test_norms_and_gelu_of_gpt_are_computed_in_the_pass_that_casts():
    model = make(gpt, torch.bfloat16)
    assert sum(isinstance(m, CastingLayerNorm) for m in model.modules()) == 2 * BLOCKS
    with Casts() as casts:
        loss_of(model).backward()
    assert casts.calls["layernorm_cast_block"] == 2 * BLOCKS
    assert casts.calls["gelu_cast_block"] == BLOCKS
    # what is left: attention's output, and the gradient of every linear's output
    linears = sum(isinstance(m, titan_fp8.Float8Linear) for m in model.modules())
    assert casts.calls["cast_block_dual"] == BLOCKS + linears


def test_flux_casts_each_input_once_and_its_norms_in_the_same_pass():
    model = make(flux, torch.bfloat16)
    assert sum(isinstance(m, CastingModulatedNorm) for m in model.modules()) == 3 * BLOCKS
    with torch.no_grad(), Casts() as casts:
        loss_of(model)
    # text and image have attention's input and a feed-forward each; a single block has one input of both
    assert casts.calls["layernorm_cast_block"] == 4 * BLOCKS + BLOCKS
    assert casts.calls["gelu_cast_block"] == 2 * BLOCKS + BLOCKS
    # attention's output, of each stream of a double block, and in a single one
    assert casts.calls["cast_block_dual"] + casts.calls["cast_block"] == 2 * BLOCKS + BLOCKS


def test_the_encoder_of_images_casts_each_input_once_and_its_norms_in_the_same_pass():
    model = make(vision, torch.bfloat16)
    assert sum(isinstance(m, CastingLayerNorm) for m in model.modules()) == 2 * BLOCKS
    with torch.no_grad(), Casts() as casts:
        loss_of(model)
    assert casts.calls["layernorm_cast_block"] == 2 * BLOCKS
    assert casts.calls["gelu_cast_block"] == BLOCKS
    # attention's output; the input and the output of `up` in both projectors
    assert casts.calls["cast_block_dual"] + casts.calls["cast_block"] == BLOCKS + 2 * 2


@pytest.mark.parametrize(("family", "kind"), [(gpt, CastingLayerNorm), (flux, CastingModulatedNorm)])
def test_hooks_of_a_norm_see_its_output(family, kind):
    model, seen = make(family, torch.bfloat16), []
    for module in model.modules():
        if isinstance(module, kind):
            module.register_forward_hook(lambda norm, given, out: seen.append(out))
    loss_of(model)
    assert seen
    assert all(isinstance(out, torch.Tensor) for out in seen)


@pytest.mark.parametrize("family", [gpt, flux, vision])
def test_float8_stays_near_the_model_in_high_precision(family):
    converted, reference = (make(family, torch.float32) for _ in range(2))
    for name, module in list(reference.named_modules()):
        if isinstance(module, titan_fp8.Float8Linear):
            linear = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight, linear.bias = module.weight, module.bias
            reference.set_submodule(name, linear)
    got, want = (loss_of(model) for model in (converted, reference))
    assert abs(got - want) <= 0.02 * abs(want)


class TwoReaders(torch.nn.Module):
    """Attention and feed-forward side by side, after one norm."""

    norm_readers = (("norm", "first"), ("norm", "second"))

    def __init__(self, *, shared):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.first, self.second = Reader(shared=True), Reader(shared=shared)

    def forward(self, x):
        normed = self.norm(x)
        return self.first(normed) + self.second(normed)


class Reader(torch.nn.Module):
    def __init__(self, *, shared):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)
        if shared:
            self.linears = SharedInput()

    def forward(self, x):
        return self.linears(x, self.linear)[0] if hasattr(self, "linears") else self.linear(x)


@pytest.mark.parametrize("shared", [True, False], ids=["both can", "one cannot"])
def test_a_norm_is_left_alone_unless_all_of_its_readers_can_apply_it(shared):
    torch.manual_seed(0)
    model = TwoReaders(shared=shared)
    x = torch.randn(16, 32)
    want = model(x)
    convert_to_float8(model, Float8Config(recipe="blockwise", min_speedup=0.0), tokens=16)
    assert isinstance(model.norm, CastingLayerNorm) == shared
    assert (model(x) - want).norm() <= 0.05 * want.norm()


def test_a_reader_that_the_block_lacks_is_refused_by_name():
    class Misnamed(TwoReaders):
        norm_readers = (("norm", "third"),)

    with pytest.raises(ValueError, match="norm_readers of Misnamed names 'third'"):
        convert_to_float8(Misnamed(shared=True), Float8Config(recipe="blockwise", min_speedup=0.0), tokens=16)
