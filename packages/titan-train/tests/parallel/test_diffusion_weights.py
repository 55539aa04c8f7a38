"""Weights of diffusers into a run and out of it, under layouts that cut them."""

import json

import composition
import pytest
import torch
from composition import joined
from safetensors.torch import load_file
from test_diffusion import TINY
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.config.load import with_published
from titan_train.export.diffusers_folder import _samples, _velocity
from titan_train.export.run import export_run
from titan_train.launch.validate import validate
from titan_train.models.arguments import model_args
from titan_train.models.flux.args import FLUX_CONFIGS
from titan_train.models.flux.diffusers import args_from, config_of
from titan_train.models.flux.rope import grid_positions
from titan_train.train import Trainer

LAYOUTS = {
    "one process": (1, {}),
    "fsdp2": (2, {}),
    "tp2": (2, {"parallel": {"tp": 2, "sequence_parallel": False}}),
    "pp2": (2, {"parallel": {"pp": 2}}),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder of several files and an index, as diffusers writes it, and the velocities of its class."""
    diffusers = pytest.importorskip("diffusers")
    folder = tmp_path_factory.mktemp("published")
    args = args_of()
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel.from_config(config_of(args))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1 if parameter.ndim > 1 else 0.3)
    model.save_pretrained(folder, max_shard_size="500KB")
    assert (folder / "diffusion_pytorch_model.safetensors.index.json").is_file()
    image, text, pooled, time, guidance = _samples(args)
    places = grid_positions(5, 3, 2).float()
    with torch.no_grad():
        out = model(
            hidden_states=image, encoder_hidden_states=text, pooled_projections=pooled, timestep=time,
            img_ids=places[5:], txt_ids=places[:5], guidance=guidance, return_dict=False,
        )[0]  # fmt: skip
    return folder, out


def args_of():
    return model_args(parse_config({"model": TINY["model"]}).model, vocab_size=None)


def tensors(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def start(folder, name, sections):
    """Load the published weights, save step 0, and return the velocities."""
    config = parse_config(composition.tree(folder, name, sections))
    with Trainer(config) as trainer:
        velocity = None
        if config.parallel.pp == 1:
            with torch.no_grad():
                velocity = _velocity(trainer.model.parts[0], args_of(), _samples(args_of()))
        trainer.fit(until=0)
        trainer.save()
        return velocity


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_of_diffusers_enter_a_run_and_leave_it_bitwise(name, published, tmp_path):
    folder, expected = published
    ranks, layout = LAYOUTS[name]
    sections = joined(TINY, layout, {"model": {**TINY["model"], "init": f"hf:{folder}"}})
    velocities = run_ranks(start, ranks, tmp_path, "r", sections, timeout_s=170)
    for velocity in velocities:
        if velocity is not None:
            # float32 sums of some hundred terms of size 1, through 4 blocks, in another order
            assert (velocity - expected).abs().max() <= 1e-5
            assert expected.abs().mean() > 0.05
    checks = export_run(tmp_path / "runs" / "r", tmp_path / "out", dtype="fp32", max_shard_bytes=300_000)
    assert [check.passed for check in checks["hf"]] == [True]
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert len(list((tmp_path / "out").glob("diffusion_pytorch_model-*.safetensors"))) > 1
    from diffusers import FluxTransformer2DModel

    again = FluxTransformer2DModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(before[key], value) for key, value in again.state_dict().items())


def test_the_folder_decides_the_arguments_of_the_model(published):
    folder, _ = published
    changed, line = with_published({"model": {"init": f"hf:{folder}"}})
    assert args_from(json.loads((folder / "config.json").read_text())) == args_of()
    assert model_args(parse_config({"model": changed["model"]}).model, vocab_size=None) == args_of()
    assert "model.name=flux_" in line


def test_a_folder_that_is_not_this_model_is_refused_before_ranks_start(published, tmp_path):
    folder, _ = published
    other = {**TINY["model"], "args": TINY["model"]["args"] | {"guidance": False}, "init": f"hf:{folder}"}
    with pytest.raises(ValueError, match="guidance=False should be True"):
        validate(parse_config(composition.tree(tmp_path, "r", TINY | {"model": other})), 1)
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"_class_name": "UNet2DModel"}, "folder `transformer` of a FLUX pipeline"),
        ({"patch_size": 2}, "patch_size=2"),
        ({"out_channels": 7}, "out_channels=7"),
        ({"new_field": 3}, "new_field=3 is not a field"),
        ({"axes_dims_rope": [8, 8]}, "three axes"),
    ):
        with pytest.raises(ValueError, match=message):
            args_from(config | change)
    assert args_from({"_class_name": "FluxTransformer2DModel"}) == FLUX_CONFIGS["flux_schnell"]


def test_what_diffusers_does_not_read_is_refused(tmp_path):
    run_ranks(start, 1, tmp_path, "r", TINY, timeout_s=170)
    run = tmp_path / "runs" / "r"
    for settings, message in (
        ({"to": ["gguf"]}, "folder of diffusers alone"),
        ({"dtype": "float8"}, "diffusers reads fp32, bf16 and fp16"),
    ):
        with pytest.raises(ValueError, match=message):
            export_run(run, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
