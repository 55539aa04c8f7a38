"""FLUX against diffusers' class, parameter by parameter and output by output."""

import dataclasses

import pytest
import torch
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, count_parameters, init_for
from titan_train.models.arguments import model_args
from titan_train.models.flux.args import FLUX_CONFIGS, FluxArgs
from titan_train.models.flux.diffusers import args_from, config_of, from_diffusers, key_map, to_diffusers
from titan_train.models.flux.model import Flux
from titan_train.models.flux.rope import grid_positions, time_features

TINY = dataclasses.replace(FLUX_CONFIGS["flux_tiny"], guidance=True, num_single_layers=3)
ROWS, COLUMNS, TEXT = 3, 2, 5


def peer(args):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    fields = {key: value for key, value in config_of(args).items() if not key.startswith("_")}
    fields["axes_dims_rope"] = tuple(fields["axes_dims_rope"])
    model = diffusers.FluxTransformer2DModel(**fields)
    for parameter in model.parameters():  # norms and biases too, so that a swap of any two shows
        torch.nn.init.normal_(parameter, std=0.05 if parameter.ndim > 1 else 0.3)
    return model


def batch(args, rows=ROWS, columns=COLUMNS):
    g = torch.Generator().manual_seed(1)
    image = torch.randn(2, rows * columns, args.in_channels, generator=g)
    text = torch.randn(2, TEXT, args.text_dim, generator=g)
    pooled = torch.randn(2, args.pooled_dim, generator=g)
    return image, text, pooled, torch.tensor([0.3, 0.85]), torch.tensor([3.5, 1.0])


def ours(args, state):
    model = Flux(args)
    model.load_state_dict(from_diffusers(state, args))
    return model


def call(model, args, image, text, pooled, time, guidance):
    scale = time_features(guidance) if args.guidance else None
    places = grid_positions(TEXT, ROWS, COLUMNS)[None]
    return model(image, text, positions=places, pooled=pooled, time=time_features(time), guidance=scale)


def theirs(model, args, image, text, pooled, time, guidance):
    places = grid_positions(TEXT, ROWS, COLUMNS)
    return model(
        hidden_states=image, encoder_hidden_states=text, pooled_projections=pooled, timestep=time,
        img_ids=places[TEXT:].float(), txt_ids=places[:TEXT].float(),
        guidance=guidance if args.guidance else None, return_dict=False,
    )[0]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("flux_schnell", 11_891_178_560), ("flux_dev", 11_901_408_320), ("flux_tiny", 7_094_336)],
)
def test_the_shipped_models_have_the_published_number_of_parameters(name, parameters):
    assert count_parameters(build_model(ModelConfig(name=name), vocab_size=None)) == parameters


@pytest.mark.parametrize("args", [TINY, FLUX_CONFIGS["flux_tiny"]], ids=["dev", "schnell"])
def test_the_velocity_is_that_of_diffusers(args):
    reference = peer(args)
    model = ours(args, reference.state_dict())
    want = theirs(reference, args, *batch(args))
    got = call(model, args, *batch(args))
    # two orders of float32 sums through 5 blocks; the values are of size 1
    assert want.abs().mean() > 0.05
    assert (got - want).abs().max() <= 1e-5


def test_gradients_are_those_of_diffusers():
    reference = peer(TINY)
    model = ours(TINY, reference.state_dict())
    theirs(reference, TINY, *batch(TINY)).square().mean().backward()
    call(model, TINY, *batch(TINY)).square().mean().backward()
    got = to_diffusers({name: p.grad for name, p in model.named_parameters()}, TINY)
    for name, parameter in reference.named_parameters():
        scale = max(1.0, float(parameter.grad.abs().max()))
        assert (got[name] - parameter.grad).abs().max() <= 1e-5 * scale, name


def test_weights_travel_to_diffusers_and_back_bitwise():
    state = peer(TINY).state_dict()
    back = to_diffusers(ours(TINY, state).state_dict(), TINY)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_a_checkpoint_of_diffusers_is_written_and_read_by_its_own_folder(tmp_path):
    state = peer(TINY).state_dict()
    import json

    from diffusers import FluxTransformer2DModel

    model = ours(TINY, state)
    FluxTransformer2DModel.from_config(config_of(TINY)).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert args_from(written) == TINY
    with pytest.raises(ValueError, match="'UNet2DModel'"):
        args_from(written | {"_class_name": "UNet2DModel"})
    assert set(to_diffusers(model.state_dict(), TINY)) == set(state)


def test_the_key_map_names_every_tensor_once():
    names = key_map(TINY)
    state = Flux(TINY).state_dict()
    joined = [name for name in state if name.endswith("mixer.down.weight")]
    assert len({names.to_hf(name) for name in state}) == len(state) - len(joined)


def test_a_fresh_model_gives_exactly_zero_and_only_its_last_layer_learns_at_first():
    model = Flux(TINY)
    init = init_for(model)
    for name, parameter in model.named_parameters():
        init(name, parameter.data, torch.Generator().manual_seed(2))
    out = call(model, TINY, *batch(TINY))
    assert torch.count_nonzero(out) == 0
    (out - 1.0).square().sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {"final.out.weight", "final.out.bias"}


def test_attention_sees_the_text_and_rotation_tells_places_apart():
    model = ours(TINY, peer(TINY).state_dict())
    image, text, pooled, time, guidance = batch(TINY)
    out = call(model, TINY, image, text, pooled, time, guidance)
    assert not torch.allclose(out, call(model, TINY, image, text.roll(1, 0), pooled, time, guidance), atol=1e-3)
    # text tokens all stand at (0, 0, 0): their order does not matter, that of the image's tokens does
    torch.testing.assert_close(out, call(model, TINY, image, text.flip(1), pooled, time, guidance), atol=1e-5, rtol=0)
    assert not torch.allclose(out, call(model, TINY, image.flip(1), text, pooled, time, guidance).flip(1), atol=1e-3)


def test_the_features_of_a_time_are_made_in_float32_and_survive_a_cast():
    close = torch.tensor([0.5, 0.5005])
    fine, coarse = time_features(close), time_features(close.bfloat16())
    assert (fine[0] - fine[1]).abs().max() > 0.1
    assert (coarse[0] - coarse[1]).abs().max() == 0.0  # what casting the time itself would lose
    assert (fine.bfloat16()[0] - fine.bfloat16()[1]).abs().max() > 0.1


def test_widths_that_cannot_be_rotated_are_refused():
    with pytest.raises(ValueError, match="add up to the head's 64"):
        FluxArgs(dim=128, num_heads=2)
    with pytest.raises(ValueError, match="not a multiple of num_heads=3"):
        FluxArgs(dim=256, num_heads=3)


def test_arguments_of_a_configuration_are_changed_by_name():
    args = model_args(ModelConfig(name="flux_tiny", args={"in_channels": 48}), vocab_size=None)
    assert args.in_channels == 48
