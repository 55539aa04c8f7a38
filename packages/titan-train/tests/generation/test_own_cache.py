"""Generation with transformers' own cache: one token a forward, and the text of transformers' ``generate``."""

import sys
from pathlib import Path
from typing import Any

import pytest
import titan_fsdp as fsdp
import torch
from titan_ckpt import import_hf
from titan_train.config.model import ModelConfig
from titan_train.export.hf_model import HfModel
from titan_train.generation.decode import generate
from titan_train.models import build_model, init_for
from titan_train.serve.folder import _of_transformers

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import hf_folders

PLANNED = [
    "qwen3_next",
    "nemotron_h",
    "granitemoehybrid",
    "kimi_linear",
    "olmo_hybrid",
    "gpt_oss",
    "gemma3_text",
    "deepseek_v32",
    "deepseek_v4",
]
UNPLANNED = ["bamba", "falcon_h1", "mamba2", "jamba", "lfm2"]
QUICK = ("granitemoehybrid", "gpt_oss", "bamba")
NEW = 6


def by_speed(kinds: list[str]) -> list[Any]:
    return [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


def build(folder: Path) -> Any:
    model: Any = build_model(ModelConfig(name=f"hf:{folder}", seq_len=32), vocab_size=96)
    fsdp.materialize(model, "cpu", init_for(model), seed=3)
    import_hf(folder, model, names=model.own_family.load_hf().key_map)
    return model.eval()


def prompts(lengths: list[int]) -> list[list[int]]:
    make = torch.Generator().manual_seed(4)
    return [torch.randint(3, 90, (length,), generator=make).tolist() for length in lengths]


def theirs(folder: Path, prompt: list[int], new: int = NEW) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    found: Any = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return found[0, len(prompt) :].tolist()


class Forwards:
    """Tokens of each forward of a model's layers."""

    def __init__(self, model: Any) -> None:
        self.tokens: list[int] = []
        self._handle = model.repeated_layers()[0].register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, keywords: Any) -> None:
        self.tokens.append((args[0] if args else keywords["hidden_states"]).shape[1])


@pytest.mark.parametrize("kind", by_speed(PLANNED + UNPLANNED))
def test_a_token_takes_one_forward_and_the_text_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = hf_folders.make(tmp_path / kind, kind)
    model, given = build(folder), prompts([9, 9, 4])
    seen = Forwards(model)
    found = generate(model, given, max_new_tokens=NEW)
    assert sorted(seen.tokens, reverse=True) == [9, 4, *[1] * (2 * (NEW - 1))], "two lengths, so two forwards a token"
    assert found == [theirs(folder, prompt) for prompt in given]
    assert found == generate(model, given, max_new_tokens=NEW, use_cache=False)


def test_a_model_without_attention_layers_counts_its_tokens_itself(tmp_path: Path) -> None:
    """transformers' generate cannot: its cache knows no length where no layer has keys."""
    folder = hf_folders.make(tmp_path / "states", "bamba", attn_layer_indices=[])
    model, given = build(folder), prompts([7])
    with pytest.raises(ValueError, match="LinearAttention layers"):
        theirs(folder, given[0])
    seen = Forwards(model)
    found = generate(model, given, max_new_tokens=NEW)
    assert seen.tokens == [7, *[1] * (NEW - 1)]
    assert found == generate(model, given, max_new_tokens=NEW, use_cache=False)


def test_a_family_with_a_cache_of_its_own_kind_goes_without(tmp_path: Path) -> None:
    folder = hf_folders.make(tmp_path / "minimax", "minimax")
    model, (given,) = build(folder), prompts([5])
    seen = Forwards(model)
    assert generate(model, [given], max_new_tokens=2) == [theirs(folder, given)[:2]]
    assert seen.tokens == [5, 6]


@pytest.mark.parametrize("window", [11, None], ids=["own cache", "keys and values"])
def test_rows_that_outgrow_the_short_factors_of_longrope_are_computed_anew(window: int | None, tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    folder = hf_folders.make(
        tmp_path / "phi", "phi3", rope_parameters=rope | {"original_max_position_embeddings": 32},
        original_max_position_embeddings=32, max_position_embeddings=64, sliding_window=window,
    )  # fmt: skip
    model, (given,) = build(folder), prompts([27])
    seen = Forwards(model)
    found = generate(model, [given], max_new_tokens=14)
    assert seen.tokens == [27, *[1] * 5, 33, *[1] * 7]
    assert found == generate(model, [given], max_new_tokens=14, use_cache=False) == [theirs(folder, given, 14)]
    assert generate(_of_transformers(HfModel(folder)), [given], max_new_tokens=14) == found
    ragged = prompts([27, 30])
    if window is None:
        options = {"max_new_tokens": 9, "multiple_of": 4}
        assert generate(model, ragged, **options) == generate(model, ragged, **options, use_cache=False)
    else:
        assert generate(model, ragged, max_new_tokens=9) == [theirs(folder, prompt, 9) for prompt in ragged]


def test_training_goes_on_with_the_code_from_here(tmp_path: Path) -> None:
    folder = hf_folders.make(tmp_path / "granite", "granitemoehybrid")
    model = build(folder)
    row = torch.tensor(prompts([24]))
    bounds = torch.tensor([[0, 5, 6, 24]], dtype=torch.int32)
    before = model(row, cu_seqlens=bounds)
    generate(model, prompts([5]), max_new_tokens=2)
    assert torch.equal(model(row, cu_seqlens=bounds), before)


def test_a_compiled_step_is_refused(tmp_path: Path) -> None:
    model = build(hf_folders.make(tmp_path / "granite", "granitemoehybrid"))
    with pytest.raises(ValueError, match="compiled=False for a model that keeps another cache"):
        generate(model, prompts([5]), max_new_tokens=2, compiled=True)


def test_a_folder_like_roberta_is_served_to_its_last_position(tmp_path: Path) -> None:
    """Two rows of its embedding are no token's: positions are counted behind that of padding."""
    import transformers

    config = transformers.RobertaConfig(
        vocab_size=96, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=18, is_decoder=True,
    )  # fmt: skip
    transformers.RobertaForCausalLM(config).save_pretrained(tmp_path)
    model, (given,) = _of_transformers(HfModel(tmp_path)), prompts([12])
    assert model.max_seq_len == 16
    assert len(generate(model, [given], max_new_tokens=4)[0]) == 4
    with pytest.raises(ValueError, match="has learned 16"):
        generate(model, [given], max_new_tokens=5)
