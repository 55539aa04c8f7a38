"""A vision-language model under every layout: the losses and gradients of one process."""

import json

import composition
import pytest
from composition_check import assert_as_one_process, assert_continues
from titan_testing import run_ranks
from titan_train.config import parse_config
from titan_train.launch.validate import validate
from titan_train.models.vision_language.decoder import SeesImages

TINY = {
    "model": {
        "name": "qwen3_vl_debug",
        "seq_len": 64,
        "args": {
            "dim": 48, "num_layers": 3, "num_kv_heads": 4, "head_dim": 16, "rope_row_pairs": 2, "rope_column_pairs": 2,
            "ffn_dim": 64, "vision_dim": 32, "vision_ffn_dim": 48, "position_side": 4,
        },
    },
    "vision": {"items": 300, "held_out": 40},
    "validation": {"every": 0},
    "train": {"steps": 4, "global_batch": 8, "max_grad_norm": 0.5},
    "optimizer": {"lr": 1e-3},
    "schedule": {"warmup_steps": 1},
}  # fmt: skip
SLOW = ("cp ulysses", "cp ring", "fsdp and pp", "tp and cp", "pp zbv", "ddp")
WHOLE = {"tp": 2, "sequence_parallel": False}
LAYOUTS = {
    "fsdp": (2, {}),
    "ddp": (2, {"parallel": {"mode": "ddp"}}),
    "hsdp": (4, {"parallel": {"dp_replicate": 2, "mode": "hsdp"}}),
    "tp": (2, {"parallel": WHOLE}),
    "cp allgather": (2, {"parallel": {"cp": 2}, "context": {"method": "allgather"}}),
    "cp ring": (2, {"parallel": {"cp": 2}, "context": {"method": "ring"}}),
    "cp ulysses": (2, {"parallel": {"cp": 2}, "context": {"method": "ulysses"}}),
    "pp": (2, {"parallel": {"pp": 2}}),
    "pp zbv": (2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "zbv"}, "model": {"args": {"num_layers": 4}}}),
    "accumulation and recomputation": (2, {"train": {"microbatch": 1}, "activations": {"checkpoint": "full"}}),
    "tp and cp": (4, {"parallel": WHOLE | {"cp": 2}}),
    "fsdp and pp": (4, {"parallel": {"pp": 2}}),
}


def filled(self, fqn, tensor, generator):
    """Not the model's own start, in which the encoder's gradients are small beside rounding."""
    tensor.normal_(1.0 if "norm" in fqn and fqn.endswith("weight") else 0.0, 0.1, generator=generator)


def run(folder, name, sections):
    """As `composition.run`, on this rank, from weights whose every gradient says something."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SeesImages, "init_weights", filled)
        return composition.run(folder, name, sections, 4)


def joined(*sections):
    """As `composition.joined`, the model's arguments too."""
    merged = composition.joined(*sections)
    if sections[-1].get("model"):
        merged["model"]["args"] = TINY["model"]["args"] | sections[-1]["model"]["args"]
    return merged


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """One process, for each depth."""
    folder = tmp_path_factory.mktemp("one")
    made = {}

    def alone(model):
        key = repr(model)
        if key not in made:
            sections = joined(TINY, {"model": model} if model else {})
            made[key] = run_ranks(run, 1, folder, f"one{len(made)}", sections, timeout_s=170)[0]
        return made[key]

    return alone


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LAYOUTS])
def test_a_layout_gives_the_losses_and_gradients_of_one_process(name, single, tmp_path):
    ranks, sections = LAYOUTS[name]
    results = run_ranks(run, ranks, tmp_path, "many", joined(TINY, sections), timeout_s=170)
    assert_as_one_process(results, single(sections.get("model")))


TINY_ENCODER = {"vision_dim": 32, "vision_ffn_dim": 48, "position_side": 4}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 32, "balance_loss": 0.01}
FAMILIES = {
    "qwen3 experts": ("qwen3_vl_moe_debug", TINY["model"]["args"] | EXPERTS),
    "llama": ("llama3_debug_vl", TINY_ENCODER | {"dim": 48, "num_layers": 3, "num_kv_heads": 4, "ffn_dim": 64}),
    "gpt": (
        "gpt_debug_vl",
        # a tied matrix has two names under a pipeline
        TINY_ENCODER | {"dim": 48, "num_layers": 3, "ffn_dim": 64, "tied_embeddings": False},
    ),
    "deepseek": (
        "deepseek_debug_vl",
        TINY_ENCODER
        | EXPERTS
        | {"dim": 48, "ffn_dim": 64, "num_heads": 4, "num_groups": 1, "top_groups": 1, "bias_rate": 0.0},
    ),
}
FAMILY_LAYOUTS = {
    "fsdp": {},
    "tp": {"parallel": WHOLE},
    "pp": {"parallel": {"pp": 2}},
    # a balance loss is over a row, and context parallelism joins the rows of a microbatch
    "cp": {"parallel": {"cp": 2}, "train": {"microbatch": 1}},
    "ep": {"parallel": {"ep": 2}},
}


def of_family(family, sections=None):
    name, args = FAMILIES[family]
    return composition.joined(TINY, {"model": {"name": name, "args": args}}, sections or {})


def run_each(folder, family, layouts):
    """One after the other on the same ranks."""
    return [run(folder, f"many{number}", of_family(family, sections)) for number, sections in enumerate(layouts)]


def check_family(family, layouts, folder, ranks=2):
    alone = run_ranks(run, 1, folder, "one", of_family(family), timeout_s=300)[0]
    each = run_ranks(run_each, ranks, folder, family, layouts, timeout_s=600)
    for number in range(len(layouts)):
        assert_as_one_process([results[number] for results in each], alone)


@pytest.mark.parametrize(("family", "layout"), [("qwen3 experts", "ep"), ("llama", "fsdp")])
def test_a_decoder_of_another_family_gives_the_losses_and_gradients_of_one_process(family, layout, tmp_path):
    check_family(family, [FAMILY_LAYOUTS[layout]], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_a_family_gives_the_losses_and_gradients_of_one_process(family, tmp_path):
    sparse = "num_experts" in FAMILIES[family][1]
    check_family(family, [s for name, s in FAMILY_LAYOUTS.items() if sparse or name != "ep"], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen3 experts", "deepseek"])
def test_experts_over_ranks_go_with_fsdp_and_with_a_pipeline(family, tmp_path):
    check_family(family, [{"parallel": {"ep": 2}}, {"parallel": {"ep": 2, "pp": 2}}], tmp_path, ranks=4)


def test_a_rank_without_an_image_does_not_hold_up_the_others(tmp_path):
    """Lines with and without images, a row each: some microbatches have none."""
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (64, 48), (200, 30, 30)).save(tmp_path / "a.png")
    seen = {"image": "a.png", "prompt": "colour?" * 3, "answer": "red"}
    lines = [seen if number % 3 == 0 else {"prompt": "one, two, three, " * 2, "answer": "four"} for number in range(24)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    vision = {"source": "jsonl", "paths": [str(tmp_path / "data.jsonl")], "held_out": 4, "max_image_tokens": 16}
    sections = joined(TINY, {"vision": vision, "train": {"microbatch": 1, "global_batch": 4}})
    alone = run_ranks(run, 1, tmp_path, "one", sections, timeout_s=170)[0]
    for found in run_ranks(run, 2, tmp_path, "two", sections, timeout_s=170):
        assert max(abs(a - b) for a, b in zip(found[0], alone[0], strict=True)) <= 2e-5  # as above


@pytest.mark.slow
def test_a_run_continues_on_another_layout_with_the_same_losses_and_bitwise_on_its_own(tmp_path):
    assert_continues(tmp_path, TINY, TINY, joined(TINY, {"parallel": {"dp_replicate": 2, "mode": "hsdp"}}), 2)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"tp": 2}}, "sequence_parallel=false"),
        (
            {"parallel": {"pp": 2}, "model": {"name": "qwen3_vl_8b", "args": {}}, "pipeline": {"cuts": [2]}},
            "stage 0 would hold 2 of the first 3 layers",
        ),
        ({"parallel": {"tp": 8, "sequence_parallel": False}}, "num_heads=4"),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_any_rank_starts(sections, message, tmp_path):
    merged = TINY | {name: TINY.get(name, {}) | values for name, values in sections.items()}
    if sections.get("model", {}).get("name") == "qwen3_vl_8b":
        merged["tokenizer"] = {"kind": "bytes"}
    config = parse_config(composition.tree(tmp_path, "refused", merged))
    with pytest.raises(ValueError, match=message):
        validate(config, sections.get("parallel", {}).get("tp", 2))


def wrapped(folder):
    from titan_train.train import Trainer

    with Trainer(parse_config(composition.tree(folder, "wrapped", TINY))) as trainer:
        return trainer.model.report.plans[0].explain()


def test_the_encoder_is_one_unit_of_fsdp(tmp_path):
    text = run_ranks(wrapped, 2, tmp_path, timeout_s=170)[0]
    assert "vision.blocks" not in text
    assert "vision" in text
