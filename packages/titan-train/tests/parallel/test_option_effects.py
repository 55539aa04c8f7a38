"""Options that take effect only where a model allows it: what came of them is said, and what names nothing is refused."""

import pytest
import titan_fsdp
import torch
from titan_train.cli import main
from titan_train.config import load_config, parse_config
from titan_train.parallel.data_parallel import fsdp_policy
from titan_train.train import Trainer
from torch import nn


@pytest.mark.parametrize(
    ("config", "model", "line"),
    [
        ({"min_speedup": 0.0}, "llama3_debug", "float8.recipe='blockwise': 14 of 15 linear layers"),
        ({}, "llama3_debug", "converts none of 15 linear layers"),
        ({}, "qwen3_moe_debug", "and the experts of"),
    ],
    ids=["all", "too small", "experts"],
)
def test_check_says_which_layers_a_recipe_converts(config, model, line, tmp_path, capsys):
    settings = [word for key, value in config.items() for word in (f"--float8.{key}", str(value))]
    words = ["check", "debug", "--model.name", model, "--float8.recipe", "blockwise", *settings]
    assert main([*words, "--run.dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert line in shown
    assert "layers.*.attention.wq" in shown


def test_a_run_says_which_layers_its_recipe_converts(tmp_path, caplog):
    caplog.set_level("INFO")
    words = [
        "--launch.device",
        "cpu",
        "--run.dir",
        str(tmp_path),
        "--float8.recipe",
        "blockwise",
        "--float8.min_speedup",
        "0",
    ]
    with Trainer(load_config("debug", words)) as trainer:
        assert "2 x layers.*.attention.wq" in (trainer.run_dir / "layout.txt").read_text()
    assert "float8.recipe='blockwise': 14 of 15 linear layers" in caplog.text


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (
            ["--float8.recipe", "blockwise", "--float8.skip", '["layer.0.*"]'],
            "float8.skip: 'layer.0.*' matches no linear",
        ),
        (["--train.dtype", "bf16", "--parallel.keep_fp32", '["nrom"]'], "mp.keep_fp32: 'nrom' matches nothing"),
        (
            ["--parallel.pp", "2", "--parallel.reshard_overrides", '{"layer.0" = "never"}', "--train.dtype", "bf16"],
            "matches no unit",
        ),
        (
            ["--activations.checkpoint", "pattern", "--activations.patterns", '["layer.0"]'],
            "'layer.0' matches no module",
        ),
        (["--optimizer.lr_scales", '{"embeddings.wieght" = 0.5}'], "optimizer.lr_scales"),
    ],
    ids=["float8.skip", "keep_fp32", "reshard_overrides", "activations.patterns", "lr_scales"],
)
def test_patterns_that_name_nothing_of_the_whole_model_are_refused(words, found, tmp_path, capsys):
    assert main(["check", "debug", "--run.dir", str(tmp_path), *words]) == 2
    assert found in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--activations.offload", "true"], "activations.offload=true moves nothing: this run is on cpu"),
        (["--profile.steps", "100:101"], "profile.steps='100:101' begins after the last step, 20: no trace"),
    ],
    ids=["offload", "profile"],
)
def test_a_run_says_which_options_come_to_nothing(words, said, tmp_path, caplog):
    caplog.set_level("INFO")
    with Trainer(load_config("debug", ["--launch.device", "cpu", "--run.dir", str(tmp_path), *words])):
        pass
    assert said in caplog.text


def test_of_several_patterns_of_reshard_overrides_the_first_counts():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.fsdp_units = ["0", "1"]
    found = []
    for order in ({"0": "never", "*": "always"}, {"*": "always", "0": "never"}):
        policy = fsdp_policy(parse_config({"parallel": {"reshard_overrides": order}}), "fsdp", model)
        units = {unit.name: unit.reshard for unit in titan_fsdp.plan(model, {"shard": 2}, policy).units}
        found.append((units["0"], units["1"]))
    assert found == [(False, True), (True, True)]


def test_kept_in_float32_a_head_gives_its_loss_and_a_gate_its_routing_in_it(tmp_path):
    words = [
        "--model.name",
        "qwen3_moe_debug",
        "--train.dtype",
        "bf16",
        "--parallel.keep_fp32",
        '["lm_head", "*.gate"]',
    ]
    seen = {}
    with Trainer(load_config("debug", ["--launch.device", "cpu", "--run.dir", str(tmp_path), *words])) as trainer:
        (model,) = trainer.model.parts
        model.layers["0"].moe.router.register_forward_hook(lambda router, given, out: seen.update(out._asdict()))
        tokens = torch.ones(1, 8, dtype=torch.int64)
        loss = model(tokens, labels=tokens)
    assert {loss.dtype, seen["logits"].dtype, seen["scores"].dtype, seen["weights"].dtype} == {torch.float32}


def test_what_blocks_keep_in_float32_is_gathered_between_their_compiled_graphs(tmp_path):
    words = [
        "--launch.device",
        "cpu",
        "--train.dtype",
        "bf16",
        "--train.steps",
        "2",
        "--parallel.keep_fp32",
        '["*norm*"]',
    ]
    losses = []
    compiled = ["--compile.enabled", "true", "--compile.backend", "aot_eager"]
    for name, more in (
        ("eager", []),
        ("compiled", compiled),
        ("recomputed", [*compiled, "--activations.checkpoint", "full"]),
    ):
        with Trainer(load_config("debug", [*words, *more, "--run.dir", str(tmp_path), "--run.name", name])) as trainer:
            trainer.fit()
            losses.append(trainer.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[2] == pytest.approx(losses[0], rel=1e-3)
