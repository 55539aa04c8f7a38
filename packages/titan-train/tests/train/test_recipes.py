"""Continued training: another learning rate, longer sequences, new tokens, frozen parameters, adapters."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.config.model import ModelConfig
from titan_train.models import build_model
from titan_train.parallel.structure import freeze

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import hf_runs

TP_PP = {"parallel": {"tp": 2, "pp": 2}, "pipeline": {"schedule": "1f1b"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    import composition

    folder = tmp_path_factory.mktemp("recipes")
    composition.prepare(folder)
    return str(folder)


def train(folder: str, tree: dict[str, Any]) -> Any:
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import hf_runs

    return hf_runs.run(folder, "recipe", tree)


def started(folder: str, tree: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights that a rank starts with."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
    import composition
    from titan_train.train import Trainer

    config = parse_config(composition.tree(folder, "started", tree))
    with Trainer(config, run_dir=Path(folder) / f"started-{id(tree)}") as trainer:
        return composition.boxes(trainer.model, of=lambda parameter: parameter.detach().clone())


def with_model(source: str, layout: dict[str, Any], **model: Any) -> dict[str, Any]:
    tree = hf_runs.sections(source, layout)
    return tree | {"model": tree["model"] | model}


def published(source: str) -> dict[str, torch.Tensor]:
    return load_file(Path(source) / "model.safetensors")


@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (2, {}), (4, TP_PP)])
def test_new_tokens_start_as_the_mean_of_the_old(folder: str, ranks: int, layout: dict[str, Any]) -> None:
    import composition

    source = hf_runs.publish(folder, "phi3")  # 264 tokens, tied
    tree = with_model(source, layout, args={"vocab_size": 280}, init_changes=["vocab_size"])
    weights = composition.assemble(run_ranks(started, ranks, folder, tree, init=ranks > 1, timeout_s=120))
    old = published(source)["model.embed_tokens.weight"]
    table = weights["model.embed_tokens.weight"]
    assert torch.equal(table[:264], old)
    # the sum over pieces of the file is taken in another order than mean's
    torch.testing.assert_close(table[264:], old.mean(0).expand(16, -1), atol=1e-7, rtol=0)


def test_another_vocabulary_or_rotary_base_must_be_named(folder: str) -> None:
    from titan_train.train.warm_start import check_init

    source = hf_runs.publish(folder, "llama")

    def check(**model: Any) -> None:
        choice = ModelConfig(name=f"hf:{source}", init=f"hf:{source}", **model)
        check_init(choice.init, build_model(choice, vocab_size=260), choice)

    longer = {"rope_parameters.rope_theta": 1e6, "max_position_embeddings": 512}
    with pytest.raises(ValueError, match=r"max_position_embeddings=512 should be 64.*rope_parameters.*init_changes"):
        check(args=longer, seq_len=64)
    check(args=longer, seq_len=512, init_changes=("rope_parameters", "max_position_embeddings"))
    with pytest.raises(ValueError, match="longer than the 64 positions"):
        check(seq_len=512)
    with pytest.raises(ValueError, match=r"init_changes: this model has no argument 'rope_theta'.*rope_parameters"):
        check(seq_len=64, init_changes=("rope_theta",))


def test_a_family_here_takes_a_new_rotary_base_too(tmp_path: Path) -> None:
    from titan_train.models.llama.hf import LLAMA_HF
    from titan_train.train import warm_start

    published_args = ModelConfig(name="llama3_debug").args
    model: Any = build_model(ModelConfig(name="llama3_debug", args=published_args), vocab_size=None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_HF.config_of(model.args)))
    other = ModelConfig(name="llama3_debug", args={"rope_theta": 4e6}, init=f"hf:{tmp_path}")
    changed: Any = build_model(other, vocab_size=None)
    with pytest.raises(ValueError, match=r"rope_theta=4000000.0 should be"):
        warm_start.check_init(other.init, changed, other)
    named = ModelConfig(name="llama3_debug", args={"rope_theta": 4e6}, init=other.init, init_changes=("rope_theta",))
    with pytest.raises((ValueError, OSError)) as caught:
        warm_start.check_init(named.init, changed, named)
    assert "safetensors" in str(caught.value)  # the arguments pass; only the weights are missing here


@pytest.mark.parametrize(("ranks", "layout"), [(2, {}), (4, TP_PP)])
def test_frozen_parameters_keep_every_bit(folder: str, ranks: int, layout: dict[str, Any]) -> None:
    source = hf_runs.publish(folder, "qwen3")  # tied
    tree = hf_runs.sections(source, layout)
    tree["train"] = tree["train"] | {"freeze": ["embed_tokens", r"layers\.[02]\.", "_norm"]}
    single = run_ranks(train, 1, folder, tree | {"parallel": {}}, init=False, timeout_s=120)
    results = run_ranks(train, ranks, folder, tree, timeout_s=200)
    from composition_check import failures

    errors, difference = hf_runs.errors(single[0], results)
    assert not failures(errors, float8=False), errors
    assert difference <= 2e-6  # as in tests/parallel/test_hf_models.py
    weights, before = hf_runs.final_weights(results), published(source)
    frozen = {name for name in weights if any(part in name for part in ("embed", ".0.", ".2.", "_norm"))}
    assert all(torch.equal(weights[name], before[name]) for name in frozen)
    assert not any(torch.equal(weights[name], before[name]) for name in weights.keys() - frozen)


def test_a_pattern_that_freezes_nothing_or_everything_is_refused() -> None:
    model = build_model(ModelConfig(name="llama3_debug"), vocab_size=None)
    with pytest.raises(ValueError, match=r"'tok_embeddin_s' is found in none of the .* parameter names.*Did you mean"):
        freeze(model, ["tok_embeddin_s"])
    with pytest.raises(ValueError, match="leaves nothing to train"):
        freeze(model, [""])


def test_a_warm_start_takes_the_learning_rate_and_schedule_of_its_own_run(folder: str) -> None:
    source = hf_runs.publish(folder, "llama")
    tree = hf_runs.sections(source, {"schedule": {"warmup_steps": 2}})
    slow = tree | {"optimizer": {"name": "sgd", "lr": 0.01}}
    (fast,), (gentle,) = (run_ranks(train, 1, folder, t, init=False, timeout_s=120) for t in (tree, slow))
    assert fast[0][0] == gentle[0][0]  # the same weights
    name = "lm_head.weight"
    moved = [(result[4][name][2] - published(source)[name]).abs().max() for result in (fast, gentle)]
    assert moved[0] > 5 * moved[1] > 0


ADAPTERS = {"lora_rank": 4, "lora_alpha": 8.0}


PP = {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}}
SHARED_KV = {"parallel": {"tp": 4, "replicate_kv": True}}
ADAPTED = [
    ("llama", 2, {"parallel": {"cp": 2}}),
    ("llama", 4, TP_PP),
    ("qwen3_moe", 4, {"parallel": {"ep": 2, "tp": 2}}),
]
SLOW_ADAPTED = [
    ("llama", 2, {}), ("llama", 2, {"parallel": {"tp": 2}}), ("llama", 2, PP), ("llama", 4, SHARED_KV), ("phi3", 2, PP),
    ("llama", 2, {"parallel": {"tp": 2, "sequence_parallel": False}}), ("mixtral", 2, {"parallel": {"ep": 2}}),
    ("deepseek_v3", 4, {"parallel": {"ep": 2, "tp": 2}}), ("olmo2", 2, {"parallel": {"tp": 2}}),
    ("gpt_neox", 2, {"parallel": {"tp": 2}}), ("gemma3_text", 4, {"parallel": {"cp": 2, "tp": 2}}),
    ("llama", 2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}}), ("stablelm", 2, {"parallel": {"tp": 2}}),
    ("granitemoe", 2, {"parallel": {"tp": 2}}),
]  # fmt: skip


@functools.cache
def alone(folder: str, source: str) -> Any:
    """What one process sees of adapters; several layouts are compared with it."""
    return run_ranks(train, 1, folder, with_model(source, {}, **ADAPTERS), init=False, timeout_s=120)[0]


@pytest.mark.parametrize(
    ("kind", "ranks", "layout"), [*ADAPTED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_ADAPTED)]
)
def test_adapters_train_beside_frozen_weights(folder: str, kind: str, ranks: int, layout: dict[str, Any]) -> None:
    from composition_check import failures

    source = hf_runs.publish(folder, kind)
    single = alone(folder, source)
    results = run_ranks(train, ranks, folder, with_model(source, layout, **ADAPTERS), timeout_s=120)
    errors, difference = hf_runs.errors(single, results)
    assert not failures(errors, float8=False), errors
    assert difference <= 2e-6  # as in tests/parallel/test_hf_models.py
    assert all(".lora_" in name for name in single[3])  # nothing else has a gradient
    before, weights = published(source), hf_runs.final_weights(results)
    for name, weight in weights.items():
        if ".lora_" not in name:
            found = before.get(name.replace(".base_layer.", "."))  # experts have other names in files
            assert found is None or torch.equal(weight, found), name
        else:
            assert bool(weight.any()), name


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_reads_the_adapter_and_merging_computes_the_same(folder: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from titan_ckpt import import_hf
    from titan_fsdp import materialize
    from titan_train.models import init_for
    from titan_train.models.hf.lora import merge_adapters, save_adapter
    from transformers import AutoModelForCausalLM

    source = hf_runs.publish(folder, "phi3")
    choice = ModelConfig(name=f"hf:{source}", seq_len=32, lora_targets=("qkv_proj", "down_proj"), **ADAPTERS)
    model: Any = build_model(choice, vocab_size=None)
    materialize(model, "cpu", init_for(model), seed=5)
    import_hf(Path(source), model, names=model.own_family.load_hf().key_map)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.randint(0, 264, (2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(model.eval()(ids), base(ids).logits)  # B starts at zero
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        want = model(ids)
    save_adapter(model, tmp_path / "adapter", base=source)
    with torch.no_grad():
        got = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(ids).logits
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    merged = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    merged.load_state_dict(merge_adapters(model).state_dict())
    # (W + BA) x and W x + B (A x) round differently
    torch.testing.assert_close(merged(ids).logits, want, atol=1e-5, rtol=0)


def test_adapters_that_cannot_be_are_refused(folder: str) -> None:
    source = hf_runs.publish(folder, "llama")
    with pytest.raises(ValueError, match="needs a model of transformers"):
        ModelConfig(name="llama3_debug", lora_rank=4)
    with pytest.raises(ValueError, match=r"no linear of the layers is named 'q_pro'. Did you mean 'q_proj'"):
        build_model(ModelConfig(name=f"hf:{source}", seq_len=32, lora_rank=4, lora_targets=("q_pro",)), vocab_size=None)
    fused = hf_runs.publish(folder, "phi3")
    with pytest.raises(
        Exception, match=r"self_attn.qkv_proj are several linears in one, and so is an adapter beside them"
    ):
        run_ranks(train, 2, folder, with_model(fused, {"parallel": {"tp": 2}}, **ADAPTERS), timeout_s=120)
