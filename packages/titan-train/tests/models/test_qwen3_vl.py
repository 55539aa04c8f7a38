"""Qwen3-VL against transformers' class: logits, every gradient, weights in and out."""

import dataclasses

import pytest
import torch
from titan_ckpt import Checkpointer, TrainState, export_hf, import_hf
from titan_train.config.model import ModelConfig
from titan_train.models import build_model, count_parameters
from titan_train.models.vision_language.args import QWEN3_VL_CONFIGS, Qwen3VLArgs
from titan_train.models.vision_language.decoder import Qwen3VL
from titan_train.models.vision_language.encoder import image_tokens, patch_places
from titan_train.models.vision_language.hf import QWEN3_VL_HF, args_from_hf, config_of, settings_of
from torch._subclasses.fake_tensor import FakeTensorMode

TINY = Qwen3VLArgs(
    dim=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=24, ffn_dim=80, vocab_size=97, rope_theta=1e4,
    rope_row_pairs=4, rope_column_pairs=3, image_token=90, image_start_token=91, image_end_token=92, vision_dim=32,
    vision_layers=3, vision_heads=4, vision_ffn_dim=56, patch=4, frames=2, position_side=5, deepstack_layers=(0, 2),
)  # fmt: skip
SPARSE = dataclasses.replace(TINY, ffn_dim=0, num_experts=4, experts_per_token=2, expert_ffn_dim=40)
GRIDS = [(4, 6), (2, 4), (8, 2)]
"""Rows and columns of patches of each image; the learned positions are 5 x 5, so all of them are interpolated."""


def peer(args):
    transformers = pytest.importorskip("transformers")
    kind = "Qwen3VLMoe" if args.num_experts else "Qwen3VL"
    config = getattr(transformers, f"{kind}Config")(**config_of(args))
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():  # norms and biases too, so that a swap of any two shows
        torch.nn.init.normal_(parameter, mean=0.3 if parameter.ndim == 1 else 0.0, std=0.1)
    return model


@pytest.fixture(scope="module", params=[TINY, SPARSE], ids=["dense", "experts"])
def pair(tmp_path_factory, request):
    """transformers' model, and ours with the weights from its folder."""
    theirs = peer(request.param)
    folder = tmp_path_factory.mktemp("published")
    theirs.save_pretrained(folder)
    ours = Qwen3VL(args_from_hf(theirs.config.to_dict()))
    import_hf(folder, ours, names=QWEN3_VL_HF.key_map)
    return theirs, ours, folder


def batch(grids, args=TINY):
    """Two rows: the first holds the first images between words, the second the last one."""
    g = torch.Generator().manual_seed(1)
    counts = [image_tokens(*grid, args.merge) for grid in grids]
    tokens, source, types = [], [], []
    start = 0
    for row in (counts[:-1], counts[-1:]):
        ids, where = [], []
        for count in row:
            ids += [*torch.randint(80, (3,), generator=g).tolist(), *([args.image_token] * count)]
            where += [-1, -1, -1, *range(start, start + count)]
            start += count
        more = 20 - len(ids)
        tokens.append([*ids, *torch.randint(80, (more,), generator=g).tolist()])
        source.append([*where, *([-1] * more)])
        types.append([int(number >= 0) for number in source[-1]])
    patches, bounds = patch_places(grids, args.merge)
    pixels = torch.randn(len(patches), args.patch_values, generator=g)
    return {
        "tokens": torch.tensor(tokens), "image_source": torch.tensor(source), "patches": patches, "image_bounds": bounds,
        "pixels": pixels,
    }, torch.tensor(types)  # fmt: skip


def call_theirs(model, given, types, grids):
    thw = torch.tensor([(1, *grid) for grid in grids])
    positions, _ = model.model.get_rope_index(given["tokens"], types, image_grid_thw=thw)
    logits = model(
        input_ids=given["tokens"], pixel_values=given["pixels"], image_grid_thw=thw, position_ids=positions
    ).logits
    return logits, positions.permute(1, 2, 0)


def test_logits_and_every_gradient_are_those_of_transformers(pair):
    theirs, ours, _ = pair
    given, types = batch(GRIDS)
    want, positions = call_theirs(theirs, given, types, GRIDS)
    got = ours(**given, positions=positions)
    assert want.std() > 0.1
    # two orders of float32 sums through 6 blocks; angles are rounded from float64 here and multiplied in float32 there
    scale = want.abs().max().item()
    assert (got - want).abs().max() <= 1e-5 * scale
    probe = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
    (want * probe).sum().backward()
    (got * probe).sum().backward()
    names = QWEN3_VL_HF.key_map
    parameters = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        pair_, letters = names.match_native(name)
        expected = parameters[pair_.hf.format(**letters)].grad
        if pair_.part is not None:
            index, count, dim = pair_.part  # transformers holds stacks of experts the other way round than in files
            expected = expected.chunk(count, dim=1 if pair_.transposed else dim)[index]
        assert expected.any(), name
        most = expected.abs().max().item()
        assert (parameter.grad - expected).abs().max() <= 2e-5 * most + 1e-6, name


def test_text_alone_needs_no_image_and_gives_the_logits_of_transformers(pair):
    theirs, ours, _ = pair
    tokens = torch.randint(80, (2, 9), generator=torch.Generator().manual_seed(4))
    want = theirs(input_ids=tokens).logits
    assert (ours.eval()(tokens) - want).abs().max() <= 1e-5 * want.abs().max()
    ours.train()
    assert torch.equal(ours(tokens), ours.eval()(tokens))


def test_weights_go_in_and_out_without_changing_a_bit(pair, tmp_path):
    theirs, ours, _ = pair
    Checkpointer(tmp_path).save(1, TrainState(model=ours, rng=False))
    (step,) = tmp_path.glob("step-*")
    export_hf(step, tmp_path / "out", names=QWEN3_VL_HF.key_map, config=config_of(ours.args))
    again = type(theirs).from_pretrained(tmp_path / "out").state_dict()
    published = theirs.state_dict()
    assert again.keys() == published.keys()
    assert all(torch.equal(again[name], published[name]) for name in published)
    read = Qwen3VL(ours.args)
    import_hf(tmp_path / "out", read, names=QWEN3_VL_HF.key_map)
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in read.state_dict().items())


def test_the_description_of_a_model_is_read_back(pair):
    for args in (TINY, *QWEN3_VL_CONFIGS.values()):
        assert args_from_hf(config_of(args)) == args
    assert settings_of(args_from_hf(pair[0].config.to_dict())) == settings_of(pair[1].args)


def test_a_published_description_with_experts_is_read():
    """It has a field of text models that its class does not heed, and may leave the head width out."""
    args = dataclasses.replace(SPARSE, dim=SPARSE.num_heads * SPARSE.head_dim)
    config = config_of(args)
    config["text_config"] |= {"norm_topk_prob": True, "head_dim": None}
    assert args_from_hf(config) == args


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3_vl_2b", 2_127_532_032),
        ("qwen3_vl_4b", 4_437_815_808),
        ("qwen3_vl_8b", 8_767_123_696),
        ("qwen3_vl_30b_a3b", 31_070_754_032),
    ],
)
def test_the_shipped_models_have_the_published_number_of_parameters(name, parameters):
    assert count_parameters(build_model(ModelConfig(name=name), vocab_size=None)) == parameters


def test_a_batch_without_an_image_still_gives_the_encoder_gradients_of_zero():
    """Otherwise a rank whose batch has none would not take part in the encoder's collectives."""
    model = Qwen3VL(TINY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model(torch.randint(80, (1, 8))).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() != name.startswith("vision."), name


def test_an_image_does_not_see_its_neighbour():
    model = Qwen3VL(TINY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    given, _ = batch(GRIDS)
    together = model.vision(given["pixels"], given["patches"], given["image_bounds"])
    patches, bounds = patch_places(GRIDS[1:2], TINY.merge)
    alone = model.vision(given["pixels"][24:32], patches, bounds)
    for packed, own in zip(together, alone, strict=True):
        assert (packed[6:8] - own).abs().max() <= 1e-5 * own.abs().max()
    changed = given["pixels"].clone()
    changed[:24] += 1.0
    again = model.vision(changed, given["patches"], given["image_bounds"])
    assert all(torch.equal(a[6:], b[6:]) for a, b in zip(again, together, strict=True))


def test_the_forward_reads_nothing_back_from_the_device(monkeypatch):
    """Fake tensors have no values: reading one, which would stall a GPU, raises."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    given, _ = batch(GRIDS)
    with FakeTensorMode(), torch.device("cuda"):
        model = Qwen3VL(TINY)
        fake = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in given.items()}
        logits = model(
            **fake,
            positions=torch.empty(2, 20, 3, dtype=torch.int64),
            cu_seqlens=torch.empty(2, 4, dtype=torch.int32),
        )
    assert logits.shape == (2, 20, TINY.vocab_size)


@pytest.mark.parametrize("rows", [0, 3, 1])
def test_a_grid_that_cannot_be_merged_is_refused(rows):
    with pytest.raises(
        ValueError, match=rf"an image of {rows} x 4 patches cannot be merged in squares of 2 x 2\. Resize"
    ):
        image_tokens(rows, 4, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_row_pairs": 5}, "Use at most 4 of each"),
        ({"vision_heads": 16}, "a multiple of 4 channels"),
        ({"deepstack_layers": (2, 0)}, "must be rising numbers of the 3 encoder blocks"),
        ({"deepstack_layers": (0, 3)}, "must be rising numbers of the 3 encoder blocks"),
        ({"merge": 0}, r"model\.args\.merge=0 must be at least 1"),
    ],
)
def test_arguments_that_no_model_can_have_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("text_config", "attention_bias", True, "attention_bias=True"),
        ("vision_config", "hidden_act", "relu", "hidden_act='relu'"),
        ("vision_config", "out_hidden_size", 7, "out_hidden_size=7"),
        ("vision_config", "num_position_embeddings", 24, "is not the square"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(section, field, value, message):
    config = config_of(TINY)
    config[section][field] = value
    with pytest.raises(ValueError, match=message):
        args_from_hf(config)
