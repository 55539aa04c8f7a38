"""A Hugging Face folder is planned by its own module: what its blocks keep, and attention that writes its scores."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from titan_train.cli import main
from titan_train.config import load_config
from titan_train.models import build_model
from titan_train.parallel.layout.run import plan_run
from titan_train.planner import Setup, estimate, find_shape, load_machine
from titan_train.planner.memory.folder import of_folder, shape_of_folder
from titan_train.planner.memory.kept import kept_bytes, working_bytes
from titan_train.planner.memory.ranks import estimate_ranks, rehearse
from titan_train.planner.translate import setup_of_config

pytest.importorskip("transformers")
GEMMA = {
    "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "vocab_size": 256, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "sliding_window": 128,
    "max_position_embeddings": 4096, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


@pytest.fixture
def name(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    return f"hf:{tmp_path}"


def test_a_folders_blocks_are_counted_on_its_own_module(name: str) -> None:
    plain = find_shape(name)
    shape = of_folder(plain, name, {})
    setup = Setup(seq_len=1024, global_batch=4, microbatch=2, stack="eager")
    words = ["--model.name", name, "--model.seq_len", "1024", "--train.microbatch", "2", "--train.global_batch", "4"]
    words += ["--train.dtype", "bf16", "--parallel.mode", "fsdp"]
    config = load_config("debug", words)
    plan, model = plan_run(config, 1), build_model(config.model, vocab_size=None)
    (rank,) = estimate_ranks(config, model, layout=plan.layout, mode=plan.mode, batch=plan.batch, schedule=None)
    # the embedding, the mask and the head keep a little beside the blocks
    assert kept_bytes(shape, setup) == pytest.approx(rank.activations, rel=0.05)
    assert kept_bytes(shape, setup) > 3 * kept_bytes(plain, setup)
    again = replace(setup, recompute="full")
    assert kept_bytes(shape, again) == 6 * 2048 * 64 * 2  # each block's input
    both = (kept_bytes(shape, again) + kept_bytes(shape, setup)) / 2
    assert kept_bytes(shape, replace(again, recompute_share=0.5)) == pytest.approx(both)


def test_a_folder_with_dropout_is_planned_as_without(name: str, tmp_path: Path) -> None:
    (tmp_path / "noisy").mkdir()
    (tmp_path / "noisy" / "config.json").write_text(json.dumps({**GEMMA, "attention_dropout": 0.1}))
    noisy, setup = f"hf:{tmp_path / 'noisy'}", Setup(seq_len=1024, global_batch=1, stack="eager")
    plain, found = (kept_bytes(of_folder(find_shape(folder), folder, {}), setup) for folder in (name, noisy))
    assert found == plain


COMPILED = {
    "none": (1, []),
    "selective": (1, ["--activations.checkpoint", "selective"]),
    "none, tp": (2, ["--parallel.tp", "2"]),
    "none, float8": (1, ["--float8.recipe", "tensorwise", "--float8.min_speedup", "0"]),
}


@pytest.mark.parametrize("case", COMPILED)
def test_a_compiled_folder_is_planned_as_it_is_rehearsed(name: str, case: str) -> None:
    """The plan's count of the blocks, and the peak of the rehearsal, whose blocks compute again what the plan says."""
    devices, more = COMPILED[case]
    words = ["--model.name", name, "--model.seq_len", "1024", "--train.microbatch", "2", "--train.global_batch", "4"]
    words += ["--train.dtype", "bf16", "--parallel.mode", "fsdp", "--compile.enabled", "true", *more]
    config = load_config("debug", words)
    (rank,) = rehearse(config, devices, folder=shape_of_folder(config))
    setup = setup_of_config(config, devices)
    assert not rank.left_out
    shape = of_folder(find_shape(name), name, {})
    masks = 2 * 2 * 1024 * 1024 * 4  # of whole rows and of windows, in float32; the ends keep a little beside
    assert kept_bytes(shape, setup) + masks == pytest.approx(
        rank.activations, rel=0.05 if case == "selective" else 0.015
    )
    if case == "selective":
        assert rank.memory.parts["block working set"] == working_bytes(shape, setup) > 2 * kept_bytes(shape, setup) / 6


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_of_a_folder_keep_what_its_blocks_keep(name: str, stages: int) -> None:
    words = ["--model.name", name, "--model.seq_len", "1024", "--train.microbatch", "2", "--train.global_batch", "12"]
    words += ["--train.dtype", "bf16", "--pipeline.schedule", "gpipe", "--parallel.pp", str(stages)]
    words += ["--model.args.num_hidden_layers", "18"]  # more than two of a sort in each stage
    config = load_config("debug", words)
    plan, model = plan_run(config, stages), build_model(config.model, vocab_size=None)
    ranks = estimate_ranks(config, model, layout=plan.layout, mode=plan.mode, batch=plan.batch, schedule=plan.schedule)
    whole = kept_bytes(
        of_folder(find_shape(name), name, {}), Setup(seq_len=1024, global_batch=2, microbatch=2, stack="eager")
    )
    assert len(ranks) == stages
    assert sum(rank.activations for rank in ranks) == pytest.approx(
        6 * 3 * whole, rel=0.1
    )  # and a head's input and mask


EXPERTS = {
    "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "vocab_size": 256, "hidden_size": 128, "intermediate_size": 64,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}  # fmt: skip


def test_attention_that_chooses_its_keys_is_counted_at_its_own_length(tmp_path: Path) -> None:
    """What a token keeps grows with the length until as many keys as it may choose are there."""
    published = {
        "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "vocab_size": 256, "hidden_size": 64,
        "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 32, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    words = [
        "--model.name",
        f"hf:{tmp_path}",
        "--model.seq_len",
        "4096",
        "--train.microbatch",
        "1",
        "--train.global_batch",
        "1",
    ]
    words += ["--data.document_mask", "false"]  # its attention sees other documents of a row
    config = load_config("debug", [*words, "--train.dtype", "bf16", "--parallel.mode", "fsdp"])
    (rank,) = rehearse(config, 1)
    shape = of_folder(find_shape(f"hf:{tmp_path}"), f"hf:{tmp_path}", {})
    found = kept_bytes(shape, replace(setup_of_config(config, 1), stack="eager"))
    assert found == pytest.approx(rank.activations, rel=0.05)  # 0.47 of it, counted at 1,024 tokens


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("ep", [1, 4])
def test_experts_over_ranks_keep_what_they_exchange(recompute: str, ep: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    name = f"hf:{tmp_path}"
    words = ["--model.name", name, "--model.seq_len", "1024", "--train.microbatch", "2", "--train.global_batch", "8"]
    words += ["--train.dtype", "bf16", "--activations.checkpoint", recompute, "--parallel.ep", str(ep)]
    config = load_config("debug", words)
    plan, model = plan_run(config, 4), build_model(config.model, vocab_size=None)
    ranks = estimate_ranks(config, model, layout=plan.layout, mode=plan.mode, batch=plan.batch, schedule=None)
    setup = replace(setup_of_config(config, 4), stack="eager")
    found = kept_bytes(of_folder(find_shape(name), name, {}), setup)
    assert found == pytest.approx(ranks[0].activations, rel=0.12)  # the embedding's and the head's beside it


def test_whole_logits_are_counted_where_the_loss_takes_them(name: str, tmp_path: Path) -> None:
    other = tmp_path / "gpt2"
    other.mkdir()
    fields = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 32_768,
        "n_embd": 64,
        "n_layer": 2,
    }
    (other / "config.json").write_text(
        json.dumps({**fields, "n_head": 4, "n_positions": 512, "resid_pdrop": 0.0, "embd_pdrop": 0.0})
    )
    common = ["--model.seq_len", "512", "--train.microbatch", "4", "--train.global_batch", "4", "--train.dtype", "bf16"]
    words = ["--model.name", f"hf:{other}", *common, "--parallel.mode", "fsdp"]
    config = load_config("debug", words)
    plan, model = plan_run(config, 1), build_model(config.model, vocab_size=None)
    (rank,) = estimate_ranks(
        config,
        model,
        layout=plan.layout,
        mode=plan.mode,
        batch=plan.batch,
        schedule=None,
        folder=shape_of_folder(config),
    )
    logits = 4 * 512 * 32_768
    assert rank.memory.parts["logits"] + rank.activations > 12 * logits  # copies in bf16 and float32, their gradient
    assert setup_of_config(config, 1).loss == "eager"
    capped = load_config("debug", ["--model.name", name, *common])  # in a way that is known
    assert setup_of_config(capped, 1).loss == "chunked"


def test_scores_that_are_written_take_time(name: str) -> None:
    plain, machine = find_shape(name), load_machine("h100")
    setup = Setup(seq_len=4096, global_batch=4)
    fused, written = (estimate(shape, machine, setup).time.terms for shape in (plain, of_folder(plain, name, {})))
    assert written["attention"] > 1.5 * fused["attention"]


def test_plan_of_a_folder_uses_its_module(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", name, "--devices", "2", "--seq-len", "1024", "--global-batch", "8", "--precision", "bf16"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "8 sequences of 1,024 tokens" in said
    assert "rehearsed 3: " in said


@pytest.fixture
def hybrid(tmp_path) -> str:
    """Eight layers, two of them of attention; the first two feed-forwards are dense."""
    from transformers import Qwen3NextConfig

    Qwen3NextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        mlp_only_layers=[0, 1], max_position_embeddings=1024,
    ).save_pretrained(tmp_path)  # fmt: skip
    return f"hf:{tmp_path}"


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_blocks_of_each_sort_stand_for_all(hybrid: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model.name", hybrid, "--model.seq_len", "256", "--train.microbatch", "1", "--train.global_batch", "1"]
    words += [
        "--train.dtype",
        "bf16",
        "--parallel.mode",
        "fsdp",
        "--launch.nproc",
        "1",
        "--compile.enabled",
        str(compiled),
    ]
    config = load_config("debug", [word.lower() if word in ("True", "False") else word for word in words])
    few = rehearse(config, 1)
    monkeypatch.setattr("titan_train.planner.memory.ranks.sort_of", lambda _: object())  # no two are alike
    assert rehearse(config, 1)[0].activations == few[0].activations


def test_layers_with_a_state_stay_whole_under_tensor_parallelism(hybrid: str) -> None:
    shape = of_folder(find_shape(hybrid), hybrid, {})
    setup = Setup(seq_len=256, global_batch=1, stack="eager")
    assert kept_bytes(shape, replace(setup, tp=2)) > 0.55 * kept_bytes(shape, setup)
    assert (
        kept_bytes(shape, replace(setup, tp=2, recompute="full"))
        == kept_bytes(shape, replace(setup, recompute="full")) / 2
    )
